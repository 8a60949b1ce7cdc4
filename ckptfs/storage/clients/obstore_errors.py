"""What obstore raises, as a typed error.

obstore's classes tell a missing object from a refused one and little more, and its exceptions carry
no fields: status, code and kind of failure stand in the text, so the text is read here, and only here.

    ... status code: 403 Forbidden: <Error><Code>AccessDenied</Code> ...   the server answered
    ... HttpError { kind: Connect | Timeout | Interrupted | ... }          it did not
    FileNotFoundError AlreadyExistsError PreconditionError ...             neither is told: the class

The text quotes the whole answer, signatures included: it is never repeated.
"""

from __future__ import annotations

import re
from typing import Final

from ckptfs.errors import CkptfsError, MissingDriverError, TransientError
from ckptfs.storage.clients.failures import Asked, Said, answered, clean, failed
from ckptfs.storage.clients.reasons import Reason

__all__ = ["answer_in", "told"]

_STATUS: Final = re.compile(r"status code: (\d{3})|\bstatus: (\d{3}),")
_XML: Final = re.compile(r"<Code>\s*([\w.]+)\s*</Code>")
_JSON: Final = re.compile(r'\\?"reason\\?":\s*\\?"(\w+)')
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_REGION: Final = re.compile(r"<Region>([a-z0-9-]+)</Region>")
_DELETED: Final = re.compile(r"DeleteObjects request failed for key .* \(code: (\w+)\)")
_KIND: Final = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode|Unknown)\b")

_CLASSES: Final = {
    "FileNotFoundError": 404,
    "AlreadyExistsError": 412,
    "PreconditionError": 412,
    "NotModifiedError": 412,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
    "NotSupportedError": 501,
}
# What an unanswered request says of itself, the first that is found.
_SILENCES: Final = (
    ("UnknownIssuer", Reason.CERTIFICATE),
    ("invalid peer certificate", Reason.CERTIFICATE),
    ("CaUsedAsEndEntity", Reason.CERTIFICATE),
    ("NotValidForName", Reason.CERTIFICATE),
    ("dns error", Reason.NO_HOST),
    ("ConnectionRefused", Reason.REFUSED),
    ("Connection refused", Reason.REFUSED),
    ("proxy", Reason.PROXY),
    ("InvalidContentType", Reason.NOT_TLS),
    ("InvalidMessage", Reason.NOT_TLS),
)
_NOBODY: Final = "<Details>Anonymous caller does not have"
_METADATA: Final = ("http://169.254.", "http://[fd00:ec2")


def told(asked: Asked, error: BaseException) -> CkptfsError:
    """The typed error for whatever obstore raised. Not raised yet."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, ImportError):
        return MissingDriverError(
            f"obstore does not import: {error}", uri=asked.uri, hint="pip install 'ckptfs[fast]'"
        )
    if any(place in text for place in _METADATA):
        # The answer, or the silence, is the metadata service's: there are no other credentials.
        return failed(asked, Reason.NO_CREDENTIALS)
    if "External" in text and "credential provider" in text:
        cause = _provider(text)
        if not cause.startswith("TransportError"):
            return failed(asked, Reason.NO_CREDENTIALS, cause)
        # google-auth's word for no answer. Nothing was asked of the store yet.
        return TransientError(
            f"{asked.action} failed: the server that issues Google's tokens gave no answer",
            uri=asked.uri,
            hint="check the network, the proxy settings and the token_uri of the key file",
        )
    if "BareRedirect" in text:
        return answered(asked, Said(301))  # its headers, which name the region, are not shown
    if "InvalidDeleteObjectsResponse" in text:
        return failed(asked, Reason.UNSUPPORTED)
    if deleted := _DELETED.search(text):
        return answered(asked, Said(0, deleted[1]))
    said = answer_in(text)
    if said is not None:
        return answered(asked, said)
    kind = _KIND.search(text)
    if kind is not None:
        return failed(asked, _silence(kind[1], text), "" if kind[1] == "Timeout" else kind[1])
    if name in _CLASSES:
        return answered(asked, Said(_CLASSES[name]))
    return failed(asked, Reason.BROKEN, name)


def answer_in(text: str) -> Said | None:
    """The server's answer in the text of an exception of obstore; None: it tells of none."""
    found = _STATUS.search(text)
    return None if found is None else _said(int(found[1] or found[2]), text)


def _said(status: int, text: str) -> Said:
    code = _XML.search(text) or _JSON.search(text)
    message, region = _MESSAGE.search(text), _REGION.search(text)
    name = code[1] if code else ""
    if _NOBODY in text:
        name = "required"  # GCS answers as to somebody who lacks a permission
    return Said(
        status,
        name,
        message[1] if message else "",
        region[1] if region else "",
    )


def _silence(kind: str, text: str) -> Reason:
    if kind == "Timeout":
        # Also of a connection that did not come about; then nothing was sent.
        return (
            Reason.UNREACHABLE if "Connect" in text.partition("kind: Timeout")[2] else Reason.SILENT
        )
    if kind != "Connect":
        return Reason.BROKEN
    return next((reason for word, reason in _SILENCES if word in text), Reason.UNREACHABLE)


def _provider(text: str) -> str:
    """What the credential provider raised: its class and words, cleaned."""
    found = re.search(r"credential provider: ([^\n]+)", text)
    return clean(found[1]) if found else ""
