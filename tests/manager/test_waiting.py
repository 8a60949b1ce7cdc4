"""Waiting for checkpoints of others: what is announced, what it costs, and how it ends."""

from __future__ import annotations

import itertools
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.commit.catalog.catalog import Checkpoint
from ckptfs.commit.log.append import READ_AHEAD
from ckptfs.commit.log.entries import Delete, Fence, Generation, Kind, Seal
from ckptfs.commit.log.fold import LogState, fold_entry
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, open_session
from ckptfs.control.control import SoloControl
from ckptfs.dcp.saving import save_at
from ckptfs.errors import (
    AccessError,
    DeadlineError,
    IncompleteCheckpointError,
    TransientError,
)
from ckptfs.manager import waiting
from ckptfs.manager.waiting import Pace, Watcher, newer_than, wait_for_new
from ckptfs.storage.base import Stat
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.memory_object_store import STORES, MemoryObjects
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.uri import Uri
from tests.measures import warned

STATE = {"w": torch.ones(4)}


def commit(
    run: Path | Uri,
    step: int,
    kind: Kind = Kind.CHECKPOINT,
    *,
    failure: bool = False,
    name: str = "",
) -> None:
    """One more commit of the run."""
    uri = Uri.parse(run)
    with open_session(uri, SoloControl(), Place(), write=True) as session, claim(session) as held:
        name = name or f"{kind.value}_{step}"
        spec = SaveSpec(name, step, run=held.generation, artifact=kind, failure=failure)
        save_at(STATE, held.session, uri / name, spec)


def meanwhile(*happenings: Callable[[], object]) -> Callable[[float], bool]:
    """A rest during which the next of these happens; after the last the watcher is stopped."""
    left = iter(happenings)

    def rest(seconds: float) -> bool:
        assert 0 < seconds <= 10
        happening = next(left, None)
        if happening is not None:
            happening()
        return happening is None

    return rest


def test_what_is_there_is_returned_at_once_and_the_next_is_waited_for(tmp_path: Path) -> None:
    """Nothing seen: the newest there is. Seen: the next commit, by a Checkpoint or by its step."""
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    first = wait_for_new(tmp_path, timeout_s=0)
    assert (first.step, first.uri, first.kind) == (
        2,
        Uri.parse(tmp_path) / "checkpoint_2",
        "checkpoint",
    )
    for after in (first, 2):
        with pytest.raises(DeadlineError, match="no new checkpoint within 0 s"):
            wait_for_new(tmp_path, after, timeout_s=0)
    step = itertools.count(3)
    for after in (first, 2):
        with Watcher(tmp_path, rest=meanwhile(lambda: commit(tmp_path, next(step)))) as watcher:
            found = watcher.wait(after)
        assert found is not None
        assert found.step in (3, 4)
        state = {"w": torch.zeros(4)}
        ckptfs.load(state, found.uri)
        assert torch.equal(state["w"], STATE["w"])


def test_a_run_retrained_from_an_older_step_is_announced(tmp_path: Path) -> None:
    """Newer is by commit order: 70 after 100; the same step trained again; a deleted one seen."""
    for step in (50, 100):
        commit(tmp_path, step)
    seen = wait_for_new(tmp_path, 50, timeout_s=0)
    assert seen.step == 100
    commit(tmp_path, 70)
    assert wait_for_new(tmp_path, 100, timeout_s=0).step == 70
    assert wait_for_new(tmp_path, seen, timeout_s=0).step == 70
    with pytest.raises(DeadlineError):
        wait_for_new(tmp_path, 70, timeout_s=0)
    again = wait_for_new(tmp_path, timeout_s=0)
    commit(tmp_path, 70, name="another_70")
    assert wait_for_new(tmp_path, again, timeout_s=0).uri.name == "another_70"
    # Overwritten: all that was seen is gone from the catalog, and its place in the order is not.
    with ckptfs.prepare_run(tmp_path, mode="overwrite"), pytest.raises(DeadlineError):
        wait_for_new(tmp_path, 70, timeout_s=0)
    commit(tmp_path, 5)
    assert wait_for_new(tmp_path, 70, timeout_s=0).step == 5


def test_a_step_that_the_run_never_committed_stands_for_nothing(tmp_path: Path) -> None:
    """A caller that comes from another run gets the newest."""
    commit(tmp_path, 10)
    assert wait_for_new(tmp_path, 4000, timeout_s=0).step == 10


def test_kinds_are_apart_and_failures_are_not_announced(tmp_path: Path) -> None:
    """Weights do not wake who waits for checkpoints, nor does what a failing run left."""
    commit(tmp_path, 1)
    commit(tmp_path, 2, Kind.WEIGHTS)
    commit(tmp_path, 3, failure=True)
    assert wait_for_new(tmp_path, timeout_s=0).step == 1
    assert wait_for_new(tmp_path, kind="weights", timeout_s=0).step == 2
    with pytest.raises(DeadlineError, match="no new weights"):
        wait_for_new(tmp_path, 2, "weights", timeout_s=0)
    with pytest.raises(ckptfs.StateError):
        Watcher(tmp_path, "directory")  # type: ignore[arg-type]


def test_a_watcher_yields_the_newest_each_time_until_it_is_stopped(tmp_path: Path) -> None:
    """Two commits between two looks are one announcement; the run need not exist at first."""

    def two() -> None:
        commit(tmp_path / "run", 2)
        commit(tmp_path / "run", 3)

    rest = meanwhile(lambda: None, lambda: commit(tmp_path / "run", 1), two)
    with Watcher(tmp_path / "run", rest=rest) as watcher:
        steps = []
        for found in watcher:
            steps.append(found.step)
            if len(steps) == 2:
                watcher.stop()
        assert steps == [1, 3]
        assert watcher.wait() is None


def test_stop_from_another_thread_and_a_signal_end_a_wait(tmp_path: Path) -> None:
    """stop() wakes a real rest at once, and Ctrl-C interrupts it; no poll is waited for."""
    pace = Pace(first_s=3600, longest_s=3600)
    with Watcher(tmp_path, pace=pace) as watcher:
        ends: list[Checkpoint | None] = []
        thread = threading.Thread(target=lambda: ends.append(watcher.wait()), daemon=True)
        thread.start()
        watcher.stop()
        thread.join(120)
    assert ends == [None]
    with Watcher(tmp_path, pace=pace) as watcher:
        real = watcher._rest

        def interrupted(seconds: float) -> bool:
            # To the thread that Python's handlers run in, as a terminal's Ctrl-C is.
            kill = [threading.get_ident(), signal.SIGINT]
            threading.Timer(0.05, signal.pthread_kill, kill).start()
            return real(seconds)

        watcher._rest = interrupted
        # A job that was started in the background inherits that SIGINT is ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                watcher.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def test_a_deleted_checkpoint_that_was_seen_keeps_its_place_in_the_order() -> None:
    """What is older than it is not announced, though it is the newest that is left."""
    holder = Generation(1, "x")
    log = fold_entry(LogState(), Fence(holder))
    for seq in (1, 2):
        seal = Seal(
            save_id=f"id{seq}",
            base=holder,
            seq=seq,
            fenced=True,
            name=f"step_{seq}",
            step=seq,
            artifact=Kind.CHECKPOINT,
            domains=("d",),
            digest="",
        )
        log = fold_entry(log, seal)
    gone = {"d": fold_entry(log, Delete("id2", holder))}
    assert newer_than(2, Kind.CHECKPOINT, gone) is None
    assert (found := newer_than(None, Kind.CHECKPOINT, gone)) is not None
    assert found.seal.save_id == "id1"


def test_a_waiter_reads_and_does_nothing_else(tmp_path: Path) -> None:
    """Read permission is enough; where no directory may be listed nothing is."""
    commit(tmp_path, 1)
    plan = Plan([Fault("list", "*", None, Fail(AccessError("no listing")))])
    storage = ReadOnlyStorage(FaultyStorage(open_storage(tmp_path), plan))
    with Watcher(tmp_path, storage=storage, rest=meanwhile(lambda: commit(tmp_path, 2))) as watcher:
        assert (one := watcher.wait()) is not None
        assert (two := watcher.wait(one)) is not None
    assert (one.step, two.step) == (1, 2)
    assert storage.refused == 0


@pytest.fixture
def bucket() -> Iterator[MemoryObjects]:
    """An object store that counts its requests."""
    yield STORES.bucket("waiting")
    STORES.drop("waiting")


def test_a_poll_of_an_object_store_is_one_request(bucket: MemoryObjects) -> None:
    """Idle polls are one GET each, and four requests more each eighth, whatever is there."""
    uri = Uri.parse("objects+memory://waiting/run")
    asked: list[int] = []

    def rest(_: float) -> bool:
        asked.append(len(bucket.requests()))
        return len(asked) > 24

    with Watcher(uri, rest=rest) as watcher:
        assert watcher.wait() is None
    assert asked[-1] == len(asked)  # a run that is not there yet
    for step in range(5):
        commit(uri, step)
    before = len(bucket.requests())
    asked.clear()
    with Watcher(uri, rest=rest) as watcher:
        assert (seen := watcher.wait()) is not None
        cold = len(bucket.requests()) - before
        assert watcher.wait(seen) is None
    mine = bucket.requests()[before:]
    assert {o.op for o in mine} <= {"get", "head", "list_keys"}
    assert cold <= 3 * 5 + READ_AHEAD + 8  # fence, seal and release of each; domain, hint, kind
    # At each eighth: the domain, a list, and both names of the newest commit's metadata, all at once.
    assert asked[-1] - asked[0] == 24 + 24 // 8 * 4
    assert asked[0] - before - cold == 1


def test_a_run_that_was_removed_and_begun_anew_is_watched_anew(tmp_path: Path) -> None:
    """A caller that remembers a place in a log that is gone would hang."""
    run = tmp_path / "run"
    for step in range(4):
        commit(run, step)

    def anew() -> None:
        shutil.rmtree(run)
        commit(run, 0)

    idle = [lambda: None] * 8
    with Watcher(run, rest=meanwhile(anew, *idle)) as watcher:
        seen = watcher.wait()
        found = watcher.wait(seen)
    assert found is not None
    assert (found.step, found.save_id == seen.save_id) == (0, False)  # type: ignore[union-attr]


def test_failures_of_the_storage_are_waited_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll that fails is followed by another; the deadline names what failed; a refusal is raised."""
    monkeypatch.setattr(waiting, "_READ_S", 0.0)
    commit(tmp_path, 1)

    def failing(error: Exception, count: int | None) -> FaultyStorage:
        faults = [Fault("read", "*/log/*", n, Fail(error)) for n in range(1, count or 2)]
        every = [] if count else [Fault("read", "*/log/*", None, Fail(error))]
        return FaultyStorage(open_storage(tmp_path), Plan([*faults, *every]))

    flaky = failing(TransientError("not now"), 4)
    with Watcher(tmp_path, storage=flaky, rest=lambda _: False) as watcher:
        found = watcher.wait()
    assert found is not None
    assert found.step == 1
    assert "not now" in caplog.text
    never = failing(TransientError("not now"), None)
    told = pytest.raises(DeadlineError, match="the storage failed last: ")
    with Watcher(tmp_path, storage=never) as watcher, told:
        watcher.wait(timeout_s=0)
    refusing = failing(AccessError("no"), None)
    with Watcher(tmp_path, storage=refusing) as watcher, pytest.raises(AccessError):
        watcher.wait(timeout_s=0)


def test_rests_grow_from_half_a_second_to_ten_and_never_leave_that_range() -> None:
    """Backoff with jitter: bounded below and above, different each time, long after a week too."""
    pace = Pace()
    rests = [[pace.pause_s(idle) for _ in range(50)] for idle in (0, 3, 20, 10**6)]
    assert all(0.5 <= rest <= 10 for row in rests for rest in row)
    assert len(set(rests[1])) > 1
    assert max(rests[0]) < min(rests[1]) < max(rests[1]) < min(rests[2])


def test_a_checkpoint_that_was_removed_by_hand_is_not_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names ``ckptfs rm``; once the log says so, the one before is the newest."""
    run = tmp_path / "run"
    commit(run, 1)
    first = wait_for_new(run, timeout_s=0)
    commit(run, 2)
    shutil.rmtree(run / "checkpoint_2")
    for after in (None, first, 1):
        with pytest.raises(IncompleteCheckpointError, match="removed by hand") as caught:
            wait_for_new(run, after, timeout_s=0)
        assert "ckptfs rm" in str(caught.value.hint)
    with Watcher(run) as watcher, pytest.raises(IncompleteCheckpointError, match="checkpoint_2"):
        next(iter(watcher))
    assert not warned(caplog)
    # Who has seen it waits for the next one.
    with pytest.raises(DeadlineError):
        wait_for_new(run, 2, timeout_s=0)
    commit(run, 2)
    assert wait_for_new(run, first, timeout_s=0).step == 2


def test_a_checkpoint_that_is_deleted_while_it_is_announced_is_passed_over(tmp_path: Path) -> None:
    """Its bytes go between the look at the log and the look at the files: no error, the next one."""
    run = tmp_path / "run"
    commit(run, 1)
    seen = wait_for_new(run, timeout_s=0)
    plain = open_storage(run)

    class Deleting(FaultyStorage):
        """Deletes the checkpoint at the first look for its manifest."""

        def stat(self, key: str) -> Stat:
            if key.startswith("checkpoint_2/") and (run / "checkpoint_2").exists():
                with ckptfs.CheckpointManager(run, name="checkpoint_{N}") as manager:
                    manager.delete(2)
            return super().stat(key)

    commit(run, 2)
    storage = Deleting(plain, Plan([]))
    with Watcher(run, storage=storage, rest=meanwhile(lambda: commit(run, 3))) as watcher:
        found = watcher.wait(seen)
    assert found is not None
    assert found.step == 3
    assert not (run / "checkpoint_2").exists()
