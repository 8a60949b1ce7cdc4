"""The text of a saved value is the start of its repr, and no more of it is made than is shown."""

from __future__ import annotations

import tracemalloc
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.tools.inspecting import _TEXT, _start_of_repr

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=150)
    | st.binary(max_size=40)
)
KEYS = (
    st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.frozensets(st.integers())
)
VALUES = st.recursive(
    ATOMS | KEYS | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(KEYS, inner),
    max_leaves=40,
)


@given(VALUES)
def test_the_start_is_that_of_repr(value: Any) -> None:
    """Whole where it is short; of a longer one at least what is shown."""
    text = _start_of_repr(value)
    if len(repr(value)) <= _TEXT:
        assert text == repr(value)
    else:
        assert len(text) > _TEXT
        assert text[:_TEXT] == repr(value)[:_TEXT]


def test_what_is_shared_is_not_written_out() -> None:
    """Forty lists of each twice the one before would be a TB of text."""
    empties: list[Any] = [[], {}, (), ""]
    for empty in empties:
        value: Any = empty
        for _ in range(40):
            value = {1: value, 2: value} if isinstance(empty, dict) else [value, value]
        tracemalloc.start()
        try:
            assert len(_start_of_repr([torch.ones(2), value])) > _TEXT
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000


def test_a_list_that_holds_itself_ends() -> None:
    """As deep as there is room for."""
    value: list[Any] = []
    value.append(value)
    assert _start_of_repr(value).startswith("[[[")
