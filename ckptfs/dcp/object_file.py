"""One object, one file: what ``torch.save`` makes, streamed to any storage, whole or not at all.

    write_object(obj, target)     pickled straight into the upload: no copy of the file in memory
    freeze(obj) -> Frozen         pickled into memory now, written later by any thread
    read_object(target)           from a mounted filesystem as it lies there, else fetched in ranges

Local: no rank takes part. The file is what ``torch.load`` reads, and nothing beside it.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptfs.dcp.metadata.pickle_scan import advise_on_torch, check_archive
from ckptfs.errors import CkptfsError, IntegrityError, NotFoundError
from ckptfs.storage.base import DataReader, DataWriter, Shape
from ckptfs.storage.local.files import is_partial_name, writer_is_gone
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = [
    "Frozen",
    "copy_file",
    "freeze",
    "read_object",
    "remove_object",
    "remove_partials",
    "write_object",
]

logger = logging.getLogger("ckptfs.dcp")

_OLD_S = 24 * 3600.0  # since its last write: then nobody is writing it, whoever began it

_TRIES = 8  # a directory that another process renames under us is found at the next look
_Options = Mapping[str, Any] | None


class Frozen:
    """An object as it was when ``freeze`` returned. size_bytes: of its file."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer = buffer
        self.size_bytes = buffer.tell()

    def write(self, target: Uri, options: _Options = None) -> None:
        """As ``write_object``. Any thread, also again after it failed."""
        _write(target, options, self._pour, self.size_bytes)

    def data(self) -> bytes:
        """What the file holds."""
        return self._buffer.getvalue()

    def _pour(self, writer: DataWriter) -> None:
        writer.write(memoryview(self._buffer.getvalue()))


def freeze(obj: object) -> Frozen:
    """Pickle now: whatever changes afterwards, tensors or anything else, is not in it."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return Frozen(buffer)


def write_object(obj: object, target: Uri, options: _Options = None) -> None:
    """Write one object; durable on return. Makes the parents of the file as needed.

    Errors are the storage's: what was there before is untouched then. After a crash the old object
    or the new one is there.
    """
    _write(target, options, lambda writer: _save_into(obj, writer), None)


def read_object(
    target: Uri,
    options: _Options = None,
    *,
    map_location: Any = "cpu",
    weights_only: bool | None = None,
) -> Any:
    """Read what ``torch.save`` wrote. weights_only: as for ``torch.load``; None is its default.

    NotFoundError. IntegrityError: no such file, or not all of it. What weights_only refuses is
    pickle.UnpicklingError, as torch raises it.
    """
    storage = open_storage(target.parent, options)
    try:
        storage.refresh("")
        with storage.open_read(target.name) as reader:
            place: Any = storage.local_path(target.name) or io.BufferedReader(_fetched(reader))
            if weights_only is not False:
                _look_at(place)
            return torch.load(place, map_location=map_location, weights_only=weights_only)
    except (CkptfsError, FileNotFoundError, pickle.UnpicklingError, MemoryError):
        raise
    except Exception as error:
        raise IntegrityError(
            f"not loadable: {type(error).__name__}: {error}",
            uri=target,
            hint="the file is damaged, or torch.save did not write it",
        ) from error
    finally:
        storage.close()


def _look_at(place: Any) -> None:
    """ValueError: what would hang or crash the process if torch unpickled it."""
    advise_on_torch(torch.__version__)
    if isinstance(place, str):
        with open(place, "rb") as file:
            check_archive(file)
    else:
        check_archive(place)


def copy_file(target: Uri, path: str, options: _Options = None) -> None:
    """Fetch one file to a local path, which is not there before it is whole."""
    storage = open_storage(target.parent, options)
    try:
        with storage.open_read(target.name) as reader, open(f"{path}.part", "wb") as file:
            window = memoryview(bytearray(min(reader.size_bytes, 64 << 20)))
            for at in range(0, reader.size_bytes, len(window) or 1):
                part = window[: reader.size_bytes - at]
                reader.read_into(at, part)
                file.write(part)
        os.replace(f"{path}.part", path)
    finally:
        storage.close()


def remove_object(target: Uri, options: _Options = None) -> None:
    """Remove one file; absent is success."""
    storage = open_storage(target.parent, options)
    try:
        storage.remove(target.name)
        storage.sync("")
    except NotFoundError:
        return  # the directory went with it
    finally:
        storage.close()


def remove_partials(folder: Uri, options: _Options = None, written: str | None = None) -> None:
    """Remove what killed writers of single files left in a directory: files that never got their name. Never
    raises a CkptfsError; what cannot be removed is a line in the log.

    Those go whose process ran on this machine and has ended. written: a file there that was just written; by
    its time those go, too, that were last written a day before it.
    """
    storage = open_storage(folder, options)
    try:
        if storage.capabilities.shape is not Shape.FILESYSTEM:
            return  # an object that is not completed has no name
        newest_s = None if written is None else storage.stat(written).modified_s
        for entry in storage.list(""):
            if entry.is_dir or not is_partial_name(entry.name):
                continue
            written_s = None if newest_s is None else storage.stat(entry.name).modified_s
            is_old = newest_s and written_s and newest_s - written_s > _OLD_S
            if is_old or writer_is_gone(entry.name):
                storage.remove(entry.name)
                logger.info("removed %s, a leftover of a dead writer", storage.uri(entry.name))
    except NotFoundError:
        return  # no directory yet, or somebody else removed it
    except CkptfsError as error:
        logger.warning("the leftovers of dead writers in %s were not removed: %s", folder, error)
    finally:
        storage.close()


def _write(
    target: Uri, options: _Options, pour: Callable[[DataWriter], None], size_bytes: int | None
) -> None:
    storage = open_storage(target.parent, options)
    try:
        for left in reversed(range(_TRIES)):
            try:
                storage.make_dir("")
                with storage.open_write(target.name, size_hint_bytes=size_bytes) as writer:
                    pour(writer)
                storage.sync("")
            except NotFoundError:
                # A step directory was replaced by its committed one between two calls.
                if not left:
                    raise
            else:
                return
    finally:
        storage.close()


def _save_into(obj: object, writer: DataWriter) -> None:
    stream = _Stream(writer)
    try:
        torch.save(obj, stream)  # type: ignore[arg-type] # it asks for write and flush only
    except Exception:
        if stream.error is not None:
            raise stream.error from None  # torch tells of an "unexpected pos" instead
        raise


class _Stream:
    """A writer as ``torch.save`` wants a file. After an error it swallows: torch ends its archive
    whatever happened, and the first error is the one to tell.
    """

    def __init__(self, writer: DataWriter) -> None:
        self._writer = writer
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._writer.write(view)
            except BaseException as error:
                self.error = error
                raise
        return len(view)

    def flush(self) -> None:
        """The writer's close does it."""


def _fetched(reader: DataReader) -> io.RawIOBase:
    """A whole file in memory, in parallel ranges where the storage is read so."""
    data = bytearray(reader.size_bytes)
    reader.read_into(0, memoryview(data))
    return _Memory(data)


class _Memory(io.RawIOBase):
    """A file over a buffer that is not copied, as BytesIO would."""

    def __init__(self, data: bytearray) -> None:
        self._view = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        out = memoryview(into).cast("B")
        found = self._view[self._at : self._at + len(out)]
        out[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at
