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
    """A tensor, a list, a number, a class: StateError names it and how to hand it over; nothing is saved."""
    run = tmp_path / "run"
    ckptfs.save({"w": torch.ones(1)}, run / "step_1")
    for call in (
        lambda: ckptfs.save(given, run / "step_2"),
        lambda: ckptfs.async_save(given, run / "step_2").result(),
        lambda: ckptfs.load(given, run / "step_1"),
    ):
        with pytest.raises(
            ckptfs.StateError, match=f"{type(given).__name__} is not a state dict"
        ) as told:
            call()
        assert '{"state": value}' in str(told.value)
    assert [one.step for one in ckptfs.list_checkpoints(run)] == [1]


def wrong_on_one_rank(rank: Rank) -> list[list[int]]:
    """Every way to hand over a wrong state, or a wrong word, by rank 1 alone."""
    rank.init_group()
    uri = f"{rank.args['run']}/step_1"
    good: Any = {"w": torch.ones(2)}
    ckptfs.save(good, uri, timeout_s=120)
    state: Any = [torch.ones(2)] if rank.number == 1 else good
    word = "al" if rank.number == 1 else "extra"
    found = []
    for call in (
        lambda: ckptfs.save(state, f"{uri}1", timeout_s=120),
        lambda: ckptfs.async_save(state, f"{uri}2", timeout_s=120).result(),
        lambda: ckptfs.load(state, uri, timeout_s=120),
        lambda: ckptfs.load(good, uri, allow=word, timeout_s=120),
    ):
        with pytest.raises(ckptfs.StateError) as told:
            call()
        assert isinstance(told.value, ckptfs.CollectiveError)
        found.append(sorted(told.value.failures))
    return found


def test_what_is_wrong_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """None waits for a rank that has not come."""
    with launch(wrong_on_one_rank, 2, args={"run": str(tmp_path / "run")}) as ranks:
        assert ranks.values() == [[[1]] * 4] * 2
