"""Azure through obstore: the options of ``azure_options`` as the configuration of its store.

    login                     obstore
    key, SAS                  a credential provider that hands them over: nothing comes from variables
                              that only obstore knows
    identity, principal       azure.identity, called for each new token, as adlfs does
    anonymous                 skip_signature

    content settings, tier, metadata      attributes of every put and upload        tags      tags

``unsupported_option`` names what obstore lacks: encryption scopes, and a checksum of its own. With these options the
data go through adlfs: ``AdlfsLibrary`` makes the requests for ``FsspecStorage``.

After a failed batch of deletes obstore reports one refusal, and not the result for the other keys. So each key is
then deleted by a request of its own.

Some refusals of Azure are recognised by their own codes before the common table is used:

    SAS with a past ``se``            EXPIRED        Azure calls it "failed to authenticate"
    Date header far from our clock    CLOCK          likewise
    UnauthorizedBlobOverwrite         CONDITION      the SAS may only create, and the blob exists
    SnapshotsPresent, leases, ...     an AccessError that says what to do; never retried
    DirectoryIsNotEmpty, ...          hierarchical namespace: a directory is in the place of a blob

No message contains a server's text about credentials: Azure quotes the string that it wanted signed.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients.azure_options import (
    Account,
    Anonymous,
    AsyncToken,
    Default,
    Login,
    Principal,
    Sas,
    SharedKey,
    Token,
    need_identity,
    resolve,
)
from ckptfs.storage.clients.base import (
    BucketLibrary,
    Condition,
    FailedDelete,
    IfAbsent,
    IfMatch,
    Limits,
)
from ckptfs.storage.clients.http_errors import (
    Dialect,
    ErrorResponse,
    Reason,
    RequestContext,
    reason_error,
    response_error,
)
from ckptfs.storage.clients.obstore import ObstoreClient, StoreTraits
from ckptfs.storage.options import Times
from ckptfs.storage.threads import Threads
from ckptfs.uri import Uri

__all__ = [
    "AZURE",
    "LIMITS",
    "AdlfsLibrary",
    "open_client",
    "open_library",
    "unsupported_option",
]

_ROLE = "or the role Storage Blob Data Contributor on the container"
_NO_CREDENTIALS: Final = (
    "pass account_key, sas_token or connection_string, or log in (az login, a managed "
    "identity); anon=True is for public containers"
)
# Errors that the common table does not have: mostly about other things under the same name on
# Azure.
_AZURE_ERRORS: Final[Mapping[str, tuple[type[StorageError], str, str | None]]] = {
    **dict.fromkeys(
        ("SnapshotsPresent", "SnapshotOperationRateExceeded"),
        (
            AccessError,
            "the blob has snapshots",
            "ckptfs deletes no snapshots: delete them with the tool that made them",
        ),
    ),
    **dict.fromkeys(
        ("LeaseIdMismatchWithBlobOperation", "LeaseLost", "LeaseAlreadyPresent"),
        (AccessError, "somebody holds a lease on the blob", "end the lease, or wait for its end"),
    ),
    **dict.fromkeys(
        ("InvalidBlobType", "BlobTypeNotSupported"),
        (
            StorageError,
            "an append blob or a page blob has this name; ckptfs writes neither",
            "choose another name",
        ),
    ),
    **dict.fromkeys(
        ("PathAlreadyExists", "PathConflict", "ResourceTypeMismatch", "DirectoryIsNotEmpty"),
        (
            StorageError,
            "a directory has this name (hierarchical namespace)",
            "choose another name",
        ),
    ),
    "InvalidBlobOrBlock": (
        StorageError,
        "this name has parts of another program's unfinished upload",
        "write to another name, or wait a week: then the service drops them",
    ),
    **dict.fromkeys(
        ("BlobUsesCustomerSpecifiedEncryption", "BlobCustomerSpecifiedEncryptionMismatch"),
        (AccessError, "the blob is encrypted with another key than cpk", "pass that key as cpk"),
    ),
    **dict.fromkeys(
        ("UnsupportedHeader", "FeatureNotSupportedForAccount"),
        (UnsupportedError, "this account does not know an option that was asked for", None),
    ),
    "EncryptionScopeNotFound": (
        StorageError,
        "there is no such encryption scope in this account",
        "check encryption_scope",
    ),
    "AccountIsDisabled": (AccessError, "the account is disabled", None),
    "PublicAccessNotPermitted": (
        CredentialsError,
        "the account allows no anonymous access",
        _NO_CREDENTIALS,
    ),
}
AZURE: Final = Dialect(
    name="Azure",
    bucket="container",
    permissions={
        "get": "r (read) in the SAS, or the role Storage Blob Data Reader on the container",
        "get range": "r (read) in the SAS, or the role Storage Blob Data Reader on the container",
        "head": "r (read) in the SAS, or the role Storage Blob Data Reader on the container",
        "list": "l (list) in the SAS, or the role Storage Blob Data Reader on the container",
        "put": f"c and w (create, write) in the SAS, {_ROLE}",
        "put part": f"w (write) in the SAS, {_ROLE}",
        "complete upload": f"w (write) in the SAS, {_ROLE}",
        "delete": f"d (delete) in the SAS, {_ROLE}",
    },
    hints={
        Reason.FORBIDDEN: "allow {permission}; a wrong key or the account's firewall can be answered so too",
        Reason.NO_CREDENTIALS: _NO_CREDENTIALS,
        Reason.WRONG_CREDENTIALS: "check account_name and account_key, or the whole SAS token, its "
        "start and its resource; a token must be of the account's own tenant",
        Reason.EXPIRED: "make a new SAS token: it carries its own end; account keys and identities "
        "do not end in the middle of a save",
        Reason.NO_HOST: "check account_name: an account that does not exist has no address",
        Reason.CERTIFICATE: "name the certificate authority's file in REQUESTS_CA_BUNDLE",
        Reason.LOCKED: "an immutability policy, a legal hold or a lease keeps it; ckptfs tries "
        "again later where it deletes",
        Reason.ARCHIVED: "set its tier to Hot or Cool first, and keep checkpoints out of lifecycle "
        "rules that archive",
        Reason.NO_BUCKET: "check its name and the account; ckptfs never creates one",
    },
    errors=_AZURE_ERRORS,
)
_MIB: Final = 1 << 20
# learn.microsoft.com/rest/api/storageservices: "Understanding block blobs", "Scalability targets".
LIMITS: Final = Limits(
    min_part_bytes=1,
    max_part_bytes=4000 * _MIB,
    max_parts=50_000,
    max_object_bytes=50_000 * 4000 * _MIB,
    max_single_put_bytes=5000 * _MIB,
    delete_batch=256,
)


def expired(context: RequestContext, sas: str) -> CkptfsError | None:
    """Return the error for a SAS that has ended. None: it has not, or its end cannot be read."""
    end = parse_qs(sas).get("se")
    return (
        reason_error(context, Reason.EXPIRED) if end and _seconds(end[0]) <= time.time() else None
    )


def _seconds(text: str) -> float:
    """Return the Unix time of an ISO time in a SAS: a date, or with minutes, or with seconds."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return float("inf")  # unreadable: then it is not known to have ended
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


# -- clients -----------------------------------------------------------------------------

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
# The settings that are sent with a block, too.
_OF_BLOCKS: Final = ("encryption_scope", "validate_content", "connection_timeout", "read_timeout")
_EXISTS: Final = ("BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite")
_DELETES: Final = 8  # at the same time
_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LOOK_AGAIN: Final = timedelta(seconds=30)


def unsupported_option(options: Mapping[str, Any]) -> str | None:
    """Return why obstore cannot do what these options ask for, or None if it can."""
    if options.get("encryption_scope") is not None:
        return "it has no encryption_scope"
    if str(options.get("validate_content", "")).lower() in ("true", "1"):
        return "it sends no checksum (validate_content)"
    bundle = _bundle()
    if bundle is not None and not os.path.isfile(bundle):
        return f"it takes certificates from a file, and {bundle} is none"
    return None


def open_client(uri: Uri, options: Mapping[str, Any], times: Times) -> ObstoreClient:
    """Return the client of one container. No I/O.

    UriError names an option that is unknown or clashes.
    """
    account = resolve(uri, options, times)
    if isinstance(account.login, Default | Principal):
        need_identity(uri)
    attributes = {_CONTENT[name]: text for name, text in account.content.items()}
    if tier := account.stored.get("x-ms-access-tier"):
        attributes["Storage-Class"] = tier
    traits = StoreTraits(
        AZURE,
        replace(LIMITS, equal_parts=True),
        attributes={**attributes, **account.metadata},
        tags=account.tags,
        update=_quoted,
    )
    return _AzureObstore(uri, account, traits)


def open_library(uri: Uri, options: Mapping[str, Any], times: Times) -> BucketLibrary:
    """Return adlfs, for the options that ``unsupported_option`` names.

    Raises:
        UriError: An option is unknown or clashes, or is cpk, with which adlfs cannot read.
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

    @property
    def dialect(self) -> Dialect:
        return AZURE

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
        """Send one block. It is not visible before the commit."""
        wanted = {n: v for n, v in self._settings().items() if n in _OF_BLOCKS}
        self.ask(fs, path, lambda blob: blob.stage_block(block, data, len(data), **wanted))

    def commit(self, fs: Any, path: str, blocks: Sequence[str]) -> None:
        """Make the blob of these blocks, in order."""
        from azure.storage.blob import BlobBlock

        named = [BlobBlock(block) for block in blocks]
        self.ask(fs, path, lambda blob: blob.commit_block_list(named, **self._settings()))

    def ask(self, fs: Any, path: str, request: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        """Make one request on a blob. Errors become those that fsspec's filesystems raise."""
        from azure.core.exceptions import HttpResponseError
        from fsspec.asyn import sync

        container, name, _ = fs.split_path(path)

        async def context() -> None:
            async with fs.service_client.get_blob_client(container=container, blob=name) as blob:
                await request(blob)

        try:
            sync(fs.loop, context)
        except HttpResponseError as error:
            error_code = getattr(error, "error_code", None)
            code = str(getattr(error_code, "value", error_code))
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
        """Return account and login as adlfs takes them.

        Without a token it is a connection string: adlfs then accepts any endpoint, and searches the
        environment for nothing.
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
    """A blob that is being uploaded block by block: the stream of ``BucketLibrary.open_write``.

    The names of the blocks are its own, so that two uploads of one blob do not mix: the second to
    commit fails.
    """

    def __init__(self, library: AdlfsLibrary, fs: Any, path: str, block_bytes: int) -> None:
        self._stage = partial(library.stage, fs, path)
        self._commit = partial(library.commit, fs, path)
        self._block_bytes = block_bytes
        self._upload = secrets.token_hex(8)
        self._blocks: list[str] = []
        self._unsent = bytearray()
        self.closed = False

    def write(self, data: bytes) -> int:
        """Take all of the data; send it when a block is full."""
        self._unsent += data
        while len(self._unsent) >= self._block_bytes:
            self._send(bytes(self._unsent[: self._block_bytes]))
            del self._unsent[: self._block_bytes]
        return len(data)

    def close(self) -> None:
        """Send the remaining bytes."""
        if self._unsent:
            self._send(bytes(self._unsent))
        self._unsent.clear()
        self.closed = True

    def commit(self) -> None:
        """Make the blob."""
        self._commit(self._blocks)

    def discard(self) -> None:
        """Do nothing to the server: it drops uncommitted blocks after a week."""
        self._unsent.clear()

    def _send(self, data: bytes) -> None:
        block = f"{self._upload}-{len(self._blocks):06}"  # all of one length, as required
        self._stage(block, data)
        self._blocks.append(block)


class _AzureObstore(ObstoreClient):
    """One container. Refusals become the same errors as with the adlfs client."""

    def __init__(self, uri: Uri, account: Account, traits: StoreTraits) -> None:
        super().__init__(uri, _AzureStoreFactory(account), traits, account.endpoint, account.times)
        self._account = account

    def delete(self, keys: Sequence[str]) -> list[FailedDelete]:
        try:
            self._delete(keys)
        except (TransientError, AnswerLostError):
            raise
        except StorageError:
            # obstore reports only one key, which may be an absent one, and nothing about the others.
            return self._delete_each(keys)
        return []

    def _delete_each(self, keys: Sequence[str]) -> list[FailedDelete]:
        # Not concurrent.futures' own pool: it accepts no work after the main thread has returned.
        pool = Threads(min(_DELETES, len(keys)), "ckptfs-delete")
        try:
            found = [pool.submit(self._refusal, key) for key in keys]
            return [refused for one in found if (refused := one.result()) is not None]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _refusal(self, key: str) -> FailedDelete | None:
        try:
            self._delete([key])
        except NotFoundError as error:
            # A hint says that the container is missing.
            return None if error.hint is None else FailedDelete(key, error)
        except CkptfsError as error:
            return FailedDelete(key, error)
        return None

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        context = self._context("delete", keys[0] if len(keys) == 1 else "", changes=True)
        self._call(context, lambda: obstore.delete(self._store(), list(keys)))

    def _azure_error(self, context: RequestContext, text: str) -> CkptfsError | None:
        """Return the error for an answer that only Azure gives, or None.

        This is the refusal of a part of a batch, or of a range behind the end, in the words of
        obstore.
        """
        if "StartTooLarge" in text:
            return reason_error(context, Reason.SHORT)
        found = _DELETE_FAILED.search(text)
        if found is None:
            return None
        # The answer to a part of a batch comes without its code.
        text, status = found[1], int(found[2])
        code = next((code for word, code in _CODES.items() if word in text.lower()), "")
        return response_error(context, ErrorResponse(status, code, text))

    def _context(self, action: str, key: str, *, changes: bool = False) -> RequestContext:
        # The authority of an abfss:// URI is the account.
        found = super()._context(action, key, changes=changes)
        return replace(found, bucket=self._account.container)

    def _call(self, context: RequestContext, request: Callable[[], T]) -> T:
        def translated() -> T:
            try:
                return request()
            except Exception as error:
                specific = self._azure_error(context, str(error))
                if specific is None:
                    raise
            raise specific

        try:
            return super()._call(context, translated)
        except AccessError as error:
            login = self._account.login
            failure = (isinstance(login, Sas) and expired(context, login.text)) or error
        # Outside of the except block, so that the error is not chained to another one.
        raise failure


@dataclass(frozen=True, slots=True)
class _AzureStoreFactory:
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
                # Each of them is given, because a missing one comes from variables of the process.
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
    """Called by obstore for a credential, and again when that one expires."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._identity: Any = None

    def __call__(self) -> Any:
        match self._login:
            case SharedKey(_, key):
                return {"access_key": key, "expires_at": None}
            case Sas(token):
                # The caller may update the object that it passed, so its text is read again later.
                again = None if isinstance(token, str) else datetime.now(UTC) + _LOOK_AGAIN
                return {"sas_token": self._login.text, "expires_at": again}
            case _:
                return self._token()

    def _token(self) -> dict[str, Any]:
        from ckptfs.storage.clients.azure_options import SCOPE, identity_of

        if self._identity is None:
            self._identity = identity_of(self._login)
        found = self._identity.get_token(SCOPE)
        return {"token": found.token, "expires_at": datetime.fromtimestamp(found.expires_on, UTC)}


def _bundle() -> str | None:
    return next((os.environ[name] for name in _BUNDLES if os.environ.get(name)), None)


def _quoted(etag: str) -> Mapping[str, str]:
    return {"e_tag": etag if etag.startswith('"') else f'"{etag}"'}
