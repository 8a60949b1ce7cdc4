"""torch_checkpointing on CPU: torchrun ... torch_checkpointing_example.py URI [sync|async]"""

import sys
from hashlib import sha256
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch_checkpointing.checkpoint_manager import CheckpointManager as Files
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig as Writer
from torch_checkpointing.config import SyncCheckpointSaverConfig as Saver
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig as Local

import ckptfs

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 8))
adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
saver = Saver(writer_config=Writer(barrier_config=None, write_to_temp_dir=False))  # ckptfs commits
files = Files(Files.Config(save=saver, storage_config=Local(use_direct_io=False)))
with ckptfs.DirectoryManager(sys.argv[1], mode=[*sys.argv, "sync"][2], keep_latest=2) as run:
    with run.reading() as found:
        if found:
            state = files.load(found.path, into={"model": None, "adamw": None})
            model.load_state_dict(state["model"])
            adamw.load_state_dict(state["adamw"])
    print(f"resumed {found.step if found else 'none'}\n" * (dist.get_rank() == 0), end="")
    for step in range(found.step + 1 if found else 1, 7):
        torch.manual_seed(step * 2 + dist.get_rank())  # this rank's batch
        adamw.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        adamw.step()
        path = f"{gettempdir()}/{sys.argv[1].split('/')[-1]}-{step}"  # of this node
        files.save(path, {"model": model.state_dict(), "adamw": adamw.state_dict()})
        run.save(step, path, consume=True)
moments = [v for one in adamw.state.values() for v in one.values()]
told = repr([v.tolist() for v in (*model.parameters(), *moments)])
print(f"final {sha256(told.encode()).hexdigest()}\n" * (dist.get_rank() == 0), end="")
