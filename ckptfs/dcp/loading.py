"""One load on an open seat: what ``load`` and the manager's ``restore`` have in common.

    metadata  plan (checks)  read and verify  hand over to stateful objects     -> LoadResult

Collective on the seat's control; reads only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog import Found
from ckptfs.commit.opening import step_of
from ckptfs.commit.seat import Seat, naming
from ckptfs.dcp.datafile import Source, Verify
from ckptfs.dcp.inventory import Inventory, Whole
from ckptfs.dcp.load_pipeline import (
    PlannedLoad,
    plan_load,
    read,
    refuse_meta,
    restore_stateful,
)
from ckptfs.dcp.load_planner import Allow
from ckptfs.dcp.opened import inventory_of, source_of, who_holds
from ckptfs.dcp.share import stateful_keys, unwrap_stateful
from ckptfs.errors import IncompleteCheckpointError
from ckptfs.events import Counters, LoadResult
from ckptfs.progress import progress
from ckptfs.uri import Uri

__all__ = ["Loadable", "load_at", "load_into"]


@dataclass(frozen=True, slots=True)
class Loadable:
    """What a rank loads into. state_dict: nested dicts and lists of tensors, filled in place, and of
    objects, replaced. hand_over: gives what was loaded to its owners, when all ranks have read.
    """

    state_dict: dict[str, Any]
    hand_over: Callable[[], None]


def load_at(
    state_dict: dict[str, Any],
    seat: Seat,
    target: Uri,
    found: Found,
    *,
    strict: bool = True,
    allow: Allow = (),
    objects: Literal["load", "refuse"] = "load",
    verify: Literal["read", "off"] = "read",
    started: float | None = None,
) -> LoadResult:
    """Collective. Load the checkpoint that ``locate`` found into ``state_dict``, in place.

    started: ``time.perf_counter()`` at the user's call. Errors are as for ``ckptfs.load``.
    """
    started = time.perf_counter() if started is None else started
    held: list[Inventory] = []
    seat.control.step("metadata", lambda: held.append(inventory_of(seat.storage, found)))
    flat: dict[str, Any] = {}
    handed_over: set[str] = set()

    def unwrapped() -> dict[str, Any]:
        refuse_meta(state_dict)
        handed_over.update(map(str, stateful_keys(state_dict)))
        flat.update(unwrap_stateful(state_dict))
        return flat

    been_read = _plan_and_read(
        unwrapped,
        held.pop(),
        seat,
        target,
        found,
        strict=strict,
        allow=allow,
        objects=objects,
        handed_over=handed_over,
        verify=Verify(verify),
    )
    loadable = Loadable(flat, lambda: restore_stateful(state_dict, flat))
    return _hand_over(loadable, been_read, seat, target, found, started)


def load_into(
    loadable: Loadable,
    metadata: Metadata,
    seat: Seat,
    target: Uri,
    found: Found,
    *,
    strict: bool = True,
    allow: Allow = (),
    objects: Literal["load", "refuse"] = "load",
    verify: Literal["read", "off"] = "read",
    started: float,
) -> LoadResult:
    """Collective. Load the checkpoint whose ``metadata`` was read into ``loadable``.

    Nobody's ``hand_over`` runs before every rank has read all of its part. Errors are as for
    ``ckptfs.load``.
    """
    been_read = _plan_and_read(
        loadable.state_dict,
        Whole(metadata),
        seat,
        target,
        found,
        strict=strict,
        allow=allow,
        objects=objects,
        verify=Verify(verify),
    )
    return _hand_over(loadable, been_read, seat, target, found, started)


@dataclass(frozen=True, slots=True)
class _BeenRead:
    """What is left of a plan when every rank has read its part."""

    per_rank: tuple[Counters, ...]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    verified: bool


def _plan_and_read(
    state_dict: dict[str, Any] | Callable[[], dict[str, Any]],
    inventory: Inventory,
    seat: Seat,
    target: Uri,
    found: Found,
    *,
    strict: bool,
    allow: Allow,
    objects: Literal["load", "refuse"],
    verify: Verify,
    handed_over: Collection[str] = (),
) -> _BeenRead:
    control, manifest = seat.control, found.manifest
    planned = plan_load(
        state_dict,
        inventory,
        control,
        strict=strict,
        allow=allow,
        objects=objects,
        handed_over=handed_over,
        saved_world=None if manifest is None else manifest.world_size,
    )
    source = source_of(seat.storage, found, verify, control.rank, control.size)
    with naming(target):
        per_rank = control.step("read", lambda: _read(planned, source, found, f"loading {target}"))
    return _BeenRead(
        tuple(per_rank),
        planned.missing_keys,
        planned.unexpected_keys,
        verify is Verify.READ and manifest is not None,
    )


def _hand_over(  # noqa: PLR0917 - what was read, for whom, and of what
    loadable: Loadable,
    been_read: _BeenRead,
    seat: Seat,
    target: Uri,
    found: Found,
    started: float,
) -> LoadResult:
    control, manifest, per_rank = seat.control, found.manifest, been_read.per_rank
    # A step of its own: what one object refuses must not leave the other ranks training.
    control.step("hand over", loadable.hand_over)
    return LoadResult(
        uri=str(target),
        step=step_of(target.name, None) if manifest is None else manifest.step,
        save_id=None if manifest is None else manifest.save_id,
        mine=per_rank[control.rank],
        total=Counters.together(per_rank),
        per_rank=per_rank,
        wall_s=time.perf_counter() - started,
        verified=been_read.verified,
        missing_keys=been_read.missing_keys,
        unexpected_keys=been_read.unexpected_keys,
    )


def _read(planned: PlannedLoad, source: Source, found: Found, title: str) -> Counters:
    try:
        with progress(title, rank=source.rank or 0) as meter:
            return read(planned, source, meter)
    except IncompleteCheckpointError as error:
        error.hint = who_holds(error.uri or "", found) or error.hint
        raise
