"""A save that torch gives up between begin and commit: what it claimed is released, and the retry waits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter

import ckptfs
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.operations import drive
from ckptfs.storage.registry import open_storage

OLD, NEW = {"w": torch.arange(8.0)}, {"w": torch.arange(8.0) + 1}


class _Failing(DefaultSavePlanner):
    """Fails between the writer's prepare_global_plan and its write_data: the writer gets no word."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise ValueError("the planner failed")


def writer_of(run: Path) -> ckptfs.StorageWriter:
    """A writer that replaces step_1."""
    return ckptfs.StorageWriter(run / "step_1", if_exists="replace", timeout_s=60)


def give_up(writer: ckptfs.StorageWriter) -> CheckpointException:
    """A save that torch gives up; the error keeps its frames, and with them the writer."""
    with pytest.raises(CheckpointException, match="the planner failed") as given_up:
        dcp.save(NEW, storage_writer=writer, planner=_Failing(), no_dist=True)
    return given_up.value


def loaded(run: Path) -> torch.Tensor:
    """What step_1 holds."""
    state = {"w": torch.zeros(8)}
    ckptfs.load(state, run / "step_1")
    return state["w"]


def by_same_writer(run: Path, writer: ckptfs.StorageWriter) -> None:
    """As a loop around dcp.save does."""
    dcp.save(NEW, storage_writer=writer, no_dist=True)


def by_another_writer(run: Path, writer: ckptfs.StorageWriter) -> None:
    """As a program that makes a writer for each save does."""
    dcp.save(NEW, storage_writer=writer_of(run), no_dist=True)


def by_save(run: Path, writer: ckptfs.StorageWriter) -> None:
    """Through another door."""
    ckptfs.save(NEW, run / "step_1", if_exists="replace")


def by_manager(run: Path, writer: ckptfs.StorageWriter) -> None:
    """Through a manager."""
    with ckptfs.CheckpointManager(run, takeover="never") as manager:
        assert manager.restore({"w": torch.zeros(8)}) is not None
        manager.save(1, NEW)


@pytest.mark.parametrize("retry", [by_same_writer, by_another_writer, by_save, by_manager])
def test_the_retry_of_a_replacing_save_that_torch_gave_up(
    tmp_path: Path, retry: Callable[[Path, ckptfs.StorageWriter], None]
) -> None:
    """It commits, whatever it goes by, while the first writer and its error are still there."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    writer = writer_of(run)
    error = give_up(writer)
    assert torch.equal(loaded(run), OLD["w"])
    retry(run, writer)
    assert torch.equal(loaded(run), NEW["w"])
    assert error.failures
    assert list((run / ".ckptfs/attempts").iterdir()) == []  # the first one's are gone too


def test_a_save_that_a_thread_gave_up_and_ended(tmp_path: Path) -> None:
    """A thread that has ended is between no two hooks: another thread's save continues at once."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    writer = writer_of(run)
    thread = threading.Thread(target=give_up, args=(writer,))
    thread.start()
    thread.join()
    by_another_writer(run, writer)
    assert torch.equal(loaded(run), NEW["w"])


def test_many_saves_that_replace_in_turn(tmp_path: Path) -> None:
    """Each begins when torch returns from the one before; its release is still on its way."""
    run = tmp_path / "run"
    for n in range(10):
        state = {"w": torch.arange(8.0) + n}
        dcp.save(state, storage_writer=writer_of(run), no_dist=True)
        assert torch.equal(loaded(run), state["w"])


def test_a_save_on_its_way_is_not_given_up_by_another_thread_s(tmp_path: Path) -> None:
    """Two threads save into one run at once, each under its name: both commit."""
    run = tmp_path / "run"
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            inside.set()
            assert go_on.wait(60)
            return super().finish_plan(new_plan)

    def first() -> None:
        writer = ckptfs.StorageWriter(run / "step_1")
        dcp.save(OLD, storage_writer=writer, planner=Waiting(), no_dist=True)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    dcp.save(NEW, storage_writer=ckptfs.StorageWriter(run / "step_2"), no_dist=True)
    go_on.set()
    thread.join()
    assert torch.equal(loaded(run), OLD["w"])
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [2, 1]


def test_a_replacing_save_on_its_way_holds_the_run(tmp_path: Path) -> None:
    """Two living owners of one process: the second replacing save learns who the first is."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            inside.set()
            assert go_on.wait(60)
            return super().finish_plan(new_plan)

    thread = threading.Thread(
        target=lambda: dcp.save(NEW, storage_writer=writer_of(run), planner=Waiting(), no_dist=True)
    )
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ckptfs.RunBusyError, match=r"held by this process .* by a StorageWriter"):
        ckptfs.save(OLD, run / "step_1", if_exists="replace", timeout_s=1)
    go_on.set()
    thread.join()
    assert torch.equal(loaded(run), NEW["w"])


def test_a_save_that_was_given_up_releases_the_run(tmp_path: Path) -> None:
    """As soon as its writer is used again, in the log: another process need not wait for a lease."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    writer = writer_of(run)
    error = give_up(writer)
    writer.reset()
    storage: Any = open_storage(run, None)
    waiting = threading.Event()
    for _ in range(600):
        if drive(catch_up(), storage).released:
            break
        waiting.wait(0.05)
    assert drive(catch_up(), storage).released
    storage.close()
    assert error.failures


class _Mirroring(TorchStorageWriter):
    """Saves twice, each hook of one writer after the other's, as one that mirrors does."""

    def __init__(self, *writers: ckptfs.StorageWriter) -> None:
        self.writers = writers
        self.results: list[Any] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        for writer in self.writers:
            writer.reset(None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        for writer in self.writers:
            writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return [writer.prepare_local_plan(plan) for writer in self.writers][-1]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [writer.prepare_global_plan(plans) for writer in self.writers][-1]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        written = [writer.write_data(plan, planner) for writer in self.writers]
        self.results = [one.wait() for one in written]
        return written[-1]

    def finish(self, metadata: Any, results: Any) -> None:
        for writer, mine in zip(self.writers, self.results, strict=True):
            writer.finish(copy.deepcopy(metadata), [mine])

    def storage_meta(self) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - torch's
        return True


def test_a_thread_that_saves_into_two_runs_at_once(tmp_path: Path) -> None:
    """The second writer's save begins between two hooks of the first one's, which is not given up for that."""
    writers = [ckptfs.StorageWriter(tmp_path / name / "step_1") for name in ("a", "b")]
    dcp.save(NEW, storage_writer=_Mirroring(*writers), no_dist=True)
    for name in ("a", "b"):
        assert torch.equal(loaded(tmp_path / name), NEW["w"])
