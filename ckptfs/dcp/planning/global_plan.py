"""Decide over the save plans of all ranks, on columns, without an object per item. Coordinator.

    table_of(ranks)             one numbering of keys and shapes for all ranks                    -> Table
    world_of(table, domains)    give each item to a rank, check the tiling                        -> World
    World.bitmap(rank)          which items of its plan a rank writes
    World.metadata()            the metadata as torch's objects
    copies_for, places_for      one copy of a replicated item for each domain
    is_tiled(pieces)            whether many tensors are tiled, for all at once; a yes is certain

A row is one item of one rank, in the order of ranks and plans. Rows of one item (same key, same offset) form
a group. The order in which torch chooses writers is kept: groups in the order in which they appear, and of
equally loaded ranks the one that torch's set of ranks yields first. Unusual cases (a tiling that is not a grid, a
key that is both tensor and object) go to torch's own planner, which decides whether they are errors and raises
them with its own messages.

torch gives an item that several ranks hold (a replicated tensor, a plain value, a shard of HSDP) to one
writer. On one shared disk that is right. If ranks have separate disks, a rank of another node would find the
key in ``.metadata``, but the bytes would be on a disk that it does not see. Therefore each domain writes the
items that its ranks hold, and the ``.metadata`` of each domain points to its own copy:

    domain A  rank 0 writes lr     .metadata of A: lr -> __0_0.distcp
    domain B  rank 2 writes lr     .metadata of B: lr -> __2_0.distcp

Sharded items have one place for all.

``is_tiled`` assumes that pieces are the cells of a grid: along each dimension two intervals are equal or
disjoint. That holds for every sharding of a mesh. Another tiling may be valid too: then the answer is no, and
the caller has to compare the pieces pair by pair, as ``ckptfs.dcp.boxes`` does for one box. These are pure functions; only the coordinator calls them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptfs.dcp.planning.columns import OBJECT, SHARD, TENSOR, Columns, Ints, KeyTable, Rows, Shapes
from ckptfs.dcp.planning.state_dicts import Path
from ckptfs.errors import StateError

__all__ = [
    "AgreedPlan",
    "Place",
    "Table",
    "copies_for",
    "is_tiled",
    "places_for",
    "table_of",
    "world_of",
]

Item = TypeVar("Item", bound=Hashable)
Place = tuple[str, int, int]  # path relative to the step directory, offset, length


def copies_for(
    domains: Sequence[Sequence[int]],
    held: Sequence[Sequence[tuple[Item, int]]],
    available: Sequence[set[Item]],
) -> list[set[Item]]:
    """Return what each rank writes in addition, so that no domain lacks what its ranks hold.

    If several ranks of a domain hold an item, the one with the least to write takes the copy.

    Args:
        domains: The ranks of each domain.
        held: Per rank, everything that it could write, with sizes in bytes. An item is any value that is equal
            on all ranks that have it.
        available: Per rank, what it writes already.

    Returns:
        Per rank, the additional items.
    """
    extra: list[set[Item]] = [set() for _ in held]
    if len(domains) < 2:  # noqa: PLR2004
        return extra
    sizes = {index: size for items in held for index, size in items}
    load = [sum(sizes[index] for index in written if index in sizes) for written in available]
    for ranks in domains:
        here = set().union(*(available[rank] for rank in ranks))
        holders: dict[Item, list[int]] = defaultdict(list)
        for rank in ranks:
            for index, _ in held[rank]:
                if index not in here:
                    holders[index].append(rank)
        for index, candidates in holders.items():
            rank = min(candidates, key=lambda r: (load[r], r))
            load[rank] += sizes[index]
            extra[rank].add(index)
    return extra


def places_for(
    ranks: Sequence[int], written: Sequence[Mapping[MetadataIndex, Place]]
) -> dict[MetadataIndex, Place]:
    """Return where a domain's readers find each item: in their domain if possible, else anywhere.

    Args:
        ranks: The ranks of the domain.
        written: Per rank, where it wrote each item.

    Returns:
        The place of each item.
    """
    own_ranks = set(ranks)
    places: dict[MetadataIndex, Place] = {}
    for rank, found in enumerate(written):
        for index, place in found.items():
            if index not in places or rank in own_ranks:
                places[index] = place
    return places


_TYPES = {
    OBJECT: WriteItemType.BYTE_IO,
    TENSOR: WriteItemType.TENSOR,
    SHARD: WriteItemType.SHARD,
}
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Table:
    """The items of all ranks as rows.

    Attributes:
        names: All keys.
        numbers: For the names of each rank, the positions of their keys in ``names``.
        paths: The path of each key in its state dict.
        properties: The properties of each shape.
        sizes: The global size of each shape.
        starts: The first row of each rank; the last entry is the number of rows.
        ranks: The rank of each row.
        keys: The key of each row, as a number into ``names``.
        kinds: As in ``Rows``.
        placed: As in ``Rows``.
        shapes: The shape of each row, as a number into ``properties`` and ``sizes``; -1 for objects.
        places: The place of each row, as a number of a row of ``offsets`` and ``lengths``; -1 for objects.
        offsets: Where each place begins; as wide as the largest number of dimensions.
        lengths: The sizes of each place, in the same form.
    """

    names: tuple[str, ...]
    numbers: Mapping[KeyTable, Ints]
    paths: dict[str, Path]
    properties: tuple[TensorProperties, ...]
    sizes: tuple[torch.Size, ...]
    starts: Ints
    ranks: Ints
    keys: Ints
    kinds: NDArray[np.uint8]
    placed: Flags
    shapes: Ints
    places: Ints
    offsets: Ints
    lengths: Ints

    @cached_property
    def dims(self) -> Ints:
        """The number of dimensions of each row; 0 for objects."""
        dims = np.array([len(size) for size in self.sizes] + [0], np.int64)
        return dims[self.shapes]

    @cached_property
    def itemsizes(self) -> Ints:
        """The bytes per element of each shape."""
        return np.array([p.dtype.itemsize for p in self.properties] + [0], np.int64)

    def boxes(self, column: Ints, rows: Ints) -> Ints:
        """Return the offsets or lengths of some rows; zeros for objects."""
        if not len(column):
            return np.zeros((len(rows), column.shape[1]), np.int64)
        found = column[self.places[rows]]
        found[self.places[rows] < 0] = 0
        return found

    def item(self, row: int) -> WriteItem:
        """Return the row as a WriteItem."""
        index = MetadataIndex(
            self.names[self.keys[row]], self._offset(row) if self.placed[row] else None
        )
        kind = _TYPES[int(self.kinds[row])]
        if kind is WriteItemType.BYTE_IO:
            return WriteItem(index, kind)
        shape = self.shapes[row]
        data = TensorWriteData(self.chunk(row), self.properties[shape], self.sizes[shape])
        return WriteItem(index, kind, tensor_data=data)

    def chunk(self, row: int) -> ChunkStorageMetadata:
        """Return the position of the row's piece in its tensor."""
        lengths = self.lengths[self.places[row], : self.dims[row]]
        return ChunkStorageMetadata(self._offset(row), torch.Size(lengths.tolist()))

    def _offset(self, row: int) -> torch.Size:
        return torch.Size(self.offsets[self.places[row], : self.dims[row]].tolist())


def table_of(ranks: Sequence[Columns]) -> Table:
    """Concatenate the ranks' plans, with one numbering of keys and shapes for all of them."""
    names: dict[str, int] = {}
    kinds: dict[tuple[object, torch.Size], int] = {}
    properties: list[TensorProperties] = []
    numbered: dict[Shapes, Ints] = {}
    named: dict[KeyTable, Ints] = {}
    keyed: dict[tuple[KeyTable, Rows], Ints] = {}

    def keys_of(table: KeyTable, rows: Rows) -> Ints:
        if table not in named:
            numbers = [names.setdefault(key, len(names)) for key in table.keys]
            named[table] = np.array(numbers, np.int64)
        found = keyed.get((table, rows))
        if found is None:
            found = keyed[table, rows] = named[table][rows.keys]
        return found

    def shapes_of(table: Shapes) -> Ints:
        found = numbered.get(table)
        if found is None:
            numbers = []
            for p, size in zip(table.properties, table.sizes, strict=True):
                kind = (p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)
                number = kinds.setdefault((kind, size), len(kinds))
                if number == len(properties):
                    properties.append(p)
                numbers.append(number)
            # The last entry is for objects: their place, -1, selects it.
            found = numbered[table] = np.array([*numbers, -1], np.int64)
        return found

    bases = np.cumsum([0, *(len(c.shape_of) for c in ranks)])
    keys = [keys_of(c.names, c.rows) for c in ranks]
    shapes = [shapes_of(c.shapes)[np.append(c.shape_of, -1)] for c in ranks]
    places = [
        np.where(c.rows.places < 0, -1, c.rows.places + base)
        for c, base in zip(ranks, bases[:-1].tolist(), strict=True)
    ]
    shape_of_row = [s[c.rows.places] for s, c in zip(shapes, ranks, strict=True)]
    dims = np.concatenate([np.zeros(0, np.int64), *(c.shapes.dims[c.shape_of] for c in ranks)])
    counts = [len(c.rows.keys) for c in ranks]
    return Table(
        names=tuple(names),
        numbers=named,
        paths=_paths([c.names for c in ranks]),
        properties=tuple(properties),
        sizes=tuple(size for _, size in kinds),
        starts=np.cumsum([0, *counts]),
        ranks=np.repeat(np.arange(len(ranks)), counts),
        keys=_joined(keys),
        kinds=np.concatenate([np.zeros(0, np.uint8), *(c.rows.kinds for c in ranks)]),
        placed=np.concatenate([np.zeros(0, np.bool_), *(c.rows.placed for c in ranks)]),
        shapes=_joined(shape_of_row),
        places=_joined(places),
        offsets=_wide(_joined([c.offsets for c in ranks]), dims),
        lengths=_wide(_joined([c.lengths for c in ranks]), dims),
    )


def _joined(columns: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *columns])


def _wide(flat: Ints, dims: Ints) -> Ints:
    """Return one row for each place, padded with zeros."""
    width = int(dims.max(initial=0))
    if len(dims) and int(dims.min()) == width:
        return flat.reshape(len(dims), width)
    wide = np.zeros((len(dims), width), np.int64)
    wide[np.arange(width) < dims[:, None]] = flat
    return wide


def _paths(ranks: Sequence[KeyTable]) -> dict[str, Path]:
    """Merge the ranks' paths as stock's ``ChainMap`` does.

    The lowest rank's path of a key wins; the keys of the highest rank come first.
    """
    tables = list({id(names): names for names in reversed(ranks)}.values())
    merged: dict[str, Path] = {key: () for names in tables for key in names.paths}
    distinct = {id(names): names for names in ranks}
    for names in reversed(distinct.values()):
        merged.update(names.paths)
    return merged


@dataclass(frozen=True, eq=False)
class AgreedPlan:
    """What all ranks agreed on. Rows are numbered as in ``table``.

    Attributes:
        table: The items of all ranks.
        groups: The group of each row.
        kept: Which rows stock DCP would have their rank write.
        writes: Those and the copies for their domains.
        keyed: The kept rows by key; keys in the order in which they appear.
        bounds: ``bounds[n]`` is where the rows of the n-th key begin in ``keyed``.
        order: ``order[n]`` is the number of the n-th key.
        hints: For each group the position of its chunk in its key's list; -1 for objects.
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
        """Return one bit per item of the rank's plan: whether the rank writes it."""
        a, b = self.table.starts[rank : rank + 2]
        return np.packbits(self.writes[a:b]).tobytes()

    @cached_property
    def written(self) -> tuple[list[int], list[int]]:
        """For every rank the number of items that it writes, and the bytes of their tensors."""
        table, rows = self.table, np.flatnonzero(self.writes)
        lengths = table.boxes(table.lengths, rows)
        lengths[np.arange(lengths.shape[1]) >= table.dims[rows][:, None]] = 1
        sizes = np.prod(lengths, axis=1, dtype=np.int64) * table.itemsizes[table.shapes[rows]]
        counts, totals = np.zeros((2, len(table.starts) - 1), np.int64)
        np.add.at(counts, table.ranks[rows], 1)
        np.add.at(totals, table.ranks[rows], sizes)
        return counts.tolist(), totals.tolist()

    def indexes(self) -> tuple[tuple[MetadataIndex, ...], ...]:
        """Return for every rank the items that it writes, as the metadata names them."""
        return tuple(
            tuple(self.index(row) for row in range(a, b) if self.writes[row])
            for a, b in itertools.pairwise(self.table.starts.tolist())
        )

    def index(self, row: int) -> MetadataIndex:
        """Return a row's item, with the position of its chunk in its tensor's list."""
        hint = int(self.hints[self.groups[row]])
        named = self.table.item(row).index
        return MetadataIndex(named.fqn, named.offset, None if hint < 0 else hint)

    def metadata(self) -> Metadata:
        """Return all tensors and objects, and the paths, without places in files."""
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
) -> AgreedPlan:
    """Decide which rank writes what.

    Args:
        table: The items of all ranks.
        domains: The ranks of each domain.
        to_lowest_rank: Whether the lowest of several ranks writes an item, instead of the least loaded.

    Returns:
        The decision.

    Raises:
        StateError: The plans do not make one checkpoint.
    """
    groups, firsts = _groups(table)
    chosen = _chosen(table, groups, firsts, to_lowest_rank=to_lowest_rank)
    rows = np.flatnonzero(chosen)
    appears = _order_of_appearance(table.keys[rows], len(table.names))
    keyed = rows[_sorted_numbers(appears)]
    counts = np.bincount(appears)
    bounds = np.append(0, np.cumsum(counts))
    heads = bounds[:-1]
    hints = np.full(len(firsts), -1, np.int64)
    place = np.arange(len(keyed)) - np.repeat(heads, counts)
    is_tensor = table.kinds[keyed] != OBJECT
    hints[groups[keyed[is_tensor]]] = place[is_tensor]
    _refuse_broken(table, chosen, keyed, bounds)
    writes = chosen | _copies(table, groups, chosen, domains)
    return AgreedPlan(table, groups, chosen, writes, keyed, bounds, table.keys[keyed[heads]], hints)


def _order_of_appearance(keys: Ints, count: int) -> Ints:
    """Return for each row the position of its key in the order in which keys first appear.

    All ``keys`` are below ``count``.
    """
    first = np.full(count, len(keys))
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    order = np.empty_like(first)
    order[np.argsort(first)] = np.arange(count)
    return order[keys]


def _groups(table: Table) -> tuple[Ints, Ints]:
    """Return the group of each row, and the first row of each group.

    Groups are numbered as they appear, because stock assigns items in that order.
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
    """Return for each row the first row that equals it, and the rows of keys where that is unknown.

    If ranks have their pieces in the order of their numbers, the rows of a key rise and equal rows are
    neighbours: only keys have to be sorted.
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
    """Return for each row of these columns the first row that equals it, in any order of rows."""
    for salt in range(8):
        mixed = np.zeros(len(columns[0]), np.uint64)
        for column in columns:
            mixed = _mixed(column ^ mixed.view(np.int64), salt)
        _, firsts, groups = np.unique(mixed, return_index=True, return_inverse=True)
        first: Ints = firsts[groups]
        if all(np.array_equal(column, column[first]) for column in columns):
            return first
    raise StateError("different items of the save have the same hash")


def _sorted_numbers(numbers: Ints) -> Ints:
    """Return a stable argsort of small numbers; 16-bit numbers are sorted without comparisons."""
    small = int(numbers.max(initial=0)) < 1 << 16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def _mixed(column: Ints, salt: int) -> NDArray[np.uint64]:
    """Return 64 well mixed bits of each number (the last steps of splitmix64)."""
    z = column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15 + 2 * salt)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _chosen(table: Table, groups: Ints, firsts: Ints, *, to_lowest_rank: bool) -> Flags:
    """Deduplicate as stock does: each group stays with one of the ranks that have it."""
    counts = np.bincount(groups, minlength=len(firsts))
    several = np.flatnonzero(counts > 1)
    if not len(several):
        return np.ones(len(groups), np.bool_)
    last = np.empty_like(firsts)
    last[groups] = np.arange(len(groups))
    planned = _planned_bytes(table, last)  # stock uses the size of the last row of a group
    single_bytes = np.where(counts == 1, planned, 0)
    # Bytes of the groups before this one that only one rank has. Groups come in order of rank.
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
        members_of: dict[bytes, list[int]] = {}
        for group, (a, b) in zip(several.tolist(), itertools.pairwise([0, *ends]), strict=True):
            raw = ranks[a:b].tobytes()
            members = members_of.get(raw)
            if members is None:
                # In the order of stock's set: that order decides between equally loaded ranks.
                members = members_of[raw] = list(set(np.frombuffer(raw, np.int64).tolist()))
            at = int(owner[group])
            # A group's ranks come at or after its owner. Only the owner may have single items that appear
            # before this group.
            part = int(before[group] - total[at])
            load[at] += part
            best = min(members, key=load.__getitem__)
            load[at] -= part
            load[best] += int(planned[group])
            chosen[group] = best
    return np.asarray(chosen[groups] == table.ranks, np.bool_)


def _planned_bytes(table: Table, rows: Ints) -> Ints:
    """Return the sizes that stock assumes: for a shard those of its whole tensor, and at least 1."""
    shapes = table.shapes[rows]
    elements = np.array([size.numel() for size in table.sizes] + [0], np.int64)
    planned: Ints = np.maximum(elements[shapes] * table.itemsizes[shapes], 1)
    return planned


def _copies(table: Table, groups: Ints, chosen: Flags, domains: Sequence[Sequence[int]]) -> Flags:
    """Return what ranks write in addition, so that no domain lacks what its ranks hold."""
    extra = np.zeros(len(groups), np.bool_)
    if len(domains) < 2:  # noqa: PLR2004
        return extra
    sizes = np.prod(table.lengths, axis=1, initial=1, where=_used(table))
    sizes = np.append(sizes, 0)[table.places] * table.itemsizes[table.shapes]
    alone = (np.bincount(groups) == 1)[groups]
    # A rank writes in any case what only it has. All of that counts as one item that no other rank can take.
    own = np.bincount(table.ranks[alone], sizes[alone], len(table.starts) - 1).astype(np.int64)
    held: list[list[tuple[int, int]]] = [[(-1 - r, n)] for r, n in enumerate(own.tolist())]
    keeps: list[set[int]] = [{-1 - rank} for rank in range(len(own))]
    shared = np.flatnonzero(~alone)
    for row in shared.tolist():
        rank, group = int(table.ranks[row]), int(groups[row])
        held[rank].append((group, int(sizes[row])))
        if chosen[row]:
            keeps[rank].add(group)
    more = copies_for(domains, held, keeps)
    for row in shared.tolist():
        extra[row] = int(groups[row]) in more[int(table.ranks[row])]
    return extra


def _used(table: Table) -> Flags:
    """Return which dimensions of each place exist."""
    dims = np.zeros(len(table.lengths), np.int64)
    placed = table.places >= 0
    dims[table.places[placed]] = table.dims[placed]
    return np.asarray(np.arange(table.lengths.shape[1]) < dims[:, None], np.bool_)


def _refuse_broken(table: Table, chosen: Flags, keyed: Ints, bounds: Ints) -> None:
    """Raise StateError, with stock's message, for keys with pieces that do not make one tensor."""
    suspects = _suspects(table, keyed, bounds)
    if not len(suspects):
        return
    odd = np.zeros(len(table.names), np.bool_)
    odd[table.keys[keyed[bounds[suspects]]]] = True
    plans = [
        SavePlan([table.item(row) for row in range(a, b) if chosen[row] and odd[table.keys[row]]])
        for a, b in itertools.pairwise(table.starts.tolist())
    ]
    try:
        DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except Exception as error:  # any type: stock fails in its own way on a tensor after an object
        raise StateError(
            f"the ranks' plans do not make one checkpoint: {error}",
            hint="describe the same global tensors on every rank",
        ) from error


def _suspects(table: Table, keyed: Ints, bounds: Ints) -> Ints:
    """Return the keys, by their position in ``bounds``, that stock might refuse."""
    heads = bounds[:-1]
    counts = np.diff(bounds)
    several = np.repeat(counts > 1, counts)
    kinds = table.kinds[keyed]
    shapes = table.shapes[keyed]
    first = np.repeat(np.arange(len(heads)), counts)
    odd = several & (kinds != SHARD)
    # For pieces with one dtype and global size, stock only checks their boxes.
    odd |= shapes != np.repeat(shapes[heads], counts)
    tensors = np.flatnonzero(kinds != OBJECT)
    width = table.offsets.shape[1]
    global_sizes = np.zeros((len(table.sizes) + 1, width), np.int64)
    for n, size in enumerate(table.sizes):
        global_sizes[n, : len(size)] = size
    found = np.bincount(first, odd, len(heads)) > 0
    tiled = is_tiled(
        first[tensors],
        table.boxes(table.offsets, keyed[tensors]),
        table.boxes(table.lengths, keyed[tensors]),
        global_sizes[shapes[tensors]],
        table.dims[keyed[tensors]],
        filled=len(table.starts) > 2,  # noqa: PLR2004 - stock lets one rank leave holes
    )
    has_tensors = np.bincount(first[tensors], minlength=len(heads)) > 0
    found[has_tensors] |= ~tiled
    return np.flatnonzero(found)


# -- whether the pieces of a tensor tile it -------------------------------------------------------


def is_tiled(
    tensors: Ints, offsets: Ints, lengths: Ints, sizes: Ints, dims: Ints, *, filled: bool
) -> Flags:
    """Return one answer for each different number in ``tensors``, in order.

    Args:
        tensors: The tensor of each piece; equal numbers are neighbours.
        offsets: Where each piece begins: (pieces, widest), zeros beyond ``dims``.
        lengths: The sizes of each piece, in the same form.
        sizes: The sizes of the piece's whole tensor, in the same form.
        dims: The number of dimensions of each piece.
        filled: Whether the pieces have to fill the tensor.

    Returns:
        Whether each tensor is tiled. A yes is certain. A no may only mean that the pieces are not the cells of a
        grid.
    """
    heads = np.flatnonzero(np.diff(tensors, prepend=-1))
    if not len(heads):
        return np.zeros(0, np.bool_)
    counts = np.diff(np.append(heads, len(tensors)))
    real = np.arange(offsets.shape[1]) < dims[:, None]
    good = ((offsets >= 0) & (lengths >= 0) & (offsets + lengths <= sizes)).all(axis=1)
    if filled:
        volumes = np.prod(lengths, axis=1, initial=1, where=real)
        tensor_volumes = np.prod(sizes, axis=1, initial=1, where=real)[heads]
        good &= np.repeat(np.add.reduceat(volumes, heads) == tensor_volumes, counts)
    several = np.repeat(counts > 1, counts)
    good &= ~several | _apart(tensors, offsets, lengths, heads, counts)
    tiled = np.logical_and.reduceat(good, heads)
    # For a tensor without dimensions stock only checks that it has one piece, and that is checked elsewhere.
    return np.asarray(tiled | (dims[heads] == 0), np.bool_)


def _apart(tensors: Ints, offsets: Ints, lengths: Ints, heads: Ints, counts: Ints) -> Flags:
    """Return for each piece whether its tensor's pieces can be cells of a grid.

    Along every dimension its interval must equal that of any other piece or be disjoint from it, and no two
    pieces of a tensor may begin at the same place.
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
    """Return for each interval whether it equals the one before it or begins at its end or later."""
    fine = np.ones(len(tensors), np.bool_)
    fine[1:] = (
        (tensors[1:] != tensors[:-1])
        | (starts[1:] >= ends[:-1])
        | ((starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1]))
    )
    return fine
