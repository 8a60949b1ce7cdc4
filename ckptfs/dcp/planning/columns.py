"""A rank's save plan as columns: the form in which the coordinator receives it and decides.

    structure_of(plan)      -> bytes      all of a plan but the values of its objects and tensors
    prints_of(plan)         -> bytes      fingerprints of those values
    decode_structure(bytes) -> Columns    ValueError for anything that no plan can be
    decode_prints(bytes)    -> Prints

    Packer      .ints(column, of) .texts(strings, of) .part(bytes)   -> .bytes()   StateError: too much
    Unpacker    .ints(), .texts(), .part(), .end()               ValueError for anything else

A structure has four sections. Each is decoded once, however many ranks send the same bytes (``Interned``):

    names    keys, and the path of each in its state dict
    shapes   (properties, global size), each once
    rows     for each item its kind, key and place
    places   shape, offsets and sizes of each piece of a tensor: what differs between ranks

The offsets of all pieces are concatenated in one flat column, and so are their sizes. Equal plans give equal
bytes, so a hash of the bytes identifies everything in the structure: dtypes, shapes, pieces, names, and the
keys that ``per_rank`` renamed.

A column of integers is one byte that says how it is encoded, its length, and its values in as few bytes as
hold all of them: no bytes for zeros, none for 0, 1, 2, ..., else 1, 2, 4 or 8 bytes each. A table of strings
is a column of their lengths and one text.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptfs.dcp.planning.state_dicts import LocalFacts, Path
from ckptfs.errors import StateError

__all__ = [
    "MOST",
    "OBJECT",
    "SHARD",
    "TENSOR",
    "Columns",
    "Interned",
    "Ints",
    "KeyTable",
    "Packer",
    "Prints",
    "Rows",
    "Shapes",
    "Unpacker",
    "decode_prints",
    "decode_structure",
    "prints_of",
    "structure_of",
]

Ints = NDArray[np.int64]

_COUNT = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_ZEROS, _COUNTING = 0, 9
_WIDTHS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}
# Limit for the numbers in a column and the characters in a string: a damaged length must not allocate without end.
MOST = 1 << 24
_MOST_BYTES = (1 << 32) - 1  # the largest length that a part's length field can hold


class Packer:
    """Encodes columns one after another."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def ints(self, column: Ints, of: str) -> None:
        """Add one column of up to ``MOST`` numbers.

        ``of`` says what they are, for the StateError if there are more.
        """
        count = len(column)
        if count > MOST:
            raise StateError(
                f"this rank's save plan has {count} {of}, {count - MOST} more than the limit",
                hint="save fewer and larger tensors, or several checkpoints",
            )
        if not count or not column.any():
            self._parts.append(_COUNT.pack(_ZEROS, count))
        elif np.array_equal(column, np.arange(count)):
            self._parts.append(_COUNT.pack(_COUNTING, count))
        else:
            width = _width(int(column.min()), int(column.max()))
            self._parts.append(_COUNT.pack(width, count))
            self._parts.append(column.astype(_WIDTHS[width]).tobytes())

    def texts(self, strings: Sequence[str], of: str) -> None:
        """Add a table of strings, lone surrogates included; ``of`` as for ``ints``."""
        longest = max(strings, key=len, default="")
        if len(longest) >= MOST:
            raise StateError(
                f"{longest[:40]!r}... is one of the {of} and has {len(longest)} characters; "
                f"a save plan holds up to {MOST - 1}",
                hint="give it a shorter name",
            )
        self.ints(np.fromiter(map(len, strings), np.int64, len(strings)), of)
        self.part("".join(strings).encode("utf-8", "surrogatepass"))

    def part(self, data: bytes) -> None:
        """Add bytes that are not interpreted here."""
        if len(data) > _MOST_BYTES:
            raise StateError(
                f"a part of this rank's save plan has {len(data)} bytes, "
                f"{len(data) - _MOST_BYTES} more than the limit",
                hint="save fewer and larger tensors under shorter names, or several checkpoints",
            )
        self._parts.append(_LENGTH.pack(len(data)))
        self._parts.append(data)

    def bytes(self) -> bytes:
        """Return everything that was added."""
        return b"".join(self._parts)


class Unpacker:
    """Decodes columns. ValueError for bytes that no Packer made."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def ints(self, *, count: int | None = None, below: int | None = None) -> Ints:
        """Take one column; it must have ``count`` numbers, and each must be in 0 ... ``below`` - 1."""
        width, found = _COUNT.unpack(self._take(_COUNT.size))
        if count is not None and found != count:
            raise ValueError(f"a column has {found} numbers instead of {count}")
        if found > MOST:
            raise ValueError(f"a column has {found} numbers, but at most {MOST} are read")
        if width == _ZEROS:
            column = np.zeros(found, np.int64)
        elif width == _COUNTING:
            column = np.arange(found, dtype=np.int64)
        elif width in _WIDTHS:
            raw = self._take(width * found)
            column = np.frombuffer(raw, _WIDTHS[width]).astype(np.int64)
        else:
            raise ValueError(f"a column has the unknown encoding {width}")
        if below is not None and found and (column.min() < 0 or column.max() >= below):
            raise ValueError(
                f"a column has numbers from {column.min()} to {column.max()}, but 0 to {below - 1} are allowed"
            )
        return column

    def texts(self) -> list[str]:
        """Take a table of strings."""
        lengths = self.ints(below=MOST)
        text = self.part().decode("utf-8", "surrogatepass")
        ends = np.cumsum(lengths).tolist()
        if (ends[-1] if ends else 0) != len(text):
            raise ValueError("the lengths of its strings exceed their text")
        return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def part(self) -> bytes:
        """Take bytes that are not interpreted here."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def end(self) -> None:
        """Raise ValueError if any bytes are left."""
        if self._at != len(self._data):
            raise ValueError("it has bytes after its last column")

    def _take(self, length: int) -> bytes:
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise ValueError("it ends too early")
        self._at += length
        return raw


def _width(least: int, most: int) -> int:
    if least < 0:
        return 8
    return next((w for w in (1, 2, 4) if most < 1 << (8 * w)), 8)


T = TypeVar("T")

OBJECT, TENSOR, SHARD = 0, 1, 2
_UNPLACED = 4  # flag of a tensor's item if its index has no offset
_MOST_DIMS = 64  # a damaged number of dimensions must not make endless tables

_Properties = tuple[torch.dtype, torch.layout, bool, torch.memory_format, bool]


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """The keys of items and of paths, each once.

    ``paths`` has the keys that have a path in a state dict.
    """

    keys: tuple[str, ...]
    paths: Mapping[str, Path]


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """The kinds of tensors: properties, global sizes, and numbers of dimensions."""

    properties: tuple[TensorProperties, ...]
    sizes: tuple[torch.Size, ...]
    dims: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One row for each item.

    Attributes:
        kinds: OBJECT, TENSOR or SHARD.
        placed: Whether the item's index has an offset.
        keys: Numbers into ``KeyTable.keys``.
        places: Numbers of places; -1 for objects.
        most_key: The largest of ``keys``; -1 if there is none.
        most_place: The largest of ``places``; -1 if there is none.
    """

    kinds: NDArray[np.uint8]
    placed: NDArray[np.bool_]
    keys: Ints
    places: Ints
    most_key: int
    most_place: int


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A plan.

    Attributes:
        names: Keys and paths.
        shapes: The kinds of tensors.
        rows: The items.
        shape_of: The shape of each place, as a number into ``shapes``.
        offsets: The offsets of all places in one flat column, one number per dimension.
        lengths: Their sizes, in the same form.
    """

    names: KeyTable
    shapes: Shapes
    rows: Rows
    shape_of: Ints
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Prints:
    """Fingerprints of the values of some keys (numbers into ``KeyTable.keys``).

    ``compared``: whether this rank's values are to be compared at all.
    """

    compared: bool
    keys: Ints
    values: NDArray[np.uint64]


@dataclass(slots=True)
class Interned:
    """Decoded sections, by their bytes."""

    known: dict[tuple[object, bytes], object] = field(default_factory=dict)

    def get(self, data: bytes, decode: Callable[[bytes], T]) -> T:
        """Return what ``data`` decodes to; the same object for equal bytes."""
        found = self.known.get((decode, data))
        if found is None:
            found = self.known[decode, data] = decode(data)
        return found  # type: ignore[return-value] # kept under the function that made it


# -- a plan -> bytes -----------------------------------------------------------------------------


def structure_of(plan: SavePlan) -> bytes:
    """Encode the plan without values. StateError for items that ``SavePlanner`` does not make."""
    mappings = _mappings_of(plan)
    keys = [item.index.fqn for item in plan.items]
    ids = {key: n for n, key in enumerate(dict.fromkeys(itertools.chain(mappings, keys)))}
    table = _PlaceTable()
    kinds, places = [], []
    for item in plan.items:
        kind, place = OBJECT, -1
        if item.type is not WriteItemType.BYTE_IO:
            kind = SHARD if item.type is WriteItemType.SHARD else TENSOR
            place, chunk = table.place_of(item)
            offset = item.index.offset
            if offset is None:
                kind |= _UNPLACED
            elif offset != chunk:
                raise StateError(
                    f"{item.index.fqn!r} has the index {offset} but the offsets {chunk}"
                )
        kinds.append(kind)
        places.append(place + 1)
    rows = Packer()
    rows.ints(np.array(kinds, np.int64), "items")
    rows.ints(np.fromiter(map(ids.__getitem__, keys), np.int64, len(keys)), "items")
    rows.ints(np.array(places, np.int64), "items")
    encoded = Packer()
    for section in (_pack_names(ids, mappings), table.shapes(), rows.bytes(), table.places()):
        encoded.part(section)
    return encoded.bytes()


def prints_of(plan: SavePlan) -> bytes:
    """Encode the fingerprints in the plan's LocalFacts, except those of shards.

    The fingerprint of a shard only covers dtype and size, which the structure has.
    """
    facts = plan.planner_data
    prints = facts.fingerprints if isinstance(facts, LocalFacts) else {}
    packer = Packer()
    packer.ints(np.array([bool(prints)], np.int64), "flags")
    first: dict[str, WriteItemType] = {}
    if prints:
        for item in plan.items:
            first.setdefault(item.index.fqn, item.type)
    names = dict.fromkeys(itertools.chain(_mappings_of(plan), first))
    numbered_prints = [
        (n, prints[key])
        for n, key in enumerate(names)
        if key in prints and first.get(key) is not WriteItemType.SHARD
    ]
    packer.ints(np.array([n for n, _ in numbered_prints], np.int64), "fingerprints")
    packer.part(np.array([value for _, value in numbered_prints], "<u8").tobytes())
    return packer.bytes()


class _PlaceTable:
    """The places and shapes of a plan, each once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # by id of a TensorWriteData: several items share one
        self._places: list[tuple[int, torch.Size, torch.Size]] = []
        self._shapes: dict[tuple[_Properties, torch.Size], int] = {}

    def place_of(self, item: WriteItem) -> tuple[int, torch.Size]:
        """Return the number of the item's place, and its offsets."""
        data = item.tensor_data
        assert data is not None  # noqa: S101 - the type of the item says so
        place = self._known.get(id(data))
        if place is None:
            place = self._known[id(data)] = self._add(data, item.index.fqn)
        return place, data.chunk.offsets

    def _add(self, data: TensorWriteData, key: str) -> int:
        p, chunk = data.properties, data.chunk
        if not len(chunk.offsets) == len(chunk.sizes) == len(data.size):
            raise StateError(f"{key!r}: {chunk} is no piece of a tensor of {data.size}")
        if len(data.size) > _MOST_DIMS:
            raise StateError(
                f"{key!r} has {len(data.size)} dimensions, but at most {_MOST_DIMS} can be saved",
                hint="reshape it: drop dimensions of size 1, or join others",
            )
        kind = (p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory)
        shape = self._shapes.setdefault((kind, data.size), len(self._shapes))
        self._places.append((shape, chunk.offsets, chunk.sizes))
        return len(self._places) - 1

    def shapes(self) -> bytes:
        """Return the section of shapes."""
        kinds = {kind: n for n, kind in enumerate(dict.fromkeys(k for k, _ in self._shapes))}
        packer = Packer()
        names = [str(part) for kind in kinds for part in (kind[0], kind[1], kind[3])]
        packer.texts(names, "properties")
        packer.ints(np.array([bool(k[2]) + 2 * bool(k[4]) for k in kinds], np.int64), "properties")
        packer.ints(np.array([kinds[kind] for kind, _ in self._shapes], np.int64), "shapes")
        packer.ints(np.array([len(size) for _, size in self._shapes], np.int64), "shapes")
        packer.ints(_flat([size for _, size in self._shapes]), "sizes of tensors")
        return packer.bytes()

    def places(self) -> bytes:
        """Return the section of places."""
        packer = Packer()
        packer.ints(np.array([shape for shape, _, _ in self._places], np.int64), "pieces")
        packer.ints(_flat([offsets for _, offsets, _ in self._places]), "offsets of pieces")
        packer.ints(_flat([sizes for _, _, sizes in self._places]), "sizes of pieces")
        return packer.bytes()


def _flat(sizes: list[torch.Size]) -> Ints:
    return np.fromiter(itertools.chain.from_iterable(sizes), np.int64)


def _mappings_of(plan: SavePlan) -> Mapping[str, Path]:
    data = plan.planner_data
    if isinstance(data, LocalFacts):
        return data.mappings
    return data if isinstance(data, dict) else {}


def _pack_names(keys: Mapping[str, int], mappings: Mapping[str, Path]) -> bytes:
    """Encode paths as numbers of their components, and keys that are not their path with dots."""
    paths = [mappings.get(key, ()) for key in keys]
    components = list(itertools.chain.from_iterable(paths))
    table = {component: n for n, component in enumerate(dict.fromkeys(components))}
    packer = Packer()
    packer.texts([str(component) for component in table], "components of keys")
    is_int = [isinstance(component, int) for component in table]
    packer.ints(np.array(is_int, np.int64), "components of keys")
    packer.ints(np.fromiter(map(len, paths), np.int64, len(paths)), "keys")
    numbers = np.fromiter(map(table.__getitem__, components), np.int64, len(components))
    packer.ints(numbers, "components of keys")
    own = [
        not path or key != ".".join(map(str, path)) for key, path in zip(keys, paths, strict=True)
    ]
    packer.ints(np.array(own, np.int64), "keys")
    packer.texts([key for key, is_own in zip(keys, own, strict=True) if is_own], "keys")
    return packer.bytes()


# -- bytes -> a plan, trusting nothing -----------------------------------------------------------


def decode_structure(data: bytes, interned: Interned) -> Columns:
    """Decode what ``structure_of`` wrote; ValueError for anything else."""
    sections = Unpacker(data)
    names = interned.get(sections.part(), _decode_names)
    shapes = interned.get(sections.part(), _decode_shapes)
    rows = interned.get(sections.part(), _decode_rows)
    places = Unpacker(sections.part())
    sections.end()
    shape_of = places.ints(below=len(shapes.sizes))
    flat = int(shapes.dims[shape_of].sum())
    offsets, lengths = places.ints(count=flat), places.ints(count=flat)
    places.end()
    if rows.most_key >= len(names.keys) or rows.most_place >= len(shape_of):
        raise ValueError("an item has no name or no place")
    return Columns(names, shapes, rows, shape_of, offsets, lengths)


def decode_prints(data: bytes) -> Prints:
    """Decode what ``prints_of`` wrote; ValueError for anything else.

    The keys may be too large for ``KeyTable.keys``: the caller checks that.
    """
    packed = Unpacker(data)
    compared = bool(packed.ints(count=1, below=2)[0])
    keys = packed.ints(below=MOST)
    values = np.frombuffer(packed.part(), "<u8")
    packed.end()
    if len(keys) != len(values) or np.any(keys[1:] <= keys[:-1]):
        raise ValueError("it has fingerprints that belong to no key")
    return Prints(compared, keys, values)


def _decode_names(data: bytes) -> KeyTable:
    packed = Unpacker(data)
    texts = packed.texts()
    numbers = packed.ints(count=len(texts), below=2).tolist()
    table = [int(t) if is_int else t for t, is_int in zip(texts, numbers, strict=True)]
    ends = np.cumsum(packed.ints(below=MOST)).tolist()
    flat = packed.ints(count=ends[-1] if ends else 0, below=len(table)).tolist()
    own = packed.ints(count=len(ends), below=2).tolist()
    given = iter(packed.texts())
    packed.end()
    keys: list[str] = []
    paths: dict[str, Path] = {}
    for start, end, is_own in zip([0, *ends], ends, own, strict=False):
        path = tuple([table[n] for n in flat[start:end]])
        key = next(given, None) if is_own else ".".join(map(str, path))
        if key is None:
            raise ValueError("a key is missing")
        keys.append(key)
        if path:
            paths[key] = path
    if len(set(keys)) != len(keys) or next(given, None) is not None:
        raise ValueError("a key is empty or occurs twice")
    return KeyTable(tuple(keys), paths)


def _decode_shapes(data: bytes) -> Shapes:
    packed = Unpacker(data)
    texts = packed.texts()
    flags = packed.ints(below=4).tolist()
    if len(texts) != 3 * len(flags):
        raise ValueError("the properties of a tensor have no name")
    kinds = [
        TensorProperties(
            dtype=_named(texts[3 * n], torch.dtype),
            layout=_named(texts[3 * n + 1], torch.layout),
            requires_grad=bool(flag & 1),
            memory_format=_named(texts[3 * n + 2], torch.memory_format),
            pin_memory=bool(flag & 2),
        )
        for n, flag in enumerate(flags)
    ]
    kind_of = packed.ints(below=len(kinds)).tolist()
    dims = packed.ints(count=len(kind_of))
    if dims.max(initial=0) > _MOST_DIMS or dims.min(initial=0) < 0:
        raise ValueError(
            f"a tensor has {dims.max()} dimensions, but at most {_MOST_DIMS} are allowed"
        )
    flat = packed.ints(count=int(dims.sum())).tolist()
    packed.end()
    ends = np.cumsum(dims).tolist()
    sizes = [torch.Size(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return Shapes(tuple(kinds[k] for k in kind_of), tuple(sizes), dims)


def _decode_rows(data: bytes) -> Rows:
    packed = Unpacker(data)
    codes = packed.ints(below=_UNPLACED + SHARD + 1)
    keys = packed.ints(count=len(codes), below=MOST)
    places = packed.ints(count=len(codes), below=MOST) - 1
    packed.end()
    kinds = codes & ~_UNPLACED
    if np.any(kinds > SHARD) or np.any((kinds == OBJECT) != (places < 0)):
        raise ValueError("an item has an unknown kind")
    placed = (kinds != OBJECT) & (codes & _UNPLACED == 0)
    most_key = int(keys.max(initial=-1))
    return Rows(kinds.astype(np.uint8), placed, keys, places, most_key, int(places.max(initial=-1)))


def _named(name: str, kind: type[T]) -> T:
    """Return torch's dtype, layout or memory format with that name, and nothing else."""
    value = vars(torch).get(name.removeprefix("torch."))  # getattr would import what it names
    if not isinstance(value, kind):
        raise ValueError(f"{name!r} is not a {kind.__name__}")  # noqa: TRY004 - a value, not a type
    return value
