"""What ObjectStorage decides over one client: conditions, retries, requests, processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.commit.log.advisory_log import ADVICE
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CredentialsError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import Entry
from ckptfs.storage.clients.base import ALWAYS, Buffer, Condition, Conditions, IfMatch
from ckptfs.storage.conditional_writes import EtagSpelling, HonouredConditions
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.storage.registry import open_storage
from ckptfs.storage.retry import Retrier
from ckptfs.testing.faults import Fail, Fault, Hold, Lose, Plan
from ckptfs.testing.memory_object_store import (
    STORES,
    Manner,
    Manners,
    MemoryObjectClient,
    MemoryObjects,
)
from ckptfs.uri import Uri
from tests.storage.objects import bucket, busy, over

# -- conditions ------------------------------------------------------------------------

HONOURS, IGNORES, REFUSES = Manner.HONOURS, Manner.IGNORES, Manner.REFUSES


@pytest.mark.parametrize(
    ("if_absent", "if_match", "found"),
    [
        (HONOURS, HONOURS, HonouredConditions(if_absent=True, if_match=EtagSpelling.AS_GIVEN)),
        (
            HONOURS,
            Manner.BARE_ONLY,
            HonouredConditions(if_absent=True, if_match=EtagSpelling.UNQUOTED),
        ),
        (HONOURS, IGNORES, HonouredConditions(if_absent=True, if_match=None)),
        (HONOURS, REFUSES, HonouredConditions(if_absent=True, if_match=None)),
        (IGNORES, HONOURS, HonouredConditions(if_absent=False, if_match=None)),
        (IGNORES, IGNORES, HonouredConditions(if_absent=False, if_match=None)),
        (REFUSES, REFUSES, HonouredConditions(if_absent=False, if_match=None)),
    ],
)
def test_conditions_are_seen_not_believed(
    if_absent: Manner, if_match: Manner, found: HonouredConditions
) -> None:
    """What a server really does decides what the storage offers; its probe leaves nothing behind."""
    store, storage = bucket()
    store.manners = Manners(if_absent, if_match)
    caps = storage.probe(".ckptfs")
    assert storage._bucket_state.conditions.found == found
    assert caps == storage.capabilities
    assert caps.exclusive_create is found.if_absent
    assert caps.conditional_replace is (found.if_match is not None)
    assert not store.objects
    assert len(store.requests()) <= 8
    assert all(o.key.startswith("run/.ckptfs/.partial-probe-") for o in store.requests())
    if caps.conditional_replace:
        storage.replace("k", b"1", if_match="")
        etag = storage.stat("k").etag
        assert etag is not None
        storage.replace("k", b"2", if_match=etag)
        with pytest.raises(AlreadyExistsError):
            storage.replace("k", b"3", if_match=etag)
        assert storage.read("k") == b"2"


def test_the_first_conditional_write_probes_and_no_other() -> None:
    """Reads and plain writes cost nothing extra; then once per process and bucket, not per storage."""
    store, storage = bucket()
    storage.replace("a", b"x")
    storage.read("a")
    assert len(store.requests()) == 2
    storage.create("log/0", b"x", staging="")
    assert len(store.requests()) == 2 + 6 + 1
    storage.create("log/1", b"x", staging="")
    over(MemoryObjectClient(store)).create("log/2", b"x", staging="")
    assert len(store.requests()) == 2 + 6 + 3


def test_what_was_seen_stays_when_a_client_learns_its_endpoint() -> None:
    """Some know it only when a request was sent: the same server is not probed again for that."""
    store, storage = bucket()
    storage.create("log/0", b"x", staging="")
    storage.client.endpoint = "https://resolved"
    storage.create("log/1", b"x", staging="")
    assert len(store.requests()) == 6 + 2


def test_before_the_probe_what_the_client_can_ask_for() -> None:
    """A client that cannot ask needs no probe, and says so from the start."""
    store = MemoryObjects()
    for if_absent, if_match in ((True, True), (True, False), (False, False)):
        client = MemoryObjectClient(store, asks=Conditions(if_absent, if_match))
        storage = over(client, root=f"s3://b{if_absent}{if_match}/run")
        caps = storage.capabilities
        assert (caps.exclusive_create, caps.conditional_replace) == (if_absent, if_match)
        assert storage.probe("") == caps
    with pytest.raises(UnsupportedError):
        storage.create("k", b"x", staging="")
    assert "k" not in store.objects


def test_a_server_that_ignores_conditions_loses_create() -> None:
    """UnsupportedError from create and from replace by etag, and nothing is written."""
    store, storage = bucket()
    store.manners = Manners(IGNORES, IGNORES)
    with pytest.raises(UnsupportedError):
        storage.create("log/0", b"x", staging="")
    with pytest.raises(UnsupportedError):
        storage.replace("k", b"x", if_match="")
    with pytest.raises(UnsupportedError):
        storage.replace("k", b"x", if_match='"1"')
    assert not store.objects


def test_a_refusal_that_was_none_is_found_out() -> None:
    """A server that answers "precondition failed" and writes all the same excludes no writer."""

    class Lying(MemoryObjectClient):
        def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
            try:
                return super().put(key, data, condition)
            except AlreadyExistsError:
                self.store.put_behind(key, bytes(data))
                raise

    storage = over(Lying(MemoryObjects()))
    assert not storage.probe("").exclusive_create


def test_a_second_create_that_is_accepted_excludes_nobody() -> None:
    """A server that answers "done" to both creates lets two writers believe that they won, whatever a read
    gives afterwards: here the first writer's bytes, from a cache on the way or because the server
    drops the second. Its creates are refused.
    """

    class Accepting(MemoryObjectClient):
        def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
            try:
                return super().put(key, data, condition)
            except AlreadyExistsError:
                return '"as if written"'

    storage = over(Accepting(MemoryObjects()))
    assert not storage.probe("").exclusive_create
    with pytest.raises(UnsupportedError):
        storage.create("log/0", b"x", staging="")


def test_a_second_replace_that_is_accepted_is_no_conditional_replace() -> None:
    """The same of replacing by an etag that is no longer the object's: two writers got "done"."""

    class Accepting(MemoryObjectClient):
        def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
            try:
                return super().put(key, data, condition)
            except AlreadyExistsError:
                if not isinstance(condition, IfMatch):
                    raise
                return '"as if written"'

    caps = over(Accepting(MemoryObjects())).probe("")
    assert caps.exclusive_create
    assert not caps.conditional_replace


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("fault", [Lose(), Lose(done=False), Fail(busy())])
def test_faults_do_not_fool_the_probe(nth: int, fault: Any) -> None:
    """Whatever request of it is throttled or unanswered, the verdict is right and nothing stays."""
    for manner in (HONOURS, IGNORES):
        store, storage = bucket([Fault("*", "*probe*", nth, fault)])
        store.manners = Manners(manner, manner)
        assert storage.probe("").exclusive_create is (manner is HONOURS)
        assert not store.objects


class Repeating(MemoryObjectClient):
    """A library that repeats some puts by itself after a lost answer, without a word."""

    def __init__(self, store: MemoryObjects, repeats: Container[int]) -> None:
        super().__init__(store)
        self._repeats = repeats
        self._puts = 0

    def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
        self._puts += 1
        if self._puts in self._repeats:
            super().put(key, data, condition)
        return super().put(key, data, condition)


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_put_that_the_library_repeats_does_not_fool_the_probe(nth: int) -> None:
    """It was done, its answer was lost below us, and the repeat met our own object: "exists already"
    for the first put on a fresh key, or for the right etag, is our own success and no verdict.
    """
    for manner in (HONOURS, Manner.BARE_ONLY, IGNORES):
        store = MemoryObjects(manners=Manners(IGNORES if manner is IGNORES else HONOURS, manner))
        storage = over(Repeating(store, [nth]))
        caps = storage.probe("")
        assert caps.exclusive_create is (manner is not IGNORES)
        assert caps.conditional_replace is (manner is not IGNORES)
        assert not store.objects


def test_what_is_always_repeated_is_no_verdict() -> None:
    """Every first put is answered with its own success: after a few keys an error, never "this store
    honours nothing", by which writers would part ways. The next time it is asked again.
    """
    store = MemoryObjects()
    client = Repeating(store, range(1, 100))
    storage = over(client)
    with pytest.raises(StorageError, match="is unknown"):
        storage.create("log/0", b"x", staging="")
    assert len({o.key for o in store.requests("put")}) == 4
    assert not store.objects
    client._repeats = ()
    storage.create("log/0", b"x", staging="")


def test_a_server_that_refuses_every_condition_honours_nothing() -> None:
    """It says "precondition failed" to the first put on a fresh key, and nothing is there: a verdict."""

    class Refusing(MemoryObjectClient):
        def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
            if condition is ALWAYS:
                return super().put(key, data)
            raise AlreadyExistsError("put failed: PreconditionFailed")

    storage = over(Refusing(MemoryObjects()))
    assert not storage.probe("").exclusive_create
    assert not storage.capabilities.conditional_replace


def test_a_refused_replace_that_was_done_is_found_out() -> None:
    """A server that answers "precondition failed" to every etag, and writes all the same."""

    class Lying(MemoryObjectClient):
        def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
            if not isinstance(condition, IfMatch):
                return super().put(key, data, condition)
            self.store.put_behind(key, bytes(data))
            raise AlreadyExistsError("put failed: PreconditionFailed")

    caps = over(Lying(MemoryObjects())).probe("")
    assert caps.exclusive_create
    assert not caps.conditional_replace


def test_a_probe_that_was_refused_left_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """No permission to put: an AccessError, and no word of an object that was never there."""

    class ReadOnly(MemoryObjectClient):
        def put(self, key: str, data: Buffer, condition: Condition = ALWAYS) -> str | None:
            raise AccessError("put failed: 403 Forbidden")

        def delete(self, keys: Sequence[str]) -> list[Any]:
            raise AccessError("delete failed: 403 Forbidden")

    with caplog.at_level(logging.INFO), pytest.raises(AccessError, match="put failed"):
        over(ReadOnly(MemoryObjects())).create("log/0", b"x", staging="")
    assert "left behind" not in caplog.text


def test_a_probe_that_may_not_delete_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """No permission to delete: a warning, no failure, and the verdict stays."""
    store, storage = bucket()
    store.locked = {"*"}
    with caplog.at_level(logging.WARNING):
        storage.create("log/0", b"x", staging="")
        storage.create("log/1", b"x", staging="")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "left behind: the probe" in caplog.text
    assert storage.capabilities.conditional_replace


def test_a_probe_that_may_not_write_is_an_error_and_asked_again() -> None:
    """No permission to put is AccessError, not "no exclusive create": the next call tries again."""
    store, storage = bucket([Fault("put", "*", 1, Fail(AccessError("denied")))])
    with pytest.raises(AccessError):
        storage.create("log/0", b"x", staging="")
    storage.create("log/0", b"x", staging="")
    assert set(store.objects) == {"run/log/0"}


# -- small files -----------------------------------------------------------------------


def test_a_lost_create_goes_up_unrepeated() -> None:
    """Repeating it would meet our own object: AnswerLostError at once; the caller reads it back."""
    store, storage = bucket([Fault("put", "run/log/0", 1, Lose())])
    with pytest.raises(AnswerLostError):
        storage.create("log/0", b"ours", staging="")
    assert len([o for o in store.requests("put") if o.key == "run/log/0"]) == 1
    assert storage.read("log/0") == b"ours"


def test_a_throttled_create_is_repeated() -> None:
    """It surely did nothing: tried again until it is done or refused."""
    store, storage = bucket([Fault("put", "run/log/0", n, Fail(busy())) for n in (1, 2)])
    storage.create("log/0", b"ours", staging="")
    assert store.objects["run/log/0"].data == b"ours"


def test_conditional_replaces_are_as_careful() -> None:
    """Lost goes up, throttled is repeated, for an etag and for "absent"."""
    store, storage = bucket()
    storage.replace("k", b"1", if_match="")
    etag = storage.stat("k").etag
    store.plan.add(Fault("put", "run/k", 1, Fail(busy())))
    store.plan.add(Fault("put", "run/k", 2, Lose()))
    with pytest.raises(AnswerLostError):
        storage.replace("k", b"2", if_match=etag)
    assert storage.read("k") == b"2"
    store.plan.add(Fault("put", "run/new", 1, Lose(done=False)))
    with pytest.raises(AnswerLostError):
        storage.replace("new", b"2", if_match="")


def test_an_etag_of_an_object_that_is_gone_does_not_hold() -> None:
    """Some servers answer 404 to If-Match on an absent key: AlreadyExistsError all the same."""
    store, storage = bucket()
    storage.replace("k", b"1", if_match="")
    etag = storage.stat("k").etag
    store.objects.clear()
    with pytest.raises(AlreadyExistsError):
        storage.replace("k", b"2", if_match=etag)
    assert not store.objects


@pytest.mark.parametrize("op", ["get", "head", "list_keys", "put"])
def test_everything_else_is_repeated(op: str) -> None:
    """Reads, listings and plain puts go again after throttling and after a lost answer."""
    store, storage = bucket([Fault(op, "*", 1, Fail(busy())), Fault(op, "*", 2, Lose())])
    store.put_behind("run/d/f", b"x")
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: storage.read("d/f"),
        "head": lambda: storage.stat("d/f"),
        "list_keys": lambda: storage.list("d"),
        "put": lambda: storage.replace("d/f", b"x"),
    }
    calls[op]()
    assert store.counts() == {op: 3}


def test_files_of_a_row_are_read_at_once_and_in_order() -> None:
    """Three at once; their order is that of the keys, whatever answers first; it ends before the
    first that is missing, and what goes wrong behind that does not matter.
    """
    gate = threading.Barrier(3)

    class Together(MemoryObjectClient):
        def get(self, key: str, limit_bytes: int | None = None) -> tuple[bytes, str | None]:
            gate.wait(120)  # passes only if three are under way at once
            return super().get(key, limit_bytes)

    store = MemoryObjects(Plan([Fault("get", "*/5", 1, Fail(StorageError("odd")))]))
    storage = over(Together(store), concurrency=3)
    for name in ("0", "1", "2", "4"):
        store.put_behind(f"run/log/{name}", name.encode())
    assert storage.read_ahead([f"log/{n}" for n in range(6)]) == (b"0", b"1", b"2")
    gate.abort()
    assert storage.read_ahead([]) == ()
    storage.close()


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("error", [StorageError, CredentialsError, TransientError])
def test_a_file_of_a_row_that_cannot_be_read_is_not_absent(
    nth: int, error: type[StorageError]
) -> None:
    """Any other error than "not found" before the end of the row is raised, wherever it is; one that
    a retry cures is not seen.
    """
    store, storage = bucket([Fault("get", f"*/{nth}", None, Fail(error("odd")))], retry_s=1)
    for n in range(3):
        store.put_behind(f"run/log/{n}", b"x")
    with pytest.raises(error, match="odd"):
        storage.read_ahead([f"log/{n}" for n in range(4)])
    store.plan = Plan([Fault("get", f"*/{nth}", 1, Fail(busy()))])
    assert len(storage.read_ahead([f"log/{n}" for n in range(4)])) == 3
    storage.close()


def test_a_row_of_one_or_none() -> None:
    """One file needs no thread; nothing there is an empty answer, for one and for many."""
    store, storage = bucket()
    assert storage.read_ahead(["log/0"]) == storage.read_ahead(["log/0", "log/1"]) == ()
    store.put_behind("run/log/0", b"x")
    assert storage.read_ahead(["log/0"]) == (b"x",)
    storage.close()


def test_a_row_that_close_cuts_short_is_an_error() -> None:
    """Reads that waited for a thread when the storage was closed: StorageError, no hang, no gap."""
    hold = Hold()
    store, storage = bucket([Fault("get", "*/0", 1, hold)], concurrency=1)
    for n in range(3):
        store.put_behind(f"run/log/{n}", b"x")
    told: list[StorageError] = []

    def read() -> None:
        try:
            storage.read_ahead([f"log/{n}" for n in range(3)])
        except StorageError as error:
            told.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    assert hold.reached.wait(120)
    waiting = storage._pool()._waiting  # type: ignore[attr-defined]
    while len(waiting) < 2:
        pass
    storage.close()
    hold.release.set()
    reading.join(120)
    assert [type(error) for error in told] == [StorageError]
    assert "closed" in str(told[0])


def test_giving_up_names_the_endpoint() -> None:
    """A dead server: the last error, its endpoint and the number of tries."""
    _, storage = bucket([Fault("get", "*", None, Fail(busy()))])
    with pytest.raises(TransientError, match=r"SlowDown \(objects\+memory://server-\d+, \d+ tries"):
        storage.read("k")


def test_no_listing_leaves_the_run() -> None:
    """Prefixes end with a slash and begin with the run's; markers and names alike do not show."""
    store, storage = bucket()
    for key in ("run/", "run/a", "run/d/x", "run/d/", "run/da", "runs/b", "run"):
        store.put_behind(key, b"x")
    assert storage.list("") == [
        Entry("a", is_dir=False),
        Entry("d", is_dir=True),
        Entry("da", is_dir=False),
    ]
    assert storage.list("d") == [Entry("x", is_dir=False)]
    assert [o.key for o in store.requests("list_keys")] == ["run/", "run/d/"]


def test_a_run_may_be_a_whole_bucket() -> None:
    """A root without a prefix: keys begin at once."""
    store = MemoryObjects()
    storage = over(MemoryObjectClient(store), root="s3://bucket")
    storage.replace("d/f", b"x")
    assert set(store.objects) == {"d/f"}
    assert storage.list("") == [Entry("d", is_dir=True)]
    storage.remove_tree("d")
    assert not store.objects


def test_what_an_object_store_has_not() -> None:
    """Directories, syncs and touches cost no request; there is no rename, no space, no path."""
    store, storage = bucket()
    for call in (
        storage.make_dir,
        storage.sync,
        storage.refresh,
        storage.touch,
        storage.remove_dir,
    ):
        call("d")
    assert storage.space() is None
    assert storage.local_path("f") is None
    with pytest.raises(UnsupportedError):
        storage.rename("a", "b")
    assert store.counts() == {}


# -- processes -------------------------------------------------------------------------


def test_options_survive_pickling() -> None:
    """Client, options and retries are the same on the other side; threads and locks are its own."""
    storage = open_storage("objects+memory://pickles/run", {"concurrency": 3, "retry_s": 7})
    with storage.open_write("f") as writer:
        writer.write(b"x" * (33 << 20))  # parts, hence threads
    again = pickle.loads(pickle.dumps(storage))
    assert again.options == storage.options  # type: ignore[attr-defined]
    assert again.retrier == storage.retrier  # type: ignore[attr-defined]
    assert again.stat("f").size_bytes == 33 << 20
    STORES.drop("pickles")


def _in_child(storage: ObjectStorage) -> str:
    pool = storage._pool()
    return f"{pool.submit(os.getpid).result(120)} {os.getpid()} {len(storage._pools)}"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_threads_of_its_own() -> None:
    """The parent's pool has no threads in the child: work given to it would never be done."""
    _, storage = bucket()
    assert storage._pool().submit(os.getpid).result() == os.getpid()
    context = multiprocessing.get_context("fork")
    reads, writes = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writes.send(_in_child(storage)))
    child.start()
    assert reads.poll(30)
    worker, pid, pools = reads.recv().split()
    child.join(120)
    assert worker == pid != str(os.getpid())
    assert pools == "2"
    storage.close()


def test_closed_and_used_again() -> None:
    """Close is harmless twice; a storage that is used afterwards opens what it needs."""
    store, storage = bucket(part_size_bytes=64 << 10)
    for _ in range(2):
        with storage.open_write("f") as writer:
            writer.write(b"x" * (200 << 10))
        storage.close()
        storage.close()
    assert len(store.objects["run/f"].data) == 200 << 10


# -- under a save ----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The URI of a run in a bucket of its own."""
    STORES.put(tmp_path.name, MemoryObjects())
    return f"objects+memory://{tmp_path.name}/run"


def save(run: str, name: str) -> ckptfs.SaveResult:
    """Eight numbers, committed under a name."""
    import torch

    return ckptfs.save({"x": torch.arange(8)}, f"{run}/{name}")


def test_saves_on_a_store_that_ignores_conditions_are_advice(run: str, tmp_path: Path) -> None:
    """Also in a run that exists already, where nothing is created before the log is chosen: every
    save warns, both are there, and no entry is lost.
    """
    store = STORES.bucket(tmp_path.name)
    store.manners = Manners(IGNORES, IGNORES)
    for name in ("step_1", "step_2"):
        # As in a new process: nothing is known of this bucket yet.
        STORES.put(tmp_path.name, store)
        store.number += 1_000_000
        assert ADVICE in save(run, name).warnings
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2]
    log = [key for key in store.objects if "/log/" in key]
    assert all("." in key.rpartition("/")[2] for key in log)


def test_saves_on_one_that_honours_them_are_not(run: str, tmp_path: Path) -> None:
    """No warning, plain entries, and only one probe for all saves of this process."""
    store = STORES.bucket(tmp_path.name)
    for name in ("step_1", "step_2"):
        assert save(run, name).warnings == ()
    log = sorted(key for key in store.objects if "/log/" in key)
    assert [key.rpartition("/")[2] for key in log] == ["00000000", "00000001"]
    assert len({o.key for o in store.requests() if "probe" in o.key}) == 1


def test_a_replaced_step_is_projected_by_its_etag(run: str, tmp_path: Path) -> None:
    """On a server that knows etags without quotation marks only: its projection still works."""
    import torch

    store = STORES.bucket(tmp_path.name)
    store.manners = Manners(HONOURS, Manner.BARE_ONLY)
    save(run, "step_1")
    with ckptfs.prepare_run(run) as held:
        result = ckptfs.save({"x": torch.ones(3)}, f"{run}/step_1", if_exists="replace", run=held)
    assert result.warnings == ()
    state = {"x": torch.zeros(3)}
    ckptfs.load(state, f"{run}/step_1")
    assert state["x"].tolist() == [1, 1, 1]


def test_reading_needs_no_permission_to_write(run: str, tmp_path: Path) -> None:
    """List, latest and load ask for nothing that a read-only key may not do."""
    import torch

    store = STORES.bucket(tmp_path.name)
    save(run, "step_1")
    for op in ("put", "delete", "begin_upload", "put_part", "complete", "abort*", "list_uploads"):
        store.plan.add(Fault(op, "*", None, Fail(AccessError("read-only"))))
    assert ckptfs.latest(run) is not None
    state = {"x": torch.zeros(8, dtype=torch.int64)}
    ckptfs.load(state, f"{run}/step_1")
    assert state["x"].tolist() == list(range(8))


def test_unknown_names_are_found_absent() -> None:
    """read, stat and open_read of nothing; the bucket's errors come through as they are."""
    _, storage = bucket([Fault("get", "run/b", 1, Fail(StorageError("odd")))])
    for call in (storage.read, storage.stat, storage.open_read):
        with pytest.raises(NotFoundError):
            call("a")
    with pytest.raises(StorageError, match="odd"):
        storage.read("b")
    with pytest.raises(UriError):
        storage.create("../x", b"", staging="")


def test_all_storages_of_one_endpoint_warn_once_together() -> None:
    """A process has one for each run, copy and reader; a dead endpoint is one line a minute for all of them."""
    store = MemoryObjects()
    first, second = (
        ObjectStorage(Uri.parse("s3://b/run"), MemoryObjectClient(store)) for _ in "12"
    )
    assert first.retrier.warning_limit is second.retrier.warning_limit
    assert first.retrier.warning_limit is not Retrier(first.client.endpoint).warning_limit
