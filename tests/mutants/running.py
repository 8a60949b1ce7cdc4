"""Plants mistakes in copies of the package, each alone, and says which test saw it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.mutants.mistakes import ROOT, Mistake, plant

__all__ = ["LIMIT_S", "Answer", "Outcome", "run_mistake", "run_without"]

LIMIT_S = 300.0

_COPIED = ("ckptfs", "tests")  # all else is only read, and a link is enough
_NOT_LINKED = (".git", ".venv", ".hypothesis", "build")
_FAILED = 1  # pytest's exit code where tests failed


class Outcome(StrEnum):
    """What became of one mistake."""

    SEEN = "seen"
    UNSEEN = "UNSEEN"
    TIMED_OUT = "TIMED OUT"  # nobody learns from it what is wrong
    BROKEN = "BROKEN"  # it could not be planted, or no test ran


@dataclass(frozen=True, slots=True)
class Answer:
    """first: the test that failed first, or what else there is to say."""

    outcome: Outcome
    first: str


def run_mistake(mistake: Mistake, limit_s: float = LIMIT_S) -> Answer:
    """Run the tests of a mistake over a copy that has it."""
    with _copy() as copy:
        try:
            planted = plant(mistake, copy / "ckptfs")
        except ValueError as error:
            return Answer(Outcome.BROKEN, str(error))
        target = copy / "ckptfs" / planted.path
        # The copy brings compiled files along, which are known by the second they were made in.
        for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
            compiled.unlink()
        target.write_text(planted.source)
        return _run(mistake.tests, copy, limit_s)


def run_without(tests: Iterable[str], limit_s: float) -> Answer:
    """Run tests over a copy without any mistake: UNSEEN is what it has to come to."""
    with _copy() as copy:
        return _run(tests, copy, limit_s)


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ckptfs-mutants-") as directory:
        copy = Path(directory)
        for entry in ROOT.iterdir():
            if entry.name in _COPIED:
                # A test that runs beside this one may compile or remove something meanwhile.
                ignore = shutil.ignore_patterns("*.pyc.*", "*.tmp")
                shutil.copytree(entry, copy / entry.name, symlinks=True, ignore=ignore)
            elif entry.name not in _NOT_LINKED and not entry.name.endswith("_cache"):
                (copy / entry.name).symlink_to(entry)
        yield copy


def _run(tests: Iterable[str], copy: Path, limit_s: float) -> Answer:
    report = copy / "report.xml"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=0", f"--junitxml={report}", *tests]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # Before the installed package, for whatever process a test starts as well.
    env["PYTHONPATH"] = str(copy)
    log = copy / "pytest.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Answer(Outcome.TIMED_OUT, f"after {limit_s:.0f} s")
        finally:
            # What the tests started ends with them: it shares their session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return Answer(Outcome.UNSEEN, "")
    if code != _FAILED or not report.exists():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return Answer(Outcome.BROKEN, f"pytest ended with {code}: {' '.join(last)}")
    return _first_failure(report)


def _first_failure(report: Path) -> Answer:
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        for problem in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.")
            said = problem.get("message", "")
            if "Timeout (>" in said or "Timeout >" in said:
                return Answer(Outcome.TIMED_OUT, name)
            if problem.tag == "error" and "collection" in said:
                return Answer(Outcome.BROKEN, f"{name}: {said}")
            return Answer(Outcome.SEEN, name)
    return Answer(Outcome.BROKEN, "no test failed, and pytest says that one did")
