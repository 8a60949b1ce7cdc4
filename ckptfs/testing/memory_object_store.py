"""An object store in this process's memory, with the interface of the real clients.

    store = MemoryObjects(Plan([...]))                       a server: objects, uploads, a request log
    MemoryObjectClient(store)                                a client of it: one try per request
    ObjectStorage(Uri.parse("s3://b/run"), client)           the storage under test
    open_storage("objects+memory://b/run")                   the same by URI, with a bucket of ``STORES``

Faults are planned with ``ckptfs.testing.faults``. The operations are the client's methods (``get``
``get_range`` ``put`` ``head`` ``list_keys`` ``delete`` ``begin_upload`` ``put_part`` ``complete``
``abort`` ``list_uploads`` ``abort_pending``), and keys are whole keys:

    Fault("put", "*/log/*", 1, Lose())                       the put is done, and its answer is lost
    Fault("put_part", "*", 3, Fail(TransientError(...)))     fails before or (When.AFTER) after it acts
    Fault("get_range", "*", 1, Fail(..., When.HALF))         the body is cut in the middle
    Fault("*", "*", None, Hold())                            as slow as the test wants

    store.manners = Manners(if_absent=Manner.IGNORES, ...)   how the server treats conditions
    store.put_behind("run/f", data)                          another writer: the etag changes
    store.locked = {"run/step_1/*"}                          deletes of these raise AccessError
    store.requests("put")                                    the requests, in order; also ``counts()``

Thread-safe. A store belongs to one process, as with ``memory://``. The limits are those of a small S3 and
are enforced: parts that are too small or too many fail at ``complete``, as they do there.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    IntegrityError,
    NotFoundError,
    StaleError,
    StorageError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients.base import (
    ALWAYS,
    Buffer,
    Condition,
    Conditions,
    FailedDelete,
    Head,
    IfAbsent,
    IfMatch,
    Limits,
    ListedKey,
    ObjectClient,
    PendingUpload,
    Upload,
    check_size,
)
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.storage.options import parse_options
from ckptfs.testing.faults import Fail, Hold, HoldFile, Kill, Lose, Operation, Plan, When
from ckptfs.uri import Uri

__all__ = [
    "SMALL_LIMITS",
    "STORES",
    "Manner",
    "Manners",
    "MemoryObjectClient",
    "MemoryObjects",
    "MemoryStores",
    "Pending",
    "Stored",
    "open_memory_objects",
]

SMALL_LIMITS = Limits(
    min_part_bytes=64 << 10,
    max_part_bytes=64 << 20,
    max_parts=1000,
    max_object_bytes=1 << 30,
    max_single_put_bytes=64 << 20,
    delete_batch=10,
)


_SERVERS = itertools.count(1)


class Manner(Enum):
    """How a server treats a condition.

    Attributes:
        HONOURS: It honours it.
        IGNORES: It ignores it, and writes.
        REFUSES: It answers 501.
        BARE_ONLY: It honours it, but recognises an etag only without its quotation marks.
    """

    HONOURS = "honours"
    IGNORES = "ignores"
    REFUSES = "refuses"
    BARE_ONLY = "bare only"


@dataclass(frozen=True, slots=True)
class Manners:
    """How a server treats the two conditions.

    Attributes:
        if_absent: How it treats "only if absent".
        if_match: How it treats "only if it matches".
    """

    if_absent: Manner = Manner.HONOURS
    if_match: Manner = Manner.HONOURS


@dataclass(slots=True)
class Stored:
    """One object.

    Attributes:
        data: Its bytes.
        etag: Its etag.
    """

    data: bytes
    etag: str


@dataclass(slots=True)
class Pending:
    """An upload that is not complete.

    Attributes:
        key: The object that it will become.
        began_s: When it began, in seconds of the server's clock.
        parts: The bytes of each part, by number.
    """

    key: str
    began_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryObjects:
    """One bucket and its server.

    Args:
        plan: The planned faults; None: none.
        limits: The limits of the server.
        manners: How it treats conditions.
        clock: The server's clock, in seconds.

    Attributes:
        locked: Shell patterns of keys that may not be deleted.
        objects: The objects, by key.
        uploads: The uploads that are not complete, by id.
        lock: Held while a request is served.
        pid: The id of the process that made it.
        number: Identifies the server among those of its process.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        limits: Limits = SMALL_LIMITS,
        manners: Manners = Manners(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan or Plan()
        self.limits = limits
        self.manners = manners
        self.clock = clock
        self.locked: set[str] = set()
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Pending] = {}
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.number = next(_SERVERS)
        self._numbers = itertools.count(1)

    def requests(self, op: str = "*") -> list[Operation]:
        """Return the requests so far, in order, that match the shell pattern ``op``."""
        return [o for o in self.plan.trace if fnmatch.fnmatchcase(o.op, op)]

    def counts(self) -> Counter[str]:
        """Return how often each operation was requested."""
        return Counter(o.op for o in self.plan.trace)

    def put_behind(self, key: str, data: bytes) -> str:
        """Write as another writer would: not counted, without planned faults and conditions.

        Args:
            key: The object.
            data: Its bytes.

        Returns:
            The new etag.
        """
        with self.lock:
            etag = f'"{next(self._numbers):032x}"'
            self.objects[key] = Stored(bytes(data), etag)
            return etag

    def new_upload(self, key: str) -> str:
        """Begin an upload of ``key``.

        Returns:
            Its id.
        """
        with self.lock:
            name = f"upload-{next(self._numbers)}"
            self.uploads[name] = Pending(key, self.clock())
            return name


class MemoryStores:
    """The named buckets of one process."""

    def __init__(self) -> None:
        self._held: dict[str, MemoryObjects] = {}

    def bucket(self, name: str) -> MemoryObjects:
        """The bucket ``name``; it is made at first use."""
        return self._held.get(name) or self._held.setdefault(name, MemoryObjects())

    def put(self, name: str, store: MemoryObjects) -> None:
        """Make ``objects+memory://`` URIs with the bucket ``name`` lead to ``store``."""
        self._held[name] = store

    def drop(self, name: str) -> None:
        """Remove the bucket ``name``. Does nothing if there is none."""
        self._held.pop(name, None)


# The buckets of objects+memory:// URIs. Such URIs are valid in the whole process, so this is global.
STORES = MemoryStores()


T = TypeVar("T")

_BOTH = Conditions(if_absent=True, if_match=True)


def open_memory_objects(uri: Uri, storage_options: Mapping[str, Any]) -> ObjectStorage:
    """The factory of ``objects+memory``: an object store in the memory of this process.

    Args:
        uri: ``objects+memory://bucket/run``. All storages of one bucket in this process see the same
            objects.
        storage_options: The options that all object stores have.

    Raises:
        UriError: Another option is given, or there are several processes.
    """
    options, unknown = parse_options(uri, storage_options)
    if unknown:
        raise UriError(f"objects+memory:// has no option {min(unknown)!r}", uri=uri)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UriError("objects+memory:// belongs to one process", uri=uri)
    return ObjectStorage(uri, MemoryObjectClient(uri.authority), options)


class MemoryObjectClient(ObjectClient):
    """A client of one bucket. It can be pickled only if the bucket was given by name.

    Args:
        store: The bucket, or its name in ``STORES``.
        asks: The conditions that the client supports.

    Attributes:
        endpoint: A URI that no other server has.
        limits: The limits of the server.
        conditions: The conditions that the client supports.
    """

    copies_parts = False

    def __init__(self, store: MemoryObjects | str, *, asks: Conditions = _BOTH) -> None:
        self._name = store if isinstance(store, str) else ""
        self._store = STORES.bucket(store) if isinstance(store, str) else store
        # Never the same endpoint twice: what a process learnt of one server must not apply to another.
        self.endpoint = f"objects+memory://server-{self._store.number}"
        self.limits = self._store.limits
        self.conditions = asks

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in self.__dict__.items() if name != "_store"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._store = STORES.bucket(self._name)

    @property
    def store(self) -> MemoryObjects:
        """The server; a UriError is raised in any process but the one that made it."""
        if self._store.pid != os.getpid():
            raise UriError("objects+memory:// belongs to the process that opened it")
        return self._store

    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        def act() -> tuple[bytes, str | None]:
            found = self._found(key)
            check_size(len(found.data), limit_bytes, Uri.parse(self._uri(key)))
            return found.data, found.etag

        return self._do("get", key, act)

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        def fill(size_bytes: int) -> None:
            found = self._found(key)
            if etag is not None and found.etag != etag:
                raise StaleError("get failed: another object has this name now", uri=self._uri(key))
            data = found.data[offset : offset + size_bytes]
            out[: len(data)] = data
            if len(data) < size_bytes:
                raise IntegrityError(f"the object ends at byte {len(found.data)}", uri=key)

        self._do("get_range", key, lambda: fill(len(out)), lambda: fill(len(out) // 2))

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        # Copied now: the body of a lost request must not change before it is done later.
        body = bytes(data)

        def act() -> str:
            self._check(key, condition)
            if len(body) > self.limits.max_single_put_bytes:
                raise StorageError("put failed: EntityTooLarge", uri=self._uri(key))
            return self.store.put_behind(key, body)

        return self._do("put", key, act)

    def head(self, key: str) -> Head:
        def act() -> Head:
            found = self._found(key)
            return Head(len(found.data), found.etag)

        return self._do("head", key, act)

    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[ListedKey]:
        def act() -> list[ListedKey]:
            found: dict[str, ListedKey] = {}
            for key, held in sorted(self.store.objects.items()):
                if not key.startswith(prefix):
                    continue
                head, slash, _ = key[len(prefix) :].partition("/")
                if delimiter and slash:
                    name = f"{prefix}{head}/"
                    found[name] = ListedKey(name, is_prefix=True)
                else:
                    found[key] = ListedKey(key, len(held.data))
            return list(found.values())

        return iter(self._do("list_keys", prefix, act))

    def delete(self, keys: Sequence[str]) -> list[FailedDelete]:
        if len(keys) > self.limits.delete_batch:
            raise StorageError(f"delete failed: {len(keys)} keys in one request")

        def act() -> list[FailedDelete]:
            refused = []
            for key in keys:
                if any(fnmatch.fnmatchcase(key, pattern) for pattern in self.store.locked):
                    error = AccessError("delete failed: object lock", uri=self._uri(key))
                    refused.append(FailedDelete(key, error))
                else:
                    self.store.objects.pop(key, None)
            return refused

        return self._do("delete", keys[0], act)

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        name = self._do("begin_upload", key, lambda: self.store.new_upload(key))
        return _MemoryUpload(self, key, name, part_bytes)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        def act() -> list[PendingUpload]:
            now_s = self.store.clock()
            return [
                PendingUpload(held.key, name, now_s - held.began_s)
                for name, held in self.store.uploads.items()
                if held.key.startswith(prefix)
            ]

        return iter(self._do("list_uploads", prefix, act))

    def abort_pending(self, upload: PendingUpload) -> None:
        def act() -> None:
            if self.store.uploads.pop(upload.upload_id, None) is None:
                raise NotFoundError("abort failed: NoSuchUpload", uri=self._uri(upload.key))

        self._do("abort_pending", upload.key, act)

    def _uri(self, key: str) -> str:
        return f"{self.endpoint}/{key}"

    def _found(self, key: str) -> Stored:
        found = self.store.objects.get(key)
        if found is None:
            raise NotFoundError("get failed: NoSuchKey", uri=self._uri(key))
        return found

    def _check(self, key: str, condition: Condition) -> None:
        manners = self.store.manners
        held = self.store.objects.get(key)
        match condition:
            case IfAbsent():
                manner, holds = manners.if_absent, held is None
            case IfMatch(etag):
                stored = "" if held is None else held.etag
                plain = manners.if_match is Manner.BARE_ONLY
                manner, holds = manners.if_match, etag == (stored.strip('"') if plain else stored)
                if held is None and manner is not Manner.IGNORES:
                    raise NotFoundError("put failed: NoSuchKey", uri=self._uri(key))
            case _:
                return
        if manner is Manner.REFUSES:
            raise UnsupportedError("put failed: NotImplemented", uri=self._uri(key))
        if not holds and manner is not Manner.IGNORES:
            raise AlreadyExistsError("put failed: PreconditionFailed", uri=self._uri(key))

    def _do(
        self, op: str, key: str, act: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        def acted() -> T:
            with self.store.lock:
                return act()

        action = self.store.plan.begin(op, key)
        match action:
            case Kill(when) | Fail(_, when):
                if when is When.AFTER:
                    acted()
                elif when is When.HALF and half is not None:
                    with self.store.lock:
                        half()
                if isinstance(action, Fail):
                    raise action.error
                os.kill(os.getpid(), signal.SIGKILL)
            case Lose(done, later, after):
                if later:
                    self.store.plan.later(after, acted)
                elif done:
                    acted()
                raise AnswerLostError(f"{op}: the test lost the answer", uri=self._uri(key))
            case Hold(reached, release):
                reached.set()
                release.wait()
            case HoldFile():
                raise TypeError("HoldFile is between processes, this store belongs to one")
            case None:
                pass
        return acted()


class _MemoryUpload(Upload):
    def __init__(self, client: MemoryObjectClient, key: str, name: str, part_bytes: int) -> None:
        self._client = client
        self._key = key
        self._name = name
        self._part_bytes = part_bytes

    def put_part(self, number: int, data: Buffer) -> None:
        body = bytes(data)

        def act() -> None:
            self._pending("put_part").parts[number] = body

        self._client._do("put_part", self._key, act)  # noqa: SLF001 - one module

    def complete(self) -> str | None:
        def act() -> str:
            held = self._pending("complete")
            self._check([held.parts[number] for number in sorted(held.parts)], set(held.parts))
            del self._client.store.uploads[self._name]
            data = b"".join(held.parts[number] for number in sorted(held.parts))
            return self._client.store.put_behind(self._key, data)

        return self._client._do("complete", self._key, act)  # noqa: SLF001

    def abort(self) -> None:
        def act() -> None:
            self._client.store.uploads.pop(self._name, None)

        self._client._do("abort", self._key, act)  # noqa: SLF001

    def _pending(self, action: str) -> Pending:
        held = self._client.store.uploads.get(self._name)
        if held is None:
            raise NotFoundError(
                f"{action} failed: NoSuchUpload",
                uri=self._client._uri(self._key),  # noqa: SLF001
            )
        return held

    def _check(self, parts: list[bytes], numbers: set[int]) -> None:
        limits, full_parts = self._client.limits, parts[:-1]
        wrong = (
            "InvalidPart: gaps"
            if numbers != set(range(len(numbers))) or not parts
            else "too many parts"
            if len(parts) > limits.max_parts
            else "EntityTooSmall"
            if any(len(p) < limits.min_part_bytes for p in full_parts)
            else "a part is no multiple"
            if any(len(p) % limits.part_multiple_bytes for p in full_parts)
            else "EntityTooLarge"
            if any(len(p) > limits.max_part_bytes for p in parts)
            else "parts differ"
            if limits.equal_parts and any(len(p) != self._part_bytes for p in full_parts)
            else ""
        )
        if wrong:
            raise StorageError(
                f"complete failed: {wrong}",
                uri=self._client._uri(self._key),  # noqa: SLF001
            )
