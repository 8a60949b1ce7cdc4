"""``ckptfs.save`` and ``ckptfs.load``: a sharded state by URI, whole on every rank or not at all.

    save   plan (checks, who writes what)  space  begin  write  seal  project     -> SaveResult
    load   look  find  plan (checks)  read and verify                             -> LoadResult

Both are collective: every rank of the group calls them with its own state dict, in the same order, and every
rank gets the same outcome. No collective runs on the user's group, so a thread of its own may call them while
the main thread trains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from torch.distributed.checkpoint.stateful import Stateful

from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.catalog.locate import following, reading_session
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run, agreeing_target
from ckptfs.commit.parts.tickets import SealedPart, TicketPart
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place, RunSession, agree_uri, control_for, open_session, step_of
from ckptfs.control.control import Control, timeout_of
from ckptfs.control.messages import Stage
from ckptfs.control.world import World
from ckptfs.dcp.incremental.reuse import Unchanged
from ckptfs.dcp.loading import MetadataAhead, load_at
from ckptfs.dcp.planning.state_dicts import as_state_dict
from ckptfs.dcp.read.load_planner import Allow
from ckptfs.dcp.saving import WriteOptions, plans_of, save_at, save_part
from ckptfs.dcp.write.pipeline import PLANNING
from ckptfs.dcp.write.rank_files import WriteEngineName
from ckptfs.errors import StateError
from ckptfs.events import LoadResult, SaveResult
from ckptfs.uri import HasProtocol, Uri, options_of

__all__ = ["load", "save"]

logger = logging.getLogger("ckptfs.dcp")

Scope = Literal["auto", "shared", "node"]
EngineName = Literal["auto", "direct", "buffered"]


@overload
def save(
    state_dict: Mapping[str, Any] | Stateful,
    uri: TicketPart,
    *,
    per_rank: Sequence[str] = ...,
    require_space: bool = ...,
    threads: int | None = ...,
    engine: EngineName = ...,
    process_group: Any = ...,
    timeout_s: float | None = ...,
    storage_options: Mapping[str, Any] | None = ...,
    scope: Scope = ...,
    domain: str | None = ...,
) -> SealedPart: ...


@overload
def save(
    state_dict: Mapping[str, Any] | Stateful,
    uri: str | os.PathLike[Any] | HasProtocol | Uri,
    *,
    step: int | None = ...,
    if_exists: Literal["error", "replace"] = ...,
    run: Run | None = ...,
    per_rank: Sequence[str] = ...,
    require_space: bool = ...,
    threads: int | None = ...,
    engine: EngineName = ...,
    unchanged: Literal["write", "reference"] = ...,
    process_group: Any = ...,
    timeout_s: float | None = ...,
    storage_options: Mapping[str, Any] | None = ...,
    scope: Scope = ...,
    domain: str | None = ...,
) -> SaveResult: ...


def save(
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
    unchanged: Literal["write", "reference"] = "write",
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> SaveResult | SealedPart:
    """Save a state dict to ``uri``; committed and durable when it returns. Collective.

    If any rank fails before the commit, every rank raises the same error, and the old checkpoint stays. After
    a crash there is exactly the old or the new checkpoint.

    ``uri`` may be ``ticket.part("actor")``: this group's part of a checkpoint that several groups write. Then
    the part is sealed and durable when this returns a SealedPart, and ``ticket.commit`` commits it; name, step
    and run are those of the ticket.

    Args:
        state_dict: Nested dicts and lists of tensors, DTensors, ShardedTensors, plain objects, and objects
            with ``state_dict()`` at the top level, called in sorted order of their keys. Tensors may have any
            shape and dtype that torch has. A module, an optimizer or another such object alone is saved under
            "state", a module without the names that wrappers add.
        uri: Run and name, ``s3://bucket/run/step_100``; the run is the parent. The same on all ranks.
        step: Completed optimizer steps; None takes the number that ends the name.
        if_exists: "error" refuses a name that is committed; "replace" keeps the old checkpoint until the new
            one is committed.
        run: A held run, which fences the save. None: the save is exclusive by name only. Then "replace" claims
            the run for the call if the name is in the log, and waits up to ``timeout_s`` for other calls that
            have claimed it. It claims nothing if the name is new.
        per_rank: fnmatch patterns of flattened keys that differ by rank and are kept for each. Without a
            pattern a difference is an error.
        require_space: Refuse before a byte is written if the state cannot fit; otherwise that is a
            warning.
        threads: Data files that each rank writes at once; None: one, but up to four on a filesystem in
            memory, where only one thread at a time can write into a file.
        engine: How files are written: "auto" decides by the storage, "direct" bypasses the page cache wherever
            that is possible, "buffered" never does. ``direct_bytes`` of the counters says what was done.
        unchanged: "write" writes everything; "reference" does not write again what the last committed
            checkpoint of the run already holds, and needs ``run``.
        process_group: The ranks that take part; None: the default group. No collective runs on it.
        timeout_s: How long to wait for a silent rank, and for other calls that hold the run, in seconds;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: What fsspec's filesystem of that protocol takes; None: those of ``uri``, where it has
            some.
        scope: Which ranks see the same storage: "auto" finds out by a probe, with "shared" all of them do,
            with "node" those of a node.
        domain: A name in place of ``scope``: ranks with the same name see the same storage; None: by
            ``scope``.

    Returns:
        What was saved, on this rank and on all: a SaveResult, or for a ticket's part a SealedPart.

    Raises:
        CommitConflictError: ``if_exists`` is "error", and the name is committed already, or holds a
            checkpoint that ckptfs did not write.
        CommitInDoubtError: Whether it is committed is not known; the next save or ``prepare_run`` settles it.
        FencedError: ``run`` has a newer owner. Nothing was committed.
        RunBusyError: ``if_exists="replace"`` without ``run``, and the run has a living owner that is not such
            a call.
        StateError: Values differ by rank and match no pattern of ``per_rank``; several ranks have no process
            group; or the arguments contradict each other.
        NoSpaceError: The storage is full; with ``require_space`` before a byte is written.
        UriError: The URI cannot be read, or ranks were given different ones.
        CollectiveError: Some ranks failed; every rank raises this same error, and ``failures`` has their
            errors. If all of these have one type, it is of that type too.
        DeadlineError: A rank was silent for longer than ``timeout_s``.
        ControlPlaneLostError: The store that the ranks talk through is gone.

    Example:
        result = ckptfs.save({"model": model, "step": 100}, "s3://bucket/run/step_100")
        print(result)
    """
    started = time.perf_counter()
    state = as_state_dict(state_dict)
    if isinstance(uri, TicketPart):
        if (step, run, if_exists, unchanged) != (None, None, "error", "write"):
            raise StateError(
                "a part takes step, run and if_exists from its ticket, and it is always "
                "written completely",
                uri=uri.uri,
                hint="pass them where the ticket is begun",
            )
        place = Place({**uri.storage_options, **(storage_options or {})}, scope, domain)
        options = WriteOptions(threads, require_space, engine=WriteEngineName(engine))
        with _control(process_group, timeout_s) as control:
            return save_part(state, uri, control, place, per_rank=tuple(per_rank), options=options)
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    wait_s = timeout_of(timeout_s)
    with (
        _session_for(uri, run, process_group, timeout_s, place) as (session, target, agreeing),
        claimed(session, run, IfExists(if_exists), Unchanged(unchanged), wait_s) as holder,
    ):
        spec = SaveSpec(
            target.name,
            step_of(target.name, step),
            IfExists(if_exists),
            run=None if holder is None else holder.generation,
            per_rank=tuple(per_rank),
            wait_s=wait_s,
        )
        options = WriteOptions(
            threads,
            require_space,
            unchanged=Unchanged(unchanged),
            engine=WriteEngineName(engine),
            plans=plans_of(run),
        )
        return save_at(state, session, target, spec, options, agreeing=agreeing, started=started)


def load(
    state_dict: dict[str, Any] | Stateful,
    uri: Any,
    *,
    strict: bool = True,
    allow: Allow = (),
    objects: Literal["load", "refuse"] = "load",
    verify: Literal["read", "off"] = "read",
    run: Run | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    scope: Scope = "auto",
    domain: str | None = None,
) -> LoadResult:
    """Load a checkpoint into ``state_dict``, in place, with any number of ranks. Collective.

    Nothing is written. Tensors are filled in place, in any sharding that they have now. Objects with
    ``load_state_dict()`` at the top level get their states; one such object alone gets the state under
    "state". Missing and unexpected keys, shapes and dtypes that differ are refused before a byte is read. It
    is always a StateError if an optimizer would stay empty because its own ``state_dict()`` is empty before
    its first step. Checkpoints written by stock torch load too, unverified. After an error tensors are
    undefined.

    Args:
        state_dict: What is to be filled: a dict, or one object with ``load_state_dict()``.
        uri: Run and name, ``s3://bucket/run/step_100``; the same on all ranks.
        strict: False allows all that ``allow`` can name.
        allow: One or several of "missing" (such keys keep their values, and the result names them), "extra"
            (keys that ``state_dict`` lacks are left out, and named), "dtype" (converted); "stock" is what
            torch's ``dcp.load`` allows: "extra" and "dtype".
        objects: "load" loads objects that contain only data; "refuse" refuses an object that is not a plain
            value (numbers, text, bytes, their containers) with an error that names its key.
        verify: "read" compares every block that is read with its digest; "off" does not.
        run: A held run, of this checkpoint or of another. The ranks talk through its control plane: if a rank
            died before this call, the error names it within seconds instead of after ``timeout_s``, and
            nothing has to be opened. ``process_group`` and ``timeout_s`` are then those of the run. It need not
            be the newest owner. None: the call opens its own control plane.
        process_group: The ranks that take part; None: the default group. No collective runs on it.
        timeout_s: How long to wait for a silent rank, in seconds; None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: What fsspec's filesystem of that protocol takes; None: those of ``uri``, where it has
            some.
        scope: Which ranks see the same storage: "auto" finds out by a probe, with "shared" all of them do,
            with "node" those of a node.
        domain: A name in place of ``scope``: ranks with the same name see the same storage; None: by
            ``scope``.

    Returns:
        What was read, on this rank and on all ranks, and the keys that were left out.

    Raises:
        NotFoundError: There is no such checkpoint.
        IncompleteCheckpointError: Not all of it is there.
        AmbiguousCheckpointError: Stock torch saved over this checkpoint.
        StateError: Keys, shapes or dtypes do not fit, an object is refused, or several ranks have no process
            group. Nothing was read.
        UriError: The URI cannot be read, or ranks were given different ones.
        CollectiveError: Some ranks failed while they read; ``failures`` names rank, URI and file. If all of
            these errors have one type, it is of that type too.
        IntegrityError: Bytes differ from what was written; as a CollectiveError.
        ManifestError: The description is damaged or too new; as a CollectiveError if only some ranks find
            that.
        DeadlineError: A rank was silent for longer than ``timeout_s``.
        ControlPlaneLostError: The store that the ranks talk through is gone.

    Example:
        state = {"model": model, "step": 0}
        ckptfs.load(state, "s3://bucket/run/step_100")
    """
    started = time.perf_counter()
    state = as_state_dict(state_dict)
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with (
        _control_of(run, process_group, timeout_s) as control,
        reading_session(uri, control, place) as (session, target, name),
    ):
        metadata = MetadataAhead(session)

        def load_found(found: LocatedCheckpoint) -> LoadResult:
            return load_at(
                state,
                session,
                target,
                found,
                metadata,
                strict=strict,
                allow=allow,
                objects=objects,
                verify=verify,
                started=started,
            )

        return following(session, name, load_found, metadata.read)


@contextlib.contextmanager
def _control(process_group: Any, timeout_s: float | None) -> Iterator[Control]:
    with control_for(process_group, timeout_s) as control:
        need_group(control.world)
        yield control


@contextlib.contextmanager
def _control_of(run: Run | None, process_group: Any, timeout_s: float | None) -> Iterator[Control]:
    """Yield the held run's control, or a new one for this call."""
    if run is None:
        with _control(process_group, timeout_s) as control:
            yield control
        return
    run.check_held()
    need_group(run.session.control.world)
    yield run.session.control


def need_group(world: World) -> None:
    """Raise StateError if several ranks would save tensors without a process group."""
    if world.size > 1 and not world.has_group:
        raise StateError(
            f"WORLD_SIZE is {world.size}, but torch.distributed is not initialized",
            rank=world.rank,
            hint="call torch.distributed.init_process_group() before saving or loading tensors",
        )


@contextlib.contextmanager
def _session_for(
    uri: Any, run: Run | None, process_group: Any, timeout_s: float | None, place: Place
) -> Iterator[tuple[RunSession, Uri, Sequence[Stage]]]:
    """Yield the held run's session, or a new one for this call, the target, and what is left to agree on."""
    if run is not None:
        need_group(run.session.control.world)
        yield run.session, *agreeing_target(run, uri, PLANNING)
        return
    with _control(process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        with open_session(target.parent, control, place, write=True) as session:
            yield session, target, ()


@contextlib.contextmanager
def claimed(
    session: RunSession, run: Run | None, if_exists: IfExists, unchanged: Unchanged, wait_s: float
) -> Iterator[Run | None]:
    """Yield the run that fences a save, or None.

    That is the held run, or a run claimed for this call if an older save is to be referenced. A save that
    replaces claims the run by itself if something has the name.
    """
    if run is not None or if_exists is IfExists.ERROR or unchanged is Unchanged.WRITE:
        yield run
        return
    caller = Caller('save(if_exists="replace")', for_call=True, wait_s=wait_s)
    with claim(session, takeover=Takeover.DEAD, caller=caller) as holder:
        yield holder
