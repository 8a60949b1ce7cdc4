"""What it costs to read ``.metadata`` and objects: this tree's readers compared with another tree's.

    python -m benchmarks.floors readers --old ../before [--pairs 7]
    readers.py CASE PATH                                          one turn: prints its CPU seconds

small      .metadata of 20,000 tensors of one rank, as the row ``small`` saves them: read, each tensor asked for
planner    .metadata of 256 ranks of 1,000 tensors, as the row ``planner`` makes it: read, 1,000 tensors asked for
stock      as ``small``, written by torch.distributed.checkpoint
objects    .metadata of 200,000 objects and no tensor, written by torch.distributed.checkpoint
leaves     5,000 small objects, each from the bytes that torch.save made of it
large      one object of 3,000,000 numbers

Each turn is a process of its own, old and new in turn, each pair the other one first; the garbage collector
is on. A turn reads once to warm up and then a few times; its figure is the median of their CPU seconds, user
and system, since other work may share the machine.
"""

from __future__ import annotations

import io
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if (
    TYPE_CHECKING
):  # a turn imports nothing of the package but what it measures, which may be an older tree's
    from ckptfs.bench.results import Result

OLD, NEW = "the other tree", "this tree"
PLACE = "memory"
PACKAGES = ("ckptfs", "torch")
REPEATS = {"small": 5, "planner": 3, "stock": 3, "objects": 3, "leaves": 3, "large": 1}
CASES = tuple(REPEATS)
REPLICATED = "scale"  # of ``planner``: on all ranks, so that its place has no offsets


# -- one turn: whichever ckptfs is first in PYTHONPATH ----------------------------------------------


def _reader() -> Callable[[bytes, object], Any]:
    try:
        from ckptfs.dcp.metadata.metadata_reader import read_inventory
    except ImportError:  # where it was before
        from ckptfs.dcp.standins import read_inventory  # type: ignore[import-not-found, no-redef]
    return read_inventory


def _read_and_ask(data: bytes) -> None:
    """What a load does with metadata: read it, then ask for up to 20,000 tensors and their places."""
    inventory = _reader()(data, "benchmark")
    for key in list(inventory.keys)[:20_000]:
        saved = inventory.tensor(key)
        offsets = None if saved is None or key == REPLICATED else saved.box(0)[0]
        inventory.place(key, offsets)


def _load_leaves(data: bytes) -> None:
    from ckptfs.dcp.planning.leaves import load_leaf

    for blob in pickle.loads(data):  # noqa: S301 - made by this script
        load_leaf(io.BytesIO(blob))


def turn(case: str, path: Path) -> float:
    """The CPU seconds of one read: the median of a few after one that warms up."""
    data = path.read_bytes()
    read = _load_leaves if case in ("leaves", "large") else _read_and_ask
    took = []
    for _ in range(1 + REPEATS[case]):
        began = time.process_time()
        read(data)
        took.append(time.process_time() - began)
    return statistics.median(took[1:])


# -- what is read ----------------------------------------------------------------------------------


def write_input(case: str, path: Path, scale: float) -> None:
    """The bytes that both read. scale: 1 for all of them, less for a quick run."""
    count = max(1, round(20_000 * scale))
    made = {
        "small": lambda: _saved_by_ckptfs(count),
        "planner": lambda: _of_many_ranks(max(1, round(256 * scale)), max(1, round(1000 * scale))),
        "stock": lambda: _saved_by_stock(
            {f"layers.{n // 10}.{n % 10}.weight": torch.zeros(4, 4) for n in range(count)}
        ),
        "objects": lambda: _saved_by_stock({f"states.{n}": "" for n in range(10 * count)}),
        "leaves": lambda: pickle.dumps([_leaf(n) for n in range(max(1, count // 4))]),
        "large": lambda: pickle.dumps([_archive(tuple(range(150 * count)))]),
    }[case]()
    path.write_bytes(made)


def _saved_by_ckptfs(count: int) -> bytes:
    import ckptfs

    state = {f"layers.{n // 10}.{n % 10}.weight": torch.zeros(4, 4) for n in range(count)}
    with tempfile.TemporaryDirectory() as directory:
        ckptfs.save(state, f"{directory}/saved")
        return Path(directory, "saved", ".metadata").read_bytes()


def _of_many_ranks(ranks: int, tensors: int) -> bytes:
    from benchmarks.coordinator import Watch, ours
    from tests.scale.simulation import Sizes

    return ours(Sizes(ranks, tensors=tensors), Watch())


def _saved_by_stock(state: dict[str, Any]) -> bytes:
    from torch.distributed.checkpoint import DefaultSavePlanner

    from ckptfs._torch import storage_info

    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    (plan,), metadata = planner.create_global_plan([plan])
    metadata.storage_data = {
        item.index: storage_info("__0_0.distcp", 1000 * n, 1000)
        for n, item in enumerate(plan.items)
    }
    return pickle.dumps(metadata)


def _leaf(number: int) -> bytes:
    return _archive(
        {"step": number, "betas": (0.9, 0.999), "name": f"group.{number}", "on": [True]}
    )


def _archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# -- in turn ---------------------------------------------------------------------------------------


def measured(old: Path, pairs: int, scale: float, cases: Sequence[str] = CASES) -> Result:
    """Every case in turn. old: the other tree. scale: of what is read: 1 for all of it."""
    from benchmarks import children, tables
    from ckptfs.bench.results import Engine, Result, Sample, Target, Workload

    began = tables.Began()
    trees = {OLD: old.resolve(), NEW: children.TREE}
    samples, workloads = [], []
    with tempfile.TemporaryDirectory(prefix="ckptfs-readers-") as directory:
        for case in cases:
            path = Path(directory, case)
            write_input(case, path, scale)
            size = path.stat().st_size
            workloads.append(Workload(case, 0, size, "bytes of a .metadata, or of objects"))
            for number in range(pairs):
                tables.say(f"readers: {case}, round {number + 1} of {pairs}")
                for name in [*trees][:: 1 if number % 2 else -1]:
                    told = f"{case} in {trees[name].name}"
                    took_s = children.ask(told, __file__, case, path, tree=trees[name])
                    samples.append(
                        Sample(name, case, PLACE, "load_warm", number, took_s, took_s, size)
                    )
    about = began.about(Path(tempfile.gettempdir()), PACKAGES)
    return Result(
        what="the readers of .metadata and objects of two trees",
        settings={"rounds": pairs, "old": _commit(old), "new": _commit(children.TREE)},
        workloads=tuple(workloads),
        targets=(Target(PLACE, "a process of its own for each turn"),),
        engines=tuple(Engine(name, "", "nothing is written", "") for name in trees),
        samples=tuple(samples),
        notes=("seconds are those of the CPU",),
        **about,
    )


def _commit(tree: Path) -> str:
    asked = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    print(turn(sys.argv[1], Path(sys.argv[2])))
