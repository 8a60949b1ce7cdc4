"""HDFS as an object store: keys that appear whole, by one rename of a file that nobody reads.

    create      temporary file at the staging key, closed -> rename, refused if the key is taken
    replace     .partial-* beside the key, closed         -> rename over what is there
    open_write  .partial-* beside the key, streamed       -> rename over what is there
    open_read   ranges, from DataNodes straight into the caller's buffers

HDFS has directories, and its rename of one onto another moves it *into* that one; so no directory
is ever renamed here, and a key is all there is: parents are made by the write that needs them and
removed when their last key is.

This is ``webhdfs://``. ``hdfs://`` goes through fsspec, pyarrow and libhdfs (``fsspec_store``), which have
no rename that refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    MissingDriverError,
    NotFoundError,
    StorageError,
    UnsupportedError,
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
from ckptfs.storage.hdfs_aside import PARTIAL, Aside, beside
from ckptfs.storage.hdfs_client import HdfsClient, Status
from ckptfs.storage.hdfs_options import web_options
from ckptfs.storage.hdfs_streams import Reader, Writer
from ckptfs.storage.options import ObjectOptions
from ckptfs.storage.os_errors import too_large
from ckptfs.storage.retry import Retrier, RetryPolicy, notice_of
from ckptfs.uri import Uri

__all__ = ["WebHdfsStorage", "open_webhdfs"]


def open_webhdfs(uri: Uri, storage_options: Mapping[str, Any]) -> WebHdfsStorage:
    """The registry's factory. UriError: an unknown option; MissingDriverError: a missing library."""
    try:
        from ckptfs.storage.hdfs_web import WebClient
    except ImportError as error:
        raise MissingDriverError(
            f"the library of webhdfs:// does not import: {error}",
            uri=uri,
            hint="pip install requests",
        ) from error
    ours, options, creating = web_options(uri, storage_options)
    return WebHdfsStorage(uri, WebClient(uri, options, ours.times, creating), ours)


class WebHdfsStorage(Storage):
    """Bytes below one directory of an HDFS, through one client. Thread-safe, picklable."""

    def __init__(self, root: Uri, client: HdfsClient, options: ObjectOptions | None = None) -> None:
        options = options or ObjectOptions()
        self.root = root
        self._client = client
        self._concurrency = options.concurrency
        notice = notice_of(client.endpoint)
        retrier = Retrier(client.endpoint, RetryPolicy(options.retry_s), notice=notice)
        self._aside = Aside(client, retrier)
        # Staging keys of creates without an answer, with what they may have left.
        self._left: dict[str, list[str]] = {}

    @property
    def capabilities(self) -> Capabilities:
        """durable is False: an answered close means that every DataNode of the pipeline has the
        bytes, in memory until its kernel writes them; dfs.datanode.synconclose is off by default.
        Names are on the NameNode's disk. A node may die, the whole cluster may not lose power.
        """
        return Capabilities(
            shape=Shape.OBJECT,
            exclusive_create=self._client.powers.refuses,
            atomic_replace=self._client.powers.replaces,
            conditional_replace=False,
            durable=False,
        )

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        path = self._at(key)
        return self._aside.again(lambda: self._client.read(path))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        # One byte more than it may have tells that it has too many.
        path = self._at(key)
        data = self._aside.again(lambda: self._client.read(path, limit_bytes + 1))
        if len(data) > limit_bytes:
            raise too_large(self.uri(key), len(data), limit_bytes)
        return data

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        target, staged = self._at(key), self._at(staging)
        if not self._client.powers.refuses:
            raise UnsupportedError(
                "no exclusive create here: this client's rename replaces what is in the way",
                uri=self.uri(key),
                hint="webhdfs:// has one; see docs/stores/hdfs.md",
            )
        mine = self._aside.put(staged, data)
        self._left.setdefault(staged, []).append(mine)
        try:
            self._aside.exclude(mine, target, self.uri(key))
        except AnswerLostError:
            raise  # it may yet happen, and only while the source stays
        except BaseException:
            self._clean(staged)
            raise
        self._left[staged].remove(mine)
        self._clean(staged)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        if if_match is not None:
            raise UnsupportedError("HDFS has no conditional replace", uri=self.uri(key))
        target = self._at(key)
        self._aside.publish(self._aside.put(beside(target), data), target, self.uri(key))

    def stat(self, key: str) -> Stat:
        found = self._status(key)
        return Stat(
            found.size_bytes,
            is_dir=False,
            etag=_etag(found),
            modified_s=found.modified_ms / 1000 or None,
        )

    def list(self, key: str) -> list[Entry]:
        found = self._listed(self._at(key))
        return usable((entry for entry, _ in found), self.uri(key))

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        del size_hint_bytes
        return Writer(self._aside, self.uri(key), self._at(key))

    def open_read(self, key: str) -> DataReader:
        found = self._status(key)
        source = self._client.open(self._at(key), found)
        return Reader(self._aside, self.uri(key), source, found.size_bytes, self._concurrency)

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        self.uri(key)

    def rename(self, source: str, target: str) -> None:
        self.uri(target)
        raise UnsupportedError("HDFS is used as an object store here", uri=self.uri(source))

    def remove(self, key: str) -> None:
        if self._was_there(self._at(key)):
            self._prune([key])

    def remove_many(self, keys: Sequence[str]) -> None:
        failures: list[StorageError] = []
        removed: list[str] = []

        def one(key: str) -> None:
            try:
                if self._was_there(self._at(key)):
                    removed.append(key)
            except StorageError as error:
                failures.append(error)

        for key in keys:
            self.uri(key)
        with ThreadPoolExecutor(max(1, min(self._concurrency, len(keys)))) as pool:
            list(pool.map(one, keys))
        self._prune(removed)
        if failures:
            raise first_of(failures, len(keys))

    def remove_dir(self, key: str) -> None:
        self.uri(key)

    def remove_tree(self, key: str) -> None:
        path = self._at(key)
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        if self._aside.again(lambda: self._client.delete(path, recursive=True)):
            self._prune([key])

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        self.uri(key)

    def refresh(self, key: str) -> None:
        self.uri(key)

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        """Delete files on their way that nobody finished, by the NameNode's clock, which notes a
        file's time when it is closed: also when its writer died.
        """
        swept, root = 0, self._at("").rstrip("/") + "/"
        for path, age_s in self._partials():
            if age_s > older_than_s and (keys is None or path.removeprefix(root) in keys):
                swept += self._was_there(path)
        return swept

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        root = self._at("").rstrip("/") + "/"
        return tuple(
            UnfinishedUpload(path.removeprefix(root), age_s) for path, age_s in self._partials()
        )

    def _partials(self) -> Iterator[tuple[str, float]]:
        """Paths and ages of files on their way."""
        folders = [self._at("")]
        while folders:
            folder = folders.pop()
            found = self._listed(folder)
            now_ms = self._client.now_ms()
            for entry, status in found:
                path = f"{folder.rstrip('/')}/{entry.name}"
                if entry.is_dir:
                    folders.append(path)
                elif entry.name.startswith(PARTIAL) and status.modified_ms > 0:
                    yield path, (now_ms - status.modified_ms) / 1000

    def space(self) -> Space | None:
        """None: what is free depends on quotas of any directory above, counted with all copies."""
        return None

    def close(self) -> None:
        self._client.close()

    # -- inside ------------------------------------------------------------------------

    def _at(self, key: str) -> str:
        return self.uri(key).path or "/"

    def _status(self, key: str) -> Status:
        path = self._at(key)
        found = self._aside.again(lambda: self._client.status(path))
        if found.is_dir:
            raise NotFoundError("a directory, not a file", uri=self.uri(key))
        return found

    def _listed(self, path: str) -> Sequence[tuple[Entry, Status]]:
        try:
            return self._aside.again(lambda: self._client.list(path))
        except NotFoundError:
            return []

    def _was_there(self, path: str) -> bool:
        """Whether this deleted a file (or an empty directory, which is nothing)."""
        try:
            return self._aside.again(lambda: self._client.delete(path, recursive=False))
        except (NotFoundError, AlreadyExistsError):
            return False  # a directory with keys below it is no object

    def _prune(self, keys: Sequence[str]) -> None:
        """Remove the directories of removed keys, if these were their last: here nothing but a key
        exists. Of removed ones only: what holds a file was a directory, and no file is hit.
        """
        done: set[str] = set()
        for key in keys:
            parent = key.rpartition("/")[0]
            while parent and parent not in done:
                done.add(parent)
                try:
                    self._client.delete(self._at(parent), recursive=False)
                except StorageError:
                    break  # it is not empty, or may not be removed: neither is a failure
                parent = parent.rpartition("/")[0]

    def _clean(self, staged: str) -> None:
        """The outcome of a create is known: nothing that it left is needed."""
        for path in self._left.pop(staged, []):
            self._aside.drop(path)


def _etag(status: Status) -> str | None:
    return None if status.file_id is None else f"{status.file_id}-{status.size_bytes}"
