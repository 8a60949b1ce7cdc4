"""A place where one node sees late what another has written, and a clock that need not be waited for.

    news = LateNews(3.0, clock := SharedClock())
    LateStorage(open_storage(uri), news, node="a")      on ranks of node a; another one on node b

Names appear late: until ``delay_s`` after a write, other nodes get "not found" and list without
it. Creating a taken name is refused at once, as a server does it. ``SharedClock`` moves on when
somebody waits, for all who share it: seconds of waiting cost nothing.
"""

from __future__ import annotations

import threading

from ckptfs.errors import NotFoundError
from ckptfs.storage.base import DataReader, DataWriter, Entry, Stat, Storage
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.tools.doctor import Clock

__all__ = ["LateNews", "LateStorage", "SharedClock"]


class SharedClock(Clock):
    """Time that passes only while a process waits. Thread-safe.

    Args:
        ahead_s: How many seconds ``wall_s`` is ahead of the real time.
    """

    def __init__(self, ahead_s: float = 0.0) -> None:
        self._ahead_s = ahead_s
        self._now_s = 0.0
        self._lock = threading.Lock()

    def wall_s(self) -> float:
        """The real one, off by ``ahead_s``."""
        return super().wall_s() + self._ahead_s

    def now_s(self) -> float:
        """Seconds waited by anybody."""
        with self._lock:
            return self._now_s

    def wait(self, seconds: float) -> None:
        """Move on."""
        with self._lock:
            self._now_s += seconds


class LateNews:
    """Who wrote what when; what of it another node does not see yet. Thread-safe.

    Args:
        delay_s: How many seconds later other nodes see it.
        clock: What measures time.
        only: Names that contain it are late; the others are seen at once.
    """

    def __init__(self, delay_s: float, clock: Clock, *, only: str = "") -> None:
        self._delay_s = delay_s
        self._only = only
        self._clock = clock
        self._wrote: dict[str, tuple[str, float]] = {}

    def wrote(self, node: str, uri: str) -> None:
        """Note that ``node`` has written at ``uri``, for the first time or again."""
        self._wrote.setdefault(uri, (node, self._clock.now_s()))

    def is_hidden(self, node: str, uri: str) -> bool:
        """Whether ``node`` does not see ``uri`` yet."""
        writer, at_s = self._wrote.get(uri, (node, 0.0))
        return self._only in uri and writer != node and self._clock.now_s() - at_s < self._delay_s


class LateStorage(FaultyStorage):
    """A storage as one node sees it.

    Args:
        inner: The real storage.
        news: What is not seen yet.
        node: The node.
    """

    def __init__(self, inner: Storage, news: LateNews, node: str) -> None:
        super().__init__(inner, Plan())
        self._news = news
        self._node = node

    def read(self, key: str) -> bytes:
        self._look(key, "read")
        return super().read(key)

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        self._look(key, "read")
        return super().read_small(key, limit_bytes)

    def stat(self, key: str) -> Stat:
        self._look(key, "stat")
        return super().stat(key)

    def open_read(self, key: str) -> DataReader:
        self._look(key, "open")
        return super().open_read(key)

    def list(self, key: str) -> list[Entry]:
        below = f"{key}/" if key else ""
        return [e for e in super().list(key) if not self._hides(f"{below}{e.name}")]

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        super().create(key, data, staging=staging)
        self._news.wrote(self._node, str(self.uri(key)))

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        super().replace(key, data, if_match=if_match)
        self._news.wrote(self._node, str(self.uri(key)))

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        self._news.wrote(self._node, str(self.uri(key)))
        return super().open_write(key, size_hint_bytes=size_hint_bytes)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        self._news.wrote(self._node, str(self.uri(key)))
        return super().open_parallel(key, size_bytes=size_bytes, engine=engine)

    def _hides(self, key: str) -> bool:
        return self._news.is_hidden(self._node, str(self.uri(key)))

    def _look(self, key: str, action: str) -> None:
        if self._hides(key):
            raise NotFoundError(
                f"{action} failed: this node has not heard of it", uri=self.uri(key)
            )
