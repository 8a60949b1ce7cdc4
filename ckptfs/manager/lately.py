"""How long the last save of a run took, as its log tells: for a warning, at the start of a job.

A save_id begins with the time at which the coordinator began it, and the seal's entry carries the time
at which it was appended; both for people, to the second. Nothing but a warning may depend on it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from ckptfs.commit.entries import decode_entry
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import log_key
from ckptfs.commit.ops import read_limited
from ckptfs.errors import CkptfsError
from ckptfs.storage.base import Storage

__all__ = ["between_s", "last_save_s"]


def last_save_s(state: LogState, storage: Storage) -> float | None:
    """Seconds from the beginning of the last save to its seal in this log; None: cannot be told.

    Local, one read, appends nothing. What a job saved that has not sealed anything is not seen.
    """
    sealed = [(save.sealed_at, save.save_id) for save in state.saves.living.values() if save.seal]
    at, save_id = max(((at, name) for at, name in sealed if at is not None), default=(-1, ""))
    if at < 0:
        return None
    try:
        entry = decode_entry(read_limited(storage, log_key(at)), log_key(at))
    except CkptfsError:
        return None  # no save fails for a warning; whoever needs that entry reads it again
    return between_s(save_id, entry.stamp.at)


def between_s(save_id: str, sealed: str) -> float | None:
    """Seconds from the time in a save_id to that of a stamp; None for others, or for clocks that
    disagree. Pure.
    """
    try:
        began = datetime.strptime(save_id.partition("-")[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
        ended = datetime.strptime(sealed, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    spent_s = (ended - began).total_seconds()
    return spent_s if spent_s >= 0 else None
