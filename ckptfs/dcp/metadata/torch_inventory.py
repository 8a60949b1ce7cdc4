"""Inventories over metadata that exists already: torch's objects, or another inventory with other names.

    TorchInventory(metadata)        what torch's objects say, by key
    Renamed(inventory, names)       a rank's own keys under their plain names

What reads the bytes of a ``.metadata`` is ``ckptfs.dcp.metadata.metadata_reader``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptfs.dcp.metadata.metadata_reader import (
    Box,
    FileRange,
    Inventory,
    Places,
    SavedTensor,
    TensorDescription,
    nowhere,
    refuse_extensions,
)
from ckptfs.dcp.metadata.torch_names import dtype_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["Renamed", "TorchInventory"]


class TorchInventory:
    """Metadata that exists as torch's objects."""

    def __init__(self, metadata: Metadata) -> None:
        from torch.distributed.checkpoint import metadata as classes

        self._metadata = metadata
        self._classes = classes

    @property
    def keys(self) -> Collection[str]:
        """As ``Inventory.keys``."""
        return self._metadata.state_dict_metadata.keys()

    def tensor(self, key: str) -> SavedTensor | None:
        """As ``Inventory.tensor``."""
        saved = self._metadata.state_dict_metadata[key]
        if not isinstance(saved, self._classes.TensorStorageMetadata):
            return None
        dtype: Any = saved.properties.dtype
        return SavedTensor(saved.size, dtype, saved.chunks, _box_of_chunk)

    def place(self, key: str, offsets: Sequence[int] | None) -> FileRange:
        """As ``Inventory.place``."""
        info: Any = self._metadata.storage_data.get(self._classes.MetadataIndex(key, offsets))
        if info is None:
            raise nowhere(key)
        refuse_extensions(info, key)
        return FileRange(info.relative_path, info.offset, info.length)

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """Return None: a look-up in torch's metadata does not give an item's hint."""
        return None

    def metadata(self) -> Metadata:
        """As ``Inventory.metadata``."""
        return self._metadata

    @property
    def paths(self) -> Mapping[str, Any]:
        """As ``Description.paths``."""
        found = self._metadata.planner_data
        return found if isinstance(found, dict) else {}

    @property
    def save_id(self) -> Any:
        """As ``Description.save_id``."""
        return getattr(self._metadata.storage_meta, "save_id", None)

    def describe(self, key: str) -> TensorDescription | None:
        """As ``Description.describe``."""
        saved = self.tensor(key)
        if saved is None:
            return None
        boxes = [(tuple(one.offsets), tuple(one.sizes)) for one in saved.chunks]
        return TensorDescription(dtype_of(saved.dtype), tuple(saved.sizes), boxes)

    def places(self) -> Places:
        """As ``Description.places``."""
        return {
            (index.fqn, None if index.offset is None else tuple(index.offset)): FileRange(
                info.relative_path, info.offset, info.length
            )
            for index, info in self._metadata.storage_data.items()
        }


class Renamed:
    """Another inventory with new names for some keys."""

    def __init__(self, inventory: Inventory, names: Mapping[str, str]) -> None:
        """Rename keys; ``names``: the key in ``inventory`` -> the new key."""
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

    def place(self, key: str, offsets: Sequence[int] | None) -> FileRange:
        """As ``Inventory.place``."""
        return self._inventory.place(self._stored.get(key, key), offsets)

    def number(self, key: str, offsets: Sequence[int]) -> int | None:
        """As ``Inventory.number``."""
        return self._inventory.number(self._stored.get(key, key), offsets)

    def metadata(self) -> Metadata:
        """As ``Inventory.metadata``."""
        if self._metadata is None:
            from ckptfs.dcp.planning.state_dicts import renamed_metadata

            self._metadata = renamed_metadata(self._inventory.metadata(), self._names)
        return self._metadata


def _box_of_chunk(chunk: Any) -> Box:
    return chunk.offsets, chunk.sizes
