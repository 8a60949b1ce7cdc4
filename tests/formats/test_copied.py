"""A checkpoint that was copied without its log is valid by its manifest alone, if it is all there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptfs


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint saved in one run and copied, without the log, into another directory."""
    ckptfs.save({"w": torch.arange(6.0)}, tmp_path / "run" / "step_7")
    shutil.copytree(tmp_path / "run" / "step_7", tmp_path / "elsewhere" / "moved_7")
    return tmp_path / "elsewhere" / "moved_7"


def test_a_whole_copy_is_listed_and_loads(copied: Path) -> None:
    """Under another name, in a directory that never was a run."""
    state = {"w": torch.zeros(6)}
    assert ckptfs.load(state, copied).verified
    assert torch.equal(state["w"], torch.arange(6.0))
    assert [str(c.uri) for c in ckptfs.list_checkpoints(copied.parent)] == [f"file://{copied}"]


@pytest.mark.parametrize("victim", ["*/__0_0.distcp", "*/__0_0.xxh3", "*/.metadata"])
@pytest.mark.parametrize("harm", ["gone", "short"])
def test_an_interrupted_copy_is_neither_listed_nor_loaded(
    copied: Path, victim: str, harm: str
) -> None:
    """A file that is missing or short is named before a tensor is touched."""
    file = next(copied.glob(victim))
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert ckptfs.list_checkpoints(copied.parent) == []
    assert ckptfs.latest(copied.parent) is None
    state = {"w": torch.full((6,), -1.0)}
    with pytest.raises(ckptfs.IncompleteCheckpointError, match=file.name):
        ckptfs.load(state, copied)
    assert torch.equal(state["w"], torch.full((6,), -1.0))
