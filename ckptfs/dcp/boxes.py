"""Boxes of a row-major tensor, cut into ranges of its bytes. Pure.

chunk 4 x 6, box rows 1-2, columns 2-4            contiguous in the file: 8-10 and 14-16
. . . . . .
. . # # # .        one piece 8-16 if the window holds it (9 elements read, 6 used),
. . # # # .        else one piece per row
. . . . . .

pieces_of        which ranges of a chunk to read for a box
pieces_within    the parts of a box that are inside a range that was read
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Piece", "narrowed", "pieces_of", "pieces_within", "strides_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a saved chunk: a span that contains a sub-box of the box.

    ``offsets`` and ``lengths`` describe the sub-box, relative to the requested box.
    """

    start: int
    stop: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the span contains the sub-box and nothing else."""
        return self.stop - self.start == prod(self.lengths)


def pieces_of(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    window: int,
    *,
    full: bool,
    hole: int | None = None,
) -> Iterator[Piece]:
    """Cut a box of a row-major chunk into pieces that are read one by one.

    The pieces are disjoint, cover the box, and rise in ``start``.

    Args:
        sizes: The sizes of the chunk.
        offsets: Where the box begins in the chunk.
        lengths: The sizes of the box.
        window: How many elements a piece may span.
        full: Whether contiguous pieces may be longer than the window.
        hole: How many unused elements between two rows a piece may span. None: any number.

    Yields:
        The pieces.
    """
    strides = strides_of(sizes)

    def cut(at: tuple[int, ...], box: tuple[int, ...]) -> Iterator[Piece]:
        start = sum((o + a) * s for o, a, s in zip(offsets, at, strides, strict=True))
        stop = start + 1 + sum((n - 1) * s for n, s in zip(box, strides, strict=True))
        piece = Piece(start, stop, at, box)
        if full and piece.is_contiguous:
            yield piece
            return
        apart = _widest_hole(box, strides)
        if stop - start <= window and (hole is None or apart <= hole):
            yield piece
            return
        dim = next(d for d, n in enumerate(box) if n > 1)
        rows = max(1, window // strides[dim])
        if hole is not None and apart > hole:
            rows = 1
        for row in range(0, box[dim], rows):
            count = min(rows, box[dim] - row)
            yield from cut(
                (*at[:dim], at[dim] + row, *at[dim + 1 :]), (*box[:dim], count, *box[dim + 1 :])
            )

    if prod(lengths):
        yield from cut((0,) * len(sizes), tuple(lengths))


def _widest_hole(box: Sequence[int], strides: Sequence[int]) -> int:
    """Return the largest number of unused elements between two rows of a box."""
    widest, inner = 0, 1
    for count, stride in zip(reversed(box), reversed(strides), strict=True):
        if count > 1:
            widest = max(widest, stride - inner)
            inner += (count - 1) * stride
    return widest


def pieces_within(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], begin: int, end: int
) -> Iterator[Piece]:
    """Yield the parts of a box that are inside elements ``begin`` to ``end`` of its chunk.

    These are few pieces, because rows that are inside completely are joined.
    """
    strides = strides_of(sizes)
    displacements = [offset * stride for offset, stride in zip(offsets, strides, strict=True)]

    def cut(at: tuple[int, ...], base: int) -> Iterator[Piece]:
        dim = len(at)
        if dim == len(sizes):
            if begin <= base < end:
                yield Piece(base, base + 1, at, (1,) * dim)
            return
        stride, first = strides[dim], base + displacements[dim]
        low = max(0, (begin - first) // stride)
        high = min(lengths[dim], -(-(end - first) // stride))
        inner_low = max(low, -(-(begin - first) // stride))  # from here on rows are inside
        inner_high = min(high, (end - first) // stride)
        if inner_low >= inner_high:
            for row in range(low, high):
                yield from cut((*at, row), first + row * stride)
            return
        for row in range(low, inner_low):
            yield from cut((*at, row), first + row * stride)
        inner = (inner_high - inner_low, *lengths[dim + 1 :])
        start = first + inner_low * stride + sum(displacements[dim + 1 :])
        stop = start + 1 + sum((n - 1) * s for n, s in zip(inner, strides[dim:], strict=True))
        deeper = (0,) * (len(sizes) - dim - 1)
        yield Piece(start, stop, (*at, inner_low, *deeper), (*(1,) * dim, *inner))
        for row in range(inner_high, high):
            yield from cut((*at, row), first + row * stride)

    if prod(lengths):
        yield from cut((), 0)


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Return the strides of a row-major tensor, in elements."""
    return [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return the sub-box of a tensor as a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, offset, length)
    return tensor
