"""HDFS through the Java client: pyarrow's HadoopFileSystem over libhdfs. Plain reads and writes only.

What it lacks decides what it may be used for (Arrow's hdfs.cc and Hadoop's hdfs.c, read in 2026-11):

    move          renames, and if that fails over two files *deletes the one in the way* and renames
                  again: no exclusive create, so run logs are kept apart by write id (advisory), and
                  a replace shows nothing for a moment
    get_file_info answers "not found" for every error: absence is asked for by opening
    delete_dir    is recursive: an empty directory cannot be removed safely, and is left
    fork          a Java machine does not survive it: a child that inherited one is refused

Its client finds the active NameNode, reads Hadoop's own configuration and Kerberos tickets, and is
the faster way to the bytes. Not run in this project's tests beyond the missing library: they have
no libhdfs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, TypeVar

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    IntegrityError,
    MissingDriverError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.base import Entry
from ckptfs.storage.hdfs_client import HdfsClient, Over, Powers, Sink, Source, Status
from ckptfs.storage.os_errors import typed
from ckptfs.uri import Uri, mask_credentials

__all__ = ["ArrowClient"]

T = TypeVar("T")

arrow: Any = import_module("pyarrow.fs")  # it ships no types

_EINTERNAL: Final = 255  # libhdfs: a Java exception that it has no number for
_LIBRARIES: Final = ("libjvm", "libhdfs", "JNI")


class ArrowClient(HdfsClient):
    """One HDFS. ``options`` are the arguments of pyarrow.fs.HadoopFileSystem."""

    powers = Powers(refuses=False, replaces=False)

    def __init__(self, root: Uri, options: Mapping[str, Any]) -> None:
        self._root = root
        self._options = dict(options)
        self._lock = threading.Lock()
        self._opened: tuple[int, Any] | None = None
        port = options.get("port")
        self.endpoint = f"hdfs://{options['host']}" + (f":{port}" if port else "")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    # -- operations ----------------------------------------------------------------------

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        def read() -> bytes:
            with self._fs.open_input_file(path) as file:
                return bytes(file.read(most_bytes))

        return self._said("read", path, read)

    def status(self, path: str) -> Status:
        def look() -> Status:
            info = self._fs.get_file_info(path)
            if info.type == arrow.FileType.Directory:
                return Status(0, is_dir=True)
            with self._fs.open_input_file(path) as file:
                return Status(int(file.size()), is_dir=False)

        return self._said("stat", path, look)

    def list(self, path: str) -> list[tuple[Entry, Status]]:
        def look() -> list[tuple[Entry, Status]]:
            found = self._fs.get_file_info(arrow.FileSelector(path, allow_not_found=False))
            return [(Entry(one.base_name, _is_dir(one)), _status(one)) for one in found]

        return self._said("list", path, look)

    def put(self, path: str, data: bytes) -> None:
        sink = self.begin(path)
        sink.send(memoryview(data))
        sink.finish()

    def begin(self, path: str) -> Sink:
        stream = self._said("create", path, lambda: self._fs.open_output_stream(path))
        return _Stream(self, path, stream)

    def open(self, path: str, status: Status) -> Source:
        file = self._said("open", path, lambda: self._fs.open_input_file(path))
        return _Ranges(self, path, file)

    def rename(self, source: str, target: str, over: Over) -> None:
        if over is Over.REFUSE:
            raise UnsupportedError(
                "libhdfs has no rename that refuses to replace", uri=self._uri(target)
            )
        self._said("rename", target, lambda: self._fs.move(source, target), changes=True)

    def make_dirs(self, path: str) -> None:
        self._said("make_dir", path, lambda: self._fs.create_dir(path, recursive=True))

    def delete(self, path: str, *, recursive: bool) -> bool:
        try:
            found = self.status(path)
        except NotFoundError:
            return False
        if found.is_dir and not recursive:
            raise AlreadyExistsError("libhdfs removes no empty directory", uri=self._uri(path))
        remove = self._fs.delete_dir if found.is_dir else self._fs.delete_file
        try:
            self._said("remove", path, lambda: remove(path), changes=True)
        except AccessError:
            raise
        except StorageError as error:
            # Somebody else may have removed it, or a part of it, meanwhile: that is asked again.
            raise TransientError(error.message, uri=self._uri(path)) from error
        return True

    def close(self) -> None:
        with self._lock:
            self._opened = None

    # -- inside --------------------------------------------------------------------------

    @property
    def _fs(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = (os.getpid(), self._connect())
            pid, fs = self._opened
        if pid != os.getpid():
            raise UnsupportedError(
                "this process was forked from one that uses libhdfs, whose Java machine does not "
                "survive that",
                uri=self._root,
                hint="start processes with 'spawn', or use webhdfs://",
            )
        return fs

    def _connect(self) -> Any:
        failure: Exception
        try:
            return arrow.HadoopFileSystem(**self._options)
        except OSError as error:
            text = str(error)
            if any(library in text for library in _LIBRARIES):
                failure = MissingDriverError(
                    f"hdfs:// needs libhdfs and Java: {text.splitlines()[0]}",
                    uri=self._root,
                    hint="set JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR) and CLASSPATH=$(hadoop "
                    "classpath --glob), or use webhdfs:// (docs/stores/hdfs.md)",
                )
            else:
                failure = TransientError(
                    f"no connection to {self.endpoint}: {mask_credentials(text.splitlines()[0])}",
                    uri=self._root,
                    hint="check host, port, Kerberos ticket and Hadoop's own configuration",
                )
        raise failure

    def _uri(self, path: str) -> Uri:
        key = path.removeprefix(self._root.path.rstrip("/")).lstrip("/")
        return self._root / key if key and path != key else self._root

    def _said(self, action: str, path: str, call: Callable[[], T], *, changes: bool = False) -> T:
        try:
            return call()
        except StorageError:
            raise
        except OSError as error:
            found = typed(error, self._uri(path), action)
            if type(found) is StorageError and error.errno in (None, errno.EIO, _EINTERNAL):
                # The Java client tried again and failed over before it said so.
                kind = AnswerLostError if changes else TransientError
                found = kind(found.message, uri=self._uri(path), hint="the log of Hadoop says why")
            raise found from error


class _Stream(Sink):
    def __init__(self, client: ArrowClient, path: str, stream: Any) -> None:
        self._client = client
        self._path = path
        self._stream = stream

    def send(self, data: memoryview) -> None:
        self._client._said("write", self._path, lambda: self._stream.write(data))  # noqa: SLF001

    def finish(self) -> None:
        self._client._said("close", self._path, self._stream.close)  # noqa: SLF001

    def drop(self) -> bool:
        try:
            self._stream.close()
        except OSError:
            return False
        return True


class _Ranges(Source):
    def __init__(self, client: ArrowClient, path: str, file: Any) -> None:
        self._client = client
        self._path = path
        self._file = file

    def read_into(self, offset: int, out: memoryview) -> None:
        def read() -> bytes:
            return bytes(self._file.read_at(len(out), offset))

        data = self._client._said("read", self._path, read)  # noqa: SLF001 - one module
        if len(data) != len(out):
            raise IntegrityError(
                f"the file ends at byte {offset + len(data)}",
                uri=self._client._uri(self._path),  # noqa: SLF001 - one module
            )
        out[:] = data

    def close(self) -> None:
        self._file.close()


def _is_dir(info: Any) -> bool:
    return bool(info.type == arrow.FileType.Directory)


def _status(info: Any) -> Status:
    return Status(0 if _is_dir(info) else int(info.size), _is_dir(info))
