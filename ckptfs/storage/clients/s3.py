"""S3 through obstore, and through s3fs for options that obstore does not have.

    s3_options    the options, checked as s3fs does it, and what they mean: endpoint, region, certificates
    S3Obstore...  ``open_client``: obstore's store, with keys or a provider of credentials that asks botocore
    S3fsLibrary   ``open_library``: the requests that ``FsspecStorage`` makes, for what ``unsupported_option`` names

Checksums through obstore: to AWS over https a crc64nvme of each body, which S3 verifies; to others over https
only that of TLS, because many refuse the newer headers and a SHA-256 costs four times as much as sending; over http
the SHA-256, signed. Through s3fs always the SHA-256.

Incomplete uploads are listed through s3fs, if it is installed.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

from ckptfs.errors import (
    NotFoundError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import (
    Always,
    BucketLibrary,
    Condition,
    IfAbsent,
    ObjectClient,
    PendingUpload,
)
from ckptfs.storage.clients.bucket_rules import BucketRules, of_s3
from ckptfs.storage.clients.http_errors import (
    Dialect,
    ErrorResponse,
    Reason,
    RequestContext,
    response_error,
)
from ckptfs.storage.clients.obstore import ObstoreClient, StoreTraits
from ckptfs.storage.clients.s3_options import (
    ResolvedEndpoint,
    S3Options,
    endpoint_name,
    forget_resolved,
    parse_s3_options,
    resolve,
    state_of,
)
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = [
    "ANONYMOUS_S3",
    "S3",
    "S3ObstoreClient",
    "S3fsLibrary",
    "open_client",
    "open_library",
    "unsupported_option",
]

_OR_MISSING = " (and s3:ListBucket, without which S3 answers so for a missing object too)"

S3: Final = Dialect(
    name="S3",
    permissions={
        "get": f"s3:GetObject{_OR_MISSING}",
        "head": f"s3:GetObject{_OR_MISSING}",
        "put": "s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey)",
        "begin upload": "s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey)",
        "upload": "s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey, kms:Decrypt)",
        "put part": "s3:PutObject on this prefix (with SSE-KMS also kms:Decrypt)",
        "complete upload": "s3:PutObject on this prefix (with SSE-KMS also kms:Decrypt)",
        "abort upload": "s3:AbortMultipartUpload on this prefix",
        "delete": "s3:DeleteObject on this prefix",
        "list": "s3:ListBucket for this prefix",
        "list uploads": "s3:ListBucketMultipartUploads on the bucket",
        "list versions": "s3:ListBucketVersions for this prefix",
        "GetBucketVersioning": "s3:GetBucketVersioning on the bucket",
        "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration on the bucket",
        "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration on the bucket",
    },
    hints={
        Reason.NO_CREDENTIALS: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
        "storage_options key= and secret= or profile=; anon=True for a public bucket",
        Reason.WRONG_REGION: "set client_kwargs={{'region_name': ...}} or AWS_DEFAULT_REGION, or the "
        "endpoint_url of that region",
        Reason.WRONG_CREDENTIALS: "check key and secret (or the profile), and that they belong to "
        "this endpoint",
        Reason.CERTIFICATE: "name the authority's file in AWS_CA_BUNDLE or client_kwargs['verify']",
    },
)

ANONYMOUS_S3: Final = replace(
    S3,
    hints={
        **S3.hints,
        Reason.FORBIDDEN: "anonymous access (anon=True) is not enough here: give credentials that "
        "may, or make the bucket public; a missing object answers so too",
    },
)

# -- clients -----------------------------------------------------------------------------

T = TypeVar("T")
_log = logging.getLogger("ckptfs.storage")

# Request members and obstore's names for them. Attributes and tags are given with each object.
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
_EXPRESSIBLE: Final = {*_ATTRIBUTES, *_CONFIG, *_SSE_C, "Tagging", "Metadata", "ChecksumAlgorithm"}
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
_BATCH: Final = 1000  # keys that one request deletes at most
_CONDITION_FAILED: Final = ("PreconditionFailed", "412")
_CHECKSUM: Final = re.compile("Checksum(CRC32|CRC32C|CRC64NVME|SHA1|SHA256)")
_NEXT_KEYS: Final = {"ContinuationToken": "NextContinuationToken"}
_NEXT_UPLOADS: Final = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObjectClient:
    """Return the client of the URI's bucket. UriError: an option is unknown, or clashes."""
    return S3ObstoreClient(uri, parse_s3_options(uri, options), times)


def open_library(uri: Uri, options: Mapping[str, Any], times: Times) -> BucketLibrary:
    """Return s3fs, for the options that ``unsupported_option`` names.

    UriError: an option is unknown, or clashes.
    """
    parsed = parse_s3_options(uri, options)
    return S3fsLibrary(parsed, times, endpoint_name(parsed))


def unsupported_option(options: Mapping[str, Any]) -> str | None:
    """Return why obstore cannot do what these options ask for, or None if it can."""
    if options.get("session") is not None:
        return "a session is aiobotocore's"
    if find_spec("botocore") is None and options.get("profile"):
        return "profiles are botocore's, which is not installed"
    config = _table(options, "config_kwargs")
    strange = sorted(set(config) - _CONFIG_KWARGS)
    strange += sorted(f"s3[{name!r}]" for name in set(_table(config, "s3")) - _S3_CONFIG)
    if strange:
        return f"config_kwargs {strange[0]}"
    parameters = _table(options, "s3_additional_kwargs")
    unsaid = sorted(set(parameters) - _EXPRESSIBLE)
    if unsaid:
        return f"s3_additional_kwargs {unsaid[0]}"
    if parameters.get("ChecksumAlgorithm", "SHA256") not in _CHECKSUMS:
        return f"s3_additional_kwargs ChecksumAlgorithm {parameters['ChecksumAlgorithm']}"
    return None


def _table(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = options.get(name)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class _S3StoreFactory:
    """Makes obstore's S3Store for one bucket, at the first request, in the process that makes it.

    A store that was made with the same configuration is used again, with its connections: making
    one takes 5 ms, because all certificates of the machine are parsed.
    """

    bucket: str
    options: S3Options
    in_batches: bool = True

    def __call__(self, client_options: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        from obstore.store import S3Store

        resolved = self.resolved()
        wanted = self.config(resolved) | {
            "client_options": client_options | dict(resolved.client_options),
            "retry_config": retry_config,
        }
        kind = hashlib.sha256(repr((wanted, _surroundings())).encode()).hexdigest()
        found = resolved.stores.get(kind)
        if found is None:
            if resolved.provider is not None:
                wanted["credential_provider"] = resolved.provider
            found = resolved.stores[kind] = S3Store(self.bucket, **wanted)
        return found

    def resolved(self) -> ResolvedEndpoint:
        """Return where requests go, by the current variables and files."""
        return resolve(self.options, self.bucket)

    def config(self, resolved: ResolvedEndpoint) -> dict[str, Any]:
        """Return obstore's configuration of the store there."""
        parameters = self.options.parameters
        config = {_CONFIG[name]: value for name, value in parameters.items() if name in _CONFIG}
        config |= dict(resolved.config) | {"disable_bulk_delete": not self.in_batches}
        if key := parameters.get("SSECustomerKey"):
            raw = key if isinstance(key, bytes) else str(key).encode()
            config["server_side_encryption"] = "sse-c"
            config["sse_customer_key_base64"] = base64.b64encode(raw).decode()
        if self.options.client.get("anon"):
            config["skip_signature"] = True
        if algorithm := parameters.get("ChecksumAlgorithm"):
            config["checksum_algorithm"] = str(algorithm).lower()
        elif resolved.is_tls and not resolved.chose_checksum:
            config["unsigned_payload"] = True
            if resolved.is_aws:
                config["checksum_algorithm"] = "crc64nvme"
        if resolved.payload_signing is not None:
            config["unsigned_payload"] = not resolved.payload_signing
        return config


def _surroundings() -> tuple[Any, ...]:
    """Return what else obstore reads when a store is made: proxies, and trusted certificates."""
    trusted = ssl.get_default_verify_paths()
    files = [state_of(Path(path)) for path in (trusted.cafile, trusted.capath) if path]
    return tuple(os.environ.get(name) for name in _SURROUNDINGS), files


class S3ObstoreClient(ObstoreClient):
    """One bucket through obstore.

    Requests that obstore does not have go through s3fs, if it is installed: the list of incomplete
    uploads, and the bucket's rules.
    """

    def __init__(self, uri: Uri, options: S3Options, times: Times) -> None:
        factory = _S3StoreFactory(uri.authority, options)
        endpoint = endpoint_name(options)
        traits = StoreTraits(
            single_deletes=replace(factory, in_batches=False),
            dialect=_dialect(options),
            attributes=_attributes(options.parameters),
            tags=dict(parse_qsl(options.parameters.get("Tagging", ""))),
            pins_reads=not options.etag_by_client,
        )
        super().__init__(uri, factory, traits, endpoint, times)
        self._library = S3fsLibrary(options, times, endpoint)
        self._fs: tuple[int, Any] | None = None  # s3fs, and the process that it belongs to

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_fs": None}

    def forget_credentials(self) -> None:
        forget_resolved()
        super().forget_credentials()

    def close(self) -> None:
        super().close()
        self._fs = None

    def list_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        context = self._context("list uploads", prefix)
        if find_spec("s3fs") is None:
            raise UnsupportedError(
                "list uploads failed: obstore does not list them, and s3fs is missing",
                uri=context.uri,
                hint="pip install s3fs; a lifecycle rule of the bucket aborts them too",
            )
        bucket = self._root.authority
        pages = self._library.list_uploads(self._s3fs(), bucket, prefix)
        try:
            while (upload := self._call_library(context, lambda: next(pages, None))) is not None:
                yield upload
        except NotFoundError as error:
            # rclone serve s3 answers NoSuchUpload if there is none.
            if error.of_bucket:
                raise

    def abort_pending(self, upload: PendingUpload) -> None:
        context = self._context("abort upload", upload.key, changes=True)
        with suppress(NotFoundError):  # completed, or aborted by another
            self._call_library(
                context,
                lambda: self._library.abort_upload(self._s3fs(), self._root.authority, upload),
            )

    def bucket_rules(self) -> BucketRules | None:
        if find_spec("s3fs") is None:
            return None
        bucket = self._root.authority

        def request(operation: str) -> dict[str, Any]:
            context = self._context(operation, "")
            found: dict[str, Any] = self._call_library(
                context, lambda: self._s3fs().call_s3(xform_name(operation), Bucket=bucket)
            )
            return found

        from botocore import xform_name

        return of_s3(request)

    def _s3fs(self) -> Any:
        with self._lock:
            if self._fs is None or self._fs[0] != os.getpid():
                self._fs = os.getpid(), self._library.filesystem()
            return self._fs[1]


@dataclass(frozen=True)
class S3fsLibrary(BucketLibrary):
    """Requests through s3fs and botocore below it, which retry. Holds credentials: never shown.

    ``s3_additional_kwargs`` are added to each request that has them. s3fs' own stream is not used:
    it begins a multipart upload for a file of any size, and tries to complete it only once.
    """

    options: S3Options = field(repr=False)
    times: Times
    server: str
    name = "s3fs"

    @property
    def endpoint(self) -> str:
        return self.server

    @property
    def dialect(self) -> Dialect:
        return _dialect(self.options)

    def bucket(self, uri: Uri) -> str:
        """See ``BucketLibrary.bucket``. The text before the @ is a key and its secret."""
        return uri.authority

    def filesystem(self) -> Any:
        from s3fs import S3FileSystem

        given = dict(self.options.client)
        config = {
            "connect_timeout": self.times.connect_s,
            "read_timeout": self.times.request_s,
            # The SHA-256 of each body is signed. botocore by default sends another checksum after
            # the body, in a framing that not every server supports.
            "request_checksum_calculation": os.environ.get(
                "AWS_REQUEST_CHECKSUM_CALCULATION", "when_required"
            ),
            **(given.pop("config_kwargs", None) or {}),
        }
        return S3FileSystem(
            **given,
            config_kwargs=config,
            s3_additional_kwargs=dict(self.options.parameters),
            max_concurrency=1,  # otherwise each read of a whole object begins with a HEAD
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def put(self, fs: Any, path: str, data: bytes, condition: Condition) -> None:
        wanted = {**_at(fs, path), "Body": data}
        if isinstance(condition, IfAbsent):
            wanted["IfNoneMatch"] = "*"
        elif not isinstance(condition, Always):
            # radosgw 16.2 refuses the quoted etag.
            wanted["IfMatch"] = condition.etag.strip('"')
        try:
            fs.call_s3("put_object", **wanted)
        except OSError as error:
            if _code(error) in _CONDITION_FAILED:
                raise FileExistsError(path) from error
            raise

    def open_write(self, fs: Any, path: str, block_bytes: int) -> Any:
        return _PartStream(fs, path, block_bytes)

    def etag(self, info: Mapping[str, Any]) -> str | None:
        found = info.get("ETag")
        return str(found) if found else None

    def list_names(self, fs: Any, path: str) -> list[dict[str, Any]]:
        """See ``BucketLibrary.list_names``.

        s3fs' own ``ls`` lists the parent if it finds nothing.
        """
        bucket, key, _ = fs.split_path(path)
        wanted = {
            "Bucket": bucket,
            "Prefix": f"{key.rstrip('/')}/" if key else "",
            "Delimiter": "/",
        }
        found = []
        for page in _pages(fs, "list_objects_v2", wanted, _NEXT_KEYS):
            found += [(item["Key"], "file") for item in page.get("Contents", ())]
            found += [(item["Prefix"], "directory") for item in page.get("CommonPrefixes", ())]
        return [{"name": f"{bucket}/{name}", "type": kind} for name, kind in found]

    def remove(self, fs: Any, paths: Sequence[str]) -> None:
        """See ``BucketLibrary.remove``. s3fs' own ``rm`` does not report keys that were refused."""
        for first in range(0, len(paths), _BATCH):
            batch = paths[first : first + _BATCH]
            bucket = fs.split_path(batch[0])[0]
            keys = [fs.split_path(path)[1] for path in batch]
            wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            answer = fs.call_s3("delete_objects", Bucket=bucket, Delete=wanted)
            for line in answer.get("Errors", ()):
                context = self._context(
                    "delete", Uri("s3", bucket, f"/{line['Key']}"), changes=True
                )
                # A batch answers 200 with a code for each key; the status that belongs to it is not
                # given.
                refused = response_error(
                    context, ErrorResponse(0, line.get("Code", ""), line.get("Message", ""))
                )
                if not isinstance(refused, NotFoundError):
                    raise refused

    def list_uploads(self, fs: Any, bucket: str, prefix: str) -> Iterator[PendingUpload]:
        wanted = {"Bucket": bucket, "Prefix": prefix}
        for page in _pages(fs, "list_multipart_uploads", wanted, _NEXT_UPLOADS):
            for item in page.get("Uploads", ()):
                yield PendingUpload(item["Key"], item["UploadId"], _age_s(page, item["Initiated"]))

    def abort_upload(self, fs: Any, bucket: str, upload: PendingUpload) -> None:
        fs.call_s3(
            "abort_multipart_upload", Bucket=bucket, Key=upload.key, UploadId=upload.upload_id
        )

    def _context(self, action: str, uri: Uri, *, changes: bool) -> RequestContext:
        return RequestContext(self.dialect, action, uri, self.server, changes=changes)


class _PartStream:
    """An object that is being uploaded part by part: the stream of ``BucketLibrary.open_write``.

    An object that is not larger than a part is one PUT.
    """

    def __init__(self, fs: Any, path: str, part_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._at = _at(fs, path)
        self._part_bytes = part_bytes
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._unsent = bytearray()
        self._size_bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        """Take all of the data.

        A part is sent when there is more, so that the last part is known as such.
        """
        self._unsent += data
        self._size_bytes += len(data)
        while len(self._unsent) > self._part_bytes:
            self._send(bytes(self._unsent[: self._part_bytes]))
            del self._unsent[: self._part_bytes]
        return len(data)

    def close(self) -> None:
        """Send the last part, if there are others."""
        if self._upload_id is not None:
            self._send(bytes(self._unsent))
            self._unsent.clear()
        self.closed = True

    def commit(self) -> None:
        """Make the object."""
        if self._upload_id is None:
            self._fs.call_s3("put_object", **self._at, Body=bytes(self._unsent))
            return
        parts = {"Parts": self._parts}
        upload = {"UploadId": self._upload_id, "MultipartUpload": parts}
        try:
            self._fs.call_s3("complete_multipart_upload", **self._at, **upload)
        except FileNotFoundError:
            # s3fs repeats a request after its answer was lost, and the upload has ended by then. Data keys
            # are used once: an object of our size is ours.
            if self._fs.info(self._path)["size"] != self._size_bytes:
                raise

    def discard(self) -> None:
        """Discard the parts."""
        self._unsent.clear()
        if self._upload_id is not None:
            self._fs.call_s3("abort_multipart_upload", **self._at, UploadId=self._upload_id)

    def _send(self, data: bytes) -> None:
        if self._upload_id is None:
            begun = self._fs.call_s3("create_multipart_upload", **self._at)
            self._upload_id = str(begun["UploadId"])
        number = {"UploadId": self._upload_id, "PartNumber": len(self._parts) + 1}
        sent = self._fs.call_s3("upload_part", **self._at, **number, Body=data)
        # If the user asks for checksums, those of the parts are sent again at the end.
        sums = {name: text for name, text in sent.items() if _CHECKSUM.fullmatch(name)}
        self._parts.append({"PartNumber": number["PartNumber"], "ETag": sent["ETag"], **sums})


def _at(fs: Any, path: str) -> dict[str, Any]:
    bucket, key, _ = fs.split_path(path)
    return {"Bucket": bucket, "Key": key}


def _pages(
    fs: Any, operation: str, wanted: Mapping[str, str], next_by: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield all pages of a listing.

    next_by: The members of the next request, each with the member of the page that it comes from.
    """
    wanted = dict(wanted)
    while True:
        page: dict[str, Any] = fs.call_s3(operation, **wanted)
        yield page
        if not page.get("IsTruncated"):
            return
        wanted |= {name: page[source] for name, source in next_by.items() if source in page}


def _age_s(page: Mapping[str, Any], began: Any) -> float:
    """Return the age of an upload by the server's clock.

    If the server does not send its time, the upload counts as new and is not aborted.
    """
    date = page["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    if not date:
        return 0.0
    return max(0.0, float((parsedate_to_datetime(date) - began).total_seconds()))


def _code(error: OSError) -> str:
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _dialect(options: S3Options) -> Dialect:
    return ANONYMOUS_S3 if options.client.get("anon") else S3


def _attributes(parameters: Mapping[str, Any]) -> dict[str, str]:
    found = {_ATTRIBUTES[name]: str(v) for name, v in parameters.items() if name in _ATTRIBUTES}
    return found | dict(parameters.get("Metadata", {}))
