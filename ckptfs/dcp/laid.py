"""Where everything of a file will lie, before a byte of it is written.

    lay_out(items, objects)  ->  Laid, Laid, ...        head | payload | tail | 0 to 63 zeros, next item
    Payload(tensor)          ->  bytes a to b of it     its own memory, or a copy of that range

What torch writes around a tensor is known from its dtype and shape (``frames``), an object's bytes are
made already: so is every offset. Items of tensors begin at multiples of 64, and so do payloads, which
torch puts at such an offset in its blob: as memory of torch's does, and copies between places that are
alike in this are faster. Of a tensor that is not contiguous, or on a device, only the range
that is asked for is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckptfs.commit.digests import BlockDigester, padding_before
from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.frames import Frame, frame
from ckptfs.dcp.resolve import check_memory, memory_of

__all__ = [
    "Framed",
    "Laid",
    "Payload",
    "blocks_of",
    "framed",
    "lay_out",
]


@dataclass(frozen=True, slots=True)
class Framed:
    """The bytes around tensors of one dtype and shape, with the digests of their blocks.

    padded: the tail, and behind it the zeros that go between it and another tensor's item.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    frame: Frame
    head: memoryview
    tail: memoryview
    padded: memoryview
    head_blocks: tuple[int, ...]
    tail_blocks: tuple[int, ...]


@dataclass(slots=True)  # not frozen: there are as many as tensors, and that doubles their making
class Laid:
    """One item: ``length`` bytes at ``offset``, then ``padding`` zeros, which are not of the item.

    framed: of a tensor; data: the bytes of an object.
    """

    position: int
    item: WriteItem
    offset: int
    length: int
    framed: Framed | None
    data: memoryview | None = None
    padding: int = 0


def blocks_of(data: bytes | memoryview) -> tuple[int, ...]:
    """The digests of a region's blocks."""
    digester = BlockDigester()
    digester.update(data)
    return tuple(digester.finish())


def framed(dtype: torch.dtype, sizes: Sequence[int]) -> Framed | None:
    """What goes around a tensor; None where torch.save has to write it."""
    made = frame(dtype, sizes)
    if made is None:
        return None
    padded = memoryview(made.tail + bytes(padding_before(made.length)))
    head, tail = memoryview(made.head), padded[: len(made.tail)]
    return Framed(dtype, tuple(sizes), made, head, tail, padded, blocks_of(head), blocks_of(tail))


def lay_out(
    items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, memoryview]
) -> list[Laid] | None:
    """Every item with its place, in their order. objects: by position, their bytes.

    None: of some tensor it is not known what torch writes around it.
    """
    with gc_paused():  # it would walk over all of them again and again
        return _lay_out(items, objects)


def _lay_out(
    items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, memoryview]
) -> list[Laid] | None:
    known: dict[tuple[torch.dtype, torch.Size], Framed | None] = {}
    laid: list[Laid] = []
    offset = 0
    for position, item in items:
        data = objects.get(position)
        if data is not None:
            laid.append(Laid(position, item, offset, len(data), None, data))
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
            laid[-1].padding = padding
            offset += padding
        laid.append(Laid(position, item, offset, length, around))
        offset += length
    return laid


class Payload:
    """The bytes of a plain tensor, wherever and however it lies. Ranges from several threads."""

    __slots__ = ("_memory", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: strided, no wrapper; it must not change."""
        self._memory = memory_of(tensor) if _lies_ready(tensor) else None
        if self._memory is None:
            check_memory(tensor)
            tensor = tensor.detach()
            if type(tensor) is not torch.Tensor:
                tensor = tensor.as_subclass(torch.Tensor)
        self._tensor = tensor

    @property
    def is_ready(self) -> bool:
        """Whether its own memory is its bytes."""
        return self._memory is not None

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``; of its own memory, or of a copy of no more than that."""
        if self._memory is not None:
            return self._memory[start:stop]
        if start == stop:
            return memoryview(b"")
        width = self._tensor.element_size()
        first, last = start // width, -(-stop // width)
        pieces = [memory_of(_on_host(piece)) for piece in _pieces(self._tensor, first, last)]
        whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        return whole[start - first * width : stop - first * width]


def _lies_ready(plain: torch.Tensor) -> bool:
    return plain.is_cpu and plain.is_contiguous() and not plain.is_neg() and not plain.is_conj()


def _on_host(piece: torch.Tensor) -> torch.Tensor:
    return piece.cpu().resolve_conj().resolve_neg().contiguous()


def _pieces(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last``, counted row by row: parts of rows, and whole rows together."""
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
