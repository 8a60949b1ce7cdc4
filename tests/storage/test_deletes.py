"""Deletes: batches, all tried, failures reported once, refusals not asked again and again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CredentialsError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.bulk_delete import DeleteBackoff, Deleter
from ckptfs.storage.clients.base import FailedDelete, ListedKey
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.testing.faults import Fail, Fault, Lose
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from tests.storage.objects import FakeTime, bucket, busy, over


def filled(
    count: int, *faults: Fault, folder: str = "step_1"
) -> tuple[MemoryObjects, ObjectStorage]:
    """A bucket with objects ``step_1/0`` ..., batches of ten."""
    store, storage = bucket(faults)
    for n in range(count):
        store.put_behind(f"run/{folder}/{n}", b"x")
    return store, storage


def test_known_names_go_in_batches_and_nothing_is_listed() -> None:
    """25 keys, ten a request: three requests."""
    store, storage = filled(25)
    storage.remove_many([f"step_1/{n}" for n in range(25)])
    assert not store.objects
    assert store.counts() == {"delete": 3}


@pytest.mark.parametrize("done", [True, False])
def test_a_lost_answer_of_one_delete_is_repeated(done: bool) -> None:
    """Whether it was done or not: asked again, gone, no error."""
    store, storage = filled(1, Fault("delete", "*", 1, Lose(done=done)))
    storage.remove("step_1/0")
    assert not store.objects
    assert store.counts() == {"delete": 2}


def test_absent_and_none_are_success() -> None:
    """No key, no request; keys that are not there are no failure."""
    store, storage = bucket()
    storage.remove_many([])
    assert store.counts() == {}
    storage.remove_many(["a", "b"])
    storage.remove("c")
    assert store.counts() == {"delete": 2}


def test_all_are_tried_and_the_failures_told_once() -> None:
    """A batch that fails as a whole and a key that is refused: the rest is gone, one error counts."""
    store, storage = filled(35, Fault("delete", "*", 1, Fail(StorageError("malformed"))))
    store.locked = {"run/step_1/33"}
    with pytest.raises(StorageError, match="11 of 35 failed, the first: malformed"):
        storage.remove_many([f"step_1/{n}" for n in range(35)])
    assert set(store.objects) == {f"run/step_1/{n}" for n in (*range(10), 33)}


def test_a_batch_is_repeated_when_it_is_throttled_or_unanswered() -> None:
    """Deleting twice is deleting once."""
    store, storage = filled(
        10, Fault("delete", "*", 1, Fail(busy())), Fault("delete", "*", 2, Lose())
    )
    storage.remove_many([f"step_1/{n}" for n in range(10)])
    assert not store.objects
    assert store.counts() == {"delete": 3}


def test_a_dead_store_is_asked_for_the_first_batch_only() -> None:
    """After retry_s for one batch the others are not each waited for as long."""
    store, storage = filled(100, Fault("delete", "*", None, Fail(busy())))
    with pytest.raises(TransientError, match="100 of 100 failed"):
        storage.remove_many([f"step_1/{n}" for n in range(100)])
    first = store.requests("delete")[0].key
    assert {o.key for o in store.requests("delete")} == {first}


def test_a_tree_goes_whole_and_alone() -> None:
    """All below the name, in batches, listed until nothing is left; names alike stay."""
    store, storage = filled(25)
    for key in ("run/step_10/x", "run/step_1.txt", "runs/step_1/x"):
        store.put_behind(key, b"x")
    storage.remove_tree("step_1")
    assert set(store.objects) == {"run/step_10/x", "run/step_1.txt", "runs/step_1/x"}
    assert store.counts() == {"list_keys": 2, "delete": 3, "head": 1}
    assert {o.key for o in store.requests("list_keys")} == {"run/step_1/"}


def test_a_tree_that_is_one_object() -> None:
    """The object of that very name goes too; where there is nothing, nothing is deleted: with
    versions, that would leave a marker forever.
    """
    store, storage = bucket()
    store.put_behind("run/f", b"x")
    storage.remove_tree("f")
    assert not store.objects
    deletes = store.counts()["delete"]
    storage.remove_tree("f")
    assert store.counts()["delete"] == deletes


def test_a_late_object_is_swept_too() -> None:
    """What a delayed request puts there between list and delete is found by the next listing."""
    store, storage = filled(3)
    store.plan.add(Fault("put", "run/step_1/late", 1, Lose(done=False, later=True, after=2)))
    with pytest.raises(StorageError):
        storage.create("step_1/late", b"x", staging="")
    storage.remove_tree("step_1")
    assert not store.objects


def test_objects_that_keep_coming_are_an_error() -> None:
    """Not forever: after a few sweeps it says that somebody is writing there."""

    class Filling(MemoryObjectClient):
        def list_keys(self, prefix: str, *, delimiter: bool):  # type: ignore[no-untyped-def] # noqa: ANN202
            yield ListedKey(f"{prefix}new", 1)

    storage = over(Filling(MemoryObjects()))
    with pytest.raises(TransientError, match="keeps adding objects"):
        storage.remove_tree("step_1")


def test_the_root_stays() -> None:
    """remove_tree of the root is refused before any request."""
    store, storage = filled(1)
    with pytest.raises(UnsupportedError):
        storage.remove_tree("")
    assert store.counts() == {}


# -- refusals --------------------------------------------------------------------------


def deleter(store: MemoryObjects, time: FakeTime) -> Deleter:
    """The deletes of ``run/`` on a clock of the test's."""
    storage = over(MemoryObjectClient(store))
    return Deleter(storage.client, storage.retrier, DeleteBackoff(time.clock), storage.root, "run/")


def test_a_refusal_is_told_once_and_backed_off(caplog: pytest.LogCaptureFixture) -> None:
    """Object lock: one warning; then no request for a minute, two, ... an hour, and an AccessError
    all the same, because nothing was deleted; after the lock ends it goes through.
    """
    store, time = MemoryObjects(), FakeTime()
    store.put_behind("run/step_1/x", b"x")
    store.locked = {"*"}
    deletes = deleter(store, time)
    asked_at = []
    with caplog.at_level(logging.WARNING):
        while time.now_s < 4 * 3600:
            before = store.counts()["delete"]
            with pytest.raises(AccessError):
                deletes.delete_keys(["step_1/x"])
            if store.counts()["delete"] > before:
                asked_at.append(time.now_s)
            time.now_s += 10
    assert asked_at[:5] == [0, 60, 180, 420, 900]
    assert max(b - a for a, b in itertools.pairwise(asked_at)) == 3600
    assert len(caplog.records) == 1
    assert "object lock" in caplog.text
    store.locked = set()
    time.now_s += 3600
    deletes.delete_keys(["step_1/x"])
    assert not store.objects
    # The next refusal is a new one: it is held for a minute, not for an hour.
    store.locked = {"*"}
    for later_s, requests in ((0, 1), (59, 1), (2, 2)):
        time.now_s += later_s
        before = before if later_s else store.counts()["delete"]
        with pytest.raises(AccessError):
            deletes.delete_keys(["step_1/x"])
        assert store.counts()["delete"] == before + requests


def test_all_files_of_a_locked_checkpoint_are_one_refusal() -> None:
    """However many keys of a name one request refuses: the next try comes after a minute, and not
    after an hour because it was sixty files.
    """
    store, time = MemoryObjects(), FakeTime()
    keys = [f"step_1/{n}" for n in range(25)]
    for key in keys:
        store.put_behind(f"run/{key}", b"x")
    store.locked = {"*"}
    deletes = deleter(store, time)
    with pytest.raises(AccessError, match="25 of 25 failed"):
        deletes.delete_keys(keys)
    store.locked = set()
    time.now_s += 59
    with pytest.raises(AccessError, match="already refused"):
        deletes.delete_keys(keys)
    time.now_s += 2
    deletes.delete_keys(keys)
    assert not store.objects


def test_a_refusal_holds_its_own_name_only() -> None:
    """One locked checkpoint does not keep the others, nor the run's own files."""
    store, time = MemoryObjects(), FakeTime()
    for key in ("step_1/x", "step_2/x", ".ckptfs/attempts/a"):
        store.put_behind(f"run/{key}", b"x")
    store.locked = {"run/step_1/*"}
    deletes = deleter(store, time)
    with pytest.raises(AccessError, match="1 of 3 failed"):
        deletes.delete_keys(["step_1/x", "step_2/x", ".ckptfs/attempts/a"])
    assert set(store.objects) == {"run/step_1/x"}
    store.put_behind("run/step_2/x", b"x")
    deletes.delete_keys(["step_2/x"])
    requests = store.counts()["delete"]
    with pytest.raises(AccessError, match="already refused"):
        deletes.delete_tree("step_1")
    assert store.counts()["delete"] == requests


def test_a_refusal_holds_no_other_run() -> None:
    """Steps have the same names in every run of a bucket: a locked archive does not keep the rest."""
    store = MemoryObjects()
    store.locked = {"archive/*"}
    archive, daily = (
        over(MemoryObjectClient(store), f"s3://bucket/{run}") for run in ("archive", "daily")
    )
    for storage in (archive, daily):
        storage.replace("step_1/x", b"x")
    with pytest.raises(AccessError):
        archive.remove("step_1/x")
    daily.remove("step_1/x")
    assert set(store.objects) == {"archive/step_1/x"}
    with pytest.raises(AccessError, match="already refused"):
        archive.remove("step_1/x")


def test_a_refusal_below_the_control_directory_holds_one_key() -> None:
    """One retained entry of the log must not keep leases, attempts and probes from being deleted."""
    store, time = MemoryObjects(), FakeTime()
    keys = [".ckptfs/log/00000000", ".ckptfs/log/00000001", ".ckptfs/lease"]
    for key in keys:
        store.put_behind(f"run/{key}", b"x")
    store.locked = {"run/.ckptfs/log/00000000"}
    deletes = deleter(store, time)
    for tried in range(2):
        with pytest.raises(AccessError, match="already refused" if tried else "object lock"):
            deletes.delete_keys(keys[:1])
    assert store.counts() == {"delete": 1}
    deletes.delete_keys(keys[1:])
    assert set(store.objects) == {f"run/{keys[0]}"}
    store.locked = set()
    time.now_s += 61
    deletes.delete_tree(".ckptfs")
    assert not store.objects


def test_expired_credentials_are_no_lock() -> None:
    """CredentialsError is an AccessError too, but renewing cures it at once: nothing is held."""
    store, storage = filled(1, Fault("delete", "*", 1, Fail(CredentialsError("expired"))))
    with pytest.raises(CredentialsError):
        storage.remove("step_1/0")
    storage.remove("step_1/0")
    assert not store.objects


def test_a_refused_request_holds_too() -> None:
    """A policy without the permission to delete refuses the whole request: the same back-off."""
    store, storage = filled(1, Fault("delete", "*", None, Fail(AccessError("no DeleteObject"))))
    for _ in range(3):
        with pytest.raises(AccessError):
            storage.remove("step_1/0")
    assert store.counts() == {"delete": 1}


@pytest.mark.parametrize("error", [busy(), AnswerLostError("500 InternalError")])
def test_a_key_that_a_retry_may_cure_goes_again(error: StorageError) -> None:
    """Of a batch, one key is answered with "slow down" or "internal error", which does not say
    whether it is gone: the batch is repeated, the others too.
    """

    class Throttling(MemoryObjectClient):
        def delete(self, keys: Sequence[str]) -> list[FailedDelete]:
            refused = super().delete(keys)
            first = self.store.counts()["delete"] == 1
            return [FailedDelete(keys[0], error)] if first else refused

    store = MemoryObjects()
    over(Throttling(store)).remove_many(["a", "b"])
    assert store.counts() == {"delete": 2}


def test_holds_outlive_a_storage() -> None:
    """Storages come and go with saves; what this process has learned of the bucket stays."""
    store, storage = filled(1)
    store.locked = {"*"}
    with pytest.raises(AccessError):
        storage.remove("step_1/0")
    storage.close()
    with pytest.raises(AccessError, match="already refused"):
        over(MemoryObjectClient(store)).remove("step_1/0")
    assert store.counts() == {"delete": 1}
