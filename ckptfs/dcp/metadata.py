"""``.metadata``: written as torch 2.13 writes it, read without trusting it.

    encode_metadata(metadata)       pickle, protocol 4; unpickles equal in torch 2.6 to 2.15
    decode_metadata(data, where)    decoded, not unpickled: ckptfs.dcp.decoding

Versions differ in one place: torch 2.15 appends a field to TensorProperties, which 2.13 cannot
unpack. It is written without, and read with or without.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

from ckptfs import _torch
from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.decoding import decode_metadata

__all__ = ["DCP_VERSION", "MetadataPickler", "decode_metadata", "describe", "encode_metadata"]

# What torch 2.13 writes; older versions write None and read it.
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
    """The planner's metadata completed as stock's writer completes it. Coordinator only.

    ``storage_data``: item -> (path relative to the checkpoint, offset, length), bytes.
    """
    metadata.storage_data = {
        index: _torch.storage_info(path, offset, length)
        for index, (path, offset, length) in storage_data.items()
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    metadata.version = DCP_VERSION
    return metadata


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``."""
    buffer = io.BytesIO()
    with gc_paused():
        MetadataPickler(buffer, _PROTOCOL).dump(metadata)
    return buffer.getvalue()


class MetadataPickler(pickle.Pickler):
    """Writes TensorProperties as torch 2.13 does, under every torch, and enums alike under every
    Python: 3.11.2 for one writes them as ``getattr``, 3.11.7 does not.
    """

    def reducer_override(self, obj: Any) -> Any:
        """As ``pickle.Pickler``."""
        if type(obj) is _torch.mem_format_encoding():
            return type(obj), (obj.value,)
        if type(obj) is TensorProperties:
            state = self.state_of(obj)
            new_object = vars(copyreg)["__newobj__"]  # what pickle itself uses; typeshed hides it
            return new_object, (TensorProperties,), state
        return NotImplemented

    @staticmethod
    def state_of(properties: TensorProperties) -> tuple[Any, ...]:
        """What is written of them."""
        return tuple(properties.__getstate__()[:_FIELDS_2_13])
