"""Processes of a server: started under a keeper, waited for until they answer, stopped for sure.

    with Crew("moto") as crew:                    a scratch directory, and what runs in it
        port = crew.port()
        crew.start("moto_server", [...])          log in <run_dir>/moto_server.log
        crew.wait_for(lambda: answers(...), "moto answers")
        ...
    everything that was started is gone, the directory too

``wait_for`` polls with a deadline; a process that ends before that, or the deadline, is a ``LabError``
with the end of every log.
"""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
REPOSITORY = Path(__file__).resolve().parents[2]
HOME = REPOSITORY / ".lab"  # what make lab-install put there
START_TIMEOUT_S = 300.0  # of a server that takes 10 s on an idle machine
STOP_GRACE_S = 5.0
LOG_LINES = 15
KEEPER = Path(__file__).with_name("keeper.py")
# Below the ports that the kernel gives to clients: no connection takes one between look and use.
_PORTS = range(17_000, 32_000)


class LabError(Exception):
    """A server did not start, or did not answer in time; with the end of its logs."""


class UnavailableError(LabError):
    """This machine lacks a part of the server; says which, and how to install it."""


class UnsuitableError(UnavailableError):
    """This machine cannot run the server, whatever is installed on it: its tests are skipped in CI too."""


def need(*names: str) -> list[str]:
    """Paths of programs, from .lab, this interpreter's directory, PATH and the system's directories."""
    places = [
        str(HOME / "node_modules" / ".bin"),
        str(HOME / "programs" / "bin"),
        os.path.dirname(sys.executable),
    ]
    path = os.pathsep.join([*places, os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    found = {name: shutil.which(name, path=path) for name in names}
    if missing := [name for name, at in found.items() if at is None]:
        raise UnavailableError(f"not installed: {', '.join(missing)}; run `make lab-install`")
    return [at for at in found.values() if at is not None]


def run(command: Sequence[str | Path], *, timeout_s: float = START_TIMEOUT_S) -> str:
    """Run a program to its end and return what it printed; LabError where it failed."""
    shown = " ".join(str(word) for word in command)
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{shown}: not done after {timeout_s:.0f} s") from error
    if done.returncode:
        raise LabError(f"{shown} exited {done.returncode}: {done.stdout}")
    return done.stdout


def status_of(
    endpoint: str, path: str = "/", *, ca_file: str | None = None, timeout_s: float = 2.0
) -> int | None:
    """The HTTP status that an endpoint answers to a GET, None without an answer."""
    scheme, _, address = endpoint.partition("://")
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    if scheme == "https":
        context = ssl.create_default_context(cafile=ca_file)
        connection = http.client.HTTPSConnection(address, timeout=timeout_s, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Crew:
    """The processes of one server and their directory; a context manager. One thread."""

    def __init__(self, name: str, *, in_memory: bool = False) -> None:
        """in_memory: the directory is on tmpfs where there is one, for a server that syncs much."""
        memory = in_memory and os.access("/dev/shm", os.W_OK)
        self.name = name
        self.run_dir = Path(
            tempfile.mkdtemp(prefix=f"ckptfs-lab-{name}-", dir="/dev/shm" if memory else None)
        )
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._ports: set[int] = set()

    def port(self) -> int:
        """A port without a listener, another one each time."""
        return self.ports_in_a_row(1)

    def ports_in_a_row(self, count: int) -> int:
        """The first of ``count`` such ports."""
        while True:
            first = random.choice(_PORTS)
            wanted = set(range(first, first + count))
            if not wanted & self._ports and all(_is_free(port) for port in wanted):
                self._ports |= wanted
                return first

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        grace_s: float = STOP_GRACE_S,
    ) -> None:
        """Start a program in the foreground of a keeper; its output goes to a log.

        grace_s: from SIGTERM to SIGKILL; 0 for one that keeps nothing and takes its time.
        """
        keeper: list[str | Path] = [
            *(sys.executable, "-I", "-S", KEEPER, str(os.getpid()), str(grace_s), self.run_dir),
        ]
        with (self.run_dir / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*keeper, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.run_dir,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C is ours; we stop it
            )
        self._running.append((name, process))

    def wait_for(
        self, ready: Callable[[], bool], what: str, *, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Return when ``ready`` does; LabError where a process ends or the time does."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            for name, process in self._running:
                if (status := process.poll()) is not None:
                    raise LabError(self._story(f"{name} ended ({status}) before {what}"))
            if time.monotonic() > deadline:
                raise LabError(self._story(f"no sign within {timeout_s:.0f} s that {what}"))
            time.sleep(0.05)  # between two looks: the wait itself is the condition above

    def pids(self) -> tuple[int, ...]:
        """The programs themselves, children of their keepers."""
        found = []
        for _, process in self._running:
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as listing:
                found += [int(pid) for pid in listing.read().split()]
        return tuple(found)

    def kill(self, name: str) -> None:
        """SIGKILL to one program and all that it started; its name may be started again."""
        for entry in [entry for entry in self._running if entry[0] == name]:
            keeper = entry[1]
            with open(f"/proc/{keeper.pid}/task/{keeper.pid}/children") as listing:
                for pid in listing.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            keeper.wait(timeout=START_TIMEOUT_S)  # it ends what the program left behind
            self._running.remove(entry)

    def stop(self) -> None:
        """End every process, last started first, and remove the directory; harmless twice."""
        for _, process in reversed(self._running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _, process in reversed(self._running):
            try:
                process.wait(timeout=3 * STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # the program dies with its keeper
                process.wait()
        self._running.clear()
        shutil.rmtree(self.run_dir, ignore_errors=True)  # a process may have left a socket there

    def _story(self, what: str) -> str:
        """What happened, and the end of every log."""
        lines = [f"{self.name}: {what}"]
        for log in sorted(self.run_dir.glob("**/*.log")):
            end = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            if end:
                lines += [f"-- {log.relative_to(self.run_dir)}", *end]
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT does not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
