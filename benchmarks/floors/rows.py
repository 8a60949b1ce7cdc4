"""How each row is measured: who takes part, with what, where. One function a row, one Result each.

ckptfs.bench does the measuring; what it is asked stands here. A row whose peers are not installed is
measured without them, and a note of the result says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import telling
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


def _files(
    sizes: Sizes,
    engines: tuple[str, ...],
    *phases: Phase,
    kind: str = "llm",
    at: Path | None = None,
) -> Result:
    """Everybody in turn on a directory, in one process of its own."""
    size_bytes = sizes.small * SMALL_BYTES if kind in NO_MODELS else sizes.size_bytes
    wanted = [one for one in engines if not sizes.only or one in sizes.only]
    there = tuple(one for one in wanted if find_spec(_module(one)))
    asked = Asked(
        (target_asked(at or sizes.directory),),
        (WorkloadAsked(kind, size_bytes=size_bytes),),
        engines=there,
        rounds=sizes.pairs,
        phases=phases,
    )
    with _threads_of_a_plain_process():
        found = measure(asked, progress=say)
    assert found is not None, "torchrun has no part in this"
    missing = [f"{one} took no part: it is not installed" for one in wanted if one not in there]
    place = "tmpfs" if at else "directory"
    named = telling.placed(found, place)
    return telling.joined([named], what=found.what, command="", note="; ".join(missing))


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


def durable(sizes: Sizes) -> Result:
    """A save that survives a power cut."""
    return _files(sizes, (OURS, "raw:direct", *PEERS), "save")


def tmpfs(sizes: Sizes) -> Result:
    """Saves where there is no disk: what remains is CPU and the kernel's copy."""
    return _files(sizes, (OURS, *DCP), "save", at=sizes.memory)


def hot(sizes: Sizes) -> Result:
    """Loads of files that are in the page cache."""
    return _files(sizes, (OURS, "raw:buffered", "dcp"), "load_warm")


def cold(sizes: Sizes) -> Result:
    """Loads of files that are not."""
    return _files(sizes, (OURS, "raw:direct", "raw:buffered", *DCP), "load_cold")


def small(sizes: Sizes) -> Result:
    """Many small tensors."""
    return _files(sizes, (OURS, "safetensors", "dcp"), "save", "load_warm", kind="many")


def shapes(sizes: Sizes) -> Result:
    """Small tensors, no two of one shape."""
    return _files(sizes, (OURS, "safetensors", "dcp"), "save", "load_warm", kind="shapes")


def stall(sizes: Sizes) -> Result:
    """How long an asynchronous save holds the training."""
    from benchmarks import async_stall

    peers = async_stall.PEERS
    return async_stall.measured(
        sizes.size_bytes, sizes.pairs, within=sizes.directory, peers=peers, command=""
    )


def planner(sizes: Sizes) -> Result:
    """What many ranks' plans cost the coordinator."""
    from benchmarks.planner import measured

    return measured(sizes.worlds, sizes.tensors, sizes.pairs, say=say)


def s3(sizes: Sizes) -> Result:
    """Loopback, without TLS: what a client costs."""
    return _at_sink("sink", sizes)


def s3_unsigned(sizes: Sizes) -> Result:
    """The same, and nobody hashes what is sent: as s3torchconnector always does."""
    return _at_sink("sink", sizes, UNSIGNED)


def tls(sizes: Sizes) -> Result:
    """The same with TLS."""
    return _at_sink("sink-tls", sizes)


def _at_sink(name: str, sizes: Sizes, options: Mapping[str, Any] | None = None) -> Result:
    from benchmarks.object_store import at_server

    wanted = (OURS, "dcp", "s3torchconnector", "raw")
    engines = [one for one in wanted if not sizes.only or one in sizes.only]
    size_bytes = min(sizes.size_bytes, MOST_ON_S3)  # the sink keeps it in memory, on the same cores
    with _threads_of_a_plain_process():
        return at_server(name, {"llm": size_bytes}, engines, sizes.pairs, options or {})


def latency(sizes: Sizes) -> Result:
    """A small state over a slow network: what is counted are the requests that wait for each other."""
    from benchmarks.object_store import at_server

    engines = [one for one in (OURS, "dcp") if not sizes.only or one in sizes.only]
    with _threads_of_a_plain_process():
        return at_server(
            "moto", {"llm": MOST_OVER_LATENCY}, engines, sizes.pairs, delay_s=LATENCY_S
        )


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
            found = measure(asked, progress=say)
            assert found is not None, "torchrun has no part in this"
            samples = tuple(replace(one, round=pair) for one in found.samples)
            parts.append(telling.placed(replace(found, samples=samples), "directory"))
    note = "every sample is a process of its own; its seconds are those of a first call"
    return telling.joined(parts, what="", command="", note=note)


def ranks2(sizes: Sizes) -> Result:
    """Two ranks, tensors sharded over them."""
    return _ranks(2, sizes)


def ranks4(sizes: Sizes) -> Result:
    """Four."""
    return _ranks(4, sizes)


def _ranks(count: int, sizes: Sizes) -> Result:
    """Each rank has one thread, as torchrun has it."""
    asked = Asked(
        (target_asked(sizes.directory),),
        (WorkloadAsked("llm", size_bytes=sizes.size_bytes),),
        engines=(OURS, *DCP, "safetensors", "raw"),
        rounds=sizes.pairs,
        ranks=count,
    )
    found = measure(asked, progress=say)
    assert found is not None, "torchrun has no part in this"
    return telling.placed(found, "directory")


def fixed(sizes: Sizes) -> Result:
    """A save and a load of next to nothing, of many processes on this machine."""
    from benchmarks.fixed import measured

    return measured(sizes.ranks, sizes.pairs, within=sizes.directory, say=say)


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
    return telling.placed(decode_result(text, path), "nfs")


ROWS: Mapping[str, Callable[[Sizes], Result]] = {
    "durable": durable,
    "tmpfs": tmpfs,
    "hot": hot,
    "cold": cold,
    "small": small,
    "shapes": shapes,
    "stall": stall,
    "planner": planner,
    "s3": s3,
    "s3-unsigned": s3_unsigned,
    "tls": tls,
    "latency": latency,
    "memory": memory,
    "ranks2": ranks2,
    "ranks4": ranks4,
    "fixed": fixed,
    "nfs": nfs,
}
