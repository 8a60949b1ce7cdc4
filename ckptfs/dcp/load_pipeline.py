"""A load as a handful of functions, each local or one collective step.

    unwrap_stateful  ->  plan_load (step)  ->  read (local)  ->  restore_stateful

Every rank makes its own plan from the metadata; what travels are the keys that it asks for, so that all
know of one that nobody wants. ``ckptfs.load`` finds the checkpoint before, and tells of it after.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.datafile import Source
from ckptfs.dcp.fetch import fetch_reads
from ckptfs.dcp.inventory import Inventory, Renamed, Whole
from ckptfs.dcp.load_planner import Asked, LoadPlanner, unexpected_keys
from ckptfs.dcp.per_rank import listed, own_keys
from ckptfs.dcp.reads import Read
from ckptfs.errors import StateError
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter
from ckptfs.topology.control import Control

__all__ = ["PlannedLoad", "plan_load", "read", "restore_stateful"]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load that all ranks agreed on; nothing was read but metadata. reads: what this rank reads."""

    reads: tuple[Read, ...]
    planner: LoadPlanner
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    plan_s: float


def plan_load(
    state_dict: dict[str, Any],
    metadata: Metadata | Inventory,
    control: Control,
    *,
    strict: bool = True,
    saved_world: int | None = None,
    weights_only: bool = True,
) -> PlannedLoad:
    """Collective. Who reads what, with every check that needs no data. No tensor is changed
    (but those on the meta device get memory).

    state_dict: already ``unwrap_stateful``. saved_world: ranks that saved it (the manifest's
    world_size). On every rank the same CollectiveError of StateErrors, or StateError for keys that
    nobody asks for (strict).
    """
    started = time.perf_counter()
    inventory = Whole(metadata) if isinstance(metadata, Metadata) else metadata
    planner = LoadPlanner(strict=strict, weights_only=weights_only)
    held: list[list[Read]] = []

    def local() -> Asked:
        planner.set_up_planner(state_dict, is_coordinator=control.rank == 0)
        with gc_paused():
            mine = own_keys(
                inventory.keys, control.rank, control.size, saved_world, planner.state_dict.keys()
            )
            held.append(planner.create_reads(Renamed(inventory, mine) if mine else inventory))
            return Asked.of(inventory.keys, planner.state_dict.keys())

    def decide(asked: list[Asked]) -> tuple[str, ...]:
        unexpected = unexpected_keys(inventory.keys, asked)
        if unexpected and strict:
            raise StateError(
                f"the checkpoint has keys that no rank asks for: {listed(unexpected)}",
                hint="strict=False skips them",
            )
        return unexpected

    unexpected = control.step("plan the load", local, decide)
    return PlannedLoad(
        tuple(held[0]), planner, planner.missing, unexpected, time.perf_counter() - started
    )


def read(planned: PlannedLoad, source: Source, meter: Meter = SILENT) -> Counters:
    """Local. Read this rank's part into its tensors, verified as ``source.verify`` says.

    IntegrityError, IncompleteCheckpointError: named by file, key and rank; the tensors are then
    undefined.
    """
    planner = planned.planner
    counters = fetch_reads(
        source, planned.reads, lambda read, stream: planner.load_object(read.key, stream), meter
    )
    return dataclasses.replace(counters, plan_s=planned.plan_s)


def restore_stateful(state_dict: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put what was loaded into ``unwrap_stateful``'s copy back where it came from. Local."""
    for key in list(state_dict):  # and no tuples of items: 20,000 of them wake the collector
        value = state_dict[key]
        # Asking whether something is Stateful takes longer than loading a small tensor.
        if not isinstance(value, torch.Tensor) and isinstance(value, Stateful):
            value.load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]
