"""How each row is measured: who takes part, with what, where. One Result each.

ckptfs.bench measures what this module asks of it. A row without its peers installed is measured without them,
and a note of the result says so.
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

from benchmarks import copying, first_call, fixed, history, planner, readers, stall, tables
from benchmarks.floors.claims import BOTH, DCP, OURS, PEERS
from benchmarks.servers import at_server
from ckptfs.bench.messages import Asked, WorkloadAsked
from ckptfs.bench.results import Phase, Result, decode_result
from ckptfs.bench.run import measure, target_asked
from ckptfs.bench.workloads import NO_MODELS
from tests.lab.nfs import NfsLab

MOST_ON_S3, MOST_ON_NFS = 536_870_912, 200_000_000
SMALL_STATE_BYTES = 20 << 20
NFS_TIMEOUT_S = 3600.0
MOST_OVER_LATENCY, LATENCY_S = 1 << 20, 0.03
# Storage options of ckptfs and of s3fs. The sum over a body, and the checksum that s3fs adds to it.
UNSIGNED: Mapping[str, Any] = {
    "config_kwargs": {
        "s3": {"payload_signing_enabled": False},
        "request_checksum_calculation": "when_required",
    }
}
SHARDED: tuple[Phase, ...] = (*BOTH, "load_cold")
SMALL_BYTES = 20 << 10  # of one small tensor, on average: see ckptfs.bench.workloads


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the command line says. directory: on a disk; memory: on a tmpfs.

    device, steps: of ``stall``. saves: how old a run is. old: the tree that ``readers`` measures in comparison.
    """

    size_bytes: int
    small: int
    pairs: int
    directory: Path
    memory: Path
    only: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (256, 1024, 4096)
    tensors: int = 1000
    ranks: tuple[int, ...] = (4, 16, 32)
    device: str = "cpu"
    steps: bool = False
    saves: int = 20_000
    old: Path | None = None


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

    small_bytes: of a state of small tensors, in addition to the large one; 0: none. delay_s: how long a proxy holds each request.
    """

    server: str
    engines: tuple[str, ...] = (OURS, "dcp", "s3torchconnector", "raw")
    most_bytes: int = MOST_ON_S3
    small_bytes: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    delay_s: float = 0.0

    def __call__(self, sizes: Sizes) -> Result:
        """Measure."""
        engines = [one for one in self.engines if not sizes.only or one in sizes.only]
        large = min(sizes.size_bytes, self.most_bytes)
        states = {"llm": large, "many": min(large, self.small_bytes)}
        with _threads_of_a_plain_process():
            return at_server(
                self.server, states, engines, sizes.pairs, self.options, delay_s=self.delay_s
            )


def _measured(asked: Asked) -> Result:
    found = measure(asked, progress=tables.say)
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


@dataclass(frozen=True, slots=True)
class FirstCalls:
    """The most that a first save, and the load after it, add to a process that holds the state.

    Every sample is a process of its own. From the moment when the state and the tensors to be loaded
    into are there, everything counts: buffers that stay, caches, modules imported late.
    """

    engines: tuple[str, ...]

    def __call__(self, sizes: Sizes) -> Result:
        """Measure, each round another one first."""
        parts = []
        for pair in range(1, sizes.pairs + 1):
            for engine in self.engines if pair % 2 else self.engines[::-1]:
                asked = Asked(
                    (target_asked(sizes.directory),),
                    (WorkloadAsked("llm", size_bytes=sizes.size_bytes),),
                    engines=(engine,),
                    rounds=1,
                    warm_ups=0,
                    phases=SHARDED,
                    memory_from="start",
                )
                found = _measured(asked)
                samples = tuple(replace(one, round=pair) for one in found.samples)
                parts.append(tables.placed(replace(found, samples=samples), "directory"))
        note = "every sample is a process of its own; its seconds are those of a first call"
        return tables.joined(parts, what="", command="", note=note)


@dataclass(frozen=True, slots=True)
class OnNfs:
    """A real server and a client, kernels in user mode: their CPU is slow and their clock coarse."""

    engines: tuple[str, ...]

    def __call__(self, sizes: Sizes) -> Result:
        """Measure with the bench's command, in the client's kernel."""
        size_bytes = min(sizes.size_bytes, MOST_ON_NFS)
        with NfsLab("4.2") as lab:
            where = lab.fresh("bench")
            path = f"{where}/result.json"
            command = [sys.executable, "-m", "ckptfs", "bench", "run", f"{where}/home"]
            command += ["--engines", ",".join(self.engines), "--workload", "llm", "--out", path]
            command += ["--size", str(size_bytes), "--rounds", str(sizes.pairs)]
            ended = lab.a.run(command, timeout_s=NFS_TIMEOUT_S)
            if ended.status:
                raise RuntimeError(
                    f"the benchmark in the lab ended with {ended.status}: {ended.output}"
                )
            text = lab.a.call(Path.read_text, Path(path))
        return tables.placed(decode_result(text, path), "nfs")


def _readers(sizes: Sizes) -> Result:
    assert sizes.old is not None, "the command asks for it"
    return readers.measured(sizes.old, sizes.pairs, min(1.0, sizes.small / 20_000))


# Rows in which no round comes before those that count. The first two are about first calls. In the next two each turn is
# a process of its own; in the others a turn warms up by itself, or is the least of a few calls.
NO_WARM_UP = ("memory", "first", "planner", "copy", "history", "readers", "catalog")

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
    "stall": lambda s: stall.measured(
        s.size_bytes, s.pairs, within=s.directory, device=s.device, steps=s.steps
    ),
    "first": lambda s: first_call.measured(s.size_bytes, s.pairs, within=s.directory),
    "planner": lambda s: planner.measured(s.worlds, s.tensors, s.pairs),
    # Loopback, without TLS: what a client costs. The sink keeps it in memory, on the same cores.
    "s3": AtServer("sink"),
    # The same, and no client hashes what it sends: as s3torchconnector always does.
    "s3-unsigned": AtServer("sink", options=UNSIGNED),
    "tls": AtServer("sink-tls"),
    # A small state over a slow network: what is counted are the requests that wait for each other.
    "latency": AtServer("moto", (OURS, "dcp"), most_bytes=MOST_OVER_LATENCY, delay_s=LATENCY_S),
    # Ceph's gateway: a client that burns CPU slows its server. moto answers at 40 MB/s.
    "radosgw": AtServer("radosgw", small_bytes=SMALL_STATE_BYTES),
    "moto": AtServer("moto", most_bytes=134_217_728, small_bytes=SMALL_STATE_BYTES),
    "memory": FirstCalls((OURS, "dcp")),
    "ranks2": Files(RANKS, SHARDED, ranks=2),
    "ranks4": Files(RANKS, SHARDED, ranks=4),
    "fixed": lambda s: fixed.measured(s.ranks, s.pairs, within=s.directory),
    "copy": lambda s: copying.measured(s.size_bytes, s.pairs, within=s.directory),
    "history": lambda s: history.history(s.saves, s.pairs, within=s.directory),
    "catalog": lambda s: history.catalog(s.saves, s.pairs, within=s.directory),
    "readers": _readers,
    "nfs": OnNfs((OURS, "dcp", "dcp:t2", "raw:buffered")),
}
