"""A server shaped like S3 that costs next to nothing, to see what a client costs.

    python -m tests.lab.sink_server --port N [--keep small|all] [--certificate PEM --key PEM]

    bytes arrive -> head -> body, straight into its place -> answer (sink_s3.py) -> next head

One thread. With ``--keep small`` a part, and a body above 1 MiB, is read into one scratch buffer and
only its size is remembered: such an object reads as zeros. ``--keep all`` keeps every byte.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
from collections import deque
from typing import Final

from tests.lab.sink_s3 import Request, Store, answer, parsed

KEEP_LIMIT_BYTES: Final = 1 << 20
_HEAD_LIMIT_BYTES: Final = 64 << 10
_SCRATCH: Final = bytearray(1 << 20)


class Connection(asyncio.BufferedProtocol):
    """One client: heads into a small buffer, bodies straight to where they stay."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._head = bytearray(_HEAD_LIMIT_BYTES)
        self._filled = 0
        self._request: Request | None = None  # set while its body arrives
        self._received = 0
        self._outgoing: deque[bytes | memoryview] = deque()
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # It copies what it holds: give it little. With 0 a TLS transport pauses and never resumes.
        transport.set_write_buffer_limits(high=1)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        request = self._request
        if request is None:
            return memoryview(self._head)[self._filled :]
        if request.body is not None:
            return memoryview(request.body)[self._received :]
        return memoryview(_SCRATCH)[: request.size_bytes - self._received]

    def buffer_updated(self, nbytes: int) -> None:
        if self._request is None:
            self._filled += nbytes
            self._read_heads()
            return
        self._received += nbytes
        if self._received == self._request.size_bytes:
            self._answer(self._request)

    def _read_heads(self) -> None:
        """Take requests out of the buffer until a head or a body is not there yet."""
        while self._request is None:
            end = self._head.find(b"\r\n\r\n", 0, self._filled)
            if end < 0:
                if self._filled == len(self._head):
                    self._transport.close()
                return
            request = parsed(self._head[:end].decode("latin-1"))
            rest = bytes(self._head[end + 4 : self._filled])
            if request.headers.get("expect", "").lower() == "100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self._keeps(request):
                request.body = bytearray(request.size_bytes)
                request.body[: len(rest)] = rest[: request.size_bytes]
            here = min(len(rest), request.size_bytes)
            rest = rest[here:]
            self._head[: len(rest)] = rest
            self._filled, self._received = len(rest), here
            if here < request.size_bytes:
                self._request = request
            else:
                self._answer(request)

    def _keeps(self, request: Request) -> bool:
        is_part = "partNumber" in request.query
        small = request.size_bytes <= KEEP_LIMIT_BYTES and not is_part
        return self._store.keep_all or small or request.method == "POST"

    def _answer(self, request: Request) -> None:
        self._request = None
        self._outgoing.extend(answer(self._store, request).encoded())
        self._send()

    def _send(self) -> None:
        while self._outgoing and not self._is_full:
            self._transport.write(self._outgoing.popleft())


async def serve(port: int, store: Store, tls: ssl.SSLContext | None = None) -> None:
    """Serve until cancelled; https with ``tls``."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(store), "127.0.0.1", port, ssl=tls)
    async with server:
        await server.serve_forever()


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--keep", choices=["small", "all"], default="small")
    parser.add_argument("--certificate", help="speak https with it")
    parser.add_argument("--key", help="of the certificate")
    chosen = parser.parse_args()
    tls = None
    if chosen.certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(chosen.certificate, chosen.key)
    asyncio.run(serve(chosen.port, Store(keep_all=chosen.keep == "all"), tls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
