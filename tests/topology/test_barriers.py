"""Barriers of other people's code carry failures while they are met at."""

from __future__ import annotations

import time

import torch.distributed as dist

from ckptfs.control.control import open_control
from ckptfs.control.framework_collectives import meeting_at_barriers
from tests.multiprocess.harness import Rank, launch


def _run(rank: Rank) -> list[str]:
    rank.init_group()
    told = []
    with open_control(timeout_s=60.0) as control:
        for failing, after in ((None, 0), (1, 0), (0, 1), (1, 2), (None, 0)):
            began = time.monotonic()
            try:
                with meeting_at_barriers(control):
                    for place in range(3):
                        if rank.number == failing and place == after:
                            raise OSError(28, "no space left")
                        if place < 2:
                            dist.barrier()
                told.append("")
            except Exception as error:  # noqa: BLE001 - passed to the test
                told.append(type(error).__name__)
            assert time.monotonic() - began < 30.0  # far below the timeout of the group
    dist.barrier()  # torch's own again
    assert dist.barrier.__module__.startswith("torch")
    return told


def test_what_one_rank_fails_of_all_hear_at_their_next_barrier() -> None:
    """Before, between or after the barriers: the rank's own error there, a CollectiveError elsewhere."""
    with launch(_run, 2) as ranks:
        first, second = ranks.values()
    assert first == ["", "CollectiveError", "OSError", "CollectiveError", ""]
    assert second == ["", "OSError", "CollectiveError", "OSError", ""]
