"""docs/scale.md says what the formulas say, which other tests compare with counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.formulas import phase_table, save_table
from tests.scale.simulation import Kind, Sizes, run_world

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_tables_of_the_page_are_made_of_the_formulas() -> None:
    """Row for row; a formula that changes changes the page."""
    lines = set(PAGE.read_text().splitlines())
    assert [row for row in save_table() if row not in lines] == []


@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name.lower())
def test_the_phases_of_the_page_are_made_of_the_formulas(kind: Kind) -> None:
    """Row for row, for each kind of storage."""
    lines = set(PAGE.read_text().splitlines())
    assert [row for row in phase_table(kind) if row not in lines] == []


def test_a_held_save_makes_the_steps_of_the_page(tmp_path: Path) -> None:
    """Step for step, in their order; each of them is a round of all ranks."""
    _, _, rest = PAGE.read_text().partition("| step | sent by all ranks |")
    rows = rest.splitlines()[2:]
    listed = [row.split("|")[1].strip() for row in rows[: rows.index("")]]
    steps = run_world(Sizes(8, 4), Kind.SHARED, tmp_path)["save"].steps
    assert [step.label for step in steps] == listed
    assert f"A save has {_NUMBERS[len(listed)]} steps" in PAGE.read_text().replace("\n", " ")


_NUMBERS = {7: "seven", 8: "eight", 9: "nine", 10: "ten"}
