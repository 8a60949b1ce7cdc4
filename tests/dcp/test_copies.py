"""Replicated items on disks that are apart: one copy per domain, and each domain finds its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckptfs.dcp.planning.global_plan import Place, copies_for, places_for

Held = list[list[tuple[MetadataIndex, int]]]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[int]], Held, list[set[MetadataIndex]]]:
    """Ranks split into domains, what each holds, and DCP's choice of one writer per item."""
    size = draw(st.integers(1, 6))
    split = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    domains = [[r for r in range(size) if split[r] == d] for d in sorted(set(split))]
    items = [MetadataIndex(f"k{i}") for i in range(draw(st.integers(0, 6)))]
    held: Held = [[] for _ in range(size)]
    kept: list[set[MetadataIndex]] = [set() for _ in range(size)]
    for item in items:
        holders = draw(st.sets(st.integers(0, size - 1), min_size=1))
        for rank in holders:
            held[rank].append((item, draw(st.integers(0, 9))))
        kept[draw(st.sampled_from(sorted(holders)))].add(item)
    return domains, held, kept


@given(worlds())
def test_every_domain_holds_once_whatever_its_ranks_hold(
    world: tuple[list[list[int]], Held, list[set[MetadataIndex]]],
) -> None:
    """No domain lacks an item of its ranks, none writes one twice, none writes what it has not."""
    domains, held, kept = world
    extra = copies_for(domains, held, kept)
    for ranks in domains:
        has = {index for rank in ranks for index, _ in held[rank]}
        writes = [index for rank in ranks for index in kept[rank] | extra[rank]]
        assert set(writes) == has
        assert len(writes) == len(has)
    for rank, more in enumerate(extra):
        assert more <= {index for index, _ in held[rank]}
        assert not more & kept[rank]


def test_the_ranks_of_a_domain_share_its_copies() -> None:
    """What a domain lacks is written by all of its ranks, each about as many bytes, counting what they
    write anyway.
    """
    items = [MetadataIndex(f"k{n}") for n in range(8)]
    held: Held = [[(index, 10) for index in items] for _ in range(4)]
    kept = [set(items[:4]), set(items[4:]), set[MetadataIndex](), set[MetadataIndex]()]
    extra = copies_for([[0, 1], [2, 3]], held, kept)
    assert [len(more) for more in extra] == [0, 0, 4, 4]
    shard = MetadataIndex("w", (0,))
    held[2].append((shard, 40))
    kept[2].add(shard)
    extra = copies_for([[0, 1], [2, 3]], held, kept)
    assert [len(more) for more in extra] == [0, 0, 2, 6]


def test_one_domain_needs_no_copies() -> None:
    """On shared storage DCP's deduplication is kept: one writer for a replicated item."""
    index = MetadataIndex("lr")
    held: Held = [[(index, 8)], [(index, 8)]]
    assert copies_for([[0, 1]], held, [{index}, set()]) == [set(), set()]
    assert copies_for([], held, [{index}, set()]) == [set(), set()]


def test_a_domain_finds_its_own_copy_and_everybody_the_only_one() -> None:
    """Both domains have `lr`; the shard of rank 0 has one place for all."""
    lr, shard = MetadataIndex("lr"), MetadataIndex("w", (0,))
    first: Place = ("id/__0_0.distcp", 0, 8)
    second: Place = ("id/__2_0.distcp", 0, 8)
    only: Place = ("id/__0_0.distcp", 8, 64)
    written = [{lr: first, shard: only}, {}, {lr: second}, {}]
    assert places_for([0, 1], written) == {lr: first, shard: only}
    assert places_for([2, 3], written) == {lr: second, shard: only}
    assert places_for([], written) == {lr: first, shard: only}
