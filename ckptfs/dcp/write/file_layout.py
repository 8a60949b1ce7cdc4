"""The layout of a data file, computed before a byte of it is written.

    lay_out(items, objects)  ->  ItemLayout, ItemLayout, ...        head | payload | tail | 0 to 63 zeros, next item
    Payload(tensor)          ->  bytes a to b of it     its own memory, or a copy of that range

All offsets are known in advance: what torch writes around a tensor follows from its dtype and shape
(``frame``), and the bytes of objects already exist. Items that hold tensors begin at multiples of 64.
So do their payloads, because torch puts the payload at such an offset within its blob. torch aligns its
memory in the same way, and a copy between two addresses of equal alignment is faster. If a tensor is not
contiguous or is on a device, only the range that is written next is copied to the host.

A frame is what torch.save writes around the memory of a tensor. It is known before the tensor exists:

    frame(dtype, sizes)      Frame: head, tail; a blob is  head | the tensor's memory | tail
    matches(bytes, ...)      where the payload begins in a blob that torch wrote, CRC fields or not

torch itself makes the frame: it saves a tensor with memory that is never touched, and its data is left
out. The frame is therefore what the installed version of torch writes. Only the CRC fields are 0,
because no reader in torch checks them and computing them takes as long as writing the data. A frame
depends on the dtype, the shape and torch's alignment of storages; it is made once and cached.

Asking torch takes 0.3 ms, too long for thousands of shapes. If the numbers of two shapes take the same
number of bytes (``_Layout``), their frames differ in these numbers only. The first frame of such a layout
becomes a template. The second is made twice, by torch and from the template. If both agree, all further
frames are made from the template, without torch.

The first frame of each dtype is tested: torch.load must return the values that were put into it. If it
does not, or if a future torch cannot be used in this way, there is no frame (None) and torch.save
writes the blob.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import mmap
import pickletools
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckptfs._torch import save_without_data, storage_alignment_bytes
from ckptfs.commit.digests import BlockDigester, padding_before
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.write.host_memory import check_memory, memory_of

__all__ = [
    "Frame",
    "Framed",
    "ItemLayout",
    "Payload",
    "blocks_of",
    "frame",
    "framed",
    "lay_out",
    "matches",
]

_log = logging.getLogger("ckptfs.dcp")

# A quantised tensor is more than its memory. One that is a view of bytes does not report that it is quantised.
_QUANTISED = frozenset(
    getattr(torch, name)
    for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
)
_KEPT = 4096  # frames of 1.5 KiB
_DESCRIPTOR = b"PK\x07\x08"  # zip's data descriptor: this, the CRC, two sizes
_CRC_BYTES = 4
# Allows mappings larger than the machine's memory. Python has a name for this flag from 3.13 on.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_TRIAL = (3, 2)  # the shape on which a dtype is tried
# torch makes the frames of larger payloads: that takes little time compared with the data, and from 4 GiB on
# zip has other fields.
_LARGEST_TEMPLATE_BYTES = 1 << 24
# Bytes of an int in a pickle of protocol 2, and how it is packed.
_PICKLED_INTS = {"BININT1": "<B", "BININT2": "<H", "BININT": "<i"}
# zip, by the format's specification: signature, length, and where the fields are that count bytes.
_CENTRAL, _CENTRAL_BYTES, _CENTRAL_SIZES, _CENTRAL_NAMES, _CENTRAL_OFFSET = (
    b"PK\x01\x02",
    46,
    (20, 24),
    28,
    42,
)
_END, _END_BYTES, _END_OFFSET = b"PK\x05\x06", 22, 16
_END64, _END64_BYTES, _END64_OFFSET = b"PK\x06\x06", 56, 48
_LOCATOR, _LOCATOR_BYTES, _LOCATOR_OFFSET = b"PK\x06\x07", 20, 8
_DESCRIPTOR_SIZES = (8, 12)


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after a payload.

    Attributes:
        head: The bytes before the payload.
        tail: The bytes after the payload.
        payload_length: The length of the payload in bytes.
        crc_offsets: Where the head has four-byte CRC fields. torch fills them in; here they are 0.
    """

    head: bytes
    tail: bytes
    payload_length: int
    crc_offsets: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The length of the whole blob in bytes."""
        return len(self.head) + self.payload_length + len(self.tail)


def frame(dtype: torch.dtype, sizes: Sequence[int]) -> Frame | None:
    """Return what torch.save writes around a plain contiguous CPU tensor of this dtype and shape.

    Any thread may call this.

    Returns:
        The frame, or None if the installed torch does not allow it to be predicted for this dtype.
    """
    alignment = storage_alignment_bytes()
    if dtype in _QUANTISED or not _is_right(dtype, alignment):
        return None
    return _made(dtype, tuple(sizes), alignment)


def matches(data: bytes | memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> int | None:
    """Return the payload's offset in a blob of this dtype and shape.

    Args:
        data: The beginning of the blob, at least its head. The CRC fields may have any value.
        dtype: The dtype of the tensor in the blob.
        sizes: Its shape.

    Returns:
        The offset, or None if ``data`` does not begin as torch writes it.
    """
    known = frame(dtype, sizes)
    if known is None:
        return None
    size = len(known.head)
    found = bytes(data[:size])
    if found == known.head:
        return size
    plain = bytearray(found)
    if len(plain) != size:
        return None
    for offset in known.crc_offsets:
        plain[offset : offset + _CRC_BYTES] = bytes(_CRC_BYTES)
    return size if plain == known.head else None


@functools.lru_cache(maxsize=_KEPT)
def _made(dtype: torch.dtype, sizes: tuple[int, ...], alignment: int) -> Frame | None:
    length = math.prod(sizes) * dtype.itemsize
    if length == 0 or length > _LARGEST_TEMPLATE_BYTES:
        return _from_torch(dtype, sizes)
    numbers = _numbers(sizes)
    widths = tuple(1 if n < 1 << 8 else 2 if n < 1 << 16 else 4 for n in numbers)
    layout = _layout(dtype, widths, length % alignment, alignment)
    return layout.frame(sizes, numbers, length)


def _numbers(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ints in the pickle of a contiguous tensor: elements, offset, sizes, strides."""
    strides = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
    return (math.prod(sizes), 0, *sizes, *strides)


class _Layout:
    """Frames of one dtype with equally wide numbers and equally long payloads modulo the alignment.

    Two threads that enter at once do the same work twice and store the same values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._template: _Template | None = None
        self._is_agreed: bool | None = None  # None: no second frame has been compared yet

    def frame(self, sizes: tuple[int, ...], numbers: tuple[int, ...], length: int) -> Frame | None:
        """Return the frame of this shape: from the template if torch confirmed it, else from torch."""
        template = self._template
        if template is not None and self._is_agreed:
            return template.filled(numbers, length)
        made = _from_torch(self._dtype, sizes)
        if made is None or self._is_agreed is False:
            return made
        if template is None:
            self._template = _template_of(made, numbers)
            self._is_agreed = None if self._template is not None else False
        elif template.frame.payload_length != length:
            # Frames of equal payloads have equal tails: a field that was missed would not show.
            self._is_agreed = template.agrees(made, numbers)
        return made


@functools.lru_cache(maxsize=_KEPT)
def _layout(dtype: torch.dtype, widths: tuple[int, ...], remainder: int, alignment: int) -> _Layout:
    """Return the layout that belongs to the arguments; they are its cache key.

    Args:
        dtype: The dtype of the tensors.
        widths: How many bytes each number takes in the pickle.
        remainder: How many bytes the payload has in its last aligned block.
        alignment: torch's alignment of storages, in bytes.

    Returns:
        The layout; equal arguments give the same object.
    """
    del widths, remainder, alignment
    return _Layout(dtype)


@dataclass(frozen=True, slots=True)
class _Template:
    """A frame, and the positions of the numbers in it.

    Attributes:
        frame: The frame that the template was made from.
        ints: The numbers of the tensor in the head, as (offset, format).
        lengths: Byte counts in the tail, as (offset, format, difference to the payload's length).
    """

    frame: Frame
    ints: tuple[tuple[int, str], ...]
    lengths: tuple[tuple[int, str, int], ...]

    def agrees(self, made: Frame, numbers: tuple[int, ...]) -> bool:
        """Return whether the template filled in with ``numbers`` equals the frame that torch made."""
        try:
            return self.filled(numbers, made.payload_length) == made
        except struct.error:  # a number does not fit: the position that was found is wrong
            return False

    def filled(self, numbers: tuple[int, ...], length: int) -> Frame:
        """Return the frame with other numbers, which take the same number of bytes."""
        head, tail = bytearray(self.frame.head), bytearray(self.frame.tail)
        for (offset, packed), number in zip(self.ints, numbers, strict=True):
            struct.pack_into(packed, head, offset, number)
        for offset, packed, more in self.lengths:
            struct.pack_into(packed, tail, offset, length + more)
        return Frame(bytes(head), bytes(tail), length, self.frame.crc_offsets)


def _template_of(made: Frame, numbers: tuple[int, ...]) -> _Template | None:
    """Return the frame as a template, or None if it has another structure than expected here."""
    try:
        ints = tuple(_pickled_ints(made.head, numbers))
        lengths = tuple(_byte_counts(made))
    except (ValueError, IndexError, struct.error) as error:
        _log.debug("no template of frames: %s: %s", type(error).__name__, error)
        return None
    return _Template(made, ints, lengths)


def _pickled_ints(head: bytes, numbers: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    """Yield where the tensor's numbers are in its pickle, which is the first record of the head."""
    start = head.index(b"\x80\x02")
    found = []
    for opcode, value, offset in pickletools.genops(head[start:]):
        if opcode.name in _PICKLED_INTS:
            found.append(value)
            yield start + (offset or 0) + 1, _PICKLED_INTS[opcode.name]
    if tuple(found) != numbers:
        raise ValueError(f"the pickle has {found}, not {numbers}")


def _byte_counts(made: Frame) -> Iterator[tuple[int, str, int]]:
    """Yield the fields of the tail that hold the payload's length or an offset behind the payload."""
    tail, before = made.tail, len(made.head) + made.payload_length
    if tail[:4] != _DESCRIPTOR:
        raise ValueError("it has no descriptor after the payload")
    fields = [(offset, "<I") for offset in _DESCRIPTOR_SIZES]
    end = len(tail) - _END_BYTES
    at = struct.unpack_from("<I", tail, end + _END_OFFSET)[0] - before
    while tail[at : at + 4] == _CENTRAL:
        (offset,) = struct.unpack_from("<I", tail, at + _CENTRAL_OFFSET)
        lengths = struct.unpack_from("<HHH", tail, at + _CENTRAL_NAMES)
        name = tail[at + _CENTRAL_BYTES : at + _CENTRAL_BYTES + lengths[0]]
        if name.endswith(b"/data/0"):
            fields += [(at + field, "<I") for field in _CENTRAL_SIZES]
        elif offset >= before:
            fields.append((at + _CENTRAL_OFFSET, "<I"))
        at += _CENTRAL_BYTES + sum(lengths)
    if tail[at : at + 4] == _END64:
        fields.append((at + _END64_OFFSET, "<Q"))
        at += _END64_BYTES
    if tail[at : at + 4] == _LOCATOR:
        fields.append((at + _LOCATOR_OFFSET, "<Q"))
        at += _LOCATOR_BYTES
    if at != end or tail[at : at + 4] != _END:
        raise ValueError("the archive does not end as zip archives do")
    fields.append((at + _END_OFFSET, "<I"))
    for field, packed in fields:
        (value,) = struct.unpack_from(packed, tail, field)
        yield field, packed, value - made.payload_length


def _from_torch(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame | None:
    """Return the frame that torch itself writes, with the data left out."""
    sink = _Sink()
    length = math.prod(sizes) * dtype.itemsize
    try:
        save_without_data(_untouched(dtype, sizes, length), sink)
    except Exception as error:  # noqa: BLE001 - a torch that works otherwise: slower, not broken
        _log.debug("no frame for %s %s: %s: %s", dtype, sizes, type(error).__name__, error)
        return None
    return sink.frame(length)


@functools.lru_cache(maxsize=_KEPT)
def _is_right(dtype: torch.dtype, alignment: int) -> bool:
    """Return whether torch.load reads back what is stored in a frame of this dtype."""
    made = _made(dtype, _TRIAL, alignment)
    if made is None:
        return False
    payload = bytes(index % 2 for index in range(made.payload_length))  # valid for bool, too
    try:
        data = io.BytesIO(made.head + payload + made.tail)
        read = torch.load(data, map_location="cpu", weights_only=True)
        same = read.dtype is dtype and tuple(read.shape) == _TRIAL and read.is_contiguous()
        return same and bytes(read.untyped_storage().tolist()) == payload
    except Exception as error:  # noqa: BLE001 - as above
        _log.debug("frames of %s are not used: %s: %s", dtype, type(error).__name__, error)
        return False


def _untouched(dtype: torch.dtype, sizes: tuple[int, ...], length: int) -> torch.Tensor:
    """Return a tensor that has only addresses: no page is touched, and torch does not fill it."""
    size = max(length, dtype.itemsize)  # there are no mappings of nothing
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    # A view, because torch.empty warns once about some dtypes, and the caller could do nothing about that.
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    wide = [max(1, size) for size in sizes]  # as torch has it for empty tensors
    strides = [math.prod(wide[index + 1 :]) for index in range(len(sizes))]
    return flat.set_(flat.untyped_storage()[:length], 0, sizes, strides)


class _Sink:
    """A file object for torch to write to; torch skips the payload with one relative seek."""

    def __init__(self) -> None:
        self._parts = [bytearray()]  # the head, and after the payload the tail
        self._skipped: list[int] = []
        self._crcs: list[int] = []

    def write(self, data: bytes | memoryview) -> int:
        """Take what torch writes. A write that begins with a data descriptor is where the CRC is."""
        part = self._parts[-1]
        if len(self._parts) == 1 and bytes(data[: len(_DESCRIPTOR)]) == _DESCRIPTOR:
            self._crcs.append(len(part) + len(_DESCRIPTOR))
        part += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Skip the payload; torch does this once."""
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation("torch goes elsewhere than over the payload")
        self._skipped.append(offset)
        self._parts.append(bytearray())
        return self.tell()

    def tell(self) -> int:
        """Return the bytes so far, including those that were skipped."""
        return sum(len(part) for part in self._parts) + sum(self._skipped)

    def flush(self) -> None:
        """Do nothing: no data is buffered."""

    def frame(self, length: int) -> Frame | None:
        """Return the frame if torch skipped exactly the payload, else None."""
        if sum(self._skipped) != length or len(self._parts) > 2:  # noqa: PLR2004 - head and tail
            return None
        head, tail = self._parts if len(self._parts) > 1 else (self._parts[0], bytearray())
        return Frame(bytes(head), bytes(tail), length, tuple(self._crcs))


@dataclass(frozen=True, slots=True)
class Framed:
    """The bytes around tensors of one dtype and shape, with the digests of their blocks.

    Attributes:
        dtype: The dtype of the tensors.
        sizes: Their shape.
        frame: Head and tail as bytes.
        head: A view of the head.
        tail: A view of the tail.
        padded: The tail and the zeros that follow it if another tensor's item comes next.
        head_blocks: The digests of the head's blocks.
        tail_blocks: The digests of the tail's blocks.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    frame: Frame
    head: memoryview
    tail: memoryview
    padded: memoryview
    head_blocks: tuple[int, ...]
    tail_blocks: tuple[int, ...]


@dataclass(slots=True)  # not frozen: one per tensor, and a frozen one takes twice as long to make
class ItemLayout:
    """The place of one item: ``length`` bytes at ``offset``, then ``padding`` zeros.

    The zeros do not belong to the item. A tensor has ``framed``; an object has its bytes in ``data``.
    """

    position: int
    item: WriteItem
    offset: int
    length: int
    framed: Framed | None
    data: memoryview | None = None
    padding: int = 0


def blocks_of(data: bytes | memoryview) -> tuple[int, ...]:
    """Return the digests of a region's blocks."""
    digester = BlockDigester()
    digester.update(data)
    return tuple(digester.finish())


def framed(dtype: torch.dtype, sizes: Sequence[int]) -> Framed | None:
    """Return what surrounds a tensor of this dtype and shape; None if torch.save has to write it."""
    made = frame(dtype, sizes)
    if made is None:
        return None
    padded = memoryview(made.tail + bytes(padding_before(made.length)))
    head, tail = memoryview(made.head), padded[: len(made.tail)]
    return Framed(dtype, tuple(sizes), made, head, tail, padded, blocks_of(head), blocks_of(tail))


def lay_out(
    items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, memoryview]
) -> list[ItemLayout] | None:
    """Return the place of every item, in the order of ``items``.

    Args:
        items: The items with their positions in the rank's plan.
        objects: The bytes of each object, by position.

    Returns:
        The layout, or None if for some tensor it is not known what torch writes around it.
    """
    with gc_paused():  # otherwise the collector would walk over all of them again and again
        return _lay_out(items, objects)


def _lay_out(
    items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, memoryview]
) -> list[ItemLayout] | None:
    known: dict[tuple[torch.dtype, torch.Size], Framed | None] = {}
    layout: list[ItemLayout] = []
    offset = 0
    for position, item in items:
        data = objects.get(position)
        if data is not None:
            layout.append(ItemLayout(position, item, offset, len(data), None, data))
            offset += len(data)
            continue
        if item.tensor_data is None:
            return None
        key = (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
        if key not in known:
            known[key] = framed(*key)
        around = known[key]
        if around is None:
            return None
        length = around.frame.length
        padding = padding_before(offset)
        if padding:
            layout[-1].padding = padding
            offset += padding
        layout.append(ItemLayout(position, item, offset, length, around))
        offset += length
    return layout


class Payload:
    """The bytes of a plain tensor, in any memory layout and on any device.

    Several threads may read ranges of it.
    """

    __slots__ = ("_memory", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take a strided tensor that is not a wrapper subclass; it must not change."""
        self._memory = memory_of(tensor) if _lies_ready(tensor) else None
        if self._memory is None:
            check_memory(tensor)
            tensor = tensor.detach()
            if type(tensor) is not torch.Tensor:
                tensor = tensor.as_subclass(torch.Tensor)
        self._tensor = tensor

    @property
    def is_ready(self) -> bool:
        """Whether the tensor's own memory is its payload, so that nothing has to be copied."""
        return self._memory is not None

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``, from the tensor's memory or from a copy of only them."""
        if self._memory is not None:
            return self._memory[start:stop]
        if start == stop:
            return memoryview(b"")
        width = self._tensor.element_size()
        first, last = start // width, -(-stop // width)
        pieces = [memory_of(_on_host(piece)) for piece in _pieces(self._tensor, first, last)]
        joined = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        return joined[start - first * width : stop - first * width]


def _lies_ready(plain: torch.Tensor) -> bool:
    return plain.is_cpu and plain.is_contiguous() and not plain.is_neg() and not plain.is_conj()


def _on_host(piece: torch.Tensor) -> torch.Tensor:
    return piece.cpu().resolve_conj().resolve_neg().contiguous()


def _pieces(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Yield elements ``first`` to ``last`` in row-major order: parts of rows, whole rows together."""
    if tensor.dim() == 0:
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    begin, end = first // row, (last - 1) // row
    if begin == end:
        if (first, last) == (begin * row, (begin + 1) * row):
            yield tensor[begin]
        else:
            yield from _pieces(tensor[begin], first - begin * row, last - begin * row)
        return
    if first > begin * row:
        yield from _pieces(tensor[begin], first - begin * row, row)
        begin += 1
    if last == (end + 1) * row:
        end += 1
    if end > begin:
        yield tensor[begin:end]
    if last > end * row:
        yield from _pieces(tensor[end], 0, last - end * row)
