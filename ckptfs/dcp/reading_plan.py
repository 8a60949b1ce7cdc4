"""The Reads of one value of a state dict: which saved chunks fill which part of its memory.

plain tensor   the whole of it is asked for
DTensor        the box that lies on this rank; where that is, is computed once per sharding
refuse_untiled     of anything else: torch plans ReadItems, and they are counted here
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from ckptfs import _torch
from ckptfs.dcp.boxes import narrowed
from ckptfs.dcp.grid import fills
from ckptfs.dcp.inventory import Inventory, SavedTensor
from ckptfs.dcp.overlaps import meetings
from ckptfs.dcp.reads import Read
from ckptfs.errors import IntegrityError

__all__ = ["PLAIN", "Mine", "Shardings", "read_box", "refuse_untiled", "untiled"]

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
    pieces = []
    for number, in_chunk, in_box, lengths in meetings(saved, offsets, sizes, hint):
        pieces.append((in_box, lengths))
        begins, chunk_sizes = saved.box(number)
        path, at, length = inventory.place(key, begins)
        part = _part(target, in_box, lengths)
        reads.append(Read(key, path, at, length, chunk_sizes, saved.dtype, in_chunk, lengths, part))
    if not fills(pieces, sizes):
        raise untiled(key, pieces, sizes)


def untiled(
    key: str, pieces: Sequence[tuple[Sequence[int], Sequence[int]]], sizes: Sequence[int]
) -> IntegrityError:
    """The error where the chunks that were saved do not fill a box exactly: what none of them holds
    would keep the values that the tensor had before, or whatever lay in fresh memory.
    """
    held, wanted = sum(math.prod(lengths) for _, lengths in pieces), math.prod(sizes)
    what = "overlap and leave a part of it out" if held >= wanted else "do not fill it"
    return IntegrityError(
        f".metadata has {held} of the {wanted} values that {key!r} asks for here: its chunks {what}",
        hint="it was saved incompletely, or changed; load another checkpoint",
    )


def refuse_untiled(plan: LoadPlan, values: Mapping[str, Any], keys: Container[str]) -> None:
    """IntegrityError unless torch's plan fills every tensor of ``values`` that is among ``keys``. Torch
    plans whatever chunks meet a tensor and counts nothing.
    """
    planned: dict[MetadataIndex, list[tuple[Sequence[int], Sequence[int]]]] = defaultdict(list)
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            planned[item.dest_index].append((item.dest_offsets, item.lengths))
    for key, value in values.items():
        if key not in keys or not isinstance(value, torch.Tensor):
            continue
        for offsets, sizes in _torch.boxes_here(value):
            pieces = planned.get(MetadataIndex(key, torch.Size(offsets)), [])
            if not fills(pieces, sizes):
                raise untiled(key, pieces, sizes)


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
