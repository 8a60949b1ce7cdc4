"""How long training is blocked: ckptfs.async_save compared with dcp.async_save and a bare copy.

    python -m benchmarks.floors stall                                            2 GB, minutes
    python -m benchmarks.floors stall --device cuda --size 20GB --steps          a state on a GPU, and the steps during the save

One process (a group of one over gloo, which dcp.async_save asks for), one state of tensors on --device, made
once. Rounds in which everybody has a turn, each round another one first:

    memcpy        every tensor copied into memory that was touched before (page-locked, for a state on a
                  device): what a copy costs here
    ckptfs        async_save into a held run
    reserved      ckptfs.CheckpointManager(mode="async").save, with memory reserved before its first call
    dcp thread    dcp.async_save, AsyncCheckpointerType.THREAD, FileSystemWriter
    dcp process   the same with AsyncCheckpointerType.PROCESS

Inside the clock is the call alone, until the tensors may be changed; then the save is waited for,
outside of it. --steps: until then the process trains, one matrix product a step, and notes say how much longer
a step takes than before the call. The first round is given separately: it touches memory, starts the process. The garbage
collector and torch's threads are as torch leaves them, for everybody.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckptfs
from benchmarks import tables
from ckptfs.bench.machine import filesystem
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload, number_text

MIB = 1 << 20
WORKLOAD, PLACE = "layers", "directory"
# MiB of one layer's tensors: attention, two large matrices, norms and biases.
LAYER = (16.0, 16.0, 44.0, 44.0, 0.25, 0.0625, 0.0625)
OURS, BARE, STOCK = "ckptfs", "memcpy", ("dcp thread", "dcp process")
RESERVED = "ckptfs reserved"
PEERS = (BARE, OURS, RESERVED, *STOCK)
PROMISES = {
    BARE: ("nothing: a copy in memory", "nothing"),
    OURS: ("when it is waited for: files, directories, commit", "every block"),
    RESERVED: ("when it is waited for: files, directories, commit", "every block"),
    STOCK[0]: ("when it is waited for: data files", "nothing"),
    STOCK[1]: ("when it is waited for: data files", "nothing"),
}
PACKAGES = ("ckptfs", "torch", "numpy", "xxhash", "fsspec")

STEPS = 5  # before a call: the median of so many is what a step takes
WIDTH = 1024  # of the matrices of a step

State = dict[str, Tensor]


class Pending(Protocol):
    """A save under way."""

    def done(self) -> bool:
        """Whether it is over."""

    def result(self) -> object:
        """Wait for it."""


class Bench:
    """The peers over one state and one directory. steps: whether the process trains during the saves."""

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        run: ckptfs.Run,
        manager: ckptfs.CheckpointManager,
        peers: Sequence[str],
        *,
        device: str = "cpu",
        steps: bool = False,
    ) -> None:
        self.directory = directory
        self.run, self.manager = run, manager
        self.on_cpu = torch.device(device).type == "cpu"
        self.state = {key: tensor.to(device) for key, tensor in _state(size_bytes).items()}
        self.copies = {
            key: torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=not self.on_cpu)
            for key, tensor in self.state.items()
        }
        self.trained = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(2 * steps)]
        ways: dict[str, Callable[[int], Pending]] = {
            BARE: self._copy,
            OURS: self._ours,
            RESERVED: self._reserved,
            STOCK[0]: lambda n: self._stock(n, AsyncCheckpointerType.THREAD),
            STOCK[1]: lambda n: self._stock(n, AsyncCheckpointerType.PROCESS),
        }
        self.peers = {name: ways[name] for name in peers}

    def measure(self, rounds: int) -> dict[str, Any]:
        """Seconds of every call, by peer: the first, and those of the rounds."""
        names = list(self.peers)
        if RESERVED in names:
            self.manager.reserve(self.state).result()
        first = {name: self._turn(name, -1) for name in names}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].append(self._turn(name, number))
        return {"first": first, "rounds": found}

    def _turn(self, name: str, number: int) -> dict[str, float]:
        # What another peer left to the disk must not be written in this one's time.
        os.sync()
        alone = [self._step() for _ in range(STEPS)] if self.trained else []
        self._synchronize()
        began = time.perf_counter()
        pending = self.peers[name](number)
        stall_s = time.perf_counter() - began
        beside = []
        while self.trained and not pending.done():
            beside.append(self._step())
        pending.result()
        done_s = time.perf_counter() - began
        for left in self.directory.glob("dcp*"):
            shutil.rmtree(left)
        slower = statistics.median(beside) / statistics.median(alone) if beside else math.nan
        return {"stall_s": stall_s, "done_s": done_s, "slower": slower}

    def _step(self) -> float:
        """Seconds of one step of training."""
        began = time.perf_counter()
        state, weights = self.trained
        state.copy_((state @ weights).tanh_())
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if not self.on_cpu:
            torch.accelerator.synchronize()

    def _copy(self, number: int) -> Pending:
        for key, tensor in self.state.items():
            self.copies[key].copy_(tensor, non_blocking=True)
        self._synchronize()
        copied: Future[None] = Future()
        copied.set_result(None)
        return copied

    def _ours(self, number: int) -> Pending:
        # One name: each save replaces the one before, so that the disk does not fill up.
        uri = f"{self.directory}/run/step"
        return ckptfs.async_save(
            self.state, uri, step=number + 1, run=self.run, if_exists="replace"
        )

    def _reserved(self, number: int) -> Pending:
        pending = self.manager.save(number + 1, self.state)
        assert isinstance(pending, ckptfs.PendingSave)
        return pending

    def _stock(self, number: int, kind: AsyncCheckpointerType) -> Pending:
        where = self.directory / f"dcp_{kind.value}_{number}"
        writer = dcp.FileSystemWriter(str(where))
        answer = dcp.async_save(self.state, storage_writer=writer, async_checkpointer_type=kind)
        future: Pending = getattr(answer, "upload_completion", answer)
        return future


def _state(size_bytes: int) -> State:
    state: State = {}
    left = size_bytes
    while left > 0:
        for number, mib in enumerate(LAYER):
            numel = max(1, min(int(mib * MIB), left) // 4)
            state[f"layers.{len(state) // len(LAYER)}.{number}"] = torch.rand(numel)
            left -= 4 * numel
            if left <= 0:
                break
    return state


def result_of(
    measured: dict[str, Any], *, size_bytes: int, tensors: int, about: dict[str, Any]
) -> Result:
    """Every stall as a sample; first calls and what came after the stall as notes. about: the rest."""
    turns: dict[str, list[dict[str, float]]] = measured["rounds"]
    return Result(
        what="the stall of async_save beside torch.distributed.checkpoint and a bare copy",
        workloads=(
            Workload(WORKLOAD, tensors, size_bytes, "layers of a model, float32, one rank"),
        ),
        engines=tuple(Engine(name, "", *PROMISES[name], is_limit=name == BARE) for name in turns),
        samples=tuple(
            Sample(name, WORKLOAD, PLACE, "stall", number, turn["stall_s"], 0.0, size_bytes)
            for name, found in turns.items()
            for number, turn in enumerate(found)
        ),
        notes=tuple(_beside(name, measured["first"][name], turns[name]) for name in turns),
        **about,
    )


def _beside(name: str, first: dict[str, float], turns: list[dict[str, float]]) -> str:
    durable_s = statistics.median(turn["done_s"] for turn in turns)
    times = first["stall_s"] / statistics.median(turn["stall_s"] for turn in turns)
    told = (
        f"{name}: the first call {number_text(first['stall_s'])} s, {times:.1f} times a later one, "
        f"until it is durable {number_text(durable_s)} s"
    )
    slower = [turn["slower"] for turn in turns if not math.isnan(turn.get("slower", math.nan))]
    if slower:
        told += f", a step meanwhile takes {number_text(statistics.median(slower))} of its time"
    return told


def measured(
    size_bytes: int,
    rounds: int,
    *,
    within: Path,
    peers: Sequence[str] = PEERS,
    device: str = "cpu",
    steps: bool = False,
) -> Result:
    """The whole comparison in this process. within: where its directory is made, and removed."""
    directory = Path(tempfile.mkdtemp(prefix="ckptfs-stall-", dir=within))
    began = tables.Began()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        if any(name in STOCK for name in peers):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True)
            dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        run = stack.enter_context(ckptfs.prepare_run(directory / "run"))
        manager = stack.enter_context(
            ckptfs.CheckpointManager(directory / "reserved", mode="async", keep_latest=1)
        )
        bench = Bench(directory, size_bytes, run, manager, peers, device=device, steps=steps)
        found = bench.measure(rounds)
    return result_of(
        found,
        size_bytes=sum(tensor.nbytes for tensor in bench.state.values()),
        tensors=len(bench.state),
        about={
            **began.about(within, PACKAGES),
            "settings": {
                "threads": torch.get_num_threads(),
                "rounds": rounds,
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
            },
            "targets": (Target(PLACE, filesystem(within)),),
        },
    )
