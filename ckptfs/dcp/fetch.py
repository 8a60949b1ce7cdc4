"""Data files read into tensors: verified in the same pass, straight into their memory.

    plan item --+-- payload known, host memory contiguous --> read into it, digest it there
                +-- payload known, anything else -----------> windows of a scratch tensor, copied
                +-- payload unknown (stock files, objects) -> torch.load(weights_only=True)

A sub-range along any dimension is cut into pieces that are contiguous in the file or fit a window
(boxes.py). Verified reading rounds to the blocks of the payload: partial blocks at the
ends go through a scratch block.
"""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.boxes import narrowed, pieces_of, strides_of
from ckptfs.dcp.datafile import (
    WINDOW_BYTES,
    DataFile,
    Source,
    Verify,
    gather,
    open_data,
    read_digests,
)
from ckptfs.dcp.resolve import memory_of
from ckptfs.errors import (
    CkptfsError,
    ManifestError,
    StateError,
)
from ckptfs.events import Counters

__all__ = ["Source", "Verify", "fetch"]


def fetch(source: Source, plan: LoadPlan, planner: LoadPlanner, metadata: Metadata) -> Counters:
    """Read every item of this rank's plan into the planner's tensors. Local.

    IncompleteCheckpointError: a file is missing. IntegrityError: it is short or its bytes differ;
    both name file, key and rank. After an error the tensors are undefined.
    """
    files: dict[str, list[ReadItem]] = defaultdict(list)
    for item in plan.items:
        files[_info(metadata, item).relative_path].append(item)
    total = Counters()
    for path in sorted(files):
        items = sorted(files[path], key=lambda item: _info(metadata, item).offset)
        try:
            total = total.plus(_fetch_file(source, path, items, planner, metadata))
        except CkptfsError as error:
            error.rank = source.rank if error.rank is None else error.rank
            raise
    return total


def _fetch_file(
    source: Source, path: str, items: Sequence[ReadItem], planner: LoadPlanner, metadata: Metadata
) -> Counters:
    started = time.perf_counter()
    digests = read_digests(source, path)
    infos = [_info(metadata, item) for item in items]
    with open_data(source, path) as reader:
        file = DataFile(
            reader, source, path, digests, gather([(i.offset, i.length) for i in infos])
        )
        end = max(info.offset + info.length for info in infos)
        if end > reader.size_bytes:
            raise file.damaged(
                f"it has {reader.size_bytes} bytes, the checkpoint needs {end}: truncated"
            )
        for item, info in zip(items, infos, strict=True):
            _fetch_item(file, item, info, planner, metadata)
    spent = time.perf_counter() - started
    return Counters(
        size_bytes=file.read_bytes,
        payload_bytes=file.read_bytes,
        files=1,
        items=len(items),
        read_s=spent - file.verify_s,
        verify_s=file.verify_s,
    )


def _fetch_item(
    file: DataFile, item: ReadItem, info: Any, planner: LoadPlanner, metadata: Metadata
) -> None:
    key = item.storage_index.fqn
    if getattr(info, "transform_descriptors", None):
        raise StateError(
            f"{key!r} was written through stream extensions {info.transform_descriptors}",
            hint="load it with the storage reader that knows them",
        )
    digests = file.item(info, key)
    if item.type is LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(file.blob(info, digests, key)))
        return
    saved = metadata.state_dict_metadata[key]
    if not isinstance(saved, TensorStorageMetadata):
        raise ManifestError(f".metadata describes {key!r} as an object and reads it as a tensor")
    sizes = _chunk_sizes(saved, item.storage_index)
    target = planner.resolve_tensor(item).detach()
    if tuple(target.size()) != tuple(item.lengths):
        raise StateError(
            f"{key!r}: the planner gave a tensor of shape {tuple(target.size())} "
            f"for a range of {tuple(item.lengths)}"
        )
    dtype = saved.properties.dtype
    if digests is not None and digests.payload_length == prod(sizes) * dtype.itemsize:
        _read_payload(file, digests, sizes, dtype, item, target)
    else:
        whole = file.tensor(info, digests, key)
        if tuple(whole.shape) != tuple(sizes):
            raise file.damaged(f"{key!r} has shape {tuple(whole.shape)} instead of {tuple(sizes)}")
        target.copy_(narrowed(whole, item.storage_offsets, item.lengths))
    planner.commit_tensor(item, target)


def _read_payload(  # noqa: PLR0917 - the two sides of one copy
    file: DataFile,
    digests: ItemDigests,
    sizes: Sequence[int],
    dtype: torch.dtype,
    item: ReadItem,
    target: torch.Tensor,
) -> None:
    size = dtype.itemsize
    direct = target.device.type == "cpu" and target.dtype == dtype
    window = max(1, WINDOW_BYTES // size)
    strides = strides_of(sizes)
    for piece in pieces_of(sizes, item.storage_offsets, item.lengths, window, whole=direct):
        part = narrowed(target, piece.offsets, piece.lengths)
        if direct and piece.is_contiguous and part.is_contiguous() and not _is_lazy(part):
            file.payload(digests, piece.start * size, memory_of(part), item.storage_index.fqn)
            continue
        scratch = torch.empty(piece.stop - piece.start, dtype=dtype)
        file.payload(digests, piece.start * size, memory_of(scratch), item.storage_index.fqn)
        part.copy_(scratch.as_strided(piece.lengths, strides))


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


def _info(metadata: Metadata, item: ReadItem) -> Any:
    try:
        return metadata.storage_data[item.storage_index]
    except KeyError:
        raise ManifestError(
            f".metadata does not say where {item.storage_index.fqn!r} lies",
            hint="it was saved incompletely; load another checkpoint",
        ) from None
