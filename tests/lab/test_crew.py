"""Processes of the lab: they tell why they did not start, and none outlives its caller."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.lab.process import REPOSITORY, Crew, LabError, UnavailableError, need
from tests.lab.server import merged

CALLER = """
import os, sys, time
from tests.lab.process import Crew
from tests.lab.sink import sink
with sink() as server:
    print(*server.pids, server.run_dir, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_its_caller(number: signal.Signals) -> None:
    """Killed, ended or interrupted: with the process that started it a server goes, and its files."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    with caller:
        assert caller.stdout is not None
        pid, run_dir = caller.stdout.readline().split()
        with _watched(int(pid)) as gone:
            caller.send_signal(number)
            caller.wait()
            assert gone(), "the server still runs 20 s after its caller ended"
    _wait_until_absent(run_dir)


FAMILY = """
import os, sys, time
if os.fork():
    while True: time.sleep(300)                     # the program that was started
os.setsid()
if os.fork(): os._exit(0)                           # a daemon of it, in a session of its own
print(os.getpid(), flush=True)
time.sleep(300)
"""


def test_daemons_of_a_server_go_with_it() -> None:
    """What a program of the crew started and detached is stopped with it."""
    with Crew("family") as crew:
        crew.start("family", [sys.executable, "-c", FAMILY])
        log = crew.run_dir / "family.log"
        crew.wait_for(lambda: log.read_text().endswith("\n"), "the daemon tells its pid")
        daemon = int(log.read_text())
        assert _runs(daemon)
    assert not _runs(daemon)


def test_a_start_that_fails_tells_the_log() -> None:
    """A program that ends before it answers is an error at once, with the end of its log."""
    said = "import sys; print('no such disk'); sys.exit(3)"
    with Crew("x") as crew:
        crew.start("x", [sys.executable, "-c", said])
        with pytest.raises(LabError, match=r"(?s)x ended \(3\) before it answers.*no such disk"):
            crew.wait_for(lambda: False, "it answers")


def test_a_start_that_hangs_tells_the_log() -> None:
    """A program that never answers is an error after the deadline, with the end of its log."""
    said = "import time; print('waiting for godot', flush=True); time.sleep(300)"
    with Crew("x") as crew:
        crew.start("x", [sys.executable, "-c", said])
        crew.wait_for(lambda: bool((crew.run_dir / "x.log").read_text()), "the log speaks")
        with pytest.raises(LabError, match=r"(?s)no sign within.*godot"):
            crew.wait_for(lambda: False, "it answers", timeout_s=0.2)


def test_what_is_missing_is_named() -> None:
    """A program that is not installed is named, with the command that installs it."""
    with pytest.raises(UnavailableError, match="no-such-program-1; run `make lab-install`"):
        need("sh", "no-such-program-1")


def test_options_are_merged_and_nobody_elses() -> None:
    """Nested options of a caller come on top, and never reach the server's own."""
    base = {"key": "a", "client_kwargs": {"region_name": "r"}}
    mine = merged(base, {"concurrency": 2, "client_kwargs": {"verify": "ca"}})
    assert mine == {
        "key": "a",
        "concurrency": 2,
        "client_kwargs": {"region_name": "r", "verify": "ca"},
    }
    mine["client_kwargs"]["region_name"] = "other"
    assert base == {"key": "a", "client_kwargs": {"region_name": "r"}}


# -- helpers -----------------------------------------------------------------------------------


def _runs(pid: int) -> bool:
    """Whether a process is there and is no corpse."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _watched(pid: int, *, within_s: float = 20.0) -> Iterator[Callable[[], bool]]:
    """A function that waits until the process has ended, or too long has passed."""
    descriptor = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)


def _wait_until_absent(path: str) -> None:
    """Return when a directory is gone; its keeper removes it right after the process."""
    with Crew("watch") as crew:
        crew.wait_for(lambda: not os.path.exists(path), f"{path} is gone", timeout_s=240)
