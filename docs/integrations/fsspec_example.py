"""torchrun --nproc-per-node 2 docs/integrations/fsspec_example.py URI [sync|async]: torch, and a URI."""

import hashlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckptfs

uri, mode = sys.argv[1], (sys.argv[2:] or ["sync"])[0]
where = "ckptfs+" + (uri if "://" in uri else f"file://{uri}")
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
done = 0
if last := ckptfs.latest(uri):
    state, done = get_state_dict(model, optimizer), last.step
    dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=f"{where}/step_{done}")
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
if torch.distributed.get_rank() == 0:
    print("resumed", done or "none")
for step in range(done + 1, 6):
    torch.manual_seed(step)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save = dcp.async_save if mode == "async" else dcp.save
    saved = save(both, checkpoint_id=f"{where}/step_{step}")
    getattr(saved, "result", lambda: None)()
moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
whole = [t.full_tensor().detach().numpy().tobytes() for t in [*model.parameters(), *moments]]
if torch.distributed.get_rank() == 0:
    print("final", hashlib.sha256(b"".join(whole)).hexdigest())
torch.distributed.destroy_process_group()
