"""save and load of what is no dict: a module, an optimizer, and what is no state at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptfs


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that stepped once."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(obj: Any, uri: Path, how: str) -> None:
    """By either call."""
    if how == "save":
        ckptfs.save(obj, uri)
    else:
        ckptfs.async_save(obj, uri).result(60)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_module_is_a_state(tmp_path: Path, how: str) -> None:
    """It comes back into another module; a manager and stock torch read it, and it reads a manager's."""
    model, _ = trained(1)
    save(model, tmp_path / "run" / "step_1", how)
    mine, managed, stock = (trained(seed)[0] for seed in (2, 3, 4))
    ckptfs.load(mine, tmp_path / "run" / "step_1")  # type: ignore[arg-type]
    with ckptfs.CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(managed) is not None
        manager.save(2, model)
    there = {"state": stock.state_dict()}
    dcp.load(there, checkpoint_id=tmp_path / "run" / "step_1", no_dist=True)
    stock.load_state_dict(there["state"])
    for other in (mine, managed, stock):
        assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    back, _ = trained(5)
    ckptfs.load(back, tmp_path / "run" / "step_2")  # type: ignore[arg-type]
    assert torch.equal(back.weight, model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_an_optimizer_is_a_state(tmp_path: Path, how: str) -> None:
    """Its moments come back into one that has stepped."""
    _, optimizer = trained(1)
    _, other = trained(2)
    save(optimizer, tmp_path / "run" / "step_1", how)
    ckptfs.load(other, tmp_path / "run" / "step_1")  # type: ignore[arg-type]
    mine, theirs = (list(one.state.values()) for one in (optimizer, other))
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("given", [torch.ones(3), [torch.ones(3)], 3, None, torch.nn.Linear])
def test_what_is_no_state_is_told_in_a_sentence(tmp_path: Path, given: Any) -> None:
    """A tensor, a list, a number, a class: StateError names it and how to hand it over; nothing is made."""
    for call in (ckptfs.save, ckptfs.async_save, ckptfs.load):
        with pytest.raises(
            ckptfs.StateError, match=f"{type(given).__name__} is no state dict"
        ) as told:
            call(given, tmp_path / "run" / "step_1")
        assert '{"state": value}' in str(told.value)
    assert not (tmp_path / "run").exists()
