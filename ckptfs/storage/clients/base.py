"""What an object store's client must do: a dozen requests, each one try, each with a typed answer.

    small      get  put(condition)  head  delete  list_keys
    ranges     get_range            into the caller's buffer
    uploads    begin_upload -> Upload: put_part, complete, abort;  list_uploads

A client is thin: it spells requests and translates answers. It never retries, never caches, never
lists where a key is known, and makes no bucket, no directory marker and no copy. What is retried,
how parts are cut, how many requests run at once and what is in memory is decided once for all
clients by ``ckptfs.storage.object_store``. Keys are whole keys inside the bucket (no leading slash).

    NotFoundError        no such key (its hint differs where the bucket is missing)
    AlreadyExistsError   the condition did not hold; what stands there is untouched
    StaleError           the object is not the one of that etag any more (get_range)
    CredentialsError     no, wrong or expired credentials; a clock that is off
    AccessError          credentials are right, and may not do this
    TransientError       worth a retry, and the request surely did nothing (throttled, no connection)
    AnswerLostError      a change was sent, and no answer tells whether it happened (5xx, reset)
    UnsupportedError     the server says that it does not know this request or header (501)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptfs.storage.clients.bucket_rules import BucketRules
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
    "Head",
    "IfAbsent",
    "IfMatch",
    "Limits",
    "Listed",
    "ObjectClient",
    "PendingUpload",
    "Refused",
    "Upload",
    "check_size",
    "whole",
]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Always:
    """Whatever stands under the key."""


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """Only if nothing stands under the key (If-None-Match: *, ifGenerationMatch=0)."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Only if what stands there has this etag, as ``head``, ``get`` or ``put`` told it."""

    etag: str


Condition = Always | IfAbsent | IfMatch
ALWAYS: Final = Always()
IF_ABSENT: Final = IfAbsent()


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which conditions this client can *ask* for; whether the server honours them is probed."""

    if_absent: bool
    if_match: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What the store takes, from its documentation (named where a client sets them), in bytes.

    part_multiple_bytes: every part but the last is a multiple of it. equal_parts: every part but the
    last has the size that ``begin_upload`` was told; else later ones may be larger.
    """

    min_part_bytes: int = 5 << 20
    max_part_bytes: int = 5 << 30
    max_parts: int = 10_000
    max_object_bytes: int = 5 << 40
    max_single_put_bytes: int = 5 << 30
    part_multiple_bytes: int = 1
    equal_parts: bool = False
    delete_batch: int = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """One object: its size, what identifies its bytes (opaque; never taken for an MD5), and when it
    was written, as Unix time on the server's clock, where the answer tells.
    """

    size_bytes: int
    etag: str | None
    modified_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a listing: a key with its size, or (``is_prefix``) a common prefix with its slash."""

    key: str
    size_bytes: int = 0
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """One key that a batch delete did not delete, as an error that is not raised yet."""

    key: str
    error: Exception


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload that nobody completed. age_s: on the server's clock (its Date header)."""

    key: str
    upload_id: str
    age_s: float


def whole(pieces: Sequence[Buffer]) -> Buffer:
    """One buffer of all of them; copied where there are several."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Upload(ABC):
    """One object on its way in parts; nothing is visible under its key before ``complete``.

    Several threads may put parts at once; a part may be put again (a retry), the last one counts.
    """

    @abstractmethod
    def put_part(self, number: int, data: Buffer) -> None:
        """Part ``number``, from 0. ``data`` may be reused when it returns."""

    def put_pieces(self, number: int, pieces: Sequence[Buffer]) -> None:
        """The same of a part that lies in several pieces, in order; where ``ObjectClient.gathers``,
        nothing is copied. The memory of the last part, if it is smaller than the others, stays as it
        is until ``complete`` or ``abort`` has returned.
        """
        self.put_part(number, whole(pieces))

    def holds(self, number: int, data: Buffer) -> bool:
        """Whether the store has this part with these very bytes, from an upload that was left. Then it
        need not be put. Tells nothing that it does not know.
        """
        del number, data
        return False

    @abstractmethod
    def complete(self) -> str | None:
        """Make the object visible, all parts in order; its etag where the answer has one.

        AnswerLostError: it may be complete. Repeating it is safe; NotFoundError then means that
        an earlier try completed it, or that somebody aborted it: the caller looks at the key.
        """

    @abstractmethod
    def abort(self) -> None:
        """Throw the parts away; harmless twice and after complete. May raise."""


class ObjectClient(ABC):
    """One bucket (or container) through one library. Thread-safe, lazy, picklable; survives forks.

    Every method is one try of one request (a listing: one per page) and raises the typed errors of
    the module's docstring, with the full URI of the key in them.
    """

    endpoint: str  # scheme://host[:port] that errors name; no credentials
    limits: Limits
    conditions: Conditions
    # Whether the library copies what it sends, while it sends it: half of an upload's memory_bytes is
    # the library's then. Nothing of a part is held after put_part returned.
    copies_parts: bool = True
    # Whether a part in pieces is sent from where they lie; others get one buffer.
    gathers: bool = False
    # Whether ``resume_upload`` may find an upload again that nobody completed.
    resumes: bool = False

    @abstractmethod
    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        """All bytes of a small object, and its etag. StorageError (EFBIG): it has more than ``limit_bytes``,
        and no more than those were received.
        """

    @abstractmethod
    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        """Fill ``out`` from ``offset``; only of the object with that etag, where one is given.

        IntegrityError: the object ends before; StaleError: another object stands there now. A
        connection that breaks in the middle is a TransientError: reading changes nothing.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        """The whole object in one request, visible all at once; its new etag."""

    @abstractmethod
    def head(self, key: str) -> Head:
        """Size and etag of one object."""

    @abstractmethod
    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[Listed]:
        """Keys that begin with ``prefix``, in order; ``delimiter``: up to the next slash only."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> list[Refused]:
        """Delete up to ``limits.delete_batch`` keys; absent is success. What was refused, and why."""

    @abstractmethod
    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        """Begin an object in parts of ``part_bytes``; the last may be smaller, and where the size was
        not known (``limits.equal_parts`` is False) later ones may be larger. No request is needed yet.
        """

    def resume_upload(self, key: str) -> Upload | None:
        """The upload of that key that was left with the most bytes, None where there is none to find."""
        del key
        return None

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Uploads below a prefix that nobody completed; none where the store forgets them itself."""
        del prefix
        return iter(())

    def abort_pending(self, upload: PendingUpload) -> None:
        """Abort one that ``list_uploads`` told of."""

    def bucket_rules(self) -> BucketRules | None:
        """What the bucket does to objects by itself; None: this client cannot ask. For `doctor`."""
        return None

    def close(self) -> None:
        """Release connections; harmless twice."""


class BucketLibrary(ABC):
    """What one client library does with a bucket beyond fsspec's own methods; ``FsspecStorage`` uses it.

    Picklable. Its methods get the filesystem that ``filesystem`` made and raise what the library
    raises; FileExistsError where a condition did not hold.
    """

    name: str  # of the package: "gcsfs"

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """scheme://host[:port] of the server, without credentials."""

    @abstractmethod
    def filesystem(self) -> Any:
        """A filesystem of the library, with the user's options, listing caches off."""

    @abstractmethod
    def put(self, fs: Any, path: str, data: bytes, condition: Condition) -> None:
        """One object in one request, with everything that the options ask of every object."""

    @abstractmethod
    def open_write(self, fs: Any, path: str, block_bytes: int) -> Any:
        """A stream of one object, with the same. ``close`` and ``commit`` make the object, ``discard``
        throws away what was sent.
        """

    @abstractmethod
    def etag(self, info: Mapping[str, Any]) -> str | None:
        """What ``IfMatch`` compares, from what ``fs.info`` returned."""


def check_size(size_bytes: int, limit_bytes: int | None, uri: Uri) -> None:
    """For ``ObjectClient.get``, as soon as a size is known: by the answer's headers, and as bytes come in.
    StorageError (EFBIG): it is too large.
    """
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise too_large(uri, size_bytes, limit_bytes)
