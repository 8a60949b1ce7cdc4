"""Carries retention out: decided together after a commit, entered in every log, then bytes deleted.

    after_commit    every owner folds its log, the coordinator decides once       (collective)
                    every owner of a listed domain appends the deletes            (collective)
                    the bytes are removed when ``grace_s`` is over                (a thread per owner)
    delete          the same for one save that the caller chose; failures are raised

``after_commit`` is called after the successor's commit and never before. A failure in it is
reported (``DeleteFailed``, and one line in the log), tried again after later commits, less and less
often, and never raised: a checkpoint that cannot be deleted is no reason to stop training. The next
owner of the run finishes what a process leaves undone.

``Eraser`` removes the bytes; only the owner of a domain has one:

    eraser.adopt(seals)     their deletes are in the log; their bytes stay for ``grace_s`` from now
    eraser.go_on()          begins with all that is due, in a thread of its own; a timer does the rest
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptfs.commit.decisions import (
    BY_NAME,
    Cause,
    Deletable,
    Refusal,
    half_deleted,
    inherited_pins,
    reason_to_keep,
    waiting,
)
from ckptfs.commit.delete.deletion_steps import Erasure, erase_retired, pin, retire
from ckptfs.commit.log.append import Appended, RefusedAppend, catch_up_again
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive, take_turns
from ckptfs.commit.ownership.background_owner import Background
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.session import RunSession, View, collect_views, step_with_views
from ckptfs.commit.state import catalog, seal_of
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    CommitInDoubtError,
    ControlPlaneLostError,
    DeadlineError,
    FencedError,
    NotFoundError,
    StateError,
    StorageError,
)
from ckptfs.events import Counters, Deleted, DeleteFailed, Event, Retained
from ckptfs.retention.policy import (
    Keep,
    needs_text,
    plan_retention,
    short_of,
)
from ckptfs.storage.inflight import log_fields

__all__ = ["Backoff", "Clock", "Eraser", "Retirer", "Tell", "failure_of"]

logger = logging.getLogger("ckptfs.retention")

_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 3600.0

Tell = Callable[[Event], None]
Clock = Callable[[], float]  # seconds that only grow: time.monotonic


@dataclass(slots=True)
class Backoff:
    """How often something failed in a row, and when it may be tried again."""

    failures: int = 0
    until_s: float = 0.0

    def failed(self, now_s: float) -> bool:
        """Note a failure; return whether it was the first.

        The next try may come at once, later ones less and less often.
        """
        self.failures += 1
        pause_s = 0.0 if self.failures == 1 else _FIRST_PAUSE_S * 2 ** (self.failures - 2)
        self.until_s = now_s + min(pause_s, _LONGEST_PAUSE_S)
        return self.failures == 1


@dataclass(slots=True)
class _PendingDelete:
    """A deleted save with bytes in this domain.

    Attributes:
        due_s: When its grace is over.
        busy: Its bytes are being removed.
    """

    seal: Seal
    reason: str
    due_s: float
    backoff: Backoff
    busy: bool = False


class Eraser:
    """Removes the bytes of one domain's deleted saves, each when its grace is over. Owners only."""

    def __init__(self, run: Run, grace_s: float, tell: Tell, clock: Clock) -> None:
        self._run, self._grace_s, self._tell, self._clock = run, grace_s, tell, clock
        self._background = Background()
        self._background.end_with(self)
        self._lock = threading.Lock()
        self._pending: dict[str, _PendingDelete] = {}
        self._timer: threading.Timer | None = None
        self._closed = False

    def adopt(
        self, seals: Sequence[Seal], reason: str = "deleted before", *, at_once: bool = False
    ) -> None:
        """Take over the bytes of saves with deletes in the log.

        ``at_once``: readers get no grace.
        """
        due_s = self._clock() + (0.0 if at_once else self._grace_s)
        with self._lock:
            for seal in seals:
                self._run.session.deferred_deletes.add(seal.save_id)
                self._pending.setdefault(
                    seal.save_id, _PendingDelete(seal, reason, due_s, Backoff())
                )

    def go_on(self, *, again: bool = False) -> None:
        """Begin to remove what is due. ``again``: also what failed before."""
        now = self._clock()
        with self._lock:
            if self._closed:
                return
            ready = [
                d
                for d in self._pending.values()
                if d.due_s <= now
                and not d.busy
                and (d.backoff.failures == 0 or (again and d.backoff.until_s <= now))
            ]
            for pending in ready:
                pending.busy = True
            self._arm(now)
        for pending in ready:
            what = f"removing {pending.seal.name}"
            self._background.submit(what, lambda d=pending: self._erase_one(d))  # type: ignore[misc]

    def _arm(self, now_s: float) -> None:
        """Set one timer, for the first grace that ends."""
        due = [d.due_s for d in self._pending.values() if d.due_s > now_s]
        if self._timer is None and due:
            # Weak: during a grace of hours, the timer would keep the run of an abandoned manager.
            self._timer = threading.Timer(min(due) - now_s, _ring, [weakref.ref(self)])
            self._timer.daemon = True
            self._timer.start()

    def ring(self) -> None:
        """Remove what is due, because a grace is over."""
        with self._lock:
            self._timer = None
        self.go_on()

    def _erase_one(self, pending: _PendingDelete) -> None:
        with log_fields(**_fields_of(self._run.session, pending.seal)):
            self._erase(pending)

    def _erase(self, pending: _PendingDelete) -> None:
        session, seal = self._run.session, pending.seal
        again = pending.backoff.failures > 0
        means = session.means().held_by(self._run.generation)
        program = erase_retired(seal.save_id, means, session.fold_from, again=again)
        try:
            turns = take_turns(program, session.turn)
            what, state = session.drive_in_background(turns, self._background)
        except (CkptfsError, OSError) as error:
            with self._lock:
                pending.busy = False
            self._tell(
                failure_of(session, seal, error, first=pending.backoff.failed(self._clock()))
            )
            return
        session.known.learn(state)
        with self._lock:
            pending.busy = False
            if what is Erasure.LATER:
                pending.backoff.failed(self._clock())
                return
            self._pending.pop(seal.save_id, None)
        session.deferred_deletes.discard(seal.save_id)
        if what is Erasure.GONE:
            self._tell(Deleted(str(session.storage.uri(seal.name)), seal.save_id, pending.reason))

    def debris(self) -> int:
        """Return how many saves still have bytes although their grace is over."""
        now = self._clock()
        with self._lock:
            return sum(1 for d in self._pending.values() if d.due_s <= now)

    def drain(self, timeout_s: float) -> bool:
        """Wait for the removals that have begun, for up to ``timeout_s`` seconds.

        Returns whether they ended.
        """
        return self._background.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the removals that have begun, and begin no other."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        done = self._background.close(timeout_s)
        with self._lock:
            left = len(self._pending)
        if left:
            where = self._run.session.storage.root
            logger.info("%d deleted saves in %s are left for the next owner to remove", left, where)
        return done


def _ring(eraser: weakref.ref[Eraser]) -> None:
    alive = eraser()
    if alive is not None:
        alive.ring()


def failure_of(
    session: RunSession, seal: Seal, error: BaseException, *, first: bool
) -> DeleteFailed:
    """Return the event of a failed delete; log it as a warning the first time."""
    uri = session.storage.uri(seal.name)
    level = logging.WARNING if first else logging.DEBUG
    logger.log(level, "%s could not be deleted and is tried again later: %s", uri, error)
    return DeleteFailed(str(uri), seal.save_id, str(error))


R = TypeVar("R")

ENTRY_S = 10.0  # how long to try an entry that no caller waits for: the next commit tries again


@dataclass(frozen=True, slots=True)
class _RankReport:
    """What one rank contributes.

    Attributes:
        view: An owner's log.
        roots: The saves that this rank still needs.
        at: The step that the run has reached.
    """

    view: View | None
    roots: frozenset[str]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The decision, the same on every rank.

    Attributes:
        halfway: Saves that are deleted in one domain and not yet in another.
        pins: The pinned saves that were replaced, each with the save that takes the pin over.
    """

    kept_count: int
    victims: tuple[Deletable, ...]
    halfway: tuple[Deletable, ...]
    pins: tuple[tuple[str, str], ...]


class Retirer:
    """Retention of one held run, seen from one rank.

    ``after_commit``, ``pin`` and ``delete`` are collective. Make it after the claim and before the
    first save, on a run that was claimed with ``defer_deletes`` if there is a grace.

    Args:
        run: The held run.
        keep: The policy.
        mine: Whether a save is the manager's.
        grace_s: For how many seconds a deleted save stays whole for readers that found it before.
        tell: Receives Retained, Deleted and DeleteFailed; the latter two from a thread of an owner.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        run: Run,
        keep: Keep,
        is_ours: Callable[[Seal], bool],
        *,
        grace_s: float = 0.0,
        tell: Tell = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._run, self._keep, self._is_ours = run, keep, is_ours
        self._tell, self._clock = tell, clock
        self._unentered: dict[str, Backoff] = {}
        self._eraser: Eraser | None = None
        if run.session.placement.is_owner:
            self._eraser = Eraser(run, grace_s, tell, clock)
            state = run.session.known.state
            self._eraser.adopt([] if state is None else waiting(state))
            self._eraser.go_on()

    def after_commit(
        self, session: RunSession, roots: Collection[str] = (), *, at: int | None = None
    ) -> Retained | None:
        """Delete what the policy does not keep. Collective on the session's control, after a commit.

        ``roots`` are save_ids that this rank still needs; those of all ranks count. ``at`` is the
        step that the run has reached, equal on all ranks: later steps stay; with None they do not.
        Returns None if it could not be decided this time; the log says why. Never raises a
        CkptfsError.
        """
        retained = None
        with log_fields(**_fields_of(session)):
            try:
                retained = self._retain(session, roots, at)
                self._tell(retained)
            except CkptfsError as error:
                logger.warning("retention failed and tries again after the next commit: %s", error)
        if self._eraser is not None:
            self._adopt_unsure(self._eraser)
            self._eraser.go_on(again=True)
        return retained

    def pin(self, session: RunSession, save_id: str, *, pinned: bool = True) -> None:
        """Keep a save whatever the policy says, until it is unpinned.

        Collective; survives restarts. Raises NotFoundError if it is not a live save of the run,
        FencedError if a newer owner has the run, and CollectiveError, with the outcome "unknown", if
        an owner could not write: a pin may then be set all the same, an unpinning is not.
        """
        where = session.storage.uri("")

        def live(reports: Sequence[_RankReport]) -> None:
            if reason_to_keep(save_id, _views(reports), (Cause.NOT_LIVE,)) is not None:
                raise _not_live(save_id, where)

        self._step_with_logs(session, "pin", (), live)

        def enter() -> Refusal | None:
            if not _holds(session, save_id):
                return None
            done = self._enter_pin(session, save_id, pinned=pinned)
            if isinstance(done, RefusedAppend) and done.state.save(save_id).pinned is not pinned:
                return done.reason
            return None

        def judge(refusals: Sequence[Refusal | None]) -> None:
            if Refusal.FENCED in refusals:
                raise FencedError("a newer owner has the run", uri=where)
            if any(refusals):
                raise _not_live(save_id, where)

        with _in_doubt():
            session.control.step("pin.enter", enter, judge)

    def delete(
        self,
        session: RunSession,
        save_id: str,
        *,
        reason: str = "deleted by name",
        at_once: bool = False,
    ) -> None:
        """Delete one save, whatever the policy says. Collective.

        Its bytes are removed as usual, or with ``at_once`` without the grace for readers. Raises
        NotFoundError if it is not a live save of the run, StateError if it is pinned or a save that
        stays uses its files, FencedError if a newer owner has the run, and CollectiveError, with the
        outcome "unknown", if an owner could not write. A save that is deleted in one log is deleted;
        the next commit or owner completes the others.
        """
        where = session.storage.uri("")

        def decide(reports: Sequence[_RankReport]) -> Deletable:
            views = _views(reports)
            seal, obstacle = seal_of(save_id, views), reason_to_keep(save_id, views, BY_NAME)
            if seal is None or (obstacle is not None and obstacle.cause is Cause.NOT_LIVE):
                raise _not_live(save_id, where)
            if obstacle is not None:
                raise StateError(f"{seal.name} is not deleted: {obstacle.text}", uri=where)
            return Deletable(seal, reason)

        victim = self._step_with_logs(session, "delete", (), decide)

        def enter() -> Refusal | None:
            if not _holds(session, save_id):
                return None
            self._unentered.setdefault(save_id, Backoff())  # checked again if the answer is lost
            done = self._append(session, victim, frozenset({save_id}), at_once=at_once)
            self._unentered.pop(save_id)
            gone = done.state.save(save_id).deleted
            return None if gone or not isinstance(done, RefusedAppend) else done.reason

        def judge(refusals: Sequence[Refusal | None]) -> None:
            if Refusal.FENCED in refusals:
                raise FencedError("a newer owner has the run", uri=where)
            if any(refusals):
                raise StateError(f"{victim.seal.name} has just been pinned or used", uri=where)

        with log_fields(**_fields_of(session, victim.seal)), _in_doubt():
            session.control.step("delete.enter", enter, judge)
        if self._eraser is not None:
            self._eraser.go_on()

    def make_room(self, timeout_s: float = 60.0) -> bool:
        """Wait for the removals under way, so that keep_latest + 1 saves fit on the disk. Local.

        An owner calls it before it writes the next save; on other ranks it does nothing. Returns
        whether all removals ended within ``timeout_s`` seconds.
        """
        return self._eraser is None or self._eraser.drain(timeout_s)

    def debris(self) -> int:
        """Return how many deleted saves still have bytes in this rank's domain after their grace.

        Local.
        """
        return 0 if self._eraser is None else self._eraser.debris()

    def log_needs(self, per_rank: Sequence[Counters]) -> str | None:
        """Log how much space the policy needs in this rank's domain. Local, after the first save.

        It is a warning if that space is not free. ``per_rank`` is that of ``SaveResult``. Returns
        the text; None on ranks that are not owners.
        """
        session = self._run.session
        if self._eraser is None:
            return None
        size_bytes = sum(per_rank[rank].size_bytes for rank in session.placement.mine.ranks)
        text, level = needs_text(size_bytes, self._keep), logging.INFO
        try:
            space = session.storage.space()
        except StorageError as error:
            logger.debug("how much space is free is not known: %s", error)
            space = None
        if space is not None and space.free_bytes is not None:
            short = short_of(size_bytes, self._keep, space.free_bytes, self._held())
            if short:
                text, level = f"{text}; {short} bytes more than are free", logging.WARNING
        logger.log(level, "%s: %s", session.storage.root, text, extra=_fields_of(session))
        return text

    def _held(self) -> int:
        """Return how many saves of the manager are here already."""
        session = self._run.session
        state = session.known.state
        views = {} if state is None else {session.placement.mine.id: state}
        return sum(1 for live in catalog(views) if self._is_ours(live.seal))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish removals under way; return whether none is left running.

        Local, before the run's release. Saves within their grace keep their bytes: the next owner
        of the run removes them.
        """
        return self._eraser is None or self._eraser.close(timeout_s)

    # -- the two collective steps -------------------------------------------------------

    def _retain(self, session: RunSession, roots: Collection[str], at: int | None) -> Retained:
        verdict = self._step_with_logs(session, "retain", roots, self._decide, at)
        if verdict.victims or verdict.halfway or verdict.pins:
            # A barrier: when a save returns on any rank, the log no longer has what was deleted.
            session.control.step("retire", lambda: self._enter_all(session, verdict))
        names = tuple(str(session.storage.uri(victim.seal.name)) for victim in verdict.victims)
        return Retained(verdict.kept_count, names)

    def _step_with_logs(
        self,
        session: RunSession,
        label: str,
        roots: Collection[str],
        decide: Callable[[Sequence[_RankReport]], R],
        at: int | None = None,
    ) -> R:
        def look(ids: Collection[str]) -> _RankReport:
            return self._survey(session, roots, ids, at)

        return step_with_views(session.control, label, look, lambda report: report.view, decide)

    def _survey(
        self, session: RunSession, roots: Collection[str], ids: Collection[str], at: int | None
    ) -> _RankReport:
        view = None
        if session.placement.is_owner:
            state = drive(catch_up_again(session.fold_from), session.storage)
            session.known.learn(state)
            view = (session.placement.mine.id, state.to_send(ids))
        return _RankReport(view, frozenset(roots), at)

    def _decide(self, reports: Sequence[_RankReport]) -> _Verdict:
        views = _views(reports)
        pins = tuple(inherited_pins(views))
        roots = frozenset(new for _, new in pins).union(*(s.roots for s in reports))
        plan = plan_retention(views, self._keep, self._is_ours, roots, at=reports[0].at)
        return _Verdict(len(plan.kept), plan.going, tuple(half_deleted(views)), pins)

    def _enter_all(self, session: RunSession, verdict: _Verdict) -> None:
        """Append the entries of this domain, oldest save first; owners only.

        A failure stops no other.
        """
        for old, new in verdict.pins:
            self._pass_on(session, old, new)
        batch = frozenset(victim.seal.save_id for victim in verdict.victims)
        todo = [(g, batch) for g in verdict.victims] + [(g, frozenset()) for g in verdict.halfway]
        for victim, ids in todo:
            if not _holds(session, victim.seal.save_id):
                continue
            with log_fields(**_fields_of(session, victim.seal)):
                entered = self._enter(session, victim, ids)
            if not entered:
                return

    def _pass_on(self, session: RunSession, old: str, new: str) -> None:
        """Pin the successor first, so that at no moment neither is pinned."""
        try:
            for save_id, pinned in ((new, True), (old, False)):
                if _holds(session, save_id):
                    self._enter_pin(session, save_id, pinned=pinned, deadline_s=ENTRY_S)
        except (StorageError, CommitInDoubtError) as error:
            logger.warning("the pin of a replaced save will be moved later: %s", error)

    def _enter_pin(
        self, session: RunSession, save_id: str, *, pinned: bool, deadline_s: float = 60.0
    ) -> Appended | RefusedAppend[Refusal]:
        """Append the pin, or its end, to this domain's log; owners only."""
        program = pin(
            save_id, session.means(), self._run.generation, session.fold_from, pinned=pinned
        )
        done = drive(program, session.storage, deadline_s=deadline_s)
        _learned(session, done.state)
        return done

    def _enter(self, session: RunSession, victim: Deletable, together: frozenset[str]) -> bool:
        """Append one delete of retention; return False once a newer owner has the run."""
        seal, save_id = victim.seal, victim.seal.save_id
        backoff = self._unentered.setdefault(save_id, Backoff())
        if self._eraser is None or self._clock() < backoff.until_s:
            return True
        try:
            done = self._append(session, victim, together, deadline_s=ENTRY_S)
        except (StorageError, CommitInDoubtError) as error:
            first = backoff.failed(self._clock())
            self._tell(failure_of(session, seal, error, first=first))
            return True
        self._unentered.pop(save_id)
        if isinstance(done, RefusedAppend) and done.reason is Refusal.FENCED:
            logger.warning("retention has stopped: a newer owner has %s", session.storage.root)
            return False
        return True

    def _append(
        self,
        session: RunSession,
        victim: Deletable,
        together: frozenset[str],
        *,
        deadline_s: float = 60.0,
        at_once: bool = False,
    ) -> Appended | RefusedAppend[Refusal]:
        """Append the delete to this domain's log, and give its bytes to the eraser; owners only."""
        seal, save_id = victim.seal, victim.seal.save_id
        # Before the entry: clearing must not see it in between.
        session.deferred_deletes.add(save_id)
        program = retire(
            seal,
            session.means().held_by(self._run.generation),
            session.fold_from,
            reason=victim.reason,
            together=together,
        )
        done = drive(program, session.storage, deadline_s=deadline_s)
        _learned(session, done.state)
        if not done.state.save(save_id).deleted:
            session.deferred_deletes.discard(save_id)
        if isinstance(done, Appended):
            logger.info("%s is deleted (%s)", session.storage.uri(seal.name), victim.reason)
        if self._eraser is not None:
            seals = [s for s in waiting(done.state) if s.save_id == save_id]
            self._eraser.adopt(seals, victim.reason, at_once=at_once)
        return done

    def _adopt_unsure(self, eraser: Eraser) -> None:
        """Adopt deletes that seemed to fail but are in the log: only their answer was lost."""
        state = self._run.session.known.state
        if self._unentered and state is not None:
            found = [seal for seal in waiting(state) if seal.save_id in self._unentered]
            eraser.adopt(found)
            for seal in found:
                self._unentered.pop(seal.save_id)


# -- small things ---------------------------------------------------------------------------


@contextmanager
def _in_doubt() -> Iterator[None]:
    """Give an error that may come after an entry was written the outcome "unknown".

    The entry may be in the log of the rank that failed or was lost, and in those of other domains.
    """
    try:
        yield
    except (CollectiveError, ControlPlaneLostError, DeadlineError) as error:
        error.outcome = "unknown"
        raise


def _fields_of(session: RunSession, seal: Seal | None = None) -> dict[str, Any]:
    """Return the fields of log records about a save; without a seal, about the run."""
    fields: dict[str, Any] = {"run": str(session.storage.root), "rank": session.control.rank}
    return fields if seal is None else {**fields, "step": seal.step, "save_id": seal.save_id}


def _views(reports: Sequence[_RankReport]) -> dict[str, LogState]:
    return collect_views(report.view for report in reports)


def _holds(session: RunSession, save_id: str) -> bool:
    """Whether this rank owns a log that holds the save's seal."""
    state = session.known.state
    return session.placement.is_owner and state is not None and state.save(save_id).seal is not None


def _learned(session: RunSession, state: LogState) -> None:
    session.known.learn(state)
    session.touch_log_later()


def _not_live(save_id: str, where: object) -> NotFoundError:
    return NotFoundError(
        f"save {save_id} is not a live checkpoint of the run",
        uri=where,
        hint="see steps or list_checkpoints() for what exists",
    )
