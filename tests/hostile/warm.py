"""One process that has everything imported, and a child with limits for each trial.

    test --(a line: input, command)--> warm process --fork--> child: input, limits, command
         <-(a line: the outcome)------              <-wait4--

The child has limits; whatever it does, the warm process lives on. It answers when the child has ended, or
when the wall clock has run out and it was killed. ``MALLOC_ARENA_MAX`` keeps the address space of threads
small, so that the limit on it means memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tests.hostile.place import SECRET, Place, picture

__all__ = ["Outcome", "Warm"]

MORE_MEMORY_BYTES = 1536 << 20  # of address space, on top of what the warm process has
MORE_RESIDENT_BYTES = 256 << 20  # of memory in use, on top of what a child that does nothing has
FILE_BYTES = 256 << 20
CPU_S = 5
WALL_S = 240.0

# C0 but tab and line feed, C1, and what turns text round.
_CONTROLS = frozenset(
    {chr(n) for n in (*range(9), *range(11, 32), *range(127, 160))}
    | set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended. fault: what is wrong with that; "" where nothing is."""

    ended: str
    fault: str
    seconds: float
    resident_bytes: int

    def __str__(self) -> str:
        mb = self.resident_bytes >> 20
        return f"{self.fault or 'right'} ({self.ended}; {self.seconds:.1f} s, {mb} MB more)"


class Warm:
    """The warm process, seen from a test."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.hostile.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
            env=environment,
            text=True,
        )

    def run(self, name: str, command: str) -> Outcome:
        """One trial."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, command]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the warm process ended: its stack is on standard error"
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End the warm process, by the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _import_all() -> None:
    """All that a command imports, so that a child has it."""
    import torch.distributed.checkpoint  # noqa: F401

    for floor in ("commit", "storage", "dcp", "manager", "tools", "cli", "topology", "control"):
        package = importlib.import_module(f"ckptfs.{floor}")
        for module in pkgutil.walk_packages(package.__path__, f"ckptfs.{floor}."):
            with contextlib.suppress(ImportError):  # what an extra brings
                importlib.import_module(module.name)


def _in_child(body: Any) -> tuple[int, int, float, bool]:
    """(status, most resident bytes, seconds, did it have to be killed)"""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must not continue as its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    watched = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([watched], [], [], WALL_S)
        if not ready:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
    finally:
        os.close(watched)
    _, status, usage = os.wait4(pid, 0)
    return status, usage.ru_maxrss << 10, time.monotonic() - begun, not ready


def _limited() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # EFBIG, as a full disk is an error


class _Server:
    """The warm process itself."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._base = top / "base"
        status, _, _, _ = _in_child(lambda: Place.make(self._base))
        assert status == 0, "the tree to begin with could not be made"
        _, self._idle_bytes, _, _ = _in_child(lambda: None)
        self._count = 0

    def trial(self, name: str, command: str) -> Outcome:
        from tests.hostile.corpus import inputs

        one = inputs()[name]
        self._count += 1
        base = self._top / str(self._count)
        place = Place(base, one.on)
        for part in {place.root.name, "victim", "out", "twin"}:
            shutil.copytree(self._base / part, base / part, symlinks=True)
        said, output = base / "said", base / "output"
        before = picture(place.victim)

        def body() -> None:
            one.build(place)
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            _limited()
            os.chdir(place.out)
            said.write_text(json.dumps(_ended(place, command, forged=one.forged)))

        try:
            status, most, seconds, killed = _in_child(body)
            more = max(0, most - self._idle_bytes)
            ended, fault = self._judged(place, status, said, killed=killed)
            fault = fault or self._traces(place, before, output)
            if not fault and more > MORE_RESIDENT_BYTES:
                fault = f"{more >> 20} MB of memory"
            return Outcome(ended, fault, seconds, more)
        finally:
            shutil.rmtree(base, ignore_errors=True)

    def _judged(self, place: Place, status: int, said: Path, *, killed: bool) -> tuple[str, str]:
        if killed:
            return "killed", f"it hung for {WALL_S:g} s"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number in (signal.SIGXCPU, signal.SIGKILL):
                return "killed", f"it computed for {CPU_S} s"
            return "died", f"it died of signal {number}"
        if os.WEXITSTATUS(status) or not said.exists():
            return "died", f"it ended with {os.WEXITSTATUS(status)}: see standard error"
        ended, fault = json.loads(said.read_text())
        return ended, fault

    def _traces(self, place: Place, before: str, output: Path) -> str:
        if place.canary.exists():
            return "code of the input ran"
        if picture(place.victim) != before:
            return "the victim's directory was touched"
        carried = [path for path in _files(place) if _holds_secret(path)]
        if carried:
            return f"the victim's file was carried to {carried[0].relative_to(place.base)}"
        text = output.read_bytes().decode(errors="surrogateescape")
        strange = sorted({hex(ord(c)) for c in text if c in _CONTROLS})
        return f"control characters in the output: {', '.join(strange)}" if strange else ""


def _ended(place: Place, command: str, *, forged: bool) -> tuple[str, str]:
    """(how it ended, what is wrong with that)"""
    from ckptfs.errors import CkptfsError
    from tests.hostile.commands import COMMANDS, Ended, check_values

    try:
        loaded = COMMANDS[command](place)
    except CkptfsError as error:
        return f"{type(error).__name__}: {str(error)[:300]}", ""
    except Ended as end:
        return str(end), ""
    except BaseException as error:  # noqa: BLE001 - what should have been typed
        where = traceback.extract_tb(error.__traceback__)[-1]
        place_of = f"{Path(where.filename).name}:{where.lineno}"
        return (
            f"{type(error).__name__} at {place_of}",
            f"untyped: {type(error).__name__} at {place_of}: {str(error)[:200]!r}",
        )
    if loaded is not None and not forged:
        wrong = check_values(loaded)
        if wrong:
            return "it returned", f"wrong: {wrong}"
    return "it returned", ""


def _files(place: Place) -> list[Path]:
    """What is there and has no other reader: no links, nothing that is not a file."""
    return [
        Path(folder, name)
        for top in (place.out, place.base / "run", place.base / "loose", place.base / "stock")
        for folder, _, names in os.walk(top)
        for name in names
        if not (path := Path(folder, name)).is_symlink()
        and path.is_file()
        and path.stat().st_size < FILE_BYTES >> 4
    ]


def _holds_secret(path: Path) -> bool:
    return SECRET.encode() in path.read_bytes()


def _serve(lines: IO[str], answers: IO[str]) -> None:
    _import_all()
    os.environ["XDG_CACHE_HOME"] = tempfile.gettempdir()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # there fsync is free
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=memory) as top:
        server = _Server(Path(top))
        for line in lines:
            name, command = json.loads(line)
            answers.write(json.dumps(asdict(server.trial(name, command))) + "\n")
            answers.flush()


if __name__ == "__main__":
    # Children write to standard output; the answers have a descriptor of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, channel)
