"""What the sink answers: as much of S3 as checkpoints ask for. A store and a request; no I/O.

    answer(store, request) -> Answer

    objects    PUT (If-None-Match, If-Match), GET and HEAD (Range, If-Match), DELETE, batch delete
    uploads    begin, part, complete, abort
    listings   prefix and delimiter, everything in one page
    /-/stats   requests by kind and bytes received, as JSON

Signatures and checksums are not looked at.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape, unescape
from typing import Final

_STEP_BYTES: Final = 1 << 20
_ZEROS: Final = memoryview(bytes(_STEP_BYTES))
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_DATE = "2026-01-01T00:00:00.000Z"


@dataclass(slots=True)
class Blob:
    """Bytes in order: kept, or (an int) so many zeros."""

    pieces: list[bytearray | int]
    etag: str

    @property
    def size_bytes(self) -> int:
        return sum(piece if isinstance(piece, int) else len(piece) for piece in self.pieces)

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """The bytes from ``start`` to ``stop``, without a copy, a MiB at a time."""
        found: list[memoryview] = []
        position = 0
        for piece in self.pieces:
            size = piece if isinstance(piece, int) else len(piece)
            first, last = max(start - position, 0), min(stop - position, size)
            position += size
            if first >= last:
                continue
            for offset in range(first, last, _STEP_BYTES):
                step = min(last - offset, _STEP_BYTES)
                there = _ZEROS if isinstance(piece, int) else memoryview(piece)[offset:]
                found.append(there[:step])
        return found


@dataclass(slots=True)
class Store:
    """Everything the sink knows. Keys are bucket/key."""

    keep_all: bool
    objects: dict[str, Blob] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytearray | int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _last: int = 0

    def new_id(self) -> str:
        """Another one each time."""
        self._last += 1
        return f"{self._last:032x}"


@dataclass(slots=True)
class Request:
    """One request; ``body`` is None where the bytes were thrown away, ``size_bytes`` says how many."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size_bytes: int = 0
    body: bytearray | None = None

    @property
    def bucket_and_key(self) -> tuple[str, str]:
        bucket, _, key = self.key.partition("/")
        return bucket, key

    @property
    def is_framed(self) -> bool:
        """The body is aws-chunked: bytes between lines with sizes and signatures."""
        content = self.headers.get("x-amz-content-sha256", "")
        return content.startswith("STREAMING") or "aws-chunked" in self.headers.get(
            "content-encoding", ""
        )

    def piece(self) -> bytearray | int:
        """What to remember of the body."""
        if self.is_framed and self.body is not None:
            return _unframed(self.body)
        if self.body is not None:
            return self.body
        return int(self.headers.get("x-amz-decoded-content-length", self.size_bytes))


@dataclass(slots=True)
class Answer:
    """Status, headers and body; ``length`` where a HEAD speaks of more than it sends."""

    status: int
    body: list[bytes | memoryview] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None

    def encoded(self) -> list[bytes | memoryview]:
        length = sum(map(len, self.body)) if self.length is None else self.length
        lines = [f"HTTP/1.1 {self.status} Sink", f"Content-Length: {length}", "Server: sink"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ["\r\n".join([*lines, "", ""]).encode(), *self.body]


def answer(store: Store, request: Request) -> Answer:
    """What S3 would say, as far as checkpoints ask it."""
    if request.key == "-/stats":
        return Answer(200, [json.dumps(store.counts).encode()])
    kind = _kind(request)
    store.counts[kind] += 1
    store.counts["body_bytes"] += request.size_bytes
    said = _HANDLERS[kind](store, request)
    if request.method == "HEAD" and said.length is None:
        # A body here would be read as the beginning of the next answer.
        return replace(said, body=[], length=sum(map(len, said.body)))
    return said


def _kind(request: Request) -> str:
    bucket_only = not request.bucket_and_key[1]
    match request.method:
        case "PUT" if bucket_only:
            return "bucket"
        case "PUT":
            return "part" if "partNumber" in request.query else "put"
        case "POST" if "delete" in request.query:
            return "delete_many"
        case "POST":
            return "begin" if "uploads" in request.query else "complete"
        case "GET" | "HEAD" if bucket_only:
            return "list_uploads" if "uploads" in request.query else "list"
        case "GET" | "HEAD":
            return request.method.lower()
        case "DELETE":
            return "abort" if "uploadId" in request.query else "delete"
        case _:
            return "unknown"


def _bucket(store: Store, request: Request) -> Answer:
    return Answer(200)


def _unknown(store: Store, request: Request) -> Answer:
    return _error(501, "NotImplemented")


def _put(store: Store, request: Request) -> Answer:
    standing = store.objects.get(request.key)
    if request.headers.get("if-none-match") == "*" and standing:
        return _error(412, "PreconditionFailed")
    wanted = request.headers.get("if-match")
    if wanted and (standing is None or standing.etag.strip('"') != wanted.strip('"')):
        return _error(412 if standing else 404, "PreconditionFailed" if standing else "NoSuchKey")
    if source := request.headers.get("x-amz-copy-source"):
        return _copy(store, request, urllib.parse.unquote(source).lstrip("/"))
    blob = Blob([request.piece()], f'"{store.new_id()}"')
    store.objects[request.key] = blob
    return Answer(200, headers={"ETag": blob.etag})


def _copy(store: Store, request: Request, source: str) -> Answer:
    """ckptfs copies nothing; torch's FsspecWriter renames its metadata so."""
    found = store.objects.get(source)
    if found is None:
        return _error(404, "NoSuchKey")
    blob = Blob(found.pieces, f'"{store.new_id()}"')
    store.objects[request.key] = blob
    return _xml(
        "CopyObjectResult",
        f"<ETag>{escape(blob.etag)}</ETag><LastModified>{_DATE}</LastModified>",
    )


def _part(store: Store, request: Request) -> Answer:
    parts = store.uploads.get(request.query["uploadId"])
    if parts is None:
        return _error(404, "NoSuchUpload")
    parts[int(request.query["partNumber"])] = request.piece()
    return Answer(200, headers={"ETag": f'"{store.new_id()}"'})


def _begin(store: Store, request: Request) -> Answer:
    upload_id = store.new_id()
    store.uploads[upload_id] = {}
    bucket, key = request.bucket_and_key
    return _xml(
        "InitiateMultipartUploadResult",
        f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>",
    )


def _complete(store: Store, request: Request) -> Answer:
    parts = store.uploads.pop(request.query["uploadId"], None)
    if parts is None:
        return _error(404, "NoSuchUpload")
    blob = Blob([parts[number] for number in sorted(parts)], f'"{store.new_id()}-{len(parts)}"')
    store.objects[request.key] = blob
    bucket, key = request.bucket_and_key
    return _xml(
        "CompleteMultipartUploadResult",
        f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{escape(blob.etag)}</ETag>",
    )


def _abort(store: Store, request: Request) -> Answer:
    known = store.uploads.pop(request.query["uploadId"], None) is not None
    return Answer(204) if known else _error(404, "NoSuchUpload")


def _delete(store: Store, request: Request) -> Answer:
    store.objects.pop(request.key, None)
    return Answer(204)


def _delete_many(store: Store, request: Request) -> Answer:
    bucket, _ = request.bucket_and_key
    asked = request.piece()
    assert isinstance(asked, bytearray)
    keys = re.findall(r"<Key>(.*?)</Key>", asked.decode())
    for key in keys:
        store.objects.pop(f"{bucket}/{unescape(key)}", None)
    return _xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys))


def _list(store: Store, request: Request) -> Answer:
    """Everything in one page: no test lists a million keys here."""
    bucket, _ = request.bucket_and_key
    prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter")
    lines: dict[str, str] = {}
    for full, blob in sorted(store.objects.items()):
        if not full.startswith(f"{bucket}/{prefix}"):
            continue
        key = full.removeprefix(f"{bucket}/")
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if found:
            common = escape(prefix + head + found)
            lines[common] = f"<CommonPrefixes><Prefix>{common}</Prefix></CommonPrefixes>"
            continue
        lines[key] = (
            f"<Contents><Key>{escape(key)}</Key><Size>{blob.size_bytes}</Size>"
            f"<ETag>{escape(blob.etag)}</ETag><LastModified>{_DATE}</LastModified></Contents>"
        )
    return _xml(
        "ListBucketResult",
        f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(lines)}</KeyCount>"
        f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(lines.values())}",
    )


def _list_uploads(store: Store, request: Request) -> Answer:
    bucket, _ = request.bucket_and_key
    return _xml(
        "ListMultipartUploadsResult", f"<Bucket>{bucket}</Bucket><IsTruncated>false</IsTruncated>"
    )


def _get(store: Store, request: Request) -> Answer:
    blob = store.objects.get(request.key)
    if blob is None:
        return _error(404, "NoSuchKey")
    wanted = request.headers.get("if-match")
    if wanted and wanted.strip('"') != blob.etag.strip('"'):
        return _error(412, "PreconditionFailed")
    size = blob.size_bytes
    start, stop, status = 0, size, 200
    headers = {
        "ETag": blob.etag,
        "Accept-Ranges": "bytes",
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Type": "binary/octet-stream",
    }
    if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            return _error(416, "InvalidRange")
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    if request.method == "HEAD":
        return Answer(status, headers=headers, length=stop - start)
    return Answer(status, [*blob.slices(start, stop)], headers)


_HANDLERS: Final[Mapping[str, Callable[[Store, Request], Answer]]] = {
    "bucket": _bucket,
    "put": _put,
    "part": _part,
    "begin": _begin,
    "complete": _complete,
    "abort": _abort,
    "delete": _delete,
    "delete_many": _delete_many,
    "list": _list,
    "list_uploads": _list_uploads,
    "get": _get,
    "head": _get,
    "unknown": _unknown,
}


def _xml(tag: str, content: str) -> Answer:
    body = f"{_XML}<{tag}>{content}</{tag}>".encode()
    return Answer(200, [body], {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Answer:
    body = f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer(status, [body], {"Content-Type": "application/xml"})


def _unframed(body: bytearray) -> bytearray:
    """The bytes between the lines of an aws-chunked body."""
    result, position = bytearray(), 0
    while True:
        end = body.index(b"\r\n", position)
        size = int(body[position:end].split(b";")[0], 16)
        if size == 0:
            return result
        result += body[end + 2 : end + 2 + size]
        position = end + 2 + size + 2


def parsed(head: str) -> Request:
    """A request's first line and headers, without its body."""
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    url = urllib.parse.urlsplit(target)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    key = urllib.parse.unquote(url.path).removeprefix("/")
    return Request(method, key, query, headers, int(headers.get("content-length", "0")))
