"""What Azure says when it says no, where its own words need reading before the common table.

    SAS with a past ``se``            EXPIRED        Azure calls it "failed to authenticate"
    Date header far from our clock    CLOCK          likewise
    UnauthorizedBlobOverwrite         CONDITION      a SAS that may create only, and a blob is there
    SnapshotsPresent, leases, ...     an AccessError that says whose they are; never retried
    DirectoryIsNotEmpty, ...          hierarchical namespace: a directory stands where a blob should
    everything else                   ckptfs.storage.clients.failures

No message holds a server's text about credentials: Azure quotes the string that it wanted signed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import parse_qs

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    CkptfsError,
    CredentialsError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import Limits
from ckptfs.storage.clients.failures import Asked, Dialect, Reason, Said, answered, failed

__all__ = ["AZURE", "LIMITS", "Refusal", "expired", "no_container", "refused"]

_ROLE = "or the role Storage Blob Data Contributor on the container"
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
        Reason.NO_CREDENTIALS: "give account_key, sas_token or connection_string, or log in (az "
        "login, a managed identity); anon=True is for public containers",
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
_CLOCK_S: Final = 10 * 60  # the service signs off at 15 minutes
_FORBIDDEN: Final = 403
_CREDENTIALS: Final = (401, _FORBIDDEN)
_NO_CONTAINER: Final = ("ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled")

# What the common table does not know: mostly about what else may stand under a name on Azure.
_ODD: Final[Mapping[str, tuple[type[StorageError], str, str | None]]] = {
    **dict.fromkeys(
        ("SnapshotsPresent", "SnapshotOperationRateExceeded"),
        (AccessError, "the blob has snapshots", "ckptfs deletes none: whoever made them must"),
    ),
    **dict.fromkeys(
        ("LeaseIdMismatchWithBlobOperation", "LeaseLost", "LeaseAlreadyPresent"),
        (AccessError, "somebody holds a lease on the blob", "end the lease, or wait for its end"),
    ),
    **dict.fromkeys(
        ("InvalidBlobType", "BlobTypeNotSupported"),
        (
            StorageError,
            "an append or page blob stands there, not one of ckptfs",
            "choose another name",
        ),
    ),
    **dict.fromkeys(
        ("PathAlreadyExists", "PathConflict", "ResourceTypeMismatch", "DirectoryIsNotEmpty"),
        (
            StorageError,
            "a directory stands there (hierarchical namespace)",
            "choose another name",
        ),
    ),
    "InvalidBlobOrBlock": (
        StorageError,
        "parts of another program's unfinished upload stand under this name",
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
        AZURE.hints[Reason.NO_CREDENTIALS],
    ),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that says no: what the server told, and the SAS that asked (its end is in it)."""

    status: int
    code: str
    message: str
    date: str | None
    sas: str | None
    container: str


def refused(asked: Asked, refusal: Refusal) -> CkptfsError:
    """The error for it. Not raised yet."""
    code = refusal.code
    if code == "UnauthorizedBlobOverwrite" and asked.conditional:
        return AlreadyExistsError("put failed: a blob is there, untouched", uri=asked.uri)
    if code in _NO_CONTAINER:
        return no_container(asked, refusal.container)
    if code in _ODD:
        kind, sentence, hint = _ODD[code]
        return kind(f"{asked.action} failed: {sentence}", uri=asked.uri, hint=hint)
    if refusal.status in _CREDENTIALS and (plain := _of_credentials(asked, refusal)):
        return plain
    return answered(asked, Said(refusal.status, code, refusal.message))


def no_container(asked: Asked, container: str) -> NotFoundError:
    """Not the common sentence: the authority of an abfss:// URI is the account."""
    missing = NotFoundError(
        f"{asked.action} failed: there is no container {container!r} at {asked.endpoint}",
        uri=asked.uri,
        hint=AZURE.hints[Reason.NO_BUCKET],
    )
    missing.of_bucket = True
    return missing


def expired(asked: Asked, sas: str, now_s: float | None = None) -> CkptfsError | None:
    """The error for a SAS whose own end is over; None where that is not so, or cannot be told."""
    end = parse_qs(sas).get("se")
    now_s = time.time() if now_s is None else now_s
    return failed(asked, Reason.EXPIRED) if end and _seconds(end[0]) <= now_s else None


def _of_credentials(asked: Asked, refusal: Refusal) -> CkptfsError | None:
    """What is wrong with the credentials, where we can tell better than the service does."""
    now_s = time.time()
    if refusal.date is not None:
        server_s = parsedate_to_datetime(refusal.date).timestamp()
        if abs(server_s - now_s) > _CLOCK_S:
            return failed(asked, Reason.CLOCK)
        now_s = server_s
    return None if refusal.sas is None else expired(asked, refusal.sas, now_s)


def _seconds(text: str) -> float:
    """An ISO time as Azure writes it in a SAS: a date, or with minutes, or with seconds."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return float("inf")  # not to be read: then it is not what we can tell
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
