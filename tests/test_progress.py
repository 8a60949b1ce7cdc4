"""Progress bars: drawn on a real pseudo-terminal, and nowhere else.

A body runs in a process of its own with the terminal as its standard error. What takes long is held at a
storage operation until the test has seen the bar.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.progress import SILENT, printable, progress

ERASE = "\r\x1b[2K"
TIMEOUT_S = 60.0

_EVERYTHING = """
import os, sys, torch, ckptfs

base = sys.argv[1]
run, copy = f"faults+file://{base}/run", f"faults+file://{base}/copy"
state = {"weight": torch.arange(250_000, dtype=torch.float64)}
WRITE, READ = "close:*__0_0.distcp", "close_read:*__0_0.distcp"

def hold(gate, what):
    os.environ["CKPTFS_TEST_FAULT"] = f"hold={base}/gate{gate}:{what}:1"

hold(0, WRITE)
ckptfs.save(state, f"{run}/step_1")
hold(1, READ)
ckptfs.load(state, f"{run}/step_1")
hold(2, WRITE)
with ckptfs.CheckpointManager(run) as manager:
    manager.save(2, state)
hold(3, READ)
with ckptfs.CheckpointManager(run) as manager:
    manager.restore({"weight": torch.zeros(250_000, dtype=torch.float64)})
hold(4, WRITE)
ckptfs.gather(f"{run}/step_1", f"{copy}/step_1")
print("done")
"""

_DRAWN = (
    "saving {0}/run/step_1",
    "loading {0}/run/step_1",
    "saving {0}/run/step_2",
    "loading {0}/run/step_2",
    "copying {0}/run/step_1",
)

_WAITS = """
import sys
from ckptfs.progress import progress
rank = int(sys.argv[1])
with progress("outer", 200, rank=rank) as meter, progress("inner", 100):
    meter.advance(50)
    print(type(meter).__name__, flush=True)
    sys.stdin.readline()
print("rich" in sys.modules)
"""


class Terminal:
    """A pseudo-terminal that a process writes to, and what it wrote."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.text = ""

    def read_until(self, *wanted: str) -> None:
        """Read on until one frame has all of it; the test fails where none ever has."""
        until = time.monotonic() + TIMEOUT_S
        while not any(all(word in frame for word in wanted) for frame in self._frames()):
            assert time.monotonic() < until, f"{wanted} is in no frame: {self.text[-500:]!r}"
            self._read(1.0)

    def _frames(self) -> list[str]:
        return re.sub(r"\x1b\[\d*m", "", self.text).split(ERASE)

    def read_rest(self) -> str:
        """All that was written; no one writes any more."""
        while self._read(0.0):
            pass
        return self.text

    def _read(self, wait_s: float) -> bool:
        if not select.select([self.master], [], [], wait_s)[0]:
            return False
        with contextlib.suppress(OSError):  # EIO: the last writer has closed it
            more = os.read(self.master, 1 << 16).decode(errors="replace")
            self.text += more
            return bool(more)
        return False


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """One, closed in the end."""
    made = Terminal()
    yield made
    for end in (made.master, made.slave):
        with contextlib.suppress(OSError):
            os.close(end)


@contextlib.contextmanager
def started(
    script: str, *arguments: object, stderr: int, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A process with ``stderr`` as its standard error; it does not outlive a test that fails."""
    env = {name: told for name, told in os.environ.items() if name != "CKPTFS_PROGRESS"}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
        env=env | {"TERM": "xterm", "COLUMNS": "200"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def test_saves_loads_and_copies_are_drawn(terminal: Terminal, tmp_path: Path) -> None:
    """save, load, a manager's save and restore, and gather each draw a bar with their URI while they
    last, and take it away.
    """
    where = f"faults+file://{tmp_path}"
    with started(_EVERYTHING, tmp_path, stderr=terminal.slave) as process:
        for gate, title in enumerate(_DRAWN):
            # Everything was written or read, and nothing is closed yet.
            terminal.read_until(title.format(where), "2.0/2.0 MB")
            (tmp_path / f"gate{gate}").touch()
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, "done\n"), terminal.read_rest()
    assert terminal.read_rest().endswith(ERASE)


def test_a_bar_shows_how_far_it_is_and_goes(terminal: Terminal) -> None:
    """The bytes that are done and those in all are drawn; of nested meters the outer has the line."""
    with started(_WAITS, 0, stderr=terminal.slave) as process:
        terminal.read_until("50/200")
        out, _ = process.communicate("go\n", timeout=TIMEOUT_S)
    text = terminal.read_rest()
    assert out.split() == ["_Drawn", "True"]
    assert "outer" in text
    assert "inner" not in text
    assert text.endswith(ERASE)


@pytest.mark.parametrize(
    ("rank", "environment"),
    [(1, {}), (0, {"CKPTFS_PROGRESS": "0"}), (0, {"TERM": "dumb"})],
    ids=["another rank", "turned off", "dumb terminal"],
)
def test_it_is_quiet_where_nobody_asked(
    terminal: Terminal, rank: int, environment: dict[str, str]
) -> None:
    """On ranks other than 0, with CKPTFS_PROGRESS=0 and on a terminal that cannot, the meter is the
    silent one: nothing will ever be written. rich is not imported.
    """
    quiet = _WAITS.replace(', progress("inner", 100)', "")
    with started(quiet, rank, stderr=terminal.slave, **environment) as process:
        out, _ = process.communicate("go\n", timeout=TIMEOUT_S)
    assert out.split() == ["Meter", "False"]
    assert terminal.read_rest() == ""


def test_it_is_quiet_into_a_pipe() -> None:
    """Where standard error is no terminal, the meter is the silent one."""
    with started(_WAITS, 0, stderr=subprocess.PIPE) as process:
        out, err = process.communicate("go\n", timeout=TIMEOUT_S)
    assert out.split() == ["Meter", "False"]
    assert err == ""


def test_short_work_draws_nothing(terminal: Terminal) -> None:
    """Work that is over at once writes not one byte, and imports no rich."""
    script = _WAITS.replace("    sys.stdin.readline()\n", "")
    with started(script, 0, stderr=terminal.slave) as process:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert out.split() == ["_Drawn", "False"]
    assert terminal.read_rest() == ""


def _drawer() -> threading.Thread:
    return next(one for one in threading.enumerate() if one.name == "ckptfs-progress")


def test_a_terminal_that_is_gone_is_no_reason_to_fail(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window was closed: the bar cannot be written, the work and its own error are as usual."""
    with os.fdopen(os.dup(terminal.slave), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with pytest.raises(KeyError, match="the work's own"):
            _work_without_a_terminal(terminal)
        with contextlib.suppress(OSError):
            stream.close()


def _work_without_a_terminal(terminal: Terminal) -> None:
    with progress("work", 10) as meter:
        assert meter is not SILENT
        os.close(terminal.master)
        _drawer().join(TIMEOUT_S)  # it fails at its first frame
        meter.advance(10)
        raise KeyError("the work's own")


def test_a_terminal_that_was_stopped_does_not_hold_the_work(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one reads what is drawn (Ctrl-S): the work ends, and leaves the writing thread behind."""
    os.set_blocking(terminal.slave, False)
    # The kernel moves what was written on, and has room once more: until it has none for long.
    while select.select([], [terminal.slave], [], 0.3)[1]:
        for size in (1024, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(terminal.slave, b"x" * size)
    os.set_blocking(terminal.slave, True)
    with os.fdopen(os.dup(terminal.slave), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with progress("work", 10):
            drawer = _drawer()
            drawer.join(1.0)  # longer than work that draws nothing
        assert drawer.is_alive()
        terminal.read_until("work")
        drawer.join(TIMEOUT_S)
        assert not drawer.is_alive()


@given(st.text())
def test_what_a_terminal_shows_is_one_line_of_plain_characters(text: str) -> None:
    """No control, no line, nothing that turns text round, nothing that cannot be encoded; letters stay."""
    shown = printable(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(one) for one in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(shown) & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\ufeff"
    )
    if text.isprintable() and not {unicodedata.category(one) for one in text} & {"Cf"}:
        assert shown == text


def test_a_hostile_title_is_escaped() -> None:
    """As Python writes it."""
    assert printable("a\x1b]0;x\x07b\r\nc\u202ed\udc80") == "a\\x1b]0;x\\x07b\\r\\nc\\u202ed\\udc80"
