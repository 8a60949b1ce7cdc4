"""What a user may say about S3: s3fs' vocabulary, checked here, the same for every S3 client.

    storage_options  (+ FSSPEC_S3_* of the environment, + key:secret@ of the URI)
          |  unknown or contradictory: UriError, before any request
          v
    S3Options     client       what s3fs.S3FileSystem is made with (keys, profile, endpoint, config)
                  parameters   members of the S3 requests that every request which knows them carries:
                               encryption, ACL, storage class, tags, requester pays, bucket owner

``parameters`` are s3fs' ``s3_additional_kwargs``, checked against botocore's model of the service:
a name that no request has, one that ckptfs sets itself, or a value of the wrong type is an error.
Where botocore is missing, obstore's client takes the names that it knows itself.
Nothing here talks to a server, and no value of an option is ever in an error's text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import urlsplit

from fsspec.config import apply_config

from ckptfs.errors import UriError
from ckptfs.uri import Uri

__all__ = ["OPERATIONS", "S3Options", "bare", "parse_s3_options", "service_loader"]

# The requests that ckptfs makes. Nothing else is ever sent.
OPERATIONS: Final = (
    "GetObject",
    "HeadObject",
    "PutObject",
    "ListObjectsV2",
    "DeleteObject",
    "DeleteObjects",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "AbortMultipartUpload",
    "ListMultipartUploads",
    "ListParts",
    "ListObjectVersions",
    # `ckptfs doctor` alone:
    "GetBucketVersioning",
    "GetObjectLockConfiguration",
    "GetBucketLifecycleConfiguration",
)

# As botocore: older and other stores have names that AWS gives nobody any more.
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
# What aiobotocore adds to botocore's configuration.
_AIO_CONFIG: Final = ("connector_args", "http_session_cls", "warm_up_loader_caches")
_SWITCHES: Final = ("anon", "use_ssl", "requester_pays", "cache_regions", "local_expiry_check")
_TEXTS: Final = ("endpoint_url", "key", "secret", "token", "username", "password", "profile")
_TABLES: Final = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
# s3fs' own streams and caches, which ckptfs does not use: they change no byte and no header.
_WITHOUT_EFFECT: Final = (
    "default_block_size",
    "default_fill_cache",
    "default_cache_type",
    "version_aware",
    "max_concurrency",
    "fixed_upload_size",
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
)
_KNOWN: Final = (*_TEXTS, *_SWITCHES, *_TABLES, "session", *_WITHOUT_EFFECT)
_CLIENT_KWARGS: Final = (
    "region_name",
    "api_version",
    "use_ssl",
    "verify",
    "endpoint_url",
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "aws_account_id",
)
_CREDENTIALS: Final = ("key", "secret", "token", "username", "password", "profile")
# Said both in the option and in client_kwargs: botocore would get the argument twice.
_TWINS: Final = {
    "endpoint_url": "endpoint_url",
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
# Members of requests that ckptfs fills in itself.
_OURS: Final = frozenset(
    (
        "Bucket", "Key", "Body", "Range", "Delete", "MultipartUpload", "UploadId", "PartNumber",
        "Prefix", "Delimiter", "ContinuationToken", "StartAfter", "MaxKeys", "EncodingType",
        "FetchOwner", "OptionalObjectAttributes", "KeyMarker", "UploadIdMarker", "MaxUploads",
        "VersionIdMarker", "VersionId", "ContentLength", "ContentMD5", "IfMatch", "IfNoneMatch",
        "IfModifiedSince", "IfUnmodifiedSince", "IfMatchInitiatedTime", "IfMatchLastModifiedTime",
        "IfMatchSize", "MpuObjectSize", "WriteOffsetBytes", "ChecksumType",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class S3Options:
    """Checked options. May hold credentials: never shown, pickled with the storage.

    client: keyword arguments of ``s3fs.S3FileSystem``; parameters: request members by name;
    etag_by_client: no If-Match on reads (VAST does not know it): the answer's etag is compared.
    """

    client: Mapping[str, Any]
    parameters: Mapping[str, Any]
    etag_by_client: bool = False

    def __repr__(self) -> str:
        return f"S3Options({', '.join(sorted(self.client))}; {', '.join(sorted(self.parameters))})"

    @property
    def endpoint(self) -> str | None:
        """The endpoint that the options name, if they do."""
        found = self.client.get("endpoint_url") or self.table("client_kwargs").get("endpoint_url")
        return str(found) if found else None

    def table(self, name: str) -> Mapping[str, Any]:
        """One of the options that are dictionaries themselves."""
        return self.client.get(name) or {}


def bare(endpoint: str) -> str:
    """scheme://host[:port] of an endpoint, whatever else stands in it."""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


class _S3:
    protocol = ("s3", "s3a")


def parse_s3_options(uri: Uri, options: Mapping[str, Any]) -> S3Options:
    """The options, with those of the environment below them. UriError names what is wrong."""
    if uri.authority.startswith("arn:"):
        raise UriError(
            "an ARN is no bucket name here", uri=uri, hint="use the access point's alias"
        )
    if not _BUCKET.fullmatch(uri.authority):
        raise UriError(
            f"{uri.authority!r} cannot be the name of a bucket",
            uri=uri,
            hint="3 to 63 small letters, digits, dots and hyphens",
        )
    given: dict[str, Any] = dict(apply_config(_S3, _from_userinfo(uri) | dict(options)))
    given = {name: value for name, value in given.items() if value is not None}
    _refuse_unknown(uri, given)
    for name in _SWITCHES:
        if name in given:
            given[name] = _switch(uri, name, given[name])
    _check_shapes(uri, given)
    _check_together(uri, given)
    parameters = dict(given.pop("s3_additional_kwargs", {}))
    if given.pop("requester_pays", False):
        parameters.setdefault("RequestPayer", "requester")
    by_client = bool(given.pop("local_expiry_check", False))
    for name in _WITHOUT_EFFECT:
        given.pop(name, None)
    if parameters and find_spec("botocore"):
        _check_parameters(uri, parameters)
    return S3Options(given, parameters, by_client)


def _from_userinfo(uri: Uri) -> dict[str, Any]:
    key, _, secret = uri.userinfo.partition(":")
    return {"key": key, "secret": secret} if key else {}


def _refuse_unknown(uri: Uri, given: Mapping[str, Any]) -> None:
    _refuse(uri, "storage option", given, _KNOWN)
    _refuse(uri, "client_kwargs key", _mapping(uri, given, "client_kwargs"), _CLIENT_KWARGS)


def _refuse(uri: Uri, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UriError(
            f"s3:// knows no {what} {unknown[0]!r}", uri=uri, hint=f"it knows {', '.join(known)}"
        )


def _mapping(uri: Uri, given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = given.get(name, {})
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise UriError(f"storage option {name} takes a dictionary", uri=uri)
    return found


def _switch(uri: Uri, name: str, value: object) -> bool:
    # A URI's query is text, and "false" must not mean yes.
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    found = known.get(str(value).lower())
    if found is None:
        raise UriError(f"storage option {name} takes true or false", uri=uri)
    return found


def _check_shapes(uri: Uri, given: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        if not isinstance(given.get(name, ""), str):
            raise UriError(f"storage option {name} takes a text", uri=uri)
    config = _mapping(uri, given, "config_kwargs")
    _mapping(uri, given, "s3_additional_kwargs")
    if config and find_spec("botocore"):
        # botocore's own check of names and values, at once rather than at the first request.
        from botocore.config import Config

        try:
            Config(**{name: value for name, value in config.items() if name not in _AIO_CONFIG})
        except Exception as error:  # noqa: BLE001 - whatever it says, it is the option
            name = next((key for key in config if key in str(error)), "")
            raise UriError(
                f"botocore does not take config_kwargs {name or sorted(config)}", uri=uri
            ) from None
    endpoint = given.get("endpoint_url") or _mapping(uri, given, "client_kwargs").get(
        "endpoint_url"
    )
    parts = urlsplit(endpoint) if isinstance(endpoint, str) else None
    if parts is not None and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise UriError(
            "storage option endpoint_url is no address",
            uri=uri,
            hint="http://host:port or https://",
        )


def _check_together(uri: Uri, given: Mapping[str, Any]) -> None:
    held = sorted(name for name in _CREDENTIALS if given.get(name))
    kwargs = given.get("client_kwargs", {})
    if given.get("anon") and held:
        raise UriError(f"anon=True and {held[0]} contradict each other", uri=uri)
    for name, twin in _TWINS.items():
        if given.get(name) and kwargs.get(twin) and given[name] != kwargs[twin]:
            raise UriError(f"{name} and client_kwargs[{twin!r}] contradict each other", uri=uri)
    for one, other in (("key", "username"), ("secret", "password"), ("session", "profile")):
        if given.get(one) and given.get(other):
            raise UriError(f"{one} and {other} contradict each other", uri=uri)
    key = given.get("key") or given.get("username") or kwargs.get("aws_access_key_id")
    secret = given.get("secret") or given.get("password") or kwargs.get("aws_secret_access_key")
    if bool(key) != bool(secret):
        there, missing = ("key", "secret") if key else ("secret", "key")
        raise UriError(f"storage option {there} is given without {missing}", uri=uri)


def _check_parameters(uri: Uri, parameters: Mapping[str, Any]) -> None:
    from botocore.validate import ParamValidator

    members = _members()
    _refuse(
        uri,
        "s3_additional_kwargs key",
        parameters,
        sorted(set(members) - _OURS - _checksum_values()),
    )
    for name, given in parameters.items():
        # The raw bytes of a key: botocore encodes them as base64 itself.
        value = "" if name == "SSECustomerKey" and isinstance(given, bytes) else given
        if ParamValidator().validate(value, members[name]).has_errors():
            raise UriError(
                f"s3_additional_kwargs[{name!r}] takes a {members[name].type_name}", uri=uri
            )


@lru_cache(maxsize=1)
def service_loader() -> Any:
    """botocore's description of S3, read from disk once: it is most of what opening a client costs."""
    import botocore.loaders

    return botocore.loaders.create_loader(os.environ.get("AWS_DATA_PATH"))


@lru_cache(maxsize=1)
def _members() -> Mapping[str, Any]:
    from botocore.model import ServiceModel

    model = ServiceModel(service_loader().load_service_model("s3", "service-2"), "s3")
    found: dict[str, Any] = {}
    for name in OPERATIONS:
        found |= dict(model.operation_model(name).input_shape.members)
    return found


def _checksum_values() -> set[str]:
    # A checksum of all bytes to come cannot be an option; the algorithm can.
    return {
        name
        for name in _members()
        if name.startswith("Checksum") and name not in ("ChecksumAlgorithm", "ChecksumMode")
    }
