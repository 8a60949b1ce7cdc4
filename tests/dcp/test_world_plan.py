"""The coordinator's decision on columns is stock's on objects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckptfs.dcp.planning.columns import Interned, decode_structure, structure_of
from ckptfs.dcp.planning.global_plan import AgreedPlan, Table, copies_for, table_of, world_of
from ckptfs.dcp.write.pipeline import item_bytes
from ckptfs.errors import StateError
from tests.dcp.random_worlds import broken, shard_item, worlds

unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)


def _table(plans: Sequence[SavePlan]) -> Table:
    interned = Interned()
    return table_of([decode_structure(structure_of(plan), interned) for plan in plans])


def _stock(plans: list[SavePlan], *, lowest: bool) -> tuple[list[SavePlan], Metadata]:
    return DefaultSavePlanner(dedup_save_to_lowest_rank=lowest).create_global_plan(plans)


def _same(ours: Metadata, stock: Metadata) -> None:
    assert ours == stock
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)
    assert list(ours.planner_data) == list(stock.planner_data)


def _same_choice(world: AgreedPlan, chosen: list[SavePlan]) -> None:
    # An item that a rank has twice has one place, and one hint: the last.
    hints = {i.index: i.index.index for plan in chosen for i in plan.items}
    named = [[(i.index, hints[i.index]) for i in plan.items] for plan in chosen]
    assert [[(i, i.index) for i in mine] for mine in world.indexes()] == named


@unhurried
@given(worlds(), st.booleans())
def test_every_item_goes_where_stock_puts_it(plans: list[SavePlan], lowest: bool) -> None:
    """Random worlds: the same writer, hint, chunk, path and order for every item."""
    chosen, metadata = _stock(plans, lowest=lowest)
    world = world_of(_table(plans), to_lowest_rank=lowest)
    _same(world.metadata(), metadata)
    _same_choice(world, chosen)


@unhurried
@given(broken())
def test_what_stock_refuses_is_refused_in_its_words(plans: list[SavePlan]) -> None:
    """An item lost, doubled, moved, resized or of another kind: accepted or refused as stock does."""
    refused: Exception | None = None
    try:
        chosen, metadata = _stock(plans, lowest=False)
    except Exception as error:  # noqa: BLE001 - stock runs into a tensor after an object
        refused = error
    if refused is not None:
        with pytest.raises(StateError) as caught:
            world_of(_table(plans))
        assert str(refused) in str(caught.value)
        return
    world = world_of(_table(plans))
    _same(world.metadata(), metadata)
    _same_choice(world, chosen)


TILINGS = {
    "in order": ([4], [([0], [2]), ([2], [2])]),
    "in another order": ([6], [([4], [2]), ([0], [2]), ([2], [2])]),
    "a grid": ([4, 4], [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 2]), ([2, 2], [2, 2])]),
    "bricks": ([4, 4], [([0, 0], [2, 1]), ([0, 1], [2, 3]), ([2, 0], [2, 3]), ([2, 3], [2, 1])]),
    "an overlap of the right volume": ([4], [([0], [2]), ([1], [2])]),
    "one inside another": ([4, 4], [([0, 0], [4, 2]), ([0, 0], [2, 4])]),
    "two overlaps in a plane": ([2, 2], [([0, 0], [1, 2]), ([0, 0], [2, 1])]),
    "a hole": ([4], [([0], [1]), ([2], [2])]),
    "out of bounds": ([4], [([0], [2]), ([3], [2])]),
    "nothing in the middle": ([4], [([0], [4]), ([2], [0])]),
    "nothing at the end": ([4], [([0], [4]), ([4], [0])]),
}


@pytest.mark.parametrize("name", TILINGS)
def test_tilings_are_judged_as_stock_judges_them(name: str) -> None:
    """Good ones, odd ones that are good, and each way of being wrong; on one rank and on several."""
    size, pieces = TILINGS[name]
    items = [shard_item("w", offsets, lengths, size) for offsets, lengths in pieces]
    for plans in [
        [SavePlan(items, planner_data={})],
        [SavePlan([i], planner_data={}) for i in items],
    ]:
        told: str | None = None
        try:
            _stock(plans, lowest=False)
        except ValueError as error:
            told = str(error)
        if told is None:
            world_of(_table(plans))
            continue
        with pytest.raises(StateError) as caught:
            world_of(_table(plans))
        assert told in str(caught.value)


def test_what_two_ranks_have_goes_to_the_one_with_less_to_write() -> None:
    """Of single items only those that the plan names before count, as in stock's own walk."""
    own = [[shard_item(f"own{r}", [0], [n], [n])] for r, n in enumerate([1, 50, 3])]
    both = shard_item("w", [0], [9], [9])
    for order in (False, True):
        items = [own[0], [*own[1], both], [*own[2], both]]
        mine = [list(reversed(i)) if order else i for i in items]
        plans = [SavePlan(i, planner_data={}) for i in mine]
        _same_choice(world_of(_table(plans)), _stock(plans, lowest=False)[0])


@unhurried
@given(worlds(most_ranks=6), st.data())
def test_domains_copies_are_those_of_items(plans: list[SavePlan], data: st.DataObject) -> None:
    """Ranks split over disks that are apart: the same ranks write the same copies as over objects."""
    size = len(plans)
    split = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    domains = [[r for r in range(size) if split[r] == d] for d in sorted(set(split))]
    chosen, _ = _stock(plans, lowest=False)
    kept = [{i.index for i in plan.items} for plan in chosen]
    held = [[(i.index, item_bytes(i)) for i in plan.items] for plan in plans]
    extra = copies_for(domains, held, kept)
    expected = [
        [i.index for i in plan.items if i.index in mine | more]
        for plan, mine, more in zip(plans, kept, extra, strict=True)
    ]
    found = world_of(_table(plans), domains=domains).indexes()
    assert [list(mine) for mine in found] == expected


@unhurried
@given(worlds(most_ranks=6), st.data())
def test_what_each_rank_writes_is_counted_as_its_items_are(
    plans: list[SavePlan], data: st.DataObject
) -> None:
    """Number and bytes, with the copies for domains: what is compared with the space that is free."""
    size = len(plans)
    split = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    domains = [[r for r in range(size) if split[r] == d] for d in sorted(set(split))]
    world = world_of(_table(plans), domains=domains)
    starts = world.table.starts.tolist()
    mine = [
        [
            item
            for item, is_own in zip(plan.items, world.writes[a:b].tolist(), strict=True)
            if is_own
        ]
        for plan, a, b in zip(plans, starts[:-1], starts[1:], strict=True)
    ]
    assert world.written == (
        [len(items) for items in mine],
        [sum(map(item_bytes, items)) for items in mine],
    )
