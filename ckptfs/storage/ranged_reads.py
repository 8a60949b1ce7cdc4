"""One object, read in ranges: in parallel, each directly into the caller's buffer.

    open        one HEAD: size and etag
    read_into   up to 8 MiB: one request           more: ranges of 8 MiB, several at once
                each range with the etag: another object under the key is StaleError, never a mixture

The calling thread fetches ranges too, so that a busy pool slows a read but never blocks it. A failed read
raises its error only when no thread writes into the caller's buffer any more.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress

from ckptfs.errors import IntegrityError, StorageError
from ckptfs.storage.base import DataReader
from ckptfs.storage.clients.base import Head
from ckptfs.storage.multipart import Route
from ckptfs.storage.threads import uninterrupted
from ckptfs.uri import Uri

__all__ = ["RANGE_BYTES", "ObjectReader", "split"]

RANGE_BYTES = 8 << 20


def split(offset: int, size_bytes: int, range_bytes: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """Return (offset, size) of each request.

    The sizes are as equal as multiples of 64 KiB permit, and none is above ``range_bytes``.
    """
    count = max(1, -(-size_bytes // range_bytes))
    step = -(-size_bytes // count)
    step = min(range_bytes, -(-step // 65536) * 65536)
    end = offset + size_bytes
    return [(at, min(step, end - at)) for at in range(offset, end, step)] if size_bytes else []


class ObjectReader(DataReader):
    """Reads one object, as it was when it was opened."""

    window_bytes = RANGE_BYTES

    def __init__(self, route: Route, key: str, uri: Uri, head: Head) -> None:
        self._route = route
        self._key = key
        self._uri = uri
        self._etag = head.etag
        self._closed = False
        self.size_bytes = head.size_bytes
        self.concurrency = route.concurrency

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise StorageError("the reader is closed", uri=self._uri)
        view = buffer.cast("B")
        if offset + len(view) > self.size_bytes:
            raise IntegrityError(
                f"the file ends at byte {self.size_bytes}, but {offset + len(view)} were requested",
                uri=self._uri,
            )
        ranges = split(offset, len(view))
        if len(ranges) > 1:
            self._fetch_all(ranges, offset, view)
        elif ranges:
            self._fetch(offset, view, None)

    def close(self) -> None:
        self._closed = True

    def _fetch(self, offset: int, out: memoryview, stop: threading.Event | None) -> None:
        client = self._route.client
        self._route.retrier.run(
            lambda: client.get_range(self._key, offset, out, self._etag), stop=stop
        )

    def _fetch_all(self, ranges: list[tuple[int, int]], base: int, view: memoryview) -> None:
        waiting = deque(ranges)
        errors: list[BaseException] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    at, size_bytes = waiting.popleft()
                except IndexError:
                    return
                try:
                    self._fetch(at, view[at - base : at - base + size_bytes], stop)
                except BaseException as error:  # noqa: BLE001 - the first one is raised below
                    errors.append(error)
                    stop.set()

        helpers: list[Future[None]] = []
        try:
            pool = self._route.pool()
            # No thread, because there is none left or the storage was closed: this one does it all.
            with suppress(RuntimeError):
                for _ in range(min(self._route.concurrency, len(ranges)) - 1):
                    helpers.append(pool.submit(work))  # noqa: PERF401 - kept when the next one fails
            work()
            # Before the helpers are stopped: the last range of a helper may have to be requested again.
            for helper in helpers:
                if not helper.cancel():
                    helper.exception()
        finally:
            # In any case, after a second Ctrl-C too: no thread may write into the buffer after this
            # returns.
            uninterrupted(lambda: _end(stop, helpers))
        if errors:
            raise errors[0]


def _end(stop: threading.Event, helpers: list[Future[None]]) -> None:
    """Stop the helpers, and return when none of them is running."""
    stop.set()
    for helper in helpers:
        if not helper.cancel():
            helper.exception()
