"""``if_exists="replace"`` claims the run where something has the name, and only there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import ckptfs
from ckptfs.commit.log.entries import Fence, decode_entry
from ckptfs.commit.ownership.lease import LeaseWatch
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.storage.registry import open_storage
from ckptfs.tools.changing import set_pin
from ckptfs.tools.verifying import verify
from tests.multiprocess.harness import Rank, launch

OLD, NEW = {"w": torch.arange(8.0)}, {"w": torch.arange(8.0) + 1}


def fences(run: Path) -> int:
    """How often the run was claimed."""
    entries = (path.read_bytes() for path in (run / ".ckptfs" / "log").iterdir())
    return sum(isinstance(decode_entry(data, "").body, Fence) for data in entries)


def loaded(uri: Any) -> torch.Tensor:
    """What a checkpoint holds."""
    state = {"w": torch.zeros(8)}
    ckptfs.load(state, uri)
    return state["w"]


def by_save(uri: Path) -> None:
    """The plain call."""
    ckptfs.save(NEW, uri, if_exists="replace")


def by_async_save(uri: Path) -> None:
    """On a thread."""
    ckptfs.async_save(NEW, uri, if_exists="replace").result()


def by_writer(uri: Path) -> None:
    """torch's own save."""
    writer = ckptfs.StorageWriter(uri, if_exists="replace")
    dcp.save(NEW, storage_writer=writer, no_dist=True)


WAYS = pytest.mark.parametrize(
    "save", [by_save, by_async_save, by_writer], ids=["save", "async_save", "writer"]
)


@WAYS
def test_a_name_that_nobody_knows_claims_nothing(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    """Next to an owner that lives, and without a fence of its own: neighbours do not wait for each other."""
    run = tmp_path / "run"
    with ckptfs.prepare_run(run):
        save(run / "step_1")
    assert torch.equal(loaded(run / "step_1"), NEW["w"])
    assert fences(run) == 1
    save(run / "step_2")
    assert fences(run) == 1


@WAYS
def test_a_name_that_the_log_knows_claims_the_run(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    """For the call: it is free afterwards, and the old one stays where somebody holds the run."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    with (
        ckptfs.prepare_run(run),
        pytest.raises((ckptfs.RunBusyError, CheckpointException), match="is held by this process"),
    ):
        save(run / "step_1")
    assert torch.equal(loaded(run / "step_1"), OLD["w"])
    save(run / "step_1")
    assert torch.equal(loaded(run / "step_1"), NEW["w"])
    assert fences(run) == 2
    with ckptfs.prepare_run(run):
        pass


def test_a_checkpoint_of_stock_torch_claims_the_run(tmp_path: Path) -> None:
    """The log does not know the name, the storage does."""
    run = tmp_path / "run"
    dcp.save(OLD, checkpoint_id=run / "step_1", no_dist=True)
    with ckptfs.prepare_run(run), pytest.raises(ckptfs.RunBusyError):
        by_save(run / "step_1")
    by_save(run / "step_1")
    assert torch.equal(loaded(run / "step_1"), NEW["w"])
    assert fences(run) == 2


@WAYS
def test_a_name_that_is_taken_meanwhile_is_replaced_and_nothing_is_written_twice(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its begin and its seal another save commits the name: the run is claimed then, and what was
    written is sealed.
    """
    run = tmp_path / "run"
    prepare, writes = SaveAttempt._prepare, []

    def overtaken(self: SaveAttempt, files: Any) -> None:
        prepare(self, files)
        writes.append(sorted(files))
        if len(writes) == 1:
            writes.append([])
            monkeypatch.setattr(SaveAttempt, "_prepare", prepare)
            ckptfs.save(OLD, run / "step_1")
            monkeypatch.setattr(SaveAttempt, "_prepare", overtaken)

    monkeypatch.setattr(SaveAttempt, "_prepare", overtaken)
    save(run / "step_1")
    first, _, second = writes
    assert len(first) > 1
    assert second == [
        "ckptfs.json"
    ]  # the manifest alone, of the generation that it is sealed under
    assert torch.equal(loaded(run / "step_1"), NEW["w"])
    assert fences(run) == 1
    assert verify([str(run / "step_1")]).all_findings == ()
    state = {"w": torch.zeros(8)}
    dcp.load(state, checkpoint_id=run / "step_1", no_dist=True)
    assert torch.equal(state["w"], NEW["w"])


def test_a_name_that_is_taken_meanwhile_in_a_held_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner lives: RunBusyError, and what was written goes."""
    run = tmp_path / "run"
    prepare = SaveAttempt._prepare
    held = ckptfs.prepare_run(run)

    def overtaken(self: SaveAttempt, files: Any) -> None:
        prepare(self, files)
        monkeypatch.setattr(SaveAttempt, "_prepare", prepare)
        ckptfs.save(OLD, run / "step_1", run=held)

    monkeypatch.setattr(SaveAttempt, "_prepare", overtaken)
    with held, pytest.raises(ckptfs.RunBusyError):
        by_save(run / "step_1")
    assert torch.equal(loaded(run / "step_1"), OLD["w"])
    assert os.listdir(run / ".ckptfs" / "attempts") == []


# -- when the bytes of a replaced save go ---------------------------------------------------------


def homes(run: str, name: str) -> int:
    """How many saves have data under a name."""
    storage = open_storage(run)
    try:
        return sum(entry.is_dir for entry in storage.list(name))
    finally:
        storage.close()


@WAYS
def test_what_a_call_replaced_is_gone_when_it_ends(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    """No job may ever save into this run again. The new one is whole, for stock torch too."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    save(run / "step_1")
    assert homes(str(run), "step_1") == 1
    assert verify([str(run / "step_1")]).all_findings == ()
    state = {"w": torch.zeros(8)}
    dcp.load(state, checkpoint_id=run / "step_1", no_dist=True)
    assert torch.equal(state["w"], NEW["w"])


def test_what_a_call_replaced_is_gone_on_an_object_store_too() -> None:
    """The release of the run waits for what deletes in parallel with the call."""
    run = f"memory://{uuid4().hex}/run"
    ckptfs.save(OLD, f"{run}/step_1?shape=object")
    result = ckptfs.save(NEW, f"{run}/step_1?shape=object", if_exists="replace")
    assert homes(f"{run}?shape=object", "step_1") == 1
    assert result.replaced_bytes == 0


def test_what_a_held_run_replaced_goes_with_its_next_commit_and_is_told(tmp_path: Path) -> None:
    """Readers of a training run have until then; the result says how many bytes stay."""
    run = tmp_path / "run"
    with ckptfs.prepare_run(run) as held:
        old = ckptfs.save(OLD, run / "step_1", run=held)
        size = sum(p.stat().st_size for p in (run / "step_1" / old.save_id).iterdir())
        new = ckptfs.save(NEW, run / "step_1", if_exists="replace", run=held)
        assert homes(str(run), "step_1") == 2
        assert size / 2 < new.replaced_bytes <= size
        assert "of older ones stay" in str(new)
        last = ckptfs.save(NEW, run / "step_2", run=held)
        assert homes(str(run), "step_1") == 1
        assert last.replaced_bytes == 0


def test_what_is_pinned_stays_and_is_told(tmp_path: Path) -> None:
    """A pin keeps the bytes of a save that was replaced, also beyond a call that replaces."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    set_pin(str(run / "step_1"), pinned=True)
    assert ckptfs.save(NEW, run / "step_1", if_exists="replace").replaced_bytes > 0
    assert homes(str(run), "step_1") == 2


# -- calls that meet each other -------------------------------------------------------------------


def neighbour(rank: Rank) -> str:
    """A process that knows of no other one: replaces its own name, or the one that all replace."""
    run, name = str(rank.args["run"]), str(rank.args["name"]).format(rank.number)
    rank.tell("ready")
    rank.hold("go")
    state = {"w": torch.full((8,), float(rank.number))}
    ckptfs.save(state, f"{run}/{name}", if_exists="replace")
    return name


def keep(rank: Rank) -> None:
    """A process that holds the run for more than one call."""
    with ckptfs.prepare_run(rank.args["run"]):
        rank.tell("holding")
        rank.hold("end")


@pytest.mark.parametrize("name", ["step_{}", "old_{}", "old_0"], ids=["new", "taken", "one"])
def test_processes_that_replace_at_once_all_save(name: str, tmp_path: Path) -> None:
    """Independent ones of one job: new names claim nothing; of names that are taken one goes after the
    other, and no call takes the run from another one.
    """
    run, size = tmp_path / "run", 4
    for number in range(size):
        ckptfs.save(OLD, run / f"old_{number}")
    args, env = {"run": str(run), "name": name}, {"CKPTFS_JOB_ID": "one"}
    with launch(neighbour, size, args=args, store="none", env=env) as ranks:
        ranks.wait("ready")
        ranks.release("go")
        saved = ranks.values()
    assert fences(run) == (0 if name == "step_{}" else size)
    for number, where in enumerate(saved):
        value = float(loaded(run / where)[0])
        assert value in (range(size) if name == "old_0" else [number])
        assert homes(str(run), where) == 1


def test_an_owner_that_lives_beyond_a_call_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the same job, and whatever timeout_s says: who it is, and what there is to do."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    monkeypatch.setenv("CKPTFS_JOB_ID", "one")
    with launch(
        keep, 1, args={"run": str(run)}, store="none", env={"CKPTFS_JOB_ID": "one"}
    ) as ranks:
        ranks.wait("holding")
        with pytest.raises(
            ckptfs.RunBusyError, match=r"pid \d+, job .* for more than one call"
        ) as busy:
            ckptfs.save(NEW, run / "step_1", if_exists="replace", timeout_s=1e6)
        ranks.release("end")
        ranks.values()
    assert "save through its holder" in str(busy.value.hint)
    assert torch.equal(loaded(run / "step_1"), OLD["w"])


@contextlib.contextmanager
def replacing(run: Path) -> Iterator[Callable[[], None]]:
    """While inside, a call of this process replaces step_1 and stops; yields what lets it continue."""
    go_on, inside = threading.Event(), threading.Event()

    class Waiting(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            inside.set()
            assert go_on.wait(60)
            return super().finish_plan(new_plan)

    writer, planner = ckptfs.StorageWriter(run / "step_1"), Waiting()
    thread = threading.Thread(
        target=lambda: dcp.save(OLD, storage_writer=writer, planner=planner, no_dist=True)
    )
    thread.start()
    assert inside.wait(60)
    try:
        yield go_on.set
    finally:
        go_on.set()
        thread.join()


@WAYS
def test_a_call_waits_for_another_call(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the run claimed, the other one ends, and both have committed."""
    run, look = tmp_path / "run", LeaseWatch.look
    ckptfs.save(OLD, run / "step_1")
    ckptfs.save(OLD, run / "step_2")
    with replacing(run) as go_on:

        def looks(self: LeaseWatch, for_s: float) -> Any:
            go_on()
            return look(self, for_s)

        monkeypatch.setattr(LeaseWatch, "look", looks)
        save(run / "step_2")
    assert torch.equal(loaded(run / "step_2"), NEW["w"])
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2]


def test_a_call_waits_no_longer_than_timeout_s(tmp_path: Path) -> None:
    """Then it says who has the run."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_1")
    with (
        replacing(run),
        pytest.raises(ckptfs.RunBusyError, match=r"held by this process .* by a StorageWriter"),
    ):
        ckptfs.save(NEW, run / "step_1", if_exists="replace", timeout_s=0.5)
