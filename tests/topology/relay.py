"""A relay in front of a store: it counts who connects, and can cut them."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


class Relay:
    """Passes bytes on to a port of this machine. accepted: how many connections were ever made."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="relay", daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """End every open connection."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads.pop(0).join(120)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(120)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            far = socket.create_connection((HOST, self._upstream))
            # Without it a small message waits 40 ms for the answer to the one before.
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends += [near, far]
            thread = threading.Thread(target=_relay, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()


def _relay(near: socket.socket, far: socket.socket) -> None:
    back = threading.Thread(target=_pass_on, args=(far, near), daemon=True)
    back.start()
    _pass_on(near, far)
    back.join()
    near.close()
    far.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
