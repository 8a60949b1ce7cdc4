"""What a save costs in an old run, and what ``latest`` costs in one that deletes nothing.

python -m benchmarks.history [--saves 20000] [--live 20000] [--repeat 5] [--record]

history   a run that keeps three of so many saves: processor time of a save there, beside one in a new run
catalog   a run with so many live saves: processor time of ``latest`` for each of them, beside a run of 1,000

The old runs are made by writing their logs, entry by entry as a manager would have, without the tensors of
saves that are gone. Old and new are measured in turn, in one process each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ckptfs
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

RESULTS = Path(__file__).parent / "results" / f"history-{datetime.now(UTC):%Y-%m-%d}.json"
KEPT = 3
BASE = Generation(1, "made")
DOMAIN = "0123456789abcdef0123456789abcdef"


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
        # Of the snapshots only the last ones are made: nobody reads the others, and together they are GBs.
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


def save_cpu_s(run: Path, first: int, count: int) -> float:
    """Processor time of one save: the median of so many, after a few that warm up."""
    state = {"w": torch.arange(1000.0)}
    took = []
    with CheckpointManager(str(run), keep_latest=KEPT) as manager:
        for n in range(first, first + count + 5):
            gc.collect()
            began = time.process_time()
            manager.save(n, state)
            took.append(time.process_time() - began)
    return statistics.median(took[5:])


def latest_cpu_s(run: Path, count: int) -> float:
    """Processor time of one ``latest``: the least of a few."""
    took = []
    for _ in range(count):
        gc.collect()
        began = time.process_time()
        assert ckptfs.latest(str(run)) is not None
        took.append(time.process_time() - began)
    return min(took)


def cold_cpu_s(run: Path) -> float:
    """Processor time in which a process that knows nothing folds the log."""
    gc.collect()
    began = time.process_time()
    drive(catch_up(), LocalStorage(Uri.parse(str(run))))
    return time.process_time() - began


def in_turn(repeat: int, old: Callable[[int], float], new: Callable[[int], float]) -> list[float]:
    """The ratios of old and new, measured one after the other."""
    return [old(n) / new(n) for n in range(repeat)]


def said(what: str) -> None:
    """A line for whoever waits."""
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    """Measures, prints, and writes the result where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=20_000)
    parser.add_argument("--live", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_log(root / "old", options.saves, keeps=KEPT)
        write_log(root / "many", options.live, keeps=None)
        write_log(root / "few", 1_000, keeps=None)
        said("the old runs are made")
        history = in_turn(
            options.repeat,
            lambda n: save_cpu_s(root / "old", options.saves + 1 + 40 * n, 30),
            lambda n: save_cpu_s(root / f"new-{n}", 1, 30),
        )
        said(f"history: {history}")
        catalog = in_turn(
            options.repeat,
            lambda _: latest_cpu_s(root / "many", 3) / options.live,
            lambda _: latest_cpu_s(root / "few", 5) / 1_000,
        )
        folded = [cold_cpu_s(root / "old") for _ in range(options.repeat)]
    result = {
        "command": f"python -m benchmarks.history {' '.join(sys.argv[1:])}".strip(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}",
        "saves": options.saves,
        "live": options.live,
        "history": {"ratio": statistics.median(history), "of": sorted(history), "limit": 1.3},
        "cold_fold_cpu_s": {"median": statistics.median(folded), "of": sorted(folded)},
        "catalog": {"ratio": statistics.median(catalog), "of": sorted(catalog), "limit": 2.0},
    }
    print(json.dumps(result, indent=2))
    if options.record:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
