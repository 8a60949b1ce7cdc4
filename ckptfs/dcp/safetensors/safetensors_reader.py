"""Read a directory of safetensors files as a checkpoint: its metadata and the places of tensors.

    index, or the files that are there  ->  headers  ->  Metadata (torch's), places of payloads

Any program may have written the directory: one file, several with an index, or the shards of torch's
HuggingFaceStorageWriter; each of those says in its metadata where in the whole tensor it belongs. What a file
says is used only after it was compared with the file's size, and with its digests if ckptfs wrote the file.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptfs import _torch
from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.digests import ItemDigests, first_bad_block
from ckptfs.commit.operations import read_limited
from ckptfs.dcp.metadata.metadata_reader import FileRange, Places, TensorDescription
from ckptfs.dcp.metadata.torch_names import TORCH
from ckptfs.dcp.read.data_file import Source, Verify, open_data, read_digests
from ckptfs.dcp.safetensors.safetensors_format import (
    INDEX,
    SUFFIX,
    Header,
    TensorEntry,
    decode_header,
    decode_index,
    header_size,
)
from ckptfs.errors import IncompleteCheckpointError, IntegrityError, ManifestError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.storage.threads import Threads

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

__all__ = ["Layout", "read_file_layout", "read_layout", "with_aliases"]

_SHARDING = "DCP_SHARDING_INFO"  # torch's name in __metadata__
_FIRST_BYTES = 64 << 10  # most headers fit: one request
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor: the file that holds it, its offsets in the tensor, and its entry."""

    file: str
    offsets: tuple[int, ...]
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a directory.

    ``aliases``: a tied key -> the key that its bytes are stored under.
    """

    chunks: Mapping[str, tuple[_Chunk, ...]]
    aliases: Mapping[str, str]

    @property
    def keys(self) -> Collection[str]:
        """As ``Description.keys``."""
        return self.chunks.keys()

    @property
    def paths(self) -> Mapping[str, Any]:
        """As ``Description.paths``: such files know none."""
        return {}

    @property
    def save_id(self) -> None:
        """As ``Description.save_id``: such files name none."""
        return None

    def describe(self, key: str) -> TensorDescription:
        """As ``Description.describe``."""
        chunks = self.chunks[key]
        boxes = [(c.offsets, c.entry.shape) for c in chunks]
        return TensorDescription(chunks[0].entry.dtype, _size_of(chunks), boxes)

    def places(self) -> Places:
        """As ``Description.places``."""
        return {
            (key, c.offsets): FileRange(c.file, c.entry.start, c.entry.size_bytes)
            for key, chunks in self.chunks.items()
            for c in chunks
        }

    def metadata(self) -> Metadata:
        """Return torch's description, with the place of every chunk."""
        import torch
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        described: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        info = _torch.storage_info_type()
        for key, chunks in self.chunks.items():
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=TORCH[chunks[0].entry.dtype]),
                torch.Size(_size_of(chunks)),
                [
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.entry.shape))
                    for c in chunks
                ],
            )
            for chunk in chunks:
                index = MetadataIndex(key, torch.Size(chunk.offsets))
                places[index] = info(chunk.file, chunk.entry.start, chunk.entry.size_bytes)
        return Metadata(state_dict_metadata=described, storage_data=places)

    def source(self, source: Source) -> Source:
        """Return ``source`` with the places of all payloads."""
        layouts: dict[str, dict[int, ItemDigests]] = defaultdict(dict)
        for chunk in (chunk for chunks in self.chunks.values() for chunk in chunks):
            start, size = chunk.entry.start, chunk.entry.size_bytes
            if size:
                layouts[chunk.file][start] = ItemDigests(start, size, 0, size, ())
        return replace(source, layouts=layouts)


def read_layout(storage: Storage, found: LocatedCheckpoint, verify: Verify) -> Layout:
    """Read the index and every header. Local.

    NotFoundError: there is no safetensors file. IncompleteCheckpointError: a file or a shard is missing.
    ManifestError, IntegrityError: a file is damaged or of another kind.
    """
    listed = _names(storage, found)
    where = storage.uri(found.home)
    weight_map: dict[str, str] | None = None
    if INDEX in listed:
        weight_map = decode_index(
            read_limited(storage, f"{found.home}/{INDEX}"), f"{where}/{INDEX}"
        )
        names = sorted(set(weight_map.values()))
    else:
        # As in transformers: a file with this name, if it exists, is the whole checkpoint.
        shards = sorted(name for name in listed if name.endswith(SUFFIX))
        names = ["model.safetensors"] if "model.safetensors" in shards else shards
    if not names:
        raise NotFoundError(
            "no safetensors file there", uri=where, hint="it holds another kind of checkpoint"
        )
    sidecars = (
        {f.path: f.digests for f in found.manifest.files if f.digests} if found.manifest else {}
    )
    source = Source(storage, found.home, sidecars, verify)
    with Threads(min(_AT_ONCE, len(names)), "ckptfs-header") as pool:
        headers = dict(zip(names, pool.map(lambda n: _read_header(source, n), names), strict=True))
    return _checked_layout(headers, weight_map, where)


def read_file_layout(source: Source, name: str) -> Layout:
    """Read the tensors of one file by itself. Local. Errors as for ``read_layout``."""
    return _checked_layout(
        {name: _read_header(source, name)}, None, source.storage.uri(source.home)
    )


def with_aliases(layout: Layout, keys: Iterable[str]) -> Layout:
    """Return the layout with tied tensors under the keys that are requested.

    ``keys`` are the keys that the ranks of a load request. If no key of a tied group is requested, the group
    keeps its stored key.
    """
    wanted = set(keys)
    groups: dict[str, list[str]] = defaultdict(list)
    for alias, stored_key in layout.aliases.items():
        groups[stored_key].append(alias)
    chunks = dict(layout.chunks)
    for stored_key, aliases in groups.items():
        used = [alias for alias in aliases if alias in wanted]
        for alias in used:
            chunks[alias] = layout.chunks[stored_key]
        if used and stored_key not in wanted:
            del chunks[stored_key]
    return Layout(chunks, {})


def _names(storage: Storage, found: LocatedCheckpoint) -> set[str]:
    if found.manifest is not None:
        return {file.path for file in found.manifest.files}
    return {entry.name for entry in storage.list(found.home) if not entry.is_dir}


def _read_header(source: Source, name: str) -> Header:
    where = source.storage.uri(source.key(name))
    with open_data(source, name) as reader:
        first = bytearray(min(_FIRST_BYTES, reader.size_bytes))
        reader.read_into(0, memoryview(first))
        size = header_size(first, reader.size_bytes, where)
        raw = first[:size]
        if size > len(first):
            raw = bytearray(size)
            reader.read_into(0, memoryview(raw))
        header = decode_header(bytes(raw), reader.size_bytes, where)
    digests = read_digests(source, name) if source.verify is Verify.READ else None
    if digests is not None:
        described = digests.get(0)
        if described is None or described.length != size:
            raise IntegrityError("its header has another size than was written", uri=where)
        if first_bad_block(described, 0, memoryview(raw)) is not None:
            raise IntegrityError("its header differs from what was written", uri=where)
    return header


def _checked_layout(
    headers: Mapping[str, Header], weight_map: Mapping[str, str] | None, where: object
) -> Layout:
    found: dict[str, list[_Chunk]] = defaultdict(list)
    for name, header in headers.items():
        offsets = _offsets(header, f"{where}/{name}")
        for entry in header.entries:
            if weight_map is None or weight_map.get(entry.key) == name:
                at = offsets.get(entry.key, (0,) * len(entry.shape))
                found[entry.key].append(_Chunk(name, at, entry))
    lost = sorted(set(weight_map or ()) - set(found))
    if lost:
        raise ManifestError(
            f"{lost[0]!r} is not in {(weight_map or {})[lost[0]]}, where the index says it is",
            uri=str(where),
            hint=f"{len(lost)} keys are missing",
        )
    for key, chunks in found.items():
        # Uneven sharding leaves some ranks without a row; their files have an empty chunk.
        found[key] = [c for c in chunks if c.entry.size_bytes] or chunks[:1]
        _check_chunks(key, found[key], where)
    aliases = {
        alias: stored_key
        for header in headers.values()
        for alias, stored_key in header.metadata.items()
        if stored_key in found and alias not in found
    }
    return Layout({key: tuple(chunks) for key, chunks in found.items()}, aliases)


def _check_chunks(key: str, chunks: Sequence[_Chunk], where: object) -> None:
    """Check that every element exists exactly once.

    A hole would keep whatever the memory contained before.
    """
    if len({(c.entry.dtype, len(c.entry.shape)) for c in chunks}) > 1:
        raise ManifestError(f"the shards of {key!r} are of different tensors", uri=str(where))
    total, present = math.prod(_size_of(chunks)), sum(math.prod(c.entry.shape) for c in chunks)
    if len({c.offsets for c in chunks}) < len(chunks) or present > total:
        files = ", ".join(sorted({c.file for c in chunks}))
        raise ManifestError(
            f"{key!r} exists more than once, in {files}",
            uri=str(where),
            hint="the directory holds files of two checkpoints; remove those of one",
        )
    if present < total:
        raise IncompleteCheckpointError(
            f"{key!r} is incomplete: it has only {present} of {total} elements",
            uri=str(where),
            hint="a file of another rank is missing: copy it here",
        )


def _size_of(chunks: Sequence[_Chunk]) -> tuple[int, ...]:
    ends = [tuple(o + s for o, s in zip(c.offsets, c.entry.shape, strict=True)) for c in chunks]
    return tuple(max(dims) for dims in zip(*ends, strict=True))


def _offsets(header: Header, where: object) -> dict[str, tuple[int, ...]]:
    """Return key -> offsets in the whole tensor, for a file of shards that torch wrote."""
    text = header.metadata.get(_SHARDING)
    if text is None:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    try:
        sharding = json.loads(text)
        for entry in header.entries:
            offsets = sharding[entry.key]["saved_offsets"]
            if len(offsets) != len(entry.shape) or any(
                type(o) is not int or o < 0 for o in offsets
            ):
                raise ValueError(f"{entry.key!r} has the offsets {offsets!r}")
            found[entry.key] = tuple(offsets)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{_SHARDING} is not torch's: {error}", uri=str(where)) from error
    return found
