"""A rank that saves in the background and then leaves the interpreter; runs on the clients of the lab."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from pathlib import Path

import ckptfs
from ckptfs.errors import CkptfsError
from tests.nfs.ranks import SIZE_BYTES, JobRank, join, state_of

__all__ = ["Left", "leaves"]


@dataclass(frozen=True)
class Left:
    """What the caller of an asynchronous save got."""

    error: str
    text: str


def leaves(job_rank: JobRank, uri: str, mark: str) -> Left:
    """Save aside, wait, and end as a script does; the last thing that the interpreter does makes ``mark``."""
    atexit.register(Path(mark).touch)  # the first to come is the last to go
    os.environ["CKPTFS_EXIT_S"] = "1"
    join(job_rank)
    state = state_of(job_rank.rank, 1, SIZE_BYTES)
    pending = ckptfs.async_save(state, uri, per_rank=["mine"], timeout_s=job_rank.timeout_s)
    try:
        pending.result()
    except CkptfsError as error:
        return Left(type(error).__name__, str(error))
    return Left("", "")
