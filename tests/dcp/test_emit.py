"""``.metadata`` made of columns is what stock would have pickled."""

from __future__ import annotations

import itertools
import pickle
import pickletools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.save.spec import WrittenPart
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import (
    PLACED,
    Described,
    describe,
    is_known_layout,
    placed_in,
)
from ckptfs.dcp.metadata.metadata_writer import places_for as places_in
from ckptfs.dcp.planning.columns import Interned, decode_structure, structure_of
from ckptfs.dcp.planning.global_plan import AgreedPlan, places_for, table_of, world_of
from ckptfs.dcp.write.pipeline import storage_data_of, written_places
from ckptfs.errors import IncompleteCheckpointError, IntegrityError
from tests.dcp.random_worlds import shard_item, worlds

unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


def world(plans: Sequence[SavePlan], domains: Sequence[Sequence[int]] = ()) -> AgreedPlan:
    """What the coordinator decides over these plans."""
    interned = Interned()
    columns = [decode_structure(structure_of(plan), interned) for plan in plans]
    return world_of(table_of(columns), domains=domains)


def parts_of(decided: AgreedPlan, at: int = 0) -> list[WrittenPart]:
    """What ranks that wrote would report; at: where their first item is."""
    parts = []
    for rank, mine in enumerate(decided.indexes()):
        told = np.zeros(len(mine), PLACED)
        told["offset"] = at + 100 * np.arange(len(mine))
        told["length"] = 100
        name = f"save-1/__{rank}_0"
        data = FileRecord(f"{name}.distcp", at + 100 * len(mine), None, f"{name}.xxh3")
        sidecar = FileRecord(f"{name}.xxh3", 10, None, digest="0" * 32)
        parts.append(WrittenPart((data, sidecar), payload=told.tobytes()))
    return parts


def encoded(decided: AgreedPlan, parts: Sequence[WrittenPart], ranks: Sequence[int] = ()) -> bytes:
    """The file."""
    places = places_in(decided, placed_in(decided, parts, None), ranks)
    return Described(decided).encode(places, StorageMeta("here", save_id="save-1"))


def by_objects(
    decided: AgreedPlan, parts: Sequence[WrittenPart], ranks: Sequence[int] = ()
) -> Metadata:
    """What is to be in it, the slow way."""
    places = places_for(ranks, written_places(decided.indexes(), parts))
    return describe(decided.metadata(), places, checkpoint_id="here", save_id="save-1")


def same(ours: Metadata, other: Metadata) -> None:
    """Equal, in the same order, with the same hints and the same types."""
    assert ours == other
    assert list(ours.state_dict_metadata) == list(other.state_dict_metadata)
    assert list(ours.planner_data) == list(other.planner_data)
    assert list(ours.storage_data) == list(other.storage_data)
    assert [i.index for i in ours.storage_data] == [i.index for i in other.storage_data]


@unhurried
@given(worlds(), st.sampled_from([0, 1 << 31, 1 << 40]))
def test_what_is_written_is_read_back_by_stock_and_by_us(plans: list[SavePlan], at: int) -> None:
    """Random worlds, small files and ones with places of 8 bytes: equal objects, equal order."""
    decided = world(plans)
    parts = parts_of(decided, at)
    raw = encoded(decided, parts)
    expected = by_objects(decided, parts)
    same(pickle.loads(raw), expected)
    same(pickle._loads(raw), expected)  # type: ignore[attr-defined] # pickle's own, in Python
    same(decode_metadata(raw, "here"), expected)


@unhurried
@given(worlds(most_ranks=6), st.data())
def test_every_domain_is_told_its_own_copies(plans: list[SavePlan], data: Any) -> None:
    """Disks that are apart: each domain's file is what objects would have made of it."""
    size = len(plans)
    split = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    domains = [[r for r in range(size) if split[r] == d] for d in sorted(set(split))]
    decided = world(plans, domains)
    parts = parts_of(decided)
    for ranks in domains:
        same(pickle.loads(encoded(decided, parts, ranks)), by_objects(decided, parts, ranks))


def test_all_that_properties_can_be_is_kept() -> None:
    """Grad, pinned, memory format, layout: each tensor gets its own; one changed changes no other."""
    items = []
    given = [
        TensorProperties(torch.float32),
        TensorProperties(torch.float32),
        TensorProperties(torch.float32, requires_grad=True),
        TensorProperties(torch.float32, pin_memory=True),
        TensorProperties(torch.float32, memory_format=torch.channels_last),
        TensorProperties(torch.float32, layout=torch.sparse_coo),
    ]
    for n, properties in enumerate(given):
        item = shard_item(f"k{n}", [0], [2], [2], kind=WriteItemType.TENSOR)
        assert item.tensor_data is not None
        data = TensorWriteData(item.tensor_data.chunk, properties, torch.Size([2]))
        items.append(WriteItem(item.index, item.type, tensor_data=data))
    decided = world([SavePlan(items, planner_data={})])
    back = pickle.loads(encoded(decided, parts_of(decided))).state_dict_metadata
    assert back == decided.metadata().state_dict_metadata
    assert [back[f"k{n}"].properties for n in range(len(given))] == given
    back["k0"].properties.dtype = torch.int8
    back["k0"].chunks.clear()
    assert back["k1"].properties.dtype is torch.float32
    assert len(back["k1"].chunks) == 1


@pytest.mark.parametrize("key", ["", "a" * 300, "\udc80", "ключ", "a.b", "x\n", "@rank"], ids=ascii)
def test_any_string_is_a_key(key: str) -> None:
    """Empty, long, of any alphabet, a lone surrogate; its path may be another."""
    item = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    for path in [(key,), ("a", 3, key), tuple("abcde"), (0,)]:
        decided = world([SavePlan([item], planner_data={key: path, "other": (1, "z")})])
        parts = parts_of(decided)
        same(pickle.loads(encoded(decided, parts)), by_objects(decided, parts))


def test_it_is_one_frame_without_memo_operations_in_records() -> None:
    """What readers of many chunks rely on: all records of a tensor have one length."""
    items = [shard_item("w", [n, 0], [1, 7], [300, 7]) for n in range(300)]
    decided = world([SavePlan(items, planner_data={"w": ("w",)})])
    raw = encoded(decided, parts_of(decided))
    operations = list(pickletools.genops(raw))
    assert [o.name for o, _, _ in operations[:2]] == ["PROTO", "FRAME"]
    ends = [at or 0 for o, _, at in operations if o.name == "BUILD"]
    chunks = {after - before for before, after in itertools.pairwise(ends[1:301])}
    assert len(chunks) == 1
    assert len(raw) < 300 * 130 + 1000


def test_what_was_not_written_is_not_described() -> None:
    """A rank that wrote fewer items, or outside its file, or is missing: no metadata is made."""
    decided = world([SavePlan([shard_item("w", [0], [2], [2])], planner_data={})])
    [good] = parts_of(decided)
    assert len(storage_data_of(decided.indexes(), [good])) == 1
    with pytest.raises(IncompleteCheckpointError, match="1 ranks planned, but 2 wrote"):
        placed_in(decided, [good, good], None)
    lost = WrittenPart(good.files, payload=b"")
    with pytest.raises(IncompleteCheckpointError, match="planned 1 items but wrote 0"):
        placed_in(decided, [lost], None)
    twice = WrittenPart(good.files, payload=good.payload * 2)
    with pytest.raises(IncompleteCheckpointError, match="rank 0 planned 1 items but wrote 2"):
        placed_in(decided, [twice], None)
    for file, offset, length in [(1, 0, 1), (0, 1, 100), (0, 2**64 - 1, 2)]:
        told = np.array([(file, offset, length)], PLACED)
        with pytest.raises(IntegrityError, match="placed 'w' outside"):
            placed_in(decided, [WrittenPart(good.files, payload=told.tobytes())], None)


def test_what_one_rank_wrote_too_much_does_not_make_up_for_another() -> None:
    """As many items as were planned, and one of them on the wrong rank: every place after it would be
    that of another tensor. The first rank that is wrong is named.
    """
    rows = [[shard_item("w", [2 * n], [2], [4])] for n in range(2)]
    decided = world([SavePlan(items, planner_data={}) for items in rows])
    first, second = parts_of(decided)
    wrong = [
        WrittenPart(first.files, payload=first.payload * 2),
        WrittenPart(second.files, payload=b""),
    ]
    with pytest.raises(IncompleteCheckpointError, match="rank 0 planned 1 items but wrote 2"):
        placed_in(decided, wrong, None)
    with pytest.raises(IncompleteCheckpointError, match="rank 0 planned 1 items but wrote 0"):
        placed_in(decided, [WrittenPart(first.files, payload=b""), wrong[0]], None)


def test_this_torch_is_known() -> None:
    """Where it is not, every save would go the slow way."""
    assert is_known_layout()
