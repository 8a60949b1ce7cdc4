"""The fence's token, read by every rank, where a rank's node still has its absence in a cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.world import simulate
from ckptfs.uri import Uri


def test_a_rank_that_sees_the_fence_late_looks_again(tmp_path: Path) -> None:
    """The neighbour of a node's lead learns that the entry is missing, and the claim continues."""

    def take(control: Control) -> int:
        absent = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        faults = [Fault("read", ".ckptfs/log/*", 1, Fail(absent))] if control.rank == 3 else []
        plan = Plan(faults)
        storage = FaultyStorage(LocalStorage(Uri.parse(tmp_path / "run")), plan)
        with claim(start_session(control, storage, Place(), write=True)) as run:
            return run.generation[0]

    ends = simulate(4, take, nodes=["a", "a", "b", "b"])
    assert [end.error for end in ends] == [None] * 4
    assert [end.get() for end in ends] == [1] * 4
