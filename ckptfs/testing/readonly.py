"""A storage that can only be read, like a read-only mount, or an object store with a read-only key.

    ReadOnlyStorage(open_storage(uri))      every method that would change a byte raises AccessError

Give it to a reader to show that the reader needs only read permission and changes nothing. ``refused``
counts the writes that were tried; a correct reader leaves it at 0.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn, TypeVar

from ckptfs.errors import AccessError, StorageError
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

__all__ = ["ReadOnlyStorage"]

T = TypeVar("T")


class ReadOnlyStorage(Storage):
    """A storage that refuses all writes.

    Args:
        inner: The real storage.

    Attributes:
        refused: The number of calls that were refused.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.root = inner.root
        self.refused = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def read(self, key: str) -> bytes:
        return self.inner.read(key)

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        return self.inner.read_small(key, limit_bytes)

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T | StorageError]:
        return self.inner.at_once(calls)

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        self._refuse("create", key)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        self._refuse("replace", key)

    def stat(self, key: str) -> Stat:
        return self.inner.stat(key)

    def list(self, key: str) -> list[Entry]:
        return self.inner.list(key)

    def refusing_links(self, top: str) -> Storage:
        strict = copy.copy(self)
        strict.inner = self.inner.refusing_links(top)
        return strict

    def refuse_link(self, key: str) -> None:
        self.inner.refuse_link(key)

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        self._refuse("write", key)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        self._refuse("write", key)

    def open_read(self, key: str) -> DataReader:
        return self.inner.open_read(key)

    def make_dir(self, key: str) -> None:
        self._refuse("make_dir", key)

    def rename(self, source: str, target: str) -> None:
        self._refuse("rename", target)

    def link(self, source: str, target: str) -> None:
        self._refuse("link", target)

    def remove(self, key: str) -> None:
        self._refuse("remove", key)

    def remove_many(self, keys: Sequence[str]) -> None:
        self._refuse("remove_many", keys[0] if keys else "")

    def remove_dir(self, key: str) -> None:
        self._refuse("remove_dir", key)

    def remove_tree(self, key: str) -> None:
        self._refuse("remove_tree", key)

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        return self.inner.unfinished_uploads()

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        self._refuse("sweep_uploads", "")

    def sync(self, key: str) -> None:
        self._refuse("sync", key)

    def refresh(self, key: str) -> None:
        self.inner.refresh(key)

    def touch(self, key: str) -> None:
        self._refuse("touch", key)

    def space(self) -> Space | None:
        return self.inner.space()

    def close(self) -> None:
        self.inner.close()

    def _refuse(self, action: str, key: str) -> NoReturn:
        self.refused += 1
        raise AccessError(
            f"{action} failed: this storage is read-only", errno=errno.EROFS, uri=self.uri(key)
        )
