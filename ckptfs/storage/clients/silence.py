"""Why no whole answer came: from whatever exception a library raised to one reason.

    could not connect     NO_HOST REFUSED UNREACHABLE PROXY CERTIFICATE NOT_TLS     nothing was sent
    was sent              SILENT (no bytes for too long)   BROKEN (reset, closed, cut short)

The exception's causes count too, wherever its library keeps them.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Final

from ckptfs.storage.clients.reasons import Reason

__all__ = ["why_silent"]

# Class names, because each library has its own classes for the same thing and none may be imported
# here. What comes first in this list wins over what comes later.
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


def why_silent(error: BaseException) -> Reason:
    """The reason that no whole answer came, from an exception of any library and its causes."""
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
        # EndpointConnectionError is also what botocore calls a reset in the middle (aiohttp's
        # ClientOSError): then it was sent.
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
    """The exception and all that caused it, also where libraries keep it in an attribute."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        held = getattr(link, "kwargs", None)
        found = [
            link.__cause__,
            link.__context__,
            held.get("error") if isinstance(held, Mapping) else None,  # botocore
            *(getattr(link, name, None) for name in ("os_error", "reason", "inner_exception")),
            *link.args,
        ]
        waiting += [one for one in found if isinstance(one, BaseException)]


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None
