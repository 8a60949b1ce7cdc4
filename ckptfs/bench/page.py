"""A report as one HTML page: no script, nothing fetched from anywhere, plots inside of it. Pure.

    page(chapters)       a chapter per result: what was measured, plots, tables, what it was measured on

The page says of itself that it may load nothing (Content-Security-Policy), so that it can be mailed,
archived and opened anywhere. It follows the reader's dark or light colours, prints, and is read aloud:
every plot has its numbers as an alternative text, and the tables have them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ckptfs.bench.page_style import HOW_TO_READ, STYLE
from ckptfs.bench.page_table import NOTHING, Cell, limit_cell, ratio_cell, spread_cell, table
from ckptfs.bench.plots import FAINT, INK, Plot
from ckptfs.bench.results import Result
from ckptfs.bench.summary import MOVING, OURS, Row, Slowdown, rows_of, slowdowns_of
from ckptfs.bench.words import bytes_text, number_text, phase_text

__all__ = ["Chapter", "page"]

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
        _in_short(rows),
        _cached(result),
        _notes(result),
    ]
    for place, workload in enumerate(dict.fromkeys(row.workload for row in rows)):
        parts.append(_workload(f"{number}-{place}", workload, one, rows))
    parts.append(_measured_on(result))
    return f'<article aria-labelledby="result-{number}">\n' + "\n".join(parts) + "\n</article>"


def _in_short(rows: Sequence[Row]) -> str:
    """ckptfs, the fastest of the others, and the limit: what most readers came for."""
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
                _told(best.engine, ratio_cell(best.to_ours)) if best else NOTHING,
                _told(ours.limit, limit_cell(ours.to_limit)) if ours.limit else NOTHING,
            )
        )
    if not lines:
        return ""
    heads = ["workload", "phase", "ckptfs GB/s"]
    heads += ["fastest other: its seconds by ckptfs's", "limit: ckptfs's seconds by its"]
    return "<h2>In short</h2>" + table("In short", heads, lines, numbers={2}, grouped=True)


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
