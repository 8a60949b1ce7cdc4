"""Downloads: ranges of one object, in parallel, straight into their place."""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.errors import IntegrityError, NotFoundError, StaleError, StorageError, TransientError
from ckptfs.storage.base import DataReader
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.storage.ranged_reads import RANGE_BYTES, ObjectReader, split
from ckptfs.storage.registry import open_storage
from ckptfs.storage.threads import Threads
from ckptfs.testing.faults import Fail, Fault, Hold, Lose, When
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from tests.storage.objects import bucket, busy, over
from tests.storage.s3_scripted import Answer, Request, Scripted, options_for

TIMES = {"ETag": '"e"', "Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT"}
BIG = bytes(range(251)) * ((3 * RANGE_BYTES + 12345) // 251)


def read_all(reader: DataReader, size: int = len(BIG)) -> bytearray:
    """The first ``size`` bytes."""
    buffer = bytearray(size)
    reader.read_into(0, memoryview(buffer))
    return buffer


@given(offset=st.integers(0, 1 << 50), size=st.integers(0, 1 << 36))
def test_ranges_cover_everything_once(offset: int, size: int) -> None:
    """In order, without gap or overlap, none above 8 MiB, none empty; as few as that allows."""
    size %= 1 << 30
    ranges = split(offset, size)
    at = offset
    for start, length in ranges:
        assert start == at
        assert 0 < length <= RANGE_BYTES
        at += length
    assert at == offset + size
    assert len(ranges) == -(-size // RANGE_BYTES)


def test_large_reads_go_in_parallel_and_small_ones_in_one_request() -> None:
    """One HEAD; a small read is one request, a large one several at once, the caller among them."""
    gate = threading.Barrier(3)
    threads = set()

    class Together(MemoryObjectClient):
        def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
            if len(out) > 1000:
                threads.add(threading.current_thread())
                gate.wait(120)  # passes only if three ranges are under way at once
            super().get_range(key, offset, out, etag)

    store = MemoryObjects()
    store.put_behind("run/f", BIG[: 3 * RANGE_BYTES])
    storage = over(Together(store), concurrency=3)
    with storage.open_read("f") as reader:
        assert (reader.concurrency, reader.window_bytes) == (3, RANGE_BYTES)
        assert read_all(reader, 1000) == BIG[:1000]
        assert store.counts() == {"head": 1, "get_range": 1}
        assert read_all(reader, 3 * RANGE_BYTES) == BIG[: 3 * RANGE_BYTES]
    assert store.counts() == {"head": 1, "get_range": 4}
    assert threading.current_thread() in threads
    assert len(threads) == 3
    storage.close()


def test_broken_bodies_are_fetched_again() -> None:
    """A range that breaks in the middle, is throttled or unanswered is asked again, nothing else."""
    store, storage = bucket(
        [
            Fault("get_range", "*", 1, Fail(busy(), When.HALF)),
            Fault("get_range", "*", 3, Fail(busy())),
            Fault("get_range", "*", 4, Lose()),
        ]
    )
    store.put_behind("run/f", BIG)
    with storage.open_read("f") as reader:
        assert read_all(reader) == BIG
    assert store.counts()["get_range"] == 4 + 3
    storage.close()


def test_the_last_range_of_a_helper_is_asked_for_again() -> None:
    """The caller has all of its own ranges when a helper's breaks: that is no reason to give it up."""
    store = MemoryObjects()
    caller, broken = threading.get_ident(), threading.Event()

    class Slow(MemoryObjectClient):
        def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
            if threading.get_ident() != caller and not broken.is_set():
                broken.set()
                time.sleep(0.2)  # a slow server; the caller is done by then
                raise busy()
            if threading.get_ident() == caller:
                broken.wait(120)  # or the caller would take all ranges itself
            super().get_range(key, offset, out, etag)

    store.put_behind("run/f", BIG)
    storage = over(Slow(store), concurrency=2)
    with storage.open_read("f") as reader:
        assert read_all(reader, 2 * RANGE_BYTES) == BIG[: 2 * RANGE_BYTES]
    assert broken.is_set()
    storage.close()


@pytest.mark.parametrize("size", [100, len(BIG)])
def test_another_object_under_the_key_is_stale(size: int) -> None:
    """The key is overwritten after the open: StaleError, never a mixture, one range or many."""
    store, storage = bucket()
    store.put_behind("run/f", BIG[:size])
    with storage.open_read("f") as reader:
        store.put_behind("run/f", bytes(size))
        with pytest.raises(StaleError):
            read_all(reader, size)
    storage.close()


def test_an_object_that_goes_is_not_found() -> None:
    """Deleted after the open: NotFoundError."""
    store, storage = bucket()
    store.put_behind("run/f", b"x")
    with storage.open_read("f") as reader:
        store.objects.clear()
        with pytest.raises(NotFoundError):
            read_all(reader, 1)


def test_past_the_end_asks_nothing() -> None:
    """IntegrityError without a request: the size is known."""
    store, storage = bucket()
    store.put_behind("run/f", b"12345")
    with storage.open_read("f") as reader, pytest.raises(IntegrityError):
        read_all(reader, 6)
    assert store.counts() == {"head": 1}


def test_nobody_writes_into_the_buffer_after_an_error() -> None:
    """One range fails while another is under way: the read returns only when that one has ended."""
    hold = Hold()
    store, storage = bucket([Fault("get_range", "*", 1, hold)], concurrency=2)
    store.put_behind("run/f", BIG)
    buffer = bytearray(len(BIG))
    outcome: list[BaseException] = []

    def read() -> None:
        try:
            with storage.open_read("f") as reader:
                reader.read_into(0, memoryview(buffer))
        except StorageError as error:
            outcome.append(error)

    # Everything after the held range is refused.
    for n in range(2, 9):
        store.plan.add(Fault("get_range", "*", n, Fail(StorageError("broken"))))
    reading = threading.Thread(target=read)
    reading.start()
    assert hold.reached.wait(120)
    while len(store.requests("get_range")) < 2:
        assert reading.is_alive()
    reading.join(0.05)
    assert reading.is_alive()  # the held range still owns its piece of the buffer
    hold.release.set()
    reading.join(120)
    assert "broken" in str(outcome[0])
    storage.close()


@pytest.mark.parametrize("raised", [StorageError, KeyboardInterrupt])
def test_a_read_that_fails_waits_for_the_threads_that_help(raised: type[BaseException]) -> None:
    """The calling thread's own range fails while a helper writes into the caller's buffer: the read
    returns when the helper has ended, or the next user of that memory gets bytes of this object.
    """
    helping, returned = threading.Event(), threading.Event()
    caller = threading.current_thread()
    late: list[bool] = []

    class Slow(MemoryObjectClient):
        def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
            if threading.current_thread() is caller:
                assert helping.wait(120)
                raise raised("broken")
            helping.set()
            returned.wait(0.5)  # a read that waits for this thread cannot return earlier
            late.append(returned.is_set())
            super().get_range(key, offset, out, etag)

    store = MemoryObjects()
    store.put_behind("run/f", BIG[: 2 * RANGE_BYTES])
    storage = over(Slow(store), concurrency=2)
    with storage.open_read("f") as reader:
        with pytest.raises(raised, match="broken"):
            read_all(reader, 2 * RANGE_BYTES)
        returned.set()
    storage.close()
    assert late == [False], "the read returned while a helper still wrote into its buffer"


class SecondInterrupt(Future[None]):
    """What a helper does; the first look at its end is where Ctrl-C comes again."""

    def __init__(self, real: Future[None], looked: threading.Event) -> None:
        super().__init__()
        self._real, self._looked = real, looked

    def cancel(self) -> bool:
        return self._real.cancel()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._looked.is_set():
            self._looked.set()
            raise KeyboardInterrupt
        return self._real.exception(timeout)


def test_a_second_interrupt_waits_for_the_threads_that_help() -> None:
    """Ctrl-C comes again while a read waits for a helper that writes into the caller's buffer: the read
    returns when the helper has ended all the same.
    """
    helping, looked, returned = threading.Event(), threading.Event(), threading.Event()
    caller = threading.current_thread()
    late: list[bool] = []

    class Slow(MemoryObjectClient):
        def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
            if threading.current_thread() is caller:
                assert helping.wait(120)
                raise KeyboardInterrupt
            helping.set()
            assert looked.wait(120)
            late.append(
                returned.wait(0.5)
            )  # a read that waits for this thread cannot return earlier
            super().get_range(key, offset, out, etag)

    class Interrupting(Threads):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            return SecondInterrupt(super().submit(fn, *args, **kwargs), looked)

    store = MemoryObjects()
    store.put_behind("run/f", BIG[: 2 * RANGE_BYTES])
    storage = over(Slow(store), concurrency=2)
    threads = Interrupting(2, "helpers")
    with storage.open_read("f") as reader:
        assert isinstance(reader, ObjectReader)
        reader._route = replace(reader._route, pool=lambda: threads)
        with pytest.raises(KeyboardInterrupt):
            read_all(reader, 2 * RANGE_BYTES)
        returned.set()
    threads.shutdown()
    storage.close()
    assert late == [False], "the read returned while a helper still wrote into its buffer"


def test_the_first_error_is_the_one_raised() -> None:
    """One range finds another object, a retrying one gives up because of it: the cause is raised."""
    stale = threading.Event()

    class Changing(MemoryObjectClient):
        def get_range(self, key: str, offset: int, out: memoryview, etag: str | None) -> None:
            if offset == 0:
                assert stale.wait(120)
                raise busy()
            stale.set()
            raise StaleError("changed")

    store = MemoryObjects()
    store.put_behind("run/f", BIG[: 2 * RANGE_BYTES])
    storage = over(Changing(store), concurrency=2, retry_s=1e9)
    with storage.open_read("f") as reader, pytest.raises(StaleError):
        read_all(reader, 2 * RANGE_BYTES)
    storage.close()


def test_giving_up_names_endpoint_and_tries() -> None:
    """A store that stays busy: TransientError with where and how often."""
    store, storage = bucket([Fault("get_range", "*", None, Fail(busy()))], retry_s=3.0)
    store.put_behind("run/f", BIG)
    with (
        storage.open_read("f") as reader,
        pytest.raises(TransientError, match=r"objects\+memory://.*tries in"),
    ):
        read_all(reader)
    storage.close()


def test_a_read_needs_no_other_thread() -> None:
    """The storage was closed, or the machine has no thread left: the calling one fetches all ranges."""
    store, storage = bucket()
    store.put_behind("run/f", BIG)
    storage._pool().shutdown()
    with storage.open_read("f") as reader:
        assert read_all(reader) == BIG


def test_an_interrupted_read_leaves_the_callers_buffer_alone() -> None:
    """Ctrl-C during a read through obstore: it returns when no thread writes into the caller's buffer any
    more, whatever the server sends later.
    """
    pytest.importorskip("obstore")
    size = 4 * RANGE_BYTES
    caller = threading.main_thread()
    assert threading.current_thread() is caller
    callers, waiting, returned = set[int](), threading.Event(), threading.Event()

    def answer(request: Request) -> Answer:
        if request.method == "HEAD":
            return Answer(200, b"", {"Content-Length": str(size)} | TIMES)
        first, last = (int(n) for n in request.headers["range"].removeprefix("bytes=").split("-"))
        if first not in callers:
            waiting.set()
            assert server.release.wait(120)
        total = {"Content-Range": f"bytes {first}-{last}/{size}"}
        return Answer(206, b"x" * (last + 1 - first), total | TIMES)

    def waits_for_the_helper() -> bool:
        frame, names = sys._current_frames().get(caller.ident or 0), set[str]()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        return {"_fetch_all", "exception"} <= names

    def interrupt() -> None:
        assert waiting.wait(120)
        while not waits_for_the_helper():
            assert not returned.wait(0.01)
        signal.pthread_kill(caller.ident or 0, signal.SIGINT)
        # A read that returns at once lets the helper's answer come afterwards; one that waits needs it.
        returned.wait(1)
        server.release.set()

    with Scripted() as server:
        server.answer = answer
        storage = open_storage("s3://bucket/run", options_for(server, concurrency=2))
        assert isinstance(storage, ObjectStorage)
        real = storage.client.get_range

        def get_range(key: str, offset: int, out: memoryview, etag: str | None) -> None:
            if threading.current_thread() is caller:
                callers.add(offset)
                assert waiting.wait(120)  # that of the helper is under way
            real(key, offset, out, etag)

        storage.client.get_range = get_range  # type: ignore[method-assign]
        breaker = threading.Thread(target=interrupt)
        buffer = bytearray(size)
        with storage.open_read("f") as reader:
            breaker.start()
            with pytest.raises(KeyboardInterrupt):
                reader.read_into(0, memoryview(buffer))
            buffer[:] = b"m" * size
            returned.set()
            breaker.join(120)
        pool = storage._pool()
        pool.shutdown(wait=True)
        storage.close()
    assert buffer == b"m" * size
