"""What every file on its way has in common: closed it is there, left by an error it never was.

    with storage.open_write(key) as writer: ...        normally: ``close``; by any exception: ``abort``

``DataWriter`` (in order) and ``ParallelWriter`` (in windows) are such files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Unfinished"]


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
