"""The benchmark over object stores still runs, and its goals are medians of rounds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import goals, servers
from benchmarks.floors import __main__ as floors
from benchmarks.floors.claims import CLAIMS, findings_of
from benchmarks.servers import asked_goals
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload, read_result
from tests.lab.server import Server

RADOSGW = "s3://ckptfs-lab/radosgw"


def test_the_benchmark_runs_from_end_to_end(
    sink: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tiny sizes against a sink of its own: every round is measured, compared, and written down."""
    out = tmp_path / "result.json"
    told = ["--servers", "sink", "--mib", "2", "--small-mib", "0", "--rounds", "1"]
    told += ["--engines", "ckptfs:obstore,dcp,raw", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *told])
    assert servers.main() == 0
    result = read_result(out)
    assert result.command == f"python -m benchmarks.servers {' '.join(told)}"
    assert [one.uri for one in result.targets] == ["s3://ckptfs-lab/sink"]
    found = {(one.workload[:3], one.engine, one.phase) for one in result.samples}
    engines, phases = ("ckptfs:obstore", "dcp", "raw"), ("save", "load_warm")
    assert found == {("llm", engine, phase) for engine in engines for phase in phases}
    assert len(result.samples) == len(found)
    assert all(one.wall_s > 0 and one.size_bytes >= 1 << 20 for one in result.samples)
    assert "ckptfs:obstore" in capsys.readouterr().out


@pytest.mark.campaign
@pytest.mark.parametrize("row", ["s3", "tls"])
def test_the_rows_of_the_floors_run(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over plain HTTP and over TLS with an authority of its own: every figure but of what is not installed."""
    told = [row, "--size", "1MB", "--pairs", "1", "--only", "ckptfs,dcp,raw"]
    monkeypatch.setattr(sys, "argv", ["floors", *told, "--out", str(tmp_path)])
    assert floors.main() == 0
    (path,) = tmp_path.iterdir()
    found = findings_of(row, read_result(path))
    known = {one.claim.told for one in found if one.found is not None}
    assert known == {"faster than FsspecWriter", "CPU s/GB", "of bare obstore"}
    assert len(found) == sum(claim.row == row for claim in CLAIMS)


def _result(ours: list[float], dcp: list[float], raw: list[float], cpu: float) -> Result:
    """Three engines on radosgw, the same seconds for save and load; ours takes ``cpu`` CPU seconds."""
    seconds = {"ckptfs:obstore": (ours, cpu), "dcp": (dcp, 2.0), "raw": (raw, 0.1)}
    return Result(
        what="x",
        date="2026-11-22",
        command="x",
        machine={},
        versions={},
        settings={},
        workloads=(Workload("llm", 1, 10**9),),
        targets=(Target(RADOSGW, "s3"),),
        engines=tuple(Engine(name, "", "", "", is_limit=name == "raw") for name in seconds),
        samples=tuple(
            Sample(name, "llm", RADOSGW, phase, number, wall, cpu_s, 10**9)
            for name, (rounds, cpu_s) in seconds.items()
            for phase in ("save", "load_warm")
            for number, wall in enumerate(rounds)
        ),
    )


def _holds(result: Result) -> bool:
    return goals.holds(goals.goals_of(result, asked_goals()))


def test_a_goal_is_met_by_the_median_round() -> None:
    """One slow round of three misses no goal, two do; CPU and bare obstore count too."""
    dcp, raw = [3.3, 3.3, 3.3], [0.95, 0.95, 0.95]
    assert _holds(_result([1.0, 1.05, 3.0], dcp, raw, 1.0))
    assert not _holds(_result([1.0, 2.0, 3.0], dcp, raw, 1.0))
    assert not _holds(_result([1.0, 1.0, 1.0], dcp, raw, 1.1))
    assert not _holds(_result([1.0, 1.0, 1.0], dcp, [0.8, 0.8, 0.8], 1.0))


def test_other_places_decide_nothing() -> None:
    """Goals are about radosgw; what another server shows is a table without them."""
    result = _result([9.0], [1.0], [1.0], 9.0)
    moved = "s3://ckptfs-lab/sink"
    samples = tuple(replace(one, target=moved) for one in result.samples)
    assert len(goals.goals_of(result, asked_goals())) == 6
    assert goals.goals_of(replace(result, samples=samples), asked_goals()) == []
