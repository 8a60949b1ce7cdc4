"""The layout of the package: ``ls -R`` shows where a change belongs, and a name has one meaning.

Each figure counts what breaks a rule. Where a rule does not hold yet, ``LIMITS`` has the count of today: lower
it after a clean-up, and never raise it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ckptfs"
MAX_MODULES = 15
MAX_LINES = 800
# Modules that are started by name: nothing has to import them.
ENTRY_POINTS = frozenset({"ckptfs.__main__"})
# Words that stand in identifiers for something that has a standard term.
DIALECT = frozenset(
    [
        "told",
        "said",
        "asked",
        "laid",
        "heed",
        "lanes",
        "desk",
        "hall",
        "ground",
        "rally",
        "crew",
        "flight",
        "blanks",
        "shelves",
        "lately",
        "bury",
        "mourned",
        "farewell",
        "hire",
        "hired",
        "seat",
        "spread",
        "tale",
        "bell",
        "fate",
        "mine",
        "theirs",
        "beside",
        "kept",
        "bare",
        "whole",
        "over",
        "aside",
        "room",
        "feed",
        "spared",
        "stand_in",
        "word_of",
        "tell_nobody",
        "heard",
        "landing",
        "corner",
        "taken",
        "looked",
        "holding",
        "seen",
        "rest",
        "going",
        "powers",
        "verdicts",
        "doomed",
        "there",
    ]
)

LIMITS = {
    "modules that are too many in their folder": 212,
    "modules that are too long": 1,
    "modules that one neighbour alone imports": 89,
    "file names that stand in several folders": 34,
    "class names that are defined in several modules": 90,
    "identifiers with a word of no field": 721,
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def figures(package: Path) -> dict[str, list[str]]:
    """Return what breaks each rule, one item per offence."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    modules = [path for path in trees if path.name != "__init__.py"]
    return dict(
        zip(
            LIMITS,
            (
                list(_crowded(modules)),
                [str(p) for p in modules if len(p.read_text().splitlines()) > MAX_LINES],
                list(_imported_once(package, trees)),
                _repeated((path.stem, str(path)) for path in modules),
                _repeated((name, str(path)) for path in trees for name in _classes(trees[path])),
                list(_dialect(trees)),
            ),
            strict=True,
        )
    )


def _crowded(modules: list[Path]) -> Iterator[str]:
    for folder, count in Counter(path.parent for path in modules).items():
        yield from [f"{folder} has {count}"] * (count - MAX_MODULES)


def _imported_once(package: Path, trees: dict[Path, ast.Module]) -> Iterator[str]:
    names = {
        path: ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in trees
    }
    known = set(names.values())
    importers: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                importers[full if full in known else node.module].add(names[path])
    for path, name in names.items():
        by = importers[name]
        if path.name == "__init__.py" or name in ENTRY_POINTS or len(by) != 1:
            continue
        only = next(iter(by))
        if only.rpartition(".")[0] == name.rpartition(".")[0]:
            yield f"{name} (by {only})"


def _classes(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _repeated(named: Iterator[tuple[str, str]]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, where in named:
        places[name].append(where)
    return [f"{name}: {', '.join(places[name])}" for name in places if len(places[name]) > 1]


def _dialect(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        identifiers = [path.stem]
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                identifiers.append(node.name)
            elif isinstance(node, ast.arg):
                identifiers.append(node.arg)
        for identifier in identifiers:
            yield from (f"{path}: {identifier}" for word in _words(identifier) if word in DIALECT)


def _words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


@functools.cache
def _found() -> dict[str, list[str]]:
    return figures(PACKAGE)


@pytest.mark.parametrize("rule", LIMITS)
def test_the_house_stays_in_order(rule: str) -> None:
    """No figure rises."""
    found = _found()[rule]
    assert len(found) <= LIMITS[rule], "\n".join([f"{len(found)} {rule}:", *found])


def _package(folder: Path, **sources: str) -> Path:
    package = folder / "ckptfs"
    for name, source in sources.items():
        path = package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def test_an_orderly_package_has_no_offence(tmp_path: Path) -> None:
    """Otherwise a limit of 0 could not be reached."""
    package = _package(
        tmp_path,
        api="from ckptfs.low.files import read\n",
        low__files="class Reader: ...\ndef read(path): ...\n",
        low__names="from ckptfs.low.files import Reader\nclass Name: ...\n",
    )
    assert not any(figures(package).values())


SIXTEEN = {f"low__m{number}": "" for number in range(MAX_MODULES + 1)}


@pytest.mark.parametrize(
    ("rule", "sources", "count"),
    [
        (0, SIXTEEN, 1),
        (1, {"long": "x = 1\n" * (MAX_LINES + 1), "short": "x = 1\n" * MAX_LINES}, 1),
        (2, {"low__a": "from ckptfs.low import b\n", "low__b": ""}, 1),
        (2, {"low__a": "from ckptfs.low.b import x\n", "low__b": "x = 1\n", "c": ""}, 1),
        (
            2,
            {
                "low__a": "from ckptfs.low.b import x\n",
                "low__b": "",
                "c": "from ckptfs.low import b\n",
            },
            0,
        ),
        (3, {"low__names": "", "high__names": "", "high__files": ""}, 1),
        (4, {"a": "class _State: ...\n", "b": "class _State: ...\nclass Other: ...\n"}, 1),
        (5, {"told": ""}, 1),
        (5, {"a": "def look_aside(seat): ...\nclass BareRoom: ...\n"}, 4),
        (5, {"a": "def roommate(override): ...\n"}, 0),
    ],
)
def test_each_offence_is_counted(
    tmp_path: Path, rule: int, sources: dict[str, str], count: int
) -> None:
    """Of each kind, planted in a small package."""
    found = list(figures(_package(tmp_path, **sources)).values())
    assert len(found[rule]) == count
