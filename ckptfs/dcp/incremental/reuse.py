"""unchanged="reference": do not write again what the last committed save contains.

    base     what this rank may take over: items and files of the last committed save of its kind
    compare  this rank's items with the digests of that save
    choose   files that are at least half unchanged stay in use
    take     hard links, or the same keys of an object store          (commit/delete/shared_data.py)
    write    everything else, in files of bounded size                (write/rank_files.py)

    filesystem     __0_0.distcp  a link to the base's file      __0_1.distcp  written
    object store   <origin>/__0_3.distcp  listed by its key     <own>/__0_0.distcp  written to _data/

A rank compares only what it writes, and takes over only what its own domain holds. If anything is wrong with
the base, the items are written: that costs bytes, but the save does not fail. All of this is local, and what
it returns is durable, including names.

Compare: nothing is read from storage. Frames are not compared, because torch makes them from dtype and shape.
A tensor in host memory is digested in place. Of a tensor on a device, the first block is fetched and then the
rest in pieces: a changed tensor usually differs at once, which costs one small copy. An item is taken over if
its dtype, its shape and the xxh3_64 of every block of 1 MiB equal those of the base. A changed block has the
same digest once in 2**64 cases: over ten thousand saves of a terabyte the probability of that is below
10**-9, less than that of an error of the disks. It is no defence against somebody who constructs colliding
tensors; but somebody who chooses the tensors can change them without a collision.

Choose: a file stays in use if the unchanged items of this rank in it are at least half of it, so a save keeps
alive at most twice what it needs. Unchanged items of other files are written again, into other files than the
changed items: from then on they share files with items that do not change either.

    objects | unchanged, to 256 MiB each | changed, to 256 MiB each | tensors from 64 MiB on, alone
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs.commit.catalog.catalog import LocatedCheckpoint, find
from ckptfs.commit.delete.shared_data import file_exists, file_key, link_file
from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests, decode_digests, first_bad_block
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import AttemptKeys, shared_key
from ckptfs.commit.save.spec import SaveSpec, WrittenPart
from ckptfs.dcp.loading import read_metadata
from ckptfs.dcp.write.host_memory import Loan, Resolve, host_tensor, memory_of
from ckptfs.dcp.write.pipeline import encode_placed, written_part
from ckptfs.dcp.write.rank_files import (
    Placed,
    RankFiles,
    WriteEngine,
    auto_engine,
    data_name,
    files_for,
    sidecar_name,
    write_files,
)
from ckptfs.errors import ArgumentChoice, CkptfsError, StateError, StorageError, UnsupportedError
from ckptfs.storage.base import Capabilities, Shape, Storage
from ckptfs.uri import Uri

logger = logging.getLogger("ckptfs.dcp")

__all__ = [
    "Base",
    "Cut",
    "HeldFile",
    "HeldItem",
    "Memory",
    "RankItems",
    "Site",
    "Unchanged",
    "bundles",
    "files_in_use",
    "need_run",
    "write_changed",
]


class Unchanged(ArgumentChoice, parameter="unchanged"):
    """What to do with items that equal those of the last committed save of the run."""

    WRITE = "write"
    REFERENCE = "reference"  # do not write them again; needs a held run


@dataclass(frozen=True, slots=True)
class HeldItem:
    """An item of a committed save.

    Attributes:
        path: Its file, as the manifest has it.
        digests: Its place in the file and the digests of its blocks.
        dtype: The dtype of the saved chunk; None for an object.
        sizes: The sizes of the saved chunk; () for an object.
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
    """What this rank may take over of the save ``save_id``.

    Attributes:
        save_id: The save.
        homes: Where its data may be now.
        items: Its items.
        files: Its files, by path.
    """

    save_id: str
    homes: tuple[str, ...]
    items: Mapping[MetadataIndex, HeldItem]
    files: Mapping[str, HeldFile]

    def origin_of(self, file: HeldFile) -> str:
        """Return the save that wrote the file's bytes, never one that took the file over."""
        return file.record.origin or self.save_id


@dataclass(frozen=True, slots=True)
class Site:
    """Where one rank writes one save; ``domain`` is the id of the domain that it writes in."""

    storage: Storage
    caps: Capabilities
    keys: AttemptKeys
    domain: str

    @property
    def prefix(self) -> str:
        """Where its data files go; on object stores that is where later saves may use them too."""
        if self.is_shared:
            return f"{shared_key(self.keys.save_id)}/"
        return f"{self.keys.data}/"

    @property
    def homes(self) -> tuple[str, ...]:
        """What the paths of its manifest may be relative to, in the order in which data moves."""
        return homes_of(self.keys)

    @property
    def is_shared(self) -> bool:
        """Whether files are shared by their keys.

        Not on a store without exclusive creates: there a second owner could delete what this one lists.
        """
        return self.keys.shape is Shape.OBJECT and self.caps.exclusive_create


@dataclass(frozen=True, slots=True)
class Cut:
    """How items that are written are divided into files: small tensors together, large ones alone."""

    bundle_bytes: int = 256 << 20
    alone_bytes: int = 64 << 20


DEFAULT_CUT = Cut()
_KINDS = 3  # saves to remember: a checkpoint, weights, and one that failed


@dataclass(slots=True)
class Memory:
    """What this process knows of the saves that it wrote last, so that it need not read them back.

    A remembered save is used only if the log says that it is the last committed one. ``cut`` holds for all
    saves.
    """

    cut: Cut = DEFAULT_CUT
    _written: dict[str, Base] = field(default_factory=dict, repr=False)

    def learn(self, base: Base) -> None:
        """Remember what was written just now, and the saves used last, three in all."""
        self._written[base.save_id] = base
        while len(self._written) > _KINDS:
            del self._written[next(iter(self._written))]

    @property
    def known(self) -> dict[str, Base]:
        """The remembered saves by save_id; the one used last is at the end."""
        return dict(self._written)

    def recall(self, save_id: str) -> Base | None:
        """Return what is known of a save; None if it is not remembered."""
        known = self._written.pop(save_id, None)
        if known is not None:
            self._written[save_id] = known  # used last
        return known


def need_run(spec: SaveSpec, target: Uri | str) -> None:
    """Raise StateError unless the save has a held run; else others could delete what it builds on."""
    if spec.run is None:
        raise StateError(
            'unchanged="reference" needs a run that is held',
            uri=target,
            hint="run = ckptfs.prepare_run(...), then save(..., run=run); a manager holds its run",
        )


def base_of(
    seal: Seal | None, site: Site, wanted: Sequence[MetadataIndex], memory: Memory
) -> Base | None:
    """Return the base of a save: remembered, or read from storage; None if there is none.

    ``wanted`` are the items that this rank writes.
    """
    if seal is None or not (site.is_shared or site.keys.shape is Shape.FILESYSTEM):
        return None
    known = memory.recall(seal.save_id)
    if known is not None:
        return known
    try:
        return _read_base(seal, site, wanted)
    except CkptfsError as error:
        logger.warning("every tensor is written: %s cannot be referenced: %s", seal.name, error)
        return None


def homes_of(keys: AttemptKeys) -> tuple[str, ...]:
    """Return what a manifest's paths, which begin with the save_id, are relative to."""
    return tuple(home.rsplit("/", 1)[0] for home in keys.homes())


def _read_base(seal: Seal, site: Site, wanted: Sequence[MetadataIndex]) -> Base:
    storage, shape = site.storage, site.keys.shape
    found = drive(find(seal, shape, storage.uri(seal.name)), storage)
    metadata = read_metadata(storage, found)
    # The disks of other domains may not be visible from here.
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


def _files_of(found: LocatedCheckpoint, domain: str) -> dict[str, HeldFile]:
    listed = () if found.manifest is None else found.manifest.files
    here = {f.path: f for f in listed if f.domain in (None, domain)}
    return {
        f.path: HeldFile(f, here[f.digests])
        for f in here.values()
        if f.digests is not None and f.digests in here
    }


def _digests_of(
    storage: Storage, found: LocatedCheckpoint, file: HeldFile
) -> Mapping[int, ItemDigests]:
    key = file_key(file.sidecar, found.home)
    return decode_digests(read_limited(storage, key), storage.uri(key)).by_offset()


def _described(
    metadata: Metadata, index: MetadataIndex
) -> tuple[torch.dtype | None, tuple[int, ...]] | None:
    """Return dtype and sizes of the chunk that was saved under an index; None if not described."""
    described = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(described, TensorStorageMetadata):
        return None if described is None else (None, ())
    offsets = tuple(index.offset or ())
    for chunk in described.chunks:
        if tuple(chunk.offsets) == offsets:
            return described.properties.dtype, tuple(chunk.sizes)
    return None


_PIECE_BYTES = 64 * BLOCK_SIZE_BYTES


def is_alike(item: WriteItem, held: HeldItem) -> bool:
    """Return whether kind, dtype, shape and size of the item match. Looks at no data."""
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return held.dtype is None and not held.digests.payload_length
    data = item.tensor_data
    if data.properties.dtype != held.dtype or tuple(data.chunk.sizes) != held.sizes:
        return False
    size_bytes = data.properties.dtype.itemsize
    for length in data.chunk.sizes:
        size_bytes *= length
    # A payload length of 0 for a tensor with bytes: its payload was not found when it was written.
    return held.digests.payload_length == size_bytes


def is_unchanged(held: HeldItem, data: torch.Tensor | io.BytesIO) -> bool:
    """Return whether the data of an item that ``is_alike`` has the digests of the held one."""
    known = held.digests
    if isinstance(data, io.BytesIO):
        view = memoryview(data.getvalue())
        return len(view) == known.length and first_bad_block(known, 0, view) is None
    return all(_is_same(known, start, piece) for start, piece in _pieces(data))


def _is_same(known: ItemDigests, start: int, piece: memoryview) -> bool:
    return first_bad_block(known, known.payload_offset + start, piece) is None


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yield the tensor's bytes in order, in whole blocks but for the last, and each offset."""
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


Numbered = tuple[int, WriteItem]  # an item and its position in the rank's plan


def files_in_use(base: Base, unchanged: Mapping[int, HeldItem]) -> dict[str, list[int]]:
    """Return the base's files that stay in use, with the positions of the items in them.

    ``unchanged``: position in this rank's plan -> the equal item of the base.
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
    """Divide the items at the positions ``write`` into files.

    Args:
        items: The rank's plan.
        write: The positions of the items to write.
        stable: The positions of those that are unchanged in the base.
        cut: The sizes of files.
        files: How many files can be written at once. There are at least as many if there is enough to share.

    Returns:
        The items of each file, with their positions.
    """
    numbered = [(position, items[position]) for position in sorted(write)]
    objects = [pair for pair in numbered if pair[1].type is WriteItemType.BYTE_IO]
    stable_objects = [pair for pair in objects if pair[0] in stable]
    new = [pair for pair in objects if pair[0] not in stable]
    tensors = [pair for pair in numbered if pair[1].type is not WriteItemType.BYTE_IO]
    total = sum(size_bytes(item) for _, item in tensors)
    bound = min(cut.bundle_bytes, max(1, -(-total // max(1, files))))
    alone = [pair for pair in tensors if size_bytes(pair[1]) >= cut.alone_bytes]
    small = [pair for pair in tensors if size_bytes(pair[1]) < cut.alone_bytes]
    return [
        *(group for group in (stable_objects, new) if group),
        *_cut([pair for pair in small if pair[0] in stable], bound),
        *_cut([pair for pair in small if pair[0] not in stable], bound),
        *([pair] for pair in alone),
    ]


def size_bytes(item: WriteItem) -> int:
    """Return the bytes of a tensor's payload; 0 for an object."""
    if item.tensor_data is None:
        return 0
    chunk = item.tensor_data.chunk
    return math.prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _cut(pairs: Sequence[Numbered], bound: int) -> Iterator[list[Numbered]]:
    """Yield bundles in the order of the plan; the next item would make each larger than ``bound``."""
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


@dataclass(frozen=True, slots=True)
class RankItems:
    """What one rank writes: the items in the order of its plan, and what returns their data."""

    rank: int
    items: Sequence[WriteItem]
    resolve: Resolve


@dataclass(frozen=True, slots=True)
class _ReusedFile:
    """A file of the base that this save uses, as its own manifest lists it."""

    file: HeldFile
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was written, what was taken over, and all that could have been taken over."""

    wrote: RankFiles
    reused: tuple[_ReusedFile, ...]
    unchanged: Mapping[int, HeldItem]


@dataclass(frozen=True, slots=True)
class _Same:
    """An item that the base holds unchanged.

    ``done`` is called once the item's data is not needed any more.
    """

    held: HeldItem
    done: Callable[[], None]


def write_changed(
    items_here: RankItems,
    site: Site,
    previous: Seal | None,
    memory: Memory,
    *,
    threads: int | None = None,
    engine: WriteEngine = auto_engine,
) -> WrittenPart:
    """Write this rank's items, except those that the save ``previous`` holds unchanged.

    Errors are those of writing.

    Args:
        items_here: What this rank writes.
        site: Where it writes.
        previous: The last committed save of its kind in the run; None if there is none.
        memory: What is known of the saves before. It knows this save when the call returns.
        threads: How many files are written at once. None: as many as pay there.
        engine: Writes one file.

    Returns:
        What the coordinator has to know about this rank's files.
    """
    started = time.perf_counter()
    wanted = [item.index for item in items_here.items]
    base = base_of(previous, site, wanted, memory)
    same = {} if base is None else _compare(items_here, base)
    unchanged = {position: one.held for position, one in same.items()}
    in_use = {} if base is None else files_in_use(base, unchanged)
    reused = [] if base is None else _take(base, in_use, site, items_here.rank)
    used = {position for reused_file in reused for position in reused_file.positions}
    for position in used:
        same[position].done()
    compare_s = time.perf_counter() - started
    remaining = [position for position in range(len(items_here.items)) if position not in used]
    files = files_for(
        site.storage, site.prefix, [items_here.items[at] for at in remaining], threads
    )
    wrote = write_files(
        site.storage,
        site.prefix,
        items_here.rank,
        items_here.items,
        items_here.resolve,
        engine=engine,
        threads=files,
        buckets=bundles(items_here.items, remaining, unchanged.keys() - used, memory.cut, files),
        first=0 if site.is_shared else len(in_use),
    )
    if reused and not wrote.files:
        site.storage.sync(site.prefix.rstrip("/"))
    outcome = _Outcome(wrote, tuple(reused), unchanged)
    part = _part_of(site, outcome)
    memory.learn(_as_base(items_here, site, part, outcome))
    counters = dataclasses.replace(part.counters, verify_s=part.counters.verify_s + compare_s)
    return dataclasses.replace(part, counters=counters)


def _compare(items_here: RankItems, base: Base) -> dict[int, _Same]:
    """Return the unchanged items by position in the plan.

    An item that has changed is resolved once more when it is written.
    """
    same = {}
    for position, item in enumerate(items_here.items):
        held = base.items.get(item.index)
        if held is None or not is_alike(item, held):
            continue
        data = items_here.resolve(item)
        loan = data if isinstance(data, Loan) else Loan(data)
        if is_unchanged(held, loan.data):
            same[position] = _Same(held, loan.done)
        else:
            loan.back()
    return same


def _take(base: Base, in_use: Mapping[str, list[int]], site: Site, rank: int) -> list[_ReusedFile]:
    reused: list[_ReusedFile] = []
    for number, (path, positions) in enumerate(in_use.items()):
        held = base.files[path]
        if site.keys.shape is Shape.OBJECT:
            file = _listed(held, site) if held.record.is_shared else None
        else:
            # No number is used twice: a link that was only half made could be mistaken for the next one.
            name = f"{site.keys.save_id}/{data_name(rank, number)}"
            file = _linked(base, held, site, name)
        if file is not None:
            reused.append(_ReusedFile(file, tuple(positions)))
    return reused


def _linked(base: Base, held: HeldFile, site: Site, path: str) -> HeldFile | None:
    """Link the base's file and sidecar to names of our own; None if that fails: they are written."""
    origin = base.origin_of(held)
    data = FileRecord(path, held.record.size_bytes, site.domain, sidecar_name(path), origin=origin)
    sidecar = dataclasses.replace(
        held.sidecar, path=sidecar_name(path), domain=site.domain, origin=origin
    )
    folder = site.prefix.rstrip("/").rsplit("/", 1)[0]
    for old, new in ((held.record, data), (held.sidecar, sidecar)):
        program = link_file(base.homes, old.path, f"{folder}/{new.path}")
        try:
            linked = drive(program, site.storage)
        except UnsupportedError as error:
            logger.debug("written, not linked: %s", error)
            return None
        except StorageError as error:
            logger.warning("written, not linked: %s", error)
            return None
        if not linked:
            logger.debug("written, not linked: %s of save %s is gone", old.path, base.save_id)
            return None
    return HeldFile(data, sidecar)


def _listed(held: HeldFile, site: Site) -> HeldFile | None:
    """Return the base's file with its key; None if it is missing or has another size."""
    try:
        if drive(file_exists(held.record), site.storage):
            return HeldFile(
                dataclasses.replace(held.record, domain=site.domain),
                dataclasses.replace(held.sidecar, domain=site.domain),
            )
    except StorageError as error:
        logger.warning("written, not referenced: %s", error)
        return None
    logger.warning("%s of an earlier save is gone: its tensors are written again", held.record.path)
    return None


def _part_of(site: Site, outcome: _Outcome) -> WrittenPart:
    """Return what the coordinator needs to know: files taken over first, then those written."""
    save_id, wrote, unchanged = site.keys.save_id, outcome.wrote, outcome.unchanged
    own = written_part(wrote, save_id, site.domain, save_id if site.is_shared else None)
    placed = [
        tuple(
            Placed(p, unchanged[p].digests.offset, unchanged[p].digests.length)
            for p in reused_file.positions
        )
        for reused_file in outcome.reused
    ]
    files = [record for t in outcome.reused for record in (t.file.record, t.file.sidecar)]
    reused_lengths = [place.length for places in placed for place in places]
    counters = dataclasses.replace(
        own.counters,
        items=own.counters.items + len(reused_lengths),
        referenced_bytes=sum(reused_lengths),
    )
    payload = encode_placed([*placed, *(file.placed for file in wrote.files)])
    return WrittenPart((*files, *own.files), counters, payload)


def _as_base(items_here: RankItems, site: Site, part: WrittenPart, outcome: _Outcome) -> Base:
    """Return this save as a base for the next one, should the log call it the last committed."""
    records = {record.path: record for record in part.files}
    files = {r.path: HeldFile(r, records[r.digests]) for r in part.files if r.digests is not None}
    items: dict[MetadataIndex, HeldItem] = {}
    for reused_file in outcome.reused:
        for position in reused_file.positions:
            moved = dataclasses.replace(
                outcome.unchanged[position], path=reused_file.file.record.path
            )
            items[items_here.items[position].index] = moved
    for file in outcome.wrote.files:
        path = f"{site.keys.save_id}/{file.name}"
        for place, known in zip(file.placed, file.digests.items, strict=True):
            item = items_here.items[place.position]
            data = item.tensor_data
            dtype = None if data is None else data.properties.dtype
            sizes = () if data is None else tuple(data.chunk.sizes)
            items[item.index] = HeldItem(path, known, dtype, sizes)
    return Base(site.keys.save_id, site.homes, items, files)
