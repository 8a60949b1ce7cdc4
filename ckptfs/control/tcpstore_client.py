"""Clients of a c10d store that cannot hang their caller, and the keys of one collective step in it.

    caller's thread --submit(op)--> daemon thread: op(store) --Future--> caller, with a deadline

A blocked wait blocks every thread of its connection, and a frozen host held a wait of 2 s for 14 s: so
an operation that may wait has a connection alone, and its caller waits for the thread, never for the
store. Waits have no timeout of their own (each expiry prints a warning from C++): what ends them early
is a write of the key that they wait for.

    put / take     values of any size under a key, in chunks below 1 MiB (8 MiB kills a connection)
    offer          the same, once: the first one wins and everybody reads the winner

Connections are made once for all clients of a process and lent for one operation:

    pool = pool_of(source)                None: it is no store of connections, or cannot be kept track of
    store = pool.shared(source)           for operations that never wait; all threads use this one
    store = pool.own(source)              for one that may wait for a key, the caller's alone; then
    pool.give(store)                      keep it; or, where something broke, pool.drop(store)

A store's server has one thread. It looks up the name of every peer that connects before it serves anybody
else, and where an answer of the name server is lost that takes 5 s. So the first call of a process makes
the connections that all later ones use: the shared one, and one for each of a few threads that wait at
the same time. What is kept goes with the store that it was cloned from. The child of a fork keeps nothing
of its parent's: two processes would talk over one connection.

    <prefix>/<k>/in/<r>     the value of rank r                          arrive, gather
                 arrived    how many have; the last sets "all"
                 all        wakes the coordinator
                 claim      "decide" (coordinator) or "alarm" (anybody), once
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

# How many threads of a process wait for other ranks at the same time: a call, a save in the background,
# a manager's copies and its word on when to save. Another one makes a connection more, kept too.
WAITING = 4


class ConnectionPool:
    """The connections to one store. Any thread may call it; the store is handed in, never kept alive.

    idle_s: a connection that nobody used for so long may have been cut, by a firewall say.
    """

    def __init__(self, idle_s: float = 10.0) -> None:
        self.idle_s = idle_s
        self._lock = threading.Lock()
        self._connecting = threading.Lock()  # or two threads would each make all of them
        self._is_filled = False
        self._shared: Any = None
        self._shared_used = 0.0
        self._idle: list[tuple[Any, float]] = []  # and since when

    def own(self, source: Any) -> Any:
        """A connection that is the caller's alone until it gives it back."""
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
        """The connection that all threads share, until one of them says that it is broken."""
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
        """Hand a broken one out no more."""
        with self._lock:
            if self._shared is store:
                self._shared = None

    def _fill(self, source: Any) -> None:
        """The first operation of the process makes all of them: no later call connects again."""
        if not self._is_filled:
            shared = _torch.clone_store(source)
            own = [_torch.clone_store(source) for _ in range(WAITING)]
            self._shared, self._shared_used, self._is_filled = shared, time.monotonic(), True
            for store in own:
                self.give(store)

    def _take(self) -> Any:
        """An idle connection that answers; None: there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                store, since = self._idle.pop()
            if self._answers(store, since):
                return store

    def _common(self) -> Any:
        """The shared connection if it answers; None: there is none."""
        store = self._shared
        if store is not None and not self._answers(store, self._shared_used):
            self.drop(store)
            return None
        return store

    def _answers(self, store: Any, since: float) -> bool:
        """Whether a connection that was idle, perhaps for hours, was not cut in between."""
        if time.monotonic() - since < self.idle_s:
            return True
        try:
            store.check(["ckptfs/idle"])
        except (RuntimeError, OSError):
            return False
        return True


class _Kept:
    """What this process keeps, by store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_store: weakref.WeakKeyDictionary[Any, ConnectionPool] = weakref.WeakKeyDictionary()


_kept = _Kept()
_parents: list[_Kept] = []  # not closed in the child: the parent still uses them


def _forget() -> None:
    global _kept  # noqa: PLW0603 - the child of a fork begins with nothing
    _parents.append(_kept)
    _kept = _Kept()


os.register_at_fork(after_in_child=_forget)


def pool_of(source: Any) -> ConnectionPool | None:
    """The connections to a store; None where clients of it are no connections."""
    if not _torch.is_networked(source):
        return None
    with _kept.lock:
        return _kept.by_store.setdefault(source, ConnectionPool())


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
        f"the value of {key} in torch's store {what}, so ckptfs did not write it",
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
            f"a rank would send {len(data) >> 20} MiB to the others, but {_MOST_CHUNKS} is "
            "the limit",
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
        """Say ``data`` (None: nothing needs to travel) and be counted."""
        if data is not None:
            put(store, self._key(f"in/{rank}"), data)
        if store.add(self._key("arrived"), 1) == self.size:
            store.set(self._key("all"), b"1")

    def gather(self, store: Any) -> list[tuple[bytes, list[str]]]:
        """Coordinator: wait for all, claim the step, read ranks 1, 2, ...: bytes and their keys.

        Empty: an alarm came first; its verdict is there, or on its way.
        """
        self.arrive(store, 0, None)
        wait_for(store, self._key("all"))
        if not self.claim(store, "decide"):
            return []
        return take_many(store, [self._key(f"in/{rank}") for rank in range(1, self.size)])

    def claim(self, store: Any, what: str) -> bool:
        """Take the step for "decide" or "alarm"; the first has it, and later ones of the same."""
        return bool(store.compare_set(self._key("claim"), "", what) == what.encode())

    def offer_verdict(self, store: Any, data: bytes, pieces: Iterable[bytes] = ()) -> bool:
        """Set the verdict if nobody has; True when ours is the one that all obey.

        pieces: of each rank, there before the verdict that speaks of them; asked for one by one, and
        what that raises is raised here.
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
            if not ours:  # an alarm came first, or one cannot be made: nobody will read them
                for name in names:
                    drop(store, name)

    def take_piece(self, store: Any, rank: int) -> bytes:
        """Read this rank's own piece of the verdict, which said that there is one."""
        data, names = take(store, self._key(f"for/{rank}"))
        for name in names:
            store.delete_key(name)
        return data

    def drop_piece(self, store: Any, rank: int) -> None:
        """Delete that rank's piece, which it will never take; absent is fine."""
        drop(store, self._key(f"for/{rank}"))

    def end(self, store: Any, data: bytes) -> bool:
        """Offer a verdict out of turn, and wake the coordinator, who waits for values. True when ours
        is the one that all obey.
        """
        ours = self.offer_verdict(store, data)
        store.set(self._key("all"), b"1")
        return ours

    def read_verdict(self, store: Any) -> bytes:
        """Wait for the verdict and read it, whoever wrote it."""
        wait_for(store, self._key("verdict"))
        return take(store, self._key("verdict"))[0]

    def acknowledge(self, store: Any) -> None:
        """This rank has read the verdict, or never will."""
        if store.add(self._key("acks"), 1) == self.size:
            store.set(self._key("acked"), b"1")

    def is_acknowledged(self, store: Any) -> bool:
        """True when every rank has read the verdict."""
        return bool(store.check([self._key("acked")]))

    def sweep(self, store: Any, read: list[str]) -> None:
        """All have arrived: nobody will read these keys, or the step before this one, again."""
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
        """Delete what ranks said and nobody gathered."""
        for rank in range(1, self.size):
            drop(store, self._key(f"in/{rank}"))
