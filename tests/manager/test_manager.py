"""CheckpointManager itself: when it claims, what it calls things, what it answers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

import ckptfs
from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.session import Place
from ckptfs.commit.state import catalog
from ckptfs.control.control import Control
from ckptfs.events import Counters
from ckptfs.manager.manager import CheckpointManager
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.manager.run_workers import Saver
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.world import SimulatedDeath, simulate
from ckptfs.tools.changing import remove


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((8,), float(value))}


def _tree(run: Path) -> Mapping[str, int]:
    """All names and their times; of a log only its entries: the appender touches it a little later."""
    names = {str(p.relative_to(run)): p.stat().st_mtime_ns for p in run.rglob("*")}
    return names | {name: 0 for name in names if name.endswith(".ckptfs/log")}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("engine", ["direct", "buffered"])
def test_the_engine_that_was_asked_for_writes_the_files(
    tmp_path: Path, mode: Literal["sync", "async"], engine: Literal["direct", "buffered"]
) -> None:
    """As many bytes go past the page cache as in ``ckptfs.save`` with that engine; none with "buffered"."""
    state = {"weight": torch.arange(4 << 20, dtype=torch.float32)}
    alone = ckptfs.save(state, tmp_path / "alone" / "step_1", engine=engine)
    with CheckpointManager(tmp_path / "run", mode=mode, engine=engine) as manager:
        saved = cast("Any", manager.save(1, state))
        result = saved.result(60) if mode == "async" else saved
    assert result.total.direct_bytes == alone.total.direct_bytes
    assert engine == "direct" or result.total.direct_bytes == 0


def test_a_save_is_committed_under_its_step(tmp_path: Path) -> None:
    """What save returns exists, is called by the template, and is what stock torch reads."""
    import torch.distributed.checkpoint as dcp

    with CheckpointManager(tmp_path, name="global_step_{N}") as manager:
        result = manager.save(7, _state(7.0))
        assert isinstance(result, ckptfs.SaveResult)
        assert result.step == 7
        assert manager.latest is not None
        assert manager.latest.uri.name == "global_step_7"
        assert manager.steps == [7]
    loaded = _state(0.0)
    dcp.load(loaded, checkpoint_id=tmp_path / "global_step_7", no_dist=True)
    assert torch.equal(loaded["weight"], torch.full((8,), 7.0))


def test_making_one_and_looking_touch_nothing(tmp_path: Path) -> None:
    """An evaluation job that makes a manager next to a training job disturbs no one."""
    with CheckpointManager(tmp_path) as training:
        training.save(1, _state(1.0))
        before = _tree(tmp_path)
        with CheckpointManager(tmp_path) as evaluation:
            assert evaluation.steps == [1]
            assert evaluation.latest is not None
        assert _tree(tmp_path) == before
        training.save(2, _state(2.0))


def test_a_missing_run_has_nothing_and_gets_nothing(tmp_path: Path) -> None:
    """Looking at a run that was not written makes no directory."""
    manager = CheckpointManager(tmp_path / "run")
    assert manager.latest is None
    assert manager.steps == []
    manager.close()
    assert not (tmp_path / "run").exists()


def test_a_failing_run_does_not_replace_a_healthy_step(tmp_path: Path) -> None:
    """What failed right after a save, at the same step, leaves the step and the latest as they are."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, _state(1.0))
        manager.save(2, _state(2.0))
        with pytest.raises(ckptfs.CommitConflictError, match="step_2 is a healthy checkpoint"):
            manager.save(2, _state(float("nan")), failure=True)
        manager.save(3, _state(3.0), failure=True)
        manager.save(3, _state(4.0), failure=True)
        state = _state(0.0)
        restored = manager.restore(state)
        assert restored is not None
        assert restored.step == 2
        assert torch.equal(state["weight"], torch.full((8,), 2.0))


def test_a_second_owner_is_told_who_holds_the_run(tmp_path: Path) -> None:
    """RunBusyError names the process and the last commit of the manager that saves there."""
    with CheckpointManager(tmp_path) as first:
        first.save(1, _state(1.0))
        second = CheckpointManager(tmp_path, takeover="never")
        with pytest.raises(ckptfs.RunBusyError, match=rf"pid {os.getpid()}.*last commit step_1"):
            second.save(2, _state(2.0))
        second.close()
        first.save(2, _state(2.0))
    assert CheckpointManager(tmp_path).steps == [1, 2]


def test_a_closed_manager_leaves_the_run_free(tmp_path: Path) -> None:
    """The next job need not wait for a lease to stand still."""
    with CheckpointManager(tmp_path) as first:
        first.save(1, _state(1.0))
    with CheckpointManager(tmp_path, takeover="never") as second:
        second.save(2, _state(2.0))
        with pytest.raises(ckptfs.StateError, match="closed"):
            first.save(3, _state(3.0))
        assert second.steps == [1, 2]


def test_latest_is_the_last_commit_and_not_the_largest_step(tmp_path: Path) -> None:
    """A run that went back and was trained again continues where it was left."""
    with CheckpointManager(tmp_path) as manager:
        for step in (50, 100, 70):
            manager.save(step, _state(step))
        assert manager.latest is not None
        assert manager.latest.step == 70
        assert manager.steps == [50, 100, 70]


def test_a_latest_that_was_removed_by_hand_is_an_error_that_names_the_way_out(
    tmp_path: Path,
) -> None:
    """To name the one before would pass over it without a word; ``ckptfs rm`` records that it is gone."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
        manager.save(3, _state(3.0), kind="weights")
        shutil.rmtree(tmp_path / "step_2")
        with pytest.raises(ckptfs.IncompleteCheckpointError, match="step_2 was removed") as caught:
            _ = manager.latest
        assert f"ckptfs rm file://{tmp_path}/step_2" in str(caught.value.hint)
        weights = manager.latest_of("weights")
        assert weights is not None
        assert weights.step == 3
    remove(tmp_path / "step_2")
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest is not None
        assert manager.latest.step == 1


def test_a_step_that_is_saved_again_is_the_new_one(tmp_path: Path) -> None:
    """Retraining to a step that was saved before the restart replaces it, whole."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, _state(1.0))
        manager.save(5, _state(2.0))
        assert manager.steps == [5]
    state = _state(0.0)
    ckptfs.load(state, tmp_path / "step_5")
    assert state["weight"][0] == 2.0


def test_each_kind_has_a_latest_of_its_own(tmp_path: Path) -> None:
    """Weights for samplers never become what training resumes from."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, _state(1.0))
        manager.save(2, _state(2.0), kind="weights")
        weights = manager.latest_of("weights")
        assert manager.latest is not None
        assert (manager.latest.uri.name, weights and weights.uri.name) == ("step_1", "weights_2")
        assert manager.steps == [1]


def test_a_save_of_a_failing_run_is_no_latest(tmp_path: Path) -> None:
    """It is there for people; nothing resumes from it by default."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, _state(1.0))
        manager.save(2, _state(2.0), failure=True)
        assert manager.latest is not None
        assert manager.latest.step == 1
        assert manager.steps == [1, 2]
    assert ckptfs.latest(tmp_path).step == 1  # type: ignore[union-attr]


def test_metrics_lie_in_the_log(tmp_path: Path) -> None:
    """They survive the process: retention of the next one still knows the best step."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, _state(1.0), {"loss": 0.5, "odd": float("nan")})
    with looking_at(tmp_path, None) as look:
        (live,) = catalog(look.views)
    assert live.seal.metrics == (("loss", 0.5),)


@pytest.mark.parametrize("metrics", [{"loss": "low"}, {"loss": None}])
def test_a_metric_that_is_no_number_is_refused_before_anything(
    tmp_path: Path, metrics: Mapping[str, float]
) -> None:
    """The call is wrong, so nothing is written."""
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ckptfs.StateError, match="loss"):
            manager.save(1, _state(1.0), metrics)
        assert manager.steps == []


def test_a_new_owner_lets_go_before_its_first_save(tmp_path: Path) -> None:
    """What a killed job did not come to delete makes room first."""
    with CheckpointManager(tmp_path) as first:
        for step in (1, 2, 3, 4):
            first.save(step, _state(step))
    with CheckpointManager(tmp_path, keep_latest=2) as second:
        assert second.restore(_state(0.0)) is not None
        second.pin(4)  # claims the run, and saves nothing
        assert second.steps == [3, 4]
        second.unpin(4)
        second.save(5, _state(5.0))
        assert second.steps == [4, 5]


def test_what_was_restored_stays_until_it_has_a_successor(tmp_path: Path) -> None:
    """A job that went back keeps that step and what is further; its next save removes what is behind it."""
    with CheckpointManager(tmp_path) as first:
        for step in (1, 2, 3, 4):
            first.save(step, _state(step))
    with CheckpointManager(tmp_path, keep_latest=1) as second:
        assert second.restore(_state(0.0), step=2) is not None
        second.pin(4)
        assert second.steps == [2, 3, 4]
        second.save(3, _state(3.5))
        assert second.steps == [4, 3]


def test_a_pin_comes_before_retention(tmp_path: Path) -> None:
    """A first call that pins an old step saves it from the retention that comes with the claim."""
    with CheckpointManager(tmp_path) as first:
        for step in (1, 2, 3):
            first.save(step, _state(step))
    with CheckpointManager(tmp_path, keep_latest=1) as second:
        second.restore(_state(0.0))
        second.pin(1)
        assert second.steps == [1, 3]
        second.save(4, _state(4.0))
        assert second.steps == [1, 4]


def test_a_step_is_pinned_that_one_log_alone_is_in_doubt_of(tmp_path: Path) -> None:
    """A job died between its seals and the record of what they came to: both logs together tell."""
    disks = [tmp_path / "disk0", tmp_path / "disk1"]

    def save(control: Control) -> None:
        # A fence, a seal, and then the record that both disks have it.
        death = Fault("create", ".ckptfs/log/*", 3, Fail(SimulatedDeath()))
        storage = FaultyStorage(open_storage(str(disks[control.rank])), Plan([death]))
        where = Where(str(tmp_path), Place(scope="node"))
        ground = RunHandle(where, control=control, storage=storage)
        CheckpointManager(tmp_path, ground=ground).save(1, _state(1.0))

    for end in simulate(2, save, nodes=["a", "b"]):
        assert end.died

    def pin(control: Control) -> list[int]:
        disk = disks[control.rank]
        with _on(tmp_path, control, disk=disk, scope="node", takeover=Takeover.FORCE) as manager:
            manager.pin(1)
        return [c.step or 0 for c in ckptfs.list_checkpoints(disk) if c.pinned]

    assert [end.get() for end in simulate(2, pin, nodes=["a", "b"])] == [[1], [1]]


@pytest.mark.parametrize("error", [ckptfs.NoSpaceError("full"), ZeroDivisionError("a bug")])
def test_a_committed_save_does_not_fail_of_what_follows(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever retention or a copy raises is in the log; the checkpoint is there, and the next follows."""
    called: list[str] = []

    def bad(session: object, result: object) -> None:
        raise error

    saver = Saver(lambda _: None, lambda: None, (bad, lambda *_: called.append("second")))
    done = ckptfs.SaveResult("run/step_1", 1, "id", Counters(), Counters(), (), 0.0)
    saver.follow(Kind.CHECKPOINT, cast("Any", None), done, 0.0)
    assert called == ["second"]
    assert "after the commit of run/step_1" in caplog.text


class _Broken:
    def state_dict(self) -> dict[str, object]:
        raise ZeroDivisionError("no state today")

    def load_state_dict(self, state: object) -> None: ...


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    """Half of step 1 and half of step 2 are neither; every rank hears which rank meant what."""

    def save(control: Control) -> None:
        manager = _on(tmp_path, control)
        manager.save(1 + control.rank, _state(1.0))

    for end in simulate(2, save):
        with pytest.raises(ckptfs.StateError, match=r"step_1 .* on rank 0, step_2 .* on rank 1"):
            end.get()
    assert CheckpointManager(tmp_path).steps == []


def test_a_state_that_one_rank_cannot_tell_fails_the_save_on_all(tmp_path: Path) -> None:
    """A state_dict() that raises on one rank leaves no other rank waiting, and the next save works."""

    def save(control: Control) -> object:
        with _on(tmp_path, control) as manager:
            mine = {"odd": _Broken()} if control.rank == 1 else {}
            with pytest.raises(ckptfs.CollectiveError) as caught:
                manager.save(1, {**_state(1.0), **mine})
            manager.save(2, _state(2.0))
            return {rank: failure.message for rank, failure in caught.value.failures.items()}

    for end in simulate(2, save):
        assert end.get() == {1: "no state today"}
    assert CheckpointManager(tmp_path).steps == [2]


def test_a_metric_that_differs_between_ranks_is_the_coordinators(tmp_path: Path) -> None:
    """Each rank has a loss of its own; on two disks there is one seal all the same."""

    def save(control: Control) -> None:
        disk = tmp_path / f"disk{control.rank}"
        with _on(tmp_path, control, disk=disk, scope="node") as manager:
            manager.save(1, _state(1.0), {"loss": float(control.rank)})

    for end in simulate(2, save, nodes=["a", "b"]):
        end.get()
    for rank in range(2):
        with looking_at(tmp_path / f"disk{rank}", None) as look:
            (live,) = catalog(look.views)
        assert live.seal.metrics == (("loss", 0.0),)


def _on(
    run: Path,
    control: Control,
    *,
    disk: Path | None = None,
    scope: Literal["auto", "node"] = "auto",
    takeover: Takeover = Takeover.AUTO,
) -> CheckpointManager:
    where = Where(str(run), Place(scope=scope), takeover=takeover)
    storage = open_storage(str(disk or run))
    return CheckpointManager(run, ground=RunHandle(where, control=control, storage=storage))


def test_a_child_of_a_fork_does_not_release_its_parents_run(tmp_path: Path) -> None:
    """A worker that runs its parent's finally blocks changes nothing: the parent continues to save."""
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, _state(1.0))
        with ckptfs.prepare_run(tmp_path / "other") as run:
            before = _tree(tmp_path / "other")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    run.release()
                    manager.close()
                    manager.__exit__(ValueError, ValueError(), None)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            log = {k: v for k, v in _tree(tmp_path / "other").items() if "/log/" in k}
            assert log == {k: v for k, v in before.items() if "/log/" in k}
        second = CheckpointManager(tmp_path / "run", takeover="never")
        with pytest.raises(ckptfs.RunBusyError):
            second.save(2, _state(2.0))
        second.close()
        manager.save(2, _state(2.0))
