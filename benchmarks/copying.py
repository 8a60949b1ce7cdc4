"""What a copy and an export of a checkpoint cost, compared with ``cp -r`` and safetensors' own writer.

    python -m benchmarks.floors copy

cp             cp -r of the checkpoint, then an fsync of every file
copy           ckptfs.replication.copier.copy_to, which ckptfs cp calls
export         ckptfs.tools.exporting.export to safetensors
safetensors    safetensors.torch.save_file of the same tensors from memory, then an fsync

All take turns, another one first each round, each in a process of its own that counts after its imports; the
source is once in the page cache and once not. What was written is compared with the source: bytes of copies,
tensors of exports.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash

import ckptfs
from benchmarks import children, tables
from ckptfs.bench.machine import filesystem
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload

TENSORS = 16
PLACE = "directory"
PACKAGES = ("ckptfs", "torch", "numpy", "xxhash", "safetensors")
# What is durable when it returns, and what it verifies of its source.
WAYS = {
    "cp": ("every file and directory, fsynced by the benchmark", "nothing"),
    "copy": ("files, directories, commit", "every block"),
    "export": ("files, directories", "every block"),
    "safetensors": ("every file and directory, fsynced by the benchmark", "no source"),
}
SOURCES = {"source in the page cache": True, "source not in the page cache": False}

CHILD = """
import json, os, resource, subprocess, sys, time
way, source, target, size = sys.argv[1:]

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
    import safetensors.torch, torch
    state = {f"layer.{n}": torch.ones(int(size) // 4) for n in range(16)}
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


def measured(size_bytes: int, rounds: int, *, within: Path) -> Result:
    """Every way in turn. within: where its directory is made, and removed."""
    began = tables.Began()
    with tempfile.TemporaryDirectory(prefix="ckptfs-copying-", dir=within.resolve()) as directory:
        samples = tuple(_samples(size_bytes, rounds, Path(directory)))
    return Result(
        what="what a copy and an export of a checkpoint cost, beside cp -r and an fsync",
        settings={"rounds": rounds},
        workloads=tuple(Workload(name, TENSORS, size_bytes) for name in SOURCES),
        targets=(Target(PLACE, filesystem(within)),),
        engines=tuple(Engine(name, "", *promised) for name, promised in WAYS.items()),
        samples=samples,
        notes=("each call is a process of its own, and counts after its imports",),
        **began.about(within, PACKAGES),
    )


def _samples(size_bytes: int, rounds: int, home: Path) -> Iterator[Sample]:
    state = {f"layer.{n}": torch.randn(size_bytes // TENSORS // 4) for n in range(TENSORS)}
    source, ways = home / "run" / "step_1", list(WAYS)
    ckptfs.save(state, source)
    for number in range(rounds):
        for workload, in_cache in SOURCES.items():
            turn = number % len(ways)
            for way in ways[turn:] + ways[:turn]:
                tables.say(f"copy: round {number + 1} of {rounds}, {workload}, {way}")
                cached(source, wanted=in_cache)
                wall_s, cpu_s = _turn(way, source, home / "out" / "step_1", state)
                yield Sample(way, workload, PLACE, "save", number, wall_s, cpu_s, size_bytes)


def _turn(
    way: str, source: Path, target: Path, state: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Seconds and CPU seconds of one process; what it wrote is compared and removed."""
    target.parent.mkdir()
    size_bytes = next(iter(state.values())).nbytes
    found = children.ask(way, "-c", CHILD, way, source, target, size_bytes)
    check(way, source, target, state)
    shutil.rmtree(target.parent)
    return found["wall_s"], found["cpu_s"]
