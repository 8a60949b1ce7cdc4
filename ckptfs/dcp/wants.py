"""One item of a load plan as ranges of its file, each with what is done with its bytes.

    payload known    payload_wants    into the tensor's own memory, or through scratch into place
    payload unknown  blob_wants       the whole item, for an unpickler

Everything given to a want runs on any thread; the planner is asked for nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.blobs import Blob, load_tensor
from ckptfs.dcp.boxes import narrowed, pieces_of, strides_of
from ckptfs.dcp.datafile import DataFile
from ckptfs.dcp.resolve import memory_of, tensor_over
from ckptfs.dcp.spans import Cutting, Owner, Want, blob_cuts, payload_cuts, whole_blocks
from ckptfs.errors import ManifestError, StateError

__all__ = ["Asked", "Saved", "blob_wants", "check_target", "payload_wants", "saved_as", "unpickle"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a chunk was when it was saved: its sizes and its dtype."""

    sizes: torch.Size
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its memory."""
        return self.sizes.numel() * self.dtype.itemsize


def saved_as(metadata: Metadata, item: ReadItem) -> Saved:
    """The chunk that ``item`` reads from; ManifestError when the metadata has none."""
    index = item.storage_index
    described = metadata.state_dict_metadata[index.fqn]
    if not isinstance(described, TensorStorageMetadata):
        raise ManifestError(
            f".metadata describes {index.fqn!r} as an object and reads it as a tensor"
        )
    return Saved(_chunk_sizes(described, index), described.properties.dtype)


def check_target(item: ReadItem, target: torch.Tensor) -> None:
    """StateError unless the planner's tensor has the shape of the range."""
    if tuple(target.size()) != tuple(item.lengths):
        raise StateError(
            f"{item.storage_index.fqn!r}: the planner gave a tensor of shape "
            f"{tuple(target.size())} for a range of {tuple(item.lengths)}"
        )


@dataclass(slots=True)
class Asked:
    """One item that is being read: what all of its wants share."""

    file: DataFile
    digests: ItemDigests | None
    key: str
    owner: Owner
    cutting: Cutting

    def compare(self, low: int, data: memoryview) -> float:
        """Compare whole blocks from ``low`` of the item on; seconds."""
        return self.file.compare(self.digests, low, data, key=self.key)


def payload_wants(
    asked: Asked, digests: ItemDigests, saved: Saved, item: ReadItem, target: torch.Tensor
) -> Iterator[Want]:
    """Ranges of a payload that fill ``target`` with the box that ``item`` asks for."""
    size, inside = saved.dtype.itemsize, digests.payload_offset
    direct = target.device.type == "cpu" and target.dtype == saved.dtype
    window = max(1, asked.cutting.window // size)
    strides = strides_of(saved.sizes)
    boxes = pieces_of(saved.sizes, item.storage_offsets, item.lengths, window, whole=direct)
    for piece in boxes:
        part = narrowed(target, piece.offsets, piece.lengths)
        start, stop = piece.start * size, piece.stop * size
        if direct and piece.is_contiguous and part.is_contiguous() and not _is_lazy(part):
            yield from _direct_wants(asked, digests, start, memory_of(part))
            continue
        low, high = start, stop
        if asked.file.verifies:
            low, high = whole_blocks(start, stop, digests.payload_length)
        box = _Box(start - low, stop - low, saved.dtype, piece.lengths, strides, part)
        yield _want(asked, digests, low, high, partial(_place, asked, inside + low, box))


def _direct_wants(
    asked: Asked, digests: ItemDigests, start: int, out: memoryview
) -> Iterator[Want]:
    """Ranges of a payload, from ``start``, that fill ``out``; only their ends may need scratch."""
    stop, inside = start + len(out), digests.payload_offset
    length, cutting = digests.payload_length, asked.cutting
    if stop - start == length <= cutting.window:
        # All of a small payload: most items of most checkpoints.
        yield _want(asked, digests, 0, length, partial(asked.compare, inside), out)
        return
    for low, high in payload_cuts(start, stop, length, cutting, rounded=asked.file.verifies):
        first, last = max(low, start), min(high, stop)
        here = out[first - start : last - start]
        if (first, last) == (low, high):
            take = partial(asked.compare, inside + low)
            yield _want(asked, digests, low, high, take, here)
        else:
            take = partial(_clip, asked, inside + low, first - low, here)
            yield _want(asked, digests, low, high, take)


def _want(  # noqa: PLR0917 - a range, and who takes it
    asked: Asked,
    digests: ItemDigests,
    low: int,
    high: int,
    take: Callable[[memoryview], float],
    out: memoryview | None = None,
) -> Want:
    base = digests.offset + digests.payload_offset
    return Want(base + low, base + high, asked.owner, asked.key, take, out)


def blob_wants(asked: Asked, offset: int, blob: Blob) -> Iterator[Want]:
    """Ranges that fill ``blob`` with the whole item at ``offset`` of the file."""
    compared = asked.digests if asked.file.verifies else None
    for low, high in blob_cuts(compared, len(blob.data), asked.cutting.window):
        take = partial(_piece_of_blob, asked, low, blob)
        out = blob.out(low, high)
        yield Want(offset + low, offset + high, asked.owner, asked.key, take, out)


def unpickle(
    file: DataFile, item: ReadItem, saved: Saved, target: torch.Tensor, stream: Any
) -> None:
    """Fill ``target`` from what torch.save wrote of the whole chunk. Any thread."""
    key = item.storage_index.fqn
    whole = load_tensor(file, stream, key)
    if tuple(whole.shape) != tuple(saved.sizes):
        raise file.damaged(
            f"{key!r} has shape {tuple(whole.shape)} instead of {tuple(saved.sizes)}"
        )
    _fill(target, narrowed(whole, item.storage_offsets, item.lengths))


def _clip(asked: Asked, low: int, skip: int, out: memoryview, data: memoryview) -> float:
    """Whole blocks of which a part is wanted."""
    spent = asked.compare(low, data)
    out[:] = data[skip : skip + len(out)]
    return spent


@dataclass(frozen=True, slots=True)
class _Box:
    """Where a box lies in scratch (bytes), what its elements are, and where they go."""

    start: int
    stop: int
    dtype: torch.dtype
    lengths: Sequence[int]
    strides: Sequence[int]
    part: torch.Tensor


def _place(asked: Asked, low: int, box: _Box, data: memoryview) -> float:
    """A box that is not contiguous, or of another dtype, or on another device."""
    spent = asked.compare(low, data)
    flat = tensor_over(data[box.start : box.stop], box.dtype)
    _fill(box.part, flat.as_strided(box.lengths, box.strides))
    return spent


def _piece_of_blob(asked: Asked, low: int, blob: Blob, data: memoryview) -> float:
    spent = asked.compare(low, data)
    blob.arrived(len(data))
    return spent


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    # inference_mode is of one thread: tensors that were made in it refuse changes outside.
    with torch.inference_mode(target.is_inference()):
        target.copy_(values)


def _is_lazy(tensor: torch.Tensor) -> bool:
    # Conjugated and negated views show other values than their memory holds.
    return tensor.is_conj() or tensor.is_neg()


def _chunk_sizes(saved: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    chunks, hint = saved.chunks, index.index
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
        return chunks[hint].sizes
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return chunk.sizes
    raise ManifestError(f".metadata has no chunk of {index.fqn!r} at {index.offset}")
