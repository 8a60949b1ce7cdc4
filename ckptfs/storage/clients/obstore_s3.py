"""S3 through obstore: s3fs' options, read by the same code, as the configuration of obstore's store.

    s3_options     the options, checked as for s3fs
    s3_resolved    endpoint, region, addressing and certificates as botocore reads them (its variables
                   and profiles) where botocore is installed; else the options and AWS_* variables
    _Make          the store: keys, or a provider of credentials that botocore refreshes

What obstore cannot say, ``cannot`` names; then ``client="auto"`` takes s3fs. Checksums: to AWS over
https a crc64nvme of each body, which S3 verifies; to others over https TLS's own, since many refuse
the newer headers and a SHA-256 costs four times what sending does; over http the SHA-256, signed.
Ranges are read over sockets of our own (``signed_get``), whose URLs obstore signs; where that does not
go, by obstore.
Uploads that nobody completed, and versions, are listed by s3fs' client where it is installed.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from ckptfs.errors import UnsupportedError
from ckptfs.storage.clients.base import ObjectClient, PendingUpload
from ckptfs.storage.clients.bucket_rules import BucketRules
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.clients.obstore import Flavour, ObstoreClient
from ckptfs.storage.clients.s3_endpoint import endpoint_name
from ckptfs.storage.clients.s3_errors import ANONYMOUS_S3, S3
from ckptfs.storage.clients.s3_options import S3Options, parse_s3_options
from ckptfs.storage.clients.s3_resolved import Place, forget, resolve, state_of
from ckptfs.storage.clients.signed_get import SIGNED_S, Got, SignedGets, can_read
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["cannot", "open_client"]

_log = logging.getLogger(__name__)

# Members of requests, and how obstore says them. Attributes and tags are given with each object.
_ATTRIBUTES: Final = {
    "StorageClass": "Storage-Class",
    "ContentType": "Content-Type",
    "ContentEncoding": "Content-Encoding",
    "ContentLanguage": "Content-Language",
    "ContentDisposition": "Content-Disposition",
    "CacheControl": "Cache-Control",
}
_CONFIG: Final = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
    "RequestPayer": "request_payer",
}
_SSE_C: Final = ("SSECustomerAlgorithm", "SSECustomerKey", "SSECustomerKeyMD5")
_SAID: Final = {*_ATTRIBUTES, *_CONFIG, *_SSE_C, "Tagging", "Metadata", "ChecksumAlgorithm"}
_CHECKSUMS: Final = ("SHA256", "CRC64NVME")
_CONFIG_KWARGS: Final = frozenset(
    (
        "connect_timeout", "read_timeout", "retries", "max_pool_connections", "tcp_keepalive",
        "region_name", "s3", "request_checksum_calculation", "response_checksum_validation",
        "parameter_validation", "connector_args", "http_session_cls", "warm_up_loader_caches",
    )
)  # fmt: skip
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_SURROUNDINGS: Final = (*_PROXIES, *map(str.upper, _PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR")
_S3_CONFIG: Final = frozenset(("addressing_style", "payload_signing_enabled"))


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObjectClient:
    """The client of the URI's bucket. UriError: an option that is unknown, or that obstore lacks."""
    return S3ObstoreClient(uri, dict(options), times)


def cannot(options: Mapping[str, Any]) -> str | None:
    """Why obstore cannot do what these options ask for, in a few words; None: it can."""
    if options.get("session") is not None:
        return "a session is aiobotocore's"
    if find_spec("botocore") is None and options.get("profile"):
        return "profiles are botocore's, which is not installed"
    config = _table(options, "config_kwargs")
    strange = sorted(set(config) - _CONFIG_KWARGS)
    strange += sorted(f"s3[{name!r}]" for name in set(_table(config, "s3")) - _S3_CONFIG)
    if strange:
        return f"config_kwargs {strange[0]}"
    said = _table(options, "s3_additional_kwargs")
    unsaid = sorted(set(said) - _SAID)
    if unsaid:
        return f"s3_additional_kwargs {unsaid[0]}"
    if said.get("ChecksumAlgorithm", "SHA256") not in _CHECKSUMS:
        return f"s3_additional_kwargs ChecksumAlgorithm {said['ChecksumAlgorithm']}"
    return None


def _table(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = options.get(name)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class _Make:
    """obstore's S3Store for one bucket; resolved at the first request, in the process that makes it.

    One that was made for the same is taken again, with its connections: to make one takes 5 ms, in which
    all certificates of the machine are parsed.
    """

    bucket: str
    options: S3Options
    in_batches: bool = True

    def __call__(self, client_options: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        from obstore.store import S3Store

        place = self.place()
        wanted = self.config(place) | {
            "client_options": client_options | dict(place.client_options),
            "retry_config": retry_config,
        }
        kind = hashlib.sha256(repr((wanted, _surroundings())).encode()).hexdigest()
        found = place.stores.get(kind)
        if found is None:
            if place.provider is not None:
                wanted["credential_provider"] = place.provider
            found = place.stores[kind] = S3Store(self.bucket, **wanted)
        return found

    def place(self) -> Place:
        """Where requests go, as variables and files are now."""
        return resolve(self.options, self.bucket)

    def config(self, place: Place) -> dict[str, Any]:
        """obstore's configuration of the store there."""
        said = self.options.parameters
        config = {_CONFIG[name]: value for name, value in said.items() if name in _CONFIG}
        config |= dict(place.config) | {"disable_bulk_delete": not self.in_batches}
        if key := said.get("SSECustomerKey"):
            raw = key if isinstance(key, bytes) else str(key).encode()
            config["server_side_encryption"] = "sse-c"
            config["sse_customer_key_base64"] = base64.b64encode(raw).decode()
        if self.options.client.get("anon"):
            config["skip_signature"] = True
        if algorithm := said.get("ChecksumAlgorithm"):
            config["checksum_algorithm"] = str(algorithm).lower()
        elif place.is_tls and not place.chose_checksum:
            config["unsigned_payload"] = True
            if place.is_aws:
                config["checksum_algorithm"] = "crc64nvme"
        if place.payload_signing is not None:
            config["unsigned_payload"] = not place.payload_signing
        return config


def _surroundings() -> tuple[Any, ...]:
    """What else obstore reads when a store is made: proxies, and whom the machine trusts."""
    trusted = ssl.get_default_verify_paths()
    files = [state_of(Path(path)) for path in (trusted.cafile, trusted.capath) if path]
    return tuple(os.environ.get(name) for name in _SURROUNDINGS), files


class _Untried:
    """Nobody has asked yet whether signed URLs go."""


_UNTRIED: Final = _Untried()


class S3ObstoreClient(ObstoreClient):
    """obstore's client, with s3fs' for the two listings that obstore does not have, and ranges over
    sockets of our own.
    """

    _gets: SignedGets | _Untried | None

    def __init__(self, uri: Uri, options: dict[str, Any], times: Times) -> None:
        parsed = parse_s3_options(uri, options)
        make = _Make(uri.authority, parsed)
        flavour = Flavour(
            singles=replace(make, in_batches=False),
            dialect=ANONYMOUS_S3 if parsed.client.get("anon") else S3,
            attributes=_attributes(parsed.parameters),
            tags=dict(parse_qsl(parsed.parameters.get("Tagging", ""))),
        )
        super().__init__(uri, make, flavour, endpoint_name(parsed), times)
        self._place = (uri, options, times)
        self._made, self._gets, self._gets_lock = make, _UNTRIED, ProcessLock()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_gets": _UNTRIED, "_gets_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gets_lock = ProcessLock()

    def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
        """Over a socket of our own, else as obstore does."""
        view, gets = out.cast("B"), self._signed()
        if gets is None or not view:
            super().get_range(key, offset, out, etag)
            return
        if gets.fill(self._asked("get", key), key, offset, view, etag) is Got.FILLED:
            return
        super().get_range(key, offset, out, etag)  # it tells what was wrong
        # Nothing was: this place does not take what obstore can do without.
        _log.info("ranges of %s are read by obstore: signed URLs do not work here", self._root)
        with self._gets_lock:
            self._gets = None

    def _signed(self) -> SignedGets | None:
        """None where obstore has to ask."""
        with self._gets_lock:
            if isinstance(self._gets, _Untried):
                place = self._made.place()
                fits = can_read(self._made.config(place), place.client_options)
                made = SignedGets(self._sign, place.client_options, self._place[2])
                self._gets = made if fits else None
            return self._gets

    def _sign(self, key: str) -> str:
        import obstore

        expires = timedelta(seconds=SIGNED_S)
        asked = self._asked("get", key)
        return self._say(asked, lambda: str(obstore.sign(self._store(), "GET", key, expires)))

    def close(self) -> None:
        super().close()
        gets, self._gets = self._gets, _UNTRIED
        if isinstance(gets, SignedGets):
            gets.close()

    def forget_credentials(self) -> None:
        forget()
        super().forget_credentials()

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        if find_spec("s3fs") is None:
            # A lifecycle rule of the bucket does the same.
            _log.info("unfinished uploads stay: obstore does not list them, and s3fs is missing")
            return
        yield from self._other().list_uploads(prefix)

    def abort_pending(self, upload: PendingUpload) -> None:
        self._other().abort_pending(upload)

    def versions(self, prefix: str) -> Any:
        """As ``S3Client.versions``."""
        return self._other().versions(prefix)

    def bucket_rules(self) -> BucketRules | None:
        if find_spec("s3fs") is None:
            return None
        found: BucketRules | None = self._other().bucket_rules()
        return found

    def _other(self) -> Any:
        if find_spec("s3fs") is None:
            raise UnsupportedError(
                "obstore knows neither foreign uploads nor versions",
                uri=self._root,
                hint="pip install 'ckptfs[s3]'",
            )
        from ckptfs.storage.clients import s3

        return s3.open_client(*self._place)


def _attributes(parameters: Mapping[str, Any]) -> dict[str, str]:
    found = {_ATTRIBUTES[name]: str(v) for name, v in parameters.items() if name in _ATTRIBUTES}
    return found | dict(parameters.get("Metadata", {}))
