"""Read ``.metadata`` without trusting it.

    read_inventory(data, where)     what a load asks for, by key; torch's objects only on request. It is a
                                    Description too: all of it, for who reads no tensor and has no torch
    decode_metadata(data, where)    all of it as torch's objects

An ``Inventory`` answers by key:

    inventory.tensor(key)            SavedTensor: sizes, dtype, boxes of the chunks; None for an object
    inventory.place(key, offsets)    the file, the offset and the length of an item

    Columns           over the decoded contents of a file
    TorchInventory    over torch's objects, in ``torch_inventory``
    Renamed           over either: a rank's own keys (per_rank=) under their plain names, there too

A checkpoint may come from a bucket that others write to, and a pickle is a program (pytorch #189308).
``ckptfs.dcp.metadata.metadata_pickle`` decodes it without running it. Here everything is checked once, in
passes over up to a million records that run in C: kinds, dimensions, numbers, and paths that leave the
checkpoint. A key is hashed only after it was checked, and only if not many others have its hash: tuples of
integers can be made to collide.

torch's classes cost a Python call for each object; a checkpoint of 1024 ranks has a million of them and a
rank reads a thousand. They are made when ``metadata`` is called.
"""

from __future__ import annotations

import pathlib
import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ckptfs import _torch
from ckptfs.commit.paths import SHARED
from ckptfs.dcp.metadata.metadata_pickle import (
    BYTES,
    CHUNK,
    INDEX,
    INFO,
    METADATA,
    MOST_DIMS,
    PROPERTIES,
    STORAGE_META,
    TENSOR,
    Chunk,
    Dict,
    FileRange,
    Index,
    NotAllowedError,
    Object,
    PathOf,
    SetOf,
    SetOfList,
    TorchClass,
    decode,
)
from ckptfs.dcp.metadata.pickle_scan import check_collisions
from ckptfs.dcp.metadata.torch_names import TORCH, Dtype, MemoryFormat, TensorLayout
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.errors import ManifestError, StateError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

__all__ = [
    "Box",
    "Description",
    "FileRange",
    "Inventory",
    "MetadataColumns",
    "Places",
    "SavedTensor",
    "TensorDescription",
    "decode_metadata",
    "nowhere",
    "read_inventory",
    "refuse_extensions",
    "stays_inside",
]

Box = tuple[Sequence[int], Sequence[int]]  # offsets in the tensor, sizes


class SavedTensor(NamedTuple):
    """A tensor as it was saved.

    ``chunks`` are opaque; ``box`` returns the position of one of them in the tensor.
    """

    sizes: Sequence[int]
    dtype: torch.dtype
    chunks: Sequence[Any]
    box_of: Callable[[Any], Box]

    def box(self, number: int) -> Box:
        """Return the offsets and sizes of one chunk."""
        return self.box_of(self.chunks[number])


class Inventory(Protocol):
    """What a load needs to know of a checkpoint's metadata. Read only; one thread."""

    @property
    def keys(self) -> Collection[str]:
        """All saved keys, in torch's order; ``in`` is quick."""

    def tensor(self, key: str) -> SavedTensor | None:
        """Return the tensor under a saved key; None for an object."""

    def place(self, key: str, offsets: Sequence[int] | None) -> FileRange:
        """Return the place of the chunk that begins at ``offsets``, or of an object (None).

        ManifestError: it has no place. StateError: it has a form that only another reader knows.
        """

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """Return the number of the chunk that begins there, if it is known: a hint, to be checked."""

    def metadata(self) -> Metadata:
        """Return all of it as torch's objects, which are made now."""


class TensorDescription(NamedTuple):
    """What is known of a tensor without torch; ``boxes`` are those of its chunks."""

    dtype: Dtype
    sizes: Sequence[int]
    boxes: Sequence[Box]


# By key and offsets; None of an object.
Places = Mapping[tuple[str, tuple[int, ...] | None], FileRange]


class Description(Protocol):
    """All of a checkpoint's metadata, for who reads no tensor and needs no torch."""

    @property
    def keys(self) -> Collection[str]:
        """All saved keys."""

    @property
    def paths(self) -> Mapping[str, Any]:
        """The place in the nested state dict of each key; empty if that is not known."""

    @property
    def save_id(self) -> Any:
        """The id of the save that it names; None if it names none."""

    def describe(self, key: str) -> TensorDescription | None:
        """Return the tensor under a saved key; None for an object."""

    def places(self) -> Places:
        """Return the places of all items, also of those that only another reader can read."""

    def metadata(self) -> Metadata:
        """Return all of it as torch's objects, which are made now."""


def nowhere(key: str) -> ManifestError:
    """Return the error for an item without a place."""
    return ManifestError(
        f".metadata gives no place for {key!r}",
        hint="it was saved incompletely; load another checkpoint",
    )


def refuse_extensions(info: Any, key: str) -> None:
    """Raise StateError for an item that was written through torch's stream extensions."""
    if getattr(info, "transform_descriptors", None):
        raise StateError(
            f"{key!r} was written through stream extensions {info.transform_descriptors}",
            hint="load it with the storage reader that knows them",
        )


_FIRST = itemgetter(0)
_SECOND = itemgetter(1)
# A NamedTuple's own __new__ is a Python function, and a load makes three of them for a tensor.
_new = tuple.__new__

_FIELDS_2_13 = 5
_KINDS = 1000  # kinds of tensors in one checkpoint: dtypes, layouts, requires_grad
_DEPTH = 50  # of the values that a planner may have put into planner_data


def read_inventory(data: bytes, where: object, shared: Collection[str] = ()) -> MetadataColumns:
    """Read the metadata in ``data``, executing nothing, in time and memory of its length.

    Args:
        data: The contents of ``.metadata``.
        where: Its URI, for errors.
        shared: What the manifest lists below ``_data/`` of the run. For stock readers such files have absolute
            paths; here they get the manifest's paths, which are right even if the run was moved.

    Returns:
        The inventory.

    Raises:
        ManifestError: It is anything but the ``.metadata`` of DCP, and names ``where``: a class outside the
            list (named), a truncated or foreign pickle, a path that leaves the checkpoint.
    """
    try:
        with gc_paused():
            return MetadataColumns(data, where, shared)
    except ManifestError:
        raise
    except NotAllowedError as error:
        raise ManifestError(
            f".metadata asks for {error}, which no DCP metadata needs: not executed",
            uri=where,
            hint="the file was tampered with, or written by a custom planner; "
            "torch.distributed.checkpoint would execute it",
        ) from error
    except Exception as error:
        # Hostile bytes can cause any error: KeyError, IndexError, OverflowError, AttributeError ...
        raise ManifestError(
            f"damaged .metadata: {type(error).__name__}: {error}",
            uri=where,
            hint="restore the file, or load another checkpoint",
        ) from error


def decode_metadata(data: bytes, where: object, shared: Collection[str] = ()) -> Metadata:
    """Return what ``read_inventory`` reads as torch's objects."""
    return read_inventory(data, where, shared).metadata()


class _Tensor:
    """The metadata of one tensor; its ``chunks`` are Chunk tuples."""

    __slots__ = ("chunks", "properties", "size")

    def __init__(self, properties: tuple[Any, ...], size: Any, chunks: list[Chunk]) -> None:
        self.properties = properties
        self.size = size
        self.chunks = chunks


class MetadataColumns:
    """Metadata as it was decoded and checked."""

    def __init__(self, data: bytes, where: object, shared: Collection[str]) -> None:
        """Decode and check. Arguments are those of ``read_inventory``; any error if it is damaged."""
        self._where = where
        root = decode(data)
        if type(root) is not Object or root.kind is not METADATA:
            raise ManifestError(
                f".metadata holds a {_kind_of(root)}, not the metadata of a checkpoint", uri=where
            )
        self._fields = _fields(root)
        entries, items = self._fields.get("state_dict_metadata"), self._fields.get("storage_data")
        _need(type(entries) is Dict, "no state_dict_metadata")
        if type(items) is not Dict:
            raise ManifestError(".metadata has no storage_data", uri=where)
        self._budget = len(data)
        self._transforms: dict[int, Any] = {}
        self._entries = self._checked_entries(cast("Dict", entries))
        self._indexes, self._infos = self._checked_items(items)
        self._renamed = self._checked_paths(shared)
        self._places: dict[tuple[str, Any], int] | None = None
        self._metadata: Metadata | None = None
        # All else that a planner wrote is checked now; what needs torch is made of it on request.
        self._others: dict[str, Any] = {}
        self._torch_fields: list[str] = []
        plain = _PlainValues(len(data))
        for name, value in self._fields.items():
            if name not in ("state_dict_metadata", "storage_data"):
                self._others[name] = plain.of(value)
                if plain.has_torch:
                    self._torch_fields.append(name)
                    plain.has_torch = False
        self._plain = _PlainValues(len(data), makes_torch=True)

    # -- as an Inventory

    @property
    def keys(self) -> Collection[str]:
        """As ``Inventory.keys``."""
        return self._entries.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """As ``Inventory.tensor``."""
        entry = self._entries[key]
        if entry is None:
            return None
        return _new(SavedTensor, (entry.size, TORCH[entry.properties[0]], entry.chunks, _box_of))

    def place(self, key: str, offsets: Sequence[int] | None) -> Any:
        """As ``Inventory.place``."""
        number = self._found_places().get((key, offsets))
        if number is None:
            raise nowhere(key)
        if number in self._transforms:
            refuse_extensions(self._info(number), key)
        path, offset, length = self._infos[number]
        return _new(FileRange, (self._renamed.get(path, path), offset, length))

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """As ``Inventory.number``."""
        number = self._found_places().get((key, offsets))
        return None if number is None else cast("int | None", self._indexes[number].number)

    def metadata(self) -> Metadata:
        """As ``Inventory.metadata``."""
        if self._metadata is None:
            with gc_paused():
                self._metadata = self._made()
        return self._metadata

    # -- as a Description

    @property
    def paths(self) -> Mapping[str, Any]:
        """As ``Description.paths``."""
        found = self._others.get("planner_data")
        return found if isinstance(found, dict) else {}

    @property
    def save_id(self) -> Any:
        """As ``Description.save_id``."""
        named = self._others.get("storage_meta")
        return named.get("save_id") if isinstance(named, _StorageFields) else None

    def describe(self, key: str) -> TensorDescription | None:
        """As ``Description.describe``."""
        entry = self._entries[key]
        if entry is None:
            return None
        return TensorDescription(entry.properties[0], entry.size, entry.chunks)

    def places(self) -> Places:
        """As ``Description.places``."""
        found: dict[tuple[str, Any], FileRange] = {}
        for at, number in self._found_places().items():
            path, offset, length = self._infos[number]
            found[at] = FileRange(self._renamed.get(path, path), offset, length)
        return found

    def _found_places(self) -> dict[tuple[str, Any], int]:
        if self._places is None:
            found = map(itemgetter(0, 1), self._indexes)
            self._places = dict(zip(found, range(len(self._indexes)), strict=True))
        return self._places

    # -- checks: every line is one pass in C over up to a million records

    def _checked_entries(self, flat: Dict) -> dict[str, _Tensor | None]:
        keys, values = flat[::2], flat[1::2]
        _need(_types(keys) <= {str}, "it has a key that is not a string")
        entries = {key: self._entry(key, value) for key, value in zip(keys, values, strict=True)}
        tensors = [entry for entry in entries.values() if entry is not None]
        lists = [*map(attrgetter("chunks"), tensors)]
        # One list of many chunks that many tensors share would be visited for each of them.
        _need(sum(map(len, lists)) <= self._budget, "it lists more chunks than it has bytes")
        if _types(chain.from_iterable(lists)) - {Chunk}:
            for tensor in tensors:
                tensor.chunks = [*map(_chunk_of, tensor.chunks)]
            lists = [*map(attrgetter("chunks"), tensors)]
        sizes = [*map(attrgetter("size"), tensors)]
        offsets = [*map(_FIRST, chain.from_iterable(lists))]
        lengths = [*map(_SECOND, chain.from_iterable(lists))]
        _check_sizes([*sizes, *offsets, *lengths])
        dims = [*map(len, offsets)]
        given = [*chain.from_iterable(map(repeat, map(len, sizes), map(len, lists)))]
        if dims != given or dims != [*map(len, lengths)]:
            raise self._not_described(entries)
        check_collisions({id(one): one for one in offsets}.values())
        states = {id(one): one for one in map(attrgetter("properties"), tensors)}.values()
        _need(
            all(map(_is_flat_state, states)),
            "it describes the properties of a tensor by something else",
        )
        kinds = {*states}
        _need(len(kinds) <= _KINDS, "it describes too many kinds of tensors")
        _need(
            all(map(_is_accepted, kinds)),
            "it has properties of a tensor that torch does not accept",
        )
        return entries

    def _entry(self, key: str, value: Any) -> _Tensor | None:
        kind = value.kind if type(value) is Object else None
        if kind is BYTES:
            return None
        if kind is TENSOR:
            state = value.state
            if type(state) is Dict and state[::2] == _TENSOR_FIELDS:
                _, properties, _, size, _, chunks = state
            else:
                properties, size, chunks = map(_fields(value).get, _TENSOR_FIELDS)
            if type(properties) is Object and properties.kind is PROPERTIES:
                state = properties.state
                if type(state) is tuple and type(chunks) is list and state:
                    return _Tensor(state, size, chunks)
        raise self._not_a_kind(key, value)

    def _not_a_kind(self, key: str, value: object) -> ManifestError:
        return ManifestError(
            f".metadata describes {_short(key)} by a {_kind_of(value)}", uri=self._where
        )

    def _not_described(self, entries: Mapping[str, _Tensor | None]) -> ManifestError:
        for key, tensor in entries.items():
            if tensor is not None:
                dims = len(tensor.size)
                if any(len(o) != dims or len(s) != dims for o, s in tensor.chunks):
                    return self._not_a_kind(key, Object(TENSOR))
        raise AssertionError("one of them differs")

    def _checked_items(self, flat: Dict) -> tuple[list[Index], list[FileRange]]:
        indexes, infos = flat[::2], flat[1::2]
        if _types(indexes) - {Index} or _types(infos) - {FileRange}:
            for number, (index, info) in enumerate(zip(indexes, infos, strict=True)):
                indexes[number], infos[number] = self._item(number, index, info)
        _need(
            _types(map(_FIRST, indexes)) <= {str}, "it has an index with a key that is not a string"
        )
        offsets = [*map(_SECOND, indexes)]
        _check_sizes([offset for offset in offsets if offset is not None])
        _need(
            _types(map(itemgetter(2), indexes)) <= {int, type(None)},
            "it has an index hint that is not a number",
        )
        check_collisions(map(itemgetter(0, 1), indexes))
        _need(_types(map(_FIRST, infos)) <= {str}, "it has a path that is not a string")
        numbers = [*map(_SECOND, infos), *map(itemgetter(2), infos)]
        _need(_types(numbers) <= {int}, "it has a byte range that is not made of integers")
        if min(numbers, default=0) < 0:
            path = next(path for path, offset, length in infos if min(offset, length) < 0)
            raise ManifestError(
                f".metadata has a negative range in {_short(path)}", uri=self._where
            )
        return indexes, infos

    def _item(self, number: int, index: Any, info: Any) -> tuple[Index, FileRange]:
        made = index if type(index) is Index else _index_of(index)
        place = info if type(info) is FileRange else None
        if place is None and made is not None and type(info) is Object and info.kind is INFO:
            fields = _fields(info)
            place = FileRange(*(fields.get(name) for name in ("relative_path", "offset", "length")))
            if fields.get("transform_descriptors"):
                self._transforms[number] = fields["transform_descriptors"]
        if made is None or place is None:
            shown = made.fqn if made is not None else index
            raise ManifestError(
                f".metadata locates {_short(shown)} by a {_kind_of(info)}",
                uri=self._where,
                hint="it was written by another storage writer; load it with its own reader",
            )
        return made, place

    def _checked_paths(self, shared: Collection[str]) -> dict[str, str]:
        """Return the paths that differ in the manifest; refuse those that leave the checkpoint."""
        renamed: dict[str, str] = {}
        for path in set(map(_FIRST, self._infos)):
            root, found, below = path.rpartition(f"/{SHARED}/")
            if found and root.startswith("/") and below in shared:
                # The root in the path is ignored: the run may have been copied to another bucket.
                renamed[path] = below
            elif not stays_inside(path):
                raise ManifestError(
                    f"path {_short(path)} in .metadata leaves the checkpoint", uri=self._where
                )
        return renamed

    # -- torch's objects

    def _made(self) -> Metadata:
        import torch
        from torch.distributed.checkpoint import metadata as classes

        entries: dict[str, Any] = {}
        for key, tensor in self._entries.items():
            if tensor is None:
                entries[key] = classes.BytesStorageMetadata()
                continue
            chunks = [
                classes.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes in tensor.chunks
            ]
            properties, size = _properties_of(tensor.properties), torch.Size(tensor.size)
            entries[key] = classes.TensorStorageMetadata(properties, size, chunks)
        items = {
            classes.MetadataIndex(*index): self._info(number)
            for number, index in enumerate(self._indexes)
        }
        made = classes.Metadata(entries, storage_data=items)
        vars(made).update(self._others)
        for name in self._torch_fields:
            vars(made)[name] = self._plain.of(self._fields[name])
        return made

    def _info(self, number: int) -> Any:
        path, offset, length = self._infos[number]
        made = _torch.storage_info(self._renamed.get(path, path), offset, length)
        if number in self._transforms:
            made.transform_descriptors = self._plain.of(self._transforms[number])
        return made


_TENSOR_FIELDS = ["properties", "size", "chunks"]


def _fields(made: Object) -> dict[str, Any]:
    """Return the state of an object as a dict; ValueError if it has none."""
    state = made.state
    if type(state) is not Dict or _types(names := state[::2]) - {str}:
        raise ValueError(f"it has a {made.kind.name} without fields")
    return dict(zip(names, state[1::2], strict=True))


def _chunk_of(value: Any) -> Chunk:
    if type(value) is Chunk:
        return value
    if type(value) is not Object or value.kind is not CHUNK:
        raise ValueError(f"it describes a chunk by a {_kind_of(value)}")
    fields = _fields(value)
    return Chunk(fields.get("offsets"), fields.get("sizes"))


def _index_of(value: Any) -> Index | None:
    if type(value) is not Object or value.kind is not INDEX:
        return None
    fields = _fields(value)
    return Index(fields.get("fqn"), fields.get("offset"), fields.get("index"))


def _is_flat_state(state: tuple[Any, ...]) -> bool:
    """Return whether it is a state of TensorProperties: quick to hash, and the dtype first."""
    plain = (Dtype, TensorLayout, bool, type(None), MemoryFormat)
    return (
        1 <= len(state) <= _FIELDS_2_13 + 1
        and type(state[0]) is Dtype
        and all(isinstance(value, plain) for value in state[:_FIELDS_2_13])
        # What torch 2.15 appended: a value that no reader here uses.
        and all(_is_short(value) for value in state[_FIELDS_2_13:])
    )


def _is_accepted(state: tuple[Any, ...]) -> bool:
    """Return whether torch takes a flat state: all fields, and the fourth a memory format."""
    return len(state) >= _FIELDS_2_13 and type(state[3]) is MemoryFormat


def _is_short(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= MOST_DIMS and _types(value) <= _ATOMS
    return type(value) in _ATOMS


def _properties_of(state: tuple[Any, ...]) -> TensorProperties:
    """Make properties from the state of any version."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    made = TensorProperties.__new__(TensorProperties)
    state = tuple([TORCH[one] if type(one) in _VALUES else one for one in state])
    try:
        made.__setstate__(state)
    except ValueError:
        # torch 2.15's six fields in an older torch: the new one comes last.
        made.__setstate__(state[:_FIELDS_2_13])
    return made


def _check_sizes(sizes: Collection[Any]) -> None:
    _need(_types(sizes) <= {tuple}, "it has a size or an offset that is not a tuple")
    _need(
        max(map(len, sizes), default=0) <= MOST_DIMS,
        f"it has a tensor with more than {MOST_DIMS} dimensions",
    )
    _need(
        _types(chain.from_iterable(sizes)) <= {int},
        "it has a size or an offset that is not made of integers",
    )
    _need(min(chain.from_iterable(sizes), default=0) >= 0, "it has a negative size or offset")


class _StorageFields(dict[str, Any]):
    """The fields of a StorageMeta."""

    __slots__ = ()


class _PlainValues:
    """Converts what a planner put into ``.metadata`` to plain objects.

    It makes at most as many values as the file has bytes. ``has_torch`` becomes true at a value that torch has
    a class for: such values are made only with ``makes_torch``, and otherwise only checked.
    """

    def __init__(self, budget: int, *, makes_torch: bool = False) -> None:
        self._left = budget
        self._makes_torch = makes_torch
        self.has_torch = False

    def of(self, value: Any, depth: int = 0) -> Any:
        """Convert a value; ValueError if it repeats more than the file holds or is nested too deep."""
        kind = type(value)
        if kind in (str, bytes, bytearray):
            return value
        self._spend(1)
        if kind in _ATOMS:
            return value
        if kind not in _CONTAINERS:
            # A pickle may name functions, for example, but they are not values that are saved.
            _need(kind in _VALUES, f"it has a {_kind_of(value)} where none is allowed")
            self.has_torch = True
            return TORCH[value] if self._makes_torch else value
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")
        if kind is tuple:
            if _types(value) <= {str, int}:  # the path of a key, the usual case
                self._spend(len(value))
                return value
            return tuple([self.of(one, depth + 1) for one in value])
        if kind is list:
            return [self.of(one, depth + 1) for one in value]
        if kind is Dict:
            keys = value[::2]
            if _types(keys) - {str}:
                keys = [self._key(one) for one in keys]
                check_collisions(keys)
            self._spend(len(keys))
            values = value[1::2]
            if _types(values) == {tuple} and _types(chain.from_iterable(values)) <= {str, int}:
                self._spend(sum(map(len, values)))  # the paths of keys, the usual case
            else:
                values = [self.of(one, depth + 1) for one in values]
            return dict(zip(keys, values, strict=True))
        if kind is PathOf:
            self._spend(sum(map(len, value.parts)))
            return _FLAVOURS[value.kind](*value.parts)
        if isinstance(value, SetOf):
            items = [self._key(one) for one in getattr(value, "items", value)]
            check_collisions(items)
            return set(items)
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        self.has_torch = True
        if type(value) is Object and value.kind is PROPERTIES:
            state = value.state
            _need(type(state) is tuple and _is_flat_state(state), "no properties")
            _need(_is_accepted(state), "it has properties of a tensor that torch does not accept")
            return _properties_of(state) if self._makes_torch else value
        if type(value) is Object and value.kind is STORAGE_META:
            fields = {name: self.of(one, depth + 1) for name, one in _fields(value).items()}
            if not self._makes_torch:
                return _StorageFields(fields)
            from torch.distributed.checkpoint.metadata import StorageMeta

            made = StorageMeta()
            vars(made).update(fields)
            return made
        raise ValueError(f"it has a {_kind_of(value)} where none is allowed")

    def _key(self, value: Any) -> Any:
        """Return a key or an element of a set; refuse anything that is slow to hash."""
        if type(value) is tuple:
            _need(len(value) <= MOST_DIMS, "it has a key that is too long")
            _need(_types(value) <= _ATOMS, "it has a nested key")
            self._spend(len(value))
        else:
            _need(type(value) in _ATOMS, f"it has a key that is a {_kind_of(value)}")
            self._spend(1)
        return value

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it repeats more values than the file can hold")


_ATOMS = {str, int, float, bool, bytes, type(None)}
_CONTAINERS = {
    tuple,
    list,
    Dict,
    SetOf,
    SetOfList,
    PathOf,
    Object,
    Chunk,
    Index,
    FileRange,
    TorchClass,
}
_VALUES = {Dtype, TensorLayout, MemoryFormat}
# A checkpoint_id from another system cannot be a concrete path here; it is only displayed.
_FLAVOURS: Mapping[str, Callable[..., pathlib.PurePath]] = {
    "Path": pathlib.PurePath,
    "PurePath": pathlib.PurePath,
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))


def _need(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - an assertion that python -O keeps
    if not is_so:
        raise ValueError(otherwise)


def _box_of(chunk: Any) -> Box:
    return cast("Box", chunk)


def _kind_of(value: object) -> str:
    """Return the name of its kind."""
    if type(value) is Object:
        return value.kind.name
    names = {
        Dict: "dict",
        Index: INDEX.name,
        FileRange: INFO.name,
        Chunk: CHUNK.name,
        Dtype: "dtype",
    }
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    """Return a text, shortened, or else the name of its kind.

    A full repr could be endless: a few lists, each twice in the next, are enough.
    """
    return repr(value[:200]) if isinstance(value, str) else f"a {_kind_of(value)}"


def stays_inside(path: str) -> bool:
    """Return whether a relative path names something below the checkpoint on every storage."""
    clean = posixpath.normpath(path)
    escapes = clean.startswith(("/", "../")) or clean in ("..", ".")
    return bool(path) and not escapes and not any(bad in path for bad in ("://", "\\", "\0"))
