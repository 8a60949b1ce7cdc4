"""What a comparison was made for: a ratio that has to be reached, and whether it was. Pure.

    goals_of(result, asked)     every Goal that the result can tell about
    holds(goals)                whether all that count are met

A ratio belongs to one round: seconds (or CPU seconds) of one engine by those of another in the same
round, so that a slow minute of the machine counts for both. Its median over the rounds is compared with
the goal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ckptfs.bench.analysis import grouped
from ckptfs.bench.results import Result, Sample, phase_text


class What(Enum):
    """What is divided."""

    SECONDS = "seconds"
    CPU_SECONDS = "CPU seconds"

    def of(self, sample: Sample) -> float:
        """Of one call."""
        return sample.wall_s if self is What.SECONDS else sample.cpu_s


@dataclass(frozen=True, slots=True)
class Asked:
    """engine by the best of others (``best_of``), in each round, is at most this. counts: else it is told only.

    where: (workload, target) to which it applies.
    """

    engine: str
    others: tuple[str, ...]
    at_most: float
    what: What = What.SECONDS
    counts: bool = True
    where: Callable[[str, str], bool] = lambda _workload, _target: True


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal at one place, in one phase."""

    workload: str
    target: str
    phase: str
    asked: Asked
    ratio: float

    @property
    def is_met(self) -> bool:
        """Whether the median ratio is good enough."""
        return self.ratio <= self.asked.at_most

    def text(self) -> str:
        """One line for a person."""
        word = ("met" if self.is_met else "MISSED") if self.asked.counts else "(told)"
        others = " or ".join(self.asked.others)
        return (
            f"{word:6} {self.asked.engine} by {others}, {self.asked.what.value}, "
            f"{phase_text(self.phase)} of {self.workload} at {self.target}: "
            f"{self.ratio:.2f}, goal {self.asked.at_most:.2f}"
        )


def goals_of(result: Result, asked: Iterable[Asked]) -> list[Goal]:
    """Of everything that was measured; what took no part has no goal."""
    wanted = list(asked)
    found = []
    for (workload, target, phase), engines in grouped(result):
        for one in wanted:
            ratio = _ratio(engines, one) if one.where(workload, target) else None
            if ratio is not None:
                found.append(Goal(workload, target, phase, one, ratio))
    return found


def best_of(engines: Mapping[str, Sequence[Sample]], names: Iterable[str]) -> str | None:
    """The name of the engine with the least median seconds; None where none of them took part.

    One engine for all rounds: the best of each round would be a peer that nobody can run.
    """
    there = [name for name in names if engines.get(name)]
    median = lambda name: statistics.median(one.wall_s for one in engines[name])  # noqa: E731
    return min(there, key=median, default=None)


def _ratio(engines: dict[str, list[Sample]], asked: Asked) -> float | None:
    best = best_of(engines, asked.others)
    if best is None:
        return None
    of = {one.round: asked.what.of(one) for one in engines[best]}
    ratios = [
        asked.what.of(one) / of[one.round]
        for one in engines.get(asked.engine, [])
        if of.get(one.round)
    ]
    return statistics.median(ratios) if ratios else None


def holds(goals: Sequence[Goal]) -> bool:
    """Whether every goal that counts is met."""
    return all(goal.is_met for goal in goals if goal.asked.counts)
