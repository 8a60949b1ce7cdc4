"""Removes the bytes of saves that are deleted in the log, each when its grace is over.

    eraser.adopt(seals)     their deletes are entered; they lie whole for ``grace_s`` from now
    eraser.go_on()          begins with whatever is due, in a thread of its own; a timer does the rest

Only the owner of a domain has one. What fails is told and tried again after later commits, less and
less often; what a process leaves undone, the next owner of the run does.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptfs.commit.background import Background
from ckptfs.commit.entries import Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.retire import Erasure, erase
from ckptfs.commit.run import Run
from ckptfs.commit.saving import Means
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import fresh_ids, now_text
from ckptfs.commit.turns import take_turns
from ckptfs.errors import CkptfsError
from ckptfs.events import Deleted, DeleteFailed, Event

__all__ = ["Clock", "Eraser", "Rest", "Tell", "failure_of", "known_of", "means_of"]

logger = logging.getLogger(__name__)

_FIRST_REST_S = 30.0
_LONGEST_REST_S = 3600.0

Tell = Callable[[Event], None]
Clock = Callable[[], float]  # seconds that only grow: time.monotonic


@dataclass(slots=True)
class Rest:
    """How often something failed in a row, and when it may be tried again."""

    failures: int = 0
    until_s: float = 0.0

    def failed(self, now_s: float) -> bool:
        """Whether this was the first time. The next try is free, then they get rarer."""
        self.failures += 1
        rest_s = 0.0 if self.failures == 1 else _FIRST_REST_S * 2 ** (self.failures - 2)
        self.until_s = now_s + min(rest_s, _LONGEST_REST_S)
        return self.failures == 1


@dataclass(slots=True)
class _Doomed:
    """A deleted save whose bytes are here. due_s: when its grace is over. busy: being removed."""

    seal: Seal
    reason: str
    due_s: float
    rest: Rest
    busy: bool = False


class Eraser:
    """Removes the bytes of one domain's deleted saves, each when its grace is over. Owners only."""

    def __init__(self, run: Run, grace_s: float, tell: Tell, clock: Clock) -> None:
        self._run, self._grace_s, self._tell, self._clock = run, grace_s, tell, clock
        self._background = Background()
        self._background.end_with(self)
        self._lock = threading.Lock()
        self._doomed: dict[str, _Doomed] = {}
        self._timer: threading.Timer | None = None
        self._closed = False

    def adopt(
        self, seals: Sequence[Seal], reason: str = "deleted before", *, at_once: bool = False
    ) -> None:
        """Their deletes are in the log; from now on their bytes are this one's business. at_once: no reader
        is given time.
        """
        due_s = self._clock() + (0.0 if at_once else self._grace_s)
        with self._lock:
            for seal in seals:
                self._run.seat.spared.add(seal.save_id)
                self._doomed.setdefault(seal.save_id, _Doomed(seal, reason, due_s, Rest()))

    def go_on(self, *, again: bool = False) -> None:
        """Begin with whatever is due. again: with what failed before, too."""
        now = self._clock()
        with self._lock:
            if self._closed:
                return
            ready = [
                d
                for d in self._doomed.values()
                if d.due_s <= now
                and not d.busy
                and (d.rest.failures == 0 or (again and d.rest.until_s <= now))
            ]
            for doomed in ready:
                doomed.busy = True
            self._arm(now)
        for doomed in ready:
            what = f"removing {doomed.seal.name}"
            self._background.submit(what, lambda d=doomed: self._erase(d))  # type: ignore[misc]

    def _arm(self, now_s: float) -> None:
        """One timer, for the first grace that ends."""
        due = [d.due_s for d in self._doomed.values() if d.due_s > now_s]
        if self._timer is None and due:
            # Weak: a grace of hours would keep the run of a manager that nobody has any more.
            self._timer = threading.Timer(min(due) - now_s, _ring, [weakref.ref(self)])
            self._timer.daemon = True
            self._timer.start()

    def ring(self) -> None:
        """A grace is over."""
        with self._lock:
            self._timer = None
        self.go_on()

    def _erase(self, doomed: _Doomed) -> None:
        seat, seal = self._run.seat, doomed.seal
        again = doomed.rest.failures > 0
        holder = self._run.generation
        program = erase(seal.save_id, means_of(seat), holder, known_of(seat), again=again)
        try:
            turns = take_turns(program, seat.turn)
            what, state = seat.drive_aside(turns, self._background)
        except (CkptfsError, OSError) as error:
            with self._lock:
                doomed.busy = False
            self._tell(failure_of(seat, seal, error, first=doomed.rest.failed(self._clock())))
            return
        seat.known.learn(state)
        with self._lock:
            doomed.busy = False
            if what is Erasure.LATER:
                doomed.rest.failed(self._clock())
                return
            self._doomed.pop(seal.save_id, None)
        seat.spared.discard(seal.save_id)
        if what is Erasure.GONE:
            self._tell(Deleted(str(seat.storage.uri(seal.name)), seal.save_id, doomed.reason))

    def debris(self) -> int:
        """How many wait although their grace is over."""
        now = self._clock()
        with self._lock:
            return sum(1 for d in self._doomed.values() if d.due_s <= now)

    def drain(self, timeout_s: float) -> bool:
        """Wait for the removals that have begun."""
        return self._background.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the removals that have begun, begin no other."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        done = self._background.close(timeout_s)
        with self._lock:
            left = len(self._doomed)
        if left:
            where = self._run.seat.storage.root
            logger.info("%d deleted saves in %s are left to the next owner", left, where)
        return done


def _ring(eraser: weakref.ref[Eraser]) -> None:
    alive = eraser()
    if alive is not None:
        alive.ring()


def failure_of(seat: Seat, seal: Seal, error: BaseException, *, first: bool) -> DeleteFailed:
    """The event of a failed delete; logged as a warning the first time."""
    uri = seat.storage.uri(seal.name)
    level = logging.WARNING if first else logging.DEBUG
    logger.log(level, "%s could not be deleted and is tried again later: %s", uri, error)
    return DeleteFailed(str(uri), seal.save_id, str(error))


def known_of(seat: Seat) -> LogState | None:
    """What to fold on from, or None: everything anew."""
    # Without exclusive creates entries may slip in below what was folded.
    return seat.known.state if seat.caps.exclusive_create else None


def means_of(seat: Seat) -> Means:
    """Fresh for each program: one generator of ids must not serve two threads."""
    stamp = Stamp(now_text(), seat.control.world.hostname, os.getpid(), seat.control.rank)
    return Means(seat.placement.mine.id, seat.caps, fresh_ids(), stamp)
