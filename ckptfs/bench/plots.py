"""A result as plots: throughput, costs, and the spread of the rounds.

    plots_of(result)     one Plot per metric and workload that has samples: PNG, SVG, words
      throughput         GB/s of save, cold and warm load
      cpu                CPU seconds per GB
      memory             what a call added to the largest rank's memory
      training           the stall of an asynchronous save, and the loop with and without it

There is a row of panels per target, a column per phase, and a bar per engine. The length of a bar is the
median; the thick line spans the middle half of the rounds, the thin one all of them. Limits are grey and
hatched. Each panel has its own axis, which begins at zero. The colours are those of Okabe and Ito, which
colour-blind people can distinguish; every bar also has its name and its number.

Only this module imports matplotlib, and without pyplot: no window, and no global state except its
settings, which are restored. ``INK`` and ``FAINT`` are the only colours of lines and letters, so that a
page with a dark background can replace them.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptfs.bench.analysis import MOVING, Row, Spread, rows_of
from ckptfs.bench.results import Phase, Result, number_text, phase_text
from ckptfs.errors import MissingDriverError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FAINT", "INK", "Plot", "plots_of"]

INK, FAINT = "#1b1f23", "#c9ced4"
_LIMIT = "#9aa2ab"
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6bb1", "#b3a600")
_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.color": "#ffffff",
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a name with a dollar sign is not a formula
    "text.usetex": False,  # whatever the user's own settings say
    "axes.formatter.use_mathtext": False,
    "svg.fonttype": "none",  # text stays text: small, and it can be searched and read aloud
    "svg.hashsalt": "ckptfs",  # the same file for the same result
}
_WIDTH_IN, _BAR_IN, _HEAD_IN = 9.6, 0.27, 0.62  # a figure, a bar, the space around a panel
_DOTS_PER_INCH = 150
_LEGEND = (
    "bar: median; thick line: middle half of the rounds; thin line: all of them; hatched: a limit"
)
_LEAST = 1e-9  # in any unit: below it there is nothing to draw, and no axis could be made
_LONGEST = 90  # characters of a target in a title


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure.

    Attributes:
        name: The name of its files, without a suffix.
        metric: What it shows.
        workload: The workload that it is about.
        title: Its title.
        told: Its content in words.
        png: The PNG file's bytes.
        svg: The SVG file's text.
    """

    name: str
    metric: str
    workload: str
    title: str
    told: str
    png: bytes
    svg: str


@dataclass(frozen=True, slots=True)
class _Metric:
    """What a figure shows. units: (name, size), smallest first; the largest that fits is used."""

    name: str
    title: str
    better: str
    phases: tuple[Phase, ...]
    of: Callable[[Row], Spread | None]
    units: tuple[tuple[str, float], ...]


_METRICS = (
    _Metric(
        "throughput",
        "Throughput",
        "more is better",
        MOVING,
        lambda row: row.gb_per_s,
        (("MB/s", 1e-3), ("GB/s", 1.0)),
    ),
    _Metric(
        "cpu",
        "CPU seconds per GB",
        "less is better",
        MOVING,
        lambda row: row.cpu_s_per_gb,
        (("CPU s per GB", 1.0),),
    ),
    _Metric(
        "memory",
        "Peak memory that a call adds, largest rank",
        "less is better",
        MOVING,
        lambda row: row.peak_memory_bytes,
        (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)),
    ),
    _Metric(
        "training",
        "Training during asynchronous saves",
        "less is better",
        ("stall", "steps", "steps_saving"),
        lambda row: row.seconds,
        (("ms", 1e-3), ("s", 1.0)),
    ),
)


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Everything that one figure shows. cells: the values, by target, phase and engine."""

    metric: _Metric
    workload: str
    targets: tuple[str, ...]
    phases: tuple[Phase, ...]
    engines: tuple[str, ...]
    limits: frozenset[str]
    cells: dict[tuple[str, str, str], Spread]
    unit: str
    one: float


def plots_of(result: Result) -> tuple[Plot, ...]:
    """Every figure that the samples of a result allow.

    Args:
        result: The result.

    Raises:
        MissingDriverError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDriverError(
            "plots need matplotlib, which is not installed",
            hint="pip install 'ckptfs[bench]'",
        ) from error
    colours = _colours(result)
    rows = rows_of(result)
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # A character that no font has becomes a box in the PNG; in the SVG it stays text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        plots = tuple(
            _drawn(sheet, _titles(result), colours)
            for metric in _METRICS
            for workload in dict.fromkeys(row.workload for row in rows)
            if (sheet := _sheet(metric, workload, rows)) is not None
        )
    return tuple(_apart(plots))


def _apart(plots: Sequence[Plot]) -> Iterator[Plot]:
    """Give plots different file names, even if workloads differ only in replaced characters."""
    used: set[str] = set()
    for plot in plots:
        name, number = plot.name, 2
        while name in used:
            name, number = f"{plot.name}-{number}", number + 1
        used.add(name)
        yield replace(plot, name=name)


def _colours(result: Result) -> dict[str, str]:
    """Return one colour per engine, for all figures."""
    names = [engine.name for engine in result.engines if not engine.is_limit]
    return {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(names)}


def _titles(result: Result) -> dict[str, str]:
    return {
        one.uri: ", ".join(filter(None, (_shortened(one.uri), _shortened(one.kind))))
        for one in result.targets
    }


def _shortened(text: str) -> str:
    text, half = _printable(text), _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


def _printable(text: str) -> str:
    """Replace unprintable characters: a control character would make the SVG invalid."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def _sheet(metric: _Metric, workload: str, rows: Sequence[Row]) -> _Sheet | None:
    """Return what a figure shows; None if nothing of it was measured."""
    selected = [row for row in rows if row.workload == workload and row.phase in metric.phases]
    cells: dict[tuple[str, str, str], Spread] = {
        (row.target, row.phase, row.engine): values
        for row in selected
        if (values := metric.of(row)) is not None
    }
    if not any(values.most > _LEAST for values in cells.values()):
        return None
    shown = [row for row in selected if (row.target, row.phase, row.engine) in cells]
    largest = max(values.median for values in cells.values())
    fitting = [unit for unit in metric.units if largest >= 0.1 * unit[1]] or [metric.units[0]]
    engines = dict.fromkeys(row.engine for row in shown if not row.is_limit)
    limits = dict.fromkeys(row.engine for row in shown if row.is_limit)
    return _Sheet(
        metric,
        workload,
        targets=tuple(dict.fromkeys(row.target for row in shown)),
        phases=tuple(phase for phase in metric.phases if any(r.phase == phase for r in shown)),
        engines=(*engines, *limits),
        limits=frozenset(limits),
        cells=cells,
        unit=fitting[-1][0],
        one=fitting[-1][1],
    )


def _drawn(sheet: _Sheet, titles: dict[str, str], colours: dict[str, str]) -> Plot:
    from matplotlib.figure import Figure

    panel = _HEAD_IN + _BAR_IN * len(sheet.engines)
    height = 0.75 + len(sheet.targets) * (panel + 0.25)
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    parts = figure.subfigures(len(sheet.targets), 1, squeeze=False, hspace=0.02)[:, 0]
    for target, part in zip(sheet.targets, parts, strict=True):
        part.suptitle(
            titles.get(target, _shortened(target)), x=0.012, ha="left", fontsize=9, color=INK
        )
        axes = part.subplots(1, len(sheet.phases), squeeze=False, sharey=True)[0]
        for column, (phase, axis) in enumerate(zip(sheet.phases, axes, strict=True)):
            _panel(axis, sheet, target, phase, colours)
            if column:
                axis.tick_params(labelleft=False)
    title = f"{sheet.metric.title}: {_shortened(sheet.workload)}"
    figure.suptitle(
        f"{title} ({sheet.unit}, {sheet.metric.better})",
        x=0.012,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    figure.supxlabel(_LEGEND, x=0.012, ha="left", fontsize=7.5)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is done: it is not repeated for each file
    name = f"{sheet.metric.name}-{re.sub(r'[^A-Za-z0-9._-]+', '-', sheet.workload)}"
    return Plot(
        name,
        sheet.metric.name,
        sheet.workload,
        title,
        _in_words(sheet, titles),
        _bytes(figure, "png", facecolor="white", dpi=_DOTS_PER_INCH),
        _bytes(figure, "svg", facecolor="none", transparent=True).decode(),
    )


def _panel(axis: Axes, sheet: _Sheet, target: str, phase: str, colours: dict[str, str]) -> None:
    found = {
        e: sheet.cells[key] for e in sheet.engines if (key := (target, phase, e)) in sheet.cells
    }
    most = max((values.most for values in found.values()), default=0.0) / sheet.one or 1.0
    for place, engine in enumerate(sheet.engines):
        if engine not in found:
            axis.text(0.01 * most, place, "not measured", va="center", fontsize=7.5, alpha=0.65)
            continue
        values = found[engine]
        parts = (values.median, values.least, values.lower, values.upper, values.most)
        middle, least, lower, upper, largest = (part / sheet.one for part in parts)
        is_limit = engine in sheet.limits
        axis.barh(
            place,
            middle,
            height=0.66,
            color=_LIMIT if is_limit else colours.get(engine, _COLOURS[0]),
            hatch="////" if is_limit else None,
            linewidth=0,
        )
        if values.count > 1:
            axis.plot([least, largest], [place, place], color=INK, linewidth=0.9)
            axis.plot(
                [lower, upper], [place, place], color=INK, linewidth=3.0, solid_capstyle="butt"
            )
        end = max(middle, largest) + 0.02 * most
        axis.text(end, place, number_text(middle), va="center", fontsize=8)
    axis.set_title(_shortened(phase_text(phase)), fontsize=9, loc="left", color=INK)
    axis.set_xlim(0, 1.25 * most)
    axis.set_ylim(len(sheet.engines) - 0.45, -0.55)
    axis.set_yticks(range(len(sheet.engines)), labels=[_shortened(one) for one in sheet.engines])
    axis.locator_params(axis="x", nbins=5, prune="upper")
    axis.tick_params(length=0, labelsize=8)
    axis.grid(axis="x", color=FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)
    axis.spines["left"].set_linewidth(0.8)


def _in_words(sheet: _Sheet, titles: dict[str, str]) -> str:
    """Return the alternative text of a figure, with all its medians."""
    sentences = []
    for target in sheet.targets:
        for phase in sheet.phases:
            numbers = [
                f"{engine} {number_text(sheet.cells[target, phase, engine].median / sheet.one)}"
                for engine in sheet.engines
                if (target, phase, engine) in sheet.cells
            ]
            sentences.append(
                f"{titles.get(target, target)}, {phase_text(phase)}: {', '.join(numbers)}."
            )
    head = (
        f"{sheet.metric.title}, {sheet.workload}, medians in {sheet.unit}, {sheet.metric.better}."
    )
    return " ".join([head, *sentences])


def _bytes(figure: Figure, ending: str, **settings: Any) -> bytes:
    # Without a date, so that the same result gives the same file.
    nothing = {"Date": None} if ending == "svg" else {}
    made = io.BytesIO()
    figure.savefig(made, format=ending, metadata=nothing, **settings)
    return made.getvalue()
