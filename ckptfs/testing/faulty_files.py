"""The writers and readers of ``FaultyStorage``: each of their operations is counted, and may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ckptfs.errors import CkptfsError
from ckptfs.storage.base import DataReader, DataWriter
from ckptfs.storage.io import Engine, ParallelWriter

__all__ = ["Do", "FaultyReader", "FaultyWindows", "FaultyWriter"]

T = TypeVar("T")


class Do(Protocol):
    """Counts an operation on a key, and does it, half of it, or something else."""

    def __call__(
        self, op: str, key: str, act: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        """What ``act`` returns, or what the plan says."""


class FaultyWriter(DataWriter):
    """A writer of ``key`` with operations that are counted by ``do``; ``inner`` is the real one."""

    def __init__(self, do: Do, key: str, inner: DataWriter) -> None:
        self._do = do
        self._key = key
        self._inner = inner
        self._send = inner.write
        self.there_bytes = inner.there_bytes

    @property
    def spared_bytes(self) -> int:  # type: ignore[override]  # a number of the base class
        """That of inner."""
        return self._inner.spared_bytes

    def read_there(self, offset: int, buffer: memoryview) -> None:
        """That of inner; not counted."""
        self._inner.read_there(offset, buffer)

    def skip(self, size_bytes: int) -> None:
        """That of inner; not counted."""
        self._inner.skip(size_bytes)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        def half() -> None:
            view = memoryview(data).cast("B")
            self._inner.write(view[: len(view) // 2])
            flush = getattr(self._inner, "flush", None)
            if flush is not None:
                flush()  # a crash leaves what the kernel has, not what Python still gathers

        return self._do("write", self._key, lambda: self._send(data), half)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """Counted as a write: whoever plans a fault does not care who copies."""
        self._send = self._inner.lend
        try:
            return self.write(data)
        finally:
            self._send = self._inner.write

    def close(self) -> None:
        self._do("close", self._key, self._inner.close)

    def abort(self) -> None:
        try:
            self._do("abort", self._key, self._inner.abort)
        except CkptfsError:
            # abort never raises; a planned failure of it is a removal that did not happen.
            return


class FaultyReader(DataReader):
    """A reader of ``key`` with operations that are counted by ``do``; ``inner`` is the real one."""

    def __init__(self, do: Do, key: str, inner: DataReader) -> None:
        self._do = do
        self._key = key
        self._inner = inner
        self.size_bytes = inner.size_bytes
        self.concurrency, self.window_bytes = inner.concurrency, inner.window_bytes
        self.reach = inner.reach

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._do("read_into", self._key, lambda: self._inner.read_into(offset, buffer))

    def keep_cached(self) -> None:
        """That of inner; not counted."""
        self._inner.keep_cached()

    def close(self) -> None:
        self._do("close_read", self._key, self._inner.close)


class FaultyWindows(ParallelWriter):
    """A parallel writer of ``key`` with operations that are counted by ``do``, each window as a ``write``;
    ``inner`` is the real one.
    """

    def __init__(self, do: Do, key: str, inner: ParallelWriter) -> None:
        self._do = do
        self._key = key
        self._inner = inner
        self.window_bytes, self.concurrency = inner.window_bytes, inner.concurrency

    @property
    def engine(self) -> Engine:
        """That of inner."""
        return self._inner.engine

    @property
    def direct_bytes(self) -> int:
        """That of inner."""
        return self._inner.direct_bytes

    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        def half() -> None:
            held = b"".join(views)
            self._inner.write_at(offset, [memoryview(held)[: len(held) // 2]])

        self._do("write", self._key, lambda: self._inner.write_at(offset, views), half)

    def close(self) -> None:
        self._do("close", self._key, self._inner.close)

    def abort(self) -> None:
        try:
            self._do("abort", self._key, self._inner.abort)
        except CkptfsError:
            return  # as for FaultyWriter
