"""What each of eight ranks does in the rounds of tests/nfs/test_rounds.py: make a directory, write in it.

In each round every rank has just looked at a directory that is not there, so that its node has cached
the absence. Then, in turn:

    held     ensure_dir over the control plane of a held run, as a save does it; all create a file in it
    naive    rank 0 makes it, all meet in a barrier, all create a file in it
    call     ckptfs.ensure_dir, which meets, probes and leaves besides; in every tenth round
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.nfs.inside import join

__all__ = ["make_and_write"]

CALL_EVERY = 10


def make_and_write(args: dict[str, Any]) -> dict[str, Any]:
    """All rounds: failures of each way, and the seconds that making the directory took."""
    import torch.distributed as dist

    import ckptfs
    from ckptfs.topology.ensure_dir import ensure_dir

    rank, _ = join()
    run = args["run"]
    held = ckptfs.prepare_run(run)
    session = held.session

    def naive(name: str) -> None:
        if rank == 0:
            os.mkdir(f"{run}/{name}")
        dist.barrier()

    ways: dict[str, Callable[[str], object]] = {
        "held": lambda name: ensure_dir(session.control, session.storage, session.placement, name),
        "naive": naive,
        "call": lambda name: ckptfs.ensure_dir(f"{run}/{name}"),
    }
    failed = dict.fromkeys(ways, 0)
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args["rounds"]):
        for way, make in ways.items():
            if way == "call" and number % CALL_EVERY:
                continue
            name = f"{way}-{number}"
            assert not os.path.exists(f"{run}/{name}")
            dist.barrier()
            begun = time.monotonic()
            make(name)
            took[way].append(time.monotonic() - begun)
            try:
                os.close(os.open(f"{run}/{name}/{rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileNotFoundError:
                failed[way] += 1
    held.release()
    return {"failed": failed, "took": took}
