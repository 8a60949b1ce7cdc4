"""``rm -rf run/step_100`` by hand, and step_100 is saved again: the log records it, and the save continues."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.cli.main import main
from ckptfs.commit.delete.deletion_steps import lies_nowhere
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.storage.registry import open_storage
from ckptfs.tools.changing import remove, set_pin

OLD, NEW = {"w": torch.arange(8.0)}, {"w": torch.arange(8.0) + 1}


def log_of(run: Any) -> LogState:
    """The fold of its log."""
    storage = open_storage(run, None)
    try:
        return drive(catch_up(), storage)
    finally:
        storage.close()


def loaded(uri: Any) -> torch.Tensor:
    """What a checkpoint holds."""
    state = {"w": torch.zeros(8)}
    ckptfs.load(state, uri)
    return state["w"]


def by_save(uri: Path) -> None:
    """The plain call."""
    ckptfs.save(NEW, uri)


def by_async_save(uri: Path) -> None:
    """On a thread."""
    ckptfs.async_save(NEW, uri).result()


def by_writer(uri: Path) -> None:
    """torch's own save."""
    dcp.save(NEW, storage_writer=ckptfs.StorageWriter(uri), no_dist=True)


def by_url(uri: Path) -> None:
    """torch's own save, and torch's own writer."""
    dcp.save(NEW, checkpoint_id=f"ckptfs+file://{uri}", no_dist=True)


def by_manager(uri: Path) -> None:
    """A manager, which replaces what it finds."""
    with ckptfs.CheckpointManager(uri.parent, begin_again=True) as manager:
        manager.save(100, NEW)


def by_held_run(uri: Path) -> None:
    """Under a run that is held already: nothing is claimed for it."""
    with ckptfs.prepare_run(uri.parent) as run:
        ckptfs.save(NEW, uri, run=run)


WAYS = [by_save, by_async_save, by_writer, by_url, by_manager, by_held_run]


@pytest.mark.parametrize("save", WAYS)
def test_a_step_that_was_removed_by_hand_is_saved_again(
    tmp_path: Path, save: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that the first one was removed, the second is there, and the run is free again."""
    run, step = tmp_path / "run", tmp_path / "run/step_100"
    ckptfs.save(OLD, step)
    shutil.rmtree(step)
    with caplog.at_level(logging.WARNING):
        save(step)
    assert torch.equal(loaded(step), NEW["w"])
    state = log_of(run)
    assert state.released or state.generation.number == 0
    if save is not by_manager:
        assert "step_100 was removed by hand" in caplog.text
        first = min(state.saves.values(), key=lambda s: s.sealed_at or 0)
        assert first.deleted
        assert first.gone
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [100]
    with ckptfs.prepare_run(run):
        assert torch.equal(loaded(step), NEW["w"])


def test_the_entries_say_why(tmp_path: Path) -> None:
    """A delete with its reason, and that the bytes are gone, before the seal of the second."""
    run, step = tmp_path / "run", tmp_path / "run/step_100"
    ckptfs.save(OLD, step)
    shutil.rmtree(step)
    ckptfs.save(NEW, step)
    entries = [path.read_text() for path in sorted((run / ".ckptfs/log").iterdir())]
    kinds = [next(k for k in KINDS if f'"kind":"{k}"' in e) for e in entries]
    assert kinds == ["seal", "fence", "delete", "gone", "seal", "release"]
    assert '"reason":"removed by hand"' in entries[2]


KINDS = ("seal", "fence", "delete", "gone", "release")


def test_a_pinned_one_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody wanted to keep it: the warning says so."""
    run, step = tmp_path / "run", tmp_path / "run/step_100"
    ckptfs.save(OLD, step)
    set_pin(step, pinned=True)
    shutil.rmtree(step)
    with caplog.at_level(logging.WARNING):
        ckptfs.save(NEW, step)
    assert "which is pinned" in caplog.text
    assert log_of(run).released


def test_a_living_owner_keeps_its_run(tmp_path: Path) -> None:
    """As replacing does: a living owner is named, and nothing is entered."""
    run, step = tmp_path / "run", tmp_path / "run/step_100"
    ckptfs.save(OLD, step)
    shutil.rmtree(step)
    with ckptfs.prepare_run(run) as held:
        before = len(list((run / ".ckptfs/log").iterdir()))
        with pytest.raises(ckptfs.RunBusyError, match="held by this process"):
            ckptfs.save(NEW, step)
        assert len(list((run / ".ckptfs/log").iterdir())) == before
        ckptfs.save(NEW, run / "step_101", run=held)
    ckptfs.save(NEW, step)
    assert torch.equal(loaded(step), NEW["w"])


def _leave_data(step: Path) -> None:
    (step / ".metadata").unlink()
    (step / "ckptfs.json").unlink()


def _leave_metadata(step: Path) -> None:
    for path in step.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def _put_a_link(step: Path) -> None:
    shutil.rmtree(step)
    step.symlink_to(step.parent / "elsewhere")


def _leave_the_manifest(step: Path) -> None:
    for path in step.iterdir():
        if path.is_dir():
            for file in path.iterdir():
                if file.name != "ckptfs.json":
                    file.unlink()


def _leave_a_data_file(step: Path) -> None:
    for path in [*step.rglob("*")]:
        if path.is_file() and path.suffix != ".distcp":
            path.unlink()


def _leave_what_stock_reads(step: Path) -> None:
    _leave_metadata(step)
    (step / "ckptfs.json").unlink()


def _leave_the_list(step: Path) -> None:
    _leave_metadata(step)
    (step / ".metadata").unlink()


@pytest.mark.parametrize(
    "harm",
    [
        _leave_data,
        _leave_a_data_file,
        _leave_metadata,
        _leave_what_stock_reads,
        _leave_the_list,
        _put_a_link,
        _leave_the_manifest,
        lambda _: None,
    ],
)
def test_what_is_not_removed_whole_keeps_its_name(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Something of it is there, or a link is in its place: committed already, as before."""
    run, step = tmp_path / "run", tmp_path / "run/step_100"
    ckptfs.save(OLD, step)
    harm(step)
    before = len(list((run / ".ckptfs/log").iterdir()))
    with pytest.raises(ckptfs.CommitConflictError, match="committed already"):
        ckptfs.save(NEW, step)
    assert len(list((run / ".ckptfs/log").iterdir())) == before


def test_files_that_somebody_put_there_since_stay(tmp_path: Path) -> None:
    """The step was removed, its directory made again for something else: that is kept."""
    step = tmp_path / "run/step_100"
    ckptfs.save(OLD, step)
    shutil.rmtree(step)
    step.mkdir()
    (step / "notes.txt").write_text("mine")
    ckptfs.save(NEW, step)
    assert torch.equal(loaded(step), NEW["w"])
    assert (step / "notes.txt").read_text() == "mine"


def test_a_directory_that_was_removed_by_hand(tmp_path: Path) -> None:
    """Files with plain names, by a manager of directories and by checkpoint_dir."""
    run = tmp_path / "run"

    def write(text: str) -> None:
        with ckptfs.checkpoint_dir(run / "step_100") as path:
            (Path(path) / "model.bin").write_text(text)

    write("old")
    shutil.rmtree(run / "step_100")
    write("new")
    assert (run / "step_100/model.bin").read_text() == "new"
    assert log_of(run).released
    (run / "step_100/model.bin").unlink()  # not all of it
    with pytest.raises(ckptfs.CommitConflictError):
        write("newer")


def test_latest_says_what_was_removed_and_rm_records_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is passed over in silence: until the log says so, the error says what to do."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_99")
    ckptfs.save(NEW, run / "step_100")
    shutil.rmtree(run / "step_100")
    for call in (
        lambda: ckptfs.latest(run),
        lambda: ckptfs.latest(f"ckptfs+file://{run}"),
        lambda: ckptfs.latest(run, unlogged="ignore"),
        lambda: loaded(run / "step_100"),
        lambda: ckptfs.CheckpointManager(run).restore({"w": torch.zeros(8)}),
    ):
        with pytest.raises(ckptfs.IncompleteCheckpointError) as missing:
            call()
        text = f"{missing.value} {missing.value.hint}"
        assert "step_100" in text
        assert "removed by hand" in text
        assert f"ckptfs rm {run / 'step_100'}" in text or "ckptfs rm file://" in text
    with pytest.raises(SystemExit) as ended:
        main(["latest", str(run)])
    assert ended.value.code == 1
    ran = capsys.readouterr()
    assert ran.out == ""
    assert "step_100 was removed by hand" in ran.err
    assert f"ckptfs rm file://{run / 'step_100'}" in ran.err
    remove(run / "step_100")
    newest = ckptfs.latest(run)
    assert newest is not None
    assert newest.step == 99
    with pytest.raises(SystemExit) as ended:
        main(["latest", str(run)])
    assert ended.value.code == 0
    state = {"w": torch.zeros(8)}
    assert ckptfs.CheckpointManager(run).restore(state) is not None
    assert torch.equal(state["w"], OLD["w"])


def test_latest_names_what_is_left_of_a_step_and_older_ones_as_before(tmp_path: Path) -> None:
    """One that was not removed whole is still the latest, and so is the newest when an older one is gone."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_99")
    ckptfs.save(NEW, run / "step_100")
    shutil.rmtree(run / "step_99")
    (run / "step_100/.metadata").unlink()
    newest = ckptfs.latest(run)
    assert newest is not None
    assert newest.step == 100
    assert ckptfs.latest(run, "weights") is None


def test_latest_of_parts_that_were_removed(tmp_path: Path) -> None:
    """The whole is named; while one part is there, it is the latest."""
    run = tmp_path / "run"
    with ckptfs.CheckpointManager(run) as manager:
        ticket = manager.begin(100, ["actor", "critic"])
        ticket.commit([ckptfs.save(NEW, ticket.part(name)) for name in ticket.parts])
    shutil.rmtree(run / "step_100/actor")
    newest = ckptfs.latest(run)
    assert newest is not None
    assert newest.step == 100
    shutil.rmtree(run / "step_100")
    with pytest.raises(ckptfs.IncompleteCheckpointError, match="step_100 was removed by hand"):
        ckptfs.latest(run)


def test_what_is_deleted_while_latest_looks_is_not_called_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log says so by the time that its bytes are missed: the one before is the latest."""
    run = tmp_path / "run"
    ckptfs.save(OLD, run / "step_99")
    ckptfs.save(NEW, run / "step_100")

    def look(*args: Any) -> Any:
        if (run / "step_100").exists():
            remove(run / "step_100")
        return (yield from lies_nowhere(*args))

    monkeypatch.setattr("ckptfs.commit.catalog.unlogged.lies_nowhere", look)
    newest = ckptfs.latest(run)
    assert newest is not None
    assert newest.step == 99
