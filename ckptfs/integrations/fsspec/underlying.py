"""The fsspec filesystem below a ``ckptfs+X://`` URL: what reads, lists and moves plain files.

    file s3 gs az ...       fsspec's own implementation without its listing cache: others write there too
    memory hdfs and others  ``StorageView``: ckptfs's backend, read through fsspec

The options are one flat mapping for both. ckptfs's options (``storage.options``) are removed for
fsspec, and fsspec's own (caches, event loops) for ckptfs. MissingDriverError if a library is not
installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from ckptfs.errors import CkptfsError, MissingDriverError, NotFoundError, StorageError
from ckptfs.storage.base import DataReader, Storage
from ckptfs.storage.options import OURS
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, mask_credentials

__all__ = [
    "OBJECT_STORES",
    "StorageView",
    "fsspec_class",
    "open_underlying",
    "options_for_storage",
    "typed_errors",
    "without_secrets",
]

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"))
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FSSPECS_OWN = frozenset(
    (
        "asynchronous",
        "loop",
        "use_listings_cache",
        "listings_expiry_time",
        "max_paths",
        "skip_instance_cache",
        "batch_size",
        "auto_mkdir",
    )
)
_SECRET = re.compile(r"key|secret|token|passw|cred|sas|connection_string|signature", re.IGNORECASE)


def fsspec_class(protocol: str) -> type[AbstractFileSystem] | None:
    """Return fsspec's class; None if a view is used instead, or its library is missing."""
    if protocol not in OBJECT_STORES and protocol not in ("file", "local"):
        return None
    try:
        found: type[AbstractFileSystem] = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return None
    return found


def open_underlying(protocol: str, options: Mapping[str, Any]) -> AbstractFileSystem:
    """Return a filesystem over the bare protocol. Raises MissingDriverError."""
    if protocol in ("file", "local"):
        return fsspec.filesystem("file", auto_mkdir=options.get("auto_mkdir", True))
    if protocol not in OBJECT_STORES:
        return StorageView(protocol, options_for_storage(protocol, options))
    library_options = {name: value for name, value in options.items() if name not in OURS}
    try:
        return fsspec.filesystem(protocol, **{"use_listings_cache": False, **library_options})
    except ImportError as error:
        raise MissingDriverError(
            f"the library of {protocol}:// is not installed",
            uri=f"{protocol}://",
            hint=f"pip install 'ckptfs[{_EXTRAS.get(protocol, 'azure')}]'",
        ) from error


@contextlib.contextmanager
def typed_errors(action: str, uri: Uri) -> Iterator[None]:
    """Turn other exceptions of a library, such as for missing credentials, into StorageError."""
    try:
        yield
    except (OSError, CkptfsError):
        raise
    except Exception as error:  # noqa: BLE001 - here all errors become typed
        text = mask_credentials(f"{type(error).__name__}: {error}")
        raise StorageError(f"{action} failed: {text}", uri=uri) from None


def options_for_storage(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a filesystem that ``open_storage`` takes."""
    if protocol in ("file", "local"):
        return {}
    return {name: value for name, value in options.items() if name not in _FSSPECS_OWN}


def without_secrets(options: Any) -> Any:
    """Return the same nested options without values that have the name of a credential."""
    if isinstance(options, Mapping):
        return {
            name: without_secrets(value)
            for name, value in options.items()
            if not (isinstance(value, str | bytes) and _SECRET.search(str(name)))
        }
    if isinstance(options, list | tuple):
        return type(options)(without_secrets(value) for value in options)
    return options


class StorageView(AbstractFileSystem):
    """Files of ``protocol`` through ``open_storage``. fsspec does not cache it; its holder does."""

    cachable = False

    def __init__(self, inner_protocol: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._protocol, self._options = inner_protocol, dict(options)
        self._storages: dict[str, Storage] = {}

    def _at(self, path: str) -> tuple[Storage, str]:
        uri = Uri.parse(f"{self._protocol}://{path}")
        root = dataclasses.replace(uri, path="" if uri.authority else "/")
        storage = self._storages.get(root.full)
        if storage is None:
            storage = self._storages[root.full] = open_storage(root, self._options)
        return storage, uri.path.lstrip("/")

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size in bytes and type. Raises NotFoundError."""
        del kwargs
        storage, key = self._at(path)
        if not key:
            return _info(path, 0, is_dir=True)
        try:
            found = storage.stat(key)
        except NotFoundError:
            if not storage.list(key):  # a prefix of an object store
                raise
            return _info(path, 0, is_dir=True)
        return _info(path, found.size_bytes, is_dir=found.is_dir)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:  # noqa: FBT001, FBT002
        """Return what is directly below; a file lists itself."""
        del kwargs
        storage, key = self._at(path)
        info = self.info(path)
        names = [path]
        if info["type"] == "directory":
            storage.refresh(key)
            names = [f"{path.rstrip('/')}/{entry.name}" for entry in storage.list(key)]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> io.BufferedReader:
        del kwargs
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: a view reads")
        storage, key = self._at(path)
        return io.BufferedReader(_Raw(storage.open_read(key)), 1 << 20)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Make a directory and its parents."""
        del create_parents, kwargs
        storage, key = self._at(path)
        storage.make_dir(key)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        storage, key = self._at(path)
        storage.remove_dir(key)

    def rm_file(self, path: str) -> None:
        """Remove one file."""
        storage, key = self._at(path)
        storage.remove(key)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT001, FBT002
        """Remove one file, or with ``recursive`` everything below a directory."""
        del maxdepth
        storage, key = self._at(path)
        if self.info(path)["type"] == "file":
            storage.remove(key)
        elif recursive:
            storage.remove_tree(key)
        else:
            raise IsADirectoryError(path)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename within one authority."""
        del kwargs
        storage, source = self._at(path1)
        storage.rename(source, self._at(path2)[1])


def _info(path: str, size_bytes: int, *, is_dir: bool) -> dict[str, Any]:
    return {"name": path, "size": size_bytes, "type": "directory" if is_dir else "file"}


class _Raw(io.RawIOBase):
    def __init__(self, reader: DataReader) -> None:
        super().__init__()
        self._reader, self._at = reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size_bytes}
        self._at = max(0, start[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._reader.size_bytes - self._at))
        if count:
            self._reader.read_into(self._at, view[:count])
        self._at += count
        return count

    def close(self) -> None:
        self._reader.close()
        super().close()
