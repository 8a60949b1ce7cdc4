"""Load a checkpoint that was found: what ``load`` and the manager's ``restore`` have in common.

    inventory_of (in the step that finds it)  ->  plan_load (step)  ->  read (local)  ->  restore_stateful     -> LoadResult

Every rank makes its own plan from the metadata. Ranks only exchange the keys that they request, so that all
of them find a key that no rank requests. Loads are collective on the session's control, and only read.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs import _torch
from ckptfs.commit.catalog.catalog import LocatedCheckpoint, sealed_metadata
from ckptfs.commit.session import RunSession, naming, step_of
from ckptfs.control.control import Control
from ckptfs.dcp.metadata.metadata_reader import (
    Inventory,
    decode_metadata,
    read_inventory,
)
from ckptfs.dcp.metadata.torch_inventory import Renamed, TorchInventory
from ckptfs.dcp.planning.state_dicts import (
    listed,
    module_of,
    own_keys,
    stateful_keys,
    unwrap_stateful,
)
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.read.data_file import Source, Verify, source_of
from ckptfs.dcp.read.load_planner import (
    OPTIMIZER_HINT,
    Allow,
    Allowed,
    LoadPlanner,
    RequestedKeys,
    unexpected_keys,
)
from ckptfs.dcp.read.read_plan import PlannedRead
from ckptfs.dcp.read.scheduler import fetch_reads
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.events import Counters, LoadResult
from ckptfs.progress import SILENT, Meter, progress
from ckptfs.storage.base import Storage
from ckptfs.storage.inflight import log_fields
from ckptfs.uri import Uri

__all__ = [
    "Loadable",
    "MetadataAhead",
    "load_at",
    "load_into",
    "plan_load",
    "read",
    "read_metadata",
    "who_holds",
]


def read_metadata(storage: Storage, found: LocatedCheckpoint) -> Metadata:
    """Return the checkpoint's ``.metadata``, with the manifest's own paths. Executes nothing.

    Errors are those of ``sealed_metadata``. ManifestError: it is not DCP metadata.
    """
    raw = sealed_metadata(storage, found)
    return decode_metadata(raw, storage.uri(found.metadata), found.shared)


def inventory_of(storage: Storage, found: LocatedCheckpoint) -> Inventory:
    """Return the same as an inventory for a load, which makes only the objects that are used.

    Errors are those of ``read_metadata``.
    """
    raw = sealed_metadata(storage, found)
    return read_inventory(raw, storage.uri(found.metadata), found.shared)


def who_holds(uri: str, found: LocatedCheckpoint) -> str | None:
    """Return which ranks and nodes hold a file that this one does not see; None on shared storage."""
    if found.manifest is None or len(found.manifest.domains) < 2:  # noqa: PLR2004
        return None
    # A data file and its digests are in the same directory; either of them may be missed first.
    record = next(
        (f for f in found.manifest.files if uri.endswith((f.path, f.digests or f.path))), None
    )
    domain = next((d for d in found.manifest.domains if record and d.id == record.domain), None)
    if domain is None:
        return None
    ranks = ", ".join(str(rank) for rank in domain.ranks)
    return (
        f"domain {domain.id} holds it, written by ranks {ranks} on {', '.join(domain.hosts)}: "
        "start these ranks there again, or copy the shards together first"
    )


_OPTIMIZER_STATE = re.compile(r"(.+?\.)?state\.[^.]")


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load that all ranks agreed on; only metadata was read so far.

    ``reads`` is what this rank reads.
    """

    reads: tuple[PlannedRead, ...]
    planner: LoadPlanner
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    plan_s: float


def plan_load(
    state_dict: dict[str, Any] | Callable[[], dict[str, Any]],
    metadata: Metadata | Inventory,
    control: Control,
    *,
    strict: bool = True,
    allow: Allow = (),
    saved_world: int | None = None,
    weights_only: bool = True,
    objects: Literal["load", "refuse"] = "load",
    receiver_keys: Collection[str] = (),
) -> PlannedLoad:
    """Plan what each rank reads, with every check that needs no data. Collective.

    No tensor is changed, except that tensors on the meta device get memory.

    Args:
        state_dict: A state dict that went through ``unwrap_stateful``, or a function that returns one. The
            function is called within the step, because a user's ``state_dict()`` may fail on one rank or talk
            to the others.
        metadata: The checkpoint's metadata.
        control: How the ranks talk.
        strict: As for ``ckptfs.load``.
        allow: As for ``ckptfs.load``.
        saved_world: How many ranks saved it (the manifest's world_size). None: not known.
        weights_only: As for ``LoadPlanner``.
        objects: As for ``ckptfs.load``.
        receiver_keys: Top-level keys of the objects that receive what was loaded; complete once ``state_dict``
            was called.

    Returns:
        The planned load.

    Raises:
        CollectiveError: Some ranks failed with a StateError; the same on every rank.
        StateError: The checkpoint has keys that no rank requests; the same on every rank.
    """
    started = time.perf_counter()
    inventory = TorchInventory(metadata) if isinstance(metadata, Metadata) else metadata
    planners: list[LoadPlanner] = []
    held: list[list[PlannedRead]] = []

    def local() -> RequestedKeys:
        flat = state_dict() if callable(state_dict) else state_dict
        # Inside the step, because its arguments may be wrong on one rank alone.
        planner = LoadPlanner(
            strict=strict, allow=allow, weights_only=weights_only, objects=objects
        )
        planners.append(planner)
        planner.receiver_keys = receiver_keys
        planner.set_up_planner(flat, is_coordinator=control.rank == 0)
        with gc_paused():
            own = own_keys(
                inventory.keys, control.rank, control.size, saved_world, planner.state_dict.keys()
            )
            view = Renamed(inventory, own) if own else inventory
            held.append(planner.create_reads(view))
            if planner.allowed:
                planner.refuse_empty(view)
            return RequestedKeys.of(inventory.keys, planner.state_dict.keys())

    def decide(requested: list[RequestedKeys]) -> tuple[str, ...]:
        unexpected = unexpected_keys(inventory.keys, requested)
        if unexpected and Allowed.EXTRA not in planners[0].allowed:
            raise StateError(
                f"the checkpoint has keys that no rank requests: {listed(unexpected)}",
                hint=_hint_for(unexpected, inventory.keys),
            )
        return unexpected

    unexpected = control.step("plan the load", local, decide)
    planner = planners[0]
    return PlannedLoad(
        tuple(held[0]), planner, planner.missing, unexpected, time.perf_counter() - started
    )


def _hint_for(unexpected: Sequence[str], saved: Collection[str]) -> str:
    """Return what to do about keys that no rank requests.

    An optimizer has no state before its first step: its state_dict() then requests none.
    """
    names = {at[1] or "" for key in unexpected if (at := _OPTIMIZER_STATE.match(key))}
    empty = sorted(
        name.removesuffix(".") or "the state dict"
        for name in names
        if any(key.startswith(f"{name}param_groups") for key in saved)
    )
    if not empty:
        return 'allow="extra" leaves them out'
    return f"{empty[0]!r} is an optimizer without state: {OPTIMIZER_HINT}"


def read(planned: PlannedLoad, source: Source, meter: Meter = SILENT) -> Counters:
    """Read this rank's part into its tensors, verified as ``source.verify`` says. Local.

    IntegrityError and IncompleteCheckpointError name file and rank, and for wrong bytes the key. After an
    error the tensors are undefined.
    """
    planner = planned.planner
    counters = fetch_reads(
        source, planned.reads, lambda read, stream: planner.load_object(read.key, stream), meter
    )
    return dataclasses.replace(counters, plan_s=planned.plan_s)


def refuse_meta(state_dict: Mapping[str, Any]) -> None:
    """Raise StateError for a module without memory: it would accept the values and lose them."""
    for key in stateful_keys(state_dict):
        module = module_of(state_dict[key])
        if module is None:
            continue
        unsaved = {
            f"{path}.{name}".lstrip(".")
            for path, inner in module.named_modules()
            for name in _torch.unsaved_buffers(inner)
        }
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if name not in unsaved and not _torch.is_sharded_tensor(value) and value.is_meta:
                raise StateError(
                    f"{key}: {name!r} is on the meta device",
                    hint="give the module memory first: module.to_empty(device=...)",
                )


def restore_stateful(state_dict: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put what was loaded into ``unwrap_stateful``'s copy back where it came from. Local.

    Objects are last, in sorted order of their keys, because they may communicate with other ranks.
    """
    objects = stateful_keys(state_dict)
    object_keys = frozenset(objects)
    for key in list(state_dict):  # not items(): 20,000 tuples would start the garbage collector
        if key not in object_keys:
            state_dict[key] = loaded[key]
    for key in objects:
        state_dict[key].load_state_dict(loaded[key])


@dataclass(frozen=True, slots=True)
class Loadable:
    """What a rank loads into.

    Attributes:
        state_dict: Nested dicts and lists of tensors, which are filled in place, and of objects, which are
            replaced.
        hand_over: Gives what was loaded to its owners, once all ranks have read.
    """

    state_dict: dict[str, Any]
    hand_over: Callable[[], None]


class MetadataAhead:
    """The metadata of a checkpoint, which a rank reads in the step that finds the files."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._held: list[Inventory] = []

    def read(self, found: LocatedCheckpoint) -> None:
        """Read it. Local."""
        self._held[:] = [inventory_of(self._session.storage, found)]

    def take(self, found: LocatedCheckpoint, *, is_read: bool) -> Inventory:
        """Return it; if it was not read, read it now. Collective."""
        if not is_read:
            self._session.control.step("metadata", lambda: self.read(found))
        return self._held.pop()


def load_at(
    state_dict: dict[str, Any],
    session: RunSession,
    target: Uri,
    found: LocatedCheckpoint,
    metadata: MetadataAhead | None = None,
    *,
    strict: bool = True,
    allow: Allow = (),
    objects: Literal["load", "refuse"] = "load",
    verify: Literal["read", "off"] = "read",
    started: float | None = None,
) -> LoadResult:
    """Load the checkpoint that ``following`` found into ``state_dict``, in place. Collective.

    ``metadata`` was its ``visit``; None if nothing was read ahead. ``started`` is ``time.perf_counter()`` at the user's call. Errors are as for ``ckptfs.load``.
    """
    started = time.perf_counter() if started is None else started
    ahead = metadata or MetadataAhead(session)
    # What has no log is found and checked first, see ``following``.
    inventory = ahead.take(found, is_read=metadata is not None and found.seal is not None)
    flat: dict[str, Any] = {}
    receiver_keys: set[str] = set()

    def unwrapped() -> dict[str, Any]:
        refuse_meta(state_dict)
        receiver_keys.update(map(str, stateful_keys(state_dict)))
        flat.update(unwrap_stateful(state_dict))
        return flat

    with log_fields(**_fields(session.storage.root, session.control.rank, found)):
        been_read = _plan_and_read(
            unwrapped,
            inventory,
            session,
            target,
            found,
            strict=strict,
            allow=allow,
            objects=objects,
            receiver_keys=receiver_keys,
            verify=Verify(verify),
        )
        loadable = Loadable(flat, lambda: restore_stateful(state_dict, flat))
        return _deliver(loadable, been_read, session, target, found, started)


def _fields(run: Uri, rank: int, found: LocatedCheckpoint) -> dict[str, Any]:
    """Return what log records of a load say about it."""
    known = found.seal or found.manifest
    return {
        "run": str(run),
        "step": None if known is None else known.step,
        "rank": rank,
        "save_id": None if known is None else known.save_id,
    }


def load_into(
    loadable: Loadable,
    metadata: Metadata,
    session: RunSession,
    target: Uri,
    found: LocatedCheckpoint,
    *,
    strict: bool = True,
    allow: Allow = (),
    objects: Literal["load", "refuse"] = "load",
    verify: Literal["read", "off"] = "read",
    started: float,
) -> LoadResult:
    """Load the checkpoint that ``metadata`` was read from into ``loadable``. Collective.

    No rank's ``hand_over`` runs before every rank has read all of its part. Errors are as for
    ``ckptfs.load``.
    """
    with log_fields(**_fields(session.storage.root, session.control.rank, found)):
        been_read = _plan_and_read(
            loadable.state_dict,
            TorchInventory(metadata),
            session,
            target,
            found,
            strict=strict,
            allow=allow,
            objects=objects,
            verify=Verify(verify),
        )
        return _deliver(loadable, been_read, session, target, found, started)


@dataclass(frozen=True, slots=True)
class _BeenRead:
    """What remains of a plan once every rank has read its part."""

    per_rank: tuple[Counters, ...]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    verified: bool


def _plan_and_read(
    state_dict: dict[str, Any] | Callable[[], dict[str, Any]],
    inventory: Inventory,
    session: RunSession,
    target: Uri,
    found: LocatedCheckpoint,
    *,
    strict: bool,
    allow: Allow,
    objects: Literal["load", "refuse"],
    verify: Verify,
    receiver_keys: Collection[str] = (),
) -> _BeenRead:
    control, manifest = session.control, found.manifest
    planned = plan_load(
        state_dict,
        inventory,
        control,
        strict=strict,
        allow=allow,
        objects=objects,
        receiver_keys=receiver_keys,
        saved_world=None if manifest is None else manifest.world_size,
    )
    source = source_of(session.storage, found, verify, control.rank, control.size)
    with naming(target):
        per_rank = control.step("read", lambda: _read(planned, source, found, f"loading {target}"))
    return _BeenRead(
        tuple(per_rank),
        planned.missing_keys,
        planned.unexpected_keys,
        verify is Verify.READ and manifest is not None,
    )


def _deliver(  # noqa: PLR0917 - what was read, for whom, and of what
    loadable: Loadable,
    been_read: _BeenRead,
    session: RunSession,
    target: Uri,
    found: LocatedCheckpoint,
    started: float,
) -> LoadResult:
    control, manifest, per_rank = session.control, found.manifest, been_read.per_rank
    # A step of its own: if one object refuses what was loaded, no rank may continue to train.
    control.step("hand over", loadable.hand_over)
    return LoadResult(
        uri=str(target),
        step=step_of(target.name, None) if manifest is None else manifest.step,
        save_id=None if manifest is None else manifest.save_id,
        mine=per_rank[control.rank],
        total=Counters.together(per_rank),
        per_rank=per_rank,
        wall_s=time.perf_counter() - started,
        verified=been_read.verified,
        missing_keys=been_read.missing_keys,
        unexpected_keys=been_read.unexpected_keys,
    )


def _read(planned: PlannedLoad, source: Source, found: LocatedCheckpoint, title: str) -> Counters:
    try:
        with progress(title, rank=source.rank or 0) as meter:
            return read(planned, source, meter)
    except IncompleteCheckpointError as error:
        error.hint = who_holds(error.uri or "", found) or error.hint
        raise
