"""A save as a handful of functions, each local or one collective step.

    plan_save (step)  ->  write (local)  ->  finish_save (coordinator)  ->  .metadata

All exchange goes through ``control.step``; no collective runs on the user's group. Upwards every
rank sends its plan as columns, or a hash where the coordinator knows it from the save before. Downwards
each gets a bitmap of which of its items it writes (DCP's deduplication gives every replicated item to
one rank); ranks keep their own plans, so no plan is sent back. What a rank wrote returns as three
numbers per item.

``ckptfs.save`` puts these between ``Attempt.begin`` and ``Attempt.commit``; torch's own
``dcp.save`` drives the same parts through ``ckptfs.dcp.writer``.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.shared_data import stock_path
from ckptfs.commit.spec import SmallFile, WrittenPart
from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.copies import Place, places_for
from ckptfs.dcp.emit import Described, is_known_layout
from ckptfs.dcp.engine import auto_engine
from ckptfs.dcp.exchange import PlanMemory, Saying, decide
from ckptfs.dcp.layout import Placed, WriteEngine, Written, sidecar_name, write_files
from ckptfs.dcp.metadata import describe, encode_metadata
from ckptfs.dcp.per_rank import original_item
from ckptfs.dcp.placing import PLACED, placed_in
from ckptfs.dcp.placing import places_for as places_in
from ckptfs.dcp.planner import SavePlanner
from ckptfs.dcp.resolve import Loan
from ckptfs.dcp.share import LiveShare, Share
from ckptfs.errors import IncompleteCheckpointError, IntegrityError
from ckptfs.storage.base import Storage
from ckptfs.topology.control import Control
from ckptfs.topology.verdict import apart
from ckptfs.uri import Uri

__all__ = [
    "PlannedSave",
    "decode_placed",
    "encode_placed",
    "finish_save",
    "item_bytes",
    "metadata_files",
    "plan_save",
    "storage_data_of",
    "write",
    "written_part",
    "written_places",
]

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks agreed on.

    items: what this rank writes, in order. size_bytes: of their tensors. share: has their data.
    described: on the coordinator, what all ranks write and what the metadata says of it.
    """

    rank: int
    items: tuple[WriteItem, ...]
    share: Share
    plan_s: float
    size_bytes: int
    described: Described | None = None

    @property
    def indexes(self) -> tuple[tuple[MetadataIndex, ...], ...]:
        """The items of every rank, as objects; on the coordinator."""
        return () if self.described is None else self.described.world.indexes()

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        """The data of one of ``items``. Any thread."""
        return self.share.resolve(original_item(item, self.rank))


def plan_save(
    state_dict: Mapping[str, Any] | Share,
    control: Control,
    *,
    per_rank: Sequence[str] = (),
    planner: SavePlanner | None = None,
    domains: Sequence[Sequence[int]] = (),
    memory: PlanMemory | None = None,
) -> PlannedSave:
    """Collective. Who writes what, with every check that needs no file. Nothing is written.

    state_dict: nested dicts and lists of tensors, DTensors, plain objects, Stateful at the top
    level; or what was staged of one. per_rank: fnmatch patterns of flattened keys that every rank
    keeps for itself. domains: the ranks of each domain; where there are several, each gets its copy
    of replicated items. memory: of this process's last save, or None; it is brought up to date. On every rank the same CollectiveError of StateErrors, or StateError where the ranks disagree.
    """
    started = time.perf_counter()
    share: Share
    if isinstance(state_dict, Mapping):
        share = LiveShare(state_dict, planner or SavePlanner(compare_ranks=control.size > 1))
    else:
        share = state_dict
    memory = PlanMemory() if memory is None else memory
    held: list[tuple[SavePlan, Saying]] = []
    known: list[Described] = []

    def local() -> bytes:
        plan = share.plan(control.rank, per_rank)  # the state dict's owner may be asked for it
        with gc_paused():
            saying = Saying.of(plan)
        held.append((plan, saying))
        return saying.short if saying.digest == memory.agreed else saying.whole

    def decide_all(said: list[bytes]) -> tuple[bool, bytes]:
        lowest = share.planner.dedup_save_to_lowest_rank
        with gc_paused():
            described = decide(said, memory, domains=domains, to_lowest_rank=lowest)
        if described is None:
            return apart(False)  # noqa: FBT003 - not decided
        known.append(described)
        return apart(True, [described.world.bitmap(rank) for rank in range(len(said))])  # noqa: FBT003

    decided, bitmap = control.step("plan the save", local, decide_all)
    plan, saying = held[0]
    if not decided:
        # The coordinator has forgotten what some hash stands for.
        _, bitmap = control.step("plan the save", lambda: saying.whole, decide_all)
    memory.agreed = saying.digest
    keep = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=len(plan.items))
    items = tuple(itertools.compress(plan.items, keep.tolist()))
    # Only what per_rank matched has another name than the planner knows.
    known_as = [original_item(item, control.rank) for item in items] if per_rank else items
    share.take_on(known_as)
    return PlannedSave(
        rank=control.rank,
        items=items,
        share=share,
        plan_s=time.perf_counter() - started,
        size_bytes=sum(map(item_bytes, items)),
        described=known[0] if known else None,
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
) -> WrittenPart:
    """Local. Write this rank's items below ``prefix``; durable on return, names too.

    prefix: ``Attempt.prefix``. domain: the id of the domain that holds the files. Errors are the
    storage's; of several threads all are told.
    """
    written = write_files(
        storage,
        prefix,
        planned.rank,
        planned.items,
        planned.resolve,
        engine=engine,
        threads=threads,
    )
    part = written_part(written, save_id, domain)
    counters = dataclasses.replace(part.counters, plan_s=planned.plan_s)
    return dataclasses.replace(part, counters=counters)


def written_part(
    written: Written, save_id: str, domain: str | None, origin: str | None = None
) -> WrittenPart:
    """What a rank tells the coordinator: its files for the manifest, its items for .metadata.

    origin: ``save_id`` where later saves may use these files too.
    """
    files = []
    for name, size, (sidecar_size, digest) in zip(
        written.names, written.sizes_bytes, written.sidecars, strict=True
    ):
        path = f"{save_id}/{name}"
        sidecar = sidecar_name(path)
        files.append(FileRecord(path, size, domain, sidecar, origin=origin))
        files.append(FileRecord(sidecar, sidecar_size, domain, digest=digest, origin=origin))
    return WrittenPart(tuple(files), written.counters, encode_placed(written.placed))


def finish_save(
    planned: PlannedSave,
    parts: Sequence[WrittenPart],
    *,
    save_id: str,
    checkpoint_id: str,
    domains: Mapping[str, Sequence[int]] | None = None,
    root: Uri | None = None,
) -> dict[str, SmallFile]:
    """Coordinator only. The extra files of the commit: ``.metadata``. Pure.

    checkpoint_id: the step's URI, bare. domains: id -> ranks; where there are several, each gets a
    ``.metadata`` of its own that points to its own copies. root: of the run, for the paths of shared
    files. IncompleteCheckpointError when what was written is not
    what was planned: such a save must not be committed.
    """
    described = planned.described
    if described is None:
        raise RuntimeError("finish_save belongs to the coordinator")
    if not is_known_layout():  # a torch whose metadata has fields that ours lacks
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
    """``.metadata``, one for all, or one for each of several domains. Coordinator only."""

    def encoded(ranks: Sequence[int]) -> bytes:
        places = places_for(ranks, written)
        described = describe(metadata, places, checkpoint_id=checkpoint_id, save_id=save_id)
        return encode_metadata(described)

    return _per_domain(encoded, domains)


def _per_domain(
    encoded: Callable[[Sequence[int]], bytes], domains: Mapping[str, Sequence[int]]
) -> dict[str, SmallFile]:
    """One for all, or one for each of several domains' ranks."""
    if len(domains) < 2:  # noqa: PLR2004
        return {METADATA: encoded(())}
    return {METADATA: {domain: encoded(ranks) for domain, ranks in domains.items()}}


def storage_data_of(
    indexes: Sequence[Sequence[MetadataIndex]], parts: Sequence[WrittenPart]
) -> dict[MetadataIndex, Place]:
    """Item -> (path, offset, length); IncompleteCheckpointError unless planned == written."""
    return places_for((), written_places(indexes, parts))


def written_places(
    indexes: Sequence[Sequence[MetadataIndex]],
    parts: Sequence[WrittenPart],
    root: Uri | None = None,
) -> list[dict[MetadataIndex, Place]]:
    """Per rank: item -> place. IncompleteCheckpointError unless planned == written."""
    if len(indexes) != len(parts):
        raise IncompleteCheckpointError(f"{len(indexes)} ranks planned, {len(parts)} wrote")
    everything = []
    for rank, (planned, part) in enumerate(zip(indexes, parts, strict=True)):
        places: dict[MetadataIndex, Place] = {}
        data_files = [record for record in part.files if record.digests is not None]
        paths = [f.path if root is None else stock_path(f, root) for f in data_files]
        placed = decode_placed(part.payload)
        if len(placed) != len(planned):
            raise IncompleteCheckpointError(
                f"rank {rank} planned {len(planned)} items and wrote {len(placed)}",
                rank=rank,
                hint="nothing was committed; this is a bug of the write engine",
            )
        for index, (number, offset, length) in zip(planned, placed, strict=True):
            if number >= len(data_files) or offset + length > data_files[number].size_bytes:
                raise IntegrityError(
                    f"rank {rank} says that {index.fqn!r} lies outside its files", rank=rank
                )
            places[index] = (paths[number], offset, length)
        everything.append(places)
    return everything


def encode_placed(placed: Sequence[Sequence[Placed]]) -> bytes:
    """File number, offset and length of every item, in the order of the rank's plan.

    placed: for each data file of the rank's part its items.
    """
    flat = [
        (place.position, (number, place.offset, place.length))
        for number, places in enumerate(placed)
        for place in places
    ]
    flat.sort()
    return np.array([told for _, told in flat], PLACED).tobytes()


def decode_placed(payload: bytes) -> list[tuple[int, int, int]]:
    """What ``encode_placed`` wrote."""
    told: list[tuple[int, int, int]] = np.frombuffer(payload, PLACED).tolist()
    return told


def item_bytes(item: WriteItem) -> int:
    """Bytes of its tensor; 0 of an object, which is as large as its pickle turns out."""
    if item.tensor_data is None:
        return 0
    size = item.tensor_data.properties.dtype.itemsize
    for length in item.tensor_data.chunk.sizes:
        size *= length
    return size
