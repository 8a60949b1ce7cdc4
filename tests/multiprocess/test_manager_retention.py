"""Retention and reclaiming by real processes on two nodes, each with a disk of its own.

Whatever is killed and started again: each disk holds what the policy keeps, one save that is on its
way, at most one dead attempt, and in the end nothing else.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfs.commit.session import Place
from ckptfs.control.control import open_control
from ckptfs.manager.manager import CheckpointManager
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Action, FaultyStorage, Plan, parse_faults
from ckptfs.testing.nodes import this_node
from ckptfs.uri import Uri
from tests.multiprocess.harness import Rank, launch, torchrun

NODES = ("a", "b")
KEEP = 3
SAVES = 20


def disk(base: str, node: str) -> str:
    """Where the run is on a node."""
    return f"{base}/{node}/run"


def steps_in(run: str) -> list[int]:
    """The step directories on a disk, by number."""
    return sorted(int(n.removeprefix("step_")) for n in os.listdir(run) if n != ".ckptfs")


def holders(run: str) -> int:
    """How many saves have bytes of data on a disk: steps, attempts, trash."""
    found = set()
    for top, _, names in os.walk(run):
        if any(name.endswith(".distcp") for name in names):
            found.add(top)
    return len(found)


def attempts(run: str) -> list[str]:
    """What is in attempts/ of a disk."""
    path = f"{run}/.ckptfs/attempts"
    return os.listdir(path) if os.path.isdir(path) else []


def trash(run: str) -> list[str]:
    """What is in trash/ of a disk, one level below the generations."""
    path = f"{run}/.ckptfs/trash"
    generations = os.listdir(path) if os.path.isdir(path) else []
    return [f"{g}/{n}" for g in generations for n in os.listdir(f"{path}/{g}")]


class Watching(Plan):
    """Faults, and before each operation a look at the disk; the most saves that were seen on it."""

    def __init__(self, faults: str, run: str) -> None:
        super().__init__(parse_faults(faults))
        self._run = run
        self.most = 0

    def begin(self, op: str, key: str) -> Action | None:
        if op in ("create", "close", "rename", "remove_tree"):
            self.most = max(self.most, holders(self._run))
        return super().begin(op, key)


@contextlib.contextmanager
def managing(rank: Rank, faults: str, **options: Any) -> Any:
    """A manager on this node's own disk, through a storage that goes wrong and looks."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # gloo itself often fails after a restart
        rank.init_group()
    uri = Uri.parse(f"nodes+file://{rank.args['base']}/@node/run")
    plan = Watching(faults, disk(rank.args["base"], this_node()))
    storage = FaultyStorage(open_storage(uri), plan)
    with open_control() as control:
        ground = RunHandle(Where(str(uri), Place()), control=control, storage=storage)
        with CheckpointManager(str(uri), ground=ground, **options) as manager:
            yield manager, plan


def state_of(rank: Rank, step: int) -> dict[str, Any]:
    """What a rank saves: a tensor of its own and a common one."""
    return {f"own{rank.number}": torch.full((256,), float(step)), "common": torch.full((4,), step)}


def train(rank: Rank) -> dict[str, Any]:
    """Continue after the newest step, saving every step; die once on request."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", rank.args.get("restart", "0"))
    faults = rank.args["fault"] if restart == "0" else ""
    with managing(rank, faults, keep_latest=KEEP, mode=rank.args["mode"]) as (manager, plan):
        begun = max(manager.steps, default=0)
        if begun:
            # A step that one disk alone has sealed is not among them, and is committed by the claim.
            manager.resumed_at(begun)
        for step in range(begun + 1, rank.args["saves"] + 1):
            manager.save(step, state_of(rank, step))
    return {"begun": begun, "most": plan.most}


@pytest.mark.parametrize(
    ("mode", "victim", "fault", "most"),
    [
        ("async", 1, "kill-half:write:*__1_0.distcp:10", KEEP + 1),
        # One disk has sealed a step and no rank knows of it: it is saved again, and what it replaces
        # goes one commit later.
        ("sync", 0, "kill-after:create:*/log/*:20", KEEP + 2),
    ],
    ids=["writing", "entering"],
)
def test_both_disks_stay_within_keep_latest_over_a_restart(
    tmp_path: Path, mode: str, victim: int, fault: str, most: int
) -> None:
    """20 saves with keep_latest=3, killed in the middle and started again: never more than keep + 1
    saves on a disk while one is written, and in the end the last three and nothing else.
    """
    args = {"base": str(tmp_path), "saves": SAVES, "fault": f"{fault}@{victim}", "mode": mode}
    with launch(train, 2, args={**args, "restart": "0"}, nodes=NODES, launcher_env=True) as ranks:
        assert ranks.results(ranks=[victim])[0].died
        ranks.kill(1 - victim)
    runs = [disk(str(tmp_path), node) for node in NODES]
    assert all(0 < len(steps_in(run)) <= KEEP + 1 for run in runs)
    with launch(train, 2, args={**args, "restart": "1"}, nodes=NODES, launcher_env=True) as ranks:
        told = ranks.values()
    assert 5 < told[0]["begun"] < SAVES
    for run, one in zip(runs, told, strict=True):
        assert steps_in(run) == [SAVES - 2, SAVES - 1, SAVES]
        assert holders(run) == KEEP
        assert one["most"] <= most
        assert attempts(run) == []
        assert trash(run) == []


@pytest.mark.campaign
def test_both_disks_stay_within_keep_latest_under_torchrun(tmp_path: Path) -> None:
    """The same under two torchrun agents that start the job again by themselves."""
    fault = "kill-half:write:*__1_0.distcp:10@1.0"
    args = {"base": str(tmp_path), "saves": SAVES, "fault": fault, "mode": "async"}
    results = torchrun(train, 1, nnodes=2, args=args, max_restarts=1)
    assert [r.error for r in results] == [None, None], results[0].log[-3000:]
    assert all(5 < r.value["begun"] < SAVES for r in results), "nobody was killed"
    for node in ("node0", "node1"):
        assert steps_in(disk(str(tmp_path), node)) == [SAVES - 2, SAVES - 1, SAVES]
        assert holders(disk(str(tmp_path), node)) == KEEP
