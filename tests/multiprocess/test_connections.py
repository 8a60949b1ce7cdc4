"""How often ranks connect to the store that they talk through."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.multiprocess.harness import Rank, launch
from tests.topology.relay import HOST, Relay

pytestmark = pytest.mark.timeout(180)

RANKS = 2


def many_calls(rank: Rank) -> object:
    """One save, and then everything that a training does, from two threads."""
    import torch
    import torch.distributed as dist

    import ckptfs

    store = TCPStore(
        HOST,
        rank.args["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size)
    run = rank.args["run"]

    def state() -> dict[str, torch.Tensor]:
        return {"w": torch.ones(4), f"own.{rank.number}": torch.ones(2)}

    ckptfs.save(state(), f"{run}/step_1")
    rank.tell("first")
    rank.hold("go on")
    for step in (2, 3):
        ckptfs.save(state(), f"{run}/step_{step}")
        ckptfs.load(state(), f"{run}/step_{step}")
    ckptfs.ensure_dir(f"{run}/logs")
    thread = threading.Thread(target=ckptfs.load, args=(state(), f"{run}/step_1"))
    thread.start()
    thread.join()
    with ckptfs.prepare_run(run):
        pass
    rank.tell("done")
    rank.hold("end")
    return "ended"


def test_no_call_after_the_first_connects_again(tmp_path: Path) -> None:
    """Saves, loads, prepare_run and ensure_dir use the connections that the first call made."""
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Relay(server.port) as relay:
        args = {"port": relay.port, "run": str(tmp_path / "run")}
        with launch(many_calls, RANKS, args=args, store="none") as ranks:
            ranks.wait("first", timeout_s=90)
            made = relay.accepted
            ranks.release("go on")
            ranks.wait("done", timeout_s=90)
            assert relay.accepted == made
            # The group's own client, and two of ours: the heartbeat's and that of the steps.
            assert made == 3 * RANKS
            ranks.release("end")
            assert ranks.values(timeout_s=30) == ["ended"] * RANKS
