"""Write ``.metadata`` as torch 2.13 does: from the columns of a plan, or from torch's objects.

    describe(metadata, places, ...)   torch's objects, completed as stock's writer completes them
    encode_metadata(metadata)         their pickle, protocol 4; unpickles equal in torch 2.6 to 2.15

Versions differ in one place: torch 2.15 appends a field to TensorProperties, which 2.13 cannot unpack. The
field is not written; readers accept it with and without.

From columns, the opcodes of the pickle are written directly, many similar records at a time:

    placed_in(world, parts, root)     checked: what was planned was written, inside its files   -> PlacedRows
    places_for(world, placed, ranks)  the entries of one ``.metadata``                          -> Places
    Described(world).encode(places, storage_meta)    -> bytes, equal to torch's when unpickled

That file is one pickle, protocol 4, in one frame:

    prefix       each class, field name, state of properties and data file's path once: pushed, put into
                 the memo, popped. Classes and names have memo numbers below 256 (BINGET)
    metadata     key (BINUNICODE, LONG_BINPUT) -> tensor: properties, size, chunks
    paths        key (LONG_BINGET) -> tuple of strings and ints
    places       MetadataIndex -> _StorageInfo, one MARK ... SETITEMS

Chunks and places are records without memo operations. Their numbers are BININT (J and 4 bytes). If one number
of a region does not fit, all numbers of the region are LONG1 with 8 bytes. Keys and paths are LONG_BINGET. So
the length of a record does not depend on its numbers: all records of tensors with the same number of
dimensions have the same length, and numpy makes millions of them at once:

    record = Record(b"...").number("offset", 4).fixed(b"...")     opcodes with holes
    fill([record, ...], kinds, columns)                           one after another, holes filled
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfs import _torch
from ckptfs.commit.delete.shared_data import stock_path
from ckptfs.commit.save.spec import WrittenPart
from ckptfs.dcp.planning.columns import OBJECT, Ints
from ckptfs.dcp.planning.global_plan import AgreedPlan
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.errors import IncompleteCheckpointError, IntegrityError
from ckptfs.uri import Uri

__all__ = [
    "DCP_VERSION",
    "PLACED",
    "Described",
    "MetadataPickler",
    "describe",
    "encode_metadata",
    "is_known_layout",
    "placed_in",
    "places_for",
]

# torch 2.13 writes this; older versions write None, and read this too.
DCP_VERSION = "1.0.0"

_PROTOCOL = 4  # the highest that every supported Python writes by default or reads
_FIELDS_2_13 = 5


def describe(
    metadata: Metadata,
    storage_data: Mapping[MetadataIndex, tuple[str, int, int]],
    *,
    checkpoint_id: str,
    save_id: str,
) -> Metadata:
    """Complete the planner's metadata as stock's writer does. Coordinator only.

    ``storage_data``: item -> (path relative to the checkpoint, offset, length), in bytes.
    """
    metadata.storage_data = {
        index: _torch.storage_info(path, offset, length)
        for index, (path, offset, length) in storage_data.items()
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    metadata.version = DCP_VERSION
    return metadata


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of ``.metadata``."""
    buffer = io.BytesIO()
    with gc_paused():
        MetadataPickler(buffer, _PROTOCOL).dump(metadata)
    return buffer.getvalue()


class MetadataPickler(pickle.Pickler):
    """Pickles TensorProperties as torch 2.13 does, and enums alike under every Python.

    Both are independent of the installed versions. Python 3.11.2, for example, writes enums as ``getattr``,
    and 3.11.7 does not.
    """

    def reducer_override(self, obj: Any) -> Any:
        """As in ``pickle.Pickler``."""
        if type(obj) is _torch.mem_format_encoding():
            return type(obj), (obj.value,)
        if type(obj) is TensorProperties:
            state = self.state_of(obj)
            new_object = vars(copyreg)["__newobj__"]  # what pickle itself uses; typeshed hides it
            return new_object, (TensorProperties,), state
        return NotImplemented

    @staticmethod
    def state_of(properties: TensorProperties) -> tuple[Any, ...]:
        """Return the part of the properties that is written."""
        return tuple(properties.__getstate__()[:_FIELDS_2_13])


_BLOCK = 1 << 16  # rows made at once, so that temporary copies stay small
_SHORT = 256


def text(string: str) -> bytes:
    """Return opcodes that push a string."""
    data = string.encode("utf-8", "surrogatepass")
    if len(data) < _SHORT:
        return b"\x8c%c" % len(data) + data
    return b"X" + len(data).to_bytes(4, "little") + data


def number_width(*columns: Ints) -> int:
    """Return how many bytes hold every number of a region: 4 if possible, else 8."""
    most = max((int(column.max(initial=0)) for column in columns), default=0)
    return 4 if most < 1 << 31 else 8


class Record:
    """Opcodes with holes for numbers."""

    def __init__(self, start: bytes) -> None:
        self.opcodes = bytearray(start)
        self.holes: list[tuple[str, int | None, int, int]] = []  # column, its part, place, width

    def fixed(self, opcodes: bytes) -> Self:
        """Add opcodes that are the same in all records."""
        self.opcodes += opcodes
        return self

    def number(self, column: str, width: int, part: int | None = None) -> Self:
        """Add an int of the column: BININT, or LONG1 with 8 bytes."""
        return self._hole(b"J" if width == 4 else b"\x8a\x08", column, width, part)  # noqa: PLR2004

    def numbers(self, column: str, count: int, width: int) -> Self:
        """Add a tuple of the first ``count`` ints of a row of the column."""
        if count > 3:  # noqa: PLR2004 - TUPLE1, TUPLE2, TUPLE3, and MARK ... TUPLE
            self.opcodes += b"("
        for part in range(count):
            self.number(column, width, part)
        self.opcodes += (b")", b"\x85", b"\x86", b"\x87")[count] if count <= 3 else b"t"  # noqa: PLR2004
        return self

    def memo_number(self, column: str) -> Self:
        """Add the memo entry with the column's number."""
        return self._hole(b"j", column, 4, None)

    def _hole(self, opcode: bytes, column: str, width: int, part: int | None) -> Self:
        self.opcodes += opcode
        self.holes.append((column, part, len(self.opcodes), width))
        self.opcodes += bytes(width)
        return self


def fill(
    records: Sequence[Record], kinds: Ints, columns: Mapping[str, Callable[[Ints], Ints]]
) -> tuple[memoryview, Ints]:
    """Return one record for each row, and where each begins; one more number is the end.

    Args:
        records: The kinds of records.
        kinds: For each row the number of its record.
        columns: By the names of the holes, functions that return the values of given rows.

    Returns:
        The bytes of all records, and where each begins.
    """
    lengths = np.array([len(record.opcodes) for record in records], np.int64)[kinds]
    ends = np.append(0, np.cumsum(lengths))
    output = np.empty(int(ends[-1]), np.uint8)
    for number in np.unique(kinds).tolist():
        record = records[number]
        size = len(record.opcodes)
        rows_of_kind = np.flatnonzero(kinds == number)
        for at in range(0, len(rows_of_kind) if size else 0, _BLOCK):
            rows = rows_of_kind[at : at + _BLOCK]
            block = np.empty((len(rows), size), np.uint8)
            block[:] = np.frombuffer(bytes(record.opcodes), np.uint8)
            found = {name: columns[name](rows) for name in {hole[0] for hole in record.holes}}
            for name, part, place, width in record.holes:
                values = found[name] if part is None else found[name][:, part]
                raw = np.ascontiguousarray(values, f"<i{width}").view(np.uint8)
                block[:, place : place + width] = raw.reshape(len(rows), width)
            first, last = int(ends[rows[0]]), int(ends[rows[-1] + 1])
            if last - first == block.size:  # the rows are contiguous
                output[first:last] = block.reshape(-1)
            else:
                output[ends[rows][:, None] + np.arange(size)] = block
    return output.data, ends


# What a rank sends: file number, offset and length of each of its items, in the order of its plan.
PLACED = np.dtype([("file", "<u4"), ("offset", "<u8"), ("length", "<u8")])


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRows:
    """Every row that was written, in order of rank and plan; columns as in ``RowLocations``."""

    paths: tuple[str, ...]
    rows: Ints
    files: Ints
    offsets: Ints
    lengths: Ints


def placed_in(world: AgreedPlan, parts: Sequence[WrittenPart], root: Uri | None) -> PlacedRows:
    """Return where the ranks wrote their items.

    ``root`` is the URI of the run, for the paths of shared files.

    IncompleteCheckpointError unless planned == written; IntegrityError for a place outside its file.
    """
    starts = world.table.starts
    if len(starts) - 1 != len(parts):
        raise IncompleteCheckpointError(f"{len(starts) - 1} ranks planned, but {len(parts)} wrote")
    rows = np.flatnonzero(world.writes)
    bounds = np.searchsorted(rows, starts).tolist()
    paths: list[str] = []
    placed_by_rank, bases = [np.zeros(0, PLACED)], []
    for rank, (part, (a, b)) in enumerate(zip(parts, itertools.pairwise(bounds), strict=True)):
        files = [record for record in part.files if record.digests is not None]
        placed = np.frombuffer(part.payload, PLACED)
        if len(placed) != b - a:
            raise IncompleteCheckpointError(
                f"rank {rank} planned {b - a} items but wrote {len(placed)}",
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
            raise IntegrityError(f"rank {rank} placed {key!r} outside its files", rank=rank)
        placed_by_rank.append(placed)
        bases.append(np.full(b - a, len(paths), np.int64))
        paths += [f.path if root is None else stock_path(f, root) for f in files]
    everything = np.concatenate(placed_by_rank)
    first = np.concatenate([np.zeros(0, np.int64), *bases])
    return PlacedRows(
        tuple(paths),
        rows,
        everything["file"].astype(np.int64) + first,
        everything["offset"].astype(np.int64),
        everything["length"].astype(np.int64),
    )


def places_for(world: AgreedPlan, placed: PlacedRows, ranks: Sequence[int]) -> RowLocations:
    """Return the place of each item, once, as readers find it.

    An item's place is that of one of the domain's ``ranks`` if one of them wrote it, else that of the rank
    that wrote it first. Without ``ranks`` any place is good.
    """
    groups = world.groups[placed.rows]
    firsts = np.unique(groups, return_index=True)[1]
    chosen = np.arange(len(groups))
    if len(firsts) < len(groups):
        owners = world.table.ranks[placed.rows]
        first_owner = np.zeros(int(groups.max()) + 1, np.int64)
        first_owner[groups[::-1]] = owners[::-1]
        # If a rank has an item twice, the last one counts; the same holds for a domain.
        score = np.where(owners == first_owner[groups], chosen, -1)
        score = np.where(np.isin(owners, list(ranks)), chosen + len(groups), score)
        order = np.lexsort((score, groups))
        last = np.append(np.diff(groups[order]) != 0, True)
        best = np.zeros(len(first_owner), np.int64)
        best[groups[order[last]]] = order[last]
        chosen = best[groups[np.sort(firsts)]]
    return RowLocations(
        placed.paths,
        placed.rows[chosen],
        placed.files[chosen],
        placed.offsets[chosen],
        placed.lengths[chosen],
    )


Piece = bytes | memoryview

_Kinds = (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
_NAMES = [
    "state_dict_metadata",
    "planner_data",
    "storage_data",
    "storage_meta",
    "version",
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "index",
    "offset",
    "relative_path",
    "length",
]


@dataclass(frozen=True, slots=True, eq=False)
class RowLocations:
    """Where rows of a world were written.

    Attributes:
        paths: The paths of the data files.
        rows: The rows in the order of the file's entries, each item once.
        files: The file of each row, as a number into ``paths``.
        offsets: Where each item begins, in bytes.
        lengths: The lengths of the items, in bytes.
    """

    paths: tuple[str, ...]
    rows: Ints
    files: Ints
    offsets: Ints
    lengths: Ints


class Described:
    """The metadata of a world. What does not depend on places is made once, on first use."""

    def __init__(self, world: AgreedPlan) -> None:
        self.world = world

    def encode(self, places: RowLocations, storage_meta: StorageMeta) -> bytes:
        """Return the bytes of ``.metadata``. Coordinator only; any thread."""
        memo, constants, keys = self._memo, self._constants, self._key_base
        # After all other numbers, because the number of files is known only now.
        base = keys + len(self.world.table.names)
        paths = b"".join(text(p) + _put(base + n) + b"0" for n, p in enumerate(places.paths))
        table = self._storage_records(places, base)
        # Joined once: of a large world these are hundreds of MB.
        body = [
            constants,
            paths,
            memo[Metadata],
            b")\x81}(",
            self._head,
            memo["storage_data"],
            *_dict_of([table] if len(places.rows) else []),
            memo["storage_meta"],
            _fragment(storage_meta),
            memo["version"],
            _fragment(DCP_VERSION),
            b"ub.",
        ]
        frame = b"\x80\x04\x95" + struct.pack("<Q", sum(map(len, body)))
        return b"".join([frame, *body])

    @cached_property
    def _memo(self) -> dict[object, bytes]:
        """Opcodes that get the classes and names of the prefix from the memo."""
        things: Iterable[object] = itertools.chain(_classes(), _NAMES)
        return {thing: _get(n) for n, thing in enumerate(things)}

    @cached_property
    def _states(self) -> dict[int, int]:
        """The memo number of each shape's state of properties; the same number for equal states."""
        first: dict[tuple[object, ...], int] = {}
        numbers: dict[int, int] = {}
        for n, p in enumerate(self.world.table.properties):
            state = (p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)
            numbers[n] = first.setdefault(state, len(self._memo) + len(first))
        return numbers

    @cached_property
    def _key_base(self) -> int:
        """The memo number of the first key."""
        return len(self._memo) + len(set(self._states.values()))

    @cached_property
    def _constants(self) -> bytes:
        pieces = [_fragment(thing) + _put(n) + b"0" for n, thing in enumerate(self._memo)]
        done: set[int] = set()
        for shape, number in self._states.items():
            if number not in done:
                done.add(number)
                state = MetadataPickler.state_of(self.world.table.properties[shape])
                pieces.append(_fragment(state) + _put(number) + b"0")
        return b"".join(pieces)

    @cached_property
    def _head(self) -> bytes:
        """The fields state_dict_metadata and planner_data."""
        memo = self._memo
        return b"".join(
            [
                memo["state_dict_metadata"],
                *_dict_of(self._tensors()),
                memo["planner_data"],
                *_dict_of(self._paths()),
            ]
        )

    def _tensors(self) -> Iterable[bytes]:
        memo, world, table, base = self._memo, self.world, self.world.table, self._key_base
        chunks, ends = self._chunk_records()
        headers: dict[int, bytes] = {}
        firsts = world.keyed[world.bounds[:-1]]
        kinds, shapes = table.kinds[firsts].tolist(), table.shapes[firsts].tolist()
        an_object = memo[BytesStorageMetadata] + b")\x81"
        spans = itertools.pairwise(ends[world.bounds].tolist())
        for key, kind, shape, (a, b) in zip(
            world.order.tolist(), kinds, shapes, spans, strict=True
        ):
            name = text(table.names[key]) + _put(base + key)
            if kind == OBJECT:
                yield name + an_object
                continue
            header = headers.get(shape)
            if header is None:
                header = headers[shape] = self._tensor_header(shape)
            yield b"".join((name, header, chunks[a:b], b"eub"))

    def _tensor_header(self, shape: int) -> bytes:
        memo = self._memo
        size = _fragment(tuple(self.world.table.sizes[shape]))
        properties = memo[TensorProperties] + b")\x81" + _get(self._states[shape]) + b"b"
        return b"".join(
            [
                memo[TensorStorageMetadata] + b")\x81}(",
                memo["properties"] + properties,
                memo["size"] + memo[torch.Size] + size + b"\x85R",
                memo["chunks"] + b"](",
            ]
        )

    def _chunk_records(self) -> tuple[memoryview, Ints]:
        """Return the chunks of all tensors one after another, and where each row's chunk begins."""
        memo, world, table = self._memo, self.world, self.world.table
        width = number_width(table.offsets, table.lengths)
        records = []
        for dims in range(table.offsets.shape[1] + 1):
            record = Record(memo[ChunkStorageMetadata] + b")\x81}(")
            for name in ("offsets", "sizes"):
                record.fixed(memo[name] + memo[torch.Size]).numbers(name, dims, width)
                record.fixed(b"\x85R")
            records.append(record.fixed(b"ub"))
        records.append(Record(b""))  # of objects
        rows = world.keyed
        kinds = np.where(table.kinds[rows] == OBJECT, len(records) - 1, table.dims[rows])
        columns: dict[str, Callable[[Ints], Ints]] = {
            "offsets": lambda at: table.boxes(table.offsets, rows[at]),
            "sizes": lambda at: table.boxes(table.lengths, rows[at]),
        }
        return fill(records, kinds, columns)

    def _paths(self) -> Iterable[bytes]:
        table, base = self.world.table, self._key_base
        described = set(self.world.order.tolist())
        numbers = {name: n for n, name in enumerate(table.names)}
        known: dict[str | int, bytes] = {}
        for key, path in table.paths.items():
            number = numbers[key]
            name = _get(base + number) if number in described else text(key) + _put(base + number)
            if path == (key,):
                yield name + _get(base + number) + b"\x85"
                continue
            pieces = []
            for component in path:
                piece = known.get(component)
                if piece is None:
                    piece = known[component] = (
                        text(component) if isinstance(component, str) else _fragment(component)
                    )
                pieces.append(piece)
            yield name + _tuple_of(pieces)

    def _storage_records(self, places: RowLocations, paths: int) -> memoryview:
        world, table = self.world, self.world.table
        rows = places.rows
        hints = world.hints[world.groups[rows]]
        width = number_width(places.offsets, places.lengths, table.offsets, hints)
        dims = range(-1, table.offsets.shape[1] + 1)
        records = [self._storage_record(d, width, hint=h) for d in dims for h in (False, True)]
        placed = np.where(table.placed[rows], table.dims[rows], -1)
        kinds = 2 * (placed + 1) + (hints >= 0)
        columns: dict[str, Callable[[Ints], Ints]] = {
            "key": lambda at: table.keys[rows[at]] + self._key_base,
            "hint": lambda at: hints[at],
            "offsets": lambda at: table.boxes(table.offsets, rows[at]),
            "path": lambda at: places.files[at] + paths,
            "offset": lambda at: places.offsets[at],
            "length": lambda at: places.lengths[at],
        }
        return fill(records, kinds, columns)[0]

    def _storage_record(self, dims: int, width: int, *, hint: bool) -> Record:
        memo = self._memo
        record = Record(memo[MetadataIndex] + b")\x81}(" + memo["fqn"]).memo_number("key")
        record.fixed(memo["index"])
        record = record.number("hint", width) if hint else record.fixed(b"N")
        if dims >= 0:
            record.fixed(memo["offset"] + memo[torch.Size]).numbers("offsets", dims, width)
            record.fixed(b"\x85R")
        record.fixed(b"ub" + memo[_torch.storage_info_type()] + b")\x81}(")
        record.fixed(memo["relative_path"]).memo_number("path")
        record.fixed(memo["offset"]).number("offset", width)
        return record.fixed(memo["length"]).number("length", width).fixed(b"ub")


def is_known_layout() -> bool:
    """Return whether this torch pickles the classes with the fields that are written here."""
    size = torch.Size([1])
    info = _torch.storage_info("path", 0, 1)
    chunk = ChunkStorageMetadata(size, size)
    properties = TensorProperties(torch.float32)
    known: list[tuple[Any, Any]] = [
        (chunk, {"offsets": size, "sizes": size}),
        (MetadataIndex("k", size, 0), {"fqn": "k", "index": 0, "offset": size}),
        (info, {"relative_path": "path", "offset": 0, "length": 1}),
        (BytesStorageMetadata(), None),
        (
            TensorStorageMetadata(properties, size, [chunk]),
            {"properties": properties, "size": size, "chunks": [chunk]},
        ),
        (Metadata({}), dict.fromkeys(_NAMES[1:5]) | {"state_dict_metadata": {}}),
    ]
    new_object = vars(copyreg)["__newobj__"]
    for thing, state in known:
        reduced = thing.__reduce_ex__(4)
        if reduced[:2] != (new_object, (type(thing),)) or (reduced[2] or None) != state:
            return False
    return True


def _classes() -> tuple[type, ...]:
    return (*_Kinds, MetadataIndex, TensorProperties, torch.Size, _torch.storage_info_type())


def _dict_of(items: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the opcodes of a dict; each item pushes keys and their values."""
    yield b"}"
    last = b""
    for item in items:
        if not last:
            yield b"("
            last = b"u"
        yield item
    yield last


def _tuple_of(pieces: Sequence[bytes]) -> bytes:
    if 1 <= len(pieces) <= 3:  # noqa: PLR2004 - TUPLE1, TUPLE2, TUPLE3
        return b"".join(pieces) + bytes([0x84 + len(pieces)])
    return b"(" + b"".join(pieces) + b"t"


def _get(number: int) -> bytes:
    return b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)  # noqa: PLR2004


def _put(number: int) -> bytes:
    return b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)  # noqa: PLR2004


def _fragment(thing: object) -> bytes:
    """Return the opcodes that push a small object, without memo operations."""
    buffer = io.BytesIO()
    pickler = MetadataPickler(buffer, 4)
    pickler.fast = True
    pickler.dump(thing)
    data = buffer.getvalue()[2:-1]
    return data[9:] if data[:1] == b"\x95" else data
