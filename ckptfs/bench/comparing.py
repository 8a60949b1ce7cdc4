"""Two results side by side: what differs between the runs, then what differs between the numbers. Pure.

    compare_results(before, after)   -> Compared
      differences     what the runs do not share; those that ``prevent`` a comparison come first
      rows            one per workload, target, phase and engine that both have: a ratio and a verdict
      missing         what only one of them has, or what has no ratio: nothing is dropped in silence
      slower          rows that are slower, limits left out

The runs never took turns, so that nothing is paired: intervals are those of two runs apart. A limit
that both measured is the control. Where the raw storage itself became faster or slower, the machine did,
and a verdict about anybody else says no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ckptfs.bench.results import Phase, Result, Sample
from ckptfs.bench.stats import Comparison, Spread, Verdict, compare_apart, spread
from ckptfs.bench.summary import grouped
from ckptfs.bench.words import phase_text, seconds_text, verdict_text

__all__ = ["Beside", "Compared", "Difference", "compare_results"]

_DECIDES = ("cpu", "cores", "memory_gib", "filesystem")  # of a machine; the rest is told
_TOLD = frozenset({"rounds", "warm_up_rounds", "engines"})  # of the settings; the rest decides
_ALIKE = 1.1  # memory of two machines of one kind differs by what firmware takes
_MEASURED = 2.0  # what was measured of a machine, such as fsync_ms, is told from this factor on


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not the same in both runs.

    Attributes:
        what: What it is.
        before: In the first run.
        after: In the second run.
        prevents: The numbers are of different things, in spite of the verdicts.
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
        is_limit: It moves raw bytes.
        before: Seconds of the first run.
        after: Seconds of the second run.
        found: The second by the first.
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
        rows: Each engine in each phase. Empty: the two, or what is left of them, have nothing in common.
        missing: "only before: ...", "no time measured after: ...", in words.
    """

    differences: tuple[Difference, ...]
    rows: tuple[Beside, ...]
    missing: tuple[str, ...]

    @property
    def slower(self) -> tuple[Beside, ...]:
        """What a launch script or a CI job would stop for."""
        return tuple(
            row for row in self.rows if row.found.verdict is Verdict.SLOWER and not row.is_limit
        )


def compare_results(
    before: Result, after: Result, *, only: Sequence[str] = (), phases: Sequence[str] = ()
) -> Compared:
    """Compare a later result with an earlier one.

    Args:
        before: The earlier one.
        after: The later one.
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
    rows = tuple(_beside(key, old[key], new[key], limits) for key in alike)
    found = [
        *moved,
        *_of_machines(before.machine, after.machine),
        *_each("setting", before.settings, after.settings, told=_TOLD),
        *_of_engines(before, after),
        *_of_limits(rows),
        *_each("version of", before.versions, after.versions, told=None),
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
        if (not phases or where[2] in phases) and _is_asked((engine, *where[:2]), only)
    }


def _is_asked(names: Sequence[str], only: Sequence[str]) -> bool:
    return not only or any(fnmatchcase(name, glob) for name in names for glob in only)


def _timed(samples: Sequence[Sample]) -> list[float]:
    """The seconds that a ratio can be made of: a clock that saw nothing pass has none."""
    return [one.wall_s for one in samples if one.is_timed]


def _untimed(key: _Key, old: Sequence[Sample], new: Sequence[Sample]) -> str:
    runs = [name for name, told in (("before", old), ("after", new)) if not _timed(told)]
    return f"no time measured {' and '.join(runs)}: {_name(key)}"


def _sizes(samples: Sequence[Sample]) -> set[int]:
    return {one.size_bytes for one in samples}


def _beside(key: _Key, old: Sequence[Sample], new: Sequence[Sample], limits: set[str]) -> Beside:
    before, after = _timed(old), _timed(new)
    return Beside(
        *key, key[-1] in limits, spread(before), spread(after), compare_apart(before, after)
    )


# -- what the runs do not share


def _same_target(before: Result, after: Result) -> tuple[Result, list[Difference]]:
    """One target of each that the other lacks is held to be the same place, moved; and said to be."""
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
    for one in _each("machine:", old, new, told=frozenset({*old, *new} - {*_DECIDES})):
        name = one.what.removeprefix("machine: ").replace(" ", "_")
        factor = _factor(old.get(name), new.get(name))
        alike = _ALIKE if one.prevents else _MEASURED
        if name == "load_average" or (factor is not None and factor < alike):
            continue
        found.append(one)
    return found


def _factor(old: Any, new: Any) -> float | None:
    """How far two measured numbers are from each other; None: they are none."""
    if not isinstance(old, float) or not isinstance(new, float) or min(old, new) <= 0:
        return None
    return max(old, new) / min(old, new)


def _each(
    what: str, old: Mapping[str, Any], new: Mapping[str, Any], *, told: frozenset[str] | None
) -> list[Difference]:
    """Fields that differ. told: those that do not prevent a comparison; None: none does."""
    return [
        Difference(
            f"{what} {name.replace('_', ' ')}",
            str(old.get(name, "-")),
            str(new.get(name, "-")),
            prevents=told is not None and name not in told,
        )
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _of_engines(before: Result, after: Result) -> list[Difference]:
    """What an engine promises and compares costs time; its version is what a comparison is about."""
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
    """The control: raw storage that is faster or slower than it was."""
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
