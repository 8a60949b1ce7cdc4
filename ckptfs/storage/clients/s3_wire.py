"""One S3 request through s3fs' configured client: sent from any thread, bounded by silence.

    S3Wire.ask(operation, parameters, body)    one request, one answer (a dict of botocore's)
    S3Wire.fill(parameters, out)               a GET whose body goes straight into a buffer

s3fs makes the client (credentials, profiles, proxies, certificates, endpoint: all its options and
botocore's environment variables); requests run on fsspec's event loop, whose thread does not survive
a fork: a child process makes its own client. botocore's retries are off, its region redirection too,
because it asks HeadBucket, and so is ``Expect: 100-continue``, a round trip for each part.

Bodies are not copied here: ``Body`` hands slices of the caller's buffer to aiohttp, and each slice
that the socket took moves the deadline, but not beyond what a very slow line needs (``_SLOW_BYTES`` in
``request_s``): a server that trickles is given up too. The caller's buffer is not touched after a method returned
or raised, Ctrl-C included.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeVar

from ckptfs.storage.clients.base import Buffer
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.clients.running import run_on
from ckptfs.storage.clients.s3_endpoint import endpoint_name
from ckptfs.storage.clients.s3_options import OPERATIONS, S3Options, bare, service_loader
from ckptfs.storage.options import Times

__all__ = ["Body", "S3Wire", "Short"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PIECE_BYTES: Final = 256 << 10  # as much as a loopback or 10 Gbit socket takes at once
_READ_BYTES: Final = 1 << 20
_SLOW_BYTES: Final = 8 << 20
_POOL: Final = 128
_LET_GO_S: Final = 5.0


class Short(Exception):  # noqa: N818 - a finding that the client tells in its own words
    """The answer's body is not the bytes that were asked for: too few, or (surplus) too many."""

    def __init__(self, received_bytes: int, *, surplus: bool) -> None:
        super().__init__(f"{received_bytes} bytes")
        self.surplus = surplus


class Body:
    """A buffer as botocore reads it (to sign it) and as aiohttp sends it, without a copy."""

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data).cast("B")
        self._at = 0
        self.moved: Callable[[], None] = lambda: None

    def crc32(self) -> str:
        """As the header x-amz-checksum-crc32 wants it."""
        return base64.b64encode(zlib.crc32(self._view).to_bytes(4, "big")).decode()

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes, as a view."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        found = self._view[self._at : end]
        self._at += len(found)
        self.moved()
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As a file's."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """As a file's."""
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._view), _PIECE_BYTES):
            yield self._view[start : start + _PIECE_BYTES]
            self.moved()


@dataclass(frozen=True, slots=True)
class _Open:
    """A client of this process. adds: the crc32 of bodies is sent for the server to verify."""

    pid: int
    fs: Any
    s3: Any
    endpoint: str
    adds_crc32: bool
    members: Mapping[str, frozenset[str]]


class _Deadline:
    """request_s from the last byte that moved, and no more in all than ``size_bytes`` may take."""

    def __init__(self, times: Times, size_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        # Until the first byte: also the time for a name, a connection and fresh credentials.
        first_s = now_s + times.connect_s + times.request_s
        self._request_s = times.request_s
        self._last_s = first_s + times.request_s * size_bytes / _SLOW_BYTES
        self.timeout = asyncio.timeout_at(first_s)

    def move(self) -> None:
        """Bytes moved."""
        now_s = asyncio.get_running_loop().time()
        self.timeout.reschedule(min(now_s + self._request_s, self._last_s))


class S3Wire:
    """The client behind one bucket. Lazy, picklable, thread-safe."""

    def __init__(self, options: S3Options, times: Times) -> None:
        self.options = options
        self.times = times
        self._lock = ProcessLock()
        self._open: _Open | None = None
        self._inherited: list[_Open] = []

    def __getstate__(self) -> dict[str, Any]:
        if "session" in self.options.client:
            raise TypeError(
                "storage_options hold a session, which does not pickle: name a profile instead"
            )
        return self.__dict__ | {"_lock": None, "_open": None, "_inherited": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = ProcessLock()

    @property
    def endpoint(self) -> str:
        """Where requests go, as far as it is known."""
        found = self._open
        return found.endpoint if found else endpoint_name(self.options)

    @property
    def adds_crc32(self) -> bool:
        """Whether bodies go with a crc32 that the server verifies (else their SHA-256 is signed)."""
        return self._opened().adds_crc32

    def forget(self) -> None:
        """Let the client go: the next request makes another, with credentials of that time."""
        with self._lock:
            self._open = None

    def ask(
        self, operation: str, parameters: Mapping[str, Any], body: Body | None = None
    ) -> dict[str, Any]:
        """The answer to one request; raises whatever botocore raises."""
        from botocore import xform_name

        found = self._opened()
        wanted = self._with_options(found, operation, parameters)
        if body is not None:
            wanted["Body"] = body
        return self._run(found, self._ask(getattr(found.s3, xform_name(operation)), wanted, body))

    def fill(self, parameters: Mapping[str, Any], out: memoryview) -> dict[str, Any]:
        """GET into ``out``, all of it; the answer without its body. Short: it is not all of it."""
        found = self._opened()
        wanted = self._with_options(found, "GetObject", parameters)
        return self._run(found, self._fill(found.s3.get_object, wanted, out))

    def fetch(
        self, parameters: Mapping[str, Any], check: Callable[[int], None] = lambda _: None
    ) -> tuple[bytes, dict[str, Any]]:
        """GET of all bytes, and the answer. check: raises of a number of bytes that is too large."""
        found = self._opened()
        wanted = self._with_options(found, "GetObject", parameters)
        return self._run(found, self._fetch(found.s3.get_object, wanted, check))

    # -- on the event loop -------------------------------------------------------------

    async def _ask(
        self, method: Any, parameters: Mapping[str, Any], body: Body | None
    ) -> dict[str, Any]:
        limit = _Deadline(self.times, len(body) if body is not None else 0)
        async with limit.timeout:
            if body is not None:
                body.moved = limit.move
            answer: dict[str, Any] = await method(**parameters)
            return answer

    async def _fill(
        self, method: Any, parameters: Mapping[str, Any], out: memoryview
    ) -> dict[str, Any]:
        limit = _Deadline(self.times, len(out))
        async with limit.timeout:
            answer: dict[str, Any] = await method(**parameters)
            stream, at = answer.pop("Body"), 0
            try:
                while chunk := await stream.read(_READ_BYTES):
                    if at + len(chunk) > len(out):
                        raise Short(at + len(chunk), surplus=True)
                    out[at : at + len(chunk)] = chunk
                    at += len(chunk)
                    limit.move()
            except BaseException:
                stream.close()
                raise
        if at < len(out):
            raise Short(at, surplus=False)
        return answer

    async def _fetch(
        self, method: Any, parameters: Mapping[str, Any], check: Callable[[int], None]
    ) -> tuple[bytes, dict[str, Any]]:
        limit = _Deadline(self.times, _SLOW_BYTES)
        async with limit.timeout:
            answer: dict[str, Any] = await method(**parameters)
            stream, chunks, done = answer.pop("Body"), [], 0
            try:
                check(int(answer.get("ContentLength") or 0))
                while chunk := await stream.read(_READ_BYTES):
                    chunks.append(chunk)
                    done += len(chunk)
                    check(done)
                    limit.move()
            except BaseException:
                stream.close()
                raise
        return b"".join(chunks), answer

    def _run(self, found: _Open, work: Coroutine[Any, Any, T]) -> T:
        return run_on(found.fs.loop, work, _LET_GO_S)

    # -- the client --------------------------------------------------------------------

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
        import s3fs
        from fsspec.asyn import sync

        options = dict(self.options.client)
        said = dict(options.pop("config_kwargs", {}))
        options["config_kwargs"] = _config(self.times, said)
        if "session" not in options:
            profile = options.pop("profile", None)
            options["session"] = import_module("aiobotocore.session").AioSession(profile=profile)
            options["session"].register_component("data_loader", service_loader())
        fs = s3fs.S3FileSystem(
            **options, asynchronous=False, skip_instance_cache=True, use_listings_cache=False
        )
        s3 = sync(fs.loop, fs.set_session)
        s3.meta.events.register("before-call.s3", _plainly)
        members = {
            name: frozenset(s3.meta.service_model.operation_model(name).input_shape.members)
            for name in OPERATIONS
        }
        endpoint = str(s3.meta.endpoint_url)
        return _Open(os.getpid(), fs, s3, bare(endpoint), _adds_crc32(s3, said, fs, self), members)

    def _with_options(
        self, found: _Open, operation: str, parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        known = found.members[operation]
        chosen = {name: value for name, value in self.options.parameters.items() if name in known}
        return chosen | dict(parameters)


def _config(times: Times, said: Mapping[str, Any]) -> dict[str, Any]:
    """What we ask of botocore, below what the user asks of it."""
    ours: dict[str, Any] = {
        "connect_timeout": times.connect_s,
        "read_timeout": times.request_s,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": _POOL,
        # Their default wraps bodies in aws-chunked, which not every store understands.
        "request_checksum_calculation": os.environ.get(
            "AWS_REQUEST_CHECKSUM_CALCULATION", "when_required"
        ),
        "response_checksum_validation": os.environ.get(
            "AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required"
        ),
    }
    return ours | dict(said)


def _adds_crc32(s3: Any, said: Mapping[str, Any], fs: Any, wire: S3Wire) -> bool:
    """Over TLS, unless the user chose a way: SHA-256 in Python costs more than the transfer."""
    name = "request_checksum_calculation"
    chosen = (
        name in said
        or f"AWS_{name.upper()}" in os.environ
        or name in fs.session.get_scoped_config()
        or "payload_signing_enabled" in (s3.meta.config.s3 or {})
        or "ChecksumAlgorithm" in wire.options.parameters
    )
    return str(s3.meta.endpoint_url).startswith("https:") and not chosen


def _plainly(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Before each request: no Expect header, no region redirection, and which checksum it carries."""
    params["headers"].pop("Expect", None)
    context.setdefault("s3_redirect", {})["redirected"] = True
    if "x-amz-checksum-crc32" in params["headers"]:
        # Over TLS botocore then signs the header and leaves the body to the checksum.
        context.setdefault("checksum", {})["request_algorithm"] = {
            "algorithm": "crc32",
            "in": "header",
            "name": "x-amz-checksum-crc32",
        }
