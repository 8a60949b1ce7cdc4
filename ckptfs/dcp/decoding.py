"""``.metadata`` read without trusting it: an unpickler that knows a dozen names and nothing else.

    decode_metadata(data, where)    all of it as torch's objects, checked

A checkpoint may come from a bucket that others write to, and a pickle is a program (pytorch
#189308). Classes outside the list are refused by name before anything is called; so are paths that
leave the checkpoint. What torch 2.15 appends to TensorProperties is read with or without.
``ckptfs.dcp.standins`` reads the same bytes for a load, with the same names.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import pathlib
import pickle
import posixpath
from collections.abc import Callable, Collection
from typing import Any

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
from ckptfs.commit.layout import SHARED
from ckptfs.dcp.planner import gc_paused
from ckptfs.errors import ManifestError

__all__ = ["DCP", "OLD_DCP", "Unpickler", "decode_metadata", "stays_inside"]

DCP = "torch.distributed.checkpoint.metadata"
OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"  # where torch < 2.3 had some

_FIELDS_2_13 = 5


def decode_metadata(data: bytes, where: object, shared: Collection[str] = ()) -> Metadata:
    """The metadata in ``data``, executing nothing.

    shared: what the manifest lists below ``_data/`` of the run. For stock readers such files have
    rooted paths; here they get the manifest's, wherever the run lies now.

    ManifestError naming ``where`` for anything that is not a DCP ``.metadata`` alone: a class
    outside the list (named), a truncated or foreign pickle, a path that leaves the checkpoint.
    """
    try:
        with gc_paused():
            metadata = Unpickler(io.BytesIO(data), where).load()
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


class _Properties(TensorProperties):
    """Stands in for TensorProperties while unpickling: takes the state of any version."""

    def __setstate__(self, state: Any) -> None:
        try:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
        except ValueError:
            # torch 2.15's six fields in an older torch: the new one comes last.
            super().__setstate__(tuple(state)[:_FIELDS_2_13])  # type: ignore[no-untyped-call]
        object.__setattr__(self, "__class__", TensorProperties)


class Unpickler(pickle.Unpickler):
    """Makes objects of a dozen classes; ManifestError for any other, before anything is called."""

    def __init__(self, file: io.BytesIO, where: object) -> None:
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle may use under this name."""
        if (module, name) == ("builtins", "getattr"):
            return self._member
        found = _known(module, name)
        if found is None:
            raise self._not_executed(f"{module}.{name}")
        return found

    def _member(self, kind: Any, name: str) -> Any:
        """What stock torch on Python 3.11.2 writes for an enum's member; of nothing else an attribute."""
        if kind is not _torch.mem_format_encoding():
            raise self._not_executed("builtins.getattr")
        return kind[name]

    def _not_executed(self, what: str) -> ManifestError:
        return ManifestError(
            f".metadata asks for {what}, which no DCP metadata needs: not executed",
            uri=self._where,
            hint="the file was tampered with, or written by a custom planner; "
            "torch.distributed.checkpoint would execute it",
        )

    def persistent_load(self, pid: Any) -> Any:
        """There are none."""
        raise ManifestError(".metadata refers to outside objects", uri=self._where)


def _known(module: str, name: str) -> Any:
    """The object that the pickle may use under this name, or None."""
    if module == "torch":
        value = getattr(torch, name, None) if name.isidentifier() else None
        return value if isinstance(value, torch.dtype) or value is torch.Size else None
    if module.split(".", maxsplit=1)[0] == "pathlib":
        return _paths().get(name)
    return _names().get((module, name))


def _paths() -> dict[str, type[pathlib.PurePath]]:
    # A checkpoint_id of another system cannot be a concrete path here; it is only shown.
    return {
        "Path": pathlib.PurePath,
        "PurePath": pathlib.PurePath,
        "PosixPath": pathlib.PosixPath,
        "PurePosixPath": pathlib.PurePosixPath,
        "WindowsPath": pathlib.PureWindowsPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
    }


def _names() -> dict[tuple[str, str], Callable[..., Any]]:
    properties: dict[str, type] = {"TensorProperties": _Properties}
    own: dict[str, type] = {
        kind.__name__: kind
        for kind in (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorStorageMetadata,
        )
    }
    encodings = {"_MEM_FORMAT_ENCODING": _torch.mem_format_encoding()}
    return {
        **{(DCP, name): kind for name, kind in (own | properties | encodings).items()},
        (OLD_DCP, "TensorProperties"): _Properties,
        (OLD_DCP, "MEM_FORMAT_ENCODING"): _torch.mem_format_encoding(),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _torch.storage_info_type(),
        ("torch.serialization", "_get_layout"): _layout_named,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
    }


def _layout_named(name: str) -> torch.layout:
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.layout):
        raise ValueError(f"{name!r} is no layout")  # noqa: TRY004 - a value of the file, not a type
    return value


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
            raise ManifestError(f".metadata describes {key!r} by a {type(value)}", uri=where)
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, kind):
            raise ManifestError(
                f".metadata locates {index!r} by a {type(info).__name__}",
                uri=where,
                hint="it was written by another storage writer; load it with its own reader",
            )
        path = info.relative_path
        if not isinstance(path, str) or not stays_inside(path):
            raise ManifestError(f"path {path!r} in .metadata leaves the checkpoint", uri=where)
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


def stays_inside(path: str) -> bool:
    """Whether a relative path names something below the checkpoint on every storage."""
    clean = posixpath.normpath(path)
    escapes = clean.startswith(("/", "../")) or clean in ("..", ".")
    return bool(path) and not escapes and not any(bad in path for bad in ("://", "\\", "\0"))
