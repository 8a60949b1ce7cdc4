"""docs/howto/what-happens-when.md: each row is a fault, an outcome, and a test that shows it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "howto" / "what-happens-when.md"

# What people ask about: a word of each, that some row must be about.
ASKED = [
    "dies while its state is staged",
    "dies while it writes",
    "coordinator dies",
    "All die at once",
    "empty disk",
    "disk is full",
    "server is gone",
    "second job",
    "evaluation job",
    "script ends with a save in flight",
    "exception leaves the training loop",
    "SIGTERM",
    "listener raises",
    "delete of retention fails",
    "newest checkpoint is damaged",
    "run is empty",
    "data loader's worker",
    "clock jumps",
]


def rows_of(text: str) -> list[list[str]]:
    """The cells of every row of every table, headings left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "What happens" and not set(row[0]) <= {"-"}]


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Functions and classes of a module."""
    tree = ast.parse(path.read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    )


def wrong_with(row: list[str], page: Path) -> str | None:
    """Why a row proves nothing; None where it does."""
    if len(row) != 4 or not row[0] or not (row[1] or row[2]):
        return "not a fault, two outcomes and a test"
    links = re.findall(r"\]\(([^)#\s]+)#(\w+)\)", row[3])
    if not links:
        return "no test"
    for path, name in links:
        module = (page.parent / path).resolve()
        if not name.startswith("test_"):
            return f"{name} is no test"
        if not module.is_file() or name not in functions_of(module):
            return f"there is no {name} in {path}"
    return None


def test_each_row_is_shown_by_an_existing_test() -> None:
    """No outcome is listed that no test saw."""
    rows = rows_of(PAGE.read_text())
    assert len(rows) > 30
    found = {row[0]: wrong for row in rows if (wrong := wrong_with(row, PAGE)) is not None}
    assert found == {}


@pytest.mark.parametrize("words", ASKED)
def test_what_people_ask_about_has_a_row(words: str) -> None:
    """The page answers the questions that it was written for."""
    assert [row[0] for row in rows_of(PAGE.read_text()) if words in row[0]]


@pytest.mark.parametrize(
    "row",
    [
        "| a disk burns | smoke | ashes | [gone](../../tests/test_what_happens.py#test_of_ashes) |",
        "| a disk burns | smoke | ashes | [page](resume.md) |",
        "| a disk burns | smoke | ashes | |",
        "| a disk burns | | | [rows](../../tests/test_what_happens.py#test_each_row) |",
        "| a disk burns | smoke | [rows](../../tests/test_what_happens.py#rows_of) |",
    ],
)
def test_a_row_that_proves_nothing_would_be_seen(row: str) -> None:
    """A missing test, a link that is no test, no link, no outcome, a missing column."""
    assert wrong_with(rows_of(row)[0], PAGE) is not None
