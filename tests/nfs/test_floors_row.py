"""The row ``nfs`` of the floors still runs: the bench's command in a client's kernel, its result read on this side."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.floors import __main__ as floors
from benchmarks.floors.claims import CLAIMS, findings_of
from ckptfs.bench.results import read_result
from tests.nfs.conftest import startable


@pytest.mark.campaign
def test_the_row_of_nfs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a lab that it starts by itself: each claim gets a value, and the target a name that stays."""
    told = ["nfs", "--size", "1MB", "--pairs", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["floors", *told])
    with startable():
        assert floors.main() == 0
    (path,) = tmp_path.iterdir()
    result = read_result(path)
    found = findings_of("nfs", result)
    assert len(found) == sum(claim.row == "nfs" for claim in CLAIMS) > 0
    assert all(one.found is not None for one in found)
    assert [one.uri for one in result.targets] == ["nfs"]
    assert "/nfs/" not in path.read_text()
    engines = {one.engine for one in result.samples}
    assert engines == {"ckptfs", "dcp", "dcp:t2", "raw:buffered"}
    assert {one.phase for one in result.samples} == {"save", "load_cold", "load_warm"}
