"""A proxy that goes wrong on purpose, for any HTTP/1.1 object store and WebHDFS.

    with FaultProxy("http://127.0.0.1:9000", [HttpFault("PUT", "*/log/*", Nth(1), LOSE)]) as proxy:
        ckptfs.save(state, "s3://bucket/run/step_1", storage_options={"endpoint_url": proxy.url})
    proxy.requests("PUT", "*/log/*")     # what was asked, what was answered, what was done to it

    python -m tests.faults.proxy http://127.0.0.1:9000 --port 9001 "lose:PUT:*/log/*:1" --log FILE

It listens on a free loopback port, in a thread of its own, counts requests, and does to them what
the plan says (``tests.faults.proxy.faults``, text form included). The Host header is passed on
as it came: clients sign it for the proxy, and radosgw, moto, Azurite and AWS-style servers check the
signature against what they are sent. No TLS on its own side; an https upstream is verified.

``rewrites`` replaces prefixes of Location headers, so that the redirect of a WebHDFS name node leads
to another proxy and not around it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.faults.proxy.faults import (
    LOSE,
    Action,
    Answer,
    At,
    Bandwidth,
    Chance,
    Cut,
    Delay,
    Each,
    Gate,
    Hold,
    HoldFile,
    HttpFault,
    Nth,
    ProxyPlan,
    Refuse,
    Reset,
    Strip,
    Trickle,
    Truncate,
    matches,
    parse_faults,
)
from tests.faults.proxy.relay import Relay
from tests.faults.proxy.shared import LIMIT_BYTES, Exchange, Shared, reset

__all__ = [
    "LOSE",
    "Action",
    "Answer",
    "At",
    "Bandwidth",
    "Chance",
    "Cut",
    "Delay",
    "Each",
    "Exchange",
    "FaultProxy",
    "Gate",
    "Hold",
    "HoldFile",
    "HttpFault",
    "Nth",
    "ProxyPlan",
    "Refuse",
    "Reset",
    "Strip",
    "Trickle",
    "Truncate",
    "parse_faults",
]

_log = logging.getLogger("ckptfs.testing")


class FaultProxy:
    """A proxy before a server, from ``__enter__`` to ``__exit__``. Thread-safe; not to be carried over a fork
    while it runs.

    Args:
        upstream: The server, scheme://host:port.
        plan: A ProxyPlan, faults, or their text form.
        seed: Of a plan made here.
        port: The proxy's; 0 is a free one.
        rewrites: Beginnings of redirects that are replaced; None: none.
        listener: A socket bound and listening already, given by a caller that must fork in between; None:
            made here.

    Attributes:
        url: Where clients reach it.
    """

    def __init__(
        self,
        upstream: str,
        plan: ProxyPlan | Iterable[HttpFault] | str = (),
        *,
        seed: int = 0,
        port: int = 0,
        rewrites: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        faults = parse_faults(plan) if isinstance(plan, str) else plan
        self.plan = faults if isinstance(faults, ProxyPlan) else ProxyPlan(faults, seed=seed)
        self._shared = Shared(urlsplit(upstream), self.plan, rewrites)
        self._listener = listener or _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self._connections = 0

    # -- life ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._accept())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    def refuse(self) -> None:
        """Reset every connection and refuse new ones (ECONNREFUSED)."""
        self._do(self._refuse())

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._do(self._accept())

    # -- what happened ------------------------------------------------------------------

    @property
    def log(self) -> list[Exchange]:
        """Every request so far, in the order of their heads."""
        with self._shared.news:
            return list(self._shared.log)

    def requests(self, method: str = "*", path: str = "*") -> list[Exchange]:
        """Return those with a method and a path (or path?query) that match these shell patterns.

        Args:
            method: Pattern of the method.
            path: Pattern of the path.
        """
        return [e for e in self.log if matches(e.method, e.target, method, path)]

    def forget(self) -> None:
        """Begin the log again, from number 1."""
        with self._shared.news:
            self._shared.log.clear()

    def wait_for(self, condition: Callable[[list[Exchange]], bool], timeout_s: float = 30) -> bool:
        """Wait until the log satisfies a condition.

        Args:
            condition: Called with the log.
            timeout_s: How many seconds at most.

        Returns:
            False after ``timeout_s``.
        """
        with self._shared.news:
            return self._shared.news.wait_for(lambda: condition(self._shared.log), timeout_s)

    def settle(self, timeout_s: float = 30) -> bool:
        """Wait until no request is under way.

        Args:
            timeout_s: How many seconds at most.

        Returns:
            False after ``timeout_s``.
        """
        return self.wait_for(lambda log: all(e.ended_s is not None for e in log), timeout_s)

    # -- inside -------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)  # type: ignore[arg-type]

    async def _accept(self) -> None:
        if self._server is None:
            if self._listener.fileno() < 0:
                self._listener = _listen(self.port)
            self._shared.refused.clear()
            self._server = await asyncio.start_server(
                self._serve, sock=self._listener, limit=LIMIT_BYTES
            )

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()  # and with it the listening socket
            self._server = None
        for writer in list(self._clients):
            reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        self._clients.add(writer)
        try:
            await Relay(self._shared, self._connections, reader, writer).run()
        except asyncio.CancelledError:
            reset(writer)  # the proxy ends; asyncio would report the cancellation as an error
        except Exception:  # noqa: BLE001 - the log is where a test looks
            # No one waits for this task; without a word the client's reset would look planned.
            _log.exception("the proxy itself failed")
            reset(writer)
        finally:
            self._clients.discard(writer)
        if self._shared.refused.is_set():
            await self._refuse()

    async def _stop(self) -> None:
        await self._refuse()
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener
