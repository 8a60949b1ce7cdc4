"""``.metadata`` written from columns: the opcodes of a pickle, many equal records at a time.

    Described(world).encode(places, storage_meta)    -> bytes, equal to stock's when unpickled

The file is one pickle, protocol 4, in one frame:

    prefix       each class, field name, state of properties and data file's path once: pushed, put into
                 the memo, popped. Classes and names have memo numbers below 256 (BINGET)
    metadata     key (BINUNICODE, LONG_BINPUT) -> tensor: properties, size, chunks
    paths        key (LONG_BINGET) -> tuple of strings and ints
    places       MetadataIndex -> _StorageInfo, one MARK ... SETITEMS

Chunks and places are records without memo operations: numbers are BININT (J and 4 bytes) or, in a region
with one that does not fit, LONG1 of 8 bytes, all of them; keys and paths are LONG_BINGET. So all records
of tensors of as many dimensions have one length, and are made by numpy.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
from ckptfs.dcp.columns import OBJECT
from ckptfs.dcp.metadata import DCP_VERSION, MetadataPickler
from ckptfs.dcp.packed import Ints
from ckptfs.dcp.records import Record, fill, number_width, text
from ckptfs.dcp.world_plan import World

__all__ = ["Described", "Places", "is_known_layout"]

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
class Places:
    """Where rows of a world were written. rows: in the order of the file's entries, each item once.

    files: numbers into ``paths``. offsets, lengths: bytes.
    """

    paths: tuple[str, ...]
    rows: Ints
    files: Ints
    offsets: Ints
    lengths: Ints


class Described:
    """The metadata of a world. What does not depend on places is made once, when first asked for."""

    def __init__(self, world: World) -> None:
        self.world = world

    def encode(self, places: Places, storage_meta: StorageMeta) -> bytes:
        """The bytes of ``.metadata``. Coordinator only; any thread."""
        memo, constants, keys = self._memo, self._constants, self._key_base
        # Behind all other numbers: there are as many as files, which is known only now.
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
        """How what is in the prefix is got back."""
        things: Iterable[object] = itertools.chain(_classes(), _NAMES)
        return {thing: _get(n) for n, thing in enumerate(things)}

    @cached_property
    def _states(self) -> dict[int, int]:
        """Memo number of the state of each shape's properties; one for equal states."""
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
        """Fields state_dict_metadata and planner_data."""
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
        """The chunks of all tensors behind each other, and where each row's begins."""
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

    def _storage_records(self, places: Places, paths: int) -> memoryview:
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
    """Whether this torch pickles the classes with the fields that are written here."""
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
        told = thing.__reduce_ex__(4)
        if told[:2] != (new_object, (type(thing),)) or (told[2] or None) != state:
            return False
    return True


def _classes() -> tuple[type, ...]:
    return (*_Kinds, MetadataIndex, TensorProperties, torch.Size, _torch.storage_info_type())


def _dict_of(items: Iterable[Piece]) -> Iterator[Piece]:
    """A dict of items, each of which pushes keys and their values."""
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
    """The opcodes that push a small thing, without a word of the memo."""
    buffer = io.BytesIO()
    pickler = MetadataPickler(buffer, 4)
    pickler.fast = True
    pickler.dump(thing)
    data = buffer.getvalue()[2:-1]
    return data[9:] if data[:1] == b"\x95" else data
