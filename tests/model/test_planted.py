"""The search sees: every mistake of the protocol, planted in the real code, is found by it."""

from __future__ import annotations

import pytest

from tests.model.planted import PLANTED
from tests.model.scenarios import build
from tests.model.search import explore


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_mistake_is_found(name: str) -> None:
    """With one rule broken, the search reports a broken promise of the expected kind and a trace."""
    mistake = PLANTED[name]
    scenario = build(mistake.scenario)
    if not mistake.needs_lost_answers:
        scenario.lost = 0
    with mistake.plant():
        result = explore(scenario, max_states=150_000, stop_at_first=True)
    assert result.found, f"{name}: {result.states} states, nothing found"
    assert any(found.what.startswith(mistake.broken) for found in result.found), result.found
    assert all(found.trace for found in result.found if not found.what.startswith("C "))
