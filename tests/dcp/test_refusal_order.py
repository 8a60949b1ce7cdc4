"""What refuses a save of a held run before it writes: the first reason in the order of its stages, on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.errors import CommitConflictError, NoSpaceError, StateError
from ckptfs.storage.base import Space
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.world import End, simulate
from ckptfs.uri import Uri


class _Tight(LocalStorage):
    """A disk on which a few bytes are free."""

    def space(self) -> Space:
        return Space(free_bytes=8, free_inodes=10**6)


class _NotSavable:
    """A module in the state: its own state is asked for, and refused on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 1:
            raise StateError("this rank has no state yet")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Part of what an object of a state has."""


def _saves(base: Path, *, is_tight: bool, is_refused: bool) -> list[End[Any]]:
    """Save under a name that is taken, on a disk that may be full, by ranks; one of them may refuse."""
    root = base / "run"

    def live(control: Control) -> None:
        kind = _Tight if is_tight else LocalStorage
        with claim(start_session(control, kind(Uri.parse(root)), Place(), write=True)) as held:
            ckptfs.save({"w": torch.zeros(1)}, root / "step_1", run=held)
            before = sorted(os.listdir(root / ".ckptfs" / "attempts"))
            state: dict[str, Any] = {"w": torch.zeros(64)}
            if is_refused:
                state["module"] = _NotSavable(control.rank)
            try:
                ckptfs.save(state, root / "step_1", run=held, require_space=True)
            finally:
                assert sorted(os.listdir(root / ".ckptfs" / "attempts")) == before
                # All ranks are still in step: the next save is made.
                ckptfs.save({"w": torch.zeros(1)}, root / "step_2", run=held)

    return simulate(2, live)


@pytest.mark.parametrize(
    ("is_tight", "is_refused", "error", "text"),
    [
        (True, True, StateError, "plan the save failed on 1 of 2 ranks: rank 1 .*no state yet"),
        (True, False, NoSpaceError, "256 bytes planned, 8 free"),
        (False, True, StateError, "plan the save failed on 1 of 2 ranks: rank 1 .*no state yet"),
        (False, False, CommitConflictError, "step_1"),
    ],
    ids=["plan before space", "space before name", "plan before name", "name"],
)
def test_the_first_reason_in_order_is_the_error_of_all_ranks(
    tmp_path: Path, *, is_tight: bool, is_refused: bool, error: type[Exception], text: str
) -> None:
    """A plan that a rank refuses, then a full disk, then a taken name. Nothing was begun."""
    for end in _saves(tmp_path, is_tight=is_tight, is_refused=is_refused):
        with pytest.raises(error, match=text):
            end.get()
