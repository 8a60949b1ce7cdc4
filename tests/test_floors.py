"""The table of floors: rows still run (one here, all in make campaign-bench), and a figure is judged as
its page says.
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import ckptfs
from benchmarks import children, coordinator, fixed, history, planner, readers, stall
from benchmarks.floors import __main__ as floors
from benchmarks.floors.claims import (
    CLAIMS,
    Claim,
    Finding,
    Found,
    Sense,
    Verdict,
    cpu_per_gb,
    findings_of,
    markdown,
    others_by_ours,
    ours_by_others,
    peak_memory,
)
from benchmarks.floors.rows import NO_WARM_UP, ROWS
from benchmarks.tables import joined, placed
from ckptfs.bench.results import Sample, read_result
from tests.bench.made import FILE, made_result
from tests.scale.simulation import Sizes

TINY = [
    "--size",
    "1MB",
    "--small",
    "20",
    "--pairs",
    "1",
    "--worlds",
    "2",
    "--tensors",
    "3",
    "--ranks",
    "2",
    "--saves",
    "10",
]
ROOT = Path(__file__).resolve().parents[1]


def _run(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[Finding]:
    """A row with tiny sizes, as the command runs it; what was found, read from its file again."""
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    told = [row, *TINY, "--dir", str(work), "--memory", str(work), "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", ["floors", *told])
    turns = _turns_counted(monkeypatch)
    assert floors.main() == 0
    assert list(work.iterdir()) == [], "nothing may be left"
    (path,) = out.iterdir()
    result = read_result(path)
    assert result.command == floors.command_of(told)
    assert str(tmp_path) not in path.read_text()
    assert result.machine["load_average"]["before"]
    assert {one.round for one in result.samples} <= {0, 1}
    # Of one round: twice as many turns as samples are a round that warms up and one that counts.
    warm_ups = result.settings.get("warm_up_rounds", len(turns) / len(result.samples) - 1)
    assert warm_ups == (row not in NO_WARM_UP)
    return findings_of(row, result)


def _turns_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One name for each turn in rows that the bench of ckptfs does not measure, as they are taken."""
    turns: list[str] = []

    def counted(owner: object, name: str, of: Callable[[Any], int] = lambda _: 1) -> None:
        take = getattr(owner, name)

        def taken(*args: Any, **more: Any) -> Any:
            found = take(*args, **more)
            turns.extend([name] * of(found))
            return found

        monkeypatch.setattr(owner, name, taken)

    counted(children, "ask")
    counted(stall.Bench, "_turn")
    counted(history, "_save")
    counted(history, "_latest")
    # All ranks of a job say what each turn took.
    counted(
        fixed,
        "_job",
        lambda found: sum(len(one) for by in found["turns"].values() for one in by.values()),
    )
    return turns


@pytest.mark.parametrize(
    "row",
    [
        "small",
        *(
            pytest.param(row, marks=pytest.mark.campaign)
            for row in (
                "shapes",
                "durable",
                "tmpfs",
                "hot",
                "cold",
                "memory",
                "stall",
                "first",
                "latency",
                "fixed",
                "copy",
                "history",
                "catalog",
            )
        ),
    ],
)
def test_a_row_runs_from_end_to_end(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real saves and loads of next to nothing: each claim of the row gets a value, and its line."""
    found = _run(row, tmp_path, monkeypatch, "--markdown", str(tmp_path / "page" / "table.md"))
    assert len(found) >= sum(claim.row == row for claim in CLAIMS) > 0
    assert all(one.found is not None for one in found)
    page = (tmp_path / "page" / "table.md").read_text()
    assert page.count(f"\n| {row} |") == len(found)
    assert "every measurement: " in capsys.readouterr().out


@pytest.mark.campaign
def test_four_ranks_take_turns_with_their_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded over four processes; all figures are reported, and nothing is claimed of them."""
    found = _run("ranks4", tmp_path, monkeypatch)
    told = ["faster than DCP's best", "CPU s/GB"]
    assert [one.claim.told for one in found] == [*told, *told]
    assert all(one.found is not None for one in found)
    assert all("ranks: 4" in one.where for one in found)
    assert {one.verdict for one in found} == {None}


@pytest.mark.campaign
def test_two_ranks_take_turns_with_their_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded over two processes; that nothing is slower than DCP's is claimed, the rest is reported."""
    found = _run("ranks2", tmp_path, monkeypatch)
    told = ["faster than DCP's best", "CPU s/GB", "DCP's time"]
    assert [one.claim.told for one in found] == [*told, *told, "DCP's time"]
    assert all(one.found is not None for one in found)
    assert {one.claim.told for one in found if one.verdict is not None} == {"DCP's time"}


@pytest.mark.campaign
def test_the_row_of_the_planner_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides in processes of their own; a world of another size than the floor's is only reported, with
    the coordinator's CPU seconds and memory.
    """
    found = _run("planner", tmp_path, monkeypatch, "--worlds", "2,3")
    told = ["less than DCP", "coordinator's CPU s", "its process, MB"]
    assert sorted(one.claim.told for one in found) == sorted(told * 2)
    assert {one.where.partition(" ")[0] for one in found} == {"2", "3"}
    assert all(one.found is not None and one.found.value > 0 for one in found)
    assert all(one.verdict is None for one in found)


def test_both_coordinators_do_the_work_of_a_whole_save() -> None:
    """Each ends with a .metadata that stock pickle reads, of the same tensors and chunks."""
    made: dict[str, Metadata] = {}
    for name, play in (("ckptfs", coordinator.ours), ("dcp", coordinator.stock)):
        watch = coordinator.Watch()
        data = play(Sizes(5, tensors=3), watch)
        assert list(watch.parts_s) == ["plan the save", "write"]
        assert min(watch.parts_s.values()) > 0
        made[name] = pickle.loads(data)
    shapes = [
        {
            key: (one.size, len(one.chunks))
            for key, one in both.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }
        for both in made.values()
    ]
    assert len(shapes[0]) == 3 + 1
    assert shapes[0] == shapes[1]
    assert len(made["ckptfs"].storage_data) == len(made["dcp"].storage_data) == 5 * 3 + 1


def test_stock_is_not_run_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world beyond a bound is measured for ckptfs alone, and the result says so."""
    monkeypatch.setattr(planner, "MOST_STOCK_ITEMS", 5)
    result = planner.measured([2], 3, 1)
    assert [one.engine for one in result.samples] == ["ckptfs"]
    assert "stock DCP was not run" in result.notes[0]


def test_a_turn_in_an_old_run_is_the_median_of_its_saves() -> None:
    """Of an even number the mean of the middle two, as in every other row; clock and CPU each by itself."""
    walls, cpus = (5.0, 1.0, 8.0, 2.0), (0.25, 0.5, 0.125, 0.75)
    calls = [history.Spent(*one) for one in zip(walls, cpus, strict=True)]
    assert history.median_of(calls) == history.Spent(3.5, 0.375)


def _samples(engine: str, seconds: list[float], **more: float) -> list[Sample]:
    cpu_s, peak = more.get("cpu_s", 0.1), more.get("peak")
    return [
        Sample(
            engine, "llm", FILE, "save", n, wall_s, cpu_s, 10**9,
            peak_memory_bytes=None if peak is None else int(peak * (n + 1)),
        )
        for n, wall_s in enumerate(seconds)
    ]  # fmt: skip


def test_a_ratio_is_a_median_over_rounds_against_the_peer_that_is_best_over_all() -> None:
    """A peer that is fastest in one round alone is not the best; a round's ratio is its own."""
    engines = {
        "ckptfs": _samples("ckptfs", [1.0, 2.0, 10.0]),
        "steady": _samples("steady", [2.0, 4.0, 25.0]),
        "lucky": _samples("lucky", [9.0, 0.1, 90.0]),
    }
    assert others_by_ours("steady", "lucky")(engines) == Found(2.0, 2.0, 2.5, "steady")
    beside = ours_by_others("steady")(engines)
    assert beside is not None
    assert (beside.value, beside.least, beside.most) == (0.5, 0.4, 0.5)
    assert others_by_ours("nobody")(engines) is None
    assert others_by_ours("steady")({"steady": engines["steady"]}) is None


def test_a_client_that_was_asked_for_counts_as_ckptfs() -> None:
    """``ckptfs:obstore`` is ckptfs; CPU is a median, memory the most of any round."""
    engines = {"ckptfs:obstore": _samples("ckptfs:obstore", [1.0] * 3, cpu_s=0.2, peak=2e6)}
    cpu, memory = cpu_per_gb()(engines), peak_memory()(engines)
    assert cpu is not None
    assert memory is not None
    assert (cpu.value, memory.value, memory.least) == (0.2, 6.0, 2.0)


@pytest.mark.parametrize(
    ("sense", "value", "verdict"),
    [
        (Sense.AT_LEAST, 0.9, Verdict.GOAL),
        (Sense.AT_LEAST, 0.85, Verdict.FLOOR),
        (Sense.AT_LEAST, 0.7, Verdict.MISSED),
        (Sense.AT_LEAST, None, Verdict.UNKNOWN),
    ],
)
def test_a_value_is_held_against_floor_and_goal(
    sense: Sense, value: float | None, verdict: Verdict
) -> None:
    """On the floor is good enough; what was not measured is not met."""
    claim = Claim("durable", "x", "save", cpu_per_gb(), sense, 0.8, 0.9)
    found = None if value is None else Found(value, value, value)
    assert Finding(claim, "here", found).verdict is verdict


def test_at_most_turns_both_bounds_round() -> None:
    """What is to be small is good where it is smaller."""
    claim = Claim("durable", "x", "save", cpu_per_gb(), Sense.AT_MOST, 0.2, 0.12)
    verdicts = [Finding(claim, "", Found(v, v, v)).verdict for v in (0.1, 0.2, 0.21)]
    assert verdicts == [Verdict.GOAL, Verdict.FLOOR, Verdict.MISSED]


def test_a_floor_without_a_goal_is_a_floor() -> None:
    """It is met or missed all the same: the row ``shapes`` has no goal."""
    claim = Claim("shapes", "x", "save", cpu_per_gb(), Sense.AT_LEAST, 4.0, None)
    verdicts = [
        Finding(claim, "", found).verdict for found in (Found(5, 5, 5), Found(3, 3, 3), None)
    ]
    assert verdicts == [Verdict.FLOOR, Verdict.MISSED, Verdict.UNKNOWN]


def test_the_floors_are_those_that_were_set() -> None:
    """Every claim that has bounds, in order: a floor is changed here and there at once, or not at all."""
    held = [
        (one.row, one.told, one.phase, one.floor, one.goal)
        for one in CLAIMS
        if one.floor is not None
    ]
    both = ("save", "load_warm")
    assert held == [
        ("durable", "of raw O_DIRECT", "save", 0.80, 0.90),
        ("durable", "CPU s/GB", "save", 0.20, 0.12),
        ("durable", "faster than the best peer", "save", 1.3, 1.5),
        ("tmpfs", "faster than DCP's best", "save", 1.0, 1.3),
        ("hot", "of raw preadv", "load_warm", 0.75, 0.85),
        ("hot", "faster than DCP", "load_warm", 4.0, 6.0),
        ("cold", "of raw, the better way", "load_cold", 0.85, 0.95),
        *(
            line
            for phase in both
            for line in (
                ("small", "safetensors' time", phase, 1.5, 1.0),
                ("small", "faster than DCP", phase, 5.0, 8.0),
                ("shapes", "faster than DCP", phase, 4.0, None),
            )
        ),
        ("stall", "a bare copy's time", "stall", 1.3, 1.1),
        ("stall", "less than DCP's best", "stall", 2.5, 5.0),
        ("first", "a synchronous save's time", "stall", 1.1, 1.0),
        ("copy", "cp -r's time, a copy", "save", 1.5, 1.5),
        ("copy", "cp -r's time, an export", "save", 2.0, 2.0),
        *(
            line
            for phase in both
            for line in (
                ("memory", "MB beyond the state", phase, 128.0, 64.0),
                ("ranks2", "DCP's time", phase, 1.05, 1.05),
            )
        ),
        ("ranks2", "DCP's time", "load_cold", 1.05, 1.05),
        ("planner", "less than DCP", "save", 5.0, 10.0),
        ("history", "CPU, an old run by a new one", "save", 1.3, 1.3),
        ("catalog", "CPU, many saves by few", "load_warm", 2.0, 2.0),
        ("readers", "CPU, this tree by the other", "load_warm", 1.05, 1.05),
        *(
            line
            for phase in both
            for line in (
                *(
                    line
                    for row in ("s3", "s3-unsigned")
                    for line in (
                        (row, "faster than s3torchconnector", phase, 3.0, 5.0),
                        (row, "faster than FsspecWriter", phase, 8.0, 14.0),
                        (row, "CPU s/GB", phase, 0.35, 0.25),
                    )
                ),
                ("radosgw", "FsspecWriter's time", phase, 1 / 3, 1 / 3),
                ("radosgw", "FsspecWriter's CPU", phase, 0.5, 0.5),
                ("radosgw", "bare obstore's time", phase, 1.15, 1.15),
            )
        ),
    ]
    assert {one.row for one in CLAIMS} == set(ROWS)


def test_results_of_before_are_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--read`` measures nothing; ``--check`` fails where a floor is missed."""
    from ckptfs.bench.results import write_result

    samples = (*_samples("ckptfs", [1.0] * 5), *_samples("raw:direct", [0.5] * 5))
    path = tmp_path / "floors-durable-2026-11-22.json"
    write_result(path, made_result(samples=samples))
    monkeypatch.setattr(sys, "argv", ["floors", "--read", str(path), "--check"])
    assert floors.main() == 1
    told = capsys.readouterr().out
    assert "0.500" in told
    assert "MISSED" in told
    assert "not measured" in told
    assert "| MISSED |" in markdown(findings_of("durable", read_result(path)))


def test_a_turn_imports_the_tree_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is found on the way: this tree is installed, and named in PYTHONPATH."""
    (tmp_path / "ckptfs").mkdir()
    (tmp_path / "ckptfs" / "__init__.py").write_text("")
    script = tmp_path / "elsewhere" / "turn.py"
    script.parent.mkdir()
    script.write_text("import ckptfs, json, sys; print(json.dumps([ckptfs.__file__, sys.argv[1]]))")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = str(tmp_path / "ckptfs" / "__init__.py")
    assert children.ask("a turn", script, 7, tree=tmp_path) == [made, "7"]
    assert children.ask("a turn", script, 7) == [ckptfs.__file__, "7"]


def test_a_turn_that_fails_is_no_result() -> None:
    """What it printed to stderr is raised, under its name."""
    with pytest.raises(RuntimeError, match=r"(?s)^the turn failed:\n.*no such engine\n$"):
        children.ask("the turn", "-c", "import sys; sys.exit('no such engine')")


def test_rows_in_which_no_round_warms_up_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--help`` promises no more than they do; the page says why."""
    monkeypatch.setattr(sys, "argv", ["floors", "--help"])
    with pytest.raises(SystemExit):
        floors.main()
    told = " ".join(capsys.readouterr().out.split())
    names = "memory, first, planner, copy, history, readers and catalog"
    assert f"rounds that count; one more comes first, but not in {names}" in told
    page = (ROOT / "benchmarks" / "README.md").read_text()
    (why,) = (part for part in page.split("\n\n") if part.startswith("`--pairs` "))
    assert {name for name in ROWS if f"`{name}`" in why} == {*NO_WARM_UP}


@pytest.mark.campaign
def test_readers_of_two_trees_are_put_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny files, this tree as both: each turn is a process of its own, and all of them count."""
    turns = _turns_counted(monkeypatch)
    result = readers.measured(ROOT, 1, 0.001, ("small", "leaves"))
    assert len(turns) == len(result.samples)
    counted = [(one.workload, one.engine) for one in result.samples]
    assert sorted(counted) == sorted(
        (case, tree) for case in ("small", "leaves") for tree in (readers.OLD, readers.NEW)
    )
    assert all(one.found is not None for one in findings_of("readers", result))


def test_every_input_of_the_readers_is_made_and_read(tmp_path: Path) -> None:
    """Also those that the test above leaves out."""
    for case in readers.CASES:
        readers.write_input(case, tmp_path / case, 0.001)
        assert readers.turn(case, tmp_path / case) >= 0


def test_a_recorded_command_names_no_path_of_the_machine() -> None:
    """Results are published; what was measured where is in the fields about the machine."""
    words = ["first", "--dir", "/scratch/me", "--memory=/mnt/tmp", "--size", "6GB"]
    assert floors.command_of(words) == (
        "python -m benchmarks.floors first --dir DIR --memory=DIR --size 6GB"
    )


def test_no_stored_result_names_a_path_of_the_machine() -> None:
    """Neither in its command nor anywhere else, drawings and profiles included."""
    stored = sorted((ROOT / "benchmarks" / "results").iterdir())
    assert len(stored) > 30
    named = re.compile(r"/(?:tmp|work|home|root|mnt|dev/shm)\b")
    found = {path.name: named.findall(path.read_text()) for path in stored}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_a_target_has_its_stable_name_in_notes_as_well() -> None:
    """Where a row was measured is of one machine and one day."""
    notes = (f"a limit was beaten at {FILE}: it is none there", "quiet")
    result = placed(made_result(notes=notes), "directory")
    assert [one.uri for one in result.targets] == ["directory"]
    assert {one.target for one in result.samples} == {"directory"}
    assert result.notes == ("a limit was beaten at directory: it is none there", "quiet")


def test_readers_need_another_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for without one the command says so; among all rows they are left out, and a line says that."""
    monkeypatch.setattr(sys, "argv", ["floors", "readers"])
    with pytest.raises(SystemExit) as ended:
        floors.main()
    assert ended.value.code == 2
    assert "--old TREE" in capsys.readouterr().err
    rows = floors._rows_of_all(argparse.Namespace(old=None))
    assert rows == [row for row in ROWS if row != "readers"]
    assert capsys.readouterr().err == "readers: left out, it needs --old TREE\n"
    assert floors._rows_of_all(argparse.Namespace(old=ROOT)) == [*ROWS]
    assert capsys.readouterr().err == ""


def test_stored_results_are_told_again() -> None:
    """Every file of a row in results/ gives each claim of its row a value, or says that it was not measured."""
    stored = sorted((ROOT / "benchmarks" / "results").glob("floors-*.json"))
    assert len(stored) > 15
    for path in stored:
        row = floors._row_of(path)
        assert row in ROWS
        assert findings_of(row, read_result(path)), path.name


def test_parts_of_a_result_are_joined_once() -> None:
    """What is in two parts is given once; samples and notes are all there; the note comes first."""
    one = made_result()
    both = joined([one, one], what="w", command="c", note="quiet")
    assert (both.workloads, both.targets, both.engines) == (one.workloads, one.targets, one.engines)
    assert len(both.samples) == 2 * len(one.samples)
    assert both.notes == ("quiet", *one.notes)
