"""The suite, several times on a busy machine: make test-repeat N=5 [PYTEST_ARGS=...].

A test that is not green every time is a defect of the test or of the code. Next to the suite run processes that
do nothing but compute, so that every wait takes longer than on the machine it was written on. At the end one
row for each run, then each test that was not green in all of them, and how often it failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Round", "read_report", "table"]

NOTHING_CHOSEN = 5  # pytest: -k and its sisters chose no test


@dataclass(frozen=True, slots=True)
class Round:
    """What one run of one part of the suite was. status: pytest's exit code."""

    part: str
    status: int
    passed: int
    failed: tuple[str, ...]
    skipped: int
    took_s: float

    @property
    def is_green(self) -> bool:
        """Nothing failed; nothing to run is green too."""
        return self.status in (0, NOTHING_CHOSEN)


def read_report(part: str, status: int, report: Path, took_s: float) -> Round:
    """A round from the JUnit report of pytest; without one, the exit code has to do."""
    if not report.exists():
        return Round(part, status, 0, (), 0, took_s)
    passed, skipped, failed = 0, 0, []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Round(part, status, passed, tuple(failed), skipped, took_s)


def table(rounds: Sequence[Round]) -> str:
    """All rounds, one row each, and every test that failed in one of them."""
    lines = [
        "| run | tests | passed | failed | skipped | seconds | exit |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    count: Counter[str] = Counter()
    for one in rounds:
        count[one.part] += 1
        lines.append(
            f"| {count[one.part]} | {one.part} | {one.passed} | {len(one.failed)} | {one.skipped} "
            f"| {one.took_s:.0f} | {one.status} |"
        )
    failures = Counter(name for one in rounds for name in one.failed)
    lines += [f"{times} of {max(count.values())}: {name}" for name, times in failures.most_common()]
    return "\n".join(lines)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes compute during the block; none of them outlives it."""
    loop = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(loop) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(part: str, arguments: Sequence[str]) -> Round:
    """One run of these tests, its output as it comes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *arguments]
        status = subprocess.run(command, check=False).returncode
        return read_report(part, status, report, time.monotonic() - began)


def main() -> int:
    """The whole of it; the exit code is 1 where one run was not green."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--busy", type=int, default=2, help="processes that compute beside the suite"
    )
    parser.add_argument(
        "--part", action="append", nargs=2, metavar=("NAME", "ARGUMENTS"), default=[]
    )
    options = parser.parse_args()
    parts = [(name, shlex.split(arguments)) for name, arguments in options.part]
    rounds = []
    with busy(options.busy):
        for _ in range(options.times):
            for name, arguments in parts:
                rounds.append(run(name, arguments))
                sys.stdout.write(f"\n{table(rounds)}\n\n")
                sys.stdout.flush()
    return int(not all(one.is_green for one in rounds))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
