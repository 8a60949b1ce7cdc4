"""pandas reads the result of a benchmark with the line that docs/howto/benchmark.md gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ckptfs.bench.analysis import rows_of
from ckptfs.bench.results import Sample, read_result

pytestmark = pytest.mark.integrations

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_samples_of_a_result_are_a_table() -> None:
    """A column for each field, numbers as numbers, and the medians that ckptfs says."""
    pandas = pytest.importorskip("pandas")
    path = RESULTS / "floors-copy-2026-11-28.json"
    with path.open() as file:
        frame = pandas.DataFrame(json.load(file)["samples"])
    result = read_result(path)
    assert list(frame.columns) == [field.name for field in dataclasses.fields(Sample)]
    assert len(frame) == len(result.samples)
    medians = frame.groupby(["workload", "engine"]).wall_s.median()
    for row in rows_of(result):
        assert medians[row.workload, row.engine] == pytest.approx(row.seconds.median)
