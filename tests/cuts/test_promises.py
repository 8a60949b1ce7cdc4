"""What a victim said decides what must be found: lost, torn, old and half checkpoints are reported."""

from __future__ import annotations

import json

import pytest

from tests.cuts.promises import Promised, promised, under_way


def line(word: str, name: str, seed: int, keep: list[str] | None = None) -> str:
    """What the victim says of a save."""
    what = {"place": "run", "name": name, "seed": seed, "keep": keep}
    return f"{word} save {json.dumps(what)}"


DONE = [line("begin", "a", 1), line("done", "a", 1)]


@pytest.mark.parametrize(
    ("said", "found", "newest"),
    [
        (DONE, {"a": 1}, "a"),
        ([line("begin", "a", 1)], {}, None),
        ([line("begin", "a", 1)], {"a": 1}, "a"),
        ([*DONE, line("begin", "a", 2)], {"a": 1}, "a"),
        ([*DONE, line("begin", "a", 2)], {"a": 2}, "a"),
        ([*DONE, line("begin", "b", 2, ["b"])], {"b": 2}, "b"),
        ([*DONE, line("begin", "b", 2, ["b"])], {"a": 1}, "a"),
    ],
)
def test_what_was_promised_is_no_fault(
    said: list[str], found: dict[str, int | None], newest: str | None
) -> None:
    """Old or new while it is under way, new when it was acknowledged, gone where it may go."""
    assert promised(said)["run"].faults(found, newest) == []


@pytest.mark.parametrize(
    ("said", "found", "newest", "fault"),
    [
        (DONE, {}, "a", "a is lost"),
        (DONE, {"a": None}, "a", "a is torn"),
        (DONE, {"a": 2}, "a", "a is of seed 2"),
        (DONE, {"a": 1}, None, "the newest is None"),
        ([*DONE, line("begin", "a", 2)], {}, "a", "a is lost"),
        ([*DONE, line("begin", "b", 2, ["a", "b"])], {"b": 2}, "b", "a is lost"),
        (DONE, {"a": 1, "c": 3}, "a", "c is of seed 3"),
        (
            [*DONE, line("begin", "a", 2), line("done", "a", 2)],
            {"a": 1},
            "a",
            "a is of seed 1",
        ),
    ],
)
def test_what_was_not_promised_is_a_fault(
    said: list[str], found: dict[str, int | None], newest: str | None, fault: str
) -> None:
    """Lost, torn, old after a replacement, or never saved."""
    assert fault in " ".join(promised(said)["run"].faults(found, newest))


def test_saves_that_overlap_are_each_told_when_it_is_done() -> None:
    """Of two on their way the first may be the newest, or the second that was begun."""
    said = [line("begin", "a", 1), line("begin", "b", 2), line("done", "a", 1)]
    assert promised(said)["run"].newest == {"a", "b"}
    assert under_way(said) == "save"
    assert under_way([*said, line("done", "b", 2)]) is None


def test_nothing_said_promises_nothing() -> None:
    """An empty place is as good as none."""
    assert promised(["lives", "idle save"]) == {}
    assert Promised().faults({}, None) == []
