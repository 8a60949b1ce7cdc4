"""What a save and a load cost that move next to nothing, by how many processes there are.

    python -m benchmarks.floors fixed --ranks 4,16,32        minutes: each number of ranks is a torchrun job
    torchrun fixed.py DIRECTORY RESULT ROUNDS                one such job

One KiB a rank, sharded. Everybody in turn, each round another one first: a save of each, then a load of each of
what it saved, from the page cache, into zeros. Inside the clock (ckptfs.bench.clock) is the call alone, until the
last rank has returned. ckptfs saves and loads in a run that is held, as a training loop does; stock DCP into a
new directory. What was loaded is compared outside of the clock. Rank 0 writes what was found as JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptfs
from benchmarks import telling
from benchmarks.jobs import run_rank, torchrun
from ckptfs.bench.clock import Clock
from ckptfs.bench.machine import filesystem
from ckptfs.bench.rank import TorchGroup
from ckptfs.bench.results import Engine, Phase, Result, Sample, Target, Workload

NUMEL = 256  # float32 of each rank: 1 KiB
PLACE = "directory"
PHASES: tuple[Phase, ...] = ("save", "load_warm")
PACKAGES = ("ckptfs", "torch", "numpy", "xxhash", "fsspec")
# What is durable when a save returns, and what a load verifies.
PROMISES = {
    "ckptfs": ("files, directories, commit", "every block"),
    "dcp": ("data files fsynced, not their directory", "nothing"),
    "dcp:fsspec": ("data files fsynced, not their directory", "nothing"),
}
TIMEOUT_S = 1800.0  # of one job

Turn = Callable[[int], None]


# -- one rank ------------------------------------------------------------------------------------


def measure(group: TorchGroup, home: Path, rounds: int) -> dict[str, Any]:
    """Collective. (seconds, CPU seconds) by engine and phase, of ``rounds`` rounds and one before them."""
    mesh = init_device_mesh("cpu", (group.size,))
    mine, got = torch.rand(NUMEL) + 1, torch.zeros(NUMEL)
    saved, loaded = (
        {"x": DTensor.from_local(one[None], mesh, [Shard(0)], run_check=False)}
        for one in (mine, got)
    )
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {phase: [] for phase in PHASES} for name in PROMISES
    }
    with ckptfs.prepare_run(str(home / "held")) as run:
        turns = {
            "ckptfs": _ours(run, home / "held", saved, loaded),
            "dcp": _stock(dcp.FileSystemWriter, dcp.FileSystemReader, home / "dcp", saved, loaded),
            "dcp:fsspec": _stock(FsspecWriter, FsspecReader, home / "fsspec", saved, loaded),
        }
        clock, names = Clock(group), list(turns)
        for number in range(rounds + 1):
            shift = number % len(names)
            for place, phase in enumerate(PHASES):
                for name in names[shift:] + names[:shift]:
                    got.zero_()
                    spent = clock.time(partial(turns[name][place], number))
                    if phase == "load_warm" and not torch.equal(got, mine):
                        raise RuntimeError(f"{name} loaded something else than it saved")
                    found[name][phase].append((spent.wall_s, spent.cpu_s))
    return found


def _ours(run: ckptfs.Run, home: Path, saved: Any, loaded: Any) -> tuple[Turn, Turn]:
    def save(number: int) -> None:
        ckptfs.save(saved, str(home / f"step_{number}"), run=run)

    def load(number: int) -> None:
        ckptfs.load(loaded, str(home / f"step_{number}"), run=run)

    return save, load


def _stock(writer: Any, reader: Any, home: Path, saved: Any, loaded: Any) -> tuple[Turn, Turn]:
    home.mkdir(exist_ok=True)

    def save(number: int) -> None:
        dcp.save(saved, storage_writer=writer(str(home / f"step_{number}")))

    def load(number: int) -> None:
        dcp.load(loaded, storage_reader=reader(str(home / f"step_{number}")))

    return save, load


# -- all jobs ------------------------------------------------------------------------------------


def measured(
    ranks: Sequence[int], rounds: int, *, within: Path, say: Callable[[str], None]
) -> Result:
    """One job after the other. within: where its directory is made, and removed."""
    started, load_before = datetime.now(UTC), list(os.getloadavg())
    samples: list[Sample] = []
    for size in ranks:
        say(f"fixed: {size} ranks")
        with tempfile.TemporaryDirectory(prefix="ckptfs-fixed-", dir=within) as directory:
            samples += _job(size, rounds, Path(directory))
    about = telling.about("floors", within, PACKAGES, started, load_before)
    return Result(
        what="what a save and a load of next to nothing cost, beside torch.distributed.checkpoint",
        settings={"rounds": rounds, "threads": 1},
        workloads=tuple(
            Workload(_name(size), 1, size * 4 * NUMEL, "1 KiB a rank, sharded") for size in ranks
        ),
        targets=(Target(PLACE, filesystem(within)),),
        engines=tuple(Engine(name, "", *promised) for name, promised in PROMISES.items()),
        samples=tuple(samples),
        notes=("ckptfs in a run that is held; the first round is not counted",),
        **about,
    )


def _name(ranks: int) -> str:
    return f"1 KiB a rank, {ranks} ranks"


def _job(ranks: int, rounds: int, directory: Path) -> list[Sample]:
    result = directory / "result.json"
    torchrun(ranks, [__file__, str(directory), str(result), str(rounds)], timeout_s=TIMEOUT_S)
    found = json.loads(result.read_text())
    return [
        Sample(name, _name(ranks), PLACE, phase, number, wall_s, cpu_s, ranks * 4 * NUMEL)
        for name, phases in found.items()
        for phase in PHASES
        for number, (wall_s, cpu_s) in enumerate(phases[phase][1:])
    ]


if __name__ == "__main__":
    run_rank(measure)
