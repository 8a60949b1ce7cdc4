"""The benchmark of replicated states still runs, and every way ends with what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import replicated


@pytest.mark.campaign
def test_every_way_brings_the_state_to_every_rank(tmp_path: Path) -> None:
    """Two processes, a file, one round: a sample of each way, whose ranks compared what they have."""
    shared = Path("/dev/shm")
    before = {path.name for path in shared.glob("ckptfs-replicated-*")}
    result = replicated.measured(2_000_000, [2], 1, ["disk"], tmp_path)
    assert sorted(one.engine for one in result.samples) == sorted(replicated.WAYS)
    assert all(one.wall_s > 0 and one.cpu_s > 0 for one in result.samples)
    assert list(tmp_path.iterdir()) == []
    assert {path.name for path in shared.glob("ckptfs-replicated-*")} <= before
