"""What a machine of NfsLab runs: calls functions, starts programs, and answers. Its process stays.

    call      (function, args, kwargs) -> its value, or the exception it raised
    start     a program, its output in a file of the machine           -> pid
    wait      for its end                                              -> Ended
    signal    to its whole process group

With ``fork MODULES`` it is the warm one: it imports those first and serves every connection in a process
forked from itself, a rank of a job for one; the child says its pid, answers one call and ends: its threads
and its exit hooks run as in any interpreter, and then the kernel takes it, see ``_gone``.

Functions are pickled by name: they are imported here, from the same files, read-only. What they keep (an
open file, a cached answer of the kernel) stays between calls. Each connection is served by a thread of
its own, so that one which hangs in a dead mount holds up no other connection. Inside a machine only.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal as signals
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PORT",
    "WARM_PORT",
    "Ended",
    "answer_of",
    "ask",
    "end",
    "hello",
    "start",
    "tell",
    "wait",
]

PORT = 9000
WARM_PORT = 9001
_LENGTH = struct.Struct("!Q")

_started: dict[
    int, subprocess.Popen[bytes]
] = {}  # this process is the machine's registry of programs


@dataclass(frozen=True)
class Ended:
    """How a program ended. status: as of subprocess; None while it runs. output: stdout and stderr."""

    status: int | None
    output: str


def ask(link: socket.socket, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Caller's side: the function's value on the other side, or its exception, raised here."""
    tell(link, function, *args, **kwargs)
    return answer_of(link)


def tell(link: socket.socket, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The first half of ``ask``."""
    _send(link, pickle.dumps((function, args, kwargs)))


def answer_of(link: socket.socket) -> Any:
    """The second half; ConnectionError where the other side has died."""
    worked, value = pickle.loads(_receive(link))
    if not worked:
        raise value
    return value


def hello(link: socket.socket) -> int:
    """The pid of the process that the warm one has forked for this connection."""
    (pid,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    return int(pid)


def start(argv: Sequence[str], environment: Mapping[str, str], log: str) -> int:
    """Start a program in a process group of its own; its pid."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(argv),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started[process.pid] = process
    return process.pid


def wait(pid: int, log: str, timeout_s: float) -> Ended:
    """Its end, or what it has printed until now."""
    try:
        status: int | None = _started[pid].wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    return Ended(status, Path(log).read_text(errors="replace"))


def end(pid: int, number: int = signals.SIGKILL) -> None:
    """A signal to the program and all that it started in its group."""
    os.killpg(pid, number)


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(_LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the machine hung up")
        data += part
    return bytes(data)


def _serve(link: socket.socket) -> None:
    with link:
        while True:
            try:
                request = _receive(link)
            except OSError:
                return
            _send(link, _answer(request))


def _answer(request: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - the caller's to handle, whatever it is
        return _as_error(error)


def _serve_in_a_child(server: socket.socket, link: socket.socket) -> None:
    """Fork; the child answers one call in a group of its own and ends, after every hook of its exit."""
    if os.fork():
        link.close()
        return
    server.close()
    os.setsid()
    signals.signal(signals.SIGCHLD, signals.SIG_DFL)
    link.sendall(_LENGTH.pack(os.getpid()))
    _send(link, _answer(_receive(link)))
    link.close()
    sys.exit(0)


def _gone() -> None:
    """The last hook of a child. To take torch apart object by object writes to each of its pages, which are
    shared until then: seconds of a machine's one CPU for every rank, for nothing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _as_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)  # some exceptions are written and cannot be read
    except Exception:  # noqa: BLE001 - then its text has to do
        data = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return data


def main(modules: Sequence[str] | None) -> None:
    """Answer forever; with modules, each connection in a child."""
    if modules is not None:
        atexit.register(_gone)  # the first to come is the last to go
    for module in modules or ():
        importlib.import_module(module)
    if modules is not None:
        gc.collect()
        gc.freeze()  # the children share what is warm: collecting it would copy it
        signals.signal(signals.SIGCHLD, signals.SIG_IGN)  # no one waits for the children
    # Every address that it has is in a network of three machines.
    port = PORT if modules is None else WARM_PORT
    with socket.create_server(("0.0.0.0", port)) as server:  # noqa: S104
        sys.stdout.write("the agent is up\n")
        sys.stdout.flush()
        while True:
            link, _ = server.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if modules is not None:
                _serve_in_a_child(server, link)
            else:
                threading.Thread(target=_serve, args=(link,), daemon=True).start()


if __name__ == "__main__":
    # Under its real name: functions of this module that arrive by name are then this module's.
    from tests.lab.nfs_agent import main as run

    run(sys.argv[2:] if sys.argv[1:2] == ["fork"] else None)
