"""The benchmark still runs, and its report says what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = ("save", "load_hot", "load_cold")


@pytest.mark.timeout(200)
def test_the_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    """Tiny sizes, two real ranks: every pair is measured, checked for equality, and written down."""
    out, checkpoints = tmp_path / "result.json", tmp_path / "checkpoints"
    checkpoints.mkdir()
    command = [sys.executable, "-m", "benchmarks.save_load", "--ranks", "2", "--commit-ranks", "2"]
    command += ["--mib", "1", "--pairs", "2", "--commits", "2", "--timeout-s", "120"]
    command += ["--dir", str(checkpoints), "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads(out.read_text())
    assert {"date", "command", "machine", "load_average", "note"} <= result.keys()
    assert result["machine"]["versions"]["torch"] != "none"
    (compared,) = result["compare"]
    assert (compared["ranks"], compared["bytes_per_rank"]) == (2, 1 << 20)
    for operation in OPERATIONS:
        pairs = compared[operation]["pairs"]
        assert [pair["first"] for pair in pairs] == ["stock", "ckptfs"]
        assert all(pair["stock_s"] > 0 and pair["ckptfs_s"] > 0 for pair in pairs)
    (commits,) = result["commits"]
    assert commits["saves"] == 2
    # Every rank's file, its digests, the small files and the entries of the log are made durable.
    assert commits["operations_in_run"]["sync"] >= 4
    assert "save " in done.stdout
    assert list(checkpoints.iterdir()) == []


def _job(ratios: dict[str, list[float]]) -> dict[str, Any]:
    pairs = {
        operation: [
            {"stock_s": 1.0, "ckptfs_s": r, "stock_cpu_s": 1.0, "ckptfs_cpu_s": r, "ratio": r}
            for r in ratios[operation]
        ]
        for operation in OPERATIONS
    }
    return {"ranks": 1, "bytes_per_rank": 1, "compare": pairs}


def test_the_goal_is_a_median_of_pairs() -> None:
    """One slow pair of three does not miss the goal, two do, and each operation counts."""
    good = {operation: [0.9, 1.0, 3.0] for operation in OPERATIONS}
    assert report.holds({"compare": [report.summary(_job(good))]}, goal=1.05)
    for operation in OPERATIONS:
        bad = good | {operation: [0.9, 1.1, 3.0]}
        assert not report.holds({"compare": [report.summary(_job(bad))]}, goal=1.05)


def test_spread_is_median_least_and_largest() -> None:
    """What stands in the result file is not a mean."""
    assert report.spread([5.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 5.0}
