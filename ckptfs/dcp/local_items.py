"""One rank's part of a plan, with few calls of Python per tensor: stock's items of stock's flat dict.

    Itemiser().items(flat)   -> the items, and why a value could not be loaded again

Tensors of one shape and kind share what describes them (``TensorWriteData``); of DTensors the geometry
is asked once for each mesh, placement and shape. What is neither a plain tensor nor a DTensor over one
goes to torch's planner, as its author may have taught it a way of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckptfs.dcp.leaves import check_leaf, check_tensor

__all__ = ["Itemiser"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict)
_Known = tuple[TensorWriteData, torch.Size, str | None]


class Itemiser:
    """Makes items, and remembers what tensors have in common. For one plan of one rank."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # key -> why it could not be loaded again
        self._known: dict[object, _Known] = {}
        self._meshes: dict[int, bool] = {}
        self._live = torch.is_grad_enabled()

    def items(self, flat: Mapping[str, Any]) -> list[WriteItem]:
        """The items of all values, in order."""
        found: list[WriteItem] = []
        known, add = self._known, found.append
        for key, value in flat.items():
            if type(value) in _PLAIN:
                kind = (
                    value.shape,
                    value.dtype,
                    value.layout,
                    value.requires_grad,
                    value.is_pinned(),
                    value.is_meta,
                )
                data, offsets, reason = known.get(kind) or self._describe(kind, value)
                if reason is not None:
                    self.reasons[key] = reason
                add(WriteItem(MetadataIndex(key, offsets), WriteItemType.TENSOR, tensor_data=data))
            elif type(value) is DTensor:
                self._distributed(key, value, found)
            else:
                self._other(key, value, found)
        return found

    def _describe(self, kind: object, value: torch.Tensor) -> _Known:
        offsets = torch.Size([0] * value.dim())
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, value.size()),
            TensorProperties.create_from_tensor(value),
            value.size(),
        )
        self._known[kind] = data, offsets, check_tensor(value)
        return self._known[kind]

    def _distributed(self, key: str, value: DTensor, found: list[WriteItem]) -> None:
        mesh = value.device_mesh
        here = self._meshes.get(id(mesh))
        if here is None:
            here = self._meshes[id(mesh)] = mesh.get_coordinate() is not None
        with torch.no_grad():  # a view that autograd follows costs more than all the rest
            local = value.to_local()
        if not here or type(local) is not torch.Tensor:
            self._other(key, value, found)
            return
        grad = value.requires_grad if self._live else local.requires_grad
        kind = (
            (mesh, value.placements, value.shape, local.shape, local.dtype, local.layout),
            (grad, local.is_pinned(), local.is_meta),
        )
        known = self._known.get(kind)
        if known is None:
            [item] = create_default_local_save_plan({key: value}, is_coordinator=False).items
            data = item.tensor_data
            assert data is not None  # noqa: S101 - DTensor's own items have it
            known = self._known[kind] = data, data.chunk.offsets, check_tensor(local)
        data, offsets, reason = known
        if reason is not None:
            self.reasons[key] = reason
        found.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))

    def _other(self, key: str, value: Any, found: list[WriteItem]) -> None:
        if type(value) in _ATOMS:
            mine = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
        else:
            mine = create_default_local_save_plan({key: value}, is_coordinator=False).items
        found += mine
        if not mine:
            return
        if mine[0].type is WriteItemType.BYTE_IO:
            reason = check_leaf(value)
        else:
            reason = check_tensor(_local_of(value))
        if reason is not None:
            self.reasons[key] = reason


def _local_of(value: Any) -> torch.Tensor:
    """The memory behind a sharded tensor on this rank, or the tensor itself."""
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    if hasattr(value, "to_local"):
        local: torch.Tensor = value.to_local()
        return local
    tensor: torch.Tensor = value
    return tensor
