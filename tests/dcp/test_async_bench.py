"""benchmarks/async_stall.py still runs, and reckons as its page says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import async_stall


def test_the_benchmark_runs_and_writes_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny state, without DCP's process: a row for each peer, the ratio of each round's pair."""
    out = tmp_path / "result.json"
    told = ["--mib", "1", "--rounds", "2", "--peers", "memcpy,ckptfs"]
    monkeypatch.setattr(sys, "argv", ["bench", *told, "--dir", str(tmp_path), "--out", str(out)])
    assert async_stall.main() == 0
    result = json.loads(out.read_text())
    turns = result["measured"]["rounds"]
    assert {name: len(found) for name, found in turns.items()} == {"memcpy": 2, "ckptfs": 2}
    assert result["summary"]["size_bytes"] == 1 << 20
    assert "ckptfs / memcpy" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_ratio_belongs_to_one_round_and_to_the_better_of_the_others() -> None:
    """The medians of ratios, not the ratio of medians; of DCP's two ways the faster one counts."""
    stalls = {
        "memcpy": [1.0, 10.0, 2.0],
        "ckptfs": [1.0, 30.0, 4.0],
        "dcp thread": [4.0, 300.0, 8.0],
        "dcp process": [2.0, 600.0, 100.0],
    }
    turns = {n: [{"stall_s": s, "done_s": s} for s in all_] for n, all_ in stalls.items()}
    first = {name: {"stall_s": 9.0, "done_s": 9.0} for name in stalls}
    found = async_stall.summary({"first": first, "rounds": turns}, 1 << 30)
    assert found["of_copy"] == 2.0
    assert found["of_dcp"] == 0.5
    assert found["stall_s"]["ckptfs"] == {"median": 4.0, "min": 1.0, "max": 30.0}
