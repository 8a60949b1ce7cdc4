"""The commit protocol holds in every interleaving that the search reaches in a short time.

``python -m tests.model.campaign`` searches every scenario to its end.
"""

from __future__ import annotations

import pytest

from ckptfs.commit.log import append
from ckptfs.storage.base import Shape
from tests.model.scenarios import SCENARIOS, build
from tests.model.search import Result, explore

MAX_STATES = 3_000  # of breadth first: short interleavings all, long ones in the campaign
# Each state of two recoveries, or of four processes, takes milliseconds; a mistake that tests/mutants plants shows
# only later than elsewhere.
OTHERS = {"parts-deleted": 700, "delete-unfenced": 1_500, "two-domains-delete": 6_000}


def _told(result: Result) -> str:
    return "\n".join(str(found) for found in result.found)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_no_promise_is_broken_in_any_short_interleaving(name: str) -> None:
    """Crashes, stalls, lost and late answers at every operation break no promise of the protocol."""
    result = explore(build(name), max_states=OTHERS.get(name, MAX_STATES))
    assert not result.found, _told(result)


@pytest.mark.parametrize(
    "name",
    [
        "fine",
        "lost",
        "plain",
        "save-delete-save",
        "delete-saved-again",
        "delete-unfenced-late",
        "newcomers-two-domains",
        "newcomers-fewer-domains",
        "parts-removed-by-hand",
    ],
)
def test_small_scenarios_are_searched_whole(name: str) -> None:
    """These have few enough states to be searched to the end every time."""
    result = explore(build(name))
    assert result.complete
    assert not result.found, _told(result)


def test_every_process_comes_to_its_point() -> None:
    """The scenarios do what their names say: saves commit, newcomers become ready, readers read."""
    ends = explore(build("replace"), max_states=40_000).ends
    assert "committed" in ends["W"]
    assert "done" in ends["P2"]
    assert "read" in ends["R"]


def test_neighbours_that_may_replace_claim_nothing() -> None:
    """A new name is saved without a claim whatever is asked for: its neighbour commits too, in every order."""
    result = explore(build("replace-siblings"))
    assert result.complete
    assert {name: set(ends) for name, ends in result.ends.items()} == {
        "U": {"committed"},
        "V": {"committed"},
    }


def test_what_a_claim_costs_a_neighbour_and_a_swap_would_not() -> None:
    """A save of another name that is under way is fenced by a claim; a swap lets it commit in every order."""
    claim, swap = explore(build("replace-neighbour")), explore(build("swap-neighbour"))
    assert claim.complete
    assert swap.complete
    assert {"committed", "refused fenced"} <= set(claim.ends["N"])
    assert set(swap.ends["N"]) == {"committed"}
    assert set(swap.ends["U"]) == {"committed"}


def test_who_finds_its_name_taken_seals_what_it_wrote() -> None:
    """Of two that save one name at once the second one replaces."""
    ends = explore(build("replace-taken-meanwhile"), max_states=40_000).ends
    assert "replaced" in set(ends["U"]) | set(ends["V"])


def test_snapshots_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after every other entry, found through a hint that may be stale, is never seen."""
    monkeypatch.setattr(append, "SNAPSHOT_EVERY", 2)
    for name in ("plain", "save-delete-save", "replace", "plain-first"):
        result = explore(build(name), max_states=MAX_STATES)
        assert not result.found, _told(result)


def test_object_scenarios_use_the_object_shape() -> None:
    """Names promise what runs: object scenarios have no directories."""
    for name in SCENARIOS:
        assert (build(name).shape is Shape.OBJECT) == name.startswith("object-")
