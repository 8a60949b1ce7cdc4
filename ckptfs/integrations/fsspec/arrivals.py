"""What a DCP writer of this process has on its way: files under final names that only wait.

    is_called_by_dcp()         torch's writers wait; what another program copies in is ``copied``'s
    open_write(step, name)     a file of the attempt that the process group agreed on
    commit(step, ".metadata.tmp")    all of them have arrived: seal, project
    put_metadata(step, data)   .metadata written in place: the commit comes with the last file
    replace(step)              ".metadata" was removed: the next commit replaces what is there

The id of an attempt is agreed without a collective (``agreement``), so that data have their
final keys on object stores too. It is used up by its commit, and by any file of it that was given up:
whatever comes after belongs to another save, and nothing of two saves is ever mixed.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable

from ckptfs.commit.arriving import Joined, give_up, join_attempt
from ckptfs.commit.layout import is_save_id
from ckptfs.errors import (
    AlreadyExistsError,
    CkptfsError,
    CommitConflictError,
    FencedError,
    NotFoundError,
    UnsupportedError,
)
from ckptfs.integrations.fsspec.agreement import agreed_id, is_first, renew_id
from ckptfs.storage.base import DataWriter, Shape, Storage
from ckptfs.uri import Uri

__all__ = ["Arrivals", "arrives", "refuse_alone"]

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"[^/]+\.distcp")
_WAITS = re.compile(r"[^/]+\.distcp|\.metadata\.tmp")
_PER_RANK = re.compile(r"__\d+\.metadata(\.tmp)?")
_KEPT = 16  # attempts that are remembered


def refuse_alone(file: Uri) -> None:
    """UnsupportedError: a DCP writer is about to write the metadata of one rank."""
    if _PER_RANK.fullmatch(file.name):
        raise UnsupportedError(
            "every rank would commit alone (use_collectives=False)",
            uri=file,
            hint="save with collectives, so that one rank knows that all have written",
        )


def arrives(file: Uri) -> bool:
    """Whether a file of this name waits for a commit if a DCP writer writes it. What lies below a
    save_id was committed elsewhere and is copied: it keeps its place.
    """
    return bool(_WAITS.fullmatch(file.name) and not is_save_id(file.parent.name))


class Arrivals:
    """Attempts of this process, below any runs. Thread-safe; of no use after a fork.

    storage_at: opens a storage rooted at a URI.
    """

    def __init__(self, storage_at: Callable[[Uri], Storage]) -> None:
        self._storage_at = storage_at
        self._lock = threading.RLock()  # a file may be collected, and given up, anywhere
        self._joined: dict[str, Joined] = {}
        self._spoilt: list[Joined] = []
        self._replacing: set[Uri] = set()

    def begin(self) -> None:
        """A save begins: what earlier ones gave up is removed, where it can be."""
        with self._lock:
            spoilt, self._spoilt = self._spoilt, []
        for joined in spoilt:
            try:
                give_up(joined)
            except (CkptfsError, OSError) as error:
                logger.warning("files of the failed save %s stay: %s", joined.keys.save_id, error)

    def open_write(self, step: Uri, name: str) -> DataWriter:
        """One file of the attempt at ``step``, whole or not at all. FencedError, StorageError."""
        joined = self._join(step)
        try:
            writer = joined.open_write(name)
        except NotFoundError as error:
            self.spoil(step, joined)
            raise FencedError(
                "this save was given up: a newer owner took the run", uri=step, hint="save again"
            ) from error
        return _Arriving(self, step, joined, writer, whole=bool(_SHARD.fullmatch(name)))

    def put_metadata(self, step: Uri, data: bytes) -> bool:
        """``.metadata`` written in place by a DCP writer: committed when all that it refers to has
        arrived. False: it is nothing that waits, write it as it is.
        """
        from ckptfs.integrations.fsspec.arriving import ARRIVED, needed

        files = needed(data, step)
        if files is None or any("/" in file for file in files):
            return (
                False  # not DCP's; or what a commit elsewhere wrote, whose files keep their places
            )
        joined = self._join(step)
        with joined.open_write(ARRIVED) as writer:
            writer.write(data)
        self.commit_if_whole(step, joined)
        return True

    def commit_if_whole(self, step: Uri, joined: Joined) -> None:
        """Commit if ``.metadata`` was put and nothing is missing; one process of all does it."""
        from ckptfs.integrations.fsspec.arriving import ARRIVED, missing

        try:
            short = missing(joined, ARRIVED)
        except NotFoundError:
            return
        if short:
            logger.info("%s waits for %d files, such as %s", step, len(short), short[0])
        elif is_first(f"{step} {joined.keys.save_id}"):
            self._commit(step, joined, ARRIVED)

    def commit(self, step: Uri, metadata: str) -> None:
        """Commit what arrived, by the staged ``metadata``. Errors as for ``commit_arrived``; then
        nothing of it is visible and its files are gone.
        """
        joined = self._join(step)
        if not is_first(f"{step} {joined.keys.save_id}"):
            raise CommitConflictError("another process commits this save", uri=step)
        self._commit(step, joined, metadata)

    def _commit(self, step: Uri, joined: Joined, metadata: str) -> None:
        from ckptfs.integrations.fsspec.arriving import commit_arrived

        try:
            commit_arrived(joined, metadata, replace=step in self._replacing)
        finally:
            # Whatever became of it: the id is used up, here and in every rank.
            self._forget(step, joined)
            self._replacing.discard(step)

    def replace(self, step: Uri) -> None:
        """The next commit at ``step`` may replace what is committed there; that stays until then."""
        self._replacing.add(step)

    def remove(self, step: Uri, name: str) -> None:
        """Take a file away that waits. NotFoundError: it does not."""
        joined = self._join(step)
        if name not in joined.files():
            raise NotFoundError("no such file", uri=step / name)
        joined.remove(name)

    def spoil(self, step: Uri, joined: Joined) -> None:
        """A file of it was given up, so its save failed: what comes is another one's."""
        with self._lock:
            self._spoilt.append(joined)
        self._forget(step, joined)

    def _forget(self, step: Uri, joined: Joined) -> None:
        renew_id(str(step), joined.keys.save_id)
        self._joined.pop(joined.keys.save_id, None)

    def _join(self, step: Uri) -> Joined:
        with self._lock:
            save_id = agreed_id(str(step))
            if save_id not in self._joined:
                try:
                    joined = join_attempt(self._storage_at(step.parent), step.name, save_id)
                except FencedError:
                    # Spent: an owner of the run came between, or a committer died half way.
                    save_id = renew_id(str(step), save_id)
                    joined = join_attempt(self._storage_at(step.parent), step.name, save_id)
                if joined.keys.shape is Shape.FILESYSTEM:
                    _remove_empty(joined.seat.storage, step.name)
                while len(self._joined) >= _KEPT:
                    self._joined.pop(next(iter(self._joined)))
                self._joined[save_id] = joined
            return self._joined[save_id]


def _remove_empty(storage: Storage, name: str) -> None:
    """The step's directory, if writers made it and nothing is in it: nobody shall take it for one."""
    try:
        storage.remove_dir(name)
    except AlreadyExistsError:
        return  # somebody's files: they stay


class _Arriving(DataWriter):
    def __init__(
        self, arrivals: Arrivals, step: Uri, joined: Joined, writer: DataWriter, *, whole: bool
    ) -> None:
        self._arrivals, self._step, self._joined = arrivals, step, joined
        self._writer, self._asks, self._done = writer, whole, False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return self._writer.write(data)

    def close(self) -> None:
        self._writer.close()
        self._done = True
        if self._asks:
            self._arrivals.commit_if_whole(self._step, self._joined)

    def abort(self) -> None:
        self._writer.abort()
        # At exit the store's thread is gone already, and nobody saves any more.
        if not self._done and not sys.is_finalizing():
            self._done = True
            try:
                self._arrivals.spoil(self._step, self._joined)
            except CkptfsError as error:
                logger.warning(
                    "the ranks' store did not hear that %s failed: %s", self._step, error
                )
