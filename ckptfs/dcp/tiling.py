"""Whether pieces of a tensor fill it exactly: what a save decides and what a load has to know. No torch.

fills(pieces, sizes)            every element once, for every kind of tiling
untiled(key, pieces, sizes)     the error where they do not
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ckptfs.errors import IntegrityError

__all__ = ["fills", "untiled"]

Piece = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the box, and its sizes

_AT_ONCE = 1024  # pieces that are compared with all others in one go


def fills(pieces: Sequence[tuple[Sequence[int], Sequence[int]]], sizes: Sequence[int]) -> bool:
    """Return whether these pieces, (offsets, lengths) each, fill a box of these sizes exactly.

    Every piece must be inside the box, no two may overlap, and nothing may be left out. The same piece
    twice counts once.

    Equal volumes prove nothing: two pieces at one place hide a hole of their size.
    """
    if not math.prod(sizes):
        return True
    found: list[Piece] = list(
        dict.fromkeys((tuple(begin), tuple(length)) for begin, length in pieces)
    )
    volume = 0
    for begin, length in found:
        if len(begin) != len(sizes) or len(length) != len(sizes):
            return False
        if any(a < 0 or n < 0 or a + n > m for a, n, m in zip(begin, length, sizes, strict=True)):
            return False
        volume += math.prod(length)
    if volume != math.prod(sizes):
        return False
    found = [piece for piece in found if 0 not in piece[1]]
    return len(found) == 1 or _is_row(found, sizes) or not _any_overlap(found)


def _is_row(pieces: list[Piece], sizes: Sequence[int]) -> bool:
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


def _any_overlap(pieces: list[Piece]) -> bool:
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
    held, wanted = sum(math.prod(lengths) for _, lengths in pieces), math.prod(sizes)
    what = "overlap and leave a part of it uncovered" if held >= wanted else "do not cover it"
    return IntegrityError(
        f".metadata has {held} of the {wanted} values that {key!r} asks for here: its chunks {what}",
        hint="it was saved incompletely, or changed; load another checkpoint",
    )
