"""torchrun --standalone --nproc-per-node 2 lightning_example.py URI [sync|async]."""

import hashlib
import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from ckptfs.integrations.lightning import checkpoint_strategy, last_checkpoint

uri, mode = sys.argv[1:3]


class Net(LightningModule):
    def configure_model(self):
        self.layer = torch.nn.Linear(8, 1)

    def on_train_start(self):
        self.print("resumed", self.trainer.global_step or "none")  # on rank 0

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


seed_everything(1, verbose=False)
own, strategy = torch.Generator(), checkpoint_strategy("ddp", mode=mode)
saves = ModelCheckpoint(uri, save_last=True, save_top_k=1)
place = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])}
trainer = Trainer(**place, strategy=strategy, callbacks=saves, max_epochs=4)
data = torch.utils.data.DataLoader(torch.randn(64, 8), 8, shuffle=True, generator=own)
trainer.fit(net := Net(), data, ckpt_path=last_checkpoint(uri))
moments = [t for state in trainer.optimizers[0].state.values() for t in state.values()]
content = b"".join(t.detach().numpy().tobytes() for t in [*net.parameters(), *moments])
print(f"final {hashlib.sha256(content).hexdigest()}\n" * trainer.is_global_zero, end="")
