"""Tables of the report: cells of one or two lines, groups of rows, captions that are read aloud. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from ckptfs.bench.stats import Comparison, Spread, Verdict
from ckptfs.bench.words import limit_text, number_text, verdict_text

__all__ = ["NOTHING", "Cell", "limit_cell", "ratio_cell", "spread_cell", "table"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: Its text.
        below: What belongs to it, smaller and below.
        remark: A sentence, below both.
    """

    text: str
    below: str = ""
    remark: str = ""

    def html(self) -> str:
        """Return its inside."""
        below = f"<small>{escape(self.below)}</small>" if self.below else ""
        remark = f'<small class="remark">{escape(self.remark)}</small>' if self.remark else ""
        return escape(self.text) + below + remark


NOTHING = Cell("-")


def spread_cell(values: Spread | None) -> Cell:
    """The median of ``values``; below it the least and the largest."""
    if values is None:
        return NOTHING
    least, most = number_text(values.least), number_text(values.most)
    return Cell(number_text(values.median), f"{least} to {most}" if values.count > 1 else "")


def ratio_cell(found: Comparison | None) -> Cell:
    """The ratio of ``found`` and its verdict; below them the interval, and what a verdict would take."""
    if found is None:
        return NOTHING
    interval = f"{found.low:.2f} to {found.high:.2f}"
    if found.verdict is Verdict.SPREAD_TOO_WIDE:
        needed = f"; needs {found.rounds_needed} rounds" if found.rounds_needed else ""
        return Cell(f"{found.ratio:.2f} no verdict", interval + needed)
    return Cell(f"{found.ratio:.2f} {verdict_text(found)}", interval)


def limit_cell(found: Comparison | None) -> Cell:
    """The comparison ``found`` with a limit; where that was passed, a sentence says what it is worth."""
    cell = ratio_cell(found)
    return cell if found is None else replace(cell, remark=limit_text(found))


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell | str]],
    *,
    numbers: Container[int] = (),
    grouped: bool = False,
) -> str:
    """Return a table. Wide ones scroll by themselves; a reader without a mouse reaches them with the keyboard.

    Args:
        caption: Above it.
        heads: Of the columns.
        rows: Cells, or their texts.
        numbers: The columns that are set right.
        grouped: Rows with the same first cell share it.
    """

    def kind(column: int) -> str:
        return " class=number" if column in numbers else ""

    head = "".join(f'<th scope="col"{kind(n)}>{escape(text)}</th>' for n, text in enumerate(heads))
    lines = []
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    for _, some in groupby(made, key=lambda row: row[0] if grouped else id(row)):
        group = list(some)
        for number, row in enumerate(group):
            cells = "".join(
                f"<td{kind(n)}>{cell.html()}</td>" for n, cell in enumerate(row) if n or not grouped
            )
            first = (
                f'<th scope="rowgroup" rowspan="{len(group)}">{row[0].html()}</th>'
                if grouped and not number
                else ""
            )
            lines.append(f"<tr>{first}{cells}</tr>")
    label, body = escape(caption, quote=True), "\n".join(lines)
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table>'
        f'<caption class="aside">{label}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
