"""StoreClient: one c10d store client on a daemon thread of its own, so that nobody hangs with it.

    caller's thread --submit(op)--> daemon thread: op(store) --Future--> caller, with a deadline

A blocked wait blocks every thread of its connection, and a frozen host held a wait of 2 s for 14 s: so
an operation that may wait has a connection alone, and its caller waits for the thread, never for the
store. Waits have no timeout of their own (each expiry prints a warning from C++): what ends them early
is a write of the key that they wait for. Connections are made once for all clients of a process, and
lent for one operation (``connection_pool``).

    put / take     values of any size under a key, in chunks below 1 MiB (8 MiB kills a connection)
    offer          the same, once: the first one wins and everybody reads the winner
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from ckptfs import _torch
from ckptfs.errors import CkptfsError, ControlPlaneLostError, StateError
from ckptfs.topology.connection_pool import ConnectionPool, pool_of

__all__ = [
    "CHUNK_BYTES",
    "StoreClient",
    "connect",
    "drop",
    "offer",
    "put",
    "take",
    "take_many",
    "wait_for",
]

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[Any], Any], bool]

CHUNK_BYTES = (1 << 20) - 4096  # with its header and key below 1 MiB
_MOST_CHUNKS = 4096  # nearly 4 GiB: more is no plan of any save, and was made up to take memory
_AT_ONCE = 32  # keys of one request, so that its answer stays below 32 MiB
_ABSENT = b"ckptfs/absent"  # no value begins so; what a store answers of a key that is missing
_LONG = timedelta(days=20)  # c10d counts milliseconds in 32 bits: 24 days is the most it can wait


class StoreClient:
    """One client of a store, used through one daemon thread. Any thread may submit.

    source: a store of the process; it is cloned, never used, so that its own users are not blocked.
    """

    def __init__(self, source: Any, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        # A daemon: a store that never answers must not keep the interpreter from ending.
        threading.Thread(target=_serve, args=(source, self._jobs), name=name, daemon=True).start()

    def submit(self, op: Callable[[Any], T]) -> Future[T]:
        """Run ``op(store)`` on the client's thread, after what was submitted before. It may wait."""
        return self._put(op, waits=True)

    def submit_short(self, op: Callable[[Any], T]) -> Future[T]:
        """As ``submit``, for an operation that waits for no key and reads none that may be missing: it
        shares its connection with all threads of the process, and would hold them up.
        """
        return self._put(op, waits=False)

    def _put(self, op: Callable[[Any], T], *, waits: bool) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, op, waits))
        return future

    def call(self, op: Callable[[Any], T], timeout_s: float) -> T:
        """Submit and wait. ControlPlaneLostError: connection gone, or no answer in timeout_s."""
        return answer(self.submit(op), timeout_s)

    def call_short(self, op: Callable[[Any], T], timeout_s: float) -> T:
        """As ``call``, by ``submit_short``."""
        return answer(self.submit_short(op), timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything submitted has run; never raises, gives up after timeout_s."""
        try:
            self.submit_short(lambda _: None).result(timeout_s)
        except Exception:  # noqa: BLE001 - leaving: the store may be gone, and that is all right
            return

    def close(self) -> None:
        """End the thread once it is idle; harmless twice. A thread in a lost wait is left behind."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)


def answer(future: Future[T], timeout_s: float | None) -> T:
    """The result of a submitted operation, with store errors typed."""
    try:
        return future.result(timeout_s)
    except CkptfsError:
        raise
    except (RuntimeError, OSError) as error:
        # torch's DistNetworkError and DistStoreError are RuntimeErrors, TimeoutError an OSError.
        if isinstance(error, TimeoutError) and not future.done():
            raise ControlPlaneLostError(
                f"the store that the ranks talk through has not answered for {timeout_s:g} s",
                hint="the process that hosts it (rank 0, or torchrun's agent) hangs or is frozen",
            ) from None
        raise ControlPlaneLostError(
            f"the store that the ranks talk through is gone: {_first_line(error)}",
            hint="the process that hosts it (rank 0, or torchrun's agent) has ended",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Connections:
    """What one client runs its operations over; of its thread alone.

    Once an operation broke, each later one first asks what it broke, and fails at once where that does
    not answer: to connect again takes a minute where the store is gone, and whoever leaves it would wait
    for that. One that answers was not what broke; it is not used again all the same.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._pool = pool_of(source)
        self._shared: Any = None
        self._shared_used = 0.0
        self._only: Any = None  # where connections are not pooled
        self._broken: Any = None

    def run(self, op: Callable[[Any], T], *, waits: bool) -> T:
        """The operation over a connection of its kind."""
        if self._pool is None:
            if self._only is None:
                self._only = _torch.clone_store(self._source)
            return op(self._only)
        if self._broken is not None:
            # Never the operation itself: it may wait, and other threads share what broke.
            self._broken.check(["ckptfs/idle"])
            self._broken = self._shared = None
        store = self._pool.own(self._source) if waits else self._common(self._pool)
        try:
            result = op(store)
        except CkptfsError:  # of ours, after an answer
            if waits:
                self._pool.give(store)
            raise
        except BaseException:
            # Whatever broke half-way, an answer may still be on its way over this connection.
            self._pool.drop(store)
            self._broken = store
            raise
        if waits:
            self._pool.give(store)
        return result

    def _common(self, pool: ConnectionPool) -> Any:
        """The connection that all threads share; after a pause, one that was not cut meanwhile."""
        now = time.monotonic()
        if self._shared is None or now - self._shared_used >= pool.idle_s:
            self._shared = pool.shared(self._source)
        self._shared_used = now
        return self._shared


def _serve(source: Any, jobs: queue.SimpleQueue[_Job | None]) -> None:
    connections = _Connections(source)
    while True:
        job = jobs.get()
        if job is None:
            return
        future, op, waits = job
        try:
            result = connections.run(op, waits=waits)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(result)
        # Or the last value, perhaps many MiB, lives until the next job.
        del future, op, job
        result = None


def connect(host: str, port: int, timeout_s: float) -> Any:
    """A client of the TCPStore at host:port, one for this process. ControlPlaneLostError within
    timeout_s.

    On a thread: connecting to a host that does not answer holds its thread for minutes.
    """
    known = _reached.get((os.getpid(), host, port))
    if known is not None and _is_there(known, timeout_s):
        return known
    wait_s = min(timeout_s, 60.0)
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(_torch.connect_store(host, port, wait_s))
        except BaseException as error:  # noqa: BLE001 - raised by answer()
            future.set_exception(error)

    threading.Thread(target=run, name="ckptfs-connect", daemon=True).start()
    _reached[os.getpid(), host, port] = store = answer(future, wait_s + 5.0)
    return store


# The stores that somebody else hosts (torchrun's agent), by process and address: nobody else keeps
# them, and with one the connections to it would go after each call.
_reached: dict[tuple[int, str, int], Any] = {}


def _is_there(store: Any, timeout_s: float) -> bool:
    """Whether the server that this client was connected to still answers."""
    with contextlib.closing(StoreClient(store, "ckptfs-reached")) as client:
        try:
            client.call_short(lambda s: s.check(["ckptfs/idle"]), min(timeout_s, 60.0))
        except ControlPlaneLostError:
            return False
    return True


# -- operations: functions of a store, for submit() -------------------------------------------


def wait_for(store: Any, key: str) -> None:
    """Block until the key exists."""
    store.wait([key], _LONG)


def put(store: Any, key: str, data: bytes) -> None:
    """Write ``data`` under ``key``; the key itself appears last, when all of it is there."""
    head = _put_tail(store, key, data)
    store.set(key, head)


def take(store: Any, key: str) -> tuple[bytes, list[str]]:
    """Read what ``put`` or ``offer`` wrote, and all keys it lies under; the key must exist."""
    return _take_rest(store, key, store.get(key))


def take_many(store: Any, keys: list[str]) -> list[tuple[bytes, list[str]]]:
    """``take`` of each; the keys must exist. In a few requests: one for each of thousands of ranks,
    one after the other, would be what every step waits for.
    """
    if not store.has_extended_api():
        return [take(store, key) for key in keys]  # FileStore
    found = []
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        heads = store.multi_get(some)
        found += [_take_rest(store, k, bytes(h)) for k, h in zip(some, heads, strict=True)]
    return found


def _take_rest(store: Any, key: str, head: bytes) -> tuple[bytes, list[str]]:
    rest = _rest_of(key, head)
    first = head.partition(b"\n")[2]
    return b"".join([first, *(_chunk(store, name) for name in rest)]), [key, *rest]


def _chunk(store: Any, name: str) -> bytes:
    data = bytes(store.get(name))
    if len(data) > CHUNK_BYTES:
        raise _forged(name, f"has {len(data)} bytes")
    return data


def _rest_of(key: str, head: bytes) -> list[str]:
    """The other keys that a value lies under, by its first chunk. StateError where no ckptfs wrote it."""
    line, newline, first = head.partition(b"\n")
    count, _, place = line[:4096].decode(errors="replace").partition(" ")
    if not newline or not count.isdecimal() or not 1 <= len(count) <= len(str(_MOST_CHUNKS)):
        raise _forged(key, "has no header")
    # Of this key alone: whoever drops it deletes them.
    if not 1 <= int(count) <= _MOST_CHUNKS or not place.startswith(key) or len(first) > CHUNK_BYTES:
        raise _forged(key, f"says {count} chunks at {place[:200]}")
    return [f"{place}/{i}" for i in range(1, int(count))]


def _forged(key: str, what: str) -> StateError:
    return StateError(
        f"the value of {key} in torch's store {what}: ckptfs did not write it",
        hint="the store is open to another program; give the job a port of its own",
    )


def offer(store: Any, key: str, data: bytes) -> bool:
    """Write ``data`` under ``key`` if nobody has; True when ours is what everybody reads."""
    place = f"{key}.{uuid.uuid4().hex}"
    head = _put_tail(store, place, data)
    if bytes(store.compare_set(key, b"", head)) == head:
        return True
    for i in range(1, _count(data)):
        store.delete_key(f"{place}/{i}")
    return False


def drop(store: Any, key: str) -> None:
    """Delete what ``put`` or ``offer`` wrote, chunks and all; absent is fine."""
    # Never get(): where somebody else has just deleted the key, that would wait for it to come back. Nor
    # an empty value to compare with: that would make the key, for others to read.
    head = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    if head != _ABSENT:
        for name in _rest_of(key, head):
            store.delete_key(name)
    store.delete_key(key)


def _count(data: bytes) -> int:
    return max(1, -(-len(data) // CHUNK_BYTES))


def _put_tail(store: Any, place: str, data: bytes) -> bytes:
    """Write all chunks but the first; return the first with its header, ``<chunks> <place>``."""
    count = _count(data)
    if count > _MOST_CHUNKS:
        raise StateError(
            f"a rank would tell the others {len(data) >> 20} MiB, and {_MOST_CHUNKS} is the most",
            hint="save fewer items, or larger ones: this is what the plan of a save takes",
        )
    view = memoryview(data)
    for i in range(1, count):
        store.set(f"{place}/{i}", bytes(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]))
    return f"{count} {place}\n".encode() + bytes(view[:CHUNK_BYTES])
