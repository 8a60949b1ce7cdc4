"""A checkpoint is files: it can be copied, and read by stock torch when ckptfs is gone."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest

import ckptfs
from tests.compat.stock import run_stock
from tests.formats.state import RANKS, blank, differences, state


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Return the directory of a committed checkpoint of the golden state."""
    ckptfs.save(state(sharded=False), tmp_path / "run" / "step_7")
    return tmp_path / "run" / "step_7"


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_stock_torch_reads_it_without_us(step: Path, ranks: int) -> None:
    """Log and manifests deleted and ckptfs not imported, stock DCP loads it on 1 and 2 ranks."""
    shutil.rmtree(step.parent / ".ckptfs")
    for manifest in step.rglob("ckptfs.json"):
        manifest.unlink()
    run_stock("load", step, ranks=ranks)


def test_a_copy_elsewhere_loads(step: Path, tmp_path: Path) -> None:
    """A step that was copied to another directory, under another name, is valid by itself."""
    shutil.copytree(step, tmp_path / "elsewhere" / "renamed")
    shutil.rmtree(step.parent)
    wanted = state(sharded=False)
    loaded = blank(copy.deepcopy(wanted))
    result = ckptfs.load(loaded, tmp_path / "elsewhere" / "renamed")
    assert differences(loaded, wanted) == []
    assert (result.step, result.verified) == (7, True)
    assert [c.uri.name for c in ckptfs.list_checkpoints(tmp_path / "elsewhere")] == ["renamed"]
