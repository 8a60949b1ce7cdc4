"""Train a small language model, sharded over all ranks; save by URI, resume by URI.

    torchrun --nproc-per-node 4 examples/demo/train.py /data/run

Started again after any end, it continues from the newest committed checkpoint, bit for bit. All that
checkpointing needs is in ``main``: prepare_run, latest, load, save. The rest is a model (FSDP2, so
parameters and AdamW's state are DTensors), a loader that knows its position, and dropout with a random
state that differs by rank.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fingerprint import fingerprint, flatten
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptfs

TEXT = Path(__file__).with_name("text.txt")
SYMBOLS = 128  # ASCII
WIDTH = 64
BLOCKS = 2
CONTEXT = 64  # characters
BATCH = 16  # windows of text, over all ranks
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """Predicts the next character from pairs of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(SYMBOLS * SYMBOLS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, text: Tensor, wanted: Tensor) -> Tensor:
        """text, wanted: int64 [windows, CONTEXT]. Returns the mean loss."""
        before = nn.functional.pad(text, (1, 0))[:, :-1]
        x = self.pairs(before * SYMBOLS + text) + self.places.weight
        future = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=future, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


class Loader:
    """Windows of the text in a shuffled order; every rank takes its share of each batch."""

    def __init__(self, rank: int, size: int) -> None:
        self.text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        self.share = slice(rank, None, size)
        self.epoch = 0
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Input and target, int64 [BATCH / ranks, CONTEXT]."""
        windows = len(self.text) - CONTEXT
        if self.position + BATCH > windows:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(self.epoch))
        starts = order[self.position : self.position + BATCH][self.share]
        self.position += BATCH
        rows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: equal on all ranks."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from there."""
        self.epoch, self.position = state["epoch"], state["position"]


class Training:
    """Everything that one more step changes, and therefore everything that is saved."""

    def __init__(self, steps: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(7)  # the same first weights everywhere
        self.model = Model()
        mesh = init_device_mesh("cpu", (self.size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.loader = Loader(self.rank, self.size)
        self.losses = torch.zeros(steps, dtype=torch.float64)
        torch.manual_seed(100 + self.rank)  # dropout: another stream on every rank

    def step(self, number: int) -> float:
        """One optimizer step; returns the mean loss of all ranks."""
        text, wanted = self.loader.next()
        loss = self.model(text, wanted)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().double() / self.size
        dist.all_reduce(mean)
        self.losses[number] = mean
        return float(mean)

    def state(self) -> dict[str, Any]:
        """The state dict of a checkpoint. "rng" differs by rank, the rest is sharded or equal."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {
            "model": model,
            "optimizer": optimizer,
            "loader": self.loader.state_dict(),
            "losses": self.losses,
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=FLAT,
        )
        self.loader.load_state_dict(state["loader"])
        self.losses.copy_(state["losses"])
        torch.set_rng_state(state["rng"])

    def fingerprint(self) -> str:
        """One hash over the state of all ranks, as the demo compares it."""
        flat = flatten(self.state())
        streams: list[Any] = [None] * self.size
        dist.all_gather_object(streams, flat.pop("rng"))
        flat |= {f"rng@rank{rank}": stream for rank, stream in enumerate(streams)}
        return fingerprint(flat)


def main() -> None:
    """Claim the run, resume, train, save."""
    options = _options()
    dist.init_process_group("gloo")
    training = Training(options.steps)
    tell = _teller(options.events if training.rank == 0 else None)

    with ckptfs.prepare_run(options.run) as run:  # fences older jobs, recovers what they left
        tell("prepared", generation=run.generation.number)

        first = 0
        newest = ckptfs.latest(options.run)
        if newest is not None:
            state = training.state()
            loaded = ckptfs.load(state, newest.uri)
            training.restore(state)
            first = loaded.step or 0
            tell("loaded", training, name=newest.uri.name, step=first, **_numbers(loaded))

        for number in range(first, options.steps):
            loss = training.step(number)
            tell("step", step=number + 1, loss=loss)
            if (number + 1) % options.every == 0:
                name = f"step_{number + 1}"
                saved = ckptfs.save(
                    training.state(), f"{options.run}/{name}", run=run, per_rank=["rng"]
                )
                tell("saved", training, name=name, step=number + 1, **_numbers(saved))

    tell("done", training, losses=training.losses.tolist())
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train a small language model, resumably")
    parser.add_argument("run", help="URI of the run, such as /data/run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--events", help="file for what the demo tells about, one JSON a line")
    return parser.parse_args()


def _numbers(result: ckptfs.SaveResult | ckptfs.LoadResult) -> dict[str, Any]:
    rank_bytes = [counters.size_bytes for counters in result.per_rank]
    return {**result.total.as_dict(), "wall_s": result.wall_s, "rank_bytes": rank_bytes}


def _teller(path: str | None) -> Any:
    """Return ``tell(event, training=None, **facts)``; a fingerprint is added on all ranks."""

    def tell(event: str, training: Training | None = None, **facts: Any) -> None:
        if training is not None:
            facts["fingerprint"] = training.fingerprint()  # collective
        if path is not None:
            with open(path, "a") as file:
                file.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")

    return tell


if __name__ == "__main__":
    main()
