"""docs/scale.md says what the formulas say, which other tests compare with counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.formulas import phase_table, save_table
from tests.scale.simulation import Kind

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
