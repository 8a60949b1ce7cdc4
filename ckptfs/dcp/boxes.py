"""Boxes of a row-major tensor, cut into ranges of its bytes. Pure.

chunk 4 x 6, box rows 1-2, columns 2-4            contiguous in the file: 8-10 and 14-16
. . . . . .
. . # # # .        one piece 8-16 if the window holds it (9 elements read, 6 used),
. . # # # .        else one piece per row
. . . . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

__all__ = ["Piece", "narrowed", "pieces_of", "strides_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a saved chunk that hold a sub-box of the asked-for box.

    offsets and lengths: the sub-box, relative to the box.
    """

    start: int
    stop: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """True when the span holds the sub-box and nothing else."""
        return self.stop - self.start == prod(self.lengths)


def pieces_of(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    window: int,
    *,
    whole: bool,
) -> Iterator[Piece]:
    """Cut a box of a row-major chunk into pieces that are read one by one.

    sizes: of the chunk; offsets, lengths: the box in it; window: elements that a piece may span.
    whole: contiguous pieces may be longer than the window. Pieces are disjoint, cover the box, and
    rise in ``start``.
    """
    strides = strides_of(sizes)

    def cut(at: tuple[int, ...], box: tuple[int, ...]) -> Iterator[Piece]:
        start = sum((o + a) * s for o, a, s in zip(offsets, at, strides, strict=True))
        stop = start + 1 + sum((n - 1) * s for n, s in zip(box, strides, strict=True))
        piece = Piece(start, stop, at, box)
        if stop - start <= window or (whole and piece.is_contiguous):
            yield piece
            return
        dim = next(d for d, n in enumerate(box) if n > 1)
        rows = max(1, window // strides[dim])
        for row in range(0, box[dim], rows):
            count = min(rows, box[dim] - row)
            yield from cut(
                (*at[:dim], at[dim] + row, *at[dim + 1 :]), (*box[:dim], count, *box[dim + 1 :])
            )

    if prod(lengths):
        yield from cut((0,) * len(sizes), tuple(lengths))


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Strides of a row-major tensor, in elements."""
    return [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The sub-box of a tensor, a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, offset, length)
    return tensor
