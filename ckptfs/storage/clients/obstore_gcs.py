"""GCS through obstore: gcsfs' options as a configuration of obstore's GCSStore.

The XML API carries everything here. Credentials come from google-auth, as with gcsfs; where that is
not installed, from what obstore finds by itself. Conditions and etags are generations, as in ``gcs``.

obstore has no header of its own for one request, so ``cannot`` names what needs one: a KMS key, an
ACL, a custom time. Nor does it send a crc32c: over TLS nothing is lost by that on the way, and ckptfs
verifies its own digests as it reads. It cannot ask anonymously of Google, because it looks for
credentials whenever it writes. Foreign uploads are listed and aborted through gcsfs, if it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from ckptfs.errors import (
    CredentialsError,
    IntegrityError,
    StaleError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients.base import Limits, ObjectClient, PendingUpload
from ckptfs.storage.clients.failures import Asked
from ckptfs.storage.clients.gcs_errors import GCS
from ckptfs.storage.clients.gcs_login import Login, is_raw
from ckptfs.storage.clients.gcs_options import GcsOptions, parse_gcs_options
from ckptfs.storage.clients.obstore import Flavour, ObstoreClient
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["cannot", "open_client"]

T = TypeVar("T")
_ANYWHERE: Final = Uri("gs", "bucket", "")
_ATTRIBUTES: Final = {
    "cache_control": "Cache-Control",
    "content_disposition": "Content-Disposition",
    "content_language": "Content-Language",
}


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObjectClient:
    """The client of the URI's bucket. UriError: an option that gcsfs or GCS does not know."""
    return GcsObstoreClient(uri, parse_gcs_options(uri, options), options, times)


def cannot(options: Mapping[str, Any]) -> str | None:
    """Why obstore cannot do what these options ask for, or None. Options that nobody knows are not
    its business: ``open_client`` tells.
    """
    try:
        parsed = parse_gcs_options(_ANYWHERE, options)
    except UriError:
        return None
    settings = parsed.settings
    reasons = (
        (settings.kms_key_name, "kms_key_name needs a header that obstore does not send"),
        (settings.acl, "predefined_acl needs a header that obstore does not send"),
        ("custom_time" in settings.fixed, "custom_time needs a header that obstore does not send"),
        (set(parsed.session_kwargs) - {"trust_env"}, "session_kwargs are for aiohttp"),
        (parsed.requester_pays is True and not parsed.project, "requester_pays needs the project"),
        (parsed.token == "cache", "token='cache' is gcsfs' own file"),  # noqa: S105
        (
            parsed.token == "anon" and not parsed.is_custom,  # noqa: S105
            "it asks for credentials whenever it writes, so not anonymously",
        ),
        (
            not _simple(parsed.token) and not _has_google_auth(),
            "these credentials need google-auth",
        ),
    )
    return next((reason for true, reason in reasons if true), None)


def _has_google_auth() -> bool:
    try:
        return find_spec("google.auth") is not None
    except ModuleNotFoundError:
        return False


def _simple(token: object) -> bool:
    """What obstore finds or takes without google-auth."""
    return token in (None, "google_default", "cloud", "anon") or is_raw(token)


@dataclass(frozen=True)
class _Make:
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
        if options.token == "anon":  # noqa: S105 - not a secret; ``cannot`` lets emulators through only
            config["service_account_key"] = json.dumps(_nobody(options.endpoint))
        elif self.login is None and is_raw(options.token):
            config["bearer_token"] = options.token
        make: Any = GCSStore
        return make(
            self.bucket,
            config=config,
            client_options=client_options | ours,
            retry_config=retry_config,
            **({} if self.login is None else {"credential_provider": self.login}),
        )


def _nobody(endpoint: str) -> dict[str, Any]:
    """A key file without a key: object_store's way to ask an emulator."""
    names = ("private_key", "private_key_id", "client_email")
    return {"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}


def _login(options: GcsOptions) -> Login | None:
    if options.token == "anon" or not _has_google_auth():  # noqa: S105 - not a secret
        return None
    return Login(options.token, options.access)


def _generation(meta: Mapping[str, Any]) -> str | None:
    found = meta.get("version")
    return str(found) if found else None


def _of_generation(etag: str) -> Mapping[str, str]:
    return {"version": etag}


def _flavour(options: GcsOptions) -> Flavour:
    settings = options.settings
    attributes = {"Content-Type": settings.content_type, **settings.metadata}
    attributes |= {
        _ATTRIBUTES[name]: value for name, value in settings.fixed.items() if name in _ATTRIBUTES
    }
    if settings.storage_class:
        attributes["Storage-Class"] = settings.storage_class
    return Flavour(
        GCS,
        limits=Limits(equal_parts=True, delete_batch=100),
        attributes=attributes,
        etag=_generation,
        update=_of_generation,
    )


class GcsObstoreClient(ObstoreClient):
    """One bucket through obstore."""

    def __init__(
        self, uri: Uri, options: GcsOptions, given: Mapping[str, Any], times: Times
    ) -> None:
        self._uri = uri
        self._given = dict(given)
        self._login = _login(options)
        self._slow_client: ObjectClient | None = None
        make = _Make(options, uri.authority, self._login)
        super().__init__(uri, make, _flavour(options), options.endpoint, times)

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        # obstore's own condition is on the ETag, and equal bytes have equal ones: the generation that
        # came with the bytes is compared instead.
        import obstore

        view = out.cast("B")
        if not view:
            return
        asked = self._asked("get", key)
        wanted: Any = {"range": (offset, offset + len(view))}

        def request() -> int:
            found = obstore.get(self._store(len(view)), key, options=wanted)
            if etag not in (None, _generation(found.meta)):
                raise StaleError("get failed: the object was replaced meanwhile", uri=asked.uri)
            first, last = found.range
            if (first, last) != (offset, offset + len(view)):
                raise IntegrityError(
                    "get failed: the object ends before the bytes that were asked for",
                    uri=asked.uri,
                )
            at = 0
            for chunk in found.stream(min_chunk_size=1 << 20):
                view[at : at + len(chunk)] = memoryview(chunk)
                at += len(chunk)
            return at

        if self._say(asked, request) < len(view):
            raise TransientError("get failed: the body ended too early", uri=asked.uri)

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        slow = self._slow()
        return iter(()) if slow is None else slow.list_uploads(prefix)

    def abort_pending(self, upload: PendingUpload) -> None:
        slow = self._slow()
        if slow is not None:
            slow.abort_pending(upload)

    def close(self) -> None:
        super().close()
        slow, self._slow_client = self._slow_client, None
        if slow is not None:
            slow.close()

    def _slow(self) -> ObjectClient | None:
        """gcsfs' client of the same bucket: it knows what obstore does not."""
        if self._slow_client is None and find_spec("gcsfs") is not None:
            from ckptfs.storage.clients import gcs

            self._slow_client = gcs.open_client(self._uri, self._given, self._times)
        return self._slow_client

    def _say(self, asked: Asked, request: Callable[[], T]) -> T:
        try:
            found = super()._say(asked, request)
            if self._login is not None:
                self._login.accepted()
            return found
        except UnsupportedError as error:
            error.hint = (
                error.hint or "obstore speaks the XML API, which emulators may lack: client='gcsfs'"
            )
            raise
        except CredentialsError as error:
            if self._login is None or not self._login.renew():
                raise
            failure = error
        self.close()  # a store that was made meanwhile keeps the token that was refused
        raise TransientError(
            f"{asked.action} failed: the token was refused, and is renewed now", uri=failure.uri
        )
