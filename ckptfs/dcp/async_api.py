"""``ckptfs.async_save``: returns when the tensors may be changed; a thread writes and commits.

    caller    stage: copy into host buffers        -> PendingSave
    thread    on its own control: plan with the other ranks, begin, write, seal, project

``begin_in_background`` is the part that a manager uses too; it is given the thread, the buffers and the save. A save
without a run uses those of the process: one thread, so that saves commit in order, and one pool of buffers,
so that the pages of its memory are there already when the next save comes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch.distributed.checkpoint.stateful import Stateful

from ckptfs import _torch
from ckptfs.commit.ownership.run import Run, agree_target
from ckptfs.commit.parts.tickets import TicketPart
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place, RunSession, agree_uri, open_session, step_of
from ckptfs.control.control import Control, control_opener, timeout_of
from ckptfs.control.world import World
from ckptfs.dcp.api import claimed, need_group
from ckptfs.dcp.incremental.reuse import Memory, Unchanged
from ckptfs.dcp.pending import PendingSave, Watch
from ckptfs.dcp.planning.state_dicts import as_state_dict
from ckptfs.dcp.saving import Tell, WriteOptions, plans_of, save_at, tell_nobody
from ckptfs.dcp.staging.buffers import HostBuffers
from ckptfs.dcp.staging.staging import (
    CopySize,
    StagedState,
    failed,
    size_of_copy,
    size_of_tensors,
    stage,
)
from ckptfs.dcp.worker import SaveWorker, exit_s
from ckptfs.dcp.write.pipeline import PlanMemory
from ckptfs.dcp.write.rank_files import WriteEngineName
from ckptfs.errors import StateError, UriError
from ckptfs.events import SaveResult
from ckptfs.events import Staged as StagedEvent
from ckptfs.uri import Uri, mask_credentials, options_of

__all__ = [
    "CopySize",
    "SaveResources",
    "async_save",
    "begin_in_background",
    "size_of_copy",
    "size_of_tensors",
    "submit_pending",
]

logger = logging.getLogger("ckptfs.dcp")

Scope = Literal["auto", "shared", "node"]
EngineName = Literal["auto", "direct", "buffered"]
_Opening = Callable[[], contextlib.AbstractContextManager[tuple[RunSession, Uri, Run | None]]]


def async_save(
    state_dict: Mapping[str, Any] | Stateful,
    uri: Any,
    *,
    step: int | None = None,
    if_exists: Literal["error", "replace"] = "error",
    run: Run | None = None,
    per_rank: Sequence[str] = (),
    require_space: bool = False,
    threads: int | None = None,
    engine: EngineName = "auto",
    writers_per_node: int | None = None,
    unchanged: Literal["write", "reference"] = "write",
    host_memory_bytes: int | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> PendingSave:
    """Like ``save``, but return when the tensors may be changed; see ``PendingSave``. Collective.

    If ``host_memory_bytes`` is at least the local state, the call takes as long as one copy of it and talks
    to no other rank. The first copy into memory that was not touched before takes longer. For large states
    the thread then also writes from the caller's tensors, and the call returns when everything is copied or
    written.

    If ``host_memory_bytes`` is less than the local state, the call blocks until all but the last window is
    written. A single tensor that has to be copied anyway, because it is on a device or not contiguous, may
    exceed the bound while it is written.

    Saves of one process are written one after another in the order of the calls, which has to be the same on
    all ranks. Nothing is sent over the process group, which may be destroyed before the save ends. When the
    interpreter ends, saves in progress get CKPTFS_EXIT_S seconds, 60 by default.

    A failure, while staging too, fails the save on all ranks with the same error, which is in the futures and
    in the log. Ctrl-C while the call blocks is raised here and fails the save everywhere. After a crash there
    is exactly the old or the new checkpoint.

    Args:
        state_dict: As for ``save``.
        uri: Run and name, as for ``save``, but not a part of a ticket.
        step: Completed optimizer steps; None takes the number that ends the name.
        if_exists: "error" or "replace", as for ``save``.
        run: A held run, which fences the save; None: exclusive by name only, as for ``save``.
        per_rank: fnmatch patterns of flattened keys that differ by rank and are kept for each.
        require_space: Refuse before a byte is written if the state cannot fit; otherwise that is a
            warning.
        threads: Data files that each rank writes at once; None: as for ``save``.
        engine: "auto", "direct" or "buffered", as for ``save``.
        writers_per_node: Ranks of one node that write at once; None: all.
        unchanged: "write" or "reference", as for ``save``.
        host_memory_bytes: The most bytes of host memory that copies of this process take; None: half of what
            the host has available, divided by its ranks.
        process_group: The ranks that take part; None: the default group.
        timeout_s: How long to wait for a silent rank, in seconds; None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: What fsspec's filesystem of that protocol takes; None: those of ``uri``, if it has
            some.
        scope: "auto", "shared" or "node", as for ``save``.
        domain: A name in place of ``scope``, as for ``save``; None: by ``scope``.

    Returns:
        The save in progress; its futures have the result or the error, which are those of ``save``.

    Raises:
        StateError: ``uri`` is a ticket's part, which is saved synchronously; an argument has none of its
            values; or several ranks have no process group. Every other error is in the futures.

    Example:
        pending = ckptfs.async_save({"model": model}, "s3://bucket/run/step_100")
        ...  # train on
        result = pending.result(timeout_s=600)
    """
    state = as_state_dict(state_dict)
    if isinstance(uri, TicketPart):
        raise StateError(
            "a ticket's part is saved synchronously",
            uri=uri.uri,
            hint="call ckptfs.save(state, ticket.part(...)), in a thread of your own if you like",
        )
    target = _target(uri)
    pending = PendingSave(
        mask_credentials(str(uri)) if target is None else str(target),
        step if target is None else step_of(target.name, step),
    )
    exists = IfExists(if_exists)
    how = Unchanged(unchanged)
    wait_s = timeout_of(timeout_s)
    if run is not None:
        world = run.session.control.world
        need_group(world)
        resources = _resources_of(run)
        opening: _Opening = partial(_in_run, run, resources, uri)
    else:
        world = World.detect(process_group)
        need_group(world)
        resources = _PROCESS.resources(world)
        ranks = _torch.group_ranks(process_group) if world.size > 1 else ()
        opener = control_opener(
            world, process_group, timeout_s, name=resources.opening(ranks), closes_at_exit=False
        )
        place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
        opening = partial(_alone, opener, resources, uri, place, (exists, how, wait_s))

    options = WriteOptions(
        threads,
        require_space,
        writers_per_node,
        how,
        resources.memory,
        WriteEngineName(engine),
        resources.plans,
    )

    def save(staged: StagedState, watch: Watch) -> SaveResult:
        with opening() as (session, agreed, holder):
            spec = SaveSpec(
                agreed.name,
                step_of(agreed.name, step),
                exists,
                run=None if holder is None else holder.generation,
                per_rank=tuple(per_rank),
                wait_s=wait_s,
            )
            return save_at(
                staged, session, agreed, spec, options, started=pending.began, watch=watch
            )

    resources.buffers.resize(host_memory_bytes)
    return begin_in_background(state, pending, save, resources, compare_ranks=world.size > 1)


@dataclass(slots=True)
class SaveResources:
    """What saves in the background need and keep.

    Attributes:
        worker: The thread.
        buffers: The memory to stage into.
        session: Of a run, a session with a control of its own; else None.
        memory: What is known of the last save, for ``unchanged="reference"``.
        plans: What is known of the last plans.
        pid: The process that made this.
    """

    worker: SaveWorker
    buffers: HostBuffers
    session: RunSession | None = None
    memory: Memory = field(default_factory=Memory)
    plans: PlanMemory = field(default_factory=PlanMemory)
    pid: int = field(default_factory=os.getpid)
    _openings: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def opening(self, ranks: tuple[int, ...]) -> str:
        """Return a name for the control of one save of these ranks.

        It is the same on all of them, and another one for their next save. Groups of ranks that share this
        process are counted separately.
        """
        self._openings[ranks] += 1
        return f"async/{self._openings[ranks]}"

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what is in progress (``SaveWorker.close``) and free the memory."""
        done = self.worker.close(timeout_s)
        self.buffers.close()
        if self.session is not None and done:
            self.session.control.close()
        return done

    def leave(self) -> None:
        """Close after an exception: saves in progress get ``exit_s`` seconds, then are abandoned."""
        if not self.close(exit_s()):
            logger.error("a save is abandoned: an exception ended the run")


def begin_in_background(
    state_dict: Mapping[str, Any],
    pending: PendingSave,
    save: Callable[[StagedState, Watch], SaveResult],
    resources: SaveResources,
    *,
    compare_ranks: bool,
    tell: Tell = tell_nobody,
) -> PendingSave:
    """Stage a state, and call ``save`` with it in the background; return once it is staged.

    Args:
        state_dict: The state.
        pending: The save.
        save: ``save_at`` with a session that only this thread uses (a clone), or a function that does more. It is
            collective, so all ranks start the same saves in the same order.
        resources: Thread and buffers.
        compare_ranks: Whether other ranks take part.
        tell: Receives ``Staged``, on this thread.

    Returns:
        ``pending``; its futures get every error except Ctrl-C.
    """
    interrupted: BaseException | None = None
    try:
        staged = stage(state_dict, resources.buffers, pending, compare_ranks=compare_ranks)
    except BaseException as error:  # noqa: BLE001 - raised below; the other ranks must get it first
        interrupted = error
        staged = failed(error, pending)

    def job() -> SaveResult:
        try:
            result = save(staged, pending.watch())
        except BaseException as error:
            staged.give_up(error)
            pending.fail(error)
            raise
        finally:
            # Not before: until here a writer may have been reading what was staged.
            staged.close()
        pending.succeed(result)
        return result

    try:
        future = resources.worker.submit(f"saving {pending.uri}", job)
    except BaseException as error:
        staged.close()
        pending.fail(error)
        raise
    # If a save never begins, because the interpreter ends, no job reports that. If its thread hangs, its
    # job does not either, and the caller may be waiting for memory that the thread should release.
    future.add_done_callback(lambda ended: _settle(pending, staged, ended))
    pending.committed.add_done_callback(lambda ended: _let_go(staged, ended))
    if interrupted is not None:
        raise interrupted
    staged.wait()
    pending.has_staged(staged.cut_short)
    if staged.cut_short is None:
        tell(StagedEvent(pending.uri, pending.step, staged.size_bytes, pending.stall_s))
    return pending


def _settle(pending: PendingSave, staged: StagedState, ended: Future[SaveResult]) -> None:
    error = ended.exception()
    if error is not None and not pending.done():
        staged.give_up(error)
        staged.close()
        pending.fail(error)


def _let_go(staged: StagedState, ended: Future[SaveResult]) -> None:
    error = ended.exception()
    if error is not None:
        staged.give_up(error)


def submit_pending(
    worker: SaveWorker, pending: PendingSave, save: Callable[[], SaveResult]
) -> None:
    """Run a save that needs no staging on ``worker``; ``pending`` gets its result or its error."""

    def job() -> SaveResult:
        try:
            result = save()
        except BaseException as error:
            pending.fail(error)
            raise
        pending.succeed(result)
        return result

    def settle(ended: Future[SaveResult]) -> None:
        # If the save never begins, because the interpreter ends, no job reports that.
        error = ended.exception()
        if error is not None and not pending.done():
            pending.fail(error)

    try:
        worker.submit(f"saving {pending.uri}", job).add_done_callback(settle)
    except BaseException as error:
        pending.fail(error)
        raise


# -- where a save runs ---------------------------------------------------------------------------


class _ProcessSaves:
    """The thread and the buffers of saves without a run.

    They belong to the process: it keeps memory from call to call and has one order for all such saves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resources: SaveResources | None = None

    def resources(self, world: World) -> SaveResources:
        """Return the SaveResources, made by the first call, and again in a forked child."""
        with self._lock:
            if self._resources is None or self._resources.pid != os.getpid():
                self._resources = SaveResources(
                    SaveWorker(), HostBuffers(local_ranks=world.local_size)
                )
            return self._resources


_PROCESS = _ProcessSaves()


def _resources_of(run: Run) -> SaveResources:
    """Return the run's own SaveResources, which ends with the run.

    The first call clones the control, so all ranks have to call this in the same order.
    """
    if run.aside is None:
        session = replace(run.session, control=run.session.control.clone())
        buffers = HostBuffers(local_ranks=session.control.world.local_size)
        run.aside = made = SaveResources(SaveWorker(), buffers, session, plans=plans_of(run))
        # If the run is garbage collected, no save is in progress, because its job would refer to the run.
        run.closing.callback(made.close, 0.0)
    resources: SaveResources = run.aside
    return resources


@contextlib.contextmanager
def _in_run(
    run: Run, resources: SaveResources, uri: Any
) -> Iterator[tuple[RunSession, Uri, Run | None]]:
    session = resources.session
    assert session is not None  # noqa: S101 - a run's has one
    yield session, agree_target(run, session.control, uri), run


@contextlib.contextmanager
def _alone(
    opener: Callable[[], Control],
    resources: SaveResources,
    uri: Any,
    place: Place,
    how: tuple[IfExists, Unchanged, float],
) -> Iterator[tuple[RunSession, Uri, Run | None]]:
    with resources.worker.keeping(opener()) as control:
        target = agree_uri(control, uri)
        with (
            open_session(target.parent, control, place, write=True) as session,
            claimed(session, None, *how) as holder,
        ):
            yield session, target, holder


def _target(uri: Any) -> Uri | None:
    """Return the URI as this rank reads it, for messages; None if it is not valid.

    All ranks raise the error for an invalid URI together, later.
    """
    try:
        return Uri.parse(uri)
    except UriError:
        return None
