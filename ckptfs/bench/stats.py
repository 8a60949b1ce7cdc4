"""Medians, spread, and whether a difference is one. Pure: no clock, no random numbers.

    spread(values)                 median, quartiles, least and largest
    compare_paired(ours, theirs)   two that took turns: the ratio belongs to one round
    compare_apart(before, after)   two runs that never took turns: every pair of their values
    Comparison                     ratio, interval, verdict, and how many rounds a verdict would take

A ratio is seconds by seconds: below one, the first that is named is faster. Its interval holds the
true median ratio with ``CONFIDENCE`` at least, whatever the distribution: order statistics (the sign
test) for pairs, the shift interval of the rank sum test for runs apart. Both need no model and no
bootstrap, so that the same samples always get the same answer, in whatever order they come.

    SAME              the whole interval is within ``MARGIN`` of one
    FASTER, SLOWER    the ratio is at least ``MARGIN`` away from one, and the interval excludes one
    SPREAD_TOO_WIDE   neither: the spread does not allow a verdict, ``rounds_needed`` may

Five pairs, or three runs on each side, are the fewest that can ever get a verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "CONFIDENCE",
    "LEAST_APART",
    "LEAST_PAIRS",
    "MARGIN",
    "MOST_ROUNDS",
    "Comparison",
    "Spread",
    "Verdict",
    "compare_apart",
    "compare_paired",
    "spread",
]

MARGIN = 1.05  # what is closer than that is nobody's concern, and no machine here repeats better
CONFIDENCE = 0.90
LEAST_PAIRS = 5  # least and largest of five hold the median with 1 - 2 / 2^5 = 94 %
LEAST_APART = 3  # on each side: all of one beside all of the other happens by chance in 10 %
MOST_ROUNDS = 999  # above that nobody repeats a benchmark: no number is told


class Verdict(Enum):
    """What the samples allow to say of the first that was named.

    Attributes:
        FASTER: It is faster.
        SLOWER: It is slower.
        SAME: They are the same.
        SPREAD_TOO_WIDE: Nothing.
    """

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    SPREAD_TOO_WIDE = "spread too wide"


@dataclass(frozen=True, slots=True)
class Spread:
    """Some values of one thing.

    Attributes:
        count: How many.
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
    """The ratio of seconds, its interval, and what follows.

    Attributes:
        ratio: The ratio.
        low: The lower end of its interval.
        high: The upper end of its interval.
        rounds: Pairs, or the smaller side of runs apart.
        verdict: What follows.
        rounds_needed: With SPREAD_TOO_WIDE, about how many would give a verdict if ratio and spread stay;
            None where there is a verdict already, or more than ``MOST_ROUNDS`` would be needed.
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
        ValueError: There is none.
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
    """Compare seconds round by round.

    Args:
        ours: Of the first, a value for each round.
        theirs: Of the second, a value for each round.

    Returns:
        Ours by theirs.

    Raises:
        ValueError: They are not of one length, empty, or not above zero.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds beside {len(theirs)}: pairs need both")
    logs = sorted(
        ours_log - theirs_log
        for ours_log, theirs_log in zip(_logs(ours), _logs(theirs), strict=True)
    )
    left_out = _left_out_of_pairs(len(logs))
    return _judged(logs, left_out, rounds=len(logs), least=LEAST_PAIRS)


def compare_apart(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compare seconds with those of a run at another time.

    Args:
        before: The earlier ones.
        after: The later ones.

    Returns:
        After by before.

    Raises:
        ValueError: One is empty, or not above zero.
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
    """Logs: of the ratios, in order; left_out: how many the interval leaves out at each end.

    In logs a ratio and its inverse are as far from one, and swapping the sides swaps the verdict.
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
    """Half of an interval shrinks with the root of the rounds; until it fits on one side."""
    margin = math.log(MARGIN)
    room = abs(ratio) if abs(ratio) >= margin else margin - abs(ratio)
    if half <= room:  # it fits already: there were too few rounds to know that
        return max(least, rounds + 1)
    grow = (half / room) ** 2 if room > 0 else math.inf
    if rounds * grow > MOST_ROUNDS:
        return None
    return max(least, rounds + 1, math.ceil(rounds * grow))


def _left_out_of_pairs(count: int) -> int | None:
    """How many ratios the interval of the median leaves out at each end; None: too few pairs.

    The true median is above k or more of n values with the chance that n coins show.
    """
    chance, left_out = 0.0, None
    for k in range((count + 1) // 2):
        chance += 2 * math.comb(count, k) / 2**count
        if chance > 1 - CONFIDENCE:
            break
        left_out = k
    return left_out


def _left_out_apart(before: int, after: int) -> int | None:
    """The same for all pairs of two runs: from the rank sum's distribution; None: too few."""
    ways = _rank_sums(before, after)
    chance, left_out = 0.0, None
    for k in range((before * after + 1) // 2):
        chance += 2 * ways[k] / math.comb(before + after, before)
        if chance > 1 - CONFIDENCE + 1e-12:  # 2 / 20, three beside three, is 10 % and not more
            break
        left_out = k
    return left_out


def _rank_sums(before: int, after: int) -> list[int]:
    """In how many orders u of the before x after pairs are the other way round, for every u.

    The coefficients of prod (1 - q^(after + i)) / (1 - q^i) for i from 1 to before.
    """
    top = before * after
    ways = [1, *[0] * top]
    for i in range(1, before + 1):
        for u in range(top, after + i - 1, -1):
            ways[u] -= ways[u - after - i]
        for u in range(i, top + 1):
            ways[u] += ways[u - i]
    return ways
