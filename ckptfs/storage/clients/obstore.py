"""Any store behind obstore (Rust's object_store): one client for S3, GCS and Azure.

    ObstoreClient = StoreFactory (configures obstore's store)  +  StoreTraits (what differs)

    get put head list delete    one request each, retries off
    get_range                   one GET, copied into the buffer piece by piece
    begin_upload                obstore's own multipart upload, see ``multipart.StreamUpload``

obstore cannot list or abort the uploads of other processes, so subclasses implement ``list_uploads`` through
another library, or not at all.

obstore's threads do not survive a fork, and a call in the child would never return: it is refused
with an error that says so. Processes that are spawned are fine.

obstore's error classes distinguish a missing object from a refused one and little more, and its exceptions have no
fields: status, code and kind of failure are only in the text. So the text is parsed here, and only here.

    ... status code: 403 Forbidden: <Error><Code>AccessDenied</Code> ...   the server answered
    ... HttpError { kind: Connect | Timeout | Interrupted | ... }          it did not
    FileNotFoundError AlreadyExistsError PreconditionError ...             text without either: the class decides

The text quotes the whole answer, signatures included: it is never repeated.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    IntegrityError,
    MissingDriverError,
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
    FailedDelete,
    Head,
    IfAbsent,
    Limits,
    ListedKey,
    ObjectClient,
    Upload,
    check_size,
)
from ckptfs.storage.clients.http_errors import (
    Dialect,
    ErrorResponse,
    Reason,
    RequestContext,
    clean,
    library_error,
    no_response_error,
    reason_error,
    response_error,
)
from ckptfs.storage.multipart import StreamUpload
from ckptfs.storage.options import Times
from ckptfs.storage.threads import ProcessLock
from ckptfs.uri import Uri

__all__ = [
    "ObstoreClient",
    "StoreFactory",
    "StoreTraits",
    "forbid_forked",
    "is_forked",
    "response_in",
    "retry_config",
    "timeout_factor",
    "timeouts",
    "translate_error",
]

_SLOW_BYTES: Final = 8 << 20  # as much as the slowest supported line sends in request_s


def timeout_factor(size_bytes: int) -> int:
    """Return how many times ``request_s`` a body of this size may take.

    It is a power of two, so that few stores are needed.
    """
    return 1 << (size_bytes // _SLOW_BYTES).bit_length()


def timeouts(times: Times, stretch: int, *, sends: bool) -> dict[str, Any]:
    """Return obstore's client options for timeouts. sends: The request has the large body."""
    quiet_s = times.request_s * (stretch if sends else 1)
    return {
        "connect_timeout": f"{max(1, round(times.connect_s * 1000))}ms",
        # Until an answer begins, counted from the request's begin and not from its last byte; then
        # between two pieces of the answer.
        "read_timeout": f"{max(1, round(quiet_s * 1000))}ms",
        # The request and its whole answer.
        "timeout": f"{max(1, round(times.request_s * 2 * stretch * 1000))}ms",
    }


def retry_config(times: Times, *, retries: bool) -> dict[str, Any]:
    """Return obstore's retry configuration: no retries, or its own inside a multipart upload."""
    if not retries:
        return {"max_retries": 0}
    return {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=max(60.0, times.request_s)),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }


class _Runtime:
    """The process in which obstore's threads run: the first one that used it."""

    pid: int | None = None


def is_forked() -> bool:
    """Whether this process is a child of one that used obstore."""
    return _Runtime.pid not in {None, os.getpid()}


def forbid_forked() -> None:
    """Raise UnsupportedError in a child of a process that used obstore.

    A call there would never return.
    """
    # obstore keeps its threads in a global of its own; this is our record of their process.
    if _Runtime.pid is None:
        _Runtime.pid = os.getpid()
    if _Runtime.pid != os.getpid():
        raise UnsupportedError(
            "obstore was used before this process was forked, and it does not survive a fork",
            hint="spawn processes instead of forking them, or choose the fsspec library by client=",
        )


# -- errors ------------------------------------------------------------------------------

_STATUS: Final = re.compile(r"status code: (\d{3})|\bstatus: (\d{3}),")
_XML: Final = re.compile(r"<Code>\s*([\w.]+)\s*</Code>")
_JSON: Final = re.compile(r'\\?"reason\\?":\s*\\?"(\w+)')
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_REGION: Final = re.compile(r"<Region>([a-z0-9-]+)</Region>")
_DELETED: Final = re.compile(r"DeleteObjects request failed for key .* \(code: (\w+)\)")
_KIND: Final = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode|Unknown)\b")

_CLASSES: Final = {
    "FileNotFoundError": 404,
    "AlreadyExistsError": 412,
    "PreconditionError": 412,
    "NotModifiedError": 412,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
    "NotSupportedError": 501,
}
# How the text describes an unanswered request; the first match counts.
_CONNECTION_FAILURES: Final = (
    ("UnknownIssuer", Reason.CERTIFICATE),
    ("invalid peer certificate", Reason.CERTIFICATE),
    ("CaUsedAsEndEntity", Reason.CERTIFICATE),
    ("NotValidForName", Reason.CERTIFICATE),
    ("dns error", Reason.NO_HOST),
    ("ConnectionRefused", Reason.REFUSED),
    ("Connection refused", Reason.REFUSED),
    ("proxy", Reason.PROXY),
    ("InvalidContentType", Reason.NOT_TLS),
    ("InvalidMessage", Reason.NOT_TLS),
)
_ANONYMOUS_CALLER: Final = "<Details>Anonymous caller does not have"
_METADATA: Final = ("http://169.254.", "http://[fd00:ec2")


def translate_error(context: RequestContext, error: BaseException) -> CkptfsError:
    """Return the typed error for an exception of obstore. It is not raised yet."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, ImportError):
        return MissingDriverError(
            f"obstore cannot be imported: {error}",
            uri=context.uri,
            hint="pip install 'ckptfs[fast]'",
        )
    if any(address in text for address in _METADATA):
        # The answer, or the missing answer, is that of the metadata service: there are no other
        # credentials.
        return reason_error(context, Reason.NO_CREDENTIALS)
    if "External" in text and "credential provider" in text:
        cause = _provider_message(text)
        if not cause.startswith("TransportError"):
            return reason_error(context, Reason.NO_CREDENTIALS, cause)
        # google-auth's text for a missing answer. No request was sent to the store yet.
        return TransientError(
            f"{context.action} failed: the server that issues Google's tokens gave no answer",
            uri=context.uri,
            hint="check the network, the proxy settings and the token_uri of the key file",
        )
    if "BareRedirect" in text:
        return response_error(
            context, ErrorResponse(301)
        )  # its headers, which name the region, are not shown
    if "InvalidDeleteObjectsResponse" in text:
        return reason_error(context, Reason.UNSUPPORTED)
    if deleted := _DELETED.search(text):
        return response_error(context, ErrorResponse(0, deleted[1]))
    response = response_in(text)
    if response is not None:
        return response_error(context, response)
    kind = _KIND.search(text)
    if kind is not None:
        return reason_error(
            context, _connection_reason(kind[1], text), "" if kind[1] == "Timeout" else kind[1]
        )
    if name in _CLASSES:
        return response_error(context, ErrorResponse(_CLASSES[name]))
    return reason_error(context, Reason.BROKEN, name)


def response_in(text: str) -> ErrorResponse | None:
    """Return the server's answer in the text of an exception of obstore, or None if it has none."""
    found = _STATUS.search(text)
    return None if found is None else _parse_response(int(found[1] or found[2]), text)


def _parse_response(status: int, text: str) -> ErrorResponse:
    code = _XML.search(text) or _JSON.search(text)
    message, region = _MESSAGE.search(text), _REGION.search(text)
    name = code[1] if code else ""
    if _ANONYMOUS_CALLER in text:
        name = "required"  # GCS answers as if a permission was missing
    return ErrorResponse(
        status,
        name,
        message[1] if message else "",
        region[1] if region else "",
    )


def _connection_reason(kind: str, text: str) -> Reason:
    if kind == "Timeout":
        # Also for a connection that was not established; then nothing was sent.
        return (
            Reason.UNREACHABLE if "Connect" in text.partition("kind: Timeout")[2] else Reason.SILENT
        )
    if kind != "Connect":
        return Reason.BROKEN
    return next(
        (reason for word, reason in _CONNECTION_FAILURES if word in text), Reason.UNREACHABLE
    )


def _provider_message(text: str) -> str:
    """Return class and text of an exception of the credential provider, cleaned."""
    found = re.search(r"credential provider: ([^\n]+)", text)
    return clean(found[1]) if found else ""


# -- the client --------------------------------------------------------------------------

T = TypeVar("T")
log = logging.getLogger("ckptfs.storage")

_PIECE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 16  # parts of one upload; a failed part is noticed up to this many parts later
_LIMITS: Final = Limits(equal_parts=True)  # obstore cuts its input into equal parts
_BOTH: Final = Conditions(if_absent=True, if_match=True)


class StoreFactory(Protocol):
    """Makes obstore's store of one bucket. Picklable: a frozen dataclass with ``__call__``."""

    def __call__(self, client_options: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        """Make the store.

        Both arguments go to its constructor; add your own client options to them.
        """


def etag_of(meta: Mapping[str, Any]) -> str | None:
    """Return the etag of an object from obstore's description of it."""
    found = meta.get("e_tag")
    return str(found) if found else None


def unquoted(etag: str) -> Mapping[str, str]:
    """Return obstore's mode for a conditional update by etag.

    The etag is unquoted because radosgw 16.2 refuses it with quotes.
    """
    return {"e_tag": etag.strip('"')}


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What differs between stores. Functions must be picklable.

    attributes, tags: Sent with every object. etag: Returns it from obstore's meta or put result.
    update: Returns obstore's mode for ``IfMatch``. pins_reads: obstore compares that etag on a
    read; otherwise it is compared when the answer comes. single_deletes: A store that deletes
    without batches, for servers that do not have them.
    """

    dialect: Dialect
    limits: Limits = _LIMITS
    conditions: Conditions = _BOTH
    attributes: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    etag: Callable[[Mapping[str, Any]], str | None] = etag_of
    update: Callable[[str], Mapping[str, str]] = unquoted
    pins_reads: bool = True
    single_deletes: StoreFactory | None = None


class ObstoreClient(ObjectClient):
    """One bucket through obstore. ``endpoint``: as in errors, without credentials."""

    copies_parts = False
    gathers = True

    def __init__(
        self, uri: Uri, factory: StoreFactory, traits: StoreTraits, endpoint: str, times: Times
    ) -> None:
        self.endpoint = endpoint
        self.limits = traits.limits
        self.conditions = traits.conditions
        self._root = replace(uri, path="", query="")
        self._factory = factory
        self._traits = traits
        self._times = times
        self._lock = ProcessLock()
        self._stores: dict[tuple[int, bool, bool], Any] = {}
        # Set when the server has shown that it does not have batches.
        self._no_ranges = False
        self._no_batches = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_stores": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ProcessLock()

    # -- small -------------------------------------------------------------------------

    def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
        context = self._context("get", key)

        def request() -> tuple[bytes, str | None]:
            found = _obstore().get(self._store(), key)
            check_size(int(found.meta["size"]), limit_bytes, context.uri)
            return bytes(found.bytes()), self._traits.etag(found.meta)

        return self._call(context, request)

    def head(self, key: str) -> Head:
        context = self._context("head", key)
        try:
            meta = self._call(context, lambda: _obstore().head(self._store(), key))
        except (NotFoundError, TransientError, AnswerLostError):
            raise
        except StorageError:
            # A HEAD has no body, so an expired token looks the same as a missing permission.
            with suppress(IntegrityError):
                wanted = {"range": (0, 1)}
                self._call(context, lambda: _obstore().get(self._store(), key, options=wanted))
            raise
        modified = meta["last_modified"]
        return Head(int(meta["size"]), self._traits.etag(meta), modified.timestamp())

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        context = self._context("put", key, changes=True)
        mode: Any = "overwrite"
        if isinstance(condition, IfAbsent):
            mode = "create"
        elif not isinstance(condition, Always):
            mode = dict(self._traits.update(condition.etag))
        view = memoryview(data).cast("B")

        def request() -> str | None:
            store = self._store(len(view), sends=True)
            done = _obstore().put(
                store, key, view, mode=mode, use_multipart=False, **self._object_settings()
            )
            return self._traits.etag(done)

        return self._call(replace(context, conditional=mode != "overwrite"), request)

    @property
    def lacks(self) -> tuple[str, ...]:
        ranges = "a range is answered with 200: each is read from the beginning of its object"
        batches = "no batches of deletes: keys go one by one"
        found = ((self._no_ranges, ranges), (self._no_batches, batches))
        return tuple(text for lacking, text in found if lacking)

    # -- ranges ------------------------------------------------------------------------

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        view = out.cast("B")
        if not view:
            return
        filled = (
            None if self._no_ranges else self._get_part(key, offset, view, etag, from_start=False)
        )
        if filled is None:
            filled = self._get_part(key, offset, view, etag, from_start=True)
        if filled != len(view):
            raise IntegrityError(
                "get failed: the object ends before the bytes that were asked for",
                uri=self._context("get", key).uri,
            )

    def _get_part(
        self, key: str, offset: int, view: memoryview, etag: str | None, *, from_start: bool
    ) -> int | None:
        """Fill ``view`` from ``offset``. Returns how many bytes were filled.

        It returns None if the server sent another range.

        from_start: No range is sent, and the bytes before ``offset`` are received and dropped.
        """
        context = self._context("get", key)
        end = offset + len(view)
        wanted: dict[str, Any] = {} if from_start else {"range": (offset, end)}
        if etag is not None and self._traits.pins_reads:
            wanted["if_match"] = etag

        def request() -> int | None:
            store = self._store(end if from_start else len(view))
            try:
                found = _obstore().get(store, key, options=wanted)
            except Exception as error:
                if from_start:
                    raise
                if "NotPartial" in str(error):
                    self._learn_no_ranges()
                # s3rver answers bytes=0-0 with the whole object, which says nothing about other ranges.
                elif "UnexpectedRange" not in str(error):
                    raise
                return None
            now = self._traits.etag(found.meta)
            if etag is not None and (now or etag).strip('"') != etag.strip('"'):
                raise StaleError(
                    "get failed: the object was replaced during the read", uri=context.uri
                )
            first, last = found.range
            if first > offset or (first < offset and not from_start):
                self._learn_no_ranges()
                return None
            return _copy_body(found, view, offset - first) if last >= end else 0

        return self._call(context, request)

    def _learn_no_ranges(self) -> None:
        """Record that the server answers a range with 200, as rclone serve s3 does.

        obstore takes that for the whole object.
        """
        self._no_ranges = True
        _warn_once(
            self.endpoint,
            "answers a range with 200 instead of 206: each range is read from the beginning of its "
            "object. fsspec+s3:// reads ranges there",
        )

    # -- names -------------------------------------------------------------------------

    def list_keys(self, prefix: str, *, delimiter: bool) -> Iterator[ListedKey]:
        context = self._context("list", prefix)
        # obstore lists below whole components; names that only begin alike are left out here.
        folder = prefix[: prefix.rfind("/") + 1]
        if delimiter:
            found = self._call(
                context, lambda: _obstore().list_with_delimiter(self._store(), folder or None)
            )
            lines = [ListedKey(meta["path"], int(meta["size"])) for meta in found["objects"]]
            lines += [
                ListedKey(path.rstrip("/") + "/", is_prefix=True)
                for path in found["common_prefixes"]
            ]
            lines.sort(key=lambda line: line.key)
            yield from (line for line in lines if line.key.startswith(prefix))
            return
        pages = self._call(context, lambda: _obstore().list(self._store(), folder or None))
        while page := self._call(context, lambda: next(pages, None)):
            for meta in page:
                if meta["path"].startswith(prefix):
                    yield ListedKey(meta["path"], int(meta["size"]))

    def delete(self, keys: Sequence[str]) -> list[FailedDelete]:
        context = self._context("delete", keys[0], changes=True)
        if self._no_batches:
            return self._delete_each(keys)
        try:
            self._call(context, lambda: _obstore().delete(self._store(), list(keys)))
        except (AccessError, UnsupportedError, NotFoundError) as error:
            if isinstance(error, CredentialsError) or (
                len(keys) == 1 and isinstance(error, AccessError)
            ):
                raise
            # Perhaps some were refused; obstore reports only the first. Or the store has no batches.
            if isinstance(error, UnsupportedError):
                self._no_batches = True
                _warn_once(
                    self.endpoint, f"deletes no batches: keys go one by one ({error.message})"
                )
            return self._delete_each(keys)
        return []

    def _delete_each(self, keys: Sequence[str]) -> list[FailedDelete]:
        refused = []
        factory = self._traits.single_deletes or self._factory
        store = factory(
            timeouts(self._times, 1, sends=False), retry_config(self._times, retries=False)
        )
        for key in keys:
            context = self._context("delete", key, changes=True)
            try:
                self._call(context, partial(_obstore().delete, store, key))
            except NotFoundError as error:
                if error.hint is not None:  # the bucket, not the key
                    raise
            except StorageError as error:
                if len(keys) == 1:
                    raise
                refused.append(FailedDelete(key, error))
        return refused

    # -- uploads -----------------------------------------------------------------------

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        context = self._context("upload", key, changes=True)

        def send(parts: Iterator[Any]) -> str | None:
            done = _obstore().put(
                self._store(part_bytes, sends=True, retries=True),
                key,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=_AT_ONCE,
                **self._object_settings(),
            )
            return self._traits.etag(done)

        return StreamUpload(
            context, part_bytes, lambda parts: self._call(context, lambda: send(parts))
        )

    def close(self) -> None:
        with self._lock:
            self._stores.clear()

    def forget_credentials(self) -> None:
        """Forget credentials that were refused, so that the next request asks for new ones."""
        self.close()

    def library_store(self, part_bytes: int) -> Any:
        """Return obstore's own store of this bucket, configured as ours, for benchmarks."""
        return self._store(part_bytes, sends=True, retries=True)

    # -- one request -------------------------------------------------------------------

    def _store(self, size_bytes: int = 0, *, sends: bool = False, retries: bool = False) -> Any:
        """Return the store for a request with a body of this size.

        obstore's deadlines begin with the request, so a larger body needs another store.
        """
        forbid_forked()
        stretch = timeout_factor(size_bytes)
        kind = (stretch, sends and stretch > 1, retries)  # a small body has no deadline of its own
        with self._lock:
            found = self._stores.get(kind)
            if found is None:
                found = self._factory(
                    timeouts(self._times, stretch, sends=sends),
                    retry_config(self._times, retries=retries),
                )
                self._stores[kind] = found
            return found

    def _object_settings(self) -> dict[str, Any]:
        attributes, tags = dict(self._traits.attributes), dict(self._traits.tags)
        return {"attributes": attributes or None, "tags": tags or None}

    def _call(self, context: RequestContext, request: Callable[[], T]) -> T:
        """Make a request. Its error is typed, and not chained to an exception of the library."""
        failure: Exception
        try:
            return request()
        except CkptfsError as error:
            error.uri = error.uri or str(context.uri)
            raise
        except Exception as error:  # noqa: BLE001 - the edge: whatever a library raises becomes typed
            failure = translate_error(context, error)
        if isinstance(failure, CredentialsError):
            self.forget_credentials()
        raise failure

    def _call_library(self, context: RequestContext, request: Callable[[], T]) -> T:
        """Make a request that obstore does not have, through the fsspec library; see ``_call``."""
        failure: Exception
        try:
            return request()
        except CkptfsError:
            raise
        except ImportError as error:
            failure = MissingDriverError(
                f"the fsspec library of {context.uri.protocol}:// cannot be imported: {error}",
                uri=context.uri,
            )
        except Exception as error:  # noqa: BLE001 - the edge, as in ``_call``
            failure = library_error(context, error) or no_response_error(context, error)
        if isinstance(failure, CredentialsError):
            self.forget_credentials()
        raise failure

    def _context(self, action: str, key: str, *, changes: bool = False) -> RequestContext:
        uri = self._root / key.strip("/")
        return RequestContext(self._traits.dialect, action, uri, self.endpoint, changes=changes)


def _obstore() -> Any:
    """Return the library, untyped: its stubs are stricter than what it accepts."""
    import obstore

    return obstore


@functools.lru_cache(maxsize=256)
def _warn_once(endpoint: str, what: str) -> None:
    """Warn once per endpoint: a process has one client for each run, copy and reader."""
    log.warning("%s %s", endpoint, what)


def _copy_body(found: Any, view: memoryview, skip_bytes: int = 0) -> int:
    """Fill ``view`` with the body behind ``skip_bytes``. Returns how many bytes there were."""
    at = 0
    for chunk in found.stream(min_chunk_size=_PIECE_BYTES):
        piece = memoryview(chunk)[skip_bytes:]
        skip_bytes = max(0, skip_bytes - len(chunk))
        if at == len(view):
            break
        size_bytes = min(len(piece), len(view) - at)
        view[at : at + size_bytes] = piece[:size_bytes]
        at += size_bytes
    return at
