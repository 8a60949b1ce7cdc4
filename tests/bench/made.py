"""A result as ``ckptfs bench`` would write it, made of arithmetic: two targets, five engines, two phases."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ckptfs.bench.results import Engine, Phase, Result, Sample, Target, Workload

FILE, S3 = "file:///mnt/fast/bench", "s3://bucket/bench"
GB = 10**9
# Median GB/s on a filesystem; on S3 everything takes three times as long.
SPEED: Mapping[str, float] = MappingProxyType(
    {"ckptfs": 2.0, "dcp FileSystemWriter": 0.5, "torch.save": 0.4, "safetensors": 0.8, "raw": 2.5}
)
PHASES: tuple[Phase, ...] = ("save", "load_cold", "load_warm")


def made_result(**changes: Any) -> Result:
    """Five rounds of two workloads everywhere; a training loop for two engines."""
    result = Result(
        what="throughput of checkpoints",
        date="2026-11-22T10:00:00+00:00",
        command="ckptfs bench /mnt/fast/bench s3://bucket/bench --rounds 5",
        machine={
            "cpu": "AMD EPYC",
            "cores": 2,
            "memory_gib": 23.5,
            "system": "Linux 6.18 x86_64",
            "filesystem": "ext4",
            "fsync_ms": 0.19,
            "python": "3.11.7",
            "load_average": {"before": [0.5, 0.4, 0.3], "after": [1.5, 0.9, 0.5]},
        },
        versions={"ckptfs": "0.1.0", "torch": "2.13.0+cpu", "safetensors": "none"},
        settings={"ranks": 2, "durable": True, "rounds": 5},
        workloads=(
            Workload(
                "llm",
                344,
                2 * GB,
                "a model of 130 million parameters with its optimizer",
                4,
                4_000_000,
                64_000_000,
            ),
            Workload("small", 20000, GB // 2, "tensors of 4 to 64 KiB"),
        ),
        targets=(
            Target(FILE, "ext4", "the page cache; emptied of the files before a cold load"),
            Target(S3, "s3 at http://127.0.0.1:9000", "what the server caches is not known"),
        ),
        engines=(
            Engine("ckptfs", "0.1.0", "data, manifest and commit", "every block"),
            Engine("dcp FileSystemWriter", "2.13.0", "data files", "nothing"),
            Engine("torch.save", "2.13.0", "the file", "nothing"),
            Engine("safetensors", "0.8.0", "the file", "nothing"),
            Engine("raw", "O_DIRECT", "the file", "nothing", is_limit=True),
        ),
        samples=tuple(_samples()),
        notes=("s3torchconnector is not installed: not measured",),
    )
    return replace(result, **changes)


def _samples() -> list[Sample]:
    chance = random.Random(6)
    found = []
    for workload, size in (("llm", 2 * GB), ("small", GB // 2)):
        for target, slower in ((FILE, 1.0), (S3, 3.0)):
            for number in range(5):
                for engine, speed in SPEED.items():
                    for phase, times in zip(PHASES, (1.0, 1.4, 0.4), strict=True):
                        wall = size / GB / speed * slower * times * chance.uniform(0.9, 1.15)
                        found.append(_sample(engine, workload, target, phase, number, wall, size))
    for engine, stall in (("ckptfs", 0.08), ("dcp FileSystemWriter", 0.45)):
        for number in range(5):
            more = stall * chance.uniform(0.9, 1.2)
            for phase, wall in (("stall", more), ("steps", 10.0), ("steps_saving", 10 + 5 * more)):
                found.append(_sample(engine, "llm", FILE, phase, number, wall, 2 * GB))
    return found


def _sample(
    engine: str, workload: str, target: str, phase: Phase, number: int, wall: float, size: int
) -> Sample:
    sent = None if target == FILE else int(1.01 * size)
    return Sample(
        engine,
        workload,
        target,
        phase,
        number,
        wall,
        0.3 * wall,
        size,
        sent_bytes=sent if phase == "save" else None,
        received_bytes=sent if phase in {"load_cold", "load_warm"} else None,
        peak_memory_bytes=None if engine == "raw" else int(0.1 * size),
    )
