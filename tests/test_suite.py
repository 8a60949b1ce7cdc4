"""The suite's own tools: what it says of skipped tests, and the table of repeated runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import repeat
from tests.skips import sum_up

ROOT = Path(__file__).parents[1]


def test_skipped_tests_are_one_line_with_the_command_that_brings_their_servers() -> None:
    """Counted by what is lacking, most first; a reason that nobody foresaw counts too."""
    reasons = [
        "Skipped: not installed: radosgw, ceph-mon; run `make lab-install`",
        "Skipped: not installed: azurite-blob; run `make lab-install`",
        "Skipped: no exclusive create here",
        "Skipped: power cuts need root: they mount filesystems",
        "Skipped: there is no CUDA device here",
        "Skipped: because",
    ]
    line = sum_up(reasons)
    assert line.startswith("6 skipped: 2 lack servers and machines of the lab: `make lab-install`")
    for part in (
        "1 lack root",
        "1 lack a CUDA device",
        "1 lack what this store",
        "1 lack something",
    ):
        assert part in line
    assert sum_up([]) == ""


@pytest.mark.parametrize(
    ("core", "labs", "status"),
    [(0, 0, 0), (1, 0, 2), (0, 1, 2), (5, 0, 0), (0, 5, 0), (2, 5, 2), (5, 5, 0)],
)
def test_both_halves_of_the_suite_run_whatever_the_first_one_finds(
    tmp_path: Path, core: int, labs: int, status: int
) -> None:
    """`make test` tells both halves, and fails where either failed; 5 is "no test chosen"."""
    fake = tmp_path / "pytest"
    fake.write_text(f'case "$*" in *--ignore*) exit {core};; *) exit {labs};; esac\n')
    makefile = tmp_path / "Makefile"
    makefile.write_text(
        f"include {ROOT}/Makefile\n.PHONY: both\nboth:\n\t@$(call run_both_halves,bash {fake})\n"
    )
    command = ["make", "--no-print-directory", "-f", str(makefile), "both"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == status, ran.stderr
    words = {0: "passed", 5: "no test chosen"}
    assert f"core: {words.get(core, f'FAILED (exit {core})')};" in ran.stdout
    assert f"cuts): {words.get(labs, f'FAILED (exit {labs})')}" in ran.stdout


def test_a_repeated_run_tells_each_test_that_was_not_green_every_time(tmp_path: Path) -> None:
    """A row for each run, then the tests that failed and how often."""
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a" name="one"/>'
        '<testcase classname="tests.a" name="two"><failure/></testcase>'
        '<testcase classname="tests.a" name="three"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    red = repeat.read_report("core", 1, report, 61.4)
    assert (red.passed, red.failed, red.skipped, red.is_green) == (1, ("tests.a::two",), 1, False)
    green = repeat.Round("core", 0, 2, (), 1, 60.0)
    assert green.is_green
    lines = repeat.table([green, red, repeat.Round("labs", 5, 0, (), 0, 1.0)]).splitlines()
    assert lines[2:] == [
        "| 1 | core | 2 | 0 | 1 | 60 | 0 |",
        "| 2 | core | 1 | 1 | 1 | 61 | 1 |",
        "| 1 | labs | 0 | 0 | 0 | 1 | 5 |",
        "1 of 2: tests.a::two",
    ]


def test_a_run_without_a_report_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    """pytest that died before it wrote anything is not green."""
    assert not repeat.read_report("core", 4, tmp_path / "none.xml", 1.0).is_green
