"""A load as a handful of functions, each local or one collective step.

    plan_load (step)  ->  read (local)  ->  restore_stateful

Every rank makes its own plan from the metadata; what travels are the keys that it asks for, so that all
know of one that nobody wants. ``ckptfs.load`` finds the checkpoint before, and tells of it after.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs import _torch
from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.datafile import Source
from ckptfs.dcp.fetch import fetch_reads
from ckptfs.dcp.inventory import Inventory, Renamed, Whole
from ckptfs.dcp.load_planner import (
    OPTIMIZER_HINT,
    Allow,
    Allowed,
    Asked,
    LoadPlanner,
    unexpected_keys,
)
from ckptfs.dcp.per_rank import listed, own_keys
from ckptfs.dcp.reads import Read
from ckptfs.dcp.share import module_of, stateful_keys
from ckptfs.errors import StateError
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter
from ckptfs.topology.control import Control

__all__ = ["PlannedLoad", "plan_load", "read", "refuse_meta", "restore_stateful"]

_OPTIMIZER_STATE = re.compile(r"(.+?\.)?state\.[^.]")


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load that all ranks agreed on; nothing was read but metadata. reads: what this rank reads."""

    reads: tuple[Read, ...]
    planner: LoadPlanner
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    plan_s: float


def plan_load(
    state_dict: dict[str, Any] | Callable[[], dict[str, Any]],
    metadata: Metadata | Inventory,
    control: Control,
    *,
    strict: bool = True,
    allow: Allow = (),
    saved_world: int | None = None,
    weights_only: bool = True,
    objects: Literal["load", "refuse"] = "load",
    handed_over: Collection[str] = (),
) -> PlannedLoad:
    """Collective. Who reads what, with every check that needs no data. No tensor is changed
    (but those on the meta device get memory).

    state_dict: already ``unwrap_stateful``, or what makes one of it: called within the step, because a
    user's ``state_dict()`` may fail on one rank, or talk to all others. saved_world: ranks that saved it (the manifest's
    world_size). On every rank the same CollectiveError of StateErrors, or StateError for keys that
    nobody asks for. strict, allow, objects: as for ``ckptfs.load``. handed_over: top-level keys of objects
    that get what was loaded; known when ``state_dict`` was called.
    """
    started = time.perf_counter()
    inventory = Whole(metadata) if isinstance(metadata, Metadata) else metadata
    planners: list[LoadPlanner] = []
    held: list[list[Read]] = []

    def local() -> Asked:
        flat = state_dict() if callable(state_dict) else state_dict
        # Here, because the words that it is given may be wrong on one rank alone.
        planner = LoadPlanner(
            strict=strict, allow=allow, weights_only=weights_only, objects=objects
        )
        planners.append(planner)
        planner.handed_over = handed_over
        planner.set_up_planner(flat, is_coordinator=control.rank == 0)
        with gc_paused():
            mine = own_keys(
                inventory.keys, control.rank, control.size, saved_world, planner.state_dict.keys()
            )
            seen = Renamed(inventory, mine) if mine else inventory
            held.append(planner.create_reads(seen))
            if planner.allowed:
                planner.refuse_empty(seen)
            return Asked.of(inventory.keys, planner.state_dict.keys())

    def decide(asked: list[Asked]) -> tuple[str, ...]:
        unexpected = unexpected_keys(inventory.keys, asked)
        if unexpected and Allowed.EXTRA not in planners[0].allowed:
            raise StateError(
                f"the checkpoint has keys that no rank asks for: {listed(unexpected)}",
                hint=_hint_for(unexpected, inventory.keys),
            )
        return unexpected

    unexpected = control.step("plan the load", local, decide)
    planner = planners[0]
    return PlannedLoad(
        tuple(held[0]), planner, planner.missing, unexpected, time.perf_counter() - started
    )


def _hint_for(unexpected: Sequence[str], saved: Collection[str]) -> str:
    """What to do about keys that nobody asks for. An optimizer has no state before its first step: what
    it says of itself then asks for none.
    """
    names = {at[1] or "" for key in unexpected if (at := _OPTIMIZER_STATE.match(key))}
    empty = sorted(
        name.removesuffix(".") or "the state dict"
        for name in names
        if any(key.startswith(f"{name}param_groups") for key in saved)
    )
    if not empty:
        return 'allow="extra" leaves them out'
    return f"{empty[0]!r} is an optimizer without state: {OPTIMIZER_HINT}"


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


def refuse_meta(state_dict: Mapping[str, Any]) -> None:
    """StateError for a module that has no memory: it would take what was loaded, and keep nothing."""
    for key in stateful_keys(state_dict):
        module = module_of(state_dict[key])
        if module is None:
            continue
        unsaved = {
            f"{path}.{name}".lstrip(".")
            for path, inner in module.named_modules()
            for name in _torch.unsaved_buffers(inner)
        }
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if name not in unsaved and not _torch.is_sharded_tensor(value) and value.is_meta:
                raise StateError(
                    f"{key}: {name!r} is on the meta device",
                    hint="give the module memory first: module.to_empty(device=...)",
                )


def restore_stateful(state_dict: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put what was loaded into ``unwrap_stateful``'s copy back where it came from. Local.

    Objects last, in sorted order of their keys, because they may talk to other ranks meanwhile.
    """
    objects = stateful_keys(state_dict)
    theirs = frozenset(objects)
    for key in list(state_dict):  # and no tuples of items: 20,000 of them wake the collector
        if key not in theirs:
            state_dict[key] = loaded[key]
    for key in objects:
        state_dict[key].load_state_dict(loaded[key])
