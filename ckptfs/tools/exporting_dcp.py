"""Plain DCP: ``__0_0.distcp`` ... and ``.metadata``, as torch's own writer leaves them, nothing else."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.dcp.metadata.metadata_writer import describe, encode_metadata
from ckptfs.dcp.planning.global_plan import fills
from ckptfs.dcp.read.boxes import pieces_of
from ckptfs.dcp.read.read_plan import untiled
from ckptfs.dcp.write.rank_files import Cancelled, FileTask, auto_engine, data_name
from ckptfs.progress import Meter
from ckptfs.tools.contents import Box, Contents, ObjectLeaf, TensorLeaf
from ckptfs.tools.landing import Landing
from ckptfs.tools.selecting import Chosen

__all__ = ["write_dcp"]

_CHUNK_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class _Item:
    """One blob to write: an object, or a box of a tensor."""

    chosen: Chosen
    item: WriteItem
    box: Box | None
    size_bytes: int


def write_dcp(  # noqa: PLR0917 - a source, a place, and how
    contents: Contents,
    chosen: Sequence[Chosen],
    made: Landing,
    checkpoint_id: str,
    limit_bytes: int,
    meter: Meter,
) -> None:
    """Write these leaves; ``.metadata`` last.

    Args:
        contents: The source.
        chosen: The leaves, with their new names.
        made: Where to write.
        checkpoint_id: The name of the checkpoint, for torch.
        limit_bytes: The size of a file, in bytes.
        meter: Counts the bytes that are read.
    """
    items_by_key = {one.key: list(_items_of(one)) for one in chosen}
    items = [item for one in chosen for item in items_by_key[one.key]]
    by_index = {item.item.index: item for item in items}

    def resolve(item: WriteItem) -> torch.Tensor | io.BytesIO:
        one = by_index[item.index]
        meter.advance(one.size_bytes)
        if isinstance(one.chosen.leaf, ObjectLeaf):
            return io.BytesIO(contents.blob(one.chosen.leaf))
        tensor = contents.read([one.box])[0] if one.box is not None else torch.empty(0)
        return tensor if one.chosen.dtype is None else tensor.to(one.chosen.dtype)

    places: dict[MetadataIndex, tuple[str, int, int]] = {}
    for number, group in enumerate(_files(items, limit_bytes)):
        name = data_name(0, number)
        task = FileTask(made.key(name), [(at, one.item) for at, one in enumerate(group)])
        written = auto_engine(made.storage, task, resolve, Cancelled())
        for place in written.placed:
            index = group[place.position].item.index
            places[index] = (name, place.offset, place.length)
    metadata = Metadata(
        state_dict_metadata={one.key: _described(one, items_by_key[one.key]) for one in chosen},
        planner_data={one.key: one.path for one in chosen},
    )
    save_id = next(fresh_ids())
    described = describe(metadata, places, checkpoint_id=checkpoint_id, save_id=save_id)
    made.put(METADATA, encode_metadata(described))


def _items_of(one: Chosen) -> Iterator[_Item]:
    leaf = one.leaf
    if isinstance(leaf, ObjectLeaf):
        item = WriteItem(MetadataIndex(one.key), WriteItemType.BYTE_IO)
        yield _Item(one, item, None, leaf.size_bytes)
        return
    dtype = leaf.dtype if one.dtype is None else one.dtype
    for number, box in enumerate(_boxes(leaf)):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.lengths)
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(dtype=dtype),
            torch.Size(leaf.shape),
        )
        index = MetadataIndex(one.key, offsets, number)
        item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        yield _Item(one, item, box, math.prod(sizes) * dtype.itemsize)


def _boxes(leaf: TensorLeaf) -> Iterator[Box]:
    """The tensor as it was sharded, in shards of at most 512 MiB."""
    pieces = [(shard.offsets, shard.sizes) for shard in leaf.shards]
    if not fills(pieces, leaf.shape):
        raise untiled(leaf.key, pieces, leaf.shape)
    seen: set[tuple[int, ...]] = set()
    window = _CHUNK_BYTES // leaf.dtype.itemsize
    for shard in leaf.shards:
        if shard.offsets in seen:
            continue  # each domain has a copy of what was replicated
        seen.add(shard.offsets)
        if not math.prod(shard.sizes):
            yield Box(leaf, shard.offsets, shard.sizes)
            continue
        zeros = (0,) * len(shard.sizes)
        for piece in pieces_of(shard.sizes, zeros, shard.sizes, window, whole=False):
            at = tuple(a + b for a, b in zip(shard.offsets, piece.offsets, strict=True))
            yield Box(leaf, at, piece.lengths)


def _described(one: Chosen, items: Sequence[_Item]) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(one.leaf, ObjectLeaf):
        return BytesStorageMetadata()
    data = [i.item.tensor_data for i in items if i.item.tensor_data is not None]
    dtype = one.leaf.dtype if one.dtype is None else one.dtype
    chunks = [each.chunk for each in data]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(one.leaf.shape), chunks)


def _files(items: Sequence[_Item], limit_bytes: int) -> Iterator[list[_Item]]:
    """Files of about so many bytes; a larger item has one to itself."""
    group: list[_Item] = []
    held = 0
    for one in items:
        if group and held + one.size_bytes > limit_bytes:
            yield group
            group, held = [], 0
        group.append(one)
        held += one.size_bytes
    if group:
        yield group
