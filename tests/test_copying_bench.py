"""The benchmark of copies and exports still runs, and compares what was written with the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfs
from benchmarks import copying
from benchmarks.floors.claims import findings_of


@pytest.mark.campaign
def test_every_way_takes_its_turn(tmp_path: Path) -> None:
    """From the page cache and from the disk; what each wrote is compared, and nothing is left of it."""
    result = copying.measured(1_000_000, 1, within=tmp_path)
    assert [(one.workload, one.engine) for one in result.samples] == [
        (source, way) for source in copying.SOURCES for way in copying.WAYS
    ]
    assert list(tmp_path.iterdir()) == []
    assert len(result.samples) == 8
    found = findings_of("copy", result)
    assert all(one.found is not None and one.found.value > 0 for one in found)
    floors = {one.claim.told: one.claim.floor for one in found if one.verdict is not None}
    assert floors == {"cp -r's time, a copy": 1.5, "cp -r's time, an export": 2.0}


def test_a_copy_that_differs_is_no_result(tmp_path: Path) -> None:
    """Digests are compared."""
    state = {"w": torch.arange(10)}
    for name, value in (("a", 1), ("b", 2)):
        ckptfs.save({"w": state["w"] * value}, tmp_path / name / "step_1")
    with pytest.raises(AssertionError):
        copying.check("copy", tmp_path / "a", tmp_path / "b", state)
