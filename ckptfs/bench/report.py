"""``bench report``: plots as PNG and SVG, and one HTML page that contains all of them.

    DIR/index.html                       self-contained: no script, nothing fetched, no other file needed
    DIR/NAME-throughput-WORKLOAD.png     and .svg, for slides and other pages

``report.html.j2`` is the template of the page; this module provides its content. The page forbids the
browser to load anything (Content-Security-Policy), so it can be mailed, archived and opened anywhere. It
follows the reader's dark or light colours, can be printed, and works with a screen reader: the tables
have all numbers, and every plot has its numbers as alternative text.

Files of an earlier report with the same names are replaced, each atomically. No other file is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfs.bench.analysis import (
    CONFIDENCE,
    LEAST_PAIRS,
    MARGIN,
    MOVING,
    OURS,
    Comparison,
    Row,
    Slowdown,
    Spread,
    Verdict,
    limit_text,
    rows_of,
    slowdowns_of,
    verdict_text,
)
from ckptfs.bench.plots import FAINT, INK, Plot, plots_of
from ckptfs.bench.results import (
    Result,
    conditions_text,
    number_text,
    phase_text,
    read_result,
    write_file,
)
from ckptfs.errors import MissingDriverError
from ckptfs.text import size_text

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = [
    "NOTHING",
    "Cell",
    "Chapter",
    "Report",
    "limit_cell",
    "page",
    "ratio_cell",
    "spread_cell",
    "write_report",
]

_TEMPLATE = "report.html.j2"


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: Its text.
        below: An addition, shown smaller and below it.
        remark: A sentence below both.
    """

    text: str
    below: str = ""
    remark: str = ""


NOTHING = Cell("-")


@dataclass(frozen=True, slots=True)
class _TableView:
    """A table of the page.

    numbers: the columns that are aligned right. is_grouped: whether rows with the same first cell share
    it.
    """

    caption: str
    heads: Sequence[str]
    rows: Iterable[Sequence[Cell | str]]
    numbers: frozenset[int] = frozenset()
    is_grouped: bool = False

    @property
    def groups(self) -> list[list[list[Cell]]]:
        """The rows in groups; rows that share their first cell are one group."""
        made = [
            [cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows
        ]
        alike = groupby(made, key=lambda row: row[0] if self.is_grouped else id(row))
        return [list(rows) for _, rows in alike]


def spread_cell(values: Spread | None) -> Cell:
    """Return a cell with the median of ``values``, and below it the least and the largest."""
    if values is None:
        return NOTHING
    least, most = number_text(values.least), number_text(values.most)
    return Cell(number_text(values.median), f"{least} to {most}" if values.count > 1 else "")


def ratio_cell(found: Comparison | None) -> Cell:
    """Return a cell with a ratio and its verdict, and below them the interval.

    Without a verdict, the number of rounds that it needs follows the interval.

    Args:
        found: The comparison; None makes a cell with "-".
    """
    if found is None:
        return NOTHING
    interval = f"{found.low:.2f} to {found.high:.2f}"
    if found.verdict is Verdict.SPREAD_TOO_WIDE:
        needed = f"; needs {found.rounds_needed} rounds" if found.rounds_needed else ""
        return Cell(f"{found.ratio:.2f} no verdict", interval + needed)
    return Cell(f"{found.ratio:.2f} {verdict_text(found)}", interval)


def limit_cell(found: Comparison | None) -> Cell:
    """Return a cell for the comparison ``found`` with a limit; a remark if the limit was passed."""
    cell = ratio_cell(found)
    return cell if found is None else replace(cell, remark=limit_text(found))


# -- the page --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chapter:
    """One result and its plots.

    Attributes:
        name: The name of its file.
        result: The result.
        plots: The figures.
    """

    name: str
    result: Result
    plots: tuple[Plot, ...]


@dataclass(frozen=True, slots=True)
class _Figure:
    """A plot inside the page. svg: markup that the page includes without escaping."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class _WorkloadSection:
    """The section of the page on one workload. numbers: a table for each target."""

    name: str
    description: str
    conditions: str
    figures: list[_Figure]
    numbers: list[tuple[str, _TableView]]
    slowdowns: _TableView | None


@dataclass(frozen=True, slots=True)
class _ChapterView:
    """The chapter of the page on one result, as the template reads it."""

    name: str
    what: str
    date: str
    title: str
    measured: str
    command: str
    summary: _TableView | None
    summary_conditions: list[str]
    targets: _TableView
    engines: _TableView
    notes: Sequence[str] = ()
    workloads: list[_WorkloadSection] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def page(chapters: Sequence[Chapter]) -> str:
    """The text of the whole page with ``chapters``.

    Raises:
        MissingDriverError: jinja2 is not installed.
    """
    limits = {"confidence": CONFIDENCE, "margin": MARGIN, "least_pairs": LEAST_PAIRS}
    views = [_chapter(number, one) for number, one in enumerate(chapters, 1)]
    return _template().render(chapters=views, limits=limits) + "\n"


def _template() -> Template:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDriverError(
            "the report needs jinja2, which is not installed",
            hint="pip install 'ckptfs[bench]'",
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names in a result may be anything
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["shown"] = _value
    return environment.get_template(_TEMPLATE)


def _chapter(number: int, one: Chapter) -> _ChapterView:
    result, rows = one.result, rows_of(one.result)
    summary = _summary(rows)
    names = dict.fromkeys(row.workload for row in rows)
    return _ChapterView(
        name=one.name,
        what=result.what,
        date=result.date,
        title=_sentence(result.what),
        measured=_date(result.date),
        command=result.command,
        summary=summary,
        summary_conditions=_summary_conditions(result, summary),
        targets=_TableView(
            "Targets",
            ("target", "storage", "cached"),
            [(target.uri, target.kind, target.cached or "not said") for target in result.targets],
        ),
        engines=_engines(result),
        notes=result.notes,
        workloads=[
            _workload(f"{number}-{place}", workload, one, rows)
            for place, workload in enumerate(names)
        ],
        machine=result.machine,
        versions=result.versions,
        settings=result.settings,
    )


def _summary(rows: Sequence[Row]) -> _TableView | None:
    """Return the summary table: ckptfs, the fastest other engine, and the limit; None if empty."""
    lines: list[tuple[Cell | str, ...]] = []
    moved = [row for row in rows if row.phase in MOVING]
    for place in dict.fromkeys((row.workload, row.target, row.phase) for row in moved):
        here = [row for row in moved if (row.workload, row.target, row.phase) == place]
        ours = next((row for row in here if row.engine.startswith(OURS)), None)
        if ours is None:
            continue
        others = [r for r in here if not r.is_limit and not r.engine.startswith(OURS)]
        best = min(others, key=lambda row: row.seconds.median, default=None)
        lines.append(
            (
                Cell(place[0], place[1]),
                phase_text(place[2]),
                spread_cell(ours.gb_per_s),
                _prefixed(best.engine, ratio_cell(best.to_ours)) if best else NOTHING,
                _prefixed(ours.limit, limit_cell(ours.to_limit)) if ours.limit else NOTHING,
            )
        )
    heads = ["workload", "phase", "ckptfs GB/s"]
    heads += ["fastest other: its seconds by ckptfs's", "limit: ckptfs's seconds by its"]
    return _TableView("In short", heads, lines, frozenset({2}), is_grouped=True) if lines else None


def _summary_conditions(result: Result, summary: _TableView | None) -> list[str]:
    names = dict.fromkeys(row[0].text for row in _flat(summary))
    found = {name: conditions_text(result, name) for name in names}
    return [f"{name}: {text}" for name, text in found.items() if text]


def _flat(table: _TableView | None) -> list[list[Cell]]:
    return [row for rows in table.groups for row in rows] if table is not None else []


def _prefixed(name: str, cell: Cell) -> Cell:
    return replace(cell, text=f"{name}: {cell.text}")


def _sentence(text: str) -> str:
    return text if text.startswith(OURS) else text[:1].upper() + text[1:]


def _date(text: str) -> str:
    return text.replace("T", " ").replace("+00:00", " UTC")


# -- one workload


def _workload(prefix: str, workload: str, one: Chapter, rows: Sequence[Row]) -> _WorkloadSection:
    spec = next((w for w in one.result.workloads if w.name == workload), None)
    description = ""
    if spec is not None:
        what = f"{spec.tensors} tensors, {size_text(spec.size_bytes)} on all ranks together"
        description = "; ".join(filter(None, (spec.told, what)))
    plots = [plot for plot in one.plots if plot.workload == workload]
    here = [row for row in rows if row.workload == workload]
    slowed = [s for s in slowdowns_of(one.result) if s.workload == workload]
    return _WorkloadSection(
        name=workload,
        description=description,
        conditions=conditions_text(one.result, workload),
        figures=[_figure(f"p{prefix}-{n}", plot) for n, plot in enumerate(plots)],
        numbers=[
            (target, _numbers(f"{workload}, {target}", [r for r in here if r.target == target]))
            for target in dict.fromkeys(row.target for row in here)
        ],
        slowdowns=_slowdowns(workload, slowed) if slowed else None,
    )


def _figure(prefix: str, plot: Plot) -> _Figure:
    return _Figure(_inline(plot, prefix), f"{plot.title} ({plot.name}.png, {plot.name}.svg)")


def _inline(plot: Plot, prefix: str) -> str:
    """Return the SVG as markup for the page: unique ids, reader's colours, an alternative text."""
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], prefix), svg)  # text between tags stays
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)
    label = escape(plot.told, quote=True)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _tag(tag: str, prefix: str) -> str:
    tag = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r'\bid="', f'id="{prefix}-', tag)
    tag = re.sub(r'href="#', f'href="#{prefix}-', tag)
    tag = re.sub(r"url\(#", f"url(#{prefix}-", tag)
    return tag.replace(INK, "currentColor").replace(FAINT, "var(--faint)")


def _numbers(caption: str, rows: Sequence[Row]) -> _TableView:
    limits = dict.fromkeys(row.limit for row in rows if row.limit)
    bound = f"seconds by {next(iter(limits))}'s" if len(limits) == 1 else "seconds by the limit's"
    heads = ["phase", "engine", "rounds", "seconds", "GB/s", bound, "seconds by ckptfs's"]
    heads += ["CPU s per GB", "peak memory", "sent", "received"]
    lines: list[list[Cell | str]] = []
    for row in rows:
        limit = row.limit if len(limits) > 1 and row.limit else ""
        lines.append(
            [
                phase_text(row.phase),
                Cell(row.engine, "a limit" if row.is_limit else ""),
                str(row.seconds.count),
                spread_cell(row.seconds),
                spread_cell(row.gb_per_s),
                _named(limit_cell(row.to_limit), limit),
                ratio_cell(row.to_ours),
                spread_cell(row.cpu_s_per_gb),
                *(
                    size_text(values.median if values else None)
                    for values in (row.peak_memory_bytes, row.sent_bytes, row.received_bytes)
                ),
            ]
        )
    keep = [n for n in range(len(heads)) if any(line[n] not in {NOTHING, "-"} for line in lines)]
    return _TableView(
        caption,
        [heads[n] for n in keep],
        [[line[n] for n in keep] for line in lines],
        frozenset(range(2, len(keep))),
        is_grouped=True,
    )


def _named(cell: Cell, limit: str) -> Cell:
    """Add the name of the limit to a cell; used if rows have different limits."""
    return (
        replace(cell, below=f"{cell.below}, of {limit}") if limit and cell is not NOTHING else cell
    )


def _slowdowns(workload: str, found: Sequence[Slowdown]) -> _TableView:
    heads = ("engine", "target", "loop alone, s", "loop saving, s", "saving by alone")
    lines = [
        (
            one.engine,
            one.target,
            spread_cell(one.alone),
            spread_cell(one.saving),
            ratio_cell(one.ratio),
        )
        for one in found
    ]
    return _TableView(f"Training beside saves, {workload}", heads, lines, frozenset({2, 3, 4}))


# -- what it was measured on


def _engines(result: Result) -> _TableView:
    return _TableView(
        "Engines",
        ("engine", "version", "durable on return", "verified on load"),
        [
            (one.name + (" (limit)" * one.is_limit), one.version, one.durable, one.verified)
            for one in result.engines
        ],
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number_text(value)
    return str(value)


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report.

    Attributes:
        page: The path of the page.
        plots: The paths of all PNG and SVG files.
        results: The result files that it was made from.
    """

    page: str
    plots: tuple[str, ...]
    results: tuple[str, ...]


def write_report(files: Sequence[str | Path], out: str | Path) -> Report:
    """Write a report with a chapter for each result file.

    Args:
        files: The result files.
        out: A directory; it is made if it does not exist.

    Returns:
        What was written.

    Raises:
        NotFoundError: A file does not exist; nothing was written.
        ManifestError: A file is not a result; nothing was written.
        MissingDriverError: matplotlib or jinja2 is not installed; nothing was written.
        AccessError: The directory may not be written.
        NoSpaceError: The disk is full.
    """
    names = _names([Path(file) for file in files])
    results = [read_result(file) for file in files]
    chapters = []
    for name, result in zip(names, results, strict=True):
        plots = tuple(replace(one, name=f"{name}-{one.name}") for one in plots_of(result))
        chapters.append(Chapter(name, result, plots))
    text = page(chapters)
    directory = Path(out)
    written = []
    for chapter in chapters:
        for plot in chapter.plots:
            for ending, data in (("png", plot.png), ("svg", plot.svg.encode())):
                path = directory / f"{plot.name}.{ending}"
                write_file(path, data)
                written.append(str(path))
    index = directory / "index.html"
    write_file(index, text.encode())
    return Report(str(index), tuple(written), tuple(str(file) for file in files))


def _names(files: Sequence[Path]) -> list[str]:
    """Return the files' names without suffixes; names that occur again get a number."""
    found: list[str] = []
    for file in files:
        name, number = file.stem, 2
        while name in found:
            name, number = f"{file.stem}-{number}", number + 1
        found.append(name)
    return found
