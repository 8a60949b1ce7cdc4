"""A file read in order, a few windows ahead, in bounded memory.

    for data in windows(reader, ReadAhead(stack), nullcontext): ...

In memory: as many windows as the reader wants under way.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager

from ckptfs.storage.base import DataReader
from ckptfs.storage.threads import Threads

__all__ = ["ReadAhead", "windows"]


class ReadAhead:
    """Threads for reads ahead, made by the first reader that wants some."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._threads: Threads | None = None

    def submit(self, count: int, read: Callable[[], memoryview]) -> Future[memoryview]:
        """Read on a thread, one of ``count``."""
        if self._threads is None:
            self._threads = Threads(count, "ckptfs-copy")
            self._stack.callback(self._threads.shutdown, wait=True, cancel_futures=True)
        return self._threads.submit(read)


def windows(
    reader: DataReader,
    pool: ReadAhead,
    reading: Callable[[], AbstractContextManager[None]],
    first: int = 0,
    sharers: int = 1,
) -> Iterator[memoryview]:
    """The file's bytes in order, from ``first`` on; each view is good until the next is asked for.

    sharers: so many files are read at once, and share what is worth having under way.
    """
    window = max(1, reader.window_bytes)
    starts = range(first, reader.size_bytes, window)
    ahead = max(1, min(reader.concurrency // sharers, len(starts)))
    spare = [bytearray(min(window, reader.size_bytes)) for _ in range(ahead)]

    def read(start: int, buffer: bytearray) -> memoryview:
        view = memoryview(buffer)[: min(window, reader.size_bytes - start)]
        with reading():
            reader.read_into(start, view)
        return view

    if ahead == 1:
        for start in starts:
            yield read(start, spare[0])
        return
    under_way: deque[tuple[Future[memoryview], bytearray]] = deque()
    left = iter(starts)

    def begin() -> None:
        start = next(left, None)
        if start is not None:
            buffer = spare.pop()
            under_way.append((pool.submit(ahead, lambda: read(start, buffer)), buffer))

    try:
        for _ in range(ahead):
            begin()
        while under_way:
            future, buffer = under_way.popleft()
            yield future.result()
            spare.append(buffer)
            begin()
    finally:
        for future, _ in under_way:
            future.cancel()
