"""Object storages over a bucket in memory that never wait, for the tests of this directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.errors import AnswerLostError, TransientError
from ckptfs.storage.clients.base import Limits, ObjectClient
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.storage.options import ObjectOptions
from ckptfs.storage.retry import Retrier
from ckptfs.testing.faults import Fault, Plan
from ckptfs.testing.memory_object_store import SMALL_LIMITS, MemoryObjectClient, MemoryObjects
from ckptfs.uri import Uri

TINY_LIMITS = Limits(
    min_part_bytes=4,
    max_part_bytes=1 << 20,
    max_parts=1000,
    max_object_bytes=1 << 20,
    max_single_put_bytes=1 << 20,
    delete_batch=3,
)


@dataclass
class FakeTime:
    """A clock that only sleeping moves, and what was slept."""

    now_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, stop: threading.Event | None) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def retrier(self, retrier: Retrier, draw: Callable[[], float] = lambda: 1.0) -> Retrier:
        """``retrier`` on this clock."""
        return replace(retrier, clock=self.clock, sleep=self.sleep, draw=draw)


def over(client: ObjectClient, root: str = "s3://bucket/run", **options: Any) -> ObjectStorage:
    """A storage over ``client`` with retries that take no time."""
    storage = ObjectStorage(Uri.parse(root), client, ObjectOptions(**options))
    storage.retrier = FakeTime().retrier(storage.retrier)
    return storage


def bucket(
    faults: Iterable[Fault] = (), *, limits: Limits = SMALL_LIMITS, **options: Any
) -> tuple[MemoryObjects, ObjectStorage]:
    """A fresh bucket under a plan, and a storage at ``run/`` in it."""
    store = MemoryObjects(Plan(faults), limits=limits)
    return store, over(MemoryObjectClient(store), **options)


def busy() -> TransientError:
    """What a throttling server answers."""
    return TransientError("503 SlowDown")


def lost() -> AnswerLostError:
    """What a connection that breaks after the request gives."""
    return AnswerLostError("connection reset")
