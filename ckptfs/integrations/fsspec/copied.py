"""Stock checkpoints that a program copies in, file by file: plain files, and one commit once all is there.

    each file            lies under its own name as soon as it is closed, in whatever order they come
    the last of a whole  .metadata of DCP and every *.distcp that it refers to, written by this process:
    stock save           linked (object stores: copied) into an attempt and committed by the log
    anything else        stays as it is: shards in subfolders, other names, a .metadata whose pickle
                         names classes of its own, half a copy

Nothing that was copied in ever waits in an attempt, because what an attempt holds is removed by the
next owner of the run. The plain files go when the commit is durable, and only if they are the same.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptfs.commit.arriving import Joined, give_up, join_attempt
from ckptfs.commit.layout import METADATA
from ckptfs.errors import CkptfsError, UnsupportedError
from ckptfs.integrations.fsspec.agreement import fresh_id
from ckptfs.storage.base import Stat, Storage
from ckptfs.uri import Uri

__all__ = ["CopiedFiles"]

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"[^/]+\.distcp")
_ASIDE = ".metadata.tmp"  # where .metadata lies for the moment of the commit, as torch has it
_REMEMBERED = 64  # directories that are being copied into


@dataclass(slots=True)
class _Copy:
    """What of one directory this process wrote, and how long each file has to be by its metadata."""

    names: set[str] = field(default_factory=set)
    needs: Mapping[str, int] | None = None
    data: bytes = b""


class CopiedFiles:
    """Plain files that this process wrote, by directory. Thread-safe; of no use after a fork.

    storage_at: opens a storage rooted at a URI. copy: copies a file within the place, where links are
    unknown.
    """

    def __init__(
        self, storage_at: Callable[[Uri], Storage], copy: Callable[[Uri, Uri], None]
    ) -> None:
        self._storage_at, self._copy = storage_at, copy
        self._lock = threading.Lock()
        self._copies: dict[Uri, _Copy] = {}

    def wrote(self, step: Uri, name: str, data: bytes) -> None:
        """A file of ``step`` was closed; data: the bytes of ``.metadata``. If it makes a stock save
        whole, that is committed; where this fails the files stay, and a warning says why.
        """
        from ckptfs.integrations.fsspec.arriving import needed

        if name != METADATA and not _SHARD.fullmatch(name):
            return  # what refers to it, or to a subfolder, is never whole
        needs = needed(data, step) if data else None
        with self._lock:
            copy = self._copies.setdefault(step, _Copy())
            if name in copy.names:
                copy = self._copies[step] = _Copy()  # the same file again: of another copy
            copy.names.add(name)
            if name == METADATA:
                copy.needs, copy.data = needs, data
            if not copy.needs or not copy.needs.keys() <= copy.names:
                while len(self._copies) > _REMEMBERED:
                    self._copies.pop(next(iter(self._copies)))
                return
            del self._copies[step]
        self._commit(step, copy.needs, copy.data)

    def failed(self, step: Uri) -> None:
        """A file of ``step`` was given up: what comes next belongs to another copy."""
        with self._lock:
            self._copies.pop(step, None)

    def _commit(self, step: Uri, needs: Mapping[str, int], data: bytes) -> None:
        from ckptfs.integrations.fsspec.arriving import ARRIVED, commit_arrived

        storage, home = self._storage_at(step.parent), step.name
        try:
            found = {file: storage.stat(f"{home}/{file}") for file in needs}
            if any(found[file].size_bytes < least for file, least in needs.items()):
                return
            joined = self._taken(step, tuple(needs), data)
            with _aside(storage, home, data):
                commit_arrived(joined, ARRIVED, replace=False)
            self._remove(storage, home, found)
        except (CkptfsError, OSError, NotImplementedError) as error:
            logger.warning("%s was copied in and is not committed; its files stay: %s", step, error)

    def _taken(self, step: Uri, files: tuple[str, ...], data: bytes) -> Joined:
        """A fresh attempt that holds all of it beside the plain files."""
        from ckptfs.integrations.fsspec.arriving import ARRIVED

        joined = join_attempt(self._storage_at(step.parent), step.name, fresh_id())
        storage = joined.seat.storage
        try:
            for file in files:
                try:
                    storage.link(f"{step.name}/{file}", joined.key(file))
                except UnsupportedError:
                    self._copy(step / file, storage.uri(joined.key(file)))
            with joined.open_write(ARRIVED) as writer:
                writer.write(data)
        except BaseException:
            with contextlib.suppress(CkptfsError, OSError):  # then the next owner removes it
                give_up(joined)
            raise
        return joined

    def _remove(self, storage: Storage, home: str, found: Mapping[str, Stat]) -> None:
        """The plain files of what is committed; one that somebody wrote anew meanwhile stays."""
        same = [
            file for file, before in found.items() if _is_same(storage, f"{home}/{file}", before)
        ]
        storage.remove_many([f"{home}/{file}" for file in same])


@contextlib.contextmanager
def _aside(storage: Storage, home: str, data: bytes) -> Iterator[None]:
    """``.metadata`` makes room for the projection, and comes back where the commit fails. A crash
    leaves it beside its shards as ``.metadata.tmp``.
    """
    storage.replace(f"{home}/{_ASIDE}", data)
    storage.remove(f"{home}/{METADATA}")
    try:
        yield
    except BaseException:
        storage.replace(f"{home}/{METADATA}", data)
        storage.remove(f"{home}/{_ASIDE}")
        raise
    storage.remove(f"{home}/{_ASIDE}")


def _is_same(storage: Storage, key: str, before: Stat) -> bool:
    now = storage.stat(key)
    return (now.size_bytes, now.etag, now.modified_s) == (
        before.size_bytes,
        before.etag,
        before.modified_s,
    )
