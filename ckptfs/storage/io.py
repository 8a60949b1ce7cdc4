"""Handles of open files: readers by range, writers in order, writers in windows.

    with storage.open_read(key) as reader:                          a file that does not change
        reader.read_into(offset, buffer)                                any thread
    with storage.open_write(key) as writer:                         a new file, written in order
        writer.write(data)                                              one thread
    with storage.open_parallel(key, size_bytes=n) as writer:        a new file of known size
        writer.write_at(0, views)                                       in windows, any order, any thread

Both writers are ``Unfinished`` files: leaving the ``with`` block normally makes the file durable and visible;
leaving it by any exception, Ctrl-C included, leaves nothing behind.

The aligned buffers of direct I/O (``buffer_pool``) are kept from window to window and from file to file, because
touching fresh memory takes as long as writing it to a fast disk. They consist of huge pages where there are any:
a direct transfer pins every page of its window.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Self

from ckptfs.errors import UnsupportedError

__all__ = [
    "BufferPool",
    "DataReader",
    "DataWriter",
    "FileEngine",
    "ParallelWriter",
    "PooledBuffer",
    "Reach",
    "Unfinished",
    "aligned_memory",
    "buffer_pool",
    "is_aligned",
]

log = logging.getLogger("ckptfs.storage")


class Reach(Enum):
    """What a read costs in addition to its bytes.

    Attributes:
        LOCAL: A system call: the calling thread may as well read itself.
        REMOTE: A round trip: the calling thread should do something else until the answer comes.
    """

    LOCAL = "local"
    REMOTE = "remote"


class DataReader(ABC):
    """Ranged reads of one file that does not change. Safe from several threads at once.

    Every backend implements ``read_into``. Where a read costs little, ``read_views`` and ``read_steps`` are
    more efficient.

    Attributes:
        size_bytes: The file's size in bytes.
        concurrency: How many reads should be in flight at once.
        window_bytes: How many bytes one read should fetch if the caller has the choice.
        reach: What another read costs.
    """

    size_bytes: int
    concurrency: int = 1
    window_bytes: int = 4 << 20
    reach: Reach = Reach.REMOTE

    @property
    def threads(self) -> int:
        """How many of the ``concurrency`` reads are worth a thread each, as far as is known now.

        That is at most the number of cores where no read waits for a disk or a server. The value may
        rise but never falls.
        """
        return self.concurrency

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of ``buffer`` with the bytes from ``offset`` on.

        Args:
            offset: Where in the file to begin.
            buffer: What to fill.

        Raises:
            IntegrityError: The file ends before the buffer is full.
            StorageError: The read failed.
        """

    def read_steps(self, offset: int, buffer: memoryview, step_bytes: int) -> Iterator[int]:
        """As ``read_into``, but yield after each step.

        Steps are as small as is possible without extra cost, so that the caller finds the bytes in the
        processor's cache.

        Args:
            offset: Where in the file to begin.
            buffer: What to fill.
            step_bytes: All steps but the last are multiples of so many bytes.

        Yields:
            How many bytes of the buffer are filled.
        """
        self.read_into(offset, buffer)
        yield len(buffer)

    def read_views(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill one buffer after the other with the bytes from ``offset`` on.

        This is a single read where ``reach`` is local, so that small adjacent items need no intermediate
        buffer.

        Args:
            offset: Where in the file to begin.
            views: Flat views of bytes.
        """
        for view in views:
            self.read_into(offset, view)
            offset += len(view)

    def keep_cached(self) -> None:
        """Leave the bytes in the page cache, if there is one: other processes are about to read them, too.

        Call it before the first read.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the handle. Calling it again is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Unfinished(ABC):
    """One file that is being written. Nothing is visible under its key before ``close`` publishes it.

    Leaving the ``with`` block normally closes the file. Leaving it by any exception, Ctrl-C included, aborts
    the file and leaves nothing behind.
    """

    @abstractmethod
    def close(self) -> None:
        """Make the file's bytes durable and visible under its key.

        The *name* is durable after ``sync`` of its directory: thousands of writers share one sync.

        Raises:
            StorageError: Bytes are missing, or could not be made durable.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove the file. Never raises; harmless after ``close``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


class DataWriter(Unfinished):
    """One file that is written in order, by one thread at a time.

    Attributes:
        there_bytes: How many bytes an earlier writer left (``open_kept``), to be read, compared and skipped.
        spared_bytes: How many of the written bytes the storage had already.
    """

    there_bytes: int = 0
    spared_bytes: int = 0

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of ``data``. The caller may reuse the buffer when this returns.

        Args:
            data: The bytes.

        Returns:
            The number of bytes in ``data``.

        Raises:
            NoSpaceError: The disk or the quota is full.
            StorageError: The write failed.
        """

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """As ``write``, without a copy: the caller must not change ``data`` until ``close`` returns.

        The writer drops its reference to ``data`` as soon as the bytes are sent.

        Args:
            data: The bytes.

        Returns:
            The number of bytes in ``data``.
        """
        return self.write(data)

    def read_there(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes that an earlier writer left, from ``offset`` on.

        Args:
            offset: Where to begin.
            buffer: What to fill; it must end at or before ``there_bytes``.

        Raises:
            UnsupportedError: Nothing is left of an earlier writer.
        """
        raise UnsupportedError("nothing is left of an earlier writer")

    def skip(self, size_bytes: int) -> None:
        """Keep the first bytes that an earlier writer left, and append after them.

        Call it before the first write.

        Args:
            size_bytes: How many bytes to keep, at most ``there_bytes``.

        Raises:
            UnsupportedError: Nothing is left of an earlier writer.
        """
        if size_bytes:
            raise UnsupportedError("nothing is left of an earlier writer")


class FileEngine(Enum):
    """How a file is written.

    Attributes:
        DIRECT: Past the page cache, from aligned buffers.
        BUFFERED: Through the page cache, from the caller's memory.
        STREAMED: In order, by a DataWriter.
    """

    DIRECT = "direct"
    BUFFERED = "buffered"
    STREAMED = "streamed"


class ParallelWriter(Unfinished):
    """One file of known size, written in windows, in any order, by several threads at once.

    The caller cuts the file into windows of ``window_bytes``; only the last one may be smaller. Every
    ``write_at`` must return before ``close`` is called. A ``write_at`` that is still running when the file is
    aborted writes to no other file.

    Attributes:
        window_bytes: The size of all windows but the last, in bytes.
        concurrency: How many threads are worth having.
    """

    window_bytes: int
    concurrency: int

    @property
    @abstractmethod
    def engine(self) -> FileEngine:
        """How the file is written. DIRECT may become BUFFERED if the filesystem refuses a direct write."""

    @property
    @abstractmethod
    def direct_bytes(self) -> int:
        """How many bytes were written past the page cache."""

    @abstractmethod
    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        """Write one window. Any thread may call it, once per window.

        Args:
            offset: Where the window begins: a multiple of ``window_bytes``.
            views: Flat views of bytes that together make up the window. They are consumed one at a time, and
                none may change until this returns. An exception of the iterable is raised here.

        Raises:
            NoSpaceError: The disk or the quota is full.
            StorageError: The write failed. After any error the file can only be aborted, and further calls
                raise that error, or a StorageError.
        """


# -- memory that bytes pass through ------------------------------------------------------------

_MAX_POOLED = 8
_HUGE_BYTES = 2 << 20
# A common minimum, or buffers of nearly the same size would displace each other.
_MIN_BUFFER_BYTES = (8 << 20) + (64 << 10)


class _MappedMemory(mmap.mmap):
    """Memory of a pool: no fork shares it."""


def is_aligned(view: memoryview) -> bool:
    """Whether ``view`` begins at a page of a pool's memory, so that direct I/O may use it as it is.

    Other memory that happens to begin at a page may be shared with a forked child: see open(2).
    """
    if not isinstance(view.obj, _MappedMemory) or not len(view):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % mmap.PAGESIZE == 0


class BufferPool:
    """Touched buffers, kept from window to window and from file to file. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    def buffer(self, size_bytes: int) -> PooledBuffer:
        """Borrow a buffer of at least ``size_bytes``, on whole pages, for a ``with`` block."""
        return PooledBuffer(self, size_bytes)

    def acquire(self, size_bytes: int) -> memoryview:
        """Take a buffer of at least ``size_bytes``, on whole pages, out of the pool, or make one."""
        with self._lock:
            for index, free in enumerate(self._free):
                if len(free) >= size_bytes:
                    return self._free.pop(index)
        return aligned_memory(max(size_bytes, _MIN_BUFFER_BYTES))

    def release(self, buffer: memoryview) -> None:
        """Return a buffer to the pool; nothing may use it any more."""
        with self._lock:
            if len(self._free) < _MAX_POOLED:
                self._free.append(buffer)


class PooledBuffer:
    """A borrowed buffer."""

    def __init__(self, pool: BufferPool, size_bytes: int) -> None:
        self._pool, self._size_bytes = pool, size_bytes

    def __enter__(self) -> memoryview:
        self._buffer = self._pool.acquire(self._size_bytes)
        return self._buffer

    def __exit__(self, *exc: object) -> None:
        self._pool.release(self._buffer)


@functools.cache
def buffer_pool() -> BufferPool:
    """The pool of this process.

    A forked child makes its own: in the parent another thread may have held the lock at the fork.
    """
    return BufferPool()


os.register_at_fork(after_in_child=buffer_pool.cache_clear)


def aligned_memory(size_bytes: int) -> memoryview:
    """Allocate memory that begins at a huge page, and consists of huge pages where there are any.

    A direct write of a window pins each of its pages.
    """
    memory = _MappedMemory(
        -1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no huge pages: %s", error)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(
            mmap.MADV_DONTFORK
        )  # open(2): no direct I/O from private memory that a fork shares
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + size_bytes]
