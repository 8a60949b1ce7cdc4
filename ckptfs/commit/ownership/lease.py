"""The lease: how a newcomer knows that a run's owner is alive, without trusting any clock but its own.

The owner of each domain rewrites ``.ckptfs/lease`` every few seconds; the bytes differ each time.
A newcomer watches them: while they change, the owner lives; once they stood still for ``still_s`` on
the newcomer's own clock, it is gone. The lease decides only whether to wait; the fence decides who
owns the run, so a stalled owner that wakes does no harm. The lease of an owner that holds the run for one
call says so, because that one is worth waiting for.

For an owner on the same node its process says more: the fence names it, by pid and start time.
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
    "Owner",
    "Pulse",
    "Watch",
    "alive_here",
    "describe",
    "moves",
    "start_ticks",
    "who_am_i",
]


@dataclass(frozen=True, slots=True)
class Owner:
    """One process: host for people; node and pid namespace, pid and start time for identity."""

    host: str
    pid: int
    job: str | None
    node: str
    started: str


def who_am_i(world: World) -> Owner:
    """This process as an owner of a run."""
    life = Life.of_this_process()
    # As /proc has it: in a pid namespace the process's own number may be somebody else's there.
    pid, started = (os.getpid(), "") if life is None else (life.pid, str(life.start_ticks))
    return Owner(world.hostname, pid, world.job_id, _place(world.node), started)


def _place(node: str) -> str:
    # Pids mean something only within one pid namespace.
    try:
        return f"{node} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return node


def start_ticks(pid: int) -> str:
    """The process's start time in clock ticks since boot: a reused pid has another one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def alive_here(fence: Fence) -> bool:
    """Whether the fence's process, one of this node, still runs; True also if this is unknown."""
    if not fence.started.isdigit():
        return True  # it had no /proc to read its start from: its lease tells
    if not is_gone(Life(fence.pid, int(fence.started))):
        return True
    # A /proc that shows the pid with another start has answered: it is somebody else's by now.
    return not os.path.exists(f"/proc/{fence.pid}") and _is_hidden(fence.pid)


def _is_hidden(pid: int) -> bool:
    """Whether /proc (hidepid) keeps another user's process from us: signals know of it all the same."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def describe(fence: Fence) -> str:
    """The holder, for a message."""
    job = f", job {fence.job}" if fence.job else ""
    return f"host {fence.host} pid {fence.pid}{job} (generation {fence.generation.number})"


logger = logging.getLogger("ckptfs.commit")

_OF_CALL = " call"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """rewrite_s: how often the owner rewrites; still_s: how long it must stand still to be gone."""

    rewrite_s: float = 5.0
    still_s: float = 20.0


class Keeper:
    """Rewrites the lease from a daemon thread until stopped; errors are logged, never raised: a
    lease that is not rewritten costs the run only a newcomer's wait. for_call: the run is held for one call.
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
        """Stop writing; harmless twice."""
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
            # Typed or not: a keeper that ended would let a living owner look dead.
            logger.warning("the lease could not be rewritten: %s", error)


def moves(
    storage: Storage,
    times: LeaseTimes,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Watch the lease: True as soon as it changes, False once it stood still for times.still_s. Errors as
    for ``Watch.look``.
    """
    return Watch(storage, times, clock=clock, wait=wait).look() is Pulse.MOVES


class Pulse(Enum):
    """What a watch has seen of a lease."""

    MOVES = "moves"
    STILL = "still"
    UNKNOWN = "unknown"  # neither yet


class Watch:
    """A lease that is looked at, with pauses for other things, until it moved or stood still for long."""

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
        self._seen: bytes | None = None
        self._until = clock() + times.still_s

    @property
    def is_of_call(self) -> bool:
        """Whether the run is held for one call, as the lease that was read last says."""
        return (self._seen or b"").rstrip().endswith(_OF_CALL.encode())

    def look(self, for_s: float = math.inf) -> Pulse:
        """Watch for up to ``for_s`` seconds: MOVES as soon as it changes, STILL once it stood still for
        times.still_s.

        A read that fails for the moment says nothing. The error is raised where the last one of all does:
        an owner whose lease cannot be read may live.
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
                if now != self._seen:
                    moved, self._seen = self._seen is not None, now
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
