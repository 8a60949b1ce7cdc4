"""What a copy and an export of a checkpoint cost, beside ``cp -r`` and safetensors' own writer.

python -m benchmarks.copying [--size 2GB] [--pairs 5] [--dir DIR] [--old TREE] [--record]

cp       cp -r of the checkpoint, then an fsync of every file
copy     ckptfs.replication.copier.copy_to, which ckptfs cp calls
export   ckptfs.tools.exporting.export to safetensors
st       safetensors.torch.save_file of the same tensors from memory, then an fsync
--old    copy and export of another working tree, too: old-copy, old-export

All take turns, in another order each round, each in a process of its own that counts after its imports; the source is
once in the page cache ("warm") and once not ("cold"). What was written is compared with the source: bytes of
copies, tensors of exports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

import ckptfs
from ckptfs.dcp.sizes import parse_size

RESULTS = Path(__file__).parent / "results" / f"copying-{datetime.now(UTC):%Y-%m-%d}.json"
TENSORS = 16
GOALS = {"copy": 1.5, "export": 2.0}  # of the time of cp

CHILD = """
import json, os, resource, subprocess, sys, time
way, source, target = sys.argv[1:]

def synced(top):
    for folder, _, names in os.walk(top):
        for name in [".", *names]:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

if way == "cp":
    def act():
        subprocess.run(["cp", "-r", source, target], check=True)
        synced(target)
elif way == "copy":
    from ckptfs.replication.copier import copy_to
    def act():
        copy_to(source, target)
elif way == "export":
    from ckptfs.tools.exporting import export
    def act():
        export(source, target, "safetensors")
else:
    import safetensors.torch, torch, ckptfs
    size = int(source.rpartition("@")[2])
    state = {f"layer.{n}": torch.ones(size // 4) for n in range(16)}
    def act():
        os.mkdir(target)
        safetensors.torch.save_file(state, f"{target}/model.safetensors")
        synced(target)

def cpu():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)

began, used = time.perf_counter(), cpu()
act()
print(json.dumps({"wall_s": time.perf_counter() - began, "cpu_s": cpu() - used}))
"""


def cached(top: Path, *, wanted: bool) -> None:
    """Bring every file below ``top`` into the page cache, or out of it."""
    for path in (path for path in top.rglob("*") if path.is_file()):
        if wanted:
            with path.open("rb") as file:
                while file.read(8 << 20):
                    pass
        else:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def digests(top: Path) -> list[str]:
    """The digests of all data files."""
    found = []
    for path in sorted(top.rglob("*.distcp")):
        state = xxhash.xxh3_128()
        with path.open("rb") as file:
            while data := file.read(8 << 20):
                state.update(data)
        found.append(state.hexdigest())
    return found


def check(way: str, source: Path, target: Path, state: dict[str, torch.Tensor]) -> None:
    """AssertionError where the target is not what the source is."""
    if way in ("cp", "copy"):
        assert digests(target) == digests(source) != []
    elif way == "export":
        import safetensors.torch

        found = safetensors.torch.load_file(target / "model.safetensors")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())


def measured(
    size_bytes: int,
    pairs: int,
    within: Path,
    old: Path | None = None,
    sources: Sequence[str] = ("warm", "cold"),
) -> list[dict[str, Any]]:
    """Every way in turn; one row for each call."""
    state = {f"layer.{n}": torch.randn(size_bytes // TENSORS // 4) for n in range(TENSORS)}
    source = within / "run" / "step_1"
    ckptfs.save(state, source)
    trees = {"": Path(__file__).parents[1], "old-": old}
    ways = [("", way) for way in ("cp", "copy", "export", "st")]
    ways += [("old-", way) for way in ("copy", "export") if old is not None]
    rows: list[dict[str, Any]] = []
    for number in range(pairs):
        for cache in sources:
            turn = number % len(ways)
            for tree, way in [*ways[turn:], *ways[:turn]]:
                target = within / "out" / "step_1"
                target.parent.mkdir()
                cached(source, wanted=cache == "warm")
                what = f"memory@{size_bytes // TENSORS}" if way == "st" else str(source)
                ran = subprocess.run(
                    [sys.executable, "-c", CHILD, way, what, str(target)],
                    env={**os.environ, "PYTHONPATH": str(trees[tree])},
                    cwd=within,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                check(way, source, target, state)
                shutil.rmtree(target.parent)
                row = {"round": number, "source": cache, "way": f"{tree}{way}"}
                rows.append({**row, **json.loads(ran.stdout)})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each source and way: seconds, CPU seconds, and the ratio to cp of the same round, with their spread."""
    found: dict[str, Any] = {}
    for cache in sorted({row["source"] for row in rows}):
        by_way: dict[str, dict[int, dict[str, Any]]] = {}
        for row in rows:
            if row["source"] == cache:
                by_way.setdefault(row["way"], {})[row["round"]] = row
        for way, rounds in by_way.items():
            ratios = [one["wall_s"] / by_way["cp"][n]["wall_s"] for n, one in rounds.items()]
            found[f"{way}, {cache}"] = {
                "wall_s": _spread([one["wall_s"] for one in rounds.values()]),
                "cpu_s": _spread([one["cpu_s"] for one in rounds.values()]),
                "of cp": _spread(ratios),
                **({"goal": GOALS[way]} if way in GOALS else {}),
            }
    return found


def _spread(values: list[float]) -> list[float]:
    """Median, least, largest."""
    return [round(one, 3) for one in (statistics.median(values), min(values), max(values))]


def main() -> int:
    """Measures, prints, and writes the result where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=2_000_000_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, help="on the disk to be measured; the temporary directory"
    )
    parser.add_argument("--old", type=Path, help="another working tree")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="ckptfs-copying-", dir=options.dir) as directory:
        rows = measured(options.size, options.pairs, Path(directory), options.old)
    result = {
        "command": f"python -m benchmarks.copying {' '.join(sys.argv[1:])}".strip(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}",
        "load_average": {"before": load, "after": os.getloadavg()},
        "size_bytes": options.size,
        "median, least, largest": told(rows),
        "rows": rows,
    }
    print(json.dumps({**result, "rows": len(rows)}, indent=2))
    if options.record:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
