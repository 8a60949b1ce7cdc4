"""What torch.save writes around the memory of a tensor, known before there is a tensor.

    frame(dtype, sizes)      Frame: head, tail; a blob is  head | the tensor's memory | tail
    matches(bytes, ...)      where the payload begins in a blob that torch wrote, CRC fields or not

torch itself makes a frame, from memory that nobody ever touches, with the data left out; so it is
what this version of torch writes, whatever that is. Only the CRC fields are 0: no reader of torch's
looks at them, and computing them takes as long as writing the data. What a frame depends on is the
dtype, the shape and torch's alignment of storages: it is made once and kept.

A dtype's first frame is tried: torch.load must give back what was put into it. Where it does not, or
where a future torch cannot be asked like this, there is no frame (None) and torch.save writes the blob.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckptfs._torch import save_without_data, storage_alignment_bytes

__all__ = ["Frame", "frame", "matches"]

_log = logging.getLogger(__name__)

# Such a tensor is more than its memory; one that is a view of bytes does not say that it is one.
_QUANTISED = frozenset(
    getattr(torch, name)
    for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
)
_KEPT = 4096  # frames of 1.5 KiB
_DESCRIPTOR = b"PK\x07\x08"  # zip's data descriptor: this, the CRC, two sizes
_CRC_BYTES = 4
# Larger than the machine is no trouble then. Python has the name from 3.13 on.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_TRIAL = (3, 2)  # the shape on which a dtype is tried


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after a payload of ``payload_length`` bytes. crc_offsets: of the four-byte
    CRC fields in the head, which torch fills in and we leave 0.
    """

    head: bytes
    tail: bytes
    payload_length: int
    crc_offsets: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Bytes of the whole blob."""
        return len(self.head) + self.payload_length + len(self.tail)


def frame(dtype: torch.dtype, sizes: Sequence[int]) -> Frame | None:
    """What torch.save writes around a plain contiguous CPU tensor of that dtype and shape.

    None: this torch cannot say it in advance, for this dtype. Any thread.
    """
    alignment = storage_alignment_bytes()
    if dtype in _QUANTISED or not _is_right(dtype, alignment):
        return None
    return _made(dtype, tuple(sizes), alignment)


def matches(data: bytes | memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> int | None:
    """The payload's offset in a blob of that dtype and shape, if ``data`` begins as torch writes it.

    data: at least the head of the blob, from its start. The CRC fields may say anything.
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
    del alignment  # torch takes it from its own settings; here it is part of what is remembered
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
    """Whether torch.load reads what a frame of this dtype makes of bytes."""
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
    """A tensor of addresses: no page of it is ever touched, and torch fills nothing in."""
    size = max(length, dtype.itemsize)  # there are no mappings of nothing
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    # A view: torch.empty warns of some dtypes, once, and whoever asks here has done nothing.
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    wide = [max(1, size) for size in sizes]  # as torch has it for empty tensors
    strides = [math.prod(wide[index + 1 :]) for index in range(len(sizes))]
    return flat.set_(flat.untyped_storage()[:length], 0, sizes, strides)


class _Sink:
    """What torch writes to: it skips the payload by one relative seek."""

    def __init__(self) -> None:
        self._parts = [bytearray()]  # the head, and after the payload the tail
        self._skipped: list[int] = []
        self._crcs: list[int] = []

    def write(self, data: bytes | memoryview) -> int:
        """Take what torch writes; the CRC of a descriptor is where one begins."""
        part = self._parts[-1]
        if len(self._parts) == 1 and bytes(data[: len(_DESCRIPTOR)]) == _DESCRIPTOR:
            self._crcs.append(len(part) + len(_DESCRIPTOR))
        part += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Over the payload, once."""
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation("torch goes elsewhere than over the payload")
        self._skipped.append(offset)
        self._parts.append(bytearray())
        return self.tell()

    def tell(self) -> int:
        """Bytes so far, what was skipped among them."""
        return sum(len(part) for part in self._parts) + sum(self._skipped)

    def flush(self) -> None:
        """Nothing is held back."""

    def frame(self, length: int) -> Frame | None:
        """The frame, if what torch skipped was exactly the payload."""
        if sum(self._skipped) != length or len(self._parts) > 2:  # noqa: PLR2004 - head and tail
            return None
        head, tail = self._parts if len(self._parts) > 1 else (self._parts[0], bytearray())
        return Frame(bytes(head), bytes(tail), length, tuple(self._crcs))
