"""open-instruct's layout: DeepSpeed's directories with one state of a controller, in one commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Store, story

pytestmark = pytest.mark.integrations


def test_a_controller_resumes_with_its_learners(tmp_path: Path, cell: Cell) -> None:
    """Killed about the commit of the fourth checkpoint, learners and the controller, which is in no group,
    continue from the last one that was committed; its state is one file of the same directory.
    """
    store = Store("file", str(tmp_path / "run"))
    with cell("open-instruct", store, "async", package="deepspeed"):
        kill = Kill("create", "*.ckptfs/log/*", nth=6, rank=0)
        told = story("open_instruct", store, "async", kill=kill)
        # The sixth entry is the fourth seal, or that the first one's bytes are gone, just next to it.
        assert told.resumed.resumed in {"3", "4"}
    newest = ckptfs.latest(store.uri, "directory")
    assert newest is not None
    assert newest.uri.name == "global_step6"
    with ckptfs.checkpoint_dir(newest.uri, "read") as path:
        assert {"driver.pt", "mp_rank_00_model_states.pt"} <= set(os.listdir(path))
    assert ckptfs.load_object(f"{store.uri}/global_step6/driver.pt").numel() > 0
