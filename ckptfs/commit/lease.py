"""The lease: how a newcomer tells that a run's owner lives, without trusting any clock but its own.

The owner of each domain rewrites ``.ckptfs/lease`` every few seconds; the bytes differ each time.
A newcomer watches them: while they change, the owner lives; once they stood still for ``still_s`` on
the newcomer's own clock, it is gone. The lease decides only whether to wait; the fence decides who
owns the run, so a stalled owner that wakes does no harm. The lease of an owner that holds the run for one
call says so, because that one is worth waiting for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ckptfs.commit.entries import Generation
from ckptfs.commit.layout import CONTROL, LEASE
from ckptfs.commit.ops import read_limited
from ckptfs.errors import AnswerLostError, NotFoundError, StaleError, TransientError
from ckptfs.storage.base import Storage

__all__ = ["Keeper", "LeaseTimes", "Pulse", "Watch", "moves"]

logger = logging.getLogger(__name__)

_OF_CALL = " call"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """rewrite_s: how often the owner rewrites; still_s: how long it must stand still to be gone."""

    rewrite_s: float = 5.0
    still_s: float = 20.0


class Keeper:
    """Rewrites the lease from a daemon thread until stopped; errors are logged, never raised: a
    lease that stands still costs the run only a newcomer's patience. for_call: the run is held for one call.
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
