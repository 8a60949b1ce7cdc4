"""One client's connection: each request is counted, done to as planned, forwarded, answered.

    head -> plan -> wait, hold -> forward head and body -> the server's answer -> hold -> the client

Every request gets a connection of its own to the server, so that no fault of an idle one is taken
for a planned one. What was cut off is never forwarded as if it were whole: a body that ends early on
one side is reset on the other.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from tests.faults.proxy.faults import (
    Action,
    Answer,
    At,
    Bandwidth,
    Cut,
    Delay,
    Hold,
    HoldFile,
    Refuse,
    Reset,
    Strip,
    Trickle,
    Truncate,
)
from tests.faults.proxy.shared import LIMIT_BYTES, Exchange, Shared, reset
from tests.faults.proxy.wire import Head, body_of, read_head

__all__ = ["Relay"]

_POLL_S = 0.005  # while a request is held
A = TypeVar("A")


class _SeveredError(Exception):
    """The connection to the client is to be cut now."""


class Relay:
    """The requests of one connection, one after the other."""

    def __init__(
        self,
        shared: Shared,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._shared, self._number = shared, number
        self._reader, self._writer = reader, writer

    async def run(self) -> None:
        """Until one side ends it, or a fault does."""
        found: socket.socket | None = self._writer.get_extra_info("socket")
        if found is not None:
            # Head and body are two writes: with Nagle's algorithm every answer would take 40 ms.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (head := await read_head(self._reader)) is not None:
                exchange = self._shared.begin(self._number, head)
                try:
                    if not await self._exchange(head, exchange):
                        break
                except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
                    exchange.done.append(f"broke: {error}")
                    reset(self._writer)
                    return
                finally:
                    self._shared.end(exchange)
            self._writer.close()
        except _SeveredError:
            reset(self._writer)

    async def _exchange(self, head: Head, exchange: Exchange) -> bool:
        """One request; whether the connection stays open."""
        actions = self._shared.plan.begin(head.method, head.target)
        for action in actions:
            if isinstance(action, Delay):
                exchange.done.append(f"delayed {action.wait_s:g} s")
                await asyncio.sleep(action.wait_s)
        await _hold(actions, At.BEFORE, exchange)
        cut = _first(actions, Reset)
        if _first(actions, Refuse):
            self._shared.refused.set()
            exchange.done.append("refused")
            raise _SeveredError
        if cut and _is_early(cut, head):
            await self._sever(cut, exchange)
        if answer := _first(actions, Answer):
            await self._answer_alone(answer, head, exchange)
            return False
        upstream = await self._connect()
        try:
            found = await self._ask(upstream, head, actions, exchange)
            await self._pass_on(found, upstream[0], head.method, actions, exchange)
            return found.keeps_open and head.keeps_open and not _first(actions, Truncate)
        finally:
            reset(upstream[1])

    async def _sever(self, cut: Reset, exchange: Exchange) -> NoReturn:
        exchange.done.append(f"{'silenced' if cut.silent else 'reset'} {cut.at.value}")
        if cut.do is not None:
            cut.do(exchange)
        while cut.silent and await self._reader.read(LIMIT_BYTES):
            continue
        raise _SeveredError

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = self._shared.upstream
        secure = where.scheme == "https"
        return await asyncio.open_connection(
            where.hostname,
            where.port or (443 if secure else 80),
            limit=LIMIT_BYTES,
            ssl=ssl.create_default_context() if secure else None,
        )

    # -- the request --------------------------------------------------------------------

    async def _ask(
        self,
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        head: Head,
        actions: Sequence[Action],
        exchange: Exchange,
    ) -> Head:
        """Forward a request; the head of the server's answer."""
        reader, writer = upstream
        cut = _first(actions, Reset)
        stop = _stop(cut, At.REQUEST, head)
        gone = [a.header.lower() for a in actions if isinstance(a, Strip)]
        exchange.done += [f"stripped {name}" for name in gone if head.get(name)]
        writer.write(head.without("expect", *gone).encode())
        if head.get("expect"):
            # Ours to say: it is never forwarded, so that the server's own does not come later.
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        answering = asyncio.ensure_future(_final_head(reader))
        try:
            async for piece in body_of(head, self._reader):
                part = piece if stop is None else piece[: stop - exchange.sent_bytes]
                await self._paced(actions, len(part))
                if not answering.done():  # it did not want the rest, as after a failed condition
                    writer.write(part)
                    await writer.drain()
                exchange.sent_bytes += len(part)
                if cut and exchange.sent_bytes == stop:
                    await self._sever(cut, exchange)
            await writer.drain()
            found = await answering
        finally:
            answering.cancel()
        if found is None:
            raise ConnectionError("the server gave no answer")
        exchange.status = found.status
        return found

    async def _paced(self, actions: Sequence[Action], size_bytes: int) -> None:
        for action in actions:
            if isinstance(action, Bandwidth):
                await self._shared.pace(action, size_bytes)

    # -- the answer ---------------------------------------------------------------------

    async def _answer_alone(self, answer: Answer, head: Head, exchange: Exchange) -> None:
        if not head.get("expect"):  # else the body is not on its way
            async for _ in body_of(head, self._reader):
                continue
        code, retry = answer.code, answer.retry_after_s
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        text = "" if head.method == "HEAD" else body
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
        headers += [] if retry is None else [("Retry-After", str(retry))]
        told = Head(f"HTTP/1.1 {answer.status} {code}", [*headers, ("Connection", "close")])
        exchange.status = answer.status
        exchange.done.append(f"answered {answer.status}")
        self._writer.write(told.encode() + text.encode())
        await self._writer.drain()

    async def _pass_on(
        self,
        answer: Head,
        upstream: asyncio.StreamReader,
        method: str,
        actions: Sequence[Action],
        exchange: Exchange,
    ) -> None:
        cut = _first(actions, Reset)
        body = body_of(answer, upstream, answers=method)
        if cut and cut.at is At.ACTED:
            async for _ in body:  # a store may begin its answer before it has acted
                continue
            await self._sever(cut, exchange)
        await _hold(actions, At.ACTED, exchange)
        short = _first(actions, Truncate)
        trickle = _first(actions, Trickle)
        stop = short.after_bytes if short else _stop(cut, At.ANSWER, answer)
        if cut and stop == 0:
            await self._sever(cut, exchange)  # an answer without a body has no middle
        await self._send(self._told(answer, short).encode(), trickle)
        if stop != 0:
            async for piece in body:
                part = piece if stop is None else piece[: stop - exchange.answer_bytes]
                await self._paced(actions, len(part))
                await self._send(part, trickle)
                exchange.answer_bytes += len(part)
                if exchange.answer_bytes == stop:
                    break
        if cut and cut.at is At.ANSWER:
            await self._sever(cut, exchange)
        if short:
            exchange.done.append(f"truncated, {short.cut.value}")
        if trickle:
            exchange.done.append("trickled")

    def _told(self, answer: Head, short: Truncate | None) -> Head:
        headers = [
            (name, self._rewritten(value) if name.lower() == "location" else value)
            for name, value in answer.headers
        ]
        length = answer.content_length
        if short and short.cut is Cut.LYING and length is not None:
            lie = str(min(short.after_bytes, length))
            headers = [(n, lie if n.lower() == "content-length" else v) for n, v in headers]
        return Head(answer.start, headers)

    def _rewritten(self, location: str) -> str:
        for old, new in self._shared.rewrites.items():
            if location.startswith(old):
                return new + location.removeprefix(old)
        return location

    async def _send(self, data: bytes, trickle: Trickle | None) -> None:
        if trickle is None:
            self._writer.write(data)
            await self._writer.drain()
            return
        for byte in data:
            self._writer.write(bytes([byte]))
            await self._writer.drain()
            await asyncio.sleep(1 / trickle.bytes_per_s)


async def _final_head(reader: asyncio.StreamReader) -> Head | None:
    while (head := await read_head(reader)) is not None and head.status < 200:
        continue
    return head


async def _hold(actions: Sequence[Action], at: At, exchange: Exchange) -> None:
    for action in actions:
        if isinstance(action, Hold) and action.at is at:
            exchange.done.append(f"held {at.value}")
            action.gate.reached.set()
            while not action.gate.release.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(_POLL_S)
        elif isinstance(action, HoldFile) and action.at is at:
            exchange.done.append(f"held {at.value}")
            os.close(os.open(f"{action.path}.reached", os.O_CREAT | os.O_WRONLY, 0o666))
            while not os.path.exists(action.path):  # noqa: ASYNC110, ASYNC240 - another process
                await asyncio.sleep(_POLL_S)


def _first(actions: Sequence[Action], kind: type[A]) -> A | None:
    return next((action for action in actions if isinstance(action, kind)), None)


def _is_early(cut: Reset, head: Head) -> bool:
    """Whether nothing is to be forwarded: at once, or in the middle of a body that is not there."""
    bodiless = not head.is_chunked and not head.content_length
    return cut.at is At.BEFORE or (cut.at is At.REQUEST and bodiless)


def _stop(cut: Reset | None, at: At, head: Head) -> int | None:
    """After how many bytes of this body the connection is cut; None: it is not."""
    if cut is None or cut.at is not at:
        return None
    if cut.after_bytes is not None:
        return cut.after_bytes
    length = head.content_length
    return 1 if length is None else length // 2
