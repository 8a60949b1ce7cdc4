"""torchrun --standalone --nproc-per-node 2 accelerate_example.py URI [sync|async]"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed
from torch.utils._pytree import tree_leaves

from ckptfs.integrations.accelerate import CkptfsState

uri, mode = (*sys.argv[1:], "sync")[:2]
set_seed(1)
position = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=position)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
own = torch.Generator()  # an iterator draws a number when it begins: not from the model's
data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4, shuffle=True, generator=own)
net, adam, decay, data = accelerator.prepare(net, adam, decay, data)
with CkptfsState(accelerator, uri, mode=mode, keep_latest=2) as saves:
    done = saves.load() or 0
    accelerator.print(f"resumed {done or 'none'}")
    for step, batch in zip(range(done, 6), data, strict=False):
        accelerator.backward(net(batch).square().mean())
        adam.step()
        decay.step()
        adam.zero_grad()
        saves.save(step + 1)
leaves = tree_leaves([accelerator.unwrap_model(net).state_dict(), adam.state_dict()])
mine = [v.tolist() for v in [*leaves, torch.get_rng_state()] if torch.is_tensor(v)]
state = repr(gather_object([[decay.state_dict(), mine]])).encode()
accelerator.print(f"final {hashlib.sha256(state).hexdigest()}")
