"""What a copy of files is asked to do and what it came to: values, and where each file goes. Pure.

CopyTask    one file and its sidecar            Readable   where a rank reads
Tally       what was sent, what was there       Writable   where it writes, and how
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.sending import PlainNames
from ckptfs.commit.shared_data import file_key
from ckptfs.errors import StateError
from ckptfs.storage.base import Shape, Storage

__all__ = ["CopyTask", "Readable", "StoppedError", "Tally", "Writable", "new_path"]


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One file to copy, with the digests that lie beside it; as the source's manifest lists them."""

    record: FileRecord
    sidecar: FileRecord | None = None

    @property
    def size_bytes(self) -> int:
        """Of both."""
        return self.record.size_bytes + (0 if self.sidecar is None else self.sidecar.size_bytes)


@dataclass(frozen=True, slots=True)
class Readable:
    """Where a rank reads the source's files. home: as ``catalog.find`` tells."""

    storage: Storage
    home: str
    rank: int

    def key(self, record: FileRecord) -> str:
        """The key of a listed file."""
        return file_key(record, self.home)


@dataclass(frozen=True, slots=True)
class Writable:
    """Where a rank writes the copy: ``prefix`` of the attempt (ends with "/"), its save_id, domain.

    plain: the files keep their names, below ``prefix`` itself. guard: asked before each of these,
    where names are final before the commit. kept: what is on its way outlives this process.
    """

    storage: Storage
    prefix: str
    save_id: str
    domain: str | None
    plain: bool = False
    guard: PlainNames | None = None
    kept: bool = False

    @property
    def is_its_alone(self) -> bool:
        """Whether a file that has its name there is whole, and of this attempt: what object stores
        complete has been compared, and these keys have the save_id in them. A plain name may be
        anybody's.
        """
        return not self.plain and self.storage.capabilities.shape is Shape.OBJECT

    def path(self, record: FileRecord, source_id: str) -> str:
        """A file's path in the copy."""
        return record.path if self.plain else new_path(record, source_id, self.save_id)

    def key(self, path: str) -> str:
        """Where that lies until the commit."""
        return self.prefix + (path if self.plain else path.partition("/")[2])


@dataclass(slots=True)
class Tally:
    """What copying came to. sent_bytes went to the target, kept_bytes were there from an earlier try;
    digests: so many were compared.
    """

    sent_bytes: int = 0
    kept_bytes: int = 0
    digests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, sent_bytes: int = 0, kept_bytes: int = 0, digests: int = 0) -> None:
        """From any thread."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.kept_bytes += kept_bytes
            self.digests += digests


class StoppedError(StateError):
    """The copy was given up between two reads."""


def new_path(record: FileRecord, source_id: str, save_id: str) -> str:
    """The path of a file in the copy: in its own directory, also where the source shares it. Pure."""
    first, slash, rest = record.path.partition("/")
    if not slash:
        return f"{save_id}/{first}"  # of torch's own writer
    # Two writers of shared files may have used one name.
    return f"{save_id}/{rest}" if first == source_id else f"{save_id}/{first}.{rest}"
