"""One checkpoint of a copy: under the id that an interrupted try had, whole or not at all.

commit_copy       find it, begin or go on, copy, seal      None: another copy of the same came first
gone_meanwhile    whether the source's retention was faster
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import replace

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.catalog import read_view, unlogged
from ckptfs.commit.claim import claim
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import catch_up
from ckptfs.commit.ops import drive
from ckptfs.commit.protocol import Standing, catalog, name_taken, standing
from ckptfs.commit.resuming import AGAIN, KeptAttempt, next_id, origin_of
from ckptfs.commit.run import Caller
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import Committed
from ckptfs.dcp.copy_source import find_held
from ckptfs.dcp.copying import Manner, copy_files, spec_of
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    ControlPlaneLostError,
    DeadlineError,
    IncompleteCheckpointError,
    NotFoundError,
    StaleError,
)
from ckptfs.tools.copy_plan import Item, Status

__all__ = ["commit_copy", "gone_meanwhile"]

View = tuple[str, LogState]


def commit_copy(reading: Seat, writing: Seat, item: Item, manner: Manner) -> Committed | None:
    """Collective. One checkpoint; None: another copy of the same came first."""
    held = find_held(reading, item.original)
    save_id = _id_of(writing, item)
    with contextlib.ExitStack() as stack:
        seat, generation = writing, None
        if item.status is Status.TO_REPLACE:
            run = stack.enter_context(
                claim(writing, keep=(save_id,), caller=Caller("cp", for_call=True))
            )
            seat, generation = run.seat, run.generation
        spec = spec_of(held, item.original.seal, item.name, generation, save_id)
        # Disks of several nodes have no one place that tells what an earlier try brought.
        single = len(seat.placement.domains) == 1
        attempt = KeptAttempt(seat, spec) if single else Attempt(seat, spec)
        try:
            return copy_files(reading, held, attempt, replace(manner, kept=single))
        except (ControlPlaneLostError, DeadlineError):
            raise
        except CkptfsError as error:
            if _came_first(writing, item):
                return None
            lost = isinstance(error, CommitConflictError) or gone_meanwhile(reading, item, error)
            if lost and isinstance(attempt, KeptAttempt):
                attempt.give_up()
            raise


def _id_of(writing: Seat, item: Item) -> str:
    """Collective. The id of the copy, that of an interrupted try if there is one."""
    if len(writing.placement.domains) > 1:
        fresh = f"{item.origin}{AGAIN}{secrets.token_hex(4)}"
        return writing.control.step("copy id", lambda: None, lambda _: fresh)
    held = item.status is Status.TO_REPLACE

    def decide(_: Sequence[None]) -> str:
        state = drive(catch_up(), writing.storage)
        program = next_id(item.origin, item.name, writing.caps.shape, state, held=held)
        return drive(program, writing.storage)

    return writing.control.step("copy id", lambda: None, decide)


def _came_first(writing: Seat, item: Item) -> bool:
    """Collective. Whether another process committed the same copy meanwhile."""

    def look() -> View | None:
        return drive(read_view(), writing.storage) if writing.placement.is_owner else None

    def decide(seen: Sequence[View | None]) -> bool:
        taken = name_taken(item.name, dict(s for s in seen if s is not None))
        return taken is not None and origin_of(taken.save_id) == item.origin

    return writing.control.step("who came first", look, decide)


_MISSING = (NotFoundError, IncompleteCheckpointError, StaleError)


def gone_meanwhile(reading: Seat, item: Item, error: CkptfsError) -> bool:
    """Collective, after the same error on all ranks. Whether it says that files are missing, and the
    source no longer has this save: deleted or replaced, or not to be found where no log tells.
    """
    failed = isinstance(error, CollectiveError) and any(
        CollectiveError("", failures={rank: failure}).all_are(kind)
        for rank, failure in error.failures.items()
        for kind in _MISSING
    )
    if not failed and not isinstance(error, _MISSING):
        return False

    def look() -> View | None:
        return drive(read_view(), reading.storage) if reading.placement.is_node_lead else None

    def decide(seen: Sequence[View | None]) -> bool:
        views = dict(s for s in seen if s is not None)
        seal = item.original.seal
        if seal is None:
            try:
                drive(unlogged(item.original.name, views, reading.storage.root), reading.storage)
            except NotFoundError:
                return True
            return False
        live = {one.seal.save_id for one in catalog(views)}
        ended = (Standing.COMMITTED, Standing.DELETED)
        return seal.save_id not in live and standing(seal.save_id, views) in ended

    return reading.control.step("what is left of the source", look, decide)
