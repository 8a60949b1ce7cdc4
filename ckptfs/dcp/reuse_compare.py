"""Is an item what the base holds? Its payload's blocks against digests; nothing is read from storage.

Framing is not compared: it is torch's own and says dtype and shape again. A tensor that lies on the
host is digested where it lies. Of one on a device a first block is fetched, then the rest in pieces:
what changed usually differs at once, and costs one small copy.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests, first_bad_block
from ckptfs.dcp.resolve import host_tensor, memory_of
from ckptfs.dcp.reuse import HeldItem

__all__ = ["is_alike", "is_unchanged"]

_PIECE_BYTES = 64 * BLOCK_SIZE_BYTES


def is_alike(item: WriteItem, held: HeldItem) -> bool:
    """Whether the item could be the held one: kind, dtype, shape and size. Looks at no data."""
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return held.dtype is None and not held.digests.payload_length
    data = item.tensor_data
    if data.properties.dtype != held.dtype or tuple(data.chunk.sizes) != held.sizes:
        return False
    size_bytes = data.properties.dtype.itemsize
    for length in data.chunk.sizes:
        size_bytes *= length
    # 0 of a tensor that has bytes: its payload was not found when it was written.
    return held.digests.payload_length == size_bytes


def is_unchanged(held: HeldItem, data: torch.Tensor | io.BytesIO) -> bool:
    """Whether the data of an item that ``is_alike`` has the digests of the held one."""
    known = held.digests
    if isinstance(data, io.BytesIO):
        view = data.getbuffer()
        return len(view) == known.length and first_bad_block(known, 0, view) is None
    return all(_is_same(known, start, piece) for start, piece in _pieces(data))


def _is_same(known: ItemDigests, start: int, piece: memoryview) -> bool:
    return first_bad_block(known, known.payload_offset + start, piece) is None


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """The tensor's bytes in order, in whole blocks but for the last, and where each begins."""
    plain = tensor.detach()
    if plain.device.type == "cpu" or not plain.is_contiguous():
        yield 0, memory_of(host_tensor(plain))
        return
    flat = plain.reshape(-1)
    item_bytes = flat.element_size()
    at, size_bytes = 0, BLOCK_SIZE_BYTES
    while at < flat.numel() * item_bytes:
        piece = flat[at // item_bytes : (at + size_bytes) // item_bytes]
        yield at, memory_of(host_tensor(piece))
        at, size_bytes = at + size_bytes, _PIECE_BYTES
