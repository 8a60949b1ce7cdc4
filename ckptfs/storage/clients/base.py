"""The interface of an object store's client: a dozen requests, each tried once, each with a typed result.

    small      get  put(condition)  head  delete  list_keys
    ranges     get_range            into the caller's buffer
    uploads    begin_upload -> Upload: put_part, complete, abort;  list_uploads

A client is thin: it makes requests and translates answers. It never retries, never caches, never
lists where a key is known, and creates no bucket, no directory marker and no copy.
``ckptfs.storage.object_store`` decides once for all clients what is retried, how large parts are, how many
requests run at once and how much memory they use. Keys are complete keys inside the bucket (no leading slash).

    NotFoundError        there is no such key; ``of_bucket`` is true if the bucket is missing
    AlreadyExistsError   the condition did not hold; the existing object is untouched
    StaleError           the object no longer has that etag (get_range)
    CredentialsError     credentials are missing, wrong or expired, or the clock is off
    AccessError          the credentials are right but lack the permission
    TransientError       worth a retry, and the request certainly did nothing (throttled, no connection)
    AnswerLostError      a change was sent, and no answer says whether it happened (5xx, reset)
    UnsupportedError     the server does not know this request or header (501)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptfs.storage.clients.bucket_rules import BucketRules
from ckptfs.storage.clients.http_errors import Dialect
from ckptfs.storage.os_errors import too_large
from ckptfs.uri import Uri

__all__ = [
    "ALWAYS",
    "IF_ABSENT",
    "Always",
    "BucketLibrary",
    "Buffer",
    "Condition",
    "Conditions",
    "FailedDelete",
    "Head",
    "IfAbsent",
    "IfMatch",
    "Limits",
    "ListedKey",
    "ObjectClient",
    "PendingUpload",
    "Upload",
    "check_size",
    "join_buffers",
]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Always:
    """Whether or not the key exists."""


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Only if the key does not exist (If-None-Match: *, ifGenerationMatch=0)."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Only if the object has this etag, as ``head``, ``get`` or ``put`` returned it."""

    etag: str


Condition = Always | IfAbsent | IfMatch
ALWAYS: Final = Always()
IF_ABSENT: Final = IfAbsent()


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which conditions this client can *send*. Whether the server honours them is probed."""

    if_absent: bool
    if_match: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What the store accepts, from its documentation (named where a client sets them)."""

    min_part_bytes: int = 5 << 20
    max_part_bytes: int = 5 << 30
    max_parts: int = 10_000
    max_object_bytes: int = 5 << 40
    max_single_put_bytes: int = 5 << 30
    part_multiple_bytes: int = 1  # every part but the last is a multiple of it
    # Every part but the last has the size that ``begin_upload`` was given; else later ones may be larger.
    equal_parts: bool = False
    delete_batch: int = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """What a HEAD request returns."""

    size_bytes: int
    etag: str | None  # identifies the bytes; opaque, never taken for an MD5
    # When it was written, as Unix time on the server's clock, if the answer has it.
    modified_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One line of a listing: a key with its size, or, if ``is_prefix``, a common prefix with its slash."""

    key: str
    size_bytes: int = 0
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class FailedDelete:
    """One key that a batch delete did not delete, with an error that is not raised yet."""

    key: str
    error: Exception


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload that is not complete."""

    key: str
    upload_id: str
    age_s: float  # on the server's clock (its Date header)


def join_buffers(pieces: Sequence[Buffer]) -> Buffer:
    """Return all pieces as one buffer. Several pieces are copied."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Upload(ABC):
    """One object that is uploaded in parts. Nothing is visible under its key before ``complete``.

    Several threads may put parts at once. A part may be put again (a retry); the last one counts.
    """

    @abstractmethod
    def put_part(self, number: int, data: Buffer) -> None:
        """Send part ``number``, from 0. ``data`` may be reused when it returns."""

    def put_pieces(self, number: int, pieces: Sequence[Buffer]) -> None:
        """As ``put_part``, for a part that consists of several pieces, in order.

        If ``ObjectClient.gathers`` is true, nothing is copied. The memory of the last part, if it is smaller than
        the others, must not change until ``complete`` or ``abort`` has returned.
        """
        self.put_part(number, join_buffers(pieces))

    @abstractmethod
    def complete(self) -> str | None:
        """Make the object visible, all parts in order. Repeating the call is safe.

        Returns:
            The object's etag, if the answer has one.

        Raises:
            AnswerLostError: It may be complete.
            NotFoundError: An earlier try completed it, or it was aborted: the caller looks at the
                key.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard the parts. Harmless if repeated, and after ``complete``. May raise."""


class ObjectClient(ABC):
    """One bucket (or container) through one library. Thread-safe, lazy, picklable; survives forks.

    Every method tries one request once (a listing: one request per page). It raises the typed errors of the
    module's docstring, with the full URI of the key.
    """

    endpoint: str  # scheme://host[:port] that errors name; no credentials
    limits: Limits
    conditions: Conditions
    # Whether the library copies what it sends while it sends it. Half of an upload's memory_bytes is then the
    # library's. Nothing of a part is held after put_part has returned.
    copies_parts: bool = True
    # Whether the pieces of a part are sent without a copy. If not, a part is one buffer.
    gathers: bool = False

    @abstractmethod
    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        """Return all bytes of a small object, and its etag.

        Args:
            key: The object.
            limit_bytes: The most bytes that are received; None: no limit.

        Raises:
            StorageError: It has more than ``limit_bytes`` (EFBIG), and no more than those were received.
        """

    @abstractmethod
    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        """Fill ``out`` with the bytes from ``offset`` on.

        Args:
            key: The object.
            offset: Where the range begins.
            out: The memory to be filled.
            etag: If given, only the object with this etag is read.

        Raises:
            IntegrityError: The object ends before the range does.
            StaleError: Another object has the key now.
            TransientError: Also for a connection that breaks in the middle, because reading changes nothing.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        """Write an object in one request. It becomes visible at once.

        Args:
            key: The object.
            data: All its bytes.
            condition: When it is written.

        Returns:
            Its new etag, if the answer has one.
        """

    @abstractmethod
    def head(self, key: str) -> Head:
        """Return size and etag of the object ``key``."""

    @abstractmethod
    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[ListedKey]:
        """Yield the keys that begin with ``prefix``, in order; with ``delimiter`` up to the next slash only."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> list[FailedDelete]:
        """Delete some objects. An absent one is success.

        Args:
            keys: The objects, up to ``limits.delete_batch``.

        Returns:
            The refused keys with their errors.
        """

    @abstractmethod
    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        """Begin an object that is uploaded in parts. It need not make a request yet.

        Args:
            key: The object.
            part_bytes: The size of each part in bytes. The last may be smaller. Later ones may be larger if
                ``limits.equal_parts`` is false.

        Returns:
            The upload.
        """

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the incomplete uploads below a prefix.

        A client does not override this if its store drops such uploads by itself.

        Args:
            prefix: The beginning of their keys.

        Raises:
            UnsupportedError: The server does not implement the request, or the library for it is
                missing.
        """
        del prefix
        return iter(())

    def abort_pending(self, upload: PendingUpload) -> None:
        """Abort ``upload``, which ``list_uploads`` returned."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """What the server was found to lack by requests until now, in a few words each. For `doctor`."""
        return ()

    def bucket_rules(self) -> BucketRules | None:
        """Return what the bucket does to objects by itself, for `doctor`.

        None: this client cannot find out.
        """
        return None

    def close(self) -> None:
        """Release connections. Calling it again is harmless."""


class BucketLibrary(ABC):
    """What ``FsspecStorage`` needs of one client library beyond fsspec's own methods. Picklable.

    Its methods get the filesystem that ``filesystem`` made and raise what the library raises. They raise
    FileExistsError if a condition did not hold.
    """

    name: str  # of the package: "gcsfs"

    @property
    @abstractmethod
    def dialect(self) -> Dialect:
        """The names and hints that errors use for the store."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Return scheme://host[:port] of the server, without credentials."""

    def bucket(self, uri: Uri) -> str:
        """Return the bucket that a URI names."""
        return uri.userinfo or uri.authority

    @abstractmethod
    def filesystem(self) -> Any:
        """Return a filesystem of the library, with the user's options and without listing caches."""

    @abstractmethod
    def put(self, fs: Any, path: str, data: bytes, condition: Condition) -> None:
        """Write one object in one request, with all settings that the options give every object."""

    @abstractmethod
    def open_write(self, fs: Any, path: str, block_bytes: int) -> Any:
        """Return a stream that writes one object, with the same settings.

        ``close`` and then ``commit`` make the object; ``discard`` throws away what was sent.
        """

    @abstractmethod
    def etag(self, info: Mapping[str, Any]) -> str | None:
        """Return what ``IfMatch`` compares, from what ``fs.info`` returned."""

    def list_names(self, fs: Any, path: str) -> list[dict[str, Any]]:
        """Return ``name`` and ``type`` of everything directly below a path.

        FileNotFoundError: there is nothing.
        """
        found: list[dict[str, Any]] = fs.ls(path, detail=True)
        return found

    def remove(self, fs: Any, paths: Sequence[str]) -> None:
        """Delete objects in few requests. Absent is success."""
        fs.rm(list(paths))

    def list_uploads(self, fs: Any, bucket: str, prefix: str) -> Iterator[PendingUpload]:
        """Yield the incomplete uploads below a prefix; none if the store drops them by itself."""
        del fs, bucket, prefix
        return iter(())

    def abort_upload(self, fs: Any, bucket: str, upload: PendingUpload) -> None:
        """Abort an upload that ``list_uploads`` returned. FileNotFoundError: it has ended."""


def check_size(size_bytes: int, limit_bytes: int | None, uri: Uri) -> None:
    """Check an object's size for ``ObjectClient.get`` as soon as it is known.

    Raises:
        StorageError: It is larger than ``limit_bytes`` (EFBIG).
    """
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise too_large(uri, size_bytes, limit_bytes)
