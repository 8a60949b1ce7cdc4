"""What ``save`` writes, a manager restores; what a manager saves, ``load`` loads: empty states too.

A manager saves the state of an object as one item, an empty one as well; ``save`` flattens all that is
a dict, and of an empty one nothing is left. Whoever loads knows neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptfs
from ckptfs.dcp.load_planner import LoadPlanner
from ckptfs.errors import CollectiveError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Counter:
    """An object whose state is whatever dict it was given last."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)
        self.loads += 1


def by_save(state: dict[str, Any], run: Path) -> None:
    """ckptfs.save."""
    ckptfs.save(state, run / "step_1")


def by_manager(state: dict[str, Any], run: Path) -> None:
    """manager.save."""
    with ckptfs.CheckpointManager(run) as manager:
        manager.save(1, state)


def by_load(state: dict[str, Any], run: Path) -> None:
    """ckptfs.load."""
    ckptfs.load(state, run / "step_1")


def by_restore(state: dict[str, Any], run: Path) -> None:
    """manager.restore."""
    with ckptfs.CheckpointManager(run) as manager:
        assert manager.restore(state) is not None


def by_planner(state: dict[str, Any], run: Path) -> None:
    """torch's dcp.load, with our planner in it."""
    reader = ckptfs.StorageReader(run / "step_1")
    dcp.load(state, storage_reader=reader, planner=LoadPlanner())


Way = Callable[[dict[str, Any], Path], None]
SAVES: list[Way] = [by_save, by_manager]
LOADS: list[Way] = [by_load, by_restore, by_planner]


def states(*, fresh: bool) -> dict[str, Any]:
    """Everything that is empty somewhere, and an object whose state is not."""
    value = 0.0 if fresh else 3.0
    return {
        "w": torch.full((2,), value),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "nothing": Counter(),
        "plain": {},
        "in a list": [{}, {"t": torch.full((1,), value)}],
        "nest": {"void": {}, "voids": [{}], "deep": {"er": {}}, "n": value},
        "module": torch.nn.Identity(),
        "sched": Counter(last_epoch=value, lrs=[value], inner={}),
    }


def values_of(state: dict[str, Any]) -> Any:
    """What can be compared."""
    return [
        state["w"].tolist(),
        state["plain"],
        [{k: v.tolist() for k, v in one.items()} for one in state["in a list"]],
        state["nest"],
        state["nothing"].state,
        state["sched"].state,
    ]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_empty_states_go_both_ways(save: Way, load: Way, tmp_path: Path) -> None:
    """Nobody's empty state is missing, and none is one that nobody asks for."""
    saved = states(fresh=False)
    save(saved, tmp_path)
    found = states(fresh=True)
    load(found, tmp_path)
    expected = values_of(saved)
    if save is by_save:
        # A dict that is empty within an object's state is not there: it is dropped, as by torch.
        expected[-1].pop("inner")
        found["sched"].state.pop("inner", None)
    assert values_of(found) == expected
    assert (found["nothing"].loads, found["sched"].loads) == (1, 1)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_a_state_that_is_not_empty_is_still_missed(save: Way, load: Way, tmp_path: Path) -> None:
    """An object that has a state, and was not saved, is an error; so is a dict with values."""
    save({"w": torch.ones(2)}, tmp_path)
    for more in ({"sched": Counter(last_epoch=1)}, {"plain": {"n": 1}}):
        with pytest.raises(
            (StateError, CollectiveError, CheckpointException), match="not in the checkpoint"
        ):
            load({"w": torch.zeros(2), **more}, tmp_path)


@pytest.mark.parametrize("load", [by_load, by_restore])
def test_what_was_saved_is_loaded_into_a_dict_that_is_empty_now(load: Way, tmp_path: Path) -> None:
    """A state that a manager saved as one item fills a fresh object, whose own state is empty."""
    by_manager({"w": torch.ones(2), "sched": Counter(last_epoch=4)}, tmp_path)
    fresh = Counter()
    load({"w": torch.zeros(2), "sched": fresh}, tmp_path)
    assert fresh.state == {"last_epoch": 4}


def test_an_optimizer_without_moments_goes_both_ways(tmp_path: Path) -> None:
    """Plain SGD keeps no state: that dict is empty on every day."""

    def pair() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.5)}

    saved = pair()
    by_manager(saved, tmp_path / "a")
    by_save(saved, tmp_path / "b")
    found = pair()
    found["optim"].param_groups[0]["lr"] = 0.0
    by_load(found, tmp_path / "a")
    assert found["optim"].param_groups[0]["lr"] == 0.5
    assert torch.equal(found["model"].weight, saved["model"].weight)
    found = pair()
    by_restore(found, tmp_path / "b")
    assert torch.equal(found["model"].weight, saved["model"].weight)
