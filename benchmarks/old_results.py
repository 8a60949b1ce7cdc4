"""Result files as these scripts wrote them before schema 1, read as results of today. Pure but ``read_any``.

save_load     "compare": [{ranks, bytes_per_rank, save: {pairs: [...]}, load_hot, load_cold}]
async_stall   "measured": {first, rounds: {peer: [{stall_s, done_s}]}}
object_store  "jobs": [{server, state, bytes, tensors, peers: {name: {save: {rounds}, load}}}]

python -m benchmarks.old_results OLD.json NEW.json      for ckptfs bench report and compare
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptfs.bench.results import (
    Engine,
    Phase,
    Result,
    Sample,
    Target,
    Workload,
    read_result,
    write_result,
)
from ckptfs.errors import ManifestError

LIMITS = ("memcpy", "obstore put / get_range")
_LOADED: Mapping[str, Phase] = {
    "save": "save",
    "load": "load_warm",
    "load_hot": "load_warm",
    "load_cold": "load_cold",
}


def read_any(path: str | Path) -> Result:
    """A result of today or of then. ManifestError: it is neither."""
    try:
        return read_result(path)
    except ManifestError:
        record = json.loads(Path(path).read_text())
        for name, read in _READERS.items():
            if name in record:
                return _result(record, list(read(record)))
        raise


def _save_load(record: dict[str, Any]) -> Iterator[Sample]:
    for job in record["compare"]:
        size = job["ranks"] * job["bytes_per_rank"]
        for name in ("save", "load_hot", "load_cold"):
            for number, pair in enumerate(job[name]["pairs"]):
                for old, engine in (("ckptfs", "ckptfs"), ("stock", "dcp")):
                    wall, cpu = pair[f"{old}_s"], pair[f"{old}_cpu_s"]
                    where = (f"{job['ranks']} ranks", "directory")
                    yield Sample(engine, *where, _LOADED[name], number, wall, cpu, size)


def _async_stall(record: dict[str, Any]) -> Iterator[Sample]:
    size = record["summary"]["size_bytes"]
    for engine, turns in record["measured"]["rounds"].items():
        for number, turn in enumerate(turns):
            where = ("layers", "directory")
            yield Sample(engine, *where, "stall", number, turn["stall_s"], 0.0, size)


def _object_store(record: dict[str, Any]) -> Iterator[Sample]:
    for job in record["jobs"]:
        for engine, peer in job["peers"].items():
            for name in ("save", "load"):
                for number, one in enumerate(peer[name]["rounds"]):
                    yield Sample(
                        engine,
                        job["state"],
                        job["server"],
                        _LOADED[name],
                        number,
                        one["s"],
                        one["cpu_s"],
                        job["bytes"],
                    )


_READERS = {"compare": _save_load, "measured": _async_stall, "jobs": _object_store}


def _result(record: dict[str, Any], samples: list[Sample]) -> Result:
    machine = dict(record["machine"])
    versions = {**machine.pop("versions"), **record.get("versions", {})}
    told = {job["state"]: job["tensors"] for job in record.get("jobs", ())}
    sizes = {one.workload: one.size_bytes for one in samples}
    targets = dict.fromkeys(one.target for one in samples)
    return Result(
        what=record["what"],
        date=record["date"],
        command=record["command"],
        machine={**machine, "load_average": record["load_average"]},
        versions=versions,
        settings={},
        workloads=tuple(Workload(n, told.get(n, 0), size) for n, size in sizes.items()),
        targets=tuple(
            Target(name, machine["filesystem"] if name == "directory" else "s3") for name in targets
        ),
        engines=tuple(
            Engine(name, "", "see the README of that time", "", is_limit=name in LIMITS)
            for name in dict.fromkeys(one.engine for one in samples)
        ),
        samples=tuple(samples),
        notes=tuple(filter(None, [record.get("note", "")])),
    )


if __name__ == "__main__":
    write_result(sys.argv[2], read_any(sys.argv[1]))
