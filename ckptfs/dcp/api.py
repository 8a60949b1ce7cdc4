"""``ckptfs.save`` and ``ckptfs.load``: a sharded state by URI, whole on every rank or not at all.

    save   plan (checks, who writes what)  begin  space  write  seal  project     -> SaveResult
    load   look  find  plan (checks)  read and verify                             -> LoadResult

Both are collective: every rank of the group calls them with its own state dict, in the same order,
and every rank gets the same outcome. No collective runs on the user's group; a thread of its own may
call them while the main thread trains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

from torch.distributed.checkpoint.stateful import Stateful

from ckptfs.commit.claim import Takeover, claim
from ckptfs.commit.locate import following, reading_seat
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat, step_of
from ckptfs.commit.run import Caller, Run
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import IfExists, SaveSpec
from ckptfs.commit.tickets import SealedPart, TicketPart
from ckptfs.dcp.engine import WriteEngineName
from ckptfs.dcp.load_planner import Allow
from ckptfs.dcp.loading import load_at
from ckptfs.dcp.parts import save_part
from ckptfs.dcp.reuse import Unchanged
from ckptfs.dcp.saving import WriteOptions, plans_of, save_at
from ckptfs.dcp.share import as_state_dict
from ckptfs.errors import StateError
from ckptfs.events import LoadResult, SaveResult
from ckptfs.topology.control import Control, timeout_of
from ckptfs.topology.world import World
from ckptfs.uri import HasProtocol, Uri, options_of

__all__ = ["load", "save"]

logger = logging.getLogger(__name__)

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
    """Collective. Save a state dict to ``uri``; committed and durable when it returns.

    state_dict: nested dicts and lists of tensors, DTensors, ShardedTensors, plain objects, and
    objects with state_dict() at the top level, called in sorted order of their keys; a module, an optimizer or
    another such object alone lies under "state", a module without the names that wrappers add. uri: run and
    name, ``s3://bucket/run/step_100``; the run is the parent. step: completed optimizer steps; None takes the number that ends the name.
    if_exists: "error" is CommitConflictError when the name is committed; "replace" keeps the old
    one until the new one is committed. run: a held Run fences the save; without it the save is
    exclusive by name only, and "replace" claims the run for the call where something has the name: it waits
    up to ``timeout_s`` for other calls that do so too, and is RunBusyError at once where an owner lives
    beyond a call. A name that nobody knows claims nothing. per_rank: fnmatch patterns of
    flattened keys whose values differ by rank and are kept for each; unasked a difference is
    StateError. require_space: NoSpaceError before a byte is written where it cannot fit; otherwise
    a warning. threads: data files written at once by each rank; None: one, but up to four on a
    filesystem in memory, which takes one thread's bytes at a time in each. engine: how files are written; "auto"
    asks the storage, "direct" goes past the page cache where that is possible at all, "buffered" through
    it; the counters' direct_bytes tell what was done. unchanged: "reference" writes nothing of
    what the last committed checkpoint of the run holds already, and needs ``run``. timeout_s: the longest silence of a
    rank, and the longest time of other calls that hold the run, that is waited out, 600 s unless
    CKPTFS_TIMEOUT_S says otherwise.

    Before the commit any failure, on any rank, is the same error on every rank, and the old state
    stands. CommitInDoubtError: the next save or prepare_run settles it. After a crash there is
    exactly the old or the new checkpoint.

    uri may be ``ticket.part("actor")``: this group's part of a checkpoint that several groups write.
    Then it is sealed and durable when this returns a SealedPart, and committed by ``ticket.commit``;
    name, step and run are the ticket's.
    """
    started = time.perf_counter()
    state = as_state_dict(state_dict)
    if isinstance(uri, TicketPart):
        if (step, run, if_exists, unchanged) != (None, None, "error", "write"):
            raise StateError(
                "step, run and if_exists of a part are its ticket's, and it is written whole",
                uri=uri.uri,
                hint="tell them where the ticket is begun",
            )
        place = Place({**uri.storage_options, **(storage_options or {})}, scope, domain)
        options = WriteOptions(threads, require_space, engine=WriteEngineName(engine))
        with _control(process_group, timeout_s) as control:
            return save_part(state, uri, control, place, per_rank=tuple(per_rank), options=options)
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    wait_s = timeout_of(timeout_s)
    with (
        _seat_for(uri, run, process_group, timeout_s, place) as (seat, target),
        claimed(seat, run, IfExists(if_exists), Unchanged(unchanged), wait_s) as holder,
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
        return save_at(state, seat, target, spec, options, started=started)


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
    """Collective. Load a checkpoint into ``state_dict``, in place, with any number of ranks.

    Tensors are filled where they are, whatever sharding they have now; objects with
    load_state_dict() at the top level get theirs, and so does one such object alone, from "state". Missing and unexpected keys and dtypes that differ are
    StateErrors before a byte is read. allow: one or several of "missing" (such keys keep their values, and
    the result names them), "extra" (keys that nobody asks for are left out, and named), "dtype" (converted);
    "stock" is what torch's dcp.load allows: "extra" and "dtype". strict: False allows all three. An
    optimizer that would be left empty by its own state_dict(), before its first step, is StateError
    whatever is allowed. objects: "refuse" is StateError for an object that is no plain value (numbers, text,
    bytes, their containers), by its key; "load" takes those that are data alone. verify: "read" compares every block that is read with its digest. run: a
    held Run, of this checkpoint or of another: the ranks talk as they do for it, so that a rank which
    dies before it has come here is named in seconds and not after timeout_s, and nothing has to be
    opened; process_group and timeout_s are then the run's. It need not be the newest owner.
    Checkpoints written by stock torch load too, unverified. Reads only; repairs nothing.

    NotFoundError, IncompleteCheckpointError: no such checkpoint, or not all of it. What single ranks
    meet while they read (IntegrityError, ManifestError, a missing file) is a CollectiveError on all;
    its ``failures`` name rank, URI and file. After an error tensors are undefined.
    """
    started = time.perf_counter()
    state = as_state_dict(state_dict)
    place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
    with _control_of(run, process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        with reading_seat(target, control, place) as (seat, name):
            load = partial(
                load_at,
                state,
                seat,
                target,
                strict=strict,
                allow=allow,
                objects=objects,
                verify=verify,
                started=started,
            )
            return following(seat, name, load)


@contextlib.contextmanager
def _control(process_group: Any, timeout_s: float | None) -> Iterator[Control]:
    with control_for(process_group, timeout_s) as control:
        need_group(control.world)
        yield control


@contextlib.contextmanager
def _control_of(run: Run | None, process_group: Any, timeout_s: float | None) -> Iterator[Control]:
    """The held run's control, or a new one for this call."""
    if run is None:
        with _control(process_group, timeout_s) as control:
            yield control
        return
    run.check_held()
    need_group(run.seat.control.world)
    yield run.seat.control


def need_group(world: World) -> None:
    """StateError where several ranks would save tensors without a process group."""
    if world.size > 1 and not world.has_group:
        raise StateError(
            f"WORLD_SIZE is {world.size}, but torch.distributed is not initialised",
            rank=world.rank,
            hint="call torch.distributed.init_process_group() before saving or loading tensors",
        )


@contextlib.contextmanager
def _seat_for(
    uri: Any, run: Run | None, process_group: Any, timeout_s: float | None, place: Place
) -> Iterator[tuple[Seat, Uri]]:
    """The held run's seat, or a new one for this call."""
    if run is not None:
        need_group(run.seat.control.world)
        target = agree_uri(run.seat.control, uri)
        run.check(target)
        yield run.seat, target
        return
    with _control(process_group, timeout_s) as control:
        target = agree_uri(control, uri)
        with open_seat(target.parent, control, place, write=True) as seat:
            yield seat, target


@contextlib.contextmanager
def claimed(
    seat: Seat, run: Run | None, if_exists: IfExists, unchanged: Unchanged, wait_s: float
) -> Iterator[Run | None]:
    """The held run; one claimed for this call where an older save is to be referred to; else None: a save
    that replaces claims the run itself, where something has the name.
    """
    if run is not None or if_exists is IfExists.ERROR or unchanged is Unchanged.WRITE:
        yield run
        return
    caller = Caller('save(if_exists="replace")', for_call=True, wait_s=wait_s)
    with claim(seat, takeover=Takeover.DEAD, caller=caller) as holder:
        yield holder
