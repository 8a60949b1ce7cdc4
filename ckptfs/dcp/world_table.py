"""All ranks' plans as one table of rows, the coordinator's ground for its decision.

    table_of(ranks)     -> Table       one numbering of keys and shapes for all ranks
    Table.item(row)     -> WriteItem   a row as the object that it was

What ranks have in common (names, shapes, kinds: see ``columns``) is looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptfs.dcp.columns import OBJECT, SHARD, TENSOR, Columns, Names, Rows, Shapes
from ckptfs.dcp.packed import Ints
from ckptfs.dcp.per_rank import Path

__all__ = ["Flags", "Table", "table_of"]

_TYPES = {
    OBJECT: WriteItemType.BYTE_IO,
    TENSOR: WriteItemType.TENSOR,
    SHARD: WriteItemType.SHARD,
}
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Table:
    """All ranks' items as rows; ``starts[r]`` is rank r's first, the last entry their number.

    numbers: where the keys of a rank's names are in ``names``. keys: numbers into ``names``. kinds, placed: as in ``Rows``. shapes: numbers into properties and
    sizes; -1 for objects. places: rows of offsets and lengths, which are as wide as the most
    dimensions; -1 for objects.
    """

    names: tuple[str, ...]
    numbers: Mapping[Names, Ints]
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
        """Dimensions of each row; 0 for objects."""
        dims = np.array([len(size) for size in self.sizes] + [0], np.int64)
        return dims[self.shapes]

    @cached_property
    def itemsizes(self) -> Ints:
        """Bytes per element of each shape."""
        return np.array([p.dtype.itemsize for p in self.properties] + [0], np.int64)

    def boxes(self, column: Ints, rows: Ints) -> Ints:
        """Offsets or lengths of some rows, objects as nothing."""
        if not len(column):
            return np.zeros((len(rows), column.shape[1]), np.int64)
        found = column[self.places[rows]]
        found[self.places[rows] < 0] = 0
        return found

    def item(self, row: int) -> WriteItem:
        """The row as the item that it was."""
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
        """Where the row's piece lies in its tensor."""
        lengths = self.lengths[self.places[row], : self.dims[row]]
        return ChunkStorageMetadata(self._offset(row), torch.Size(lengths.tolist()))

    def _offset(self, row: int) -> torch.Size:
        return torch.Size(self.offsets[self.places[row], : self.dims[row]].tolist())


def table_of(ranks: Sequence[Columns]) -> Table:
    """The ranks' plans behind each other, with one numbering of keys and shapes for all."""
    names: dict[str, int] = {}
    kinds: dict[tuple[object, torch.Size], int] = {}
    properties: list[TensorProperties] = []
    numbered: dict[Shapes, Ints] = {}
    named: dict[Names, Ints] = {}
    keyed: dict[tuple[Names, Rows], Ints] = {}

    def keys_of(table: Names, rows: Rows) -> Ints:
        if table not in named:
            mine = [names.setdefault(key, len(names)) for key in table.keys]
            named[table] = np.array(mine, np.int64)
        found = keyed.get((table, rows))
        if found is None:
            found = keyed[table, rows] = named[table][rows.keys]
        return found

    def shapes_of(table: Shapes) -> Ints:
        found = numbered.get(table)
        if found is None:
            mine = []
            for p, size in zip(table.properties, table.sizes, strict=True):
                kind = (p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)
                number = kinds.setdefault((kind, size), len(kinds))
                if number == len(properties):
                    properties.append(p)
                mine.append(number)
            # The last entry is that of objects: a place of -1 finds it.
            found = numbered[table] = np.array([*mine, -1], np.int64)
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
    """One row for each place, filled up with zeros."""
    width = int(dims.max(initial=0))
    if len(dims) and int(dims.min()) == width:
        return flat.reshape(len(dims), width)
    wide = np.zeros((len(dims), width), np.int64)
    wide[np.arange(width) < dims[:, None]] = flat
    return wide


def _paths(ranks: Sequence[Names]) -> dict[str, Path]:
    """What stock's ``ChainMap`` of all ranks' paths is: the lowest rank's, the highest rank's first."""
    tables = list({id(names): names for names in reversed(ranks)}.values())
    merged: dict[str, Path] = {key: () for names in tables for key in names.paths}
    seen = {id(names): names for names in ranks}
    for names in reversed(seen.values()):
        merged.update(names.paths)
    return merged
