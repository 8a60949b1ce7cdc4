"""Requests and answers as values, and the one handler that reads and writes them.

    bytes on the socket -> Request -> Api.answer(request) -> Response -> bytes on the socket

HTTP/1.1 with keep-alive and TCP_NODELAY; bodies by Content-Length or chunked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.lab._gcs.store import Conditions, RefusedError, Why

__all__ = ["Api", "HttpServer", "Request", "Response", "answer_json", "answer_xml", "tag"]


@dataclass(frozen=True)
class Request:
    """One request. Header names in lower case; ``path`` as sent, still quoted."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    base_url: str = ""

    @property
    def path(self) -> str:
        """The path, quoted."""
        return urlsplit(self.target).path

    @cached_property
    def query(self) -> dict[str, str]:
        """The query; of a name that comes twice, the last."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def parts(self, prefix: str = "/") -> list[str]:
        """The components behind ``prefix``, unquoted each: ``a%2Fb`` is one."""
        return [unquote(part) for part in self.path.removeprefix(prefix).split("/")]

    @property
    def conditions(self) -> Conditions:
        """From the JSON API's parameters or the XML API's headers."""
        return Conditions(
            generation=self._number("ifGenerationMatch", "x-goog-if-generation-match"),
            not_generation=self._number("ifGenerationNotMatch", ""),
            metageneration=self._number("ifMetagenerationMatch", "x-goog-if-metageneration-match"),
            not_metageneration=self._number("ifMetagenerationNotMatch", ""),
        )

    @property
    def generation(self) -> int | None:
        """The one generation that is asked for."""
        return self._number("generation", "")

    def _number(self, name: str, header: str) -> int | None:
        text = self.query.get(name) or self.headers.get(header)
        if not text:
            return None
        if not text.isdigit():
            raise RefusedError(Why.BAD, f"Invalid value for {name or header}: {text}")
        return int(text)

    def span(self, size: int) -> slice | None:
        """What ``Range`` asks of ``size`` bytes; None: all of them."""
        unit, _, text = self.headers.get("range", "").partition("=")
        first, dash, last = text.partition("-")
        if unit != "bytes" or not dash or "," in text:
            return None
        start = int(first) if first else max(size - int(last), 0)
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            raise RefusedError(Why.RANGE, "Request range not satisfiable")
        return slice(start, stop)


@dataclass(frozen=True)
class Response:
    """One answer. ``truncate``: send only so many bytes of the body, then break the connection."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: bool = False


def answer_json(value: object, status: int = 200, **headers: str) -> Response:
    """A JSON answer."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    body = json.dumps(value).encode()
    return Response(status, body, {"Content-Type": "application/json; charset=UTF-8", **named})


def answer_xml(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An XML answer."""
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
    named = {"Content-Type": "application/xml; charset=UTF-8", **(headers or {})}
    return Response(status, body, named)


def tag(name: str, text: object) -> str:
    """One XML element."""
    return f"<{name}>{escape(str(text))}</{name}>"


class Api(Protocol):
    """What answers."""

    def answer(self, request: Request) -> Response:
        """Never raises."""


class HttpServer(ThreadingHTTPServer):
    """One thread per connection; all end with the server."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, api: Api) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.api = api

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up in the middle is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "ckptfs-test-gcs"
    wbufsize = 1 << 16

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class says so
        """Quiet."""

    def _serve(self) -> None:
        request = Request(
            self.command,
            self.path,
            {name.lower(): value for name, value in self.headers.items()},
            self._body(),
            f"http://{self.headers.get('Host', 'localhost')}",
        )
        self._send(cast("HttpServer", self.server).api.answer(request))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815 - and so

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, answer: Response) -> None:
        if answer.drop:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.wfile.flush()
