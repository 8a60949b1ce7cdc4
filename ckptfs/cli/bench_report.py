"""``bench report`` makes plots and a page; ``bench compare`` says whether one result is slower.

Both read what ``ckptfs bench`` and the scripts in benchmarks/ wrote; neither measures anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ckptfs.bench.analysis import (
    Beside,
    Compared,
    Difference,
    Spread,
    Verdict,
    compare_results,
    spread_text,
    verdict_text,
)
from ckptfs.bench.report import Report, write_report
from ckptfs.bench.results import PHASES, Phase, Result, number_text, phase_text, read_result
from ckptfs.cli.output import Answer, Exit, group_command, table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_to"]


def add_to(group: click.Group) -> None:
    """Add both commands to ``group``, the group ``bench``. Further calls do nothing."""
    if "report" not in group.commands:
        group_command(group, "report", answers=(Report,))(_report)
        group_command(group, "compare", answers=(_CompareDocument,))(_compare)


@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--out", default="bench-report", show_default=True, metavar="DIR", help="Where to write."
)
def _report(files: tuple[str, ...], out: str) -> Answer:
    """Plots (PNG, SVG) and one self-contained HTML page of results.

    The page has everything inside: it needs no network, no script and nothing beside it.
    """
    made = write_report(files, out)

    def show(console: Console) -> None:
        console.print(made.page)
        console.print(f"{len(made.plots)} plots beside it")

    return Answer(made, show)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredDocument:
    file: str
    date: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowDocument:
    workload: str
    target: str
    phase: Phase
    engine: str
    is_limit: bool
    before: Spread
    after: Spread
    ratio: float
    low: float
    high: float
    rounds: int
    verdict: Verdict
    rounds_needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompareDocument:
    before: _MeasuredDocument
    after: _MeasuredDocument
    differences: Sequence[Difference]
    rows: Sequence[_RowDocument]
    missing: Sequence[str]
    slower: int


@click.argument("before")
@click.argument("after")
@click.option("--only", multiple=True, metavar="GLOB", help="Engines, workloads or targets.")
@click.option("--phase", "phases", multiple=True, type=click.Choice(list(PHASES)))
def _compare(before: str, after: str, only: tuple[str, ...], phases: tuple[str, ...]) -> Answer:
    """Hold the result AFTER beside the result BEFORE.

    Says first what makes the two not comparable. Exit code 1 if something is slower; a spread that is
    too wide for a verdict is said, and fails nothing.
    """
    old, new = read_result(before), read_result(after)
    found = compare_results(old, new, only=only, phases=phases)
    if not found.rows:
        raise click.UsageError(_nothing(found))
    document = _CompareDocument(
        before=_MeasuredDocument(file=before, date=old.date, command=old.command),
        after=_MeasuredDocument(file=after, date=new.date, command=new.command),
        differences=found.differences,
        rows=[_row_document(row) for row in found.rows],
        missing=found.missing,
        slower=len(found.slower),
    )

    def show(console: Console) -> None:
        _show(console, {before: old, after: new}, found)

    return Answer(document, show, Exit.NO if found.slower else Exit.OK)


def _nothing(found: Compared) -> str:
    """Return why there are no rows: the filters match nothing, or the first thing left out."""
    text = "the two results have nothing in common that was asked for"
    more = f"; and {len(found.missing) - 1} more" if len(found.missing) > 1 else ""
    return f"{text} ({found.missing[0]}{more})" if found.missing else text


def _row_document(row: Beside) -> _RowDocument:
    found = row.found
    return _RowDocument(
        workload=row.workload,
        target=row.target,
        phase=row.phase,
        engine=row.engine,
        is_limit=row.is_limit,
        before=row.before,
        after=row.after,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        rounds=found.rounds,
        verdict=found.verdict,
        rounds_needed=found.rounds_needed,
    )


def _show(console: Console, runs: dict[str, Result], found: Compared) -> None:
    for name, (path, result) in zip(("before", "after"), runs.items(), strict=False):
        console.print(f"{name:7} {path}, {result.date[:19].replace('T', ' ')}: {result.command}")
    console.print()
    for title, prevents in (("not comparable", True), ("differs", False)):
        for one in found.differences:
            if one.prevents is prevents:
                console.print(f"{title}: {one.what}: {one.before} -> {one.after}")
    if found.differences:
        console.print()
    columns = ("workload", "target", "phase", "engine", "before s>", "after s>", "after/before>")
    table(console, (*columns, "verdict"), [_cells(row) for row in found.rows])
    console.print()
    for line in found.missing:
        console.print(line)
    console.print(_in_short(found.rows))


def _cells(row: Beside) -> Sequence[str]:
    found = row.found
    return (
        row.workload,
        row.target,
        phase_text(row.phase),
        row.engine + (" (limit)" * row.is_limit),
        spread_text(row.before),
        spread_text(row.after),
        f"{number_text(found.ratio)} ({number_text(found.low)}-{number_text(found.high)})",
        verdict_text(found),
    )


def _in_short(rows: Sequence[Beside]) -> str:
    counted = Counter(row.found.verdict for row in rows if not row.is_limit)
    names = {verdict: verdict.value for verdict in Verdict}
    names[Verdict.SPREAD_TOO_WIDE] = "without a verdict"
    texts = [f"{counted[verdict]} {name}" for verdict, name in names.items() if counted[verdict]]
    return ", ".join(texts) or "limits only"
