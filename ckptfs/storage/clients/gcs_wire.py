"""One GCS request through gcsfs' session and credentials: sent from any thread, bounded by silence.

    GcsWire.ask(Call(...)) -> Reply      any status: what an answer means is the client's business

gcsfs finds the credentials and makes the aiohttp session (its options, and what google-auth reads
from the environment); requests run on fsspec's event loop, whose thread does not survive a fork: a
child process has its own. Nothing of gcsfs retries here: its requests, which do, are not used.

The core filesystem class is taken, never the one for hierarchical buckets, whose question about the
kind of bucket waits a minute where no Google answers it.

A token is renewed 5 minutes before it ends, in the thread that asks, so that nobody else waits. One
that is refused earlier is renewed once (``renew``). Bodies are slices of the caller's buffers, and
each that the socket took moves the deadline; the buffers are left alone after ``ask`` returned or
raised, Ctrl-C included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.clients.gcs_login import is_raw, refresh
from ckptfs.storage.clients.gcs_options import NAMED_TOKENS, GcsOptions
from ckptfs.storage.clients.running import run_on
from ckptfs.storage.options import Times

__all__ = ["Call", "GcsWire", "Reply", "ShortError", "UnusableError"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_PIECE_BYTES: Final = 256 << 10
_READ_BYTES: Final = 1 << 20
_LET_GO_S: Final = 5.0
_CLOSE_S: Final = 1.0
_GOOD: Final = (200, 206)


class ShortError(Exception):
    """The answer's body is not the bytes that were asked for: too few, or (surplus) too many."""

    def __init__(self, *, surplus: bool) -> None:
        super().__init__("surplus" if surplus else "short")
        self.surplus = surplus


class UnusableError(Exception):
    """The credentials that were given or found cannot be read."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. path: quoted, from the root of the endpoint. body: buffers that follow each other.
    out: where the bytes of a good answer go, all of it. check: raises of a number of bytes that is too large.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[bytes | memoryview, ...] | None = None
    out: memoryview | None = None
    check: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Header names as in HTTP, in any case. token: the one it was asked with."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    token: str | None


@dataclass(frozen=True, slots=True)
class _Open:
    """What this process has open."""

    pid: int
    fs: Any
    location: str


class GcsWire:
    """The session behind one bucket. Lazy, picklable, thread-safe."""

    def __init__(self, options: GcsOptions, times: Times) -> None:
        self.options = options
        self.times = times
        self._forget()

    def _forget(self) -> None:
        self._lock = ProcessLock()
        self._open: _Open | None = None
        self._inherited: list[_Open] = []
        self._renewed: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "times": self.times}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def payer(self) -> str | None:
        """The project that pays, where it is not the bucket's own. May look for credentials."""
        pays = self.options.requester_pays
        if pays is True:
            return str(self._opened().fs.project or "") or None
        return pays or None

    def ask(self, call: Call) -> Reply:
        """One try. Raises what aiohttp and google-auth raise, ShortError, and UnusableError."""
        found = self._opened()
        headers = dict(call.headers)
        # May ask for a new token: in this thread, for the loop's has other requests to serve.
        found.fs.credentials.apply(headers)
        reply = self._run(found, self._exchange(found, call, headers))
        if reply.status != HTTPStatus.UNAUTHORIZED and reply.token == self._renewed:
            self._renewed = None  # it is good: when it is refused one day, it may be renewed again
        return reply

    def renew(self, token: str | None) -> bool:
        """Whether another token may help after this one was refused; asks for one, once per token.

        False: there are no credentials, they cannot be renewed, or this one is fresh already.
        Raises google-auth's TransportError: nobody answers where tokens are issued.
        """
        holder = self._opened().fs.credentials
        if holder.credentials is None or token is None:
            return False
        with self._lock:
            if holder.credentials.token != token:
                return True  # somebody else was faster
            if self._renewed == token:
                return False
            from google.auth.exceptions import GoogleAuthError, TransportError

            try:
                refresh(holder.credentials)
            except TransportError:
                raise  # nobody answered: that is no refusal
            except GoogleAuthError as error:
                log.debug("the token could not be renewed: %s", type(error).__name__)
                return False
            self._renewed = holder.credentials.token
            return bool(self._renewed != token)

    def close(self) -> None:
        """Close the session; the next request makes another, with credentials of that time."""
        with self._lock:
            found, self._open = self._open, None
        if found is not None and found.fs.session is not None:
            _close(found.pid, found.fs.loop, found.fs.session)

    # -- on the event loop -------------------------------------------------------------

    async def _exchange(self, found: _Open, call: Call, headers: dict[str, str]) -> Reply:
        import aiohttp
        from yarl import URL

        session = await self._session(found)
        query = f"?{urlencode(call.query)}" if call.query else ""
        sent = headers.get("Authorization", headers.get("authorization", ""))
        async with asyncio.timeout(self.times.connect_s + self.times.request_s) as limit:

            def move() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + self.times.request_s)

            if call.body is not None:
                headers["Content-Length"] = str(sum(map(len, call.body)))
            async with session.request(
                call.method,
                URL(f"{found.location}{call.path}{query}", encoded=True),
                data=None if call.body is None else _pieces(call.body, move),
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=self.options.request_s, sock_connect=self.times.connect_s
                ),
            ) as answer:
                move()
                body = await _received(answer, call.out, move, call.check)
                token = sent.removeprefix("Bearer ") or None
                return Reply(answer.status, answer.headers, body, token)

    async def _session(self, found: _Open) -> Any:
        if found.fs.session is None:
            session = await found.fs._set_session()  # noqa: SLF001 - the only way to it
            # gcsfs closes it at the end of the process from the wrong thread, with noise: we are first.
            weakref.finalize(found.fs, _close, os.getpid(), found.fs.loop, session)
        return found.fs.session

    def _run(self, found: _Open, work: Coroutine[Any, Any, T]) -> T:
        return run_on(found.fs.loop, work, _LET_GO_S)

    # -- the session -------------------------------------------------------------------

    def _opened(self) -> _Open:
        with self._lock:
            found = self._open
            if found is not None and found.pid != os.getpid():
                # Kept, not closed: its sockets are the parent's.
                self._inherited.append(found)
                found = None
            if found is None:
                found = self._open = self._connect()
            return found

    def _connect(self) -> _Open:
        from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

        options = self.options
        asked = {"project": options.project, "access": options.access}
        try:
            fs = GCSFileSystem(
                **{name: value for name, value in asked.items() if value is not None},
                token=_usable(options.token),
                endpoint_url=options.endpoint if options.is_custom else None,
                session_kwargs=self._session_kwargs(),
                skip_instance_cache=True,
                use_listings_cache=False,
            )
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise UnusableError(type(error).__name__) from error
        return _Open(os.getpid(), fs, fs._location)  # noqa: SLF001 - Google's own, mutual TLS or not

    def _session_kwargs(self) -> dict[str, Any]:
        # HTTPS_PROXY and its kin count, as they do for every other client.
        return {"trust_env": True, "read_bufsize": _READ_BYTES, **self.options.session_kwargs}


def _close(pid: int, loop: asyncio.AbstractEventLoop, session: Any) -> None:
    """Close a session of this process, on its own loop."""
    if pid != os.getpid() or session.closed or not loop.is_running():
        return
    closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
    if _running() is not loop:
        with contextlib.suppress(TimeoutError):
            closing.result(_CLOSE_S)


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _usable(token: Any) -> Any:
    """What gcsfs takes. A token itself becomes credentials here: gcsfs would ask Google about it,
    which a private endpoint does not want and an offline host cannot.
    """
    if is_raw(token):
        from google.oauth2.credentials import Credentials

        made: Any = Credentials
        return made(token)
    if not isinstance(token, str) or token in NAMED_TOKENS:
        return token
    path = os.path.expanduser(token)
    if not os.path.exists(path):
        raise FileNotFoundError(path)  # gcsfs would take the path for a token
    return path


async def _pieces(
    buffers: tuple[bytes | memoryview, ...], moved: Callable[[], None]
) -> AsyncIterator[bytes | memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
            moved()


async def _received(
    answer: Any,
    out: memoryview | None,
    moved: Callable[[], None],
    check: Callable[[int], None] | None,
) -> bytes:
    """The body; of a good answer into ``out``, where there is one."""
    if out is None or answer.status not in _GOOD:
        chunks, done = [], 0
        if check is not None:
            check(answer.content_length or 0)
        async for chunk in answer.content.iter_any():
            chunks.append(chunk)
            done += len(chunk)
            if check is not None:
                check(done)
            moved()
        return b"".join(chunks)
    length = answer.content_length
    if length is not None and length != len(out):
        answer.close()
        raise ShortError(surplus=length > len(out))
    at = 0
    async for chunk in answer.content.iter_any():
        if at + len(chunk) > len(out):
            answer.close()
            raise ShortError(surplus=True)
        out[at : at + len(chunk)] = chunk
        at += len(chunk)
        moved()
    if at < len(out):
        raise ShortError(surplus=False)
    return b""
