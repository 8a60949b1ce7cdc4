"""What one rank reads: boxes of saved chunks and the memory that they fill, and whole objects.

    LoadPlanner.create_reads    a Read for every piece of this rank's state    (ckptfs.load)
    fetch_reads                 brings their bytes                             (ckptfs.dcp.fetch)

A tuple and not a dataclass: a load of 20,000 tensors makes as many of them, and a tuple costs a
third. torch's ReadItem says the same with three torch.Size and two MetadataIndex.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["Read"]


class Read(NamedTuple):
    """One piece.

    path, offset, length: the saved item that holds it, as the metadata says, in bytes. sizes, dtype:
    of the saved chunk; dtype is None for an object. box_offsets, box_lengths: what of the chunk is
    asked for. target: as large as the box, None for an object. item: what torch's planners call it,
    where one of them asked.
    """

    key: str
    path: str
    offset: int
    length: int
    sizes: Sequence[int] = ()
    dtype: torch.dtype | None = None
    box_offsets: Sequence[int] = ()
    box_lengths: Sequence[int] = ()
    target: torch.Tensor | None = None
    item: ReadItem | None = None
