"""Ranges of S3 objects read from a socket straight into the caller's memory.

    obstore signs a URL  ->  GET with Range and If-Match  ->  recv_into(the caller's buffer)

obstore's own get hands over pieces that are copied twice, in Python and before it, for a third of the
CPU seconds that a GB costs. Here nothing is copied, and obstore still says who signs and where to.
What this way cannot read, it leaves: ``fill`` then answers LEFT, and obstore asks, whose answer or error
counts. Broken and silent connections are typed errors here already; reading again is the retrier's.

Not for requests that carry more than a signature (customer keys, requester pays), nor through proxies:
``can_read`` tells.
"""

from __future__ import annotations

import http.client
import io
import logging
import os
import re
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from ckptfs.errors import CkptfsError
from ckptfs.storage.clients.failures import Asked, Said, answered, unanswered
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.options import Times

__all__ = ["SIGNED_S", "Got", "SignedGets", "can_read"]

log = logging.getLogger(__name__)

SIGNED_S: Final = 300  # how long a signed URL holds; a server's log may show it. Used for a third
_URLS: Final = 256  # that are kept: a load reads many ranges of few objects
_WAKE_BYTES: Final = 1 << 20  # that have come when a reader is woken: 16 times for 16 MiB
_ERROR_BYTES: Final = 16 << 10  # of an answer that says no
_IDLE: Final = 32  # connections that are kept
_SERVER_ERRORS: Final = 500
_SLOW_DOWN: Final = 429
_CODE: Final = re.compile(rb"<Code>\s*([\w.]+)\s*</Code>")
# A server that closed a kept connection while it was idle.
_CLOSED: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class Got(Enum):
    """What came of a range: FILLED, the buffer holds it; LEFT, obstore has to ask."""

    FILLED = "filled"
    LEFT = "left"


def can_read(config: Mapping[str, Any], client_options: Mapping[str, Any]) -> bool:
    """Whether requests of a store configured so need nothing but a signed URL, and go straight."""
    if config.get("skip_signature") or config.get("request_payer"):
        return False
    if config.get("server_side_encryption") == "sse-c" or client_options.get("proxy_url"):
        return False
    parts = urlsplit(str(config.get("endpoint", "https://s3.amazonaws.com")))
    return parts.scheme not in getproxies() or bool(proxy_bypass(parts.hostname or ""))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where connections go, and the process that they belong to."""

    scheme: str
    host: str
    pid: int


@dataclass(slots=True)
class _Idle:
    """Connections that wait for the next request; the last one that came back goes first."""

    place: _Place | None = None
    connections: list[http.client.HTTPConnection] = field(default_factory=list)

    def close(self) -> None:
        """Close those of this process. Those of the one that forked it are its own: only dropped."""
        ours = self.place is not None and self.place.pid == os.getpid()
        while self.connections:
            connection = self.connections.pop()
            if ours:
                connection.close()


def _is_asked_for(
    answer: http.client.HTTPResponse, asked: Mapping[str, str], offset: int, size_bytes: int
) -> bool:
    """Whether an answer is the range that was asked for, of the object that was."""
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT or answer.length != size_bytes:
        return False
    place = answer.getheader("Content-Range") or ""
    etag = asked.get("If-Match", "").strip('"')
    now = (answer.getheader("ETag") or "").strip('"')
    if etag and now and now != etag:
        return False  # a server that does not know If-Match sends what stands there now
    return place.startswith(f"bytes {offset}-{offset + size_bytes - 1}/")


def _wake_after(sock: socket.socket | None, size_bytes: int) -> int:
    """Wake who waits for a plain connection when so many bytes are there; returns their number.

    A thread that is woken for each packet takes the GIL from those that work.
    """
    if sock is not None and not isinstance(sock, ssl.SSLSocket):
        with suppress(OSError):  # no such option here: woken more often
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
    return size_bytes


class SignedGets:
    """GETs of one bucket. Thread-safe; opens connections when they are needed.

    sign: key -> a URL that may be read for ``SIGNED_S``. client_options: obstore's, for certificates.
    """

    def __init__(
        self, sign: Callable[[str], str], client_options: Mapping[str, Any], times: Times
    ) -> None:
        self._sign = sign
        self._options = client_options
        self._times = times
        self._lock = ProcessLock()
        self._urls: dict[str, tuple[float, SplitResult]] = {}
        self._idle = _Idle()
        weakref.finalize(self, self._idle.close)  # clients are dropped more often than closed
        self._tls: ssl.SSLContext | None = None

    def fill(self, asked: Asked, key: str, offset: int, view: memoryview, etag: str | None) -> Got:
        """Fill ``view`` from ``offset`` of an object, only of the one with that etag.

        The typed error of a connection that broke or was silent, or of a server that is busy; after
        any of them the buffer is undefined. LEFT: nothing is known, and the buffer is undefined too.
        """
        url = self._url(key)
        headers = {"Range": f"bytes={offset}-{offset + len(view) - 1}", "Connection": "keep-alive"}
        if etag is not None:
            headers["If-Match"] = etag
        failure: CkptfsError
        try:
            return self._ask(asked, url, headers, offset, view)
        except CkptfsError:
            raise
        except ssl.SSLCertVerificationError:
            return Got.LEFT  # obstore trusts certificates of its own, and tells it better
        except (OSError, http.client.HTTPException, ValueError) as error:
            failure = unanswered(asked, error)
        # Out of the except block: no exception whose text has a signed URL hangs on ours.
        raise failure

    def close(self) -> None:
        """Close what is idle and forget what was signed; harmless twice."""
        with self._lock:
            self._idle.close()
            self._urls.clear()

    # -- one request -----------------------------------------------------------------------

    def _ask(
        self,
        asked: Asked,
        url: SplitResult,
        headers: Mapping[str, str],
        offset: int,
        view: memoryview,
    ) -> Got:
        connection, is_kept = self._connection(url)
        whole = False
        try:
            try:
                answer = self._answer(connection, url, headers)
            except _CLOSED:
                if not is_kept:
                    raise
                connection.close()
                connection = self._connected(url)
                answer = self._answer(connection, url, headers)
            if answer.status >= _SERVER_ERRORS or answer.status == _SLOW_DOWN:
                code = _CODE.search(answer.read(_ERROR_BYTES))
                said = Said(answer.status, code.group(1).decode() if code else "")
                raise answered(asked, said)
            if not _is_asked_for(answer, headers, offset, len(view)):
                return Got.LEFT
            self._pour(answer, view, connection.sock)
            whole = not answer.will_close
            return Got.FILLED
        finally:
            if whole:
                self._keep(connection, url)
            else:
                connection.close()

    def _answer(
        self, connection: http.client.HTTPConnection, url: SplitResult, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        connection.request("GET", f"{url.path}?{url.query}", headers=dict(headers))
        return connection.getresponse()

    def _pour(
        self, answer: http.client.HTTPResponse, view: memoryview, sock: socket.socket | None
    ) -> None:
        # A server that sends a byte a minute is never silent, and never done.
        until = time.monotonic() + self._times.request_s * (2 + len(view) / (8 << 20))
        # What came with the headers lies in a buffer of Python's: the kernel never has all bytes that are
        # missing then, and who waits for so many would wait for ever.
        first = answer.fp.read1(min(len(view), io.DEFAULT_BUFFER_SIZE))
        view[: len(first)] = first
        at, wakes = len(first), 1
        if not at:
            raise http.client.IncompleteRead(b"", len(view))
        while at < len(view):
            wanted = min(_WAKE_BYTES, len(view) - at)
            if wanted != wakes:
                wakes = _wake_after(sock, wanted)
            # One recv each: a server that goes on sending a byte would never end a larger read.
            count = answer.fp.readinto1(view[at:])
            if not count:
                raise http.client.IncompleteRead(b"", len(view) - at)
            at += count
            if time.monotonic() > until:
                raise TimeoutError("the answer took too long")
        _wake_after(sock, 1)  # or the next answer's first line would wake nobody
        answer.close()  # all of it was read: the connection may be used again

    # -- connections -----------------------------------------------------------------------

    def _connection(self, url: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """One that is idle, or a new one; and whether it was idle."""
        place = _Place(url.scheme, url.netloc, os.getpid())
        with self._lock:
            if self._idle.place == place and self._idle.connections:
                return self._idle.connections.pop(), True
        return self._connected(url), False

    def _connected(self, url: SplitResult) -> http.client.HTTPConnection:
        made: http.client.HTTPConnection
        host, port = url.hostname or "", url.port
        if url.scheme == "https":
            made = http.client.HTTPSConnection(
                host, port, timeout=self._times.connect_s, context=self._context()
            )
        else:
            made = http.client.HTTPConnection(host, port, timeout=self._times.connect_s)
        made.connect()
        made.sock.settimeout(self._times.request_s)
        return made

    def _keep(self, connection: http.client.HTTPConnection, url: SplitResult) -> None:
        place = _Place(url.scheme, url.netloc, os.getpid())
        with self._lock:
            if self._idle.place != place:
                self._idle.close()
                self._idle.place = place
            if len(self._idle.connections) < _IDLE:
                self._idle.connections.append(connection)
                return
        connection.close()

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                root = self._options.get("root_certificate")
                text = root.decode() if isinstance(root, bytes) else root
                self._tls = ssl.create_default_context(cadata=text)
                if self._options.get("allow_invalid_certificates"):
                    self._tls.check_hostname = False
                    self._tls.verify_mode = ssl.CERT_NONE
            return self._tls

    def _url(self, key: str) -> SplitResult:
        now = time.monotonic()
        with self._lock:
            found = self._urls.get(key)
            if found is not None and now < found[0]:
                return found[1]
        url = urlsplit(self._sign(key))
        with self._lock:
            while len(self._urls) >= _URLS:
                with suppress(KeyError):
                    del self._urls[next(iter(self._urls))]
            self._urls[key] = (now + SIGNED_S / 3, url)
        return url
