"""A save to a name where stock torch, or a copy by hand, put a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.errors import CommitConflictError
from ckptfs.manager.manager import CheckpointManager


def value_of(uri: str) -> float:
    """What ckptfs loads from there."""
    state = {"w": torch.zeros(3)}
    ckptfs.load(state, uri)
    return float(state["w"][0])


def stock_value_of(path: Path) -> float:
    """What stock torch loads from there."""
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return float(state["w"][0])


def stock_save(path: Path, value: float) -> None:
    """As a program that does not know ckptfs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it overwrites
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=str(path), no_dist=True)


def managed(state: dict[str, torch.Tensor], run: Path) -> None:
    """A manager's save: it replaces what ckptfs saved, and nothing else."""
    with CheckpointManager(str(run)) as manager:
        manager.save(2, state)


def written(state: dict[str, torch.Tensor], run: Path) -> None:
    """A save by torch, with our writer."""
    writer = ckptfs.StorageWriter(f"{run}/step_2", if_exists="error")
    dcp.save(state, storage_writer=writer, no_dist=True)


SAVES: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "save": lambda state, run: ckptfs.save(state, f"{run}/step_2"),
    "writer": written,
    "manager": managed,
}


@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("has_log", [True, False])
def test_what_stock_torch_saved_is_not_replaced_unasked(
    tmp_path: Path, way: str, has_log: bool
) -> None:
    """if_exists="error", the default but of a StorageWriter: CommitConflictError, and the checkpoint of stock torch is whole."""
    run, state = tmp_path / "run", {"w": torch.ones(3)}
    if has_log:
        ckptfs.save(state, f"{run}/step_1")
    stock_save(run / "step_2", 2.0)
    with pytest.raises(BaseException, match="that ckptfs did not write"):  # torch wraps ours
        SAVES[way](state, run)
    assert stock_value_of(run / "step_2") == 2.0
    assert [path.name for path in (run / ".ckptfs" / "attempts").iterdir()] == []


@pytest.mark.parametrize("has_log", [True, False])
def test_what_stock_torch_saved_is_replaced_when_that_is_asked_for(
    tmp_path: Path, has_log: bool
) -> None:
    """if_exists="replace": both ckptfs and stock torch load the new tensors."""
    run, state = tmp_path / "run", {"w": torch.ones(3)}
    if has_log:
        ckptfs.save(state, f"{run}/step_1")
    stock_save(run / "step_2", 2.0)
    ckptfs.save(state, f"{run}/step_2", if_exists="replace")
    assert value_of(f"{run}/step_2") == 1.0
    assert stock_value_of(run / "step_2") == 1.0
    latest = ckptfs.latest(str(run))
    assert latest is not None
    assert latest.uri.name == "step_2"


def test_stock_torch_over_ours_is_replaced_by_the_next_save_that_replaces(tmp_path: Path) -> None:
    """A step that ckptfs and then stock torch saved: refused by default, replaced when asked."""
    run, state = tmp_path / "run", {"w": torch.ones(3)}
    ckptfs.save({"w": torch.full((3,), 5.0)}, f"{run}/step_1")
    stock_save(run / "step_1", 2.0)
    with pytest.raises(CommitConflictError):
        ckptfs.save(state, f"{run}/step_1")
    assert stock_value_of(run / "step_1") == 2.0
    ckptfs.save(state, f"{run}/step_1", if_exists="replace")
    assert value_of(f"{run}/step_1") == stock_value_of(run / "step_1") == 1.0
