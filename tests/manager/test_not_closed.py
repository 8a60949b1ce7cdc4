"""An owner that was not closed: an object without a reference releases the run of its process."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import SoloControl
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

STATE = {"w": torch.arange(8.0)}
WITHIN_S = 30.0  # only a defect makes a test wait so long


def log_of(run: Path) -> LogState:
    """The fold of its log."""
    storage = open_storage(run, None)
    try:
        return drive(catch_up(), storage)
    finally:
        storage.close()


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def make_run(run: Path) -> Any:
    """prepare_run alone."""
    return ckptfs.prepare_run(run)


def make_manager(run: Path) -> Any:
    """A manager that saved."""
    manager = ckptfs.CheckpointManager(run, keep_latest=2)
    manager.save(1, STATE)
    return manager


def make_async_manager(run: Path) -> Any:
    """With a thread for saves, one for its schedule, and a timer of an hour for a delete."""
    manager = ckptfs.CheckpointManager(run, mode="async", every_s=3600, delete_grace_s=3600)
    for step in (1, 2, 2):
        manager.should_save(step)
        manager.save(step, STATE)
    manager.wait()
    return manager


def make_manager_with_copies(run: Path) -> Any:
    """With a thread that copies, and a second run."""
    manager = ckptfs.CheckpointManager(run, keep_latest=1, copies=[run.parent / "copy"])
    manager.save(1, STATE)
    manager.wait()
    manager.save(2, STATE)
    manager.wait()
    return manager


def make_manager_that_is_heard_by_its_owner(run: Path) -> Any:
    """The trainer refers to the manager, and the manager's listeners to the trainer."""

    class Trainer:
        def __init__(self) -> None:
            self.heard: list[str] = []
            self.manager = ckptfs.CheckpointManager(
                run, mode="async", on_commit=self.committed, preempt_signals=("SIGUSR2",)
            )

        def committed(self, uri: str) -> None:
            self.heard.append(uri)

    trainer = Trainer()
    trainer.manager.save(1, STATE)
    trainer.manager.wait()
    return trainer


def make_run_that_saved_aside(run: Path) -> Any:
    """With a thread of its own."""
    held = ckptfs.prepare_run(run)
    ckptfs.async_save(STATE, run / "step_1", run=held).result()
    return held


OWNERS = [
    make_run,
    make_manager,
    make_async_manager,
    make_manager_with_copies,
    make_manager_that_is_heard_by_its_owner,
    make_run_that_saved_aside,
]


@pytest.mark.parametrize("make", OWNERS)
def test_what_is_collected_releases_its_run(
    tmp_path: Path, make: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """After del and a garbage collection the run is released, in the log, without another call."""
    run = tmp_path / "run"
    owner = make(run)
    alive = weakref.ref(owner)
    assert not log_of(run).released
    del owner
    # Not at once: a thread of ours may be telling a listener, or have just handed its save over.
    until(lambda: gc.collect() >= 0 and alive() is None)
    until(lambda: log_of(run).released)
    assert "was never released" in caplog.text
    if (tmp_path / "copy").exists():
        until(lambda: log_of(tmp_path / "copy").released)


@pytest.mark.parametrize("make", OWNERS)
def test_a_dropped_owner_does_not_keep_its_process_from_the_run(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    """Without a garbage collection by anybody else: the next claim asks for it, and waits."""
    run = tmp_path / "run"
    gc.disable()
    try:
        owner = make(run)
        del owner
        with ckptfs.prepare_run(run, takeover="never"):
            pass
    finally:
        gc.enable()


def test_an_owner_that_a_thread_lets_go_of_late_is_collected(tmp_path: Path) -> None:
    """Where something still refers to it at the first collection, the claim looks again."""
    run = tmp_path / "run"
    holder = [make_manager(run)]

    def let_go(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            holder.clear()

    gc.disable()
    gc.callbacks.append(let_go)
    try:
        with ckptfs.prepare_run(run, takeover="never"):
            pass
    finally:
        gc.callbacks.remove(let_go)
        gc.enable()


def test_a_notebook_cell_runs_again(tmp_path: Path) -> None:
    """A cell that makes a manager and saves, run three times: each takes over from the one before."""
    run = tmp_path / "run"
    cell = "manager = ckptfs.CheckpointManager(run)\nmanager.save(step, state)\n"
    names: dict[str, Any] = {"ckptfs": ckptfs, "run": run, "state": STATE}
    for step in (1, 2, 3):
        names["step"] = step
        exec(compile(cell, "<cell>", "exec"), names)  # noqa: S102 - as a notebook does
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2, 3]
    assert log_of(run).generation.number == 3
    names["manager"].close()


def test_a_retry_loop_without_close(tmp_path: Path) -> None:
    """Training that fails and is tried again in its process continues where it was."""
    run = tmp_path / "run"

    def train(fails: bool) -> None:
        manager = ckptfs.CheckpointManager(run)
        done = manager.latest
        step = 1 if done is None or done.step is None else done.step + 1
        manager.save(step, STATE)
        if fails:
            raise RuntimeError("a node is lost")

    for left in (2, 1, 0):
        try:
            train(fails=left > 0)
        except RuntimeError:
            continue
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2, 3]


@pytest.mark.parametrize("takeover", ["auto", "never"])
def test_two_living_owners_of_one_process(tmp_path: Path, takeover: Any) -> None:
    """The second learns that this process holds the run, since when, and by which call."""
    run = tmp_path / "run"
    with ckptfs.CheckpointManager(run) as manager:
        manager.save(1, STATE)
        with pytest.raises(ckptfs.RunBusyError) as busy:
            ckptfs.prepare_run(run, takeover=takeover)
        text = str(busy.value)
        since = log_of(run).fence
        assert "held by this process" in text
        assert f"pid {since.pid}" in text
        assert "by CheckpointManager in test_not_closed.py, line " in text
        assert "since 20" in text
        assert "last commit step_1" in text
        manager.save(2, STATE)  # it continues


def test_a_living_owner_of_this_process_is_not_judged_by_its_lease(tmp_path: Path) -> None:
    """Its thread may not have come to write one for long: the process itself is there to tell that it lives."""
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")))

    def claimed(times: LeaseTimes) -> Run:
        return claim(start_session(SoloControl(), storage, Place(), write=True), times=times)

    with (
        claimed(LeaseTimes(rewrite_s=3600.0)),
        pytest.raises(ckptfs.RunBusyError, match="is held by this process"),
    ):
        claimed(LeaseTimes(still_s=0.0))


def test_a_released_run_is_not_released_again(tmp_path: Path) -> None:
    """A Run that was released and collected later leaves the next owner alone."""
    run = tmp_path / "run"
    first = ckptfs.prepare_run(run)
    first.release()
    with ckptfs.prepare_run(run) as second:
        entries = len(list((run / ".ckptfs/log").iterdir()))
        del first
        gc.collect()
        ckptfs.save(STATE, run / "step_1", run=second)
        assert len(list((run / ".ckptfs/log").iterdir())) == entries + 1
