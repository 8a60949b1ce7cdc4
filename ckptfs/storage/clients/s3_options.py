"""The storage options of S3: s3fs' vocabulary, checked here, the same for every S3 client.

    storage_options  (+ FSSPEC_S3_* of the environment, + key:secret@ of the URI)
          |  unknown or contradictory: UriError, before any request
          v
    S3Options     client       the arguments of s3fs.S3FileSystem (keys, profile, endpoint, config)
                  parameters   members that are added to every S3 request that has them: encryption,
                               ACL, storage class, tags, requester pays, bucket owner

``parameters`` are s3fs' ``s3_additional_kwargs``, checked against botocore's model of the service:
a name that no request has, one that ckptfs sets itself, or a value of the wrong type is an error.
If botocore is missing, obstore's client accepts the names that it knows itself.
Nothing here makes a request, and no value of an option is ever in an error's text.

``endpoint_name`` returns the name of the server before anything was sent to it:

    endpoint_url of the options  >  AWS_ENDPOINT_URL_S3  >  AWS_ENDPOINT_URL  >  the profile's
    services section  >  the profile's endpoint_url  >  "S3 in" the region  >  "S3"

Errors contain this name. It also keeps the probe results of two servers apart: two profiles may lead to two servers
that have buckets of the same name.

``resolve`` returns where obstore sends requests and with which credentials: endpoint, region, path or host style,
certificates, proxies, keys or a provider of credentials. If botocore is installed, all of this comes from it, so
that variables, profiles, SSO, roles and credential processes mean the same as for s3fs, and credentials are renewed
during a long save. Without it the options and AWS_ACCESS_KEY_ID, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL(_S3) and
AWS_CA_BUNDLE count, and obstore's own sources (web identity, container and instance metadata).

botocore takes 20 ms for that, more than the requests of most saves together. Its answer is kept as long as options,
variables and files are the same (``_ResolveKey``), or until credentials were refused (``forget_resolved``).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

from fsspec.config import apply_config

from ckptfs.errors import CredentialsError, UriError
from ckptfs.storage.clients.http_errors import clean, origin_of
from ckptfs.storage.options import parse_boolean
from ckptfs.uri import Uri

__all__ = [
    "OPERATIONS",
    "ResolvedEndpoint",
    "S3Options",
    "endpoint_name",
    "forget_resolved",
    "parse_s3_options",
    "resolve",
    "service_loader",
    "state_of",
]

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

# As botocore does: older and other stores have names that AWS does not permit any more.
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
# What aiobotocore adds to botocore's configuration.
_AIO_CONFIG: Final = ("connector_args", "http_session_cls", "warm_up_loader_caches")
_BOOLEANS: Final = ("anon", "use_ssl", "requester_pays", "cache_regions", "local_expiry_check")
_TEXTS: Final = ("endpoint_url", "key", "secret", "token", "username", "password", "profile")
_TABLES: Final = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
# s3fs' own streams and caches, which ckptfs does not use: these options change no byte and no
# header.
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
_KNOWN: Final = (*_TEXTS, *_BOOLEANS, *_TABLES, "session", *_WITHOUT_EFFECT)
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
# Given both in the option and in client_kwargs: botocore would get the argument twice.
_DUPLICATES: Final = {
    "endpoint_url": "endpoint_url",
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
# Members of requests that ckptfs fills in itself.
_RESERVED: Final = frozenset(
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
    """Checked options. They may hold credentials: never shown, pickled with the storage.

    client: The keyword arguments of ``s3fs.S3FileSystem``. parameters: Request members by name.
    etag_by_client: Reads send no If-Match, because the server (VAST) does not know it; the etag of
    the answer is compared.
    """

    client: Mapping[str, Any]
    parameters: Mapping[str, Any]
    etag_by_client: bool = False

    def __repr__(self) -> str:
        return f"S3Options({', '.join(sorted(self.client))}; {', '.join(sorted(self.parameters))})"

    @property
    def endpoint(self) -> str | None:
        """The endpoint in the options, or None."""
        found = self.client.get("endpoint_url") or self.table("client_kwargs").get("endpoint_url")
        return str(found) if found else None

    def table(self, name: str) -> Mapping[str, Any]:
        """Return one of the options that are dictionaries themselves."""
        return self.client.get(name) or {}


class _S3:
    protocol = ("s3", "s3a")


def parse_s3_options(uri: Uri, options: Mapping[str, Any]) -> S3Options:
    """Check the options; those of the environment have lower precedence.

    UriError names what is wrong.
    """
    if uri.authority.startswith("arn:"):
        raise UriError(
            "an ARN cannot be used as the name of a bucket",
            uri=uri,
            hint="use the access point's alias",
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
    for name in _BOOLEANS:
        if name in given:
            given[name] = parse_boolean(uri, name, given[name])
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
            "storage option endpoint_url is not an address",
            uri=uri,
            hint="http://host:port or https://",
        )


def _check_together(uri: Uri, given: Mapping[str, Any]) -> None:
    credentials = sorted(name for name in _CREDENTIALS if given.get(name))
    kwargs = given.get("client_kwargs", {})
    if given.get("anon") and credentials:
        raise UriError(f"anon=True and {credentials[0]} contradict each other", uri=uri)
    for name, twin in _DUPLICATES.items():
        if given.get(name) and kwargs.get(twin) and given[name] != kwargs[twin]:
            raise UriError(f"{name} and client_kwargs[{twin!r}] contradict each other", uri=uri)
    for one, other in (("key", "username"), ("secret", "password"), ("session", "profile")):
        if given.get(one) and given.get(other):
            raise UriError(f"{one} and {other} contradict each other", uri=uri)
    key = given.get("key") or given.get("username") or kwargs.get("aws_access_key_id")
    secret = given.get("secret") or given.get("password") or kwargs.get("aws_secret_access_key")
    if bool(key) != bool(secret):
        given_name, missing = ("key", "secret") if key else ("secret", "key")
        raise UriError(f"storage option {given_name} is given without {missing}", uri=uri)


def _check_parameters(uri: Uri, parameters: Mapping[str, Any]) -> None:
    from botocore.validate import ParamValidator

    members = _members()
    _refuse(
        uri,
        "s3_additional_kwargs key",
        parameters,
        sorted(set(members) - _RESERVED - _checksum_values()),
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
    """Return botocore's description of S3, read from disk only once.

    Reading it takes most of the time of opening a client.
    """
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
    # A checksum of all future bytes cannot be an option; the algorithm can.
    return {
        name
        for name in _members()
        if name.startswith("Checksum") and name not in ("ChecksumAlgorithm", "ChecksumMode")
    }


# -- the name of the server --------------------------------------------------------------


def endpoint_name(options: S3Options) -> str:
    """Return the configured scheme://host[:port], else "S3 in <region>" or "S3"."""
    configured, region = (
        _configured_botocore if find_spec("botocore") else _configured_environment
    )(options)
    endpoint = options.endpoint or configured
    if endpoint:
        return origin_of(endpoint)
    given = options.table("client_kwargs"), options.table("config_kwargs")
    region = next((str(t["region_name"]) for t in given if t.get("region_name")), region)
    return f"S3 in {region}" if region else "S3"


def _configured_environment(_: S3Options) -> tuple[str | None, str | None]:
    read = os.environ.get
    region = read("AWS_REGION") or read("AWS_DEFAULT_REGION")
    return read("AWS_ENDPOINT_URL_S3") or read("AWS_ENDPOINT_URL"), region


def _configured_botocore(options: S3Options) -> tuple[str | None, str | None]:
    import botocore.session
    from botocore.exceptions import BotoCoreError

    session = options.client.get("session")
    try:
        # Without handlers, which make requests and take five times as long as everything else.
        session = session or botocore.session.Session(
            include_builtin_handlers=False, profile=options.client.get("profile")
        )
        region = session.get_config_variable("region")
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None, region
        scoped = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(scoped.get("services"), {})
    except BotoCoreError:
        # No such profile, or a damaged file: the first request raises the error with its own text.
        return _configured_environment(options)
    endpoint = (
        _configured_environment(options)[0]
        or services.get("s3", {}).get("endpoint_url")
        or scoped.get("endpoint_url")
    )
    return endpoint, region


# -- where requests go -------------------------------------------------------------------

_AWS: Final = (".amazonaws.com", ".amazonaws.com.cn")
# botocore renews its credentials when they are asked for and close to their end.
_ASK_AGAIN: Final = timedelta(minutes=1)
_VARIABLES: Final = ("HOME", "USERPROFILE", "REQUESTS_CA_BUNDLE", "BOTO_CONFIG")
_FILES: Final = (
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("BOTO_CONFIG", "~/.boto"),
    ("", "/etc/boto.cfg"),
)

_FileState = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class ResolvedEndpoint:
    """Where requests go.

    config, client_options: For obstore's S3Store. provider: Called for credentials. is_aws: It is
    AWS itself, over https. chose_checksum, payload_signing: The user's choices. trusted: The file
    of certificates in client_options and its state. stores: obstore's stores that were made for
    this endpoint.
    """

    config: Mapping[str, Any]
    client_options: Mapping[str, Any]
    is_tls: bool
    is_aws: bool
    chose_checksum: bool
    payload_signing: bool | None
    provider: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    trusted: _FileState | None = None
    stores: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class _ResolveKey:
    """The arguments of ``resolve`` and everything else that its answer depends on.

    digest: A digest of all this, because options hold credentials.
    """

    digest: str
    options: S3Options = field(compare=False, repr=False)
    bucket: str = field(compare=False)

    @classmethod
    def of(cls, options: S3Options, bucket: str) -> _ResolveKey:
        """Make the key from the current variables and files."""
        names = [n for n in os.environ if n.startswith("AWS_") or n in _VARIABLES]
        variables = [(name, os.environ[name]) for name in sorted(names)]
        files = [state_of(Path(os.environ.get(name, path))) for name, path in _FILES]
        has_botocore = find_spec("botocore") is not None
        # A forked child resolves again: its parent may be in the middle of a refresh.
        all_ = (options, bucket, variables, files, has_botocore, os.getpid())
        try:
            digest = hashlib.sha256(pickle.dumps(all_)).hexdigest()
        except (pickle.PicklingError, TypeError, AttributeError):
            digest = uuid4().hex  # a class that was made inside a function: resolved each time
        return cls(digest, options, bucket)


def state_of(path: Path) -> _FileState | None:
    """Return the state of a file, which differs after each write, or None if there is no file."""
    try:
        found = path.expanduser().stat()
    except (OSError, RuntimeError):  # no home
        return None
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


def resolve(options: S3Options, bucket: str) -> ResolvedEndpoint:
    """Resolve options by variables and files, without network.

    CredentialsError: the profile does not exist.
    """
    resolve_key = _ResolveKey.of(options, bucket)
    resolved = _resolved(resolve_key)
    if resolved.trusted is not None and resolved.trusted != state_of(Path(resolved.trusted[0])):
        forget_resolved()  # the certificates were renewed: a long job would refuse the server's next one
        resolved = _resolved(resolve_key)
    return resolved


def forget_resolved() -> None:
    """Forget all answers of ``resolve``, because credentials were refused."""
    _resolved.cache_clear()


@lru_cache(maxsize=16)
def _resolved(resolve_key: _ResolveKey) -> ResolvedEndpoint:
    options, bucket = resolve_key.options, resolve_key.bucket
    found = (
        _resolve_with_botocore(options, bucket)
        if find_spec("botocore")
        else _resolve_with_environment(options)
    )
    config, verify, provider = found
    config |= _keys(options)
    host = urlsplit(config.get("endpoint", "https://s3.amazonaws.com")).hostname or ""
    s3 = options.table("config_kwargs").get("s3") or {}
    is_tls = config.get("endpoint", "https:").startswith("https:")
    trusted = state_of(Path(verify)) if isinstance(verify, str) else None  # before it is read
    return ResolvedEndpoint(
        config,
        _client_options(options, verify, allow_http=not is_tls),
        is_tls=is_tls,
        is_aws=is_tls and host.endswith(_AWS),
        chose_checksum="request_checksum_calculation" in options.table("config_kwargs")
        or "AWS_REQUEST_CHECKSUM_CALCULATION" in os.environ,
        payload_signing=s3.get("payload_signing_enabled"),
        provider=None if options.client.get("anon") or "access_key_id" in config else provider,
        trusted=trusted,
    )


def _keys(options: S3Options) -> dict[str, Any]:
    kwargs = options.table("client_kwargs")
    given = options.client
    found = {
        "access_key_id": given.get("key")
        or given.get("username")
        or kwargs.get("aws_access_key_id"),
        "secret_access_key": given.get("secret")
        or given.get("password")
        or kwargs.get("aws_secret_access_key"),
        "session_token": given.get("token") or kwargs.get("aws_session_token"),
    }
    return {name: value for name, value in found.items() if value}


def _client_options(options: S3Options, verify: Any, *, allow_http: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"allow_http": allow_http}
    if verify is False:
        found["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        try:
            with open(verify, "rb") as file:
                found["root_certificate"] = file.read()
        except OSError as error:
            raise UriError(
                f"the certificates in {verify} cannot be read: {error.strerror}"
            ) from None
    config = options.table("config_kwargs")
    if proxies := config.get("proxies"):
        found["proxy_url"] = proxies.get("https") or proxies.get("http")
    for name in ("connect_timeout", "read_timeout"):
        if name in config:
            found[name] = f"{round(float(config[name]) * 1000)}ms"
    return found


# -- with botocore ---------------------------------------------------------------------


def _resolve_with_botocore(
    options: S3Options, bucket: str
) -> tuple[dict[str, Any], Any, Callable[[], dict[str, Any]] | None]:
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    kwargs = dict(options.table("client_kwargs"))
    given = dict(options.table("config_kwargs"))
    shape = {name: given[name] for name in ("s3", "region_name") if name in given}
    endpoint = options.client.get("endpoint_url") or kwargs.get("endpoint_url")
    try:
        session = botocore.session.Session(profile=options.client.get("profile"))
        session.register_component("data_loader", service_loader())
        # Unsigned: a client that only returns addresses must not look for credentials.
        client = session.create_client(
            "s3",
            region_name=kwargs.get("region_name"),
            use_ssl=kwargs.get("use_ssl", options.client.get("use_ssl", True)),
            verify=kwargs.get("verify"),
            endpoint_url=endpoint,
            config=Config(**shape, signature_version=UNSIGNED),
        )
        url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
        verify = kwargs.get("verify")
        if verify is None:
            verify = session.get_config_variable("ca_bundle")
    except (BotoCoreError, ValueError) as error:
        failure = CredentialsError(
            f"the configuration of AWS cannot be used: {clean(str(error))}",
            hint="check AWS_PROFILE, AWS_CONFIG_FILE and the files that they name",
        )
    else:
        region = client.meta.region_name
        config = _addressed(client.meta.endpoint_url, url, bucket) | {"region": _region(region)}
        ca_file = verify or os.environ.get("REQUESTS_CA_BUNDLE")
        return config, ca_file, _Credentials(session)
    raise failure


def _region(name: str) -> str:
    return "us-east-1" if name == "aws-global" else name


def _addressed(endpoint: str, url: str, bucket: str) -> dict[str, Any]:
    """Return the endpoint as obstore wants it.

    It contains the bucket if URLs of objects have the bucket in their host.
    """
    in_path = f"/{bucket}/" in urlsplit(url).path
    if in_path:
        return {"endpoint": endpoint.rstrip("/"), "virtual_hosted_style_request": False}
    scheme, _, authority = endpoint.rstrip("/").partition("://")
    return {"endpoint": f"{scheme}://{bucket}.{authority}", "virtual_hosted_style_request": True}


class _Credentials:
    """Called by obstore when it needs credentials; botocore finds and renews them."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self) -> dict[str, Any]:
        found = self._session.get_credentials()
        if found is None:
            raise CredentialsError("no credentials were found")
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _ASK_AGAIN,
        }


# -- without ---------------------------------------------------------------------------


def _resolve_with_environment(
    options: S3Options,
) -> tuple[dict[str, Any], Any, Callable[[], dict[str, Any]] | None]:
    kwargs = options.table("client_kwargs")
    region = (
        kwargs.get("region_name")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or "us-east-1"
    )
    config: dict[str, Any] = {"region": region}
    endpoint = (
        options.endpoint
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    style = (options.table("config_kwargs").get("s3") or {}).get("addressing_style", "path")
    if endpoint:
        config["endpoint"] = endpoint
    else:
        config["virtual_hosted_style_request"] = style != "path"
    return config, kwargs.get("verify") or os.environ.get("AWS_CA_BUNDLE"), None
