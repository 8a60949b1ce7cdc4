"""What ``.metadata`` says, as a load asks for it: by key, and objects only of what is asked for.

inventory.tensor(key)            SavedTensor: sizes, dtype, boxes of the chunks; None for an object
inventory.place(key, offsets)    the file, the offset and the length of an item

Whole      over torch's objects
Columns    over what was decoded of a file: ckptfs.dcp.decoding
Renamed    over either: a rank's own keys (per_rank=) under their plain names
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckptfs.dcp.metadata_pickle import Place
from ckptfs.dcp.per_rank import renamed_metadata
from ckptfs.dcp.planned import refuse_extensions
from ckptfs.errors import ManifestError

__all__ = [
    "Box",
    "Inventory",
    "Place",
    "Renamed",
    "SavedTensor",
    "Whole",
    "nowhere",
]

Box = tuple[Sequence[int], Sequence[int]]  # offsets in the tensor, sizes


class SavedTensor(NamedTuple):
    """A tensor as it was saved. chunks: opaque; ``box`` tells of one where it lies."""

    sizes: Sequence[int]
    dtype: torch.dtype
    chunks: Sequence[Any]
    box_of: Callable[[Any], Box]

    def box(self, number: int) -> Box:
        """The place of one chunk in the tensor."""
        return self.box_of(self.chunks[number])


class Inventory(Protocol):
    """What a load asks of a checkpoint's metadata. Read only; one thread."""

    @property
    def keys(self) -> Collection[str]:
        """Everything that was saved, in torch's order; ``in`` is quick."""

    def tensor(self, key: str) -> SavedTensor | None:
        """The tensor under a key that is there; None for an object."""

    def place(self, key: str, offsets: Sequence[int] | None) -> Place:
        """Where the chunk that begins at ``offsets`` lies, or the object (None). ManifestError: nowhere.
        StateError: in a form that only another reader knows.
        """

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """Which of the tensor's chunks begins there, if that is known: a hint, to be checked."""

    def metadata(self) -> Metadata:
        """All of it as torch's objects, which are made now."""


class Whole:
    """Metadata that is there as torch's objects."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    @property
    def keys(self) -> Collection[str]:
        """As ``Inventory.keys``."""
        return self._metadata.state_dict_metadata.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """As ``Inventory.tensor``."""
        saved = self._metadata.state_dict_metadata[key]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        dtype: Any = saved.properties.dtype
        return SavedTensor(saved.size, dtype, saved.chunks, _box_of_chunk)

    def place(self, key: str, offsets: Sequence[int] | None) -> Place:
        """As ``Inventory.place``."""
        info: Any = self._metadata.storage_data.get(MetadataIndex(key, offsets))
        if info is None:
            raise nowhere(key)
        refuse_extensions(info, key)
        return Place(info.relative_path, info.offset, info.length)

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """As ``Inventory.number``: the hint of an item is not kept by the place of it."""
        return None

    def metadata(self) -> Metadata:
        """As ``Inventory.metadata``."""
        return self._metadata


class Renamed:
    """Another's metadata with other names for some keys."""

    def __init__(self, inventory: Inventory, names: Mapping[str, str]) -> None:
        """names: as the keys are in ``inventory`` -> as they shall be."""
        self._inventory = inventory
        self._names = names
        self._stored = {new: old for old, new in names.items()}
        self._keys = dict.fromkeys(names.get(key, key) for key in inventory.keys)
        self._metadata: Metadata | None = None

    @property
    def keys(self) -> Collection[str]:
        """As ``Inventory.keys``."""
        return self._keys.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """As ``Inventory.tensor``."""
        return self._inventory.tensor(self._stored.get(key, key))

    def place(self, key: str, offsets: Sequence[int] | None) -> Place:
        """As ``Inventory.place``."""
        return self._inventory.place(self._stored.get(key, key), offsets)

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """As ``Inventory.number``."""
        return self._inventory.number(self._stored.get(key, key), offsets)

    def metadata(self) -> Metadata:
        """As ``Inventory.metadata``."""
        if self._metadata is None:
            self._metadata = renamed_metadata(self._inventory.metadata(), self._names)
        return self._metadata


def _box_of_chunk(chunk: Any) -> Box:
    return chunk.offsets, chunk.sizes


def nowhere(key: str) -> ManifestError:
    """The error for an item without a place."""
    return ManifestError(
        f".metadata does not say where {key!r} lies",
        hint="it was saved incompletely; load another checkpoint",
    )
