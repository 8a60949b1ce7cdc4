"""What is refused before any file is made, what each rank keeps for itself, and what ranks agree on."""

from __future__ import annotations

import collections
import datetime as dt
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ckptfs.control.control import Control
from ckptfs.dcp.loading import plan_load, read
from ckptfs.dcp.planning.leaves import check_leaf, fingerprint_of, load_leaf, serialise_leaf
from ckptfs.dcp.planning.save_planner import SavePlanner
from ckptfs.dcp.planning.state_dicts import marked_key, unmarked_key
from ckptfs.dcp.write.pipeline import finish_save, write
from ckptfs.errors import CollectiveError, StateError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.world import simulate
from tests.dcp.fake_ranks import fake_rank, load, our_save, source
from tests.dcp.planned import plan_save
from tests.dcp.test_metadata import dtensor


def save_on(storage: Storage, size: int, build: Any, **options: Any) -> list[Any]:
    """plan, write, finish on simulated ranks, as ckptfs.save does; the ends of all ranks."""

    def body(control: Control) -> Any:
        planned = plan_save(build(control.rank), control, **options)
        control.step("dir", lambda: storage.make_dir("save-1"))
        parts = control.step("write", lambda: write(planned, storage, "save-1/", "save-1"))
        if control.rank == 0:
            extra = finish_save(planned, parts, save_id="save-1", checkpoint_id="here")
            raw = extra[".metadata"]
            assert isinstance(raw, bytes)  # one domain: one for all
            storage.replace(".metadata", raw)
        return planned

    return simulate(size, body)


def first_error(ends: list[Any]) -> BaseException:
    """The error that every rank raised; fails unless it is the same on all."""
    assert all(end.error is not None for end in ends)
    assert len({str(end.error) for end in ends}) == 1
    error: BaseException = ends[0].error
    return error


# -- ranks agree -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", lambda rank: rank),
        ("rng", lambda rank: torch.full((5,), float(rank))),
        ("shape", lambda rank: torch.ones(2 + rank)),
        ("kind", lambda rank: torch.ones(1) if rank else 1.0),
        ("large", lambda rank: torch.full((1 << 18,), float(rank))),
        ("nested", lambda rank: (1, {"a": [rank]})),
    ],
)
def test_a_value_that_differs_between_ranks_is_an_error(
    tmp_path: Path, key: str, value: Any
) -> None:
    """DCP would keep one rank's value; we name key and ranks, suggest per_rank=, make no file."""
    storage = open_storage(tmp_path)
    ends = save_on(storage, 3, lambda rank: {"same": 1, "d": {key: value(min(rank, 1))}})
    error = first_error(ends)
    assert isinstance(error, StateError)
    assert f"'d.{key}': ranks 0 and ranks 1-2 differ" in str(error)
    assert f"per_rank=['d.{key}']" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_other_dtypes_of_one_sharded_tensor_are_told(tmp_path: Path) -> None:
    """DCP takes the dtype of a sharded tensor from one rank; we compare it."""
    planners, plans = [], []
    for rank in range(2):
        with fake_rank(rank, 2):
            mesh = DeviceMesh("cpu", torch.arange(2))
            dtype = torch.float64 if rank else torch.float32
            planners.append(SavePlanner())
            value = dtensor(rank, torch.ones(4, dtype=dtype), mesh, [Shard(0)])
            planners[rank].set_up_planner({"w": value}, None, rank == 0)
            plans.append(planners[rank].create_local_plan())
    with pytest.raises(StateError, match="'w'"):
        planners[0].create_global_plan(plans)


leaves = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def _rebuilt(value: Any) -> Any:
    """An equal value that shares no object with the other, dicts in another order."""
    if isinstance(value, dict):
        return {_rebuilt(k): _rebuilt(v) for k, v in reversed(value.items())}
    if isinstance(value, (list, tuple)):
        return type(value)(_rebuilt(v) for v in value)
    return value.encode().decode() if isinstance(value, str) else value


@given(leaves, leaves)
def test_fingerprints_follow_values(one: Any, other: Any) -> None:
    """Equal values have equal fingerprints, however they are built; others have others."""
    assert fingerprint_of(one) == fingerprint_of(_rebuilt(one))
    if repr(one) != repr(other) and one != other:
        assert fingerprint_of(one) != fingerprint_of(other)


def test_equal_values_that_pickle_differently_are_equal() -> None:
    """Shared and unshared strings give different pickles and the same fingerprint."""
    word = str(b"word", "ascii")
    shared, apart = [word, word], [word, str(b"word", "ascii")]
    assert serialise_leaf(shared).getvalue() != serialise_leaf(apart).getvalue()
    assert fingerprint_of(shared) == fingerprint_of(apart)
    assert fingerprint_of({"a", "b"}) == fingerprint_of({"b", "a"})
    assert fingerprint_of(torch.arange(6).view(2, 3)) != fingerprint_of(torch.arange(6).view(3, 2))
    assert fingerprint_of(torch.arange(4.0)[::2]) == fingerprint_of(torch.tensor([0.0, 2.0]))


# -- what could not be loaded again ------------------------------------------------------------


class Opaque:
    """A class of the user's."""


@pytest.mark.parametrize(
    "leaf",
    [Opaque(), lambda: None, threading.Lock(), (1, [Opaque()]), [dt.date(2026, 1, 1), Opaque()]],
    ids=["object", "lambda", "lock", "nested", "beside a date"],
)
def test_a_leaf_that_would_execute_code_is_refused_by_key(tmp_path: Path, leaf: Any) -> None:
    """No load could take it: the key is named, on every rank, and no file is made."""
    error = first_error(save_on(open_storage(tmp_path), 2, lambda _: {"a": {"bad": leaf}, "b": 1}))
    assert isinstance(error, CollectiveError)
    assert error.all_are(StateError)
    assert "'a.bad'" in str(error.failures[0].message)
    assert list(tmp_path.iterdir()) == []


@given(leaves)
def test_plain_leaves_are_accepted_and_come_back(leaf: Any) -> None:
    """What is judged by its types alone does load."""
    if check_leaf(leaf) is None:
        back = load_leaf(serialise_leaf(leaf))
        assert fingerprint_of(back) == fingerprint_of(leaf)


@pytest.mark.parametrize(
    "leaf",
    [
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        {1, 2},
        2**3000,
        torch.Size([1, 2]),
        torch.float16,
        torch.device("cpu"),
        b"x" * 1000,
        1 + 2j,
        bytearray(b"x"),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_weights_only_loads_is_loaded(leaf: Any) -> None:
    """check_leaf and load_leaf say yes wherever torch.load(weights_only=True) does."""
    try:
        torch.load(serialise_leaf(leaf), weights_only=True)
    except pickle.UnpicklingError:
        assert leaf == 2**3000, "the one that torch refuses"
    assert check_leaf(leaf) is None
    assert load_leaf(serialise_leaf(leaf)) == leaf


def test_a_sharded_tensor_in_a_tuple_is_refused(tmp_path: Path) -> None:
    """DCP stores a tuple whole, with one rank's shard in it: the others would be lost."""

    def build(rank: int) -> dict[str, Any]:
        mesh = DeviceMesh("cpu", torch.arange(2))
        return {"tup": (dtensor(rank, torch.ones(4), mesh, [Shard(0)]), 1)}

    with pytest.raises(StateError, match=r"'tup'.*DTensor"):
        our_save(open_storage(tmp_path), 2, build)


def test_one_flat_key_for_two_values_is_refused() -> None:
    """'a.b' and a -> b flatten to one key."""
    with pytest.raises(StateError, match=r"a\.b"):
        SavePlanner().set_up_planner({"a": {"b": 1}, "a.b": 2})


# -- per_rank ----------------------------------------------------------------------------------


def _own(rank: int) -> dict[str, Any]:
    return {
        "loader": {"pos": rank, "rng": torch.full((2,), float(rank)), "list": [{"x": rank}]},
        "w": torch.ones(2),
    }


def _blank() -> dict[str, Any]:
    return {"loader": {"pos": -1, "rng": torch.zeros(2), "list": [{"x": -1}]}, "w": torch.zeros(2)}


def test_per_rank_keys_come_back_to_their_ranks(tmp_path: Path) -> None:
    """Each rank gets its own values again; what is common is stored once."""
    storage = open_storage(tmp_path)
    for end in save_on(storage, 3, _own, per_rank=["loader.*"]):
        end.get()
    seen = load(storage, 3, lambda _: _blank(), saved_world=3, view=repr)
    assert seen == [repr(_own(rank)) for rank in range(3)]


def test_per_rank_keys_are_refused_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Another world size: the keys are listed, before a byte is read; without them it loads."""
    storage = open_storage(tmp_path)
    save_on(storage, 3, _own, per_rank=["loader.*"])
    with pytest.raises(StateError, match=r"by 3 ranks, loaded by 2: 'loader\.list\.0\.x'"):
        load(storage, 2, lambda _: _blank(), saved_world=3)
    [seen] = load(
        storage, 1, lambda _: {"w": torch.zeros(2)}, saved_world=3, view=lambda s: s["w"].tolist()
    )
    assert seen == [1.0, 1.0]


def test_reserved_names_and_sharded_tensors_are_refused(tmp_path: Path) -> None:
    """Keys that look like ours are refused; so is keeping the parts of one tensor apart."""
    error = first_error(save_on(open_storage(tmp_path), 2, lambda _: {"a@rank1": {"x": 1}}))
    assert "'a@rank1.x'" in str(error)

    def build(rank: int) -> dict[str, Any]:
        return {"w": dtensor(rank, torch.ones(4), DeviceMesh("cpu", torch.arange(2)), [Shard(0)])}

    with pytest.raises(StateError, match="sharded tensors: 'w'"):
        our_save(open_storage(tmp_path), 2, build, per_rank=["w"])


@given(st.lists(st.text("ab.@rnk1", min_size=1, max_size=6), min_size=1, max_size=3))
def test_marks_can_be_taken_off_again(parts: list[str]) -> None:
    """unmark(mark(key)) == key for every key that has no mark already."""
    key = ".".join(parts)
    if unmarked_key(key) is None:
        marked, path = marked_key(key, tuple(parts), 12)
        assert ".".join(map(str, path)) == marked
        assert unmarked_key(marked) == (key, 12)


# -- the load's checks ---------------------------------------------------------------------------


def _load_on(storage: Storage, size: int, build: Any, **options: Any) -> list[Any]:
    from ckptfs.dcp.metadata.metadata_reader import decode_metadata

    def body(control: Control) -> Any:
        metadata = decode_metadata(storage.read(".metadata"), "here")
        state = build(control.rank)
        planned = plan_load(state, metadata, control, **options)
        read(planned, source(storage, rank=control.rank))
        return state, planned

    return simulate(size, body)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"w": torch.zeros(2), "b": 0, "more": 1}, "'more'"),
        ({"w": torch.zeros(3), "b": 0}, "shape (2,) saved, (3,) asked"),
        ({"w": torch.zeros(2, 1), "b": 0}, "shape (2,) saved, (2, 1) asked"),
        ({"w": torch.zeros(2).double(), "b": 0}, "float32 saved, torch.float64 asked"),
        ({"w": 1, "b": 0}, "has a tensor, the state dict an object"),
        ({"w": torch.zeros(2), "b": torch.zeros(1)}, "has an object, the state dict a tensor"),
        ({"w": torch.zeros(2)}, "no rank requests: 'b'"),
    ],
)
def test_what_does_not_fit_is_told_before_a_byte_is_read(
    tmp_path: Path, asked: dict[str, Any], told: str
) -> None:
    """Missing, unexpected, other shape, dtype or kind: a typed error on all ranks, data files gone."""
    storage = open_storage(tmp_path)
    save_on(storage, 2, lambda _: {"w": torch.ones(2), "b": 1})
    storage.remove_tree("save-1")  # so that reading a byte would be another error
    error = first_error(_load_on(storage, 2, lambda _: dict(asked)))
    said = str(error) + "".join(f.message for f in getattr(error, "failures", {}).values())
    assert told in said


def test_not_strict_skips_and_says_so(tmp_path: Path) -> None:
    """strict=False keeps what is missing, skips what is unexpected, and names both."""
    storage = open_storage(tmp_path)
    save_on(storage, 1, lambda _: {"w": torch.ones(2), "b": 1})
    [end] = _load_on(storage, 1, lambda _: {"w": torch.zeros(2), "new": 5}, strict=False)
    state, planned = end.get()
    assert (state["w"].tolist(), state["new"]) == ([1.0, 1.0], 5)
    assert (planned.missing_keys, planned.unexpected_keys) == (("new",), ("b",))


def test_ranks_may_ask_for_different_keys(tmp_path: Path) -> None:
    """Pipeline stages: each rank has its own keys, and strict means the union."""
    storage = open_storage(tmp_path)
    save_on(storage, 2, lambda rank: {f"stage{rank}": torch.full((2,), float(rank))})
    ends = _load_on(storage, 2, lambda rank: {f"stage{rank}": torch.zeros(2)})
    assert [end.get()[0][f"stage{end.rank}"].tolist() for end in ends] == [[0, 0], [1, 1]]


def test_replicated_tensors_are_written_once(tmp_path: Path) -> None:
    """Every rank has them, one writes each, and the work is shared."""
    storage = open_storage(tmp_path)
    ends = save_on(storage, 4, lambda _: {f"w{n}": torch.ones(1000) for n in range(8)})
    written = [len(end.get().items) for end in ends]
    assert written == [2, 2, 2, 2]
