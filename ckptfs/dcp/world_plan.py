"""The coordinator's decision over the columns of all ranks: stock's, without an object per item.

    world_of(ranks, domains)    compare values, give each item to a rank, check the tiling   -> World
    World.bitmap(rank)          what it writes of its plan
    World.metadata()            as objects, for those who want them

A row is one item of one rank, in order of rank and plan. Rows of one item (same key, same offset) are a
group. Where stock chooses, its order of choosing is kept: groups in the order in which they appear, of
equally loaded ranks the one that its set of ranks yields first. What looks odd (a tiling that is no
grid, a key that is tensor and object) is given to stock's own planner, which decides whether it is an
error and what it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from ckptfs.dcp.columns import OBJECT, SHARD
from ckptfs.dcp.copies import copies_for
from ckptfs.dcp.grid import is_tiled
from ckptfs.dcp.packed import Ints
from ckptfs.dcp.world_table import Flags, Table
from ckptfs.errors import StateError

__all__ = ["World", "world_of"]


@dataclass(frozen=True, eq=False)
class World:
    """What all ranks agreed on. Rows as in ``table``.

    groups: of each row. kept: what stock has each rank write; writes: that and its domain's copies.
    keyed: the kept rows by key, keys in the order in which they appear; ``bounds[n]`` is where the
    n-th key's begin, ``order[n]`` its number. hints: of each group the place of its chunk in its key's
    list; -1 of objects.
    """

    table: Table
    groups: Ints
    kept: Flags
    writes: Flags
    keyed: Ints
    bounds: Ints
    order: Ints
    hints: Ints

    def bitmap(self, rank: int) -> bytes:
        """One bit per item of the rank's plan: does it write it."""
        a, b = self.table.starts[rank : rank + 2]
        return np.packbits(self.writes[a:b]).tobytes()

    def indexes(self) -> tuple[tuple[MetadataIndex, ...], ...]:
        """Of every rank what it writes, as the metadata names it."""
        return tuple(
            tuple(self.index(row) for row in range(a, b) if self.writes[row])
            for a, b in itertools.pairwise(self.table.starts.tolist())
        )

    def index(self, row: int) -> MetadataIndex:
        """A row's item, with the place of its chunk in its tensor's list."""
        hint = int(self.hints[self.groups[row]])
        named = self.table.item(row).index
        return MetadataIndex(named.fqn, named.offset, None if hint < 0 else hint)

    def metadata(self) -> Metadata:
        """All tensors and objects, and the paths; without places in files."""
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        table = self.table
        for key, a, b in zip(self.order, self.bounds[:-1], self.bounds[1:], strict=True):
            first = self.keyed[a]
            if table.kinds[first] == OBJECT:
                described[table.names[key]] = BytesStorageMetadata()
                continue
            shape = table.shapes[first]
            chunks = [table.chunk(row) for row in self.keyed[a:b].tolist()]
            described[table.names[key]] = TensorStorageMetadata(
                table.properties[shape], table.sizes[shape], chunks
            )
        return Metadata(described, planner_data=dict(table.paths))


def world_of(
    table: Table, *, domains: Sequence[Sequence[int]] = (), to_lowest_rank: bool = False
) -> World:
    """Who writes what. domains: the ranks of each. to_lowest_rank: of several ranks the first, else
    the one with the least to write. StateError where the plans do not make one checkpoint.
    """
    groups, firsts = _groups(table)
    kept = _chosen(table, groups, firsts, to_lowest_rank=to_lowest_rank)
    rows = np.flatnonzero(kept)
    appears = _order_of_appearance(table.keys[rows], len(table.names))
    keyed = rows[_sorted_numbers(appears)]
    counts = np.bincount(appears)
    bounds = np.append(0, np.cumsum(counts))
    heads = bounds[:-1]
    hints = np.full(len(firsts), -1, np.int64)
    place = np.arange(len(keyed)) - np.repeat(heads, counts)
    is_tensor = table.kinds[keyed] != OBJECT
    hints[groups[keyed[is_tensor]]] = place[is_tensor]
    _refuse_broken(table, kept, keyed, bounds)
    writes = kept | _copies(table, groups, kept, domains)
    return World(table, groups, kept, writes, keyed, bounds, table.keys[keyed[heads]], hints)


def _order_of_appearance(keys: Ints, count: int) -> Ints:
    """Of each row the place of its key among keys as they appear. keys: below ``count``."""
    first = np.full(count, len(keys))
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    order = np.empty_like(first)
    order[np.argsort(first)] = np.arange(count)
    return order[keys]


def _groups(table: Table) -> tuple[Ints, Ints]:
    """The group of each row, and each group's first row; numbered as they appear: stock gives items
    away in that order.
    """
    rows = np.arange(len(table.keys))
    offsets = table.boxes(table.offsets, rows)
    named = np.where(table.placed, table.dims + 1, 0)
    offsets[named == 0] = 0
    columns = [named, *offsets.T]
    first, unsorted = _first_of_neighbours(table.keys, columns)
    if len(unsorted):
        some = [column[unsorted] for column in (table.keys, *columns)]
        first[unsorted] = unsorted[_first_of_equals(some)]
    is_first = first == rows
    return (np.cumsum(is_first) - 1)[first], np.flatnonzero(is_first)


def _first_of_neighbours(keys: Ints, columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Of each row the first one that equals it; and the rows of keys for which that is not known.

    Where ranks have pieces in the order of their numbers, a key's rows rise, and equal ones are
    neighbours: there is nothing to sort but keys.
    """
    by_key = _sorted_numbers(keys)
    head = np.diff(keys[by_key], prepend=-1) != 0
    falls = np.zeros(len(keys), np.bool_)
    alike = ~head
    for column in columns:
        step = np.diff(column[by_key], prepend=0)
        falls |= alike & (step < 0)
        alike &= step == 0
    leader = by_key[~alike]
    first = np.empty_like(by_key)
    first[by_key] = leader[np.cumsum(~alike) - 1]
    is_odd = np.zeros(int(keys.max(initial=-1)) + 1, np.bool_)
    is_odd[keys[by_key[falls]]] = True
    return first, np.flatnonzero(is_odd[keys])


def _first_of_equals(columns: Sequence[Ints]) -> Ints:
    """Of each row of these columns the first row that equals it, in whatever order they stand."""
    for salt in range(8):
        mixed = np.zeros(len(columns[0]), np.uint64)
        for column in columns:
            mixed = _mixed(column ^ mixed.view(np.int64), salt)
        _, firsts, groups = np.unique(mixed, return_index=True, return_inverse=True)
        first: Ints = firsts[groups]
        if all(np.array_equal(column, column[first]) for column in columns):
            return first
    raise StateError("items of the save cannot be told apart")


def _sorted_numbers(numbers: Ints) -> Ints:
    """A stable argsort of small numbers: those of 16 bits are sorted without comparing them."""
    small = int(numbers.max(initial=0)) < 1 << 16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def _mixed(column: Ints, salt: int) -> NDArray[np.uint64]:
    """64 well mixed bits of each number (splitmix64's finish)."""
    z = column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15 + 2 * salt)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _chosen(table: Table, groups: Ints, firsts: Ints, *, to_lowest_rank: bool) -> Flags:
    """Stock's deduplication: each group stays with one of the ranks that have it."""
    counts = np.bincount(groups, minlength=len(firsts))
    several = np.flatnonzero(counts > 1)
    if not len(several):
        return np.ones(len(groups), np.bool_)
    last = np.empty_like(firsts)
    last[groups] = np.arange(len(groups))
    planned = _planned_bytes(table, last)  # stock takes the size that it saw last
    single_bytes = np.where(counts == 1, planned, 0)
    # Bytes of what only one rank has, of all groups that appear before: they come in order of rank.
    before = np.append(0, np.cumsum(single_bytes))
    owner = table.ranks[firsts]
    begins = np.searchsorted(owner, np.arange(len(table.starts)))
    total = before[begins]
    chosen = owner.copy()
    if not to_lowest_rank:
        shared = np.flatnonzero((counts > 1)[groups])
        number = np.cumsum(counts > 1) - 1
        ranks = table.ranks[shared[_sorted_numbers(number[groups[shared]])]]
        ends = np.cumsum(counts[several]).tolist()
        load = [0] * (len(table.starts) - 1)
        seen: dict[bytes, list[int]] = {}
        for group, (a, b) in zip(several.tolist(), itertools.pairwise([0, *ends]), strict=True):
            raw = ranks[a:b].tobytes()
            members = seen.get(raw)
            if members is None:
                # As stock's set of them is walked: its order decides between equal ranks.
                members = seen[raw] = list(set(np.frombuffer(raw, np.int64).tolist()))
            at = int(owner[group])
            # Its ranks come at or after its owner, of whom alone single items were given away before.
            part = int(before[group] - total[at])
            load[at] += part
            best = min(members, key=load.__getitem__)
            load[at] -= part
            load[best] += int(planned[group])
            chosen[group] = best
    return np.asarray(chosen[groups] == table.ranks, np.bool_)


def _planned_bytes(table: Table, rows: Ints) -> Ints:
    """What stock takes items for: of a shard the bytes of its whole tensor, and 1 for no bytes."""
    shapes = table.shapes[rows]
    elements = np.array([size.numel() for size in table.sizes] + [0], np.int64)
    planned: Ints = np.maximum(elements[shapes] * table.itemsizes[shapes], 1)
    return planned


def _copies(table: Table, groups: Ints, kept: Flags, domains: Sequence[Sequence[int]]) -> Flags:
    """What ranks write besides, so that no domain lacks what its ranks hold (``copies_for``)."""
    extra = np.zeros(len(groups), np.bool_)
    if len(domains) < 2:  # noqa: PLR2004
        return extra
    sizes = np.prod(table.lengths, axis=1, initial=1, where=_used(table))
    sizes = np.append(sizes, 0)[table.places] * table.itemsizes[table.shapes]
    alone = (np.bincount(groups) == 1)[groups]
    # What one rank alone has it writes anyway; all of it is one item that nobody else can take.
    own = np.bincount(table.ranks[alone], sizes[alone], len(table.starts) - 1).astype(np.int64)
    held: list[list[tuple[int, int]]] = [[(-1 - r, n)] for r, n in enumerate(own.tolist())]
    keeps: list[set[int]] = [{-1 - rank} for rank in range(len(own))]
    shared = np.flatnonzero(~alone)
    for row in shared.tolist():
        rank, group = int(table.ranks[row]), int(groups[row])
        held[rank].append((group, int(sizes[row])))
        if kept[row]:
            keeps[rank].add(group)
    more = copies_for(domains, held, keeps)
    for row in shared.tolist():
        extra[row] = int(groups[row]) in more[int(table.ranks[row])]
    return extra


def _used(table: Table) -> Flags:
    """Which dimensions of places are there at all."""
    dims = np.zeros(len(table.lengths), np.int64)
    placed = table.places >= 0
    dims[table.places[placed]] = table.dims[placed]
    return np.asarray(np.arange(table.lengths.shape[1]) < dims[:, None], np.bool_)


def _refuse_broken(table: Table, kept: Flags, keyed: Ints, bounds: Ints) -> None:
    """StateError, in stock's words, for keys whose pieces do not make one tensor."""
    suspects = _suspects(table, keyed, bounds)
    if not len(suspects):
        return
    odd = np.zeros(len(table.names), np.bool_)
    odd[table.keys[keyed[bounds[suspects]]]] = True
    plans = [
        SavePlan([table.item(row) for row in range(a, b) if kept[row] and odd[table.keys[row]]])
        for a, b in itertools.pairwise(table.starts.tolist())
    ]
    try:
        DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except Exception as error:  # a tensor after an object: stock runs into it
        raise StateError(
            f"the ranks' plans do not make one checkpoint: {error}",
            hint="every rank must describe the same global tensors",
        ) from error


def _suspects(table: Table, keyed: Ints, bounds: Ints) -> Ints:
    """Keys, by their place in ``bounds``, that stock would perhaps refuse."""
    heads = bounds[:-1]
    counts = np.diff(bounds)
    several = np.repeat(counts > 1, counts)
    kinds = table.kinds[keyed]
    shapes = table.shapes[keyed]
    first = np.repeat(np.arange(len(heads)), counts)
    odd = several & (kinds != SHARD)
    # Of pieces with one dtype and global size stock's checks are about their boxes alone.
    odd |= shapes != np.repeat(shapes[heads], counts)
    tensors = np.flatnonzero(kinds != OBJECT)
    width = table.offsets.shape[1]
    whole = np.zeros((len(table.sizes) + 1, width), np.int64)
    for n, size in enumerate(table.sizes):
        whole[n, : len(size)] = size
    found = np.bincount(first, odd, len(heads)) > 0
    tiled = is_tiled(
        first[tensors],
        table.boxes(table.offsets, keyed[tensors]),
        table.boxes(table.lengths, keyed[tensors]),
        whole[shapes[tensors]],
        table.dims[keyed[tensors]],
        filled=len(table.starts) > 2,  # noqa: PLR2004 - stock lets one rank leave holes
    )
    has_tensors = np.bincount(first[tensors], minlength=len(heads)) > 0
    found[has_tensors] |= ~tiled
    return np.flatnonzero(found)
