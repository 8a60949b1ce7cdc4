"""Clients of a c10d store that cannot hang their caller, and the keys of one collective step in it.

    caller's thread --submit(op)--> daemon thread: op(store) --Future--> caller, with a deadline

A blocked wait blocks every thread of its connection, and a frozen host once made a wait of 2 s last 14 s. So
an operation that may wait has a connection to itself, and its caller waits for the thread, never for the
store. Waits have no timeout of their own (each expiry prints a warning from C++). To end a wait early, the
key that it waits for is written.

    put / take     values of any size under a key, in chunks below 1 MiB (8 MiB kills a connection)
    offer          the same, once: the first one wins and every rank reads the winner

Connections are made once for all clients of a process and lent for one operation:

    pool = pool_of(source)                None if the store has no connections, or cannot be tracked
    store = pool.shared(source)           for operations that never wait; all threads use this one
    store = pool.own(source)              for one that may wait for a key, the caller's alone; then
    pool.give(store)                      keep it; or, if something broke, pool.drop(store)

A store's server has one thread. It looks up the name of every peer that connects before it serves any other
client, and if an answer of the name server is lost, that takes 5 s. So the first call of a process makes the
connections that all later calls use: the shared one, and one for each of a few threads that wait at the same
time. The connections are kept as long as the store that they were cloned from. The child of a fork keeps none
of its parent's: two processes would use one connection.

    <prefix>/<k>/in/<r>     the value of rank r                          arrive, gather
                 arrived    how many have; the last sets "all"
                 all        wakes the coordinator
                 claim      "decide" (coordinator) or "alarm" (any rank), once
                 for/<r>    rank r's own piece of it, if it has pieces    offer_verdict, take_piece, drop_piece
                 verdict    the answer, once                              offer_verdict, end
                 acks       how many have read it; the last sets "acked"  acknowledge

Every method of StepKeys is an operation on a store, run on a StoreClient's thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ckptfs import _torch
from ckptfs.errors import CkptfsError, ControlPlaneLostError, StateError
from ckptfs.text import size_text

__all__ = [
    "CHUNK_BYTES",
    "WAITING",
    "ConnectionPool",
    "StepKeys",
    "StoreClient",
    "connect",
    "drop",
    "offer",
    "pool_of",
    "put",
    "take",
    "take_many",
    "wait_for",
]

# How many threads of a process wait for other ranks at the same time: a call, a save in the
# background, a manager's copies and its decision when to save. One more thread makes one more
# connection, which is kept too.
WAITING = 4


class ConnectionPool:
    """The connections to one store. Any thread may call it. It does not keep the store alive.

    idle_s: A connection that was not used for this long may have been cut, for example by a
    firewall.
    """

    def __init__(self, idle_s: float = 10.0) -> None:
        self.idle_s = idle_s
        self._lock = threading.Lock()
        self._connecting = threading.Lock()  # otherwise two threads could each make all of them
        self._is_filled = False
        self._shared: Any = None
        self._shared_used = 0.0
        self._idle: list[tuple[Any, float]] = []  # and since when

    def own(self, source: Any) -> Any:
        """Return a connection that only the caller uses until it gives it back."""
        store = self._take()
        if store is None:
            with self._connecting:
                self._fill(source)
                store = self._take()
                if store is None:
                    store = _torch.clone_store(source)
        return store

    def give(self, store: Any) -> None:
        """Keep a connection that no thread uses any more."""
        with self._lock:
            self._idle.append((store, time.monotonic()))

    def shared(self, source: Any) -> Any:
        """Return the connection that all threads share, until one of them reports it broken."""
        store = self._common()
        if store is None:
            with self._connecting:
                self._fill(source)
                store = self._common()
                if store is None:
                    store = self._shared = _torch.clone_store(source)
        self._shared_used = time.monotonic()
        return store

    def drop(self, store: Any) -> None:
        """Stop using a broken connection."""
        with self._lock:
            if self._shared is store:
                self._shared = None

    def _fill(self, source: Any) -> None:
        """Make all connections at the first operation, so that no later call connects again."""
        if not self._is_filled:
            shared = _torch.clone_store(source)
            own = [_torch.clone_store(source) for _ in range(WAITING)]
            self._shared, self._shared_used, self._is_filled = shared, time.monotonic(), True
            for store in own:
                self.give(store)

    def _take(self) -> Any:
        """Return an idle connection that answers, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                store, since = self._idle.pop()
            if self._answers(store, since):
                return store

    def _common(self) -> Any:
        """Return the shared connection if it answers, or None."""
        store = self._shared
        if store is not None and not self._answers(store, self._shared_used):
            self.drop(store)
            return None
        return store

    def _answers(self, store: Any, since: float) -> bool:
        """Whether an idle connection still works. It may have been cut in the meantime."""
        if time.monotonic() - since < self.idle_s:
            return True
        try:
            store.check(["ckptfs/idle"])
        except (RuntimeError, OSError):
            return False
        return True


class _Pools:
    """The connection pools of this process, by store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_store: weakref.WeakKeyDictionary[Any, ConnectionPool] = weakref.WeakKeyDictionary()


_pools = _Pools()
_parents: list[_Pools] = []  # not closed in the child: the parent still uses them


def _forget() -> None:
    global _pools  # noqa: PLW0603 - the child of a fork begins with nothing
    _parents.append(_pools)
    _pools = _Pools()


os.register_at_fork(after_in_child=_forget)


def pool_of(source: Any) -> ConnectionPool | None:
    """Return the connections to a store, or None if its clients have no connections."""
    if not _torch.is_networked(source):
        return None
    with _pools.lock:
        return _pools.by_store.setdefault(source, ConnectionPool())


T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[Any], Any], bool]

CHUNK_BYTES = (1 << 20) - 4096  # with its header and key below 1 MiB
_MOST_CHUNKS = 4096  # nearly 4 GiB: no save sends more, a larger count is forged
_AT_ONCE = 32  # keys of one request, so that its answer stays below 32 MiB
_ABSENT = b"ckptfs/absent"  # no value begins so; the answer of the store for a missing key
_LONG = timedelta(days=20)  # c10d counts milliseconds in 32 bits: 24 days is the most it can wait


class StoreClient:
    """One client of a store, used through one daemon thread. Any thread may submit.

    source: A store of the process. It is cloned, never used, so that its own users are not blocked.
    """

    def __init__(self, source: Any, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        # A daemon: a store that never answers must not keep the interpreter from ending.
        threading.Thread(target=_serve, args=(source, self._jobs), name=name, daemon=True).start()

    def submit(self, op: Callable[[Any], T]) -> Future[T]:
        """Run ``op(store)`` on the client's thread, after earlier operations. It may wait."""
        return self._put(op, waits=True)

    def submit_short(self, op: Callable[[Any], T]) -> Future[T]:
        """Run an operation as ``submit`` does, over the connection that all threads share.

        It must not wait for a key or read a key that may be missing, because it would block the
        other threads.
        """
        return self._put(op, waits=False)

    def _put(self, op: Callable[[Any], T], *, waits: bool) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, op, waits))
        return future

    def call(self, op: Callable[[Any], T], timeout_s: float) -> T:
        """Submit and wait.

        ControlPlaneLostError: the connection is gone, or there is no answer within timeout_s.
        """
        return answer(self.submit(op), timeout_s)

    def call_short(self, op: Callable[[Any], T], timeout_s: float) -> T:
        """Submit with ``submit_short`` and wait. See ``call``."""
        return answer(self.submit_short(op), timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything submitted has run. Never raises, and gives up after timeout_s."""
        try:
            self.submit_short(lambda _: None).result(timeout_s)
        except Exception:  # noqa: BLE001 - leaving: the store may be gone, and that is all right
            return

    def close(self) -> None:
        """End the thread once it is idle. A thread in a wait that never ends is left behind.

        Calling it twice is harmless.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)


def answer(future: Future[T], timeout_s: float | None) -> T:
    """Return the result of a submitted operation, with typed store errors."""
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
    """The connections over which one client runs its operations. Used by the client's thread only.

    After an operation broke a connection, each later one first makes a request over that
    connection, and fails at once if it does not answer: if the store is gone, connecting again
    takes a minute, and a rank that leaves would have to wait for that. If it answers, the
    fault was not in this connection; it is replaced all the same.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._pool = pool_of(source)
        self._shared: Any = None
        self._shared_used = 0.0
        self._only: Any = None  # where connections are not pooled
        self._broken: Any = None

    def run(self, op: Callable[[Any], T], *, waits: bool) -> T:
        """Run the operation over a connection of its kind."""
        if self._pool is None:
            if self._only is None:
                self._only = _torch.clone_store(self._source)
            return op(self._only)
        if self._broken is not None:
            # Never the operation itself: it may wait, and other threads share the broken connection.
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
            # If anything broke half-way, an answer may still arrive over this connection.
            self._pool.drop(store)
            self._broken = store
            raise
        if waits:
            self._pool.give(store)
        return result

    def _common(self, pool: ConnectionPool) -> Any:
        """Return the connection that all threads share. After a pause it is checked again."""
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
        except BaseException as error:  # noqa: BLE001 - raised by the future that the caller waits for
            future.set_exception(error)
        else:
            future.set_result(result)
        # Otherwise the last value, perhaps many MiB, stays in memory until the next job.
        del future, op, job
        result = None


def connect(host: str, port: int, timeout_s: float) -> Any:
    """Return a client of the TCPStore at host:port, one for this process.

    It connects on a thread, because connecting to a host that does not answer blocks a thread for
    minutes.

    Raises:
        ControlPlaneLostError: There is no connection within timeout_s.
    """
    known = _reached.get((os.getpid(), host, port))
    if known is not None and _is_alive(known, timeout_s):
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


# The stores of other hosts (torchrun's agent), by process and address. They are kept only here: without
# this, the connections to a store would be lost after each call.
_reached: dict[tuple[int, str, int], Any] = {}


def _is_alive(store: Any, timeout_s: float) -> bool:
    """Whether the server that this client is connected to still answers."""
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
    """Write ``data`` under ``key``. The key itself appears last, when all chunks are there."""
    head = _put_tail(store, key, data)
    store.set(key, head)


def take(store: Any, key: str) -> tuple[bytes, list[str]]:
    """Read what ``put`` or ``offer`` wrote, and return it with all its keys. The key must exist."""
    return _take_remainder(store, key, store.get(key))


def take_many(store: Any, keys: list[str]) -> list[tuple[bytes, list[str]]]:
    """Read each key as ``take`` does, in few requests. The keys must exist.

    A request for each of thousands of ranks, one after another, would dominate the time of every
    step.
    """
    if not store.has_extended_api():
        return [take(store, key) for key in keys]  # FileStore
    found = []
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        heads = store.multi_get(some)
        found += [_take_remainder(store, k, bytes(h)) for k, h in zip(some, heads, strict=True)]
    return found


def _take_remainder(store: Any, key: str, head: bytes) -> tuple[bytes, list[str]]:
    remainder = _remainder_of(key, head)
    first = head.partition(b"\n")[2]
    return b"".join([first, *(_chunk(store, name) for name in remainder)]), [key, *remainder]


def _chunk(store: Any, name: str) -> bytes:
    data = bytes(store.get(name))
    if len(data) > CHUNK_BYTES:
        raise _forged(name, f"has {len(data)} bytes")
    return data


def _remainder_of(key: str, head: bytes) -> list[str]:
    """Return the other keys of a value, by its first chunk.

    StateError: ckptfs did not write it.
    """
    line, newline, first = head.partition(b"\n")
    count, _, place = line[:4096].decode(errors="replace").partition(" ")
    if not newline or not count.isdecimal() or not 1 <= len(count) <= len(str(_MOST_CHUNKS)):
        raise _forged(key, "has no header")
    # Only keys that belong to this key: the process that drops the value deletes them.
    if not 1 <= int(count) <= _MOST_CHUNKS or not place.startswith(key) or len(first) > CHUNK_BYTES:
        raise _forged(key, f"says {count} chunks at {place[:200]}")
    return [f"{place}/{i}" for i in range(1, int(count))]


def _forged(key: str, what: str) -> StateError:
    return StateError(
        f"the value of {key} in torch's store {what}, so ckptfs did not write it",
        hint="the store is open to another program; give the job a port of its own",
    )


def offer(store: Any, key: str, data: bytes) -> bool:
    """Write ``data`` under ``key`` if no rank has. Returns True if all ranks read ours."""
    place = f"{key}.{uuid.uuid4().hex}"
    head = _put_tail(store, place, data)
    if bytes(store.compare_set(key, b"", head)) == head:
        return True
    for i in range(1, _count(data)):
        store.delete_key(f"{place}/{i}")
    return False


def drop(store: Any, key: str) -> None:
    """Delete what ``put`` or ``offer`` wrote, with all chunks. Absent is fine."""
    # Never get(): if another rank has just deleted the key, that would wait for it to appear again. Nor
    # compare with an empty value: that would make the key, and others would read it.
    head = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    if head != _ABSENT:
        for name in _remainder_of(key, head):
            store.delete_key(name)
    store.delete_key(key)


def _count(data: bytes) -> int:
    return max(1, -(-len(data) // CHUNK_BYTES))


def _put_tail(store: Any, place: str, data: bytes) -> bytes:
    """Write all chunks but the first; return the first with its header, ``<chunks> <place>``."""
    count = _count(data)
    if count > _MOST_CHUNKS:
        raise StateError(
            f"a rank would send {size_text(len(data))} to the others, but "
            f"{size_text(_MOST_CHUNKS * CHUNK_BYTES)} is the limit",
            hint="save fewer or larger items: the plan of the save is too large",
        )
    view = memoryview(data)
    for i in range(1, count):
        store.set(f"{place}/{i}", bytes(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]))
    return f"{count} {place}\n".encode() + bytes(view[:CHUNK_BYTES])


@dataclass(frozen=True, slots=True)
class StepKeys:
    """Step ``number`` of the control (or clone) under ``prefix``, with ``size`` ranks."""

    prefix: str
    number: int
    size: int

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{self.number}/{name}"

    def arrive(self, store: Any, rank: int, data: bytes | None) -> None:
        """Write ``data`` (None: nothing needs to be sent) and count this rank."""
        if data is not None:
            put(store, self._key(f"in/{rank}"), data)
        if store.add(self._key("arrived"), 1) == self.size:
            store.set(self._key("all"), b"1")

    def gather(self, store: Any) -> list[tuple[bytes, list[str]]]:
        """Wait for all ranks, claim the step, and read the values of ranks 1, 2, ...

        Only on the coordinator. Returns the bytes and the keys of each value. Empty: an alarm came
        first, and its verdict is there or will be.
        """
        self.arrive(store, 0, None)
        wait_for(store, self._key("all"))
        if not self.claim(store, "decide"):
            return []
        return take_many(store, [self._key(f"in/{rank}") for rank in range(1, self.size)])

    def claim(self, store: Any, what: str) -> bool:
        """Claim the step for "decide" or "alarm".

        The first claim wins, together with later ones of the same kind.
        """
        return bool(store.compare_set(self._key("claim"), "", what) == what.encode())

    def offer_verdict(self, store: Any, data: bytes, pieces: Iterable[bytes] = ()) -> bool:
        """Set the verdict if there is none. Returns True if ours is the one that all obey.

        pieces: A piece for each rank, written before the verdict that refers to it. They are made
        one by one, and their errors are raised here.
        """
        names: list[str] = []
        ours = False
        try:
            for rank, piece in enumerate(pieces):
                if rank:  # the coordinator has its own
                    names.append(self._key(f"for/{rank}"))
                    put(store, names[-1], piece)
            ours = offer(store, self._key("verdict"), data)
            return ours
        finally:
            if not ours:  # an alarm came first, or one cannot be made: no rank will read them
                for name in names:
                    drop(store, name)

    def take_piece(self, store: Any, rank: int) -> bytes:
        """Read and delete this rank's own piece of a verdict that has pieces."""
        data, names = take(store, self._key(f"for/{rank}"))
        for name in names:
            store.delete_key(name)
        return data

    def drop_piece(self, store: Any, rank: int) -> None:
        """Delete the piece of a rank that will never take it. Absent is fine."""
        drop(store, self._key(f"for/{rank}"))

    def end(self, store: Any, data: bytes) -> bool:
        """Offer a verdict out of turn, and wake the coordinator, which waits for values.

        Returns True if ours is the one that all obey.
        """
        ours = self.offer_verdict(store, data)
        store.set(self._key("all"), b"1")
        return ours

    def read_verdict(self, store: Any) -> bytes:
        """Wait for the verdict of any rank and read it."""
        wait_for(store, self._key("verdict"))
        return take(store, self._key("verdict"))[0]

    def acknowledge(self, store: Any) -> None:
        """Record that this rank has read the verdict, or never will."""
        if store.add(self._key("acks"), 1) == self.size:
            store.set(self._key("acked"), b"1")

    def is_acknowledged(self, store: Any) -> bool:
        """Whether every rank has read the verdict."""
        return bool(store.check([self._key("acked")]))

    def sweep(self, store: Any, read: list[str]) -> None:
        """Delete keys that are not needed because all ranks have arrived.

        No rank will read these keys, or those of the step before this one, again.
        """
        for name in read:
            store.delete_key(name)
        if self.number:
            StepKeys(self.prefix, self.number - 1, self.size).drop(store)

    def drop(self, store: Any) -> None:
        """Delete the step's own keys; absent is fine."""
        drop(store, self._key("verdict"))
        for name in ("claim", "arrived", "all", "acks", "acked"):
            store.delete_key(self._key(name))

    def drop_values(self, store: Any) -> None:
        """Delete values that ranks wrote and that were never gathered."""
        for rank in range(1, self.size):
            drop(store, self._key(f"in/{rank}"))
