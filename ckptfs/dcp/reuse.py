"""unchanged="reference": what the last committed save holds need not be written again.

    base     what this rank may take over: items and files of the last committed save of the kind
    compare  this rank's items with the digests of that save's        (reuse_compare.py)
    choose   files of which at least half is unchanged stay in use    (reuse_plan.py)
    take     hard links, or the same keys of an object store          (commit/shared_data.py)
    write    everything else, in files of bounded size                (layout.py)

A rank compares only what it writes, and takes over only what its own domain holds. Whatever goes
wrong with the base costs bytes, never the save: then the items are written.

How sure a comparison is: an item is taken over when its dtype, its shape and the xxh3_64 of every
block of 1 MiB are those of the base. A changed block has the same digest once in 2**64: ten thousand
saves of a terabyte meet that with a probability below 10**-9, which is less than disks do by
themselves. Against somebody who makes tensors collide on purpose it is no defence; whoever chooses
the tensors need not collide to change them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckptfs.commit.catalog import Found, find
from ckptfs.commit.digests import ItemDigests, decode_digests
from ckptfs.commit.entries import Seal
from ckptfs.commit.layout import AttemptKeys, shared_key
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import drive, read_limited
from ckptfs.commit.shared_data import file_key
from ckptfs.commit.spec import SaveSpec
from ckptfs.dcp.opened import read_metadata
from ckptfs.errors import ArgumentChoice, CkptfsError, StateError
from ckptfs.storage.base import Capabilities, Shape, Storage
from ckptfs.uri import Uri

__all__ = [
    "DEFAULT_CUT",
    "Base",
    "Cut",
    "HeldFile",
    "HeldItem",
    "Memory",
    "Site",
    "Unchanged",
    "base_of",
    "need_run",
]

logger = logging.getLogger(__name__)


class Unchanged(ArgumentChoice, parameter="unchanged"):
    """What to do with items that are what the last committed save of the run holds."""

    WRITE = "write"
    REFERENCE = "reference"  # they cost no bytes; needs a held run


@dataclass(frozen=True, slots=True)
class HeldItem:
    """An item of a committed save: its file (the manifest's path) and what its bytes are.

    dtype and sizes are of the chunk that was saved, None and () for an object.
    """

    path: str
    digests: ItemDigests
    dtype: torch.dtype | None
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A data file of a committed save and its sidecar, as its manifest lists them."""

    record: FileRecord
    sidecar: FileRecord


@dataclass(frozen=True, slots=True)
class Base:
    """What this rank may take over of the save ``save_id``. homes: where its data may lie now."""

    save_id: str
    homes: tuple[str, ...]
    items: Mapping[MetadataIndex, HeldItem]
    files: Mapping[str, HeldFile]

    def origin_of(self, file: HeldFile) -> str:
        """The save that wrote the file's bytes: never one that took them over itself."""
        return file.record.origin or self.save_id


@dataclass(frozen=True, slots=True)
class Site:
    """Where one rank writes one save. domain: the id of the domain that it writes in."""

    storage: Storage
    caps: Capabilities
    keys: AttemptKeys
    domain: str

    @property
    def prefix(self) -> str:
        """Where its data files go: on object stores to where later saves may use them too."""
        if self.is_shared:
            return f"{shared_key(self.keys.save_id)}/"
        return f"{self.keys.data}/"

    @property
    def homes(self) -> tuple[str, ...]:
        """Where the paths of its manifest begin, in the direction of movement."""
        return homes_of(self.keys)

    @property
    def is_shared(self) -> bool:
        """Whether files are shared by their keys. Not where exclusive creates are missing: a second
        owner could delete what this one lists.
        """
        return self.keys.shape is Shape.OBJECT and self.caps.exclusive_create


@dataclass(frozen=True, slots=True)
class Cut:
    """How what is written is cut into files: small tensors together, large ones alone."""

    bundle_bytes: int = 256 << 20
    alone_bytes: int = 64 << 20


DEFAULT_CUT = Cut()
_KINDS = 3  # checkpoints, weights, and one that failed


@dataclass(slots=True)
class Memory:
    """What one process knows of the saves that it wrote last, so that it need not read them back. One
    is believed where the log calls it the last committed. cut: of all its saves.
    """

    cut: Cut = DEFAULT_CUT
    _written: dict[str, Base] = field(default_factory=dict, repr=False)

    def learn(self, base: Base) -> None:
        """Keep what was written just now, and of the others the last of each kind."""
        self._written[base.save_id] = base
        while len(self._written) > _KINDS:
            del self._written[next(iter(self._written))]

    @property
    def known(self) -> dict[str, Base]:
        """By save_id, the one used last behind."""
        return dict(self._written)

    def recall(self, save_id: str) -> Base | None:
        """What is known of a save."""
        known = self._written.pop(save_id, None)
        if known is not None:
            self._written[save_id] = known  # used last
        return known


def need_run(spec: SaveSpec, target: Uri | str) -> None:
    """StateError unless the save holds its run: else anybody could delete what it builds on."""
    if spec.run is None:
        raise StateError(
            'unchanged="reference" needs a run that is held',
            uri=target,
            hint="run = ckptfs.prepare_run(...), then save(..., run=run); a manager holds its run",
        )


def base_of(
    seal: Seal | None, site: Site, wanted: Sequence[MetadataIndex], memory: Memory
) -> Base | None:
    """The base of a save: remembered, or read from storage; None where there is none to be had.

    wanted: the items that this rank writes.
    """
    if seal is None or not (site.is_shared or site.keys.shape is Shape.FILESYSTEM):
        return None
    known = memory.recall(seal.save_id)
    if known is not None:
        return known
    try:
        return _read_base(seal, site, wanted)
    except CkptfsError as error:
        logger.warning("everything is written: %s cannot be built on: %s", seal.name, error)
        return None


def homes_of(keys: AttemptKeys) -> tuple[str, ...]:
    """What a manifest's paths, which begin with the save_id, are relative to."""
    return tuple(home.rsplit("/", 1)[0] for home in keys.homes())


def _read_base(seal: Seal, site: Site, wanted: Sequence[MetadataIndex]) -> Base:
    storage, shape = site.storage, site.keys.shape
    found = drive(find(seal, shape, storage.uri(seal.name)), storage)
    metadata = read_metadata(storage, found)
    # Of other domains the disks may not be seen from here.
    files = _files_of(found, site.domain)
    digests: dict[str, Mapping[int, ItemDigests]] = {}
    items = {}
    for index in wanted:
        info = metadata.storage_data.get(index)
        if info is None or info.relative_path not in files:
            continue
        path = info.relative_path
        if path not in digests:
            digests[path] = _digests_of(storage, found, files[path])
        known = digests[path].get(info.offset)
        described = _described(metadata, index)
        if known is not None and known.length == info.length and described is not None:
            items[index] = HeldItem(path, known, *described)
    homes = homes_of(AttemptKeys(shape, seal.name, seal.save_id))
    return Base(seal.save_id, homes, items, files)


def _files_of(found: Found, domain: str) -> dict[str, HeldFile]:
    listed = () if found.manifest is None else found.manifest.files
    here = {f.path: f for f in listed if f.domain in (None, domain)}
    return {
        f.path: HeldFile(f, here[f.digests])
        for f in here.values()
        if f.digests is not None and f.digests in here
    }


def _digests_of(storage: Storage, found: Found, file: HeldFile) -> Mapping[int, ItemDigests]:
    key = file_key(file.sidecar, found.home)
    return decode_digests(read_limited(storage, key), storage.uri(key)).by_offset()


def _described(
    metadata: Metadata, index: MetadataIndex
) -> tuple[torch.dtype | None, tuple[int, ...]] | None:
    """dtype and sizes of the chunk that was saved under an index; None: not described."""
    described = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(described, TensorStorageMetadata):
        return None if described is None else (None, ())
    offsets = tuple(index.offset or ())
    for chunk in described.chunks:
        if tuple(chunk.offsets) == offsets:
            return described.properties.dtype, tuple(chunk.sizes)
    return None
