"""Files that torch's writers, and programs that copy, write one by one until they are one commit.

``Arrivals`` are files that a DCP writer of this process has written under final names, and that
wait:

    is_called_by_dcp()         only torch's writers wait; what another program copies in is not held up
    open_write(step, name)     a file of the attempt that the process group agreed on
    commit(step, ".metadata.tmp")    all of them have arrived: seal, project
    put_metadata(step, data)   .metadata written in place: the commit comes with the last file
    replace(step)              ".metadata" was removed: the next commit replaces what is there

The processes agree on the id of an attempt without a collective (``agreed_id``), so that data have
their final keys on object stores too. The id is used up by its commit, and by any file of it that
was given up: everything after that belongs to another save, and files of two saves are never mixed.

``CopiedFiles`` are stock checkpoints that a program copies in, file by file:

    each file            is under its own name as soon as it is closed, in any order
    the last of a whole  .metadata of DCP and every *.distcp that it refers to, written by this process:
    stock save           linked (object stores: copied) into an attempt and committed by the log
    anything else        stays as it is: shards in subfolders, other names, a .metadata with a pickle
                         that names classes of its own, half a copy

Files that were copied in never wait in an attempt, because the next owner of the run removes what
an attempt holds. The plain files are removed when the commit is durable, and only if they have not
changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs import _torch
from ckptfs.commit.paths import METADATA, is_save_id
from ckptfs.commit.save.shared_attempt import Joined, give_up, join_attempt
from ckptfs.commit.save.spec import fresh_save_id
from ckptfs.control.control import default_timeout_s
from ckptfs.control.tcpstore_client import StoreClient
from ckptfs.errors import (
    AlreadyExistsError,
    CkptfsError,
    CommitConflictError,
    FencedError,
    NotFoundError,
    UnsupportedError,
)
from ckptfs.storage.base import DataWriter, Shape, Stat, Storage
from ckptfs.uri import Uri

__all__ = ["Arrivals", "CopiedFiles", "agreed_id", "arrives", "refuse_alone"]

logger = logging.getLogger("ckptfs.integrations")

_SHARD = re.compile(r"[^/]+\.distcp")
_WAITS = re.compile(r"[^/]+\.distcp|\.metadata\.tmp")
_PER_RANK = re.compile(r"__\d+\.metadata(\.tmp)?")
_KEPT = 16  # attempts that are remembered


def refuse_alone(file: Uri) -> None:
    """Raise UnsupportedError if a DCP writer is about to write the metadata of one rank."""
    if _PER_RANK.fullmatch(file.name):
        raise UnsupportedError(
            "every rank would commit alone (use_collectives=False)",
            uri=file,
            hint="save with collectives, so that one rank knows that all have written",
        )


def arrives(file: Uri) -> bool:
    """Whether a file of this name waits for a commit if a DCP writer writes it.

    A file below a save_id was committed elsewhere and is copied: it keeps its place.
    """
    return bool(_WAITS.fullmatch(file.name) and not is_save_id(file.parent.name))


class Arrivals:
    """Attempts of this process, below any runs. Thread-safe; not usable after a fork.

    ``storage_at`` opens a storage rooted at a URI.
    """

    def __init__(self, storage_at: Callable[[Uri], Storage]) -> None:
        self._storage_at = storage_at
        self._lock = threading.RLock()  # a file may be collected, and given up, at any point
        self._joined: dict[str, Joined] = {}
        self._spoilt: list[Joined] = []
        self._replacing: set[Uri] = set()

    def begin(self) -> None:
        """Begin a save: remove what earlier ones gave up, as far as possible."""
        with self._lock:
            spoilt, self._spoilt = self._spoilt, []
        for joined in spoilt:
            try:
                give_up(joined)
            except (CkptfsError, OSError) as error:
                logger.warning("files of the failed save %s stay: %s", joined.keys.save_id, error)

    def open_write(self, step: Uri, name: str) -> DataWriter:
        """Return a writer for one file of the attempt at ``step``, whole or not at all.

        Raises FencedError or StorageError.
        """
        joined = self._join(step)
        try:
            writer = joined.open_write(name)
        except NotFoundError as error:
            self.spoil(step, joined)
            raise FencedError(
                "this save was abandoned: a newer owner took the run", uri=step, hint="save again"
            ) from error
        return _Arriving(self, step, joined, writer, complete=bool(_SHARD.fullmatch(name)))

    def put_metadata(self, step: Uri, data: bytes) -> bool:
        """Write ``.metadata`` for a DCP writer; commit when all that it refers to has arrived.

        Returns False if it has nothing to wait for: the caller then writes it as it is.
        """
        from ckptfs.integrations.fsspec.stock_save import ARRIVED, needed

        files = needed(data, step)
        if files is None or any("/" in file for file in files):
            # Not DCP's; or written by a commit elsewhere, and its files keep their places.
            return False
        joined = self._join(step)
        with joined.open_write(ARRIVED) as writer:
            writer.write(data)
        self.commit_if_complete(step, joined)
        return True

    def commit_if_complete(self, step: Uri, joined: Joined) -> None:
        """Commit if ``.metadata`` was put and nothing is missing; one process of all does it."""
        from ckptfs.integrations.fsspec.stock_save import ARRIVED, missing

        try:
            short = missing(joined, ARRIVED)
        except NotFoundError:
            return
        if short:
            logger.info("%s waits for %d files, such as %s", step, len(short), short[0])
        elif is_first(f"{step} {joined.keys.save_id}"):
            self._commit(step, joined, ARRIVED)

    def commit(self, step: Uri, metadata: str) -> None:
        """Commit what arrived, by the staged ``metadata``.

        Errors are those of ``commit_arrived``; then nothing of it is visible and its files are
        gone.
        """
        joined = self._join(step)
        if not is_first(f"{step} {joined.keys.save_id}"):
            raise CommitConflictError("another process commits this save", uri=step)
        self._commit(step, joined, metadata)

    def _commit(self, step: Uri, joined: Joined, metadata: str) -> None:
        from ckptfs.integrations.fsspec.stock_save import commit_arrived

        try:
            commit_arrived(joined, metadata, replace=step in self._replacing)
        finally:
            # Whether it succeeded or not, the id is used up, here and on every rank.
            self._forget(step, joined)
            self._replacing.discard(step)

    def replace(self, step: Uri) -> None:
        """Let the next commit at ``step`` replace the committed one, which stays until then."""
        self._replacing.add(step)

    def remove(self, step: Uri, name: str) -> None:
        """Remove a file that waits. Raises NotFoundError if there is none."""
        joined = self._join(step)
        if name not in joined.files():
            raise NotFoundError("no such file", uri=step / name)
        joined.remove(name)

    def spoil(self, step: Uri, joined: Joined) -> None:
        """Give up a save with a file that was given up: later files belong to another save."""
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
                    # Spent: another job owned the run in between, or a committer died half way.
                    save_id = renew_id(str(step), save_id)
                    joined = join_attempt(self._storage_at(step.parent), step.name, save_id)
                if joined.keys.shape is Shape.FILESYSTEM:
                    _remove_empty(joined.session.storage, step.name)
                while len(self._joined) >= _KEPT:
                    self._joined.pop(next(iter(self._joined)))
                self._joined[save_id] = joined
            return self._joined[save_id]


def _remove_empty(storage: Storage, name: str) -> None:
    """Remove the step's directory if it is empty: it could be taken for a checkpoint."""
    try:
        storage.remove_dir(name)
    except AlreadyExistsError:
        return  # it has files: they stay


class _Arriving(DataWriter):
    def __init__(
        self, arrivals: Arrivals, step: Uri, joined: Joined, writer: DataWriter, *, complete: bool
    ) -> None:
        self._arrivals, self._step, self._joined = arrivals, step, joined
        self._writer, self._asks, self._done = writer, complete, False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return self._writer.write(data)

    def close(self) -> None:
        self._writer.close()
        self._done = True
        if self._asks:
            self._arrivals.commit_if_complete(self._step, self._joined)

    def abort(self) -> None:
        self._writer.abort()
        # At exit the store's thread is gone already, and no save follows.
        if not self._done and not sys.is_finalizing():
            self._done = True
            try:
                self._arrivals.spoil(self._step, self._joined)
            except CkptfsError as error:
                logger.warning(
                    "the failure of %s could not be sent to the store of the ranks: %s",
                    self._step,
                    error,
                )


_MOVED_METADATA = ".metadata.tmp"  # the name of .metadata during the commit, as in torch
_REMEMBERED = 64  # directories that are being copied into


@dataclass(slots=True)
class _Copy:
    """What this process wrote of one directory, and the bytes each file needs by its metadata."""

    names: set[str] = field(default_factory=set)
    needs: Mapping[str, int] | None = None
    data: bytes = b""


class CopiedFiles:
    """Plain files that this process wrote, by directory. Thread-safe; not usable after a fork.

    ``storage_at`` opens a storage rooted at a URI. ``copy`` copies a file within the place, if that
    has no links.
    """

    def __init__(
        self, storage_at: Callable[[Uri], Storage], copy: Callable[[Uri, Uri], None]
    ) -> None:
        self._storage_at, self._copy = storage_at, copy
        self._lock = threading.Lock()
        self._copies: dict[Uri, _Copy] = {}

    def wrote(self, step: Uri, name: str, data: bytes) -> None:
        """Note that a file of ``step`` was closed; commit if it completes a stock save.

        ``data`` are the bytes of ``.metadata``. If the commit fails the files stay, and a warning
        says why.
        """
        from ckptfs.integrations.fsspec.stock_save import needed

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
        """Note that a file of ``step`` was given up: later files belong to another copy."""
        with self._lock:
            self._copies.pop(step, None)

    def _commit(self, step: Uri, needs: Mapping[str, int], data: bytes) -> None:
        from ckptfs.integrations.fsspec.stock_save import ARRIVED, commit_arrived

        storage, home = self._storage_at(step.parent), step.name
        try:
            found = {file: storage.stat(f"{home}/{file}") for file in needs}
            if any(found[file].size_bytes < least for file, least in needs.items()):
                return
            joined = self._filled_attempt(step, tuple(needs), data)
            with _metadata_moved(storage, home, data):
                commit_arrived(joined, ARRIVED, replace=False)
            self._remove(storage, home, found)
        except (CkptfsError, OSError, NotImplementedError) as error:
            logger.warning("%s was copied in and is not committed; its files stay: %s", step, error)

    def _filled_attempt(self, step: Uri, files: tuple[str, ...], data: bytes) -> Joined:
        """Return a fresh attempt that holds all of it; the plain files stay."""
        from ckptfs.integrations.fsspec.stock_save import ARRIVED

        joined = join_attempt(self._storage_at(step.parent), step.name, fresh_save_id())
        storage = joined.session.storage
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
        """Remove the plain files of what is committed; one that was written again since stays."""
        same = [
            file for file, before in found.items() if _is_same(storage, f"{home}/{file}", before)
        ]
        storage.remove_many([f"{home}/{file}" for file in same])


@contextlib.contextmanager
def _metadata_moved(storage: Storage, home: str, data: bytes) -> Iterator[None]:
    """Make room for the projection of ``.metadata``, and restore it if the commit fails.

    A crash leaves it next to its shards as ``.metadata.tmp``.
    """
    storage.replace(f"{home}/{_MOVED_METADATA}", data)
    storage.remove(f"{home}/{METADATA}")
    try:
        yield
    except BaseException:
        storage.replace(f"{home}/{METADATA}", data)
        storage.remove(f"{home}/{_MOVED_METADATA}")
        raise
    storage.remove(f"{home}/{_MOVED_METADATA}")


def _is_same(storage: Storage, key: str, before: Stat) -> bool:
    now = storage.stat(key)
    return (now.size_bytes, now.etag, now.modified_s) == (
        before.size_bytes,
        before.etag,
        before.modified_s,
    )


# -- one id for the processes of a group -------------------------------------------------------------

_ANSWER_S = 60.0  # one small request to a process that lives


def agreed_id(topic: str) -> str:
    """Return the id of ``topic``, the same in all processes of the default group.

    Raises ControlPlaneLostError.
    """
    return _HERE.ask(fresh_save_id(), topic, "")


def is_first(topic: str) -> bool:
    """Whether this is the first call for this topic in any process of the default group."""
    own = fresh_save_id()
    return _HERE.ask(own, topic, "") == own


def renew_id(topic: str, spent: str) -> str:
    """Return the id of ``topic`` after ``spent``; a fresh one unless it was renewed already."""
    return _HERE.ask(fresh_save_id(), topic, spent)


class _Process:
    """What one process agreed on: with its group if there is one, else with itself.

    It is the only thing here that outlives a call: all threads of a process are one writer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collected file may call ask while its thread is in ask
        self._pid = os.getpid()
        self._alone: dict[str, str] = {}
        self._client: tuple[Any, StoreClient] | None = None

    def ask(self, own: str, topic: str, spent: str) -> str:
        """Replace ``spent`` ("": no id yet) by ``own`` if it is current; return the current id."""
        key = f"ckptfs/agreed/{hashlib.sha256(topic.encode()).hexdigest()[:32]}"
        client = self._connected()
        if client is None:
            with self._lock:
                if self._alone.get(key, "") == spent:
                    self._alone[key] = own
                return self._alone[key]
        wait_s = min(default_timeout_s(), _ANSWER_S)
        current: bytes = client.call_short(lambda store: store.compare_set(key, spent, own), wait_s)
        return bytes(current).decode()

    def _connected(self) -> StoreClient | None:
        with self._lock:
            if self._pid != os.getpid():
                # The child of a fork has neither the thread nor what the parent is writing.
                self._pid, self._alone, self._client = os.getpid(), {}, None
            if not _torch.has_default_group():
                return None
            store = _torch.group_store(None)
            if self._client is None or self._client[0] is not store:
                if self._client is not None:
                    self._client[1].close()
                self._client = store, StoreClient(store, "ckptfs-agreement")
            return self._client[1]


_HERE = _Process()
