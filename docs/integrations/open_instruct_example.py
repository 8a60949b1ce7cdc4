"""DeepSpeed, fed by a controller: torchrun ... open_instruct_example.py URI [sync|async]"""

import hashlib
import sys
from multiprocessing import Pipe, Process

import deepspeed
import torch

import ckptfs
from ckptfs.integrations.deepspeed import CkptfsEngine

uri, mode, root = *(*sys.argv[1:], "sync")[:2], f"{sys.argv[1]}.local"


def control(pipe):  # in no group, as the driver of Ray: where the data is, is its state
    data = torch.Generator().manual_seed(1)
    if newest := ckptfs.latest(uri, "directory"):
        data.set_state(ckptfs.load_object(newest.uri / "driver.pt"))
    while True:
        pipe.send([torch.randn(2, 4, 8, generator=data), data.get_state()])


deepspeed.init_distributed("gloo")
(pipe, end), rank = Pipe(), torch.distributed.get_rank()
Process(target=control, args=(end,), daemon=True).start() if rank == 0 else None
config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
engine, *_ = deepspeed.initialize(model=torch.nn.LayerNorm(8), config=config)
with CkptfsEngine(root, uri, mode=mode, keep_latest=2).attach(engine) as store:
    print(engine.load_checkpoint(root) and f"resumed {engine.global_steps or 'none'}" * (not rank))
    while engine.global_steps < 6:
        torch.distributed.broadcast_object_list(told := pipe.recv() if rank == 0 else [0, 0])
        engine.backward(engine(told[0][rank]).pow(3).mean())
        engine.step()
        store.save_object("driver.pt", told[1]) if rank == 0 else None  # one file, one commit
        engine.save_checkpoint(root)
state = repr([told[1].tolist(), engine.module.weight.tolist()]).encode()
print(f"final {hashlib.sha256(state).hexdigest()}" if rank == 0 else "")
