"""Typed errors from the answers of object stores: one table for all stores and libraries.

    context = RequestContext(S3, "put", uri, endpoint, changes=True, conditional=True)

    the server answered with an error     raise response_error(context, ErrorResponse(status, code, message))
    no complete answer came               raise no_response_error(context, exception)
    an fsspec library raised something    raise library_error(context, exception) or ...

    status, code --> Reason --> type and one sentence --> hint of the store's Dialect

    S3     <Code> of the XML error       AWS's list of error codes, and those of radosgw and MinIO
    GCS    "reason" of the JSON error
    Azure  x-ms-error-code
                    `--> CODES: code -> Reason     where it has no entry: STATUSES: status -> Reason

Where no complete answer came, the exception and its causes say whether anything was sent:

    could not connect     NO_HOST REFUSED UNREACHABLE PROXY CERTIFICATE NOT_TLS     nothing was sent
    was sent              SILENT (no bytes for too long)   BROKEN (reset, closed, cut short)

s3fs, gcsfs and adlfs turn an answer into other exceptions: FileNotFoundError, PermissionError, an OSError with an
errno or with only a text. ``response_of`` finds the answer again, in the exception or in its causes.

A client describes its store once (``Dialect``: what a bucket is called there, which permission each
action needs, how credentials are given) and calls one of these functions. It raises the result
*outside* of its ``except`` block, so that it is not chained to the library's exception, which may
contain a signed URL. A server's own words are repeated only if they add something, and cleaned. They
are never repeated for refused credentials, because such answers quote the signature.
"""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
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
from ckptfs.uri import Uri, mask_credentials

__all__ = [
    "CODES",
    "STATUSES",
    "Dialect",
    "ErrorResponse",
    "Reason",
    "RequestContext",
    "clean",
    "connection_reason",
    "library_error",
    "no_response_error",
    "origin_of",
    "reason_error",
    "reason_of",
    "response_error",
    "response_of",
]


class Reason(Enum):
    """Why a request failed, by what the user or the caller has to do about it."""

    NO_BUCKET = auto()
    NO_KEY = auto()
    NO_UPLOAD = auto()
    CONDITION = auto()  # of a change: the existing object does not meet the condition
    CHANGED = auto()  # of a read: the object is another one now
    CONFLICT = auto()  # two requests at the same time: repeat it
    WRONG_REGION = auto()
    NO_CREDENTIALS = auto()
    WRONG_CREDENTIALS = auto()
    EXPIRED = auto()
    CLOCK = auto()
    FORBIDDEN = auto()
    LOCKED = auto()  # retention, legal hold, immutability policy
    ARCHIVED = auto()  # a storage class that must be restored first
    NO_SPACE = auto()
    SHORT = auto()  # the range is behind the end
    THROTTLED = auto()
    SLOW_BODY = auto()  # the server waited for the body in vain: nothing was stored
    DAMAGED = auto()  # the checksum that the server computed differs
    SERVER = auto()
    UNSUPPORTED = auto()
    INVALID = auto()
    BAD_REQUEST = auto()  # found before sending: a name or a value that the store cannot have
    # No complete answer:
    NO_HOST = auto()
    REFUSED = auto()
    UNREACHABLE = auto()
    PROXY = auto()
    CERTIFICATE = auto()
    NOT_TLS = auto()
    SILENT = auto()
    BROKEN = auto()


CODES: Final[dict[str, Reason]] = {
    **dict.fromkeys(
        ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"),
        Reason.NO_BUCKET,
    ),
    **dict.fromkeys(("NoSuchKey", "BlobNotFound"), Reason.NO_KEY),
    **dict.fromkeys(("NoSuchUpload", "InvalidBlockList", "InvalidBlockId"), Reason.NO_UPLOAD),
    **dict.fromkeys(
        ("PreconditionFailed", "ConditionNotMet", "conditionNotMet", "BlobAlreadyExists"),
        Reason.CONDITION,
    ),
    **dict.fromkeys(
        ("ConditionalRequestConflict", "OperationAborted", "ConcurrentModification", "conflict"),
        Reason.CONFLICT,
    ),
    **dict.fromkeys(
        (
            "PermanentRedirect",
            "TemporaryRedirect",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
            "IncorrectEndpoint",
        ),
        Reason.WRONG_REGION,
    ),
    **dict.fromkeys(("NoAuthenticationInformation", "required"), Reason.NO_CREDENTIALS),
    **dict.fromkeys(
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "InvalidToken",
            "InvalidClientTokenId",
            "UnrecognizedClientException",
            "InvalidSecurity",
            "AuthenticationFailed",
            "InvalidAuthenticationInfo",
            "authError",
            "invalid_grant",
        ),
        Reason.WRONG_CREDENTIALS,
    ),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"),
        Reason.EXPIRED,
    ),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestInTheFuture"), Reason.CLOCK),
    **dict.fromkeys(
        (
            "AccessDenied",
            "AllAccessDisabled",
            "AccountProblem",
            "UserSuspended",
            "KMS.AccessDeniedException",
            "AuthorizationFailure",
            "AuthorizationPermissionMismatch",
            "AuthorizationProtocolMismatch",
            "AuthorizationSourceIPMismatch",
            "InsufficientAccountPermissions",
            "AccountIsDisabled",
            "forbidden",
            "insufficientPermissions",
        ),
        Reason.FORBIDDEN,
    ),
    **dict.fromkeys(
        (
            "ObjectLocked",
            "BlobImmutableDueToPolicy",
            "BlobImmutableDueToLegalHold",
            "retentionPolicyNotMet",
            "RetentionPolicyNotMet",
            "ObjectUnderActiveHold",
            "objectUnderActiveHold",
            "LeaseIdMissing",
        ),
        Reason.LOCKED,
    ),
    **dict.fromkeys(("InvalidObjectState", "BlobArchived", "BlobBeingRehydrated"), Reason.ARCHIVED),
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "AccountStorageFull", "quotaExceeded"),
        Reason.NO_SPACE,
    ),
    "InvalidRange": Reason.SHORT,
    **dict.fromkeys(
        (
            "SlowDown",
            "SlowDownRead",
            "SlowDownWrite",
            "Throttling",
            "ThrottlingException",
            "RequestLimitExceeded",
            "TooManyRequests",
            "TooManyRequestsException",
            "KMS.ThrottlingException",
            "ServerBusy",
            "rateLimitExceeded",
            "userRateLimitExceeded",
        ),
        Reason.THROTTLED,
    ),
    **dict.fromkeys(("RequestTimeout", "IncompleteBody"), Reason.SLOW_BODY),
    **dict.fromkeys(
        (
            "BadDigest",
            "XAmzContentSHA256Mismatch",
            "XAmzContentChecksumMismatch",
            "Md5Mismatch",
            "Crc64Mismatch",
        ),
        Reason.DAMAGED,
    ),
    **dict.fromkeys(("NotImplemented", "MethodNotAllowed"), Reason.UNSUPPORTED),
    **dict.fromkeys(("InternalError", "OperationTimedOut", "backendError"), Reason.SERVER),
}

STATUSES: Final[dict[int, Reason]] = {
    301: Reason.WRONG_REGION,
    307: Reason.WRONG_REGION,
    401: Reason.WRONG_CREDENTIALS,
    403: Reason.FORBIDDEN,
    404: Reason.NO_KEY,
    405: Reason.UNSUPPORTED,
    408: Reason.SLOW_BODY,
    409: Reason.CONFLICT,
    410: Reason.NO_UPLOAD,
    412: Reason.CONDITION,
    416: Reason.SHORT,
    423: Reason.LOCKED,
    429: Reason.THROTTLED,
    501: Reason.UNSUPPORTED,
    507: Reason.NO_SPACE,
}


# -- why no whole answer came ------------------------------------------------------------

# Class names, because each library has its own classes for the same error and none may be imported
# here. Earlier entries of this list win over later ones.
_BEFORE_SENDING: Final = (
    ("Proxy", Reason.PROXY),
    ("ClientConnectorDNSError", Reason.NO_HOST),
    ("NameResolutionError", Reason.NO_HOST),
    ("ConnectTimeout", Reason.UNREACHABLE),
    ("ConnectionTimeoutError", Reason.UNREACHABLE),  # aiohttp's name for it
    ("ClientConnectorError", Reason.UNREACHABLE),
    ("NewConnectionError", Reason.UNREACHABLE),
    ("EndpointConnectionError", Reason.UNREACHABLE),
    ("ServiceRequestError", Reason.UNREACHABLE),  # azure.core: it could not be sent
)
_NOT_THE_SAME_PROTOCOL: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


def connection_reason(error: BaseException) -> Reason:
    """Return why no complete answer came, from an exception of any library and its causes."""
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, ssl.SSLCertVerificationError):
            return Reason.CERTIFICATE
        # aiohttp's class is an SSLError that has no reason of its own.
        if (
            isinstance(link, ssl.SSLError)
            and (getattr(link, "reason", None) or "") in _NOT_THE_SAME_PROTOCOL
        ):
            return Reason.NOT_TLS
    for word, reason in _BEFORE_SENDING:
        if reason is Reason.PROXY and any(word in type(link).__name__ for link in chain):
            return reason
    for link in chain:
        if isinstance(link, socket.gaierror):
            return Reason.NO_HOST
        if isinstance(link, ConnectionRefusedError) or _errno(link) == errno.ECONNREFUSED:
            return Reason.REFUSED
    for word, reason in _BEFORE_SENDING:
        # botocore uses EndpointConnectionError for a reset in the middle too (aiohttp's
        # ClientOSError): then the request was sent.
        if any(word in type(link).__name__ for link in chain) and not _was_sent(chain):
            return reason
    if any("Timeout" in type(link).__name__ for link in chain):
        return Reason.SILENT
    return Reason.BROKEN


def _was_sent(chain: list[BaseException]) -> bool:
    names = {type(link).__name__ for link in chain}
    connecting = {"ClientConnectorError", "NewConnectionError", "ConnectTimeoutError"}
    return not names & connecting and any(
        isinstance(link, ConnectionError | ssl.SSLError) or "ClientOSError" in type(link).__name__
        for link in chain
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and all its causes, also those that libraries keep in an attribute."""
    waiting, visited = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in visited:
            continue
        visited.add(id(link))
        yield link
        attributes = getattr(link, "kwargs", None)
        found = [
            link.__cause__,
            link.__context__,
            attributes.get("error") if isinstance(attributes, Mapping) else None,  # botocore
            *(getattr(link, name, None) for name in ("os_error", "reason", "inner_exception")),
            *link.args,
        ]
        waiting += [one for one in found if isinstance(one, BaseException)]


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


# -- typed errors ------------------------------------------------------------------------

_MESSAGE_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names and hints that errors use for one store."""

    name: str  # "S3"
    bucket: str = "bucket"  # what it calls a bucket
    permissions: Mapping[str, str] = field(default_factory=dict)  # what each action needs
    # The next thing to do, by reason, if it differs from the general advice.
    hints: Mapping[Reason, str] = field(default_factory=dict)
    # Codes that only this store has, with type, sentence and hint.
    errors: Mapping[str, tuple[type[CkptfsError], str, str | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request, as its error describes it."""

    dialect: Dialect
    action: str  # "get", "head", "put", "list", "delete", "begin upload", "put part", ...
    uri: Uri
    endpoint: str  # scheme://host[:port], no credentials
    changes: bool = False  # it may have happened although no answer came
    conditional: bool = False  # it carried a condition
    bucket: str = ""  # its name, if that is not the URI's authority


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error that the server answered."""

    status: int
    code: str = ""  # the server's own
    message: str = ""
    region: str = ""  # the right region, if the server named it


def response_error(context: RequestContext, response: ErrorResponse) -> CkptfsError:
    """Return the error for an error response. It is not raised yet."""
    if (special := context.dialect.errors.get(response.code)) is not None:
        kind, sentence, hint = special
        return kind(f"{context.action} failed: {sentence}", uri=context.uri, hint=hint)
    return _make_error(context, reason_of(context, response), response)


def no_response_error(context: RequestContext, error: BaseException) -> CkptfsError:
    """Return the error for a request without a complete answer, from any exception of any library."""
    return _make_error(context, connection_reason(error), None, type(error).__name__)


def reason_error(context: RequestContext, reason: Reason, cause: str = "") -> CkptfsError:
    """Return the error for a reason that the client found itself, such as NO_CREDENTIALS."""
    return _make_error(context, reason, None, cause)


def reason_of(context: RequestContext, response: ErrorResponse) -> Reason:
    """Return the reason that an answer means: by its code, else by its status."""
    if response.code == _OVERWRITE_REFUSED and context.conditional:
        return Reason.CONDITION
    reason = CODES.get(response.code) or STATUSES.get(response.status)
    if reason is None:
        reason = Reason.SERVER if response.status >= _SERVER_ERRORS else Reason.INVALID
    if reason is Reason.FORBIDDEN and _speaks_of_a_lock(response.message):
        return Reason.LOCKED
    if context.action == "delete" and _wants_content_md5(response):
        return Reason.UNSUPPORTED
    if reason is Reason.CONDITION and not context.changes:
        return Reason.CHANGED
    if reason is Reason.NO_KEY and context.conditional:
        # If-Match on nothing: 404 on AWS, 412 on radosgw.
        return Reason.CONDITION
    return reason


def origin_of(endpoint: str) -> str:
    """Return scheme://host[:port] of an endpoint, whatever else it contains."""
    scheme, _, remainder = endpoint.partition("://")
    return f"{scheme}://{remainder.partition('/')[0].rpartition('@')[2]}"


def clean(text: str) -> str:
    """Return foreign text for a message: one line, not long, and without anything like a secret."""
    text = mask_credentials(" ".join(text.split()))
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 3] + "..."


# -- tables ----------------------------------------------------------------------------

_SERVER_ERRORS: Final = 500
_OVERWRITE_REFUSED: Final = "UnauthorizedBlobOverwrite"  # Azure, of a SAS that may create only

# Type, sentence and hint of each reason; the words in braces are those of ``_make_error``.
_ERRORS: Final[dict[Reason, tuple[type[CkptfsError], str, str | None]]] = {
    Reason.NO_BUCKET: (
        NotFoundError,
        "there is no {bucket} {name!r} at {endpoint}",
        "check its name and the endpoint; ckptfs never creates one",
    ),
    Reason.NO_KEY: (NotFoundError, "no such object", None),
    Reason.NO_UPLOAD: (
        NotFoundError,
        "no such upload: it was completed or aborted before",
        "check whether the object exists",
    ),
    Reason.CONDITION: (
        AlreadyExistsError,
        "the condition did not hold: what exists is untouched",
        None,
    ),
    Reason.CHANGED: (StaleError, "the object was replaced during the read", "open it again"),
    Reason.CONFLICT: (TransientError, "another request on this object was in progress", None),
    Reason.WRONG_REGION: (
        StorageError,
        "the {bucket} {name!r} is not in this region: {endpoint} refers to {region}",
        "set the region, or the endpoint, of the {bucket}",
    ),
    Reason.NO_CREDENTIALS: (
        CredentialsError,
        "no credentials were found{cause}",
        "pass credentials, or ask for anonymous access",
    ),
    Reason.WRONG_CREDENTIALS: (
        CredentialsError,
        "{endpoint} does not accept these credentials{code}",
        "check the key, its secret and the endpoint that they belong to",
    ),
    Reason.EXPIRED: (
        CredentialsError,
        "the credentials have expired{code}{cause}",
        "renew them; a profile or a role is renewed automatically, a pasted token is not",
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
        "delete it after the retention has ended",
    ),
    Reason.ARCHIVED: (
        StorageError,
        "the object is in an archive class and cannot be read at once",
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

# After one of these, a change may have happened.
_IN_DOUBT: Final = frozenset((Reason.SERVER, Reason.SILENT, Reason.BROKEN))

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
    # S3 answers AccessDenied for a locked version as for a missing permission: only the text differs.
    return any(word in message.lower() for word in ("object lock", "worm", "legal hold"))


def _wants_content_md5(response: ErrorResponse) -> bool:
    # OpenStack Swift accepts no other checksum of a batch of deletes: InvalidRequest, "Missing
    # required header for this request: Content-MD5".
    return response.code == "MissingContentMD5" or "Content-MD5" in response.message


# -- what fsspec's libraries raise ---------------------------------------------------------

# Classes by name: no library may be imported here.
_NO_SOURCE: Final = ("NoCredentialsError", "NoAuthTokenError")
_BAD_SOURCE: Final = (
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "InvalidConfigError",
    "ProfileNotFound",
    "ConfigParseError",
    "ConfigNotFound",
    "UnknownCredentialError",
    "InfiniteLoopConfigError",
    "MetadataRetrievalError",
    "DefaultCredentialsError",  # google.auth
    "RefreshError",
    "CredentialUnavailableError",  # azure.identity
    "ClientAuthenticationError",
)
_EXPIRED_SOURCE: Final = (
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "LoginRefreshTokenExpired",
)
_BAD_REQUEST: Final = ("ParamValidationError", "InvalidBucketName", "InvalidS3AddressingStyleError")
_LIBRARIES: Final = frozenset(
    ("botocore", "aiobotocore", "aiohttp", "requests", "urllib3", "azure", "google", "gcsfs")
)
_GCSFS_FORBIDDEN: Final = "Forbidden: "
# s3fs, where the answer is lost: InternalError, SlowDown.
_S3FS_ERRNOS: Final = {errno.EREMOTEIO: Reason.SERVER, errno.EBUSY: Reason.THROTTLED}


def library_error(context: RequestContext, error: Exception) -> CkptfsError | None:
    """Return the error for an exception of s3fs, gcsfs, adlfs or a library below them.

    Returns:
        The error of the table, not raised yet. None: the exception is no answer of a server and no
            failed connection, so its own type and text say more.
    """
    if isinstance(error, FileExistsError):
        return reason_error(context, Reason.CONDITION if context.changes else Reason.CHANGED)
    response = response_of(error)
    if response is not None:
        return response_error(context, response)
    name = type(error).__name__
    if name in _NO_SOURCE:
        return reason_error(context, Reason.NO_CREDENTIALS)
    if name in _EXPIRED_SOURCE:
        return reason_error(context, Reason.EXPIRED, clean(str(error)))
    if name in _BAD_SOURCE:
        return reason_error(context, Reason.NO_CREDENTIALS, clean(str(error)))
    if name in _BAD_REQUEST:
        # Its text quotes the values.
        return reason_error(context, Reason.BAD_REQUEST, name)
    if isinstance(error, FileNotFoundError):
        return reason_error(context, Reason.CONDITION if context.conditional else Reason.NO_KEY)
    if isinstance(error, OSError) and error.errno in _S3FS_ERRNOS:
        return reason_error(context, _S3FS_ERRNOS[error.errno])
    if isinstance(error, ConnectionError | TimeoutError) or (
        type(error).__module__.partition(".")[0] in _LIBRARIES
    ):
        return no_response_error(context, error)
    return None


def response_of(error: BaseException) -> ErrorResponse | None:
    """Return the server's answer in an exception or in its causes, or None if there is none."""
    link: BaseException | None = error
    while link is not None:
        found = _botocore_response(link) or _gcsfs_response(link) or _status_response(link)
        if found is not None:
            return found
        # adlfs does not chain its exceptions with "from".
        is_missing = isinstance(link, FileNotFoundError)
        link = link.__cause__ or (link.__context__ if is_missing else None)
    return None


def _botocore_response(error: BaseException) -> ErrorResponse | None:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping) or "ResponseMetadata" not in response:
        return None
    meta, details = response["ResponseMetadata"], response.get("Error", {})
    code = str(details.get("Code") or "")
    return ErrorResponse(
        int(meta.get("HTTPStatusCode") or 0),
        "" if code.isdigit() else code,  # of an answer without a body
        str(details.get("Message") or ""),
        str(meta.get("HTTPHeaders", {}).get("x-amz-bucket-region") or details.get("Region") or ""),
    )


def _gcsfs_response(error: BaseException) -> ErrorResponse | None:
    text = str(error)
    if type(error) is OSError and error.errno is None and text.startswith(_GCSFS_FORBIDDEN):
        # It has no status, and no reason for a 403: the message follows the path.
        message = text.partition("\n")[2]
        return ErrorResponse(403, "", message)
    if type(error).__name__ == "ProxyError" and not error.args:
        return ErrorResponse(502)  # requests' class, which gcsfs raises for this status
    answer = getattr(error, "_error_response", None)
    if not isinstance(answer, Mapping) or not str(answer.get("code", "")).isdigit():
        return None
    reasons = [
        one.get("reason", "") for one in answer.get("errors") or () if isinstance(one, Mapping)
    ]
    return ErrorResponse(
        int(answer["code"]), str(next(iter(reasons), "")), str(answer.get("message") or "")
    )


def _status_response(error: BaseException) -> ErrorResponse | None:
    """Return the answer that azure.core's and aiohttp's exceptions have as attributes."""
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    if not isinstance(status, int) or isinstance(error, OSError):
        return None
    code = getattr(error, "error_code", None)
    message = str(getattr(error, "message", "")).partition("\n")[0]
    return ErrorResponse(status, str(getattr(code, "value", code) or ""), message)


# -- making the error ------------------------------------------------------------------


def _make_error(
    context: RequestContext, reason: Reason, response: ErrorResponse | None, cause: str = ""
) -> CkptfsError:
    kind, sentence, hint = _ERRORS[reason]
    words = {
        "store": context.dialect.name,
        "bucket": context.dialect.bucket,
        "name": context.bucket or context.uri.authority,
        "endpoint": context.endpoint,
        "verb": _VERBS.get(context.action, "do it"),
        "permission": context.dialect.permissions.get(context.action, context.action),
        "region": _region(response),
        "status": response.status if response else "",
        "code": f" ({response.code})"
        if response and response.code and not response.code.isdigit()
        else "",
        "said": _quoted_message(response),
        "cause": f" ({cause})" if cause else "",
    }
    hint = context.dialect.hints.get(reason, hint)
    text = f"{context.action} failed: {sentence.format(**words)}"
    if context.changes and reason in _IN_DOUBT:
        kind, text = (
            AnswerLostError,
            f"{context.action} may have happened: {sentence.format(**words)}",
        )
    made = kind(text, uri=context.uri, hint=hint.format(**words) if hint else None)
    if isinstance(made, NotFoundError):
        made.of_bucket = reason is Reason.NO_BUCKET
    return made


def _region(response: ErrorResponse | None) -> str:
    return f"region {response.region!r}" if response and response.region else "another one"


def _quoted_message(response: ErrorResponse | None) -> str:
    if response is None:
        return ""
    text = ": ".join(filter(None, (response.code, clean(response.message))))
    return f" ({text})" if text else ""
