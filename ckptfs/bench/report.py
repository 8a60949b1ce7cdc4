"""``bench report``: plots as PNG and SVG, and one HTML page with all of them inside.

    DIR/index.html                       by itself: no script, nothing fetched, no other file needed
    DIR/NAME-throughput-WORKLOAD.png     and .svg, for slides and pages of others

The page says of itself that it may load nothing (Content-Security-Policy), so that it can be mailed,
archived and opened anywhere. It follows the reader's dark or light colours, prints, and is read aloud:
every plot has its numbers as an alternative text, and the tables have them all.

Files of an earlier report with the same names are replaced, each as a whole; nothing else is touched.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

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
    bytes_text,
    conditions_text,
    number_text,
    phase_text,
    read_result,
    write_file,
)

__all__ = [
    "HOW_TO_READ",
    "NOTHING",
    "STYLE",
    "Cell",
    "Chapter",
    "Report",
    "limit_cell",
    "page",
    "ratio_cell",
    "spread_cell",
    "table",
    "write_report",
]

STYLE = """
:root { --ink: #1b1f23; --soft: #59636e; --faint: #d5dae0; --back: #ffffff; --panel: #f5f7f9;
  --link: #0059b3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a2abb5; --faint: #3a424b;
  --back: #14171a; --panel: #1d2226; --link: #7cb8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
article + article { margin-top: 5rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 1.5rem 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--faint); }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; overflow-wrap: anywhere; }
p, ul, ol { max-width: 46rem; }
a { color: var(--link); }
.kind { margin: 0; color: var(--soft); font-size: .85rem; letter-spacing: .04em; }
.lead { margin: 0 0 1rem; color: var(--soft); }
pre { background: var(--panel); padding: .75rem 1rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .875rem; }
figure { margin: 1.25rem 0 1.75rem; overflow-x: auto; }
figure svg { width: 100%; min-width: 40rem; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .8rem; margin-top: .25rem; }
.wide { overflow-x: auto; margin: .5rem 0 1rem; }
.wide:focus-visible, figure:focus-visible, a:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .8125rem; line-height: 1.3; min-width: 60%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--ink); vertical-align: bottom; }
td { border-bottom: 1px solid var(--faint); }
tbody th { font-weight: 600; color: var(--ink); border-bottom: 1px solid var(--faint);
  vertical-align: top; }
small { display: block; white-space: nowrap; font-weight: 400; color: var(--soft); font-size: .6875rem; }
small.remark { white-space: normal; font-style: italic; }
.number { text-align: right; min-width: 5.5rem; font-variant-numeric: tabular-nums; }
.aside { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 2.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0;
  font-size: .875rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { font-size: 11px; } .wide { overflow: visible; } figure, tr { break-inside: avoid; } }
"""

HOW_TO_READ = f"""
<p>Numbers are medians over the rounds, with the least and the largest in brackets. In a round
everybody has one turn, so that a slow minute of the machine counts for all of them. Inside the clock
is the call on the slowest rank; making the data and comparing what was loaded is outside. A GB is
10<sup>9</sup> bytes of tensors; CPU seconds are those of all ranks with their threads; a dash stands for
what was not, or could not be, measured.</p>
<p>A ratio belongs to one round: seconds by seconds, so that below one the engine of the row took less
time. Its brackets hold the true median ratio with {CONFIDENCE:.0%} confidence at least, by order
statistics of the rounds. <em>Faster</em> and <em>slower</em>: at least {MARGIN - 1:.0%} away from one, and the
brackets exclude one. <em>Same</em>: the brackets are within {MARGIN - 1:.0%} of one. Otherwise the spread
does not allow a verdict, and the number below says how many rounds about might; fewer than {LEAST_PAIRS} rounds never give one. A limit moves as many bytes without making a
checkpoint of them, in one simple way; where an engine is faster than that, the table says that it is no limit there.</p>
"""


# -- tables ----------------------------------------------------------------------------------------


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


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class Chapter:
    """One result, and what was drawn of it.

    Attributes:
        name: Of its file.
        result: The result.
        plots: The figures.
    """

    name: str
    result: Result
    plots: tuple[Plot, ...]


def page(chapters: Sequence[Chapter]) -> str:
    """The whole file, with these ``chapters``."""
    title = "ckptfs bench: " + "; ".join(dict.fromkeys(one.result.what for one in chapters))
    body = "\n".join(_chapter(number, one) for number, one in enumerate(chapters, 1))
    contents = _contents(chapters) if len(chapters) > 1 else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><p class="kind">ckptfs bench report</p>{contents}</header>
{body}
<section aria-labelledby="reading"><h2 id="reading">How to read this</h2>{HOW_TO_READ}</section>
</main>
</body>
</html>
"""


def _contents(chapters: Sequence[Chapter]) -> str:
    items = (
        f'<li><a href="#result-{number}">{escape(one.name)}</a>: {escape(one.result.what)}, '
        f"{escape(one.result.date[:10])}</li>"
        for number, one in enumerate(chapters, 1)
    )
    return f'<nav aria-label="Results"><ol>{"".join(items)}</ol></nav>'


def _chapter(number: int, one: Chapter) -> str:
    result, rows = one.result, rows_of(one.result)
    parts = [
        f'<h1 id="result-{number}">{escape(_sentence(result.what))}</h1>',
        f'<p class="lead">{escape(one.name)}, measured {escape(_date(result.date))}</p>',
        f"<pre><code>{escape(result.command)}</code></pre>",
        _in_short(result, rows),
        _cached(result),
        _notes(result),
    ]
    for place, workload in enumerate(dict.fromkeys(row.workload for row in rows)):
        parts.append(_workload(f"{number}-{place}", workload, one, rows))
    parts.append(_measured_on(result))
    return f'<article aria-labelledby="result-{number}">\n' + "\n".join(parts) + "\n</article>"


def _in_short(result: Result, rows: Sequence[Row]) -> str:
    """ckptfs, the fastest of the others, and the limit: what most readers came for."""
    lines: list[tuple[Cell, *tuple[Cell | str, ...]]] = []
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
                _told(best.engine, ratio_cell(best.to_ours)) if best else NOTHING,
                _told(ours.limit, limit_cell(ours.to_limit)) if ours.limit else NOTHING,
            )
        )
    if not lines:
        return ""
    heads = ["workload", "phase", "ckptfs GB/s"]
    heads += ["fastest other: its seconds by ckptfs's", "limit: ckptfs's seconds by its"]
    held = dict.fromkeys(
        f"{line[0].text}: {conditions_text(result, line[0].text)}" for line in lines
    )
    return (
        "<h2>In short</h2>"
        + table("In short", heads, lines, numbers={2}, grouped=True)
        + "".join(f"<p>Ratios of {escape(text)}.</p>" for text in held if not text.endswith(": "))
    )


def _told(name: str, cell: Cell) -> Cell:
    return replace(cell, text=f"{name}: {cell.text}")


def _sentence(text: str) -> str:
    return text if text.startswith(OURS) else text[:1].upper() + text[1:]


def _date(text: str) -> str:
    return text.replace("T", " ").replace("+00:00", " UTC")


def _cached(result: Result) -> str:
    rows = [(one.uri, one.kind, one.cached or "not said") for one in result.targets]
    return "<h2>Where, and what was cached</h2>" + table(
        "Targets", ("target", "storage", "cached"), rows
    )


def _notes(result: Result) -> str:
    if not result.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    return f"<h2>Notes</h2><ul>{items}</ul>"


# -- one workload


def _workload(prefix: str, workload: str, one: Chapter, rows: Sequence[Row]) -> str:
    told = next((w for w in one.result.workloads if w.name == workload), None)
    parts = [f"<h2>Workload: {escape(workload)}</h2>"]
    if told is not None:
        what = f"{told.tensors} tensors, {bytes_text(told.size_bytes)} on all ranks together"
        parts.append(f"<p>{escape('; '.join(filter(None, (told.told, what))))}.</p>")
    if conditions := conditions_text(one.result, workload):
        parts.append(f"<p>Ratios hold for {escape(conditions)}.</p>")
    mine = [plot for plot in one.plots if plot.workload == workload]
    parts += [_figure(f"p{prefix}-{n}", plot) for n, plot in enumerate(mine)]
    of_this = [row for row in rows if row.workload == workload]
    for target in dict.fromkeys(row.target for row in of_this):
        shown = [row for row in of_this if row.target == target]
        parts.append(f"<h3>{escape(target)}</h3>" + _numbers(f"{workload}, {target}", shown))
    slowed = [s for s in slowdowns_of(one.result) if s.workload == workload]
    if slowed:
        parts.append("<h3>Training beside saves</h3>" + _slowdowns(workload, slowed))
    return "\n".join(parts)


def _figure(prefix: str, plot: Plot) -> str:
    caption = escape(f"{plot.title} ({plot.name}.png, {plot.name}.svg)")
    drawn = _inline(plot, prefix)
    return f'<figure tabindex="0">{drawn}<figcaption>{caption}</figcaption></figure>'


def _inline(plot: Plot, prefix: str) -> str:
    """The SVG inside of the page: its own ids, the reader's colours, its words for a screen reader."""
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], prefix), svg)  # names between tags stay
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)
    told = escape(plot.told, quote=True)
    return svg.replace("<svg", f'<svg role="img" aria-label="{told}"', 1).strip()


def _tag(tag: str, prefix: str) -> str:
    tag = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r'\bid="', f'id="{prefix}-', tag)
    tag = re.sub(r'href="#', f'href="#{prefix}-', tag)
    tag = re.sub(r"url\(#", f"url(#{prefix}-", tag)
    return tag.replace(INK, "currentColor").replace(FAINT, "var(--faint)")


def _numbers(caption: str, rows: Sequence[Row]) -> str:
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
                    bytes_text(values.median if values else None)
                    for values in (row.peak_memory_bytes, row.sent_bytes, row.received_bytes)
                ),
            ]
        )
    keep = [n for n in range(len(heads)) if any(line[n] not in {NOTHING, "-"} for line in lines)]
    return table(
        caption,
        [heads[n] for n in keep],
        [[line[n] for n in keep] for line in lines],
        numbers=range(2, len(keep)),
        grouped=True,
    )


def _named(cell: Cell, limit: str) -> Cell:
    """Where rows have different limits, each says which."""
    return (
        replace(cell, below=f"{cell.below}, of {limit}") if limit and cell is not NOTHING else cell
    )


def _slowdowns(workload: str, found: Sequence[Slowdown]) -> str:
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
    return table(f"Training beside saves, {workload}", heads, lines, numbers={2, 3, 4})


# -- what it was measured on


def _measured_on(result: Result) -> str:
    engines = [
        (one.name + (" (limit)" * one.is_limit), one.version, one.durable, one.verified)
        for one in result.engines
    ]
    parts = [
        "<h2>Engines</h2>",
        table("Engines", ("engine", "version", "durable on return", "verified on load"), engines),
        "<h2>Measured on</h2>",
        '<div class="columns">',
        *(
            f"<div><h3>{name}</h3>{_values(values)}</div>"
            for name, values in (
                ("Machine", result.machine),
                ("Versions", result.versions),
                ("Settings", result.settings),
            )
            if values
        ),
        "</div>",
    ]
    return "\n".join(parts)


def _values(values: Mapping[str, Any]) -> str:
    items = (
        f"<dt>{escape(str(key).replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd>"
        for key, value in values.items()
    )
    return f"<dl>{''.join(items)}</dl>"


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
    """What was written.

    Attributes:
        page: The path of the page.
        plots: The paths of all PNG and SVG files.
        results: The files that it was made of.
    """

    page: str
    plots: tuple[str, ...]
    results: tuple[str, ...]


def write_report(files: Sequence[str | Path], out: str | Path) -> Report:
    """Write a report of result files, a chapter each.

    Args:
        files: The result files.
        out: A directory, which is made where it is missing.

    Returns:
        What was written.

    Raises:
        NotFoundError: A file is not there; nothing was written.
        ManifestError: A file is no result; nothing was written.
        MissingDriverError: matplotlib is not installed; nothing was written.
        AccessError: The directory may not be written.
        NoSpaceError: The disk is full.
    """
    names = _names([Path(file) for file in files])
    results = [read_result(file) for file in files]
    chapters = []
    for name, result in zip(names, results, strict=True):
        plots = tuple(replace(one, name=f"{name}-{one.name}") for one in plots_of(result))
        chapters.append(Chapter(name, result, plots))
    directory = Path(out)
    written = []
    for chapter in chapters:
        for plot in chapter.plots:
            for ending, data in (("png", plot.png), ("svg", plot.svg.encode())):
                path = directory / f"{plot.name}.{ending}"
                write_file(path, data)
                written.append(str(path))
    index = directory / "index.html"
    write_file(index, page(chapters).encode())
    return Report(str(index), tuple(written), tuple(str(file) for file in files))


def _names(files: Sequence[Path]) -> list[str]:
    """The files' names without endings; two that are alike get a number."""
    found: list[str] = []
    for file in files:
        name, number = file.stem, 2
        while name in found:
            name, number = f"{file.stem}-{number}", number + 1
        found.append(name)
    return found
