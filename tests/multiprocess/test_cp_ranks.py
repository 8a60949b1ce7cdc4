"""``torchrun ... -m ckptfs cp``: every node brings what is on its disk, without a process group."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.cli.main import main
from tests.multiprocess.harness import Rank, torchrun

NUMBERS = 200_000


def state_of(rank: int) -> dict[str, Any]:
    """Something of every rank's own, something replicated."""
    return {f"w{rank}": torch.arange(float(NUMBERS)) + rank, "lr": torch.tensor(0.5)}


def save_and_copy(rank: Rank) -> dict[str, Any]:
    """Save on two disks, leave the group, then the command; and once more, of what is not there."""
    source = str(rank.args["source"])
    dist.init_process_group("gloo")
    ckptfs.save(state_of(rank.number), f"{source}/step_3")
    dist.destroy_process_group()
    ended = {}
    for name in ("step_3", "step_4"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(["cp", f"{source}/{name}", f"{rank.args['target']}/{name}"])
            except SystemExit as exit_:
                ended[name] = [exit_.code, out.getvalue(), err.getvalue()]
    return ended


def test_shards_of_two_nodes_become_one_checkpoint_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 speaks; all ranks end with one code; stock torch reads the copy in one process."""
    target = tmp_path / "copy"
    args = {"source": f"nodes+file://{tmp_path}/@node/run", "target": str(target)}
    ended = torchrun(save_and_copy, 1, nnodes=2, args=args, warm=True)
    assert all(result.value for result in ended), ended[0].log
    results = [result.value for result in ended]
    assert [r["step_3"][0] for r in results] == [0] * 2
    assert [r["step_4"][0] for r in results] == [3] * 2
    assert "copied" in results[0]["step_3"][1]
    assert "neither a checkpoint nor a run" in results[0]["step_4"][2]
    assert [r[name][1:] for r in results[1:] for name in r] == [["", ""]] * 2
    state: dict[str, Any] = {f"w{r}": torch.zeros(NUMBERS) for r in range(2)}
    state["lr"] = torch.zeros(())
    dcp.load(state, checkpoint_id=target / "step_3", no_dist=True)
    for rank in range(2):
        assert torch.equal(state[f"w{rank}"], state_of(rank)[f"w{rank}"])
    assert [c.step for c in ckptfs.list_checkpoints(target)] == [3]
