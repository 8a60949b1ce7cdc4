"""openpi's DDP: torchrun ... openpi_example.py URI [sync|async [resume|overwrite]]"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckptfs

uri, mode, begin = (*sys.argv[1:], *("sync", "resume")[len(sys.argv) - 2 :])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model.module, "optimizer": optimizer, "global_step": 0}

ckptfs.prepare_run(uri, begin).release()
with ckptfs.CheckpointManager(uri, name="{N}", mode=mode, keep_latest=1, keep_every=3) as manager:
    restored = manager.restore(state)
    if rank == 0:
        print("resumed", "none" if restored is None else restored.step)
        if restored is None:
            ckptfs.save_object({"id": "3f9a"}, f"{uri}/wandb.pt")
    for step in range(state["global_step"] + 1, 7):
        data = torch.Generator().manual_seed(2 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=data)).pow(2).mean().backward()
        optimizer.step()
        manager.save(step, {**state, "global_step": step})
adam = optimizer.state_dict()["state"]
parts = [*model.parameters(), *(adam[n][key] for n in sorted(adam) for key in sorted(adam[n]))]
digest = hashlib.sha256(repr([part.tolist() for part in parts]).encode()).hexdigest()
print(f"final {digest}" if rank == 0 else "")
