"""docs/design describes the life of a save and of a load as the code lives it."""

from __future__ import annotations

import re

import pytest

from tests.ways import ROOT, modules_of

MOST_STOPS = 15


def _stops(text: str) -> list[str]:
    paths = re.findall(r"^\d+\. `([\w/]+)\.py`:", text, re.MULTILINE)
    return [f"ckptfs.{path.replace('/', '.')}" for path in paths]


def _out_of_order(stops: list[str], passed: tuple[str, ...]) -> list[str]:
    """Return the stops that are not passed, or not after the stop before them."""
    places = [passed.index(stop) if stop in passed else -1 for stop in stops]
    before = [-1, *places]
    return [stop for stop, at, last in zip(stops, places, before, strict=False) if at <= last]


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_life_is_told_in_the_order_of_its_trace(way: str) -> None:
    """Every stop is a module that a real save or load passes, later than the stop before it."""
    text = (ROOT / f"docs/design/life-of-a-{way}.md").read_text()
    stops = _stops(text)
    assert len(stops) == len(re.findall(r"^\d+\. ", text, re.MULTILINE))
    assert 10 <= len(stops) <= MOST_STOPS
    assert _out_of_order(stops, modules_of(way)) == []


def test_a_stop_that_is_missing_or_comes_too_early_is_seen() -> None:
    """The comparison fails for a module that is not passed, and for two stops that changed places."""
    passed = ("a", "b", "c")
    assert _out_of_order(["a", "c"], passed) == []
    assert _out_of_order(["a", "x"], passed) == ["x"]
    assert _out_of_order(["b", "a", "c"], passed) == ["a"]
