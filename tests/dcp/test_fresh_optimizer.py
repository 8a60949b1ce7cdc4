"""An optimizer that made no step yet is never left empty without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckptfs
from ckptfs.errors import StateError
from ckptfs.manager.manager import CheckpointManager


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer before the first step."""
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint after one step."""
    model, optimizer = fresh()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ckptfs.save(state, str(tmp_path / "step_1"))
    return str(tmp_path / "step_1")


def test_the_error_names_the_optimizer_and_how_to_hand_it_over(saved: str) -> None:
    """Its own state_dict() asks for no state: the hint names both ways that load it."""
    model, optimizer = fresh()
    with pytest.raises(StateError) as caught:
        ckptfs.load({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    text = str(caught.value)
    assert "'optimizer' is an optimizer without state" in text
    assert "get_state_dict(model, optimizer)" in text
    assert "CheckpointManager.restore" in text
    assert "leave the optimizer out" in text


def test_the_manager_loads_it(saved: str) -> None:
    """The second way of the hint."""
    model, optimizer = fresh()
    with CheckpointManager(saved.rpartition("/")[0]) as manager:
        assert manager.restore({"model": model, "optimizer": optimizer}) is not None
    assert [float(one["step"]) for one in optimizer.state.values()] == [1.0, 1.0]


def test_torch_asks_for_its_state(tmp_path: Path) -> None:
    """The first way of the hint, saved and loaded."""
    model, optimizer = fresh()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    ckptfs.save({"model": weights, "optimizer": moments}, str(tmp_path / "step_1"))
    model, optimizer = fresh()
    weights, moments = get_state_dict(model, optimizer)
    ckptfs.load({"model": weights, "optimizer": moments}, str(tmp_path / "step_1"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert [float(one["step"]) for one in optimizer.state.values()] == [1.0, 1.0]


def test_other_keys_have_the_plain_hint(tmp_path: Path) -> None:
    """A module that is called "state" is no optimizer."""
    ckptfs.save({"a.state.w": torch.ones(1), "b": torch.ones(1)}, str(tmp_path / "step_1"))
    with pytest.raises(StateError, match='allow="extra" leaves them out'):
        ckptfs.load({"b": torch.zeros(1)}, str(tmp_path / "step_1"))
