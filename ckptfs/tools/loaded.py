"""Leaves of one torch.save file, loaded with weights_only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.planning.leaves import serialise_leaf
from ckptfs.dcp.read.boxes import narrowed
from ckptfs.dcp.write.host_memory import host_tensor
from ckptfs.errors import IntegrityError
from ckptfs.tools.contents import DEEPEST, Box, Contents, Leaf, ObjectLeaf, Shard, TensorLeaf

__all__ = ["LoadedContents"]


class LoadedContents(Contents):
    """Leaves of one torch.save file that was loaded: a nested dict, flattened as DCP does it.

    Args:
        loaded: What was loaded.
        file: The name of the file.
    """

    def __init__(self, loaded: Any, file: str) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._objects: dict[str, Any] = {}
        found: dict[str, Leaf] = {}
        for path, value in _flat(loaded, ()):
            key = ".".join(str(part) for part in path) or file
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._tensors[key] = value
                whole = (0,) * value.dim(), tuple(value.shape)
                shard = Shard(*whole, file, 0, value.numel() * value.element_size())
                found[key] = TensorLeaf(key, value.dtype, tuple(value.shape), (shard,), path)
            else:
                self._objects[key] = value
                size = serialise_leaf(value).getbuffer().nbytes
                found[key] = ObjectLeaf(key, file, 0, size, path)
        self.leaves = found

    def read(
        self, boxes: Sequence[Box], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As ``Contents.read``: views of what was loaded, copied where they are not contiguous."""
        found = [narrowed(self._tensors[box.leaf.key], box.offsets, box.lengths) for box in boxes]
        if into is None:
            return [host_tensor(tensor) for tensor in found]
        return [target.copy_(tensor) for target, tensor in zip(into, found, strict=True)]

    def blob(self, leaf: ObjectLeaf) -> bytes:
        """As ``Contents.blob``: pickled once more, by itself."""
        return serialise_leaf(self._objects[leaf.key]).getvalue()

    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """None: such a file has no digests."""
        return None


def _flat(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if len(path) > DEEPEST:  # it may hold itself
        raise IntegrityError(f"its values are nested more than {DEEPEST} deep")
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*path, str(key)))
    elif isinstance(value, list) and any(_holds_tensors(inner) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, (*path, number))
    else:
        yield path, value


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if depth > DEEPEST:
        raise IntegrityError(f"its values are nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return any(_holds_tensors(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return any(_holds_tensors(inner, depth + 1) for inner in value)
    return isinstance(value, torch.Tensor)
