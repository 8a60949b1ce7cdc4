"""What a save costs the coordinator of a large job before and after the bytes: ckptfs and stock DCP.

    python -m benchmarks.floors planner --worlds 256,1024               pairs in turn: minutes

Every tensor is sharded over all ranks, one item each on every rank; one more is on all of them. Each turn
is a process of its own (``coordinator.py``), which plays all ranks one after the other and times what the
coordinator does:

    plan      what the ranks said is decoded, decided on, and answered
    finish    what the ranks wrote is decoded, and .metadata is made of it

Both sides get their ranks' values as bytes, as they arrive, and end with bytes for each rank and the
.metadata file, in memory. What the ranks do by themselves, and the network, is not in it. The garbage
collector is on, as a job has it; a side that holds it off does so itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import children, tables
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload

OURS, STOCK = "ckptfs", "dcp"
SIDES = (OURS, STOCK)
PLACE = "coordinator"
PACKAGES = ("ckptfs", "torch", "numpy")
# Rank 0 of stock DCP holds about 5 GB with 1024 ranks x 1000 tensors, and four times that with 4096.
MOST_STOCK_ITEMS = 1_100_000


def measured(
    ranks: Sequence[int],
    tensors: int,
    pairs: int,
) -> Result:
    """All pairs for each number of ranks, everybody in turn, each round another one first."""
    began = tables.Began()
    samples, workloads, notes = [], [], []
    for size in ranks:
        name, turns = f"{size} ranks x {tensors} tensors", list(SIDES)
        if size * tensors > MOST_STOCK_ITEMS and STOCK in turns:
            turns.remove(STOCK)
            notes.append(f"{name}: stock DCP was not run, its rank 0 would hold too much memory")
        metadata_bytes = 0
        for number in range(pairs):
            for side in turns if number % 2 else turns[::-1]:
                tables.say(f"{name}: round {number + 1} of {pairs}, {side}")
                found = _turn(side, size, tensors)
                metadata_bytes = found["metadata_bytes"]
                samples.append(_sample(side, name, number + 1, found))
                parts = ", ".join(f"{k} {v:.2f} s" for k, v in found["parts_s"].items())
                notes.append(f"{name}, {side}, round {number + 1}: {parts}")
        told = f"every tensor sharded over all; .metadata {metadata_bytes / 1e6:.0f} MB"
        workloads.append(Workload(name, tensors, metadata_bytes, told))
    return Result(
        what="the coordinator's work in a save, beside torch.distributed.checkpoint",
        settings={"pairs": pairs},
        workloads=tuple(workloads),
        targets=(Target(PLACE, "one process that plays all ranks"),),
        engines=tuple(Engine(side, "", "nothing is written", "nothing") for side in SIDES),
        samples=tuple(samples),
        notes=tuple(notes),
        **began.about(Path(tempfile.gettempdir()), PACKAGES),
    )


def _sample(side: str, workload: str, number: int, found: dict[str, Any]) -> Sample:
    return Sample(
        side, workload, PLACE, "save", number, found["wall_s"], found["cpu_s"],
        found["metadata_bytes"], peak_memory_bytes=found["peak_bytes"],
    )  # fmt: skip


def _turn(side: str, ranks: int, tensors: int) -> dict[str, Any]:
    """One process: what it measured. RuntimeError: it failed."""
    told = f"{side}, {ranks} ranks x {tensors} tensors,"
    found: dict[str, Any] = children.ask(told, "-m", "benchmarks.coordinator", side, ranks, tensors)
    return found
