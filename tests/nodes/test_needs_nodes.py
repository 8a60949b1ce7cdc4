"""N1 to N4 on machines with a disk of their own each: torchrun over two, a driver on a third.

One life of a run, in three jobs: a whole machine dies in the middle of a save; it comes back and the
job continues to the end; it is replaced by an empty one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.lab import training
from tests.lab.job import WAIT_S, Facts, Job
from tests.lab.nodes import Nodes
from tests.lab.process import REPOSITORY
from tests.nodes.conftest import MakeNodes

pytestmark = pytest.mark.timeout(1200)

PROGRAM = training.__file__
RUN = "/scratch/run"
COPY = "/shared/copy"
SILENCE_S = 12.0  # timeout_s of the job that loses a machine: silence, not work
TOLD_WITHIN_S = 2 * SILENCE_S + 20.0  # promised: timeout_s; this machine may be busy


def test_n1_to_n4_while_machines_die_come_back_and_are_replaced(
    make_nodes: MakeNodes, tmp_path: Path
) -> None:
    """N1 to N4 on node-local disks, end to end: see the steps."""
    nodes = make_nodes(3)
    reference = a_machine_dies_in_the_middle_of_a_save(nodes, tmp_path, victim=1)
    nodes[1].boot()
    the_job_goes_on(nodes, tmp_path, reference)
    nodes[1].replace()
    an_empty_machine_is_named_and_the_copy_serves_it(nodes, tmp_path, reference)


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_campaign_each_machine_dies(
    make_nodes: MakeNodes, tmp_path: Path, victim: int, mode: str
) -> None:
    """N4: the coordinator's machine, or the other one, in both modes; resumed bit for bit."""
    nodes = make_nodes(3)
    reference = a_machine_dies_in_the_middle_of_a_save(nodes, tmp_path, victim=victim, mode=mode)
    nodes[victim].boot()
    the_job_goes_on(nodes, tmp_path, reference)


def a_machine_dies_in_the_middle_of_a_save(
    nodes: Nodes, home: Path, *, victim: int, mode: str = "async"
) -> list[str]:
    """N4: a save is on its way, ``latest`` has not moved, a whole machine dies: within the deadline the
    others learn which. Returns what each rank should end with.
    """
    gate, pending_deletes = home / "gate", 2 * victim + 1
    fault = f"hold={gate}:close:*__{pending_deletes}_0.distcp:2@{pending_deletes}"
    words = [f"faults+file://{RUN}", "--reference", "--mode", mode, "--timeout-s", str(SILENCE_S)]
    with job(nodes, "train", *words, home=home, fault=fault) as first:
        first.reached(gate)
        if mode == "async":
            # While the writer of one rank is held: saves return before their bytes are durable.
            first.until(
                lambda: all(staged(first, rank) == [2, 4] for rank in first.ranks),
                "both saves have returned everywhere",
            )
            for rank in first.ranks:
                assert last(first, rank, "staged")["latest"] == 2
        before = time.monotonic()
        nodes[victim].kill()
        others = [2 * (1 - victim), 2 * (1 - victim) + 1]
        told = first.wait("failed", ranks=others)
        took_s = time.monotonic() - before
        assert took_s < TOLD_WITHIN_S
        for rank in others:
            assert told[rank]["kind"] in kinds(victim), told[rank]
            if victim == 1:
                # Its two ranks fell silent up to a heartbeat apart: one of them alone may be named.
                silent = {f"rank {r} on node1 " for r in (pending_deletes - 1, pending_deletes)}
                assert any(words in told[rank]["text"] for words in silent), told[rank]
        first.release("leave")
        assert first.statuses([1 - victim]) != [0]
        return [str(first.wait("reference")[rank]["fingerprint"]) for rank in first.ranks]


def kinds(victim: int) -> set[str]:
    """What survivors may learn: node 0 hosts the store through which ranks talk."""
    lost = {"ControlPlaneLostError", "CommitInDoubtError"} if victim == 0 else set()
    return {"DeadlineError", "CollectiveError", *lost}


def the_job_goes_on(nodes: Nodes, home: Path, reference: list[str]) -> None:
    """N3: from the old checkpoint to the end, bit for bit what training without a death gives; then
    N2 and N1, with a driver on a machine that has no rank.
    """
    exchange = home / "exchange"
    exchange.mkdir()
    words = [RUN, str(exchange), "--mode", "async", "--copy", COPY]
    with job(nodes, "train", *words, home=home) as second:
        with the_driver(nodes, second, exchange):
            second.succeed()
        assert [told["step"] for told in second.wait("restored").values()] == [2] * 4
        done = second.wait("done")
        assert [done[rank]["fingerprint"] for rank in second.ranks] == reference
        assert done[0]["steps"] == [4, 6], "retention is per node, and after a restart"
        n2_overwriting(second)
        n1_a_driver_and_a_group(second)
    for number in (0, 1):
        left = nodes[number].run(["ls", "-A", RUN, f"{RUN}/.ckptfs/attempts"]).split()
        assert left == [f"{RUN}:", ".ckptfs", "step_4", "step_6", f"{RUN}/.ckptfs/attempts:"]
    gathered = dcp.FileSystemReader(exchange / "gathered/step_6").read_metadata()
    assert len({place.relative_path for place in gathered.storage_data.values()}) == 4


def n2_overwriting(second: Job) -> None:
    """N2: nothing moves before the first commit of the new, foreign files stay, and an owner that cannot
    write is one error on every rank.
    """
    for rank in second.ranks:
        first = 0 if rank < 2 else 2
        theirs = [f"theirs-{first}", f"theirs-{first + 1}"]
        during, after, failed = (
            second.find(event, rank)
            for event in ("overwriting", "overwritten", "after the failure")
        )
        assert during is not None
        assert after is not None
        assert failed is not None
        assert (during["latest"], during["there"]) == (None, ["step_1", *theirs])
        assert (after["latest"], after["there"]) == ("step_2", ["step_2", *theirs])
        assert failed["there"] == after["there"], "a failed overwrite costs nothing"
        raised = second.wait("not overwritten")[rank]
        assert (raised["kind"], raised["ranks"]) == ("CollectiveError", [2]), raised
        assert "Read-only" in raised["text"]
        assert "node1" in raised["text"]


def n1_a_driver_and_a_group(second: Job) -> None:
    """N1: a driver on a machine of its own, where no directory was made, and a group on two others:
    one commit; each finds its part, and who looks for it elsewhere learns where it is.
    """
    for told in second.wait("parts").values():
        assert (told["whole"], told["latest"]) == (True, "step_8")
    driver = second.size
    second.wait("done", ranks=[driver])
    found = {event: second.find(event, driver) for event in ("drove", "object", "incomplete")}
    assert found["drove"] == {"event": "drove", "latest": "step_8", "epoch": 3}
    assert found["object"] == {"event": "object", "seen": 17}
    assert found["incomplete"] is not None
    assert "actor" in found["incomplete"]["text"]
    elsewhere = second.find("elsewhere", driver)
    assert elsewhere is not None, "a part on other machines was read"
    assert "node0" in elsewhere["text"]
    assert "node1" in elsewhere["text"]


def an_empty_machine_is_named_and_the_copy_serves_it(
    nodes: Nodes, home: Path, reference: list[str]
) -> None:
    """The restore names the machine that lost its disk, its ranks and its shards, on every rank; with
    ``copies=`` it restores, and the job saves on.
    """
    words = [RUN, "--mode", "async", "--copy", COPY, "--refused", "--until", "8"]
    with job(nodes, "train", *words, home=home) as third:
        third.succeed()
        refused = third.wait("refused")
        for rank in third.ranks:
            assert refused[rank]["kind"] == "IncompleteCheckpointError", refused[rank]
            for part in ("node1", "__2_0.distcp", "__3_0.distcp"):
                assert part in refused[rank]["text"], refused[rank]
        assert len({told["text"] for told in refused.values()}) == 1
        restored = third.wait("restored")
        assert [restored[rank]["step"] for rank in third.ranks] == [6] * 4
        assert [restored[rank]["fingerprint"] for rank in third.ranks] == reference
        assert third.wait("done")[0]["steps"][-1] == 8


# -- helpers -----------------------------------------------------------------------------------------


def job(nodes: Nodes, *words: str, home: Path, fault: str = "") -> Job:
    """One start of the job on the first two machines; each is the same job to the run's owner."""
    env = {"CKPTFS_TEST_FAULT": fault}
    machines = list(nodes)[:2]
    return Job(machines, [PROGRAM, *words], home=home, env=env, run_id="lab", warm=True)


@contextmanager
def the_driver(nodes: Nodes, job: Job, exchange: Path) -> Iterator[None]:
    """The driver on the third machine, until it ends well; it reports as the rank after the last."""
    env = {"CKPTFS_LAB_TOLD": str(job.home), "RANK": str(job.size), "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, PROGRAM, "drive", f"{RUN}-parts", str(exchange)]
    process = nodes[2].start(words, log=job.home / "driver.log", env=env)
    try:
        yield
        assert process.wait(WAIT_S) == 0, (job.home / "driver.log").read_text()
    finally:
        process.kill()
        process.wait()


def staged(job: Job, rank: int) -> list[int]:
    """The steps with a save that has returned on a rank."""
    return [told["step"] for told in job.told(rank) if told["event"] == "staged"]


def last(job: Job, rank: int, event: str) -> Facts:
    """The last such event of a rank."""
    return [told for told in job.told(rank) if told["event"] == event][-1]
