"""The lease: how a newcomer knows that a run's owner is alive, by no clock but its own.

The owner of each domain rewrites ``.ckptfs/lease`` every few seconds; the bytes differ each time.
A newcomer watches them: while they change, the owner is alive; if they have not changed for ``still_s`` on
the newcomer's own clock, the owner is gone. The lease decides only whether to wait. The fence decides who
owns the run, so a stalled owner that wakes does no harm. If an owner holds the run for one call, its lease says
so, because it is worth waiting for the end of that call.

For an owner on the same node the process itself is checked: the fence names it by pid and start time.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ckptfs.commit.log.entries import Fence, Generation
from ckptfs.commit.operations import read_limited
from ckptfs.commit.paths import CONTROL, LEASE
from ckptfs.control.world import Life, World, is_gone
from ckptfs.errors import AnswerLostError, NotFoundError, StaleError, TransientError
from ckptfs.storage.base import Storage

__all__ = [
    "Keeper",
    "LeaseTimes",
    "LeaseWatch",
    "Owner",
    "Pulse",
    "alive_here",
    "describe",
    "moves",
    "start_ticks",
    "who_am_i",
]


@dataclass(frozen=True, slots=True)
class Owner:
    """One process that owns a run.

    host is for people. node (with the pid namespace), pid and start time identify the process.
    """

    host: str
    pid: int
    job: str | None
    node: str
    started: str


def who_am_i(world: World) -> Owner:
    """Return this process as an owner of a run."""
    life = Life.of_this_process()
    # The pid as /proc has it: in a pid namespace, os.getpid() may be another process's number there.
    pid, started = (os.getpid(), "") if life is None else (life.pid, str(life.start_ticks))
    return Owner(world.hostname, pid, world.job_id, _place(world.node), started)


def _place(node: str) -> str:
    # Pids mean something only within one pid namespace.
    try:
        return f"{node} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return node


def start_ticks(pid: int) -> str:
    """Return a process's start time in clock ticks since boot. A reused pid has another one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def alive_here(fence: Fence) -> bool:
    """Whether the fence's process, one of this node, still runs; True also if this is unknown."""
    if not fence.started.isdigit():
        return True  # it had no /proc to read its start from: its lease decides
    if not is_gone(Life(fence.pid, int(fence.started))):
        return True
    # /proc shows the pid with another start time: it is the pid of another process now.
    return not os.path.exists(f"/proc/{fence.pid}") and _is_hidden(fence.pid)


def _is_hidden(pid: int) -> bool:
    """Whether /proc (hidepid) hides another user's process, which a signal can still find."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def describe(fence: Fence) -> str:
    """Describe the holder, for a message."""
    job = f", job {fence.job}" if fence.job else ""
    return f"host {fence.host} pid {fence.pid}{job} (generation {fence.generation.number})"


logger = logging.getLogger("ckptfs.commit")

_OF_CALL = " call"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The times of a lease in seconds.

    Attributes:
        rewrite_s: How often the owner rewrites it.
        still_s: How long it must not change before the owner counts as gone.
    """

    rewrite_s: float = 5.0
    still_s: float = 20.0


class Keeper:
    """Rewrites the lease from a daemon thread until stopped.

    Errors are logged, never raised: if the lease is not rewritten, the only cost is a newcomer's
    wait. for_call: The run is held for one call.
    """

    def __init__(
        self,
        storage: Storage,
        generation: Generation,
        times: LeaseTimes,
        *,
        for_call: bool = False,
    ) -> None:
        self._storage = storage
        self._generation = generation
        self._times = times
        self._stop = threading.Event()
        self._count = 0
        self._mark = _OF_CALL if for_call else ""
        self._thread = threading.Thread(target=self._keep, name="ckptfs-lease", daemon=True)

    def start(self) -> None:
        """Write the lease once, then keep writing it."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Stop writing. Calling it twice is harmless."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._times.rewrite_s)

    def _keep(self) -> None:
        while not self._stop.wait(self._times.rewrite_s):
            self._write()

    def _write(self) -> None:
        self._count += 1
        number, nonce = self._generation
        try:
            self._storage.replace(LEASE, f"{number} {nonce} {self._count}{self._mark}\n".encode())
        except OSError as error:
            # Any error: if the keeper ended, a living owner would look dead.
            logger.warning("the lease could not be rewritten: %s", error)


def moves(
    storage: Storage,
    times: LeaseTimes,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Watch the lease: True as soon as it changes, False after times.still_s without a change.

    Errors as for ``LeaseWatch.look``.
    """
    return LeaseWatch(storage, times, clock=clock, wait=wait).look() is Pulse.MOVES


class Pulse(Enum):
    """The result of watching a lease."""

    MOVES = "moves"
    STILL = "still"
    UNKNOWN = "unknown"  # neither yet


class LeaseWatch:
    """Watches a lease, with pauses for other work, until it changed or did not for a long time."""

    def __init__(
        self,
        storage: Storage,
        times: LeaseTimes,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._storage, self._times = storage, times
        self._clock, self._wait = clock, wait
        self._last_read: bytes | None = None
        self._until = clock() + times.still_s

    @property
    def is_of_call(self) -> bool:
        """Whether the run is held for one call, according to the lease that was read last."""
        return (self._last_read or b"").rstrip().endswith(_OF_CALL.encode())

    def look(self, for_s: float = math.inf) -> Pulse:
        """Watch the lease for up to ``for_s`` seconds.

        A read that fails temporarily decides nothing. But if the last read of all fails, its error
        is raised: the owner of a lease that cannot be read may be alive.

        Returns:
            MOVES as soon as the lease changes, STILL after times.still_s without a change, else
            UNKNOWN.
        """
        end = self._clock() + for_s if for_s < math.inf else math.inf
        while True:
            last = self._clock() >= self._until
            try:
                now = _read(self._storage)
            except (AnswerLostError, StaleError, TransientError) as error:
                if last:
                    raise
                logger.debug("the lease cannot be read now: %s", error)
            else:
                if now != self._last_read:
                    moved, self._last_read = self._last_read is not None, now
                    self._until = self._clock() + self._times.still_s
                    if moved:
                        return Pulse.MOVES
                elif last:
                    return Pulse.STILL
            pause = min(0.5, self._times.rewrite_s / 4)
            if end < math.inf and self._clock() + pause > end:
                self._wait(max(0.0, end - self._clock()))
                return Pulse.UNKNOWN
            self._wait(pause)


def _read(storage: Storage) -> bytes:
    storage.refresh(CONTROL)
    try:
        return read_limited(storage, LEASE)
    except NotFoundError:
        return b""
