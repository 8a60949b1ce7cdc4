"""What one rank reads: boxes of saved chunks with the memory that they fill, and whole objects.

    Read              one piece of this rank's state, or one object
    meetings          which saved chunks a box of a tensor overlaps, and where; pure
    read_box          the Reads of one value of a state dict (``LoadPlanner.create_reads``)
    reads_of          the Reads of one of torch's plans, for planners that torch drives
    refuse_untiled    checks what torch planned for other kinds of tensors for holes

A plain tensor needs the whole saved tensor. A DTensor needs the box that is on this rank, which is computed
once per sharding:

    tensor       |   chunk 0   |   chunk 1   |   chunk 2   |
    needed               |------------------|
    meetings             |-----|------------|                  chunk 0 from its middle, chunk 1 whole

torch's ``create_read_items_for_chunk_list`` computes the same, but makes an object of every pair that it
looks at. Here many chunks are compared at once, in columns. A Read is a tuple and not a dataclass for the
same reason: a load of 20,000 tensors makes as many Reads, and a tuple costs a third. torch's ReadItem
contains the same with three torch.Size and two MetadataIndex.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckptfs import _torch
from ckptfs.dcp.boxes import fills, narrowed, untiled
from ckptfs.dcp.metadata.metadata_reader import Inventory, SavedTensor, refuse_extensions
from ckptfs.errors import ManifestError, StateError

__all__ = [
    "PLAIN",
    "OwnTargets",
    "PlannedRead",
    "PlannerTargets",
    "Shardings",
    "Targets",
    "meetings",
    "read_box",
    "reads_of",
    "refuse_untiled",
    "target_of",
]


class PlannedRead(NamedTuple):
    """One piece of this rank's state, or one object.

    Attributes:
        key: The key in the checkpoint.
        path: The file of the saved item, as the metadata has it.
        offset: Where the item begins in the file, in bytes.
        length: Its length in bytes.
        sizes: The sizes of the saved chunk.
        dtype: Its dtype; None for an object.
        box_offsets: Where the requested box begins in the chunk.
        box_lengths: The sizes of the requested box.
        target: A tensor of the box's size to fill; None for an object.
        item: The item of torch's planner that requested this, if one did.
    """

    key: str
    path: str
    offset: int
    length: int
    sizes: Sequence[int] = ()
    dtype: torch.dtype | None = None
    box_offsets: Sequence[int] = ()
    box_lengths: Sequence[int] = ()
    target: torch.Tensor | None = None
    item: ReadItem | None = None


_FEW = 8  # for fewer chunks, making columns takes longer than looking at each


class Meeting(NamedTuple):
    """The common part of a chunk and a box: where it begins in each, and its sizes."""

    chunk: int
    in_chunk: Sequence[int]
    in_box: Sequence[int]
    lengths: Sequence[int]


def meetings(
    saved: SavedTensor, offsets: Sequence[int], sizes: Sequence[int], hint: int | None = None
) -> Iterator[Meeting]:
    """Yield the chunks that the box overlaps, by rising number; none if either has no elements.

    ``hint`` is the number of the chunk that may be this very box. Chunks do not overlap, so if it is, it is the
    only one.
    """
    if 0 in sizes:
        return
    if hint is not None and 0 <= hint < len(saved.chunks) and _is_same(saved, hint, offsets, sizes):
        zeros = (0,) * len(sizes)
        yield Meeting(hint, zeros, zeros, sizes)
        return
    for number in _candidates(saved, offsets, sizes):
        begins, lengths = saved.box(number)
        low = [max(a, b) for a, b in zip(begins, offsets, strict=True)]
        high = [
            min(a + n, b + m) for a, n, b, m in zip(begins, lengths, offsets, sizes, strict=True)
        ]
        if all(a < b for a, b in zip(low, high, strict=True)):
            yield Meeting(
                number,
                [a - b for a, b in zip(low, begins, strict=True)],
                [a - b for a, b in zip(low, offsets, strict=True)],
                [b - a for a, b in zip(low, high, strict=True)],
            )


def _is_same(saved: SavedTensor, number: int, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    begins, lengths = saved.box(number)
    return tuple(begins) == tuple(offsets) and tuple(lengths) == tuple(sizes)


def _candidates(saved: SavedTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
    """Return the numbers of chunks that may overlap the box; all that do are among them."""
    if len(saved.chunks) < _FEW or not sizes:
        return range(len(saved.chunks))
    boxes = [saved.box_of(chunk) for chunk in saved.chunks]
    begins = np.array([begin for begin, _ in boxes], np.int64)
    ends = begins + np.array([lengths for _, lengths in boxes], np.int64)
    low = np.array(offsets, np.int64)
    meets = (begins < low + np.array(sizes, np.int64)) & (low < ends)
    found: list[int] = np.nonzero(meets.all(axis=1))[0].tolist()
    return found


# The memory of these types is exactly what their shape says. In a subclass it may mean something else.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

# A NamedTuple's own __new__ is a Python function.
_new = tuple.__new__

Mine = tuple[torch.Tensor, Sequence[int]]  # a rank's part of a tensor, and where it begins


class Shardings:
    """This rank's boxes of DTensors, computed once per sharding. For one plan."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def of(self, value: Any) -> list[Mine] | None:
        """Return this rank's part of a DTensor, empty if it has none; None if torch has to plan it.

        torch has to plan it if it is not a DTensor, or if its part is sharded further.
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
    reads: list[PlannedRead],
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
            # A whole tensor that was saved in one piece: the usual case in most checkpoints.
            if 0 not in sizes:
                path, at, length = inventory.place(key, begins)
                made = (key, path, at, length, lengths, saved.dtype, begins, lengths, target, None)
                reads.append(_new(PlannedRead, made))
            return
    hint = inventory.number(key, offsets) if len(saved.chunks) > 1 else None
    pieces = []
    for number, in_chunk, in_box, lengths in meetings(saved, offsets, sizes, hint):
        pieces.append((in_box, lengths))
        begins, chunk_sizes = saved.box(number)
        path, at, length = inventory.place(key, begins)
        part = _part(target, in_box, lengths)
        reads.append(
            PlannedRead(key, path, at, length, chunk_sizes, saved.dtype, in_chunk, lengths, part)
        )
    if not fills(pieces, sizes):
        raise untiled(key, pieces, sizes)


def refuse_untiled(plan: LoadPlan, values: Mapping[str, Any], keys: Container[str]) -> None:
    """Raise IntegrityError unless torch's plan fills every tensor of ``values`` among ``keys``.

    torch plans the chunks that overlap a tensor and does not count their elements.
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
    """Return offsets and sizes; empty if this rank is not in the mesh, None if torch has to plan."""
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


class OwnTargets:
    """The targets of Reads that have their own tensors; nothing happens when one is filled."""

    commits = False

    def __init__(self, load_bytes: Callable[[PlannedRead, io.BytesIO], None]) -> None:
        self.load_bytes = load_bytes

    def target(self, read: PlannedRead) -> torch.Tensor:
        """Return the tensor to fill."""
        assert read.target is not None  # noqa: S101 - only objects have none
        return read.target

    def commit(self, read: PlannedRead, target: torch.Tensor) -> None:
        """Do nothing: the tensor is filled."""


class PlannerTargets:
    """The targets of one of torch's planners.

    The planner gives each tensor when its turn comes, and is called again when it is filled.
    """

    commits = True

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def target(self, read: PlannedRead) -> torch.Tensor:
        """Return the tensor to fill."""
        return target_of(self._planner, read)

    def commit(self, read: PlannedRead, target: torch.Tensor) -> None:
        """Report to the planner that the tensor is filled."""
        assert read.item is not None  # noqa: S101 - reads_of has set it
        self._planner.commit_tensor(read.item, target)

    def load_bytes(self, read: PlannedRead, stream: io.BytesIO) -> None:
        """Give an object to the planner."""
        assert read.item is not None  # noqa: S101 - reads_of has set it
        self._planner.load_bytes(read.item, stream)


Targets = OwnTargets | PlannerTargets


def reads_of(plan: LoadPlan, metadata: Metadata) -> Iterator[PlannedRead]:
    """Yield one PlannedRead per item of the plan, in its order, without a target.

    ManifestError: the metadata does not say where the item is, or as what it was saved. StateError: only
    another reader can read it.
    """
    for item in plan.items:
        info, key = _info(metadata, item), item.storage_index.fqn
        refuse_extensions(info, key)
        place = (key, info.relative_path, info.offset, info.length)
        if item.type is LoadItemType.BYTE_IO:
            yield PlannedRead(*place, item=item)
            continue
        index = item.storage_index
        saved = metadata.state_dict_metadata[index.fqn]
        if not isinstance(saved, TensorStorageMetadata):
            raise ManifestError(
                f".metadata describes {index.fqn!r} as an object and reads it as a tensor"
            )
        yield PlannedRead(
            *place,
            sizes=_chunk_sizes(saved, index),
            dtype=saved.properties.dtype,
            box_offsets=item.storage_offsets,
            box_lengths=item.lengths,
            item=item,
        )


def target_of(planner: LoadPlanner, read: PlannedRead) -> torch.Tensor:
    """Return the planner's tensor; StateError unless it has the shape of the box."""
    assert read.item is not None  # noqa: S101 - reads_of has set it
    target = planner.resolve_tensor(read.item).detach()
    if tuple(target.size()) != tuple(read.box_lengths):
        raise StateError(
            f"{read.key!r}: the planner gave a tensor of shape {tuple(target.size())} "
            f"for a range of {tuple(read.box_lengths)}"
        )
    return target


def _info(metadata: Metadata, item: ReadItem) -> Any:
    try:
        return metadata.storage_data[item.storage_index]
    except KeyError:
        raise ManifestError(
            f".metadata gives no place for {item.storage_index.fqn!r}",
            hint="it was saved incompletely; load another checkpoint",
        ) from None


def _chunk_sizes(saved: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    chunks, hint = saved.chunks, index.index
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
        return chunks[hint].sizes
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return chunk.sizes
    raise ManifestError(f".metadata has no chunk of {index.fqn!r} at {index.offset}")
