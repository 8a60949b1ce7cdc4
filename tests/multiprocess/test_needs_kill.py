"""kill -9 of one rank of four in the middle of ``ckptfs.save``: the others learn it within seconds,
by name; what was there stays, or the new is whole; four new processes continue.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.multiprocess.harness import Rank, Result, StoreHost, launch

RANKS = 4
TOLD_WITHIN_S = 60  # promised: seconds; the machine of the tests may be busy


def state_of(rank: int, value: int) -> dict[str, Any]:
    """What one rank saves: a tensor of its own, a replicated one, a leaf."""
    import torch

    own = torch.arange(30_000, dtype=torch.float32) * value + rank
    return {f"part{rank}": own, "common": torch.full((7, 11), value), "step": value}


def save_and_die(rank: Rank) -> dict[str, Any]:
    """step_1 is saved in peace; the victim dies in the save of step_2."""
    rank.init_group()
    run = str(rank.args["run"])
    ckptfs.save(state_of(rank.number, 1), f"{run}/step_1")
    if rank.number == rank.args["victim"]:
        os.environ["CKPTFS_TEST_FAULT"] = rank.args["fault"]
    begun = time.monotonic()
    try:
        saved = ckptfs.save(state_of(rank.number, 2), f"{run}/step_2", timeout_s=600)
    except ckptfs.CkptfsError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "outcome": error.outcome,
            "after_s": time.monotonic() - begun,
        }
    return {"saved": saved.save_id, "warnings": saved.warnings}


def go_on(rank: Rank) -> dict[str, Any]:
    """New processes: claim, see what is there, save the next step."""
    import torch

    rank.init_group()
    run = str(rank.args["run"])
    with ckptfs.prepare_run(run) as held:
        latest = ckptfs.latest(run)
        assert latest is not None
        state = state_of(rank.number, 0)
        ckptfs.load(state, latest.uri)
        value = int(state["step"])
        for key, tensor in state_of(rank.number, value).items():
            same = torch.equal(state[key], tensor) if key != "step" else state[key] == value
            assert same, f"{key} of rank {rank.number} is not what was saved in step {value}"
        ckptfs.save(state_of(rank.number, 3), f"{run}/step_3", run=held)
    return {"found": str(latest.uri).rsplit("/", 1)[1], "all": len(ckptfs.list_checkpoints(run))}


@pytest.mark.parametrize(
    ("victim", "fault", "store", "end"),
    [
        pytest.param(2, "kill-half:write:*__2_0.distcp:1", "test", "old", id="half-a-file"),
        pytest.param(0, "kill:sync:*:2", "test", "old", id="owner-before-a-sync"),
        pytest.param(0, "kill:create:*log/00000001:1", "rank0", "old", id="owner-with-the-store"),
        pytest.param(0, "kill-after:create:*log/00000001:1", "test", "new", id="owner-after-seal"),
    ],
)
def test_one_of_four_is_killed_inside_a_save(
    tmp_path: Path, victim: int, fault: str, store: StoreHost, end: str
) -> None:
    """Every survivor names the dead rank (or the store that went with it), says "failed" only where
    nothing was committed, and the next four processes find the old or the new state, whole.
    """
    run = tmp_path / "run"
    args = {"run": f"faults+file://{run}", "victim": victim, "fault": fault}
    with launch(save_and_die, RANKS, args=args, store=store) as ranks:
        results = ranks.results()
    assert results[victim].died, results[victim].log
    survivors = [r for r in results if r.rank != victim]
    assert_told(survivors, victim, end, store)

    with launch(go_on, RANKS, args={"run": str(run)}) as ranks:
        found = ranks.values()
    wanted = {"found": "step_2" if end == "new" else "step_1", "all": 3 if end == "new" else 2}
    assert found == [wanted] * RANKS
    assert list((run / ".ckptfs/attempts").iterdir()) == []


def assert_told(survivors: list[Result], victim: int, end: str, store: StoreHost) -> None:
    """One story for all survivors, in time."""
    told = [r.value for r in survivors]
    assert all(told), [r.error for r in survivors]
    for value in told:
        assert value.get("after_s", 0) < TOLD_WITHIN_S
        if end == "new":
            # The seal is there: a rank without that answer must not get another one.
            assert "saved" in value or value["outcome"] == "unknown", value
        elif store == "rank0":
            assert value["error"] in ("ControlPlaneLostError", "CommitInDoubtError"), value
        else:
            assert value["error"] in ("CollectiveError", "CommitInDoubtError"), value
            assert f"rank {victim}" in value["text"], value
