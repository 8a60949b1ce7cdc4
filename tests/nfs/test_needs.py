"""needs.md N1 to N4 on two NFS clients: a whole node dies in the middle of a save, the next job resumes.

The survivors learn it in time, what was committed before is there, and training ends bit for bit where it
would have ended in one go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.conftest import Labs
from tests.nfs.crowd import RESULT_S
from tests.nfs.inside import tree
from tests.nfs.launched import said
from tests.nfs.wreck import JOBS, TIMEOUT_S, Wreck, lost_under_torchrun, under_torchrun

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

TOLD_WITHIN_S = TIMEOUT_S + 60  # promised: TIMEOUT_S after the last sign of life, and what it takes
TOLD = {"DeadlineError", "CollectiveError", "CommitInDoubtError", "ControlPlaneLostError"}


@pytest.fixture(scope="module")
def wreck(labs: Labs) -> Iterator[Wreck]:
    """Client b has died under four jobs, and is back."""
    with Wreck(labs("4.2"), labs("4.2").b) as made:
        yield made


def assert_told(survivors: list[Any], died_s: float) -> None:
    """Each survivor raised a typed error in time, and none says that the save failed which committed."""
    for value in survivors:
        assert isinstance(value, dict), value
        assert value["error"]["type"] in TOLD, value
        assert 0 < value["error"]["at_s"] - died_s < TOLD_WITHIN_S, (value, died_s)


def check_n1(wreck: Wreck) -> None:
    """Step 1 of parts, driver state and object is whole; step 2, in which the node died, is not there."""
    assert_told(wreck.survivors["N1"], wreck.died_s)
    if wreck.driver is not None:
        assert wreck.driver["gave up"] == 2
    driver, *ranks = wreck.again("N1")
    assert driver["restored"] == 1
    assert driver["object"] == {"step": 1}
    assert driver["loader"] == {"position": 10}
    assert driver["steps"] == [1, 2, 3]
    assert [(rank["restored"], rank["same"]) for rank in ranks] == [(1, True)] * 4


def check_n2(wreck: Wreck) -> None:
    """Nothing half is believed, and what was overwritten goes after the first new commit, not before."""
    assert_told(wreck.survivors["N2"], wreck.died_s)
    assert {"step_5", "step_7"} <= set(wreck.lab.server.call(os.listdir, wreck.behind("N2")))
    ranks = wreck.again("N2")
    assert [rank["latest"] for rank in ranks] == [None] * 4
    assert [(rank["steps"], rank["same"]) for rank in ranks] == [([1, 2], True)] * 4
    left = set(wreck.lab.server.call(os.listdir, wreck.behind("N2")))
    assert left == {".ckptfs", "step_1", "step_2"}


def check_n3(wreck: Wreck, *, by_torchrun: bool = False) -> None:
    """Driver state, generators and positions come back; there is one latest; the policy costs nothing."""
    assert_told(wreck.survivors["N3"], wreck.died_s)
    assert_n3(wreck.again_by_torchrun("N3") if by_torchrun else wreck.again("N3"))


def assert_n3(ranks: list[Any]) -> None:
    """Step 2 was restored; training ended bit for bit, with all that its ranks keep."""
    for number, rank in enumerate(ranks):
        assert (rank["restored"], rank["same"]) == (2, True)
        assert rank["steps"] == [rank["latest"]] == [4]
        assert min(rank["referenced"]) >= 4096 * 4
        assert rank["queue"] == ([2, 4] if number == 0 else None)


def check_n4(wreck: Wreck) -> None:
    """Training had continued; the failure is raised on all survivors; hooks have got commits only."""
    assert_told(wreck.survivors["N4"], wreck.died_s)
    ranks = wreck.again("N4")
    for rank in ranks:
        assert (rank["restored"], rank["same"]) == (2, True)
        assert rank["steps"] == [5]
        assert rank["weights"] == 2
    heard = [uri.rpartition("/")[2] for value in wreck.survivors["N4"] for uri in value["heard"]]
    assert set(heard) <= {"step_1", "step_2", "weights_2"}


def assert_clean(wreck: Wreck) -> None:
    """Nothing of what the dead wrote is left over."""
    for name in wreck.runs:
        control = f"{wreck.behind(name)}/.ckptfs"
        assert wreck.lab.server.call(tree, f"{control}/attempts") == [], name
        assert wreck.lab.server.call(tree, f"{control}/trash") == [], name


def test_n1_parts_and_a_driver_resume_after_a_node_died(wreck: Wreck) -> None:
    """N1: actor part, driver part and the driver's object of a step are one checkpoint."""
    check_n1(wreck)


def test_n2_an_overwritten_run_survives_the_death_of_a_node(wreck: Wreck) -> None:
    """N2: killed between the claim and the first new commit."""
    check_n2(wreck)


def test_n3_driver_state_and_generators_resume_after_a_node_died(wreck: Wreck) -> None:
    """N3: a manager's whole state, bit for bit."""
    check_n3(wreck)


def test_n4_an_asynchronous_save_is_lost_with_its_node_and_nothing_else(wreck: Wreck) -> None:
    """N4: killed behind training."""
    check_n4(wreck)
    assert_clean(wreck)


def test_n3_under_torchrun_a_node_dies_and_torchrun_goes_on(lab: NfsLab) -> None:
    """N3 by the real launcher in both lives: it fails on the node that is left, started again it ends right."""
    run = lab.fresh("torchrun")
    args = {"run": f"faults+file://{run}", "until": JOBS["N3"].until}
    left, died_s = lost_under_torchrun(lab, "N3", args)
    survivors = list(said(left.output).values())
    assert left.status, left.output
    assert survivors, left.output  # the launcher may end the second before it has said anything
    assert_told(survivors, died_s)
    for survivor in survivors:
        assert re.search("rank [23] on b ", survivor["error"]["text"]), survivor
    ends = [program.wait(RESULT_S) for program in under_torchrun(lab, "N3", args)]
    assert [end.status for end in ends] == [0, 0], "\n".join(end.output for end in ends)
    values = {**said(ends[0].output), **said(ends[1].output)}
    assert_n3([values[rank] for rank in range(4)])
    assert lab.server.call(tree, f"{lab.behind(run)}/.ckptfs/attempts") == []


@pytest.mark.parametrize("victim", ["a", "b"])
def test_campaign_either_node_dies_under_all_four(lab: NfsLab, victim: str) -> None:
    """On both versions, N3 resumed by the real torchrun; with a the store, rank 0 and N1's driver go."""
    with Wreck(lab, lab.a if victim == "a" else lab.b) as wreck:
        for check in (check_n1, check_n2, check_n4):
            check(wreck)
        check_n3(wreck, by_torchrun=True)
        assert_clean(wreck)
