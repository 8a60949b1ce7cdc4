"""The commit layer dies at every storage operation, and half-way through every write.

After each death: exactly the old or exactly the new state, bit by bit, through every rank's own
path; stock readers see whole checkpoints only; a reader that may not write gives the same answer
before and after recovery; the next writer goes on and leaves nothing of the dead behind.
"""

from __future__ import annotations

import collections
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ckptfs.commit import project, recovery, saving
from ckptfs.commit.fold import LogState
from tests.crash import forks, rig
from tests.crash.forks import Verdict, deaths, scratch
from tests.crash.rig import (
    ONE_DOMAIN,
    SCENARIOS,
    SOLO,
    TWO_DOMAINS,
    TWO_FULL_DOMAINS,
    Layout,
    judge,
    prepare,
    seats,
    values,
)

LAYOUTS = {
    "solo": SOLO,
    "one": ONE_DOMAIN,
    "two": TWO_DOMAINS,
    "two-full": TWO_FULL_DOMAINS,
}


def assert_all_well(verdicts: list[Verdict]) -> None:
    """Every death was judged well, and the moment of the commit lies among them."""
    bad = [f"{v.point}:\n{v.trouble}" for v in verdicts if v.trouble]
    assert not bad, f"{len(bad)} of {len(verdicts)} deaths:\n" + "\n".join(bad[:3])
    ends = collections.Counter(v.end for v in verdicts)
    assert set(ends) == {"old", "new"}, f"the commit was not among the deaths: {ends}"


@pytest.mark.parametrize(
    ("scenario", "layout"),
    [("fresh", "one"), ("replace", "one"), ("fenced", "two"), ("replace", "two")],
)
def test_killed_at_every_operation_leaves_the_old_or_the_new_state(
    scenario: str, layout: str
) -> None:
    """SIGKILL to all ranks at every operation k, and half-way through each write, for all k."""
    verdicts = deaths(scenario, LAYOUTS[layout])
    assert len(verdicts) > 50
    assert_all_well(verdicts)


@pytest.mark.parametrize(
    ("scenario", "layout"),
    [("overwrite", "two"), ("directory", "one"), ("fenced", "one"), ("fresh", "two-full")],
)
def test_killed_at_a_sample_of_operations(scenario: str, layout: str) -> None:
    """The other scenarios, at every sixth operation here and at all in the campaign."""
    assert_all_well(deaths(scenario, LAYOUTS[layout], stride=6))


@pytest.mark.parametrize(
    ("scenario", "layout"), [("fresh", "one"), ("fenced", "two"), ("replace", "two")]
)
def test_one_rank_dies_and_the_others_are_told_the_truth(scenario: str, layout: str) -> None:
    """A survivor that was told "committed" finds the new state, "failed" the old, "unknown" either;
    what the survivors abandon and what the dead one left is cleaned up just the same."""
    assert_all_well(deaths(scenario, LAYOUTS[layout], alone=True, stride=4))


@pytest.mark.campaign
@pytest.mark.parametrize("alone", [False, True], ids=["all-die", "one-dies"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_campaign_every_death_of_every_scenario(scenario: str, layout: str, alone: bool) -> None:
    """All k, all scenarios, all layouts, whole machines and single ranks."""
    assert_all_well(deaths(scenario, LAYOUTS[layout], alone=alone))
