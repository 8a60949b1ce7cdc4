"""Which files of the base stay in use, and how the rest is cut into files. Pure.

A file stays in use when the items of this rank that lie in it unchanged are at least half of it, so
what a save keeps alive is at most twice what it needs. Items that are unchanged and lie in other files
are written anew, apart from those that changed: from then on they lie with their like.

    objects | unchanged, to 256 MiB each | changed, to 256 MiB each | tensors from 64 MiB on, alone
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs.dcp.reuse import DEFAULT_CUT, Base, Cut, HeldItem

__all__ = ["Numbered", "bundles", "files_in_use"]

Numbered = tuple[int, WriteItem]  # an item and its position in the rank's plan


def files_in_use(base: Base, unchanged: Mapping[int, HeldItem]) -> dict[str, list[int]]:
    """Paths of the base's files that stay in use -> positions of the items taken over with them.

    unchanged: position in this rank's plan -> where the base holds the same.
    """
    inside: dict[str, list[int]] = defaultdict(list)
    for position, held in unchanged.items():
        inside[held.path].append(position)
    return {
        path: sorted(positions)
        for path, positions in sorted(inside.items())
        if 2 * sum(unchanged[p].digests.length for p in positions)
        >= base.files[path].record.size_bytes
    }


def bundles(
    items: Sequence[WriteItem],
    write: Collection[int],
    stable: Collection[int],
    cut: Cut = DEFAULT_CUT,
    files: int = 1,
) -> list[list[Numbered]]:
    """The items at the positions ``write`` as files to be written.

    stable: positions of those that the base holds unchanged. files: how many can be written at
    once; so many there are at least, where there is enough to share.
    """
    numbered = [(position, items[position]) for position in sorted(write)]
    objects = [pair for pair in numbered if pair[1].type is WriteItemType.BYTE_IO]
    kept = [pair for pair in objects if pair[0] in stable]
    new = [pair for pair in objects if pair[0] not in stable]
    tensors = [pair for pair in numbered if pair[1].type is not WriteItemType.BYTE_IO]
    total = sum(size_bytes(item) for _, item in tensors)
    bound = min(cut.bundle_bytes, max(1, -(-total // max(1, files))))
    alone = [pair for pair in tensors if size_bytes(pair[1]) >= cut.alone_bytes]
    small = [pair for pair in tensors if size_bytes(pair[1]) < cut.alone_bytes]
    return [
        *(group for group in (kept, new) if group),
        *_cut([pair for pair in small if pair[0] in stable], bound),
        *_cut([pair for pair in small if pair[0] not in stable], bound),
        *([pair] for pair in alone),
    ]


def size_bytes(item: WriteItem) -> int:
    """Bytes of a tensor's payload, 0 of an object."""
    if item.tensor_data is None:
        return 0
    chunk = item.tensor_data.chunk
    return math.prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _cut(pairs: Sequence[Numbered], bound: int) -> Iterator[list[Numbered]]:
    """In the order of the plan, each full when the next item would make it larger than ``bound``."""
    bundle: list[Numbered] = []
    filled = 0
    for position, item in pairs:
        size = size_bytes(item)
        if bundle and filled + size > bound:
            yield bundle
            bundle, filled = [], 0
        bundle.append((position, item))
        filled += size
    if bundle:
        yield bundle
