"""One save on an open seat: what ``save``, ``async_save`` and the manager have in common.

    plan (checks, who writes what)  space  begin  write  seal  project     -> SaveResult

Collective on the seat's control, and on nothing else: it runs as well on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import SaveSpec, SmallFile, WrittenPart
from ckptfs.dcp.pipeline import finish_save, plan_save, write
from ckptfs.dcp.space import check_space
from ckptfs.events import Counters, Event, SaveResult, Written
from ckptfs.uri import Uri

__all__ = ["WriteOptions", "save_at"]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a rank writes its part; equal on all ranks.

    threads: data files written at once by each rank. require_space: NoSpaceError before a byte is
    written where it cannot fit; otherwise a warning.
    """

    threads: int = 1
    require_space: bool = False


def save_at(
    state_dict: Mapping[str, Any],
    seat: Seat,
    target: Uri,
    spec: SaveSpec,
    options: WriteOptions = WriteOptions(),
    *,
    started: float | None = None,
    tell: Callable[[Event], None] = lambda _: None,
) -> SaveResult:
    """Collective. Save a state dict as ``target``, directly in the run that the seat is at.

    started: ``time.perf_counter()`` at the user's call. tell: hears of Written. Errors and what a crash leaves are as for
    ``ckptfs.save``.
    """
    started = time.perf_counter() if started is None else started
    control = seat.control
    domains = {d.id: d.ranks for d in seat.placement.domains}
    planned = plan_save(
        state_dict, control, per_rank=spec.per_rank, domains=tuple(domains.values())
    )
    warnings = check_space(seat, planned, options.threads, required=options.require_space)
    attempt = Attempt(seat, spec)

    def write_mine() -> WrittenPart:
        part = write(
            planned,
            seat.storage,
            attempt.prefix,
            attempt.save_id,
            domain=seat.placement.mine.id,
            threads=options.threads,
        )
        tell(Written(str(target), spec.step or 0, part.counters))
        return part

    def finish(parts: list[WrittenPart]) -> Mapping[str, SmallFile]:
        return finish_save(
            planned, parts, save_id=attempt.save_id, checkpoint_id=str(target), domains=domains
        )

    try:
        attempt.begin()
        committed = attempt.commit(write_mine, finish)
    except BaseException:
        attempt.abandon()
        raise
    per_rank = tuple(c.plus(Counters(commit_s=committed.commit_s)) for c in committed.counters)
    return SaveResult(
        uri=str(target),
        step=spec.step,
        save_id=committed.save_id,
        mine=per_rank[control.rank],
        total=Counters.together(per_rank),
        per_rank=per_rank,
        wall_s=time.perf_counter() - started,
        warnings=(*warnings, *committed.warnings),
    )
