"""The manager's asynchronous mode on one process: what waits, what is skipped, who hears of failures."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.session import Place
from ckptfs.control.control import Control, SoloControl
from ckptfs.events import Event, SaveCommitted, SaveFailed, SaveSkipped
from ckptfs.manager.manager import CheckpointManager
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Hold, Plan
from ckptfs.testing.world import simulate


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64,), float(value))}


def _manager(run: Path, plan: Plan, **options: Any) -> CheckpointManager:
    storage = FaultyStorage(open_storage(str(run)), plan)
    ground = RunHandle(Where(str(run), Place()), control=SoloControl(), storage=storage)
    return CheckpointManager(run, mode="async", ground=ground, **options)


def _value(run: Path, step: int) -> float:
    state = _state(-1.0)
    ckptfs.load(state, run / f"step_{step}")
    return float(state["weight"][0])


@pytest.fixture
def held() -> Iterator[Hold]:
    """A storage operation that waits; it is released at the end whatever happened."""
    hold = Hold()
    yield hold
    hold.release.set()


def _no_space(data_file: int) -> Fault:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return Fault("write", "*.distcp", data_file, Fail(full))


def test_tensors_may_change_when_save_returns(tmp_path: Path, held: Hold) -> None:
    """The checkpoint has what the tensors were at the call, though nothing is written yet."""
    with _manager(tmp_path, Plan([Fault("write", "*.distcp", 1, held)])) as manager:
        state = _state(1.0)
        pending = manager.save(1, state)
        assert held.reached.wait(120)
        state["weight"].fill_(9.0)
        assert manager.poll() == 1
        assert manager.latest is None
        held.release.set()
        manager.wait()
        assert isinstance(pending, ckptfs.PendingSave)
        assert pending.done()
    assert _value(tmp_path, 1) == 1.0


def test_a_save_is_skipped_while_the_one_before_is_on_its_way(tmp_path: Path, held: Hold) -> None:
    """if_slow="skip" saves nothing, says so, and saves again when there is room."""
    told: list[Event] = []
    plan = Plan([Fault("write", "*.distcp", 1, held)])
    with _manager(tmp_path, plan, if_slow="skip", listeners=[told.append]) as manager:
        manager.save(1, _state(1.0))
        assert held.reached.wait(120)
        skipped = manager.save(2, _state(2.0))
        assert skipped == SaveSkipped(f"file://{tmp_path}/step_2", 2, 1)
        held.release.set()
        manager.wait()
        assert isinstance(manager.save(3, _state(3.0)), ckptfs.PendingSave)
    assert CheckpointManager(tmp_path).steps == [1, 3]
    assert skipped in told


def test_with_room_for_two_the_third_waits_for_the_first(tmp_path: Path, held: Hold) -> None:
    """max_in_flight bounds what is on its way; the call that is one too many returns when one ended."""
    plan = Plan([Fault("write", "*.distcp", 1, held)])
    with _manager(tmp_path, plan, max_in_flight=2) as manager:
        manager.save(1, _state(1.0))
        manager.save(2, _state(2.0))
        assert held.reached.wait(120)
        assert manager.poll() == 2
        third = threading.Thread(target=manager.save, args=(3, _state(3.0)))
        third.start()
        assert CheckpointManager(tmp_path).steps == []
        held.release.set()
        third.join(120)
        assert not third.is_alive()
    assert CheckpointManager(tmp_path).steps == [1, 2, 3]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_failure_is_raised_at_the_next_call_and_once(tmp_path: Path, call: str) -> None:
    """No job trains for days on saves that fail: the next save, wait or close raises it."""
    told: list[Event] = []
    manager = _manager(tmp_path, Plan([_no_space(2)]), listeners=[told.append])
    manager.save(1, _state(1.0))
    manager.save(2, _state(2.0))
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: manager.save(3, _state(3.0)),
        "wait": manager.wait,
        "close": manager.close,
    }
    with pytest.raises(ckptfs.CollectiveError) as caught:
        calls[call]()
    assert caught.value.all_are(ckptfs.NoSpaceError)
    if call != "close":
        assert manager.latest is not None
        assert manager.latest.step == 1
        manager.save(4, _state(4.0))
        manager.close()
        assert CheckpointManager(tmp_path).steps == [1, 4]
    failures = [event for event in told if isinstance(event, SaveFailed)]
    assert [failure.step for failure in failures] == [2]


def test_a_poll_tells_too_and_leaves_it_for_the_next_call(tmp_path: Path) -> None:
    """Ranks poll at different moments: the call that all make raises it once more."""
    manager = _manager(tmp_path, Plan([_no_space(1)]))
    pending = manager.save(1, _state(1.0))
    assert isinstance(pending, ckptfs.PendingSave)
    assert pending.committed.exception(30) is not None
    with pytest.raises(ckptfs.CollectiveError):
        manager.poll()
    with pytest.raises(ckptfs.CollectiveError):
        manager.save(2, _state(2.0))
    manager.save(3, _state(3.0))
    manager.close()


def _fail_in_the_loop(manager: CheckpointManager) -> None:
    with manager:
        manager.save(1, _state(1.0))
        raise ZeroDivisionError


def test_an_exception_of_the_loop_is_not_hidden_and_the_save_is_finished(tmp_path: Path) -> None:
    """Leaving the block by an exception commits what was staged before it."""
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_loop(_manager(tmp_path, Plan([])))
    assert CheckpointManager(tmp_path).steps == [1]


def test_an_exception_of_the_loop_wins_over_one_of_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are reported: the loop's is raised, the save's is in the log."""
    with pytest.raises(ZeroDivisionError):
        _fail_in_the_loop(_manager(tmp_path, Plan([_no_space(1)])))
    assert "a save failed too" in caplog.text


def test_retention_has_had_its_turn_when_wait_returns(tmp_path: Path) -> None:
    """After wait the catalog is what the policy says, not what it will say."""
    with _manager(tmp_path, Plan([]), keep_latest=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
        manager.wait()
        assert manager.steps == [2, 3]


def test_nothing_is_deleted_for_a_save_that_failed(tmp_path: Path) -> None:
    """With keep_latest=1 the only good checkpoint outlives every failed successor."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    plan = Plan([Fault("write", "*.distcp", n, Fail(full)) for n in (2, 3)])
    with _manager(tmp_path, plan, keep_latest=1) as manager:
        manager.save(1, _state(1.0))
        for step in (2, 3):
            manager.save(step, _state(step))
            with pytest.raises(ckptfs.CollectiveError):
                manager.wait()
            assert manager.steps == [1]
            assert _value(tmp_path, 1) == 1.0
        manager.save(4, _state(4.0))
    assert CheckpointManager(tmp_path).steps == [4]


def test_commits_are_told_once_and_in_order(tmp_path: Path) -> None:
    """on_commit hears committed URIs only, each when it exists."""
    seen: list[str] = []
    told: list[Event] = []
    with _manager(
        tmp_path, Plan([_no_space(2)]), listeners=[told.append], on_commit=seen.append
    ) as manager:
        manager.save(1, _state(1.0))
        manager.save(2, _state(2.0))
        with pytest.raises(ckptfs.CollectiveError):
            manager.save(3, _state(3.0))
        manager.save(3, _state(3.0))
    assert seen == [f"file://{tmp_path}/step_{step}" for step in (1, 3)]
    commits = [event for event in told if isinstance(event, SaveCommitted)]
    assert [commit.result.step for commit in commits] == [1, 3]
    assert all(0 < commit.stall_s <= commit.result.wall_s for commit in commits)


def test_a_block_left_by_an_exception_is_not_kept_by_a_storage_that_hangs(
    tmp_path: Path, held: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save under way gets CKPTFS_EXIT_S seconds, once: then the exception reaches its reader."""
    monkeypatch.setenv("CKPTFS_EXIT_S", "0.1")

    def train() -> None:
        with _manager(tmp_path, Plan([Fault("write", "*.distcp", 1, held)])) as manager:
            manager.save(1, _state(1.0))
            assert held.reached.wait(120)
            raise ValueError("training failed")

    ends: list[str] = []

    def run() -> None:
        with pytest.raises(ValueError, match="training failed"):
            train()
        ends.append("left")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert ends == ["left"]


def test_ctrl_c_while_closing_does_not_begin_to_wait_again(
    tmp_path: Path, held: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who interrupts a close that waits for a storage that hangs gets out of it, at the first time."""
    monkeypatch.setenv("CKPTFS_EXIT_S", "0.1")
    manager = _manager(tmp_path, Plan([Fault("write", "*.distcp", 1, held)]))
    manager.save(1, _state(1.0))
    assert held.reached.wait(120)
    main = threading.main_thread().ident
    assert main is not None
    press = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    let_go = threading.Timer(20, held.release.set)  # with the claim broken this test ends, too
    let_go.start()
    press.start()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    let_go.cancel()
    assert not held.release.is_set()


def test_a_save_under_way_does_not_keep_the_callers_tensors(tmp_path: Path, held: Hold) -> None:
    """Memory is that of the copy alone: tensors that the caller replaced go when he lets them go."""
    with _manager(tmp_path, Plan([Fault("write", "*.distcp", 1, held)])) as manager:
        state = _state(1.0)
        tensor = weakref.ref(state["weight"])
        manager.save(1, state)
        assert held.reached.wait(120)
        del state
        gc.collect()
        is_kept = tensor() is not None
        held.release.set()
        assert not is_kept


class _Interrupted:
    def state_dict(self) -> dict[str, Any]:
        raise KeyboardInterrupt

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ctrl_c_on_one_rank_costs_one_save(tmp_path: Path, mode: Any) -> None:
    """It is raised where it happens, the save fails on the other rank, and both continue in step."""

    def train(control: Control) -> list[str]:
        ground = RunHandle(Where(str(tmp_path), Place()), control=control, storage=storage)
        ends = []
        with CheckpointManager(tmp_path, mode=mode, ground=ground) as manager:
            for step in range(1, 6):
                state: dict[str, Any] = dict(_state(step))
                if (control.rank, step) == (1, 2):
                    state["scheduler"] = _Interrupted()
                try:
                    manager.save(step, state)
                    ends.append("saved")
                except (KeyboardInterrupt, ckptfs.CkptfsError) as error:
                    ends.append(type(error).__name__)
        return ends

    storage = open_storage(str(tmp_path))
    first, second = (end.get() for end in simulate(2, train, timeout_s=120))
    if mode == "sync":
        assert first == ["saved", "CollectiveError", "saved", "saved", "saved"]
        assert second == ["saved", "KeyboardInterrupt", "saved", "saved", "saved"]
    else:  # what a save in the background failed of is raised at the next, which is not made
        assert first == ["saved", "saved", "CollectiveError", "saved", "saved"]
        assert second == ["saved", "KeyboardInterrupt", "CollectiveError", "saved", "saved"]
    made = [1, 3, 4, 5] if mode == "sync" else [1, 4, 5]
    assert CheckpointManager(tmp_path).steps == made


def test_ranks_that_wait_differently_long_stay_in_step(tmp_path: Path, held: Hold) -> None:
    """Where one has waited long enough all learn it: what is in flight stays the same on all."""
    plan = Plan([Fault("write", "*.distcp", 1, held)])

    def train(control: Control) -> list[str]:
        storage = FaultyStorage(open_storage(str(tmp_path)), plan)
        ground = RunHandle(Where(str(tmp_path), Place()), control=control, storage=storage)
        with CheckpointManager(tmp_path, mode="async", if_slow="skip", ground=ground) as manager:
            manager.save(1, _state(1.0))
            assert held.reached.wait(120)
            with pytest.raises(ckptfs.DeadlineError):
                manager.wait(0.0 if control.rank == 0 else 0.5)
            held.release.set()
            told = [type(manager.save(step, _state(step))).__name__ for step in (2, 3)]
            manager.wait()
        return told

    first, second = (end.get() for end in simulate(2, train, timeout_s=120))
    assert first == second


def test_a_manager_that_could_not_begin_may_try_again(tmp_path: Path) -> None:
    """What fails between the claim and the first save gives the run back: no one holds it then."""
    refused = Fail(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    for read in (7,):  # the first of the copies, when the run is claimed
        run = tmp_path / f"run_{read}"
        plan = Plan([Fault("read", "*", read, refused)])
        copies = [tmp_path / f"copy_{read}"]
        with _manager(run, plan, takeover="never", copies=copies) as manager:
            with contextlib.suppress(ckptfs.CollectiveError):
                manager.save(1, _state(1.0))
                manager.wait()
            manager.save(2, _state(2.0))
        latest = CheckpointManager(run).latest
        assert latest is not None
        assert latest.step == 2
