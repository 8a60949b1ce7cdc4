"""What it costs to read ``.metadata`` and objects: this tree's readers beside those of another tree.

    python -m benchmarks.readers --old ../before [--pairs 7] [--record]

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

import argparse
import io
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
LIMIT = 1.05
TIMEOUT_S = 900.0
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


def measured(
    old: Path, pairs: int, cases: tuple[str, ...], scale: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """CPU seconds of both trees, and their ratios pair by pair."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            path = Path(directory, case)
            write_input(case, path, scale)
            trees = {"old": old.resolve(), "new": HERE.parents[1]}
            took: dict[str, list[float]] = {name: [] for name in trees}
            for number in range(pairs):
                for name in [*trees][:: 1 if number % 2 else -1]:
                    took[name].append(_turn_in(trees[name], case, path))
            found[case] = _summary(took, path.stat().st_size)
            say(f"{case}: {found[case]}")
    return found


def _turn_in(tree: Path, case: str, path: Path) -> float:
    ended = subprocess.run(
        [sys.executable, str(HERE), "--turn", case, str(path)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{case} in {tree.name} failed:\n{ended.stderr[-4000:]}")
    return float(ended.stdout)


def _summary(took: dict[str, list[float]], size: int) -> dict[str, Any]:
    ratios = sorted(new / old for old, new in zip(took["old"], took["new"], strict=True))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(ratios[0], 3),
        "largest": round(ratios[-1], 3),
        "limit": LIMIT,
        "input_bytes": size,
        "old_cpu_s": [round(one, 4) for one in took["old"]],
        "new_cpu_s": [round(one, 4) for one in took["new"]],
    }


def main() -> int:
    """Measure, print, and write the result where it is asked for."""
    options = _options()
    if options.turn:
        print(turn(options.turn[0], Path(options.turn[1])))
        return 0
    began = datetime.now(UTC)
    found = measured(options.old, options.pairs, options.cases, options.scale, _say)
    result = {
        "command": f"python -m benchmarks.readers {' '.join(sys.argv[1:])}",
        "at": began.isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}",
        "load_average": list(os.getloadavg()),
        "old": _commit(options.old),
        "new": _commit(HERE.parents[1]),
        "cases": found,
    }
    print(json.dumps(result, indent=2))
    if options.record:
        name = f"metadata_reader-{began:%Y-%m-%d}.json"
        (HERE.parent / "results" / name).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _commit(tree: Path) -> str:
    asked = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="readers of .metadata and objects, old and new")
    parser.add_argument("--old", type=Path, help="another checkout of ckptfs")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cases", type=_names, default=CASES, help=", ".join(CASES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the inputs: less is quicker")
    parser.add_argument("--record", action="store_true", help="into benchmarks/results")
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.turn and options.old is None:
        parser.error("--old: which tree to measure beside this one?")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
