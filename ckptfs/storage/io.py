"""Handles of open files: readers by range, writers in order, writers in windows.

    with storage.open_read(key) as reader:                          a file that does not change
        reader.read_into(offset, buffer)                                any thread
    with storage.open_write(key) as writer:                         a new file, written in order
        writer.write(data)                                              one thread
    with storage.open_parallel(key, size_bytes=n) as writer:        a new file of known size
        writer.write_at(0, views)                                       in windows, any order, any thread

Both writers are ``Unfinished`` files: leaving the ``with`` block normally makes the file durable and visible;
leaving it by any exception, Ctrl-C included, leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Self

from ckptfs.errors import UnsupportedError

__all__ = ["DataReader", "DataWriter", "Engine", "ParallelWriter", "Reach", "Unfinished"]


class Reach(Enum):
    """What a read costs in addition to its bytes."""

    LOCAL = "local"  # a system call: the calling thread may as well read itself
    REMOTE = "remote"  # a round trip: the calling thread should do something else meanwhile


class DataReader(ABC):
    """Ranged reads of one file that does not change. Safe from several threads at once.

    Every backend implements ``read_into``. Where a read costs little, ``read_views`` and ``read_steps`` are
    more efficient.
    """

    size_bytes: int
    concurrency: int = 1  # how many reads should be in flight at once
    window_bytes: int = 4 << 20  # what one read should fetch if the caller has the choice
    reach: Reach = Reach.REMOTE  # what another read costs

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
            step_bytes: All steps but the last are multiples of it.

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
    """One file that is written in order, by one thread at a time."""

    there_bytes: int = (
        0  # what an earlier writer left (``open_kept``), to be read, compared and skipped
    )
    spared_bytes: int = 0  # how many of the written bytes the storage had already

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of ``data``. The caller may reuse the buffer when this returns.

        Returns:
            The number of bytes in ``data``.

        Raises:
            NoSpaceError: The disk or the quota is full.
            StorageError: The write failed.
        """

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """As ``write``, without a copy: the caller must not change ``data`` until ``close`` returns.

        The writer drops its reference to ``data`` as soon as the bytes are sent.
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
        """Keep the first ``size_bytes`` that an earlier writer left, and append after them.

        Call it before the first write.

        Raises:
            UnsupportedError: Nothing is left of an earlier writer.
        """
        if size_bytes:
            raise UnsupportedError("nothing is left of an earlier writer")


class Engine(Enum):
    """How a file is written."""

    DIRECT = "direct"  # past the page cache, from aligned buffers
    BUFFERED = "buffered"  # through the page cache, from the caller's memory
    STREAMED = "streamed"  # in order, by a DataWriter


class ParallelWriter(Unfinished):
    """One file of known size, written in windows, in any order, by several threads at once.

    The caller cuts the file into windows of ``window_bytes``; only the last one may be smaller. Every
    ``write_at`` must return before ``close`` is called. A ``write_at`` that is still running when the file is
    aborted writes to no other file.
    """

    window_bytes: int  # the size of all windows but the last
    concurrency: int  # how many threads are worth having

    @property
    @abstractmethod
    def engine(self) -> Engine:
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
