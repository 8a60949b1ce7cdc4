"""A server that answers S3 requests as a test says, and remembers every one of them.

    with Scripted() as server:
        server.answer = lambda request: Answer(503, error("SlowDown"))
        client = open_s3(server)
        ...
        server.requests[0].headers["x-amz-acl"]

``Answer(..., then="drop")`` closes the connection instead of answering, "cut" sends half of the body
and closes, "hold" answers when ``server.release`` is set, "trickle" sends a byte every 20 ms.
"""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.clients.s3 import open_client, open_library
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.options import Times
from ckptfs.uri import Uri

BUCKET = "bucket"
KEY, SECRET, TOKEN = "AKIASCRIPTED00000000", "very-secret-secret", "very-secret-token"
TIMES = Times(60, 60)  # far beyond what any answer here takes on a busy machine


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came; header names in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        """Which of S3's operations it is, as far as the tests tell them apart."""
        for name in ("uploads", "delete", "versions"):
            if name in self.query:
                return f"{self.method} ?{name}"
        if "uploadId" in self.query:
            return f"{self.method} ?{'partNumber' if 'partNumber' in self.query else 'uploadId'}"
        if "list-type" in self.query:
            return f"{self.method} ?list"
        return self.method


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server does with one request."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Literal["answer", "drop", "cut", "hold", "trickle"] = "answer"


def error(code: str, message: str = "told by the server", more: str = "") -> bytes:
    """The body of an S3 error."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        f"<Message>{message}</Message>{more}<RequestId>1</RequestId></Error>"
    ).encode()


def deleted(lines: str) -> bytes:
    """The body of an answer to a batch delete."""
    return f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{lines}</DeleteResult>'.encode()


def usual(request: Request) -> Answer:
    """A server on which everything works, and nothing is kept."""
    etag = {"ETag": '"e1"'}
    match request.kind:
        case "POST ?uploads":
            xml = b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, xml)
        case "POST ?uploadId":
            xml = b"<CompleteMultipartUploadResult><ETag>&quot;e2&quot;</ETag></CompleteMultipartUploadResult>"
            return Answer(200, xml)
        case "POST ?delete":
            gone = re.findall("<Key>([^<]*)</Key>", request.body.decode())
            return Answer(200, deleted("".join(f"<Deleted><Key>{k}</Key></Deleted>" for k in gone)))
        case "GET ?list":
            return Answer(
                200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            )
        case "DELETE" | "DELETE ?uploadId":
            return Answer(204)
        case "HEAD":
            more = {"Content-Length": "10", "Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT"}
            return Answer(200, b"", etag | more)
        case "GET":
            return _ranged(request, b"0123456789", etag)
        case _:
            return Answer(200, b"", etag)


def _ranged(request: Request, data: bytes, etag: Mapping[str, str]) -> Answer:
    more = dict(etag) | {"Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT"}
    wanted = request.headers.get("range")
    if wanted is None:
        return Answer(200, data, more)
    first, last = (int(text) for text in wanted.removeprefix("bytes=").split("-"))
    piece = data[first : last + 1]
    total = f"bytes {first}-{first + len(piece) - 1}/{len(data)}"
    return Answer(206, piece, more | {"Content-Range": total})


class Scripted:
    """A server on a free port of this machine, in threads of this process."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answer: Callable[[Request], Answer] = usual
        self.requests: list[Request] = []
        self.connections = 0
        self.release = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        scheme = "http" if tls is None else "https"
        self.endpoint = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def kinds(self) -> list[str]:
        """The requests so far, by kind."""
        return [request.kind for request in self.requests]


def _handler(scripted: Scripted) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            scripted.connections += 1

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True  # the client went away: a test made it do so

        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):
                return self._serve
            raise AttributeError(name)

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            request = Request(
                self.command,
                unquote(parts.path),
                dict(parse_qsl(parts.query, keep_blank_values=True)),
                {name.lower(): value for name, value in self.headers.items()},
                self.rfile.read(int(self.headers.get("Content-Length") or 0)),
            )
            scripted.requests.append(request)
            answer = scripted.answer(request)
            if answer.then == "hold":
                scripted.release.wait(120)
            if answer.then in ("drop", "hold"):
                self.close_connection = True
                return
            self.send_response(answer.status)
            headers = {"Content-Length": str(len(answer.body))} | dict(answer.headers)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if answer.then == "cut":
                self.wfile.write(answer.body[: len(answer.body) // 2])
                self.close_connection = True
                return
            if answer.then == "trickle":
                for place in range(len(answer.body)):
                    self.wfile.write(answer.body[place : place + 1])
                    if scripted.release.wait(0.02):
                        break
                self.close_connection = True
                return
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            del format, args

    return Handler


def options_for(server: Scripted, **more: Any) -> dict[str, Any]:
    """Options that reach the server; None leaves one out."""
    found: dict[str, Any] = {
        "key": KEY,
        "secret": SECRET,
        "token": TOKEN,
        "endpoint_url": server.endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    return {name: value for name, value in (found | more).items() if value is not None}


def open_s3(server: Scripted, times: Times = TIMES, **more: Any) -> ObjectClient:
    """The client on obstore, talking to the server."""
    uri = Uri.parse(f"s3://{BUCKET}/run")
    return open_client(uri, options_for(server, **more), times)


def open_s3fs(
    server: Scripted, root: str = "run", times: Times = TIMES, **more: Any
) -> FsspecStorage:
    """The storage over s3fs, talking to the server."""
    uri = Uri.parse(f"s3://{BUCKET}/{root}")
    return FsspecStorage(uri, library=open_library(uri, options_for(server, **more), times))
