"""Storage: bytes under a URI. It has never heard of a rank, a tensor or a checkpoint.

A ``Storage`` is opened at one root (a run) and takes *keys*: relative POSIX paths such as
``"step_100/.metadata"``; ``""`` is the root itself. Two shapes exist, told by ``capabilities``:

    filesystem   directories are real; ``rename`` of a directory is one step
    object       a key is all there is; ``make_dir`` is nothing, ``rename`` is refused

    small, whole       read_small  read_ahead  create  replace  stat  list    (log entries, manifests)
    large, streamed    open_write -> DataWriter, open_read -> DataReader
    large, at once     open_parallel -> ParallelWriter, where the place takes windows in any order
    names              make_dir  rename  link  remove  remove_many  remove_tree  sweep_uploads
    certainty          sync (durable names)  refresh (drop what a client cached)  touch

Each method's docstring answers: what is visible after a crash, is it durable on return, is a retry
safe, who may call it at once, which errors when. A backend is done when it subclasses
``ckptfs.testing.conformance.StorageConformance`` and passes.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ckptfs.errors import NotFoundError, StorageError, UnsupportedError, UriError
from ckptfs.storage.io import DataReader, DataWriter, Engine, ParallelWriter, Reach
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

log = logging.getLogger(__name__)

# What a small file may have that is nothing in particular.
SMALL_BYTES = 64 << 20


class Shape(Enum):
    """What a name is: a place in a tree, or the whole of an address."""

    FILESYSTEM = "filesystem"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this place was seen to do; found by a probe of the place, never by its scheme.

    shape: filesystem (directories can be renamed in one step) or object.
    exclusive_create: ``create`` lets one of many win, and the name appears with its bytes.
    atomic_replace: ``replace`` shows the old or the new bytes, never a mix or nothing.
    conditional_replace: ``replace(if_match=)`` is honoured.
    durable: what returned survives a power cut.
    """

    shape: Shape
    exclusive_create: bool
    atomic_replace: bool
    conditional_replace: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class Stat:
    """size_bytes of a file (0 for a directory); etag identifies the bytes where the store has one.

    modified_s: when it was written, on the server's clock (Unix time), where that is told. For people
    and for what is old by days; no decision of the protocol reads it.
    """

    size_bytes: int
    is_dir: bool
    etag: str | None = None
    modified_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that nobody completed yet: the key it is for, and its age on the server's clock."""

    key: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One name directly under a directory. is_dir: it is one, or a link that leads to one."""

    name: str
    is_dir: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """Free bytes and free inodes for this user; None where the place does not tell."""

    free_bytes: int | None
    free_inodes: int | None


class Storage(ABC):
    """Bytes under one root URI. Safe from several threads; picklable; clients open lazily.

    Errors are those of ``ckptfs.errors.StorageError`` with the full URI in them. No method retries
    for longer than its client library does by itself: policy belongs to the callers.
    """

    root: Uri

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this place does. Local knowledge: asking costs no write (see ``probe``)."""

    def probe(self, key: str) -> Capabilities:
        """What this place does, tried where it can only be found by writing: on names of our own
        directly below ``key``, removed again. For writers, before they decide by it; once per
        process is enough, repeating it costs nothing. StorageError: it cannot be tried.
        """
        self.uri(key)
        return self.capabilities

    def uri(self, key: str) -> Uri:
        """The full URI of a key."""
        return self.root / key if key else self.root

    # -- small, whole ------------------------------------------------------------------

    @abstractmethod
    def read(self, key: str) -> bytes:
        """All bytes of a small file. NotFoundError; StaleError where an NFS server answers so."""

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        """As ``read``, of a file that has at most ``limit_bytes``: StorageError (EFBIG) of a larger one,
        before its bytes are read where the place tells their number. Anything but a regular file is a
        StorageError at once: a FIFO or a device holds nobody up.

        Whatever a stranger may have written is read so: it may be there to fill the memory.
        """
        data = self.read(key)
        if len(data) > limit_bytes:
            raise too_large(self.uri(key), len(data), limit_bytes)
        return data

    def read_ahead(
        self, keys: Sequence[str], *, limit_bytes: int = SMALL_BYTES
    ) -> tuple[bytes, ...]:
        """The bytes of small files that were written one after another, up to the first that is
        missing. Any other error of one before that is raised: a file that cannot be read is not absent.

        limit_bytes: of each, as for ``read_small``. Stores where a request takes long read several at once.
        """
        found: list[bytes] = []
        for key in keys:
            try:
                found.append(self.read_small(key, limit_bytes))
            except NotFoundError:
                break
        return tuple(found)

    @abstractmethod
    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """Create ``key`` with ``data``, only if it does not exist: one caller of many wins.

        Durable on return, name and bytes together; after a crash the key is whole or absent.
        ``staging`` is a key of the caller's own, in an existing directory, that filesystems use on
        the way (written, fsynced, linked, removed when the outcome is known) and object stores
        ignore. AlreadyExistsError: somebody's bytes are there, perhaps our own from a lost answer:
        read them. AnswerLostError: it may have happened. NotFoundError: the directory is missing.
        Repeating the same call is safe.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        """Write ``key`` whole, over what is there; durable on return (name too).

        Readers see the old or the new bytes. With ``if_match`` (an etag of ``stat``, or ``""`` for
        "absent") it happens only if that still holds, else AlreadyExistsError; UnsupportedError
        where the capability is missing. Makes no directory: NotFoundError if the parent is absent.
        """

    @abstractmethod
    def stat(self, key: str) -> Stat:
        """Size, kind and etag. NotFoundError."""

    @abstractmethod
    def list(self, key: str) -> list[Entry]:
        """Names directly under a directory (or prefix), sorted; a hint, never a synchronisation. A name
        that no key can have is passed by, with a warning.

        NotFoundError where directories are real and it is absent; empty on object stores.
        """

    def refusing_links(self, top: str) -> Storage:
        """This place, for reading what lies below ``top``: a symbolic link there that leads out of it is a
        SymlinkError. ``top`` itself may be reached through some. For who carries what is read elsewhere.
        Nothing to close by itself.
        """
        self.uri(top)
        return self

    def refuse_link(self, key: str) -> None:
        """SymlinkError where a symbolic link stands at ``key``; absent is fine. Object stores have none.

        A look, for an error before anything is done: what writes, moves or deletes goes through no
        link below the root in any case.
        """
        self.uri(key)

    # -- large, streamed ---------------------------------------------------------------

    @abstractmethod
    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        """Begin one file. The parent must exist (filesystems). Other writers of the key: last wins."""

    def open_over(self, key: str) -> DataWriter:
        """As ``open_write``, for a name that a person chose, where anything may stand. On filesystems what
        plain ``open`` would write to is written to: through a link, a device in place; the mode of a
        file that is replaced stays. AlreadyExistsError: a directory stands there.
        """
        return self.open_write(key)

    def open_kept(self, key: str, *, size_bytes: int) -> DataWriter:
        """As ``open_write``, but what is on its way outlives an abort, and this process: the next
        ``open_kept`` of the key goes on with it. The bytes are the same each time, by the caller's
        word. AlreadyExistsError: another living process is at it, where that can be told.

        Filesystems keep a partial file, S3 the parts of an upload (through s3fs); elsewhere nothing.
        """
        return self.open_write(key, size_hint_bytes=size_bytes)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """How many files below ``key`` one process should write so many bytes into, at the same time.

        1 where one file takes them as fast as the place does. A hint: any other number is right too.
        """
        del size_bytes
        self.uri(key)
        return 1

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: Engine | None = None
    ) -> ParallelWriter | None:
        """As ``open_write``, for a file of exactly that size that several threads write at once. None:
        not here, use ``open_write``. engine: DIRECT or BUFFERED where the caller insists; by default
        what the place is seen to be fast with.
        """
        del size_bytes, engine
        self.uri(key)
        return None

    @abstractmethod
    def open_read(self, key: str) -> DataReader:
        """Open one file for ranged reads. NotFoundError."""

    # -- names -------------------------------------------------------------------------

    @abstractmethod
    def make_dir(self, key: str) -> None:
        """Make a directory and its missing ancestors, each durable; existing is success.

        Modes are 0o777 & ~umask, setgid and default ACLs inherited. Safe from many at once.
        Nothing at all on object stores.
        """

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Move a file (over an existing file, atomically) or a directory, in one step.

        A directory may replace an empty one; a non-empty target is AlreadyExistsError and both
        stay. NotFoundError: the source or the target's parent is gone. Durable after ``sync`` of
        both parents. UnsupportedError on object stores.
        """

    def link(self, source: str, target: str) -> None:
        """Give a file a second name: both are the same bytes, and either name may go first.

        Durable after ``sync`` of the target's directory. NotFoundError: the source or the target's
        parent is gone. AlreadyExistsError: something stands at the target, and stays.
        UnsupportedError: no hard links here, or not between these two; object stores have none.
        """
        self.uri(source)
        raise UnsupportedError("no hard links here", uri=self.uri(target))

    @abstractmethod
    def remove(self, key: str) -> None:
        """Unlink one file or delete one object. Absent is success."""

    def remove_many(self, keys: Sequence[str]) -> None:
        """Unlink files whose names are known, in as few requests as the store takes; nothing is
        listed. Absent is success. All are tried; then the first failure is raised, with their number.
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
        """Remove one directory if it is empty. Absent is success; AlreadyExistsError (ENOTEMPTY):
        something lies in it and everything stays. Nothing at all on object stores.
        """

    @abstractmethod
    def remove_tree(self, key: str) -> None:
        """Remove everything below and the directory itself. Absent is success, also half-way.

        Not atomic. The caller must own the name (see commit/erase.py). Never follows links.
        """

    # -- certainty ---------------------------------------------------------------------

    @abstractmethod
    def sync(self, key: str) -> None:
        """Make the names in a directory durable (fsync of the directory). Nothing on object stores."""

    @abstractmethod
    def refresh(self, key: str) -> None:
        """Drop what a network client cached of a directory: open it and fstat (NFS). Never raises
        NotFoundError: an absent directory has nothing to refresh.
        """

    def touch(self, key: str) -> None:
        """Move a directory's timestamps, so that NFSv3 readers look again. Optional."""

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        """Uploads below the root that are on their way, or that a dead writer left. Empty where there
        is no such thing. AccessError: not permitted to look.
        """
        return ()

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        """Abort uploads below the root that nobody completed and that began at least so long ago on
        the server's clock; how many. keys: only those for these keys. 0 where there is no such thing.
        AccessError: not permitted.
        """
        return 0

    @abstractmethod
    def space(self) -> Space | None:
        """Free space at the root, or None where there is no such thing."""

    def local_path(self, key: str) -> str | None:
        """A path that plain ``open`` understands, or None: this is not a mounted filesystem."""
        return None

    def close(self) -> None:
        """Release clients; harmless twice."""


@functools.lru_cache(maxsize=1024)
def _warn_once(where: str, why: str) -> None:
    """A run is listed at every save: whoever reads the log has read of the name already."""
    log.warning("passed by in %s: %s", where, why)


class Listing(list[Entry]):
    """What a listing answers, sorted. passed_by: the names in it that no key can have."""

    passed_by: tuple[str, ...] = ()


def usable(found: Iterable[Entry], where: Uri) -> Listing:
    """What a listing answers: the names that can be keys, sorted. One that cannot, with a control character
    or bytes that are no text, is told once and passed by: no program of ours made it, nobody can ask for it,
    and what lies beside it must not be out of reach for it.
    """
    entries, strange = Listing(), list[str]()
    for entry in sorted(found, key=lambda one: one.name):
        try:
            check_key(entry.name)
        except UriError as error:
            _warn_once(str(where), error.message)
            strange.append(entry.name)
        else:
            entries.append(entry)
    entries.passed_by = tuple(strange)
    return entries


def first_of(failures: Sequence[StorageError], asked: int) -> StorageError:
    """The first failure of many, told with their number."""
    first = failures[0]
    first.message = f"{len(failures)} of {asked} failed, the first: {first.message}"
    return first
