"""Ray Train, two workers: python ray_example.py URI [sync|async]. Killed at any time, it resumes."""

import hashlib
import sys
from typing import Any

import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from ckptfs.integrations.ray import RayCheckpoints, storage


def train(mode: Any) -> tuple[object, str]:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with RayCheckpoints(mode=mode["mode"]) as checkpoints:
        restored = checkpoints.restore(state)
        for step in range(restored.step if restored else 0, 6):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.report({"loss": loss.item()}, state, step + 1)
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters())
    return restored.step if restored else "none", hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    keep = CheckpointConfig(num_to_keep=2)
    run = RunConfig(name="run", checkpoint_config=keep, **storage(sys.argv[1]))
    workers = ScalingConfig(num_workers=2)
    mode = {"mode": [*sys.argv, "sync"][2]}
    trainer = TorchTrainer(train, train_loop_config=mode, scaling_config=workers, run_config=run)
    print("resumed {}\nfinal {}".format(*trainer.fit().return_value))
