"""What GCS answers, and what google-auth raises, as a typed error.

    JSON API   {"error": {"code": 404, "message": ..., "errors": [{"reason": "notFound", ...}]}}
    XML API    <Error><Code>NoSuchKey</Code><Message>...</Message><Details>...</Details></Error>

Google's reasons are coarser than S3's codes (one "notFound" for buckets and objects, "invalid" for a
checksum that differs): the message tells them apart, here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import unescape
from http import HTTPStatus
from typing import Any, Final

from ckptfs.errors import CkptfsError, CredentialsError, MissingDriverError, TransientError
from ckptfs.storage.clients.failures import (
    Asked,
    Dialect,
    Reason,
    Said,
    answered,
    clean,
    failed,
    unanswered,
)

__all__ = ["GCS", "refused", "said_of", "told", "unusable"]

_OVERWRITE = " (to replace an object, storage.objects.delete too)"
_PART = "storage.multipartUploads.create and storage.objects.create on this prefix"

GCS: Final = Dialect(
    name="GCS",
    permissions={
        "get": "storage.objects.get on this prefix",
        "head": "storage.objects.get on this prefix",
        "put": f"storage.objects.create on this prefix{_OVERWRITE}",
        "begin upload": _PART,
        "put part": _PART,
        "upload": _PART,
        "complete upload": f"{_PART}{_OVERWRITE}",
        "abort upload": "storage.multipartUploads.abort on this prefix",
        "delete": "storage.objects.delete on this prefix",
        "list": "storage.objects.list on the bucket",
        "list uploads": "storage.multipartUploads.list on the bucket",
        "get bucket": "storage.buckets.get on the bucket",
    },
    hints={
        Reason.NO_CREDENTIALS: "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or the storage "
        "option token=; token='anon' for a public bucket",
        Reason.WRONG_CREDENTIALS: "the token is wrong or has expired: renew it, or use a key file or "
        "the machine's service account, which renew themselves",
        Reason.CERTIFICATE: "name the authority's file in SSL_CERT_FILE, or pass "
        "session_kwargs={{'connector': ...}}",
    },
)
_PAYER: Final = "pass requester_pays=True, or the project that pays"
_TAG: Final = re.compile(r"<(Code|Message|Details)>(.*?)</\1>", re.DOTALL)


def said_of(status: int, body: bytes) -> Said:
    """What an error answer of either API says; of anything else (a proxy's page) only the status."""
    text = body[: 1 << 16].decode("utf-8", "replace")
    found = _from_json(text) if text.lstrip().startswith("{") else _from_xml(text)
    code, message = found
    lower = message.lower()
    if status == HTTPStatus.NOT_FOUND and code in ("", "notFound"):
        code = "NoSuchBucket" if "bucket does not exist" in lower else "NoSuchKey"
    elif "doesn't match calculated" in lower:
        code = "BadDigest"
    elif "anonymous caller" in lower:
        code = "required"
    elif status == HTTPStatus.UNAUTHORIZED:
        code = "authError"
    return Said(status, code, message)


def refused(asked: Asked, said: Said) -> CkptfsError:
    """The typed error for an answer that says no. Not raised yet."""
    found = answered(asked, said)
    if "requester pays" in said.message.lower():
        found.hint = _PAYER
    return found


def told(asked: Asked, error: Exception) -> CkptfsError:
    """The typed error for whatever gcsfs, google-auth or aiohttp raised. Not raised yet."""
    name, module = type(error).__name__, type(error).__module__
    if isinstance(error, ImportError):
        return MissingDriverError(
            f"the library of gs:// does not import: {error}",
            uri=asked.uri,
            hint="pip install 'ckptfs[gcs]'",
        )
    if name == "TransportError" and module.startswith("google."):
        # The token's server, not the store: nothing was asked of the store yet.
        return TransientError(
            f"{asked.action} failed: the server that issues Google's tokens gave no answer",
            uri=asked.uri,
            hint="check the network, the proxy settings and the token_uri of the key file",
        )
    if getattr(error, "code", None) == HTTPStatus.UNAUTHORIZED or name in (
        "RefreshError",
        "NonRetryableError",
    ):
        return CredentialsError(
            f"{asked.action} failed: the credentials cannot be renewed{_cause(error)}",
            uri=asked.uri,
            hint="renew them: gcloud auth application-default login, or a new key file",
        )
    if module.startswith("google.auth"):
        return failed(asked, Reason.NO_CREDENTIALS, clean(str(error)))
    return unanswered(asked, error)


def unusable(asked: Asked, error: Exception) -> CkptfsError:
    """Credentials were given and cannot be read: a file, a dictionary, a project that differs."""
    return CredentialsError(
        f"{asked.action} failed: the credentials cannot be used ({type(error).__name__})",
        uri=asked.uri,
        hint="check GOOGLE_APPLICATION_CREDENTIALS or the storage option token=: a key file of a "
        "service account, its content as a dictionary, or a token",
    )


def _cause(error: BaseException) -> str:
    """google-auth's own words, from below gcsfs' wrapping, without anything that looks secret."""
    below = error.__cause__ or error
    word = next((arg for arg in below.args if isinstance(arg, str)), "")
    return f" ({clean(word)})" if word else ""


def _from_json(text: str) -> tuple[str, str]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        return "", ""
    error = found.get("error") if isinstance(found, Mapping) else None
    if not isinstance(error, Mapping):
        return "", str(error or "")
    errors = error.get("errors")
    first = errors[0] if isinstance(errors, list) and errors else {}
    reason = first.get("reason") if isinstance(first, Mapping) else None
    return str(reason or ""), str(error.get("message") or "")


def _from_xml(text: str) -> tuple[str, str]:
    found = {name: unescape(value) for name, value in _TAG.findall(text)}
    parts = (found.get("Message"), found.get("Details"))
    return found.get("Code", ""), " ".join(part for part in parts if part)
