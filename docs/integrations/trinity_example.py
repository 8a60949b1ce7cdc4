"""torchrun --standalone --nproc-per-node 2 trinity_example.py URI [sync|async]."""

import hashlib
import sys

import torch
from torch.distributed.fsdp import fully_shard
from trinity.trainer.verl.checkpoint import CheckpointCoordinator

import ckptfs


class Coordinator(CheckpointCoordinator):  # in place of Trinity's, in every worker
    def __init__(self, uri, mode):
        self.manager = ckptfs.CheckpointManager(uri, mode=mode, keep_latest=2, delete_grace_s=60)

    def save_async(self, name, state, global_step, *, is_state_dict=False):  # no function: a state
        kind = "weights" if is_state_dict else "checkpoint"
        self.manager.save(global_step, state, kind=kind)  # raises what the last one failed of


torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}
state["rng"] = ckptfs.RngState()
coordinator, rank = Coordinator(*sys.argv[1:3]), torch.distributed.get_rank()
restored = coordinator.manager.restore(state)
print("" if rank else f"resumed {restored.step if restored else 'none'}\n", end="")
for step in range(1 if restored is None else restored.step + 1, 5):
    model(torch.randn(4, 8)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    coordinator.save_async("model", {"model": model}, step, is_state_dict=True)
    coordinator.save_async("checkpoint", state, step)
coordinator.manager.close()
tensors = [*(p.full_tensor() for p in model.parameters()), torch.get_rng_state()]
content = b"".join(t.detach().numpy().tobytes() for t in tensors)
print("" if rank else f"final {hashlib.sha256(content).hexdigest()}\n", end="")
