"""One object in one file: what ``torch.save`` makes, streamed to any storage, whole or not at all.

    write_object(obj, target)     pickled straight into the upload: no copy of the file in memory
    freeze(obj) -> Frozen         pickled into memory now, written later by any thread
    read_object(target)           from a mounted filesystem in place, else fetched in ranges

Local: no other rank takes part. ``torch.load`` reads the file, and no other file belongs to it.
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

_OLD_S = 24 * 3600.0  # age of the last write after which a partial file is certainly abandoned

_TRIES = 8  # a directory that another process renames during a call is found at the next try
_Options = Mapping[str, Any] | None


class Frozen:
    """An object as it was when ``freeze`` returned; ``size_bytes`` is the size of its file."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer = buffer
        self.size_bytes = buffer.tell()

    def write(self, target: Uri, options: _Options = None) -> None:
        """Write it as ``write_object`` does. Any thread; may be repeated after a failure."""
        _write(target, options, self._pour, self.size_bytes)

    def data(self) -> bytes:
        """Return the contents of the file."""
        return self._buffer.getvalue()

    def _pour(self, writer: DataWriter) -> None:
        writer.write(memoryview(self._buffer.getvalue()))


def freeze(obj: object) -> Frozen:
    """Pickle now: later changes, of tensors or anything else, are not included."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return Frozen(buffer)


def write_object(obj: object, target: Uri, options: _Options = None) -> None:
    """Write one object; durable on return. Creates the parents of the file as needed.

    Errors are the storage's; after one the old file is untouched. After a crash either the old object or the
    new one is there.
    """
    _write(target, options, lambda writer: _save_into(obj, writer), None)


def read_object(
    target: Uri,
    options: _Options = None,
    *,
    map_location: Any = "cpu",
    weights_only: bool | None = None,
) -> Any:
    """Read what ``torch.save`` wrote.

    Args:
        target: The file.
        options: Storage options.
        map_location: As for ``torch.load``.
        weights_only: As for ``torch.load``; None is its default.

    Returns:
        The object.

    Raises:
        NotFoundError: There is no such file.
        IntegrityError: It is another kind of file, or not all of it is there.
        pickle.UnpicklingError: ``weights_only`` refuses it; as torch raises it.
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
    """Raise ValueError if unpickling the file with torch would hang or crash the process."""
    advise_on_torch(torch.__version__)
    if isinstance(place, str):
        with open(place, "rb") as file:
            check_archive(file)
    else:
        check_archive(place)


def copy_file(target: Uri, path: str, options: _Options = None) -> None:
    """Fetch one file to a local path; nothing has that name before the file is complete."""
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
    """Remove one file; it is no error if it does not exist."""
    storage = open_storage(target.parent, options)
    try:
        storage.remove(target.name)
        storage.sync("")
    except NotFoundError:
        return  # the directory is gone too
    finally:
        storage.close()


def remove_partials(folder: Uri, options: _Options = None, written: str | None = None) -> None:
    """Remove the partial files in a directory that killed writers of single files left behind.

    Such files never got their final name. This never raises a CkptfsError; what cannot be removed is logged.

    A file is removed if the process that wrote it ran on this machine and has ended. ``written`` is a file
    there that was just written: partial files that were last written more than a day before it are removed
    too.
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
        return  # the directory does not exist yet, or another process removed it
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
            raise stream.error from None  # torch would report an "unexpected pos" instead
        raise


class _Stream:
    """A writer with the interface that ``torch.save`` expects of a file.

    After an error it ignores further data: torch finishes its archive in any case, and the first error is the
    one to raise.
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
        """Do nothing: closing the writer flushes it."""


def _fetched(reader: DataReader) -> io.RawIOBase:
    """Return a whole file in memory, read in parallel ranges if the storage does that."""
    data = bytearray(reader.size_bytes)
    reader.read_into(0, memoryview(data))
    return _MemoryFile(data)


class _MemoryFile(io.RawIOBase):
    """A file over a buffer that is not copied, unlike in BytesIO."""

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
