"""Replicated data on node-local disks: one copy per domain, so that every node can load alone.

DCP gives an item that several ranks hold (a replicated tensor, a plain value, a shard of HSDP) to
one writer. On one shared disk that is right. Where the ranks' disks are apart, a rank of another
node would find the key in ``.metadata`` and its bytes on a disk that it does not see. So each domain
whose ranks hold an item writes it, and each domain's ``.metadata`` points to its own copy:

    domain A  rank 0 writes lr     .metadata of A: lr -> __0_0.distcp
    domain B  rank 2 writes lr     .metadata of B: lr -> __2_0.distcp

Sharded items have one place for all. Pure functions; the coordinator calls them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from torch.distributed.checkpoint.metadata import MetadataIndex

__all__ = ["Place", "copies_for", "places_for"]

Item = TypeVar("Item", bound=Hashable)
Place = tuple[str, int, int]  # path relative to the step directory, offset, length


def copies_for(
    domains: Sequence[Sequence[int]],
    held: Sequence[Sequence[tuple[Item, int]]],
    kept: Sequence[set[Item]],
) -> list[set[Item]]:
    """What each rank writes besides what DCP gave it, so that no domain lacks what its ranks hold.

    domains: ranks of each. held: per rank, all that it could write, with sizes in bytes; items are
    whatever is equal on all ranks that have it. kept: per rank, what it writes anyway. Of several ranks of a domain the one with the least to write takes the copy.
    """
    extra: list[set[Item]] = [set() for _ in held]
    if len(domains) < 2:  # noqa: PLR2004
        return extra
    sizes = {index: size for items in held for index, size in items}
    load = [sum(sizes[index] for index in mine if index in sizes) for mine in kept]
    for ranks in domains:
        here = set().union(*(kept[rank] for rank in ranks))
        holders: dict[Item, list[int]] = defaultdict(list)
        for rank in ranks:
            for index, _ in held[rank]:
                if index not in here:
                    holders[index].append(rank)
        for index, candidates in holders.items():
            rank = min(candidates, key=lambda r: (load[r], r))
            load[rank] += sizes[index]
            extra[rank].add(index)
    return extra


def places_for(
    ranks: Sequence[int], written: Sequence[Mapping[MetadataIndex, Place]]
) -> dict[MetadataIndex, Place]:
    """Where a domain's readers find each item: in their own domain if it is there, else where it is.

    ranks: the domain's. written: per rank, where it wrote what.
    """
    mine = set(ranks)
    places: dict[MetadataIndex, Place] = {}
    for rank, found in enumerate(written):
        for index, place in found.items():
            if index not in places or rank in mine:
                places[index] = place
    return places
