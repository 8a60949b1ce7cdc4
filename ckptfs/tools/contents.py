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
from ckptfs.dcp.planning.leaves import load_leaf
from ckptfs.dcp.read.boxes import pieces_of

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
    """A box of a tensor as it was saved.

    Attributes:
        offsets: Where it begins in the tensor, in each dimension.
        sizes: How many elements it has, in each dimension.
        file: The file that has it, relative to the checkpoint.
        start: Where the blob that holds it begins in the file, in bytes.
        length: The size of that blob in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor.

    Attributes:
        key: Its key.
        dtype: Its dtype.
        shape: Its global shape.
        shards: The boxes that it was saved in.
        path: Its place in the nested state dict; empty where that is not known.
    """

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
    """Anything but a tensor, pickled.

    Attributes:
        key: Its key.
        file: The file that has it, relative to the checkpoint.
        start: Where it begins in the file, in bytes.
        length: Its size in bytes.
        path: Its place in the nested state dict; empty where that is not known.
    """

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
    """A part of a tensor.

    Attributes:
        leaf: The tensor.
        offsets: Where it begins, in each dimension.
        lengths: How many elements it has, in each dimension.
    """

    leaf: TensorLeaf
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def all_of(leaf: TensorLeaf) -> Box:
        """The whole tensor ``leaf``."""
        return Box(leaf, (0,) * len(leaf.shape), leaf.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.lengths) * self.leaf.dtype.itemsize


class Contents(ABC):
    """The leaves of one checkpoint, by key. One thread.

    Attributes:
        leaves: Tensors and objects, by key.
    """

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
    def read(
        self, boxes: Sequence[Box], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Read parts of tensors.

        Args:
            boxes: The parts.
            into: Memory for each of them, of its dtype and shape; None makes some.

        Returns:
            Their elements, contiguous, on the host; no other object has their memory, or none changes it.

        Raises:
            IntegrityError: The bytes differ from what was written; named by file and key.
            IncompleteCheckpointError: A file is missing; named by file and key.
        """

    def check_sizes(self, leaves: Iterable[Leaf]) -> None:
        """Check that the files have the bytes that leaves claim.

        Call it before memory or files of the claimed size are made.

        Args:
            leaves: The leaves.

        Raises:
            IntegrityError: A leaf claims more bytes than its file holds.
        """

    @abstractmethod
    def blob(self, leaf: ObjectLeaf) -> bytes:
        """The pickle of the object ``leaf``, as torch.save made it."""

    @abstractmethod
    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """The digests of the bytes of ``leaf`` from when they were written, shard by shard; None: not of all."""

    def value(self, leaf: ObjectLeaf) -> Any:
        """The object, loaded with weights_only.

        Args:
            leaf: Which one.

        Raises:
            UnpicklingError: It would run code.
        """
        return load_leaf(io.BytesIO(self.blob(leaf)))


def batches(leaves: Iterable[TensorLeaf], most_bytes: int = _BATCH_BYTES) -> Iterator[list[Box]]:
    """Yield all of the tensors ``leaves`` as boxes of at most 8 MiB, in batches of up to ``most_bytes`` bytes."""
    batch: list[Box] = []
    held_bytes = 0
    for leaf in leaves:
        for box in _cut(leaf):
            if batch and held_bytes + box.size_bytes > most_bytes:
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
