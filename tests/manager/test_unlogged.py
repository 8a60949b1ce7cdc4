"""Stock torch saves into a run of ours: nobody goes back to the commit before it without a word."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptfs
from ckptfs.commit.entries import Kind
from ckptfs.commit.unlogged import data_paths
from ckptfs.tools.looking import newest


def stock(path: Path, value: float, later_s: float = 60.0) -> None:
    """What stock torch saves there, so long after now by the storage's clock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces what is there
        writer = dcp.FileSystemWriter(path, overwrite=True)
        dcp.save({"w": torch.full((4,), value)}, storage_writer=writer, no_dist=True)
    now = path.stat().st_mtime + later_s
    os.utime(path / ".metadata", (now, now))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one commit of ours, step_2."""
    run = tmp_path / "run"
    ckptfs.save({"w": torch.full((4,), 2.0)}, run / "step_2")
    return run


def restored(run: Path, **more: object) -> float:
    """What a manager restores."""
    state = {"w": torch.zeros(4)}
    with ckptfs.CheckpointManager(run) as manager:
        assert manager.restore(state, **more) is not None  # type: ignore[arg-type]
    return float(state["w"][0])


READERS: dict[str, Callable[[Path], object]] = {
    "latest": ckptfs.latest,
    "restore": restored,
    "wait_for_new": lambda run: ckptfs.wait_for_new(run, timeout_s=0),
    "ckptfs latest": lambda run: newest(run, Kind.CHECKPOINT),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_stock_saved_later_is_named(run: Path, reader: str) -> None:
    """Every reader of the newest raises, names all of them and what to do; and writes nothing."""
    stock(run / "step_3", 3.0)
    stock(run / "step_4", 4.0)
    before = sorted(str(path) for path in run.rglob("*"))
    with pytest.raises(
        ckptfs.StateError, match="step_3 and step_4 were saved after step_2"
    ) as caught:
        READERS[reader](run)
    assert 'unlogged="ignore"' in str(caught.value)
    assert sorted(str(path) for path in run.rglob("*")) == before


def test_there_are_ways_out(run: Path) -> None:
    """By its name it is loaded; "ignore" takes our newest; moved away, it disturbs nobody."""
    stock(run / "step_3", 3.0)
    state = {"w": torch.zeros(4)}
    ckptfs.load(state, run / "step_3")
    assert float(state["w"][0]) == 3.0
    ckptfs.load(state, run / "step_2")
    assert float(state["w"][0]) == 2.0
    assert restored(run, unlogged="ignore") == 2.0
    assert restored(run, step=2) == 2.0
    found = ckptfs.latest(run, unlogged="ignore")
    assert found is not None
    assert found.uri.name == "step_2"
    assert ckptfs.wait_for_new(run, timeout_s=0, unlogged="ignore").step == 2
    assert ckptfs.latest(run, "weights") is None
    shutil.move(run / "step_3", run.parent / "elsewhere")
    assert restored(run) == 2.0


def test_what_is_older_does_not_disturb(run: Path) -> None:
    """A run that stock began and ckptfs went on with is restored from our newest."""
    stock(run / "step_1", 1.0, later_s=-60.0)
    assert restored(run) == 2.0


@pytest.mark.parametrize("half", ["no .metadata", "no data"])
def test_what_is_not_whole_does_not_count(run: Path, half: str) -> None:
    """A stock save that is under way, or died, or whose files went, is no checkpoint."""
    stock(run / "step_3", 3.0)
    for path in (run / "step_3").glob(".metadata" if half == "no .metadata" else "*.distcp"):
        path.unlink()
    assert restored(run) == 2.0


def test_copies_with_a_manifest_never_count(run: Path) -> None:
    """A copy of ours beside the log says what it is."""
    shutil.copytree(run / "step_2", run / "best")
    now = (run / "best").stat().st_mtime + 60
    os.utime(run / "best/.metadata", (now, now))
    assert restored(run) == 2.0


def test_stock_over_our_newest_is_named(run: Path) -> None:
    """Whoever takes the newest is told that another .metadata stands in its place."""
    stock(run / "step_2", 3.0)
    with pytest.raises(ckptfs.StateError, match="step_2 was saved over, and not by ckptfs"):
        restored(run)
    with pytest.raises(ckptfs.StateError, match="step_2 was saved over, and not by ckptfs"):
        ckptfs.load({"w": torch.zeros(4)}, run / "step_2")


def test_the_data_files_of_a_metadata_are_found_without_unpickling_it(tmp_path: Path) -> None:
    """Of stock's and of ours; and none of what is no pickle."""
    stock(tmp_path / "stock", 1.0)
    assert set(data_paths((tmp_path / "stock/.metadata").read_bytes())) == {"__0_0.distcp"}
    assert list(data_paths(b"no pickle at all")) == []
