"""save and load of what is no dict: a module, an optimizer, and what is no state at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import ckptfs
from tests.multiprocess.harness import Rank, launch


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
    ckptfs.load(mine, tmp_path / "run" / "step_1")
    with ckptfs.CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(managed) is not None
        manager.save(2, model)
    there = {"state": stock.state_dict()}
    dcp.load(there, checkpoint_id=tmp_path / "run" / "step_1", no_dist=True)
    stock.load_state_dict(there["state"])
    for other in (mine, managed, stock):
        assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    back, _ = trained(5)
    ckptfs.load(back, tmp_path / "run" / "step_2")
    assert torch.equal(back.weight, model.weight)  # type: ignore[arg-type]


def wrapped(rank: Rank) -> list[str]:
    """A module under DistributedDataParallel: saved, and loaded with and without the wrapper."""
    rank.init_group()
    uri = Path(rank.args["run"])
    plain, _ = trained(1)
    model = DistributedDataParallel(plain)
    ckptfs.save(model, uri / "step_1")
    other, _ = trained(2)
    ckptfs.load(other, uri / "step_1")
    assert torch.equal(other.weight, plain.weight)  # type: ignore[arg-type]
    with ckptfs.CheckpointManager(uri) as manager:
        manager.save(2, model)
    again, _ = trained(3)
    ckptfs.load(DistributedDataParallel(again), uri / "step_2")
    assert torch.equal(again.weight, plain.weight)  # type: ignore[arg-type]
    steps = (dcp.FileSystemReader(uri / f"step_{n}").read_metadata() for n in (1, 2))
    first, second = (sorted(step.state_dict_metadata) for step in steps)
    assert first == second
    return first


def test_wrappers_leave_no_names(tmp_path: Path) -> None:
    """A module alone has the keys that a manager gives it, whatever wraps it: DDP here, torch.compile."""
    with launch(wrapped, 2, args={"run": str(tmp_path / "run")}) as ranks:
        assert ranks.values() == [["state.bias", "state.weight"]] * 2
    model, _ = trained(4)
    compiled: Any = torch.compile(model)
    ckptfs.load(compiled, tmp_path / "run" / "step_1")
    assert torch.equal(model.weight, trained(1)[0].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_an_optimizer_is_a_state(tmp_path: Path, how: str) -> None:
    """Its moments come back into one that has stepped."""
    _, optimizer = trained(1)
    _, other = trained(2)
    save(optimizer, tmp_path / "run" / "step_1", how)
    ckptfs.load(other, tmp_path / "run" / "step_1")
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
