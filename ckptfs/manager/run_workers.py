"""What a manager needs from its first save on: the run, the objects that work for it, and one save.

    RunWorkers.start(run_handle, settings, tell)   claims the run; collective
      run        the claimed run: all saves carry its generation
      retirer    retention, after each commit
      copier     copies elsewhere, in the background
      saver      the saves themselves
      worker     the thread of asynchronous saves, with a control of its own
    workers.check_beginning(kind, name, step)      refuses a job that would begin over what earlier ones saved

**A job's place in its run.** A manager has a place once it restored a step (or was given one by
``resumed_at``), was made with ``begin_again``, claimed the run right behind an overwrite, or saved
a full checkpoint. Until then a full checkpoint has to be further than the newest one of earlier
jobs, and every save needs a name that they did not use. From then on nothing is checked: a step of
an earlier job that comes again is replaced, with a line in the log, and retention deletes nothing
that is further than the job has come.

Controls are cloned in one order on all ranks, and closed before the one that they were cloned from.

One save of the manager, and what follows its commit:

    job.run        stage or list, write, seal, project   on failure: SaveFailed, raised
    committed      events, on_commit
    followers      retention, copies, in this order      on failure: logged, tried again at the next commit

The synchronous save runs this on the caller's thread, the asynchronous one on the worker's. Only
the session differs, because its control belongs to one thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.directory_checkpoints.write import (
    LocalFile,
    Publication,
    list_files,
    refuse_own,
    remove_source,
    share_files,
)
from ckptfs.commit.log.entries import Generation, Kind
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.parts.tickets import Decision, SealedPart, Ticket, begin_parts
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import Committed, IfExists, SaveSpec, WrittenPart
from ckptfs.commit.session import RunSession, View, collect_views, step_with_views
from ckptfs.commit.state import Views, catalog, save_named
from ckptfs.control.control import hearing
from ckptfs.dcp.async_api import SaveResources, begin_in_background, submit_pending
from ckptfs.dcp.pending import PendingSave, Phase, Watch
from ckptfs.dcp.planning.save_planner import Share
from ckptfs.dcp.saving import Tell, WriteOptions, followed, save_at
from ckptfs.dcp.staging.buffers import HostBuffers
from ckptfs.dcp.worker import SaveWorker
from ckptfs.errors import CkptfsError, CommitConflictError, DeadlineError
from ckptfs.events import Counters, Event, SaveCommitted, SaveFailed, SaveResult, Written
from ckptfs.manager.run_setup import RunHandle, Settings
from ckptfs.replication.tiers import Copier, open_copies
from ckptfs.retention.deletion import Retirer
from ckptfs.uri import Uri

__all__ = ["FilesJob", "Follower", "Job", "RunWorkers", "Saver", "StartingPoint", "StateJob"]

logger = logging.getLogger("ckptfs.manager")

# Called on every rank after each commit, on the thread and control that saved. Collective.
Follower = Callable[[RunSession, SaveResult], None]


class Job(Protocol):
    """One save: its target, how it is recorded, and how it is made."""

    @property
    def target(self) -> Uri:
        """The URI that the checkpoint will have."""

    @property
    def spec(self) -> SaveSpec:
        """What the attempt needs to know of the save."""

    @property
    def started(self) -> float:
        """When the user called, by ``perf_counter``."""

    def run(self, session: RunSession, tell: Tell, watch: Watch | None) -> SaveResult:
        """Save. Collective; committed when it returns."""


@dataclass(frozen=True, slots=True)
class StateJob:
    """A save of a state, live or staged."""

    state: Mapping[str, Any] | Share
    target: Uri
    spec: SaveSpec
    options: WriteOptions
    started: float

    def run(self, session: RunSession, tell: Tell, watch: Watch | None) -> SaveResult:
        """As ``Job.run``."""
        return save_at(
            self.state,
            session,
            self.target,
            self.spec,
            self.options,
            started=self.started,
            tell=tell,
            watch=watch,
        )


@dataclass(frozen=True, slots=True)
class FilesJob:
    """A save of a local directory, as each node sees it.

    ``consume``: remove it after the commit.
    """

    path: str
    target: Uri
    spec: SaveSpec
    started: float
    consume: bool = False

    def run(self, session: RunSession, tell: Tell, watch: Watch | None) -> SaveResult:
        """As ``Job.run``."""
        control, watch = session.control, watch or Watch()
        watch.enter(Phase.PLAN)
        nodes = [world.node for world in control.worlds]
        domains = [domain.ranks for domain in session.placement.domains]
        is_lead = nodes.index(control.world.node) == control.rank
        # A node's lead may arrive first: it must not list files that other ranks are still writing.
        control.step("all have written", lambda: None)
        shares = control.step(
            "list files",
            lambda: self._list(session) if is_lead else None,
            lambda listings: share_files(listings, nodes, domains),
        )
        share = shares[control.rank]
        watch.planned(sum(file.size_bytes for file in share.send), len(share.send))
        attempt = SaveAttempt(session, self.spec)
        try:
            with followed(attempt, watch, self._result_of(control.rank)):
                attempt.begin()
                part = Publication(attempt, session, self.path, share)

                def write() -> WrittenPart:
                    watch.enter(Phase.WRITE)
                    written = part.write()
                    tell(Written(str(self.target), self.spec.step, written.counters))
                    watch.durable(written.counters)
                    watch.enter(Phase.COMMIT)
                    return written

                committed = attempt.commit(write, part.finish)
        except BaseException:
            attempt.abandon()
            raise
        if self.consume and is_lead:
            remove_source(self.path)
        return self._result_of(control.rank)(committed)

    def _result_of(self, rank: int) -> Callable[[Committed], SaveResult]:
        def result_of(committed: Committed) -> SaveResult:
            wall_s = time.perf_counter() - self.started
            return committed.result(str(self.target), self.spec.step, rank, wall_s)

        return result_of

    def _list(self, session: RunSession) -> tuple[LocalFile, ...]:
        run = session.storage.local_path("")
        if self.consume and run is not None:
            refuse_own(self.path, run, self.spec.name)
        return list_files(self.path)


class Saver:
    """Runs jobs, one at a time.

    ``tell`` reports events; ``before`` is local, ahead of each save.
    """

    def __init__(
        self,
        tell: Callable[[Event], None],
        before: Callable[[], None],
        followers: Sequence[Follower],
    ) -> None:
        self._tell = tell
        self._before = before
        self._followers = tuple(followers)

    def run(self, job: Job, session: RunSession, watch: Watch | None = None) -> SaveResult:
        """Run a job. Collective; committed when it returns. Errors are those of ``ckptfs.save``."""
        try:
            self._before()
            return job.run(session, self._tell, watch)
        except BaseException as error:
            self.failed(job.target, job.spec, error)
            raise

    def failed(self, target: Uri, spec: SaveSpec, error: BaseException) -> None:
        """Report a failed save to the listeners. Local."""
        outcome = error.outcome if isinstance(error, CkptfsError) else "failed"
        text = f"{type(error).__name__}: {error}"
        self._tell(SaveFailed(str(target), spec.step or 0, text, outcome))

    def follow(self, kind: Kind, session: RunSession, result: SaveResult, stall_s: float) -> None:
        """Run what follows a commit.

        Collective. A failure is logged; the checkpoint stays committed. ``stall_s``: how many
        seconds training stood still for the save.
        """
        self._tell(SaveCommitted(result, kind.value, stall_s))
        for follower in self._followers:
            try:
                follower(session, result)
            except CkptfsError as error:
                # The follower does this work after the next commit.
                logger.warning("an error after the commit of %s: %s", result.uri, error)
            except Exception:
                # The save is committed: an error after that must not make it look failed.
                logger.exception("an error after the commit of %s", result.uri)


_NOTICED_S = 5.0  # only a number in an event depends on this wait


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a job resumes in its run; the same on every rank.

    Attributes:
        step: The step that it was restored from; None: it has restored nothing.
        is_empty: It looked, and neither the run nor its copies held a full checkpoint to restore.
    """

    step: int | None = None
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Earlier:
    """A live save of an earlier job under one of the manager's names.

    ``where``: its URI, maybe in a copy. ``is_full``: a healthy save of the manager's main kind,
    from which a restore can resume.
    """

    where: Uri
    step: int | None
    save_id: str
    is_full: bool


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier jobs saved into a run, or into its copies if the run is empty.

    ``saves`` are in commit order. ``is_overwritten``: an overwrite that nothing was committed after
    had hidden them from the catalog, until this job's claim brought them back. Equal on all ranks.
    """

    saves: tuple[Earlier, ...] = ()
    is_overwritten: bool = False


class RunWorkers:
    """The objects that work for a claimed run. Made by ``start``, on every rank."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        tell: Callable[[Event], None],
        start: StartingPoint = StartingPoint(),
        *,
        buffers: HostBuffers,
    ) -> None:
        self.run = run
        self._buffers = buffers
        self._start = start
        self._at: int | None = None  # the step of the last commit since then
        self._has_begun = False  # a full checkpoint was accepted from a job that restored nothing
        self._past = Past()
        self._settings = settings
        self._tell = tell
        self._resources: SaveResources | None = None
        self._hurried = False
        self._stack = contextlib.ExitStack()
        self.retirer = Retirer(
            run, settings.keep, settings.names.is_ours, grace_s=settings.delete_grace_s, tell=tell
        )
        self._stack.callback(self.retirer.close)
        try:
            self._copier = self._start_copier() if settings.copies else None
        except BaseException:
            self._stack.close()
            raise
        self.saver = Saver(tell, self._before, (self._point, self._retain))
        self._has_logged_needs = False

    @classmethod
    def start(
        cls,
        run_handle: RunHandle,
        settings: Settings,
        tell: Callable[[Event], None],
        needed: frozenset[str],
        start: StartingPoint = StartingPoint(),
        *,
        buffers: HostBuffers,
    ) -> RunWorkers:
        """Claim the run and start working for it. Collective.

        ``needed`` are the save_ids of what this job was restored from: they stay until the next
        commit. ``buffers`` are the manager's own; asynchronous saves borrow them. Raises
        RunBusyError if another job holds the run.
        """
        run = run_handle.claim(defer_deletes=settings.delete_grace_s > 0)
        try:
            workers = cls(run, settings, tell, start, buffers=buffers)
        except BaseException:
            run.release()  # otherwise the next try finds the run held by this very process
            raise
        run_handle.before_release(workers.close)
        workers._follow_pointer()
        knows_its_place = workers._has_place
        # Directories cannot be replaced, so a job that has a place needs the earlier jobs' names too.
        if not knows_its_place or settings.names.main is Kind.DIRECTORY:
            workers._look_back()
        # A job without a place must not delete: the checkpoints are another job's.
        if knows_its_place:
            # A job that died between a commit and its deletes left one checkpoint too many, and the next
            # save might not fit.
            workers._let_go(run.session, needed)
        return workers

    def _start_copier(self) -> Copier:
        settings = self._settings
        copier = Copier(
            self.run,
            settings.copies,
            settings.names.is_ours,
            takeover=settings.takeover,
            grace_s=settings.delete_grace_s,
            begin_again=settings.begin_again,
            tell=self._tell,
        )
        self._stack.callback(copier.close)
        return copier

    def hurry(self) -> None:
        """Give the saves under way a bounded time: an exception left the block. Local."""
        self._hurried = True  # close would wait for them again, without a limit
        if self._resources is not None:
            self._resources.leave()

    def close(self) -> None:
        """Close everything that works for the run. Local. A second call does nothing."""
        self._stack.close()

    # -- resuming, or beginning -----------------------------------------------------------

    def set_start(self, start: StartingPoint) -> None:
        """Note that the job restored again or found nothing.

        Local, on every rank, no save under way.
        """
        self._start = start
        if start.step is not None:
            self._at = None

    @property
    def _begins_again(self) -> bool:
        return self._settings.begin_again or self._past.is_overwritten

    @property
    def _has_place(self) -> bool:
        return self._start.step is not None or self._begins_again or self._has_begun

    def check_beginning(self, kind: Kind, name: str, step: int, *, failure: bool = False) -> None:
        """Refuse a save that would begin over what earlier jobs saved. Local, before each save.

        Raises CommitConflictError, the same on all ranks. A job with a place in the run is never
        refused.
        """
        main = self._settings.names.main
        if not self._has_place:
            is_full = kind is main and not failure
            earlier = self._past.saves
            if self._start.is_empty and not is_full:
                # Left by a job that died before its first full checkpoint: no job resumes from it.
                earlier = tuple(one for one in earlier if one.is_full)
            refuse_beginning(earlier, name, step, is_full=is_full, main=main)
            self._has_begun = is_full
        if main is not Kind.DIRECTORY:
            self._tell_replaced(name)

    def comes_again(self, name: str, step: int) -> bool:
        """Whether an earlier job saved a directory of this name, beyond this job's starting point.

        Local, the same on all ranks.
        """
        start = self._start.step
        is_ahead = start is None or step > start
        return is_ahead and any(one.where.name == name for one in self._past.saves)

    def free_name(self, name: str) -> None:
        """Delete the directory that an earlier job saved under this name.

        Collective, no save under way. It is deleted if something was committed after it: files with
        fixed names cannot be replaced.
        """
        session, is_ours = self.run.session, self._settings.names.is_ours

        def decide(views: Views) -> str | None:
            seals = [live.seal for live in catalog(views) if is_ours(live.seal)]
            passed = (s for s in seals[:-1] if s.name == name and s.base != self.run.generation)
            return next((seal.save_id for seal in passed), None)

        save_id = _ask(session, "what has the name", lambda: session.known.state, decide)
        if save_id is None:
            return  # retention deleted it, or it is the newest: then the save fails and says so
        if session.control.rank == 0:
            self._warn_of_replacing(name, save_id)
        self._follow_pointer(save_id)
        self.retirer.delete(session, save_id, reason="a new save replaces it", at_once=True)

    def _look_back(self) -> None:
        """Find out what other jobs saved into the run or, if it is empty, its copies.

        Collective.
        """
        session, copies = self.run.session, self._settings.copies
        self._past = self._past_of(session, lambda: session.known.state)
        if self._past.saves or self._past.is_overwritten or self._start.is_empty or not copies:
            return
        try:
            with open_copies(copies, session.control) as copy_sessions:
                found = [self._past_of(one, partial(_state_of, one)) for one in copy_sessions]
        except CkptfsError as error:
            # A copy that cannot be reached is no reason not to save.
            logger.warning("it is unknown whether a copy is newer than the run: %s", error)
            return
        self._past = Past(tuple(save for past in found for save in past.saves))

    def _past_of(self, session: RunSession, look: Callable[[], LogState | None]) -> Past:
        """Return what other jobs saved there under this manager's names. Collective."""
        generation, names = self.run.generation, self._settings.names

        def saves(views: Views) -> tuple[Earlier, ...]:
            seals = (live.seal for live in catalog(views))
            return tuple(
                Earlier(
                    session.storage.uri(seal.name),
                    seal.step,
                    seal.save_id,
                    seal.artifact is names.main and not seal.failure,
                )
                for seal in seals
                if seal.base != generation and names.is_ours(seal)
            )

        def decide(views: Views) -> Past:
            before = {domain: _before(generation, view) for domain, view in views.items()}
            found = saves(before)
            return Past(found or saves(views), is_overwritten=not found and bool(saves(views)))

        return _ask(session, "what earlier jobs saved", look, decide)

    def _tell_replaced(self, name: str) -> None:
        """Log, on the coordinator, that a save is about to replace an earlier job's."""
        session = self.run.session
        state = session.known.state
        if session.control.rank != 0 or state is None or not state.saves.knows_name(name):
            return
        replaced = save_named(name, {session.placement.mine.id: state})
        if replaced is not None and replaced.base != self.run.generation:
            self._warn_of_replacing(name, replaced.save_id)

    def _warn_of_replacing(self, name: str, save_id: str) -> None:
        if self._start.step is not None:
            why = f"restored step {self._start.step}"
        else:
            why = "began the run again" if self._begins_again else "restored nothing"
        uri = self.run.session.storage.uri(name)
        logger.warning("%s replaces save %s of an earlier job: this job %s", uri, save_id, why)

    # -- saving -------------------------------------------------------------------------

    def save(self, job: Job) -> SaveResult:
        """Save on the manager's thread. Collective; committed when it returns."""
        result = self.saver.run(job, self.run.session)
        self.saver.follow(
            job.spec.artifact, self.run.session, result, time.perf_counter() - job.started
        )
        return result

    def save_in_background(self, job: Job, begun: Callable[[PendingSave], None]) -> PendingSave:
        """Save in the background. Collective; returns when the tensors may be changed.

        ``begun`` receives the pending save, also if Ctrl-C is raised instead of returning it: the
        other ranks wait for it.
        """
        resources, session = self._opened_resources()
        pending = PendingSave(str(job.target), job.spec.step)
        if not isinstance(job, StateJob):
            return self._save_later(job, resources, session, pending, begun)
        state, job = job.state, replace(job, state={})  # the worker must not keep tensors alive

        def save(staged: Share, watch: Watch) -> SaveResult:
            result = self.saver.run(replace(job, state=staged), session, watch)
            # A small state may be committed before the caller has noticed that it was staged.
            futures.wait([pending.staged], timeout=_NOTICED_S)
            self._follow(job, session, result, pending)
            return result

        assert isinstance(state, Mapping)  # noqa: S101 - staged below, never twice
        compare = session.control.size > 1
        try:
            return begin_in_background(
                state, pending, save, resources, compare_ranks=compare, tell=self._tell
            )
        finally:
            begun(pending)

    def _save_later(
        self,
        job: Job,
        resources: SaveResources,
        session: RunSession,
        pending: PendingSave,
        begun: Callable[[PendingSave], None],
    ) -> PendingSave:
        """Save without staging: the files to save must not change until they are committed."""

        def save() -> SaveResult:
            result = self.saver.run(job, session, pending.watch())
            self._follow(job, session, result, pending)
            return result

        pending.has_staged(None)
        submit_pending(resources.worker, pending, save)
        begun(pending)
        return pending

    def _follow(
        self, job: Job, session: RunSession, result: SaveResult, pending: PendingSave
    ) -> None:
        """Run what follows a commit. Collective, on the worker's thread.

        If this rank hangs in its storage, its caller gets the result that all other ranks have by
        then: the save is committed.
        """

        def hangs(error: CkptfsError) -> None:
            logger.warning("an error after the commit of %s: %s", result.uri, error)
            pending.succeed(result)

        with hearing(session.control, hangs):
            self.saver.follow(job.spec.artifact, session, result, pending.stall_s)

    def begin(
        self,
        name: str,
        step: int,
        parts: Sequence[str],
        storage_options: Mapping[str, Any] | None,
        artifact: Kind = Kind.CHECKPOINT,
    ) -> Ticket:
        """Begin a checkpoint of parts; its commit is followed as usual.

        Collective, no save under way.
        """
        began = time.perf_counter()
        self._before()
        # Files with fixed names cannot be replaced.
        if_exists = IfExists.ERROR if artifact is Kind.DIRECTORY else IfExists.REPLACE

        def then(decision: Decision, sealed: Sequence[SealedPart]) -> None:
            result = self._result_of(decision, sealed, time.perf_counter() - began)
            self.saver.follow(artifact, self.run.session, result, 0.0)

        return begin_parts(
            self.run,
            name,
            step,
            parts,
            if_exists=if_exists,
            artifact=artifact,
            storage_options=storage_options,
            then=then,
        )

    def _result_of(
        self, decision: Decision, sealed: Sequence[SealedPart], wall_s: float
    ) -> SaveResult:
        """Return the result of a checkpoint of parts: the counters of all ranks of all parts."""
        parts = {part.part: part.result for part in sealed}.values()
        per_rank = tuple(counters for part in parts for counters in part.per_rank)
        return SaveResult(
            uri=str(decision.uri),
            step=decision.step,
            save_id=decision.seal.save_id,
            mine=Counters(),
            total=Counters.together(per_rank),
            per_rank=per_rank,
            wall_s=wall_s,
        )

    def wait_for_copies(self, timeout_s: float | None, *, alike: bool = False) -> None:
        """Copy what was committed so far, or try once more; then delete what waited for that.

        Collective. No save may be under way. With ``alike`` a DeadlineError is raised on all ranks
        if it is on one, for jobs that continue; without it a rank may leave alone.
        """
        copier = self._copier
        if copier is None:
            return
        if alike:
            late = partial(_late, copier, timeout_s)
            self.run.session.control.step("wait for copies", late, _raise_first)
        else:
            copier.wait(timeout_s)
        if self._start.step is not None or self._begins_again or self._at is not None:
            self._let_go(self.run.session)

    def pin(self, save_id: str, *, pinned: bool) -> None:
        """Pin a save, or unpin it. Collective, with no save under way."""
        self.retirer.pin(self.run.session, save_id, pinned=pinned)

    def delete(self, save_id: str) -> None:
        """Delete a save. Collective, with no save under way."""
        # Before the entry: the pointer must never name a deleted save.
        self._follow_pointer(save_id)
        try:
            self.retirer.delete(self.run.session, save_id)
        finally:
            self._follow_pointer()  # back to the save, if it could not be deleted

    def _follow_pointer(self, deleted: str | None = None) -> None:
        """Let the pointer name the newest save but ``deleted``; log failures. Collective."""
        pointer, is_ours = self._settings.pointer, self._settings.names.is_ours
        if pointer is None:
            return
        try:
            pointer.follow(self.run.session, lambda s: is_ours(s) and s.save_id != deleted)
        except CkptfsError as error:
            logger.warning(
                "%s was not updated; it is updated after the next commit: %s", pointer.file, error
            )

    def _opened_resources(self) -> tuple[SaveResources, RunSession]:
        """Return the worker's thread, buffers and session. Collective at its first use."""
        if self._resources is None or self._resources.session is None:
            control = self.run.session.control.clone()
            session = replace(self.run.session, control=control)
            self._resources = SaveResources(SaveWorker("ckptfs-manager"), self._buffers, session)
            self._stack.callback(self._close_resources)
            # When the run is collected, no save is under way: its job would refer to the manager.
            self.run.closing.callback(self._resources.close, 0.0)
        assert self._resources.session is not None  # noqa: S101 - made with one
        return self._resources, self._resources.session

    def _close_resources(self) -> None:
        if self._resources is not None and not self._hurried:
            self._resources.close()

    # -- around each save ---------------------------------------------------------------

    def _before(self) -> None:
        """Finish deleting what retention gave up, so that the space its policy needs is enough."""
        self.retirer.make_room()

    def _point(self, session: RunSession, result: SaveResult) -> None:
        # Before retention: the pointer must never name what that deletes.
        if self._settings.pointer is not None:
            self._settings.pointer.move(session, Uri.parse(result.uri).name)

    def _retain(self, session: RunSession, result: SaveResult) -> None:
        # The copier first: from here on it needs this save, and retention asks it what it needs.
        if self._copier is not None:
            self._copier.after_commit(result)
        self._at = result.step
        self._let_go(session)
        if not self._has_logged_needs and len(result.per_rank) == session.control.size:
            self._has_logged_needs = True
            self.retirer.log_needs(result.per_rank)

    def _let_go(self, session: RunSession, needed: frozenset[str] = frozenset()) -> None:
        """Run retention. Collective. A checkpoint that is further than this job has come stays."""
        at = self._start.step if self._at is None else self._at
        self.retirer.after_commit(
            session, self._roots() | needed, at=None if self._begins_again else at
        )

    def _roots(self) -> frozenset[str]:
        """Return the save_ids that a copy waits for; they stay."""
        return frozenset() if self._copier is None else self._copier.waiting()


def refuse_beginning(
    earlier: Sequence[Earlier], name: str, step: int, *, is_full: bool, main: Kind
) -> None:
    """Refuse a save by a job without a place in the run that conflicts with earlier saves. Pure.

    Raises CommitConflictError if it takes the name of one of them, or if it is a full checkpoint
    that is not further than their newest one. ``earlier`` is in commit order; ``is_full`` as for
    ``Earlier``.
    """
    newest = next((one for one in reversed(earlier) if one.is_full), None)
    same_name = next((one for one in earlier if one.where.name == name), None)
    reads = "restore()" if main is Kind.CHECKPOINT else "reading() or the framework's own load"
    hint = (
        f"call {reads} to continue from the newest, save to another run, or make the manager "
        "with begin_again=True: retention then deletes the old ones"
    )
    if is_full and newest is not None and newest.step is not None and step <= newest.step:
        raise CommitConflictError(
            f"step {step} would begin the run again: {newest.where.name} is its newest commit "
            f"(save {newest.save_id}), and this job restored nothing",
            uri=newest.where,
            hint=hint,
        )
    if same_name is not None:
        raise CommitConflictError(
            f"{name} is committed already (save {same_name.save_id}), and this job restored nothing",
            uri=same_name.where,
            hint=hint,
        )


def _ask(
    session: RunSession,
    label: str,
    look: Callable[[], LogState | None],
    decide: Callable[[Views], R],
) -> R:
    """Decide once for all ranks, by the logs of all owners. Collective.

    ``look`` returns an owner's log, None if it has none.
    """

    def view(ids: Collection[str]) -> View | None:
        state = look() if session.placement.is_owner else None
        return None if state is None else (session.placement.mine.id, state.to_send(ids))

    def decide_all(found: Sequence[View | None]) -> R:
        return decide(collect_views(found))

    return step_with_views(session.control, label, view, lambda one: one, decide_all)


def _before(own: Generation, view: LogState) -> LogState:
    """Return a log as it was before the fence of ``own``, if that followed an overwrite.

    While the overwrite was the newest fence, no catalog had the saves that it hid.
    """
    last = view.overwrites[-1].generation if view.overwrites else None
    if last is None or view.generation != own or last.number != own.number - 1:
        return view
    return replace(view, fence=replace(view.fence, generation=last))


def _state_of(session: RunSession) -> LogState | None:
    found = drive(read_view(), session.storage)
    return None if found is None else found[1]


def _late(copier: Copier, timeout_s: float | None) -> DeadlineError | None:
    try:
        copier.wait(timeout_s)
    except DeadlineError as error:
        return error
    return None


def _raise_first(late: Sequence[DeadlineError | None]) -> None:
    for error in late:
        if error is not None:
            raise error
