"""The file that names the newest checkpoint of a run, for readers that are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptfs
from ckptfs.commit.session import Place
from ckptfs.errors import NoSpaceError, StateError
from ckptfs.manager.run_setup import Pointer, RunHandle, Where
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.uri import Uri


def _source(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "model.pt").write_text("weights")
    return folder


def _manager(run: Path, plan: Plan) -> ckptfs.DirectoryManager:
    storage = FaultyStorage(open_storage(Uri.parse(run)), plan)
    ground = RunHandle(Where(str(run), Place()), storage=storage)
    return ckptfs.DirectoryManager(run, keep_latest=1, pointer="latest", ground=ground)


def _moves(plan: Plan, since: int) -> list[str]:
    """Log entries and moves of the pointer, in order."""
    told = [(op.op, op.key) for op in plan.trace[since:]]
    wanted = {("create", "log"): "entry", ("replace", "latest"): "move"}
    short = [(op, "log" if key.startswith(".ckptfs/log/") else key) for op, key in told]
    return [wanted[one] for one in short if one in wanted]


def test_it_moves_after_the_commit_and_before_retention(tmp_path: Path) -> None:
    """The seal, then the pointer, then the entry that lets the old checkpoint go: no reader finds the
    name of one that is not there.
    """
    run, source, plan = tmp_path / "run", _source(tmp_path), Plan()
    with _manager(run, plan) as manager:
        manager.save(1, source)
        assert (run / "latest").read_text() == "step_1"
        begun = len(plan.trace)
        manager.save(2, source)
        seen = _moves(plan, begun)
        assert seen[:3] == ["entry", "move", "entry"]
        assert (
            "move" not in seen[3:]
        )  # in the background it may have said already that the old one is gone
        assert manager.steps == [2]
    assert (run / "latest").read_text() == "step_2"


def test_a_job_that_died_before_the_move_is_made_good_at_the_next_claim(tmp_path: Path) -> None:
    """Dead between commit and move, it leaves the old name with its files; the next claim moves it on
    before retention takes them.
    """
    run, source = tmp_path / "run", _source(tmp_path)
    plan = Plan([Fault("replace", "latest", 2, Fail(KeyboardInterrupt()))])
    with _manager(run, plan) as manager:
        manager.save(1, source)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, source)
    assert (run / "latest").read_text() == "step_1"
    assert (run / "step_1" / "model.pt").exists()
    plan = Plan()
    with _manager(run, plan) as manager:
        with manager.reading():
            pass
        manager.pin(2)
        entries = _moves(plan, 0)
        assert entries[:3] == ["entry", "move", "entry"]  # the claim, then the move
        assert manager.steps == [2]
    assert (run / "latest").read_text() == "step_2"


def test_a_pointer_that_cannot_move_fails_no_save(tmp_path: Path) -> None:
    """The checkpoint is there all the same, and the next commit moves the pointer."""
    run, source = tmp_path / "run", _source(tmp_path)
    plan = Plan([Fault("replace", "latest", 1, Fail(NoSpaceError("the disk is full")))])
    with _manager(run, plan) as manager:
        manager.save(1, source)
        assert not (run / "latest").exists()
        assert manager.steps == [1]
        manager.save(2, source)
    assert (run / "latest").read_text() == "step_2"


def test_it_names_nothing_that_was_deleted(tmp_path: Path) -> None:
    """It goes back to what is left when the newest is deleted by name, and away with the last one."""
    run, source = tmp_path / "run", _source(tmp_path)
    with ckptfs.DirectoryManager(run, pointer="latest") as manager:
        for step in (1, 2):
            manager.save(step, source)
        manager.delete(2)
        assert (run / "latest").read_text() == "step_1"
        manager.delete(1)
        assert not (run / "latest").exists()


def test_its_text_is_the_readers_own(tmp_path: Path) -> None:
    """A reader that wants the number gets the number, and what is no file of the run is refused."""
    run, source = tmp_path / "run", _source(tmp_path)
    pointer = Pointer("iteration.txt", lambda name: name.rpartition("_")[2])
    with ckptfs.DirectoryManager(run, pointer=pointer) as manager:
        manager.save(7, source)
    assert (run / "iteration.txt").read_text() == "7"
    with pytest.raises(StateError, match="not the name of a file"):
        Pointer("a/b")
