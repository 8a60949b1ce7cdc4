"""The Reads of one value of a state dict: which saved chunks fill which part of its memory.

plain tensor   the whole of it is asked for
DTensor        the box that lies on this rank; where that is, is computed once per sharding
read_of        of anything else: torch plans ReadItems, and each is put into our words
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ckptfs import _torch
from ckptfs.dcp.boxes import narrowed
from ckptfs.dcp.inventory import Inventory, SavedTensor
from ckptfs.dcp.overlaps import meetings
from ckptfs.dcp.reads import Read
from ckptfs.errors import ManifestError

__all__ = ["PLAIN", "Mine", "Shardings", "read_box"]

# Their memory is exactly what their shape says; a subclass may mean something else by it.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

# A NamedTuple's own __new__ is a Python function.
_new = tuple.__new__

Mine = tuple[torch.Tensor, Sequence[int]]  # a rank's part of a tensor, and where it begins


class Shardings:
    """Where the parts of DTensors lie, each sharding asked for once. For one plan."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def of(self, value: Any) -> list[Mine] | None:
        """This rank's part of a DTensor, if it has one; None where torch has to plan it: it is no
        DTensor, or its part is cut further.
        """
        if not _torch.is_dtensor(value):
            return None
        key = (value.device_mesh, value.placements, value.shape)
        if key not in self._boxes:
            self._boxes[key] = _box_of(value)
        box = self._boxes[key]
        if not box:
            return None if box is None else []
        local = value.to_local()
        if type(local) not in PLAIN or tuple(local.shape) != tuple(box[1]):
            return None
        return [(local, box[0])]


def read_box(  # noqa: PLR0917 - what is asked for, and where it goes
    reads: list[Read],
    inventory: Inventory,
    key: str,
    saved: SavedTensor,
    memory: torch.Tensor,
    offsets: Sequence[int],
) -> None:
    """Add the Reads that fill ``memory``, the box of the tensor that begins at ``offsets``."""
    target = memory.detach() if memory.requires_grad else memory
    sizes = memory.shape
    if len(saved.chunks) == 1 and saved.sizes == sizes:
        begins, lengths = saved.box_of(saved.chunks[0])
        if lengths == sizes and not any(begins):
            # All of a tensor that was saved in one piece: most of most checkpoints.
            if 0 not in sizes:
                path, at, length = inventory.place(key, begins)
                made = (key, path, at, length, lengths, saved.dtype, begins, lengths, target, None)
                reads.append(_new(Read, made))
            return
    hint = inventory.number(key, offsets) if len(saved.chunks) > 1 else None
    filled = 0
    for number, in_chunk, in_box, lengths in meetings(saved, offsets, sizes, hint):
        filled += math.prod(lengths)
        begins, chunk_sizes = saved.box(number)
        path, at, length = inventory.place(key, begins)
        part = _part(target, in_box, lengths)
        reads.append(Read(key, path, at, length, chunk_sizes, saved.dtype, in_chunk, lengths, part))
    if filled < math.prod(sizes):
        # What no chunk holds would keep the values that the tensor had before.
        raise ManifestError(
            f".metadata has {filled} of the {math.prod(sizes)} values that {key!r} asks for here",
            hint="it was saved incompletely; load another checkpoint",
        )


def _box_of(value: Any) -> tuple[Any, ...] | None:
    """Offsets and sizes; nothing where this rank is not in the mesh, None where torch has to plan."""
    if value.device_mesh.get_coordinate() is None:
        return ()
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1:
        return None
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def _part(target: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    if tuple(target.shape) == tuple(lengths):
        return target
    return narrowed(target, offsets, lengths)
