"""Tiers of a run: every committed checkpoint is copied to other places, in the background.

    CheckpointManager("/nvme/run", keep_latest=2, copies=[Copy("s3://bucket/run", keep=Keep(10))])

    commit on the primary ---> after_commit (local, at once) ---> the copier's thread, on every rank
                               the save is a retention root       look    the primary's logs
                               of the primary from here on        round   of each copy

    drain.round(views)
      open     session, claim (RunBusyError: another job fills the copy)  at the first round, then held
      plan     both logs folded -> what to copy, in commit order       coordinator
      copy     one save after another: CopyCommitted, or CopyFailed
      retain   the copy's own retention, after each commit

Every rank makes a copier with a control of its own. Rounds are collective, one for each commit and
each ``wait``, so they come in the same order on every rank. What a dead job left uncopied is copied
first: the first round compares the catalogs. Nothing here ever fails a save.

A failure is reported as an event, tried again in a later round, less and less often, and never
raised: a copy that cannot be made is no reason to stop training. A save that is damaged at the
source is given up after a few tries, so that it does not hold back newer ones; a save that the
copy's storage refuses waits for as long as that takes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptfs.commit.log.append import catch_up, catch_up_again
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Mode, Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.save.shared_attempt import origin_of
from ckptfs.commit.session import (
    Known,
    Place,
    RunSession,
    View,
    agree_uri,
    collect_views,
    open_session,
    step_with_views,
)
from ckptfs.commit.state import Views, catalog
from ckptfs.control.control import Control
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    ControlPlaneLostError,
    DeadlineError,
    FencedError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    StateError,
)
from ckptfs.events import CopyCommitted, CopyFailed, Event, Retained, SaveResult
from ckptfs.replication.backlog import Every, One, Policy, Reached, Todo, plan_copies
from ckptfs.replication.checkpoint_copy import Manner, copy_checkpoint, copy_parts
from ckptfs.retention.deletion import Backoff, Clock, Retirer, Tell
from ckptfs.retention.policy import Keep
from ckptfs.storage.inflight import log_fields
from ckptfs.topology.storage_domains import Scope
from ckptfs.uri import Uri, options_of

__all__ = ["Copier", "Copy", "Drain", "Goal", "copies_of", "open_copies"]

logger = logging.getLogger("ckptfs.replication")

_DAMAGED = (IntegrityError, IncompleteCheckpointError, ManifestError)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a copy is to be.

    Attributes:
        uri: As the user gave it.
        place: How to reach it.
        policy: What is copied and kept.
        attempts: How often a damaged save is tried.
        takeover: As for the manager.
        grace_s: How many seconds a deleted save stays whole.
        begin_again: Its retention may also delete saves that are further than what is copied.
    """

    uri: Any
    place: Place
    policy: Policy
    attempts: int
    takeover: Takeover = Takeover.AUTO
    grace_s: float = 0.0
    begin_again: bool = False


@dataclass(frozen=True, slots=True)
class _RankReport:
    """What one rank contributes to a round."""

    urgent: bool
    stopped: bool


@dataclass(frozen=True, slots=True)
class _RoundNeeds:
    """What a round has to do.

    Attributes:
        rests: There is nothing to do now.
        waits: The names of the saves that wait for this copy.
        ids: The save_ids of these.
    """

    rests: bool
    waits: tuple[str, ...]
    ids: tuple[str, ...] = ()


@dataclass
class _Tries:
    """The results of earlier tries.

    Only the coordinator plans, so only its ``settled`` and ``backoff`` matter.

    Attributes:
        ids: The ids that were tried.
        settled: The save_ids that no longer need a copy.
        reached: How far the copy is.
    """

    ids: set[str] = field(default_factory=set)
    damaged: Counter[str] = field(default_factory=Counter)
    settled: set[str] = field(default_factory=set)
    reached: Reached | None = None
    backoff: Backoff = field(default_factory=Backoff)


class Drain:
    """One copy. Only the copier's thread calls it, over the control of ``source``."""

    def __init__(
        self, source: RunSession, goal: Goal, tell: Tell, stopped: threading.Event, clock: Clock
    ) -> None:
        self._source, self._goal, self._tell = source, goal, tell
        self._stopped, self._clock = stopped, clock
        self._run: Run | None = None
        self._retirer: Retirer | None = None
        self._tries = _Tries()
        self._lost = False
        self.is_planned = False  # equal on all ranks; once True, live saves are enough to plan by

    def is_settled(self, save_id: str) -> bool:
        """Whether a save of the primary does not, or no longer, wait for this copy.

        Coordinator only.
        """
        return self._lost or save_id in self._tries.settled

    def round(self, views: Views, *, urgent: bool) -> tuple[str, ...]:
        """Copy what there is to copy; return the names that are left for a later round. Collective.

        ``views`` are the primary's logs; only the coordinator's are used. ``urgent``: do not rest
        after failures; it counts if any rank says so. Raises ControlPlaneLostError or DeadlineError
        if the ranks lost each other.
        """
        control = self._source.control
        report = _RankReport(urgent, self._stopped.is_set())
        turn = control.step("copy: turn", lambda: report, lambda all_: self._turn(views, all_))
        if turn.rests:
            return turn.waits
        try:
            run = self._opened()
            copies = step_with_views(
                control,
                "copy: plan",
                lambda ids: self._survey(run.session, (*ids, *turn.ids)),
                lambda view: view,
                lambda found: self._plan(views, collect_views(found), run),
            ).copies
            self.is_planned = True
        except CkptfsError as error:
            self._cannot_open(error)
            return turn.waits
        left = [one.seal.name for one in copies]
        for one in copies:
            with log_fields(step=one.seal.step, save_id=one.seal.save_id):
                copied = self._copy(one, run, views)
            if not copied:
                break
            left.pop(0)
        return tuple(left)

    def close(self, timeout_s: float) -> None:
        """Release the copy's run to the next owner. Local. A second call does nothing."""
        if self._retirer is not None:
            self._retirer.close(timeout_s)
        if self._run is not None:
            self._run.release()

    # -- on the coordinator ---------------------------------------------------------------

    def _turn(self, views: Views, reports: Sequence[_RankReport]) -> _RoundNeeds:
        waits = [x.seal for x in catalog(views) if not self.is_settled(x.seal.save_id)]
        rests = self._clock() < self._tries.backoff.until_s and not any(s.urgent for s in reports)
        return _RoundNeeds(
            rests or not waits or any(s.stopped for s in reports),
            tuple(seal.name for seal in waits),
            tuple(seal.save_id for seal in waits),
        )

    def _plan(self, views: Views, target_views: Views, run: Run) -> Todo:
        if any(view.generation > run.generation for view in target_views.values()):
            raise FencedError("another job took the copy's run", uri=run.uri)
        given_up = [s for s, n in self._tries.damaged.items() if n >= self._goal.attempts]
        todo = plan_copies(
            views,
            target_views,
            self._goal.policy,
            given_up=given_up,
            tried=self._tries.ids,
            before=self._tries.reached,
        )
        self._tries.settled |= todo.settled
        self._tries.reached = todo.reached
        return Todo(todo.copies)  # only the coordinator needs the rest

    # -- on every rank --------------------------------------------------------------------

    def _opened(self) -> Run:
        if self._run is None:
            control, goal = self._source.control, self._goal
            with contextlib.ExitStack() as stack:
                root = agree_uri(control, goal.uri)
                session = stack.enter_context(open_session(root, control, goal.place, write=True))
                run = claim(
                    session,
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

    def _survey(self, session: RunSession, ids: Collection[str]) -> View | None:
        if not session.placement.is_owner:
            return None
        state = drive(catch_up_again(session.fold_from), session.storage)
        session.known.learn(state)
        return session.placement.mine.id, state.to_send(ids) if self.is_planned else state

    def _copy(self, one: One, run: Run, views: Views) -> bool:
        """Copy one save; return whether to continue with the next."""
        self._tries.ids.add(one.save_id)
        try:
            result = self._copied(one, run)
        except CkptfsError as error:
            return self._failed(one, error)
        self._tries.settled.add(one.seal.save_id)
        if self._tries.reached is not None:
            self._tries.reached = self._tries.reached.with_save(one.seal, views)
        self._tries.backoff = Backoff()
        uri = str(self._source.storage.uri(one.seal.name))
        logger.info("%s is copied to %s", uri, result.uri)
        self._tell(CopyCommitted(uri, result.uri, result.total.size_bytes, result.wall_s))
        if self._retirer is not None:
            at = None if self._goal.begin_again else one.seal.step
            self._retirer.after_commit(run.session, at=at)
        return True

    def _copied(self, one: One, run: Run) -> SaveResult:
        seal = one.seal
        if seal.artifact is Kind.DIRECTORY:
            self._free_name(seal, run)
        if not seal.parts:
            return copy_checkpoint(
                self._source,
                seal,
                run.session,
                run=run.generation,
                save_id=one.save_id,
                stopped=self._stopped,
            )
        began, manner = time.perf_counter(), Manner(stopped=self._stopped)
        replaces = seal.artifact is not Kind.DIRECTORY
        committed = copy_parts(
            self._source,
            seal,
            run,
            name=seal.name,
            save_id=one.save_id,
            manner=manner,
            replaces=replaces,
        )
        uri, wall_s = str(run.session.storage.uri(seal.name)), time.perf_counter() - began
        return committed.result(uri, seal.step, self._source.control.rank, wall_s)

    def _free_name(self, seal: Seal, run: Run) -> None:
        """Delete the copy's save of this name if the run has deleted its own. Collective.

        Files with plain names cannot be replaced. The run deleted its save of the name because the
        step came again; the copy deletes it too, before the new save is copied.
        """
        retirer, origin = self._retirer, origin_of(seal.save_id)

        def decide(found: Sequence[View | None]) -> str | None:
            lives = (live.seal for live in catalog(collect_views(found)))
            other = next((s for s in lives if s.name == seal.name), None)
            return None if other is None or origin_of(other.save_id) == origin else other.save_id

        save_id = step_with_views(
            run.session.control,
            "copy: what has the name",
            lambda ids: self._survey(run.session, ids),
            lambda view: view,
            decide,
        )
        if retirer is None:
            raise AssertionError("made with the run")
        if save_id is not None:
            logger.warning("save %s of %s in a copy is replaced", save_id, seal.name)
            retirer.delete(run.session, save_id, reason="a new save replaces it", at_once=True)
        retirer.make_room()

    def _failed(self, one: One, error: CkptfsError) -> bool:
        """Report a failure; return whether to continue with the next save.

        That is so only if this one will never be copied.
        """
        self._tell_failure(self._source.storage.uri(one.seal.name), error)
        _raise_if_apart(error)
        if isinstance(error, FencedError):
            self._give_the_copy_up(error)
            return False
        if _is_damage(error):
            self._tries.damaged[one.seal.save_id] += 1
            if self._tries.damaged[one.seal.save_id] >= self._goal.attempts:
                self._tries.settled.add(one.seal.save_id)
                logger.error("%s is damaged, so it is not copied: %s", one.seal.name, error)
                return True
        first = self._tries.backoff.failed(self._clock())
        level = logging.WARNING if first else logging.INFO
        logger.log(level, "%s is copied later: %s", one.seal.name, error)
        return False

    def _cannot_open(self, error: CkptfsError) -> None:
        """Report that the copy cannot be opened.

        Only once: it may stay unreachable for many commits.
        """
        _raise_if_apart(error)
        if isinstance(error, FencedError):
            self._give_the_copy_up(error)
            return
        if self._tries.backoff.failed(self._clock()):
            self._tell_failure(self._source.storage.root, error)
            logger.warning("copies to %s are waiting: %s", self._goal.uri, error)
        else:
            logger.info("copies to %s are still waiting: %s", self._goal.uri, error)

    def _give_the_copy_up(self, error: FencedError) -> None:
        self._lost = True
        logger.warning("copying to %s has stopped: %s", self._goal.uri, error)

    def _tell_failure(self, uri: Uri, error: CkptfsError) -> None:
        self._tell(CopyFailed(str(uri), str(Uri.parse(self._goal.uri)), str(error)))

    def _tell_of_retention(self, event: Event) -> None:
        # A Retained event names no run, so it would look like the primary's.
        if not isinstance(event, Retained):
            self._tell(event)


def _raise_if_apart(error: CkptfsError) -> None:
    if isinstance(error, ControlPlaneLostError | DeadlineError):
        raise error  # the ranks have lost contact with each other


def _is_damage(error: CkptfsError) -> bool:
    """Whether the save itself is at fault, and not the place that it is copied to."""
    if isinstance(error, CollectiveError):
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _DAMAGED}
        return any(failure.type in names for failure in error.failures.values())
    return isinstance(error, _DAMAGED)


LAST_S = 30.0  # how long a close waits for what is under way, and again after asking it to stop


@dataclass(frozen=True, slots=True)
class Copy:
    """Another place for the checkpoints of a run.

    Another word for ``every``, or ``attempts`` below 1, is a StateError.

    Attributes:
        uri: A run of its own, on any storage.
        keep: What is kept there, as for the manager; everything by default.
        every: Of several checkpoints that wait, "all" that ``keep`` would keep, or only the
            "latest": then the primary never holds back more than one for a copy that is slow or
            cannot be reached.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.
        scope: "auto", "shared" or "node", as for ``ckptfs.save``.
        domain: A name in place of ``scope``, as for ``ckptfs.save``; None: by ``scope``.
        attempts: How often a checkpoint that is damaged on the primary is tried before newer ones
            go first.
    """

    uri: Any
    keep: Keep = field(default_factory=Keep)
    every: Literal["all", "latest"] = "all"
    storage_options: Mapping[str, Any] | None = None
    scope: Scope = "auto"
    domain: str | None = None
    attempts: int = 3

    def __repr__(self) -> str:
        # Its URI and its options may hold credentials.
        return f"Copy({str(Uri.parse(self.uri))!r}, keep={self.keep!r}, every={self.every!r})"

    def __post_init__(self) -> None:
        Uri.parse(self.uri)
        if self.every not in ("all", "latest"):
            raise StateError(f'Copy.every is {self.every!r}; it is "all" or "latest"')
        if self.attempts < 1:
            raise StateError(f"Copy.attempts is {self.attempts}; it counts tries, from 1")

    @property
    def place(self) -> Place:
        """How to reach it."""
        options = {**options_of(self.uri), **(self.storage_options or {})}
        return Place(options, self.scope, self.domain)


def copies_of(given: Sequence[Any], run_uri: Any) -> tuple[Copy, ...]:
    """Return the Copy objects for ``copies=``, which takes URIs or Copy objects. Pure.

    Raises StateError if one of them is the run itself, or is given twice.
    """
    copies = tuple(one if isinstance(one, Copy) else Copy(one) for one in given)
    known = {Uri.parse(run_uri)}
    for copy in copies:
        uri = Uri.parse(copy.uri)
        if uri in known:
            raise StateError(
                "a copy must have a place of its own, apart from the run and the other copies",
                uri=uri,
                hint="pass each place once",
            )
        known.add(uri)
    return copies


@contextlib.contextmanager
def open_copies(copies: Sequence[Copy], control: Control) -> Iterator[tuple[RunSession, ...]]:
    """Yield read-only sessions of the copies, for a restore from the place that is furthest.

    Collective. A copy that was never written is an empty run. A copy that cannot be reached is an
    error: it may hold the newest checkpoint, and only a person may decide to continue without it.
    """
    with contextlib.ExitStack() as stack:
        sessions = []
        for copy in copies:
            root = agree_uri(control, copy.uri)
            sessions.append(
                stack.enter_context(open_session(root, control, copy.place, write=False))
            )
        yield tuple(sessions)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One round for the thread. ``left``: what it could not copy."""

    urgent: bool
    done: threading.Event = field(default_factory=threading.Event)
    left: list[str] = field(default_factory=list)


class Copier:
    """All copies of a held run, seen from one rank. Making it is collective; so is ``wait``.

    Args:
        run: The run that is copied.
        copies: Where to.
        mine: Whether a save is the manager's, for the copies' retention.
        takeover: As for the manager.
        grace_s: The manager's delete_grace_s.
        begin_again: As for the manager.
        tell: Receives CopyCommitted, CopyFailed, Deleted and DeleteFailed, on the copier's thread.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        run: Run,
        copies: Sequence[Copy],
        is_ours: Callable[[Seal], bool],
        *,
        takeover: Takeover = Takeover.AUTO,
        grace_s: float = 0.0,
        begin_again: bool = False,
        tell: Tell = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._control = run.session.control.clone()
        self._stopped = threading.Event()
        # A fold of its own: saves update theirs on another thread.
        self._source = replace(
            run.session, control=self._control, known=Known(run.session.known.state)
        )
        self._drains = tuple(
            Drain(
                self._source,
                Goal(
                    copy.uri,
                    copy.place,
                    Policy(copy.keep, Every(copy.every), is_ours),
                    copy.attempts,
                    takeover,
                    grace_s,
                    begin_again,
                ),
                tell,
                self._stopped,
                clock,
            )
            for copy in copies
        )
        self._lock = threading.Lock()
        self._known = self._first_known(run.session)
        self._turns: _Turns = queue.SimpleQueue()
        self._closed = False
        self._apart = False  # whether the ranks have lost contact with each other
        self._turns.put((self, _Turn(urgent=False)))
        self._thread = threading.Thread(
            target=_work, args=(self._turns,), name="ckptfs-copies", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._turns.put, None).atexit = False

    def after_commit(self, result: SaveResult) -> None:
        """Copy this save too.

        Local; called on every rank after each commit and before retention.
        """
        with self._lock:
            if self._closed:
                return
            self._known.add(result.save_id)
            self._turns.put((self, _Turn(urgent=False)))

    def waiting(self) -> frozenset[str]:
        """Return the save_ids that the primary's retention must keep until they are copied. Local.

        Before the catalogs were compared, these are all save_ids. Only the coordinator knows all of
        them; retention unites those of all ranks.
        """
        with self._lock:
            return frozenset(
                s for s in self._known if not all(drain.is_settled(s) for drain in self._drains)
            )

    def wait(self, timeout_s: float | None = None) -> tuple[str, ...]:
        """Return when what was committed so far is copied, or was tried once more. Collective.

        Returns the names that are left, or the run's URI if they are not known. Raises
        DeadlineError after ``timeout_s`` seconds; copying continues.
        """
        turn = _Turn(urgent=True)
        with self._lock:
            if self._closed:
                return ()
            self._turns.put((self, turn))
        if not turn.done.wait(timeout_s):
            raise DeadlineError(
                f"the copies were not ready within {timeout_s:g} s",
                uri=self._source.storage.root,
                hint="the copies continue; wait again, or pass a longer timeout",
            )
        if turn.left and self._control.rank == 0:
            logger.warning("not copied yet: %s", ", ".join(turn.left))
        return tuple(turn.left)

    def close(self, timeout_s: float = LAST_S) -> bool:
        """Finish the rounds that were begun, then release the copies' runs. Local.

        It waits for up to ``timeout_s`` seconds. A second call does nothing. Returns whether all
        rounds were finished. The next job copies what is left.
        """
        with self._lock:
            if self._closed:
                return not self._thread.is_alive()
            self._closed = True
            self._turns.put(None)
        self._thread.join(timeout_s)
        finished = not self._thread.is_alive()
        if not finished:
            self._stopped.set()
            self._thread.join(LAST_S)
            logger.warning("a copy was interrupted; the next job makes it")
        if self._thread.is_alive():
            # Its storage hangs. After a release another job could enter while this one may still write.
            logger.warning("the runs of the copies were not released: a thread still holds them")
            return False
        for drain in self._drains:
            drain.close(LAST_S)
        self._control.close()
        return finished

    # -- the thread -----------------------------------------------------------------------

    def serve(self, turn: _Turn) -> None:
        """Run one round on the copier's thread."""
        with log_fields(run=str(self._source.storage.root), rank=self._control.rank):
            self._serve(turn)

    def _serve(self, turn: _Turn) -> None:
        turn.left.append(str(self._source.storage.root))
        try:
            if not self._apart:
                turn.left[:] = self._round(urgent=turn.urgent)
        except (ControlPlaneLostError, DeadlineError) as error:
            logger.warning("copying has stopped: %s", error)
            self._apart = True
        except CkptfsError as error:
            # Every rank gets here: the error of a step is the same on all of them.
            logger.warning("copying failed and continues after the next commit: %s", error)
        except Exception:
            logger.exception("this process has stopped copying")
            self._apart = True
            self._control.close()  # the others learn it at their next step
        finally:
            turn.done.set()

    def _round(self, *, urgent: bool) -> tuple[str, ...]:
        """Copy to all places; return the names that are left. Collective."""
        gathered: list[dict[str, LogState]] = []
        with self._lock:
            before = frozenset(self._known)

        def gather(found: Sequence[View | None]) -> None:
            gathered.append(collect_views(found))

        step_with_views(self._control, "copy: look", self._look, lambda view: view, gather)
        views = gathered[0] if gathered else {}
        left = [name for drain in self._drains for name in drain.round(views, urgent=urgent)]
        lives = {x.seal.save_id for x in catalog(views)}
        with self._lock:
            # Deleted, copied everywhere or given up: it no longer has to be remembered.
            self._known -= {
                s for s in before if s not in lives or all(d.is_settled(s) for d in self._drains)
            }
        return tuple(dict.fromkeys(left))

    def _look(self, ids: Collection[str]) -> View | None:
        if not self._source.placement.is_owner:
            return None
        state = drive(catch_up(self._source.fold_from), self._source.storage)
        self._source.known.learn(state)
        # How far a copy is takes the whole log to find out, once; after that it is known.
        sends_all = not all(drain.is_planned for drain in self._drains)
        return self._source.placement.mine.id, state if sends_all else state.to_send(ids)

    def _first_known(self, session: RunSession) -> set[str]:
        """Return all live saves: they wait until the catalogs were compared. Collective."""
        gathered: list[set[str]] = []

        def gather(found: Sequence[View | None]) -> None:
            views = collect_views(found)
            seals = [live.seal for live in catalog(views)]
            gathered.append({seal.save_id for seal in seals})

        step_with_views(
            session.control, "copy: what there is", self._look, lambda view: view, gather
        )
        return gathered[0] if gathered else set()


_Turns = queue.SimpleQueue[tuple[Copier, _Turn] | None]


def _work(turns: _Turns) -> None:
    """Serve rounds on the thread.

    An idle thread keeps no copier alive, so the runs of an abandoned copier are released.
    """
    while (request := turns.get()) is not None:
        copier, turn = request
        copier.serve(turn)
        del request, copier, turn
