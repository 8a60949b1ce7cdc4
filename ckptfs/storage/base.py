"""The storage interface: bytes under a URI. It knows nothing of ranks, tensors or checkpoints.

A ``Storage`` is opened at one root (a run) and takes *keys*: relative POSIX paths such as
``"step_100/.metadata"``; ``""`` is the root itself. ``capabilities`` says which of two shapes it has:

    filesystem   directories are real; ``rename`` of a directory is one step
    object       there are only keys; ``make_dir`` does nothing, ``rename`` is refused

    small files        read_small  read_ahead  create  replace  stat  list    (log entries, manifests)
    several calls      at_once, write_files: together where each is a slow request
    large, in order    open_write -> DataWriter, open_read -> DataReader
    large, in windows  open_parallel -> ParallelWriter, where windows may be written in any order
    names              make_dir  rename  link  remove  remove_many  remove_tree  sweep_uploads
    durability         sync (durable names)  refresh (drop what a client cached)  touch

Each method's docstring says what is visible after a crash, whether the change is durable on return, whether
a retry is safe, who may call it concurrently, and which errors it raises. A backend is complete when a
subclass of ``ckptfs.testing.conformance.StorageConformance`` passes for it.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from ckptfs.errors import NotFoundError, StorageError, UnsupportedError, UriError
from ckptfs.storage.io import DataReader, DataWriter, FileEngine, ParallelWriter, Reach
from ckptfs.storage.os_errors import CONTROL, too_large
from ckptfs.uri import Uri, check_key

__all__ = [
    "CONTROL",
    "SMALL_BYTES",
    "Capabilities",
    "DataReader",
    "DataWriter",
    "Entry",
    "Listing",
    "Reach",
    "Shape",
    "Space",
    "Stat",
    "Storage",
    "UnfinishedUpload",
    "first_of",
]

log = logging.getLogger("ckptfs.storage")

T = TypeVar("T")

# The default limit for small files.
SMALL_BYTES = 64 << 20


class Shape(Enum):
    """Whether directories are real.

    Attributes:
        FILESYSTEM: A tree of directories.
        OBJECT: Keys only.
    """

    FILESYSTEM = "filesystem"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this storage really does: found by a probe of the storage, never derived from its scheme.

    Attributes:
        shape: FILESYSTEM if a directory can be renamed in one step.
        exclusive_create: Of several ``create`` calls one wins, and the name appears with its bytes.
        atomic_replace: During ``replace`` a reader sees the old or the new bytes, never a mix or nothing.
        conditional_replace: ``replace(if_match=)`` is honoured.
        durable: A change survives a power cut once the call has returned.
    """

    shape: Shape
    exclusive_create: bool
    atomic_replace: bool
    conditional_replace: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class Stat:
    """What ``Storage.stat`` returns.

    Attributes:
        size_bytes: Its size in bytes; 0 for a directory.
        is_dir: It is a directory.
        etag: Identifies the bytes; None where the storage has no etags.
        modified_s: When it was written, in seconds of Unix time on the server's clock; None where that is not
            known. It is for people and for clean-ups of what is days old; the commit protocol never decides
            by it.
    """

    size_bytes: int
    is_dir: bool
    etag: str | None = None
    modified_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that is not complete.

    Attributes:
        key: The object that it would become.
        age_s: Its age in seconds, on the server's clock.
    """

    key: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One name directly under a directory.

    Attributes:
        name: The name.
        is_dir: It is a directory, or a link to one.
        is_link: It is a link.
    """

    name: str
    is_dir: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """What is free for this user.

    Attributes:
        free_bytes: Free bytes; None where unknown.
        free_inodes: Free inodes; None where unknown.
    """

    free_bytes: int | None
    free_inodes: int | None


class Storage(ABC):
    """Bytes under one root URI. Safe from several threads; picklable; clients are opened lazily.

    All errors are subclasses of ``ckptfs.errors.StorageError`` and name the full URI. No method retries for
    longer than its client library does by itself, because how long to wait is the caller's decision.

    Attributes:
        root: The URI that keys are relative to.
    """

    root: Uri

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What is known of this storage. Reading it writes nothing; see ``probe``."""

    def probe(self, key: str) -> Capabilities:
        """Find out what this storage does, by writing where there is no other way.

        The probe uses names of its own directly below ``key`` and removes them. A writer calls it before it
        decides by the capabilities. It runs once per process; repeating the call costs nothing.

        Args:
            key: The directory to probe in.

        Returns:
            What was found.

        Raises:
            StorageError: The probe failed without an answer.
        """
        self.uri(key)
        return self.capabilities

    def uri(self, key: str) -> Uri:
        """Return the full URI of ``key``."""
        return self.root / key if key else self.root

    # -- small files -------------------------------------------------------------------

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Read all bytes of a small file.

        Args:
            key: The file.

        Returns:
            Its bytes.

        Raises:
            NotFoundError: The file does not exist.
            StaleError: An NFS server calls the file stale.
        """

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        """As ``read``, of a file that has at most ``limit_bytes``.

        Use it for every file that somebody else may have written, because such a file may be there to fill
        the memory.

        Args:
            key: The file.
            limit_bytes: The largest size that is accepted, in bytes.

        Returns:
            Its bytes.

        Raises:
            StorageError: The file is larger (EFBIG), which is found before its bytes are read where the
                storage reports sizes. Or it is no regular file: a FIFO or a device is refused at once.
            NotFoundError: The file does not exist.
        """
        data = self.read(key)
        if len(data) > limit_bytes:
            raise too_large(self.uri(key), len(data), limit_bytes)
        return data

    def read_ahead(
        self, keys: Sequence[str], *, limit_bytes: int = SMALL_BYTES
    ) -> tuple[bytes, ...]:
        """Read small files that were written one after another, up to the first that is missing.

        Storages with slow requests read several files at once.

        Args:
            keys: The files, in the order in which they were written.
            limit_bytes: The largest size of each that is accepted, in bytes, as for ``read_small``.

        Returns:
            The bytes of the files before the first missing one.

        Raises:
            StorageError: A file before the first missing one could not be read. It may exist.
        """
        found: list[bytes] = []
        for key in keys:
            try:
                found.append(self.read_small(key, limit_bytes))
            except NotFoundError:
                break
        return tuple(found)

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T | StorageError]:
        """Make calls to this storage that do not depend on each other.

        Storages with slow requests make them at the same time; others one after another.

        Args:
            calls: Functions that call methods of this storage.

        Returns:
            What each call returned, in order; a ``StorageError`` in the place of a call that raised it. Any
            other error is raised when all calls have ended.
        """
        found: list[T | StorageError] = []
        for call in calls:
            try:
                found.append(call())
            except StorageError as error:
                found.append(error)
        return found

    @abstractmethod
    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """Create ``key`` with ``data``, only if it does not exist: one caller of many wins.

        Name and bytes are durable on return. After a crash the key is complete or absent. Repeating the same
        call is safe, and several callers may race.

        Args:
            key: What to create.
            data: All of its bytes.
            staging: A key of the caller's own, in an existing directory. Filesystems use it on the way
                (written, fsynced, linked, removed when the outcome is known); object stores ignore it.

        Raises:
            AlreadyExistsError: The key exists. The bytes may be our own, after a lost answer: read them.
            AnswerLostError: The create may have happened.
            NotFoundError: The directory is missing.
            UnsupportedError: The storage cannot create exclusively.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        """Write all of ``key``, over what exists. Name and bytes are durable on return.

        Readers see the old or the new bytes. The parent directory is not made.

        Args:
            key: What to write.
            data: All of its bytes.
            if_match: Write only if the key still has this etag (of ``stat``), or, for ``""``, is absent;
                None: in any case.

        Raises:
            AlreadyExistsError: ``if_match`` does not hold.
            UnsupportedError: ``if_match`` is given, and the storage has no conditional replace.
            NotFoundError: The parent directory is absent.
            AnswerLostError: The replacement may have happened.
        """

    @abstractmethod
    def stat(self, key: str) -> Stat:
        """Return size, kind and etag of ``key``.

        Raises:
            NotFoundError: Nothing exists at ``key``.
        """

    @abstractmethod
    def list(self, key: str) -> list[Entry]:
        """List the names directly under a directory or prefix, sorted.

        A listing is a hint: another process may change the directory at any time, and a client may have
        cached it. A name that cannot be a key is skipped with a warning.

        Args:
            key: The directory or prefix.

        Raises:
            NotFoundError: The directory is absent. On an object store the listing is empty instead.
        """

    def refusing_links(self, top: str) -> Storage:
        """Return a view of this storage that does not follow symbolic links out of ``top``.

        Reading through a link below ``top`` that leads out of ``top`` is a ``SymlinkError``. ``top`` itself
        may be reached through links. Use it when the bytes are copied elsewhere. Close this storage, not the
        view.

        Args:
            top: The directory that links may not leave.
        """
        self.uri(top)
        return self

    def refuse_link(self, key: str) -> None:
        """Check that no symbolic link is at ``key``. Absent is fine; object stores have no links.

        This check only gives an early error: operations that write, move or delete never follow a link below
        the root.

        Args:
            key: What to check.

        Raises:
            SymlinkError: There is a link.
        """
        self.uri(key)

    # -- large files -------------------------------------------------------------------

    @abstractmethod
    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        """Begin a new file, written in order. It replaces an existing file when it is closed.

        If several processes write the same key, the last to close wins. After a crash the old file is there,
        or the new one.

        Args:
            key: The file. On a filesystem its parent directory must exist.
            size_hint_bytes: About how many bytes it will have; object stores choose the part size by it.
                None: not known.

        Returns:
            The writer.

        Raises:
            NotFoundError: The parent directory is absent.
        """

    def write_files(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write small new files into one directory. Their bytes and names are durable on return.

        Each file replaces an existing one. After a crash, or an error, each of them is there or not.

        Args:
            folder: The directory, which must exist on a filesystem.
            files: The bytes of each file, by its name in the directory.

        Raises:
            NotFoundError: The directory is absent.
            StorageError: The first failure; each of the other files may be there.
        """

        def write(name: str, data: bytes) -> None:
            key = f"{folder}/{name}" if folder else name
            with self.open_write(key, size_hint_bytes=len(data)) as writer:
                writer.write(data)

        for answer in self.at_once(
            [functools.partial(write, name, data) for name, data in files.items()]
        ):
            if isinstance(answer, StorageError):
                raise answer
        self.sync(folder)

    def open_over(self, key: str) -> DataWriter:
        """As ``open_write``, for a path that a person chose, where anything may exist.

        On a filesystem this writes to what plain ``open`` would write to: to the target of a link, and to a
        device in place. A file that is replaced keeps its mode.

        Args:
            key: The file.

        Returns:
            The writer.

        Raises:
            AlreadyExistsError: It is a directory.
        """
        return self.open_write(key)

    def open_kept(self, key: str, *, size_bytes: int) -> DataWriter:
        """As ``open_write``, but the unfinished file outlives an abort and this process.

        The next ``open_kept`` of the key continues it. The caller guarantees that the bytes are the same each
        time. Filesystems keep a partial file; other storages keep nothing, because obstore and fsspec neither
        list the parts of an upload nor add to one that another process began. It is a method of every storage
        all the same, so that a caller that copies a file does not ask where it is copied to.

        Args:
            key: The file.
            size_bytes: Its size in bytes.

        Returns:
            The writer; ``there_bytes`` of it are there already.

        Raises:
            AlreadyExistsError: Another living process is writing it, where that can be detected.
        """
        return self.open_write(key, size_hint_bytes=size_bytes)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """How many files below ``key`` one process should write ``size_bytes`` bytes into, at the same time.

        1 where a single file is as fast as the storage. A hint: any other number is correct, too.

        Args:
            key: The directory.
            size_bytes: How many bytes are to be written, in all.

        Returns:
            The number of files.
        """
        del size_bytes
        self.uri(key)
        return 1

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        """As ``open_write``, for a file of known size that several threads write at once.

        Args:
            key: The file.
            size_bytes: Its exact size in bytes.
            engine: DIRECT or BUFFERED if the caller insists; None: what is fast on this storage.

        Returns:
            The writer, or None where that is not possible: use ``open_write`` then.
        """
        del size_bytes, engine
        self.uri(key)
        return None

    @abstractmethod
    def open_read(self, key: str) -> DataReader:
        """Open one file for ranged reads.

        Args:
            key: The file.

        Returns:
            The reader.

        Raises:
            NotFoundError: The file does not exist.
        """

    # -- names -------------------------------------------------------------------------

    @abstractmethod
    def make_dir(self, key: str) -> None:
        """Make a directory and its missing ancestors, each durable. An existing directory is success.

        The mode is 0o777 & ~umask; setgid and default ACLs are inherited. Several processes may call it at
        once. On an object store it does nothing.

        Args:
            key: The directory.
        """

    def make_dir_unsynced(self, key: str) -> None:
        """As ``make_dir``, but the name of the directory itself is not durable before ``sync`` of its parent.

        Args:
            key: The directory.
        """
        self.make_dir(key)

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Move a file or a directory in one step.

        A file replaces an existing file atomically; a directory may replace an empty one. The move is durable
        after ``sync`` of both parents.

        Args:
            source: What to move.
            target: Its new key.

        Raises:
            AlreadyExistsError: The target is a non-empty directory. Source and target stay.
            NotFoundError: The source or the target's parent does not exist.
            UnsupportedError: This is an object store.
            AnswerLostError: The move may have happened.
        """

    def link(self, source: str, target: str) -> None:
        """Give a file a second name (a hard link). Either name may be removed first.

        The new name is durable after ``sync`` of its directory.

        Args:
            source: The file.
            target: Its second key.

        Raises:
            NotFoundError: The source or the target's parent does not exist.
            AlreadyExistsError: The target exists, and stays.
            UnsupportedError: There are no hard links here, or not between these two.
        """
        self.uri(source)
        raise UnsupportedError("this storage has no hard links", uri=self.uri(target))

    @abstractmethod
    def remove(self, key: str) -> None:
        """Unlink one file or delete one object, ``key``. An absent key is success."""

    def remove_many(self, keys: Sequence[str]) -> None:
        """Remove the given files in as few requests as the store allows. Nothing is listed.

        Absent keys are success. All removals are tried before an error is raised.

        Args:
            keys: The files.

        Raises:
            StorageError: The first failure, with the number of failures.
        """
        failures: list[StorageError] = []
        for key in keys:
            try:
                self.remove(key)
            except StorageError as error:
                failures.append(error)
        if failures:
            raise first_of(failures, len(keys))

    @abstractmethod
    def remove_dir(self, key: str) -> None:
        """Remove the directory ``key`` if it is empty. Absent is success; on an object store it does nothing.

        Raises:
            AlreadyExistsError: The directory is not empty (ENOTEMPTY). Everything stays.
        """

    @abstractmethod
    def remove_tree(self, key: str) -> None:
        """Remove a directory and everything below it. Never follows links.

        Not atomic: after a crash some of it may be left. Files that are already absent are success. The
        caller must own the name (see commit/delete/erase.py).

        Args:
            key: The directory.
        """

    # -- durability --------------------------------------------------------------------

    @abstractmethod
    def sync(self, key: str) -> None:
        """Make the names in the directory ``key`` durable (fsync). On an object store it does nothing."""

    @abstractmethod
    def refresh(self, key: str) -> None:
        """Drop what a network client cached of a directory (NFS: open and fstat).

        Never raises ``NotFoundError``: an absent directory has nothing to refresh.

        Args:
            key: The directory.
        """

    def touch(self, key: str) -> None:
        """Update the timestamps of the directory ``key``, so that NFSv3 readers look again. Optional."""

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        """List the uploads below the root that are in progress or that a dead writer left.

        Returns:
            The uploads; empty where the storage has none.

        Raises:
            AccessError: Listing them is not permitted.
        """
        return ()

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        """Abort old incomplete uploads below the root.

        Args:
            older_than_s: The least age of an upload, in seconds on the server's clock.
            keys: Only uploads for these keys; None for all.

        Returns:
            How many were aborted; 0 where there are no uploads.

        Raises:
            AccessError: It is not permitted.
        """
        return 0

    @abstractmethod
    def space(self) -> Space | None:
        """Return the free space at the root, or None where there is no such limit."""

    def local_path(self, key: str) -> str | None:
        """Return a path for plain ``open`` of ``key``, or None if this is not a mounted filesystem."""
        return None

    def close(self) -> None:
        """Release the clients. Calling it again is harmless."""


@functools.lru_cache(maxsize=1024)
def _warn_once(where: str, why: str) -> None:
    """Warn once per name: a run is listed at every save."""
    log.warning("skipped in %s: %s", where, why)


class Listing(list[Entry]):
    """The sorted result of a listing.

    Attributes:
        passed_by: Names that cannot be keys, which the listing left out.
    """

    passed_by: tuple[str, ...] = ()


def usable(found: Iterable[Entry], where: Uri) -> Listing:
    """Return the entries that can be keys, sorted, and leave out the others with one warning each.

    A name with a control character, or with bytes that are no text, cannot be a key. ckptfs did not
    make it and cannot request it, but the other names in its directory must stay accessible.
    """
    entries, left_out = Listing(), list[str]()
    for entry in sorted(found, key=lambda one: one.name):
        try:
            check_key(entry.name)
        except UriError as error:
            _warn_once(str(where), error.message)
            left_out.append(entry.name)
        else:
            entries.append(entry)
    entries.passed_by = tuple(left_out)
    return entries


def first_of(failures: Sequence[StorageError], asked: int) -> StorageError:
    """Return the first of several ``failures``; its message says how many of ``asked`` failed."""
    first = failures[0]
    first.message = f"{len(failures)} of {asked} failed, the first: {first.message}"
    return first
