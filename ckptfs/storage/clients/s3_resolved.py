"""Where S3 requests go and who signs them, told for a client that is not botocore's.

    resolve(options, bucket) -> Place     endpoint, region, path or host style, certificates, proxies,
                                          keys or a provider of credentials

With botocore installed everything is asked of botocore itself, so that variables, profiles, SSO,
roles and credential processes mean the same as for s3fs: the endpoint and style are those of a URL
that it would use, and credentials are refreshed by it during a long save. Without it: the options and
AWS_ACCESS_KEY_ID, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL(_S3), AWS_CA_BUNDLE, and obstore's own sources
(web identity, container and instance metadata).

botocore takes 20 ms to tell, more than most saves' requests do together. What it told is kept for as long
as options, variables and files say the same (``_Asking``), or until what came of it was refused (``forget``).
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

from ckptfs.errors import CredentialsError, UriError
from ckptfs.storage.clients.failures import clean
from ckptfs.storage.clients.s3_options import S3Options, service_loader

__all__ = ["Place", "forget", "resolve", "state_of"]

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
class Place:
    """config and client_options: for obstore's S3Store. provider: called for credentials.

    is_aws: AWS itself, over https. chose_checksum, payload_signing: what the user said of them.
    trusted: the file of certificates in client_options, as it was. stores: of obstore, made for this place.
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
class _Asking:
    """A question and all that its answer depends on. told: a digest, for options hold credentials."""

    told: str
    options: S3Options = field(compare=False, repr=False)
    bucket: str = field(compare=False)

    @classmethod
    def of(cls, options: S3Options, bucket: str) -> _Asking:
        """As variables and files are now."""
        names = [n for n in os.environ if n.startswith("AWS_") or n in _VARIABLES]
        variables = [(name, os.environ[name]) for name in sorted(names)]
        files = [state_of(Path(os.environ.get(name, path))) for name, path in _FILES]
        has_botocore = find_spec("botocore") is not None
        # A fork's child asks for itself: its parent may be in the middle of a refresh.
        all_ = (options, bucket, variables, files, has_botocore, os.getpid())
        try:
            told = hashlib.sha256(pickle.dumps(all_)).hexdigest()
        except (pickle.PicklingError, TypeError, AttributeError):
            told = uuid4().hex  # a class that somebody made inside a function: asked each time
        return cls(told, options, bucket)


def state_of(path: Path) -> _FileState | None:
    """Another one where the file was written since; None: there is none."""
    try:
        found = path.expanduser().stat()
    except (OSError, RuntimeError):  # no home
        return None
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns


def resolve(options: S3Options, bucket: str) -> Place:
    """Read variables and files, no network. CredentialsError: the profile does not exist."""
    asking = _Asking.of(options, bucket)
    place = _resolved(asking)
    if place.trusted is not None and place.trusted != state_of(Path(place.trusted[0])):
        forget()  # somebody renewed the certificates: a job of weeks would refuse the server's next one
        place = _resolved(asking)
    return place


def forget() -> None:
    """Whoever asks next gets an answer of then: credentials were refused."""
    _resolved.cache_clear()


@lru_cache(maxsize=16)
def _resolved(asking: _Asking) -> Place:
    options, bucket = asking.options, asking.bucket
    found = (
        _asked_botocore(options, bucket) if find_spec("botocore") else _asked_environment(options)
    )
    config, verify, provider = found
    config |= _keys(options)
    host = urlsplit(config.get("endpoint", "https://s3.amazonaws.com")).hostname or ""
    s3 = options.table("config_kwargs").get("s3") or {}
    is_tls = config.get("endpoint", "https:").startswith("https:")
    trusted = state_of(Path(verify)) if isinstance(verify, str) else None  # before it is read
    return Place(
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
    said = options.client
    found = {
        "access_key_id": said.get("key") or said.get("username") or kwargs.get("aws_access_key_id"),
        "secret_access_key": said.get("secret")
        or said.get("password")
        or kwargs.get("aws_secret_access_key"),
        "session_token": said.get("token") or kwargs.get("aws_session_token"),
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


def _asked_botocore(
    options: S3Options, bucket: str
) -> tuple[dict[str, Any], Any, Callable[[], dict[str, Any]] | None]:
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    kwargs = dict(options.table("client_kwargs"))
    said = dict(options.table("config_kwargs"))
    shape = {name: said[name] for name in ("s3", "region_name") if name in said}
    endpoint = options.client.get("endpoint_url") or kwargs.get("endpoint_url")
    try:
        session = botocore.session.Session(profile=options.client.get("profile"))
        session.register_component("data_loader", service_loader())
        # Unsigned: a client that only tells addresses must not look for credentials.
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
    """obstore wants the bucket in the endpoint where a URL of an object has it in its host."""
    in_path = f"/{bucket}/" in urlsplit(url).path
    if in_path:
        return {"endpoint": endpoint.rstrip("/"), "virtual_hosted_style_request": False}
    scheme, _, rest = endpoint.rstrip("/").partition("://")
    return {"endpoint": f"{scheme}://{bucket}.{rest}", "virtual_hosted_style_request": True}


class _Credentials:
    """What obstore calls when it needs credentials; botocore finds and renews them."""

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


def _asked_environment(
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
