"""What a save costs in an old run, and what ``latest`` costs in one that deletes nothing.

history   a run that keeps three of so many saves: processor time of a save there, compared with one in a new run
catalog   a run with so many live saves: processor time of ``latest`` for each of them, compared with a run of 1,000

The old runs are made by writing their logs, entry by entry as a manager would have, without the tensors of
saves that are gone. Old and new are measured in turn, in this process.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ckptfs
from benchmarks import tables
from ckptfs.bench.machine import filesystem
from ckptfs.bench.results import Engine, Phase, Result, Sample, Target, Workload, number_text
from ckptfs.commit.log.append import SNAPSHOT_EVERY, catch_up
from ckptfs.commit.log.entries import (
    Body,
    Delete,
    Entry,
    Fence,
    Generation,
    Gone,
    Kind,
    Release,
    Seal,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry, snapshot_of
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import HINT, LOG, log_key
from ckptfs.manager.manager import CheckpointManager
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri

OLD, NEW = "an old run", "a new run"
PLACE = "directory"
PACKAGES = ("ckptfs", "torch")
PROMISED = ("files, directories, commit", "every block")
NUMEL, EACH, WARM_UPS = 1000, 30, 5  # of the state; saves of a turn, and those before them
FEW = 1_000
KEPT = 3
BASE = Generation(1, "made")
DOMAIN = "0123456789abcdef0123456789abcdef"


class Spent(NamedTuple):
    """Seconds of one call, and CPU seconds."""

    wall_s: float
    cpu_s: float


def write_log(run: Path, saves: int, *, keeps: int | None) -> None:
    """The log of a run that an owner saved to so often, and left. keeps: None keeps all."""
    (run / LOG).mkdir(parents=True)
    (run / ".ckptfs" / "domain").write_text(DOMAIN)
    state = LogState()

    def append(body: Body) -> None:
        nonlocal state
        entry = encode_entry(Entry(f"made-{state.next}", body))
        (run / log_key(state.next)).write_bytes(entry)
        state = fold_entry(state, body)

    append(Fence(BASE))
    ids: list[str] = []
    for n in range(1, saves + 1):
        ids.append(f"20260101T000000-{n:012x}")
        place: Any = {"artifact": Kind.CHECKPOINT, "domains": (DOMAIN,), "digest": f"{n:032x}"}
        append(Seal(ids[-1], BASE, n, fenced=True, name=f"step_{n}", step=n, **place))
        if keeps is not None and n > keeps:
            append(Delete(ids[n - keeps - 1], BASE, "retention"))
            append(Gone(ids[n - keeps - 1], BASE))
        # Of the snapshots only the last ones are made: no one reads the others, and together they are GBs.
        if n > saves - SNAPSHOT_EVERY and state.next - state.snapshot_at >= SNAPSHOT_EVERY:
            number = state.next
            append(snapshot_of(state))
            hint = json.dumps({"snapshot": number, "next": number + 1})
            (run / HINT).write_text(hint)
    if keeps is not None:
        # Their bytes are not there: the manager that comes saves its own, and these go as well.
        for save_id in ids[-keeps:]:
            append(Delete(save_id, BASE, "made"))
            append(Gone(save_id, BASE))
    append(Release(BASE))


def _save(run: Path, first: int, count: int) -> Spent:
    """One save: the median of so many, after a few that warm up."""
    state = {"w": torch.arange(NUMEL, dtype=torch.float32)}
    with CheckpointManager(str(run), keep_latest=KEPT) as manager:
        steps = range(first, first + count + WARM_UPS)
        took = [_spent(functools.partial(manager.save, step, state)) for step in steps]
    return median_of(took[WARM_UPS:])


def median_of(calls: Sequence[Spent]) -> Spent:
    """Of the seconds and of the CPU seconds, each by itself."""
    walls, cpus = zip(*calls, strict=True)
    return Spent(statistics.median(walls), statistics.median(cpus))


def _latest(run: Path, saves: int, count: int) -> Spent:
    """One ``latest``, by each live save: the least of a few."""

    def look() -> None:
        if ckptfs.latest(str(run)) is None:
            raise RuntimeError("the run that was made has no checkpoint")

    least = min((_spent(look) for _ in range(count)), key=lambda one: one.cpu_s)
    return Spent(least.wall_s / saves, least.cpu_s / saves)


def _spent(act: Callable[[], object]) -> Spent:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def history(saves: int, rounds: int, *, within: Path) -> Result:
    """A save in a run that is so many saves old, and in a new one. within: where the runs are made, and removed."""
    began = tables.Began()
    with tempfile.TemporaryDirectory(prefix="ckptfs-history-", dir=within) as directory:
        root = Path(directory)
        write_log(root / "old", saves, keeps=KEPT)
        tables.say("history: the old run is made")
        turns: dict[str, Callable[[int], Spent]] = {
            OLD: lambda n: _save(root / "old", saves + 1 + 40 * n, EACH),
            NEW: lambda n: _save(root / f"new-{n}", 1, EACH),
        }
        samples = _in_turn(turns, rounds, f"a save after {saves} saves", "save", 4 * NUMEL)
        folded = statistics.median(_fold(root / "old").cpu_s for _ in range(rounds))
    note = f"a process that knows nothing folds the log in {number_text(folded)} s of CPU"
    return _result(samples, began, within, note)


def catalog(saves: int, rounds: int, *, within: Path) -> Result:
    """``latest`` of a run of so many live saves and of one of 1,000, by each of them."""
    began = tables.Began()
    with tempfile.TemporaryDirectory(prefix="ckptfs-catalog-", dir=within) as directory:
        root = Path(directory)
        for name, count in (("many", saves), ("few", FEW)):
            write_log(root / name, count, keeps=None)
            # A real one comes last: ``latest`` refuses one without its files.
            with CheckpointManager(str(root / name)) as manager:
                manager.save(count + 1, {"w": torch.zeros(NUMEL)})
        tables.say("catalog: the runs are made")
        turns: dict[str, Callable[[int], Spent]] = {
            OLD: lambda _: _latest(root / "many", saves, 3),
            NEW: lambda _: _latest(root / "few", FEW, 5),
        }
        name = f"latest of {saves} live saves, by each of them"
        samples = _in_turn(turns, rounds, name, "load_warm", 0)
    return _result(samples, began, within, f"the new run has {FEW} live saves")


def _fold(run: Path) -> Spent:
    return _spent(lambda: drive(catch_up(), LocalStorage(Uri.parse(str(run)))))


def _in_turn(
    turns: Mapping[str, Callable[[int], Spent]], rounds: int, name: str, phase: Phase, size: int
) -> list[Sample]:
    return [
        Sample(engine, name, PLACE, phase, number, spent.wall_s, spent.cpu_s, size)
        for number in range(rounds)
        for engine, turn in turns.items()
        for spent in [turn(number)]
    ]


def _result(samples: list[Sample], began: tables.Began, within: Path, note: str) -> Result:
    first = samples[0]
    return Result(
        what="what the age of a run costs",
        settings={"rounds": len(samples) // 2, "keep_latest": KEPT},
        workloads=(Workload(first.workload, 1, first.size_bytes),),
        targets=(Target(PLACE, filesystem(within)),),
        engines=tuple(Engine(name, "", *PROMISED) for name in (OLD, NEW)),
        samples=tuple(samples),
        notes=(note, "seconds of CPU are compared: look at their column"),
        **began.about(within, PACKAGES),
    )
