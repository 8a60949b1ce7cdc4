"""What may differ between a state dict and the checkpoint: a word for each, and stock's by one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.errors import CkptfsError, CollectiveError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# What is asked for -> the word that allows it.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "extra": {"a": torch.zeros(2)},
    "missing": {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)},
    "dtype": {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2)},
}
STOCK = ("extra", "dtype")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two tensors, as ``save`` writes them."""
    ckptfs.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "run" / "step_1")
    return tmp_path / "run" / "step_1"


def asked(difference: str) -> dict[str, Any]:
    """A state dict that differs in one way."""
    return {key: value.clone() for key, value in DIFFERENCES[difference].items()}


@pytest.mark.parametrize("how", ["load", "restore"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_word_allows_one_difference(difference: str, how: str, saved: Path) -> None:
    """By default none is allowed; the error names the word; the other words do not help."""

    def load(allow: Any, **more: Any) -> dict[str, Any]:
        state = asked(difference)
        if how == "load":
            ckptfs.load(state, saved, allow=allow, **more)
        else:
            with ckptfs.CheckpointManager(saved.parent) as manager:
                manager.restore(state, allow=allow, **more)
        return state

    others: Collection[str] = [word for word in DIFFERENCES if word != difference]
    for refused in ((), others):
        with pytest.raises(CkptfsError, match=f'allow="{difference}"'):
            load(refused)
    for allowed in (difference, [difference], list(DIFFERENCES)):
        assert load(allowed)["a"].tolist() == [1.0, 1.0]
    assert load((), strict=False)["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_stock_is_what_torch_allows(difference: str, saved: Path) -> None:
    """allow="stock" and dcp.load say yes and no to the same."""

    def ends(call: Any) -> bool:
        try:
            call()
        except (CkptfsError, dcp.CheckpointException):
            return False
        return True

    stock = ends(lambda: dcp.load(asked(difference), checkpoint_id=saved))
    assert ends(lambda: ckptfs.load(asked(difference), saved, allow="stock")) == stock
    reader = ckptfs.StorageReader(saved)
    assert ends(lambda: dcp.load(asked(difference), storage_reader=reader)) == stock
    assert stock == (difference in STOCK)


def test_a_word_that_is_none_lists_those_that_are(saved: Path) -> None:
    """Before anything is read."""
    with pytest.raises(CkptfsError, match=r'"extra", "missing", "dtype" or "stock"'):
        ckptfs.load({}, saved, allow="dtypes")


def test_what_was_allowed_is_named_in_the_result(saved: Path) -> None:
    """The keys that were left out, and those that keep their values."""
    result = ckptfs.load(asked("extra"), saved, allow="stock")
    assert result.unexpected_keys == ("b",)
    result = ckptfs.load(asked("missing"), saved, allow="missing")
    assert result.missing_keys == ("c",)


# -- never empty without a word --------------------------------------------------------------------


def trained(*, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after so many steps."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("how", [{"allow": "stock"}, {"strict": False}, {"allow": "extra"}, {}])
@pytest.mark.parametrize("shape", ["as such", "its state_dict()", "at the root", "in a nest"])
def test_a_fresh_optimizer_is_never_left_empty(
    shape: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever is allowed: by itself it asks for nothing, and would continue without its moments."""

    def state(optimizer: Any) -> dict[str, Any]:
        shapes: dict[str, Callable[[], dict[str, Any]]] = {
            "as such": lambda: {"optim": optimizer},
            "its state_dict()": lambda: {"optim": optimizer.state_dict()},
            "at the root": optimizer.state_dict,
            "in a nest": lambda: {"train": {"optim": optimizer.state_dict()}},
        }
        return shapes[shape]()

    ckptfs.save(state(trained(steps=1)[1]), tmp_path / "step_1")
    with pytest.raises((StateError, CollectiveError), match="without state"):
        ckptfs.load(state(trained(steps=0)[1]), tmp_path / "step_1", **how)
    ckptfs.load(state(trained(steps=2)[1]), tmp_path / "step_1", **how)


def test_torchs_load_tells_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """dcp.load leaves it empty, with every reader; ours says so."""
    dcp.save(
        {"optim": trained(steps=1)[1]}, storage_writer=ckptfs.StorageWriter(tmp_path / "step_1")
    )
    for steps, told in ((0, 1), (1, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ckptfs"):
            reader = ckptfs.StorageReader(tmp_path / "step_1")
            dcp.load({"optim": trained(steps=steps)[1]}, storage_reader=reader)
        messages = [one for one in caplog.messages if "no state before its first step" in one]
        assert len(messages) == told
        assert all("'optim'" in one for one in messages)


def test_an_optimizer_without_parameters_here_is_not_meant(tmp_path: Path) -> None:
    """A pipeline stage; another rank has all its parameters."""
    ckptfs.save({"optim": trained(steps=1)[1]}, tmp_path / "step_1")
    none = {"state": {}, "param_groups": [{"lr": 0.0, "params": []}]}
    ckptfs.load({"optim": none}, tmp_path / "step_1", allow="stock")


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    """On the meta device it would take what was loaded, and keep nothing of it."""
    ckptfs.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "step_1")
    with pytest.raises(CkptfsError, match=r"model.*meta device.*to_empty"):
        ckptfs.load({"model": torch.nn.Linear(2, 2, device="meta")}, tmp_path / "step_1")


def test_a_buffer_that_is_not_saved_needs_no_memory(tmp_path: Path) -> None:
    """Nothing is loaded into it, so that nothing gets lost; parameters next to it still need theirs."""
    rotary = torch.nn.Module()
    rotary.register_buffer("inv", torch.zeros(2, device="meta"), persistent=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), rotary)
    saved = torch.nn.Linear(2, 2)
    ckptfs.save({"model": torch.nn.Sequential(saved)}, tmp_path / "step_1")
    ckptfs.load({"model": model}, tmp_path / "step_1")
    assert torch.equal(model.state_dict()["0.weight"], saved.weight)
    rotary.register_buffer("mean", torch.zeros(2, device="meta"))
    with pytest.raises(CkptfsError, match=r"'1.mean' is on the meta device"):
        ckptfs.load({"model": model}, tmp_path / "step_1")


def test_a_module_alone_needs_memory_too(tmp_path: Path) -> None:
    """load(module, uri) is as load({"state": module}, uri)."""
    ckptfs.save(torch.nn.Linear(2, 2), tmp_path / "step_1")
    with pytest.raises(CkptfsError, match=r"'weight' is on the meta device"):
        ckptfs.load(torch.nn.Linear(2, 2, device="meta"), tmp_path / "step_1")


def test_an_object_in_a_nest_is_never_passed_over(tmp_path: Path) -> None:
    """Only objects at the top level are asked for their state: missing keys are no word for that."""
    model = torch.nn.Linear(2, 2)
    ckptfs.save({"a": {"model": model.state_dict()}, "b": 1}, tmp_path / "step_1")
    with pytest.raises(CkptfsError, match=r"'a.model'.*inside another container"):
        ckptfs.load(
            {"a": {"model": torch.nn.Linear(2, 2)}, "b": 0}, tmp_path / "step_1", strict=False
        )
