"""``bench report`` and ``bench compare`` on results that somebody measured elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfs.bench.results import Result, Sample, write_result
from ckptfs.cli.output import Exit
from tests.bench.made import FILE, made_result
from tests.cli.conftest import Cli, Golden, Place

Write = Callable[..., str]


@pytest.fixture
def write(local: Place) -> Write:
    """Puts a small result into a file: saves and stalls of one workload on one target."""

    def put(name: str, change: Callable[[Sample], Sample] = lambda one: one, **fields: Any) -> str:
        base = made_result(**fields)
        kept = [s for s in base.samples if (s.workload, s.target) == ("llm", FILE)]
        small: Result = replace(
            base,
            workloads=base.workloads[:1],
            targets=base.targets[:1],
            samples=tuple(change(s) for s in kept if s.phase in {"save", "stall"}),
        )
        write_result(f"{local.uri}/{name}.json", small)
        return f"{local.uri}/{name}.json"

    return put


def _times(factor: float, engine: str) -> Callable[[Sample], Sample]:
    return lambda one: replace(one, wall_s=one.wall_s * factor) if one.engine == engine else one


def _stalls(local: Place) -> str:
    """A result with one figure in it: drawing is what a report costs."""
    stalls = [one for one in made_result().samples if one.phase == "stall"]
    write_result(f"{local.uri}/b.json", made_result(samples=tuple(stalls)))
    return f"{local.uri}/b.json"


def _settled(one: Sample) -> Sample:
    """Rounds without spread: every verdict is certain."""
    return replace(one, wall_s=1.0 + len(one.engine) / 10)


def test_report_as_a_person_reads_it(cli: Cli, local: Place, write: Write, golden: Golden) -> None:
    """Where the page is; the files are there."""
    ran = cli("bench", "report", _stalls(local), "--out", f"{local.uri}/out")
    assert (ran.exit, ran.err) == (Exit.OK, "")
    golden("bench_report", ran.out, local)
    made = {path.name for path in Path(local.uri, "out").iterdir()}
    assert made == {"index.html", "b-training-llm.png", "b-training-llm.svg"}


def test_report_as_a_document(cli: Cli, local: Place, golden: Golden) -> None:
    """The same for programs: every path that was written."""
    ran = cli("bench", "report", _stalls(local), "--out", f"{local.uri}/out", "--json")
    assert ran.exit == Exit.OK
    assert all(os.path.isfile(path) for path in (ran.json["page"], *ran.json["plots"]))
    golden("bench_report_json", ran.out, local)


def test_report_without_matplotlib(
    cli: Cli, local: Place, write: Write, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong call, which the hint makes right; nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = cli("bench", "report", write("a"), "--out", f"{local.uri}/out")
    assert (ran.exit, ran.out) == (Exit.USAGE, "")
    golden("bench_report_no_matplotlib", ran.err, local)
    assert not Path(local.uri, "out").exists()


def test_compare_says_what_became_slower(
    cli: Cli, local: Place, write: Write, golden: Golden
) -> None:
    """What prevents a comparison, what differs, the table, what is missing; exit code 1."""
    before = write("before")
    after = write(
        "after",
        _times(1.5, "ckptfs"),
        date="2026-11-23T09:30:00+00:00",
        settings={"ranks": 4, "durable": True, "rounds": 5},
        versions={"ckptfs": "0.2.0", "torch": "2.13.0+cpu"},
    )
    ran = cli("bench", "compare", before, after)
    assert (ran.exit, ran.err) == (Exit.NO, "")
    golden("bench_compare_slower", ran.out, local)


def test_compare_of_what_is_the_same(cli: Cli, local: Place, write: Write, golden: Golden) -> None:
    """No difference is said to be none."""
    ran = cli("bench", "compare", write("a", _settled), write("b", _settled))
    assert ran.exit == Exit.OK
    golden("bench_compare_same", ran.out, local)


def test_a_spread_that_is_too_wide_fails_nothing(
    cli: Cli, local: Place, write: Write, golden: Golden
) -> None:
    """It is said, with the rounds that it would take; the exit code is 0."""

    def wide(one: Sample) -> Sample:
        return replace(one, wall_s=one.wall_s * (2.0 if one.round % 2 else 0.9))

    ran = cli("bench", "compare", "--only", "ckptfs", write("a", wide), write("b"))
    assert ran.exit == Exit.OK
    golden("bench_compare_wide", ran.out, local)


def test_compare_as_a_document(cli: Cli, local: Place, write: Write, golden: Golden) -> None:
    """Every number and verdict for programs; filters leave one row."""
    arguments = ("bench", "compare", "--json", "--only", "ckptfs", "--phase", "stall")
    ran = cli(*arguments, write("a", _settled), write("b", _settled))
    assert ran.exit == Exit.OK
    assert [row["verdict"] for row in ran.json["rows"]] == ["same"]
    golden("bench_compare_json", ran.out, local)


@pytest.mark.parametrize("flags", [["--only", "nobody"], ["--phase", "load_warm"]])
def test_nothing_in_common_is_no_success(cli: Cli, write: Write, flags: list[str]) -> None:
    """A filter with a typing error must not let a CI job pass."""
    ran = cli("bench", "compare", *flags, write("a"), write("b"))
    assert ran.exit == Exit.USAGE
    assert "nothing in common" in ran.err


def test_faster_is_no_failure_and_a_slower_limit_neither(cli: Cli, write: Write) -> None:
    """Only who makes checkpoints can fail a comparison."""
    base = write("a")
    assert cli("bench", "compare", base, write("b", _times(0.5, "ckptfs"))).exit == Exit.OK
    ran = cli("bench", "compare", base, write("b", _times(2.0, "raw")))
    assert ran.exit == Exit.OK
    assert "not comparable: the limit itself, raw, save of llm" in ran.out


@pytest.mark.parametrize(
    ("text", "code"),
    [(None, Exit.NOT_FOUND), ("{}", Exit.NO), ('{"schema": 99}', Exit.NO)],
)
@pytest.mark.parametrize("name", ["report", "compare"])
def test_files_that_are_no_results(
    cli: Cli, local: Place, write: Write, name: str, text: str | None, code: Exit
) -> None:
    """Missing, something else, too new: one line that names the file, and the documented code."""
    bad = Path(local.uri, "bad.json")
    good = write("good")
    if text is not None:
        bad.write_text(text)
    ran = cli("bench", name, good, bad)
    assert ran.exit == code
    assert f"ckptfs bench {name}: " in ran.err
    assert str(bad) in ran.err
    assert not Path("bench-report").exists()
