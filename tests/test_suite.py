"""The suite's own tools: what it says of skipped tests, and the table of repeated runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import repeat
from tests.skips import name_failures, sum_up

ROOT = Path(__file__).parents[1]


def test_skipped_tests_are_one_line_with_the_command_that_brings_their_servers() -> None:
    """Counted by what is lacking, most first; an unforeseen reason counts too."""
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


def test_what_failed_is_named_with_the_first_line_of_its_error() -> None:
    """Also where a fixture broke, and where pytest has no more than a text."""
    crash = SimpleNamespace(message="AssertionError: one\nand more")
    failed = SimpleNamespace(nodeid="a.py::one", longrepr=SimpleNamespace(reprcrash=crash))
    broken = SimpleNamespace(nodeid="a.py::two", longrepr="")
    lines = name_failures({"failed": [failed], "error": [broken]})
    assert lines == ["FAILED a.py::one: AssertionError: one\n", "FAILED a.py::two: \n"]


@pytest.mark.parametrize(
    ("short", "labs", "status"),
    [(0, 0, 0), (1, 0, 2), (0, 1, 2), (5, 0, 0), (0, 5, 0), (2, 5, 2), (5, 5, 0)],
)
def test_both_halves_of_the_campaigns_run_whatever_the_first_one_finds(
    tmp_path: Path, short: int, labs: int, status: int
) -> None:
    """`make test-campaigns` reports both halves, and fails where either failed; 5 is "no test chosen"."""
    fake = tmp_path / "pytest"
    fake.write_text(
        'case "$*" in *tests/crash*) echo the campaigns; echo FAILED one >>$CKPTFS_FAILURES;'
        f" exit {short};; *) echo the labs; exit {labs};; esac\n"
    )
    makefile = tmp_path / "Makefile"
    makefile.write_text(
        f"include {ROOT}/Makefile\n.PHONY: both\nboth:\n\t@$(call run_both_halves,bash {fake})\n"
    )
    command = ["make", "--no-print-directory", "-f", str(makefile), "both"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == status, ran.stderr
    order = [
        ran.stdout.index(text)
        for text in ("the campaigns", "the labs", "FAILED one", "campaigns: ")
    ]
    assert order == sorted(order)
    words = {0: "passed", 5: "no test chosen"}
    assert f"campaigns: {words.get(short, f'FAILED (exit {short})')};" in ran.stdout
    assert f"cuts): {words.get(labs, f'FAILED (exit {labs})')}" in ran.stdout


@pytest.mark.parametrize("failing", ["none", "docs"])
def test_ci_prints_the_seconds_of_each_stage_and_stops_at_the_first_that_fails(
    tmp_path: Path, failing: str
) -> None:
    """Also of the stages before the one that failed; its exit code is that of the whole."""
    fake = tmp_path / "make"
    fake.write_text(f"#!/bin/sh\n[ $1 = {failing} ] && exit 7\nexit 0\n")
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [ROOT / ".ci/run"], env=environment, capture_output=True, text=True, check=False
    )
    told = ran.stdout.partition("Seconds of each stage:\n")[2].splitlines()
    stages = [line.split(maxsplit=1)[1] for line in told]
    assert all(line.split()[0].isdigit() for line in told)
    if failing == "none":
        assert ran.returncode == 0, ran.stderr
        targets = (
            "lab-install",
            "check",
            "docs",
            "demo",
            "test",
            "test-campaigns",
            "test-integrations",
        )
        assert stages[:7] == [f"make {name}" for name in targets]
    else:
        assert ran.returncode == 7
        assert stages == ["make lab-install", "make check", "make docs"]


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


HANGS = """
import ctypes
import pytest

@pytest.mark.timeout(60)
def test_before():
    pass

def test_that_hangs_in_c():
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)

@pytest.mark.timeout(60)
def test_after():
    pass
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_a_test_that_never_returns_from_a_call_ends(tmp_path: Path, processes: int) -> None:
    """Its stack is printed; with a process next to the one that reports, it is a failure and the rest runs."""
    (tmp_path / "test_hanging.py").write_text(HANGS)
    (tmp_path / "conftest.py").write_text(
        "from tests import ending\nfrom tests.ending import *\n"
        "from tests.ending import pytest_configure, pytest_runtest_protocol, pytest_unconfigure\n"
        "ending.GRACE_S = 1.0\n"
    )
    command = [sys.executable, "-m", "pytest", "--timeout=3", "-n", str(processes), str(tmp_path)]
    ran = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", os.devnull],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "in test_that_hangs_in_c" in ran.stderr
    if processes:
        assert "1 failed, 2 passed" in ran.stdout


LIMITS = """
import pytest
from tests.ending import limit_s

@pytest.mark.parametrize("limit", [
    BASE,
    pytest.param(5.0, marks=pytest.mark.timeout(5)),
    pytest.param(6.0, marks=pytest.mark.timeout(timeout=6)),
    pytest.param(BASE, marks=pytest.mark.timeout(method="thread")),
])
def test_it(request, limit):
    assert limit_s(request.node) == limit
"""


@pytest.mark.parametrize(("options", "base"), [([], 7.0), (["--timeout=0"], 0.0)])
def test_the_second_limit_follows_the_first(
    tmp_path: Path, options: list[str], base: float
) -> None:
    """A mark counts before the option, and that before the file; a campaign's --timeout=0 is none."""
    (tmp_path / "test_limit.py").write_text(LIMITS.replace("BASE", str(base)))
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 7\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *options, str(tmp_path)]
    ran = subprocess.run(
        [*command, "-c", str(tmp_path / "pytest.ini")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "4 passed" in ran.stdout, ran.stdout
