"""``.metadata`` read without trusting it.

    decode_metadata(data, where)    all of it as torch's objects, checked

A checkpoint may come from a bucket that others write to, and a pickle is a program (pytorch
#189308). ``ckptfs.dcp.unpickler`` knows a dozen names, refuses any other before anything is called,
and keeps what it hands out from being changed; paths that leave the checkpoint are refused here. What
torch 2.15 appends to TensorProperties is read with or without. ``ckptfs.dcp.standins`` reads the same
bytes for a load, with the same names.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckptfs import _torch
from ckptfs.commit.layout import SHARED
from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.unpickler import Unpickler
from ckptfs.errors import ManifestError

__all__ = ["decode_metadata", "stays_inside"]


def decode_metadata(data: bytes, where: object, shared: Collection[str] = ()) -> Metadata:
    """The metadata in ``data``, executing nothing.

    shared: what the manifest lists below ``_data/`` of the run. For stock readers such files have
    rooted paths; here they get the manifest's, wherever the run lies now.

    ManifestError naming ``where`` for anything that is not a DCP ``.metadata`` alone: a class
    outside the list (named), a truncated or foreign pickle, a path that leaves the checkpoint.
    """
    try:
        with gc_paused():
            metadata = Unpickler(data, where).load()
            if shared:
                _unroot(metadata, shared)
            _check(metadata, where)
    except ManifestError:
        raise
    except Exception as error:
        # Hostile bytes raise what they like (KeyError, OverflowError, RecursionError ...), and
        # make objects that lack their fields (AttributeError in the check).
        raise ManifestError(
            f"damaged .metadata: {type(error).__name__}: {error}",
            uri=where,
            hint="restore the file, or load another checkpoint",
        ) from error
    checked: Metadata = metadata
    return checked


def _check(metadata: Any, where: object) -> None:
    """ManifestError unless it has the shape that readers rely on."""
    kind = _torch.storage_info_type()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ManifestError(
            f".metadata holds a {type(metadata).__name__}, not the metadata of a checkpoint",
            uri=where,
        )
    if not isinstance(metadata.storage_data, dict):
        raise ManifestError(".metadata has no storage_data", uri=where)
    for key, value in metadata.state_dict_metadata.items():
        if not isinstance(value, BytesStorageMetadata) and not _is_tensor(value):
            raise ManifestError(f".metadata describes {_shown(key)} by a {type(value)}", uri=where)
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, kind):
            raise ManifestError(
                f".metadata locates {_shown(index)} by a {type(info).__name__}",
                uri=where,
                hint="it was written by another storage writer; load it with its own reader",
            )
        path = info.relative_path
        if not isinstance(path, str) or not stays_inside(path):
            raise ManifestError(
                f"path {_shown(path)} in .metadata leaves the checkpoint", uri=where
            )
        if info.offset < 0 or info.length < 0:
            raise ManifestError(f".metadata has a negative range in {path!r}", uri=where)
    # Metadata from before torch 2.5 lacks fields that today's readers ask for.
    for name in ("planner_data", "storage_meta", "version"):
        if not hasattr(metadata, name):
            setattr(metadata, name, None)


def _unroot(metadata: Metadata, shared: Collection[str]) -> None:
    """Rooted paths of listed files become the manifest's; any other stays as it is, to be refused."""
    for index, info in metadata.storage_data.items():
        root, found, path = info.relative_path.rpartition(f"/{SHARED}/")
        if found and root.startswith("/") and path in shared:
            # Not the root that stands there: the run may have been copied to another bucket.
            metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, TensorStorageMetadata)
        and isinstance(_dtype_of(value.properties), torch.dtype)
        and all(len(c.offsets) == len(c.sizes) == len(value.size) for c in value.chunks)
    )


def _dtype_of(properties: Any) -> Any:
    return properties.dtype  # whatever the file put there


def _shown(value: Any) -> str:
    """Text, or what it is: a few lists, each twice in the next, make a repr without end."""
    told = value.fqn if isinstance(value, MetadataIndex) else value
    return repr(told) if isinstance(told, str) else f"a {type(told).__name__}"


def stays_inside(path: str) -> bool:
    """Whether a relative path names something below the checkpoint on every storage."""
    clean = posixpath.normpath(path)
    escapes = clean.startswith(("/", "../")) or clean in ("..", ".")
    return bool(path) and not escapes and not any(bad in path for bad in ("://", "\\", "\0"))
