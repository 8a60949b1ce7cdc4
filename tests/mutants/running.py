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

__all__ = ["LIMIT_S", "Answer", "Outcome", "failing_without", "run_mistake"]

LIMIT_S = 1000.0  # longer than any wait of a test

_COPIED = ("ckptfs", "tests")  # all else is only read, and a link is enough
_NOT_LINKED = (".git", ".venv", ".hypothesis", "build")
_FAILED = 1  # pytest's exit code where tests failed


class Outcome(StrEnum):
    """What became of one mistake."""

    SEEN = "seen"
    UNSEEN = "UNSEEN"
    TIMED_OUT = "TIMED OUT"  # it does not show what is wrong
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


def failing_without(tests: Iterable[str], limit_s: float) -> frozenset[str]:
    """The tests that fail over a copy without any mistake: of a mistake they say nothing. RuntimeError
    where pytest did not come to its end.
    """
    with _copy() as copy:
        report = copy / "report.xml"
        code, said = _pytest(tests, copy, limit_s)
        if code not in (0, _FAILED) or not report.exists():
            raise RuntimeError(f"the tests do not run as they are: {said}")
        return frozenset(name for name, _ in _failures(report))


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ckptfs-mutants-") as directory:
        copy = Path(directory)
        for entry in ROOT.iterdir():
            if entry.name in _COPIED:
                # A test that runs next to this one may compile or remove something at the same time.
                ignore = shutil.ignore_patterns("*.pyc.*", "*.tmp")
                shutil.copytree(entry, copy / entry.name, symlinks=True, ignore=ignore)
            elif entry.name not in _NOT_LINKED and not entry.name.endswith("_cache"):
                (copy / entry.name).symlink_to(entry)
        yield copy


def _run(tests: Iterable[str], copy: Path, limit_s: float) -> Answer:
    code, said = _pytest(["-x", *tests], copy, limit_s)
    report = copy / "report.xml"
    if code is None:
        return Answer(Outcome.TIMED_OUT, said)
    if code == 0:
        return Answer(Outcome.UNSEEN, "")
    if code != _FAILED or not report.exists():
        return Answer(Outcome.BROKEN, said)
    for name, problem in _failures(report):
        why = problem.get("message", "")
        if "Timeout (>" in why or "Timeout >" in why:
            return Answer(Outcome.TIMED_OUT, name)
        if problem.tag == "error" and "collection" in why:
            return Answer(Outcome.BROKEN, f"{name}: {why}")
        return Answer(Outcome.SEEN, name)
    return Answer(Outcome.BROKEN, "no test failed, and pytest says that one did")


def _pytest(arguments: Iterable[str], copy: Path, limit_s: float) -> tuple[int | None, str]:
    """Its exit code, None where the limit ran out, and its last word."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=0", f"--junitxml={copy / 'report.xml'}", *arguments]
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
            return None, f"after {limit_s:.0f} s"
        finally:
            # What the tests started ends with them: it shares their session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return code, f"pytest ended with {code}: {' '.join(last)}"


def _failures(report: Path) -> Iterator[tuple[str, ET.Element]]:
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        for problem in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            yield name.removeprefix("tests."), problem
