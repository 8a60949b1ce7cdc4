"""CheckpointManager: when to save, what to keep, where to resume.

    with ckptfs.CheckpointManager("s3://bucket/run", keep_latest=3, mode="async") as manager:
        restored = manager.restore(state)
        for step in range(0 if restored is None else restored.step, steps):
            ...
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss})

Making a manager, restoring and reading append nothing to the run. The first ``save`` (or ``begin``)
claims the run; ``close`` releases it. All calls but ``latest``, ``latest_of``, ``steps``,
``preempted``, ``poll`` and ``resumed_at`` are collective: every rank makes the same calls in the same
order, and every rank gets the same outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from ckptfs.commit.catalog.catalog import Checkpoint
from ckptfs.commit.catalog.unlogged import Unlogged
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.parts.tickets import Ticket
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place
from ckptfs.dcp.async_api import CopySize, size_of_copy
from ckptfs.dcp.incremental.reuse import Unchanged
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.read.load_planner import Allow
from ckptfs.dcp.saving import WriteOptions
from ckptfs.dcp.write.rank_files import WriteEngineName
from ckptfs.events import Restored, SaveResult, SaveSkipped
from ckptfs.manager.listeners import Listener
from ckptfs.manager.load_targets import Reshard
from ckptfs.manager.preemption import SignalName
from ckptfs.manager.restore import restore
from ckptfs.manager.restore_candidates import Fallback, PerRankPolicy, RestoreRequest
from ckptfs.manager.run_manager import RunManager
from ckptfs.manager.run_setup import (
    IfSlow,
    Names,
    RunHandle,
    SaveMode,
    Settings,
    Template,
    Where,
    metrics_of,
)
from ckptfs.manager.run_workers import StartingPoint, StateJob
from ckptfs.manager.schedule import Rules
from ckptfs.manager.state_dict import Saveable, Untold, saveable
from ckptfs.replication.tiers import copies_of, open_copies
from ckptfs.retention.policy import Best, Keep
from ckptfs.uri import options_of

__all__ = ["CheckpointManager"]

logger = logging.getLogger("ckptfs.manager")

Kinds = Literal["checkpoint", "weights"]


class CheckpointManager(RunManager):
    """Saves, retains and restores the checkpoints of one run. Every rank makes one.

    Making one appends nothing, so an evaluation job may make one too. The first ``save`` claims the
    run; RunBusyError names its living owner, if it has one. Options that make no sense are a
    StateError. After a crash of any rank at any time, exactly the committed checkpoints are there.

    Args:
        uri: The run, the same on all ranks.
        keep_latest: How many of the last commits of each kind stay; None deletes nothing.
        keep_every: Steps that are a multiple of it are always kept; None: no such steps.
        keep_best: ``Best("loss")``: the best saves by a metric stay too; None: no such saves.
        mode: "sync" commits before ``save`` returns; "async" returns from ``save`` when the state
            is staged, and commits in the background.
        name: Template of the names of full checkpoints, matched exactly: a checkpoint that it does
            not match is never deleted.
        weights_name: The same for ``kind="weights"``.
        every_steps: ``should_save`` is true at steps that are a multiple of it; None: not by steps.
        every_s: ``should_save`` is true when the last save returned this many seconds ago; None:
            not by time.
        preempt_signals: Signals by which a launcher announces that it will stop the job;
            ``should_save`` is true after one.
        grace_s: How many seconds the launcher waits after a signal.
        max_in_flight: Asynchronous saves under way at once.
        if_slow: What a save does when ``max_in_flight`` saves are under way: "delay" waits for the
            oldest, "skip" saves nothing this time.
        host_memory_bytes: As for ``async_save``: the most bytes of host memory that staging takes;
            None: half of what is available, divided by the host's ranks.
        threads: Data files that each rank writes at once; None: as for ``ckptfs.save``.
        engine: "auto", "direct" or "buffered", as for ``ckptfs.save``.
        writers_per_node: Ranks of one node that write at once; None: all.
        unchanged: "write" writes everything, "reference" writes no bytes for tensors that are as in
            the last checkpoint.
        delete_grace_s: How many seconds a deleted checkpoint stays whole for readers that found it
            before.
        copies: URIs, or ``Copy(uri, keep=Keep(10))``, that committed checkpoints are copied to in
            the background; a checkpoint that waits for a copy is not deleted.
        listeners: Called with every event of ``ckptfs.events``, on the coordinator.
        on_commit: Called with the URI of every commit, on the coordinator; None: no call.
        per_rank: fnmatch patterns of flattened keys that every rank keeps for itself, as for
            ``ckptfs.save``.
        takeover: "auto", "never" or "force", as for ``prepare_run``.
        begin_again: Train from the beginning in a run that has checkpoints, on purpose. Without it,
            a manager that restored nothing may save its first full checkpoint only if that is
            further than the newest one, and retention keeps every checkpoint that is further than
            what this job saves; see docs/howto/resume.md.
        unlogged: What ``restore`` does if stock torch saved into the run after its newest commit,
            unless the call says: "error", or "ignore", for wrappers that call it without an
            argument.
        process_group: The ranks that take part; None: the default group. No collective runs on it.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of that protocol; None: those of ``uri``,
            if it has any.
        scope: Which ranks see the same storage: "auto" finds out by a probe, with "shared" all of
            them do, with "node" those of a node.
        domain: A name in place of ``scope``: ranks with the same name see the same storage; None:
            by ``scope``.
        ground: The opened run to use, for wrappers; None: the manager opens its own.

    Example:
        with ckptfs.CheckpointManager("s3://bucket/run", keep_latest=3, every_steps=1000) as manager:
            restored = manager.restore(state)
            for step in range(1 if restored is None else restored.step + 1, last + 1):
                train()
                if manager.should_save(step):
                    manager.save(step, state)
    """

    def __init__(
        self,
        uri: Any,
        *,
        keep_latest: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        mode: Literal["sync", "async"] = "sync",
        name: str = "step_{N}",
        weights_name: str = "weights_{N}",
        every_steps: int | None = None,
        every_s: float | None = None,
        preempt_signals: Iterable[SignalName] = (),
        grace_s: float = 30.0,
        max_in_flight: int = 1,
        if_slow: Literal["delay", "skip"] = "delay",
        host_memory_bytes: int | None = None,
        threads: int | None = None,
        engine: Literal["auto", "direct", "buffered"] = "auto",
        writers_per_node: int | None = None,
        unchanged: Literal["write", "reference"] = "write",
        delete_grace_s: float = 0.0,
        copies: Sequence[Any] = (),
        listeners: Sequence[Listener] = (),
        on_commit: Callable[[str], None] | None = None,
        per_rank: Sequence[str] = (),
        takeover: Literal["auto", "never", "force"] = "auto",
        begin_again: bool = False,
        unlogged: Literal["error", "ignore"] = "error",
        process_group: Any = None,
        timeout_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
        scope: Literal["auto", "shared", "node"] = "auto",
        domain: str | None = None,
        ground: RunHandle | None = None,
    ) -> None:
        place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
        where = Where(uri, place, process_group, timeout_s, Takeover(takeover))
        settings = Settings(
            names=Names.of_states(Template(name), Template(weights_name)),
            keep=Keep(keep_latest, keep_every, keep_best),
            mode=SaveMode(mode),
            if_slow=IfSlow(if_slow),
            max_in_flight=max_in_flight,
            host_memory_bytes=host_memory_bytes,
            delete_grace_s=delete_grace_s,
            write=WriteOptions(
                threads=threads,
                writers_per_node=writers_per_node,
                unchanged=Unchanged(unchanged),
                engine=WriteEngineName(engine),
            ),
            per_rank=tuple(per_rank),
            listeners=tuple(listeners),
            on_commit=on_commit,
            copies=copies_of(copies, uri),
            takeover=where.takeover,
            begin_again=begin_again,
            unlogged=Unlogged(unlogged),
        )
        rules = Rules(every_steps, every_s, grace_s)
        super().__init__(ground or RunHandle(where), settings, rules, preempt_signals)

    # -- saving -------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        kind: Kinds = "checkpoint",
        failure: bool = False,
        reach_s: float = 60.0,
    ) -> SaveResult | PendingSave | SaveSkipped:
        """Save ``state`` as the checkpoint of ``step``. Collective.

        A step that exists is replaced: the old checkpoint stays until the new one is committed. If
        an earlier job saved it, a line in the log says so. If an earlier asynchronous save failed,
        this call raises that error, on all ranks, and saves nothing: call again. After a crash
        there is exactly the old or the new checkpoint.

        Args:
            step: Completed optimizer steps.
            state: Any nest of tensors, plain values and objects with ``state_dict`` (see
                docs/howto/resume.md). It needs no copy: with ``mode="async"`` tensors may be
                changed when this returns.
            metrics: Numbers for ``keep_best`` and the log; None: none.
            kind: "checkpoint", or "weights", which are saved next to full checkpoints and have
                their own latest.
            failure: A save by a run that is failing: it is made only if every rank calls within
                ``reach_s``, and is never ``latest``. It does not replace the checkpoint of a step
                that was saved healthily.
            reach_s: How many seconds the ranks have to call, with ``failure``.

        Returns:
            A SaveResult; in async mode a PendingSave; or a SaveSkipped (``if_slow="skip"``) when
            the save before it is still under way on some rank.

        Raises:
            CommitConflictError: This manager restored nothing and has saved no full checkpoint, and
                the run has come to this step or further, or the name is taken: call ``restore()``,
                use another run, or pass ``begin_again=True``. With ``failure``: the step is saved
                healthily.
            RunBusyError: The run has a living owner.
            FencedError: The run has a newer owner. Nothing was committed.
            CommitInDoubtError: Whether it is committed is not known; the next save settles it.
            StateError: The state cannot be saved as it is, such as values that differ by rank
                without ``per_rank``.
            NoSpaceError: The storage is full.
            DeadlineError: With ``failure``: not every rank called within ``reach_s``. Or a rank was
                silent for longer than ``timeout_s``.
            CollectiveError: Some ranks failed; every rank raises this same error.
        """
        started = time.perf_counter()
        artifact = Kind(kind)
        name = self._settings.names.of(artifact).name(step)
        checked_metrics = metrics_of(metrics)  # a wrong call is refused before the run is claimed
        self._run_handle.check_open()
        if failure:
            self._run_handle.reach_all(f"the save of step {step} on failure", reach_s)
        skipped = self._make_way(step, name)
        if skipped is not None:
            return skipped
        workers = self._workers()
        workers.check_beginning(artifact, name, step, failure=failure)
        saveable = self._saveable_of(state)
        spec = SaveSpec(
            name,
            step,
            IfExists.REPLACE,
            artifact=artifact,
            run=workers.run.generation,
            failure=failure,
            per_rank=(*self._settings.per_rank, *saveable.per_rank),
            metrics=checked_metrics,
            spares_foreign=True,
        )
        job = StateJob(
            saveable.state_dict, self._run_handle.root / name, spec, self._settings.write, started
        )
        return self._run_job(job)

    def _saveable_of(self, state: Any) -> Saveable:
        try:
            return saveable(state)
        except BaseException as error:  # noqa: BLE001 - raised where all ranks plan, so all hear of it
            return Saveable(Untold(error), ())

    def reserve(self, state: Any) -> Future[int]:
        """Have memory ready for the copy that the first asynchronous save of ``state`` makes.

        Collective. The call looks at the state as a save does, and returns. A thread then has the
        system provide the memory, up to ``host_memory_bytes``, so that the first save stalls
        training no longer than later ones. After ``restore`` a manager with ``mode="async"`` does
        this by itself: call it in a job that restores nothing, as soon as the optimizer has its
        state. The state may change afterwards: a save that needs less uses this memory, one that
        needs more gets other memory, as it would without this call. ``close`` gives the memory
        back. With ``mode="sync"`` nothing is copied and nothing is reserved. A failure, such as
        memory that is not available, is logged and never raised.

        Args:
            state: As for ``save``.

        Returns:
            How many bytes the thread touched, once it is done; 0 if the memory was there already.
            No call has to wait for it.
        """
        self._run_handle.check_open()
        size = CopySize(0, on_device=False)
        if self._settings.mode is SaveMode.ASYNC:
            try:
                size = size_of_copy(saveable(state).state_dict)
            except Exception as error:  # noqa: BLE001 - the save raises it, on all ranks
                logger.warning("no memory is reserved for asynchronous saves: %s", error)
        return self._staging_buffers().reserve(size.size_bytes, pinned=size.on_device)

    def begin(
        self,
        step: int,
        parts: Sequence[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Begin a checkpoint that several groups write. Collective over this manager's ranks.

        Send ``ticket.part(name)`` to each group, which calls ``ckptfs.save(state, part)``. Bring
        the results back here and call ``ticket.commit``. Until then nothing is visible. A step that
        exists is replaced. Retention and listeners run after the commit. After a crash the next
        owner of the run gives up a checkpoint that was not committed.

        Args:
            step: Completed optimizer steps.
            parts: The name of each group's part.
            storage_options: How the groups reach the run; they travel with the ticket. None: as
                this manager does.

        Returns:
            The ticket.

        Raises:
            StateError: The names of the parts are empty, repeated, or no names.
            CkptfsError: As for ``save``.
        """
        name = self._settings.names.of(Kind.CHECKPOINT).name(step)
        self._settle(1)
        workers = self._workers()
        workers.check_beginning(Kind.CHECKPOINT, name, step)
        given = self._run_handle.where.place.storage_options
        ticket = workers.begin(
            name, step, parts, given if storage_options is None else storage_options
        )
        # Not before: a caller that catches an error of begin still has to save this step.
        self._schedule.saved(step)
        return ticket

    # -- restoring ----------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        kind: Kinds = "checkpoint",
        fallback: Literal["error", "older"] = "error",
        per_rank: Literal["error", "drop"] = "error",
        reshard: Mapping[str, Reshard] | None = None,
        include_failures: bool = False,
        strict: bool = True,
        allow: Allow = (),
        objects: Literal["load", "refuse"] = "load",
        part: str | None = None,
        unlogged: Literal["error", "ignore"] | None = None,
    ) -> Restored | None:
        """Restore ``state``, in place, from the newest whole checkpoint. Collective, read-only.

        The newest checkpoint is the last commit, and it must be whole on all domains; one decision
        is made for all ranks. If the run has lost that save, a copy of it is used. After an error
        the tensors are undefined.

        Args:
            state: Shaped like what was saved; fresh objects will do.
            step: Exactly this one; None: the newest.
            kind: "checkpoint" or "weights".
            fallback: What happens if the newest is damaged: "error" never uses an older one,
                "older" uses the newest whole one, and says in ``Restored.skipped`` what that costs.
            per_rank: What happens under another number of ranks with what each rank kept for
                itself: "error" refuses, "drop" leaves it out.
            reshard: Functions that make new states from the old ones, by pattern of keys; None:
                none.
            include_failures: Saves of a failing run count too.
            strict: As for ``ckptfs.load``: False allows all that ``allow`` can name.
            allow: As for ``ckptfs.load``: "missing", "extra", "dtype" or "stock".
            objects: "load" or "refuse", as for ``ckptfs.load``.
            part: This group's part of a checkpoint that several groups wrote; None: the whole.
            unlogged: "error" or "ignore": what happens if stock torch saved into the run after the
                newest commit; None: as the manager was made.

        Returns:
            What was restored. None only if nothing was ever saved: step 0 is not nothing, so test
            ``is None``.

        Raises:
            NotFoundError: There is no such step.
            IncompleteCheckpointError: The newest is not whole; the message says what is missing
                where.
            IntegrityError: The newest is damaged; its bytes differ from what was written.
            ManifestError: The newest, or the log, is damaged or too new.
            AmbiguousCheckpointError: Stock torch saved into the run after the newest commit, and
                ``unlogged`` is "error".
            StateError: The checkpoint does not fit ``state``, or another number of ranks saved what
                each kept for itself.
            CollectiveError: Some ranks failed; every rank raises this same error.
        """
        self._settle(1)
        request = RestoreRequest(
            self._settings.names.of(Kind(kind)).step_of,
            step,
            Kind(kind),
            Fallback(fallback),
            include_failures,
            PerRankPolicy(per_rank),
            dict(reshard or {}),
            strict,
            part,
            self._settings.unlogged_of(unlogged),
            allow,
            objects,
        )
        with (
            self._run_handle.reading() as session,
            open_copies(self._settings.copies, self._run_handle.control) as copies,
        ):
            outcome = restore([session, *copies], state, request)
        if outcome is None:
            self._found_nothing(request.kind)
            return None
        self._needed = frozenset({outcome.save_id})
        self._set_start(StartingPoint(outcome.restored.step))
        if self._settings.mode is SaveMode.ASYNC:
            size = outcome.copied
            self._staging_buffers().reserve(size.size_bytes, pinned=size.on_device)
        self._tell(outcome.restored)
        return outcome.restored

    # -- looking: local, read-only, any time ------------------------------------------------

    def latest_of(self, kind: Kinds) -> Checkpoint | None:
        """The last committed save of ``kind``, by commit order, without saves of a failing run.

        Local, read-only.

        Args:
            kind: "checkpoint" or "weights".

        Raises:
            IncompleteCheckpointError: It was removed by hand; ``ckptfs rm`` records that.
        """
        return self._latest(Kind(kind))
