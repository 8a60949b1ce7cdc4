"""What botocore raises, as a typed error: which of S3's answers it is, or which failure to ask.

ClientError              the server answered: status, code, message (never the signature in it)
NoCredentialsError ...   nothing was sent: no credentials, or their source failed
ParamValidationError     nothing was sent: a name or a value that S3 cannot have
anything else            no whole answer came
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ckptfs.errors import CkptfsError, MissingDriverError
from ckptfs.storage.clients.failures import (
    Asked,
    Dialect,
    Said,
    answered,
    clean,
    failed,
    unanswered,
)
from ckptfs.storage.clients.reasons import Reason

__all__ = ["ANONYMOUS_S3", "S3", "told"]

_OR_MISSING = " (and s3:ListBucket, without which S3 answers so for a missing object too)"

S3: Final = Dialect(
    name="S3",
    permissions={
        "get": f"s3:GetObject{_OR_MISSING}",
        "head": f"s3:GetObject{_OR_MISSING}",
        "put": "s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey)",
        "begin upload": "s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey)",
        "upload": "s3:PutObject on this prefix (with SSE-KMS also kms:GenerateDataKey, kms:Decrypt)",
        "put part": "s3:PutObject on this prefix (with SSE-KMS also kms:Decrypt)",
        "complete upload": "s3:PutObject on this prefix (with SSE-KMS also kms:Decrypt)",
        "abort upload": "s3:AbortMultipartUpload on this prefix",
        "delete": "s3:DeleteObject on this prefix",
        "list": "s3:ListBucket for this prefix",
        "list uploads": "s3:ListBucketMultipartUploads on the bucket",
        "list versions": "s3:ListBucketVersions for this prefix",
        "GetBucketVersioning": "s3:GetBucketVersioning on the bucket",
        "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration on the bucket",
        "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration on the bucket",
    },
    hints={
        Reason.NO_CREDENTIALS: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
        "storage_options key= and secret= or profile=; anon=True for a public bucket",
        Reason.WRONG_REGION: "set client_kwargs={{'region_name': ...}} or AWS_DEFAULT_REGION, or the "
        "endpoint_url of that region",
        Reason.WRONG_CREDENTIALS: "check key and secret (or the profile), and that they belong to "
        "this endpoint",
        Reason.CERTIFICATE: "name the authority's file in AWS_CA_BUNDLE or client_kwargs['verify']",
    },
)

ANONYMOUS_S3: Final = replace(
    S3,
    hints={
        **S3.hints,
        Reason.FORBIDDEN: "anonymous access (anon=True) is not enough here: give credentials that "
        "may, or make the bucket public; a missing object answers so too",
    },
)

# Classes of botocore by name: it is not imported here.
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
)
_EXPIRED_SOURCE: Final = (
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "LoginRefreshTokenExpired",
)
_BAD_REQUEST: Final = ("ParamValidationError", "InvalidBucketName", "InvalidS3AddressingStyleError")


def told(asked: Asked, error: Exception) -> CkptfsError:
    """The typed error for whatever s3fs, botocore or aiohttp raised. Not raised yet."""
    name = type(error).__name__
    response = getattr(error, "response", None)
    if isinstance(error, ImportError):
        return MissingDriverError(
            f"the library of s3:// does not import: {error}",
            uri=asked.uri,
            hint="pip install 'ckptfs[s3]'",
        )
    if isinstance(response, dict) and "ResponseMetadata" in response:
        return _answered(asked, response)
    if name in _NO_SOURCE:
        return failed(asked, Reason.NO_CREDENTIALS)
    if name in _EXPIRED_SOURCE:
        return failed(asked, Reason.EXPIRED, clean(str(error)))
    if name in _BAD_SOURCE:
        return failed(asked, Reason.NO_CREDENTIALS, clean(str(error)))
    if name in _BAD_REQUEST:
        # Its text quotes the values.
        return failed(asked, Reason.BAD_REQUEST, name)
    return unanswered(asked, error)


def _answered(asked: Asked, response: dict[str, Any]) -> CkptfsError:
    meta, error = response["ResponseMetadata"], response.get("Error", {})
    headers = meta.get("HTTPHeaders", {})
    status = int(meta.get("HTTPStatusCode") or 0)
    code = str(error.get("Code") or "")
    said = Said(
        status,
        "" if code.isdigit() else code,
        str(error.get("Message") or ""),
        str(headers.get("x-amz-bucket-region") or error.get("Region") or ""),
    )
    return answered(asked, said)
