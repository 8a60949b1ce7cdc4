"""The lease: how a newcomer tells that a run's owner lives, without trusting any clock but its own.

The owner of each domain rewrites ``.ckptfs/lease`` every few seconds; the bytes differ each time.
A newcomer watches them: while they change, the owner lives; once they stood still for ``still_s`` on
the newcomer's own clock, it is gone. The lease decides only whether to wait; the fence decides who
owns the run, so a stalled owner that wakes does no harm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptfs.commit.entries import Generation
from ckptfs.commit.layout import CONTROL, LEASE
from ckptfs.commit.ops import read_limited
from ckptfs.errors import AnswerLostError, NotFoundError, StaleError, TransientError
from ckptfs.storage.base import Storage

__all__ = ["Keeper", "LeaseTimes", "moves"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """rewrite_s: how often the owner rewrites; still_s: how long it must stand still to be gone."""

    rewrite_s: float = 5.0
    still_s: float = 20.0


class Keeper:
    """Rewrites the lease from a daemon thread until stopped; errors are logged, never raised: a
    lease that stands still costs the run only a newcomer's patience.
    """

    def __init__(self, storage: Storage, generation: Generation, times: LeaseTimes) -> None:
        self._storage = storage
        self._generation = generation
        self._times = times
        self._stop = threading.Event()
        self._count = 0
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
            self._storage.replace(LEASE, f"{number} {nonce} {self._count}\n".encode())
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
    """Watch the lease: True as soon as it changes, False once it stood still for times.still_s.

    A look that fails for the moment says nothing. The error is raised where the last one of all does:
    an owner whose lease cannot be read may live.
    """
    seen: bytes | None = None
    until = clock() + times.still_s
    while True:
        last = clock() >= until
        try:
            now = _read(storage)
        except (AnswerLostError, StaleError, TransientError) as error:
            if last:
                raise
            logger.debug("the lease cannot be read now: %s", error)
        else:
            if seen is not None and now != seen:
                return True
            if last and seen is not None:
                return False
            if seen is None:
                seen, until = now, clock() + times.still_s
        wait(min(0.5, times.rewrite_s / 4))


def _read(storage: Storage) -> bytes:
    storage.refresh(CONTROL)
    try:
        return read_limited(storage, LEASE)
    except NotFoundError:
        return b""
