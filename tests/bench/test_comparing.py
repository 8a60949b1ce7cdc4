"""Two results side by side: what keeps them from being comparable comes first, then the verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptfs.bench.analysis import Compared, Verdict, compare_results, rows_of, slowdowns_of
from ckptfs.bench.results import Result, Sample, Target
from tests.bench.made import FILE, S3, made_result

Change = Callable[[Sample], Sample]


def _changed(change: Change, **fields: Any) -> Result:
    result = made_result(**fields)
    return replace(result, samples=tuple(change(one) for one in result.samples))


def _times(factor: float, engine: str = "ckptfs", phase: str = "save") -> Change:
    return lambda one: (
        replace(one, wall_s=one.wall_s * factor)
        if (one.engine, one.phase) == (engine, phase)
        else one
    )


def _told(found: Compared) -> list[tuple[str, bool]]:
    return [(one.what, one.prevents) for one in found.differences]


def test_a_result_beside_itself() -> None:
    """Nothing differs, nothing is missing, and no engine is faster or slower."""
    found = compare_results(made_result(), made_result())
    assert (found.differences, found.missing, found.slower) == ((), (), ())
    assert len(found.rows) == 66
    assert {row.found.verdict for row in found.rows} <= {Verdict.SAME, Verdict.SPREAD_TOO_WIDE}


def test_what_became_slower_is_found_and_nothing_else() -> None:
    """Half as fast on saves, in every workload and target; the others are as they were."""
    found = compare_results(made_result(), _changed(_times(2.0)))
    assert {(row.engine, row.phase) for row in found.slower} == {("ckptfs", "save")}
    assert {(row.workload, row.target) for row in found.slower} == {
        (workload, target) for workload in ("llm", "small") for target in (FILE, S3)
    }
    assert not [row for row in found.rows if row.found.verdict is Verdict.FASTER]
    faster = compare_results(_changed(_times(2.0)), made_result())
    assert faster.slower == ()
    assert len([row for row in faster.rows if row.found.verdict is Verdict.FASTER]) == 4


def test_a_limit_that_moved_is_the_machine() -> None:
    """Slower raw storage fails nothing; it says that the runs are not comparable."""
    found = compare_results(made_result(), _changed(_times(2.0, "raw")))
    assert found.slower == ()
    assert len(found.differences) == 4
    for one in found.differences:
        assert one.prevents
        assert one.what.startswith("the limit itself, raw, save of ")
        assert one.after.endswith(", slower")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("machine", {"cpu": "Another"}, ("machine: cpu", True)),
        ("machine", {"cores": 4}, ("machine: cores", True)),
        ("machine", {"memory_gib": 47.0}, ("machine: memory gib", True)),
        ("machine", {"memory_gib": 23.4}, None),
        ("machine", {"filesystem": "xfs"}, ("machine: filesystem", True)),
        ("machine", {"system": "Linux 7.0 x86_64"}, ("machine: system", False)),
        ("machine", {"fsync_ms": 0.3}, None),
        ("machine", {"fsync_ms": 3.0}, ("machine: fsync ms", False)),
        ("machine", {"load_average": {}}, None),
        ("settings", {"ranks": 8}, ("setting ranks", True)),
        ("settings", {"durable": False}, ("setting durable", True)),
        ("settings", {"rounds": 9}, ("setting rounds", False)),
        ("settings", {"new": 1}, ("setting new", True)),
        ("versions", {"torch": "2.14.0"}, ("version of torch", False)),
    ],
)
def test_what_runs_do_not_share(
    field: str, value: dict[str, Any], told: tuple[str, bool] | None
) -> None:
    """Each field is weighed: another machine or setting prevents, versions and noise are reported."""
    base = made_result()
    found = compare_results(base, made_result(**{field: {**getattr(base, field), **value}}))
    assert _told(found) == ([told] if told else [])


def test_what_prevents_comes_first() -> None:
    """Whatever the order in which differences are found."""
    base = made_result()
    engines = tuple(replace(one, verified="nothing", version="9") for one in base.engines[:1])
    other = replace(
        base,
        versions={},
        machine={**base.machine, "system": "x", "cpu": "y"},
        engines=(*engines, *base.engines[1:]),
    )
    told = [prevents for _, prevents in _told(compare_results(base, other))]
    assert told == sorted(told, reverse=True)
    assert told.count(True) == 2
    assert ("ckptfs: verified on load", True) in _told(compare_results(base, other))


def test_a_target_that_moved_is_compared_and_said() -> None:
    """One place of each is taken for the same; with two that could be meant nothing is guessed."""
    base = made_result()
    moved = replace(
        base,
        targets=(Target("file:///elsewhere", "ext4"), base.targets[1]),
        samples=tuple(
            replace(one, target="file:///elsewhere") if one.target == FILE else one
            for one in base.samples
        ),
    )
    found = compare_results(base, moved)
    assert _told(found) == [("target", True)]
    assert (found.missing, len(found.rows)) == ((), 66)
    away = replace(
        moved,
        targets=(moved.targets[0], Target("s3://other/b", "s3")),
        samples=tuple(
            replace(s, target="s3://other/b") if s.target == S3 else s for s in moved.samples
        ),
    )
    assert compare_results(base, away).rows == ()


def test_nothing_is_dropped_in_silence() -> None:
    """What one run lacks, or moved other sizes of, is named and not compared."""
    base = made_result()
    other = replace(
        base,
        samples=tuple(
            replace(one, size_bytes=7) if one.workload == "small" and one.phase == "save" else one
            for one in base.samples
            if one.engine != "torch.save"
        ),
    )
    found = compare_results(base, other)
    assert len([line for line in found.missing if line.startswith("only before: torch.save")]) == 12
    assert len([line for line in found.missing if line.startswith("of another size")]) == 8
    assert len(found.rows) == 66 - 12 - 8
    assert compare_results(other, base).missing[0].startswith("only after: torch.save")


def test_filters() -> None:
    """Globs of engines, workloads or targets, and phases; what fits nothing leaves nothing."""
    base = made_result()

    def left(**asked: Any) -> int:
        return len(compare_results(base, base, **asked).rows)

    assert left(only=["ckptfs"]) == 15
    assert left(only=["dcp*", "raw"]) == 27
    assert left(only=["s3://*"], phases=["save"]) == 10
    assert left(only=["small"]) == 30
    assert left(phases=["stall"]) == 2
    assert left(only=["nobody"]) == 0


def test_a_clock_that_saw_nothing_has_no_ratio() -> None:
    """A sample of zero seconds breaks neither the comparison nor the table; it is named."""
    base = made_result()
    other = replace(base, samples=tuple(replace(s, wall_s=0.0) for s in base.samples))
    assert compare_results(base, other).rows == ()
    assert {row.to_limit for row in rows_of(other)} == {None}
    assert len(compare_results(base, other).missing) == 66
    assert compare_results(base, other).missing[0].startswith("no time measured after: ckptfs, ")


@pytest.mark.parametrize("nothing", [0.0, math.nan, math.inf])
def test_what_has_no_ratio_is_named(nothing: float) -> None:
    """A group without a single time, on one side or both, is no row, and does not vanish either."""
    base = made_result()
    untimed = _changed(lambda s: replace(s, wall_s=nothing) if _is_stall_of_ours(s) else s)
    for before, after, runs in (
        (untimed, untimed, "before and after"),
        (untimed, base, "before"),
        (base, untimed, "after"),
    ):
        found = compare_results(before, after)
        assert found.missing == (f"no time measured {runs}: ckptfs, stall of llm at {FILE}",)
        assert len(found.rows) == 65


def _is_stall_of_ours(one: Sample) -> bool:
    return (one.engine, one.phase) == ("ckptfs", "stall")


def test_rows_are_paired_by_round() -> None:
    """A slow round counts for both sides; a round that one side lacks counts for none."""
    base = made_result()
    slow = tuple(
        replace(one, wall_s=one.wall_s * 10) if one.round == 1 else one for one in base.samples
    )
    for row, slowed in zip(rows_of(base), rows_of(replace(base, samples=slow)), strict=True):
        assert (row.limit, row.to_limit is None) == (slowed.limit, slowed.to_limit is None)
        if row.to_limit is not None and slowed.to_limit is not None:
            assert slowed.to_limit.ratio == pytest.approx(row.to_limit.ratio)
            assert slowed.to_limit.high == pytest.approx(row.to_limit.high)
    less = tuple(one for one in base.samples if one.engine != "raw" or one.round != 2)
    row = rows_of(replace(base, samples=less))[0]
    assert row.to_limit is not None
    assert (row.engine, row.limit, row.to_limit.rounds) == ("ckptfs", "raw", 4)
    assert row.seconds.count == 5


def test_the_fastest_limit_is_the_limit() -> None:
    """Of two limits every engine is compared with the one that took less time; limits have none."""
    base = made_result()
    slow = [
        replace(one, engine="raw slow", wall_s=3 * one.wall_s)
        for one in base.samples
        if one.engine == "raw"
    ]
    engines = (*base.engines, replace(base.engines[-1], name="raw slow"))
    rows = rows_of(replace(base, engines=engines, samples=(*slow, *base.samples)))
    moved = [row for row in rows if row.phase == "save"]
    assert {row.limit for row in moved if not row.is_limit} == {"raw"}
    assert [row.engine for row in moved if row.is_limit] == ["raw", "raw slow"] * 4
    assert {row.to_limit for row in moved if row.is_limit} == {None}


def test_the_loop_alone_serves_every_engine() -> None:
    """Where it was measured once for all; an engine's own is taken where there is one."""
    base = made_result()
    ours, stock = slowdowns_of(base)
    assert (ours.engine, ours.alone.median) == ("ckptfs", 10.0)
    assert ours.ratio is not None
    assert ours.ratio.ratio == pytest.approx(1.04, abs=0.01)
    once = tuple(s for s in base.samples if s.phase != "steps" or s.engine == "ckptfs")
    assert slowdowns_of(replace(base, samples=once)) == (ours, stock)
