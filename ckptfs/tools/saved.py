"""Leaves that lie in data files: ours, stock DCP's, safetensors'. Read through the engine of loads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.planning.global_plan import fills
from ckptfs.dcp.read.boxes import narrowed
from ckptfs.dcp.read.data_file import DataFile, Source, Verify, open_data, read_digests
from ckptfs.dcp.read.read_plan import untiled
from ckptfs.dcp.read.scheduler import fetch
from ckptfs.errors import IntegrityError, ManifestError
from ckptfs.tools.contents import Box, Contents, Leaf, ObjectLeaf, Shard, TensorLeaf

__all__ = ["SavedContents"]

_LARGEST = (1 << 63) - 1  # what torch's sizes can be


class SavedContents(Contents):
    """Leaves in data files, by torch's metadata.

    Args:
        source: Reads the files; it stays the caller's.
        metadata: torch's.
    """

    def __init__(self, source: Source, metadata: Metadata) -> None:
        self._source = source
        self._metadata = metadata
        self._digests: dict[str, Mapping[int, ItemDigests] | None] = {}
        self.leaves = _leaves_of(metadata)

    def read(
        self, boxes: Sequence[Box], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As ``Contents.read``; every byte that is read is compared as the source says."""
        if into is None:
            into = [torch.empty(box.lengths, dtype=box.leaf.dtype) for box in boxes]
        targets = _Targets()
        items: list[ReadItem] = []
        for box, tensor in zip(boxes, into, strict=True):
            found = self._items_of(box)
            targets.add(tensor, found)
            items += found
        fetch(self._source, LoadPlan(items), targets, self._metadata)  # type: ignore[arg-type]
        return list(into)

    def _items_of(self, box: Box) -> list[ReadItem]:
        if not math.prod(box.lengths):
            return []
        described: Any = self._metadata.state_dict_metadata[box.leaf.key]
        asked = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
        found = create_read_items_for_chunk_list(box.leaf.key, described, [asked])
        pieces = [(item.dest_offsets, item.lengths) for item in found]
        if not fills(pieces, box.lengths):
            # The memory of the box is fresh: what is not filled would be whatever lay there before.
            error = untiled(box.leaf.key, pieces, box.lengths)
            error.uri = str(self._source.storage.uri(self._source.home))
            raise error
        return found

    def check_sizes(self, leaves: Iterable[Leaf]) -> None:
        """As ``Contents.check_sizes``: by the sizes of the files, of each one once."""
        sizes: dict[str, int] = {}
        for leaf in leaves:
            if isinstance(leaf, TensorLeaf):
                pieces = [(shard.offsets, shard.sizes) for shard in leaf.shards]
                if not fills(pieces, leaf.shape):
                    raise untiled(leaf.key, pieces, leaf.shape)
                for shard in leaf.shards:
                    size = math.prod(shard.sizes) * leaf.dtype.itemsize
                    if size > shard.length:
                        raise self._too_large(leaf, shard.file, size, shard.length)
            for place in leaf.shards if isinstance(leaf, TensorLeaf) else (leaf,):
                if place.file not in sizes:
                    with open_data(self._source, place.file) as reader:
                        sizes[place.file] = reader.size_bytes
                end = place.start + place.length
                if end > sizes[place.file]:
                    raise self._too_large(leaf, place.file, end, sizes[place.file])

    def _too_large(self, leaf: Leaf, file: str, size: int, there: int) -> IntegrityError:
        return IntegrityError(
            f".metadata gives {leaf.key!r} {size} bytes in {file}, where {there} are",
            uri=self._source.storage.uri(self._source.key(file)),
            hint="the file is truncated, or .metadata was changed; load another checkpoint",
        )

    def blob(self, leaf: ObjectLeaf) -> bytes:
        """As ``Contents.blob``, compared with its digests where the source verifies."""
        verifies = self._source.verify is Verify.READ
        known = read_digests(self._source, leaf.file) if verifies else None
        with open_data(self._source, leaf.file) as reader:
            file = DataFile(reader, self._source, leaf.file, known)
            file.check_size(leaf.start + leaf.length)
            data = bytearray(leaf.length)  # not before: a length that cannot be is not memory
            reader.read_into(leaf.start, memoryview(data))
            item = file.item(leaf.start, leaf.length, leaf.key)
            if item is not None and file.verifies:
                file.compare(item, 0, leaf.key, memoryview(data))
        return bytes(data)

    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """As ``Contents.digests``; no data file is read, their sidecars are."""
        if isinstance(leaf, ObjectLeaf):
            item = self._item(leaf.file, leaf.start, leaf.length)
            return None if item is None else ((item, None),)
        found = []
        for shard in leaf.shards:
            size = math.prod(shard.sizes) * leaf.dtype.itemsize
            item = self._item(shard.file, shard.start, shard.length)
            if size and (item is None or item.payload_length != size):
                return None
            if size and item is not None:
                found.append((item, shard))
        return tuple(found)

    def _item(self, file: str, start: int, length: int) -> ItemDigests | None:
        if file not in self._source.sidecars:
            return None
        if file not in self._digests:
            self._digests[file] = read_digests(self._source, file)
        item = (self._digests[file] or {}).get(start)
        return item if item is not None and item.length == length else None


class _Targets:
    """As much of a load planner as ``fetch`` asks for: tensors are filled."""

    def __init__(self) -> None:
        self._by_index: dict[MetadataIndex, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, items: Iterable[ReadItem]) -> None:
        self._by_index.update((item.dest_index, tensor) for item in items)

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return narrowed(self._by_index[item.dest_index], item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """It lies where it belongs."""


def _leaves_of(metadata: Metadata) -> dict[str, Leaf]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    places = metadata.storage_data
    try:
        return _leaves(metadata, paths, places)
    except (TypeError, AttributeError, ValueError) as error:
        # What it says is of other types than torch writes: nothing of it is believed.
        raise ManifestError(
            f".metadata describes no tensors: {error}",
            hint="it was changed, or written by something else; load another checkpoint",
        ) from error


def _leaves(
    metadata: Metadata, paths: Mapping[str, Any], places: Mapping[MetadataIndex, Any]
) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    for key, described in metadata.state_dict_metadata.items():
        path = tuple(paths.get(key, ()))
        if isinstance(described, TensorStorageMetadata):
            shards = []
            for chunk in described.chunks:
                place = places.get(MetadataIndex(key, chunk.offsets))
                if place is not None:
                    at = _numbers((place.offset, place.length))
                    offsets, sizes = _numbers(chunk.offsets), _numbers(chunk.sizes)
                    shards.append(Shard(offsets, sizes, place.relative_path, at[0], at[1]))
            shape, dtype = _numbers(described.size), described.properties.dtype
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{key!r} has the dtype {dtype!r}")
            found[key] = TensorLeaf(key, dtype, shape, tuple(shards), path)
            continue
        place = places.get(MetadataIndex(key))
        if place is None:
            raise ManifestError(f".metadata gives no place for {key!r}")
        at = _numbers((place.offset, place.length))
        found[key] = ObjectLeaf(key, place.relative_path, at[0], at[1], path)
    return found


def _numbers(told: Iterable[Any]) -> tuple[int, ...]:
    """Sizes and offsets, or TypeError."""
    numbers = tuple(told)
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        raise TypeError(f"{numbers!r:.200} are no sizes and offsets")
    return numbers
