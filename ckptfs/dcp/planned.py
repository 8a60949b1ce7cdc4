"""A plan of torch's, as Reads: for planners that torch drives.

reads_of        a Read for each ReadItem of a plan, by the metadata alone
target_of       the planner's tensor for one of them
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckptfs.dcp.reads import Read
from ckptfs.errors import ManifestError, StateError

__all__ = ["AsTorch", "Taker", "Told", "reads_of", "refuse_extensions", "target_of"]


class Told:
    """Reads that know their tensors; nobody waits for one of them."""

    commits = False

    def __init__(self, load_bytes: Callable[[Read, io.BytesIO], None]) -> None:
        self.load_bytes = load_bytes

    def target(self, read: Read) -> torch.Tensor:
        """Where it goes."""
        assert read.target is not None  # noqa: S101 - only objects have none
        return read.target

    def commit(self, read: Read, target: torch.Tensor) -> None:
        """It is there."""


class AsTorch:
    """A planner of torch's: asked for each tensor when its turn comes, told when it is filled."""

    commits = True

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def target(self, read: Read) -> torch.Tensor:
        """Where it goes."""
        return target_of(self._planner, read)

    def commit(self, read: Read, target: torch.Tensor) -> None:
        """It is there."""
        assert read.item is not None  # noqa: S101 - reads_of has told it
        self._planner.commit_tensor(read.item, target)

    def load_bytes(self, read: Read, stream: io.BytesIO) -> None:
        """An object is there."""
        assert read.item is not None  # noqa: S101 - reads_of has told it
        self._planner.load_bytes(read.item, stream)


Taker = Told | AsTorch


def reads_of(plan: LoadPlan, metadata: Metadata) -> Iterator[Read]:
    """One Read per item of the plan, in its order, without a target. ManifestError: the metadata
    does not say where it lies, or as what. StateError: only another reader can read it.
    """
    for item in plan.items:
        info, key = _info(metadata, item), item.storage_index.fqn
        refuse_extensions(info, key)
        place = (key, info.relative_path, info.offset, info.length)
        if item.type is LoadItemType.BYTE_IO:
            yield Read(*place, item=item)
            continue
        index = item.storage_index
        saved = metadata.state_dict_metadata[index.fqn]
        if not isinstance(saved, TensorStorageMetadata):
            raise ManifestError(
                f".metadata describes {index.fqn!r} as an object and reads it as a tensor"
            )
        yield Read(
            *place,
            sizes=_chunk_sizes(saved, index),
            dtype=saved.properties.dtype,
            box_offsets=item.storage_offsets,
            box_lengths=item.lengths,
            item=item,
        )


def target_of(planner: LoadPlanner, read: Read) -> torch.Tensor:
    """The planner's tensor; StateError unless it has the shape of the range."""
    assert read.item is not None  # noqa: S101 - reads_of has told it
    target = planner.resolve_tensor(read.item).detach()
    if tuple(target.size()) != tuple(read.box_lengths):
        raise StateError(
            f"{read.key!r}: the planner gave a tensor of shape {tuple(target.size())} "
            f"for a range of {tuple(read.box_lengths)}"
        )
    return target


def refuse_extensions(info: Any, key: str) -> None:
    """StateError for an item that was written through stream extensions of torch's."""
    if getattr(info, "transform_descriptors", None):
        raise StateError(
            f"{key!r} was written through stream extensions {info.transform_descriptors}",
            hint="load it with the storage reader that knows them",
        )


def _info(metadata: Metadata, item: ReadItem) -> Any:
    try:
        return metadata.storage_data[item.storage_index]
    except KeyError:
        raise ManifestError(
            f".metadata does not say where {item.storage_index.fqn!r} lies",
            hint="it was saved incompletely; load another checkpoint",
        ) from None


def _chunk_sizes(saved: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    chunks, hint = saved.chunks, index.index
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
        return chunks[hint].sizes
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return chunk.sizes
    raise ManifestError(f".metadata has no chunk of {index.fqn!r} at {index.offset}")
