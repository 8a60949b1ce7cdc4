"""Verdicts are decided by the samples alone, and never by less than they can carry."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptfs.bench import analysis
from ckptfs.bench.analysis import (
    LEAST_APART,
    LEAST_PAIRS,
    MARGIN,
    Comparison,
    Verdict,
    compare_apart,
    compare_paired,
    spread,
)

SECONDS = st.floats(min_value=1e-3, max_value=1e3)
RUN = st.lists(SECONDS, min_size=1, max_size=12)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)
OTHER_SIDE = {
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
    Verdict.SAME: Verdict.SAME,
    Verdict.SPREAD_TOO_WIDE: Verdict.SPREAD_TOO_WIDE,
}


def _sides(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [a for a, _ in pairs], [b for _, b in pairs]


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_order_of_rounds_does_not_matter(
    pairs: list[tuple[float, float]], chance: random.Random
) -> None:
    """The same rounds in another order give the same ratio, interval and verdict."""
    told = compare_paired(*_sides(pairs))
    chance.shuffle(pairs)
    assert compare_paired(*_sides(pairs)) == told


@given(RUN, RUN, st.randoms(use_true_random=False))
def test_the_order_of_runs_apart_does_not_matter(
    before: list[float], after: list[float], chance: random.Random
) -> None:
    """Each side may be shuffled by itself where nothing was paired."""
    told = compare_apart(before, after)
    chance.shuffle(before)
    chance.shuffle(after)
    assert compare_apart(before, after) == told


@given(RUN)
def test_the_same_values_are_never_faster_or_slower(values: list[float]) -> None:
    """A run compared with itself: paired it is the same from five rounds on, apart it is no difference."""
    paired = compare_paired(values, values)
    enough = len(values) >= LEAST_PAIRS
    assert paired.verdict is (Verdict.SAME if enough else Verdict.SPREAD_TOO_WIDE)
    assert compare_apart(values, values).verdict in {Verdict.SAME, Verdict.SPREAD_TOO_WIDE}


@given(
    st.lists(st.floats(1.0, 2.0), min_size=LEAST_PAIRS, max_size=12),
    st.lists(st.floats(1.0, 2.0), min_size=LEAST_PAIRS, max_size=12),
)
def test_enough_values_that_lie_apart_are_always_decided(a: list[float], b: list[float]) -> None:
    """All of one beyond all of the other, by more than the margin: a verdict, apart and paired."""
    high = [2.2 * value for value in b]
    assert compare_apart(a, high).verdict is Verdict.SLOWER
    assert compare_apart(high, a).verdict is Verdict.FASTER
    rounds = min(len(a), len(b))
    assert compare_paired(a[:rounds], high[:rounds]).verdict is Verdict.FASTER


@given(PAIRS, RUN, RUN)
def test_swapping_the_sides_swaps_the_verdict(
    pairs: list[tuple[float, float]], before: list[float], after: list[float]
) -> None:
    """No engine profits from being named first: the ratio is the inverse, the verdict the opposite."""
    ours, theirs = _sides(pairs)
    for told, back in (
        (compare_paired(ours, theirs), compare_paired(theirs, ours)),
        (compare_apart(before, after), compare_apart(after, before)),
    ):
        assert back.verdict is OTHER_SIDE[told.verdict]
        assert back.ratio == pytest.approx(1 / told.ratio)
        assert (back.low, back.high) == pytest.approx((1 / told.high, 1 / told.low))
        assert back.rounds_needed == told.rounds_needed


@given(RUN, RUN, st.floats(1e-3, 1e3))
def test_a_change_of_unit_changes_nothing(
    before: list[float], after: list[float], unit: float
) -> None:
    """Milliseconds for seconds: the same ratio, and the same verdict unless it stood on an edge."""
    told = compare_apart(before, after)
    again = compare_apart([unit * v for v in before], [unit * v for v in after])
    assert again.ratio == pytest.approx(told.ratio)
    edges = (1.0, MARGIN, 1 / MARGIN)
    values = (told.ratio, told.low, told.high)
    assume(not any(math.isclose(v, e, rel_tol=1e-9) for v in values for e in edges))
    assert again.verdict is told.verdict


@given(PAIRS)
def test_the_parts_of_a_comparison_fit_each_other(pairs: list[tuple[float, float]]) -> None:
    """The ratio is inside of its interval, and each verdict is what the documentation says of it."""
    told = compare_paired(*_sides(pairs))
    assert told.low <= told.ratio <= told.high
    assert told.rounds == len(pairs)
    _is_documented(told)


def _is_documented(told: Comparison) -> None:
    near = 1e-9
    if told.verdict is Verdict.SAME:
        assert 1 / MARGIN - near <= told.low <= told.high <= MARGIN + near
    if told.verdict is Verdict.FASTER:
        assert told.ratio <= 1 / MARGIN + near
        assert told.high < 1 + near
    if told.verdict is Verdict.SLOWER:
        assert told.ratio >= MARGIN - near
        assert told.low > 1 - near
    if told.verdict is Verdict.SPREAD_TOO_WIDE:
        assert (
            told.rounds_needed is None or told.rounds < told.rounds_needed <= analysis.MOST_ROUNDS
        )
    else:
        assert told.rounds_needed is None


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5], Verdict.FASTER),
        ([0.5, 0.5, 0.5, 0.5], Verdict.SPREAD_TOO_WIDE),  # four rounds: 88 % is too little
        ([0.5, 0.5, 0.5, 0.5, 1.1], Verdict.SPREAD_TOO_WIDE),  # of five none may be elsewhere
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.1], Verdict.FASTER),  # of eight one may
        ([1.5, 1.2, 1.3, 1.4, 1.2], Verdict.SLOWER),
        ([1.0, 1.01, 0.99, 1.04, 0.97], Verdict.SAME),
        ([1.01, 1.03, 1.02, 1.04, 1.09], Verdict.SPREAD_TOO_WIDE),  # slower, but by enough?
        ([0.5, 2.0, 0.9, 1.1, 1.0], Verdict.SPREAD_TOO_WIDE),
    ],
)
def test_rounds_and_what_they_allow_to_say(ratios: list[float], verdict: Verdict) -> None:
    """The table by which a person may check the thresholds."""
    assert compare_paired(ratios, [1.0] * len(ratios)).verdict is verdict


def test_three_runs_on_each_side_are_the_fewest() -> None:
    """Three against three that are apart get a verdict, two against any number of others none."""
    assert compare_apart([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]).verdict is Verdict.SLOWER
    assert compare_apart([1.0, 1.1], [2.0, 2.1, 2.2]).verdict is Verdict.SPREAD_TOO_WIDE
    assert compare_apart([1.0, 1.1], [2.0, 2.1, 2.2]).rounds_needed == LEAST_APART


def test_how_many_rounds_are_needed() -> None:
    """Half of the spread takes a quarter of the rounds; where no number would do, none is given."""
    wide = compare_paired([0.5, 0.8, 0.8, 0.8, 1.6], [1.0] * 5)
    narrow = compare_paired([0.63, 0.8, 0.8, 0.8, 1.13], [1.0] * 5)
    assert wide.verdict is narrow.verdict is Verdict.SPREAD_TOO_WIDE
    assert wide.rounds_needed == math.ceil(5 * (math.log(2) / math.log(1.25)) ** 2)
    assert narrow.rounds_needed is not None
    assert narrow.rounds_needed < wide.rounds_needed
    assert compare_paired([0.1, 1.0, 10.0], [1.0] * 3).rounds_needed is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_spread_is_in_order(values: list[float]) -> None:
    """Least, quartiles, median and largest never pass each other, and the median is the usual one."""
    told = spread(values)
    parts = [told.least, told.lower, told.median, told.upper, told.most]
    assert all(a <= b or math.isclose(a, b) for a, b in itertools.pairwise(parts))
    assert (told.count, told.median) == (len(values), statistics.median(values))
    assert (told.least, told.most) == (min(values), max(values))


@pytest.mark.parametrize(("before", "after"), [(3, 4), (5, 2), (1, 6)])
def test_the_distribution_of_rank_sums_is_exact(before: int, after: int) -> None:
    """Counted over every order of two small runs, one by one."""
    counted = [0] * (before * after + 1)
    for places in itertools.combinations(range(before + after), before):
        others = [p for p in range(before + after) if p not in places]
        counted[sum(a > b for a in places for b in others)] += 1
    assert analysis._rank_sums(before, after) == counted


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, -1.0]])
def test_what_has_no_ratio_is_refused(bad: list[float]) -> None:
    """Nothing, zero and less are no seconds."""
    with pytest.raises(ValueError, match="above zero"):
        compare_paired(bad, bad)
    with pytest.raises(ValueError, match="above zero"):
        compare_apart([1.0], bad)


def test_pairs_have_two_sides() -> None:
    """A round that one side lacks is no pair, and is not dropped in silence."""
    with pytest.raises(ValueError, match="pairs need the same number"):
        compare_paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        spread([])
