"""A file whose size is known before its first byte: written in windows, by several threads at once.

    with storage.open_parallel(key, size_bytes=n) as writer:      None: this place takes streams only
        writer.write_at(0, views) ... writer.write_at(window_bytes, views) ...      any order, any thread
                                                                  left normally: durable and visible

Whoever writes cuts the file into windows of ``window_bytes``; all but the last are whole. How the bytes
get to the disk is the storage's affair, and ``engine`` tells it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from enum import Enum

from ckptfs.storage.unfinished import Unfinished

__all__ = ["Engine", "ParallelWriter"]


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
