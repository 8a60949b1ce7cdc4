"""Opening what a URI names, whatever it is: the contents, and what is known about them.

with open_contents(uri, options) as opened:
    opened.contents   opened.format   opened.found (None of a single file)
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog.catalog import Found
from ckptfs.commit.log.entries import Kind
from ckptfs.dcp.loading import read_metadata, source_of
from ckptfs.dcp.metadata.pickle_scan import advise_on_torch, check_archive
from ckptfs.dcp.read.data_file import Source, Verify
from ckptfs.dcp.safetensors.safetensors_format import SUFFIX
from ckptfs.dcp.safetensors.safetensors_reader import read_file_layout, read_layout
from ckptfs.errors import CkptfsError, IntegrityError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.tools.contents import Contents
from ckptfs.tools.loaded import LoadedContents
from ckptfs.tools.located import File, file_at, located
from ckptfs.tools.saved import SavedContents
from ckptfs.uri import Uri

__all__ = ["Format", "Opened", "open_contents"]

_ARCHIVE = b"PK\x03\x04"


class Format(StrEnum):
    """How the bytes are stored.

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
        format: How its bytes are stored.
        contents: Its leaves.
        storage: The storage that its files are in.
        home: The directory that paths begin at.
        found: Where its files are; None of one file.
    """

    uri: Uri
    format: Format
    contents: Contents
    storage: Storage
    home: str
    found: Found | None = None


class _NoLeaves(SavedContents):
    """A directory of files that hold no tensors we know how to read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, Metadata(state_dict_metadata={}, storage_data={}))


@contextlib.contextmanager
def open_contents(
    uri: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    verify: Verify = Verify.READ,
    follow_links: bool = True,
) -> Iterator[Opened]:
    """Open a checkpoint, a part of one, a directory of files, one safetensors or torch.save file. Local,
    read-only.

    A torch.save file is loaded with weights_only.

    Args:
        uri: Where.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.
        verify: Whether what is read is compared with its digests.
        follow_links: Read what symbolic links that lead out of a checkpoint lead to.

    Yields:
        The open checkpoint, until the block is left.

    Raises:
        IntegrityError: A torch.save file is none, or holds what would run code.
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
            contents: Contents = SavedContents(source, read_metadata(storage, found))
        else:
            kind, contents = _directory(storage, found, source, verify)
        yield Opened(here.uri, kind, contents, storage, found.home, found)


def _directory(
    storage: Storage, found: Found, source: Source, verify: Verify
) -> tuple[Format, Contents]:
    try:
        layout = read_layout(storage, found, verify)
    except NotFoundError:
        return Format.FILES, _NoLeaves(source)
    return Format.SAFETENSORS, SavedContents(layout.source(source), layout.metadata)


def _file(file: File, verify: Verify) -> Opened:
    name = file.uri.name
    if name.endswith(SUFFIX):
        source = Source(file.storage, "", verify=verify)
        layout = read_file_layout(source, name)
        contents: Contents = SavedContents(layout.source(source), layout.metadata)
        return Opened(file.uri, Format.SAFETENSORS, contents, file.storage, "")
    contents = LoadedContents(_load(file), name)
    return Opened(file.uri, Format.TORCH_SAVE, contents, file.storage, "")


def _load(file: File) -> Any:
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
        # An archive is mapped: pages come as they are looked at, and go again when memory is short. What
        # an old torch wrote is none: it is read as far as it says.
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


# torch's own text goes on to say how to unpickle the file all the same.
_GLOBAL = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)")


def _why_not(error: Exception) -> str:
    """Why a file cannot be loaded with weights_only. Pure."""
    refused = _GLOBAL.search(str(error))
    if refused is not None:
        return f"it holds an object of {refused[1]}, which weights_only does not load"
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error):
        return "it holds an object that weights_only does not load"
    return "a plain file: torch.save did not write it, or it is damaged"
