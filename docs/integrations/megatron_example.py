"""Megatron-Core: torchrun --standalone --nproc-per-node 2 megatron_example.py URI. It resumes."""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor, load, save

import ckptfs
from ckptfs.integrations.megatron import ITERATIONS, TRACKER, TorchShards


def sharded(state: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
    mine = (0, dist.get_rank(), dist.get_world_size())
    cut = {name: ShardedTensor.from_rank_offsets(name, t, mine) for name, t in state.items()}
    return {"model": cut, "iteration": step}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    state, start = {"weight": torch.ones(64), "momentum": torch.zeros(64)}, None
    uri, keep = sys.argv[1], {"keep_latest": 2, "pointer": TRACKER}
    with ckptfs.DirectoryManager(uri, name=ITERATIONS, **keep) as manager:
        with manager.reading() as found:
            if found is not None:
                loaded = load(sharded(state, 0), found.path)
                state, start = loaded["model"], loaded["iteration"]
        for step in range(start or 0, 6):
            batch = torch.randn(64, generator=torch.Generator().manual_seed(step)) + dist.get_rank()
            state["momentum"] = 0.9 * state["momentum"] + (state["weight"] - batch)
            state["weight"] = state["weight"] - 0.1 * state["momentum"]
            with manager.writing(step + 1) as path:
                save(sharded(state, step + 1), path, TorchShards())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, b"".join(t.numpy().tobytes() for t in state.values()))
    if dist.get_rank() == 0:
        print(f"resumed {start or 'none'}\nfinal {hashlib.sha256(b''.join(parts)).hexdigest()}")
