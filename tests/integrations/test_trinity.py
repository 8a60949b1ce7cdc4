"""Trinity-RFT: its coordinator over ckptfs; weights for the explorer, and failures that are reported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    coordination: Any = pytest.importorskip(
        "trinity.trainer.verl.checkpoint", reason="Trinity is not installed: make test-integrations"
    )

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_a_killed_run_goes_on_and_the_explorer_finds_weights(tmp_path: Path, cell: Cell) -> None:
    """Killed while it saves, the trainer resumes bit by bit; weights have a newest of their own, which
    another process waits for and loads.
    """
    store = Store("file", str(tmp_path / "run"))
    mode: Mode = "async"
    with cell("Trinity-RFT", store, mode, package="trinity-rft"):
        # Step 2: its weights are committed, its checkpoint is not.
        told = story("trinity", store, mode, kill=Kill("create", "*.ckptfs/log/*", nth=5))
    assert told.resumed.resumed == "1"
    seen = ckptfs.wait_for_new(store.uri, kind="weights", timeout_s=0)
    newest = ckptfs.latest(store.uri)
    assert newest is not None
    assert (seen.step, newest.step, seen.uri != newest.uri) == (4, 4, True)
    import torch

    state = {"model": {"0.weight": torch.zeros(8, 8)}}
    ckptfs.load(state, seen.uri, strict=False)
    assert state["model"]["0.weight"].any()


def test_stock_never_hears_of_a_failed_save_and_ours_does(tmp_path: Path) -> None:
    """Stock: what fails in the thread, here that no Ray runs, is lost in wait_all; ours raises it."""
    saved: list[int] = []
    coordinator = coordination.CheckpointCoordinator(None)
    coordinator.save_async("model", lambda: saved.append(1), 1)
    coordinator.wait_all()
    coordinator.save_async("model", lambda: saved.append(2), 2)  # as if nothing had happened
    coordinator.wait_all()
    assert not saved

    with ckptfs.CheckpointManager(tmp_path / "run", mode="async") as manager:
        manager.save(1, {"step": 1})
        manager.wait()
        (tmp_path / "run/.ckptfs/attempts").rmdir()
        (tmp_path / "run/.ckptfs/attempts").write_text("in the way")
        manager.save(2, {"step": 2})
        with pytest.raises(ckptfs.CkptfsError):
            manager.wait()
        assert manager.steps == [1]
