"""GCS: the two libraries that carry the data, and Google's credentials.

    gcs_options   the options, checked as gcsfs has them
          |
    GcsOptions --unsupported_option?--no--> GcsObstoreClient      obstore, by the XML API
                                     --yes-> GcsfsLibrary         gcsfs for FsspecStorage, by the JSON API

Conditions and etags are generations: a generation only grows, and equal bytes have different ones.

obstore cannot add a header to a single request, so ``unsupported_option`` names the options that need one: a KMS
key, an ACL, a custom time. It also looks for credentials whenever it writes, so it cannot write to Google
anonymously. obstore sends no crc32c: TLS protects the bytes on the way, and ckptfs verifies its own digests when
it reads. Unfinished uploads and the rules of the bucket are requested through gcsfs.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import Any, Final, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree as ET

from ckptfs.errors import (
    CredentialsError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients.base import (
    Always,
    BucketLibrary,
    Condition,
    IfAbsent,
    Limits,
    ObjectClient,
    PendingUpload,
)
from ckptfs.storage.clients.bucket_rules import BucketRules, of_gcs
from ckptfs.storage.clients.gcs_options import NAMED_TOKENS, GcsOptions, parse_gcs_options
from ckptfs.storage.clients.http_errors import Dialect, Reason, RequestContext
from ckptfs.storage.clients.obstore import ObstoreClient, StoreTraits
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = [
    "GcsObstoreClient",
    "open_client",
    "open_library",
    "unsupported_option",
]

_OVERWRITE = " (to replace an object, storage.objects.delete too)"
_PART = "storage.multipartUploads.create and storage.objects.create on this prefix"

GCS: Final = Dialect(
    name="GCS",
    permissions={
        "get": "storage.objects.get on this prefix",
        "head": "storage.objects.get on this prefix",
        "put": f"storage.objects.create on this prefix{_OVERWRITE}",
        "begin upload": _PART,
        "put part": _PART,
        "upload": _PART,
        "complete upload": f"{_PART}{_OVERWRITE}",
        "abort upload": "storage.multipartUploads.abort on this prefix",
        "delete": "storage.objects.delete on this prefix",
        "list": "storage.objects.list on the bucket",
        "list uploads": "storage.multipartUploads.list on the bucket",
        "get bucket": "storage.buckets.get on the bucket",
    },
    hints={
        Reason.NO_CREDENTIALS: "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or the storage "
        "option token=; token='anon' for a public bucket",
        Reason.WRONG_CREDENTIALS: "the token is wrong or has expired: renew it, or use a key file or "
        "the machine's service account, which renew themselves",
        Reason.CERTIFICATE: "name the authority's file in SSL_CERT_FILE, or pass "
        "session_kwargs={{'connector': ...}}",
    },
)
T = TypeVar("T")
_ANYWHERE: Final = Uri("gs", "bucket", "")
_ATTRIBUTES: Final = {
    "cache_control": "Cache-Control",
    "content_disposition": "Content-Disposition",
    "content_language": "Content-Language",
}

# -- credentials -------------------------------------------------------------------------

# As in google-auth: metadata servers return the same token until four minutes before its end.
_AHEAD: Final = timedelta(minutes=3, seconds=45)
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage."
_FOUND: Final = (None, "google_default")


def is_raw(token: object) -> bool:
    """Whether ``token`` is a token itself, and neither a name nor the path of a file."""
    return (
        isinstance(token, str)
        and token not in NAMED_TOKENS
        and not os.path.exists(token)
        and not token.endswith(".json")
        and not token.startswith(("/", "~", "./"))
    )


class Login:
    """Tokens for one set of credentials, in any form that ``token`` may have. Threads may share it.

    obstore calls it when it needs a token, and again some time before that one expires. Picklable
    as long as the credentials are; one per process and client.
    """

    def __init__(self, token: Any, access: str | None) -> None:
        self._source = token
        self._access = access or "full_control"
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._last_token: str | None = None
        self._unproven_token: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source, "_access": self._access}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __call__(self) -> dict[str, Any]:
        """Return obstore's ``GCSCredential``: the token, and when to request the next one."""
        with self._lock:
            credentials = self._loaded_credentials()
            expiry = _aware(credentials.expiry)
            if credentials.token is None or (expiry and expiry - datetime.now(UTC) < _AHEAD):
                if credentials.token is None or not is_raw(self._source):
                    refresh(credentials)
                expiry = _aware(credentials.expiry)
            self._last_token = str(credentials.token)
            return {"token": self._last_token, "expires_at": expiry - _AHEAD if expiry else None}

    def accepted(self) -> None:
        """Record that the last token was accepted: if it is refused later, a new one may help."""
        self._unproven_token = None

    def renew(self) -> bool:
        """Request a new token after the last one was refused, once. Returns whether it may help."""
        with self._lock:
            if (
                is_raw(self._source)
                or self._last_token is None
                or self._last_token == self._unproven_token
            ):
                return False
            refused, credentials = self._last_token, self._loaded_credentials()
            from google.auth.exceptions import GoogleAuthError

            try:
                refresh(credentials)
            except GoogleAuthError:
                return False
            self._unproven_token = str(credentials.token)
            return self._unproven_token != refused

    def _loaded_credentials(self) -> Any:
        if self._credentials is None:
            self._credentials = _credentials(self._source, f"{_SCOPE}{self._access}")
        return self._credentials


def _credentials(given: Any, scope: str) -> Any:
    import google.auth
    from google.oauth2 import credentials, service_account

    user: Any = credentials.Credentials
    machine: Any = service_account.Credentials
    if is_raw(given):
        return user(given)
    if given in _FOUND:
        found, _ = google.auth.default(scopes=[scope])
        return found
    if given == "cloud":
        from google.auth import compute_engine

        instance: Any = compute_engine.Credentials
        return instance()
    if isinstance(given, str):
        with open(os.path.expanduser(given), encoding="utf-8") as file:
            given = json.load(file)
    if not isinstance(given, Mapping):
        return given
    if given.get("type") == "service_account":
        return machine.from_service_account_info(dict(given), scopes=[scope])
    return user.from_authorized_user_info(dict(given))


def usable(token: Any) -> Any:
    """Return ``token`` in a form that gcsfs takes.

    A raw token becomes credentials here: gcsfs would verify it at Google, which a private endpoint
    does not want and an offline host cannot do. FileNotFoundError: no such file.
    """
    if is_raw(token):
        from google.oauth2.credentials import Credentials

        made: Any = Credentials
        return made(token)
    if not isinstance(token, str) or token in NAMED_TOKENS:
        return token
    path = os.path.expanduser(token)
    if not os.path.exists(path):
        raise FileNotFoundError(path)  # gcsfs would take the path for a token
    return path


def refresh(credentials: Any) -> None:
    """Request a new token with google-auth. Raises what google-auth raises."""
    import requests
    from google.auth.transport.requests import Request

    with requests.Session() as session:
        credentials.refresh(Request(session))


def _aware(expiry: datetime | None) -> datetime | None:
    """Return google-auth's time as one with a timezone: it is UTC, but does not say so."""
    return expiry.replace(tzinfo=UTC) if expiry is not None and expiry.tzinfo is None else expiry


# -- libraries ---------------------------------------------------------------------------


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObjectClient:
    """Return the client of the URI's bucket. UriError: gcsfs or GCS does not know an option."""
    return GcsObstoreClient(uri, parse_gcs_options(uri, options), times)


def open_library(uri: Uri, options: Mapping[str, Any], times: Times) -> BucketLibrary:
    """Return gcsfs, for the options that ``unsupported_option`` names.

    UriError: gcsfs or GCS does not know an option.
    """
    return GcsfsLibrary(parse_gcs_options(uri, options), times)


def unsupported_option(options: Mapping[str, Any]) -> str | None:
    """Return why obstore cannot do what these options ask for, or None if it can.

    Unknown options are no reason: ``open_client`` reports them.
    """
    try:
        parsed = parse_gcs_options(_ANYWHERE, options)
    except UriError:
        return None
    settings = parsed.settings
    reasons = (
        (settings.kms_key_name, "kms_key_name needs a header that obstore does not send"),
        (settings.predefined_acl, "predefined_acl needs a header that obstore does not send"),
        (
            "custom_time" in settings.fixed_key_metadata,
            "custom_time needs a header that obstore does not send",
        ),
        (
            set(parsed.session_kwargs) - {"trust_env"},
            "session_kwargs belong to aiohttp, which obstore does not use",
        ),
        (parsed.others, f"only gcsfs has the option {min(parsed.others, default='')}"),
        (
            parsed.requester_pays is True and not parsed.project,
            "requester_pays needs the option project",
        ),
        (parsed.token == "cache", "token='cache' is a file that only gcsfs reads"),  # noqa: S105
        (
            parsed.token == "anon" and not parsed.is_custom,  # noqa: S105
            "obstore needs credentials for every write, so it cannot write anonymously",
        ),
        (
            not _needs_no_google_auth(parsed.token) and not _has("google.auth"),
            "these credentials need google-auth",
        ),
    )
    return next((reason for true, reason in reasons if true), None)


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _needs_no_google_auth(token: object) -> bool:
    """Whether obstore finds or takes this token without google-auth."""
    return token in (None, "google_default", "cloud", "anon") or is_raw(token)


@dataclass(frozen=True)
class _GcsStoreFactory:
    """Makes the store. Holds credentials: never shown."""

    options: GcsOptions
    bucket: str
    login: Login | None = field(repr=False)

    def __call__(self, client_options: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        from obstore.store import GCSStore

        options = self.options
        ours: dict[str, Any] = {"allow_http": options.endpoint.startswith("http:")}
        pays = options.requester_pays
        if pays:
            ours["default_headers"] = {
                "x-goog-user-project": str(options.project if pays is True else pays)
            }
        if options.request_s is not None:
            ours["timeout"] = f"{max(1, round(options.request_s * 1000))}ms"
        config: dict[str, Any] = {"base_url": options.endpoint}
        if options.token == "anon":  # noqa: S105 - not a secret; ``unsupported_option`` lets emulators through only
            config["service_account_key"] = json.dumps(_nobody(options.endpoint))
        elif self.login is None and is_raw(options.token):
            config["bearer_token"] = options.token
        factory: Any = GCSStore
        return factory(
            self.bucket,
            config=config,
            client_options=client_options | ours,
            retry_config=retry_config,
            **({} if self.login is None else {"credential_provider": self.login}),
        )


def _nobody(endpoint: str) -> dict[str, Any]:
    """Return the options of a key file without a key: object_store's way to access an emulator."""
    names = ("private_key", "private_key_id", "client_email")
    return {"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}


def _login(options: GcsOptions) -> Login | None:
    if options.token == "anon" or not _has("google.auth"):  # noqa: S105 - not a secret
        return None
    return Login(options.token, options.access)


def _generation(meta: Mapping[str, Any]) -> str | None:
    found = meta.get("version")
    return str(found) if found else None


def _of_generation(etag: str) -> Mapping[str, str]:
    return {"version": etag}


def _traits(options: GcsOptions) -> StoreTraits:
    settings = options.settings
    attributes = {"Content-Type": settings.content_type, **settings.metadata}
    attributes |= {
        _ATTRIBUTES[name]: value
        for name, value in settings.fixed_key_metadata.items()
        if name in _ATTRIBUTES
    }
    if settings.storage_class:
        attributes["Storage-Class"] = settings.storage_class
    return StoreTraits(
        GCS,
        limits=Limits(equal_parts=True, delete_batch=100),
        attributes=attributes,
        etag=_generation,
        update=_of_generation,
        pins_reads=False,
    )


@dataclass(frozen=True)
class GcsfsLibrary(BucketLibrary):
    """Requests through gcsfs, which finds the credentials and retries. Holds credentials: never shown.

    Each object is made by a request of our own, because gcsfs has no keyword for some settings.
    """

    options: GcsOptions = field(repr=False)
    times: Times
    name = "gcsfs"

    @property
    def endpoint(self) -> str:
        return self.options.endpoint

    @property
    def dialect(self) -> Dialect:
        return GCS

    def filesystem(self) -> Any:
        """See ``BucketLibrary.filesystem``.

        This is not gcsfs' newer class, which asks another service what kind of bucket it is, and
        waits a minute if that service does not answer.
        """
        from aiohttp import ClientTimeout
        from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

        options, times = self.options, self.times
        given = {
            "project": options.project,
            "access": options.access,
            "endpoint_url": options.endpoint if options.is_custom else None,
        }
        return GCSFileSystem(
            **{name: value for name, value in given.items() if value is not None},
            token=usable(options.token),
            requester_pays=options.requester_pays,
            session_kwargs={"trust_env": True, **options.session_kwargs},
            requests_timeout=ClientTimeout(
                total=options.request_s, sock_connect=times.connect_s, sock_read=times.request_s
            ),
            skip_instance_cache=True,
            use_listings_cache=False,
            **options.others,
        )

    def put(self, fs: Any, path: str, data: bytes, condition: Condition) -> None:
        line = f"--{secrets.token_hex(16)}"
        head = (
            f"{line}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(self._resource(fs, path))}\r\n{line}\r\n"
            f"Content-Type: {self.options.settings.content_type}\r\n\r\n"
        )
        fs.call(
            "POST",
            self._uploads(fs, path),
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{line[2:]}"'},
            data=b"".join((head.encode(), data, f"\r\n{line}--\r\n".encode())),
            **self.options.settings.query(),
            **_matching(condition),
        )

    def open_write(self, fs: Any, path: str, block_bytes: int) -> Any:
        stream = fs.open(path, "wb", autocommit=False, block_size=block_bytes)

        def begin() -> None:
            headers, _ = fs.call(
                "POST",
                self._uploads(fs, path),
                uploadType="resumable",
                json=self._resource(fs, path),
                headers={"X-Upload-Content-Type": self.options.settings.content_type},
                **self.options.settings.query(),
            )
            stream.location = headers["Location"]

        # gcsfs' own sends neither the ACL nor the storage class.
        stream._initiate_upload = begin  # noqa: SLF001 - the hook of fsspec's buffered files
        return stream

    def etag(self, info: Mapping[str, Any]) -> str | None:
        found = info.get("generation")
        return None if found is None else str(found)

    def _uploads(self, fs: Any, path: str) -> str:
        return f"{self.options.endpoint}/upload/storage/v1/b/{quote(fs.split_path(path)[0])}/o"

    def _resource(self, fs: Any, path: str) -> dict[str, Any]:
        return {"name": fs.split_path(path)[1], **self.options.settings.resource()}


def _matching(condition: Condition) -> dict[str, str]:
    match condition:
        case Always():
            return {}
        case IfAbsent():
            return {"ifGenerationMatch": "0"}
        case _:
            return {"ifGenerationMatch": condition.etag}


class GcsObstoreClient(ObstoreClient):
    """One bucket through obstore."""

    def __init__(self, uri: Uri, options: GcsOptions, times: Times) -> None:
        self._login = _login(options)
        self._library = GcsfsLibrary(options, times)
        self._fs: tuple[int, Any] | None = None  # gcsfs, and the process that it belongs to
        factory = _GcsStoreFactory(options, uri.authority, self._login)
        super().__init__(uri, factory, _traits(options), options.endpoint, times)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_fs": None}

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        context = self._context("list uploads", prefix)
        if not _has("gcsfs"):
            raise UnsupportedError(
                "list uploads failed: obstore does not list them, and gcsfs is missing",
                uri=context.uri,
                hint="pip install gcsfs; a lifecycle rule of the bucket aborts them too",
            )
        query = {"uploads": "", "prefix": prefix, "max-uploads": "1000"}
        while True:
            headers, body = self._call_gcsfs(context, "GET", self._url(""), query)
            now = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(UTC)
            page = ET.fromstring(body)  # noqa: S314 - from the server that has our data
            for upload in page.iterfind("{*}Upload"):
                age = now - datetime.fromisoformat(upload.findtext("{*}Initiated", ""))
                key, name = (upload.findtext(f"{{*}}{tag}", "") for tag in ("Key", "UploadId"))
                yield PendingUpload(key, name, max(age.total_seconds(), 0.0))
            if page.findtext("{*}IsTruncated") != "true":
                return
            query["key-marker"] = page.findtext("{*}NextKeyMarker", "")
            query["upload-id-marker"] = page.findtext("{*}NextUploadIdMarker", "")

    def abort_pending(self, upload: PendingUpload) -> None:
        context = self._context("abort upload", upload.key, changes=True)
        if not _has("gcsfs"):
            return
        with suppress(NotFoundError):  # completed, or aborted by another
            self._call_gcsfs(
                context, "DELETE", self._url(upload.key), {"uploadId": upload.upload_id}
            )

    def bucket_rules(self) -> BucketRules | None:
        if not _has("gcsfs"):
            return None
        context = self._context("get bucket", "")
        query = {"fields": "versioning,retentionPolicy,lifecycle"}
        at = f"{self.endpoint}/storage/v1/b/{quote(self._root.authority)}"
        return of_gcs(lambda: dict(json.loads(self._call_gcsfs(context, "GET", at, query)[1])))

    def _url(self, key: str) -> str:
        return f"{self.endpoint}/{quote(self._root.authority)}/{quote(key)}".rstrip("/")

    def _call_gcsfs(
        self, context: RequestContext, method: str, url: str, query: Mapping[str, str]
    ) -> tuple[Mapping[str, str], bytes]:
        """Make a request that obstore does not have, through gcsfs. Returns headers and body."""

        def request() -> tuple[Mapping[str, str], bytes]:
            with self._lock:
                if self._fs is None or self._fs[0] != os.getpid():
                    self._fs = (os.getpid(), self._library.filesystem())
                fs = self._fs[1]
            found: tuple[Mapping[str, str], bytes] = fs.call(method, url, **query)
            return found

        return self._call_library(context, request)

    def _call(self, context: RequestContext, request: Callable[[], T]) -> T:
        try:
            found = super()._call(context, request)
            if self._login is not None:
                self._login.accepted()
            return found
        except UnsupportedError as error:
            error.hint = (
                error.hint or "obstore speaks the XML API, which emulators may lack: client='gcsfs'"
            )
            raise
        except StorageError as error:
            if "requester pays" in error.message.lower():
                error.hint = "pass requester_pays=True, or the project that pays"
            if not isinstance(error, CredentialsError):
                raise
            if self._login is None or not self._login.renew():
                raise
            failure = error
        self.close()  # a store that was made in between keeps the refused token
        raise TransientError(
            f"{context.action} failed: the token was refused, and is renewed now", uri=failure.uri
        )
