"""Turn single samples into verdicts: rows of a table, comparisons of two results, and texts. Pure.

    spread, compare_paired, compare_apart     values -> Spread, Comparison: ratio, interval, verdict
    rows_of(result)        one row per workload, target, phase and engine, in the order of the result
      .to_limit            its seconds divided by those of the fastest limit, round by round
      .to_ours             its seconds divided by those of the first engine with a name ckptfs...
    slowdowns_of(result)   how much slower a training loop was while an engine saved during it
    compare_results(before, after)   -> Compared
      differences     what the runs do not share; those that ``prevent`` a comparison come first
      rows            one per workload, target, phase and engine that both have: a ratio and a verdict
      missing         what only one of them has, or has no ratio: nothing is dropped silently
      slower          rows that are slower, without the limits

A ratio is seconds divided by seconds: below one, the engine that is named first is faster. Its interval
contains the true median ratio with a probability of at least ``CONFIDENCE``, whatever the distribution.
It comes from order statistics (the sign test) for pairs, and from the shift interval of the rank sum test
for separate runs. Neither needs a model or a bootstrap, so the same samples always give the same answer,
in whatever order they come.

    SAME              the whole interval is within ``MARGIN`` of one
    FASTER, SLOWER    the ratio is at least ``MARGIN`` away from one, and the interval excludes one
    SPREAD_TOO_WIDE   neither: the spread does not allow a verdict; ``rounds_needed`` rounds may

No verdict is possible from fewer than five pairs, or three rounds on each side.

The ratios within one result come from the same rounds: an engine that was measured in a slow minute is
compared with the others in that minute. Two results never took turns, so their rounds are not paired, and
the interval is that for separate runs. A limit that both measured is the control: if the raw storage
became faster or slower, the machine changed, and a verdict about an engine may show no more than that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from ckptfs.bench.results import (
    PHASES,
    Phase,
    Result,
    Sample,
    number_text,
    phase_text,
    seconds_text,
)

__all__ = [
    "CONFIDENCE",
    "LEAST_APART",
    "LEAST_PAIRS",
    "MARGIN",
    "MOST_ROUNDS",
    "MOVING",
    "OURS",
    "Beside",
    "Compared",
    "Comparison",
    "Difference",
    "Row",
    "Slowdown",
    "Spread",
    "Verdict",
    "compare_apart",
    "compare_paired",
    "compare_results",
    "grouped",
    "interval_text",
    "limit_text",
    "rows_of",
    "slowdowns_of",
    "spread",
    "spread_text",
    "verdict_text",
]

MARGIN = 1.05  # smaller differences do not matter, and no machine here repeats better than that
CONFIDENCE = 0.90
LEAST_PAIRS = 5  # the least and the largest of five enclose the median with 1 - 2 / 2^5 = 94 %
LEAST_APART = 3  # on each side: a complete separation happens by chance in 10 %
MOST_ROUNDS = 999  # a benchmark is not repeated more often: above it no number is given


class Verdict(Enum):
    """What the samples allow to say about the side that is named first.

    Attributes:
        FASTER: It is faster.
        SLOWER: It is slower.
        SAME: They are the same.
        SPREAD_TOO_WIDE: No verdict is possible.
    """

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    SPREAD_TOO_WIDE = "spread too wide"


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of some values.

    Attributes:
        count: How many values.
        median: Their median.
        least: The least.
        lower: The lower quartile (inclusive).
        upper: The upper quartile (inclusive).
        most: The largest.
    """

    count: int
    median: float
    least: float
    lower: float
    upper: float
    most: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of seconds, its interval and the verdict.

    Attributes:
        ratio: The ratio.
        low: The lower end of its interval.
        high: The upper end of its interval.
        rounds: The number of pairs, or of rounds on the smaller side of separate runs.
        verdict: The verdict.
        rounds_needed: With SPREAD_TOO_WIDE, about how many rounds would give a verdict if ratio and
            spread stay the same; None if there is a verdict already, or if more than ``MOST_ROUNDS``
            would be needed.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    verdict: Verdict
    rounds_needed: int | None = None


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value.

    Args:
        values: The values.

    Raises:
        ValueError: There is no value.
    """
    if not values:
        raise ValueError("no values: nothing to take a median of")
    ordered = sorted(values)
    lower = upper = ordered[0]
    if len(ordered) > 1:
        lower, _, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    middle = statistics.median(ordered)
    return Spread(len(ordered), middle, ordered[0], lower, upper, ordered[-1])


def compare_paired(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Compare the seconds of two engines round by round.

    Args:
        ours: The seconds of the first, one value for each round.
        theirs: The seconds of the second, one value for each round.

    Returns:
        Ours divided by theirs.

    Raises:
        ValueError: They differ in length, are empty, or have values that are not above zero.
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"{len(ours)} rounds against {len(theirs)}: pairs need the same number of rounds"
        )
    logs = sorted(
        ours_log - theirs_log
        for ours_log, theirs_log in zip(_logs(ours), _logs(theirs), strict=True)
    )
    left_out = _left_out_of_pairs(len(logs))
    return _judged(logs, left_out, rounds=len(logs), least=LEAST_PAIRS)


def compare_apart(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare the seconds of two separate runs.

    Args:
        before: The seconds of the earlier run.
        after: The seconds of the later run.

    Returns:
        After divided by before.

    Raises:
        ValueError: One is empty, or has values that are not above zero.
    """
    old, new = _logs(before), _logs(after)
    logs = sorted(b - a for a in old for b in new)
    left_out = _left_out_apart(len(old), len(new))
    return _judged(logs, left_out, rounds=min(len(old), len(new)), least=LEAST_APART)


def _logs(values: Sequence[float]) -> list[float]:
    if not values or min(values) <= 0:
        raise ValueError("a ratio needs at least one value, and all of them above zero")
    return [math.log(value) for value in values]


def _judged(logs: list[float], left_out: int | None, *, rounds: int, least: int) -> Comparison:
    """Return the comparison for sorted logarithms of ratios.

    left_out: how many the interval leaves out at each end; None: too few for an interval. In logarithms a
    ratio and its inverse are equally far from one, so swapping the sides swaps the verdict.
    """
    ratio = statistics.median(logs)
    beyond = left_out or 0
    low, high = logs[beyond], logs[len(logs) - 1 - beyond]
    verdict = Verdict.SPREAD_TOO_WIDE if left_out is None else _verdict(ratio, low, high)
    needed = None
    if verdict is Verdict.SPREAD_TOO_WIDE:
        needed = _rounds_needed(ratio, max(high - ratio, ratio - low), rounds, least)
    return Comparison(math.exp(ratio), math.exp(low), math.exp(high), rounds, verdict, needed)


def _verdict(ratio: float, low: float, high: float) -> Verdict:
    margin = math.log(MARGIN)
    if -margin <= low and high <= margin:
        return Verdict.SAME
    if ratio <= -margin and high < 0:
        return Verdict.FASTER
    if ratio >= margin and low > 0:
        return Verdict.SLOWER
    return Verdict.SPREAD_TOO_WIDE


def _rounds_needed(ratio: float, half: float, rounds: int, least: int) -> int | None:
    """Return about how many rounds a verdict needs; None if they are too many.

    half: half of the interval. It shrinks with the root of the rounds, and must become small enough to
    exclude one, or to be within the margin.
    """
    margin = math.log(MARGIN)
    limit = abs(ratio) if abs(ratio) >= margin else margin - abs(ratio)
    if half <= limit:  # it is small enough already, but there were too few rounds for an interval
        return max(least, rounds + 1)
    grow = (half / limit) ** 2 if limit > 0 else math.inf
    if rounds * grow > MOST_ROUNDS:
        return None
    return max(least, rounds + 1, math.ceil(rounds * grow))


def _left_out_of_pairs(count: int) -> int | None:
    """Return how many ratios the median's interval leaves out at each end; None: too few pairs.

    The number of values below the true median is distributed like the heads of ``count`` coin tosses.
    """
    chance, left_out = 0.0, None
    for k in range((count + 1) // 2):
        chance += 2 * math.comb(count, k) / 2**count
        if chance > 1 - CONFIDENCE:
            break
        left_out = k
    return left_out


def _left_out_apart(before: int, after: int) -> int | None:
    """As ``_left_out_of_pairs`` for two separate runs, from the distribution of the rank sum."""
    ways = _rank_sums(before, after)
    chance, left_out = 0.0, None
    for k in range((before * after + 1) // 2):
        chance += 2 * ways[k] / math.comb(before + after, before)
        if chance > 1 - CONFIDENCE + 1e-12:  # for three and three, 2 / 20 must count as 10 %
            break
        left_out = k
    return left_out


def _rank_sums(before: int, after: int) -> list[int]:
    """Return, for every u, in how many orders u of the before x after pairs are inverted.

    These are the coefficients of prod (1 - q^(after + i)) / (1 - q^i) for i from 1 to before.
    """
    top = before * after
    ways = [1, *[0] * top]
    for i in range(1, before + 1):
        for u in range(top, after + i - 1, -1):
            ways[u] -= ways[u - after - i]
        for u in range(i, top + 1):
            ways[u] += ways[u - i]
    return ways


# -- in words --------------------------------------------------------------------------------------


def spread_text(values: Spread) -> str:
    """Return ``1.23 (1.10-1.40)``: median, least and largest of ``values``."""
    if values.count == 1:
        return number_text(values.median)
    least, most = number_text(values.least), number_text(values.most)
    return f"{number_text(values.median)} ({least}-{most})"


def interval_text(found: Comparison) -> str:
    """Return ``0.84 (0.80-0.90)``: the ratio of ``found`` and its interval."""
    return f"{found.ratio:.2f} ({found.low:.2f}-{found.high:.2f})"


def verdict_text(found: Comparison) -> str:
    """The verdict of ``found`` in words; without one, how many rounds it might take."""
    if found.verdict is not Verdict.SPREAD_TOO_WIDE:
        return str(found.verdict.value)
    if found.rounds_needed is None:
        return "the spread does not allow a verdict"
    return f"the spread does not allow a verdict; about {found.rounds_needed} rounds might"


def limit_text(to_limit: Comparison) -> str:
    """Return a remark if an engine took less time than its limit; "" if it did not.

    An engine within ``MARGIN`` of the limit has reached it, but not passed it.

    Args:
        to_limit: The engine's seconds divided by those of its limit.
    """
    if to_limit.verdict is Verdict.FASTER:
        return "faster than the limit: it is no limit here"
    if to_limit.verdict is Verdict.SPREAD_TOO_WIDE and to_limit.ratio <= 1 / MARGIN:
        return "its median is faster than the limit, without a verdict"
    return ""


# -- rows of a result ------------------------------------------------------------------------------


OURS = "ckptfs"
MOVING: tuple[Phase, ...] = ("save", "load_cold", "load_warm")  # all bytes move in the timed call


@dataclass(frozen=True, slots=True)
class Row:
    """One engine in one phase.

    Attributes:
        workload: The name of the workload.
        target: The target's URI.
        phase: "save", "load_cold", "load_warm", "stall", "steps" or "steps_saving".
        engine: The name of the engine.
        is_limit: Whether it moves raw bytes and is a limit for the others.
        seconds: The seconds of its calls.
        gb_per_s: GB per second, with 10^9 bytes in a GB; None if not all bytes move in the timed call.
        cpu_s_per_gb: CPU seconds per GB; None if not all bytes move in the timed call.
        peak_memory_bytes: Bytes of memory; None if they could not be measured.
        sent_bytes: Bytes sent; None if they could not be measured.
        received_bytes: Bytes received; None if they could not be measured.
        limit: The engine that ``to_limit`` compares with; None if there is none.
        to_limit: Its seconds divided by those of the limit; None for the limit itself, and if no round
            has both.
        to_ours: Its seconds divided by those of ckptfs; None for ckptfs itself, and if no round has both.
    """

    workload: str
    target: str
    phase: Phase
    engine: str
    is_limit: bool
    seconds: Spread
    gb_per_s: Spread | None
    cpu_s_per_gb: Spread | None
    peak_memory_bytes: Spread | None
    sent_bytes: Spread | None
    received_bytes: Spread | None
    limit: str | None = None
    to_limit: Comparison | None = None
    to_ours: Comparison | None = None


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A training loop alone, and the same loop while an engine saved.

    Attributes:
        workload: The name of the workload.
        target: The target's URI.
        engine: The name of the engine.
        alone: Seconds of the loop alone.
        saving: Seconds of the loop with saves.
        ratio: ``saving`` divided by ``alone``; None if no round has both.
    """

    workload: str
    target: str
    engine: str
    alone: Spread
    saving: Spread
    ratio: Comparison | None


_Where = tuple[str, str, Phase]  # workload, target, phase
_Groups = dict[_Where, dict[str, list[Sample]]]


def rows_of(result: Result) -> tuple[Row, ...]:
    """Return a row for each workload, target, phase and engine of ``result`` that was measured."""
    limits = {engine.name for engine in result.engines if engine.is_limit}
    order = [engine.name for engine in result.engines]
    return tuple(
        row for where, engines in grouped(result) for row in _rows_at(where, engines, limits, order)
    )


def slowdowns_of(result: Result) -> tuple[Slowdown, ...]:
    """Return the slowdown of a training loop by every engine of ``result`` that saved during it.

    The loop alone may have been measured only once for all engines.

    Args:
        result: The result.
    """
    groups = dict(grouped(result))
    order = [engine.name for engine in result.engines]
    found = []
    for (workload, target, phase), engines in groups.items():
        alone = groups.get((workload, target, "steps"))
        if phase != "steps_saving" or not alone:
            continue
        for engine in sorted(engines, key=lambda name: _at(order, name)):
            saving = engines[engine]
            without_saves = alone.get(engine) or next(iter(alone.values()))
            found.append(
                Slowdown(
                    workload,
                    target,
                    engine,
                    spread([one.wall_s for one in without_saves]),
                    spread([one.wall_s for one in saving]),
                    _paired(saving, without_saves),
                )
            )
    return tuple(found)


def grouped(result: Result) -> list[tuple[_Where, dict[str, list[Sample]]]]:
    """Return the samples of ``result`` by workload, target and phase, and by engine within these.

    The groups are in the order of the report.

    Args:
        result: The result.
    """
    groups: _Groups = defaultdict(lambda: defaultdict(list))
    for one in result.samples:
        groups[one.workload, one.target, one.phase][one.engine].append(one)
    names = [one.name for one in result.workloads]
    uris = [one.uri for one in result.targets]
    phases: list[str] = list(PHASES)

    def place(where: _Where) -> tuple[int, int, int]:
        workload, target, phase = where
        return _at(names, workload), _at(uris, target), _at(phases, phase)

    return [(where, groups[where]) for where in sorted(groups, key=place)]


def _at(order: list[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _rows_at(
    where: _Where, engines: dict[str, list[Sample]], limits: set[str], order: list[str]
) -> Iterable[Row]:
    names = sorted(engines, key=lambda name: (name in limits, _at(order, name)))
    bounds = {name: spread([s.wall_s for s in engines[name]]) for name in names if name in limits}
    limit = min(bounds, key=lambda name: bounds[name].median, default=None)
    ours = next((name for name in names if name.startswith(OURS)), None)
    for name in names:
        samples = engines[name]
        moves = where[2] in MOVING
        yield Row(
            *where,
            engine=name,
            is_limit=name in limits,
            seconds=spread([one.wall_s for one in samples]),
            gb_per_s=spread([one.gb_per_s for one in samples]) if moves else None,
            cpu_s_per_gb=spread([one.cpu_s_per_gb for one in samples]) if moves else None,
            peak_memory_bytes=_known(samples, lambda one: one.peak_memory_bytes),
            sent_bytes=_known(samples, lambda one: one.sent_bytes),
            received_bytes=_known(samples, lambda one: one.received_bytes),
            limit=None if name in limits else limit,
            to_limit=_ratio_to(engines, name, limit) if name not in limits else None,
            to_ours=_ratio_to(engines, name, ours),
        )


def _ratio_to(engines: dict[str, list[Sample]], name: str, other: str | None) -> Comparison | None:
    if other is None or other == name:
        return None
    return _paired(engines[name], engines[other])


def _paired(these: list[Sample], those: list[Sample]) -> Comparison | None:
    """Compare the rounds that both have; None if there are none. Untimed samples are left out."""
    left = {one.round: one.wall_s for one in these if one.is_timed}
    right = {one.round: one.wall_s for one in those if one.is_timed}
    rounds = sorted(left.keys() & right.keys())
    if not rounds:
        return None
    return compare_paired([left[n] for n in rounds], [right[n] for n in rounds])


def _known(samples: list[Sample], of: Callable[[Sample], int | None]) -> Spread | None:
    values = [float(value) for value in map(of, samples) if value is not None]
    return spread(values) if values else None


# -- two results side by side ----------------------------------------------------------------------


_DECIDES = ("cpu", "cores", "memory_gib", "filesystem")  # these prevent a comparison of machines
# Settings that do not prevent a comparison; all others do.
_HARMLESS = frozenset({"rounds", "within_s", "warm_up_rounds", "engines"})
_ALIKE = 1.1  # memory of two machines of one kind differs by what the firmware takes
_MEASURED = 2.0  # measured properties of a machine, such as fsync_ms, count from this factor on


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in both runs.

    Attributes:
        what: What it is.
        before: Its value in the first run.
        after: Its value in the second run.
        prevents: Whether it makes the numbers incomparable, in spite of the verdicts.
    """

    what: str
    before: str
    after: str
    prevents: bool


@dataclass(frozen=True, slots=True)
class Beside:
    """One engine in one phase, in both runs.

    Attributes:
        workload: The name of the workload.
        target: The target's URI.
        phase: "save", "load_cold", "load_warm", "stall", "steps" or "steps_saving".
        engine: The name of the engine.
        is_limit: Whether it moves raw bytes and is a limit for the others.
        before: Seconds of the first run.
        after: Seconds of the second run.
        found: The second run divided by the first.
    """

    workload: str
    target: str
    phase: Phase
    engine: str
    is_limit: bool
    before: Spread
    after: Spread
    found: Comparison


@dataclass(frozen=True, slots=True)
class Compared:
    """Two results in comparison; see the module.

    Attributes:
        differences: What differs between the two runs in addition to the numbers.
        rows: Each engine in each phase. Empty if the two, after the filters, have nothing in common.
        missing: What could not be compared, in words: "only before: ...", "no time measured after: ...".
    """

    differences: tuple[Difference, ...]
    rows: tuple[Beside, ...]
    missing: tuple[str, ...]

    @property
    def slower(self) -> tuple[Beside, ...]:
        """The rows that are slower, without limits: what a CI job would fail for."""
        return tuple(
            row for row in self.rows if row.found.verdict is Verdict.SLOWER and not row.is_limit
        )


def compare_results(
    before: Result, after: Result, *, only: Sequence[str] = (), phases: Sequence[str] = ()
) -> Compared:
    """Compare a later result with an earlier one.

    Args:
        before: The earlier result.
        after: The later result.
        only: Glob patterns of engines, workloads or targets; empty: all.
        phases: Names of phases; empty: all.

    Returns:
        The comparison.
    """
    after, moved = _same_target(before, after)
    old, new = _chosen(before, only, phases), _chosen(after, only, phases)
    limits = {engine.name for engine in (*before.engines, *after.engines) if engine.is_limit}
    both = [key for key in old if key in new]
    timed = [key for key in both if _timed(old[key]) and _timed(new[key])]
    alike = [key for key in timed if _sizes(old[key]) == _sizes(new[key])]
    rows = tuple(_side_by_side(key, old[key], new[key], limits) for key in alike)
    found = [
        *moved,
        *_of_machines(before.machine, after.machine),
        *_each("setting", before.settings, after.settings, harmless=_HARMLESS),
        *_of_engines(before, after),
        *_of_limits(rows),
        *_each("version of", before.versions, after.versions, harmless=None),
    ]
    missing = [
        *(f"only before: {_name(key)}" for key in old if key not in new),
        *(f"only after: {_name(key)}" for key in new if key not in old),
        *(_untimed(key, old[key], new[key]) for key in both if key not in timed),
        *(f"of another size: {_name(key)}" for key in timed if key not in alike),
    ]
    return Compared(tuple(sorted(found, key=lambda one: not one.prevents)), rows, tuple(missing))


_Key = tuple[str, str, Phase, str]  # workload, target, phase, engine


def _name(key: _Key) -> str:
    workload, target, phase, engine = key
    return f"{engine}, {phase_text(phase)} of {workload} at {target}"


# -- rows


def _chosen(result: Result, only: Sequence[str], phases: Sequence[str]) -> dict[_Key, list[Sample]]:
    return {
        (*where, engine): samples
        for where, engines in grouped(result)
        for engine, samples in engines.items()
        if (not phases or where[2] in phases) and _is_selected((engine, *where[:2]), only)
    }


def _is_selected(names: Sequence[str], only: Sequence[str]) -> bool:
    return not only or any(fnmatchcase(name, glob) for name in names for glob in only)


def _timed(samples: Sequence[Sample]) -> list[float]:
    """Return the seconds of samples that can have a ratio."""
    return [one.wall_s for one in samples if one.is_timed]


def _untimed(key: _Key, old: Sequence[Sample], new: Sequence[Sample]) -> str:
    runs = [name for name, samples in (("before", old), ("after", new)) if not _timed(samples)]
    return f"no time measured {' and '.join(runs)}: {_name(key)}"


def _sizes(samples: Sequence[Sample]) -> set[int]:
    return {one.size_bytes for one in samples}


def _side_by_side(
    key: _Key, old: Sequence[Sample], new: Sequence[Sample], limits: set[str]
) -> Beside:
    before, after = _timed(old), _timed(new)
    return Beside(
        *key, key[-1] in limits, spread(before), spread(after), compare_apart(before, after)
    )


# -- what the runs do not share


def _same_target(before: Result, after: Result) -> tuple[Result, list[Difference]]:
    """Treat the targets as the same place if each result has one that the other lacks.

    Return the later result with the old target's name in place of the new one, and a difference for it.
    """
    old, new = [one.uri for one in before.targets], [one.uri for one in after.targets]
    gone, come = [u for u in old if u not in new], [u for u in new if u not in old]
    if len(gone) != 1 or len(come) != 1:
        return after, []
    samples = tuple(
        replace(one, target=gone[0]) if one.target == come[0] else one for one in after.samples
    )
    return replace(after, samples=samples), [Difference("target", gone[0], come[0], prevents=True)]


def _of_machines(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    found = []
    for one in _each("machine:", old, new, harmless=frozenset({*old, *new} - {*_DECIDES})):
        name = one.what.removeprefix("machine: ").replace(" ", "_")
        factor = _factor(old.get(name), new.get(name))
        alike = _ALIKE if one.prevents else _MEASURED
        if name == "load_average" or (factor is not None and factor < alike):
            continue
        found.append(one)
    return found


def _factor(old: Any, new: Any) -> float | None:
    """Return the ratio of two measured numbers, at least 1; None if they are not such numbers."""
    if not isinstance(old, float) or not isinstance(new, float) or min(old, new) <= 0:
        return None
    return max(old, new) / min(old, new)


def _each(
    what: str, old: Mapping[str, Any], new: Mapping[str, Any], *, harmless: frozenset[str] | None
) -> list[Difference]:
    """Return the fields that differ.

    ``harmless``: the fields that do not prevent a comparison; None: no field prevents it.
    """
    return [
        Difference(
            f"{what} {name.replace('_', ' ')}",
            str(old.get(name, "-")),
            str(new.get(name, "-")),
            prevents=harmless is not None and name not in harmless,
        )
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _of_engines(before: Result, after: Result) -> list[Difference]:
    """Return the differences of engines.

    What an engine promises and verifies costs time, so a difference there prevents a comparison. Its
    version does not: that is usually what a comparison is about.
    """
    old = {engine.name: engine for engine in before.engines}
    found = []
    for new in after.engines:
        was = old.get(new.name)
        if was is None:
            continue
        for what, one, other, prevents in (
            ("durable on return", was.durable, new.durable, True),
            ("verified on load", was.verified, new.verified, True),
            ("version", was.version, new.version, False),
        ):
            if one != other:
                found.append(Difference(f"{new.name}: {what}", one, other, prevents))
    return found


def _of_limits(rows: Sequence[Beside]) -> list[Difference]:
    """Return a difference for each limit, the control, that became faster or slower."""
    return [
        Difference(
            f"the limit itself, {_name((row.workload, row.target, row.phase, row.engine))}",
            seconds_text(row.before.median),
            f"{seconds_text(row.after.median)}, {verdict_text(row.found)}",
            prevents=True,
        )
        for row in rows
        if row.is_limit and row.found.verdict in {Verdict.FASTER, Verdict.SLOWER}
    ]
