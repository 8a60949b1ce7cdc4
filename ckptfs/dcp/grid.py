"""Whether the pieces of many tensors tile them: for all at once, and sure where it says yes.

    is_tiled(...)    one answer per tensor: in bounds, no overlap, nothing left out
    fills(...)       of one box, for every tiling that there is

For ``is_tiled`` pieces are taken for the cells of a grid: along each dimension their intervals are the same or apart.
That is so for every sharding of a mesh. Another tiling may be a good one too: the answer is no, and
somebody has to compare the pieces pair by pair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ckptfs.dcp.packed import Ints

__all__ = ["fills", "is_tiled"]

Flags = NDArray[np.bool_]

Piece = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the box, and its sizes

_AT_ONCE = 1024  # pieces that are compared with all others in one go


def fills(pieces: Sequence[tuple[Sequence[int], Sequence[int]]], sizes: Sequence[int]) -> bool:
    """Whether these pieces, (offsets, lengths) each, fill a box of these sizes: every one inside of
    it, none over another, nothing left out. The same piece twice counts once.

    That the volumes add up proves nothing: two pieces at one place hide a hole of their size.
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
    """Whether they lie behind one another along one dimension: most shardings, without numpy."""
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
    """Whether two of them share an element."""
    begins = np.array([begin for begin, _ in pieces], np.int64)
    ends = begins + np.array([length for _, length in pieces], np.int64)
    order = np.argsort(begins[:, 0], kind="stable")
    begins, ends = begins[order], ends[order]
    for first in range(0, len(pieces), _AT_ONCE):
        low, high = begins[first : first + _AT_ONCE], ends[first : first + _AT_ONCE]
        # Of those that begin behind the end of all of these none can meet one.
        last = int(np.searchsorted(begins[:, 0], high[:, 0].max()))
        meets = np.ones((len(low), last - first), np.bool_)
        for dim in range(begins.shape[1]):
            meets &= low[:, dim, None] < ends[None, first:last, dim]
            meets &= begins[None, first:last, dim] < high[:, dim, None]
        # Each meets itself.
        if int(meets.sum()) > len(low) and bool(np.triu(meets, 1).any()):
            return True
    return False


def is_tiled(
    tensors: Ints, offsets: Ints, lengths: Ints, sizes: Ints, dims: Ints, *, filled: bool
) -> Flags:
    """One answer for each different number in ``tensors``, in order; equal ones stand together.

    offsets, lengths, sizes (of the whole tensor): (pieces, widest), zeros beyond ``dims``. filled:
    whether something left out is a no.
    """
    heads = np.flatnonzero(np.diff(tensors, prepend=-1))
    if not len(heads):
        return np.zeros(0, np.bool_)
    counts = np.diff(np.append(heads, len(tensors)))
    real = np.arange(offsets.shape[1]) < dims[:, None]
    good = ((offsets >= 0) & (lengths >= 0) & (offsets + lengths <= sizes)).all(axis=1)
    if filled:
        volumes = np.prod(lengths, axis=1, initial=1, where=real)
        whole = np.prod(sizes, axis=1, initial=1, where=real)[heads]
        good &= np.repeat(np.add.reduceat(volumes, heads) == whole, counts)
    several = np.repeat(counts > 1, counts)
    good &= ~several | _apart(tensors, offsets, lengths, heads, counts)
    told = np.logical_and.reduceat(good, heads)
    # Of a number alone stock asks nothing, but that it has one piece, and that is asked elsewhere.
    return np.asarray(told | (dims[heads] == 0), np.bool_)


def _apart(tensors: Ints, offsets: Ints, lengths: Ints, heads: Ints, counts: Ints) -> Flags:
    """Of each piece: its interval is that of another or apart from it along every dimension, and no
    two pieces of its tensor begin at one place.
    """
    good = np.ones(len(tensors), np.bool_)
    for start, length in zip(offsets.T, lengths.T, strict=True):
        fine = _in_order(tensors, start, start + length)
        bad = ~np.logical_and.reduceat(fine, heads)
        if bad.any():
            again = np.flatnonzero(np.repeat(bad, counts))
            order = again[np.lexsort((start[again] + length[again], start[again], tensors[again]))]
            fine[again] = _in_order(tensors[order], start[order], (start + length)[order])
        good &= fine
    unlike = np.zeros(len(tensors), np.bool_)
    rising = np.zeros(len(tensors), np.bool_)
    for start in offsets.T:
        step = np.diff(start, prepend=0)
        rising |= ~unlike & (step > 0)
        unlike |= step != 0
    rising[heads] = True
    bad = ~np.logical_and.reduceat(rising, heads)
    if bad.any():
        again = np.flatnonzero(np.repeat(bad, counts))
        order = again[np.lexsort((*offsets[again].T, tensors[again]))]
        differs = np.any(np.diff(offsets[order], axis=0) != 0, axis=1)
        differs |= np.diff(tensors[order]) != 0
        good[order[1:]] &= differs
    return good


def _in_order(tensors: Ints, starts: Ints, ends: Ints) -> Flags:
    """Of each interval: it is the one before it, or begins where that ends or later."""
    fine = np.ones(len(tensors), np.bool_)
    fine[1:] = (
        (tensors[1:] != tensors[:-1])
        | (starts[1:] >= ends[:-1])
        | ((starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1]))
    )
    return fine
