"""One rank of the benchmark, started by torchrun; rank 0 writes what was measured as JSON.

    compare   pairs of stock DCP and ckptfs, in turn A B, B A, A B, ...: save, load hot, load cold
    commits   saves of next to nothing: what a commit costs by itself

Inside the clock: the call, and a barrier after it. Outside: making the data, removing what an
earlier save wrote, os.sync(), emptying caches, and a barrier, so that all ranks begin together.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptfs

KIB, MIB = 1 << 10, 1 << 20
# Bytes of one layer's shards on one rank: attention, two large matrices, norms and biases.
LAYER = (4 * MIB, 4 * MIB, 11 * MIB, 11 * MIB, 64 * KIB, 16 * KIB, 16 * KIB)
PEERS = ("stock", "ckptfs")
PHASES = ("plan_s", "stage_s", "write_s", "sync_s", "read_s", "verify_s", "commit_s")

State = dict[str, Any]


@dataclass(frozen=True)
class Spent:
    """One timed call: seconds of the slowest rank, CPU seconds of all ranks together."""

    wall_s: float
    cpu_s: float


class Bench:
    """The measurements over one directory, seen from one rank."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.size,))
        self.directory = directory
        self.last: ckptfs.SaveResult | ckptfs.LoadResult | None = None  # of the newest call
        torch.manual_seed(self.rank)
        self.state = self._sharded(size_bytes, torch.rand)
        self.target = self._sharded(size_bytes, torch.zeros)

    def _sharded(self, size_bytes: int, make: Callable[[int, int], Tensor]) -> State:
        """DTensors, sharded over all ranks, of about ``size_bytes`` on each; float32."""
        state: State = {}
        left, layer = size_bytes, 0
        while left > 0:
            for number, wanted in enumerate(LAYER):
                rows = max(1, min(wanted, left) // (4 * 256))
                local = make(rows, 256)
                state[f"layers.{layer}.{number}"] = DTensor.from_local(
                    local, self.mesh, [Shard(0)], run_check=False
                )
                left -= local.nbytes
                if left <= 0:
                    break
            layer += 1
        return state

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(tensor.to_local().nbytes for tensor in self.state.values())

    # -- stock against ckptfs

    def compare(self, pairs: int) -> dict[str, Any]:
        """All pairs of saves, of hot loads and of cold loads."""
        for peer in PEERS:  # imports, page tables, the disk's first allocations: in nobody's time
            self._save(peer, -1)
            self._load(peer, -1)
            self._same()
        last = pairs - 1

        def hot(peer: str) -> Spent:
            return self._load(peer, last)

        def cold(peer: str) -> Spent:
            return self._load(peer, last, cold=True)

        found = {
            "save": [self._pair(n, functools.partial(self._save, number=n)) for n in range(pairs)],
            "load_hot": [self._pair(n, hot) for n in range(pairs)],
            "load_cold": [self._pair(n, cold) for n in range(pairs)],
        }
        self._same()
        return found

    def _pair(self, number: int, measure: Callable[[str], Spent]) -> dict[str, Any]:
        order = PEERS if number % 2 == 0 else PEERS[::-1]
        spent = {peer: measure(peer) for peer in order}
        counted = self.last.total.as_dict() if self.last else {}
        return {
            "first": order[0],
            **{f"{peer}_s": spent[peer].wall_s for peer in PEERS},
            **{f"{peer}_cpu_s": spent[peer].cpu_s for peer in PEERS},
            "ratio": spent["ckptfs"].wall_s / spent["stock"].wall_s,
            "ckptfs_phases_s": {k: v for k, v in counted.items() if k in PHASES and v},
        }

    def _where(self, peer: str, number: int) -> Path:
        # Each in a directory of its own: ckptfs makes its run anew every time, log and all.
        return self.directory / f"{peer}_{number}" / "step_1"

    def _save(self, peer: str, number: int) -> Spent:
        where = self._where(peer, number)

        def stock() -> None:
            dcp.save(self.state, storage_writer=dcp.FileSystemWriter(str(where)))

        def ours() -> None:
            self.last = ckptfs.save(self.state, str(where))

        self._on_one(lambda: self._forget(peer, number - 1))
        return self._timed(stock if peer == "stock" else ours)

    def _load(self, peer: str, number: int, *, cold: bool = False) -> Spent:
        where = self._where(peer, number)

        def stock() -> None:
            dcp.load(self.target, storage_reader=dcp.FileSystemReader(str(where)))

        def ours() -> None:
            self.last = ckptfs.load(self.target, str(where))

        if cold:
            self._on_one(lambda: _evict(where))
        return self._timed(stock if peer == "stock" else ours)

    def _forget(self, peer: str, number: int) -> None:
        shutil.rmtree(self._where(peer, number).parent, ignore_errors=True)
        os.sync()

    def _same(self) -> None:
        for key, saved in self.state.items():
            if not torch.equal(saved.to_local(), self.target[key].to_local()):
                raise AssertionError(f"{key} was not loaded as it was saved")
            self.target[key].to_local().zero_()

    # -- the fixed cost

    def commits(self, saves: int) -> dict[str, Any]:
        """Saves of one KiB per rank: stock, ckptfs alone, ckptfs in a run that is held."""
        tiny = {"x": DTensor.from_local(torch.rand(1, 256), self.mesh, [Shard(0)], run_check=False)}
        home = self.directory / "tiny"
        results: list[ckptfs.SaveResult] = []

        def plain(n: int) -> None:
            dcp.save(tiny, storage_writer=dcp.FileSystemWriter(str(home / f"stock_{n}")))

        def alone(n: int) -> None:
            ckptfs.save(tiny, str(home / f"alone/step_{n}"))

        found = {"stock_s": self._each(plain, saves), "ckptfs_s": self._each(alone, saves)}
        with ckptfs.prepare_run(str(home / "held")) as run:

            def held(n: int) -> None:
                results.append(ckptfs.save(tiny, str(home / f"held/step_{n}"), run=run))

            found["ckptfs_in_run_s"] = self._each(held, saves)
        phases = {
            phase: _median([getattr(result.total, phase) for result in results[1:]])
            for phase in ("plan_s", "stage_s", "write_s", "sync_s", "commit_s")
        }
        return {**found, "phases_in_run_s": phases, "operations": self._operations(tiny)}

    def _each(self, save: Callable[[int], None], saves: int) -> list[float]:
        """Seconds of each save but the first, which makes what the others find."""
        return [self._timed(functools.partial(save, n)).wall_s for n in range(saves + 1)][1:]

    def _operations(self, tiny: State) -> dict[str, int]:
        """Storage operations of one save in a held run, all ranks together, by name."""
        trace = self.directory / "trace"
        os.environ["CKPTFS_TEST_TRACE"] = str(trace)
        mine = Path(f"{trace}.{self.rank}")
        uri = f"faults+file://{self.directory}/traced"
        with ckptfs.prepare_run(uri) as run:
            ckptfs.save(tiny, f"{uri}/step_1", run=run)
            before = len(mine.read_text().splitlines()) if mine.exists() else 0
            ckptfs.save(tiny, f"{uri}/step_2", run=run)
            lines = mine.read_text().splitlines()[before:] if mine.exists() else []
        del os.environ["CKPTFS_TEST_TRACE"]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, Counter(line.split()[1] for line in lines))
        return dict(sorted(sum(told, Counter()).items()))

    # -- the clock

    def _timed(self, call: Callable[[], None]) -> Spent:
        gc.collect()
        dist.barrier()
        cpu, started = time.process_time(), time.perf_counter()
        call()
        mine = time.perf_counter() - started
        spent = torch.tensor([mine, 0.0], dtype=torch.float64)
        dist.barrier()
        spent[1] = time.process_time() - cpu
        slowest, together = spent.clone(), spent.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(together, dist.ReduceOp.SUM)
        return Spent(float(slowest[0]), float(together[1]))

    def _on_one(self, act: Callable[[], None]) -> None:
        if self.rank == 0:
            act()
        dist.barrier()


def _evict(where: Path) -> None:
    """Take a checkpoint's files out of the page cache; needs no privileges."""
    os.sync()
    for path in where.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    """Measure, and let rank 0 write it down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--bytes", type=int, default=0, help="per rank; 0 compares nothing")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--commits", type=int, default=20, help="0 measures none")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    bench = Bench(options.directory, options.bytes)
    found: dict[str, Any] = {"ranks": bench.size, "bytes_per_rank": bench.local_bytes}
    if options.bytes:
        found["compare"] = bench.compare(options.pairs)
    if options.commits:
        found["commits"] = bench.commits(options.commits)
    if bench.rank == 0:
        options.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
