"""torchrun --standalone --nproc-per-node 2 torchdata_example.py URI [sync|async]."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckptfs

uri, mode = sys.argv[1:3]
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = torch.arange(48.0).view(24, 2)
sampler = StatefulDistributedSampler(data, seed=3)  # each rank its own half, shuffled
own = torch.Generator().manual_seed(dist.get_rank())  # iterators draw from it, dropout does not
loader = StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=1, generator=own)
weights = torch.zeros(2)
seen = ckptfs.PerRank([])  # anything else that every rank has for itself
state = {"weights": weights, "loader": loader, "seen": seen, "rng": ckptfs.RngState(), "step": 0}

with ckptfs.CheckpointManager(uri, keep_latest=2, mode=mode) as manager:
    restored = manager.restore(state)
    step = 0 if restored is None else restored.step
    print(f"resumed {step or 'none'}\n" * (dist.get_rank() == 0), end="")
    seen = state["seen"]
    for batch in loader:  # goes on with the next sample of this rank
        step += 1
        seen.value.append(batch.tolist())
        mean = torch.nn.functional.dropout(batch, 0.5).mean(0)
        dist.all_reduce(mean)
        weights.mul_(0.9).add_(mean)
        manager.save(step, {**state, "seen": seen, "step": step})
everything = [None, None]
dist.all_gather_object(everything, (weights.tolist(), seen.value))
if dist.get_rank() == 0:
    print("final", hashlib.sha256(repr(everything).encode()).hexdigest())
