"""Carries retention out: decided together after a commit, entered in every log, bytes in the background.

    after_commit    every owner folds its log, the coordinator decides once       (collective)
                    every owner of a listed domain appends the deletes            (collective)
                    the bytes follow, when ``grace_s`` is over                    (a thread per owner)
    delete          the same for one save that somebody else let go; what fails is raised

``after_commit`` is called after the successor's commit and never before. What fails in it is told
(``DeleteFailed``, and once in the log), tried again after later commits, less and less often, and never
raised: a checkpoint that cannot be deleted is no reason to stop training. What a process leaves undone,
the next owner of the run does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptfs.commit.decisions import Refusal
from ckptfs.commit.entries import Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import Appended, Refused, catch_up_again
from ckptfs.commit.ops import drive
from ckptfs.commit.protocol import Standing, Views, catalog, living, seal_of, standing
from ckptfs.commit.retire import pin, retire, waiting
from ckptfs.commit.run import Run
from ckptfs.commit.seat import Seat, View, step_with_views
from ckptfs.errors import (
    CkptfsError,
    CommitInDoubtError,
    FencedError,
    NotFoundError,
    StateError,
    StorageError,
)
from ckptfs.events import Counters, Retained
from ckptfs.manager.erasing import Clock, Eraser, Rest, Tell, failure_of, known_of, means_of
from ckptfs.manager.retention import (
    Going,
    Keep,
    inherited_pins,
    needs_text,
    plan_retention,
    short_of,
    why_it_stays,
)

__all__ = ["Retirer"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

ENTRY_S = 10.0  # how long an entry is tried that nobody waits for: the next commit tries again


@dataclass(frozen=True, slots=True)
class _Said:
    """What one rank brings: an owner its log, every rank the saves that it still needs, and the step that
    the run has come to.
    """

    view: View | None
    roots: frozenset[str]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The same on every rank. halfway: deleted in one domain and not yet in another. pins: of replaced
    saves, each with the save that takes it over.
    """

    kept: int
    going: tuple[Going, ...]
    halfway: tuple[Going, ...]
    pins: tuple[tuple[str, str], ...]


class Retirer:
    """Retention of one held run, seen from one rank. ``after_commit``, ``pin``, ``delete`` are collective.

    keep: the policy. mine: whether a save is the manager's. grace_s: for how long a deleted save
    stays whole for readers that found it before. tell: hears Retained, Deleted and DeleteFailed, the
    latter two from a thread of an owner. Make it after the claim and before the first save, on a run
    that was claimed with ``defer_deletes`` where there is a grace.
    """

    def __init__(
        self,
        run: Run,
        keep: Keep,
        mine: Callable[[Seal], bool],
        *,
        grace_s: float = 0.0,
        tell: Tell = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._run, self._keep, self._mine = run, keep, mine
        self._tell, self._clock = tell, clock
        self._unentered: dict[str, Rest] = {}
        self._eraser: Eraser | None = None
        if run.seat.placement.is_owner:
            self._eraser = Eraser(run, grace_s, tell, clock)
            state = run.seat.known.state
            self._eraser.adopt([] if state is None else waiting(state))
            self._eraser.go_on()

    def after_commit(
        self, seat: Seat, roots: Collection[str] = (), *, at: int | None = None
    ) -> Retained | None:
        """Collective on the seat's control, after a commit. Let go what the policy does not keep.

        roots: save_ids that this rank still needs; those of all ranks count. at: the step that the run has
        come to, equal on all ranks: later ones stay; None: they do not. None: it could not be decided
        this time (in the log). Never raises a CkptfsError.
        """
        retained = None
        try:
            retained = self._retain(seat, roots, at)
            self._tell(retained)
        except CkptfsError as error:
            logger.warning("retention waits for the next commit: %s", error)
        if self._eraser is not None:
            self._adopt_unsure(self._eraser)
            self._eraser.go_on(again=True)
        return retained

    def pin(self, seat: Seat, save_id: str, *, pinned: bool = True) -> None:
        """Collective. Keep a save whatever the policy says, until it is unpinned; survives restarts.

        NotFoundError: it is not a live save of the run. FencedError: a newer owner has the run.
        CollectiveError: an owner could not write; the pin may stand, an unpinning does not.
        """
        where = seat.storage.uri("")

        def live(said: Sequence[_Said]) -> None:
            if all(live.seal.save_id != save_id for live in catalog(_views(said))):
                raise _not_live(save_id, where)

        self._step_with_logs(seat, "pin", (), live)

        def enter() -> Refusal | None:
            if not _holds(seat, save_id):
                return None
            means, holder = means_of(seat), self._run.generation
            done = drive(pin(save_id, means, holder, known_of(seat), pinned=pinned), seat.storage)
            _learned(seat, done.state)
            if isinstance(done, Refused) and done.state.save(save_id).pinned is not pinned:
                return done.reason
            return None

        def judge(refusals: Sequence[Refusal | None]) -> None:
            if Refusal.FENCED in refusals:
                raise FencedError("a newer owner has the run", uri=where)
            if any(refusals):
                raise _not_live(save_id, where)

        seat.control.step("pin.enter", enter, judge)

    def delete(
        self,
        seat: Seat,
        save_id: str,
        *,
        reason: str = "deleted by name",
        at_once: bool = False,
    ) -> None:
        """Collective. Let one save go, whatever the policy says; its bytes follow as ever, or, at_once,
        without the grace for readers.

        NotFoundError: it is not a live save of the run. StateError: it is pinned, or one that stays
        uses its files. FencedError: a newer owner has the run. CollectiveError: an owner could not
        write; deleted in one log is deleted, and the next commit or owner completes the others.
        """
        where = seat.storage.uri("")

        def let_go(said: Sequence[_Said]) -> Going:
            views = _views(said)
            found = [live.seal for live in catalog(views) if live.seal.save_id == save_id]
            if not found:
                raise _not_live(save_id, where)
            why = why_it_stays(views, save_id)
            if why is not None:
                raise StateError(f"{found[0].name} is not deleted: {why}", uri=where)
            return Going(found[0], reason)

        going = self._step_with_logs(seat, "delete", (), let_go)

        def enter() -> Refusal | None:
            if not _holds(seat, save_id):
                return None
            self._unentered.setdefault(save_id, Rest())  # an answer may be lost: looked at again
            done = self._append(seat, going, frozenset({save_id}), at_once=at_once)
            self._unentered.pop(save_id)
            gone = done.state.save(save_id).deleted
            return None if gone or not isinstance(done, Refused) else done.reason

        def judge(refusals: Sequence[Refusal | None]) -> None:
            if Refusal.FENCED in refusals:
                raise FencedError("a newer owner has the run", uri=where)
            if any(refusals):
                raise StateError(f"{going.seal.name} was pinned or used just now", uri=where)

        seat.control.step("delete.enter", enter, judge)
        if self._eraser is not None:
            self._eraser.go_on()

    def make_room(self, timeout_s: float = 60.0) -> bool:
        """Local. Wait for the removals under way, so that keep_latest + 1 saves fit on the disk;
        whether all were done. For an owner, before it writes the next save; nothing elsewhere.
        """
        return self._eraser is None or self._eraser.drain(timeout_s)

    def debris(self) -> int:
        """Local. Deleted saves whose bytes are still in this rank's domain after their grace."""
        return 0 if self._eraser is None else self._eraser.debris()

    def log_needs(self, per_rank: Sequence[Counters]) -> str | None:
        """Local. After the first save: log what it took in this rank's domain and what the policy
        will need there, as a warning where that is not free. The text; None but on owners.

        per_rank: of ``SaveResult``.
        """
        seat = self._run.seat
        if self._eraser is None:
            return None
        size_bytes = sum(per_rank[rank].size_bytes for rank in seat.placement.mine.ranks)
        text, level = needs_text(size_bytes, self._keep), logging.INFO
        try:
            space = seat.storage.space()
        except StorageError as error:
            logger.debug("how much space is free is not known: %s", error)
            space = None
        if space is not None and space.free_bytes is not None:
            short = short_of(size_bytes, self._keep, space.free_bytes, self._held())
            if short:
                text, level = f"{text}; {short} bytes more than are free", logging.WARNING
        logger.log(level, "%s: %s", seat.storage.root, text)
        return text

    def _held(self) -> int:
        """How many saves of the manager's lie here already."""
        seat = self._run.seat
        state = seat.known.state
        views = {} if state is None else {seat.placement.mine.id: state}
        return sum(1 for live in catalog(views) if self._mine(live.seal))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Local. Finish removals under way; whether none is left running. Before the run's release.

        Saves within their grace keep their bytes: the next owner of the run removes them.
        """
        return self._eraser is None or self._eraser.close(timeout_s)

    # -- the two collective steps -------------------------------------------------------

    def _retain(self, seat: Seat, roots: Collection[str], at: int | None) -> Retained:
        verdict = self._step_with_logs(seat, "retain", roots, self._decide, at)
        if verdict.going or verdict.halfway or verdict.pins:
            # A barrier: whoever returns from a save sees a log without what it let go.
            seat.control.step("retire", lambda: self._enter_all(seat, verdict))
        names = tuple(str(seat.storage.uri(going.seal.name)) for going in verdict.going)
        return Retained(verdict.kept, names)

    def _step_with_logs(
        self,
        seat: Seat,
        label: str,
        roots: Collection[str],
        decide: Callable[[Sequence[_Said]], R],
        at: int | None = None,
    ) -> R:
        def look(ids: Collection[str]) -> _Said:
            return self._survey(seat, roots, ids, at)

        return step_with_views(seat.control, label, look, lambda said: said.view, decide)

    def _survey(
        self, seat: Seat, roots: Collection[str], ids: Collection[str], at: int | None
    ) -> _Said:
        view = None
        if seat.placement.is_owner:
            state = drive(catch_up_again(known_of(seat)), seat.storage)
            seat.known.learn(state)
            view = (seat.placement.mine.id, state.to_send(ids))
        return _Said(view, frozenset(roots), at)

    def _decide(self, said: Sequence[_Said]) -> _Verdict:
        views = _views(said)
        pins = tuple(inherited_pins(views))
        roots = frozenset(new for _, new in pins).union(*(s.roots for s in said))
        plan = plan_retention(views, self._keep, self._mine, roots, at=said[0].at)
        return _Verdict(len(plan.kept), plan.going, tuple(_halfway(views)), pins)

    def _enter_all(self, seat: Seat, verdict: _Verdict) -> None:
        """Owners: the entries of this domain, oldest save first; one that fails keeps no other."""
        for old, new in verdict.pins:
            self._pass_on(seat, old, new)
        together = frozenset(going.seal.save_id for going in verdict.going)
        todo = [(g, together) for g in verdict.going] + [(g, frozenset()) for g in verdict.halfway]
        for going, ids in todo:
            if _holds(seat, going.seal.save_id) and not self._enter(seat, going, ids):
                return

    def _pass_on(self, seat: Seat, old: str, new: str) -> None:
        """The successor's pin first: at no moment is neither pinned."""
        means, holder = means_of(seat), self._run.generation
        try:
            for save_id, pinned in ((new, True), (old, False)):
                if _holds(seat, save_id):
                    program = pin(save_id, means, holder, known_of(seat), pinned=pinned)
                    seat.known.learn(drive(program, seat.storage, deadline_s=ENTRY_S).state)
        except (StorageError, CommitInDoubtError) as error:
            logger.warning("the pin of a replaced save is passed on later: %s", error)

    def _enter(self, seat: Seat, going: Going, together: frozenset[str]) -> bool:
        """One entry of retention; False once a newer owner has the run."""
        seal, save_id = going.seal, going.seal.save_id
        rest = self._unentered.setdefault(save_id, Rest())
        if self._eraser is None or self._clock() < rest.until_s:
            return True
        try:
            done = self._append(seat, going, together, deadline_s=ENTRY_S)
        except (StorageError, CommitInDoubtError) as error:
            first = rest.failed(self._clock())
            self._tell(failure_of(seat, seal, error, first=first))
            return True
        self._unentered.pop(save_id)
        if isinstance(done, Refused) and done.reason is Refusal.FENCED:
            logger.warning("nothing is deleted any more: a newer owner has %s", seat.storage.root)
            return False
        return True

    def _append(
        self,
        seat: Seat,
        going: Going,
        together: frozenset[str],
        *,
        deadline_s: float = 60.0,
        at_once: bool = False,
    ) -> Appended | Refused[Refusal]:
        """Owners: the delete in this domain's log; from there on its bytes are the eraser's."""
        seal, save_id = going.seal, going.seal.save_id
        seat.spared.add(save_id)  # before the entry: clearing must not see it in between
        program = retire(
            seal,
            means_of(seat),
            self._run.generation,
            known_of(seat),
            reason=going.reason,
            going=together,
        )
        done = drive(program, seat.storage, deadline_s=deadline_s)
        _learned(seat, done.state)
        if not done.state.save(save_id).deleted:
            seat.spared.discard(save_id)
        if isinstance(done, Appended):
            logger.info("%s is deleted (%s)", seat.storage.uri(seal.name), going.reason)
        if self._eraser is not None:
            mine = [s for s in waiting(done.state) if s.save_id == save_id]
            self._eraser.adopt(mine, going.reason, at_once=at_once)
        return done

    def _adopt_unsure(self, eraser: Eraser) -> None:
        """Deletes that seemed to fail and lie in the log after all: their answer was lost."""
        state = self._run.seat.known.state
        if self._unentered and state is not None:
            found = [seal for seal in waiting(state) if seal.save_id in self._unentered]
            eraser.adopt(found)
            for seal in found:
                self._unentered.pop(seal.save_id)


# -- small things ---------------------------------------------------------------------------


def _halfway(views: Views) -> list[Going]:
    """Saves that one reached domain deleted and another did not: its process died in between."""
    found = []
    for save_id in living(views):
        seal = seal_of(save_id, views)
        if seal is None or standing(save_id, views) is not Standing.DELETED:
            continue
        states = [view.save(save_id) for view in views.values()]
        if any(save.seal is not None and not save.deleted for save in states):
            found.append(Going(seal, "begun elsewhere"))
    return found


def _views(said: Sequence[_Said]) -> dict[str, LogState]:
    return dict(s.view for s in said if s.view is not None)


def _holds(seat: Seat, save_id: str) -> bool:
    """Whether this rank owns a log that holds the save's seal."""
    state = seat.known.state
    return seat.placement.is_owner and state is not None and state.save(save_id).seal is not None


def _learned(seat: Seat, state: LogState) -> None:
    seat.known.learn(state)
    seat.touch_log_later()


def _not_live(save_id: str, where: object) -> NotFoundError:
    return NotFoundError(
        f"save {save_id} is not a live checkpoint of the run",
        uri=where,
        hint="see steps or list_checkpoints() for what is there",
    )
