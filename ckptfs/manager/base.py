"""What the managers of a run have in common, whatever they save: one run, one flight, one crew.

    RunManager            schedule, waiting, retention, looking, the end
      CheckpointManager   state dicts: tensors, sharded, resharded
      DirectoryManager    directories of files that a framework wrote

A subclass saves through ``_hired()``, the crew that works for the claimed run, after ``_make_way``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from ckptfs.commit.catalog import Checkpoint
from ckptfs.commit.entries import Kind
from ckptfs.commit.seat import Seat
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import CkptfsError, DeadlineError
from ckptfs.events import Event, SaveBegan, SaveResult, SaveSkipped
from ckptfs.manager.crew import Crew, StartingPoint
from ckptfs.manager.flight import Flight
from ckptfs.manager.ground import Ground
from ckptfs.manager.lately import last_save_s
from ckptfs.manager.listeners import Bell
from ckptfs.manager.options import IfSlow, SaveMode, Settings
from ckptfs.manager.preemption import PreemptSignals, SignalName
from ckptfs.manager.saver import Job
from ckptfs.manager.schedule import Rules, Schedule
from ckptfs.manager.view import View

__all__ = ["RunManager"]

logger = logging.getLogger(__name__)


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
        # The last that may fail: no handler outlives a manager that was never made.
        signals = PreemptSignals(preempt_signals) if preempt_signals else None
        self._schedule = Schedule(rules, lambda: self._ground.control, signals=signals)
        self._ground.before_release(self._schedule.close)

    # -- when -----------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Collective. Whether to save now, by steps, time or preemption; the same on all ranks.

        Costs nothing by steps; the other two are agreed in the background, one call late. Every rank
        calls it equally often.
        """
        return self._schedule(step)

    @property
    def preempted(self) -> bool:
        """Whether the ranks agreed that the job is about to be stopped: save, then leave."""
        return self._schedule.preempted

    # -- where it goes on -----------------------------------------------------------------

    def resumed_at(self, step: int) -> None:
        """Local, on every rank, before the next save: the job goes on from ``step`` of the run, which
        something else loaded than this manager, such as a framework's own loader.

        Saves, and what retention lets go, are then as after ``restore``.
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
        """Collective. Return when every save so far is committed, retention has had its turn, and
        copies are made or were tried once more.

        Raises what a save failed of, on all ranks; a copy that fails is told to the listeners.
        DeadlineError after timeout_s, on all ranks if on one; saves and copies go on.
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
        """Local. How many saves are on their way. Raises what one failed of, if this rank knows; the
        next collective call raises it again, on all ranks.
        """
        self._flight.poll()
        return len(self._flight)

    # -- keeping ------------------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Collective. Retention leaves this step alone until ``unpin``, in later jobs too.

        NotFoundError: there is no such checkpoint. RunBusyError as for ``save``.
        """
        self._pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Collective. Retention may let the step go again."""
        self._pin(step, pinned=False)

    def delete(self, step: int) -> None:
        """Collective. Delete one checkpoint: it is gone from the run when this returns, an entry in
        every log; its bytes follow in the background. Saves on their way are waited for first.

        For whoever decides by other rules than keep_*; what retention or a copy still needs is not
        asked. NotFoundError: there is no such checkpoint. RunBusyError as for ``save``.
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
        """The last committed checkpoint that a manager with this template made, None without one."""
        return self._latest(self._settings.names.main)

    def _latest(self, kind: Kind) -> Checkpoint | None:
        live = self._view.live(kind, failures=False)
        return live[-1] if live else None

    @property
    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, oldest commit first."""
        return self._view.steps(self._settings.names.main)

    # -- the end ------------------------------------------------------------------------

    def close(self, copies_s: float = 300.0) -> None:
        """Collective. Finish what is on its way, copies too, and release the run. Harmless twice.

        copies_s: how long copies are waited for; what is left, the next job copies. Raises what a
        save failed of, after everything is closed.
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
            logger.warning("the run is left before its copies are made: %s", error)

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
                self._ground, self._settings, self._tell, self._needed, self._start
            )
            self._warn_of_the_last_save(self._crew.run.seat)
        return self._crew

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
            f"waited long enough, and saves are on their way on ranks {late[:4]}",
            hint="they go on; wait again, or give it more time",
        )
