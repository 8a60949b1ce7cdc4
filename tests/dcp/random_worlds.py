"""Random worlds for tests of the planner: what each rank of one would bring to a save.

worlds()        plans of all ranks, good ones: replicated, sharded on meshes, HSDP, objects, own keys
broken()        the same with one item moved, resized, of another kind, or lost
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

__all__ = ["broken", "shard_item", "worlds"]

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.uint8]


def shard_item(
    key: str,
    offsets: Any,
    lengths: Any,
    size: Any,
    dtype: torch.dtype = torch.float32,
    kind: WriteItemType = WriteItemType.SHARD,
) -> WriteItem:
    """One piece of a tensor, as DCP's planner describes it."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(size))
    return WriteItem(MetadataIndex(key, chunk.offsets), kind, tensor_data=data)


def _cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """DTensor's way: equal pieces, and what is left over is short or empty at the end."""
    step = -(-length // parts) if length else 0
    return [(min(n * step, length), max(0, min(step, length - n * step))) for n in range(parts)]


@st.composite
def _holders(draw: st.DrawFn, size: int) -> list[int]:
    return sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))


@st.composite
def _tensor(draw: st.DrawFn, key: str, size: int) -> dict[int, list[WriteItem]]:
    """What each rank has of one key."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    kind = draw(st.sampled_from(["object", "whole", "shard", "grid", "hybrid"]))
    holders = draw(_holders(size))
    if kind == "object":
        item = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        return {rank: [item] for rank in holders}
    if kind == "whole" or not shape:
        item = shard_item(key, [0] * len(shape), shape, shape, dtype, WriteItemType.TENSOR)
        return {rank: [item] for rank in holders}
    mesh = [1] * len(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    ranks = holders
    if kind == "hybrid":  # several ranks have each piece
        ranks = holders[: max(1, len(holders) // 2)]
    if kind == "grid" and len(shape) > 1 and len(holders) % 2 == 0:
        mesh[(dim + 1) % len(shape)] = 2
        mesh[dim] = len(holders) // 2
    else:
        mesh[dim] = len(ranks)
    boxes = list(itertools.product(*(_cuts(n, m) for n, m in zip(shape, mesh, strict=True))))
    order = draw(st.permutations(range(len(boxes))))
    found: dict[int, list[WriteItem]] = {}
    for n, rank in enumerate(holders):
        box = boxes[order[n % len(boxes)]]
        item = shard_item(key, [a for a, _ in box], [b for _, b in box], shape, dtype)
        found[rank] = [item]
    return found


@st.composite
def worlds(draw: st.DrawFn, most_ranks: int = 10) -> list[SavePlan]:
    """One plan per rank."""
    size = draw(st.integers(1, most_ranks))
    items: list[list[WriteItem]] = [[] for _ in range(size)]
    for n in range(draw(st.integers(0, 8))):
        for rank, mine in draw(_tensor(f"k.{n}", size)).items():
            items[rank] += mine
    for rank in draw(st.sets(st.integers(0, size - 1))):
        name = f"loader@rank{rank}.seed"
        items[rank].append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
    if draw(st.booleans()):
        items = [draw(st.permutations(mine)) for mine in items]
    return [SavePlan(mine, planner_data=_paths(mine)) for mine in items]


def _paths(items: list[WriteItem]) -> dict[str, tuple[str | int, ...]]:
    return {i.index.fqn: tuple(_component(c) for c in i.index.fqn.split(".")) for i in items}


def _component(text: str) -> str | int:
    return int(text) if text.isdigit() else text


@st.composite
def broken(draw: st.DrawFn) -> list[SavePlan]:
    """A world in which one item was tampered with; it may still be a good one."""
    plans = draw(worlds(most_ranks=5))
    places = [(r, n) for r, plan in enumerate(plans) for n in range(len(plan.items))]
    if not places:
        return plans
    rank, number = draw(st.sampled_from(places))
    items = list(plans[rank].items)
    item = items[number]
    data = item.tensor_data
    change = draw(st.sampled_from(["lose", "twice", "kind", "move", "grow", "size"]))
    if change == "lose":
        del items[number]
    elif change == "twice":
        items.append(item)
    elif data is None or change == "kind":
        items[number] = dataclasses.replace(item, type=WriteItemType.SHARD) if data else item
    else:
        by = draw(st.lists(st.integers(-2, 3), min_size=len(data.size), max_size=len(data.size)))
        changed = [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
        which = ["move", "grow", "size"].index(change)
        changed[which] = [max(0, a + b) for a, b in zip(changed[which], by, strict=True)]
        offsets, lengths, size = changed
        dtype = data.properties.dtype
        items[number] = shard_item(item.index.fqn, offsets, lengths, size, dtype, item.type)
    plans[rank] = dataclasses.replace(plans[rank], items=items)
    return plans
