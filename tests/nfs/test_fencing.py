"""Two jobs, one run directory, two NFS clients: the older one, on the other node, is fenced."""

from __future__ import annotations

import os

import pytest

from tests.lab.nfs import NfsLab, Version
from tests.nfs.conftest import Labs
from tests.nfs.crowd import Crowd, Gate
from tests.nfs.inside import tree
from tests.nfs.lives import look, newer, older

MOMENTS = {
    # The older job's rank 1 has its data file open and most of it written.
    "writing": ("close", "*__1_0.distcp", 2, 1),
    # Its rank 0 is about to append the seal: all data is there, on both ranks.
    "sealing": ("create", ".ckptfs/log/*", 3, 0),
}


@pytest.mark.campaign
@pytest.mark.parametrize(("version", "moment"), [("4.2", "sealing"), ("3", "writing")])
def test_an_older_job_on_another_node_is_fenced(labs: Labs, version: Version, moment: str) -> None:
    """It is stopped in the middle of a save while a job on b takes the run over and commits the same step:
    both of its ranks get a typed error, nothing of what it writes late is believed, on either node.
    """
    fence_the_older(labs(version), moment)


@pytest.mark.campaign
@pytest.mark.parametrize("moment", MOMENTS)
def test_campaign_an_older_job_is_fenced_at_both_moments(lab: NfsLab, moment: str) -> None:
    """Both moments on both versions."""
    fence_the_older(lab, moment)


def fence_the_older(lab: NfsLab, moment: str) -> None:
    """One round of it."""
    operation, key, nth, rank = MOMENTS[moment]
    run = lab.fresh("two-jobs")
    gate = Gate(lab.a)
    fault = gate.fault(operation, key, nth, rank=rank)
    first = Crowd(
        lab,
        older,
        {"run": f"faults+file://{run}"},
        nodes=[lab.a],
        job="older",
        own=lambda _: fault,
    )
    with first:
        first.wait_at(gate)
        with Crowd(lab, newer, {"run": run}, nodes=[lab.b], job="newer") as second:
            assert second.values() == [{"found": 1, "wrong": ""}] * 2
        written = set(lab.server.call(tree, lab.behind(f"{run}/step_2")))
        gate.open()
        ends = [value["ends"] for value in first.values()]
    assert ends[0] == ends[1], "the ranks of the older job were told different things"
    late, after = ends[0]
    assert late["type"] in ("FencedError", "CollectiveError"), late
    assert late["outcome"] == "failed", late
    if moment == "sealing":
        assert late["type"] == "FencedError", late
    assert after["type"] == "FencedError", after
    assert set(lab.server.call(tree, lab.behind(f"{run}/step_2"))) == written
    assert lab.server.call(os.listdir, lab.behind(f"{run}/.ckptfs/attempts")) == []
    for node in lab.nodes:
        wanted = {"steps": [1, 2], "wrong": {1: "", 2: ""}}
        with Crowd(lab, look, {"run": run, "steps": {1: 0, 2: 7}}, nodes=[node]) as eyes:
            assert eyes.values() == [wanted] * 2
