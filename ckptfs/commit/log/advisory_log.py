"""The run log on stores without an exclusive create.

Some stores can only write, not create (many fsspec protocols, mounts without hard links). There an
entry is not ``00000042`` but ``00000042.<write_id>``: if two writers take one number, both entries are
stored, neither overwrites the other, and nothing acknowledged is lost. Readers sort the entries by
number and write id and number them in this order, so the programs of ``commit`` see an ordinary log:

    log/00000000.a  log/00000001.c  log/00000001.d      read as entries 0, 1, 2

But the order is not final: an entry may appear below one that was read already. So fences and the
exclusiveness of names are only advisory here. The result of every save says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import TypeVar

from ckptfs.commit.paths import HINT, LOG, log_key
from ckptfs.errors import AlreadyExistsError, NotFoundError, StorageError
from ckptfs.storage.base import (
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Space,
    Stat,
    Storage,
    UnfinishedUpload,
)
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.uri import Uri

__all__ = ["ADVICE", "AdvisoryLog", "LogKind", "kind_of_log", "other_kind", "with_log"]

ADVICE = (
    "this storage has no exclusive create: two writers of one run are not kept apart, "
    "fences and exclusive names are advice"
)

_PREFIX = f"{LOG}/"

T = TypeVar("T")


def with_log(storage: Storage, caps: Capabilities, *, write: bool) -> Storage:
    """Return the storage, or one that presents its advisory run log as an ordinary one.

    Readers write nothing.
    """
    if write:
        return storage if caps.exclusive_create else AdvisoryLog(storage)
    return AdvisoryLog(storage) if kind_of_log(storage) is LogKind.ADVISORY else storage


class LogKind(Enum):
    """How the entries that exist in a log were written."""

    NONE = "none"
    EXCLUSIVE = "exclusive"
    ADVISORY = "advisory"


def kind_of_log(storage: Storage) -> LogKind:
    """Return the kind of a log. Writes nothing.

    It takes one stat, and a listing if that finds nothing.
    """
    try:
        storage.stat(log_key(0))
    except NotFoundError:
        try:
            names = [entry.name for entry in storage.list(LOG)]
        except NotFoundError:
            return LogKind.NONE
        return LogKind.ADVISORY if any("." in name for name in names) else LogKind.NONE
    return LogKind.EXCLUSIVE


def other_kind(storage: Storage, caps: Capabilities) -> str | None:
    """Return an error text if the existing log is not of the kind that this writer would write.

    Two kinds of log in one run would be two histories of that run.
    """
    match kind_of_log(storage):
        case LogKind.EXCLUSIVE if not caps.exclusive_create:
            return (
                "the run's log was written with exclusive creates, and the store or its client "
                "does not keep two creates apart now"
            )
        case LogKind.ADVISORY if caps.exclusive_create:
            return (
                "the run's log was written without exclusive creates, which the store and its "
                "client have now"
            )
        case _:
            return None


class AdvisoryLog(Storage):
    """A storage that adds the write id to the names of log entries, and to no other key."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.root: Uri = inner.root
        self._names: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner storage: no exclusive create."""
        return self._inner.capabilities

    def probe(self, key: str) -> Capabilities:
        """As the inner storage."""
        return self._inner.probe(key)

    def _number(self, key: str) -> int | None:
        name = key.removeprefix(_PREFIX)
        return int(name) if key.startswith(_PREFIX) and name.isdigit() else None

    def _listed(self) -> list[str]:
        try:
            entries = self._inner.list(LOG)
        except NotFoundError:
            return []
        return sorted(e.name for e in entries if not e.is_dir and e.name[:1].isdigit())

    def read(self, key: str) -> bytes:
        """Read an entry by its place in the order; any other key as it is."""
        return self._inner.read(self._lies_at(key))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        """As ``read``."""
        return self._inner.read_small(self._lies_at(key), limit_bytes)

    def _lies_at(self, key: str) -> str:
        if key == HINT:
            # A snapshot equals the entries below it at that time; here more may have appeared since.
            raise NotFoundError("no hint on an advisory log", uri=self.uri(key))
        number = self._number(key)
        if number is None:
            return key
        names = self._names  # read once: another thread may refresh at the same time
        if number >= len(names):
            names = self._names = self._listed()
        if number >= len(names):
            raise NotFoundError("no such entry yet", uri=self.uri(key))
        return _PREFIX + names[number]

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T | StorageError]:
        """As the inner storage."""
        return self._inner.at_once(calls)

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """Write an entry under its own name, unless its place in the order is taken already."""
        number = self._number(key)
        if number is None:
            # The domain id: the last writer wins, and every process reads it back.
            try:
                self._inner.stat(key)
            except NotFoundError:
                self._inner.replace(key, data)
                return
            raise AlreadyExistsError("somebody made it first", uri=self.uri(key))
        self._names = self._listed()
        if number < len(self._names):
            raise AlreadyExistsError("the log is longer by now", uri=self.uri(key))
        write_id = staging.rsplit("/", 1)[1]
        self._inner.replace(f"{key}.{write_id}", data)

    def refresh(self, key: str) -> None:
        """Refresh the inner storage; for the log, also forget which entries were seen."""
        if key == LOG:
            self._names = []
        self._inner.refresh(key)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        """As the inner storage."""
        self._inner.replace(key, data, if_match=if_match)

    def stat(self, key: str) -> Stat:
        """As the inner storage."""
        return self._inner.stat(key)

    def list(self, key: str) -> list[Entry]:
        """As the inner storage."""
        return self._inner.list(key)

    def refusing_links(self, top: str) -> Storage:
        """Return the inner storage's: files in a checkpoint have no number."""
        return self._inner.refusing_links(top)

    def refuse_link(self, key: str) -> None:
        """As the inner storage."""
        self._inner.refuse_link(key)

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        """As the inner storage."""
        return self._inner.open_write(key, size_hint_bytes=size_hint_bytes)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """As the inner storage."""
        return self._inner.files_at_once(key, size_bytes)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        """As the inner storage."""
        return self._inner.open_parallel(key, size_bytes=size_bytes, engine=engine)

    def open_kept(self, key: str, *, size_bytes: int) -> DataWriter:
        """As the inner storage."""
        return self._inner.open_kept(key, size_bytes=size_bytes)

    def open_read(self, key: str) -> DataReader:
        """As the inner storage."""
        return self._inner.open_read(key)

    def make_dir(self, key: str) -> None:
        """As the inner storage."""
        self._inner.make_dir(key)

    def rename(self, source: str, target: str) -> None:
        """As the inner storage."""
        self._inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """As the inner storage."""
        self._inner.link(source, target)

    def remove(self, key: str) -> None:
        """As the inner storage."""
        self._inner.remove(key)

    def remove_many(self, keys: Sequence[str]) -> None:
        """As the inner storage."""
        self._inner.remove_many(keys)

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        """As the inner storage."""
        return self._inner.unfinished_uploads()

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        """As the inner storage."""
        return self._inner.sweep_uploads(older_than_s, keys)

    def remove_dir(self, key: str) -> None:
        """As the inner storage."""
        self._inner.remove_dir(key)

    def remove_tree(self, key: str) -> None:
        """As the inner storage."""
        self._inner.remove_tree(key)

    def sync(self, key: str) -> None:
        """As the inner storage."""
        self._inner.sync(key)

    def touch(self, key: str) -> None:
        """As the inner storage."""
        self._inner.touch(key)

    def space(self) -> Space | None:
        """As the inner storage."""
        return self._inner.space()

    def local_path(self, key: str) -> str | None:
        """As the inner storage."""
        return self._inner.local_path(key)

    def close(self) -> None:
        """Close the inner storage."""
        self._inner.close()
