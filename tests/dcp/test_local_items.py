"""A rank's own plan is stock's, though tensors share what describes them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

import ckptfs
from ckptfs.dcp.planning.save_planner import Itemiser, SavePlanner
from ckptfs.dcp.planning.state_dicts import flat_to_save
from ckptfs.errors import StateError

values = st.recursive(
    st.none() | st.integers() | st.text(max_size=2) | st.just(torch.ones(1)) | st.just((1, "a")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab.", max_size=2) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("ab.", max_size=2), values, max_size=4))
def test_flattening_is_stocks(state: dict[str, Any]) -> None:
    """Nested dicts, lists with and without tensors, empty ones, keys that meet: the same, in order."""
    refused: ValueError | None = None
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        refused = error
    if refused is not None:
        with pytest.raises(ValueError, match="duplicated flatten key") as caught:
            flat_to_save(state)
        assert str(caught.value) == str(refused)
        return
    found = flat_to_save(state)
    assert found is not None
    assert list(found[0]) == list(flat)
    assert all(found[0][key] is flat[key] for key in flat)
    assert list(found[1].items()) == list(paths.items())


def test_tensors_that_differ_in_one_way_are_described_each() -> None:
    """The same shape, and another dtype, grad, memory order or class: items equal to stock's."""
    state: dict[str, Any] = {
        "plain": torch.ones(3, 3),
        "again": torch.zeros(3, 3),
        "double": torch.ones(3, 3, dtype=torch.float64),
        "grad": torch.ones(3, 3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(3, 3)),
        "transposed": torch.ones(3, 3).t(),
        "sparse": torch.ones(3, 3).to_sparse(),
        "meta": torch.ones(3, 3, device="meta"),
        "buffer": torch.nn.Buffer(torch.ones(3, 3)),
        "number": torch.tensor(1.0),
        "nothing": torch.empty(0, 3),
        "object": {"a": 1},
        "text": "a",
    }
    itemiser = Itemiser()
    assert itemiser.items(state) == create_default_local_save_plan(state, is_coordinator=True).items
    assert sorted(itemiser.reasons) == ["meta", "sparse"]


class Taught(torch.Tensor):
    """A tensor that makes its own items."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return create_default_local_save_plan({fqn: 5}, is_coordinator=False).items


def test_what_was_taught_its_own_way_keeps_it() -> None:
    """torch asks a class that knows its items; so do we."""
    state = {"t": torch.ones(2).as_subclass(Taught)}
    expected = create_default_local_save_plan(state, is_coordinator=True).items
    assert Itemiser().items(state) == expected


def test_only_what_cannot_be_loaded_is_named() -> None:
    """Of two tensors of one shape the one without data is refused, and by its key."""
    planner = SavePlanner()
    planner.set_up_planner({"a": torch.ones(2), "b": torch.ones(2, device="meta")})
    with pytest.raises(StateError, match="1 values could not be loaded again: 'b'"):
        planner.create_local_plan()


def test_a_write_item_is_made_by_its_names() -> None:
    """torch 2.6 has no ``bytes_io_data``: by place, the fourth argument is one too many there."""
    package = Path(ckptfs.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                by_place = len(call.args) if call.func.id == "WriteItem" else 0
                assert by_place <= 2, f"{path.name}:{call.lineno}"
