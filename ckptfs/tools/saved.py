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
from ckptfs.dcp.boxes import narrowed
from ckptfs.dcp.datafile import DataFile, Source, Verify, open_data, read_digests
from ckptfs.dcp.fetch import fetch
from ckptfs.dcp.grid import fills
from ckptfs.dcp.reading_plan import untiled
from ckptfs.errors import ManifestError
from ckptfs.tools.contents import Box, Contents, Leaf, ObjectLeaf, Shard, TensorLeaf

__all__ = ["SavedContents"]


class SavedContents(Contents):
    """Leaves that lie in data files, by torch's metadata. ``source`` stays the caller's."""

    def __init__(self, source: Source, metadata: Metadata) -> None:
        self._source = source
        self._metadata = metadata
        self._digests: dict[str, Mapping[int, ItemDigests] | None] = {}
        self.leaves = _leaves_of(metadata)

    def read(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """As ``Contents.read``; every byte that is read is compared as the source says."""
        into = _Into()
        items: list[ReadItem] = []
        for box in boxes:
            found = self._items_of(box)
            into.add(box, found)
            items += found
        fetch(self._source, LoadPlan(items), into, self._metadata)  # type: ignore[arg-type]
        return into.tensors

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


class _Into:
    """As much of a load planner as ``fetch`` asks for: boxes of fresh memory are filled."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._by_index: dict[MetadataIndex, torch.Tensor] = {}

    def add(self, box: Box, items: Iterable[ReadItem]) -> None:
        tensor = torch.empty(box.lengths, dtype=box.leaf.dtype)
        self.tensors.append(tensor)
        self._by_index.update((item.dest_index, tensor) for item in items)

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return narrowed(self._by_index[item.dest_index], item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """It lies where it belongs."""


def _leaves_of(metadata: Metadata) -> dict[str, Leaf]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    places = metadata.storage_data
    found: dict[str, Leaf] = {}
    for key, described in metadata.state_dict_metadata.items():
        path = tuple(paths.get(key, ()))
        if isinstance(described, TensorStorageMetadata):
            shards = []
            for chunk in described.chunks:
                place = places.get(MetadataIndex(key, chunk.offsets))
                if place is not None:
                    at = (place.relative_path, place.offset, place.length)
                    shards.append(Shard(tuple(chunk.offsets), tuple(chunk.sizes), *at))
            shape, dtype = tuple(described.size), described.properties.dtype
            found[key] = TensorLeaf(key, dtype, shape, tuple(shards), path)
            continue
        place = places.get(MetadataIndex(key))
        if place is None:
            raise ManifestError(f".metadata does not say where {key!r} lies")
        found[key] = ObjectLeaf(key, place.relative_path, place.offset, place.length, path)
    return found
