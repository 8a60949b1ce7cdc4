"""The leaves of a checkpoint, and their values box by box, in bounded memory.

with open_contents(uri, options) as contents:
    contents.leaves                          TensorLeaf and ObjectLeaf, by key
    contents.read([Box(leaf, (0, 0), (4, 8))])    tensors, verified if there are digests
    for boxes in batches(contents.tensors): ...   all of them, about 32 MiB at a time

SavedContents     checkpoints of ckptfs and of stock DCP, by .metadata, in any sharding; safetensors of
                  any writer, one file or a directory, by headers and index. Loads read the same way
LoadedContents    one torch.save file, mapped if it is on a mounted filesystem, otherwise fetched
                  whole into memory; weights only
other files       no leaves
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.boxes import fills, narrowed, pieces_of, untiled
from ckptfs.dcp.metadata.metadata_reader import Description
from ckptfs.dcp.metadata.torch_inventory import TorchInventory
from ckptfs.dcp.metadata.torch_names import TORCH, Dtype, dtype_of
from ckptfs.dcp.read.data_file import DataFile, Source, Verify, open_data, read_digests
from ckptfs.errors import IntegrityError, ManifestError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem

__all__ = [
    "DEEPEST",
    "Box",
    "Contents",
    "Leaf",
    "LoadedContents",
    "ObjectLeaf",
    "SavedContents",
    "Shard",
    "TensorLeaf",
    "batches",
]

DEEPEST = 200  # levels of dicts and lists: deeper nesting is meant to overflow the stack

_BATCH_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor as it was saved.

    Attributes:
        offsets: Where it begins in the tensor, in each dimension.
        sizes: How many elements it has, in each dimension.
        file: The file that has it, relative to the checkpoint.
        start: Where the blob that holds it begins in the file, in bytes.
        length: The size of that blob in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor.

    Attributes:
        key: Its key.
        dtype: Its dtype.
        shape: Its global shape.
        shards: The boxes that it was saved in.
        path: Its place in the nested state dict; empty if that is not known.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    path: tuple[str | int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def dtype_name(self) -> str:
        """The name of its dtype without ``torch.``. Imports no torch."""
        return _DTYPE.known(self).name

    @property
    def itemsize(self) -> int:
        """Bytes of one element. Imports no torch."""
        return _DTYPE.known(self).itemsize


class _DtypeAttribute:
    """``TensorLeaf.dtype``: a Dtype is kept, and torch's own is made where it is read.

    Who lists leaves, measures them or compares their digests reads none, and does without the import of torch.
    """

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def known(self, leaf: TensorLeaf) -> Dtype:
        """Return the Dtype."""
        found: Dtype = self._slot.__get__(leaf)
        return found

    def __get__(self, leaf: TensorLeaf | None, owner: Any = None) -> Any:
        return self if leaf is None else TORCH[self.known(leaf)]

    def __set__(self, leaf: TensorLeaf, dtype: torch.dtype | Dtype) -> None:
        self._slot.__set__(leaf, dtype if isinstance(dtype, Dtype) else dtype_of(dtype))


# Not in the class: a dataclass would take it for the default of the field.
_DTYPE = _DtypeAttribute(vars(TensorLeaf)["dtype"])
TensorLeaf.dtype = _DTYPE  # type: ignore[misc, assignment]


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """Anything but a tensor, pickled.

    Attributes:
        key: Its key.
        file: The file that has it, relative to the checkpoint.
        start: Where it begins in the file, in bytes.
        length: Its size in bytes.
        path: Its place in the nested state dict; empty if that is not known.
    """

    key: str
    file: str
    start: int
    length: int
    path: tuple[str | int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of its pickle."""
        return self.length


Leaf = TensorLeaf | ObjectLeaf


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    Attributes:
        leaf: The tensor.
        offsets: Where it begins, in each dimension.
        lengths: How many elements it has, in each dimension.
    """

    leaf: TensorLeaf
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def all_of(leaf: TensorLeaf) -> Box:
        """The whole tensor ``leaf``."""
        return Box(leaf, (0,) * len(leaf.shape), leaf.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.lengths) * self.leaf.itemsize


class Contents(ABC):
    """The leaves of one checkpoint, by key. One thread.

    Attributes:
        leaves: Tensors and objects, by key.
    """

    leaves: Mapping[str, Leaf]

    @property
    def tensors(self) -> tuple[TensorLeaf, ...]:
        """The leaves that are tensors, in the order of their bytes on the storage."""
        found = [leaf for leaf in self.leaves.values() if isinstance(leaf, TensorLeaf)]
        return tuple(sorted(found, key=_place_of))

    @property
    def objects(self) -> tuple[ObjectLeaf, ...]:
        """The leaves that are objects, in the order of their bytes on the storage."""
        found = [leaf for leaf in self.leaves.values() if isinstance(leaf, ObjectLeaf)]
        return tuple(sorted(found, key=lambda leaf: (leaf.file, leaf.start)))

    @abstractmethod
    def read(
        self, boxes: Sequence[Box], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Read parts of tensors.

        Args:
            boxes: The parts.
            into: Memory for each of them, of its dtype and shape; None allocates it.

        Returns:
            The parts as contiguous host tensors. Their memory is either not shared with other objects,
            or not changed by them.

        Raises:
            IntegrityError: The bytes differ from what was written; the error names file and key.
            IncompleteCheckpointError: A file is missing; the error names file and key.
        """

    def check_sizes(self, leaves: Iterable[Leaf]) -> None:
        """Check that the files have the bytes that leaves claim.

        Call it before memory or files of the claimed size are made.

        Args:
            leaves: The leaves.

        Raises:
            IntegrityError: A leaf claims more bytes than its file holds.
        """

    @abstractmethod
    def blob(self, leaf: ObjectLeaf) -> bytes:
        """The pickle of the object ``leaf``, as torch.save made it."""

    @abstractmethod
    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """The digests of ``leaf`` from its save, shard by shard; None if a shard has none."""

    def value(self, leaf: ObjectLeaf) -> Any:
        """The object, loaded with weights_only.

        Args:
            leaf: The object's leaf.

        Raises:
            UnpicklingError: Loading it would run code.
        """
        from ckptfs.dcp.planning.leaves import load_leaf

        return load_leaf(io.BytesIO(self.blob(leaf)))


def batches(leaves: Iterable[TensorLeaf], most_bytes: int = _BATCH_BYTES) -> Iterator[list[Box]]:
    """Yield ``leaves`` as boxes of at most 8 MiB, in batches of up to ``most_bytes`` bytes."""
    batch: list[Box] = []
    held_bytes = 0
    for leaf in leaves:
        for box in _cut(leaf):
            if batch and held_bytes + box.size_bytes > most_bytes:
                yield batch
                batch, held_bytes = [], 0
            batch.append(box)
            held_bytes += box.size_bytes
    if batch:
        yield batch


def _cut(leaf: TensorLeaf) -> Iterator[Box]:
    zeros = (0,) * len(leaf.shape)
    if leaf.size_bytes <= _PIECE_BYTES:
        yield Box(leaf, zeros, leaf.shape)
        return
    window = _PIECE_BYTES // leaf.itemsize
    for piece in pieces_of(leaf.shape, zeros, leaf.shape, window, full=False):
        yield Box(leaf, piece.offsets, piece.lengths)


def _place_of(leaf: TensorLeaf) -> tuple[str, int]:
    first = leaf.shards[0] if leaf.shards else None
    return ("", 0) if first is None else (first.file, first.start)


class LoadedContents(Contents):
    """The leaves of one loaded torch.save file: a nested dict, flattened as DCP does it.

    Args:
        loaded: The loaded value.
        file: The name of the file.
    """

    def __init__(self, loaded: Any, file: str) -> None:
        import torch

        from ckptfs.dcp.planning.leaves import serialise_leaf

        self._tensors: dict[str, torch.Tensor] = {}
        self._objects: dict[str, Any] = {}
        found: dict[str, Leaf] = {}
        for path, value in _flat(loaded, ()):
            key = ".".join(str(part) for part in path) or file
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._tensors[key] = value
                extent = (0,) * value.dim(), tuple(value.shape)
                shard = Shard(*extent, file, 0, value.numel() * value.element_size())
                found[key] = TensorLeaf(key, value.dtype, tuple(value.shape), (shard,), path)
            else:
                self._objects[key] = value
                size = serialise_leaf(value).getbuffer().nbytes
                found[key] = ObjectLeaf(key, file, 0, size, path)
        self.leaves = found

    def read(
        self, boxes: Sequence[Box], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As ``Contents.read``: views of the loaded tensors, copied if they are not contiguous."""
        from ckptfs.dcp.write.host_memory import host_tensor

        found = [narrowed(self._tensors[box.leaf.key], box.offsets, box.lengths) for box in boxes]
        if into is None:
            return [host_tensor(tensor) for tensor in found]
        return [target.copy_(tensor) for target, tensor in zip(into, found, strict=True)]

    def blob(self, leaf: ObjectLeaf) -> bytes:
        """As ``Contents.blob``: the object is pickled again, by itself."""
        from ckptfs.dcp.planning.leaves import serialise_leaf

        return serialise_leaf(self._objects[leaf.key]).getvalue()

    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """None: such a file has no digests."""
        return None


def _flat(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if len(path) > DEEPEST:  # a container may contain itself
        raise IntegrityError(f"its values are nested more than {DEEPEST} deep")
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*path, str(key)))
    elif isinstance(value, list) and any(_holds_tensors(inner) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, (*path, number))
    else:
        yield path, value


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    import torch

    if depth > DEEPEST:
        raise IntegrityError(f"its values are nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return any(_holds_tensors(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return any(_holds_tensors(inner, depth + 1) for inner in value)
    return isinstance(value, torch.Tensor)


_LARGEST = (1 << 63) - 1  # the largest size in torch


class SavedContents(Contents):
    """The leaves in data files, as torch's metadata describes them.

    Args:
        source: Reads the files; the caller keeps it.
        metadata: The metadata of the checkpoint, as it was read or as torch's object.
    """

    def __init__(self, source: Source, metadata: Metadata | Description) -> None:
        self._source = source
        self._description: Description = (
            TorchInventory(cast("Metadata", metadata))
            if hasattr(metadata, "state_dict_metadata")
            else metadata
        )
        self._digests: dict[str, Mapping[int, ItemDigests] | None] = {}
        self.leaves = _leaves_of(self._description)

    def read(
        self, boxes: Sequence[Box], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As ``Contents.read``; the source's ``verify`` decides whether bytes are verified."""
        import torch
        from torch.distributed.checkpoint.planner import LoadPlan

        from ckptfs.dcp.read.scheduler import fetch

        if into is None:
            into = [torch.empty(box.lengths, dtype=box.leaf.dtype) for box in boxes]
        targets = _Targets()
        items: list[ReadItem] = []
        for box, tensor in zip(boxes, into, strict=True):
            found = self._items_of(box)
            targets.add(tensor, found)
            items += found
        metadata = self._description.metadata()
        fetch(self._source, LoadPlan(items), targets, metadata)  # type: ignore[arg-type]
        return list(into)

    def _items_of(self, box: Box) -> list[ReadItem]:
        if not math.prod(box.lengths):
            return []
        import torch
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        described: Any = self._description.metadata().state_dict_metadata[box.leaf.key]
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
        found = create_read_items_for_chunk_list(box.leaf.key, described, [chunk])
        pieces = [(item.dest_offsets, item.lengths) for item in found]
        if not fills(pieces, box.lengths):
            # The memory of the box is not initialised: an unfilled part would hold arbitrary values.
            error = untiled(box.leaf.key, pieces, box.lengths)
            error.uri = str(self._source.storage.uri(self._source.home))
            raise error
        return found

    def check_sizes(self, leaves: Iterable[Leaf]) -> None:
        """As ``Contents.check_sizes``; the size of each file is read once."""
        sizes: dict[str, int] = {}
        for leaf in leaves:
            if isinstance(leaf, TensorLeaf):
                pieces = [(shard.offsets, shard.sizes) for shard in leaf.shards]
                if not fills(pieces, leaf.shape):
                    raise untiled(leaf.key, pieces, leaf.shape)
                for shard in leaf.shards:
                    size = math.prod(shard.sizes) * leaf.itemsize
                    if size > shard.length:
                        raise self._too_large(leaf, shard.file, size, shard.length)
            for place in leaf.shards if isinstance(leaf, TensorLeaf) else (leaf,):
                if place.file not in sizes:
                    with open_data(self._source, place.file) as reader:
                        sizes[place.file] = reader.size_bytes
                end = place.start + place.length
                if end > sizes[place.file]:
                    raise self._too_large(leaf, place.file, end, sizes[place.file])

    def _too_large(self, leaf: Leaf, file: str, size: int, present_bytes: int) -> IntegrityError:
        return IntegrityError(
            f".metadata gives {leaf.key!r} {size} bytes in {file}, where {present_bytes} are",
            uri=self._source.storage.uri(self._source.key(file)),
            hint="the file is truncated, or .metadata was changed; load another checkpoint",
        )

    def blob(self, leaf: ObjectLeaf) -> bytes:
        """As ``Contents.blob``, compared with its digests if the source verifies."""
        verifies = self._source.verify is Verify.READ
        known = read_digests(self._source, leaf.file) if verifies else None
        with open_data(self._source, leaf.file) as reader:
            file = DataFile(reader, self._source, leaf.file, known)
            file.check_size(leaf.start + leaf.length)
            data = bytearray(leaf.length)  # after the check: an impossible length takes no memory
            reader.read_into(leaf.start, memoryview(data))
            item = file.item(leaf.start, leaf.length, leaf.key)
            if item is not None and file.verifies:
                file.compare(item, 0, leaf.key, memoryview(data))
        return bytes(data)

    def digests(self, leaf: Leaf) -> tuple[tuple[ItemDigests, Shard | None], ...] | None:
        """As ``Contents.digests``; reads sidecars but no data files."""
        if isinstance(leaf, ObjectLeaf):
            item = self._item(leaf.file, leaf.start, leaf.length)
            return None if item is None else ((item, None),)
        found = []
        for shard in leaf.shards:
            size = math.prod(shard.sizes) * leaf.itemsize
            item = self._item(shard.file, shard.start, shard.length)
            if size and (item is None or item.payload_length != size):
                return None
            if size and item is not None:
                found.append((item, shard))
        return tuple(found)

    def _item(self, file: str, start: int, length: int) -> ItemDigests | None:
        if file not in self._source.sidecars:
            return None
        if file not in self._digests:
            self._digests[file] = read_digests(self._source, file)
        item = (self._digests[file] or {}).get(start)
        return item if item is not None and item.length == length else None


class _Targets:
    """The part of a load planner that ``fetch`` uses: it returns the tensors to fill."""

    def __init__(self) -> None:
        self._by_index: dict[MetadataIndex, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, items: Iterable[ReadItem]) -> None:
        self._by_index.update((item.dest_index, tensor) for item in items)

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return narrowed(self._by_index[item.dest_index], item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the data was read straight into its target."""


def _leaves_of(description: Description) -> dict[str, Leaf]:
    try:
        return _leaves(description)
    except (TypeError, AttributeError, ValueError) as error:
        # It has other types than torch writes, so none of it is trusted.
        raise ManifestError(
            f".metadata describes no tensors: {error}",
            hint="it was changed, or written by something else; load another checkpoint",
        ) from error


def _leaves(description: Description) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    paths, places = description.paths, description.places()
    for key in description.keys:
        path = tuple(paths.get(key, ()))
        tensor = description.describe(key)
        if tensor is not None:
            shards = []
            for begin, lengths in tensor.boxes:
                place = places.get((key, tuple(begin)))
                if place is not None:
                    at = _numbers((place.offset, place.length))
                    offsets, sizes = _numbers(begin), _numbers(lengths)
                    shards.append(Shard(offsets, sizes, place.path, at[0], at[1]))
            shape = _numbers(tensor.sizes)
            dtype: Any = tensor.dtype  # the leaf keeps it as it is
            found[key] = TensorLeaf(key, dtype, shape, tuple(shards), path)
            continue
        place = places.get((key, None))
        if place is None:
            raise ManifestError(f".metadata gives no place for {key!r}")
        at = _numbers((place.offset, place.length))
        found[key] = ObjectLeaf(key, place.path, at[0], at[1], path)
    return found


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return sizes or offsets as a tuple; TypeError if a value cannot be one."""
    numbers = tuple(values)
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        raise TypeError(f"{numbers!r:.200} are no sizes and offsets")
    return numbers
