"""Ranks that all need the same bytes: each reads them, or one does and passes them on.

    python -m benchmarks.replicated                                   minutes
    python -m benchmarks.replicated --size 2MB --ranks 2 --pairs 1 --places disk     does it still run?

Real processes in a gloo group, one replicated state, one ``ckptfs.load`` of it. Rounds in which every way
has its turn, each round another one first:

    each         every rank loads by itself: reads, verifies
    broadcast    rank 0 loads; each tensor goes to the others by gloo's broadcast
    shared       rank 0 loads into memory that the processes of the node share; the others copy it out

Who was passed something compares it with rank 0's digests, as a rank that reads does with the store's. The
clock runs from a barrier until the last rank has all of it; CPU seconds are those of all ranks. The server
of the object store runs on the same cores, without latency: what it saves by being asked once is in the
seconds, its money is not. Requests are counted by it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import ckptfs
from benchmarks import telling
from benchmarks.jobs import torchrun
from ckptfs.bench.results import Engine, Phase, Result, Sample, Target, Workload
from ckptfs.bench.target import evict
from ckptfs.bench.workloads import parse_size

TENSORS = 32
WAYS = ("each", "broadcast", "shared")
PHASES: dict[str, Phase] = {"disk": "load_warm", "cold": "load_cold", "s3": "load_warm"}
PACKAGES = ("ckptfs", "torch", "xxhash", "obstore")
TIMEOUT_S = 900.0
HERE = Path(__file__).resolve().parent

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of one place do. cold: the directory whose files' pages are dropped before each turn."""

    uri: str
    options: dict[str, Any]
    size_bytes: int
    pairs: int
    shared: str
    cold: str = ""


# -- the ranks ------------------------------------------------------------------------------------


class Rank:
    """One process of the group, with its own copy of the state."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank, self.size = job, dist.get_rank(), dist.get_world_size()
        self.alone = dist.new_group([0])
        self.state = _empty(job.size_bytes)
        # Touched, so that no way pays for new pages of the receiver.
        for tensor in self.state.values():
            tensor.fill_(1.0)

    def turn(self, way: str) -> dict[str, float]:
        """Seconds until the last rank has it, and CPU seconds of all."""
        if self.rank == 0 and self.job.cold:
            evict(path for path in Path(self.job.cold).rglob("*") if path.is_file())
        act: Callable[[], None] = getattr(self, way)
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        act()
        cpu_s = time.process_time() - cpu
        dist.barrier()
        told = torch.tensor([cpu_s], dtype=torch.float64)
        wall_s = time.perf_counter() - began
        dist.all_reduce(told)
        if any(float(t[-1]) != n for n, t in enumerate(self.state.values())):
            raise RuntimeError(f"{way}: other values than were saved")
        for tensor in self.state.values():
            tensor.fill_(-1.0)
        return {"wall_s": wall_s, "cpu_s": float(told[0])}

    def each(self) -> None:
        """Every rank for itself, in one collective load."""
        ckptfs.load(self.state, self.job.uri, storage_options=self.job.options)

    def broadcast(self) -> None:
        """Over the network of the group."""
        self._load_alone(self.state)
        for tensor in self.state.values():
            dist.broadcast(tensor, 0)
        self._compare(self.state)

    def shared(self) -> None:
        """Through memory of the node, made anew for each load: pages of before belong to nobody."""
        path = Path(self.job.shared) / "state"
        size = sum(t.nbytes for t in self.state.values())
        if self.rank == 0:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        dist.barrier()
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        views, at = {}, 0
        for key, tensor in self.state.items():
            views[key] = flat[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            at += tensor.nbytes
        self._load_alone(views)
        dist.barrier()
        for key, tensor in self.state.items():
            tensor.copy_(views[key])
        self._compare(self.state)
        dist.barrier()
        if self.rank == 0:
            path.unlink()

    def _load_alone(self, state: State) -> None:
        if self.rank == 0:
            options = self.job.options
            ckptfs.load(
                dict(state), self.job.uri, process_group=self.alone, storage_options=options
            )

    def _compare(self, state: State) -> None:
        mine = [xxhash.xxh3_128_digest(t.numpy().data) for t in state.values()]
        theirs: list[Any] = [mine]
        dist.broadcast_object_list(theirs, 0)
        if theirs[0] != mine:
            raise RuntimeError("what was passed on is not what was read")


def live(path: Path) -> None:
    """What each process does with the orders in that file; rank 0 leaves there what was measured."""
    job = Job(**json.loads(path.read_text()))
    dist.init_process_group("gloo")
    rank = Rank(job)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(-1, job.pairs):
        shift = number % len(WAYS)
        for way in WAYS[shift:] + WAYS[:shift]:
            told = rank.turn(way)
            if number >= 0:
                found[way].append(told)
    dist.barrier()  # all have read their orders
    if rank.rank == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def _empty(size_bytes: int) -> State:
    numel = max(1, size_bytes // TENSORS // 4)
    return {f"layers.{n}": torch.empty(numel) for n in range(TENSORS)}


# -- who starts them --------------------------------------------------------------------------------


def measured(
    size_bytes: int, ranks: Sequence[int], pairs: int, places: Sequence[str], directory: Path
) -> Result:
    """All places and numbers of ranks. directory: on the disk that is measured."""
    started, load_before = datetime.now(UTC), os.getloadavg()
    samples: list[Sample] = []
    notes: list[str] = []
    with ExitStack() as stack:
        work = Path(stack.enter_context(_temporary(directory)))
        memory = stack.enter_context(_temporary(Path("/dev/shm")))  # noqa: S108 - a tmpfs
        state = {
            key: torch.full_like(t, n) for n, (key, t) in enumerate(_empty(size_bytes).items())
        }
        total = sum(t.nbytes for t in state.values())
        for place in places:
            uri, options, requests = _place(place, work, stack)
            ckptfs.save(state, uri, storage_options=options, if_exists="replace")
            for size in ranks:
                cold = str(work) if place == "cold" else ""
                before = requests()
                job = Job(uri, options, size_bytes, pairs, memory, cold)
                found = _group(size, job, Path(memory))
                notes += [f"{place}, {size} ranks: {requests() - before} GETs in all"] * (
                    place == "s3"
                )
                samples += [
                    Sample(
                        way, f"{size} ranks", place, PHASES[place], number, one["wall_s"],
                        one["cpu_s"], total,
                    )
                    for way, turns in found.items()
                    for number, one in enumerate(turns)
                ]  # fmt: skip
    return Result(
        what="a replicated state for every rank: each reads it, or one passes it on",
        **telling.about("replicated", directory, PACKAGES, started, load_before),
        settings={"pairs": pairs},
        workloads=tuple(Workload(f"{n} ranks", TENSORS, total, "one state for all") for n in ranks),
        targets=tuple(Target(place, place) for place in places),
        engines=tuple(Engine(way, "", "nothing is written", "all of it") for way in WAYS),
        samples=tuple(samples),
        notes=tuple(notes),
    )


def _temporary(within: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ckptfs-replicated-", dir=within)


def _place(
    place: str, work: Path, stack: ExitStack
) -> tuple[str, dict[str, Any], Callable[[], int]]:
    """Where the state lies: a URI, options, and how often it was asked."""
    if place != "s3":
        return f"{work}/run/step_1", {}, lambda: 0
    from tests import lab
    from tests.lab.sink import sink_stats

    server = stack.enter_context(lab.sink(keep="all"))
    return (
        server.uri("replicated/step_1"),
        server.storage_options(),
        lambda: sink_stats(server).get("get", 0),
    )


def _group(size: int, job: Job, orders: Path) -> dict[str, list[dict[str, float]]]:
    """The processes of one group: what rank 0 measured. orders: a directory of the caller's."""
    path = orders / "job.json"  # not on a command line: options may hold credentials
    path.write_text(json.dumps(asdict(job)))
    torchrun(size, ["-m", "benchmarks.replicated", "--job", str(path)], timeout_s=TIMEOUT_S)
    found: dict[str, list[dict[str, float]]] = json.loads(path.read_text())
    return found


def main() -> int:
    """Measure, write the result, print the table."""
    options = _options()
    if options.job:
        live(options.job)
        return 0
    result = measured(options.size, options.ranks, options.pairs, options.places, options.dir)
    telling.finish(result, options.out, "replicated")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one state for many ranks")
    parser.add_argument("--size", type=parse_size, default=500_000_000, help="of the state: 500MB")
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], help="such as 2,4")
    parser.add_argument("--pairs", type=int, default=5, help="rounds; one more comes first")
    parser.add_argument("--places", type=_names, default=list(PHASES), help="disk,cold,s3")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="the result's file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [place for place in PHASES if place in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
