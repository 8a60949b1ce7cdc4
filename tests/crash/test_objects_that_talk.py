"""Objects in a state with a ``state_dict`` and ``load_state_dict`` that talk to the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.errors import CollectiveError
from tests.crash.one_rank import HERE, Ground, Stage

RUN = "rank+file:///site/run"


class Board:
    """Where two ranks meet, by name; a rank that meets no other gets BrokenBarrierError."""

    def __init__(self) -> None:
        self._barriers: dict[str, threading.Barrier] = {}
        self._lock = threading.Lock()

    def meet(self, name: str) -> None:
        """Return when the other rank is here under the same name."""
        with self._lock:
            barrier = self._barriers.setdefault(name, threading.Barrier(2, timeout=120))
        barrier.wait()


class Talker:
    """An object that meets its twin on the other rank whenever its state is taken or given."""

    def __init__(self, name: str, board: Board) -> None:
        self.name, self._board = name, board
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        self._board.meet(f"{self.name} gives")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._board.meet(f"{self.name} takes")
        self.value = state["value"]


def _states(rank: int, board: Board, *, nested: bool) -> tuple[dict[str, Any], list[Talker]]:
    """The same objects in another order on each rank."""
    names = ["a", "b", "c"] if rank == 0 else ["c", "b", "a"]
    talkers = {name: Talker(name, board) for name in names}
    for name, talker in talkers.items():
        talker.value = ord(name)
    flat: dict[str, Any] = {**talkers, "weight": torch.ones(4)}
    return ({"deep": flat, "last": flat.pop("a")} if nested else flat), [*talkers.values()]


def _plain(state: dict[str, Any]) -> None:
    ckptfs.save(state, f"{RUN}/step_2")


def _loads(state: dict[str, Any]) -> None:
    ckptfs.load(state, f"{RUN}/step_2")


def _managed(state: dict[str, Any]) -> None:
    with ckptfs.CheckpointManager(RUN) as manager:
        manager.save(3, state)


def _restores(state: dict[str, Any]) -> None:
    with ckptfs.CheckpointManager(RUN) as manager:
        manager.restore(state)


@pytest.mark.parametrize(
    ("save", "load", "nested"),
    [(_plain, _loads, False), (_managed, _restores, False), (_managed, _restores, True)],
    ids=["save and load", "manager", "manager, nested"],
)
def test_objects_are_called_in_one_order_on_every_rank(
    tmp_path: Path,
    save: Callable[[dict[str, Any]], None],
    load: Callable[[dict[str, Any]], None],
    nested: bool,
) -> None:
    """Ranks that hold the same objects in another order save and load them, though each waits for its
    twin.
    """
    stage, board = Stage(tmp_path, Ground("ab")), Board()

    def work(rank: int) -> list[int]:
        state, _ = _states(rank, board, nested=nested)
        save(state)
        state, talkers = _states(rank, board, nested=nested)
        for talker in talkers:
            talker.value = 0
        load(state)
        return sorted(talker.value for talker in talkers)

    for end in stage.run(work, {}):
        assert end.get() == [97, 98, 99]


def test_a_state_that_one_rank_cannot_give_ends_the_load_of_all(tmp_path: Path) -> None:
    """In a held run, where no rank leaves, too: all get the error of the user's object and its rank."""

    class Broken(Talker):
        def state_dict(self) -> dict[str, Any]:
            if HERE.control is not None and HERE.control.rank == 1:
                raise RuntimeError("no state here")
            return {}

    def work(rank: int) -> object:
        with ckptfs.prepare_run(RUN) as run:
            state = {"x": Broken("x", Board()), "weight": torch.ones(8)}
            return ckptfs.load(state, f"{RUN}/step_1", run=run, strict=False)

    for end in Stage(tmp_path, Ground("ab")).run(work, {}):
        with pytest.raises(CollectiveError, match=r"rank 1 .*no state here"):
            end.get()
