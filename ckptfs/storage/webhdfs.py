"""HDFS over HTTP (WebHDFS), used as an object store.

    create       a temporary file at the staging key, closed, then renamed; refused if the key exists
    replace      a temporary file next to the key, closed, then renamed over the key
    open_write   the same, streamed
    open_read    ranges of one inode

HDFS renames a directory *into* an existing directory and reports success, so no directory is ever
renamed here. Only keys count: the write that needs a parent makes it, and the parent is removed with
its last key. ``clients/webhdfs_client`` makes the requests.

This is ``webhdfs://``. ``hdfs://`` goes through fsspec, pyarrow and libhdfs (``fsspec_store``), which
have no rename that refuses to replace.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from fsspec.implementations.webhdfs import WebHDFS

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    IntegrityError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
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
    UnfinishedUpload,
    first_of,
    usable,
)
from ckptfs.storage.clients.webhdfs_client import (
    FileStatus,
    RenameOptions,
    StreamedPut,
    WebHdfsClient,
)
from ckptfs.storage.options import ObjectOptions, parse_options
from ckptfs.storage.os_errors import too_large
from ckptfs.storage.retry import NOT_DONE, Retrier, RetryPolicy, warning_limit_of
from ckptfs.storage.threads import Threads
from ckptfs.uri import Uri

__all__ = ["WebHdfsStorage", "open_webhdfs"]

log = logging.getLogger("ckptfs.storage")
T = TypeVar("T")

_PARTIAL: Final = ".partial-"
_INODES: Final = "/.reserved/.inodes"
_GATHER_BYTES: Final = 1 << 20  # smaller writes are sent together
_WINDOW_BYTES: Final = 16 << 20  # each range costs the NameNode an operation
_LATE_TRIES: Final = 5
_LATE_S: Final = 0.1
_PARENT_TRIES: Final = 5  # others may remove an empty directory as often as we make it


# -- options -----------------------------------------------------------------------------------

_OURS: Final = ("concurrency", "retry_s", "connect_timeout_s", "request_timeout_s")
_OF_NEW_FILES: Final = {"replication": "replication", "block_size_bytes": "blocksize"}
_OF_FSSPEC: Final = frozenset(inspect.signature(WebHDFS.__init__).parameters) - {"self", "kwargs"}
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def open_webhdfs(uri: Uri, storage_options: Mapping[str, Any]) -> WebHdfsStorage:
    """Open ``webhdfs://``: the registry's factory. It does no I/O.

    Args:
        uri: ``webhdfs://[user[:password]@]host[:port]/path``.
        storage_options: The arguments of fsspec's ``WebHDFS``, which win over the URI;
            ``replication`` and ``block_size_bytes`` of new files; ``concurrency``, ``retry_s``,
            ``connect_timeout_s`` and ``request_timeout_s``. Without any user, HADOOP_USER_NAME is
            used.

    Raises:
        UriError: An option is unknown, or its value is not valid.
    """
    known = {*_OF_FSSPEC, *_OF_NEW_FILES, *_OURS}
    for name in sorted(storage_options.keys() - known):
        raise UriError(
            f"webhdfs:// has no storage option {name!r}",
            uri=uri,
            hint=f"it has {', '.join(sorted(known))}",
        )
    ours, others = parse_options(uri, storage_options)
    creating = {
        parameter: str(_number(uri, name, others.pop(name)))
        for name, parameter in _OF_NEW_FILES.items()
        if name in others
    }
    options = {**_server_of(uri), **others}
    if not options.get("host"):
        raise UriError("the URI names no NameNode", uri=uri, hint="write webhdfs://host:port/path")
    for name in ("kerberos", "use_https", "session_verify"):
        if isinstance(word := options.get(name), str) and word.lower() in _BOOLEANS:
            options[name] = _BOOLEANS[word.lower()]
    if "port" in options:
        options["port"] = _number(uri, "port", options["port"])
    named = any(options.get(name) for name in ("user", "token", "kerberos"))
    if not named and (user := os.environ.get("HADOOP_USER_NAME")):
        options["user"] = user
    return WebHdfsStorage(uri, WebHdfsClient(uri, options, ours.times, creating), ours)


def _server_of(uri: Uri) -> dict[str, Any]:
    parts = urlsplit(f"//{uri.authority}")
    user, _, password = uri.userinfo.partition(":")
    try:
        found = {"host": parts.hostname, "port": parts.port, "user": user, "password": password}
    except ValueError as error:
        raise UriError(f"no port number in {uri.authority!r}", uri=uri) from error
    return {name: value for name, value in found.items() if value}


def _number(uri: Uri, name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as error:
        raise UriError(f"storage option {name}={value!r}: it takes a number", uri=uri) from error


# -- the storage -------------------------------------------------------------------------------


class WebHdfsStorage(Storage):
    """Bytes below one directory of an HDFS. Thread-safe, picklable, usable after a fork."""

    def __init__(self, root: Uri, client: WebHdfsClient, options: ObjectOptions) -> None:
        self.root = root
        self._client = client
        self._concurrency = options.concurrency
        retrier = Retrier(
            client.endpoint,
            RetryPolicy(options.retry_s),
            warning_limit=warning_limit_of(client.endpoint),
        )
        self._files = _TemporaryFiles(client, retrier)
        # Staging keys of creates that got no answer, with the temporary files that they may have left.
        self._unanswered: dict[str, list[str]] = {}

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of HDFS. ``durable`` is False.

        When a file is closed, its bytes are in the memory of every DataNode of the pipeline, and on
        disk once their kernels write them (dfs.datanode.synconclose is off by default). Names are
        on the NameNode's disk. So a power cut of single nodes loses nothing, one of all nodes may.
        """
        return Capabilities(
            shape=Shape.OBJECT,
            exclusive_create=True,
            atomic_replace=True,
            conditional_replace=False,
            durable=False,
        )

    # -- small, whole --

    def read(self, key: str) -> bytes:
        path = self._path(key)
        return self._files.retry(lambda: self._client.read(path))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        # One byte more than allowed shows that there are too many, whatever the file's size.
        path = self._path(key)
        data = self._files.retry(lambda: self._client.read(path, limit_bytes + 1))
        if len(data) > limit_bytes:
            raise too_large(self.uri(key), len(data), limit_bytes)
        return data

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        target, staged = self._path(key), self._path(staging)
        path = self._files.write(staged, data)
        self._unanswered.setdefault(staged, []).append(path)
        try:
            self._files.rename(path, target, self.uri(key), "NONE")
        except AnswerLostError:
            raise  # it may still happen, as long as the source stays
        except BaseException:
            self._clean(staged)
            raise
        self._unanswered[staged].remove(path)
        self._clean(staged)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        if if_match is not None:
            raise UnsupportedError("HDFS has no conditional replace", uri=self.uri(key))
        target = self._path(key)
        self._files.publish(
            self._files.write(_temporary_prefix(target), data), target, self.uri(key)
        )

    def stat(self, key: str) -> Stat:
        found = self._status(key)
        etag = None if found.file_id is None else f"{found.file_id}-{found.size_bytes}"
        return Stat(
            found.size_bytes, is_dir=False, etag=etag, modified_s=found.modified_ms / 1000 or None
        )

    def list(self, key: str) -> list[Entry]:
        found = self._listing(self._path(key))
        return usable((Entry(name, status.is_dir) for name, status in found), self.uri(key))

    # -- large, streamed --

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        del size_hint_bytes
        return WebHdfsWriter(self._files, self.uri(key), self._path(key))

    def open_read(self, key: str) -> DataReader:
        status = self._status(key)
        return WebHdfsReader(self._files, self.uri(key), self._path(key), status, self._concurrency)

    # -- names --

    def make_dir(self, key: str) -> None:
        self.uri(key)

    def rename(self, source: str, target: str) -> None:
        self.uri(target)
        raise UnsupportedError("HDFS is used as an object store here", uri=self.uri(source))

    def remove(self, key: str) -> None:
        if self._delete(self._path(key)):
            self._prune([key])

    def remove_many(self, keys: Sequence[str]) -> None:
        waiting = deque((key, self._path(key)) for key in keys)
        failures: list[StorageError] = []
        removed: list[str] = []

        def work() -> None:
            while True:
                try:
                    key, path = waiting.popleft()
                except IndexError:
                    return
                try:
                    if self._delete(path):
                        removed.append(key)
                except StorageError as error:
                    failures.append(error)

        with Threads(self._concurrency, "ckptfs-webhdfs") as helpers:
            # If no thread can be started, this one does all of it.
            with contextlib.suppress(RuntimeError):
                for _ in range(min(self._concurrency, len(keys)) - 1):
                    helpers.submit(work)
            work()
        self._prune(removed)
        if failures:
            raise first_of(failures, len(keys))

    def remove_dir(self, key: str) -> None:
        self.uri(key)

    def remove_tree(self, key: str) -> None:
        path = self._path(key)
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        if self._files.retry(lambda: self._client.delete(path, recursive=True)):
            self._prune([key])

    # -- certainty --

    def sync(self, key: str) -> None:
        self.uri(key)

    def refresh(self, key: str) -> None:
        self.uri(key)

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        """Delete temporary files that were never finished.

        Their age is by the NameNode's clock, which dates a file when it is closed, even after its
        writer died.
        """
        return sum(
            self._delete(self._path(key))
            for key, age_s in self._partial_files()
            if age_s > older_than_s and (keys is None or key in keys)
        )

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        return tuple(UnfinishedUpload(key, age_s) for key, age_s in self._partial_files())

    def space(self) -> Space | None:
        """Return None: the free space depends on the quotas of all directories above.

        Quotas count all copies of a block.
        """
        return None

    def close(self) -> None:
        self._client.close()

    # -- inside --

    def _path(self, key: str) -> str:
        return self.uri(key).path or "/"

    def _status(self, key: str) -> FileStatus:
        path = self._path(key)
        found = self._files.retry(lambda: self._client.status(path))
        if found.is_dir:
            raise NotFoundError("a directory, not a file", uri=self.uri(key))
        return found

    def _listing(self, path: str) -> Sequence[tuple[str, FileStatus]]:
        try:
            return self._files.retry(lambda: self._client.list(path))
        except NotFoundError:
            return []

    def _partial_files(self) -> Iterator[tuple[str, float]]:
        """Yield keys and ages of temporary files below the root."""
        folders = [""]
        while folders:
            folder = folders.pop()
            found = self._listing(self._path(folder))
            now_ms = self._client.now_ms
            for name, status in found:
                key = f"{folder}/{name}" if folder else name
                if status.is_dir:
                    folders.append(key)
                elif name.startswith(_PARTIAL) and status.modified_ms > 0 and now_ms > 0:
                    yield key, (now_ms - status.modified_ms) / 1000

    def _delete(self, path: str) -> bool:
        """Delete a file or an empty directory. Returns whether there was one."""
        try:
            return self._files.retry(lambda: self._client.delete(path, recursive=False))
        except (NotFoundError, AlreadyExistsError):
            return False  # a directory with keys below it is no object

    def _prune(self, keys: Sequence[str]) -> None:
        """Remove the directories of removed keys if these were their last keys.

        Only for keys that existed: then their parents are directories, and no file is deleted.
        """
        done: set[str] = set()
        for key in keys:
            parent = key.rpartition("/")[0]
            while parent and parent not in done:
                done.add(parent)
                try:
                    self._client.delete(self._path(parent), recursive=False)
                except StorageError:
                    break  # it is not empty, or may not be removed: neither is a failure
                parent = parent.rpartition("/")[0]

    def _clean(self, staged: str) -> None:
        """Delete the temporary files of a create with a known outcome: none of them is needed."""
        for path in self._unanswered.pop(staged, []):
            self._files.delete(path)


# -- temporary files ---------------------------------------------------------------------------


def _temporary_prefix(path: str) -> str:
    """Return the prefix of temporary files for ``path``."""
    return f"{path.rpartition('/')[0]}/{_PARTIAL}"


class _TemporaryFiles:
    """Files under names that no request used before, renamed to their keys when they are complete.

    Each try has a new name, because a delayed CREATE of an earlier try would truncate the very file
    that is being renamed. It also makes the rename decisive: no other process moves that name, so
    the rename can be repeated until it is answered. If the source is gone after an answer was lost,
    the rename succeeded.
    """

    def __init__(self, client: WebHdfsClient, retrier: Retrier) -> None:
        self.client = client
        self._retrier = retrier

    def retry(self, request: Callable[[], T]) -> T:
        """Repeat a request until it is answered or time is over.

        Doing the request twice must be the same as doing it once.
        """
        return self._retrier.run(request)

    def write(self, prefix: str, data: bytes) -> str:
        """Write a new file and close it. Returns its path."""
        return self.retry(lambda: self._write(f"{prefix}{secrets.token_hex(8)}", data))

    def _write(self, path: str, data: bytes) -> str:
        try:
            self.client.put(path, data)
            self.client.check_size(path, len(data))
        except BaseException as error:
            self.delete(path, late=isinstance(error, TransientError))
            raise
        return path

    def begin(self, prefix: str, tried: list[str]) -> StreamedPut:
        """Begin a new file to be streamed.

        Every path that was tried is appended to ``tried``; the last one is that of the file.
        """

        def begin() -> StreamedPut:
            tried.append(path := f"{prefix}{secrets.token_hex(8)}")
            return StreamedPut(lambda body: self.client.put(path, body))

        return self._retrier.run(begin, after=NOT_DONE)

    def publish(self, path: str, target: str, uri: Uri) -> None:
        """Rename ``path`` over the key ``target``.

        If that certainly failed, ``path`` is deleted.
        """
        try:
            self.rename(path, target, uri, "OVERWRITE")
        except AnswerLostError:
            raise  # it may still happen
        except BaseException:
            self.delete(path)
            raise

    def rename(self, path: str, target: str, uri: Uri, rename_options: RenameOptions) -> None:
        """Rename ``path`` to the key ``target``.

        Raises:
            AlreadyExistsError: The key exists, and ``rename_options`` is "NONE".
            AnswerLostError: No answer came until ``retry_s`` was over.
        """
        lost = False

        def rename() -> None:
            nonlocal lost
            try:
                self.client.rename(path, target, rename_options)
            except AnswerLostError:
                lost = True
                raise

        for _ in range(_PARENT_TRIES):
            try:
                self.retry(rename)
                return
            except NotFoundError:
                if not self._exists(path):
                    if lost:
                        return
                    raise TransientError(
                        "the temporary file is gone: another program removed it", uri=uri
                    ) from None
            self.retry(lambda: self.client.make_dirs(target.rpartition("/")[0] or "/"))
        raise TransientError(
            "another program removes the key's directory each time it is made", uri=uri
        )

    def _exists(self, path: str) -> bool:
        try:
            self.retry(lambda: self.client.status(path))
        except NotFoundError:
            return False
        return True

    def delete(self, path: str, *, late: bool = False) -> None:
        """Delete a temporary file. Never raises a StorageError.

        Args:
            path: The file.
            late: Try again for a while, because an interrupted request may make the file only
                later.
        """
        for turn in range(_LATE_TRIES if late else 1):
            if turn:
                time.sleep(_LATE_S)
            try:
                if self.client.delete(path, recursive=False):
                    return
            except StorageError as error:
                log.info("left behind until it is swept: %s (%s)", path, error)
                return


class WebHdfsWriter(DataWriter):
    """One file, under a temporary name until it is closed. Nothing is sent before 1 MiB or close.

    ``write`` returns when the connection has taken the bytes, so there is no ``lend``.
    """

    def __init__(self, files: _TemporaryFiles, uri: Uri, target: str) -> None:
        self._files = files
        self._uri = uri
        self._target = target
        self._tried: list[str] = []
        self._small = bytearray()
        self._put: StreamedPut | None = None
        self._size_bytes = 0
        self._done = False
        self._broken = False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._done or self._broken:
            raise StorageError("the file cannot be written any more", uri=self._uri)
        view = memoryview(data).cast("B")
        self._broken = True  # until this write is complete
        if len(self._small) + len(view) < _GATHER_BYTES:
            self._small += view
        else:
            self._send_small()
            self._send(view)
        self._broken = False
        return len(view)

    def close(self) -> None:
        if self._done:
            return
        if self._broken:
            raise StorageError("the file cannot be closed: a write failed", uri=self._uri)
        self._broken = True
        self._send_small()
        self._begun().finish()
        self._files.client.check_size(self._tried[-1], self._size_bytes)
        self._files.publish(self._tried.pop(), self._target, self._uri)
        self._done = True
        self._delete_tried()

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        self._small = bytearray()
        if self._put is not None and self._put.abort() and self._tried:
            self._files.delete(self._tried.pop())
        self._delete_tried()

    def _begun(self) -> StreamedPut:
        # Only here can the request be repeated with another DataNode and name, because sent bytes
        # are not kept.
        if self._put is None:
            self._put = self._files.begin(_temporary_prefix(self._target), self._tried)
        return self._put

    def _send(self, data: memoryview) -> None:
        if len(data):
            self._begun().send(data)
            self._size_bytes += len(data)

    def _send_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._send(memoryview(small))

    def _delete_tried(self) -> None:
        """Delete the files that interrupted tries may have made."""
        while self._tried:
            self._files.delete(self._tried.pop(), late=True)


class WebHdfsReader(DataReader):
    """Ranges of one inode.

    If a file is renamed over the key, the old file is still the one that is read.
    """

    def __init__(
        self, files: _TemporaryFiles, uri: Uri, path: str, status: FileStatus, concurrency: int
    ) -> None:
        self._files = files
        self._uri = uri
        self._path = path
        self._id = status.file_id
        self._by_id = status.file_id is not None
        self._closed = False
        self.size_bytes = status.size_bytes
        self.concurrency = concurrency
        self.window_bytes = _WINDOW_BYTES

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise StorageError("the reader is closed", uri=self._uri)
        view = buffer.cast("B")
        if offset + len(view) > self.size_bytes:
            raise IntegrityError(
                f"the file has {self.size_bytes} bytes, but {offset + len(view)} were requested",
                uri=self._uri,
            )
        if len(view):
            self._files.retry(lambda: self._read_into(offset, view))

    def close(self) -> None:
        self._closed = True

    def _read_into(self, offset: int, view: memoryview) -> None:
        client = self._files.client
        if self._by_id:
            try:
                client.read_into(f"{_INODES}/{self._id}", offset, view, shown=self._path)
                return
            except (NotFoundError, UnsupportedError):
                if client.status(self._path).file_id != self._id:
                    raise StaleError(
                        "the file was replaced or removed during the read",
                        uri=self._uri,
                        hint="open it again",
                    ) from None
                self._by_id = False  # the router of a federation knows no inodes
        client.read_into(self._path, offset, view)
