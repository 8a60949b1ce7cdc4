"""HTTP/1.1 on the wire, as much as a relay must understand: heads, and where a body ends.

Bytes are passed on as they came, chunk framing included; a body is never held whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = ["PIECE_BYTES", "Head", "body_of", "read_head"]

PIECE_BYTES = 256 << 10
_BODILESS = frozenset({204, 304})


@dataclass(slots=True)
class Head:
    """A start line and headers, in their order and spelling."""

    start: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def without(self, *names: str) -> Head:
        """The same without these headers."""
        return Head(self.start, [pair for pair in self.headers if pair[0].lower() not in names])

    def encode(self) -> bytes:
        """As it goes over the wire."""
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    @property
    def method(self) -> str:
        """Of a request."""
        return self.start.split(" ", 1)[0]

    @property
    def target(self) -> str:
        """Of a request: path and query."""
        return self.start.split(" ")[1]

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.start.split(" ")[1])

    @property
    def is_chunked(self) -> bool:
        """Whether the body has no length of its own."""
        return "chunked" in (self.get("transfer-encoding") or "").lower()

    @property
    def content_length(self) -> int | None:
        """As it is given; None where it is not."""
        told = self.get("content-length")
        return None if told is None or self.is_chunked else int(told)

    @property
    def keeps_open(self) -> bool:
        """Whether this side will use the connection again."""
        told = (self.get("connection") or "").lower()
        return told != "close" and (not self.start.startswith("HTTP/1.0") or told == "keep-alive")


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None where the other side has ended the connection instead."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    start, *lines = raw.decode("latin-1").strip("\r\n").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return Head(start, [(name, value.strip()) for name, _, value in pairs])


async def body_of(
    head: Head, reader: asyncio.StreamReader, *, answers: str | None = None
) -> AsyncIterator[bytes]:
    """The bytes after a head, piece by piece, framing included. answers: the request's method, where
    ``head`` is an answer. ConnectionError: it ended before its end.
    """
    if answers is not None and (answers == "HEAD" or head.status in _BODILESS):
        return
    if head.is_chunked:
        async for piece in _chunks(reader):
            yield piece
        return
    length = head.content_length
    if length is None and answers is None:
        return
    while length is None or length > 0:
        piece = await reader.read(PIECE_BYTES if length is None else min(length, PIECE_BYTES))
        if not piece:
            if length is None:
                return
            raise ConnectionError("the body ended early")
        if length is not None:
            length -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if size:
                yield line
                left = size + 2
                while left:
                    piece = await reader.readexactly(min(left, PIECE_BYTES))
                    left -= len(piece)
                    yield piece
                continue
            tail = line
            while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
                tail += line
            yield tail + line
            return
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the body ended early") from error
