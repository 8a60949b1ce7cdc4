"""Pieces of a load as ranges of their file, each with what is done with its bytes.

    payload known    full_wants      all of it, into place: most items of most checkpoints
                     payload_wants   any parts of one saved tensor: into place, or through scratch
                     head_want       read first if only torch's usual head shows where the payload is
    payload unknown  blob_wants      the whole item, for an unpickler

Whole items are objects, and tensors in files without recorded payloads (those of stock torch):

    Blob           the item's bytes, from as many reads as it takes; any thread brings a piece
    load_tensor    torch.load(weights_only=True) of them, with a typed error for anything it raises
    ItemStream     the same item as a stream over the file: for disks, where seeking is cheap

The functions that a want carries run on any thread and never call the planner.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests
from ckptfs.dcp.boxes import narrowed, pieces_of, pieces_within, strides_of
from ckptfs.dcp.metadata.pickle_scan import check_archive
from ckptfs.dcp.read.data_file import Cutting, DataFile, ItemProgress, Want, blob_cuts, payload_cuts
from ckptfs.dcp.read.read_plan import PlannedRead
from ckptfs.dcp.write.file_layout import frame, matches
from ckptfs.dcp.write.host_memory import memory_of, tensor_view
from ckptfs.errors import CkptfsError

__all__ = [
    "Blob",
    "ItemStream",
    "PayloadRange",
    "SavedItem",
    "blob_wants",
    "full_wants",
    "head_want",
    "is_plain",
    "payload_wants",
    "unpickle",
    "usual_want",
]


@dataclass(slots=True)
class SavedItem:
    """One saved item that is being read: what all of its wants share."""

    file: DataFile
    digests: ItemDigests | None
    key: str
    owner: ItemProgress
    cutting: Cutting

    def check(self, low: int) -> Callable[[memoryview], float] | None:
        """Return what compares whole blocks from the item's byte ``low`` on; None without digests."""
        if self.digests is None or not self.file.verifies:
            return None
        return partial(self.file.compare, self.digests, low, self.key)

    def blocks(self, low: int, high: int) -> Sequence[int]:
        """Return the digests of the payload's bytes ``low`` to ``high``; empty without digests."""
        if self.digests is None or not self.file.verifies:
            return ()
        first = _blocks_in(self.digests.payload_offset) + low // BLOCK_SIZE_BYTES
        return self.digests.blocks[first : first + _blocks_in(high - low)]


@dataclass(frozen=True, slots=True)
class PayloadRange:
    """The place of a saved tensor's memory in its file, in bytes.

    Attributes:
        item: Where the item begins in the file.
        inside: Where the payload begins within the item.
        length: The length of the payload.
        is_sure: True if the digests say so, False if only torch's usual head does.
    """

    item: int
    inside: int
    length: int
    is_sure: bool = True

    @staticmethod
    def of(read: PlannedRead, digests: ItemDigests | None, size_bytes: int) -> PayloadRange | None:
        """Return the payload's place from the digests, or as torch writes it today.

        Returns:
            The place, or None if only torch can find it.
        """
        if digests is not None:
            if digests.payload_length != size_bytes:
                return None
            return PayloadRange(read.offset, digests.payload_offset, size_bytes)
        usual = None if read.dtype is None else frame(read.dtype, tuple(read.sizes))
        if usual is None or usual.length != read.length:
            return None
        return PayloadRange(read.offset, len(usual.head), size_bytes, is_sure=False)


def full_wants(
    file: DataFile,
    digests: ItemDigests,
    read: PlannedRead,
    owner: ItemProgress,
    out: memoryview,
    *,
    window_bytes: int,
) -> Sequence[Want]:
    """Return wants that read a whole payload into ``out``, a window each."""
    base, length, key = read.offset + digests.payload_offset, len(out), read.key
    blocks: Sequence[int] = ()
    if file.verifies:
        first = -(-digests.payload_offset // BLOCK_SIZE_BYTES)
        blocks = digests.blocks[first : first + -(-length // BLOCK_SIZE_BYTES)]
    if length <= window_bytes:
        return [Want(base, base + length, owner, key, out, blocks)]
    each = window_bytes // BLOCK_SIZE_BYTES
    return [
        Want(
            base + low,
            base + min(low + window_bytes, length),
            owner,
            key,
            out[low : low + window_bytes],
            blocks[number * each : (number + 1) * each],
        )
        for number, low in enumerate(range(0, length, window_bytes))
    ]


def usual_want(
    payload: PayloadRange, read: PlannedRead, owner: ItemProgress, out: memoryview
) -> Want:
    """Return a want for an item without digests, from its head to the end of its payload.

    If the head is not torch's usual one, the owner is marked as strange and ``out`` is not changed.
    """
    stop = payload.item + payload.inside + payload.length
    take = partial(_place_if_usual, owner, read, out)
    return Want(payload.item, stop, owner, read.key, take=take)


def head_want(saved: SavedItem, payload: PayloadRange, read: PlannedRead) -> Want:
    """Return a want for the head of an item without digests.

    If the head is not torch's usual one, the owner is marked as strange.
    """
    take = partial(_look, saved.owner, read)
    return Want(payload.item, payload.item + payload.inside, saved.owner, saved.key, take=take)


def payload_wants(
    saved: SavedItem, payload: PayloadRange, parts: Sequence[tuple[PlannedRead, torch.Tensor]]
) -> Iterator[Want]:
    """Yield ranges of a payload that fill each tensor with its PlannedRead's box; no byte is read twice.

    ``parts`` belong to one saved tensor, and their tensors are as large as their boxes.
    """
    cutting, rounded = saved.cutting, saved.file.verifies
    places = [_Place.of(read, tensor, cutting, rounded=rounded) for read, tensor in parts]
    cuts = payload_cuts(
        [span for place in places for span in place.spans],
        [place.spans[0] for place in places if place.memory is not None],
        payload.length,
        cutting.window,
        rounded=rounded,
    )
    base = payload.item + payload.inside
    for low, high in cuts:
        out, others = None, []
        for place in places:
            if place.stop <= low or place.start >= high:
                continue
            memory = place.memory
            if out is None and memory is not None and place.start <= low and high <= place.stop:
                out = memory[low - place.start : high - place.start]
            else:
                others.append(place)
        yield Want(
            base + low,
            base + high,
            saved.owner,
            saved.key,
            out,
            saved.blocks(low, high),
            take=partial(_deliver, low, others) if others else None,
        )


def blob_wants(saved: SavedItem, offset: int, blob: Blob) -> Iterator[Want]:
    """Yield ranges that fill ``blob`` with the whole item at ``offset`` of the file."""
    compared = saved.digests if saved.file.verifies else None
    for low, high in blob_cuts(compared, len(blob.data), saved.cutting.window):
        yield Want(
            offset + low,
            offset + high,
            saved.owner,
            saved.key,
            blob.out(low, high),
            check=saved.check(low),
            take=lambda data: blob.arrived(len(data)),
        )


def unpickle(
    file: DataFile, parts: Sequence[tuple[PlannedRead, torch.Tensor]], stream: Any
) -> None:
    """Fill the tensors from what torch.save wrote of the whole chunk. Any thread."""
    read = parts[0][0]
    chunk = load_tensor(file, stream, read.key)
    if tuple(chunk.shape) != tuple(read.sizes):
        raise file.damaged(
            f"{read.key!r} has shape {tuple(chunk.shape)} instead of {tuple(read.sizes)}"
        )
    for part, target in parts:
        _fill(target, narrowed(chunk, part.box_offsets, part.box_lengths))


def is_plain(target: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether the tensor's host memory is the saved values, one after the other."""
    # Conjugated and negated views show other values than their memory holds.
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and not (target.is_complex() and target.is_conj())
        and not target.is_neg()
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """One part of a saved tensor, and the tensor that it fills.

    Attributes:
        read: The part.
        target: The tensor to fill.
        spans: The ranges of the payload, in bytes, that contain the part.
        memory: The tensor's memory if the part is one range of the payload and needs no conversion, else None.
    """

    read: PlannedRead
    target: torch.Tensor
    spans: Sequence[tuple[int, int]]
    memory: memoryview | None

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        return self.spans[-1][1]

    @staticmethod
    def of(read: PlannedRead, target: torch.Tensor, cutting: Cutting, *, rounded: bool) -> _Place:
        size = _size_of(read)
        hole = BLOCK_SIZE_BYTES if rounded else cutting.gap
        pieces = [
            *pieces_of(
                read.sizes,
                read.box_offsets,
                read.box_lengths,
                max(1, cutting.window // size),
                full=True,
                hole=hole // size,
            )
        ]
        is_direct = pieces[0].is_contiguous and len(pieces) == 1 and is_plain(target, read.dtype)
        spans = [(piece.start * size, piece.stop * size) for piece in pieces]
        return _Place(read, target, spans, memory_of(target) if is_direct else None)

    def put(self, low: int, data: memoryview) -> None:
        """Copy what these bytes, from byte ``low`` of the payload on, contain of this part."""
        if self.memory is not None:
            first, last = max(low, self.start), min(low + len(data), self.stop)
            self.memory[first - self.start : last - self.start] = data[first - low : last - low]
            return
        read = self.read
        assert read.dtype is not None  # noqa: S101 - an object is no part of a tensor
        size = read.dtype.itemsize
        begin, end = low // size, (low + len(data)) // size
        flat = tensor_view(data, read.dtype)
        strides = strides_of(read.sizes)
        for piece in pieces_within(read.sizes, read.box_offsets, read.box_lengths, begin, end):
            values = flat.as_strided(piece.lengths, strides, piece.start - begin)
            _fill(narrowed(self.target, piece.offsets, piece.lengths), values)


def _blocks_in(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_SIZE_BYTES)


def _size_of(read: PlannedRead) -> int:
    return 1 if read.dtype is None else read.dtype.itemsize


def _deliver(low: int, places: Sequence[_Place], data: memoryview) -> None:
    """Give the payload's bytes from ``low`` on to all parts that were not read in place."""
    for place in places:
        place.put(low, data)


def _look(owner: ItemProgress, read: PlannedRead, data: memoryview) -> None:
    if read.dtype is None or matches(data, read.dtype, tuple(read.sizes)) is None:
        owner.is_strange = True


def _place_if_usual(
    owner: ItemProgress, read: PlannedRead, out: memoryview, data: memoryview
) -> None:
    _look(owner, read, data)
    if not owner.is_strange:
        out[:] = data[len(data) - len(out) :]


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    # inference_mode is set per thread: tensors that were made in it refuse changes outside of it.
    with torch.inference_mode(target.is_inference()):
        target.detach().copy_(values)


class Blob:
    """The bytes of one item; ``complete(stream)`` runs once all of them have been read.

    It runs on the thread that brought the last of them.
    """

    def __init__(self, length: int, complete: Callable[[io.BytesIO], None] | None = None) -> None:
        self.data = bytearray(length)
        self._missing = length
        self._complete = complete
        self._lock = threading.Lock()

    def out(self, low: int, high: int) -> memoryview:
        """Return the memory for bytes ``low`` to ``high`` of the item."""
        return memoryview(self.data)[low:high]

    def arrived(self, count: int) -> None:
        """Count ``count`` more bytes as read. Any thread; no byte may be counted twice."""
        with self._lock:
            self._missing -= count
            is_last = not self._missing
        if is_last and self._complete is not None:
            self._complete(self.stream())

    def stream(self) -> io.BytesIO:
        """Return all bytes as a stream."""
        return io.BytesIO(self.data)


def load_tensor(file: DataFile, stream: Any, key: str) -> torch.Tensor:
    """Return the tensor that ``torch.save`` wrote into this stream; else raise IntegrityError."""
    try:
        check_archive(stream)
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except CkptfsError:
        raise
    except Exception as error:
        # A damaged blob raises anything from RuntimeError to UnpicklingError.
        raise file.damaged(f"{key!r} is not what torch.save wrote: {error}") from error
    if not isinstance(loaded, torch.Tensor):
        raise file.damaged(f"{key!r} holds a {type(loaded).__name__}, not a tensor")
    return loaded


class ItemStream(io.RawIOBase):
    """A seekable view of one item; unverified."""

    def __init__(self, file: DataFile, offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0
        self.read_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes from the item's start."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move as in any stream; the end is the item's end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or as much of it as the item has bytes left."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        if count:
            self._file.reader.read_into(self._offset + self._at, view[:count])
            self._at += count
            self.read_bytes += count
        return count
