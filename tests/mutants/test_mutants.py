"""The mistakes of ``make campaign-mutants`` still say something about the code as it is."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.mistakes import FLOORS, HERE, ROOT, Mistake, load, plant
from tests.mutants.running import Outcome, run_mistake

MISTAKES = load()
CHEAP = "commit/plain-base-greatest"


def _named(name: str) -> Mistake:
    return next(m for m in MISTAKES if m.name == name)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_mistake_can_be_planted(mistake: Mistake) -> None:
    """Its text is exactly once where it says, and with the mistake the file is other code that
    still compiles.
    """
    planted = plant(mistake)
    assert ast.dump(ast.parse(planted.source)) != _dumped(ROOT / "ckptfs" / planted.path)
    compile(planted.source, str(planted.path), "exec")


@functools.cache
def _dumped(path: Path) -> str:
    """Of a file before its mistake; many mistakes are planted in one file."""
    return ast.dump(ast.parse(path.read_text()))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_the_tests_of_a_mistake_exist(mistake: Mistake) -> None:
    """A test that was renamed would leave its mistake without one."""
    for argument in mistake.tests:
        path, _, node = argument.partition("::")
        assert (ROOT / path).exists(), argument
        if node:
            names = node.partition("[")[0].split("::")
            assert set(names) <= _defined(ROOT / path), argument


@functools.cache
def _defined(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(
        n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)
    )


def test_every_file_is_of_a_floor() -> None:
    """A directory that is none would be left out of the table without a word."""
    assert {path.parent.name for path in HERE.rglob("*.toml")} <= set(FLOORS)


PACKAGE = """
class Bag:
    def take(self) -> int:
        if self.full:
            self.count -= 1
            return 1
        return 0

    def look(self) -> int:
        return 0
"""


def _package(directory: Path, **sources: str) -> Path:
    for name, source in sources.items():
        (directory / f"{name}.py").write_text(source)
    return directory


def test_a_mistake_is_found_wherever_its_function_stands(tmp_path: Path) -> None:
    """Of two methods with one text only the named one is changed, and its indentation stays."""
    mistake = Mistake("commit/x", "", "Bag.take", "return 0", "return 2", ("t",))
    planted = plant(mistake, _package(tmp_path, bag=PACKAGE, other="def take(): return 0\n"))
    assert planted.path == Path("bag.py")
    assert planted.source == PACKAGE.replace("        return 0\n\n", "        return 2\n\n")
    lines = replace(
        mistake, find="self.count -= 1\nreturn 1", replace="self.count -= 2\n\nreturn 1\n"
    )
    block = "            self.count -= 2\n\n            return 1\n"
    assert block in plant(lines, tmp_path).source


@pytest.mark.parametrize("find", ["return 7", "return", "self.count -= 1\n    return 1"])
def test_a_mistake_that_stands_nowhere_or_twice_is_refused(tmp_path: Path, find: str) -> None:
    """Else it is not known what was planted."""
    _package(tmp_path, bag=PACKAGE)
    with pytest.raises(ValueError, match="places in"):
        plant(Mistake("commit/x", "", "Bag.take", find, "pass", ("t",)), tmp_path)


def test_a_mistake_of_the_list_is_seen() -> None:
    """From its file to the test that fails: the whole way of the campaign, once."""
    answer = run_mistake(_named(CHEAP))
    assert answer.outcome is Outcome.SEEN, answer
    assert answer.first.endswith("test_several_domains_are_as_old_as_the_oldest"), answer


def test_a_mistake_without_a_fitting_test_is_unseen() -> None:
    """Tests that hold with the mistake see nothing."""
    deaf = replace(_named(CHEAP), tests=("tests/test_uri.py",))
    assert run_mistake(deaf).outcome is Outcome.UNSEEN


def test_a_mistake_that_only_hangs_is_not_seen() -> None:
    """A limit that ran out says nothing about what is wrong; tests that are not there even less."""
    find, replacement = "_refuse_unprintable(key)", "import threading\nthreading.Event().wait()"
    stuck = Mistake("api/stuck", "", "check_key", find, replacement, ("tests/test_uri.py",))
    assert run_mistake(stuck, limit_s=5.0).outcome is Outcome.TIMED_OUT
    nothing = replace(_named(CHEAP), tests=("tests/test_uri.py::test_nothing",))
    assert run_mistake(nothing).outcome is Outcome.BROKEN
