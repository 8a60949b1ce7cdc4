"""What ranks say of their plans: compact, compared, sent once, and never trusted."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptfs.control.control import Control, SoloControl
from ckptfs.dcp.metadata.metadata_writer import Described
from ckptfs.dcp.planning.columns import Packer, Unpacker, prints_of, structure_of
from ckptfs.dcp.planning.save_planner import refuse_divergence, shard_fingerprint
from ckptfs.dcp.planning.state_dicts import LocalFacts
from ckptfs.dcp.write.pipeline import PlanMemory, PlanMessage, decide
from ckptfs.errors import CkptfsError, StateError
from ckptfs.testing.world import simulate
from tests.dcp.planned import plan_save
from tests.dcp.random_worlds import shard_item, worlds
from tests.scale.simulation import Shard, Sizes

unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


def _facts(plan: SavePlan, prints: dict[str, int]) -> SavePlan:
    return dataclasses.replace(plan, planner_data=LocalFacts(plan.planner_data, prints))


def _whole(plans: list[SavePlan]) -> list[bytes]:
    return [PlanMessage.of(plan).whole for plan in plans]


# -- values ------------------------------------------------------------------------------------


@unhurried
@given(worlds(most_ranks=5), st.data())
def test_values_that_differ_are_told_as_before(plans: list[SavePlan], data: Any) -> None:
    """Random fingerprints: an error exactly where comparing key by key finds one, in its words."""
    all_prints = []
    for n, plan in enumerate(plans):
        prints = {}
        for item in plan.items:
            if item.tensor_data is not None and item.type is WriteItemType.SHARD:
                size = item.tensor_data.size
                prints[item.index.fqn] = shard_fingerprint(item.tensor_data.properties.dtype, size)
            else:
                prints[item.index.fqn] = data.draw(st.sampled_from([7, 7, 7, 2**64 - 1]))
        plans[n] = _facts(plan, prints)
        all_prints.append(prints)
    differing: StateError | None = None
    try:
        refuse_divergence(all_prints)
    except StateError as error:
        differing = error
    if differing is None:
        assert isinstance(decide(_whole(plans), PlanMemory()), Described)
        return
    with pytest.raises(StateError) as caught:
        decide(_whole(plans), PlanMemory())
    assert sorted(str(caught.value)) == sorted(str(differing))  # keys in another order


@pytest.mark.parametrize("other", [(4, torch.float64), (5, torch.float32)], ids=["dtype", "size"])
def test_shards_of_different_tensors_are_told(other: tuple[int, torch.dtype]) -> None:
    """DCP takes dtype and size from one rank; they are compared without being sent."""
    one = SavePlan([shard_item("w", [0], [2], [4])], planner_data={"w": ("w",)})
    two = SavePlan([shard_item("w", [2], [2], [other[0]], other[1])], planner_data={"w": ("w",)})
    received = _whole([_facts(one, {"w": 1}), _facts(two, {"w": 2})])
    with pytest.raises(StateError, match="'w': ranks 0 and ranks 1 differ"):
        decide(received, PlanMemory())


# -- the memory --------------------------------------------------------------------------------


class Spying:
    """A control that counts what its rank says."""

    def __init__(self, control: Control, received: list[tuple[str, int]]) -> None:
        self._control = control
        self._said = received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def step(self, label: str, local: Any, decide: Any = None) -> Any:
        def told() -> Any:
            value = local()
            self._said.append((label, len(value)))
            return value

        return self._control.step(label, told, decide)


def _planned(state: Any, memories: list[PlanMemory], **options: Any) -> list[Any]:
    """On each rank: bytes said in each step, keys that it writes, and the metadata of rank 0."""

    def body(control: Control) -> Any:
        received: list[tuple[str, int]] = []
        planned = plan_save(
            state(control.rank),
            Spying(control, received),
            memory=memories[control.rank],
            **options,
        )
        keys = [item.index.fqn for item in planned.items]
        described = planned.described and planned.described.world.metadata()
        return [size for _, size in received], keys, described

    return [end.get() for end in simulate(len(memories), body)]


def _state(rank: int, **changed: Any) -> dict[str, Any]:
    tensors = {f"layers.{n}.weight": torch.ones(4, 3) for n in range(200)}
    return {"model": tensors, "step": 5, "lr": [0.1, 0.2]} | changed


def test_the_second_save_sends_hashes_and_values() -> None:
    """The same structure: no key travels again, the decision is the same one."""
    memories = [PlanMemory(), PlanMemory()]
    first = _planned(_state, memories)
    kept = memories[0].decision
    assert kept is not None
    second = _planned(_state, memories)
    assert memories[0].decision is not None
    assert memories[0].decision.described is kept.described
    for (before, keys, described), (after, *rest) in zip(first, second, strict=True):
        assert rest == [keys, described]
        assert after[0] < before[0] / 2
        assert after[0] <= 202 * 10 + 64


def test_values_are_compared_in_every_save() -> None:
    """Equal in the first save, different in the second: an error, though the plans are known."""
    memories = [PlanMemory(), PlanMemory()]
    _planned(_state, memories)
    with pytest.raises(StateError, match="'step': ranks 0 and ranks 1 differ"):
        _planned(lambda rank: _state(rank, step=rank), memories)
    _planned(lambda rank: _state(rank, step=6), memories)


CHANGES: dict[str, Any] = {
    "dtype": lambda rank: _state(rank, w=torch.ones(4, dtype=torch.float64)),
    "shape": lambda rank: _state(rank, w=torch.ones(5)),
    "grad": lambda rank: _state(rank, w=torch.ones(4, requires_grad=True)),
    "kind": lambda rank: _state(rank, w=4),
    "key": lambda rank: _state(rank, v=torch.ones(4)),
    "path": lambda rank: _state(rank, w=[torch.ones(4)]),
    "order": lambda rank: {"w": torch.ones(4)} | _state(rank),
    "one rank less": lambda rank: _state(rank, **({"w": torch.ones(4)} if rank else {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_planned_anew(change: str) -> None:
    """Dtype, shape, grad, kind, key, path, order, who has it: as with no memory at all."""
    memories = [PlanMemory(), PlanMemory()]
    before = _planned(lambda rank: _state(rank, w=torch.ones(4)), memories)
    changed = _planned(CHANGES[change], memories)
    fresh = _planned(CHANGES[change], [PlanMemory(), PlanMemory()])
    assert [end[1:] for end in changed] == [end[1:] for end in fresh]
    assert list(fresh[0][2].state_dict_metadata.items()) != list(
        before[0][2].state_dict_metadata.items()
    ) or [end[1] for end in fresh] != [end[1] for end in before]


@pytest.mark.parametrize(
    "options",
    [{"per_rank": ["lr"]}, {"domains": [[0], [1]]}, {"domains": [[0, 1]], "per_rank": ["step"]}],
    ids=str,
)
def test_changed_options_are_planned_anew(options: dict[str, Any]) -> None:
    """per_rank and domains: as with no memory at all."""
    memories = [PlanMemory(), PlanMemory()]
    before = _planned(_state, memories)
    changed = _planned(_state, memories, **options)
    fresh = _planned(_state, [PlanMemory(), PlanMemory()], **options)
    assert [end[1:] for end in changed] == [end[1:] for end in fresh]
    assert [end[1:] for end in changed] != [end[1:] for end in before]


def test_another_world_is_planned_anew() -> None:
    """Memories of a world of two in one of three, in which each rank has another part."""

    def state(rank: int) -> dict[str, Any]:
        return _state(rank, **{f"of{rank}": rank})

    memories = [PlanMemory() for _ in range(3)]
    _planned(state, memories[:2])
    changed = _planned(state, memories)
    fresh = _planned(state, [PlanMemory() for _ in range(3)])
    assert [end[1:] for end in changed] == [end[1:] for end in fresh]


@pytest.mark.parametrize("forgets", [0, 1])
def test_who_forgets_costs_a_step(forgets: int) -> None:
    """A coordinator that lost its memory asks once more; a rank that lost its own says all."""
    memories = [PlanMemory(), PlanMemory()]
    first = _planned(_state, memories)
    memories[forgets] = PlanMemory()
    again = _planned(_state, memories)
    assert [end[1:] for end in again] == [end[1:] for end in first]
    # Of rank 0 the structure is that of rank 1: what it says is enough.
    assert [len(end[0]) for end in again] == [1, 1]
    memories = [PlanMemory(), PlanMemory()]
    mixed = lambda rank: _state(rank, **({"only": 1} if rank else {}))  # noqa: E731
    first = _planned(mixed, memories)
    memories[forgets] = PlanMemory()
    again = _planned(mixed, memories)
    assert [end[1:] for end in again] == [end[1:] for end in first]
    assert [len(end[0]) for end in again] == ([1, 1] if forgets else [2, 2])


# -- hostile bytes -----------------------------------------------------------------------------


@unhurried
@given(worlds(most_ranks=2), st.data())
def test_damaged_messages_are_errors_that_name_the_rank(plans: list[SavePlan], data: Any) -> None:
    """Bits flipped, bytes cut or added, even under a hash that fits: StateError or a plan."""
    message = PlanMessage.of(_facts(plans[0], {i.index.fqn: 5 for i in plans[0].items}))
    raw = bytearray(message.whole)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    structure = bytearray(message.structure)
    for _ in range(data.draw(st.integers(1, 4))):
        structure[data.draw(st.integers(0, len(structure) - 1))] ^= data.draw(st.integers(1, 255))
    fits = PlanMessage(xxhash.xxh3_128_digest(structure), message.prints, bytes(structure)).whole
    for received in (damaged, fits):
        told = ""
        try:
            decide([received], PlanMemory())
        except StateError as error:
            told = str(error)
        assert not told or "rank 0" in told or "plans" in told


@pytest.mark.parametrize("section", [0, 1, 2, 3], ids=["names", "shapes", "rows", "places"])
def test_sections_of_different_plans_do_not_make_one(section: int) -> None:
    """Each section is a good one and the hash fits: items without a name or a place are an error."""
    items = [shard_item(f"k{n}", [0] * n, [2] * n, [2] * n) for n in range(3)]
    small, large = (SavePlan(items[:n], planner_data={}) for n in (1, 3))
    parts = [Unpacker(structure_of(plan)) for plan in (small, large)]
    sections = [[unpacker.part() for _ in range(4)] for unpacker in parts]
    taken = sections[0] if section != 2 else sections[1]
    other = sections[1] if section != 2 else sections[0]
    packer = Packer()
    for n in range(4):
        # Small names, shapes or places under the rows of the large plan.
        packer.part((taken if n == section else other)[n])
    structure = packer.bytes()
    received = PlanMessage(xxhash.xxh3_128_digest(structure), prints_of(small), structure).whole
    with pytest.raises(StateError, match="plan of rank 0 cannot be read"):
        decide([received], PlanMemory())


def test_another_version_is_named() -> None:
    """A rank with another release of ckptfs: which rank, which version."""
    received = _whole([SavePlan([]), SavePlan([])])
    received[1] = b"\x07" + received[1][1:]
    with pytest.raises(StateError, match="rank 1 sent a save plan of version 7") as caught:
        decide(received, PlanMemory())
    assert caught.value.rank == 1


def test_items_that_no_planner_makes_are_refused() -> None:
    """An index that names another place than the chunk's, a chunk of other dimensions."""
    good = shard_item("w", [0], [2], [4])
    moved = dataclasses.replace(good, index=MetadataIndex("w", torch.Size([2])))
    flat = shard_item("w", [0], [2], [2, 2])
    for item in (moved, flat):
        with pytest.raises(StateError, match="'w'"):
            PlanMessage.of(SavePlan([item], planner_data={}))


# -- what it costs -----------------------------------------------------------------------------


def _calls(action: Any) -> int:
    count = 0

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_planning_costs_few_python_calls_per_tensor() -> None:
    """Per tensor of one rank, second save or first: at most ten calls of Python functions."""
    tensors = 1000
    state = {"model": {f"layers.{n}.weight": torch.ones(n % 7 + 1) for n in range(tensors)}}
    memory = PlanMemory()
    plan_save(state, SoloControl(), memory=memory)
    assert _calls(lambda: plan_save(state, SoloControl(), memory=PlanMemory())) < 10 * tensors
    assert _calls(lambda: plan_save(state, SoloControl(), memory=memory)) < 10 * tensors


def test_the_coordinators_work_does_not_grow_with_calls_per_item() -> None:
    """Ten times the ranks: a few calls more per rank, none per item."""

    def calls(ranks: int) -> int:
        received = [PlanMessage.of(Shard(Sizes(ranks, 8, 100)).plan(r)).whole for r in range(ranks)]
        return _calls(lambda: decide(received, PlanMemory()))

    calls(4)  # what is made once in a process
    assert calls(40) - calls(4) < 36 * 100


def test_sharded_rows_are_never_sorted_by_comparing_them() -> None:
    """A world of ranks with their pieces in order: what is compared to be sorted is keys, not rows."""
    ranks, tensors = 64, 100
    received = [PlanMessage.of(Shard(Sizes(ranks, 8, tensors)).plan(r)).whole for r in range(ranks)]
    sorted_rows = []

    def watch(frame: Any, event: str, function: Any) -> None:
        del frame
        column: Any = getattr(function, "__self__", None)
        if event == "c_call" and function.__name__ in ("argsort", "sort"):
            # Numbers of 16 bits are sorted by their digits.
            sorted_rows.append(0 if column.itemsize <= 2 else len(column))

    sys.setprofile(watch)
    try:
        decide(received, PlanMemory())
    finally:
        sys.setprofile(None)
    assert sorted_rows
    assert sum(sorted_rows) <= 2 * (tensors + 1)


def test_what_the_coordinator_holds_is_a_few_numbers_per_item() -> None:
    """At most 300 bytes per item at any moment, and 150 kept for the next save: there is no object."""
    ranks, tensors = 64, 1000
    received = [PlanMessage.of(Shard(Sizes(ranks, 8, tensors)).plan(r)).whole for r in range(ranks)]
    memory = PlanMemory()
    tracemalloc.start()
    try:
        decide(received, memory)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 300 * ranks * tensors
    assert kept < 150 * ranks * tensors


def test_a_plan_is_small_on_the_wire() -> None:
    """A thousand sharded tensors: under 20 bytes each and their names, and 47 bytes the next time."""
    plan = Shard(Sizes(64, 8, 1000)).plan(63)
    message = PlanMessage.of(plan)
    names = sum(len(item.index.fqn) for item in plan.items)
    assert len(message.whole) < 20 * 1000 + names
    assert len(message.short) < 100


def test_an_object_of_any_rank_is_one_item() -> None:
    """Only objects: nothing has a shape."""
    item = WriteItem(MetadataIndex("lr"), WriteItemType.BYTE_IO)
    described = decide(_whole([SavePlan([item], planner_data={"lr": ("lr",)})] * 3), PlanMemory())
    assert described is not None
    assert described.world.writes.tolist() == [True, False, False]


def test_an_error_leaves_the_memory_as_it_was() -> None:
    """What was refused is no plan to continue from."""
    memory = PlanMemory()
    received = _whole([_facts(SavePlan([shard_item("w", [0], [3], [2])], planner_data={}), {})] * 2)
    with pytest.raises(CkptfsError):
        decide(received, memory)
    assert memory == PlanMemory()
