"""From what an object store said, or did not say, to a typed error: one table for all stores.

    asked = Asked(S3, "put", uri, endpoint, changes=True, conditional=True)

    the server answered with an error     raise answered(asked, Said(status, code, message))
    no whole answer came                  raise unanswered(asked, exception)

    status, code --> Reason --> type and one sentence --> hint of the store's Dialect

A client describes its store once (``Dialect``: what a bucket is called there, which permission each
action needs, how credentials are given) and asks one of the two functions; it raises what it got
*outside* of its ``except`` block, so that no exception of a library, whose text may hold a signed
URL, hangs on ours. A server's own words are repeated only where they add something, and cleaned:
never for refused credentials, because such answers quote the signature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    IntegrityError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.clients.reasons import CODES, STATUSES, Reason
from ckptfs.storage.clients.silence import why_silent
from ckptfs.uri import Uri, mask_credentials

__all__ = [
    "Asked",
    "Dialect",
    "Reason",
    "Said",
    "answered",
    "clean",
    "failed",
    "reason_of",
    "unanswered",
]

_SAID_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one store is spoken of.

    name: "S3"; bucket: what it calls a bucket; permissions: what each action of ``Asked`` needs;
    hints: what to do next, by reason, where it differs from the general advice.
    """

    name: str
    bucket: str = "bucket"
    permissions: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[Reason, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as its error tells of it. ``endpoint`` is scheme://host[:port], no credentials.

    action: "get", "head", "put", "list", "delete", "begin upload", "put part", ...
    changes: it may have happened although no answer came. conditional: it carried a condition.
    """

    dialect: Dialect
    action: str
    uri: Uri
    endpoint: str
    changes: bool = False
    conditional: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """An error as the server told it. region: the right one, where it named it; code: its own."""

    status: int
    code: str = ""
    message: str = ""
    region: str = ""


def answered(asked: Asked, said: Said) -> CkptfsError:
    """The error for an answer that says no. Not raised yet."""
    return _error(asked, reason_of(asked, said), said)


def unanswered(asked: Asked, error: BaseException) -> CkptfsError:
    """The error for a request that got no whole answer: any exception of any library. Not raised."""
    return _error(asked, why_silent(error), None, type(error).__name__)


def failed(asked: Asked, reason: Reason, cause: str = "") -> CkptfsError:
    """The error for a reason that the client found itself, such as NO_CREDENTIALS. Not raised."""
    return _error(asked, reason, None, cause)


def reason_of(asked: Asked, said: Said) -> Reason:
    """What an answer means: by its code, else by its status."""
    reason = CODES.get(said.code) or STATUSES.get(said.status)
    if reason is None:
        reason = Reason.SERVER if said.status >= _SERVER_ERRORS else Reason.INVALID
    if reason is Reason.FORBIDDEN and _speaks_of_a_lock(said.message):
        return Reason.LOCKED
    if asked.action == "delete" and _wants_content_md5(said):
        return Reason.UNSUPPORTED
    if reason is Reason.CONDITION and not asked.changes:
        return Reason.CHANGED
    if reason is Reason.NO_KEY and asked.conditional:
        # If-Match on nothing: 404 on AWS, 412 on radosgw.
        return Reason.CONDITION
    return reason


def clean(text: str) -> str:
    """Foreign text for a message: one line, not long, without anything that looks like a secret."""
    text = mask_credentials(" ".join(text.split()))
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text if len(text) <= _SAID_CHARS else text[: _SAID_CHARS - 3] + "..."


# -- tables ----------------------------------------------------------------------------

_SERVER_ERRORS: Final = 500

# How each reason is told; the words in braces are those of ``_error``.
_TOLD: Final[dict[Reason, tuple[type[CkptfsError], str, str | None]]] = {
    Reason.NO_BUCKET: (
        NotFoundError,
        "there is no {bucket} {name!r} at {endpoint}",
        "check its name and the endpoint; ckptfs never creates one",
    ),
    Reason.NO_KEY: (NotFoundError, "no such object", None),
    Reason.NO_UPLOAD: (
        NotFoundError,
        "no such upload: it was completed or aborted before",
        "look whether the object is there",
    ),
    Reason.CONDITION: (
        AlreadyExistsError,
        "the condition did not hold: what stands there is untouched",
        None,
    ),
    Reason.CHANGED: (StaleError, "the object was replaced meanwhile", "open it again"),
    Reason.CONFLICT: (TransientError, "another request on this object was under way", None),
    Reason.WRONG_REGION: (
        StorageError,
        "the {bucket} {name!r} is not in this region: {endpoint} refers to {region}",
        "set the region, or the endpoint, of the {bucket}",
    ),
    Reason.NO_CREDENTIALS: (
        CredentialsError,
        "no credentials were found{cause}",
        "give some, or ask for anonymous access",
    ),
    Reason.WRONG_CREDENTIALS: (
        CredentialsError,
        "{endpoint} does not accept these credentials{code}",
        "check the key, its secret and the endpoint that they belong to",
    ),
    Reason.EXPIRED: (
        CredentialsError,
        "the credentials have expired{code}{cause}",
        "renew them; a profile or a role renews itself, a pasted token does not",
    ),
    Reason.CLOCK: (
        CredentialsError,
        "this machine's clock and that of {endpoint} differ by too much",
        "set the clock (ntp, chrony): requests are signed with the time",
    ),
    Reason.FORBIDDEN: (
        AccessError,
        "these credentials may not {verb} here{code}",
        "allow {permission}",
    ),
    Reason.LOCKED: (
        AccessError,
        "the object is protected by a lock, a retention time or a legal hold",
        "it can go when the retention has ended",
    ),
    Reason.ARCHIVED: (
        StorageError,
        "the object lies in an archive class and cannot be read at once",
        "restore it first, and keep checkpoints out of lifecycle rules that archive",
    ),
    Reason.NO_SPACE: (NoSpaceError, "{endpoint} has no space or no quota left{code}", None),
    Reason.SHORT: (IntegrityError, "the object ends before the bytes that were asked for", None),
    Reason.THROTTLED: (TransientError, "{endpoint} asks to slow down{code}", None),
    Reason.SLOW_BODY: (TransientError, "{endpoint} waited too long for the data", None),
    Reason.DAMAGED: (
        TransientError,
        "the data was damaged on the way: {endpoint} computed another checksum",
        None,
    ),
    Reason.SERVER: (TransientError, "{endpoint} failed with {status}{said}", None),
    Reason.UNSUPPORTED: (
        UnsupportedError,
        "{endpoint} does not know this request{code}{said}",
        None,
    ),
    Reason.INVALID: (StorageError, "{endpoint} refused the request with {status}{said}", None),
    Reason.BAD_REQUEST: (
        StorageError,
        "{store} cannot have such a request{cause}",
        "check the name of the {bucket} and the storage options",
    ),
    Reason.NO_HOST: (
        TransientError,
        "the host of {endpoint} has no address",
        "check the endpoint's spelling and this machine's DNS",
    ),
    Reason.REFUSED: (
        TransientError,
        "nothing listens at {endpoint}",
        "check the endpoint's host and port, and whether the server runs",
    ),
    Reason.UNREACHABLE: (
        TransientError,
        "no connection to {endpoint}{cause}",
        "check the endpoint, the network and the proxy settings",
    ),
    Reason.PROXY: (
        TransientError,
        "the proxy between here and {endpoint} gave no connection",
        "check HTTPS_PROXY, HTTP_PROXY and NO_PROXY",
    ),
    Reason.CERTIFICATE: (
        StorageError,
        "the TLS certificate of {endpoint} is not trusted{cause}",
        "name the certificate authority's file in AWS_CA_BUNDLE",
    ),
    Reason.NOT_TLS: (
        StorageError,
        "no TLS connection to {endpoint}{cause}",
        "check https against http in the endpoint, and its port",
    ),
    Reason.SILENT: (TransientError, "{endpoint} was silent for too long", None),
    Reason.BROKEN: (TransientError, "the connection to {endpoint} broke{cause}", None),
}

_VERBS: Final = {
    **dict.fromkeys(("get", "head"), "read"),
    **dict.fromkeys(("put", "upload", "begin upload", "put part", "complete upload"), "write"),
    **dict.fromkeys(("list", "list uploads", "list versions"), "list"),
    **dict.fromkeys(("delete", "abort upload"), "delete"),
}

# A change that met one of these may have happened.
_MAY_HAVE_HAPPENED: Final = frozenset((Reason.SERVER, Reason.SILENT, Reason.BROKEN))

_SECRETS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        (
            r"((?:signature|credential|security-token|sig|token|secret|password|account_?key|"
            r"access_?key(?:_?id)?)[\"']?\s*[=:]\s*[\"']?)[^\s&,;'\"<]+"
        ),
        r"((?:bearer|basic|sharedkey)\s+)[A-Za-z0-9._~+/=:-]{8,}",
        r"()\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
    )
)


def _speaks_of_a_lock(message: str) -> bool:
    # S3 answers AccessDenied for a locked version as for a missing permission: only its text tells.
    return any(word in message.lower() for word in ("object lock", "worm", "legal hold"))


def _wants_content_md5(said: Said) -> bool:
    # OpenStack Swift takes no other checksum of a batch of deletes: InvalidRequest, "Missing required
    # header for this request: Content-MD5".
    return said.code == "MissingContentMD5" or "Content-MD5" in said.message


# -- telling ---------------------------------------------------------------------------


def _error(asked: Asked, reason: Reason, said: Said | None, cause: str = "") -> CkptfsError:
    kind, sentence, hint = _TOLD[reason]
    words = {
        "store": asked.dialect.name,
        "bucket": asked.dialect.bucket,
        "name": asked.uri.authority,
        "endpoint": asked.endpoint,
        "verb": _VERBS.get(asked.action, "do it"),
        "permission": asked.dialect.permissions.get(asked.action, asked.action),
        "region": _region(said),
        "status": said.status if said else "",
        "code": f" ({said.code})" if said and said.code and not said.code.isdigit() else "",
        "said": _quoted(said),
        "cause": f" ({cause})" if cause else "",
    }
    hint = asked.dialect.hints.get(reason, hint)
    text = f"{asked.action} failed: {sentence.format(**words)}"
    if asked.changes and reason in _MAY_HAVE_HAPPENED:
        kind, text = (
            AnswerLostError,
            f"{asked.action} may have happened: {sentence.format(**words)}",
        )
    made = kind(text, uri=asked.uri, hint=hint.format(**words) if hint else None)
    if isinstance(made, NotFoundError):
        made.of_bucket = reason is Reason.NO_BUCKET
    return made


def _region(said: Said | None) -> str:
    return f"region {said.region!r}" if said and said.region else "another one"


def _quoted(said: Said | None) -> str:
    if said is None:
        return ""
    told = ": ".join(filter(None, (said.code, clean(said.message))))
    return f" ({told})" if told else ""
