"""Any protocol that fsspec knows, used as an object store: keys, no directories, no rename.

    bucket kinds (s3 gs az ...)       data: one stream, committed on close, discarded on abort
                                      small: one PUT; create: the client's conditional PUT, probed
    tree kinds (file sftp hdfs ...)   data and small: .partial-*, then mv over the key
                                      create: UnsupportedError, no client of theirs is exclusive

Listing caches are off, instances are not shared, and a client that was made in another process is
never used: fsspec's event loop does not survive a fork. Nothing here is as fast as a client of
its own could be (``object_store`` is the room for those); it is the one that always works.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from ckptfs.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import (
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
)
from ckptfs.storage.fsspec_client import Client
from ckptfs.uri import Uri, mask_credentials

_log = logging.getLogger(__name__)

__all__ = ["FsspecStorage", "open_fsspec"]

_BLOCK_BYTES = 16 << 20  # 16 MiB parts: S3 takes 10,000 of them, 160 GB a file
_READ_BYTES = 64 << 20  # 64 MiB a request
_SWEEPS = 3


def open_fsspec(uri: Uri, storage_options: Mapping[str, Any]) -> FsspecStorage:
    """The registry's factory: ``s3://...``, or ``fsspec+file:///...`` to insist on fsspec."""
    return FsspecStorage(uri, storage_options)


class FsspecStorage(Storage):
    """Bytes below one URI, through fsspec. ``storage_options`` are fsspec's, and are pickled."""

    def __init__(self, root: Uri, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = root
        self._client = Client(root, storage_options or {})
        self._lock = threading.Lock()
        self._exclusive: bool | None = None
        if self._client.protocol == "memory" and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise UriError("fsspec's memory belongs to one process", uri=root)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """Before this process creates anything, what its client claims; then what the probe saw."""
        return Capabilities(
            shape=Shape.OBJECT,
            exclusive_create=self._client.claims_create()
            if self._exclusive is None
            else self._exclusive,
            atomic_replace=self._client.is_bucket
            or self._client.protocol in ("file", "local", "memory"),
            conditional_replace=False,
            durable=self._client.is_bucket,
        )

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        with self._client.said("read", key):
            return bytes(self._client.fs.cat_file(self._client.at(key)))

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """As ``Storage.create``. UnsupportedError where the client or the server has no condition:
        the first create of a process writes, and removes, a key of its own to find out.
        """
        del staging
        if not self._creates_exclusively(key):
            raise UnsupportedError(
                "no exclusive create here: the server or its client ignores the condition",
                uri=self.uri(key),
                hint="fences cannot hold on this store; see capabilities",
            )
        self._create(key, data)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        if if_match is not None:
            raise UnsupportedError("fsspec has no conditional replace", uri=self.uri(key))
        with self._client.said("replace", key, changes=True):
            if self._client.is_bucket:
                self._client.fs.pipe_file(self._client.at(key), data)
                return
        with self.open_write(key) as writer:
            writer.write(data)

    def stat(self, key: str) -> Stat:
        with self._client.said("stat", key):
            found = self._client.fs.info(self._client.at(key))
        if found.get("type") == "directory":
            raise NotFoundError("stat failed: a prefix, not an object", uri=self.uri(key))
        etag = found.get("ETag") or found.get("etag") or found.get("generation")
        size_bytes = int(found.get("size") or 0)
        return Stat(size_bytes, is_dir=False, etag=None if etag is None else str(etag))

    def list(self, key: str) -> list[Entry]:
        path = self._client.at(key).rstrip("/")
        try:
            with self._client.said("list", key):
                self._client.fs.invalidate_cache()
                found = self._client.fs.ls(path, detail=True)
        except NotFoundError:
            return []
        names = {
            item["name"].rstrip("/").rpartition("/")[2]: item.get("type") == "directory"
            for item in found
            # A listing of a file is that file; a bucket may hold a marker for the prefix itself.
            if item["name"].strip("/") != path.strip("/")
        }
        return [Entry(name, is_dir) for name, is_dir in sorted(names.items())]

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        del size_hint_bytes
        return _Stream(self._client, key)

    def open_read(self, key: str) -> DataReader:
        return _Ranges(self._client, key, self.stat(key).size_bytes)

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        self.uri(key)

    def rename(self, source: str, target: str) -> None:
        del target
        raise UnsupportedError("an object store has no rename", uri=self.uri(source))

    def remove(self, key: str) -> None:
        with self._client.said("remove", key, changes=True):
            try:
                self._client.fs.rm_file(self._client.at(key))
            except FileNotFoundError:
                return

    def remove_dir(self, key: str) -> None:
        self.uri(key)

    def remove_tree(self, key: str) -> None:
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        path = self._client.at(key)
        with self._client.said("remove_tree", key, changes=True):
            for remaining in reversed(range(_SWEEPS)):
                try:
                    self._client.fs.invalidate_cache()
                    self._client.fs.rm(path, recursive=True)
                except FileNotFoundError:
                    # Nothing there, or another remover was faster with one of many: look again.
                    if not remaining or not self._client.fs.exists(path):
                        return
                else:
                    return

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        self.uri(key)

    def refresh(self, key: str) -> None:
        with self._client.said("refresh", key):
            self._client.fs.invalidate_cache(self._client.at(key))

    def space(self) -> Space | None:
        return None

    def close(self) -> None:
        self._client.close()

    # -- inside ------------------------------------------------------------------------

    def _creates_exclusively(self, key: str) -> bool:
        with self._lock:
            known = self._exclusive
        if known is None:
            known = self._client.claims_create() and self._probe(key.rpartition("/")[0])
            with self._lock:
                self._exclusive = known
        return known

    def _probe(self, folder: str) -> bool:
        """Create a key of our own twice: a store that excludes refuses the second."""
        name = f".partial-probe-{secrets.token_hex(8)}"
        key = f"{folder}/{name}" if folder else name
        try:
            self._create(key, b"first")
            try:
                self._create(key, b"second")
            except AlreadyExistsError:
                return self.read(key) == b"first"
            return False
        finally:
            self.remove(key)

    def _create(self, key: str, data: bytes) -> None:
        try:
            with self._client.said("create", key, changes=True):
                self._client.fs.pipe_file(self._client.at(key), data, mode="create")
        except AlreadyExistsError:
            raise
        except StorageError as error:
            # Some servers' refusal arrives as EINVAL (radosgw through s3fs): what stands there,
            # if it is not ours, says that it was one.
            if error.errno == errno.EINVAL and self._holds_other(key, data):
                raise AlreadyExistsError("create failed: it exists", uri=self.uri(key)) from error
            raise

    def _holds_other(self, key: str, data: bytes) -> bool:
        try:
            return self.read(key) != data
        except StorageError:
            return False


class _Stream(DataWriter):
    """One file through one fsspec stream; invisible under its key until closed."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self._target = client.at(key)
        folder, _, _ = self._target.rpartition("/")
        self._path = (
            self._target if client.is_bucket else f"{folder}/.partial-{secrets.token_hex(8)}"
        )
        self._done = False
        self._broken = False
        self._file: Any = None
        try:
            with client.said("write", key):
                self._file = self._begin()
        except BaseException:
            self.abort()
            raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._file is None or self._broken:
            raise StorageError("the file cannot be written any more", uri=self._uri)
        view = memoryview(data).cast("B")
        self._broken = True
        with self._client.said("write", self._key):
            sent = 0
            while sent < len(view):
                # bytes: not every client's stream takes a memoryview, and it may keep the buffer.
                sent += self._file.write(bytes(view[sent : sent + _BLOCK_BYTES]))
        self._broken = False
        return len(view)

    def close(self) -> None:
        if self._done:
            return
        if self._file is None or self._broken:
            raise StorageError("the file cannot be closed: a write failed", uri=self._uri)
        self._broken = True
        with self._client.said("write", self._key, changes=True):
            self._file.close()
            if self._client.is_bucket:
                self._file.commit()
            else:
                self._move()
        self._file, self._done = None, True

    def abort(self) -> None:
        if self._done:
            return
        stream, self._file, self._done = self._file, None, True
        self._broken = True
        try:
            if self._client.is_bucket:
                if stream is not None:
                    # Not close(): that would complete the upload and leave a truncated object.
                    stream.discard()
                    stream.closed = True
            else:
                if stream is not None:
                    stream.close()
                self._client.fs.rm_file(self._path)
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001 - the error that brought us here is the one to tell
            _log.warning("left behind: %s (%s)", self._uri, mask_credentials(str(error)))

    @property
    def _uri(self) -> Uri:
        return self._client.uri(self._key)

    def _begin(self) -> Any:
        fs = self._client.fs
        if self._client.is_bucket:
            return fs.open(self._path, "wb", autocommit=False, block_size=_BLOCK_BYTES)
        try:
            return fs.open(self._path, "wb")
        except FileNotFoundError:
            # An object store has no parents to make, so our callers make none.
            fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            return fs.open(self._path, "wb")

    def _move(self) -> None:
        fs = self._client.fs
        try:
            fs.mv(self._path, self._target)
        except FileExistsError:
            # HDFS and some SFTP servers do not rename over: last wins means taking it away first.
            fs.rm_file(self._target)
            fs.mv(self._path, self._target)


class _Ranges(DataReader):
    def __init__(self, client: Client, key: str, size_bytes: int) -> None:
        self._client = client
        self._key = key
        self._closed = False
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        client, uri = self._client, self._client.uri(self._key)
        if self._closed:
            raise StorageError("the reader is closed", uri=uri)
        view = buffer.cast("B")
        for start in range(0, len(view), _READ_BYTES):
            part = view[start : start + _READ_BYTES]
            begin = offset + start
            data = b""
            if begin < self.size_bytes:
                with client.said("read", self._key):
                    data = client.fs.cat_file(
                        client.at(self._key), start=begin, end=begin + len(part)
                    )
            if len(data) != len(part):
                raise IntegrityError(
                    f"the file ends at byte {begin + len(data)}, "
                    f"{offset + len(view)} were asked for",
                    uri=uri,
                )
            part[:] = data

    def close(self) -> None:
        self._closed = True
