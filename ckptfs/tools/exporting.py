"""Export a checkpoint to another format: safetensors with index, one torch.save file, plain DCP.

    export("s3://bucket/run/step_100", "out/hf", "safetensors", Selection(filters=["model.*"]))

    safetensors   tensors only; streamed, with about 64 MiB in memory whatever the size: each part of the
                  file is read into the memory that it is written from, while the part before is written
    torch         one file that torch.load(weights_only=True) opens; the whole state is in memory, or
                  mapped from a file in ``scratch``
    dcp           what torch.distributed.checkpoint.load opens by itself: ``__0_0.distcp`` ... and
                  ``.metadata``; shards as they were saved, one at a time in memory (cut at 512 MiB)

The source is any checkpoint that ``inspect`` reads, the target any URI. One process does the work; what
it reads is verified. ``Selection`` says which leaves are exported, and under which names:

    Selection(filters=("model.*",), strip="model.", prefix="base.", dtype=torch.bfloat16)

    model.layers.0.weight  float32    ->  base.layers.0.weight  bfloat16
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.dcp.boxes import fills, narrowed, pieces_of, untiled
from ckptfs.dcp.metadata.metadata_writer import describe, encode_metadata
from ckptfs.dcp.metadata.torch_names import dtype_of
from ckptfs.dcp.object_file import write_object
from ckptfs.dcp.planning.leaves import dtype_round_trips, first_line
from ckptfs.dcp.safetensors.exporter import HeldTensor, PlannedFile, plan_files
from ckptfs.dcp.safetensors.safetensors_format import (
    INDEX,
    TensorEntry,
    dtype_name,
    encode_header,
    encode_index,
)
from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.dcp.write.rank_files import Cancelled, FileTask, auto_engine, data_name
from ckptfs.errors import CkptfsError, StateError
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.io import aligned_memory
from ckptfs.storage.registry import open_storage
from ckptfs.storage.threads import Pump
from ckptfs.text import parse_size
from ckptfs.tools.contents import DEEPEST, Box, Contents, Leaf, ObjectLeaf, TensorLeaf, batches
from ckptfs.tools.export_target import ExportTarget, open_target, refuse_place, refuse_taken
from ckptfs.tools.inspecting import matching
from ckptfs.tools.opening import open_contents, options_for
from ckptfs.uri import Uri, options_of

__all__ = ["Chosen", "ExportFormat", "Exported", "Selection", "export", "nested", "write_dcp"]

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A leaf to export.

    Attributes:
        leaf: The leaf.
        key: Its new key.
        path: Its new path.
        dtype: The dtype that a tensor is written in; None: the leaf is written as it is.
    """

    leaf: Leaf
    key: str
    path: Path
    dtype: torch.dtype | None

    @property
    def size_bytes(self) -> int:
        """Bytes of a tensor as it is written, or of an object's pickle."""
        if isinstance(self.leaf, ObjectLeaf) or self.dtype is None:
            return self.leaf.size_bytes
        return self.leaf.size_bytes // self.leaf.dtype.itemsize * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Selection:
    """Which leaves are exported, under which keys and in which dtype.

    Attributes:
        filters: fnmatch patterns of the keys as they were saved; empty: all.
        strip: Removed from the front of keys that begin with it.
        prefix: Put in front of all keys.
        dtype: The dtype to convert floating point tensors to; None leaves them as they are.
    """

    filters: Sequence[str] = ()
    strip: str = ""
    prefix: str = ""
    dtype: torch.dtype | None = None

    def of(self, leaves: Iterable[Leaf]) -> list[Chosen]:
        """Choose the leaves to export, in the order of the checkpoint.

        Args:
            leaves: All leaves of the checkpoint.

        Returns:
            The chosen leaves, with their new names.

        Raises:
            StateError: No leaf is chosen, two would get the same name, or one would get an empty name.
        """
        found = [self._chosen(leaf) for leaf in matching(leaves, self.filters)]
        if not found:
            raise StateError(
                "there is nothing to export",
                hint="no key fits the filter" if self.filters else "it holds no tensors",
            )
        sources: dict[str, str] = {}
        for one in found:
            other = sources.setdefault(one.key, one.leaf.key)
            if other != one.leaf.key:
                raise StateError(f"{other!r} and {one.leaf.key!r} would both be called {one.key!r}")
            if not one.key:
                raise StateError(f"nothing is left of {one.leaf.key!r}", hint="strip less")
        return found

    def _chosen(self, leaf: Leaf) -> Chosen:
        key, path = leaf.key, leaf.path or (leaf.key,)
        if self.strip and key.startswith(self.strip):
            key, path = key[len(self.strip) :], _stripped(path, self.strip)
        if self.prefix:
            key, path = self.prefix + key, (f"{self.prefix}{path[0]}", *path[1:])
        if isinstance(leaf, ObjectLeaf):
            return Chosen(leaf, key, path, None)
        return Chosen(leaf, key, path, self._dtype_of(leaf))

    def _dtype_of(self, leaf: TensorLeaf) -> torch.dtype:
        return self.dtype if self.dtype is not None and leaf.dtype.is_floating_point else leaf.dtype


def nested(leaves: Sequence[tuple[Path, object]]) -> object:
    """Nest leaves in dicts and lists by their paths. Pure.

    A list stays a list if all its elements are there. Keys of dicts are text, as DCP saves them.

    Args:
        leaves: The path and the value of each leaf.

    Returns:
        The outermost dict or list.

    Raises:
        StateError: A path is too long, or below another leaf.
    """
    root: dict[str | int, object] = {}
    for path, value in leaves:
        if len(path) > DEEPEST:
            raise StateError(f"a value is {len(path)} levels deep, more than {DEEPEST}")
        node = root
        for part in path[:-1]:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):
                raise StateError(f"{path!r} is below another leaf")
            node = inner
        node[path[-1]] = value
    return _listed(root)


def _listed(node: object) -> object:
    if type(node) is not dict:
        return node
    inner = {key: _listed(value) for key, value in node.items()}
    if inner and all(type(key) is int for key in inner) and set(inner) == set(range(len(inner))):
        return [inner[n] for n in range(len(inner))]
    return inner


def _stripped(path: Path, strip: str) -> Path:
    """Remove ``strip`` from the front of a path that begins with it when joined by dots."""
    left, remaining = list(path), strip
    while remaining and len(left) > 1:
        first = str(left[0])
        if not remaining.startswith(f"{first}."):
            break
        remaining = remaining[len(first) + 1 :]
        left.pop(0)
    if remaining and left and str(left[0]).startswith(remaining):
        left[0] = str(left[0])[len(remaining) :]
    return tuple(left)


_CHUNK_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class _ExportItem:
    """One blob to write: an object or a box of a tensor."""

    chosen: Chosen
    item: WriteItem
    box: Box | None
    size_bytes: int


def write_dcp(  # noqa: PLR0917 - a source, a place, and how
    contents: Contents,
    chosen: Sequence[Chosen],
    made: ExportTarget,
    checkpoint_id: str,
    limit_bytes: int,
    meter: Meter,
) -> None:
    """Write leaves as a DCP checkpoint; ``.metadata`` comes last.

    Args:
        contents: The source.
        chosen: The leaves, with their new names.
        made: Where to write.
        checkpoint_id: The name of the checkpoint, for torch.
        limit_bytes: The size limit of a file, in bytes; a larger item gets a file of its own.
        meter: Counts the bytes that are read.
    """
    items_by_key = {one.key: list(_items_of(one)) for one in chosen}
    items = [item for one in chosen for item in items_by_key[one.key]]
    by_index = {item.item.index: item for item in items}

    def resolve(item: WriteItem) -> torch.Tensor | io.BytesIO:
        one = by_index[item.index]
        meter.advance(one.size_bytes)
        if isinstance(one.chosen.leaf, ObjectLeaf):
            return io.BytesIO(contents.blob(one.chosen.leaf))
        tensor = contents.read([one.box])[0] if one.box is not None else torch.empty(0)
        return tensor if one.chosen.dtype is None else tensor.to(one.chosen.dtype)

    places: dict[MetadataIndex, tuple[str, int, int]] = {}
    for number, group in enumerate(_files(items, limit_bytes)):
        name = data_name(0, number)
        numbered = [(at, one.item) for at, one in enumerate(group)]
        task = FileTask(made.key(name), numbered, has_sidecar=False)
        written = auto_engine(made.storage, task, resolve, Cancelled())
        for place in written.placed:
            index = group[place.position].item.index
            places[index] = (name, place.offset, place.length)
    metadata = Metadata(
        state_dict_metadata={one.key: _described(one, items_by_key[one.key]) for one in chosen},
        planner_data={one.key: one.path for one in chosen},
    )
    save_id = next(fresh_ids())
    described = describe(metadata, places, checkpoint_id=checkpoint_id, save_id=save_id)
    made.put(METADATA, encode_metadata(described))


def _items_of(one: Chosen) -> Iterator[_ExportItem]:
    leaf = one.leaf
    if isinstance(leaf, ObjectLeaf):
        item = WriteItem(MetadataIndex(one.key), WriteItemType.BYTE_IO)
        yield _ExportItem(one, item, None, leaf.size_bytes)
        return
    dtype = leaf.dtype if one.dtype is None else one.dtype
    for number, box in enumerate(_boxes(leaf)):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.lengths)
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(dtype=dtype),
            torch.Size(leaf.shape),
        )
        index = MetadataIndex(one.key, offsets, number)
        item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        yield _ExportItem(one, item, box, math.prod(sizes) * dtype.itemsize)


def _boxes(leaf: TensorLeaf) -> Iterator[Box]:
    """Yield a tensor's shards as they were saved, cut at 512 MiB."""
    pieces = [(shard.offsets, shard.sizes) for shard in leaf.shards]
    if not fills(pieces, leaf.shape):
        raise untiled(leaf.key, pieces, leaf.shape)
    yielded: set[tuple[int, ...]] = set()
    window = _CHUNK_BYTES // leaf.dtype.itemsize
    for shard in leaf.shards:
        if shard.offsets in yielded:
            continue  # each domain has a copy of what was replicated
        yielded.add(shard.offsets)
        if not math.prod(shard.sizes):
            yield Box(leaf, shard.offsets, shard.sizes)
            continue
        zeros = (0,) * len(shard.sizes)
        for piece in pieces_of(shard.sizes, zeros, shard.sizes, window, full=False):
            at = tuple(a + b for a, b in zip(shard.offsets, piece.offsets, strict=True))
            yield Box(leaf, at, piece.lengths)


def _described(
    one: Chosen, items: Sequence[_ExportItem]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(one.leaf, ObjectLeaf):
        return BytesStorageMetadata()
    data = [i.item.tensor_data for i in items if i.item.tensor_data is not None]
    dtype = one.leaf.dtype if one.dtype is None else one.dtype
    chunks = [each.chunk for each in data]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(one.leaf.shape), chunks)


def _files(items: Sequence[_ExportItem], limit_bytes: int) -> Iterator[list[_ExportItem]]:
    """Group items into files of at most ``limit_bytes``; a larger item gets a file of its own."""
    group: list[_ExportItem] = []
    held = 0
    for one in items:
        if group and held + one.size_bytes > limit_bytes:
            yield group
            group, held = [], 0
        group.append(one)
        held += one.size_bytes
    if group:
        yield group


_ALL = Selection()
_PART_BYTES = 16 << 20  # of a safetensors file; three are in memory

# These match exactly the names that exports give: they decide what may be overwritten.
_SAFETENSORS = re.compile(rf"model(-\d{{5,}}-of-\d{{5,}})?\.safetensors|{re.escape(INDEX)}")
_DCP = re.compile(rf"__0_\d+\.distcp|{re.escape(METADATA)}")


class ExportFormat(StrEnum):
    """The format of an export.

    Attributes:
        SAFETENSORS: A Hugging Face checkpoint.
        TORCH: One file of ``torch.save``.
        DCP: A checkpoint of torch.distributed.checkpoint.
    """

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        uri: Where it was written.
        format: Its format.
        files: The names of its files.
        tensors: Number of tensors.
        objects: Number of objects.
        tensor_bytes: Bytes of the tensors.
        left_out: Keys of objects that the format cannot hold.
    """

    uri: Uri
    format: ExportFormat
    files: tuple[str, ...]
    tensors: int
    objects: int
    tensor_bytes: int
    left_out: tuple[str, ...] = ()


def export(
    uri: Any,
    target: Any,
    to: ExportFormat | str,
    selection: Selection = _ALL,
    *,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    scratch: str | None = None,
    follow_links: bool = False,
    meter: Meter = SILENT,
) -> Exported:
    """Export a checkpoint, or a part of one. Local; durable on return.

    After a crash the target is as it was, except as the module ``export_target`` says of object stores.

    Args:
        uri: The checkpoint, or a part of one.
        target: A directory; a file for "torch".
        to: "safetensors", "torch" or "dcp".
        selection: Which keys, under which names, and in which dtype; by default all as they are.
        storage_options: Options for fsspec's filesystem of the checkpoint; None: only those that its URI
            carries.
        target_options: The same for the target; None: those of the checkpoint, if both have the same
            protocol.
        max_shard_size: The size limit of a file, in bytes or as "5GB"; not used for "torch".
        overwrite: Replace an earlier export of this format.
        scratch: For "torch": a directory for a file as large as all tensors; None keeps the tensors in
            memory.
        follow_links: Follow symbolic links that lead out of the checkpoint.
        meter: Counts the bytes that are read.

    Returns:
        What was written.

    Raises:
        AlreadyExistsError: The target exists, and ``overwrite`` is False.
        StateError: Nothing to export; a name twice; a dtype that the format lacks; an object that would
            run code; a target that is the source, above or inside it, or part of a run, or that contains
            something that no export of this format wrote. ``overwrite`` never replaces these.
        SymlinkError: A link leads out of the checkpoint, and ``follow_links`` is False.
        CkptfsError: Errors of reading are those of ``ckptfs.load``.
    """
    kind, limit_bytes = ExportFormat(to), parse_size(max_shard_size)
    place = Uri.parse(target)
    given_options = options_for(target, uri, storage_options, target_options)
    options = {**options_of(target), **given_options}
    reading = {**options_of(uri), **(storage_options or {})}
    refuse_place(Uri.parse(uri), place, reading, options)
    with open_contents(uri, storage_options, follow_links=follow_links) as opened:
        contents, chosen = opened.contents, selection.of(opened.contents.leaves.values())
        contents.check_sizes(one.leaf for one in chosen)
        _check_dtypes(chosen)
        meter.expect(sum(one.leaf.size_bytes for one in chosen))
        if kind is ExportFormat.TORCH:
            _to_torch(contents, chosen, place, options, overwrite, scratch, meter)
            return _result(place, kind, (place.name,), chosen)
        if kind is ExportFormat.DCP:
            with open_target(
                place, options, overwrite=overwrite, ours=_DCP, markers=(METADATA,)
            ) as made:
                write_dcp(contents, chosen, made, str(place), limit_bytes, meter)
            return _result(place, kind, _names(made), chosen)
        tensors = [one for one in chosen if isinstance(one.leaf, TensorLeaf)]
        planned = _plan(tensors, limit_bytes)
        with open_target(
            place, options, overwrite=overwrite, ours=_SAFETENSORS, markers=(INDEX,)
        ) as made:
            _to_safetensors(contents, tensors, planned, made, meter)
        left_out = tuple(one.leaf.key for one in chosen if isinstance(one.leaf, ObjectLeaf))
        return _result(place, kind, _names(made), tensors, left_out)


def _check_dtypes(chosen: Sequence[Chosen]) -> None:
    for one in chosen:
        if isinstance(one.leaf, TensorLeaf) and not dtype_round_trips(one.leaf.dtype):
            raise StateError(
                f"{one.leaf.key!r} is {one.leaf.dtype}, which no export can hold",
                hint="leave it out with a filter",
            )


def _result(
    uri: Uri,
    kind: ExportFormat,
    files: Sequence[str],
    chosen: Sequence[Chosen],
    left_out: tuple[str, ...] = (),
) -> Exported:
    sizes = [one.size_bytes for one in chosen if isinstance(one.leaf, TensorLeaf)]
    objects = len(chosen) - len(sizes)
    return Exported(uri, kind, tuple(files), len(sizes), objects, sum(sizes), left_out)


def _names(made: ExportTarget) -> list[str]:
    return [key.removeprefix(made.prefix) for key in made.written]


def _pieces(
    contents: Contents, chosen: Sequence[Chosen], meter: Meter
) -> Iterator[tuple[Chosen, Box, torch.Tensor]]:
    """Yield all elements of these tensors, in the given order, each tensor in row-major order."""
    by_key = {one.leaf.key: one for one in chosen}
    leaves = [one.leaf for one in chosen if isinstance(one.leaf, TensorLeaf)]
    for batch in batches(leaves):
        for box, tensor in zip(batch, contents.read(batch), strict=True):
            one = by_key[box.leaf.key]
            converted = tensor if one.dtype is None else tensor.to(one.dtype)
            yield one, box, converted.contiguous()
            meter.advance(box.size_bytes)


# -- safetensors ---------------------------------------------------------------------


def _plan(tensors: Sequence[Chosen], limit_bytes: int) -> tuple[PlannedFile, ...]:
    held = []
    for one in tensors:
        if one.dtype is None or dtype_name(dtype_of(one.dtype)) is None:
            raise StateError(
                f"{one.leaf.key!r}: safetensors has no {one.dtype}",
                hint="--dtype converts floating point tensors; --filter leaves others out",
            )
        shape = one.leaf.shape if isinstance(one.leaf, TensorLeaf) else ()
        held.append(HeldTensor(TensorEntry(one.key, dtype_of(one.dtype), shape), (0,)))
    if not held:
        raise StateError("there is no tensor to export", hint="safetensors holds tensors only")
    return plan_files(held, max_bytes=limit_bytes, world=1)


def _to_safetensors(
    contents: Contents,
    tensors: Sequence[Chosen],
    planned: Sequence[PlannedFile],
    made: ExportTarget,
    meter: Meter,
) -> None:
    by_name = {one.key: one for one in tensors}
    for file in planned:
        head, header = encode_header(file.entries, {"format": "pt"})
        size = header.size_bytes + file.size_bytes
        ordered = [by_name[entry.key] for entry in header.entries]
        with (
            made.storage.open_write(made.key(file.name), size_hint_bytes=size) as writer,
            Pump(writer) as pump,
        ):
            leaves = [one.leaf for one in ordered if isinstance(one.leaf, TensorLeaf)]
            converts = any(
                one.dtype is not leaf.dtype for one, leaf in zip(ordered, leaves, strict=True)
            )
            parts = _converted if converts else _in_place
            for part in parts(contents, ordered, head, meter):
                pump.write(part)
    if len(planned) > 1:
        names = {entry.key: file.name for file in planned for entry in file.entries}
        total = sum(file.size_bytes for file in planned)
        made.put(INDEX, encode_index(names, total))


def _converted(
    contents: Contents, ordered: Sequence[Chosen], head: bytes, meter: Meter
) -> Iterator[memoryview]:
    """Yield the bytes of a file with tensors that change their dtype; no part is overwritten."""
    yield memoryview(head)
    for _, _, tensor in _pieces(contents, ordered, meter):
        yield memory_of(tensor)


def _in_place(
    contents: Contents, ordered: Sequence[Chosen], head: bytes, meter: Meter
) -> Iterator[memoryview]:
    """Yield the bytes of a file with tensors that keep their dtypes, in parts for direct I/O.

    Tensors are read into the memory that they are written from. All parts except the last are whole
    pages, and all except the header are in aligned memory. A part keeps its bytes until the consumer has
    taken two more.
    """
    size = _PART_BYTES + mmap.PAGESIZE
    memory = itertools.cycle([aligned_memory(size) for _ in range(3)])
    remainder = memoryview(head)  # what fills no page begins the next part
    if len(remainder) >= mmap.PAGESIZE:
        aligned_end = len(remainder) - len(remainder) % mmap.PAGESIZE
        yield remainder[:aligned_end]
        remainder = remainder[aligned_end:]
    leaves = [one.leaf for one in ordered if isinstance(one.leaf, TensorLeaf)]
    for batch in batches(leaves, _PART_BYTES):
        part = next(memory)
        end = len(remainder)
        part[:end] = remainder
        into = []
        for box in batch:
            into.append(_tensor_in(part[end : end + box.size_bytes], box))
            end += box.size_bytes
        contents.read(batch, into)
        meter.advance(sum(box.size_bytes for box in batch))
        aligned_end = end - end % mmap.PAGESIZE
        yield part[:aligned_end]
        remainder = part[aligned_end:end]
    yield remainder


def _tensor_in(view: memoryview, box: Box) -> torch.Tensor:
    """Return a tensor for the box that uses ``view`` as its memory."""
    if not len(view):
        return torch.empty(box.lengths, dtype=box.leaf.dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(box.leaf.dtype).view(box.lengths)


# -- one torch.save file -------------------------------------------------------------


def _to_torch(  # noqa: PLR0917 - as for export
    contents: Contents,
    chosen: Sequence[Chosen],
    target: Uri,
    options: Mapping[str, Any],
    overwrite: bool,  # noqa: FBT001
    scratch: str | None,
    meter: Meter,
) -> None:
    storage = open_storage(target.parent, options)
    try:
        refuse_taken(storage, target, ours=None, overwrite=overwrite)
    finally:
        storage.close()
    tensors = [one for one in chosen if isinstance(one.leaf, TensorLeaf)]
    objects = [
        (one, _loaded(contents, one.leaf)) for one in chosen if isinstance(one.leaf, ObjectLeaf)
    ]
    with tempfile.TemporaryDirectory(prefix="ckptfs-export-", dir=scratch) as folder:
        memory = _ExportBuffer(f"{folder}/tensors" if scratch is not None else None, tensors)
        full_tensors = {one.key: memory.of(one) for one in tensors}
        for one, box, piece in _pieces(contents, tensors, meter):
            narrowed(full_tensors[one.key], box.offsets, box.lengths).copy_(piece)
        values = {one.key: value for one, value in objects} | full_tensors
        state = nested([(one.path, values[one.key]) for one in chosen])
        try:
            write_object(state, target, options)
        except RecursionError as error:
            raise StateError(
                "an object in it is nested too deeply for torch.save",
                hint="leave it out with a filter; plain DCP keeps it as it is",
            ) from error


class _ExportBuffer:
    """Memory for whole tensors: separate memory for each, or one mapped file for all."""

    def __init__(self, path: str | None, tensors: Sequence[Chosen]) -> None:
        self._at = 0
        self._mapped: torch.Tensor | None = None
        total = sum(_aligned(one.size_bytes) for one in tensors)
        if path is not None and total:
            self._mapped = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)

    def of(self, one: Chosen) -> torch.Tensor:
        """Return an empty tensor of the right shape and dtype."""
        shape = one.leaf.shape if isinstance(one.leaf, TensorLeaf) else ()
        size = one.size_bytes
        if self._mapped is None or one.dtype is None or not size:
            return torch.empty(shape, dtype=one.dtype)
        storage = self._mapped.untyped_storage()[self._at : self._at + size]
        self._at += _aligned(size)
        # Each tensor gets its own torch storage: torch.save writes all of a tensor's storage.
        return torch.empty(0, dtype=one.dtype).set_(storage).view(shape)


def _aligned(size: int) -> int:
    return size + -size % 64


def _loaded(contents: Contents, leaf: ObjectLeaf) -> Any:
    try:
        return contents.value(leaf)
    except CkptfsError:
        raise
    except (pickle.UnpicklingError, RuntimeError, AttributeError, ImportError) as error:
        raise StateError(
            f"the object under {leaf.key!r} would run code: {first_line(error)}",
            hint="leave it out with a filter; plain DCP keeps it as it is",
        ) from error
