"""One rank, started by torchrun: saves of next to nothing, which cost what a commit costs.

    torchrun commits.py DIRECTORY RESULT SAVES      by save_load.py

Inside the clock (ckptfs.bench.clock) is the call alone. One KiB a rank: stock DCP; ckptfs.save by itself;
ckptfs.save in a run that is held, as in a training loop. Rank 0 writes what was found as JSON.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptfs
from benchmarks.jobs import run_rank
from ckptfs.bench.clock import Clock
from ckptfs.bench.rank import TorchGroup

PHASES = ("plan_s", "stage_s", "write_s", "sync_s", "commit_s")
State = dict[str, Any]


def measure(group: TorchGroup, home: Path, saves: int) -> dict[str, Any]:
    """Collective. (seconds, CPU seconds) of each save, by engine; phases and operations of a held run."""
    mesh = init_device_mesh("cpu", (group.size,))
    tiny = {"x": DTensor.from_local(torch.rand(1, 256), mesh, [Shard(0)], run_check=False)}
    results: list[ckptfs.SaveResult] = []

    def each(save: Callable[[int], None]) -> list[tuple[float, float]]:
        """Of all saves but the first, which makes what the others find."""
        clock = Clock(group)
        spent = [clock.time(functools.partial(save, number)) for number in range(saves + 1)]
        return [(one.wall_s, one.cpu_s) for one in spent[1:]]

    def stock(n: int) -> None:
        dcp.save(tiny, storage_writer=dcp.FileSystemWriter(str(home / f"stock_{n}")))

    def alone(n: int) -> None:
        ckptfs.save(tiny, str(home / f"alone/step_{n}"))

    found: dict[str, Any] = {"dcp": each(stock), "ckptfs": each(alone)}
    with ckptfs.prepare_run(str(home / "held")) as run:

        def held(n: int) -> None:
            results.append(ckptfs.save(tiny, str(home / f"held/step_{n}"), run=run))

        found["ckptfs in a held run"] = each(held)
    found["phases_in_run_s"] = {
        phase: statistics.median(getattr(result.total, phase) for result in results[1:])
        for phase in PHASES
    }
    return {**found, "operations": _operations(group, home, tiny)}


def _operations(group: TorchGroup, home: Path, tiny: State) -> dict[str, int]:
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


if __name__ == "__main__":
    run_rank(measure)
