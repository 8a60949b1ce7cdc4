"""Why a store refuses, or does not answer: the reasons, and the codes that name them.

    S3     <Code> of the XML error       AWS's list of error codes, and those of radosgw and MinIO
    GCS    "reason" of the JSON error
    Azure  x-ms-error-code
                    `--> CODES: code -> Reason     where it has no entry: STATUSES: status -> Reason

``failures`` tells each reason as one sentence and gives it a type.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

__all__ = ["CODES", "STATUSES", "Reason"]


class Reason(Enum):
    """Why a request failed, in the words of what the user or the caller does about it."""

    NO_BUCKET = auto()
    NO_KEY = auto()
    NO_UPLOAD = auto()
    CONDITION = auto()  # of a change: what stands there is not what was asked for
    CHANGED = auto()  # of a read: the object is another one now
    CONFLICT = auto()  # two at once: ask again
    WRONG_REGION = auto()
    NO_CREDENTIALS = auto()
    WRONG_CREDENTIALS = auto()
    EXPIRED = auto()
    CLOCK = auto()
    FORBIDDEN = auto()
    LOCKED = auto()  # retention, legal hold, immutability policy
    ARCHIVED = auto()  # a storage class that must be restored first
    NO_SPACE = auto()
    SHORT = auto()  # the range lies behind the end
    THROTTLED = auto()
    SLOW_BODY = auto()  # the server waited for the body in vain: nothing was stored
    DAMAGED = auto()  # the checksum that the server computed differs
    SERVER = auto()
    UNSUPPORTED = auto()
    INVALID = auto()
    BAD_REQUEST = auto()  # found before sending: a name or a value that the store cannot have
    # No whole answer:
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
