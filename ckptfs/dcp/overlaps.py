"""Which saved chunks a box of a tensor meets, and where. Pure.

    tensor       |   chunk 0   |   chunk 1   |   chunk 2   |
    asked for            |------------------|
    meetings             |-----|------------|                  chunk 0 from its middle, chunk 1 whole

The same as torch's ``create_read_items_for_chunk_list``, which makes an object of every pair that it
looks at. Many chunks are compared in one go, in columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ckptfs.dcp.inventory import SavedTensor

__all__ = ["Meeting", "meetings"]

_FEW = 8  # chunks; below, making columns of them takes longer than looking at each


class Meeting(NamedTuple):
    """The common part of a chunk and a box: where it begins in each, and its sizes."""

    chunk: int
    in_chunk: Sequence[int]
    in_box: Sequence[int]
    lengths: Sequence[int]


def meetings(
    saved: SavedTensor, offsets: Sequence[int], sizes: Sequence[int], hint: int | None = None
) -> Iterator[Meeting]:
    """The chunks that the box meets, by rising number; none where either has no elements.

    hint: the chunk that may be this very box. Chunks do not overlap, so then it is the only one.
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
    """Numbers of chunks among which are all that meet the box."""
    if len(saved.chunks) < _FEW or not sizes:
        return range(len(saved.chunks))
    boxes = [saved.box_of(chunk) for chunk in saved.chunks]
    begins = np.array([begin for begin, _ in boxes], np.int64)
    ends = begins + np.array([lengths for _, lengths in boxes], np.int64)
    low = np.array(offsets, np.int64)
    meets = (begins < low + np.array(sizes, np.int64)) & (low < ends)
    found: list[int] = np.nonzero(meets.all(axis=1))[0].tolist()
    return found
