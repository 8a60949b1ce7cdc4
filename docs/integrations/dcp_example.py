"""torch.distributed.checkpoint and FSDP2, on CPU: torchrun ... dcp_example.py URI [sync|async]"""

import sys
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckptfs

uri, save = sys.argv[1], dcp.async_save if "async" in sys.argv else dcp.save
dist.init_process_group("gloo")
group = dist.new_group()  # what saves in the background must not share one with what trains
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)))
adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
names, wait = ("model_state_dict", "optim_state_dict"), list  # nothing to wait for yet
with ckptfs.prepare_run(uri) as run:  # this job's: what an earlier one still writes is fenced
    if last := ckptfs.latest(uri):
        state = dict(zip(names, get_state_dict(model, adamw), strict=True))
        dcp.load(state, storage_reader=ckptfs.StorageReader(last.uri))
        set_state_dict(model, adamw, **state)
    print(f"resumed {last.step if last else 'none'}\n" * (dist.get_rank() == 0), end="", flush=True)
    for step in range(last.step + 1 if last else 1, 7):
        torch.manual_seed(step * 2 + dist.get_rank())  # this rank's batch
        model(torch.randn(4, 16)).square().mean().backward()
        adamw.step()
        adamw.zero_grad()
        state = dict(zip(names, get_state_dict(model, adamw), strict=True))
        writer = ckptfs.StorageWriter(f"{uri}/step_{step}", run=run)
        wait()  # raises what the save before failed of
        wait = getattr(save(state, storage_writer=writer, process_group=group), "result", list)
    wait()
whole = [*model.parameters(), *(v for one in adamw.state.values() for v in one.values())]
told = repr([getattr(v, "full_tensor", v.clone)().tolist() for v in whole])
print(f"final {sha256(told.encode()).hexdigest()}\n" * (dist.get_rank() == 0), end="")
