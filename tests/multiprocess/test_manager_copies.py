"""Node-local checkpoints drained to shared storage by real ranks, and ranks killed while they do it.

primary   nodes+file://.../@node/run    a disk for each of two nodes
copy      a directory that both see     one domain
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ckptfs
from tests.multiprocess.harness import Rank, launch, torchrun

NODES = ["a", "a", "b", "b"]
NUMBERS = 400_000


def state_of(rank: int, step: int) -> dict[str, Any]:
    """A shard of this rank's, something replicated, something of its own."""
    return {
        f"w{rank}": torch.arange(float(NUMBERS)) + rank + step,
        "lr": torch.tensor(0.5),
        "own": {"seed": rank + step},
    }


def save_and_drain(rank: Rank) -> dict[str, Any]:
    """One job: drain what is left, save, drain; what it reported."""
    from ckptfs.events import CopyFailed, Event
    from ckptfs.replication.copier import gather
    from ckptfs.replication.tiers import Copier, copies_of

    told: list[Event] = []
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        rank.init_group()
    primary, copy = str(rank.args["primary"]), str(rank.args["copy"])
    with ckptfs.prepare_run(primary) as run:
        copier = Copier(run, copies_of([copy], primary), lambda seal: True, tell=told.append)
        for step in rank.args["steps"]:
            state = state_of(rank.number, step)
            saved = ckptfs.save(state, f"{primary}/step_{step}", run=run, per_rank=["own.*"])
            copier.after_commit(saved)
        left = copier.wait(timeout_s=240)
        waiting = len(copier.waiting())
        copier.close()
        domains = len(run.session.placement.domains)
        if rank.args.get("by_hand"):
            gather(f"{primary}/step_{step}", str(rank.args["by_hand"]))
    return {
        "left": left,
        "waiting": waiting,
        "domains": domains,
        "failed": [e.error for e in told if isinstance(e, CopyFailed)],
    }


def places(tmp_path: Path) -> dict[str, str]:
    """Where the primary and the copy are."""
    return {
        "primary": f"nodes+file://{tmp_path}/@node/run",
        "copy": f"{tmp_path}/copy",
    }


def check_copy(copy: Path, step: int) -> None:
    """Whole and bit for bit, by stock torch in one process."""
    state: dict[str, Any] = {f"w{r}": torch.zeros(NUMBERS) for r in range(4)} | {
        "lr": torch.zeros(())
    }
    dcp.load(state, checkpoint_id=copy / f"step_{step}", no_dist=True)
    for rank in range(4):
        assert torch.equal(state[f"w{rank}"], state_of(rank, step)[f"w{rank}"])
    assert state["lr"] == 0.5


def steps(run: Path) -> list[int | None]:
    """Committed steps, in commit order."""
    return [c.step for c in ckptfs.list_checkpoints(run)]


def test_two_nodes_with_a_disk_each_become_one_checkpoint_elsewhere(tmp_path: Path) -> None:
    """N1: node-local shards are gathered at another URI, by the copier and by hand, every byte by a
    rank that sees it.
    """
    args = places(tmp_path) | {"steps": [1, 2], "by_hand": str(tmp_path / "kept/step_2")}
    with launch(save_and_drain, 4, nodes=NODES, args=args) as ranks:
        values = ranks.values()
    assert [(v["left"], v["waiting"], v["domains"], v["failed"]) for v in values] == [
        ([], 0, 2, [])
    ] * 4
    copy = tmp_path / "copy"
    assert steps(copy) == [1, 2]
    for step in (1, 2):
        check_copy(copy, step)
    assert len(list(copy.glob("step_2/*/*.distcp"))) == 4
    check_copy(tmp_path / "kept", 2)


def test_a_failure_of_one_rank_is_told_on_all_and_the_copy_is_made_at_the_next_try(
    tmp_path: Path,
) -> None:
    """Rank 2 meets a full disk: CopyFailed with its message on every rank, training saves on, and the
    retry is a copy like any other.
    """
    copy = tmp_path / "copy"
    args = places(tmp_path) | {"steps": [1, 2], "copy": f"faults+file://{copy}"}

    def environment(rank: int) -> dict[str, str]:
        return {"CKPTFS_TEST_FAULT": "fail=ENOSPC:write:*.distcp:1"} if rank == 2 else {}

    with launch(save_and_drain, 4, nodes=NODES, args=args, env=environment) as ranks:
        values = ranks.values()
    for value in values:
        assert value["left"] == []
        [error] = value["failed"]
        assert "No space left" in error
        assert "rank 2" in error
    assert steps(copy) == [1, 2]
    for step in (1, 2):
        check_copy(copy, step)


@pytest.mark.campaign
def test_the_same_under_torchrun(tmp_path: Path) -> None:
    """Two agents, two ranks each."""
    args = places(tmp_path) | {"steps": [1]}
    results = torchrun(save_and_drain, 2, nnodes=2, args=args)
    assert [r.error for r in results] == [None] * 4, results[0].log
    check_copy(tmp_path / "copy", 1)


DEATHS = {
    "one rank, in the middle of a file": ({1: "kill-half:write:*.distcp:1"}, []),
    "all ranks, before a file has its name": (dict.fromkeys(range(4), "kill:close:*.distcp:1"), []),
    "the coordinator, when the seal lies in the log": ({0: "kill-after:create:*/log/*:2"}, [1]),
}


@pytest.mark.parametrize("death", DEATHS)
def test_killed_while_copying_the_copy_is_absent_or_whole(tmp_path: Path, death: str) -> None:
    """SIGKILL at any point: the copy has the save or nothing of it, the primary keeps it, survivors
    are not harmed, and the next job drains what is left before anything else.
    """
    faults, expected = DEATHS[death]
    args = places(tmp_path) | {"steps": [1]}
    copy = tmp_path / "copy"

    def environment(rank: int) -> dict[str, str]:
        return {"CKPTFS_TEST_FAULT": faults[rank]} if rank in faults else {}

    faulty = args | {"copy": f"faults+file://{copy}"}
    with launch(save_and_drain, 4, nodes=NODES, args=faulty, env=environment) as ranks:
        results = ranks.results()
    assert {r.rank for r in results if r.died} == set(faults)
    assert [r.error for r in results if not r.died] == [None] * (4 - len(faults))
    assert steps(copy) == expected
    for step in expected:  # committed, and not projected for stock readers yet
        state = {"w1": torch.zeros(NUMBERS)}
        ckptfs.load(state, copy / f"step_{step}", strict=False)
        assert torch.equal(state["w1"], state_of(1, step)["w1"])
    with launch(save_and_drain, 4, nodes=NODES, args=args | {"steps": [2]}) as ranks:
        assert [v["left"] for v in ranks.values()] == [[]] * 4
    assert steps(copy) == [1, 2]
    for step in (1, 2):
        check_copy(copy, step)
    assert not list((copy / ".ckptfs/attempts").iterdir())
