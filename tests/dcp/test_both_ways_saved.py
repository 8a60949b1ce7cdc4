"""What ``save`` writes, a manager restores; what a manager saves, ``load`` loads: empty states too.

A manager saves the state of an object as one item, an empty one as well; ``save`` flattens all that is
a dict, and of an empty one nothing is left. The loader knows neither.
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
from ckptfs.dcp.read.load_planner import LoadPlanner
from ckptfs.errors import CollectiveError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Counter:
    """An object; its state is whatever dict it was given last."""

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
    """Everything that is empty somewhere, and an object with a state that is not."""
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
    """No empty state is missing, and none is one that is not asked for."""
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
    """A state that a manager saved as one item fills a fresh object with an empty state."""
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


def whole(state: dict[str, Any], run: Path) -> None:
    """A nest as one object, as torch's planner makes it where it must not flatten."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=ckptfs.StorageWriter(run / "step_1"), planner=planner)


@pytest.mark.parametrize("load", LOADS)
def test_tensors_are_filled_or_the_load_is_refused(load: Way, tmp_path: Path) -> None:
    """A dict of tensors that was saved as one object: in its place the model would keep its weights."""
    whole({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path)
    with pytest.raises((StateError, CollectiveError, CheckpointException), match=r"model\.weight"):
        load({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path)


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        ([0.1, 0.2], [torch.zeros(1), torch.zeros(1)]),
        ((1, 2), {"lr": 0.1, "sub": {"t": torch.zeros(2)}}),
        ((1, 2), {"lr": 0.1}),
        ((1, 2), {}),
        ((1, 2), [{}]),
    ],
)
@pytest.mark.parametrize("load", [by_load, by_planner])
def test_an_object_of_another_kind_takes_no_nest_s_place(
    load: Way, saved: Any, asked: Any, tmp_path: Path
) -> None:
    """A list of numbers is no list of tensors, and a tuple no dict."""
    dcp.save({"ema": saved}, checkpoint_id=str(tmp_path / "step_1"))
    with pytest.raises((StateError, CollectiveError, CheckpointException), match="ema"):
        load({"ema": asked}, tmp_path)


@pytest.mark.parametrize("load", [by_load, by_restore])
def test_an_object_gets_the_tensors_of_its_state(load: Way, tmp_path: Path) -> None:
    """A manager saves its state as one item; what is handed over need not be filled in place."""
    by_manager({"sched": Counter(ema=torch.ones(2))}, tmp_path)
    fresh = Counter(ema=torch.zeros(2))
    load({"sched": fresh}, tmp_path)
    assert fresh.state["ema"].tolist() == [1.0, 1.0]
