"""What a copy meets at its target, and what its source loses during the copy: known before it is too late."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.errors import CommitConflictError, RunBusyError, UriError
from ckptfs.replication.copier import CopyReport, copy_to
from ckptfs.tools.changing import remove
from tests.cli.conftest import Place, no_accounts, place, radosgw
from tests.lab.server import Server

__all__ = ["no_accounts", "place", "radosgw"]


def statuses(report: CopyReport) -> dict[str, str]:
    """What became of each checkpoint."""
    return {one.name: one.status.value for one in report.checkpoints}


def save(path: Path, value: float) -> Path:
    """A small checkpoint."""
    ckptfs.save({"w": torch.full((4,), value)}, path)
    return path


def value_of(path: Path) -> float:
    """What it holds."""
    state = {"w": torch.zeros(4)}
    ckptfs.load(state, path)
    return float(state["w"][0])


# -- what no log knows ------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["stock", "hand"])
def test_a_checkpoint_that_no_log_knows_is_replaced_only_by_overwrite(
    tmp_path: Path, maker: str
) -> None:
    """By stock torch, or copied there by hand: refused, unchanged; with overwrite, and a note."""
    source, target = save(tmp_path / "source" / "step_1", 1.0), tmp_path / "target" / "step_1"
    if maker == "stock":
        dcp.save({"w": torch.full((4,), 7.0)}, checkpoint_id=target, no_dist=True)
    else:
        shutil.copytree(save(tmp_path / "other" / "step_1", 7.0), target)
    for into in (target, f"{target.parent}/"):
        with pytest.raises(CommitConflictError, match="which no log lists"):
            copy_to(source, into)
    with pytest.raises(CommitConflictError):
        copy_to(source.parent, target.parent)
    assert value_of(target) == 7.0
    report = copy_to(source, target, overwrite=True)
    assert statuses(report) == {"step_1": "copied"}
    assert any("no log lists the step_1" in warning for warning in report.warnings)
    assert value_of(target) == 1.0


def test_a_copy_by_hand_is_there_and_one_that_was_interrupted_is_made_whole(tmp_path: Path) -> None:
    """The same save, without a log; then the same with a file missing."""
    source, target = save(tmp_path / "source" / "step_1", 1.0), tmp_path / "target" / "step_1"
    shutil.copytree(source, target)
    assert statuses(copy_to(source, target)) == {"step_1": "already there"}
    [data] = target.glob("*/__0_0.distcp")
    data.unlink()
    assert statuses(copy_to(source, target)) == {"step_1": "copied"}
    assert value_of(target) == 1.0


# -- what goes during a copy ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 2])
def test_what_the_source_deletes_meanwhile_is_left_out_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    """Retention takes step_2 when it is about to be read: the others are copied, and that is said."""
    source, target, gate = tmp_path / "source", tmp_path / "target", tmp_path / "gate"
    for number in (1, 2, 3):
        save(source / f"step_{number}", float(number))
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"hold={gate}:open_read:step_2/*.distcp:1")
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy_to, f"faults+file://{source}", target, step=step)
        moment = threading.Event()
        while not Path(f"{gate}.reached").exists() and not copying.done():
            moment.wait(0.01)
        try:
            remove(source / "step_2")
        finally:
            gate.touch()
        if step is not None:
            with pytest.raises(FileNotFoundError):
                copying.result()
            return
        report = copying.result()
    told = {"step_1": "copied", "step_2": "gone meanwhile", "step_3": "copied"}
    assert statuses(report) == told
    assert any("step_2 was deleted from the source" in warning for warning in report.warnings)
    assert [c.step for c in ckptfs.list_checkpoints(target)] == [1, 3]
    assert not list(target.glob(".ckptfs/attempts/*"))


# -- where it is to be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("run/step_1", "run/.ckptfs/x"),
        ("run/step_1", "run/.ckptfs"),
        ("run/step_1", "run/.ckptfs/"),
        ("run/step_1", "run/step_1/"),
        ("run/step_1", "run/step_1/copy"),
        ("run/step_1", "run/step_2/deep/copy"),
        ("run", "run/step_2"),
        ("run", "run/_data"),
    ],
)
def test_a_target_inside_a_checkpoint_or_in_what_is_a_run_s_own_is_refused(
    tmp_path: Path, source: str, target: str
) -> None:
    """UriError, and not a file of the run is another."""
    for number in (1, 2):
        save(tmp_path / "run" / f"step_{number}", float(number))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UriError):
        copy_to(f"{tmp_path}/{source}", f"{tmp_path}/{target}")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_target_inside_a_checkpoint_on_s3_is_refused(tmp_path: Path, radosgw: Server) -> None:
    """The run above is found there too; next to its checkpoints everything is free."""
    source, there = save(tmp_path / "run" / "step_1", 1.0), str(radosgw.fresh())
    options = dict(radosgw.storage_options())
    copy_to(source, f"{there}/step_1", target_options=options)
    with pytest.raises(UriError, match="inside step_1"):
        copy_to(source.parent, f"{there}/step_1", target_options=options)
    report = copy_to(source.parent, f"{there}/nested", target_options=options)
    assert statuses(report) == {"step_1": "copied"}


# -- who is there -----------------------------------------------------------------------------------


def test_a_copy_that_a_living_job_would_go_on_from_is_told(tmp_path: Path) -> None:
    """Checkpoints only, and only while somebody holds the run; a replacement is refused in words of cp."""
    source, target = tmp_path / "source", tmp_path / "target"
    for number in (1, 2):
        save(source / f"step_{number}", float(number))
    with ckptfs.checkpoint_dir(source / "export_3") as path:
        Path(path, "x").write_text("x")
    run = ckptfs.prepare_run(target)
    assert copy_to(source / "export_3", target / "export_3").warnings == ()
    report = copy_to(source / "step_1", target / "step_1")
    assert any("its latest will be the copy step_1" in warning for warning in report.warnings)
    latest = ckptfs.latest(target)
    assert latest is not None
    assert latest.step == 1
    assert copy_to(source / "step_1", target / "step_1").warnings == ()
    with pytest.raises(RunBusyError) as busy:
        copy_to(source / "step_2", target / "step_1", overwrite=True)
    assert "takeover" not in str(busy.value)
    run.release()
    assert copy_to(source / "step_2", target / "step_2").warnings == ()


def test_a_directory_of_files_is_never_replaced(place: Place, tmp_path: Path) -> None:
    """Refused before anything is claimed, and the hint does not promise what cannot be."""
    for number in (1, 2):
        with ckptfs.checkpoint_dir(tmp_path / "source" / f"export_{number}") as path:
            Path(path, "x").write_text(str(number))
    target, options = f"{place.uri}/export", place.options
    copy_to(tmp_path / "source" / "export_1", target, target_options=options)
    with pytest.raises(CommitConflictError) as refused:
        copy_to(tmp_path / "source" / "export_2", target, overwrite=True, target_options=options)
    assert "never replaces" in str(refused.value)
    assert "--overwrite" not in str(refused.value)
    with place.storage() as storage:
        assert storage.read("export/x") == b"1"
