"""The base class of both managers, with the saves that are on their way and the read-only view of the run.

What the managers of a run have in common, whatever they save: one run, one flight, one crew.

    RunManager            schedule, waiting, retention, looking, the end
      CheckpointManager   state dicts: tensors, sharded, resharded
      DirectoryManager    directories of files that a framework wrote

A subclass saves through ``_hired()``, the crew that works for the claimed run, after ``_make_way``.

The saves that are on their way, oldest first, and who hears when one failed.

    flight.settle(limit)   waits until fewer than limit are left; raises what failed, once
    flight.poll()          raises what is known to have failed; does not take it away

Every rank starts the same saves in the same order and waits for the same ones before the same call,
so a failure is raised on all ranks at the same call: a rank that raised alone would leave the
others waiting in a collective call that it never makes.

What a manager's run holds: read-only, any time; but for ``save_id_of`` no other rank is asked.

How long the last save of a run took, as its log tells: for a warning, at the start of a job.

A save_id begins with the time at which the coordinator began it, and the seal's entry carries the time
at which it was appended; both for people, to the second. Nothing but a warning may depend on it.
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

from ckptfs.commit.catalog.catalog import Checkpoint, list_live, logged, looking_at, read_view
from ckptfs.commit.catalog.unlogged import views_if_gone
from ckptfs.commit.log.entries import Kind, decode_entry
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import log_key
from ckptfs.commit.session import Seat
from ckptfs.commit.state import Views, catalog
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.staging.buffers import HostBuffers
from ckptfs.errors import CkptfsError, DeadlineError, NotFoundError
from ckptfs.events import Event, SaveBegan, SaveResult, SaveSkipped
from ckptfs.manager.claimed_run import Ground, Where
from ckptfs.manager.listeners import Bell
from ckptfs.manager.options import IfSlow, Names, SaveMode, Settings
from ckptfs.manager.preemption import PreemptSignals, SignalName
from ckptfs.manager.schedule import Rules, Schedule
from ckptfs.manager.session import Crew, Job, StartingPoint
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri

__all__ = ["Flight", "Pending", "RunManager", "View", "between_s", "last_save_s"]

logger = logging.getLogger("ckptfs.manager")


def last_save_s(state: LogState, storage: Storage) -> float | None:
    """Seconds from the beginning of the last save to its seal in this log; None: cannot be told.

    Local, one read, appends nothing. What a job saved that has not sealed anything is not seen.
    """
    sealed = [(save.sealed_at, save.save_id) for save in state.saves.living.values() if save.seal]
    at, save_id = max(((at, name) for at, name in sealed if at is not None), default=(-1, ""))
    if at < 0:
        return None
    try:
        entry = decode_entry(read_limited(storage, log_key(at)), log_key(at))
    except CkptfsError:
        return None  # no save fails for a warning; whoever needs that entry reads it again
    return between_s(save_id, entry.stamp.at)


def between_s(save_id: str, sealed: str) -> float | None:
    """Seconds from the time in a save_id to that of a stamp; None for others, or for clocks that
    disagree. Pure.
    """
    try:
        began = datetime.strptime(save_id.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
        ended = datetime.strptime(sealed, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    spent_s = (ended - began).total_seconds()
    return spent_s if spent_s >= 0 else None


class Pending(Protocol):
    """A save on its way, as ``async_save`` returns it."""

    uri: str

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait; raises what the save raised, TimeoutError after timeout_s."""

    def done(self) -> bool:
        """Whether it is committed or failed, as far as this rank knows."""


class Flight:
    """One thread: the one that makes the manager's calls."""

    def __init__(self) -> None:
        self._saves: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, save: Pending) -> None:
        """One more is on its way."""
        self._saves.append(save)

    def oldest_is_done(self) -> bool:
        """Whether this rank knows the outcome of the oldest one."""
        return not self._saves or self._saves[0].done()

    def is_done(self) -> bool:
        """Whether this rank knows the outcome of all of them."""
        return all(save.done() for save in self._saves)

    def wait_done(self, timeout_s: float | None) -> bool:
        """Wait until all have ended, for up to ``timeout_s``; whether they have. Settles nothing."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self._saves:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(Exception):  # the save's own failure: settle raises it
                save.result(left)
        return self.is_done()

    def settle(self, limit: int) -> SaveResult | None:
        """Wait until fewer than ``limit`` are on their way; the result of the last that was waited for.

        Raises the first failure after all that had to be waited for have ended; it is raised once.
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
        """Raise the failure of a save that has ended, if there is one. It is raised again by the next
        ``settle``: ranks do not poll at the same moment.
        """
        for save in self._saves:
            if save.done():
                save.result(0)


@dataclass(frozen=True, slots=True)
class View:
    """Looks anew at each call. On node-local disks it is this node's log that answers."""

    where: Where
    names: Names

    def live(self, kind: Kind, *, failures: bool) -> list[Checkpoint]:
        """Committed saves of a kind that the template made, oldest commit first.

        failures: those of a failing run too.
        """
        with looking_at(self.where.uri, self.where.place.storage_options) as look:
            return self._live(look.views, look.root, kind, failures=failures)

    def latest(self, kind: Kind) -> Checkpoint | None:
        """The last commit of a kind that the template made, those of failing runs apart.

        Raises:
            IncompleteCheckpointError: It was removed by hand: to name the one before would pass over it.
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
        """The steps of these saves, oldest commit first."""
        template = self.names.of(kind)
        found = (template.step_of(c.uri.name) for c in self.live(kind, failures=True))
        return [step for step in found if step is not None]

    def save_id_of(self, step: int, seat: Seat) -> str:
        """Collective: the checkpoint of a step, by the logs of all domains; one alone may not know yet
        what became of it. NotFoundError: there is none.
        """
        main = self.names.main
        name = self.names.of(main).name(step)

        def look() -> tuple[str, LogState] | None:
            return drive(read_view(), seat.storage) if seat.placement.is_node_lead else None

        def decide(found: Sequence[tuple[str, LogState] | None]) -> str:
            lives = list_live(dict(one for one in found if one is not None))
            seals = [s for s in lives if s.artifact is main]
            for seal in seals:
                if seal.name == name:
                    return seal.save_id
            raise NotFoundError(
                f"there is no checkpoint of step {step}",
                uri=seat.storage.root,
                hint=f"there are {', '.join(seal.name for seal in seals) or 'none'}",
            )

        return seat.control.step("find the step", look, decide)


class RunManager:
    """Base class; not made by itself. One thread makes its calls, except for ``latest``, ``steps``."""

    def __init__(
        self,
        ground: Ground,
        settings: Settings,
        rules: Rules,
        preempt_signals: Iterable[SignalName],
    ) -> None:
        self._settings = settings
        self._ground = ground
        ground.owner = type(self).__name__
        self._view = View(ground.where, settings.names)
        self._flight = Flight()
        self._crew: Crew | None = None
        self._needed: frozenset[str] = frozenset()  # what this job was restored from
        self._start = StartingPoint()
        self._bell: Bell | None = None
        self._buffers: HostBuffers | None = None
        # The last that may fail: no handler outlives a manager that was never made.
        signals = PreemptSignals(preempt_signals) if preempt_signals else None
        self._schedule = Schedule(rules, lambda: self._ground.control, signals=signals)
        self._ground.before_release(self._schedule.close)

    # -- when -----------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save now, by steps, time or preemption; the same on all ranks. Collective.

        It costs nothing by steps; the other two are agreed in the background, one call late. Every rank calls
        it equally often.

        Args:
            step: Completed optimizer steps.
        """
        return self._schedule(step)

    @property
    def preempted(self) -> bool:
        """Whether the ranks agreed that the job is about to be stopped: save, then leave."""
        return self._schedule.preempted

    # -- where it goes on -----------------------------------------------------------------

    def resumed_at(self, step: int) -> None:
        """The job continues from ``step`` of the run. Local, on every rank, before the next save.

        For a step that something else loaded than this manager, such as a framework's own loader. Saves, and
        what retention deletes, are then as after ``restore``.

        Args:
            step: Completed optimizer steps of what was loaded.
        """
        self._set_start(StartingPoint(step))

    def _set_start(self, start: StartingPoint) -> None:
        self._start = start
        if self._crew is not None:
            self._crew.set_start(start)

    def _found_nothing(self, kind: Kind) -> None:
        """A look for checkpoints of a kind found none: an earlier restore counts on, and weights that
        nobody saved say nothing of the run.
        """
        if kind is self._settings.names.main and self._start.step is None:
            self._set_start(StartingPoint(is_empty=True))

    # -- saving -------------------------------------------------------------------------

    def _run_job(self, job: Job) -> SaveResult | PendingSave:
        """Collective. Save as the mode says: committed, or on its way, when it returns."""
        crew, kind = self._hired(), job.spec.artifact
        mode = self._settings.mode
        step = job.spec.step or 0
        self._tell(SaveBegan(str(job.target), step, kind.value, mode.value))
        if mode is SaveMode.SYNC:
            result = crew.save(job)
            self._schedule.took(result.wall_s)
            self._saved(kind, step)
            return result
        self._saved(kind, step)  # also where Ctrl-C cuts it short: the other ranks go on
        return crew.save_aside(job, self._flight.add)

    def _saved(self, kind: Kind, step: int) -> None:
        # Weights of a step are no reason to leave its full checkpoint out.
        if kind is not Kind.WEIGHTS:
            self._schedule.saved(step)

    def _make_way(self, step: int, name: str) -> SaveSkipped | None:
        """Raise what failed before; wait for a free place, or say that there is none."""
        limit = self._settings.max_in_flight
        may_skip = self._settings.if_slow is IfSlow.SKIP and not self.preempted
        if may_skip and len(self._flight) >= limit:
            # All ranks or none: this one may know the outcome before the others do.
            done = self._ground.control.step("in flight", self._flight.oldest_is_done, all)
            if not done:
                uri = str(self._ground.root / name)
                skipped = SaveSkipped(uri, step, len(self._flight))
                self._tell(skipped)
                return skipped
        self._settle(limit)
        return None

    def _settle(self, limit: int) -> None:
        last = self._flight.settle(limit)
        if last is not None:
            self._schedule.took(last.wall_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save so far is committed, retention has had its turn, and copies are made or were
        tried once more. Collective.

        A copy that fails is an event for the listeners.

        Args:
            timeout_s: How long, in seconds; None: as long as it takes.

        Raises:
            DeadlineError: It took longer than ``timeout_s``, on all ranks if on one. Saves and copies
                continue.
            CkptfsError: That of a save which failed, on all ranks.
        """
        began = time.monotonic()
        if len(self._flight):
            # All ranks or none: one that gave up alone would have other saves in flight than they.
            control = self._ground.control
            try:
                control.step("wait", lambda: self._flight.wait_done(timeout_s), _need_all)
            except CkptfsError as error:
                # It is the waiting that failed: what was waited for may be committed.
                error.outcome = "unknown"
                raise
        self._settle(1)
        if self._crew is not None:
            left = None if timeout_s is None else max(0.0, timeout_s - time.monotonic() + began)
            self._crew.wait_for_copies(left, alike=True)

    def poll(self) -> int:
        """Return how many saves are under way. Local.

        Raises:
            CkptfsError: That of a save which failed, if this rank knows; the next collective call raises it
                again, on all ranks.
        """
        self._flight.poll()
        return len(self._flight)

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

        It is gone from the run when this returns, an entry in every log; its bytes follow in the background,
        after a crash by the next owner. Saves under way are waited for first. This is for those who decide by
        other rules than ``keep_latest``: what retention or a copy still needs is deleted too.

        Args:
            step: Completed optimizer steps of a committed checkpoint.

        Raises:
            NotFoundError: There is no such checkpoint.
            RunBusyError: The run has a living owner.
        """
        save_id = self._find(step)
        self._hired().delete(save_id)

    def _find(self, step: int) -> str:
        self._settle(1)
        with self._ground.reading() as seat:
            return self._view.save_id_of(step, seat)

    def _pin(self, step: int, *, pinned: bool) -> None:
        save_id = self._find(step)
        # Retention has its turn when the run is claimed: it must not come before the pin.
        self._needed |= {save_id}
        self._hired().pin(save_id, pinned=pinned)

    # -- looking: local, read-only, any time ------------------------------------------------

    @property
    def latest(self) -> Checkpoint | None:
        """The last committed checkpoint that a manager with this template made, None without one.

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
            copies_s: How many seconds copies are waited for; what is left, the next job copies.

        Raises:
            CkptfsError: That of a save which failed, after everything is closed.
        """
        try:
            if not self._ground.is_closed:
                self._settle(1)
                self._finish_copies(copies_s)
        except (KeyboardInterrupt, SystemExit):
            if self._crew is not None:
                self._crew.hurry()  # or leaving begins the wait anew
            raise
        finally:
            self._leave()

    def _finish_copies(self, timeout_s: float) -> None:
        try:
            if self._crew is not None:
                self._crew.wait_for_copies(timeout_s)
        except CkptfsError as error:
            logger.warning("the run ends before its copies are made: %s", error)

    def _leave(self) -> None:
        """Local."""
        self._ground.close()
        if self._bell is not None:
            self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """As ``close``. After an exception of the block nothing is asked of other ranks, which may
        train on: saves on their way are finished, and none of their failures hides the exception.
        """
        if exc is None:
            self.close()
            return
        try:
            if self._crew is not None and not self._ground.is_closed:
                self._crew.hurry()
            if self._flight.is_done():
                self._settle(1)
        except Exception:
            logger.exception("a save failed too, while the block was left by an exception")
        finally:
            self._leave()

    # -- small things ---------------------------------------------------------------------

    def _hired(self) -> Crew:
        if self._crew is None:
            self._hang_bell()  # before there are threads that tell: each would make its own
            self._crew = Crew.hire(
                self._ground,
                self._settings,
                self._tell,
                self._needed,
                self._start,
                buffers=self._staging_buffers(),
            )
            self._warn_of_the_last_save(self._crew.run.seat)
        return self._crew

    def _staging_buffers(self) -> HostBuffers:
        """Collective at its first use."""
        if self._buffers is None:
            local_ranks = self._ground.control.world.local_size
            bound_bytes = self._settings.host_memory_bytes
            self._buffers = HostBuffers(bound_bytes, local_ranks=local_ranks)
            self._ground.before_release(self._buffers.close)
        return self._buffers

    def _warn_of_the_last_save(self, seat: Seat) -> None:
        """Collective. The job before may have needed longer than this one will be given."""

        def look() -> float | None:
            state = seat.known.state
            if state is None or not self._schedule.warns_here:
                return None
            return last_save_s(state, seat.storage)

        # In a step: if this read hung or broke between two steps, the other ranks would wait without a cause.
        label = "how long the last save took"
        self._schedule.took(seat.control.step(label, look, lambda found: found[0]))

    def _tell(self, event: Event) -> None:
        self._hang_bell().tell(event)

    def _hang_bell(self) -> Bell:
        if self._bell is None:
            settings, rank = self._settings, self._ground.control.rank
            self._bell = Bell(settings.listeners, on_commit=settings.on_commit, rank=rank)
        return self._bell


def _need_all(done: Sequence[bool]) -> None:
    late = [rank for rank, is_done in enumerate(done) if not is_done]
    if late:
        raise DeadlineError(
            f"the timeout ended while saves were in progress on ranks {late[:4]}",
            hint="the saves continue; wait again, or pass a longer timeout",
        )
