"""From single samples to the rows of a table: medians, spread, ratios. Pure.

    rows_of(result)        one row per workload, target, phase and engine, in the order of the result
      .to_limit            its seconds by those of the fastest limit, round by round
      .to_ours             its seconds by those of ckptfs (the first engine whose name starts so)
    slowdowns_of(result)   how much slower a training loop was while an engine saved beside it

Two ratios of one row come from the same rounds: whoever was measured in a slow minute was measured
beside the others in that minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptfs.bench.results import Phase, Result, Sample
from ckptfs.bench.stats import Comparison, Spread, compare_paired, spread
from ckptfs.bench.words import PHASES

__all__ = ["MOVING", "OURS", "Row", "Slowdown", "grouped", "rows_of", "slowdowns_of"]

OURS = "ckptfs"
MOVING: tuple[Phase, ...] = ("save", "load_cold", "load_warm")  # all bytes move inside the clock


@dataclass(frozen=True, slots=True)
class Row:
    """One engine in one phase.

    Attributes:
        workload: The name of the workload.
        target: The target's URI.
        phase: "save", "load_cold", "load_warm", "stall", "steps" or "steps_saving".
        engine: The name of the engine.
        is_limit: It moves raw bytes.
        seconds: Of its calls.
        gb_per_s: GB per second, that is 10^9 bytes; None where bytes do not move inside the clock.
        cpu_s_per_gb: CPU seconds per GB; None where bytes do not move inside the clock.
        peak_memory_bytes: Bytes of memory; None where they could not be measured.
        sent_bytes: Bytes sent; None where they could not be measured.
        received_bytes: Bytes received; None where they could not be measured.
        limit: The engine that ``to_limit`` is about; None where there is none.
        to_limit: Its seconds by those of the limit; None for the limit itself, and where no round has both.
        to_ours: Its seconds by those of ckptfs; None for ckptfs itself, and where no round has both.
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
        ratio: The second by the first; None where no round has both.
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
    """Return a row for every engine of ``result``, everywhere it was measured: by workload, target, phase,
    engine.
    """
    limits = {engine.name for engine in result.engines if engine.is_limit}
    order = [engine.name for engine in result.engines]
    return tuple(
        row for where, engines in grouped(result) for row in _rows_at(where, engines, limits, order)
    )


def slowdowns_of(result: Result) -> tuple[Slowdown, ...]:
    """Return the slowdown by every engine of ``result`` that saved during a loop.

    The loop alone may have been measured once for all.

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
            bare = alone.get(engine) or next(iter(alone.values()))
            found.append(
                Slowdown(
                    workload,
                    target,
                    engine,
                    spread([one.wall_s for one in bare]),
                    spread([one.wall_s for one in saving]),
                    _paired(saving, bare),
                )
            )
    return tuple(found)


def grouped(result: Result) -> list[tuple[_Where, dict[str, list[Sample]]]]:
    """Return the samples of ``result`` by workload, target and phase, in the order of the report; then by
    engine.
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
            to_limit=_beside(engines, name, limit) if name not in limits else None,
            to_ours=_beside(engines, name, ours),
        )


def _beside(engines: dict[str, list[Sample]], name: str, other: str | None) -> Comparison | None:
    if other is None or other == name:
        return None
    return _paired(engines[name], engines[other])


def _paired(these: list[Sample], those: list[Sample]) -> Comparison | None:
    """The rounds that both have; a clock that saw nothing pass has no ratio."""
    left = {one.round: one.wall_s for one in these if one.is_timed}
    right = {one.round: one.wall_s for one in those if one.is_timed}
    rounds = sorted(left.keys() & right.keys())
    if not rounds:
        return None
    return compare_paired([left[n] for n in rounds], [right[n] for n in rounds])


def _known(samples: list[Sample], of: Callable[[Sample], int | None]) -> Spread | None:
    values = [float(value) for value in map(of, samples) if value is not None]
    return spread(values) if values else None
