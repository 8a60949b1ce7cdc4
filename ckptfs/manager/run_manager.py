"""The base class of both managers, with the saves under way and the read-only view of the run.

    RunManager            schedule, waiting, retention, reading the catalog, the end
      CheckpointManager   state dicts: tensors, sharded, resharded
      DirectoryManager    directories of files that a framework wrote

A subclass calls ``_make_way`` and then saves through ``_workers()``, the objects that work
for the claimed run.

``PendingSaves`` holds the saves that are under way, oldest first, and raises their failures:

    flight.settle(limit)   waits until fewer than limit are left; raises what failed, once
    flight.poll()          raises a failure that is known here; settle raises it again

Every rank starts the same saves in the same order and waits for the same ones before the same call,
so a failure is raised on all ranks at the same call. A rank that raised alone would leave the
others waiting in a collective call that it never makes.

``View`` reads what the run holds, at any time and read-only. Only ``save_id_of`` involves other
ranks.

``last_save_s`` reads in the log how long the last save of the run took, for a warning at the start
of a job. A save_id begins with the time at which the coordinator began the save, and the seal's
entry has the time at which it was appended. Both are meant for people and exact to the second.
Nothing but a warning may depend on them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Protocol, Self

from ckptfs.commit.catalog.catalog import Checkpoint, list_live, logged, looking_at
from ckptfs.commit.catalog.locate import node_view
from ckptfs.commit.catalog.unlogged import views_if_gone
from ckptfs.commit.log.entries import Kind, decode_entry
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import log_key
from ckptfs.commit.session import RunSession, collect_views
from ckptfs.commit.state import Views, catalog
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.staging.buffers import HostBuffers
from ckptfs.errors import CkptfsError, DeadlineError, NotFoundError
from ckptfs.events import Event, SaveBegan, SaveResult, SaveSkipped
from ckptfs.manager.listeners import EventDispatcher
from ckptfs.manager.preemption import PreemptSignals, SignalName
from ckptfs.manager.run_setup import IfSlow, Names, RunHandle, SaveMode, Settings, Where
from ckptfs.manager.run_workers import Job, RunWorkers, StartingPoint
from ckptfs.manager.schedule import Rules, Schedule
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri

__all__ = ["Pending", "PendingSaves", "RunManager", "View", "between_s", "last_save_s"]

logger = logging.getLogger("ckptfs.manager")


def last_save_s(state: LogState, storage: Storage) -> float | None:
    """Return the seconds from the start of the last save to its seal in this log; None: unknown.

    Local; reads one entry, appends nothing. A save of a job that has not sealed anything is not
    counted.
    """
    sealed = [(save.sealed_at, save.save_id) for save in state.saves.living.values() if save.seal]
    at, save_id = max(((at, name) for at, name in sealed if at is not None), default=(-1, ""))
    if at < 0:
        return None
    try:
        entry = decode_entry(read_limited(storage, log_key(at)), log_key(at))
    except CkptfsError:
        return None  # no save fails for a warning; code that needs the entry reads it again
    return between_s(save_id, entry.stamp.at)


def between_s(save_id: str, sealed: str) -> float | None:
    """Return the seconds from the time in a save_id to that of a stamp. Pure.

    None if either has no such time, or if the clocks disagree.
    """
    try:
        began = datetime.strptime(save_id.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
        ended = datetime.strptime(sealed, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    spent_s = (ended - began).total_seconds()
    return spent_s if spent_s >= 0 else None


class Pending(Protocol):
    """A save under way, as ``async_save`` returns it."""

    uri: str

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait; raise what the save raised, or TimeoutError after ``timeout_s`` seconds."""

    def done(self) -> bool:
        """Whether it is committed or failed, as far as this rank knows."""


class PendingSaves:
    """The saves under way. Only the thread that makes the manager's calls may use it."""

    def __init__(self) -> None:
        self._saves: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, save: Pending) -> None:
        """Add a save that is under way."""
        self._saves.append(save)

    def oldest_is_done(self) -> bool:
        """Whether this rank knows the outcome of the oldest save."""
        return not self._saves or self._saves[0].done()

    def is_done(self) -> bool:
        """Whether this rank knows the outcome of all saves."""
        return all(save.done() for save in self._saves)

    def wait_done(self, timeout_s: float | None) -> bool:
        """Wait until all have ended, for up to ``timeout_s`` seconds; return whether they have.

        This settles nothing: ``settle`` still raises their failures.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self._saves:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(Exception):  # the save's own failure: settle raises it
                save.result(left)
        return self.is_done()

    def settle(self, limit: int) -> SaveResult | None:
        """Wait until fewer than ``limit`` are under way; return the last result waited for.

        Raises the first failure, once, after all saves that had to be waited for have ended.
        """
        last: SaveResult | None = None
        failed: BaseException | None = None
        while len(self._saves) >= max(1, limit):
            try:
                last = self._saves[0].result()
            except Exception as error:  # noqa: BLE001 - raised below, after the others
                failed = failed or error
            self._saves.popleft()
        if failed is not None:
            raise failed
        return last

    def poll(self) -> None:
        """Raise the failure of a save that has ended, if there is one.

        The next ``settle`` raises it again, because ranks do not poll at the same moment.
        """
        for save in self._saves:
            if save.done():
                save.result(0)


@dataclass(frozen=True, slots=True)
class View:
    """Reads the run again at each call. On node-local disks this node's log answers."""

    where: Where
    names: Names

    def live(self, kind: Kind, *, failures: bool) -> list[Checkpoint]:
        """Return the committed saves of a kind with names of the template, oldest commit first.

        ``failures``: saves of a failing run too.
        """
        with looking_at(self.where.uri, self.where.place.storage_options) as look:
            return self._live(look.views, look.root, kind, failures=failures)

    def latest(self, kind: Kind) -> Checkpoint | None:
        """Return the last commit of a kind with a template name, without those of failing runs.

        Raises:
            IncompleteCheckpointError: It was removed by hand. Returning the previous commit would
                hide that.
        """
        with looking_at(self.where.uri, self.where.place.storage_options) as look:
            views, shape = look.views, look.storage.capabilities.shape
            while found := self._live(views, look.root, kind, failures=False):
                seal = next(s for s in list_live(views) if s.save_id == found[-1].save_id)
                now = drive(views_if_gone(seal, views, look.root, shape), look.storage)
                if now is None:
                    return found[-1]
                views = now
        return None

    def _live(self, views: Views, root: Uri, kind: Kind, *, failures: bool) -> list[Checkpoint]:
        failed = {live.seal.save_id for live in catalog(views) if live.seal.failure}
        template = self.names.of(kind)
        return [
            c
            for c in logged(views, root)
            if c.kind is kind
            and template.step_of(c.uri.name) is not None
            and (failures or c.save_id not in failed)
        ]

    def steps(self, kind: Kind) -> list[int]:
        """Return the steps of these saves, oldest commit first."""
        template = self.names.of(kind)
        found = (template.step_of(c.uri.name) for c in self.live(kind, failures=True))
        return [step for step in found if step is not None]

    def save_id_of(self, step: int, session: RunSession) -> str:
        """Return the save_id of the checkpoint of ``step``, by the logs of all domains. Collective.

        One domain alone may not know yet what became of a save. Raises NotFoundError if there is
        none.
        """
        main = self.names.main
        name = self.names.of(main).name(step)

        def decide(found: Sequence[tuple[str, LogState] | None]) -> str:
            lives = list_live(collect_views(found))
            seals = [s for s in lives if s.artifact is main]
            for seal in seals:
                if seal.name == name:
                    return seal.save_id
            raise NotFoundError(
                f"there is no checkpoint of step {step}",
                uri=session.storage.root,
                hint=f"there are {', '.join(seal.name for seal in seals) or 'none'}",
            )

        return session.control.step("find the step", lambda: node_view(session), decide)


class RunManager:
    """Base class of the managers; not used by itself.

    One thread makes its calls, except for ``latest`` and ``steps``.
    """

    def __init__(
        self,
        run_handle: RunHandle,
        settings: Settings,
        rules: Rules,
        preempt_signals: Iterable[SignalName],
    ) -> None:
        self._settings = settings
        self._run_handle = run_handle
        run_handle.owner = type(self).__name__
        self._view = View(run_handle.where, settings.names)
        self._pending_saves = PendingSaves()
        self._run_workers: RunWorkers | None = None
        self._needed: frozenset[str] = frozenset()  # what this job was restored from
        self._start = StartingPoint()
        self._dispatcher: EventDispatcher | None = None
        self._buffers: HostBuffers | None = None
        # The last step that may fail: no handler may outlive a manager that was never made.
        signals = PreemptSignals(preempt_signals) if preempt_signals else None
        self._schedule = Schedule(rules, lambda: self._run_handle.control, signals=signals)
        self._run_handle.before_release(self._schedule.close)

    # -- when -----------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save now, by steps, time or preemption; the same on all ranks. Collective.

        By steps it costs nothing; the other two are agreed in the background, one call late. Every
        rank calls it equally often.

        Args:
            step: Completed optimizer steps.
        """
        return self._schedule(step)

    @property
    def preempted(self) -> bool:
        """Whether the ranks agreed that the job is about to be stopped: save, then leave."""
        return self._schedule.preempted

    # -- where it resumes -----------------------------------------------------------------

    def resumed_at(self, step: int) -> None:
        """Declare that the job continues from ``step`` of the run.

        Local, on every rank, before the next save. Use it if something other than this manager,
        such as a framework's own loader, loaded the step. Saves, and what retention deletes, are
        then as after ``restore``.

        Args:
            step: Completed optimizer steps of what was loaded.
        """
        self._set_start(StartingPoint(step))

    def _set_start(self, start: StartingPoint) -> None:
        self._start = start
        if self._run_workers is not None:
            self._run_workers.set_start(start)

    def _found_nothing(self, kind: Kind) -> None:
        """Note that a search for checkpoints of a kind found none.

        An earlier restore still counts; and if no weights were saved, that says nothing about the
        run.
        """
        if kind is self._settings.names.main and self._start.step is None:
            self._set_start(StartingPoint(is_empty=True))

    # -- saving -------------------------------------------------------------------------

    def _run_job(self, job: Job) -> SaveResult | PendingSave:
        """Run a save in the manager's mode. Collective.

        When it returns, the save is committed, or under way.
        """
        workers, kind = self._workers(), job.spec.artifact
        mode = self._settings.mode
        step = job.spec.step or 0
        self._tell(SaveBegan(str(job.target), step, kind.value, mode.value))
        if mode is SaveMode.SYNC:
            result = workers.save(job)
            self._schedule.took(result.wall_s)
            self._saved(kind, step)
            return result
        self._saved(kind, step)  # also if Ctrl-C interrupts it: the other ranks continue
        return workers.save_in_background(job, self._pending_saves.add)

    def _saved(self, kind: Kind, step: int) -> None:
        # Weights of a step are no reason to leave its full checkpoint out.
        if kind is not Kind.WEIGHTS:
            self._schedule.saved(step)

    def _make_way(self, step: int, name: str) -> SaveSkipped | None:
        """Raise earlier failures; wait until a save may begin, or return that it is skipped."""
        limit = self._settings.max_in_flight
        may_skip = self._settings.if_slow is IfSlow.SKIP and not self.preempted
        if may_skip and len(self._pending_saves) >= limit:
            # All ranks or none: this one may know the outcome before the others do.
            done = self._run_handle.control.step(
                "in flight", self._pending_saves.oldest_is_done, all
            )
            if not done:
                uri = str(self._run_handle.root / name)
                skipped = SaveSkipped(uri, step, len(self._pending_saves))
                self._tell(skipped)
                return skipped
        self._settle(limit)
        return None

    def _settle(self, limit: int) -> None:
        last = self._pending_saves.settle(limit)
        if last is not None:
            self._schedule.took(last.wall_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for saves, retention and copies. Collective.

        When this returns, every save so far is committed, retention has run, and copies are made or
        were tried once more. A copy that fails is an event for the listeners.

        Args:
            timeout_s: How long, in seconds; None: as long as it takes.

        Raises:
            DeadlineError: It took longer than ``timeout_s``, on all ranks if on one. Saves and
                copies continue.
            CkptfsError: The error of a save that failed, on all ranks.
        """
        began = time.monotonic()
        if len(self._pending_saves):
            # All ranks or none: a rank that gave up alone would have other saves in flight than the rest.
            control = self._run_handle.control
            try:
                control.step("wait", lambda: self._pending_saves.wait_done(timeout_s), _need_all)
            except CkptfsError as error:
                # Only the waiting failed: the saves themselves may be committed.
                error.outcome = "unknown"
                raise
        self._settle(1)
        if self._run_workers is not None:
            left = None if timeout_s is None else max(0.0, timeout_s - time.monotonic() + began)
            self._run_workers.wait_for_copies(left, alike=True)

    def poll(self) -> int:
        """Return how many saves are under way. Local.

        Raises:
            CkptfsError: The error of a save that failed, if this rank knows; the next collective
                call raises it again, on all ranks.
        """
        self._pending_saves.poll()
        return len(self._pending_saves)

    # -- keeping ------------------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keep a step from retention until ``unpin``, in later jobs too. Collective.

        Args:
            step: Completed optimizer steps of a committed checkpoint.

        Raises:
            NotFoundError: There is no such checkpoint.
            RunBusyError: The run has a living owner.
        """
        self._pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Let retention delete a step again. Collective.

        Args:
            step: Completed optimizer steps of a committed checkpoint.

        Raises:
            NotFoundError: There is no such checkpoint.
            RunBusyError: The run has a living owner.
        """
        self._pin(step, pinned=False)

    def delete(self, step: int) -> None:
        """Delete one checkpoint. Collective.

        When this returns, the checkpoint is gone from the run: every log has an entry. Its bytes
        are deleted in the background, after a crash by the next owner. Saves under way are waited
        for first. This is for callers that decide by other rules than ``keep_latest``: it deletes
        what retention or a copy still needs, too.

        Args:
            step: Completed optimizer steps of a committed checkpoint.

        Raises:
            NotFoundError: There is no such checkpoint.
            RunBusyError: The run has a living owner.
            CollectiveError: An owner could not write. If its outcome is "unknown", the checkpoint may be gone
                all the same; another call, or the next owner of the run, settles it.
        """
        save_id = self._find(step)
        self._workers().delete(save_id)

    def _find(self, step: int) -> str:
        self._settle(1)
        with self._run_handle.reading() as session:
            return self._view.save_id_of(step, session)

    def _pin(self, step: int, *, pinned: bool) -> None:
        save_id = self._find(step)
        # Claiming the run runs retention: it must not delete the step before it is pinned.
        self._needed |= {save_id}
        self._workers().pin(save_id, pinned=pinned)

    # -- looking: local, read-only, any time ------------------------------------------------

    @property
    def latest(self) -> Checkpoint | None:
        """The last committed checkpoint with a name of this template, None if there is none.

        Raises:
            IncompleteCheckpointError: It was removed by hand; ``ckptfs rm`` records that.
        """
        return self._latest(self._settings.names.main)

    def _latest(self, kind: Kind) -> Checkpoint | None:
        return self._view.latest(kind)

    @property
    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, oldest commit first."""
        return self._view.steps(self._settings.names.main)

    # -- the end ------------------------------------------------------------------------

    def close(self, copies_s: float = 300.0) -> None:
        """Finish what is under way, copies too, and release the run. Collective; harmless twice.

        Args:
            copies_s: How many seconds copies are waited for; the next job makes those that are
                left.

        Raises:
            CkptfsError: The error of a save that failed, after everything is closed.
        """
        try:
            if not self._run_handle.is_closed:
                self._settle(1)
                self._finish_copies(copies_s)
        except (KeyboardInterrupt, SystemExit):
            if self._run_workers is not None:
                self._run_workers.hurry()  # otherwise leaving would wait again
            raise
        finally:
            self._leave()

    def _finish_copies(self, timeout_s: float) -> None:
        try:
            if self._run_workers is not None:
                self._run_workers.wait_for_copies(timeout_s)
        except CkptfsError as error:
            logger.warning("the run ends before its copies are made: %s", error)

    def _leave(self) -> None:
        """Release the run and close the dispatcher. Local."""
        self._run_handle.close()
        if self._dispatcher is not None:
            self._dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close as ``close`` does, or leave without waiting for other ranks after an exception.

        The other ranks may still be training. Saves under way are finished, and none of their
        failures hides the exception.
        """
        if exc is None:
            self.close()
            return
        try:
            if self._run_workers is not None and not self._run_handle.is_closed:
                self._run_workers.hurry()
            if self._pending_saves.is_done():
                self._settle(1)
        except Exception:
            logger.exception("a save failed too, while the block was left by an exception")
        finally:
            self._leave()

    # -- small things ---------------------------------------------------------------------

    def _workers(self) -> RunWorkers:
        if self._run_workers is None:
            self._start_dispatcher()  # before threads report events: each of them would make a dispatcher
            self._run_workers = RunWorkers.start(
                self._run_handle,
                self._settings,
                self._tell,
                self._needed,
                self._start,
                buffers=self._staging_buffers(),
            )
            self._warn_of_the_last_save(self._run_workers.run.session)
        return self._run_workers

    def _staging_buffers(self) -> HostBuffers:
        """Return the buffers for staging. Collective at its first use."""
        if self._buffers is None:
            local_ranks = self._run_handle.control.world.local_size
            bound_bytes = self._settings.host_memory_bytes
            self._buffers = HostBuffers(bound_bytes, local_ranks=local_ranks)
            self._run_handle.before_release(self._buffers.close)
        return self._buffers

    def _warn_of_the_last_save(self, session: RunSession) -> None:
        """Warn if a save of the previous job took longer than this job's grace. Collective."""

        def look() -> float | None:
            state = session.known.state
            if state is None or not self._schedule.warns_here:
                return None
            return last_save_s(state, session.storage)

        # In a step: if this read hung or failed between two steps, the other ranks would wait without
        # knowing why.
        label = "how long the last save took"
        self._schedule.took(session.control.step(label, look, lambda found: found[0]))

    def _tell(self, event: Event) -> None:
        self._start_dispatcher().tell(event)

    def _start_dispatcher(self) -> EventDispatcher:
        if self._dispatcher is None:
            settings, rank = self._settings, self._run_handle.control.rank
            self._dispatcher = EventDispatcher(
                settings.listeners, on_commit=settings.on_commit, rank=rank
            )
        return self._dispatcher


def _need_all(done: Sequence[bool]) -> None:
    late = [rank for rank, is_done in enumerate(done) if not is_done]
    if late:
        raise DeadlineError(
            f"the timeout ended while saves were in progress on ranks {late[:4]}",
            hint="the saves continue; wait again, or pass a longer timeout",
        )
