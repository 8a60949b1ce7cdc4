"""DeepSpeed's ZeRO, saved to a URI: torchrun ... deepspeed_example.py URI [sync|async]"""

import hashlib
import os
import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ckptfs.integrations.deepspeed import CkptfsEngine

uri, mode = (*sys.argv[1:], "sync")[:2]
root = f"{tempfile.gettempdir()}/{os.environ['TORCHELASTIC_RUN_ID']}"  # on this node's disk
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=adam, lr_scheduler=decay, config={"train_batch_size": 8, **zero}
)
torch.manual_seed(rank := dist.get_rank())
with CkptfsEngine(root, uri, mode=mode, keep_latest=2).attach(engine):
    if client := engine.load_checkpoint(root)[1]:
        torch.set_rng_state(client["rng"][rank])
    print(f"resumed {engine.global_steps if client else 'none'}" if rank == 0 else "")
    while engine.global_steps < 6:
        engine.backward(engine(torch.randn(4, 8)).pow(2).mean())
        engine.step()
        dist.all_gather_object(rng := [None, None], torch.get_rng_state())
        engine.save_checkpoint(root, client_state={"rng": rng})
leaves = tree_leaves([engine.module_state_dict(), engine.optimizer.state_dict()])
state = [leaf.tolist() for leaf in [*leaves, torch.get_rng_state()] if torch.is_tensor(leaf)]
dist.all_gather_object(states := [None, None], [decay.state_dict(), state])
print(f"final {hashlib.sha256(repr(states).encode()).hexdigest()}" if rank == 0 else "")
