"""torchtitan's own containers and FSDP2, on CPU: torchrun ... torchtitan_example.py URI [sync|async]"""

import sys
from hashlib import sha256

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from ckptfs.integrations.torchtitan import CheckpointManager

uri, mode, steps = sys.argv[1], [*sys.argv, "sync"][2], 6
dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)))
adamw = default_adamw(lr=0.01)
adamw.implementation = "for-loop"  # the default is CUDA's
optimizers = adamw.build(model_parts=[model])
schedule = LRSchedulersContainer.Config(warmup_steps=2)
lrs = schedule.build(optimizers=optimizers, training_steps=steps)
config = CheckpointManager.Config(enable=True, folder=uri, interval=1, keep_latest_k=2)
config.async_mode = {"sync": "disabled", "async": "async"}[mode]
config.last_save_model_only = False
parts = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": lrs}
checkpointer = config.build(dataloader=None, states={}, sd_adapter=None, **parts)
done = lrs.schedulers[0].last_epoch if checkpointer.load() else 0
print(f"resumed {done or 'none'}\n" * (dist.get_rank() == 0), end="", flush=True)
for step in range(done, steps):
    torch.manual_seed(step * 2 + dist.get_rank())  # this rank's batch
    model(torch.randn(4, 16)).square().mean().backward()
    optimizers.step()
    lrs.step()
    optimizers.zero_grad()
    checkpointer.save(step + 1, last_step=step + 1 == steps)
checkpointer.close()
state = [*model.state_dict().values(), *optimizers.state_dict().values(), lrs.state_dict()]
whole = [v.full_tensor().tolist() if hasattr(v, "full_tensor") else v for v in state]
print(f"final {sha256(repr(whole).encode()).hexdigest()}\n" * (dist.get_rank() == 0), end="")
