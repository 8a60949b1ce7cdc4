"""What all connections of one proxy share: the plan, the log of requests, the pace of bodies."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult

from tests.faults.proxy.faults import Bandwidth, ProxyPlan
from tests.faults.proxy.wire import Head

__all__ = ["LIMIT_BYTES", "Exchange", "Shared", "reset"]

LIMIT_BYTES = 1 << 20
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
_SECRET_QUERY = re.compile(
    r"(?i)\b(sig|signature|delegation|[\w-]*credential|[\w-]*token|x-[\w-]*-signature)=[^&]*"
)


@dataclass(slots=True)
class Exchange:
    """One request and what became of it. Times are those of ``time.monotonic``; no credentials in it.

    Attributes:
        number: From 1.
        connection: The number of its connection.
        method: Of the request.
        target: Path and query.
        headers: Of the request.
        began_s: When it began, in seconds.
        status: The server's, or the proxy's own; None: no answer came, or none was wanted.
        done: What was planned and done to it, as words.
        sent_bytes: Bytes of its body, to the server.
        answer_bytes: Bytes of the answer's body, to the client.
        ended_s: When it ended, in seconds; None while it is under way.
    """

    number: int
    connection: int
    method: str
    target: str
    headers: Mapping[str, str]
    began_s: float
    status: int | None = None
    done: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    answer_bytes: int = 0
    ended_s: float | None = None

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """The target's query, "" without one."""
        return self.target.partition("?")[2]


class Shared:
    """What all connections of one proxy share."""

    def __init__(
        self, upstream: SplitResult, plan: ProxyPlan, rewrites: Mapping[str, str] | None = None
    ) -> None:
        self.upstream = upstream
        self.plan = plan
        self.rewrites = dict(rewrites or {})
        self.log: list[Exchange] = []
        self.news = threading.Condition()
        self.refused = asyncio.Event()
        self._paces: dict[Bandwidth, float] = {}

    def begin(self, connection: int, head: Head) -> Exchange:
        """Number a request and write it down."""
        headers = {
            name.lower(): value
            for name, value in head.headers
            if name.lower() not in _SECRET_HEADERS and "token" not in name.lower()
        }
        target = _SECRET_QUERY.sub(r"\1=***", head.target)
        with self.news:
            exchange = Exchange(
                len(self.log) + 1, connection, head.method, target, headers, time.monotonic()
            )
            self.log.append(exchange)
            self.news.notify_all()
        return exchange

    def end(self, exchange: Exchange) -> None:
        """It is over, one way or another."""
        with self.news:
            exchange.ended_s = time.monotonic()
            self.news.notify_all()

    async def pace(self, limit: Bandwidth, size_bytes: int) -> None:
        """Wait until so many more bytes may pass."""
        now = time.monotonic()
        free = max(self._paces.get(limit, now), now) + size_bytes / limit.bytes_per_s
        self._paces[limit] = free
        await asyncio.sleep(free - now)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST; bytes that wait to be sent are dropped."""
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):  # closed already
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
