"""Who asks, on Azure: from options, environment or a connection string to one of six logins.

    SharedKey   the account's key            Token      an object with get_token (azure.identity)
    Sas         a shared access signature    Principal  an application and its secret
    Default     whoever this machine is      Anonymous  nobody: public containers

The order in which they win is adlfs's. None of them shows its secret in a repr, no error repeats
one, and nothing here asks the network.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from ckptfs.errors import UriError
from ckptfs.uri import Uri

__all__ = [
    "DEFAULT_ARGUMENTS",
    "PUBLIC",
    "Anonymous",
    "Default",
    "Login",
    "Principal",
    "Sas",
    "SharedKey",
    "Token",
    "connected",
    "login_of",
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
        """The query string as it is now, without its question mark."""
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
    """Whoever this machine or this person is: azure.identity's DefaultAzureCredential."""

    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Anonymous:
    """Nobody: nothing is signed."""


Login = SharedKey | Sas | Token | Principal | Default | Anonymous


def connected(uri: Uri, text: str) -> tuple[str, str, Login]:
    """Endpoint, account and login of a connection string, whose text no error repeats."""
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
            raise UriError("connection_string names no AccountName and no BlobEndpoint", uri=uri)
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
    """Who asks, where no connection string says it. UriError: half a login."""

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
    # As adlfs reads it: whatever is not plainly a no is a yes.
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
        raise UriError(f"{option} without account_name", uri=uri, hint="give account_name too")
    return SharedKey(name, key)
