"""A checkpoint is found where it was written, and projected before it is read: it is read all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptfs

END_S = 60.0


def unprojected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """step_1 is committed and is in its attempt."""
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=EACCES:rename:*:1")
    result = ckptfs.save({"w": torch.arange(8.0)}, f"faults+file://{run}/step_1")
    monkeypatch.delenv("CKPTFS_TEST_FAULT")
    assert result.warnings
    assert not (run / "step_1").exists()


def projecting_at(
    moment: str, run: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]
) -> threading.Thread:
    """From now on every thread that comes to that operation waits, until ``then`` was done."""
    gate = run.parent / "gate"
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"hold={gate}:{moment}:1")

    def meanwhile() -> None:
        deadline = time.monotonic() + END_S
        while not Path(f"{gate}.reached").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        then()
        gate.touch()

    thread = threading.Thread(target=meanwhile)
    thread.start()
    return thread


MOMENTS = ["read:*/attempts/*/.metadata", "open_read:*/attempts/*.distcp"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("by", ["load", "restore"])
def test_what_is_projected_between_the_look_and_the_read_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, by: str
) -> None:
    """Before its .metadata is read, and before a data file is opened: the whole state arrives."""
    run = tmp_path / "run"
    unprojected(run, monkeypatch)
    thread = projecting_at(
        moment, run, monkeypatch, lambda: ckptfs.prepare_run(f"file://{run}").release()
    )
    state = {"w": torch.zeros(8)}
    if by == "load":
        ckptfs.load(state, f"faults+file://{run}/step_1")
    else:
        with ckptfs.CheckpointManager(f"faults+file://{run}") as manager:
            assert manager.restore(state) is not None
    thread.join(END_S)
    assert (run / "step_1" / ".metadata").exists()
    assert torch.equal(state["w"], torch.arange(8.0))


def test_what_is_missing_is_missing_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody removed in between is reported as before, and looked for once."""
    run = tmp_path / "run"
    unprojected(run, monkeypatch)

    def remove() -> None:
        for path in run.glob(".ckptfs/attempts/*/*/*.distcp"):
            path.unlink()

    thread = projecting_at("read:*/attempts/*/.metadata", run, monkeypatch, remove)
    with pytest.raises(ckptfs.CollectiveError, match="IncompleteCheckpointError"):
        ckptfs.load({"w": torch.zeros(8)}, f"faults+file://{run}/step_1")
    thread.join(END_S)
