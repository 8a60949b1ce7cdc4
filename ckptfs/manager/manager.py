"""CheckpointManager: when to save, what to keep, where to go on.

    with ckptfs.CheckpointManager("s3://bucket/run", keep_latest=3, mode="async") as manager:
        restored = manager.restore(state)
        for step in range(0 if restored is None else restored.step, steps):
            ...
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss})

Constructing, restoring and looking append nothing. The first ``save`` (or ``begin``) claims the run;
``close`` releases it. All but ``latest``, ``steps`` and ``poll`` are collective: every rank makes the
same calls in the same order, and every rank gets the same outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from ckptfs.commit.catalog import Checkpoint
from ckptfs.commit.claim import Takeover
from ckptfs.commit.entries import Kind
from ckptfs.commit.opening import Place
from ckptfs.commit.spec import IfExists, SaveSpec
from ckptfs.commit.tickets import Ticket
from ckptfs.commit.unlogged import Unlogged
from ckptfs.dcp.engine import WriteEngineName
from ckptfs.dcp.load_planner import Allow
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.reuse import Unchanged
from ckptfs.dcp.saving import WriteOptions
from ckptfs.events import Restored, SaveResult, SaveSkipped
from ckptfs.manager.base import RunManager
from ckptfs.manager.blanks import Reshard
from ckptfs.manager.candidates import Fallback, PerRankPolicy, RestoreRequest
from ckptfs.manager.copies import copies_of, open_copies
from ckptfs.manager.crew import StartingPoint
from ckptfs.manager.ground import Ground, Where
from ckptfs.manager.listeners import Listener
from ckptfs.manager.naming import Template
from ckptfs.manager.options import IfSlow, Names, SaveMode, Settings, metrics_of
from ckptfs.manager.preemption import SignalName
from ckptfs.manager.restoring import restore
from ckptfs.manager.retention import Best, Keep
from ckptfs.manager.saver import StateJob
from ckptfs.manager.schedule import Rules
from ckptfs.manager.state import Saveable, Untold, saveable
from ckptfs.uri import options_of

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)

Kinds = Literal["checkpoint", "weights"]


class CheckpointManager(RunManager):
    """Saves, retains and restores the checkpoints of one run. Every rank makes one.

    uri: the run. mode: "async" returns from ``save`` when the state is staged, and commits in the
    background.

    What stays: keep_latest: so many of each kind, None deletes nothing; keep_every: steps that it
    divides stay for ever; keep_best: ``Best("loss")``; delete_grace_s: how long a deleted checkpoint
    stays whole for readers that found it before. name, weights_name: templates of directory names,
    matched exactly: what they do not match is never deleted.

    When: every_steps, every_s and preempt_signals are what ``should_save`` goes by; grace_s: how
    long the launcher waits after a signal.

    Asynchronous: max_in_flight saves at once; if_slow: "delay" waits for the oldest, "skip" saves
    nothing this time; host_memory_bytes: as for ``async_save``; writers_per_node: as there.

    unchanged: "reference" writes no bytes for tensors that are what the last checkpoint has.

    copies: URIs, or ``Copy(uri, keep=Keep(10))``, that committed checkpoints are copied to in the
    background; what waits for a copy is not deleted.

    begin_again: train from the beginning in a run that has checkpoints, on purpose. Without it the first
    full checkpoint of a manager that restored nothing is CommitConflictError unless it is further than the
    newest one, and retention keeps whatever is further than what this job saves; see docs/howto/resume.md.

    unlogged: what ``restore`` does where stock torch saved into the run after its newest commit, unless it is
    told itself: "error", or "ignore", for wrappers that call it without an argument.

    threads, engine, per_rank, process_group, timeout_s, storage_options, scope, domain: as for
    ``ckptfs.save``. takeover: as for ``prepare_run``. listeners hear every event of ``ckptfs.events``
    on the coordinator, on_commit the URI of every commit. ground: what it stands on instead of
    opening it, for wrappers.

    Making one appends nothing, so an evaluation job may: the first ``save`` claims the run, and
    RunBusyError names the living owner. StateError: options that make no sense. After a crash of any
    rank at any time exactly the committed checkpoints are there.
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
        ground: Ground | None = None,
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
        super().__init__(ground or Ground(where), settings, rules, preempt_signals)

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
        """Collective. Save ``state`` as the checkpoint of ``step``: completed optimizer steps.

        state: any nest of tensors, plain values and objects with state_dict (see docs/howto/resume.md);
        it needs no copy: with mode="async" tensors may be changed when this returns. metrics: numbers
        for keep_best and the log. kind: "weights" lies beside full checkpoints and has its own
        latest. A step that exists is replaced: the old one stays until the new one is committed, and where an
        earlier job saved it, the log says so.

        CommitConflictError: this manager restored nothing and has saved no full checkpoint, and the run has
        come to this step or further, or the name is taken. ``restore()``, take another run, or pass
        begin_again=True.

        failure: a save by a run that is failing: it is made only if every rank calls within
        ``reach_s`` seconds, and is never ``latest``; CommitConflictError where the step is saved
        healthily, which it does not replace.

        Returns the SaveResult, in async mode a PendingSave, or SaveSkipped (if_slow="skip") when the
        save before it is still on its way on some rank. What an earlier asynchronous save failed of
        is raised first, on all ranks at the same call, and nothing is saved then: call again.
        RunBusyError, FencedError: the run has another owner.
        """
        started = time.perf_counter()
        artifact = Kind(kind)
        name = self._settings.names.of(artifact).name(step)
        told = metrics_of(metrics)  # a wrong call is refused before the run is claimed
        self._ground.check_open()
        if failure:
            self._ground.reach_all(f"the save of step {step} on failure", reach_s)
        skipped = self._make_way(step, name)
        if skipped is not None:
            return skipped
        crew = self._hired()
        crew.check_beginning(artifact, name, step, failure=failure)
        taken = self._taken(state)
        spec = SaveSpec(
            name,
            step,
            IfExists.REPLACE,
            artifact=artifact,
            run=crew.run.generation,
            failure=failure,
            per_rank=(*self._settings.per_rank, *taken.per_rank),
            metrics=told,
            spares_foreign=True,
        )
        job = StateJob(
            taken.state_dict, self._ground.root / name, spec, self._settings.write, started
        )
        return self._run_job(job)

    def _taken(self, state: Any) -> Saveable:
        try:
            return saveable(state)
        except BaseException as error:  # noqa: BLE001 - raised where all ranks plan, so all hear of it
            return Saveable(Untold(error), ())

    def begin(
        self,
        step: int,
        parts: Sequence[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Collective over this manager's ranks: begin a checkpoint that several groups write.

        Send ``ticket.part(name)`` to each group, which calls ``ckptfs.save(state, part)``; bring what
        that returns back here and call ``ticket.commit``. Nothing is visible before. A step that
        exists is replaced. storage_options: how the groups reach the run; by default as this manager
        does, and they travel with the ticket. Retention and listeners have their turn after the
        commit. Errors are as for ``save``.
        """
        name = self._settings.names.of(Kind.CHECKPOINT).name(step)
        self._settle(1)
        crew = self._hired()
        crew.check_beginning(Kind.CHECKPOINT, name, step)
        given = self._ground.where.place.storage_options
        ticket = crew.begin(
            name, step, parts, given if storage_options is None else storage_options
        )
        # Not before: whoever catches an error of begin is still to save this step.
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
        """Collective, read-only. Restore ``state``, in place, from the newest whole checkpoint.

        The newest commit that is whole on all domains, decided once for all ranks; a copy of the same
        save where the run has lost it. None only where nothing was ever saved: step 0 is not nothing,
        so ask ``is None``. state: shaped like what was saved; fresh objects will do.

        step: exactly this one. fallback: "older" goes on from the newest whole one, and says in
        ``Restored.skipped`` what that costs; "error" never goes back unasked. Under another number of
        ranks what each rank kept for itself is StateError, unless per_rank="drop" leaves it out or
        reshard={pattern: function} makes the new state of the old ones. part: this group's, of a
        checkpoint that several groups wrote. strict, allow, objects: as for ``ckptfs.load``.

        NotFoundError: no such step. IncompleteCheckpointError, IntegrityError, ManifestError: the
        newest is damaged, and what is missing where. AmbiguousCheckpointError: stock torch saved into the run
        after the newest commit; unlogged="ignore" goes back to that, None does as the manager was made to.
        After an error tensors are undefined.
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
            self._ground.reading() as seat,
            open_copies(self._settings.copies, self._ground.control) as copies,
        ):
            outcome = restore([seat, *copies], state, request)
        if outcome is None:
            self._found_nothing(request.kind)
            return None
        self._needed = frozenset({outcome.save_id})
        self._set_start(StartingPoint(outcome.restored.step))
        self._tell(outcome.restored)
        return outcome.restored

    # -- looking: local, read-only, any time ------------------------------------------------

    def latest_of(self, kind: Kinds) -> Checkpoint | None:
        """The last committed save of a kind, by commit order; those of a failing run apart."""
        return self._latest(Kind(kind))
