"""One file through fsspec: written by one stream, read by ranges.

bucket kinds   the stream is an upload: committed on close, thrown away on abort
tree kinds     the stream is .partial-* in the same directory, moved over the key on close
"""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import threading
from typing import Any, Final

from ckptfs.errors import IntegrityError, StorageError
from ckptfs.storage.base import DataReader, DataWriter
from ckptfs.storage.fsspec_client import Client
from ckptfs.uri import Uri, mask_credentials

__all__ = ["Ranges", "Stream"]

_log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 16 << 20  # parts of a bucket's stream: S3 takes 10,000 of them, 160 GB a file
_READ_BYTES: Final = 64 << 20
_WEB: Final = ("http", "https")
_GONE: Final = (404, 410)


class Stream(DataWriter):
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
                block = bytes(view[sent : sent + _BLOCK_BYTES])
                written = self._file.write(block)
                # paramiko's writes all, and says nothing.
                sent += len(block) if written is None else written
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
                with self._client.turn():
                    if stream is not None:
                        stream.close()
                    self._client.fs.rm_file(self._path)
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001 - the error that brought us here is the one to tell
            # Where the file was never opened, nothing of it is known to be there.
            level = logging.DEBUG if stream is None else logging.WARNING
            _log.log(level, "left behind: %s (%s)", self._uri, mask_credentials(str(error)))

    @property
    def _uri(self) -> Uri:
        return self._client.uri(self._key)

    def _begin(self) -> Any:
        fs, library = self._client.fs, self._client.library
        if library is not None:
            return library.open_write(fs, self._path, _BLOCK_BYTES)
        if self._client.is_bucket:
            return fs.open(self._path, "wb", autocommit=False, block_size=_BLOCK_BYTES)
        # An object store has no parents to make, so our callers make none.
        self._client.make_parents(self._path.rpartition("/")[0])
        return fs.open(self._path, "wb")

    def _move(self) -> None:
        try:
            self._client.move(self._path, self._target)
        except FileExistsError:
            # Some SFTP and SMB servers do not rename over: last wins means taking it away first.
            self._client.fs.rm_file(self._target)
            self._client.move(self._path, self._target)


class Ranges(DataReader):
    """Ranged reads of one file, one request after another, each at most 64 MiB.

    A web server that ignores ranges is found out by its first answer, before its body is read; then the
    file is fetched whole, once, into a temporary file (the first 64 MiB of it in memory).
    """

    def __init__(self, client: Client, key: str, size_bytes: int) -> None:
        self._client = client
        self._key = key
        self._closed = False
        self._file: Any = None
        self._whole: tempfile.SpooledTemporaryFile[bytes] | None = None
        self._lock = threading.Lock()
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        uri = self._client.uri(self._key)
        if self._closed:
            raise StorageError("the reader is closed", uri=uri)
        view = buffer.cast("B")
        for start in range(0, len(view), _READ_BYTES):
            part = view[start : start + _READ_BYTES]
            begin = offset + start
            data = b""
            if begin < self.size_bytes:
                with self._client.said("read", self._key):
                    data = self._read(begin, min(begin + len(part), self.size_bytes))
            if len(data) != len(part):
                raise IntegrityError(
                    f"the file ends at byte {begin + len(data)}, "
                    f"{offset + len(view)} were asked for",
                    uri=uri,
                )
            part[:] = data

    def close(self) -> None:
        self._closed = True
        with self._lock:
            whole, self._whole = self._whole, None
            if whole is not None:
                whole.close()

    def _read(self, begin: int, end: int) -> bytes:
        client = self._client
        if client.protocol not in _WEB:
            return client.read_range(client.at(self._key), begin, end)
        if self._whole is None:
            try:
                return self._read_range(begin, end)
            except ValueError:
                # fsspec's answer to a body that is no range, from which nothing was read.
                _log.info("%s: the server ignores ranges, it is read whole", self._uri)
        with self._lock:
            if self._whole is None:
                self._whole = self._fetch()
            self._whole.seek(begin)
            return self._whole.read(end - begin)

    def _read_range(self, begin: int, end: int) -> bytes:
        if self._file is None:
            self._file = self._client.fs.open(self._client.at(self._key), size=self.size_bytes)
        try:
            # The seam of fsspec's buffered files. Unlike cat_file it looks at the answer first.
            return bytes(self._file._fetch_range(begin, end))  # noqa: SLF001
        except Exception as error:
            if getattr(error, "status", None) in _GONE:
                raise FileNotFoundError(f"{type(error).__name__}: {self._key}") from error
            raise

    def _fetch(self) -> tempfile.SpooledTemporaryFile[bytes]:
        whole = tempfile.SpooledTemporaryFile(max_size=_READ_BYTES)  # noqa: SIM115 - until close
        try:
            with self._client.fs.open(self._client.at(self._key), block_size=0) as stream:
                shutil.copyfileobj(stream, whole, _BLOCK_BYTES)
        except BaseException:
            whole.close()
            raise
        return whole

    @property
    def _uri(self) -> Uri:
        return self._client.uri(self._key)
