"""One checkpoint copied to another URI, by hand: node-local shards gathered, a step put aside.

ckptfs.gather("/local/nvme/run/step_100", "s3://bucket/kept/step_100")

which    both logs folded: which save it is, which id it gets     coordinator
copy     dcp/copying.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.catalog import live_of, part_of, read_view
from ckptfs.commit.fold import LogState
from ckptfs.commit.locate import reading_seat
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat
from ckptfs.commit.ops import drive
from ckptfs.commit.pieces import split_name
from ckptfs.commit.seat import Seat
from ckptfs.dcp.copying import copy_checkpoint
from ckptfs.errors import NotFoundError
from ckptfs.events import SaveResult
from ckptfs.manager.copy_plan import One, fresh_id
from ckptfs.uri import Uri, options_of

__all__ = ["gather"]

View = tuple[str, LogState]


def gather(
    source: Any,
    target: Any,
    *,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> SaveResult:
    """Collective. Copy a committed checkpoint to another URI; committed and durable when it returns.

    source: run and name (and part), the same on all ranks; on node-local disks a rank of every node that holds
    a part takes part, and each file is read by one of them. target: run and name; one that is
    committed is CommitConflictError. storage_options: of the source; target_options: of the target.
    Every block is compared with its digest; the source is only read, and nobody may delete it
    meanwhile.

    NotFoundError: the source's log knows no such checkpoint. IncompleteCheckpointError: some of it is
    on nodes that do not take part, and on which. What single ranks meet is a CollectiveError on all:
    IntegrityError where the source is damaged. After an error or a crash the target is as it was.
    """
    with control_for(process_group, timeout_s) as control:
        at, to = agree_uri(control, source), agree_uri(control, target)
        here = Place({**options_of(source), **(storage_options or {})})
        there = Place({**options_of(target), **(target_options or {})})
        with (
            reading_seat(at, control, here) as (reading, name),
            open_seat(to.parent, control, there, write=True) as writing,
        ):
            one = control.step(
                "which to copy",
                lambda: _look(reading, writing),
                lambda all_: _choose(all_, name, at),
            )
            return copy_checkpoint(
                reading, one.seal, writing, name=to.name, save_id=one.save_id, shows=True
            )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank sees of both logs; None where another rank looks."""

    source: View | None
    target: View | None


def _look(reading: Seat, writing: Seat) -> _Seen:
    return _Seen(
        drive(read_view(), reading.storage) if reading.placement.is_node_lead else None,
        drive(read_view(), writing.storage) if writing.placement.is_owner else None,
    )


def _choose(seen: Sequence[_Seen], name: str, at: Uri) -> One:
    views = dict(s.source for s in seen if s.source is not None)
    step, part = split_name(name)
    whole = live_of(step, views, at)
    if whole is None:
        raise NotFoundError(
            "no committed checkpoint there that a log knows",
            uri=at,
            hint="see list_checkpoints() of its parent; ckptfs cp copies what has no log too",
        )
    seal, _ = part_of(whole, part, at)
    return One(seal, fresh_id(seal.save_id, dict(s.target for s in seen if s.target is not None)))
