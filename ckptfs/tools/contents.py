"""What a checkpoint holds, leaf by leaf, and its values box by box: memory stays bounded.

with open_contents(uri, options) as contents:
    contents.leaves                          TensorLeaf and ObjectLeaf, by key
    contents.read([Box(leaf, (0, 0), (4, 8))])    tensors, verified where there are digests
    for boxes in batches(contents.tensors): ...   all of them, about 32 MiB at a time

ours, stock DCP        .metadata          any sharding
safetensors            headers, index     one file or a directory, whoever wrote it
torch.save             one file           mapped where it lies on a mounted filesystem, else fetched
                                          whole into memory; weights only
other files            no leaves
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.boxes import pieces_of
from ckptfs.dcp.leaves import load_leaf

__all__ = [
    "DEEPEST",
    "Box",
    "Contents",
    "Leaf",
    "ObjectLeaf",
    "Shard",
    "TensorLeaf",
    "batches",
]

DEEPEST = 200  # levels of dicts and lists: what nests deeper is made to end the stack

_BATCH_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor as it was saved. file: relative to the checkpoint; start, length: of the blob
    that holds it, in bytes of that file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor. path: where it stood in the nested state dict; empty where nobody tells."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    path: tuple[str | int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """Anything else, pickled: ``length`` bytes of a file, from ``start``."""

    key: str
    file: str
    start: int
    length: int
    path: tuple[str | int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its pickle."""
        return self.length


Leaf = TensorLeaf | ObjectLeaf


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    leaf: TensorLeaf
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def all_of(leaf: TensorLeaf) -> Box:
        """The whole tensor."""
        return Box(leaf, (0,) * len(leaf.shape), leaf.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.lengths) * self.leaf.dtype.itemsize


class Contents(ABC):
    """The leaves of one checkpoint, by key. One thread."""

    leaves: Mapping[str, Leaf]

    @property
    def tensors(self) -> tuple[TensorLeaf, ...]:
        """Those that are tensors, in the order of their bytes on the storage."""
        found = [leaf for leaf in self.leaves.values() if isinstance(leaf, TensorLeaf)]
        return tuple(sorted(found, key=_place_of))

    @property
    def objects(self) -> tuple[ObjectLeaf, ...]:
        """Those that are not, in the order of their bytes on the storage."""
        found = [leaf for leaf in self.leaves.values() if isinstance(leaf, ObjectLeaf)]
        return tuple(sorted(found, key=lambda leaf: (leaf.file, leaf.start)))

    @abstractmethod
    def read(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """The boxes, contiguous, on the host; nobody else has their memory, or nobody changes it.

        IntegrityError, IncompleteCheckpointError: named by file and key.
        """

    def check_sizes(self, leaves: Iterable[Leaf]) -> None:
        """IntegrityError where a leaf is said to have more bytes than its file holds. Whoever makes memory
        or files of the size that is said asks first.
        """

    @abstractmethod
    def blob(self, leaf: ObjectLeaf) -> bytes:
        """The pickle of an object, as torch.save made it."""

    @abstractmethod
    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """What was noted of its bytes when they were written, shard by shard; None: of not all."""

    def value(self, leaf: ObjectLeaf) -> Any:
        """The object, loaded with weights_only. pickle.UnpicklingError: it would run code."""
        return load_leaf(io.BytesIO(self.blob(leaf)))


def batches(leaves: Iterable[TensorLeaf]) -> Iterator[list[Box]]:
    """All of these tensors as boxes of at most 8 MiB, and so many at once that it is 32 MiB."""
    batch: list[Box] = []
    held_bytes = 0
    for leaf in leaves:
        for box in _cut(leaf):
            if batch and held_bytes + box.size_bytes > _BATCH_BYTES:
                yield batch
                batch, held_bytes = [], 0
            batch.append(box)
            held_bytes += box.size_bytes
    if batch:
        yield batch


def _cut(leaf: TensorLeaf) -> Iterator[Box]:
    zeros = (0,) * len(leaf.shape)
    if leaf.size_bytes <= _PIECE_BYTES:
        yield Box(leaf, zeros, leaf.shape)
        return
    window = _PIECE_BYTES // leaf.dtype.itemsize
    for piece in pieces_of(leaf.shape, zeros, leaf.shape, window, whole=False):
        yield Box(leaf, piece.offsets, piece.lengths)


def _place_of(leaf: TensorLeaf) -> tuple[str, int]:
    first = leaf.shards[0] if leaf.shards else None
    return ("", 0) if first is None else (first.file, first.start)
