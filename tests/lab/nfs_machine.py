"""One user-mode Linux of NfsLab, and the network namespace that all of them are plugged into.

    Network(crew, names)        a bridge and a tap per machine, in a namespace of their own
    Machine.begin / answer      boot; wait for its agent
    Machine.call(f, *args)      f there, one call at a time; ``connect()`` for a line of one's own
    Machine.start(argv)         -> Program: wait, end
    Machine.fork(f, *args)      f in a process of its own, torch already imported -> Forked: result, end
    Machine.kill / boot         SIGKILL to its kernel: nothing is flushed; and up again
    python -m tests.lab.nfs_machine ADDRESS PROGRAM ...    in the namespace: a program there, for a person

A namespace belongs to a thread: the thread that dials enters it, the socket stays there for all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tests.lab import nfs_agent
from tests.lab.nfs_agent import PORT, WARM_PORT, Ended
from tests.lab.process import Crew, LabError

__all__ = ["Forked", "Machine", "Network", "Program"]

P = ParamSpec("P")
T = TypeVar("T")

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_BOOT_S = 300.0  # of a machine that takes 5 s on an idle host
_IMPORT_S = 300.0  # of a start that takes 25 s there
_CALL_S = 600.0  # then the caller has lost it
_WARM = (
    *("torch", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    *("ckptfs.api", "ckptfs.dcp.api", "ckptfs.dcp.async_api", "ckptfs.manager.manager"),
    *("ckptfs.control.tcpstore_control", "ckptfs.testing.faults"),
    *("torch.distributed.device_mesh", "torch._dynamo"),  # at the first DTensor of a process: 8 s
)


class Network:
    """A bridge of its own, seen by no other program; ends with ``crew``."""

    def __init__(self, crew: Crew, names: Sequence[str]) -> None:
        before = crew.pids()
        crew.start("network", ["unshare", "--net", "sleep", "infinity"], grace_s=0)
        ours = os.readlink("/proc/self/ns/net")
        found: list[int] = []

        def is_apart() -> bool:
            found[:] = [pid for pid in crew.pids() if pid not in before]
            with contextlib.suppress(OSError):
                return bool(found) and os.readlink(f"/proc/{found[0]}/ns/net") != ours
            return False

        crew.wait_for(is_apart, "the network is apart")
        self._namespace = f"/proc/{found[0]}/ns/net"
        self._ip("link", "set", "lo", "up")
        self._ip("link", "add", "br0", "type", "bridge")
        self._ip("addr", "add", "10.77.0.254/24", "dev", "br0")
        self._ip("link", "set", "br0", "up")
        for name in names:
            self._ip("tuntap", "add", self.tap(name), "mode", "tap")
            self._ip("link", "set", self.tap(name), "master", "br0", "up")

    @staticmethod
    def tap(name: str) -> str:
        """The host's end of a machine's cable."""
        return f"tap-{name}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, run in there."""
        return ["nsenter", f"--net={self._namespace}", *command]

    def plug(self, name: str, *, inside: bool) -> None:
        """Connect a machine with the bridge, or not. Setting the tap down would kill the card for good."""
        self._ip("link", "set", self.tap(name), *(("master", "br0") if inside else ("nomaster",)))

    def dial(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """A connection from in there; OSError."""
        done: list[socket.socket | OSError] = []

        def dial() -> None:
            try:
                self._enter()
                done.append(socket.create_connection((address, port), timeout=timeout_s))
            except OSError as error:
                done.append(error)

        thread = threading.Thread(target=dial)
        thread.start()
        thread.join()
        if isinstance(done[0], OSError):
            raise done[0]
        return done[0]

    def _enter(self) -> None:
        namespace = os.open(self._namespace, os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace, _NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(namespace)

    def _ip(self, *words: str) -> None:
        done = subprocess.run(
            self.inside(["ip", *words]), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LabError(f"ip {' '.join(words)}: {done.stderr}")


@dataclass(frozen=True)
class Program:
    """A program that was started on a machine."""

    machine: Machine
    pid: int
    log: str

    def wait(self, timeout_s: float) -> Ended:
        """How it ended; LabError with its output where it has not by then."""
        with self.machine.connect(timeout_s + 60) as link:
            ended: Ended = nfs_agent.ask(link, nfs_agent.wait, self.pid, self.log, timeout_s)
        if ended.status is None:
            raise LabError(f"not ended after {timeout_s:g} s:\n{ended.output}")
        return ended

    def peek(self) -> Ended:
        """How it is: status None while it runs, and what it has printed."""
        return self.machine.call(nfs_agent.wait, self.pid, self.log, 0.0)

    def end(self, number: int = signal.SIGKILL) -> None:
        """A signal to it and all that it started in its group."""
        self.machine.call(nfs_agent.end, self.pid, number)


class Forked:
    """A function that runs in a process of its own on a machine; ``pid`` is there."""

    def __init__(self, machine: Machine, link: socket.socket) -> None:
        self.machine = machine
        self.pid = nfs_agent.hello(link)
        self._link = link

    def result(self, timeout_s: float = 120.0) -> Any:
        """Its value; raises what it raised, ConnectionError where it died, TimeoutError. Once."""
        with self._link as link:
            link.settimeout(timeout_s)
            return nfs_agent.answer_of(link)

    def hang_up(self) -> None:
        """Its machine is no more: ``result`` is OSError from here on."""
        self._link.close()

    def has_ended(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""
        return bool(select.select([self._link], [], [], 0)[0])

    def end(self, number: int = signal.SIGKILL) -> None:
        """A signal to it and all that it started."""
        self.machine.call(nfs_agent.end, self.pid, number)


class Machine:
    """One kernel. ``call`` is thread-safe, one call after the other."""

    interface = "vec0"

    def __init__(
        self, name: str, address: str, crew: Crew, network: Network, command: Sequence[str]
    ) -> None:
        self.name = name
        self.address = address
        self._crew = crew
        self._network = network
        card = f"vec0:transport=tap,ifname={network.tap(name)},depth=64,gro=1"
        hardware = f"mac=52:54:00:77:00:{address.rpartition('.')[2]:>02}"
        self._command = network.inside([*command, f"{card},{hardware}"])
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._warmed = False
        self._forked: weakref.WeakSet[Forked] = weakref.WeakSet()

    # -- life ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Boot; returns at once."""
        self._crew.start(self.name, self._command, grace_s=0)

    def answer(self) -> None:
        """Return when its agent answers; LabError with its console where it does not."""

        def answers() -> bool:
            with contextlib.suppress(OSError), self.connect(5.0) as link:
                return bool(nfs_agent.ask(link, os.getpid))
            return False

        self._crew.wait_for(answers, f"{self.name} answers", timeout_s=_BOOT_S)

    def kill(self) -> None:
        """SIGKILL to its kernel: what was not on its disk, or not sent, is gone."""
        self.hang_up()
        for forked in self._forked:
            forked.hang_up()  # nothing will come any more, not even an end of file
        self._warmed = False
        self._crew.kill(self.name)

    def boot(self) -> None:
        """``begin`` and ``answer``; a client comes back with nothing mounted and an empty /scratch."""
        self.begin()
        self.answer()

    def hang_up(self) -> None:
        """Forget the line; the next call dials again."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    # -- work ----------------------------------------------------------------------------

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's value there; raises what it raised."""
        with self._lock:
            if self._link is None:
                self._link = self._network.dial(self.address, PORT, 10.0)
                self._link.settimeout(_CALL_S)
            try:
                value: T = nfs_agent.ask(self._link, function, *args, **kwargs)
            except TimeoutError:
                self.hang_up()
                raise
            return value

    @contextlib.contextmanager
    def connect(self, timeout_s: float) -> Iterator[socket.socket]:
        """A line of one's own: a call on it may hang without holding up the others."""
        with self._network.dial(self.address, PORT, min(timeout_s, 10.0)) as link:
            link.settimeout(timeout_s)
            yield link

    def start(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        libraries: bool = False,
    ) -> Program:
        """Start a program there. libraries: it comes from the lab's packages, as mount.nfs does."""
        log = f"/tmp/program-{uuid.uuid4().hex[:12]}.log"
        pid = self.call(_start, list(argv), dict(environment or {}), log, libraries=libraries)
        return Program(self, pid, log)

    def run(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        libraries: bool = False,
    ) -> Ended:
        """``start`` and ``wait``."""
        return self.start(argv, environment=environment, libraries=libraries).wait(timeout_s)

    def warm(self, *modules: str) -> None:
        """Start the process that ``fork`` forks from; ``modules`` in addition to torch and ckptfs. Returns at once.

        Where it runs already nothing is done: a child imports what it still needs.
        """
        if self._warmed:
            return
        self._warmed = True
        module = "tests.lab.nfs_agent"
        wanted = [*_WARM, *modules]
        single = {"OMP_NUM_THREADS": "1"}  # torch's threads would not survive a fork
        self.start([sys.executable, "-B", "-m", module, "fork", *wanted], environment=single)

    def fork(
        self,
        function: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """Run ``function(*args)`` in a process of its own; waits until ``warm`` is."""
        dialled: list[socket.socket] = []

        def is_warm() -> bool:
            with contextlib.suppress(OSError):
                dialled.append(self._network.dial(self.address, WARM_PORT, 10.0))
            return bool(dialled)

        self._crew.wait_for(is_warm, f"{self.name} is warm", timeout_s=_IMPORT_S)
        dialled[0].settimeout(_BOOT_S)  # to fork a large process takes a busy machine seconds
        forked = Forked(self, dialled[0])
        self._forked.add(forked)
        nfs_agent.tell(dialled[0], _in_fork, dict(environment or {}), function, args)
        return forked

    def shell(self) -> str:
        """The start of a command line that runs a program there; for a person."""
        ours = [sys.executable, "-m", "tests.lab.nfs_machine", self.address]
        return shlex.join(self._network.inside(ours))

    def seconds(self) -> float:
        """Its own clock, as time.monotonic()."""
        return self.call(time.monotonic)


def _start(argv: list[str], environment: dict[str, str], log: str, *, libraries: bool) -> int:
    """There: with the lab's libraries for its own programs, without for all others."""
    if libraries:
        environment = {**environment, "LD_LIBRARY_PATH": os.environ["LAB_LIBRARIES"]}
    return nfs_agent.start(argv, environment, log)


def _in_fork(environment: dict[str, str], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ.update(environment)
    return function(*args)


def main(arguments: Sequence[str]) -> int:
    """A person's program on a machine; we are in its network already."""
    address, *argv = arguments
    log = f"/tmp/program-{uuid.uuid4().hex[:12]}.log"
    with socket.create_connection((address, PORT), timeout=_CALL_S) as link:
        pid = nfs_agent.ask(link, _start, argv, {}, log, libraries=False)
        ended: Ended = nfs_agent.ask(link, nfs_agent.wait, pid, log, _CALL_S)
    sys.stdout.write(ended.output)
    return 1 if ended.status is None else ended.status


if __name__ == "__main__":
    from tests.lab.nfs_machine import main as run  # functions travel under their module's real name

    sys.exit(run(sys.argv[1:]))
