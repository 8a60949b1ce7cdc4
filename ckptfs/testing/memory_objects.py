"""The server behind ``ckptfs.testing.object_client``: objects, uploads, manners, a request log."""

from __future__ import annotations

import fnmatch
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ckptfs.storage.clients.base import Limits
from ckptfs.testing.plan import Operation, Plan

__all__ = [
    "SMALL_LIMITS",
    "STORES",
    "Manner",
    "Manners",
    "MemoryObjects",
    "MemoryStores",
    "Pending",
    "Stored",
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
    """What a server makes of a condition.

    Attributes:
        HONOURS: It honours it.
        IGNORES: It writes all the same.
        REFUSES: It answers 501.
        BARE_ONLY: It knows an etag only without its quotation marks.
    """

    HONOURS = "honours"
    IGNORES = "ignores"
    REFUSES = "refuses"
    BARE_ONLY = "bare only"


@dataclass(frozen=True, slots=True)
class Manners:
    """What a server makes of both conditions.

    Attributes:
        if_absent: What it makes of "only if absent".
        if_match: What it makes of "only if it matches".
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
    """One upload that is not complete.

    Attributes:
        key: The object that it would become.
        began_s: When it began, in seconds of the server's clock.
        parts: Bytes of each part, by number.
    """

    key: str
    began_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryObjects:
    """One bucket and its server.

    Args:
        plan: What goes wrong, at which request; None: nothing.
        limits: Of the server.
        manners: What it makes of conditions.
        clock: The server's, in seconds.

    Attributes:
        locked: Shell patterns of keys that may not be deleted.
        objects: The objects, by key.
        uploads: Uploads that are not complete, by id.
        lock: Held while a request is served.
        pid: The process that made it.
        number: Tells servers of one process apart.
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
        """Return the requests so far, in order, with an operation that fits the shell pattern ``op``."""
        return [o for o in self.plan.trace if fnmatch.fnmatchcase(o.op, op)]

    def counts(self) -> Counter[str]:
        """Return how often each operation was requested."""
        return Counter(o.op for o in self.plan.trace)

    def put_behind(self, key: str, data: bytes) -> str:
        """Write as another writer does: not counted, under no plan and no condition.

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
        """The bucket ``name``, made at first use."""
        return self._held.get(name) or self._held.setdefault(name, MemoryObjects())

    def put(self, name: str, store: MemoryObjects) -> None:
        """Let ``objects+memory://name`` lead to ``store``, for this ``name``."""
        self._held[name] = store

    def drop(self, name: str) -> None:
        """Forget the bucket ``name``; absent is success."""
        self._held.pop(name, None)


# The buckets that objects+memory:// URIs name: process-wide by the nature of the scheme.
STORES = MemoryStores()
