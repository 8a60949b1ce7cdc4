"""What saves and loads cost that move next to nothing, by how many processes there are: jobs of torchrun.

    python -m benchmarks.floors fixed --ranks 4,16,32     saves and loads, everybody in turn: minutes
    torchrun fixed.py DIRECTORY RESULT ROUNDS             one such job

One KiB a rank, sharded. Inside the clock (ckptfs.bench.clock) is the call alone, until the last rank has
returned. ckptfs in a run that is held saves and loads as a training loop does; stock DCP uses a new
directory. Rank 0 writes what was found as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptfs
from benchmarks import children, tables
from ckptfs.bench.clock import Clock
from ckptfs.bench.machine import filesystem
from ckptfs.bench.rank import TorchGroup, joined_group
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
SAVE_PHASES = ("plan_s", "stage_s", "write_s", "sync_s", "commit_s")
TIMEOUT_S = 1800.0  # of one job

Turn = Callable[[int], None]


# -- one rank ------------------------------------------------------------------------------------


def turns_of(group: TorchGroup, home: Path, rounds: int) -> dict[str, Any]:
    """Collective. (seconds, CPU seconds) by engine and phase, of ``rounds`` rounds and one before them; what
    a held save of ckptfs consists of.

    Each round another one first: a save of each, then a load of each of what it saved, from the page cache,
    into zeros. What was loaded is compared outside of the clock.
    """
    mesh = init_device_mesh("cpu", (group.size,))
    mine, got = torch.rand(NUMEL) + 1, torch.zeros(NUMEL)
    saved, loaded = (
        {"x": DTensor.from_local(one[None], mesh, [Shard(0)], run_check=False)}
        for one in (mine, got)
    )
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {phase: [] for phase in PHASES} for name in PROMISES
    }
    results: list[ckptfs.SaveResult] = []
    with ckptfs.prepare_run(str(home / "held")) as run:
        turns = {
            "ckptfs": _ours(run, home / "held", saved, loaded, results),
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
    medians_s = {
        phase: statistics.median(getattr(result.total, phase) for result in results[1:])
        for phase in SAVE_PHASES
    }
    return {"turns": found, "phases_s": medians_s, "operations": _operations(group, home, saved)}


def _ours(
    run: ckptfs.Run, home: Path, saved: Any, loaded: Any, results: list[ckptfs.SaveResult]
) -> tuple[Turn, Turn]:
    def save(number: int) -> None:
        results.append(ckptfs.save(saved, str(home / f"step_{number}"), run=run))

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


def _operations(group: TorchGroup, home: Path, tiny: dict[str, Any]) -> dict[str, int]:
    """Storage operations of one save in a held run, all ranks together, by name."""
    trace = home / "trace"
    os.environ["CKPTFS_TEST_TRACE"] = str(trace)
    mine = Path(f"{trace}.{group.rank}")
    uri = f"faults+file://{home}/traced"
    with ckptfs.prepare_run(uri) as run:
        ckptfs.save(tiny, f"{uri}/step_1", run=run)
        before = len(mine.read_text().splitlines()) if mine.exists() else 0
        ckptfs.save(tiny, f"{uri}/step_2", run=run)
        lines = mine.read_text().splitlines()[before:] if mine.exists() else []
    del os.environ["CKPTFS_TEST_TRACE"]
    told = group.gather(Counter(line.split()[1] for line in lines))
    return dict(sorted(sum(told, Counter()).items()))


# -- all jobs ------------------------------------------------------------------------------------


def measured(ranks: Sequence[int], rounds: int, *, within: Path) -> Result:
    """One job after the other. within: where its directory is made, and removed."""
    began = tables.Began()
    samples: list[Sample] = []
    notes = ["ckptfs in a run that is held; the first round is not counted"]
    for size in ranks:
        tables.say(f"fixed: {size} ranks")
        with tempfile.TemporaryDirectory(prefix="ckptfs-fixed-", dir=within) as directory:
            found = _job(size, Path(directory), rounds)
            samples += _samples(size, found["turns"])
            steps = ", ".join(f"{k[:-2]} {1e3 * v:.1f} ms" for k, v in found["phases_s"].items())
            operations = ", ".join(f"{n} {name}" for name, n in found["operations"].items())
            notes.append(f"{_name(size)}, a save: {steps}; storage operations: {operations}")
    return Result(
        what="what a save and a load of next to nothing cost, beside torch.distributed.checkpoint",
        settings={"rounds": rounds, "threads": 1},
        workloads=tuple(
            Workload(_name(size), 1, size * 4 * NUMEL, "1 KiB a rank, sharded") for size in ranks
        ),
        targets=(Target(PLACE, filesystem(within)),),
        engines=tuple(Engine(name, "", *promised) for name, promised in PROMISES.items()),
        samples=tuple(samples),
        notes=tuple(notes),
        **began.about(within, PACKAGES),
    )


def _name(ranks: int) -> str:
    return f"1 KiB a rank, {ranks} ranks"


def _samples(ranks: int, found: dict[str, Any]) -> list[Sample]:
    return [
        Sample(name, _name(ranks), PLACE, phase, number, wall_s, cpu_s, ranks * 4 * NUMEL)
        for name, phases in found.items()
        for phase in PHASES
        for number, (wall_s, cpu_s) in enumerate(phases[phase][1:])
    ]


# -- a job -----------------------------------------------------------------------------------------


def _job(ranks: int, directory: Path, rounds: int) -> dict[str, Any]:
    """What rank 0 of one torchrun job found."""
    result = directory / "result.json"
    _torchrun(ranks, [__file__, str(directory), str(result), str(rounds)], timeout_s=TIMEOUT_S)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _torchrun(ranks: int, arguments: Sequence[str], *, timeout_s: float) -> None:
    """RuntimeError: it failed. TimeoutExpired: it took longer. On any end no process is left.

    If one rank fails torchrun ends the others, so no rank waits in a barrier for it.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    environment = {**children.environment(), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the job with {ranks} ranks failed:\n{output[-8000:]}")


def main() -> None:
    """Measure as one rank."""
    home, result, rounds = sys.argv[1:]
    group = joined_group()
    found = turns_of(group, Path(home), int(rounds))
    if group.rank == 0:
        Path(result).write_text(json.dumps(found))
    group.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
