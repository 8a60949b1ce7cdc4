"""What refuses a save or load of a held run before it touches a file: the first reason in order, on all ranks."""

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
from ckptfs.errors import CommitConflictError, NoSpaceError, StateError, UriError
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


_ELSEWHERE = "s3:/misspelt/step_5"


def _with_targets(base: Path, targets: tuple[str, str], *, does_load: bool) -> list[End[Any]]:
    """Save or load in a held run, each of two ranks at a target of its own below ``base``."""
    root = base / "run"

    def live(control: Control) -> None:
        with claim(
            start_session(control, LocalStorage(Uri.parse(root)), Place(), write=True)
        ) as held:
            ckptfs.save({"w": torch.ones(1)}, root / "step_1", run=held)
            state = {"w": torch.zeros(1)}
            given: Any = targets[control.rank]
            given = given if given == _ELSEWHERE else base / given
            try:
                if does_load:
                    ckptfs.load(state, given, run=held)
                else:
                    ckptfs.save(state, given, run=held)
            finally:
                assert os.listdir(root / ".ckptfs" / "attempts") == []
                # All ranks are still in step: the next load is made.
                ckptfs.load(state, root / "step_1", run=held)
                assert state["w"][0] == 1

    return simulate(2, live)


@pytest.mark.parametrize("does_load", [False, True], ids=["save", "load"])
@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (("run/step_5", "run/step_6"), "different URIs: .*step_5 on rank 0, .*step_6 on rank 1"),
        (("run/step_5", "other/step_5"), "different URIs: .*run/step_5 on rank 0, .*other/"),
        (("run/step_5", _ELSEWHERE), "s3:/misspelt"),
        ((_ELSEWHERE, "run/step_5"), "s3:/misspelt"),
        ((_ELSEWHERE, _ELSEWHERE), "s3:/misspelt"),
    ],
    ids=["names", "runs", "one is unreadable", "the first is unreadable", "unreadable"],
)
def test_ranks_with_different_uris_all_hear_of_it(
    tmp_path: Path, targets: tuple[str, str], text: str, *, does_load: bool
) -> None:
    """UriError on every rank, also on one that was given a good one. Nothing was begun."""
    for end in _with_targets(tmp_path, targets, does_load=does_load):
        with pytest.raises(UriError, match=text):
            end.get()


def test_a_checkpoint_of_another_run_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """The URI is the same on all ranks, and not in the run that was passed."""
    for end in _with_targets(tmp_path, ("other/step_5", "other/step_5"), does_load=False):
        with pytest.raises(StateError, match="not directly in the run"):
            end.get()


def test_a_relative_path_is_made_absolute_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves and loads in a held run, and by itself: the ranks agree on it in a step of its own."""
    monkeypatch.chdir(tmp_path)

    def live(control: Control) -> float:
        session = start_session(control, LocalStorage(Uri.parse("run")), Place(), write=True)
        with claim(session) as held:
            ckptfs.save({"w": torch.ones(1)}, "run/step_1", run=held)
            state = {"w": torch.zeros(1)}
            ckptfs.load(state, "run/step_1", run=held)
            return float(state["w"][0])

    assert [end.get() for end in simulate(2, live)] == [1.0, 1.0]
    state = {"w": torch.zeros(1)}
    ckptfs.load(state, "run/step_1")
    assert state["w"][0] == 1
