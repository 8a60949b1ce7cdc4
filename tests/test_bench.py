"""The benchmark on directories still runs; its goal is a median; results of before can be read."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import goals, readers, save_load
from benchmarks.old_results import read_any
from benchmarks.tables import joined, markdown
from ckptfs.bench.results import Result, Sample, read_result
from ckptfs.errors import ManifestError
from tests.bench.made import FILE, made_result

ROOT = Path(__file__).resolve().parents[1]
OLD = sorted((ROOT / "benchmarks" / "results").glob("*-2026-11-20.json"))


def test_the_benchmark_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiny sizes, a real rank for each part: every round is measured, checked, and written down."""
    out, checkpoints = tmp_path / "result.json", tmp_path / "checkpoints"
    checkpoints.mkdir()
    told = ["--ranks", "1", "--commit-ranks", "1", "--mib", "1", "--rounds", "1", "--commits", "2"]
    told += ["--timeout-s", "600", "--dir", str(checkpoints), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *told])
    assert save_load.main() == 0
    result = read_result(out)
    assert result.command == f"python -m benchmarks.save_load {' '.join(told)}"
    assert result.versions["torch"] != "none"
    assert [one.uri for one in result.targets] == ["directory"]
    moved, tiny = (one.name for one in result.workloads)
    counted = {
        (moved, engine, phase): 1
        for engine in ("ckptfs", "dcp")
        for phase in ("save", "load_warm", "load_cold")
    } | {(tiny, engine, "save"): 2 for engine in ("ckptfs", "dcp", save_load.HELD)}
    found = [(one.workload, one.engine, one.phase) for one in result.samples]
    assert {key: found.count(key) for key in found} == counted
    assert all(one.wall_s > 0 for one in result.samples)
    assert {one.size_bytes for one in result.samples if one.workload == tiny} == {1024}
    # Every rank's file, its digests, the small files and the entries of the log are made durable.
    (note,) = (note for note in result.notes if "storage operations" in note)
    (syncs,) = (part.split()[0] for part in note.split(": ")[-1].split(", ") if " sync" in part)
    assert int(syncs) >= 4
    shown = capsys.readouterr().out
    assert "ckptfs by dcp, seconds, save of 1 MiB a rank, 1 ranks at directory" in shown
    assert list(checkpoints.iterdir()) == []


def _result(ratios: list[float]) -> Result:
    """Two engines on a directory: dcp takes a second, ckptfs ``ratios`` of it."""
    rounds = [("ckptfs", number, ratio) for number, ratio in enumerate(ratios)]
    rounds += [("dcp", number, 1.0) for number in range(len(ratios))]
    return made_result(
        samples=tuple(
            Sample(engine, "llm", FILE, phase, number, wall_s, wall_s, 1)
            for phase in ("save", "load_warm", "load_cold")
            for engine, number, wall_s in rounds
        )
    )


def test_the_goal_is_a_median_of_rounds() -> None:
    """One slow round of three does not miss the goal, two do, and each operation counts."""
    good = _result([0.9, 1.0, 3.0])
    found = goals.goals_of(good, [save_load.GOAL])
    assert [goal.phase for goal in found] == ["save", "load_cold", "load_warm"]
    assert goals.holds(found)
    bad = _result([0.9, 1.1, 3.0])
    for phase in ("save", "load_warm", "load_cold"):
        mixed = [s for s in bad.samples if s.phase == phase]
        mixed += [s for s in good.samples if s.phase != phase]
        found = goals.goals_of(replace(good, samples=tuple(mixed)), [save_load.GOAL])
        assert [goal.phase for goal in found if not goal.is_met] == [phase]
        assert not goals.holds(found)


def test_a_ratio_belongs_to_one_round_and_to_the_best_of_the_others() -> None:
    """The median of ratios, not the ratio of medians; of several others the one with the best median
    counts in every round.
    """
    seconds = {
        "ckptfs": [1.0, 30.0, 4.0],
        "thread": [4.0, 300.0, 8.0],
        "process": [2.0, 600.0, 100.0],
    }
    result = made_result(
        samples=tuple(
            Sample(engine, "llm", FILE, "stall", number, wall_s, 0.0, 1)
            for engine, all_ in seconds.items()
            for number, wall_s in enumerate(all_)
        )
    )
    asked = [goals.Asked("ckptfs", ("thread", "process"), 0.5), goals.Asked("ckptfs", ("none",), 1)]
    (goal,) = goals.goals_of(result, asked)
    assert (goal.ratio, goal.is_met) == (0.25, True)
    told = [goals.Asked("ckptfs", ("process",), 0.01, counts=False)]
    assert goals.holds(goals.goals_of(result, told)), "what is told only decides nothing"
    assert goals.goals_of(result, told)[0].text().startswith("(told)")


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_results_of_before_can_be_read(path: Path) -> None:
    """Every file that was kept in the format of its script: its numbers, and a table of them."""
    result = read_any(path)
    assert result.date.startswith("2026-11-20")
    assert result.samples
    assert {one.workload for one in result.samples} == {one.name for one in result.workloads}
    assert "ckptfs" in markdown(result)


def test_numbers_of_before_are_what_they_were() -> None:
    """Against what the page of that time says of them: medians of radosgw and of the stall."""
    by_name = {path.stem.rpartition("-2026")[0]: read_any(path) for path in OLD}
    assert len(by_name) == len(OLD) == 4
    told = markdown(by_name["object_store-radosgw"])
    assert "| ckptfs (obstore) | 5 | 1.64 (1.40-2.93) | 0.327 | 1.15 |" in told
    assert "| FsspecWriter | 5 | 2.87 (2.69-3.79) | 0.187 | 2.68 |" in told
    moved = markdown(by_name["save_load"])
    assert "| ckptfs | 9 | 0.112 (0.0938-0.307) |" in moved
    assert "| dcp | 9 | 0.149 (0.132-0.196) |" in moved
    assert "| memcpy (limit) | 3 | 0.180 (0.107-0.209) |" in markdown(by_name["async_stall"])


def test_what_is_no_result_of_any_time_is_refused(tmp_path: Path) -> None:
    """Some other JSON is not taken for an old result."""
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ManifestError):
        read_any(tmp_path / "x.json")


def test_parts_of_a_result_are_joined_once() -> None:
    """What is in two parts is told once; samples and notes are all there; the note comes first."""
    one = made_result()
    both = joined([one, one], what="w", command="c", note="quiet")
    assert (both.workloads, both.targets, both.engines) == (one.workloads, one.targets, one.engines)
    assert len(both.samples) == 2 * len(one.samples)
    assert both.notes == ("quiet", *one.notes)


@pytest.mark.campaign
def test_readers_of_two_trees_are_put_beside_each_other() -> None:
    """Tiny files, this tree as both: each turn is a process of its own."""
    said: list[str] = []
    found = readers.measured(ROOT, 1, ("small", "leaves"), 0.001, said.append)
    assert [*found] == ["small", "leaves"]
    for case in found.values():
        assert len(case["old_cpu_s"]) == len(case["new_cpu_s"]) == 1
        assert case["least"] == case["ratio"] == case["largest"] > 0


def test_every_input_of_the_readers_is_made_and_read(tmp_path: Path) -> None:
    """Also those that the test above leaves out."""
    for case in readers.CASES:
        readers.write_input(case, tmp_path / case, 0.001)
        assert readers.turn(case, tmp_path / case) >= 0
