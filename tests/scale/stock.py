"""What torch.distributed.checkpoint does for the same save, counted: its own planner and writer run here.

    cost = run_stock(Sizes(ranks=64), directory)
    cost.calls                 {"mkdir": 64, "stat": 128, "create": 65, "sync": 65, "rename": 1}
    cost.sent_bytes            by collective: what is gathered, scattered and broadcast

Rank after rank in one process: what a rank asks of storage does not depend on the collectives between
the phases, and their sizes are those of the pickles that torch would send. tests/scale/test_stock.py
compares the counts with the system calls of real ranks under strace.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from tests.scale.simulation import Shard, Sizes

__all__ = ["StockCost", "run_stock"]


@dataclass(frozen=True, slots=True)
class StockCost:
    """calls: to the kernel, on names. sent_bytes: what each collective carries over all ranks."""

    calls: dict[str, int]
    sent_bytes: dict[str, int]


class _Planner(DefaultSavePlanner):
    """Stock's planner, given what each rank has instead of a state dict."""

    def __init__(self, share: Shard) -> None:
        super().__init__()
        self._share = share

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._share.resolve(write_item)


def run_stock(sizes: Sizes, directory: Path) -> StockCost:
    """Save once into ``directory``/step_1, which must not exist; its parent must."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    share = Shard(sizes)
    writers = [FileSystemWriter(directory / "step_1") for _ in range(sizes.ranks)]
    with _counted(calls, str(directory)):
        plans = []
        for rank, writer in enumerate(writers):
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(_plain(share.plan(rank))))
        sent["gather of plans"] = sum(len(pickle.dumps(plan)) for plan in plans[1:])
        planner = _Planner(share)
        chosen, metadata = planner.create_global_plan(plans)
        chosen = writers[0].prepare_global_plan(chosen)
        sent["scatter of plans"] = sum(len(pickle.dumps(plan)) for plan in chosen[1:])
        results = []
        for writer, plan in zip(writers, chosen, strict=True):
            results.append(writer.write_data(plan, planner).wait())
        sent["gather of results"] = sum(len(pickle.dumps(one)) for one in results[1:])
        writers[0].finish(metadata, results)
    sent["broadcast of metadata"] = (sizes.ranks - 1) * len(pickle.dumps(metadata))
    return StockCost({op: n for op, n in sorted(calls.items()) if n}, dict(sent))


def _plain(plan: SavePlan) -> SavePlan:
    """As stock's planner makes it: what it knows of paths instead of our facts."""
    facts: Any = plan.planner_data
    return SavePlan(plan.items, planner_data=dict(facts.mappings))


@contextmanager
def _counted(calls: Counter[str], below: str) -> Iterator[None]:
    """Count what goes through ``os`` and ``io.open`` below a directory; fsync is counted and left out."""
    opens = io.open

    def counting(name: str, real: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += str(path).startswith(below)
            return real(path, *args, **kwargs)

        return call

    def creating(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        calls["create" if "w" in mode else "open"] += str(path).startswith(below)
        return opens(path, mode, *args, **kwargs)

    def syncing(_: int) -> None:
        calls["sync"] += 1

    with (
        patch.object(os, "mkdir", counting("mkdir", os.mkdir)),
        patch.object(os, "stat", counting("stat", os.stat)),
        patch.object(os, "rename", counting("rename", os.rename)),
        patch.object(os, "unlink", counting("unlink", os.unlink)),
        patch.object(os, "fsync", syncing),
        patch.object(io, "open", creating),
    ):
        yield
