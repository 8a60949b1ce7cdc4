"""How each row is measured: who takes part, with what, where. One Result each.

ckptfs.bench does the measuring; what it is asked stands here. A row whose peers are not installed is
measured without them, and a note of the result says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.floors.claims import DCP, OURS, PEERS
from ckptfs.bench.messages import Asked, WorkloadAsked
from ckptfs.bench.results import Phase, Result
from ckptfs.bench.run import measure, target_asked
from ckptfs.bench.workloads import NO_MODELS

MOST_ON_S3, MOST_ON_NFS = 536_870_912, 200_000_000
NFS_TIMEOUT_S = 3600.0
MOST_OVER_LATENCY, LATENCY_S = 1 << 20, 0.03
# Storage options of ckptfs and of s3fs. The sum over a body, and the checksum that s3fs adds to it.
UNSIGNED: Mapping[str, Any] = {
    "config_kwargs": {
        "s3": {"payload_signing_enabled": False},
        "request_checksum_calculation": "when_required",
    }
}
SMALL_BYTES = 20 << 10  # of one small tensor, on average: see ckptfs.bench.workloads


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the command line says. directory: on a disk; memory: on a tmpfs."""

    size_bytes: int
    small: int
    pairs: int
    directory: Path
    memory: Path
    only: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (256, 1024, 4096)
    tensors: int = 1000
    ranks: tuple[int, ...] = (4, 16, 32)


@dataclass(frozen=True, slots=True)
class Files:
    """Everybody in turn on a directory: in one process of its own, or in ``ranks`` over which the state is sharded."""

    engines: tuple[str, ...]
    phases: tuple[Phase, ...]
    kind: str = "llm"
    in_memory: bool = False
    ranks: int = 1

    def __call__(self, sizes: Sizes) -> Result:
        """Measure. Ranks have one thread each, as torchrun has it."""
        size_bytes = sizes.small * SMALL_BYTES if self.kind in NO_MODELS else sizes.size_bytes
        wanted = [one for one in self.engines if not sizes.only or one in sizes.only]
        there = tuple(one for one in wanted if find_spec(_module(one)))
        asked = Asked(
            (target_asked(sizes.memory if self.in_memory else sizes.directory),),
            (WorkloadAsked(self.kind, size_bytes=size_bytes),),
            engines=there,
            rounds=sizes.pairs,
            ranks=self.ranks,
            phases=self.phases,
        )
        with _threads_of_a_plain_process() if self.ranks == 1 else nullcontext():
            found = _measured(asked)
        missing = [f"{one} took no part: it is not installed" for one in wanted if one not in there]
        named = tables.placed(found, "tmpfs" if self.in_memory else "directory")
        return tables.joined([named], what=found.what, command="", note="; ".join(missing))


@dataclass(frozen=True, slots=True)
class AtServer:
    """Everybody in turn at a server that is started for it; at most ``most_bytes``, one process.

    delay_s: how long a proxy holds each request.
    """

    server: str
    engines: tuple[str, ...] = (OURS, "dcp", "s3torchconnector", "raw")
    most_bytes: int = MOST_ON_S3
    options: Mapping[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0

    def __call__(self, sizes: Sizes) -> Result:
        """Measure."""
        from benchmarks.servers import at_server

        engines = [one for one in self.engines if not sizes.only or one in sizes.only]
        state = {"llm": min(sizes.size_bytes, self.most_bytes)}
        with _threads_of_a_plain_process():
            return at_server(
                self.server, state, engines, sizes.pairs, self.options, delay_s=self.delay_s
            )


def _measured(asked: Asked) -> Result:
    found = measure(asked, progress=say)
    assert found is not None, "torchrun has no part in this"
    return found


def _module(engine: str) -> str:
    name = engine.partition(":")[0]
    return name if name in ("safetensors", "torchsnapshot", "torch_checkpointing") else "torch"


@contextmanager
def _threads_of_a_plain_process() -> Iterator[None]:
    """As many threads as a process has that no launcher started; torchrun gives each rank one."""
    name, before = "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault(name, str(len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def stall(sizes: Sizes) -> Result:
    """How long an asynchronous save holds the training."""
    from benchmarks import stall

    peers = stall.PEERS
    return stall.measured(
        sizes.size_bytes, sizes.pairs, within=sizes.directory, peers=peers, command=""
    )


def planner(sizes: Sizes) -> Result:
    """What many ranks' plans cost the coordinator."""
    from benchmarks.planner import measured

    return measured(sizes.worlds, sizes.tensors, sizes.pairs, say=say)


def memory(sizes: Sizes) -> Result:
    """The most that a first save, and the load after it, add to a process that holds the state.

    Every sample is a process of its own. From the moment when the state and the tensors to be loaded
    into are there, everything counts: buffers that stay, caches, modules imported late.
    """
    parts = []
    for pair in range(1, sizes.pairs + 1):
        turns = (OURS, "dcp") if pair % 2 else ("dcp", OURS)
        for engine in turns:
            asked = Asked(
                (target_asked(sizes.directory),),
                (WorkloadAsked("llm", size_bytes=sizes.size_bytes),),
                engines=(engine,),
                rounds=1,
                warm_ups=0,
                phases=("save", "load_warm", "load_cold"),
                memory_from="start",
            )
            found = _measured(asked)
            samples = tuple(replace(one, round=pair) for one in found.samples)
            parts.append(tables.placed(replace(found, samples=samples), "directory"))
    note = "every sample is a process of its own; its seconds are those of a first call"
    return tables.joined(parts, what="", command="", note=note)


def fixed(sizes: Sizes) -> Result:
    """A save and a load of next to nothing, of many processes on this machine."""
    from benchmarks.fixed import measured

    return measured(sizes.ranks, sizes.pairs, within=sizes.directory, say=say)


def copy(sizes: Sizes) -> Result:
    """A copy and an export of a checkpoint, beside cp."""
    from benchmarks.copying import measured

    return measured(sizes.size_bytes, sizes.pairs, within=sizes.directory, say=say)


def nfs(sizes: Sizes) -> Result:
    """A real server and a client, kernels in user mode: their CPU is slow and their clock coarse."""
    from ckptfs.bench.results import decode_result
    from tests.lab.nfs import NfsLab

    with NfsLab("4.2") as lab:
        where = lab.fresh("bench")
        path = f"{where}/result.json"
        command = [sys.executable, "-m", "ckptfs", "bench", "run", f"{where}/home"]
        command += ["--engines", f"{OURS},dcp,dcp:t2,raw:buffered", "--workload", "llm"]
        command += ["--size", str(min(sizes.size_bytes, MOST_ON_NFS)), "--rounds", str(sizes.pairs)]
        command += ["--out", path]
        ended = lab.a.run(command, timeout_s=NFS_TIMEOUT_S)
        if ended.status:
            raise RuntimeError(
                f"the benchmark in the lab ended with {ended.status}: {ended.output}"
            )
        text = lab.a.call(Path.read_text, Path(path))
    return tables.placed(decode_result(text, path), "nfs")


BOTH: tuple[Phase, ...] = ("save", "load_warm")
SHARDED: tuple[Phase, ...] = (*BOTH, "load_cold")
SMALL = (OURS, "safetensors", "dcp")
RANKS = (OURS, *DCP, "safetensors", "raw")
ROWS: Mapping[str, Callable[[Sizes], Result]] = {
    "durable": Files((OURS, "raw:direct", *PEERS), ("save",)),
    # Where there is no disk: what remains is CPU and the kernel's copy.
    "tmpfs": Files((OURS, *DCP), ("save",), in_memory=True),
    "hot": Files((OURS, "raw:buffered", "dcp"), ("load_warm",)),
    "cold": Files((OURS, "raw:direct", "raw:buffered", *DCP), ("load_cold",)),
    "small": Files(SMALL, BOTH, kind="many"),
    "shapes": Files(SMALL, BOTH, kind="shapes"),
    "stall": stall,
    "planner": planner,
    # Loopback, without TLS: what a client costs. The sink keeps it in memory, on the same cores.
    "s3": AtServer("sink"),
    # The same, and nobody hashes what is sent: as s3torchconnector always does.
    "s3-unsigned": AtServer("sink", options=UNSIGNED),
    "tls": AtServer("sink-tls"),
    # A small state over a slow network: what is counted are the requests that wait for each other.
    "latency": AtServer("moto", (OURS, "dcp"), most_bytes=MOST_OVER_LATENCY, delay_s=LATENCY_S),
    "memory": memory,
    "ranks2": Files(RANKS, SHARDED, ranks=2),
    "ranks4": Files(RANKS, SHARDED, ranks=4),
    "fixed": fixed,
    "copy": copy,
    "nfs": nfs,
}
