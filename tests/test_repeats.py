"""No code is repeated: eight lines that are the same in two places are a helper that somebody missed.

Compared are lines of code: comments, docstrings, imports, ``__all__`` and the heads of functions are left out,
since the parts of one protocol have to look alike there.
"""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ckptfs"
AROUND = ("tests", "benchmarks", "examples")
LINES = 8  # of code: some 12 with the comments, docstrings and headings that are not compared
# Repeated pieces of each floor, within it and with the floors below; lower them, and never raise them.
LIMITS = {
    "control": 0,
    "topology": 0,
    "commit": 0,
    "dcp": 0,
    "storage": 0,
    "manager": 0,
    "integrations": 1,
    "tools": 0,
    "bench": 0,
    "cli": 0,
    "testing": 0,
}

Line = tuple[Path, int, str]  # its file, its number, its code


def code_lines(path: Path) -> list[Line]:
    """The lines of code of a module, without what may be the same anywhere."""
    text = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__")
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ):
            left_out.update(_rows(node.lineno, node.end_lineno))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left_out.update(_rows(node.lineno, node.body[0].lineno - 1))
    found = ((n, line.partition("  # ")[0].strip()) for n, line in enumerate(text.split("\n"), 1))
    return [
        (path, n, line)
        for n, line in found
        if n not in left_out and line and not line.startswith("#")
    ]


def _rows(first: int, last: int | None) -> range:
    return range(first, (last or first) + 1)


def repeats(paths: list[Path], lines: int = LINES) -> Iterator[tuple[Line, Line]]:
    """Where two equal pieces of at least so many lines begin; each pair of places once."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    modules = [code_lines(path) for path in paths]
    for number, module in enumerate(modules):
        for at in range(len(module) - lines + 1):
            places[tuple(line for _, _, line in module[at : at + lines])].append((number, at))
    seen: set[tuple[int, int, int, int]] = set()
    for where in places.values():
        for (a, i), (b, j) in itertools.combinations(where, 2):
            seen.add((a, i, b, j))
            if (a, i - 1, b, j - 1) not in seen and not (a == b and j - i < lines):
                yield modules[a][i], modules[b][j]


@pytest.fixture(name="found", scope="module")
def _found() -> dict[str, list[str]]:
    """The repeated pieces of the package, by the upper floor of the two."""
    floors: dict[str, list[str]] = {floor: [] for floor in LIMITS}
    order = list(LIMITS)
    for pair in repeats(sorted(PACKAGE.rglob("*.py"))):
        names = [path.relative_to(PACKAGE).parts[0] for path, _, _ in pair]
        text = " and ".join(f"{path.relative_to(PACKAGE)}:{n}" for path, n, _ in pair)
        upper = max((n for n in names if n in order), key=order.index, default=None)
        if upper is not None:
            floors[upper].append(text)
    return floors


@pytest.mark.parametrize("floor", LIMITS)
def test_no_code_stands_twice(floor: str, found: dict[str, list[str]]) -> None:
    """No floor has more repeated pieces than before."""
    assert len(found[floor]) <= LIMITS[floor], "\n".join(found[floor])


def test_no_code_around_the_package_stands_twice() -> None:
    """In tests, benchmarks and examples either: a case that is copied is a row of a table."""
    root = PACKAGE.parent
    paths = [path for name in AROUND for path in sorted((root / name).rglob("*.py"))]
    found = [" and ".join(f"{path}:{n}" for path, n, _ in pair) for pair in repeats(paths)]
    assert not found, "\n".join(found)


STEPS = [f"step_{number} = {number}" for number in range(LINES)]


@pytest.mark.parametrize(
    ("second", "count"),
    [
        (STEPS, 1),
        ([*STEPS, "more = 1"], 1),
        (["import os", *STEPS[:4], "", "# why", *STEPS[4:]], 1),
        (STEPS[1:], 0),
        ([*STEPS[:4], "other = 1", *STEPS[4:]], 0),
        ([*STEPS, "other = 1", *STEPS], 3),
    ],
)
def test_a_repeated_piece_is_found(tmp_path: Path, second: list[str], count: int) -> None:
    """Planted next to another file; comments, blank lines and imports hide nothing."""
    for name, lines in (("a", STEPS), ("b", second)):
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    assert len(list(repeats(sorted(tmp_path.glob("*.py"))))) == count
