"""Workloads have the size that was asked for, and the same bytes every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.bench.workloads import (
    EVEN_SIZES,
    KINDS,
    NO_MODELS,
    DType,
    TensorSpec,
    WorkloadSpec,
    clear,
    differences,
    make_blank,
    make_state,
    make_workload,
    parse_params,
    rows_of,
)
from ckptfs.errors import StateError

MODELS = ("llm", "moe", "rl", "loop")


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MODELS), st.integers(10_000, 2_000_000_000))
def test_a_model_has_the_parameters_that_were_asked_for(kind: str, params: int) -> None:
    """Weights to 3 %, tiny ones to 15; of one of rl's three models; two fp32 moments of what is trained."""
    made = make_workload(kind, params=params)
    weights = [one for one in made.tensors if one.dtype is DType.BF16]
    models = 3 if kind == "rl" else 1
    assert sum(one.numel for one in weights) / models == pytest.approx(
        params, rel=0.03 if params >= 100_000 else 0.15
    )
    names = [one.name for one in made.tensors]
    assert len(set(names)) == len(names)
    trained = sum(one.numel for one in weights if not one.name.startswith("reference"))
    moments = [one for one in made.tensors if one.dtype is DType.FP32 and one.shape]
    assert sum(one.numel for one in moments) == 2 * trained


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(tuple(KINDS)), st.integers(2_300_000, 5_000_000_000))
def test_a_workload_has_the_bytes_that_were_asked_for(kind: str, size_bytes: int) -> None:
    """To 3 %, whatever it is made of."""
    size_bytes = min(size_bytes, 50_000_000) if kind in NO_MODELS else size_bytes
    found = make_workload(kind, size_bytes=size_bytes).size_bytes
    assert found == pytest.approx(size_bytes, rel=0.03)


@pytest.mark.parametrize(("kind", "size"), EVEN_SIZES.items())
def test_tensors_of_one_size(kind: str, size: int) -> None:
    """All but the last, which has what is left."""
    made = [one.size_bytes for one in make_workload(kind, size_bytes=5 * size + size // 2).tensors]
    assert made[:-1] == [size] * 5
    assert made[-1] == size // 2
    with pytest.raises(StateError, match=f"no tensor of {kind}"):
        make_workload(kind, size_bytes=999)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30))
def test_half_of_the_bytes_are_in_tensors_up_to_a_size(sizes: list[int]) -> None:
    """What a result says of a state: by that much at least, and by less without the tensors of that size."""
    made = WorkloadSpec(
        "x", tuple(TensorSpec(str(n), (size,), DType.BF16) for n, size in enumerate(sizes)), ""
    )
    least, half, largest = made.tensor_sizes_bytes
    assert (least, largest) == (2 * min(sizes), 2 * max(sizes))
    assert 2 * sum(2 * size for size in sizes if 2 * size <= half) >= made.size_bytes
    assert 2 * sum(2 * size for size in sizes if 2 * size < half) <= made.size_bytes


@settings(deadline=None, max_examples=20)
@given(st.integers(4096, 1_200_000_000))
def test_no_two_tensors_of_shapes_have_one_shape(size_bytes: int) -> None:
    """Also when all lengths have been used up, and for the last tensor, which is cut."""
    made = make_workload("shapes", size_bytes=size_bytes).tensors
    assert len({one.shape for one in made}) == len({one.name for one in made}) == len(made)
    assert all(4096 <= one.size_bytes <= 65_536 for one in made)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 12))
def test_shards_cover_every_row_once_and_are_those_of_torch(rows: int, ranks: int) -> None:
    """In order, without gaps, and as long as ``torch.chunk`` cuts them."""
    spec = TensorSpec("x", (rows, 3), DType.FP32)
    shards = [rows_of(spec, rank, ranks) for rank in range(ranks)]
    assert [row for first, after in shards for row in range(first, after)] == list(range(rows))
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    assert [b - a for a, b in shards if b > a] == chunks


@given(st.integers(1, 9))
def test_the_ranks_hold_the_workload_together(ranks: int) -> None:
    """Every byte once, but scalars, which are on every rank."""
    made = make_workload("llm", params=200_000)
    scalars = sum(one.size_bytes for one in made.tensors if not one.shape)
    held = sum(made.local_bytes(rank, ranks) for rank in range(ranks))
    assert held == made.size_bytes + scalars * (ranks - 1)


def test_the_same_workload_is_the_same_bytes() -> None:
    """Made twice, nothing differs; another rank's noise and an emptied state differ everywhere."""
    made = make_workload("llm", params=20_000)
    state = make_state(made)
    assert sum(one.nbytes for one in state.values()) == made.size_bytes
    assert differences(state, make_state(make_workload("llm", params=20_000))) == []
    other = make_state(make_workload("rl", params=20_000))
    assert set(differences(state, other)) == set(state)
    filled = make_state(made)
    clear(filled)
    assert differences(make_blank(made), filled) == []
    assert set(differences(state, filled)) == set(state)


def test_one_flipped_bit_is_a_difference() -> None:
    """Also where the numbers stay equal: -0.0 for 0.0."""
    made = make_workload("many", size_bytes=40_000)
    zeros, changed = make_blank(made), make_blank(made)
    changed["small.1"].view(-1)[7] = -0.0
    assert differences(zeros, changed) == ["small.1"]


@pytest.mark.parametrize(
    ("text", "value"), [("7B", 7 * 10**9), ("125M", 125 * 10**6), ("1.5b", 15 * 10**8)]
)
def test_parameters_are_read_as_people_write_them(text: str, value: int) -> None:
    """With a letter for thousands, in either case."""
    assert parse_params(text) == value


@pytest.mark.parametrize("text", ["", "B", "7Q", "-1M", "1e9", "5"])
def test_nonsense_is_no_number_of_parameters(text: str) -> None:
    """Nor are so few that no model can be made of them."""
    with pytest.raises(ValueError, match="param"):
        parse_params(text)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gpt", {}),
        ("many", {"params": 10**6}),
        ("shapes", {"params": 10**6}),
        ("shapes", {"size_bytes": 100}),
        ("shapes", {"size_bytes": 10**12}),
        ("llm", {"params": 5}),
        ("many", {"size_bytes": 100}),
        ("many", {"size_bytes": 10**12}),
        ("llm", {"params": 10**6, "size_bytes": 10**6}),
    ],
)
def test_what_cannot_be_made_is_refused(kind: str, told: dict[str, int]) -> None:
    """With a sentence that says what can."""
    with pytest.raises(StateError):
        make_workload(kind, **told)
