"""The page of what was tried says what was recorded, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from tests.integrations.matrix import PAGES, Cell, merged, read, render

CELL = Cell("Lightning", "s3", "async", "lightning", "2.6.6", "2026-11-20", passed=True)


def test_the_page_is_what_the_record_renders_to() -> None:
    """No cell was written into the page by hand."""
    cells = read(PAGES / "matrix.json")
    assert (PAGES / "matrix.json").exists()
    assert (PAGES / "matrix.md").read_text() == render(cells)


def test_what_nobody_tried_is_shown_as_such() -> None:
    """One cell that passed is one "yes", one that failed is marked, and the other six are dashes."""
    failed = replace(CELL, store="nfs", passed=False)
    [row] = [line for line in render([CELL, failed]).splitlines() if line.startswith("| Light")]
    assert row.count("| yes ") == 1
    assert row.count("| FAILED ") == 1
    assert row.count("| - ") == 6
    assert "lightning 2.6.6" in row


def test_a_mode_that_a_framework_lacks_is_no_gap() -> None:
    """Four cells of it are "none", and the other three of its own mode are still to be tried."""
    page = render([replace(CELL, mode="sync", modes=("sync",))])
    [row] = [line for line in page.splitlines() if line.startswith("| Light")]
    assert (row.count("| none "), row.count("| - "), row.count("| yes ")) == (4, 3, 1)


def test_the_newest_counts_and_a_failure_outlives_its_day() -> None:
    """A later day replaces a cell; on one day and version no pass hides a failure."""
    failed = replace(CELL, passed=False)
    assert merged([CELL], [failed]) == [failed]
    assert merged([failed], [CELL]) == [failed]
    tomorrow = replace(CELL, date="2026-11-21")
    assert merged([failed], [tomorrow]) == [tomorrow]
