"""Where the items of a world were written, from what the ranks told: columns all the way.

placed_in(world, parts, root)   -> Placed     checked: what was planned was written, inside its files
places_for(world, placed, ranks) -> Places    the entries of one ``.metadata``
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptfs.commit.shared_data import stock_path
from ckptfs.commit.spec import WrittenPart
from ckptfs.dcp.emit import Places
from ckptfs.dcp.packed import Ints
from ckptfs.dcp.world_plan import World
from ckptfs.errors import IncompleteCheckpointError, IntegrityError
from ckptfs.uri import Uri

__all__ = ["PLACED", "Placed", "placed_in", "places_for"]

# A rank's payload: file number, offset and length of each of its items, in the order of its plan.
PLACED = np.dtype([("file", "<u4"), ("offset", "<u8"), ("length", "<u8")])


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Every row that was written, in order of rank and plan; columns as in ``Places``."""

    paths: tuple[str, ...]
    rows: Ints
    files: Ints
    offsets: Ints
    lengths: Ints


def placed_in(world: World, parts: Sequence[WrittenPart], root: Uri | None) -> Placed:
    """What the ranks wrote. root: of the run, for the paths of shared files.

    IncompleteCheckpointError unless planned == written, IntegrityError for a place outside its file.
    """
    starts = world.table.starts
    if len(starts) - 1 != len(parts):
        raise IncompleteCheckpointError(f"{len(starts) - 1} ranks planned, {len(parts)} wrote")
    rows = np.flatnonzero(world.writes)
    bounds = np.searchsorted(rows, starts).tolist()
    paths: list[str] = []
    told, bases = [np.zeros(0, PLACED)], []
    for rank, (part, (a, b)) in enumerate(zip(parts, itertools.pairwise(bounds), strict=True)):
        files = [record for record in part.files if record.digests is not None]
        placed = np.frombuffer(part.payload, PLACED)
        if len(placed) != b - a:
            raise IncompleteCheckpointError(
                f"rank {rank} planned {b - a} items and wrote {len(placed)}",
                rank=rank,
                hint="nothing was committed; this is a bug of the write engine",
            )
        limits = np.array([f.size_bytes for f in files] + [0], np.uint64)
        file = np.minimum(placed["file"], len(files))
        ends = placed["offset"] + placed["length"]
        outside = (file == len(files)) | (ends > limits[file]) | (ends < placed["offset"])
        if outside.any():
            row = int(rows[a + int(outside.argmax())])
            key = world.table.names[int(world.table.keys[row])]
            raise IntegrityError(f"rank {rank} says that {key!r} lies outside its files", rank=rank)
        told.append(placed)
        bases.append(np.full(b - a, len(paths), np.int64))
        paths += [f.path if root is None else stock_path(f, root) for f in files]
    everything = np.concatenate(told)
    first = np.concatenate([np.zeros(0, np.int64), *bases])
    return Placed(
        tuple(paths),
        rows,
        everything["file"].astype(np.int64) + first,
        everything["offset"].astype(np.int64),
        everything["length"].astype(np.int64),
    )


def places_for(world: World, placed: Placed, ranks: Sequence[int]) -> Places:
    """Each item once, as readers find it: in a domain's own ranks if one of them wrote it, else where
    it was written first. ranks: the domain's; none: any place will do.
    """
    groups = world.groups[placed.rows]
    firsts = np.unique(groups, return_index=True)[1]
    taken = np.arange(len(groups))
    if len(firsts) < len(groups):
        owners = world.table.ranks[placed.rows]
        first_owner = np.zeros(int(groups.max()) + 1, np.int64)
        first_owner[groups[::-1]] = owners[::-1]
        # A rank that has an item twice is believed the last time; so is a domain.
        score = np.where(owners == first_owner[groups], taken, -1)
        score = np.where(np.isin(owners, list(ranks)), taken + len(groups), score)
        order = np.lexsort((score, groups))
        last = np.append(np.diff(groups[order]) != 0, True)
        best = np.zeros(len(first_owner), np.int64)
        best[groups[order[last]]] = order[last]
        taken = best[groups[np.sort(firsts)]]
    return Places(
        placed.paths,
        placed.rows[taken],
        placed.files[taken],
        placed.offsets[taken],
        placed.lengths[taken],
    )
