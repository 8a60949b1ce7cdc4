"""Azure through obstore: the options of ``azure_options`` as the configuration of its store.

    login                     obstore
    key, SAS                  a credential provider that hands them over: nothing comes from variables
                              that only obstore knows
    identity, principal       azure.identity, as the adlfs client asks it, called for each new token
    nobody                    skip_signature

    content settings, tier, metadata      attributes of every put and upload        tags      tags

``cannot`` names what it lacks: encryption scopes, customer-provided keys and a checksum of its own.
Deletes are batches of the service, which tell one refusal and not what became of the other keys: they
are asked for one by one then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptfs.storage.clients.azure_failures import (
    AZURE,
    LIMITS,
    Refusal,
    expired,
    no_container,
    refused,
)
from ckptfs.storage.clients.azure_identity import need_identity
from ckptfs.storage.clients.azure_login import (
    Anonymous,
    Default,
    Login,
    Principal,
    Sas,
    SharedKey,
)
from ckptfs.storage.clients.azure_options import Account, resolve
from ckptfs.storage.clients.base import Refused
from ckptfs.storage.clients.failures import Asked, Reason, failed
from ckptfs.storage.clients.obstore import Flavour, ObstoreClient
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["cannot", "open_client"]

T = TypeVar("T")

_LACKS: Final = {
    "cpk": "it has no customer-provided keys (cpk)",
    "encryption_scope": "it has no encryption_scope",
}
_CONTENT: Final = {
    "content_type": "Content-Type",
    "content_encoding": "Content-Encoding",
    "content_language": "Content-Language",
    "content_disposition": "Content-Disposition",
    "cache_control": "Cache-Control",
}
_DELETE_FAILED: Final = re.compile(r"Bulk delete request failed for key .*: (.*) \(code: (\d{3})\)")
_CODES: Final = {
    "lease": "LeaseIdMissing",
    "snapshot": "SnapshotsPresent",
    "immutab": "BlobImmutableDueToPolicy",
    "legal hold": "BlobImmutableDueToPolicy",
    "container does not exist": "ContainerNotFound",
}
_DELETES: Final = 8  # under way at once
_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LOOK_AGAIN: Final = timedelta(seconds=30)


def cannot(options: Mapping[str, Any]) -> str | None:
    """Why obstore cannot do what these options ask for; None where it can."""
    for name, why in _LACKS.items():
        if options.get(name) is not None:
            return why
    if str(options.get("validate_content", "")).lower() in ("true", "1"):
        return "it sends no checksum (validate_content)"
    bundle = _bundle()
    if bundle is not None and not os.path.isfile(bundle):
        return f"it takes certificates from a file, and {bundle} is none"
    return None


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObstoreClient:
    """The client of one container; no I/O. UriError names an option that is unknown or clashes."""
    account = resolve(uri, options, times)
    if isinstance(account.login, Default | Principal):
        need_identity(uri)
    attributes = {_CONTENT[name]: text for name, text in account.content.items()}
    if tier := account.stored.get("x-ms-access-tier"):
        attributes["Storage-Class"] = tier
    flavour = Flavour(
        AZURE,
        replace(LIMITS, equal_parts=True),
        attributes={**attributes, **account.metadata},
        tags=account.tags,
        update=_quoted,
    )
    return _AzureObstore(uri, account, flavour)


class _AzureObstore(ObstoreClient):
    """One container; refusals are told as the adlfs client tells them."""

    def __init__(self, uri: Uri, account: Account, flavour: Flavour) -> None:
        super().__init__(uri, _Make(account), flavour, account.endpoint, account.times)
        self._account = account

    def delete(self, keys: Sequence[str]) -> list[Refused]:
        try:
            self._delete(keys)
        except (TransientError, AnswerLostError):
            raise
        except StorageError:
            # obstore tells of one key only, an absent one too, and not what became of the others.
            return self._delete_each(keys)
        return []

    def _delete_each(self, keys: Sequence[str]) -> list[Refused]:
        with ThreadPoolExecutor(min(_DELETES, len(keys)), "ckptfs-delete") as pool:
            return [found for found in pool.map(self._refusal, keys) if found is not None]

    def _refusal(self, key: str) -> Refused | None:
        try:
            self._delete([key])
        except NotFoundError as error:
            return None if error.hint is None else Refused(key, error)  # the container is missing
        except CkptfsError as error:
            return Refused(key, error)
        return None

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        asked = self._asked("delete", keys[0] if len(keys) == 1 else "", changes=True)
        self._say(asked, lambda: obstore.delete(self._store(), list(keys)))

    def _plain(self, asked: Asked, text: str) -> CkptfsError | None:
        """What obstore says of Azure alone: a part of a batch, a range behind the end."""
        if "StartTooLarge" in text:
            return failed(asked, Reason.SHORT)
        found = _DELETE_FAILED.search(text)
        if found is None:
            return None
        # The answer to a part of a batch comes without its code.
        said, status = found[1], int(found[2])
        code = next((code for word, code in _CODES.items() if word in said.lower()), "")
        container = self._account.container
        return refused(asked, Refusal(status, code, said, None, None, container))

    def _say(self, asked: Asked, request: Callable[[], T]) -> T:
        def plainer() -> T:
            try:
                return request()
            except Exception as error:
                plain = self._plain(asked, str(error))
                if plain is None:
                    raise
            raise plain

        failure: CkptfsError
        try:
            return super()._say(asked, plainer)
        except AccessError as error:
            login = self._account.login
            failure = (isinstance(login, Sas) and expired(asked, login.text)) or error
        except NotFoundError as error:
            if error.hint != AZURE.hints[Reason.NO_BUCKET]:
                raise
            failure = no_container(asked, self._account.container)
        # Outside of the except blocks: an error that explains another is one sentence, not two.
        raise failure


@dataclass(frozen=True, slots=True)
class _Make:
    """Makes the store of one container. Picklable, with its credentials."""

    account: Account

    def __call__(self, client_options: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        from obstore.store import AzureStore

        account = self.account
        anonymous = isinstance(account.login, Anonymous)
        configured: Any = {**client_options, "allow_http": account.endpoint.startswith("http://")}
        if (bundle := _bundle()) is not None:
            with open(bundle, "rb") as file:
                configured["root_certificate"] = file.read()
        return AzureStore(
            account.container,
            config={
                # Each of them named, because what is left out comes from variables of the process.
                "account_name": account.name,
                "endpoint": account.endpoint,
                "use_emulator": False,
                "use_fabric_endpoint": False,
                "skip_signature": anonymous,
            },
            client_options=configured,
            retry_config=retry_config,  # type: ignore[arg-type]
            credential_provider=None if anonymous else _Provider(account.login),
        )


class _Provider:
    """What obstore calls for a credential, and again when its time is over."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._identity: Any = None

    def __call__(self) -> Any:
        match self._login:
            case SharedKey(_, key):
                return {"access_key": key, "expires_at": None}
            case Sas(token):
                # An object may be updated by whoever made it, so it is looked at again.
                again = None if isinstance(token, str) else datetime.now(UTC) + _LOOK_AGAIN
                return {"sas_token": self._login.text, "expires_at": again}
            case _:
                return self._token()

    def _token(self) -> dict[str, Any]:
        from ckptfs.storage.clients.azure_identity import SCOPE, identity_of

        if self._identity is None:
            self._identity = identity_of(self._login)
        found = self._identity.get_token(SCOPE)
        return {"token": found.token, "expires_at": datetime.fromtimestamp(found.expires_on, UTC)}


def _bundle() -> str | None:
    return next((os.environ[name] for name in _BUNDLES if os.environ.get(name)), None)


def _quoted(etag: str) -> Mapping[str, str]:
    return {"e_tag": etag if etag.startswith('"') else f'"{etag}"'}
