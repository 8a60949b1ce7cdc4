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
    """What a read costs beside its bytes."""

    LOCAL = "local"  # a system call: the thread that asks may as well read itself
    REMOTE = "remote"  # a round trip: whoever asks has better things to do meanwhile


class DataReader(ABC):
    """Ranged reads of one file that does not change. Safe from several threads at once.

    concurrency: reads that are worth having under way at once. window_bytes: what one read should
    fetch, where the caller has the choice. reach: what another read costs.
    """

    size_bytes: int
    concurrency: int = 1
    window_bytes: int = 4 << 20
    reach: Reach = Reach.REMOTE

    @property
    def threads(self) -> int:
        """How many of ``concurrency`` reads are worth a thread each, as far as is known now: no more
        than there are cores, where nothing is waited for. May rise, never falls.
        """
        return self.concurrency

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of ``buffer`` from ``offset``. A short file is an EOF error: IntegrityError."""

    def read_steps(self, offset: int, buffer: memoryview, step_bytes: int) -> Iterator[int]:
        """As ``read_into``, telling after each step how much of the buffer is filled.

        Steps are multiples of ``step_bytes``, but for the last: as small ones as cost nothing, so that
        what is done with the bytes finds them in the processor's cache.
        """
        self.read_into(offset, buffer)
        yield len(buffer)

    def read_views(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill one buffer after the other with the bytes from ``offset``; they are flat, of bytes.

        One read where ``reach`` is local, so that small neighbours need no memory between.
        """
        for view in views:
            self.read_into(offset, view)
            offset += len(view)

    def keep_cached(self) -> None:
        """Others of this machine are about to read the same: leave it in the page cache, if there is
        one. Before the first read.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the handle; harmless twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Unfinished(ABC):
    """One file on its way. Nothing is visible under its key before ``close`` returns.

    Leaving the ``with`` block normally closes; leaving it by any exception, Ctrl-C included, aborts
    and leaves nothing over.
    """

    @abstractmethod
    def close(self) -> None:
        """Make the file's bytes durable and visible under its key. StorageError: bytes are missing.

        The *name* is durable after ``sync`` of its directory: thousands of writers share one sync.
        """

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind; never raises; harmless after close."""

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
    """One file on its way, written in order. One thread at a time.

    there_bytes: what an earlier writer left of this file (``open_kept``), to be read, compared and
    skipped. spared_bytes: of what was written, bytes that the place held already.
    """

    there_bytes: int = 0
    spared_bytes: int = 0

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of ``data``; the buffer may be reused when it returns. NoSpaceError, ..."""

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """As ``write``, but ``data`` stays as it is until ``close`` returns: it need not be copied.

        A writer lets go of it once its bytes are sent; staged copies live as long as that.
        """
        return self.write(data)

    def read_there(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what an earlier writer left, from ``offset``; below ``there_bytes``."""
        raise UnsupportedError("nothing is left of an earlier writer")

    def skip(self, size_bytes: int) -> None:
        """Before the first write: the first bytes are right as they are there, go on behind them."""
        if size_bytes:
            raise UnsupportedError("nothing is left of an earlier writer")


class Engine(Enum):
    """How a file was written.

    direct: past the page cache, from staging buffers. buffered: through the page cache, from where the
    data lies. streamed: in order, by the storage's own stream.
    """

    DIRECT = "direct"
    BUFFERED = "buffered"
    STREAMED = "streamed"


class ParallelWriter(Unfinished):
    """One file on its way. By ``close`` every ``write_at`` must have returned; one that has not when the
    file is aborted writes to nobody's file.

    window_bytes: of all windows but the last. concurrency: threads that are worth having.
    """

    window_bytes: int
    concurrency: int

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """How it is written; direct may become buffered where the place refuses it half-way."""

    @property
    @abstractmethod
    def direct_bytes(self) -> int:
        """Bytes that went past the page cache."""

    @abstractmethod
    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        """Write these bytes, one view after another, from ``offset``: one whole window, or the last.

        views: flat views of bytes, taken one at a time; each must stay as it is until this returns.
        What it raises while it is taken is raised here. Any thread, each window once. NoSpaceError,
        ...: after an error the file can only be aborted.
        """
