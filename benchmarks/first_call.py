"""How long the first asynchronous save of a process holds its caller: compared with a save that is not asynchronous.

    python -m benchmarks.floors first --size 6GB
    first_call.py NAME BYTES DIRECTORY      one turn: prints the seconds of the call, and until the save is durable

Every turn is a process of its own, because a process touches the memory of its buffers once. A turn makes the state,
then calls once. Inside the clock is the call, until the tensors may be changed. Each round another one is first.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import ckptfs
from benchmarks import children, tables
from ckptfs.bench.machine import filesystem
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload, number_text

WORKLOAD, PLACE = "tensors", "directory"
ASYNC, SYNC = "ckptfs", "ckptfs save"
PROMISES = {
    ASYNC: "when it is waited for: files, directories, commit",
    SYNC: "when it returns: files, directories, commit",
}
TENSOR_BYTES = 64 << 20
PACKAGES = ("ckptfs", "torch", "numpy", "xxhash")


def turn(name: str, size_bytes: int, directory: Path) -> tuple[float, float]:
    """The seconds that the first call holds its caller, and those until the save is durable."""
    state = {
        str(at): torch.ones(max(1, min(TENSOR_BYTES, size_bytes - at) // 4))
        for at in range(0, size_bytes, TENSOR_BYTES)
    }
    began = time.perf_counter()
    if name == SYNC:
        ckptfs.save(state, directory / "step_1")
        held_s = durable_s = time.perf_counter() - began
    else:
        pending = ckptfs.async_save(state, directory / "step_1")
        held_s = time.perf_counter() - began
        pending.result()
        durable_s = time.perf_counter() - began
    return held_s, durable_s


def measured(size_bytes: int, pairs: int, *, within: Path) -> Result:
    """Both in turn. within: where the directories are made, and removed."""
    began = tables.Began()
    samples, durable = [], []
    for number in range(pairs):
        tables.say(f"first: round {number + 1} of {pairs}")
        for name in [*PROMISES][:: 1 if number % 2 else -1]:
            held_s, durable_s = _turn_in(within, name, size_bytes)
            samples.append(Sample(name, WORKLOAD, PLACE, "stall", number, held_s, 0.0, size_bytes))
            durable += [durable_s] * (name == ASYNC)
    least, most = number_text(min(durable)), number_text(max(durable))
    tensors = -(-size_bytes // TENSOR_BYTES)
    return Result(
        what="the first asynchronous save of a process beside one that is not asynchronous",
        settings={"rounds": pairs},
        workloads=(Workload(WORKLOAD, tensors, size_bytes, "float32, of 64 MiB, one rank"),),
        targets=(Target(PLACE, filesystem(within)),),
        engines=tuple(Engine(name, "", told, "every block") for name, told in PROMISES.items()),
        samples=tuple(samples),
        notes=(
            "every sample is a process of its own; its seconds are those of a first call",
            f"the asynchronous save is durable after {least} to {most} s",
        ),
        **began.about(within, PACKAGES),
    )


def _turn_in(within: Path, name: str, size_bytes: int) -> tuple[float, float]:
    directory = tempfile.mkdtemp(prefix="ckptfs-first-", dir=within.resolve())
    try:
        held_s, durable_s = children.ask(
            name, "-m", "benchmarks.first_call", name, size_bytes, directory
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return held_s, durable_s


if __name__ == "__main__":
    print(json.dumps(turn(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
