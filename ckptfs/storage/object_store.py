"""An object store: keys, no directories, no rename. All decisions that client libraries share.

    read create replace stat list     one request each       conditional_writes.py  whether conditions work
    at_once      several of these at the same time
    open_write   parts in parallel    multipart.py           retry.py     when to retry
    open_read    ranges in parallel   ranged_reads.py        options.py   how much at the same time
    remove*      batches              bulk_delete.py         clients/     one file per library

Writing is final: the bytes of a data key never change, and the only operation with one winner is a create.
If the answer to a conditional put is lost, the put is not repeated here but raises AnswerLostError: only the
caller can distinguish its own bytes from another's. All other requests are repeated until ``retry_s`` is over.

Reading writes nothing, nothing is listed if its key is known, and no bucket, no directory marker and no copy
is ever made. Clients and threads belong to one process; after a fork or a pickle there are new ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfs.errors import AlreadyExistsError, NotFoundError, StorageError, UnsupportedError
from ckptfs.storage.base import (
    SMALL_BYTES,
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
    UnfinishedUpload,
    usable,
)
from ckptfs.storage.bulk_delete import DeleteBackoff, Deleter
from ckptfs.storage.clients.base import ALWAYS, IF_ABSENT, IfMatch, ObjectClient, PendingUpload
from ckptfs.storage.clients.choose import choose_path, open_client, open_library
from ckptfs.storage.conditional_writes import ConditionProbe, HonouredConditions, probe_conditions
from ckptfs.storage.multipart import ObjectWriter, Route, plan_parts
from ckptfs.storage.options import ObjectOptions, parse_options
from ckptfs.storage.ranged_reads import ObjectReader
from ckptfs.storage.retry import NOT_DONE, Retrier, RetryPolicy, warning_limit_of
from ckptfs.storage.threads import Threads, uninterrupted
from ckptfs.uri import Uri

__all__ = ["ObjectStorage", "open_object_store"]

_log = logging.getLogger("ckptfs.storage")


T = TypeVar("T")


def open_object_store(uri: Uri, storage_options: Mapping[str, Any]) -> Storage:
    """Open ``s3://``, ``gs://``, ``az://`` and related protocols: the registry's factory.

    Returns an ``ObjectStorage``, or an ``FsspecStorage`` over the store's fsspec library if obstore
    cannot do what the options ask for, or was used before this process was forked. ``data_path``
    names the library.
    """
    options, others = parse_options(uri, storage_options)
    path = choose_path(uri, options.client, others)
    if not path.is_obstore:
        from ckptfs.storage.fsspec_store import FsspecStorage

        library = open_library(uri, options, others)
        return FsspecStorage(uri, library=library, data_path=str(path))
    client = open_client(uri, options, others, path)
    return ObjectStorage(uri, client, options, data_path=str(path))


@dataclass(frozen=True, slots=True)
class _BucketState:
    """What this process knows of one bucket through one client.

    Storages are opened and closed with saves; this stays.
    """

    conditions: ConditionProbe = field(default_factory=ConditionProbe)
    backoff: DeleteBackoff = field(default_factory=DeleteBackoff)


# By process, client library, endpoint and bucket. A forked child has entries, and locks, of its own.
_SEEN: dict[tuple[int, str, str, str], _BucketState] = {}


class ObjectStorage(Storage):
    """Bytes below one prefix of one bucket, through ``client``. Picklable with its options.

    data_path: The library that carries the data, and why it was chosen, for ``ckptfs doctor``.
    """

    def __init__(
        self,
        root: Uri,
        client: ObjectClient,
        options: ObjectOptions | None = None,
        data_path: str = "",
    ) -> None:
        self.root = root
        self.data_path = data_path
        self.client = client
        self.options = options or ObjectOptions()
        # The memory of an upload: all of it is ours, or half of it is the library's.
        self._memory_bytes = self.options.memory_bytes // (2 if client.copies_parts else 1)
        self.retrier = Retrier(
            client.endpoint,
            RetryPolicy(self.options.retry_s),
            warning_limit=warning_limit_of(client.endpoint),
        )
        base = root.path.lstrip("/")
        self._prefix = f"{base}/" if base else ""
        self._pools: dict[int, Threads] = {}
        self._callers: dict[int, Threads] = {}
        # As given at first: a client that learns more by a request has the same server.
        self._server = (type(client).__qualname__, client.endpoint)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pools": {}, "_callers": {}}

    @property
    def capabilities(self) -> Capabilities:
        """What the client can request. After the first conditional write: what the probe found.

        Reading this makes no request.
        """
        found, asks = self._bucket_state.conditions.found, self.client.conditions
        return Capabilities(
            shape=Shape.OBJECT,
            exclusive_create=asks.if_absent if found is None else found.if_absent,
            atomic_replace=True,
            conditional_replace=asks.if_absent and asks.if_match
            if found is None
            else found.if_match is not None,
            durable=True,
        )

    def probe(self, key: str) -> Capabilities:
        """See ``Storage.probe``. It makes six small requests on a new key, once per process."""
        self._honoured(key)
        return self.capabilities

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        path = self._path(key)
        return self.retrier.run(lambda: self.client.get(path)[0])

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        path = self._path(key)
        return self.retrier.run(lambda: self.client.get(path, limit_bytes)[0])

    def read_ahead(
        self, keys: Sequence[str], *, limit_bytes: int = SMALL_BYTES
    ) -> tuple[bytes, ...]:
        """See ``Storage.read_ahead``. All files are read at the same time.

        A request takes long, and most of the files exist.
        """
        if len(keys) < 2:  # noqa: PLR2004 - one is no reason for a thread
            return super().read_ahead(keys, limit_bytes=limit_bytes)
        pool = self._pool()
        reads = [pool.submit(self.read_small, key, limit_bytes) for key in keys]
        wait(reads)
        found = []
        for key, read in zip(keys, reads, strict=True):
            try:
                found.append(read.result())
            except NotFoundError:
                break
            except CancelledError:
                raise StorageError("not read: the storage was closed", uri=self.uri(key)) from None
        return tuple(found)

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T | StorageError]:
        """See ``Storage.at_once``. All calls run at the same time."""
        if len(calls) < 2:  # noqa: PLR2004 - one is no reason for a thread
            return super().at_once(calls)
        first, *others = calls
        # Not the threads that send parts: a call that waits for parts would occupy one of them.
        pool = self._threads(self._callers, "ckptfs-calls")
        running: list[Future[T]] = []
        try:
            running += map(pool.submit, others)
            found = super().at_once([first])
        except RuntimeError as error:
            raise StorageError(f"no thread can send a request: {error}", uri=self.root) from error
        finally:
            # In any case: a request that is still in flight may write.
            uninterrupted(lambda: wait(running))
        for one in running:
            try:
                found.append(one.result())
            except StorageError as error:
                found.append(error)
            except CancelledError:
                found.append(StorageError("the storage was closed", uri=self.root))
        return found

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """See ``Storage.create``. It uses a conditional PUT.

        Raises:
            UnsupportedError: The store ignores the condition.
        """
        del staging
        path = self._path(key)
        if not self._honoured(key.rpartition("/")[0]).if_absent:
            raise UnsupportedError(
                "no exclusive create here: the store or its client ignores the condition",
                uri=self.uri(key),
                hint="fences cannot hold on this store; see capabilities",
            )
        self.retrier.run(lambda: self.client.put(path, data, IF_ABSENT), after=NOT_DONE)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        path = self._path(key)
        if if_match is None:
            self.retrier.run(lambda: self.client.put(path, data, ALWAYS))
            return
        spelling = self._honoured(key.rpartition("/")[0]).if_match
        if spelling is None:
            raise UnsupportedError(
                "no conditional replace here: the store or its client ignores the condition",
                uri=self.uri(key),
            )
        condition = IfMatch(spelling.of(if_match)) if if_match else IF_ABSENT
        try:
            self.retrier.run(lambda: self.client.put(path, data, condition), after=NOT_DONE)
        except NotFoundError as error:
            # Some stores answer 404, not 412, if the object with that etag is gone.
            raise AlreadyExistsError(
                "replace failed: the object has changed", uri=self.uri(key)
            ) from error

    def stat(self, key: str) -> Stat:
        path = self._path(key)
        found = self.retrier.run(lambda: self.client.head(path))
        return Stat(found.size_bytes, is_dir=False, etag=found.etag, modified_s=found.modified_s)

    def list(self, key: str) -> list[Entry]:
        path = self._path(key)
        prefix = f"{path}/" if path else ""
        found = self.retrier.run(lambda: [*self.client.list_keys(prefix, delimiter=True)])
        names: dict[str, bool] = {}
        for item in found:
            name = item.key.removeprefix(prefix).rstrip("/")
            if name:  # otherwise it is a marker object for the prefix itself
                names[name] = names.get(name, False) or item.is_prefix
        entries = (Entry(name, is_dir) for name, is_dir in names.items())
        return usable(entries, self.uri(key))

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        """See ``Storage.open_write``.

        If the size is given, parts are no larger than necessary, and a size that no object may have
        raises UnsupportedError at once.
        """
        uri = self.uri(key)
        try:
            plan = plan_parts(
                self.client.limits,
                size_hint_bytes=size_hint_bytes,
                configured_bytes=self.options.part_size_bytes,
                memory_bytes=self._memory_bytes,
            )
        except StorageError as error:
            error.uri = str(uri)
            raise
        return ObjectWriter(self._route, self._path(key), uri, plan)

    def open_read(self, key: str) -> DataReader:
        path = self._path(key)
        head = self.retrier.run(lambda: self.client.head(path))
        return ObjectReader(self._route, path, self.uri(key), head)

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        self.uri(key)

    def rename(self, source: str, target: str) -> None:
        raise UnsupportedError("an object store has no rename", uri=self.uri(source))

    def remove(self, key: str) -> None:
        self.uri(key)
        self._deleter.delete_keys([key])

    def remove_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.uri(key)
        self._deleter.delete_keys(keys)

    def remove_dir(self, key: str) -> None:
        self.uri(key)

    def remove_tree(self, key: str) -> None:
        self.uri(key)
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        self._deleter.delete_tree(key)

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        self.uri(key)

    def refresh(self, key: str) -> None:
        self.uri(key)

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        return tuple(
            UnfinishedUpload(upload.key.removeprefix(self._prefix), upload.age_s)
            for upload in self._pending()
        )

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        swept = 0
        for upload in self._pending():
            if upload.age_s < older_than_s:
                continue
            if keys is not None and upload.key.removeprefix(self._prefix) not in keys:
                continue
            try:
                self.retrier.run(lambda u=upload: self.client.abort_pending(u))  # type: ignore[misc]
            except NotFoundError:
                continue  # completed, or aborted by another sweep
            swept += 1
        return swept

    def space(self) -> Space | None:
        return None

    def close(self) -> None:
        for pools in (self._pools, self._callers):
            pool = pools.pop(os.getpid(), None)
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    # -- inside ------------------------------------------------------------------------

    def _pending(self) -> Sequence[PendingUpload]:
        try:
            return self.retrier.run(lambda: [*self.client.list_uploads(self._prefix)])
        except UnsupportedError as error:
            # A lifecycle rule of the bucket does the same.
            _log.info("unfinished uploads were not removed: %s", error)
            return ()

    def _path(self, key: str) -> str:
        """Return the whole key in the bucket. UriError: it is not a plain relative key."""
        return self.uri(key).path.lstrip("/")

    def _honoured(self, folder: str) -> HonouredConditions:
        path = self._path(folder)
        return self._bucket_state.conditions.settle(
            lambda: probe_conditions(self.client, f"{path}/" if path else "", self.retrier)
        )

    @property
    def _bucket_state(self) -> _BucketState:
        root = self.root
        bucket = str(Uri(root.protocol, root.authority, "", "", root.userinfo))
        key = (os.getpid(), *self._server, bucket)
        return _SEEN.get(key) or _SEEN.setdefault(key, _BucketState())

    @property
    def _deleter(self) -> Deleter:
        return Deleter(
            self.client, self.retrier, self._bucket_state.backoff, self.root, self._prefix
        )

    @property
    def _route(self) -> Route:
        at_once = self.options.concurrency
        return Route(self.client, self.retrier, self._pool, at_once, self._memory_bytes)

    def _pool(self) -> Executor:
        return self._threads(self._pools, "ckptfs-io")

    def _threads(self, pools: dict[int, Threads], name: str) -> Executor:
        """Return the threads of this process. A forked child has none of its parent's threads."""
        pid = os.getpid()
        found = pools.get(pid)
        if found is None:
            # setdefault: if two threads come first at the same time, both use one pool.
            fresh = Threads(self.options.concurrency, name)
            found = pools.setdefault(pid, fresh)
        return found
