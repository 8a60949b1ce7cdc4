"""python verl_example.py URI [sync|async]: verl's shape, a driver and a group of two actors."""

import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from ckptfs.integrations.verl import CkptfsDriver, CkptfsFSDPCheckpointManager
from tests.integrations.worker_group import Digested, WorkerGroup  # forked, in place of Ray's


class Actor(Digested, CkptfsFSDPCheckpointManager):  # with verl, its engine has one
    def __init__(self, uri, mode):
        config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
        model = torch.distributed.fsdp.fully_shard(GPT2LMHeadModel(config))
        super().__init__(model, torch.optim.AdamW(model.parameters()), remote_dir=uri, mode=mode)

    def train(self, tokens):
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


torch.manual_seed(0)  # before the workers are forked
actors = WorkerGroup(Actor, 2, *sys.argv[1:])
mine = {"batch_size": 4, "shuffle": True, "generator": torch.Generator()}
loader = StatefulDataLoader(torch.randint(32, (16, 8)), **mine)
with CkptfsDriver(sys.argv[1], mode=sys.argv[2], keep_latest=2, flush=actors.wait) as driver:
    if folder := driver.resume():
        actors.load_checkpoint(f"{folder}/actor")
        loader.load_state_dict(torch.load(f"{folder}/data.pt", weights_only=False))
    print("resumed", max(driver.steps, default="none"))
    for step, tokens in enumerate(loader, max(driver.steps, default=0) + 1):
        actors.train(tokens)
        with driver.saving(step, ["actor"]) as saving:
            actors.save_checkpoint("actor", saving.part("actor"), step)
            torch.save(loader.state_dict(), f"{saving.path}/data.pt")
print("final", "".join(actors.digest()))
