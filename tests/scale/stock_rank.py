"""One rank of a stock save, for strace: python stock_rank.py RANK SIZE STORE DIRECTORY."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def main(rank: int, size: int, store: str, directory: str) -> None:
    """Save one sharded and one replicated tensor."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    state = {"w": distribute_tensor(torch.zeros(4 * size), mesh, [Shard(0)]), "b": torch.zeros(4)}
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
