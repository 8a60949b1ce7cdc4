"""Azure through obstore: the options of ``azure_options`` as the configuration of its store.

    login                     obstore
    key, SAS                  a credential provider that hands them over: nothing comes from variables
                              that only obstore knows
    identity, principal       azure.identity, as the adlfs client asks it, called for each new token
    nobody                    skip_signature

    content settings, tier, metadata      attributes of every put and upload        tags      tags

``cannot`` names what obstore lacks: encryption scopes, and a checksum of its own. With these the data go
through adlfs: ``AdlfsLibrary`` makes the requests for ``FsspecStorage``.

A batch of deletes tells of one refusal, and not what became of the other keys. After one, each key is
deleted by a request of its own.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    NotFoundError,
    StorageError,
    TransientError,
    UriError,
)
from ckptfs.storage.clients.azure_failures import (
    AZURE,
    LIMITS,
    Refusal,
    expired,
    no_container,
    refused,
)
from ckptfs.storage.clients.azure_identity import AsyncToken, need_identity
from ckptfs.storage.clients.azure_login import (
    Anonymous,
    Default,
    Login,
    Principal,
    Sas,
    SharedKey,
    Token,
)
from ckptfs.storage.clients.azure_options import Account, resolve
from ckptfs.storage.clients.base import BucketLibrary, Condition, IfAbsent, IfMatch, Refused
from ckptfs.storage.clients.failures import Asked, Reason, failed
from ckptfs.storage.clients.obstore import Flavour, ObstoreClient
from ckptfs.storage.clients.obstore_errors import answer_in
from ckptfs.storage.options import Times
from ckptfs.storage.threads import Threads
from ckptfs.uri import Uri

__all__ = ["AdlfsLibrary", "cannot", "open_client", "open_library"]

T = TypeVar("T")

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
# What of the settings goes with a block, too.
_OF_BLOCKS: Final = ("encryption_scope", "validate_content", "connection_timeout", "read_timeout")
_EXISTS: Final = ("BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite")
_DELETES: Final = 8  # under way at once
_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LOOK_AGAIN: Final = timedelta(seconds=30)


def cannot(options: Mapping[str, Any]) -> str | None:
    """Why obstore cannot do what these options ask for; None where it can."""
    if options.get("encryption_scope") is not None:
        return "it has no encryption_scope"
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


def open_library(uri: Uri, options: Mapping[str, Any], times: Times) -> BucketLibrary:
    """adlfs, for what ``cannot`` names. UriError: an option that is unknown or clashes, or cpk, with
    which adlfs cannot read.
    """
    account = resolve(uri, options, times)
    if account.encryption_key is not None:
        raise UriError(
            "cpk goes through obstore alone: adlfs cannot read with it",
            uri=uri,
            hint="leave out what keeps obstore away; the log and `ckptfs doctor` name it",
        )
    return AdlfsLibrary(account)


@dataclass(frozen=True)
class AdlfsLibrary(BucketLibrary):
    """Requests through adlfs and the Azure SDK below it, which retries. Holds credentials: never shown.

    Each blob is made by a request of our own, because adlfs has no keyword for some settings.
    """

    account: Account = field(repr=False)
    name = "adlfs"

    @property
    def endpoint(self) -> str:
        return self.account.endpoint

    def filesystem(self) -> Any:
        from adlfs import AzureBlobFileSystem  # type: ignore[import-untyped]

        return AzureBlobFileSystem(
            **self._login(),
            connection_timeout=self.account.times.connect_s,
            read_timeout=self.account.times.request_s,
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def put(self, fs: Any, path: str, data: bytes, condition: Condition) -> None:
        from azure.core import MatchConditions

        wanted = self._settings() | {"overwrite": not isinstance(condition, IfAbsent)}
        if isinstance(condition, IfMatch):
            wanted |= {"etag": condition.etag, "match_condition": MatchConditions.IfNotModified}
        self.ask(fs, path, lambda blob: blob.upload_blob(data, length=len(data), **wanted))

    def open_write(self, fs: Any, path: str, block_bytes: int) -> Any:
        return _BlockStream(self, fs, path, block_bytes)

    def etag(self, info: Mapping[str, Any]) -> str | None:
        found = info.get("etag")
        return None if found is None else str(found)

    def stage(self, fs: Any, path: str, block: str, data: bytes) -> None:
        """Send one block, which nobody sees before the commit."""
        wanted = {n: v for n, v in self._settings().items() if n in _OF_BLOCKS}
        self.ask(fs, path, lambda blob: blob.stage_block(block, data, len(data), **wanted))

    def commit(self, fs: Any, path: str, blocks: Sequence[str]) -> None:
        """Make the blob of these blocks, in order."""
        from azure.storage.blob import BlobBlock

        named = [BlobBlock(block) for block in blocks]
        self.ask(fs, path, lambda blob: blob.commit_block_list(named, **self._settings()))

    def ask(self, fs: Any, path: str, request: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        """One request on a blob. Errors become those that fsspec's filesystems raise."""
        from azure.core.exceptions import HttpResponseError
        from fsspec.asyn import sync

        container, name, _ = fs.split_path(path)

        async def asked() -> None:
            async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
                await request(blob)

        try:
            sync(fs.loop, asked)
        except HttpResponseError as error:
            told = getattr(error, "error_code", None)
            code = str(getattr(told, "value", told))
            status = error.status_code
            if code in _EXISTS:
                raise FileExistsError(path) from error
            if status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(path) from error
            if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise PermissionError(f"{path}: {code}") from error
            raise

    def _settings(self) -> dict[str, Any]:
        from azure.storage.blob import ContentSettings, StandardBlobTier

        account = self.account
        tier = account.stored.get("x-ms-access-tier")
        found: dict[str, Any] = {
            "encryption_scope": account.stored.get("x-ms-encryption-scope"),
            "standard_blob_tier": StandardBlobTier(tier) if tier else None,
            "tags": dict(account.tags),
            "metadata": dict(account.metadata),
            "validate_content": account.md5,
        }
        if account.content:
            content: dict[str, Any] = dict(account.content)
            found["content_settings"] = ContentSettings(**content)
        times = {
            "connection_timeout": account.times.connect_s,
            "read_timeout": account.times.request_s,
        }
        return {name: value for name, value in found.items() if value} | times

    def _login(self) -> dict[str, Any]:
        """Account and login, as adlfs takes them. A string for all that need no token: adlfs then
        speaks to any endpoint, and looks for nothing in the environment.
        """
        account = self.account
        text = f"BlobEndpoint={account.endpoint};AccountName={account.name}"
        match account.login:
            case SharedKey(name, key):
                return {"connection_string": f"{text};AccountName={name};AccountKey={key}"}
            case Sas():
                return {"connection_string": f"{text};SharedAccessSignature={account.login.text}"}
        host = account.endpoint.partition("://")[2]
        found: dict[str, Any] = {"account_name": account.name, "account_host": host}
        match account.login:
            case Anonymous():
                return found | {"anon": True}
            case Token(credential):
                return found | {"credential": AsyncToken(credential)}
            case Principal(tenant, client, secret):
                return found | {"tenant_id": tenant, "client_id": client, "client_secret": secret}
            case Default(arguments):
                return found | dict(arguments)
        raise AssertionError(account.login)


class _BlockStream:
    """A blob on its way, block by block, as ``BucketLibrary.open_write`` has it. The names of the blocks
    are its own, so that two uploads of one blob do not mix: the second to commit fails.
    """

    def __init__(self, library: AdlfsLibrary, fs: Any, path: str, block_bytes: int) -> None:
        self._stage = partial(library.stage, fs, path)
        self._commit = partial(library.commit, fs, path)
        self._block_bytes = block_bytes
        self._upload = secrets.token_hex(8)
        self._blocks: list[str] = []
        self._rest = bytearray()
        self.closed = False

    def write(self, data: bytes) -> int:
        """Take all of it; send it where a block is full."""
        self._rest += data
        while len(self._rest) >= self._block_bytes:
            self._send(bytes(self._rest[: self._block_bytes]))
            del self._rest[: self._block_bytes]
        return len(data)

    def close(self) -> None:
        """Send what is left."""
        if self._rest:
            self._send(bytes(self._rest))
        self._rest.clear()
        self.closed = True

    def commit(self) -> None:
        """Make the blob."""
        self._commit(self._blocks)

    def discard(self) -> None:
        """Nothing to do: the service drops blocks that nobody committed after a week."""
        self._rest.clear()

    def _send(self, data: bytes) -> None:
        block = f"{self._upload}-{len(self._blocks):06}"  # all of one length, as the service wants
        self._stage(block, data)
        self._blocks.append(block)


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
        # Not concurrent.futures' own pool: after the main thread has returned it takes no more work.
        pool = Threads(min(_DELETES, len(keys)), "ckptfs-delete")
        try:
            found = [pool.submit(self._refusal, key) for key in keys]
            return [refused for one in found if (refused := one.result()) is not None]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

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
        """What Azure alone says, and what obstore says of it: a part of a batch, a range behind the end."""
        if "StartTooLarge" in text:
            return failed(asked, Reason.SHORT)
        found = _DELETE_FAILED.search(text)
        if found is None:
            said = answer_in(text)
            if said is None or not said.code:
                return None
            refusal = Refusal(
                said.status, said.code, said.message, None, None, self._account.container
            )
            return refused(asked, refusal)
        # The answer to a part of a batch comes without its code.
        text, status = found[1], int(found[2])
        code = next((code for word, code in _CODES.items() if word in text.lower()), "")
        container = self._account.container
        return refused(asked, Refusal(status, code, text, None, None, container))

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
                **({"encryption_key": key} if (key := account.encryption_key) else {}),
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
