"""The commit layer dies at every storage operation, and half-way through every write.

After each death: exactly the old or exactly the new state, bit by bit, through every rank's own
path; stock readers see whole checkpoints only; a reader that may not write gives the same answer
before and after recovery; the next writer continues and leaves nothing of the dead behind.
"""

from __future__ import annotations

import collections
from collections.abc import Set as AbstractSet

import pytest

from tests.crash.forks import Job, Verdict, deaths
from tests.crash.rig import ONE_DOMAIN, SCENARIOS, SOLO, TWO_DOMAINS, TWO_FULL_DOMAINS

LAYOUTS = {
    "solo": SOLO,
    "one": ONE_DOMAIN,
    "two": TWO_DOMAINS,
    "two-full": TWO_FULL_DOMAINS,
}


def assert_all_well(
    verdicts: list[Verdict], ends: AbstractSet[str] = frozenset({"old", "new"})
) -> None:
    """Every death was judged well, and the moment of the commit is among them."""
    bad = [f"{v.point}:\n{v.trouble}" for v in verdicts if v.trouble]
    assert not bad, f"{len(bad)} of {len(verdicts)} deaths:\n" + "\n".join(bad[:3])
    seen = collections.Counter(v.end for v in verdicts)
    assert set(seen) == ends, f"the commit was not among the deaths: {seen}"


@pytest.mark.parametrize(("scenario", "layout"), [("fresh", "one")])
def test_killed_at_every_operation_leaves_the_old_or_the_new_state(
    scenario: str, layout: str
) -> None:
    """SIGKILL to all ranks at every operation k, and half-way through each write, for all k."""
    verdicts = deaths(Job(scenario, LAYOUTS[layout]))
    assert len(verdicts) > 50
    assert_all_well(verdicts)


@pytest.mark.parametrize(
    ("scenario", "layout", "stride"),
    [
        ("fenced", "two", 19),
        ("replace", "one", 17),
        ("replace", "two", 23),
        ("overwrite", "two", 29),
        ("directory", "one", 17),
        ("published", "two", 19),
        ("fenced", "one", 19),
        ("fresh", "two-full", 19),
        ("abandoned", "two", 17),
        ("removed", "two", 23),
        ("removed", "one", 23),
    ],
)
def test_killed_at_a_sample_of_operations(scenario: str, layout: str, stride: int) -> None:
    """The other scenarios, at every 17th to 29th operation of each rank here and at all in the campaign."""
    ends = {"new"} if scenario == "abandoned" else {"old", "new"}
    assert_all_well(deaths(Job(scenario, LAYOUTS[layout], stride=stride)), ends)


@pytest.mark.parametrize(
    ("scenario", "layout"), [("fresh", "one"), ("fenced", "two"), ("replace", "two")]
)
def test_one_rank_dies_and_the_others_are_told_the_truth(scenario: str, layout: str) -> None:
    """A survivor that got "committed" finds the new state, "failed" the old, "unknown" either;
    what the survivors abandon and what the dead one left is cleaned up just the same.
    """
    assert_all_well(deaths(Job(scenario, LAYOUTS[layout], "alone", stride=17)))


def test_a_rank_dies_between_its_seal_and_the_answer() -> None:
    """The seal is in the log and its writer is gone: the others get "unknown", not "failed"."""
    verdicts = deaths(Job("fresh", ONE_DOMAIN, "alone", when="after"))
    assert_all_well(verdicts, {"new"})


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["kill", "alone"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_campaign_every_death_of_every_scenario(scenario: str, layout: str, how: str) -> None:
    """All k, all scenarios, all layouts, whole machines and single ranks."""
    ends = {"new"} if scenario in ("claim", "abandoned") else {"old", "new"}
    assert_all_well(deaths(Job(scenario, LAYOUTS[layout], how)), ends)
