"""One copy of a run as one rank sees it: opened, claimed, filled, pruned. Everything is collective.

    drain.round(views)
      open     seat, claim (RunBusyError: somebody else fills it)      at the first round, then held
      plan     both logs folded -> what to copy, in commit order       coordinator
      copy     one save after another: CopyCommitted, or CopyFailed
      retain   the copy's own retention, after each commit

What fails is told, tried again in a later round, less and less often, and never raised: a copy that
cannot be made is no reason to stop training. A save that is damaged where it lies is given up after
a few tries, so that it does not keep newer ones; one that the copy's place refuses waits for as long
as that takes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.claim import Mode, Takeover, claim
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import catch_up_again
from ckptfs.commit.opening import Place, agree_uri, open_seat
from ckptfs.commit.ops import drive
from ckptfs.commit.protocol import Views, catalog
from ckptfs.commit.run import Caller, Run
from ckptfs.commit.seat import Seat, View, step_with_views
from ckptfs.dcp.copying import copy_checkpoint
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    ControlPlaneLostError,
    DeadlineError,
    FencedError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
)
from ckptfs.events import CopyCommitted, CopyFailed, Event, Retained
from ckptfs.manager.copy_plan import One, Policy, Reached, Todo, can_be_copied, plan_copies
from ckptfs.manager.erasing import Clock, Rest, Tell, known_of
from ckptfs.manager.retiring import Retirer
from ckptfs.uri import Uri

__all__ = ["Drain", "Goal"]

logger = logging.getLogger(__name__)

_DAMAGED = (IntegrityError, IncompleteCheckpointError, ManifestError)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a copy is to be. uri as the user gave it; attempts: for a save that is damaged. begin_again:
    what is further there than what is copied does not stay for that.
    """

    uri: Any
    place: Place
    policy: Policy
    attempts: int
    takeover: Takeover = Takeover.AUTO
    grace_s: float = 0.0
    begin_again: bool = False


@dataclass(frozen=True, slots=True)
class _Said:
    """What one rank says before a round."""

    urgent: bool
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Turn:
    """Whether there is anything to do now. waits: names of the saves that wait for this copy; ids:
    theirs.
    """

    rests: bool
    waits: tuple[str, ...]
    ids: tuple[str, ...] = ()


@dataclass
class _Tries:
    """What came of earlier tries. Only the coordinator plans, so only its settled and rest count.

    ids: that were tried. settled: save_ids that need no copy any more. reached: how far the copy came.
    """

    ids: set[str] = field(default_factory=set)
    damaged: Counter[str] = field(default_factory=Counter)
    settled: set[str] = field(default_factory=set)
    reached: Reached | None = None
    rest: Rest = field(default_factory=Rest)


class Drain:
    """One copy. One thread calls it: the copier's, whose control ``source`` has."""

    def __init__(
        self, source: Seat, goal: Goal, tell: Tell, stopped: threading.Event, clock: Clock
    ) -> None:
        self._source, self._goal, self._tell = source, goal, tell
        self._stopped, self._clock = stopped, clock
        self._run: Run | None = None
        self._retirer: Retirer | None = None
        self._tries = _Tries()
        self._lost = False
        self.is_planned = False  # equal on all ranks: from now on what lives is enough to plan by

    def is_settled(self, save_id: str) -> bool:
        """Whether a save of the primary need not wait for this copy (any more); coordinator only."""
        return self._lost or save_id in self._tries.settled

    def round(self, views: Views, *, urgent: bool) -> tuple[str, ...]:
        """Collective. Copy what there is to copy; the names that are left for a later round.

        views: the primary's logs; only the coordinator's are looked at. urgent: do not rest after
        failures; any rank's counts. ControlPlaneLostError, DeadlineError: the ranks lost each other.
        """
        control = self._source.control
        said = _Said(urgent, self._stopped.is_set())
        turn = control.step("copy: turn", lambda: said, lambda all_: self._turn(views, all_))
        if turn.rests:
            return turn.waits
        try:
            run = self._opened()
            copies = step_with_views(
                control,
                "copy: plan",
                lambda ids: self._survey(run.seat, (*ids, *turn.ids)),
                lambda view: view,
                lambda found: self._plan(views, _views(found), run),
            ).copies
            self.is_planned = True
        except CkptfsError as error:
            self._cannot_open(error)
            return turn.waits
        left = [one.seal.name for one in copies]
        for one in copies:
            if not self._copy(one, run, views):
                break
            left.pop(0)
        return tuple(left)

    def close(self, timeout_s: float) -> None:
        """Local. Leave the copy's run to the next owner. Harmless twice."""
        if self._retirer is not None:
            self._retirer.close(timeout_s)
        if self._run is not None:
            self._run.release()

    # -- on the coordinator ---------------------------------------------------------------

    def _turn(self, views: Views, said: Sequence[_Said]) -> _Turn:
        waits = [
            x.seal
            for x in catalog(views)
            if can_be_copied(x.seal) and not self.is_settled(x.seal.save_id)
        ]
        rests = self._clock() < self._tries.rest.until_s and not any(s.urgent for s in said)
        return _Turn(
            rests or not waits or any(s.stopped for s in said),
            tuple(seal.name for seal in waits),
            tuple(seal.save_id for seal in waits),
        )

    def _plan(self, views: Views, there: Views, run: Run) -> Todo:
        if any(view.generation > run.generation for view in there.values()):
            raise FencedError("another job took the copy's run", uri=run.uri)
        given_up = [s for s, n in self._tries.damaged.items() if n >= self._goal.attempts]
        todo = plan_copies(
            views,
            there,
            self._goal.policy,
            given_up=given_up,
            tried=self._tries.ids,
            before=self._tries.reached,
        )
        self._tries.settled |= todo.settled
        self._tries.reached = todo.reached
        return Todo(todo.copies)  # the rest is for the coordinator alone

    # -- on every rank --------------------------------------------------------------------

    def _opened(self) -> Run:
        if self._run is None:
            control, goal = self._source.control, self._goal
            with contextlib.ExitStack() as stack:
                root = agree_uri(control, goal.uri)
                seat = stack.enter_context(open_seat(root, control, goal.place, write=True))
                run = claim(
                    seat,
                    Mode.RESUME,
                    goal.takeover,
                    defer_deletes=goal.grace_s > 0,
                    caller=Caller("a manager's copies"),
                )
                run.closing.push(stack.pop_all())
            self._run = run
            self._retirer = Retirer(
                run,
                goal.policy.keep,
                goal.policy.mine,
                grace_s=goal.grace_s,
                tell=self._tell_of_retention,
            )
        return self._run

    def _survey(self, seat: Seat, ids: Collection[str]) -> View | None:
        if not seat.placement.is_owner:
            return None
        state = drive(catch_up_again(known_of(seat)), seat.storage)
        seat.known.learn(state)
        return seat.placement.mine.id, state.to_send(ids) if self.is_planned else state

    def _copy(self, one: One, run: Run, views: Views) -> bool:
        """Copy one save; whether to go on with the next."""
        self._tries.ids.add(one.save_id)
        try:
            result = copy_checkpoint(
                self._source,
                one.seal,
                run.seat,
                run=run.generation,
                save_id=one.save_id,
                stopped=self._stopped,
            )
        except CkptfsError as error:
            return self._failed(one, error)
        self._tries.settled.add(one.seal.save_id)
        if self._tries.reached is not None:
            self._tries.reached = self._tries.reached.with_save(one.seal, views)
        self._tries.rest = Rest()
        uri = str(self._source.storage.uri(one.seal.name))
        logger.info("%s is copied to %s", uri, result.uri)
        self._tell(CopyCommitted(uri, result.uri, result.total.size_bytes, result.wall_s))
        if self._retirer is not None:
            at = None if self._goal.begin_again else one.seal.step
            self._retirer.after_commit(run.seat, at=at)
        return True

    def _failed(self, one: One, error: CkptfsError) -> bool:
        """Whether to go on with the next: only where this one will never be copied."""
        self._tell_failure(self._source.storage.uri(one.seal.name), error)
        _raise_if_apart(error)
        if isinstance(error, FencedError):
            self._give_the_copy_up(error)
            return False
        if _is_damage(error):
            self._tries.damaged[one.seal.save_id] += 1
            if self._tries.damaged[one.seal.save_id] >= self._goal.attempts:
                self._tries.settled.add(one.seal.save_id)
                logger.error("%s is damaged and gets no copy: %s", one.seal.name, error)
                return True
        first = self._tries.rest.failed(self._clock())
        level = logging.WARNING if first else logging.INFO
        logger.log(level, "%s is copied later: %s", one.seal.name, error)
        return False

    def _cannot_open(self, error: CkptfsError) -> None:
        """Told once: a copy that is out of reach stays so for many commits."""
        _raise_if_apart(error)
        if isinstance(error, FencedError):
            self._give_the_copy_up(error)
            return
        if self._tries.rest.failed(self._clock()):
            self._tell_failure(self._source.storage.root, error)
            logger.warning("copies to %s wait: %s", self._goal.uri, error)
        else:
            logger.info("copies to %s still wait: %s", self._goal.uri, error)

    def _give_the_copy_up(self, error: FencedError) -> None:
        self._lost = True
        logger.warning("nothing is copied to %s any more: %s", self._goal.uri, error)

    def _tell_failure(self, uri: Uri, error: CkptfsError) -> None:
        self._tell(CopyFailed(str(uri), str(Uri.parse(self._goal.uri)), str(error)))

    def _tell_of_retention(self, event: Event) -> None:
        # Retained names no run: it would look like the primary's.
        if not isinstance(event, Retained):
            self._tell(event)


def _views(found: Sequence[View | None]) -> dict[str, LogState]:
    return dict(f for f in found if f is not None)


def _raise_if_apart(error: CkptfsError) -> None:
    if isinstance(error, ControlPlaneLostError | DeadlineError):
        raise error  # the ranks do not hear each other any more


def _is_damage(error: CkptfsError) -> bool:
    """Whether the save itself is at fault, and not the place that it is copied to."""
    if isinstance(error, CollectiveError):
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _DAMAGED}
        return any(failure.type in names for failure in error.failures.values())
    return isinstance(error, _DAMAGED)
