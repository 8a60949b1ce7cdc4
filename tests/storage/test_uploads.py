"""Uploads: whole or nothing, within the store's limits and the given memory."""

from __future__ import annotations

import logging
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.base import DataWriter
from ckptfs.storage.clients.base import Buffer, Limits, Upload
from ckptfs.storage.multipart import ObjectWriter
from ckptfs.storage.retry import Retrier, RetryPolicy
from ckptfs.testing._conformance.base import write_and_raise
from ckptfs.testing.faults import Fail, Fault, Hold, Lose, When
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from tests.storage.objects import TINY_LIMITS, bucket, busy, over

PART = 64 << 10


def put(writer: DataWriter, pieces: list[tuple[bytes, bool]]) -> None:
    """Hand over pieces, lent or not; what is not lent is scribbled over at once."""
    for data, lent in pieces:
        if lent:
            assert writer.lend(data) == len(data)
        else:
            mine = bytearray(data)
            assert writer.write(mine) == len(data)
            mine[:] = b"!" * len(mine)


def held(writer: DataWriter) -> int:
    """What the upload believes to hold; its bound is only as good as its book-keeping."""
    assert isinstance(writer, ObjectWriter)
    return writer._budget.allocated_bytes


pieces = st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=12)


@settings(deadline=None)
@example(  # parts that grow: memory of another size comes back
    pieces=[(b"x" * 300, False)],
    hint=None,
    part=5,
    memory=100,
    concurrency=1,
    multiple=1,
    equal=False,
    gathers=False,
)
@given(
    pieces=pieces,
    hint=st.none() | st.integers(0, 40) | st.integers(0, 300),
    part=st.integers(5, 30),
    memory=st.integers(1, 100),
    concurrency=st.integers(1, 4),
    multiple=st.sampled_from([1, 4, 5]),
    equal=st.booleans(),
    gathers=st.booleans(),
)
def test_any_pieces_arrive_whole(
    *,
    pieces: list[tuple[bytes, bool]],
    hint: int | None,
    part: int,
    memory: int,
    concurrency: int,
    multiple: int,
    equal: bool,
    gathers: bool,
) -> None:
    """Whatever is written or lent in whatever pieces, with a right, wrong or no size given, comes out in
    order, in parts that the store takes (it checks them), one PUT where one part is enough.
    """
    # A hundred parts of five bytes are just enough; those that may grow do so from the fifteenth on.
    limits = replace(TINY_LIMITS, max_parts=100, part_multiple_bytes=multiple, equal_parts=equal)
    store, storage = bucket(
        limits=limits, part_size_bytes=part, memory_bytes=memory, concurrency=concurrency
    )
    storage.client.gathers = gathers
    data = b"".join(piece for piece, _ in pieces)
    with storage.open_write("f", size_hint_bytes=hint) as writer:
        put(writer, pieces)
        assert not store.objects
    assert store.objects["run/f"].data == data
    assert not store.uploads
    counts = store.counts()
    assert counts["put"] + counts["complete"] == 1
    assert held(writer) == 0
    storage.close()


op_of_upload = st.sampled_from(["begin_upload", "put_part", "complete", "put", "abort", "head"])
actions = st.sampled_from(
    [
        Lose(),
        Lose(done=False),
        Fail(busy()),
        Fail(busy(), When.AFTER),
        Fail(AccessError("no")),
        Fail(StorageError("broken")),
    ]
)
faults = st.lists(
    st.builds(Fault, op_of_upload, st.just("*"), st.integers(1, 4), actions), max_size=4
)


@settings(deadline=None)
@given(pieces=pieces, faults=faults)
def test_faults_never_leave_a_wrong_object(
    pieces: list[tuple[bytes, bool]], faults: list[Fault]
) -> None:
    """Lost answers, throttling and refusals anywhere: the object is there with exactly its bytes
    when close returned, and otherwise only where an answer of the last request was lost.
    """
    store, storage = bucket(faults, limits=TINY_LIMITS, part_size_bytes=8, concurrency=2)
    data = b"".join(piece for piece, _ in pieces)
    writer = storage.open_write("f")
    try:
        with writer:
            put(writer, pieces)
    except StorageError:
        assert store.objects.get("run/f") is None or store.objects["run/f"].data == data
    else:
        assert store.objects["run/f"].data == data
        assert not [u for u in store.uploads.values() if u.parts]
    assert held(writer) == 0
    storage.close()


def test_lent_parts_are_sent_as_they_are() -> None:
    """A part inside one lent buffer reaches the client as that very memory; joined ones do not."""
    seen: list[Buffer] = []

    class Watching(MemoryObjectClient):
        def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
            upload = super().begin_upload(key, part_bytes=part_bytes)
            plain = upload.put_part

            def put_part(number: int, data: Buffer) -> None:
                seen.append(data)
                plain(number, data)

            upload.put_part = put_part  # type: ignore[method-assign]
            return upload

    storage = over(Watching(MemoryObjects()), part_size_bytes=PART, concurrency=1)
    tensor = bytearray(b"t" * (3 * PART))
    with storage.open_write("f") as writer:
        writer.lend(tensor)
        writer.write(b"tail")
    lent = [isinstance(d, memoryview) and d.obj is tensor for d in seen]
    assert lent == [True, True, True, False]
    storage.close()


def test_a_client_that_takes_pieces_gets_lent_ones_uncopied() -> None:
    """Two tensors and what is between share a part: both are sent from where they are, and what was
    written is together in the memory that the upload holds.
    """
    first, second = bytearray(b"1" * (PART + 100)), bytearray(b"2" * PART)
    tensors = (first, second)
    seen: list[list[object]] = []

    class Gathering(MemoryObjectClient):
        gathers = True

        def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
            upload = super().begin_upload(key, part_bytes=part_bytes)
            plain = upload.put_pieces

            def put_pieces(number: int, pieces: Sequence[Buffer]) -> None:
                views = [memoryview(piece) for piece in pieces]
                seen.append([v.obj if v.obj in tensors else bytes(v) for v in views])
                plain(number, pieces)

            upload.put_pieces = put_pieces  # type: ignore[method-assign]
            return upload

    store = MemoryObjects()
    storage = over(Gathering(store), part_size_bytes=PART, concurrency=1)
    with storage.open_write("f") as writer:
        put(writer, [(b"head", False)])
        writer.lend(first)
        put(writer, [(b"tail", False), (b"head", False)])
        writer.lend(second)
        put(writer, [(b"tail", False)])
    assert seen == [[b"head", first], [first, b"tailhead", second], [second, b"tail"]]
    assert store.objects["run/f"].data == b"head" + first + b"tailhead" + second + b"tail"
    storage.close()


def test_a_client_that_takes_one_buffer_gets_one() -> None:
    """What it would have to join itself is joined in memory that the upload counts."""

    class Single(MemoryObjectClient):
        def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
            upload = super().begin_upload(key, part_bytes=part_bytes)
            plain = upload.put_pieces

            def put_pieces(number: int, pieces: Sequence[Buffer]) -> None:
                assert len(pieces) == 1
                plain(number, pieces)

            upload.put_pieces = put_pieces  # type: ignore[method-assign]
            return upload

    store = MemoryObjects()
    storage = over(Single(store), part_size_bytes=PART, concurrency=1)
    tensor = bytearray(b"t" * (PART - 10))
    with storage.open_write("f") as writer:
        writer.lend(tensor)
        writer.lend(tensor)
        writer.write(b"tail")
    assert store.objects["run/f"].data == tensor + tensor + b"tail"
    storage.close()


def test_the_memory_of_a_part_is_used_again() -> None:
    """Twenty parts, one at a time: two pieces of memory in turn, not twenty."""
    seen: set[int] = set()
    kept: list[object] = []

    class Watching(MemoryObjectClient):
        def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
            upload = super().begin_upload(key, part_bytes=part_bytes)
            plain = upload.put_part

            def put_part(number: int, data: Buffer) -> None:
                assert isinstance(data, memoryview)
                kept.append(data.obj)  # alive, so that no other gets its address
                seen.add(id(data.obj))
                plain(number, data)

            upload.put_part = put_part  # type: ignore[method-assign]
            return upload

    storage = over(Watching(MemoryObjects()), part_size_bytes=PART, concurrency=1)
    with storage.open_write("f") as writer:
        put(writer, [(b"x" * PART, False)] * 20)
    assert len(kept) == 20
    assert len(seen) <= 3
    storage.close()


class Sink(MemoryObjectClient):
    """Forgets what it is sent. Holds every part until ``full`` are under way, once."""

    copies_parts = False

    def __init__(self, full: int) -> None:
        super().__init__(
            MemoryObjects(limits=Limits(min_part_bytes=1 << 20, max_object_bytes=1 << 40))
        )
        self.full = full
        self.reached = threading.Event()
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
        sink = self

        class Forgetting(Upload):
            def put_part(self, number: int, data: Buffer) -> None:
                sink.under_way(1)
                sink.reached.wait(120)
                sink.under_way(-1)

            def complete(self) -> str | None:
                return None

            def abort(self) -> None:
                return None

        return Forgetting()

    def under_way(self, step: int) -> None:
        with self._lock:
            self._now += step
            self.most = max(self.most, self._now)
            if self._now >= self.full:
                self.reached.set()


@pytest.mark.parametrize("copies", [False, True])
def test_what_an_upload_holds_is_bounded(copies: bool) -> None:
    """64 MiB in parts of 1 MiB, 16 MiB of memory, 64 requests at once: as many parts go out as the
    memory allows, and never more is held. Where the library copies what it sends, half.
    """
    memory = 16 << 20
    client = Sink(full=7 if copies else 15)
    client.copies_parts = copies
    storage = over(client, part_size_bytes=1 << 20, memory_bytes=memory, concurrency=64)
    piece = b"x" * (1 << 18)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with storage.open_write("f") as writer:
            for _ in range(256):
                writer.write(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert client.reached.is_set()
    assert peak - before < (memory // 2 if copies else memory) + (1 << 20)
    storage.close()


def test_lent_memory_is_not_held_twice() -> None:
    """64 MiB lent in one piece: next to nothing is allocated, 8 requests run at once."""
    client = Sink(full=8)
    storage = over(client, part_size_bytes=1 << 20, concurrency=8)
    tensor = bytearray(64 << 20)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with storage.open_write("f", size_hint_bytes=len(tensor)) as writer:
            writer.lend(tensor)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert client.most == 8
    assert peak - before < 1 << 20
    storage.close()


def test_a_part_above_the_memory_goes_alone() -> None:
    """Where the object's size asks for parts above memory_bytes, one at a time still gets through."""
    limits = replace(TINY_LIMITS, max_parts=10)
    store, storage = bucket(limits=limits, part_size_bytes=4, memory_bytes=8, concurrency=4)
    with storage.open_write("f", size_hint_bytes=1000) as writer:
        writer.write(b"x" * 1000)
    assert store.objects["run/f"].data == b"x" * 1000
    assert store.counts()["put_part"] == 9


def test_small_files_are_one_put() -> None:
    """Up to one part, nothing but one PUT; nothing at all before close."""
    store, storage = bucket(part_size_bytes=PART)
    for size in (0, 1, PART):
        with storage.open_write("f", size_hint_bytes=size) as writer:
            writer.write(b"x" * size)
            before = len(store.requests())
        assert [o.op for o in store.requests()[before:]] == ["put"]
    with storage.open_write("f") as writer:
        writer.write(b"x" * (PART + 1))
    assert [o.op for o in store.requests()[3:]] == ["begin_upload", *["put_part"] * 2, "complete"]


def test_a_failed_part_reaches_the_writer() -> None:
    """Its error is raised by write or close, nothing appears, the parts are thrown away."""
    store, storage = bucket(
        [Fault("put_part", "*", 2, Fail(AccessError("denied")))], part_size_bytes=PART
    )
    with pytest.raises(AccessError, match="denied"), storage.open_write("f") as writer:
        put(writer, [(b"x" * PART, False)] * 20)
    assert not store.objects
    assert not store.uploads


def test_a_failed_part_stops_the_others() -> None:
    """When one part failed for good, parts that were retrying give up, and close does not wait."""
    retrying = threading.Event()

    class Denying(MemoryObjectClient):
        def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
            upload = super().begin_upload(key, part_bytes=part_bytes)

            def put_part(number: int, data: Buffer) -> None:
                if number == 0:
                    assert retrying.wait(120)
                    raise AccessError("denied")
                retrying.set()
                raise busy()

            upload.put_part = put_part  # type: ignore[method-assign]
            return upload

    store = MemoryObjects()
    storage = over(Denying(store), part_size_bytes=PART, concurrency=8)
    # Real waits, longer than the test may take: only a signal can end them.
    policy = RetryPolicy(retry_s=1e6, first_s=1e6, cap_s=1e6)
    storage.retrier = Retrier(storage.client.endpoint, policy, draw=lambda: 1.0)
    with pytest.raises(AccessError), storage.open_write("f") as writer:
        writer.write(b"x" * (3 * PART))
    assert not store.objects


def test_one_upload_does_not_fill_the_queue() -> None:
    """At most ``concurrency`` parts of one upload are handed to the threads: another's get in between."""
    client = Sink(full=3)
    storage = over(client, part_size_bytes=1 << 20, concurrency=2)
    writer = storage.open_write("f")
    lending = threading.Thread(target=lambda: writer.lend(bytearray(10 << 20)))
    lending.start()
    other = storage.open_write("g")
    other.lend(bytearray(1 << 20))
    waiting = storage._pool()._waiting  # type: ignore[attr-defined]
    lending.join(0.2)
    assert lending.is_alive()
    assert not waiting
    client.reached.set()
    lending.join(120)
    writer.close()
    other.close()
    storage.close()


def ends(writer: DataWriter) -> list[StorageError]:
    """What a close in another thread raised; it must end."""
    told: list[StorageError] = []

    def close() -> None:
        try:
            writer.close()
        except StorageError as error:
            told.append(error)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()
    return told


def test_a_storage_that_is_closed_ends_its_uploads() -> None:
    """Parts that waited for a thread are never sent: their writer gets an error and does not hang on
    them; nothing appears, nothing stays.
    """
    hold = Hold()
    store, storage = bucket(
        [Fault("put_part", "*", 1, hold)], part_size_bytes=PART, concurrency=2, memory_bytes=1 << 30
    )
    storage._pool()._size = 1  # type: ignore[attr-defined]
    writer = storage.open_write("f")
    writer.write(b"x" * (3 * PART))
    assert hold.reached.wait(120)
    assert len(storage._pool()._waiting) == 1  # type: ignore[attr-defined]
    storage.close()
    hold.release.set()
    (error,) = ends(writer)
    assert "closed" in str(error)
    writer.abort()
    assert held(writer) == 0
    assert not store.objects
    assert not store.uploads


def test_threads_that_take_no_more_are_a_storage_error() -> None:
    """The storage was closed between two parts, just as one was handed over."""
    store, storage = bucket(part_size_bytes=PART)
    storage._pool().shutdown()
    with (
        pytest.raises(StorageError, match="no thread"),
        storage.open_write("f") as writer,
    ):
        writer.write(b"x" * (3 * PART))
    assert not store.objects
    assert not store.uploads
    assert held(writer) == 0


def test_abort_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """An abort that the store refuses is a warning; the error that led there is the one raised."""
    store, storage = bucket(
        [Fault("abort", "*", None, Fail(AccessError("no permission to abort")))],
        part_size_bytes=PART,
    )
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError):
        write_and_raise(storage, "f", b"x" * (3 * PART), KeyError)
    assert "were not removed" in caplog.text
    assert "no permission to abort" in caplog.text
    assert not store.objects


def test_abort_waits_for_what_is_under_way() -> None:
    """The parts are thrown away after the last part that was under way, or it would stay behind."""
    hold = Hold()
    store, storage = bucket([Fault("put_part", "*", 1, hold)], part_size_bytes=PART)
    writer = storage.open_write("f")
    writer.write(b"x" * (2 * PART))
    assert hold.reached.wait(120)
    aborting = threading.Thread(target=writer.abort)
    aborting.start()
    assert store.counts()["abort"] == 0
    hold.release.set()
    aborting.join(120)
    assert [o.op for o in store.requests()][-1] == "abort"
    assert not store.uploads


def test_an_aborted_file_sends_no_part_that_waited_for_a_thread() -> None:
    """Another file's part has the only thread when this file is aborted: what waited is not sent any
    more, neither to delay the abort nor to be left behind by it.
    """
    hold = Hold()
    store, storage = bucket(
        [Fault("put_part", "run/other", 1, hold)], part_size_bytes=PART, concurrency=1
    )
    other, writer = storage.open_write("other"), storage.open_write("f")
    other.write(b"x" * (2 * PART))
    assert hold.reached.wait(120)
    writer.write(b"x" * (2 * PART))
    aborting = threading.Thread(target=writer.abort)
    aborting.start()
    assert writer._budget.stopped.wait(120)  # type: ignore[attr-defined]
    hold.release.set()
    aborting.join(120)
    other.close()
    assert {o.key for o in store.requests("put_part")} == {"run/other"}
    assert set(store.objects) == {"run/other"}
    assert not store.uploads


def test_a_lost_answer_of_complete_is_settled() -> None:
    """It was done: the repeat finds no upload, the key has our size, close returns."""
    store, storage = bucket([Fault("complete", "*", 1, Lose())], part_size_bytes=PART)
    with storage.open_write("f") as writer:
        writer.write(b"x" * (2 * PART))
    assert [o.op for o in store.requests()][-3:] == ["complete", "complete", "head"]
    assert store.objects["run/f"].data == b"x" * (2 * PART)


def test_a_lost_request_of_complete_is_repeated() -> None:
    """It was not done: the repeat does it."""
    store, storage = bucket([Fault("complete", "*", 1, Lose(done=False))], part_size_bytes=PART)
    with storage.open_write("f") as writer:
        writer.write(b"x" * (2 * PART))
    assert store.counts()["complete"] == 2
    assert store.objects["run/f"].data == b"x" * (2 * PART)


@pytest.mark.parametrize("older", [None, b"of another size"])
def test_an_upload_that_was_taken_away_is_no_success(older: bytes | None) -> None:
    """Lost, then "no such upload", and the key has not our size: somebody aborted it. An error."""
    store, storage = bucket([Fault("complete", "*", 1, Lose(done=False))], part_size_bytes=PART)
    if older is not None:
        store.put_behind("run/f", older)
    writer = storage.open_write("f")
    writer.write(b"x" * (2 * PART))
    store.plan.add(Fault("complete", "*", 2, Hold(release=Sweeping(store))))
    with pytest.raises(StorageError, match="vanished"):
        writer.close()
    assert store.objects.get("run/f") is None or store.objects["run/f"].data == older


class Sweeping(threading.Event):
    """No caller waits for it; one that does sweeps the uploads."""

    def __init__(self, store: MemoryObjects) -> None:
        super().__init__()
        self._store = store

    def wait(self, timeout: float | None = None) -> bool:
        self._store.uploads.clear()
        return True


def test_an_upload_that_was_never_there_is_an_error() -> None:
    """No such upload, without a lost answer before it: nothing of ours can be there."""
    store, storage = bucket(part_size_bytes=PART)
    store.put_behind("run/f", b"y" * (2 * PART))
    writer = storage.open_write("f")
    writer.write(b"x" * (2 * PART))
    store.plan.add(Fault("complete", "*", 1, Hold(release=Sweeping(store))))
    with pytest.raises(StorageError, match="vanished"):
        writer.close()
    assert store.objects["run/f"].data == b"y" * (2 * PART)


def test_a_bucket_that_is_gone_is_told_as_such() -> None:
    """The last request meets a missing bucket: its words and its hint, not only "vanished"."""
    gone = NotFoundError("complete failed: the bucket 'b' does not exist", hint="check its name")
    _, storage = bucket([Fault("complete", "*", 1, Fail(gone))], part_size_bytes=PART)
    with (
        pytest.raises(StorageError, match="bucket 'b' does not exist") as caught,
        storage.open_write("f") as writer,
    ):
        writer.write(b"x" * (2 * PART))
    assert caught.value.hint == "check its name"


def test_giving_up_names_endpoint_and_tries() -> None:
    """A store that stays silent: the last error, with where and how often."""
    _, storage = bucket([Fault("put", "*", None, Fail(busy()))], retry_s=5.0)
    with (
        pytest.raises(TransientError, match=r"objects\+memory://.*tries in 5.0 s"),
        storage.open_write("f") as writer,
    ):
        writer.write(b"x")


def test_a_write_that_was_interrupted_cannot_be_closed() -> None:
    """Bytes may be missing in the middle: close must not make that an object."""
    store, storage = bucket(
        [Fault("begin_upload", "*", 1, Fail(KeyboardInterrupt()))], part_size_bytes=PART
    )
    writer = storage.open_write("f")
    with pytest.raises(KeyboardInterrupt):
        writer.write(b"x" * (2 * PART))
    with pytest.raises(StorageError):
        writer.close()
    with pytest.raises(StorageError):
        writer.write(b"y")
    writer.abort()
    assert not store.objects


def test_too_large_is_said_before_and_on_the_way() -> None:
    """A given size above the limit fails at open; an unknown one at the part that is too much."""
    store, storage = bucket(limits=replace(TINY_LIMITS, max_object_bytes=100, max_parts=10))
    with pytest.raises(UnsupportedError) as caught:
        storage.open_write("f", size_hint_bytes=101)
    assert caught.value.uri == "s3://bucket/run/f"
    store, storage = bucket(
        limits=replace(TINY_LIMITS, equal_parts=True, max_parts=3), part_size_bytes=4
    )
    with pytest.raises(UnsupportedError, match="3 parts") as caught, storage.open_write("f") as out:
        out.write(b"x" * 13)
    assert caught.value.uri == "s3://bucket/run/f"
    assert not store.objects
    assert not store.uploads


def test_a_put_that_was_lost_is_repeated() -> None:
    """Twice is once: the same bytes under the same key."""
    store, storage = bucket([Fault("put", "*", 1, Lose())])
    with storage.open_write("f") as writer:
        writer.write(b"x")
    assert store.counts()["put"] == 2
    assert store.objects["run/f"].data == b"x"


def sweep(age_s: float, faults: tuple[Fault, ...] = ()) -> tuple[MemoryObjects, Callable[[], int]]:
    """Two uploads below the run, old and young, and one of another run, on the server's clock."""
    now = [0.0]
    store, storage = bucket(faults)
    store.clock = lambda: now[0]
    for key, at in (("run/old", 0.0), ("runs/old", 0.0), ("run/young", 50.0)):
        now[0] = at
        store.new_upload(key)
    now[0] = 100.0
    return store, lambda: storage.sweep_uploads(age_s)


def test_sweeping_takes_old_uploads_of_this_run_only() -> None:
    """By age on the server's clock, below the root only; their number is returned."""
    store, act = sweep(60.0)
    assert act() == 1
    assert {u.key for u in store.uploads.values()} == {"runs/old", "run/young"}
    assert act() == 0


def test_sweeping_beside_another_sweeper() -> None:
    """One that is gone by then is no error and is not counted."""
    _, act = sweep(0.0, (Fault("abort_pending", "run/old", 1, Fail(NotFoundError("gone"))),))
    assert act() == 1


def test_sweeping_without_permission_says_so() -> None:
    """AccessError goes up: the caller decides how loud that is."""
    _, act = sweep(0.0, (Fault("list_uploads", "*", 1, Fail(AccessError("denied"))),))
    with pytest.raises(AccessError):
        act()


def test_a_lost_part_is_sent_again() -> None:
    """A part with a lost answer goes again under its number: the object has it once."""
    store, storage = bucket(
        [Fault("put_part", "*", n, Lose()) for n in (1, 3)], part_size_bytes=PART
    )
    data = bytes(range(256)) * 1024
    with storage.open_write("f") as writer:
        writer.write(data)
    assert store.objects["run/f"].data == data
    assert store.counts()["put_part"] == 6


def test_a_final_answer_that_stays_lost_is_told_as_such() -> None:
    """AnswerLostError, not a plain failure: the object may be there, whole."""
    store, storage = bucket([Fault("complete", "*", None, Lose(done=False))], part_size_bytes=PART)
    with pytest.raises(AnswerLostError), storage.open_write("f") as writer:
        writer.write(b"x" * (2 * PART))
    assert not store.uploads


def test_whoever_comes_after_a_part_that_failed_gets_its_error() -> None:
    """A full store is reported by the write that meets it, by each later one and by close; not that the file is
    broken, which says nothing.
    """

    class Full(MemoryObjectClient):
        def begin_upload(self, key: str, *, part_bytes: int) -> Upload:
            upload = super().begin_upload(key, part_bytes=part_bytes)

            def put_part(number: int, data: Buffer) -> None:
                raise NoSpaceError("no quota left")

            upload.put_part = put_part  # type: ignore[method-assign]
            return upload

    storage = over(Full(MemoryObjects()), part_size_bytes=PART, concurrency=1)
    writer = storage.open_write("f")
    data = memoryview(b"x" * (8 * PART))
    for _ in range(3):
        with pytest.raises(NoSpaceError, match="no quota left"):
            writer.write(data)
    with pytest.raises(NoSpaceError, match="no quota left"):
        writer.close()
    writer.abort()
    storage.close()
