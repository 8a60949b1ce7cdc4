"""What a way to HDFS must do: a few operations, each one try, each with a typed answer.

    WebClient    webhdfs://   HTTP to the NameNode, then to a DataNode      hdfs_web.py

A client is thin: it spells operations and translates answers. It never retries. Paths are absolute
in HDFS. What the operations are put together to is decided once, in ``webhdfs.py``.

    NotFoundError      no such path, or a path's parent is missing
    TransientError     worth a retry, and nothing happened
    AnswerLostError    a change was asked for, and no answer tells whether it happened
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from ckptfs.storage.base import Entry

__all__ = ["HdfsClient", "Over", "Powers", "Sink", "Source", "Status"]


class Over(Enum):
    """What a rename does when a file stands under the new name."""

    REFUSE = "refuse"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Powers:
    """refuses: Over.REFUSE holds against everybody. replaces: Over.REPLACE is one step."""

    refuses: bool
    replaces: bool


@dataclass(frozen=True, slots=True)
class Status:
    """One path. file_id: the inode's number, of this file whatever it is called; None: not told."""

    size_bytes: int
    is_dir: bool
    modified_ms: int = 0
    file_id: int | None = None


class Sink(ABC):
    """One new file on its way; its bytes may be visible under its (temporary) path."""

    @abstractmethod
    def send(self, data: memoryview) -> None:
        """Append ``data`` (bytes, contiguous); it may be reused when this returns."""

    @abstractmethod
    def finish(self) -> None:
        """Close the file: HDFS has every byte, on as many nodes as the replication asks for."""

    @abstractmethod
    def drop(self) -> bool:
        """Stop; what arrived stays under its path, to be deleted. True: the server will not make it
        any more, if it did not yet. Never raises; harmless twice.
        """


class Source(ABC):
    """One file open for ranged reads, from several threads at once."""

    @abstractmethod
    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out``. IntegrityError: the file ends before."""

    @abstractmethod
    def close(self) -> None:
        """Harmless twice."""


class HdfsClient(ABC):
    """One HDFS through one library. Thread-safe, lazy, picklable; survives forks."""

    endpoint: str  # what errors name; no credentials
    powers: Powers

    @abstractmethod
    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """All bytes of a small file, or the first ``most_bytes`` of them."""

    @abstractmethod
    def status(self, path: str) -> Status:
        """Size and kind of one path."""

    @abstractmethod
    def list(self, path: str) -> list[tuple[Entry, Status]]:
        """What lies directly in a directory, in any order. NotFoundError: no directory."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """A new small file, closed, and its missing parents. AlreadyExistsError."""

    @abstractmethod
    def begin(self, path: str) -> Sink:
        """Begin a new large file, and its missing parents."""

    @abstractmethod
    def open(self, path: str, status: Status) -> Source:
        """Open a file whose status is known."""

    @abstractmethod
    def rename(self, source: str, target: str, over: Over) -> None:
        """Move one file. NotFoundError: the source or the target's parent is missing.
        AlreadyExistsError: refused. UnsupportedError: this way cannot.
        """

    @abstractmethod
    def make_dirs(self, path: str) -> None:
        """A directory and its missing parents; existing is success."""

    @abstractmethod
    def delete(self, path: str, *, recursive: bool) -> bool:
        """Whether something was there. AlreadyExistsError: a directory that is not empty."""

    def now_ms(self) -> int:
        """The time on the server's clock, of its last answer; 0: it does not tell."""
        return 0

    def close(self) -> None:
        """Release connections; harmless twice."""
