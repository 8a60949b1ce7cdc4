"""``.metadata`` for a load: torch's classes are not made of it, their states are kept in columns.

    read_inventory(data, where)
        regular      C unpickler, stand-ins for torch's classes, columns checked     Columns
        anything else     decode_metadata: every object, every check, every error    Whole

torch's classes cost a Python call for each object that is unpickled; a checkpoint of 1024 ranks has
a million of them and a rank reads a thousand. A stand-in is a list that keeps the state of its object
and runs no Python. The stand-ins are believed only where everything has exactly the form that torch
writes today; whatever else there is goes the long way, which also tells what is wrong. Nothing more
is trusted than there: the same few names, and none of them does anything or can be changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.layout import SHARED
from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.decoding import decode_metadata, stays_inside
from ckptfs.dcp.inventory import Box, Inventory, Place, SavedTensor, Whole, nowhere
from ckptfs.dcp.unpickler import DCP, FILESYSTEM, OLD_DCP, SavedProperties, Sealed, Unpickler

__all__ = ["Columns", "read_inventory"]

_FIRST = itemgetter(0)
# A NamedTuple's own __new__ is a Python function, and a load makes three of them for a tensor.
_new = tuple.__new__


class Columns:
    """Metadata of the usual form, as the states that the stand-ins kept."""

    def __init__(
        self,
        entries: Mapping[str, Any],
        items: Mapping[Any, Any],
        renamed: Mapping[str, str],
        whole: Callable[[], Metadata],
    ) -> None:
        self._entries = entries
        self._items = items
        self._renamed = renamed
        self._whole = whole
        self._metadata: Metadata | None = None
        self._places: dict[tuple[str, Any], tuple[dict[str, Any], dict[str, Any]]] | None = None

    @property
    def keys(self) -> Collection[str]:
        """As ``Inventory.keys``."""
        return self._entries.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """As ``Inventory.tensor``."""
        entry = self._entries[key]
        if type(entry) is not _Tensor:
            return None
        state = entry[0]
        dtype = state["properties"][0][0]
        return _new(SavedTensor, (state["size"], dtype, state["chunks"], _box_of_state))

    def place(self, key: str, offsets: Sequence[int] | None) -> Place:
        """As ``Inventory.place``."""
        places = self._places or self._found_places()
        found = places.get((key, offsets))
        if found is None:
            raise nowhere(key)
        info = found[1]
        path = info["relative_path"]
        return _new(Place, (self._renamed.get(path, path), info["offset"], info["length"]))

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """As ``Inventory.number``."""
        found = (self._places or self._found_places()).get((key, offsets))
        return None if found is None else found[0].get("index")

    def metadata(self) -> Metadata:
        """As ``Inventory.metadata``."""
        if self._metadata is None:
            self._metadata = self._whole()
        return self._metadata

    def _found_places(self) -> dict[tuple[str, Any], tuple[dict[str, Any], dict[str, Any]]]:
        states = zip(map(_FIRST, self._items), map(_FIRST, self._items.values()), strict=True)
        self._places = {(one["fqn"], one.get("offset")): (one, at) for one, at in states}
        return self._places


def read_inventory(data: bytes, where: object, shared: Collection[str] = ()) -> Inventory:
    """The metadata in ``data``, executing nothing. Arguments and errors are ``decode_metadata``'s."""
    with gc_paused():
        try:
            return _columns(data, where, shared)
        except Exception:  # noqa: BLE001 - whatever it is, the long way tells it or does without
            return Whole(decode_metadata(data, where, shared))


_KINDS = 1000  # of tensors in one checkpoint: dtypes, layouts, and whether they want gradients


class _State(list[Any], metaclass=Sealed):
    """Keeps the state of an object of torch's; equal to nothing else, so that no comparison runs.

    The classes outlive the decoding: they are sealed, and ``list.append`` without a list fails.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class _Metadata(_State):
    __slots__ = ()


class _Tensor(_State):
    __slots__ = ()


class _Object(_State):
    __slots__ = ()


class _Chunk(_State):
    __slots__ = ()


class _Index(_State):
    __slots__ = ()


class _Place(_State):
    __slots__ = ()


class _Properties(_State):
    # Its state is a tuple, of which the dtype comes first in every version.
    __slots__ = ()


_STAND_INS: Mapping[tuple[str, str], Callable[..., Any]] = {
    (DCP, "Metadata"): _Metadata,
    (DCP, "TensorStorageMetadata"): _Tensor,
    (DCP, "BytesStorageMetadata"): _Object,
    (DCP, "ChunkStorageMetadata"): _Chunk,
    (DCP, "MetadataIndex"): _Index,
    (DCP, "TensorProperties"): _Properties,
    (OLD_DCP, "TensorProperties"): _Properties,
    (FILESYSTEM, "_StorageInfo"): _Place,
    # A tuple as it is, and of nothing else one: ``tuple`` copies a list as often as it is told.
    ("torch", "Size"): ().__add__,
}


class _StandIns(Unpickler):
    """Knows the names that ``Unpickler`` knows."""

    def find_class(self, module: str, name: str) -> Any:
        return _STAND_INS.get((module, name)) or super().find_class(module, name)


def _columns(data: bytes, where: object, shared: Collection[str]) -> Columns:
    """Anything is raised where the metadata has not the usual form."""
    whole = _StandIns(data, where).load()
    state = whole[0]
    entries, items = state["state_dict_metadata"], state["storage_data"]
    _need({type(whole)} == {_Metadata} and {type(entries), type(items)} == {dict})
    _check_entries(entries)
    paths = _check_items(items)
    return Columns(
        entries,
        items,
        {path: clean for path in paths if (clean := _listed(path, shared)) != path},
        lambda: decode_metadata(data, where, shared),
    )


# Every line of these is one pass in C over all of a million: no Python runs for each.


def _check_entries(entries: Mapping[Any, Any]) -> None:
    _need(_types(entries) <= {str} and _types(entries.values()) <= {_Tensor, _Object})
    tensors = [one for one in entries.values() if type(one) is _Tensor]
    _need(_once(tensors))
    states = [*map(_FIRST, tensors)]
    _need(_types(states) <= {dict})
    sizes = [*map(itemgetter("size"), states)]
    lists = [*map(itemgetter("chunks"), states)]
    _need(_types(lists) <= {list} and _types(chain.from_iterable(lists)) <= {_Chunk})
    chunks = [*map(_FIRST, chain.from_iterable(lists))]
    _need(_types(chunks) <= {dict})
    offsets, lengths = [*map(itemgetter("offsets"), chunks)], [*map(itemgetter("sizes"), chunks)]
    _need(_types(chain(sizes, offsets, lengths)) <= {tuple})
    _need(_types(chain.from_iterable(chain(sizes, offsets, lengths))) <= {int})
    dims = [*map(len, offsets)]
    _need(dims == [*map(len, lengths)])
    _need(dims == [*chain.from_iterable(map(repeat, map(len, sizes), map(len, lists)))])
    properties = [*map(itemgetter("properties"), states)]
    _need(
        _types(properties) <= {_Properties} and _once(chain(properties, chain.from_iterable(lists)))
    )
    inner = [*map(_FIRST, properties)]
    _need(_types(inner) <= {tuple} and _types(map(_FIRST, inner)) <= {torch.dtype})
    kinds = {*inner}
    _need(len(kinds) <= _KINDS)
    for state in kinds:  # what torch does not take is not believed here either
        SavedProperties.__new__(SavedProperties).__setstate__(state)


def _check_items(items: Mapping[Any, Any]) -> set[str]:
    """All paths; checked, and so is every range."""
    _need(_types(items) <= {_Index} and _types(items.values()) <= {_Place})
    _need(_once(chain(items, items.values())))
    indexes, infos = [*map(_FIRST, items)], [*map(_FIRST, items.values())]
    _need(_types(indexes) <= {dict} and _types(infos) <= {dict})
    _need(_types(map(itemgetter("fqn"), indexes)) <= {str})
    _need(_types(map(methodcaller("get", "offset"), indexes)) <= {tuple, type(None)})
    _need(_types(map(methodcaller("get", "index"), indexes)) <= {int, type(None)})
    _need(not any(map(methodcaller("get", "transform_descriptors"), infos)))
    paths = set(map(itemgetter("relative_path"), infos))
    numbers = [*map(itemgetter("offset"), infos), *map(itemgetter("length"), infos)]
    _need(_types(numbers) <= {int} and min(numbers, default=0) >= 0)
    _need(_types(paths) <= {str})
    return paths


def _listed(path: str, shared: Collection[str]) -> str:
    """The manifest's path; an error where it is none that may be followed."""
    root, found, below = path.rpartition(f"/{SHARED}/")
    if found and root.startswith("/") and below in shared:
        return below
    _need(stays_inside(path))
    return path


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))


def _once(objects: Iterable[_State]) -> bool:
    """Whether each was given its state once: of two torch's object would have the last."""
    return set(map(len, objects)) <= {1}


def _need(is_so: bool) -> None:  # noqa: FBT001 - an assertion that python -O keeps
    if not is_so:
        raise ValueError("not the usual form")


def _box_of_state(chunk: Any) -> Box:
    state = chunk[0]
    return state["offsets"], state["sizes"]
