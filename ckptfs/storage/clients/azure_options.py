"""The options of an Azure URI, with the same meaning for both clients: endpoint, login, settings.

    options + environment + URI  -->  Account(endpoint, container, login, stored, key headers)

    connection_string                       wins over every other, as in adlfs
    credential | account_key                a token, a key or a SAS; the key as text
    sas_token
    client_id + client_secret + tenant_id   a service principal
    (none, anon not asked for)              DefaultAzureCredential: environment, workload or managed
                                            identity, az login
    anon=True                               nothing is signed: public containers

The names are those of adlfs, with its environment variables AZURE_STORAGE_*. Nothing here uses the network.
The settings of every stored object have the names of the Azure SDK: encryption_scope, cpk,
standard_blob_tier, tags, metadata, content_settings. An unknown name is a UriError; so are two that
contradict each other, above all two accounts.

There are six logins. They have the same precedence as in adlfs, and none of them shows its secret in a repr:

    SharedKey   the account's key            Token      an object with get_token (azure.identity)
    Sas         a shared access signature    Principal  an application and its secret
    Default     the login of this machine    Anonymous  no login: public containers
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from ckptfs.errors import MissingDriverError, UriError
from ckptfs.storage.options import Times, parse_boolean
from ckptfs.uri import Uri

__all__ = [
    "DEFAULT_ARGUMENTS",
    "PUBLIC",
    "SCOPE",
    "Account",
    "Anonymous",
    "AsyncToken",
    "Default",
    "Login",
    "Principal",
    "Sas",
    "SharedKey",
    "Token",
    "connected",
    "identity_of",
    "login_of",
    "need_identity",
    "resolve",
]

PUBLIC: Final = "core.windows.net"
DEFAULT_ARGUMENTS: Final = (
    "authority",
    "managed_identity_client_id",
    "workload_identity_client_id",
    "workload_identity_tenant_id",
    "process_timeout",
)
# The emulator's account, which Microsoft publishes: it protects nothing.
_EMULATOR: Final = {
    "blobendpoint": "http://127.0.0.1:10000/devstoreaccount1",
    "accountname": "devstoreaccount1",
    "accountkey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}


@dataclass(frozen=True, slots=True)
class SharedKey:
    """The account's key: signs every request, may do everything."""

    account: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sas:
    """A shared access signature: a query string, or an AzureSasCredential that is renewed outside."""

    token: Any = field(repr=False)

    @property
    def text(self) -> str:
        """The current query string, without its question mark."""
        return str(getattr(self.token, "signature", self.token)).lstrip("?")


@dataclass(frozen=True, slots=True)
class Token:
    """A credential object of azure.identity, or any with a ``get_token`` (also an async one)."""

    credential: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class Principal:
    """A service principal: an application that logs in by a secret."""

    tenant: str
    client: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Default:
    """The login of this machine or person: azure.identity's DefaultAzureCredential."""

    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Anonymous:
    """No login: nothing is signed."""


Login = SharedKey | Sas | Token | Principal | Default | Anonymous


def connected(uri: Uri, text: str) -> tuple[str, str, Login]:
    """Return endpoint, account and login of a connection string. No error repeats its text."""
    pairs = [pair.split("=", 1) for pair in text.strip().rstrip(";").split(";")]
    if any(len(pair) != 2 for pair in pairs):  # noqa: PLR2004 - a name and a value
        raise UriError("connection_string is not a list of name=value, joined by ';'", uri=uri)
    parts = {name.strip().lower(): value.strip() for name, value in pairs}
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        parts = _EMULATOR | parts
    name = parts.get("accountname", "")
    endpoint = parts.get("blobendpoint", "")
    if not endpoint:
        if not name:
            raise UriError("connection_string has neither AccountName nor BlobEndpoint", uri=uri)
        scheme = parts.get("defaultendpointsprotocol", "https")
        endpoint = f"{scheme}://{name}.blob.{parts.get('endpointsuffix', PUBLIC)}"
    endpoint, _, query = endpoint.partition("?")
    endpoint = endpoint.rstrip("/")
    name = name or endpoint.partition("://")[2].partition(".")[0]
    sas = query or parts.get("sharedaccesssignature", "")
    if key := parts.get("accountkey"):
        return endpoint, name, _shared_key(uri, name, key, "AccountKey of connection_string")
    return endpoint, name, Sas(sas) if sas else Anonymous()


def login_of(uri: Uri, name: str, given: Mapping[str, Any], env: Mapping[str, str]) -> Login:
    """Return the login if there is no connection string. UriError: the login is incomplete."""

    def of(option: str) -> Any:
        return given.get(option) or env.get(f"AZURE_STORAGE_{option.upper()}")

    if (credential := given.get("credential")) is not None:
        return _credential(uri, name, credential)
    if key := of("account_key"):
        return _shared_key(uri, name, str(key), "account_key")
    if sas := of("sas_token"):
        return Sas(str(sas).lstrip("?"))
    if client := of("client_id"):
        tenant, secret = of("tenant_id"), of("client_secret")
        if not tenant or not secret:
            missing = "client_secret" if tenant else "tenant_id"
            raise UriError(f"client_id without {missing}", uri=uri, hint=f"give {missing} too")
        return Principal(str(tenant), str(client), str(secret))
    # As adlfs reads it: everything that is not clearly false is true.
    anon = given.get("anon", env.get("AZURE_STORAGE_ANON", "false"))
    if str(anon).lower() not in ("false", "0", "f", ""):
        return Anonymous()
    return Default(
        {
            argument: value
            for argument, value in given.items()
            if argument in DEFAULT_ARGUMENTS or argument.startswith("exclude_")
        }
    )


def _credential(uri: Uri, name: str, credential: Any) -> Login:
    if hasattr(credential, "get_token"):
        return Token(credential)
    if isinstance(credential, str):
        is_sas = "sig" in parse_qs(credential.lstrip("?"))
        return (
            Sas(credential.lstrip("?"))
            if is_sas
            else _shared_key(uri, name, credential, "credential")
        )
    if isinstance(credential, Mapping) and {"account_name", "account_key"} <= set(credential):
        return _shared_key(
            uri, str(credential["account_name"]), str(credential["account_key"]), "credential"
        )
    if (named := getattr(credential, "named_key", None)) is not None:
        return _shared_key(uri, str(named.name), str(named.key), "credential")
    if hasattr(credential, "signature"):
        return Sas(credential)
    raise UriError(
        f"credential={type(credential).__name__}: not one of azure.identity or azure.core",
        uri=uri,
        hint="pass an object with get_token, an AzureSasCredential, a key or a SAS token",
    )


def _shared_key(uri: Uri, name: str, key: str, option: str) -> SharedKey:
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        # From None: the library's message could quote the key.
        raise UriError(f"{option} is not base64", uri=uri, hint="copy the whole key") from None
    if not name:
        raise UriError(f"{option} without account_name", uri=uri, hint="pass account_name too")
    return SharedKey(name, key)


# -- tokens ------------------------------------------------------------------------------

SCOPE: Final = "https://storage.azure.com/.default"


def identity_of(login: Login) -> Any:
    """Return an object with a ``get_token(SCOPE)`` that can be called in this thread."""
    if isinstance(login, Token):
        credential = login.credential
        asynchronous = inspect.iscoroutinefunction(credential.get_token)
        return _Waiting(credential) if asynchronous else credential
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    match login:
        case Principal(tenant, client, secret):
            return ClientSecretCredential(tenant, client, secret)
        case Default(arguments):
            return DefaultAzureCredential(**arguments)
        case _:
            raise TypeError(f"{type(login).__name__} gives no tokens")


def need_identity(uri: Uri) -> None:
    """Raise MissingDriverError if azure.identity is missing. It does not come with obstore."""
    if find_spec("azure") is None or find_spec("azure.identity") is None:
        raise MissingDriverError(
            "azure-identity, which gives tokens for az://, is not installed",
            uri=uri,
            hint="pip install 'ckptfs[azure]', or pass account_key, sas_token or connection_string",
        )


class AsyncToken:
    """A credential object of either kind, in the asynchronous form that adlfs takes."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(self._credential.get_token):
            return await self._credential.get_token(*scopes, **arguments)
        return await asyncio.to_thread(self._credential.get_token, *scopes, **arguments)

    async def close(self) -> None:
        """Do nothing: the object belongs to the caller."""


class _Waiting:
    """An asynchronous credential, as adlfs takes it, used synchronously on fsspec's event loop."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    def get_token(self, *scopes: str, **arguments: Any) -> Any:
        from fsspec.asyn import get_loop, sync

        return sync(get_loop(), self._credential.get_token, *scopes, **arguments)


# -- options -----------------------------------------------------------------------------

_WHO: Final = (
    "account_name", "account_key", "account_host", "connection_string", "sas_token", "credential",
    "client_id", "client_secret", "tenant_id", "anon", "location_mode",
)  # fmt: skip
_STORED: Final = (
    "encryption_scope", "cpk", "standard_blob_tier", "tags", "metadata", "content_settings",
    "validate_content",
)  # fmt: skip
_TIMES: Final = ("connection_timeout", "read_timeout")
# Options for adlfs's own caches and file objects. They are accepted and ignored, because the same
# dictionary of options may be used for pandas (concurrency and part_size_bytes are ours).
_OF_ADLFS_ALONE: Final = (
    "blocksize", "max_concurrency", "default_fill_cache", "default_cache_type", "asynchronous",
    "loop", "request_session", "socket_timeout", "timeout", "assume_container_exists",
    "version_aware", "use_listings_cache", "listings_expiry_time", "max_paths",
    "skip_instance_cache",
)  # fmt: skip
_KNOWN: Final = frozenset((*_WHO, *_STORED, *_TIMES, *_OF_ADLFS_ALONE, *DEFAULT_ARGUMENTS))
_TIERS: Final = {"hot": "Hot", "cool": "Cool", "cold": "Cold"}
_CONTENT: Final = {
    "content_type": "x-ms-blob-content-type",
    "content_encoding": "x-ms-blob-content-encoding",
    "content_language": "x-ms-blob-content-language",
    "content_disposition": "x-ms-blob-content-disposition",
    "cache_control": "x-ms-blob-cache-control",
}
_HOST: Final = re.compile(r"([a-z0-9-]+)\.(?:dfs|blob)\.(.+)")


@dataclass(frozen=True, slots=True)
class Account:
    """One container of one account, with its login and its settings.

    endpoint: scheme://host[/account], without a query. times: connection_timeout and read_timeout,
    if given. stored: Headers of every request that stores an object. encryption_key: The customer's
    key, for reading too. md5: Whether to send one with all data; None: if the client can.
    """

    endpoint: str
    name: str
    container: str
    login: Login
    times: Times
    stored: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)
    encryption_key: str | None = field(default=None, repr=False)
    md5: bool | None = None

    def storing(self) -> dict[str, str]:
        """Return the headers of every PUT of an object and every commit of one."""
        found = dict(self.stored)
        found |= {_CONTENT[name]: value for name, value in self.content.items()}
        found |= {f"x-ms-meta-{name}": value for name, value in self.metadata.items()}
        if self.tags:
            found["x-ms-tags"] = urlencode(self.tags)
        return found

    def key_headers(self) -> dict[str, str]:
        """Return the headers of the customer's key, for requests that touch an object's bytes."""
        if self.encryption_key is None:
            return {}
        digest = hashlib.sha256(base64.b64decode(self.encryption_key)).digest()
        return {
            "x-ms-encryption-key": self.encryption_key,
            "x-ms-encryption-key-sha256": base64.b64encode(digest).decode(),
            "x-ms-encryption-algorithm": "AES256",
        }


def resolve(
    uri: Uri,
    options: Mapping[str, Any],
    times: Times,
    environ: Mapping[str, str] | None = None,
) -> Account:
    """Parse an Azure URI with its options. No I/O. UriError names the option that is wrong."""
    env = os.environ if environ is None else environ
    given = {name: value for name, value in options.items() if value is not None}
    _refuse_unknown(uri, given)
    container, named, host = _location(uri)
    requested = given.get("account_name")
    if named and requested and named != requested:
        raise _clash(uri, f"account_name={requested!r}", f"the URI names account {named!r}")
    name = named or requested or env.get("AZURE_STORAGE_ACCOUNT_NAME") or ""
    connection = given.get("connection_string") or env.get("AZURE_STORAGE_CONNECTION_STRING")
    if connection:
        endpoint, found, login = connected(uri, str(connection))
        if (named or requested) and found != (named or requested):
            raise _clash(
                uri,
                f"the connection string is for {found!r}",
                f"{named or requested!r} was asked for",
            )
        name = found
    else:
        endpoint = _endpoint(uri, name, given.get("account_host") or host, given)
        login = login_of(uri, name, given, env)
    if isinstance(login, Token | Principal | Default) and not endpoint.startswith("https://"):
        raise UriError(
            f"{endpoint} is not https, and a token is sent over nothing else",
            uri=uri,
            hint="pass account_key or a SAS for an emulator",
        )
    return Account(
        endpoint=endpoint,
        name=name,
        container=container,
        login=login,
        times=Times(
            float(given.get("connection_timeout", times.connect_s)),
            float(given.get("read_timeout", times.request_s)),
        ),
        stored=_stored(uri, given),
        tags=_texts(uri, given, "tags"),
        metadata=_texts(uri, given, "metadata"),
        content=_content(uri, given),
        encryption_key=_encryption_key(uri, given.get("cpk")),
        md5=parse_boolean(uri, "validate_content", given["validate_content"])
        if "validate_content" in given
        else None,
    )


# -- where -----------------------------------------------------------------------------


def _refuse_unknown(uri: Uri, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _KNOWN and not re.fullmatch(r"exclude_\w+_credential", name):
            known = ", ".join(sorted((*_WHO, *_STORED)))
            raise UriError(
                f"no storage option {name!r} for Azure", uri=uri, hint=f"known are: {known}"
            )
    if parse_boolean(uri, "version_aware", given.get("version_aware", False)):
        raise UriError(
            "version_aware: ckptfs reads current versions only", uri=uri, hint="leave it out"
        )


def _location(uri: Uri) -> tuple[str, str, str]:
    """Return container, account and blob host of a URI.

    It is az://container/... or abfss://container@host/...
    """
    if not uri.userinfo:
        if _HOST.fullmatch(uri.authority):
            raise UriError(
                "the URI names an account but no container",
                uri=uri,
                hint=f"write {uri.protocol}://container@{uri.authority}/path",
            )
        return uri.authority, "", ""
    found = _HOST.fullmatch(uri.authority)
    if found is None or ":" in uri.userinfo:
        raise UriError(
            "not an Azure URI",
            uri=uri,
            hint="write az://container/path or abfss://container@account.dfs.core.windows.net/path",
        )
    return uri.userinfo, found[1], f"{found[1]}.blob.{found[2]}"


def _endpoint(uri: Uri, name: str, host: str, given: Mapping[str, Any]) -> str:
    if not name and not host:
        raise UriError(
            "the Azure account is not known",
            uri=uri,
            hint="pass account_name or connection_string, or set AZURE_STORAGE_ACCOUNT_NAME",
        )
    mode = given.get("location_mode", "primary")
    if mode not in ("primary", "secondary"):
        raise UriError(f"location_mode={mode!r}: it takes 'primary' or 'secondary'", uri=uri)
    host = host or f"{name}.blob.{PUBLIC}"
    if mode == "secondary":
        account, dot, domain = host.partition(".")
        host = f"{account}-secondary{dot}{domain}"
    return f"https://{host.rstrip('/')}"


# -- what is stored --------------------------------------------------------------------


def _stored(uri: Uri, given: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    if scope := given.get("encryption_scope"):
        if given.get("cpk") is not None:
            raise _clash(uri, "encryption_scope", "cpk is given too, and a blob has one of them")
        found["x-ms-encryption-scope"] = str(scope)
    if tier := given.get("standard_blob_tier"):
        name = str(getattr(tier, "value", tier))
        if name.lower() not in _TIERS:
            raise UriError(
                f"standard_blob_tier={name!r}: it takes 'Hot', 'Cool' or 'Cold'",
                uri=uri,
                hint="an archived blob cannot be read, and a run reads its own log",
            )
        found["x-ms-access-tier"] = _TIERS[name.lower()]
    return found


def _content(uri: Uri, given: Mapping[str, Any]) -> dict[str, str]:
    settings = given.get("content_settings")
    if settings is not None and not isinstance(settings, Mapping):
        settings = {n: v for n in _CONTENT if (v := getattr(settings, n, None)) is not None}
    for name in settings or {}:
        if name not in _CONTENT:
            raise UriError(
                f"content_settings has {name!r}", uri=uri, hint=f"it takes {', '.join(_CONTENT)}"
            )
    return {name: str(value) for name, value in (settings or {}).items()}


def _texts(uri: Uri, given: Mapping[str, Any], option: str) -> dict[str, str]:
    value = given.get(option, {})
    if not isinstance(value, Mapping):
        raise UriError(f"{option} is not a mapping of names to texts", uri=uri)
    return {str(name): str(text) for name, text in value.items()}


def _encryption_key(uri: Uri, cpk: Any) -> str | None:
    if cpk is None:
        return None
    key = cpk.get("key_value") if isinstance(cpk, Mapping) else getattr(cpk, "key_value", cpk)
    key = base64.b64encode(key).decode() if isinstance(key, bytes) else str(key)
    try:
        size_bytes = len(base64.b64decode(key, validate=True))
    except (binascii.Error, ValueError):
        size_bytes = 0
    if size_bytes != 32:  # noqa: PLR2004 - AES-256
        raise UriError("cpk is not the base64 of a 256-bit key", uri=uri)
    return key


def _clash(uri: Uri, one: str, other: str) -> UriError:
    return UriError(f"{one}, but {other}", uri=uri, hint="leave one of them out")
