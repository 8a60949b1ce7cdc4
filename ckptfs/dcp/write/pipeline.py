"""A save as a handful of functions; each is local or one collective step.

    SavePlanning (a stage of a step)  ->  write (local)  ->  finish_save (coordinator)  ->  .metadata

All exchange goes through ``control.step``; no collective runs on the user's group. Every rank sends its plan
to the coordinator as columns, or only a hash if the coordinator knows the plan from the save before. Each
rank receives a bitmap that says which of its items it writes (DCP's deduplication assigns every replicated
item to one rank). Ranks keep their own plans, so no plan is sent back. After writing, each rank sends three
numbers per item.

What a rank sends, and what the coordinator makes of it:

    rank         PlanMessage.of(plan, memory)     -> .whole, or .short where the coordinator knows the rest
    coordinator  decide(received, memory, ...)    -> Described, or None: the plans have to be sent whole

A message is a version, a hash of the plan's structure, fingerprints of values, and the structure itself. A
rank that keeps a ``PlanMemory`` from save to save sends the structure only once. After that the hash replaces
it; the hash covers dtypes, shapes, pieces, keys and the keys that ``per_rank`` renamed. A coordinator that
does not know a hash asks all ranks for their whole plans, so a lost memory costs one step and nothing else.
The decision is kept as well; it is used again for the same plans of all ranks in the same domains. Values
are compared in every save.

``ckptfs.save`` calls these functions between ``Attempt.begin`` and ``Attempt.commit``; torch's own
``dcp.save`` uses the same parts through ``ckptfs.dcp.torch_hooks.storage_writer``.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckptfs.commit.delete.shared_data import stock_path
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.save.spec import SmallFile, WrittenPart
from ckptfs.control.control import Control
from ckptfs.control.messages import Stage, apart
from ckptfs.dcp.metadata.metadata_writer import (
    PLACED,
    Described,
    describe,
    encode_metadata,
    is_known_layout,
    placed_in,
)
from ckptfs.dcp.metadata.metadata_writer import places_for as places_in
from ckptfs.dcp.planning.columns import (
    SHARD,
    Columns,
    Interned,
    Ints,
    KeyTable,
    Prints,
    decode_prints,
    decode_structure,
    prints_of,
    structure_of,
)
from ckptfs.dcp.planning.global_plan import Place, Table, places_for, table_of, world_of
from ckptfs.dcp.planning.save_planner import (
    LiveShare,
    SavePlanner,
    Share,
    refuse_divergence,
    shard_fingerprint,
)
from ckptfs.dcp.planning.state_dicts import original_item
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.write.host_memory import Loan, Resolve
from ckptfs.dcp.write.rank_files import (
    Placed,
    RankFiles,
    WriteEngine,
    auto_engine,
    sidecar_name,
    sidecar_of,
    write_files,
)
from ckptfs.errors import IncompleteCheckpointError, IntegrityError, StateError
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri

__all__ = [
    "PLANNING",
    "Decision",
    "PlanMemory",
    "PlanMessage",
    "PlannedSave",
    "SavePlanning",
    "decide",
    "decode_placed",
    "encode_placed",
    "finish_save",
    "item_bytes",
    "metadata_files",
    "storage_data_of",
    "write",
    "written_part",
    "written_places",
]

PLANNING = "plan the save"  # the label of the step

_VERSION = 1
_HEAD = struct.Struct("<BB16sI")  # version, whether the plan is whole, hash, bytes of prints

_Key = tuple[tuple[bytes, ...], tuple[bool, ...], tuple[tuple[int, ...], ...], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What was decided, and for which plans.

    ``structures`` has the plans of all ranks, without values, by their hashes.
    """

    key: _Key
    structures: Mapping[bytes, Columns]
    described: Described


@dataclass(slots=True)
class PlanMemory:
    """What this process knows of its last planned save.

    Several saves may use it at once: each field changes as a whole, and a hash that is not known any more
    costs one step.

    Attributes:
        agreed: The hash of the structure that the coordinator has from this rank.
        decision: The last decision; on the coordinator only.
    """

    agreed: bytes | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """One rank's plan in bytes; ``digest`` is the hash of its structure."""

    digest: bytes
    prints: bytes
    structure: bytes

    @classmethod
    def of(cls, plan: SavePlan) -> PlanMessage:
        """Encode a plan. StateError for items that ``SavePlanner`` does not make."""
        structure = structure_of(plan)
        return cls(xxhash.xxh3_128_digest(structure), prints_of(plan), structure)

    @property
    def whole(self) -> bytes:
        """The message with the structure."""
        head = _HEAD.pack(_VERSION, 1, self.digest, len(self.prints))
        return head + self.prints + self.structure

    @property
    def short(self) -> bytes:
        """The message without the structure; the hash replaces it."""
        return _HEAD.pack(_VERSION, 0, self.digest, len(self.prints)) + self.prints


@dataclass(frozen=True, slots=True)
class _ReceivedPlan:
    """A rank's message, decoded; ``columns`` is None if its hash is not known here."""

    digest: bytes
    raw: bytes
    prints: Prints
    columns: Columns | None


def decide(
    received: Sequence[bytes],
    memory: PlanMemory,
    *,
    domains: Sequence[Sequence[int]] = (),
    to_lowest_rank: bool = False,
) -> Described | None:
    """Decide what each rank writes. Coordinator only.

    Args:
        received: The message of every rank, in order of rank.
        memory: What is known of the last save; it is updated.
        domains: The ranks of each domain.
        to_lowest_rank: Whether a replicated item is written by its lowest rank, instead of the least loaded.

    Returns:
        The decision, or None if some plans have to be sent whole.

    Raises:
        StateError: Values differ between ranks, the plans do not make one checkpoint, or this version cannot
            read a message.
    """
    interned = Interned()
    last = memory.decision
    structures = dict(last.structures) if last else {}
    plans = [_read(rank, data, structures, interned) for rank, data in enumerate(received)]
    columns = [plan.columns for plan in plans if plan.columns is not None]
    if len(columns) < len(plans):
        return None
    compared = tuple(plan.prints.compared for plan in plans)
    places = tuple(tuple(ranks) for ranks in domains)
    key = (tuple(plan.digest for plan in plans), compared, places, to_lowest_rank)
    if last is not None and last.key == key:
        described = last.described
        _compare_values(described.world.table, plans, columns)
    else:
        table = table_of(columns)
        if not _shards_agree(table, np.array(compared)):
            _tell_divergence(plans, columns)
        _compare_values(table, plans, columns)
        world = world_of(table, domains=domains, to_lowest_rank=to_lowest_rank)
        described = Described(world)
    columns_by_digest = {plan.digest: found for plan, found in zip(plans, columns, strict=True)}
    memory.decision = Decision(key, columns_by_digest, described)
    return described


def _read(
    rank: int, data: bytes, structures: dict[bytes, Columns], interned: Interned
) -> _ReceivedPlan:
    if not data or data[0] != _VERSION:
        raise StateError(
            f"rank {rank} sent a save plan of version {data[0] if data else 'none'}, but this "
            f"rank reads version {_VERSION}",
            rank=rank,
            hint="run the same version of ckptfs on all ranks",
        )
    try:
        if len(data) < _HEAD.size:
            raise ValueError("it ends too early")
        _, has_structure, digest, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        raw, encoded = data[_HEAD.size : end], data[end:]
        if len(raw) != length or has_structure > 1 or (encoded and not has_structure):
            raise ValueError("its parts do not fit together")
        if has_structure and digest != xxhash.xxh3_128_digest(encoded):
            raise ValueError("its hash belongs to another plan")
        if has_structure and digest not in structures:
            structures[digest] = decode_structure(encoded, interned)
        columns = structures.get(digest)
        prints = interned.get(raw, decode_prints)
        if columns and len(prints.keys) and prints.keys[-1] >= len(columns.names.keys):
            raise ValueError("it has a fingerprint for an unknown key")
    except ValueError as error:
        raise StateError(
            f"the save plan of rank {rank} cannot be read: {error}",
            rank=rank,
            hint="run the same version of ckptfs on all ranks",
        ) from error
    return _ReceivedPlan(digest, raw, prints, columns)


# -- whether ranks have the same values -----------------------------------------------------------


def _shards_agree(table: Table, compared: Ints) -> bool:
    """Return whether each key is sharded on all compared ranks with one dtype and size, or on none."""
    kinds: dict[object, int] = {}
    properties = zip(table.properties, table.sizes, strict=True)
    number = [kinds.setdefault((p.dtype, size), len(kinds)) for p, size in properties]
    rows = np.flatnonzero(compared[table.ranks])
    keys = table.keys[rows]
    shard_kinds = np.where(
        table.kinds[rows] == SHARD, np.array([*number, -1])[table.shapes[rows]], -1
    )
    first = np.zeros(len(table.names), np.int64)
    first[keys] = shard_kinds
    return bool(np.array_equal(first[keys], shard_kinds))


def _compare_values(
    table: Table, plans: Sequence[_ReceivedPlan], columns: Sequence[Columns]
) -> None:
    """Raise StateError if two ranks have different fingerprints for one key."""
    compared: set[tuple[KeyTable, bytes]] = set()
    values = np.zeros(len(table.names), np.uint64)
    known = np.zeros(len(table.names), np.bool_)
    for plan, structure in zip(plans, columns, strict=True):
        if not len(plan.prints.keys) or (structure.names, plan.raw) in compared:
            continue
        compared.add((structure.names, plan.raw))
        keys = table.numbers[structure.names][plan.prints.keys]
        if np.any(known[keys] & (values[keys] != plan.prints.values)):
            _tell_divergence(plans, columns)
        values[keys] = plan.prints.values
        known[keys] = True


def _tell_divergence(plans: Sequence[_ReceivedPlan], columns: Sequence[Columns]) -> None:
    """Raise StateError with keys and ranks if any values really differ."""
    refuse_divergence(
        [
            _prints_by_key(plan.prints, structure)
            for plan, structure in zip(plans, columns, strict=True)
        ]
    )


def _prints_by_key(prints: Prints, columns: Columns) -> dict[str, int]:
    names, rows, shapes = columns.names.keys, columns.rows, columns.shapes
    found = {
        names[key]: value
        for key, value in zip(prints.keys.tolist(), prints.values.tolist(), strict=True)
    }
    if not prints.compared:
        return found
    keys, firsts = np.unique(rows.keys, return_index=True)
    for key, row in zip(keys.tolist(), firsts.tolist(), strict=True):
        if rows.kinds[row] == SHARD:
            shape = columns.shape_of[rows.places[row]]
            dtype, size = shapes.properties[shape].dtype, shapes.sizes[shape]
            found[names[key]] = shard_fingerprint(dtype, size)
    return found


METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks agreed on.

    Attributes:
        rank: This rank.
        items: What this rank writes, in order.
        share: Has their data.
        plan_s: Seconds that planning took.
        size_bytes: The bytes of their tensors.
        described: On the coordinator, what all ranks write and what the metadata says about it.
    """

    rank: int
    items: tuple[WriteItem, ...]
    share: Share
    plan_s: float
    size_bytes: int
    described: Described | None = None

    @property
    def indexes(self) -> tuple[tuple[MetadataIndex, ...], ...]:
        """The items of every rank, as torch's objects; on the coordinator only."""
        return () if self.described is None else self.described.world.indexes()

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        """Return the data of one of ``items``. Any thread."""
        return self.share.resolve(original_item(item, self.rank))

    def counted(self, meter: Meter) -> Resolve:
        """Return ``resolve``, changed so that it counts each item once the writer has released it."""
        if meter is SILENT:
            return self.resolve

        def resolve(item: WriteItem) -> Loan:
            data = self.resolve(item)
            loan = data if isinstance(data, Loan) else Loan(data)

            def done() -> None:
                loan.done()
                meter.advance(item_bytes(item))

            return dataclasses.replace(loan, done=done)

        return resolve


class SavePlanning:
    """Agrees on which rank writes what, with every check that needs no file, as a stage of a step of all ranks.

    Nothing is written. The stage fails if some ranks refuse their part, or if the ranks disagree.

    Args:
        state_dict: Nested dicts and lists of tensors, DTensors, plain objects, and Stateful objects at the top
            level; or a Share, such as what was staged of one.
        control: How the ranks talk.
        per_rank: fnmatch patterns of flattened keys that every rank keeps for itself.
        planner: Plans this rank's part. None: a SavePlanner.
        domains: The ranks of each domain. If there are several, each gets its own copy of replicated items.
        memory: What is known of this process's last save; it is updated. None: nothing is known.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any] | Share,
        control: Control,
        *,
        per_rank: Sequence[str] = (),
        planner: SavePlanner | None = None,
        domains: Sequence[Sequence[int]] = (),
        memory: PlanMemory | None = None,
    ) -> None:
        self._started = time.perf_counter()
        self._share: Share = (
            LiveShare(state_dict, planner or SavePlanner(compare_ranks=control.size > 1))
            if isinstance(state_dict, Mapping)
            else state_dict
        )
        self._rank = control.rank
        self._per_rank = per_rank
        self._domains = domains
        self._memory = PlanMemory() if memory is None else memory
        self._own: tuple[SavePlan, PlanMessage] | None = None
        self.described: Described | None = None  # on the coordinator, once it has decided

    @property
    def stage(self) -> Stage:
        """The stage. To make it again sends the whole plan."""
        # The user's state_dict() may talk to the other ranks: they would wait for one that failed before.
        return Stage(PLANNING, self._message, self._decide, always=True)

    def _message(self) -> bytes:
        if self._own is not None:
            return self._own[1].whole
        plan = self._share.plan(self._rank, self._per_rank)  # it may call the user's state_dict()
        with gc_paused():
            message = PlanMessage.of(plan)
        self._own = plan, message
        return message.short if message.digest == self._memory.agreed else message.whole

    def _decide(self, received: list[bytes]) -> tuple[bool, bytes]:
        lowest = self._share.planner.dedup_save_to_lowest_rank
        with gc_paused():
            described = decide(received, self._memory, domains=self._domains, to_lowest_rank=lowest)
        if described is None:
            return apart(False)  # noqa: FBT003 - not decided
        self.described = described
        return apart(True, [described.world.bitmap(rank) for rank in range(len(received))])  # noqa: FBT003

    def planned(self, answer: tuple[bool, bytes]) -> PlannedSave | None:
        """Return the planned save, or None: the coordinator does not know the structure that belongs to
        some hash any more, so the stage has to be made again.
        """
        decided, bitmap = answer
        if not decided or self._own is None:
            return None
        plan, message = self._own
        self._memory.agreed = message.digest
        keep = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=len(plan.items))
        items = tuple(itertools.compress(plan.items, keep.tolist()))
        # Only keys that per_rank matches have another name than the planner uses.
        known_as = [original_item(item, self._rank) for item in items] if self._per_rank else items
        self._share.take_on(known_as)
        return PlannedSave(
            rank=self._rank,
            items=items,
            share=self._share,
            plan_s=time.perf_counter() - self._started,
            size_bytes=sum(map(item_bytes, items)),
            described=self.described,
        )


def write(
    planned: PlannedSave,
    storage: Storage,
    prefix: str,
    save_id: str,
    *,
    domain: str | None = None,
    threads: int | None = None,
    engine: WriteEngine = auto_engine,
    meter: Meter = SILENT,
    sync_names: bool = True,
) -> WrittenPart:
    """Write this rank's items below ``prefix``; durable on return, including the names. Local.

    Errors are the storage's; if several threads failed, all their errors are reported.

    Args:
        planned: The save.
        storage: Where to write.
        prefix: ``Attempt.prefix``.
        save_id: The save's id.
        domain: The id of the domain that holds the files.
        threads: How many files are written at once. None: as many as pay there.
        engine: Writes one file.
        meter: Counts the bytes of items that are written.
        sync_names: Whether to sync the directory. Not needed where this process prepares the domain, because
            that syncs the same directory.

    Returns:
        What the coordinator has to know about this rank's files.
    """
    wrote = write_files(
        storage,
        prefix,
        planned.rank,
        planned.items,
        planned.counted(meter),
        engine=engine,
        threads=threads,
        sync_names=sync_names,
    )
    part = written_part(wrote, save_id, domain)
    counters = dataclasses.replace(part.counters, plan_s=planned.plan_s)
    return dataclasses.replace(part, counters=counters)


def written_part(
    wrote: RankFiles, save_id: str, domain: str | None, origin: str | None = None
) -> WrittenPart:
    """Return what a rank sends to the coordinator: files for the manifest, items for .metadata.

    Args:
        wrote: What the rank wrote.
        save_id: The save's id.
        domain: The id of the domain that holds the files.
        origin: ``save_id`` if later saves may use these files too, else None.

    Returns:
        The part.
    """
    records = []
    for file in wrote.files:
        path = f"{save_id}/{file.name}"
        name, sidecar = sidecar_name(path), sidecar_of(file)
        records += [
            FileRecord(path, file.size_bytes, domain, name, origin=origin),
            FileRecord(name, sidecar.size_bytes, domain, digest=sidecar.digest, origin=origin),
        ]
    placed = encode_placed([file.placed for file in wrote.files])
    return WrittenPart(tuple(records), wrote.counters, placed)


def finish_save(
    planned: PlannedSave,
    parts: Sequence[WrittenPart],
    *,
    save_id: str,
    checkpoint_id: str,
    domains: Mapping[str, Sequence[int]] | None = None,
    root: Uri | None = None,
) -> dict[str, SmallFile]:
    """Return the extra files of the commit: ``.metadata``. Coordinator only; does no I/O.

    Args:
        planned: The save.
        parts: What each rank wrote.
        save_id: The save's id.
        checkpoint_id: The step's URI without credentials.
        domains: The ranks of each domain, by its id. If there are several, each gets a ``.metadata`` of its own
            that points to its own copies.
        root: The URI of the run, for the paths of shared files.

    Returns:
        The files by name.

    Raises:
        IncompleteCheckpointError: What was written is not what was planned; such a save must not be committed.
    """
    described = planned.described
    if described is None:
        raise RuntimeError("finish_save belongs to the coordinator")
    if not is_known_layout():  # torch's metadata classes have fields that are not known here
        return metadata_files(
            described.world.metadata(),
            written_places(planned.indexes, parts, root),
            domains or {},
            checkpoint_id=checkpoint_id,
            save_id=save_id,
        )
    with gc_paused():
        placed = placed_in(described.world, parts, root)
        meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)

        def encoded(ranks: Sequence[int]) -> bytes:
            return described.encode(places_in(described.world, placed, ranks), meta)

        return _per_domain(encoded, domains or {})


def metadata_files(
    metadata: Metadata,
    written: Sequence[Mapping[MetadataIndex, Place]],
    domains: Mapping[str, Sequence[int]],
    *,
    checkpoint_id: str,
    save_id: str,
) -> dict[str, SmallFile]:
    """Return ``.metadata``: one for all, or one for each of several domains. Coordinator only."""

    def encoded(ranks: Sequence[int]) -> bytes:
        places = places_for(ranks, written)
        described = describe(metadata, places, checkpoint_id=checkpoint_id, save_id=save_id)
        return encode_metadata(described)

    return _per_domain(encoded, domains)


def _per_domain(
    encoded: Callable[[Sequence[int]], bytes], domains: Mapping[str, Sequence[int]]
) -> dict[str, SmallFile]:
    """Return one file for all, or one for the ranks of each of several domains."""
    if len(domains) < 2:  # noqa: PLR2004
        return {METADATA: encoded(())}
    return {METADATA: {domain: encoded(ranks) for domain, ranks in domains.items()}}


def storage_data_of(
    indexes: Sequence[Sequence[MetadataIndex]], parts: Sequence[WrittenPart]
) -> dict[MetadataIndex, Place]:
    """Return item -> (path, offset, length); IncompleteCheckpointError unless planned == written."""
    return places_for((), written_places(indexes, parts))


def written_places(
    indexes: Sequence[Sequence[MetadataIndex]],
    parts: Sequence[WrittenPart],
    root: Uri | None = None,
) -> list[dict[MetadataIndex, Place]]:
    """Return item -> place for each rank; IncompleteCheckpointError unless planned == written."""
    if len(indexes) != len(parts):
        raise IncompleteCheckpointError(f"{len(indexes)} ranks planned, but {len(parts)} wrote")
    everything = []
    for rank, (planned, part) in enumerate(zip(indexes, parts, strict=True)):
        places: dict[MetadataIndex, Place] = {}
        data_files = [record for record in part.files if record.digests is not None]
        paths = [f.path if root is None else stock_path(f, root) for f in data_files]
        placed = decode_placed(part.payload)
        if len(placed) != len(planned):
            raise IncompleteCheckpointError(
                f"rank {rank} planned {len(planned)} items but wrote {len(placed)}",
                rank=rank,
                hint="nothing was committed; this is a bug of the write engine",
            )
        for index, (number, offset, length) in zip(planned, placed, strict=True):
            if number >= len(data_files) or offset + length > data_files[number].size_bytes:
                raise IntegrityError(
                    f"rank {rank} placed {index.fqn!r} outside its files", rank=rank
                )
            places[index] = (paths[number], offset, length)
        everything.append(places)
    return everything


def encode_placed(placed: Sequence[Sequence[Placed]]) -> bytes:
    """Encode file number, offset and length of every item, in the order of the rank's plan.

    ``placed`` has the items of each data file of the rank's part.
    """
    flat = [
        (place.position, (number, place.offset, place.length))
        for number, places in enumerate(placed)
        for place in places
    ]
    flat.sort()
    return np.array([row for _, row in flat], PLACED).tobytes()


def decode_placed(payload: bytes) -> list[tuple[int, int, int]]:
    """Decode what ``encode_placed`` wrote."""
    rows: list[tuple[int, int, int]] = np.frombuffer(payload, PLACED).tolist()
    return rows


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of the item's tensor; 0 for an object: its size is known once it is pickled."""
    if item.tensor_data is None:
        return 0
    size = item.tensor_data.properties.dtype.itemsize
    for length in item.tensor_data.chunk.sizes:
        size *= length
    return size
