"""The benchmark of copies and exports still runs, and compares what was written with the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfs
from benchmarks import copying


def test_every_way_takes_its_turn(tmp_path: Path) -> None:
    """What each wrote is compared, and nothing is left of it."""
    rows = copying.measured(1_000_000, 1, tmp_path, sources=("cold",))
    assert [row["way"] for row in rows] == ["cp", "copy", "export", "st"]
    assert not (tmp_path / "out").exists()
    table = copying.told(rows)
    assert table["cp, cold"]["of cp"] == [1, 1, 1]
    assert table["copy, cold"]["goal"] == 1.5
    assert len(table) == 4


def test_a_copy_that_differs_is_no_result(tmp_path: Path) -> None:
    """Digests are compared."""
    state = {"w": torch.arange(10)}
    for name, value in (("a", 1), ("b", 2)):
        ckptfs.save({"w": state["w"] * value}, tmp_path / name / "step_1")
    with pytest.raises(AssertionError):
        copying.check("copy", tmp_path / "a", tmp_path / "b", state)
