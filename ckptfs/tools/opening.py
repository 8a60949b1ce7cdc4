"""Open one checkpoint of any format in one process, for inspect, verify and export.

    with open_contents(uri, options) as opened:
        opened.contents   opened.format   opened.found (None for a single file)

    with located(uri, options) as here:     here.storage  here.name  here.found  here.domain
    with file_at(uri, options) as file:     one file by its URI; None for a directory

Read-only and local: it needs only read permission and talks to no other rank.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckptfs.commit.catalog.catalog import (
    LocatedCheckpoint,
    is_run,
    live_of,
    looking_at,
    run_error,
    sealed_metadata,
)
from ckptfs.commit.catalog.locate import locate_directory, reading_session
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.operations import drive
from ckptfs.commit.session import Place
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.dcp.metadata.metadata_reader import read_inventory
from ckptfs.dcp.metadata.pickle_scan import advise_on_torch, check_archive
from ckptfs.dcp.read.data_file import Source, Verify, source_of
from ckptfs.dcp.safetensors.safetensors_format import SUFFIX
from ckptfs.dcp.safetensors.safetensors_reader import read_file_layout, read_layout
from ckptfs.errors import CkptfsError, IntegrityError, NotFoundError, StateError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.tools.contents import Box, Contents, Leaf, LoadedContents, ObjectLeaf, SavedContents
from ckptfs.uri import Uri, options_of

__all__ = [
    "File",
    "Format",
    "Located",
    "Opened",
    "file_at",
    "located",
    "open_contents",
    "options_for",
    "whole_of_parts",
]


@dataclass(frozen=True, slots=True)
class Located:
    """A committed checkpoint.

    Attributes:
        uri: Where it is.
        storage: The storage of its run, open until the block is left.
        name: Its name in the run; for a part such as ``step_100/actor``.
        found: Where its files are.
        domain: The id of the domain that is seen from here; "" for none.
    """

    uri: Uri
    storage: Storage
    name: str
    found: LocatedCheckpoint
    domain: str


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Attributes:
        uri: Where it is.
        storage: The storage of its directory.
        size_bytes: Its bytes.
    """

    uri: Uri
    storage: Storage
    size_bytes: int


@contextlib.contextmanager
def located(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[Located]:
    """The checkpoint, part or directory of files at ``uri``, until the block is left.

    Local, read-only.

    Args:
        uri: The place.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Raises:
        NotFoundError: There is no such checkpoint.
        IncompleteCheckpointError: It is incomplete.
        IntegrityError: The description differs from what was written.
        ManifestError: The description is damaged or too new.
        StateError: It consists of parts (see ``whole_of_parts``), or is a run.
    """
    target = Uri.parse(uri)
    place = Place({**options_of(uri), **(storage_options or {})})
    with reading_session(target, SoloControl(World.solo()), place) as (session, _, name):
        try:
            found = locate_directory(session, name)
        except StateError:
            if drive(is_run(name), session.storage):
                shown = target.local_path if target.is_local else str(target)
                raise run_error(
                    target,
                    f"ckptfs ls {shown} lists its checkpoints, ckptfs latest {shown} names the newest",
                ) from None
            raise
        yield Located(target, session.storage, name, found, session.placement.mine.id)


def whole_of_parts(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Seal | None:
    """The seal of a checkpoint that several groups of processes wrote. Local, read-only.

    Args:
        uri: The checkpoint.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Returns:
        The seal; None if it is no checkpoint of parts.

    Raises:
        IncompleteCheckpointError: It is in doubt whether it was committed.
    """
    target = Uri.parse(uri)
    with looking_at(target.parent, {**options_of(uri), **(storage_options or {})}) as look:
        seal = live_of(target.name, look.views, target)
    return seal if seal is not None and seal.parts else None


@contextlib.contextmanager
def file_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[File | None]:
    """The file at ``uri``, until the block is left. Local, read-only.

    Args:
        uri: The file.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Yields:
        The file; None if there is a directory or nothing.

    Raises:
        StorageError: The storage failed.
    """
    target = Uri.parse(uri)
    storage = open_storage(target.parent, {**options_of(uri), **(storage_options or {})})
    try:
        try:
            stat = storage.stat(target.name)
        except (NotFoundError, NotADirectoryError):
            yield None
        except StorageError:
            # The directory above may be a forbidden bucket root: the next access reports the error.
            yield None
        else:
            yield None if stat.is_dir else File(target, storage, stat.size_bytes)
    finally:
        storage.close()


def options_for(
    other: Any, uri: Any, storage_options: Mapping[str, Any] | None, own: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """The storage options for the second of two URIs. Pure.

    Args:
        other: The second URI.
        uri: The first URI.
        storage_options: The options of the first; None: no options.
        own: The options of the second; None: those of the first, if both have the same protocol.
    """
    if own:
        return own
    alike = Uri.parse(other).protocol == Uri.parse(uri).protocol
    return (storage_options or {}) if alike else {}


_ARCHIVE = b"PK\x03\x04"


class Format(StrEnum):
    """The format of a checkpoint.

    Attributes:
        CKPTFS: A checkpoint of ckptfs.
        DCP: A checkpoint of torch.distributed.checkpoint.
        SAFETENSORS: Files of safetensors.
        TORCH_SAVE: One file of ``torch.save``.
        FILES: Files with plain names.
    """

    CKPTFS = "ckptfs"
    DCP = "torch.distributed.checkpoint"
    SAFETENSORS = "safetensors"
    TORCH_SAVE = "torch.save"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class Opened:
    """An open checkpoint.

    Attributes:
        uri: Where it is.
        format: Its format.
        contents: Its leaves.
        storage: The storage that its files are in.
        home: The directory that paths are relative to.
        found: Where its files are; None for a single file.
    """

    uri: Uri
    format: Format
    contents: Contents
    storage: Storage
    home: str
    found: LocatedCheckpoint | None = None


class _NoLeaves(Contents):
    """The contents of a directory of files without tensors in a known format: nothing to read."""

    def __init__(self) -> None:
        self.leaves = {}

    def read(self, boxes: Sequence[Box], into: Sequence[Any] | None = None) -> list[Any]:
        """As ``Contents.read``, of no boxes."""
        return []

    def blob(self, leaf: ObjectLeaf) -> bytes:
        """KeyError: there is no leaf."""
        raise KeyError(leaf.key)

    def digests(self, leaf: Leaf) -> None:
        """None."""


@contextlib.contextmanager
def open_contents(
    uri: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    verify: Verify = Verify.READ,
    follow_links: bool = True,
) -> Iterator[Opened]:
    """Open a checkpoint, a part, a directory of files, or one safetensors or torch.save file.

    Local, read-only. A torch.save file is loaded with weights_only.

    Args:
        uri: The place.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        verify: Whether what is read is compared with its digests.
        follow_links: Follow symbolic links that lead out of the checkpoint.

    Yields:
        The open checkpoint, until the block is left.

    Raises:
        IntegrityError: The file is not a torch.save file, is damaged, or would run code.
        SymlinkError: A link leads out of the checkpoint, and ``follow_links`` is False.
        CkptfsError: Errors of finding it are those of ``ckptfs.load``.
    """
    with file_at(uri, storage_options) as file:
        if file is not None:
            yield _file(file, verify)
            return
    with located(uri, storage_options) as here:
        storage, found = here.storage, here.found
        if not follow_links:
            storage = storage.refusing_links(found.home)
        source = source_of(storage, found, verify, 0)
        manifest = found.manifest
        if found.metadata and (manifest is None or manifest.artifact is not Kind.DIRECTORY):
            kind = Format.DCP if manifest is None else Format.CKPTFS
            raw, where = sealed_metadata(storage, found), storage.uri(found.metadata)
            contents: Contents = SavedContents(source, read_inventory(raw, where, found.shared))
        else:
            kind, contents = _directory(storage, found, source, verify)
        yield Opened(here.uri, kind, contents, storage, found.home, found)


def _directory(
    storage: Storage, found: LocatedCheckpoint, source: Source, verify: Verify
) -> tuple[Format, Contents]:
    try:
        layout = read_layout(storage, found, verify)
    except NotFoundError:
        return Format.FILES, _NoLeaves()
    return Format.SAFETENSORS, SavedContents(layout.source(source), layout)


def _file(file: File, verify: Verify) -> Opened:
    name = file.uri.name
    if name.endswith(SUFFIX):
        source = Source(file.storage, "", verify=verify)
        layout = read_file_layout(source, name)
        contents: Contents = SavedContents(layout.source(source), layout)
        return Opened(file.uri, Format.SAFETENSORS, contents, file.storage, "")
    contents = LoadedContents(_load(file), name)
    return Opened(file.uri, Format.TORCH_SAVE, contents, file.storage, "")


def _load(file: File) -> Any:
    import torch

    name = file.uri.name
    path = file.storage.local_path(name)
    try:
        with file.storage.open_read(name) as reader:  # a regular file, whatever the path may be
            advise_on_torch(torch.__version__)
            magic = bytearray(min(len(_ARCHIVE), reader.size_bytes))
            reader.read_into(0, memoryview(magic))
            if path is None:
                data = bytearray(reader.size_bytes)
                reader.read_into(0, memoryview(data))
                check_archive(io.BytesIO(data))
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # An archive is mapped: pages are read on access and can be dropped when memory is short. Old
        # versions of torch wrote no archive; such a file is read as a stream.
        mapped = magic == _ARCHIVE
        with open(path, "rb") as opened:
            check_archive(opened)
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except (CkptfsError, MemoryError):
        raise
    except Exception as error:
        raise IntegrityError(
            _why_not(error), uri=file.uri, hint="ckptfs reads only what runs no code"
        ) from error


# torch's own text also says how to unpickle the file in spite of the danger.
_GLOBAL = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)")


def _why_not(error: Exception) -> str:
    """Return why a file cannot be loaded with weights_only. Pure."""
    refused = _GLOBAL.search(str(error))
    if refused is not None:
        return f"it holds an object of {refused[1]}, which weights_only does not load"
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error):
        return "it holds an object that weights_only does not load"
    return "a plain file: torch.save did not write it, or it is damaged"
