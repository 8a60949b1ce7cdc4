"""A checkpoint in another format: safetensors with index, one torch.save file, plain DCP.

    export("s3://bucket/run/step_100", "out/hf", "safetensors", Selection(filters=["model.*"]))

    safetensors   tensors only; streamed, about 64 MiB in memory whatever the size: a part of the file is read to
                  where it is written from, while the part before is written
    torch         one file that torch.load(weights_only=True) opens; the whole state in memory, or
                  mapped from a file of ``scratch``
    dcp           what torch.distributed.checkpoint.load opens by itself: shards as they were saved, one
                  of them in memory (cut at 512 MiB)

Any checkpoint that ``inspect`` reads, to any URI. One process; what is read is verified.
"""

from __future__ import annotations

import itertools
import mmap
import pickle
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from ckptfs.commit.paths import METADATA
from ckptfs.dcp.object_file import write_object
from ckptfs.dcp.planning.leaves import dtype_round_trips, first_line
from ckptfs.dcp.read.boxes import narrowed
from ckptfs.dcp.safetensors.exporter import Held, PlannedFile, plan_files
from ckptfs.dcp.safetensors.safetensors_format import (
    INDEX,
    Entry,
    dtype_name,
    encode_header,
    encode_index,
)
from ckptfs.dcp.sizes import parse_size
from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.errors import CkptfsError, StateError
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.io import aligned_memory
from ckptfs.storage.registry import open_storage
from ckptfs.storage.threads import Pump
from ckptfs.tools.contents import Box, Contents, ObjectLeaf, TensorLeaf, batches
from ckptfs.tools.exporting_dcp import write_dcp
from ckptfs.tools.landing import Landing, landing
from ckptfs.tools.located import options_for
from ckptfs.tools.opened import open_contents
from ckptfs.tools.selecting import Chosen, Selection, nested
from ckptfs.tools.taken import refuse_place, refuse_taken
from ckptfs.uri import Uri, options_of

__all__ = ["ExportFormat", "Exported", "export"]

_ALL = Selection()
_PART_BYTES = 16 << 20  # of a safetensors file; three are in memory

# All names that these exports have, and no others: what is overwritten is known by them.
_SAFETENSORS = re.compile(rf"model(-\d{{5,}}-of-\d{{5,}})?\.safetensors|{re.escape(INDEX)}")
_DCP = re.compile(rf"__0_\d+\.distcp|{re.escape(METADATA)}")


class ExportFormat(StrEnum):
    """What to export to.

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
    """What was written.

    Attributes:
        uri: Where.
        format: The format.
        files: The names of its files.
        tensors: How many tensors.
        objects: How many objects.
        tensor_bytes: Bytes of the tensors.
        left_out: Keys of objects that the format has no place for.
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

    After a crash the target is as it was, with what ``landing`` says of object stores.

    Args:
        uri: The checkpoint, or a part of one.
        target: A directory; of "torch" a file.
        to: "safetensors", "torch" or "dcp".
        selection: Which keys, under which names, and in which dtype; by default all as they are.
        storage_options: For the checkpoint: what fsspec's filesystem of that protocol takes; None: nothing
            beyond what the URI has.
        target_options: The same for the target; None: those of the checkpoint, where both are of one kind of
            storage.
        max_shard_size: The size of a file, in bytes or as "5GB", but of "torch".
        overwrite: Replace an earlier export of this format.
        scratch: For "torch": a directory for a file as large as all tensors; None: the temporary directory.
        follow_links: Read what symbolic links in a checkpoint lead to.
        meter: Counts the bytes that are read.

    Returns:
        What was written.

    Raises:
        AlreadyExistsError: The target is there, and ``overwrite`` is False.
        StateError: Nothing to export; a name twice; a dtype that the format lacks; an object that would run
            code; a target that is the source, above or inside it, or part of a run, or has what no export of
            this format wrote: ``overwrite`` never takes these.
        SymlinkError: A link leads out of the checkpoint, and ``follow_links`` is False.
        CkptfsError: Errors of reading are those of ``ckptfs.load``.
    """
    kind, limit_bytes = ExportFormat(to), parse_size(max_shard_size)
    place = Uri.parse(target)
    told = options_for(target, uri, storage_options, target_options)
    options = {**options_of(target), **told}
    reading = {**options_of(uri), **(storage_options or {})}
    refuse_place(Uri.parse(uri), place, reading, options)
    with open_contents(uri, storage_options, follow_links=follow_links) as opened:
        contents, chosen = opened.contents, selection.of(opened.contents.leaves.values())
        contents.check_sizes(one.leaf for one in chosen)
        _check_dtypes(chosen)
        meter.expect(sum(one.leaf.size_bytes for one in chosen))
        if kind is ExportFormat.TORCH:
            _to_torch(contents, chosen, place, options, overwrite, scratch, meter)
            return _told(place, kind, (place.name,), chosen)
        if kind is ExportFormat.DCP:
            with landing(
                place, options, overwrite=overwrite, ours=_DCP, markers=(METADATA,)
            ) as made:
                write_dcp(contents, chosen, made, str(place), limit_bytes, meter)
            return _told(place, kind, _names(made), chosen)
        tensors = [one for one in chosen if isinstance(one.leaf, TensorLeaf)]
        planned = _plan(tensors, limit_bytes)
        with landing(
            place, options, overwrite=overwrite, ours=_SAFETENSORS, markers=(INDEX,)
        ) as made:
            _to_safetensors(contents, tensors, planned, made, meter)
        left_out = tuple(one.leaf.key for one in chosen if isinstance(one.leaf, ObjectLeaf))
        return _told(place, kind, _names(made), tensors, left_out)


def _check_dtypes(chosen: Sequence[Chosen]) -> None:
    for one in chosen:
        if isinstance(one.leaf, TensorLeaf) and not dtype_round_trips(one.leaf.dtype):
            raise StateError(
                f"{one.leaf.key!r} is {one.leaf.dtype}, which no export can hold",
                hint="leave it out with a filter",
            )


def _told(
    uri: Uri,
    kind: ExportFormat,
    files: Sequence[str],
    chosen: Sequence[Chosen],
    left_out: tuple[str, ...] = (),
) -> Exported:
    sizes = [one.size_bytes for one in chosen if isinstance(one.leaf, TensorLeaf)]
    objects = len(chosen) - len(sizes)
    return Exported(uri, kind, tuple(files), len(sizes), objects, sum(sizes), left_out)


def _names(made: Landing) -> list[str]:
    return [key.removeprefix(made.prefix) for key in made.written]


def _pieces(
    contents: Contents, chosen: Sequence[Chosen], meter: Meter
) -> Iterator[tuple[Chosen, Box, torch.Tensor]]:
    """Every element of these tensors, in the order given, each in order of its rows."""
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
        if one.dtype is None or dtype_name(one.dtype) is None:
            raise StateError(
                f"{one.leaf.key!r}: safetensors has no {one.dtype}",
                hint="--dtype converts floating point tensors; --filter leaves others out",
            )
        shape = one.leaf.shape if isinstance(one.leaf, TensorLeaf) else ()
        held.append(Held(Entry(one.key, one.dtype, shape), (0,)))
    if not held:
        raise StateError("there is no tensor to export", hint="safetensors holds tensors only")
    return plan_files(held, max_bytes=limit_bytes, world=1)


def _to_safetensors(
    contents: Contents,
    tensors: Sequence[Chosen],
    planned: Sequence[PlannedFile],
    made: Landing,
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
    """The bytes of a file, in memory that nobody changes."""
    yield memoryview(head)
    for _, _, tensor in _pieces(contents, ordered, meter):
        yield memory_of(tensor)


def _in_place(
    contents: Contents, ordered: Sequence[Chosen], head: bytes, meter: Meter
) -> Iterator[memoryview]:
    """The bytes of a file with tensors that keep their dtypes, in parts that may be written past the page cache.

    Tensors are read to where they are written from. All parts but the last are whole pages, and in aligned memory
    but for the header. Each keeps its bytes until two more have been asked for.
    """
    size = _PART_BYTES + mmap.PAGESIZE
    memory = itertools.cycle([aligned_memory(size) for _ in range(3)])
    rest = memoryview(head)  # what fills no page begins the next part
    if len(rest) >= mmap.PAGESIZE:
        whole = len(rest) - len(rest) % mmap.PAGESIZE
        yield rest[:whole]
        rest = rest[whole:]
    leaves = [one.leaf for one in ordered if isinstance(one.leaf, TensorLeaf)]
    for batch in batches(leaves, _PART_BYTES):
        part = next(memory)
        end = len(rest)
        part[:end] = rest
        into = []
        for box in batch:
            into.append(_tensor_in(part[end : end + box.size_bytes], box))
            end += box.size_bytes
        contents.read(batch, into)
        meter.advance(sum(box.size_bytes for box in batch))
        whole = end - end % mmap.PAGESIZE
        yield part[:whole]
        rest = part[whole:end]
    yield rest


def _tensor_in(view: memoryview, box: Box) -> torch.Tensor:
    """A tensor for the box, with ``view`` for its memory."""
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
        memory = _Memory(f"{folder}/tensors" if scratch is not None else None, tensors)
        whole = {one.key: memory.of(one) for one in tensors}
        for one, box, piece in _pieces(contents, tensors, meter):
            narrowed(whole[one.key], box.offsets, box.lengths).copy_(piece)
        values = {one.key: value for one, value in objects} | whole
        whole_state = nested([(one.path, values[one.key]) for one in chosen])
        try:
            write_object(whole_state, target, options)
        except RecursionError as error:
            raise StateError(
                "an object in it is nested too deeply for torch.save",
                hint="leave it out with a filter; plain DCP keeps it as it is",
            ) from error


class _Memory:
    """Where whole tensors are kept: in memory of their own, or all in one mapped file."""

    def __init__(self, path: str | None, tensors: Sequence[Chosen]) -> None:
        self._at = 0
        self._mapped: torch.Tensor | None = None
        total = sum(_aligned(one.size_bytes) for one in tensors)
        if path is not None and total:
            self._mapped = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)

    def of(self, one: Chosen) -> torch.Tensor:
        """Memory for this tensor."""
        shape = one.leaf.shape if isinstance(one.leaf, TensorLeaf) else ()
        size = one.size_bytes
        if self._mapped is None or one.dtype is None or not size:
            return torch.empty(shape, dtype=one.dtype)
        storage = self._mapped.untyped_storage()[self._at : self._at + size]
        self._at += _aligned(size)
        # A storage of its own: torch.save writes all of a tensor's storage.
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
