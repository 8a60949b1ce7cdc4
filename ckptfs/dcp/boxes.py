"""Boxes of a row-major tensor: the ranges of bytes that they are cut into, and whether they fill it. Pure.

chunk 4 x 6, box rows 1-2, columns 2-4            contiguous in the file: 8-10 and 14-16
. . . . . .
. . # # # .        one piece 8-16 if the window holds it (9 elements read, 6 used),
. . # # # .        else one piece per row
. . . . . .

pieces_of        which ranges of a chunk to read for a box
pieces_within    the parts of a box that are inside a range that was read

fills            whether pieces fill a box exactly: every element once, for every kind of tiling
untiled          the error where they do not
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ckptfs.errors import IntegrityError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Piece",
    "fills",
    "narrowed",
    "pieces_of",
    "pieces_within",
    "strides_of",
    "untiled",
]


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


_Tile = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the box, and its sizes

_AT_ONCE = 1024  # pieces that are compared with all others in one go


def fills(pieces: Sequence[tuple[Sequence[int], Sequence[int]]], sizes: Sequence[int]) -> bool:
    """Return whether these pieces, (offsets, lengths) each, fill a box of these sizes exactly.

    Every piece must be inside the box, no two may overlap, and nothing may be left out. The same piece
    twice counts once.

    Equal volumes prove nothing: two pieces at one place hide a hole of their size.
    """
    if not prod(sizes):
        return True
    found: list[_Tile] = list(
        dict.fromkeys((tuple(begin), tuple(length)) for begin, length in pieces)
    )
    volume = 0
    for begin, length in found:
        if len(begin) != len(sizes) or len(length) != len(sizes):
            return False
        if any(a < 0 or n < 0 or a + n > m for a, n, m in zip(begin, length, sizes, strict=True)):
            return False
        volume += prod(length)
    if volume != prod(sizes):
        return False
    found = [piece for piece in found if 0 not in piece[1]]
    return len(found) == 1 or _is_row(found, sizes) or not _any_overlap(found)


def _is_row(pieces: list[_Tile], sizes: Sequence[int]) -> bool:
    """Return whether the pieces follow each other along one dimension.

    That covers most shardings, without numpy.
    """
    cut = [
        dim
        for dim, size in enumerate(sizes)
        if any(begin[dim] or length[dim] != size for begin, length in pieces)
    ]
    if len(cut) != 1:
        return False
    ends = sorted((begin[cut[0]], begin[cut[0]] + length[cut[0]]) for begin, length in pieces)
    return all(last[1] == following[0] for last, following in itertools.pairwise(ends))


def _any_overlap(pieces: list[_Tile]) -> bool:
    """Return whether two of the pieces share an element."""
    begins = np.array([begin for begin, _ in pieces], np.int64)
    ends = begins + np.array([length for _, length in pieces], np.int64)
    order = np.argsort(begins[:, 0], kind="stable")
    begins, ends = begins[order], ends[order]
    for first in range(0, len(pieces), _AT_ONCE):
        low, high = begins[first : first + _AT_ONCE], ends[first : first + _AT_ONCE]
        # Pieces that begin behind the end of all of these cannot overlap any of them.
        last = int(np.searchsorted(begins[:, 0], high[:, 0].max()))
        meets = np.ones((len(low), last - first), np.bool_)
        for dim in range(begins.shape[1]):
            meets &= low[:, dim, None] < ends[None, first:last, dim]
            meets &= begins[None, first:last, dim] < high[:, dim, None]
        # Each piece overlaps itself.
        if int(meets.sum()) > len(low) and bool(np.triu(meets, 1).any()):
            return True
    return False


def untiled(
    key: str, pieces: Sequence[tuple[Sequence[int], Sequence[int]]], sizes: Sequence[int]
) -> IntegrityError:
    """Return the error for saved chunks that do not fill a box exactly.

    Elements that no chunk holds would keep the tensor's old values, or whatever fresh memory contains.
    """
    held, wanted = sum(prod(lengths) for _, lengths in pieces), prod(sizes)
    what = "overlap and leave a part of it uncovered" if held >= wanted else "do not cover it"
    return IntegrityError(
        f".metadata has {held} of the {wanted} values that {key!r} asks for here: its chunks {what}",
        hint="it was saved incompletely, or changed; load another checkpoint",
    )
