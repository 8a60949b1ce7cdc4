"""Rows of the floors over object stores still run, and their claims are medians of rounds."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from benchmarks.floors import __main__ as floors
from benchmarks.floors.claims import CLAIMS, Finding, Verdict, findings_of
from benchmarks.floors.rows import UNSIGNED
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload, read_result
from tests.lab.server import merged
from tests.storage.s3_scripted import BUCKET, Scripted, open_s3, options_for

RADOSGW = "s3://ckptfs-lab/radosgw"


def _run(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, list[Finding]]:
    told = [row, "--size", "1MB", "--pairs", "1", "--only", "ckptfs,dcp,raw"]
    monkeypatch.setattr(sys, "argv", ["floors", *told, "--out", str(tmp_path)])
    assert floors.main() == 0
    (path,) = tmp_path.iterdir()
    return read_result(path), findings_of(row, read_result(path))


@pytest.mark.parametrize(
    "row",
    ["s3", *(pytest.param(row, marks=pytest.mark.campaign) for row in ("s3-unsigned", "tls"))],
)
def test_the_rows_of_the_sink_run(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over plain HTTP and over TLS with an authority of its own: every figure but of what is not installed."""
    result, found = _run(row, tmp_path, monkeypatch)
    known = {one.claim.told for one in found if one.found is not None}
    assert known == {"faster than FsspecWriter", "CPU s/GB", "of bare obstore"}
    assert len(found) == sum(claim.row == row for claim in CLAIMS)
    assert [one.uri for one in result.targets] == [f"s3://ckptfs-lab/sink{'-tls' * (row == 'tls')}"]
    assert all(one.wall_s > 0 and one.size_bytes > 500_000 for one in result.samples)


@pytest.mark.parametrize(
    ("options", "is_hashed"), [({}, True), (UNSIGNED, False)], ids=["s3", "s3-unsigned"]
)
def test_the_row_without_hashes_is_what_it_says(
    options: Mapping[str, Any], is_hashed: bool
) -> None:
    """With its options neither ckptfs nor s3fs hashes a body for its signature; without them both do."""
    size_bytes = 6 << 20  # more than a part
    with Scripted() as server:
        told = merged(options_for(server), options)
        upload = open_s3(server, **told).begin_upload("run/u", part_bytes=size_bytes)
        upload.put_part(0, bytes(size_bytes))
        upload.complete()
        stock = fsspec.filesystem("s3", **told, skip_instance_cache=True)
        stock.pipe_file(f"{BUCKET}/k", bytes(size_bytes))
        bodies = [one for one in server.requests if len(one.body) >= size_bytes]
    assert len(bodies) == 2
    for one in bodies:
        digest = hashlib.sha256(one.body).hexdigest()
        wanted = digest if is_hashed else "UNSIGNED-PAYLOAD"
        assert one.headers["x-amz-content-sha256"] == wanted, one.headers


@pytest.mark.campaign
@pytest.mark.parametrize("row", ["radosgw", "moto"])
def test_the_rows_of_servers_that_check_run(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two states; on radosgw the one of large tensors is held against three claims."""
    result, found = _run(row, tmp_path, monkeypatch)
    assert {one.name.partition(" ")[0] for one in result.workloads} == {"llm", "many"}
    held = [one for one in found if one.verdict is not None]
    assert len(held) == (6 if row == "radosgw" else 0)
    assert all(one.found is not None for one in found)


def _result(
    ours: list[float], dcp: list[float], raw: list[float], cpu: float, workload: str = "llm"
) -> Result:
    """Three engines on radosgw, the same seconds for save and load; ours takes ``cpu`` CPU seconds."""
    seconds = {"ckptfs:obstore": (ours, cpu), "dcp": (dcp, 2.0), "raw": (raw, 0.1)}
    return Result(
        what="x",
        date="2026-11-22",
        command="x",
        machine={},
        versions={},
        settings={},
        workloads=(Workload("llm", 1, 10**9), Workload("many", 1, 10**6)),
        targets=(Target(RADOSGW, "s3"),),
        engines=tuple(Engine(name, "", "", "", is_limit=name == "raw") for name in seconds),
        samples=tuple(
            Sample(name, workload, RADOSGW, phase, number, wall, cpu_s, 10**9)
            for name, (rounds, cpu_s) in seconds.items()
            for phase in ("save", "load_warm")
            for number, wall in enumerate(rounds)
        ),
    )


def _holds(result: Result) -> bool:
    found = findings_of("radosgw", result)
    assert len(found) == 6
    return all(one.verdict is Verdict.GOAL for one in found)


def test_a_goal_is_met_by_the_median_round() -> None:
    """One slow round of three misses no goal, two do; CPU and bare obstore count too."""
    dcp, raw = [3.3, 3.3, 3.3], [0.95, 0.95, 0.95]
    assert _holds(_result([1.0, 1.05, 3.0], dcp, raw, 1.0))
    assert not _holds(_result([1.0, 2.0, 3.0], dcp, raw, 1.0))
    assert not _holds(_result([1.0, 1.0, 1.0], dcp, raw, 1.1))
    assert not _holds(_result([1.0, 1.0, 1.0], dcp, [0.8, 0.8, 0.8], 1.0))


def test_small_tensors_and_other_servers_decide_nothing() -> None:
    """What is claimed is of large tensors on radosgw; however slow the rest is, no verdict is made of it."""
    slow = ([9.0], [1.0], [1.0], 9.0)
    assert len([one for one in findings_of("radosgw", _result(*slow)) if one.verdict]) == 6
    assert findings_of("radosgw", _result(*slow, workload="many")) == []
    told = findings_of("moto", _result(*slow))
    assert [one.verdict for one in told] == [None, None]
