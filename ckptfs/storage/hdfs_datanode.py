"""The second leg of WebHDFS: bytes to and from one DataNode, straight out of and into buffers.

    NameNode --307--> http://datanode:9864/webhdfs/v1/path?op=...&delegation=...
                      GET   --> into the caller's buffer             fetch, fetch_into
                      PUT   <-- whole                                put
                      PUT   <-- piece by piece, chunked              PutStream

A connection of its own for each request, because DataNodes close it after each. Headers, cookies,
certificates and proxies are those of the ``requests`` session that spoke to the NameNode, so that
gateways which serve both legs see one client. The query holds a delegation token: no message
repeats a URL.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from ckptfs.errors import IntegrityError, StorageError
from ckptfs.storage.clients.failures import Asked, unanswered
from ckptfs.storage.hdfs_client import Sink
from ckptfs.storage.hdfs_failures import DATA_NODE, refused
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

__all__ = ["PutStream", "Route", "fetch", "fetch_into", "put"]

_SLICE_BYTES: Final = 4 << 20  # a socket's timeout spans one whole sendall: none may be long
_ERROR_BYTES: Final = 64 << 10
_LAST_WORDS_S: Final = 5.0
_OK: Final = 200
_CREATED: Final = 201
_TYPE: Final = {"Content-Type": "application/octet-stream"}
_BROKEN: Final = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach one DataNode for one request. session: the ``requests`` session of the NameNode."""

    session: Any
    url: str
    uri: Uri
    action: str
    times: Times

    def asked(self) -> Asked:
        """For errors: the DataNode's address, without the query. No change: what a broken PUT left
        lies under a temporary name that nobody reads.
        """
        parts = urlsplit(self.url)
        endpoint = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        return Asked(DATA_NODE, self.action, self.uri, endpoint)


def fetch(route: Route) -> bytes:
    """The whole body."""
    with _answer(route) as response:
        return response.read()


def fetch_into(route: Route, out: memoryview) -> None:
    """The body, which must fill ``out``. IntegrityError: the file ends before."""
    with _answer(route) as response:
        if response.length is not None and response.length < len(out):
            raise IntegrityError(
                f"the file ends {len(out) - response.length} bytes before the end of the range",
                uri=route.uri,
            )
        got = 0
        while got < len(out):
            count = response.readinto(out[got:])
            if not count:
                raise http.client.IncompleteRead(b"", len(out) - got)
            got += count


def put(route: Route, data: bytes) -> None:
    """One PUT with the whole body; the file is closed when this returns."""
    with _talking(route) as connection:
        target, headers = _prepared(route, "PUT", connection)
        connection.request("PUT", target, data, {**headers, **_TYPE})
        _created(route, connection)


class PutStream(Sink):
    """One PUT whose body is sent piece by piece, straight from the caller's memory."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._connection: http.client.HTTPConnection | None = None
        self._between = False  # chunks: where the body can be ended in order
        with self._guarded():
            connection = _connected(route)
            self._connection = connection
            target, headers = _prepared(route, "PUT", connection)
            connection.putrequest("PUT", target, skip_accept_encoding=True)
            for name, value in {**headers, **_TYPE, "Transfer-Encoding": "chunked"}.items():
                connection.putheader(name, value)
            connection.endheaders()
        self._between = True

    def send(self, data: memoryview) -> None:
        if not len(data):
            return  # an empty chunk would end the body
        connection = self._open()
        self._between = False
        with self._guarded():
            connection.send(b"%x\r\n" % len(data))
            for start in range(0, len(data), _SLICE_BYTES):
                connection.send(data[start : start + _SLICE_BYTES])
            connection.send(b"\r\n")
        self._between = True

    def finish(self) -> None:
        connection = self._open()
        self._between = False
        with self._guarded():
            connection.send(b"0\r\n\r\n")
            _created(self._route, connection)
        self._close()

    def drop(self) -> bool:
        connection, heard = self._connection, False
        if connection is not None and self._between and connection.sock is not None:
            # Ended in order, because a DataNode that finds the connection gone may make the file
            # after we deleted it: only its answer tells that it is past that.
            with contextlib.suppress(*_BROKEN):
                connection.sock.settimeout(_LAST_WORDS_S)
                connection.send(b"0\r\n\r\n")
                with connection.getresponse() as response:
                    response.read()
                heard = True
        self._close()
        return heard

    def _open(self) -> http.client.HTTPConnection:
        if self._connection is None:
            raise StorageError("the file cannot be written any more", uri=self._route.uri)
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever ends the request ends the connection; a DataNode's last words are heard."""
        failure: Exception
        try:
            yield
        except _BROKEN as error:
            failure = _last_words(self._route, self._connection) or _silence(self._route, error)
        else:
            return
        self._close()
        raise failure


# -- one connection --------------------------------------------------------------------


@contextlib.contextmanager
def _talking(route: Route) -> Iterator[http.client.HTTPConnection]:
    connection: http.client.HTTPConnection | None = None
    failure: Exception
    try:
        connection = _connected(route)
        yield connection
    except StorageError:
        raise
    except _BROKEN as error:
        failure = _last_words(route, connection) or _silence(route, error)
    else:
        return
    finally:
        if connection is not None:
            connection.close()
    # Out here, so that no exception of a library, whose text may hold the URL, hangs on ours.
    raise failure


@contextlib.contextmanager
def _answer(route: Route) -> Iterator[http.client.HTTPResponse]:
    with _talking(route) as connection:
        target, headers = _prepared(route, "GET", connection)
        connection.request("GET", target, None, headers)
        with connection.getresponse() as response:
            if response.status != _OK:
                raise refused(route.asked(), response.status, response.read(_ERROR_BYTES))
            yield response


def _created(route: Route, connection: http.client.HTTPConnection) -> None:
    with connection.getresponse() as response:
        body = response.read(_ERROR_BYTES)
    if response.status not in (_OK, _CREATED):
        raise refused(route.asked(), response.status, body)


def _silence(route: Route, error: Exception) -> Exception:
    return unanswered(route.asked(), error)


def _last_words(route: Route, connection: http.client.HTTPConnection | None) -> Exception | None:
    """The answer of a DataNode that closed while we were sending: it says why."""
    if connection is None or connection.sock is None:
        return None
    try:
        connection.sock.settimeout(_LAST_WORDS_S)
        with connection.getresponse() as response:
            if response.status >= http.client.BAD_REQUEST:
                return refused(route.asked(), response.status, response.read(_ERROR_BYTES))
    except _BROKEN:
        return None
    return None


def _prepared(
    route: Route, method: str, connection: http.client.HTTPConnection
) -> tuple[str, Mapping[str, str]]:
    """The request's target, and the session's headers: cookies and basic authentication too."""
    requests = import_module("requests")
    prepared = route.session.prepare_request(requests.Request(method, route.url))
    headers = {k: v for k, v in prepared.headers.items() if k.lower() != "content-length"}
    if getattr(connection, "ckptfs_proxied", None) is not None:
        return prepared.url, {**headers, **connection.ckptfs_proxied}  # type: ignore[attr-defined]
    return prepared.path_url, headers


def _connected(route: Route) -> http.client.HTTPConnection:
    """A connection with the session's certificates, through the session's proxy where it has one."""
    session, url = route.session, route.url
    settings = session.merge_environment_settings(url, {}, stream=True, verify=None, cert=None)
    proxy = import_module("requests.utils").select_proxy(url, settings["proxies"])
    parts = urlsplit(url)
    via = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else parts
    host, port = via.hostname or "", via.port
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = _context(verify=settings["verify"], cert=settings["cert"])
        connection = http.client.HTTPSConnection(
            host, port, timeout=route.times.connect_s, context=context
        )
        if proxy:
            told = session.get_adapter(url).proxy_headers(proxy)
            connection.set_tunnel(parts.hostname or "", parts.port, told)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=route.times.connect_s)
        if proxy:
            told = session.get_adapter(url).proxy_headers(proxy)
            connection.ckptfs_proxied = told  # type: ignore[attr-defined]
    connection.connect()
    connection.sock.settimeout(route.times.request_s)
    return connection


def _context(*, verify: bool | str, cert: str | tuple[str, str] | None) -> ssl.SSLContext:
    bundle = import_module("requests.certs").where() if verify is True else verify or None
    context = ssl.create_default_context(cafile=bundle)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert is not None:
        context.load_cert_chain(*((cert,) if isinstance(cert, str) else cert))
    return context
