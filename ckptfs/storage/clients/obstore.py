"""Any store behind obstore (Rust's object_store): one client for S3, GCS and Azure.

    ObstoreClient = MakeStore (how obstore's store is configured)  +  Flavour (what differs)

    get put head list delete    one request each, retries off
    get_range                   one GET, copied into the buffer piece by piece
    begin_upload                obstore's own multipart upload, see ``obstore_upload``

What obstore does not have comes from elsewhere or not at all: it lists and aborts no foreign
uploads, so ``list_uploads`` is a subclass's business.

obstore's threads do not survive a fork, and a call in the child would wait for ever: it is refused
with an error that says so. Processes that are spawned are fine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    IntegrityError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import (
    ALWAYS,
    Always,
    Buffer,
    Condition,
    Conditions,
    Head,
    IfAbsent,
    Limits,
    Listed,
    ObjectClient,
    Refused,
    Upload,
    check_size,
)
from ckptfs.storage.clients.failures import Asked, Dialect
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.clients.obstore_errors import told
from ckptfs.storage.clients.obstore_process import (
    forbid_forked,
    retries_of,
    stretched,
    timeouts,
)
from ckptfs.storage.clients.obstore_upload import StreamUpload
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["Flavour", "MakeStore", "ObstoreClient"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 16  # parts of one upload; a part that failed is noticed so many parts later
_LIMITS: Final = Limits(equal_parts=True)  # obstore cuts what it is given into equal parts
_BOTH: Final = Conditions(if_absent=True, if_match=True)


class MakeStore(Protocol):
    """Makes obstore's store of one bucket. Picklable: a frozen dataclass with ``__call__``."""

    def __call__(self, client_options: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        """The store. Both arguments go to its constructor; add your own client options to them."""


def etag_of(meta: Mapping[str, Any]) -> str | None:
    """What identifies an object's bytes, from obstore's description of it."""
    found = meta.get("e_tag")
    return str(found) if found else None


def unquoted(etag: str) -> Mapping[str, str]:
    """obstore's mode for "only if it is still this one". radosgw 16.2 refuses the quoted etag."""
    return {"e_tag": etag.strip('"')}


@dataclass(frozen=True, slots=True)
class Flavour:
    """What differs between stores. attributes and tags go with every object; functions must pickle.

    etag: from obstore's meta or put result; update: its mode for ``IfMatch``; pins_reads: that etag is
    what obstore compares on a read, else it is compared when the answer comes. singles: a store that
    deletes without batches, where a server may not know them.
    """

    dialect: Dialect
    limits: Limits = _LIMITS
    conditions: Conditions = _BOTH
    attributes: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    etag: Callable[[Mapping[str, Any]], str | None] = etag_of
    update: Callable[[str], Mapping[str, str]] = unquoted
    pins_reads: bool = True
    singles: MakeStore | None = None


class ObstoreClient(ObjectClient):
    """One bucket through obstore. ``endpoint``: as errors shall name it, without credentials."""

    copies_parts = False
    gathers = True

    def __init__(
        self, uri: Uri, make: MakeStore, flavour: Flavour, endpoint: str, times: Times
    ) -> None:
        self.endpoint = endpoint
        self.limits = flavour.limits
        self.conditions = flavour.conditions
        self._root = replace(uri, path="", query="")
        self._make = make
        self._flavour = flavour
        self._times = times
        self._lock = ProcessLock()
        self._stores: dict[tuple[int, bool, bool], Any] = {}
        # Set when the server has shown that it does not have them.
        self._no_ranges = False
        self._no_batches = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_stores": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ProcessLock()

    # -- small -------------------------------------------------------------------------

    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        asked = self._asked("get", key)

        def request() -> tuple[bytes, str | None]:
            found = _obstore().get(self._store(), key)
            check_size(int(found.meta["size"]), limit_bytes, asked.uri)
            return bytes(found.bytes()), self._flavour.etag(found.meta)

        return self._say(asked, request)

    def head(self, key: str) -> Head:
        asked = self._asked("head", key)
        try:
            meta = self._say(asked, lambda: _obstore().head(self._store(), key))
        except (NotFoundError, TransientError, AnswerLostError):
            raise
        except StorageError:
            # A HEAD has no body, so it cannot tell an expired token from a missing permission.
            with suppress(IntegrityError):
                wanted = {"range": (0, 1)}
                self._say(asked, lambda: _obstore().get(self._store(), key, options=wanted))
            raise
        modified = meta["last_modified"]
        return Head(int(meta["size"]), self._flavour.etag(meta), modified.timestamp())

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        asked = self._asked("put", key, changes=True)
        mode: Any = "overwrite"
        if isinstance(condition, IfAbsent):
            mode = "create"
        elif not isinstance(condition, Always):
            mode = dict(self._flavour.update(condition.etag))
        view = memoryview(data).cast("B")

        def request() -> str | None:
            store = self._store(len(view), sends=True)
            done = _obstore().put(
                store, key, view, mode=mode, use_multipart=False, **self._extras()
            )
            return self._flavour.etag(done)

        return self._say(replace(asked, conditional=mode != "overwrite"), request)

    # -- ranges ------------------------------------------------------------------------

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        view = out.cast("B")
        if not view:
            return
        filled = None if self._no_ranges else self._get_part(key, offset, view, etag, whole=False)
        if filled is None:
            # rclone serve s3 answers a range with 200, which obstore takes for the whole object.
            self._no_ranges = True
            _warn_once(
                self.endpoint,
                "answers a range with 200 instead of 206: each range is read from the beginning of its "
                "object. fsspec+s3:// reads ranges there",
            )
            filled = self._get_part(key, offset, view, etag, whole=True)
        if filled != len(view):
            raise IntegrityError(
                "get failed: the object ends before the bytes that were asked for",
                uri=self._asked("get", key).uri,
            )

    def _get_part(
        self, key: str, offset: int, view: memoryview, etag: str | None, *, whole: bool
    ) -> int | None:
        """Fill ``view`` from ``offset``. Returns: how much was filled; None: the server ignores ranges.

        whole: no range is sent, and what lies before ``offset`` is received and dropped.
        """
        asked = self._asked("get", key)
        end = offset + len(view)
        wanted: dict[str, Any] = {} if whole else {"range": (offset, end)}
        if etag is not None and self._flavour.pins_reads:
            wanted["if_match"] = etag

        def request() -> int | None:
            store = self._store(end if whole else len(view))
            try:
                found = _obstore().get(store, key, options=wanted)
            except Exception as error:
                if whole or "NotPartial" not in str(error):
                    raise
                return None
            now = self._flavour.etag(found.meta)
            if etag is not None and (now or etag).strip('"') != etag.strip('"'):
                raise StaleError("get failed: the object was replaced meanwhile", uri=asked.uri)
            first, last = found.range
            if first > offset or (first < offset and not whole):
                return None
            return _poured(found, view, offset - first) if last >= end else 0

        return self._say(asked, request)

    # -- names -------------------------------------------------------------------------

    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[Listed]:
        asked = self._asked("list", prefix)
        # obstore lists below whole components; what only begins alike is left out here.
        folder = prefix[: prefix.rfind("/") + 1]
        if delimiter:
            found = self._say(
                asked, lambda: _obstore().list_with_delimiter(self._store(), folder or None)
            )
            lines = [Listed(meta["path"], int(meta["size"])) for meta in found["objects"]]
            lines += [
                Listed(path.rstrip("/") + "/", is_prefix=True) for path in found["common_prefixes"]
            ]
            lines.sort(key=lambda line: line.key)
            yield from (line for line in lines if line.key.startswith(prefix))
            return
        pages = self._say(asked, lambda: _obstore().list(self._store(), folder or None))
        while page := self._say(asked, lambda: next(pages, None)):
            for meta in page:
                if meta["path"].startswith(prefix):
                    yield Listed(meta["path"], int(meta["size"]))

    def delete(self, keys: Sequence[str]) -> list[Refused]:
        asked = self._asked("delete", keys[0], changes=True)
        if self._no_batches:
            return self._delete_each(keys)
        try:
            self._say(asked, lambda: _obstore().delete(self._store(), list(keys)))
        except (AccessError, UnsupportedError, NotFoundError) as error:
            if isinstance(error, CredentialsError) or (
                len(keys) == 1 and isinstance(error, AccessError)
            ):
                raise
            # Some of them, perhaps; obstore tells the first only. Or the store knows no batches.
            if isinstance(error, UnsupportedError):
                self._no_batches = True
                _warn_once(
                    self.endpoint, f"deletes no batches: keys go one by one ({error.message})"
                )
            return self._delete_each(keys)
        return []

    def _delete_each(self, keys: Sequence[str]) -> list[Refused]:
        refused = []
        make = self._flavour.singles or self._make
        store = make(timeouts(self._times, 1, sends=False), retries_of(self._times, retries=False))
        for key in keys:
            asked = self._asked("delete", key, changes=True)
            try:
                self._say(asked, partial(_obstore().delete, store, key))
            except NotFoundError as error:
                if error.hint is not None:  # the bucket, not the key
                    raise
            except StorageError as error:
                if len(keys) == 1:
                    raise
                refused.append(Refused(key, error))
        return refused

    # -- uploads -----------------------------------------------------------------------

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        asked = self._asked("upload", key, changes=True)

        def send(parts: Iterator[Any]) -> str | None:
            done = _obstore().put(
                self._store(part_bytes, sends=True, retries=True),
                key,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=_AT_ONCE,
                **self._extras(),
            )
            return self._flavour.etag(done)

        return StreamUpload(asked, part_bytes, lambda parts: self._say(asked, lambda: send(parts)))

    def close(self) -> None:
        with self._lock:
            self._stores.clear()

    def forget_credentials(self) -> None:
        """They were refused: whoever asks again shall do so with those of then."""
        self.close()

    def library_store(self, part_bytes: int) -> Any:
        """obstore's own store of this bucket, configured as ours: what benchmarks hold us against."""
        return self._store(part_bytes, sends=True, retries=True)

    # -- one request -------------------------------------------------------------------

    def _store(self, size_bytes: int = 0, *, sends: bool = False, retries: bool = False) -> Any:
        """The store for a request with so large a body: obstore's deadlines begin with the request."""
        forbid_forked()
        stretch = stretched(size_bytes)
        kind = (stretch, sends and stretch > 1, retries)  # a small body has no deadline of its own
        with self._lock:
            found = self._stores.get(kind)
            if found is None:
                found = self._make(
                    timeouts(self._times, stretch, sends=sends),
                    retries_of(self._times, retries=retries),
                )
                self._stores[kind] = found
            return found

    def _extras(self) -> dict[str, Any]:
        attributes, tags = dict(self._flavour.attributes), dict(self._flavour.tags)
        return {"attributes": attributes or None, "tags": tags or None}

    def _say(self, asked: Asked, request: Callable[[], T]) -> T:
        """The answer, or a typed error that no exception of the library hangs on."""
        failure: Exception
        try:
            return request()
        except CkptfsError as error:
            error.uri = error.uri or str(asked.uri)
            raise
        except Exception as error:  # noqa: BLE001 - the edge: whatever a library raises becomes typed
            failure = told(asked, error)
        if isinstance(failure, CredentialsError):
            self.forget_credentials()
        raise failure

    def _asked(self, action: str, key: str, *, changes: bool = False) -> Asked:
        uri = self._root / key.strip("/")
        return Asked(self._flavour.dialect, action, uri, self.endpoint, changes=changes)


def _obstore() -> Any:
    """The library, untyped: its stubs are stricter than what it takes."""
    import obstore

    return obstore


@functools.lru_cache(maxsize=256)
def _warn_once(endpoint: str, what: str) -> None:
    """A process has a client for each run, copy and reader, and one endpoint for all."""
    log.warning("%s %s", endpoint, what)


def _poured(found: Any, view: memoryview, skip_bytes: int = 0) -> int:
    """Fill ``view`` with what the body has behind ``skip_bytes``. Returns: how much there was."""
    at = 0
    for chunk in found.stream(min_chunk_size=_PIECE_BYTES):
        piece = memoryview(chunk)[skip_bytes:]
        skip_bytes = max(0, skip_bytes - len(chunk))
        if at == len(view):
            break
        room = min(len(piece), len(view) - at)
        view[at : at + room] = piece[:room]
        at += room
    return at
