"""What is read of one large file: ranges, into the caller's memory.

read_into    one buffer                     every backend has it
read_views   one buffer after the other     where a read costs little,
read_steps   one buffer, told as it fills   these are better than read_into
keep_cached  others are about to read the same
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Self

__all__ = ["DataReader", "Reach"]


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
