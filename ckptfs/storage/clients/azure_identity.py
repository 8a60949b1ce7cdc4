"""Who gives tokens: azure.identity, or the credential object that the caller passed."""

from __future__ import annotations

import asyncio
import inspect
from importlib.util import find_spec
from typing import Any, Final

from ckptfs.errors import MissingDriverError
from ckptfs.storage.clients.azure_login import Default, Login, Principal, Token
from ckptfs.uri import Uri

__all__ = ["SCOPE", "AsyncToken", "identity_of", "need_identity"]

SCOPE: Final = "https://storage.azure.com/.default"


def identity_of(login: Login) -> Any:
    """An object whose ``get_token(SCOPE)`` answers in this thread."""
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
    """MissingDriverError where azure.identity is not installed: obstore alone does not bring it."""
    if find_spec("azure") is None or find_spec("azure.identity") is None:
        raise MissingDriverError(
            "azure-identity, which gives tokens for az://, is not installed",
            uri=uri,
            hint="pip install 'ckptfs[azure]', or give account_key, sas_token or connection_string",
        )


class AsyncToken:
    """A credential object as adlfs takes it: asynchronous, whichever kind it is."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(self._credential.get_token):
            return await self._credential.get_token(*scopes, **arguments)
        return await asyncio.to_thread(self._credential.get_token, *scopes, **arguments)

    async def close(self) -> None:
        """Nothing: the object is the caller's."""


class _Waiting:
    """adlfs takes asynchronous credentials; those are asked on fsspec's loop."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    def get_token(self, *scopes: str, **arguments: Any) -> Any:
        from fsspec.asyn import get_loop, sync

        return sync(get_loop(), self._credential.get_token, *scopes, **arguments)
