"""Every method of the GCS client, against a server with Google's preconditions."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    StaleError,
)
from ckptfs.storage.clients.base import IF_ABSENT, IfMatch, ListedKey, ObjectClient
from tests.lab._gcs.store import Upload
from tests.servers.gcs_lab import CLIENTS, Place, fresh, place_of

ODD = ["run/a b/ü+%.&=#", "run/quote'\"<>", "run/x" * 40]


@pytest.fixture(scope="module", params=CLIENTS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """One server for the module, per client."""
    with place_of(request.param) as found:
        yield found


@pytest.fixture
def client(place: Place) -> ObjectClient:
    """The client alone."""
    return place.client


@pytest.mark.parametrize("key", ODD)
def test_small_objects(client: ObjectClient, key: str) -> None:
    """What was put is got, under any key, with one identity everywhere: the generation."""
    data = bytes(range(256)) + b"\r\n--\n"
    etag = client.put(key, data)
    assert client.get(key) == (data, etag)
    assert client.head(key).etag == etag
    assert client.head(key).size_bytes == len(data)
    assert etag is not None
    assert etag.isdigit()
    assert ListedKey(key, len(data)) in list(client.list_keys("run/", delimiter=False))
    assert client.delete([key]) == []
    with pytest.raises(NotFoundError):
        client.get(key)
    with pytest.raises(NotFoundError):
        client.head(key)


def test_empty_objects(client: ObjectClient) -> None:
    """An object of no bytes is an object."""
    key = fresh()
    client.put(key, b"", IF_ABSENT)
    assert client.get(key)[0] == b""
    assert client.head(key).size_bytes == 0


def test_conditions_look_at_the_live_generation(client: ObjectClient) -> None:
    """Only if absent, only if this one: else AlreadyExistsError, and what stood there stays."""
    key = fresh()
    first = client.put(key, b"1", IF_ABSENT)
    assert first is not None
    for condition in (IF_ABSENT, IfMatch("1"), IfMatch(str(int(first) + 1))):
        with pytest.raises(AlreadyExistsError):
            client.put(key, b"wrong", condition)
    assert client.get(key) == (b"1", first)
    second = client.put(key, b"2", IfMatch(first))
    assert second is not None
    with pytest.raises(AlreadyExistsError):
        client.put(key, b"wrong", IfMatch(first))
    client.delete([key])
    with pytest.raises(AlreadyExistsError):
        client.put(key, b"wrong", IfMatch(second))
    assert client.put(key, b"3", IF_ABSENT) not in (None, first, second)


def test_equal_bytes_are_another_generation(client: ObjectClient) -> None:
    """Replaced by the same bytes, the object is still not the one that was seen."""
    key = fresh()
    first = client.put(key, b"same")
    assert first is not None
    second = client.put(key, b"same")
    assert first != second
    with pytest.raises(AlreadyExistsError):
        client.put(key, b"wrong", IfMatch(first))
    with pytest.raises(StaleError):
        client.get_range(key, 0, memoryview(bytearray(4)), first)


def test_of_sixteen_writers_one_wins(client: ObjectClient) -> None:
    """One of many creates succeeds, all others get that answer, and the winner's bytes are there."""
    for _ in range(10):
        key, barrier = fresh("race"), threading.Barrier(16)

        def one(i: int, key: str = key, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                client.put(key, b"%d" % i, IF_ABSENT)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(one, range(16)))
        assert won.count(True) == 1
        assert client.get(key)[0] == b"%d" % won.index(True)


def test_ranges_go_straight_into_the_buffer(client: ObjectClient) -> None:
    """A range fills its buffer and nothing else, with a pinned generation and without one."""
    key, data = fresh(), bytes(range(256)) * 20
    etag = client.put(key, data)
    room = bytearray(120)
    client.get_range(key, 1000, memoryview(room)[10:110], etag)
    assert bytes(room) == bytes(10) + data[1000:1100] + bytes(10)
    whole = bytearray(len(data))
    client.get_range(key, 0, memoryview(whole), None)
    assert whole == data
    client.get_range(key, 5, memoryview(bytearray()), etag)


def test_a_read_notices_another_object_and_its_end(client: ObjectClient) -> None:
    """A replaced object is StaleError, one that ends too early IntegrityError, a deleted one not there."""
    key = fresh()
    etag = client.put(key, b"0123456789")
    for offset in (8, 10, 20):
        with pytest.raises(IntegrityError):
            client.get_range(key, offset, memoryview(bytearray(4)), etag)
    client.put(key, b"9876543210")
    with pytest.raises(StaleError):
        client.get_range(key, 0, memoryview(bytearray(4)), etag)
    client.delete([key])
    with pytest.raises((NotFoundError, StaleError)):
        client.get_range(key, 0, memoryview(bytearray(4)), etag)


def test_uploads_in_parts(client: ObjectClient) -> None:
    """Parts come in any order, from threads, twice; nothing is visible before the end."""
    key, parts = fresh(), [bytes([i]) * (1000 - (i == 7)) for i in range(8)]
    upload = client.begin_upload(key, part_bytes=1000)
    upload.put_part(0, parts[0])
    with ThreadPoolExecutor(4) as pool:
        for done in [
            pool.submit(upload.put_part, i, memoryview(parts[i])) for i in range(7, -1, -1)
        ]:
            done.result()
    with pytest.raises(NotFoundError):
        client.head(key)
    etag = upload.complete()
    data, found = client.get(key)
    assert data == b"".join(parts)
    assert etag in (None, found)
    with contextlib.suppress(NotFoundError):  # or the same answer again
        assert upload.complete() == etag
    upload.abort()
    assert client.head(key).size_bytes == len(data)


def test_a_last_part_that_comes_late(client: ObjectClient) -> None:
    """Parts one after the other, the last one short: each is taken without waiting for the next."""
    key = fresh()
    upload = client.begin_upload(key, part_bytes=1000)
    for number, part in enumerate([b"a" * 1000, b"b" * 1000, b"c"]):
        upload.put_part(number, part)
    upload.complete()
    assert client.get(key)[0] == b"a" * 1000 + b"b" * 1000 + b"c"


def test_buffers_of_an_upload_may_be_reused(client: ObjectClient) -> None:
    """A part's bytes are taken when put_part returns: the buffer is the caller's again."""
    key, buffer = fresh(), bytearray(4 << 20)
    upload = client.begin_upload(key, part_bytes=len(buffer))
    for number in range(3):
        buffer[:] = bytes([number]) * len(buffer)
        upload.put_part(number, memoryview(buffer))
    buffer[:] = b"x" * len(buffer)
    upload.complete()
    found = bytearray(12 << 20)
    client.get_range(key, 0, memoryview(found), None)
    assert found == b"".join(bytes([number]) * len(buffer) for number in range(3))


def test_an_aborted_upload_leaves_nothing(place: Place) -> None:
    """After abort, twice too, there is no object and no upload."""
    key = fresh()
    upload = place.client.begin_upload(key, part_bytes=1000)
    upload.put_part(0, b"x" * 1000)
    upload.abort()
    upload.abort()
    with pytest.raises(NotFoundError):
        place.client.head(key)
    assert not place.gcs.store.multipart


def test_uploads_that_nobody_completed_are_found_with_their_age() -> None:
    """They are listed below their prefix only, with an age, in pages, and can be aborted."""
    with place_of("obstore") as place:
        keys = sorted(fresh(f"up/{i}") for i in range(3))
        for number, key in enumerate([*keys, "elsewhere/x"]):
            left = Upload(f"left-{number}", place.gcs.bucket, key, {})
            place.gcs.store.multipart[left.id] = left
        pending = list(place.client.list_uploads("run/up/"))
        assert [upload.key for upload in pending] == keys
        assert all(0 <= upload.age_s < 60 for upload in pending)
        place.client.abort_pending(pending[0])
        place.client.abort_pending(pending[0])
        assert [u.key for u in place.client.list_uploads("run/up/")] == keys[1:]
        more = [Upload(f"{i:04}", place.gcs.bucket, "run/page/k", {}) for i in range(1001)]
        place.gcs.store.multipart.update({upload.id: upload for upload in more})
        found = [u.upload_id for u in place.client.list_uploads("run/page/")]
        assert found == [upload.id for upload in more]


def test_listings_are_in_order_and_in_pages(place: Place) -> None:
    """More keys than a page holds come once each, in order; with a delimiter only the next level."""
    keys = sorted([f"run/list/{i:04}" for i in range(1001)] + ["run/list/d/1", "run/list/d/2"])
    bucket = place.gcs.store.bucket(place.gcs.bucket)
    place.client.put(keys[0], b"x")
    blob = bucket.live[keys[0]]
    bucket.live.update({key: replace(blob, key=key) for key in keys})
    assert [listed.key for listed in place.client.list_keys("run/list/", delimiter=False)] == keys
    found = list(place.client.list_keys("run/list/", delimiter=True))
    assert [listed.key for listed in found if listed.is_prefix] == ["run/list/d/"]
    assert len(found) == 1002
    assert list(place.client.list_keys("run/list-none/", delimiter=True)) == []
    for start in range(0, len(keys), place.client.limits.delete_batch):
        batch = keys[start : start + place.client.limits.delete_batch]
        assert place.client.delete(batch) == []
    assert list(place.client.list_keys("run/list/", delimiter=False)) == []


def test_deletes_tell_what_was_refused(place: Place) -> None:
    """Of many keys absent ones are success, a held one is reported with its key, the others go."""
    keys = [fresh(str(i)) for i in range(3)]
    for key in keys[:2]:
        place.client.put(key, b"x")
    held = place.gcs.store.bucket(place.gcs.bucket).held
    held.add(keys[0])
    try:
        [refused] = place.client.delete(keys)
        assert refused.key == keys[0]
        assert isinstance(refused.error, AccessError)
    finally:
        held.clear()
    assert place.client.head(keys[0]).size_bytes == 1
    with pytest.raises(NotFoundError):
        place.client.head(keys[1])


def _child(client: ObjectClient, key: str) -> None:
    """Runs in a spawned process."""
    client.put(key, client.get(key)[0] + b"!", IfMatch(client.head(key).etag or ""))


def test_a_client_goes_to_another_process(client: ObjectClient) -> None:
    """A used client pickles with its options and works in a spawned process; the first one stays."""
    key = fresh()
    client.put(key, b"hello")
    copy = pickle.loads(pickle.dumps(client))
    assert copy.get(key)[0] == b"hello"
    copy.close()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(client, key))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert client.get(key)[0] == b"hello!"


def test_a_closed_client_opens_again(place: Place) -> None:
    """close is harmless twice, and the next request opens it again."""
    client = place.another()
    key = fresh()
    client.put(key, b"x")
    client.close()
    client.close()
    assert client.get(key)[0] == b"x"
    client.close()
