"""Data files read into tensors: verified in the same pass, straight into their memory.

    plan item --+-- payload known, host memory contiguous --> read into it, digest it there
                +-- payload known, anything else -----------> scratch, copied into place
                +-- payload unknown (stock files, objects) -> the whole item, then torch's unpickler

    calling thread   resolve_tensor, wants, requests ... commit_tensor, load_bytes    in reading order
    lanes            read, compare with digests, copy                                 in any order

The reading order is that of the files' names and of the offsets in them. A reader whose
``concurrency`` is 1 (a disk) is read by the calling thread alone; others by so many threads, which
open the next files too. In memory beyond the tensors, at most: ``concurrency`` times a window and
two digest blocks, and whole items (64 MiB of them, or one that is larger) until they are unpickled.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckptfs.dcp.blobs import Blob, ItemStream
from ckptfs.dcp.datafile import DataFile, Ran, Source, Verify, run_request
from ckptfs.dcp.lanes import Lanes, Scratch
from ckptfs.dcp.planner import gc_paused
from ckptfs.dcp.readers import Readers, opened
from ckptfs.dcp.spans import Cutting, Gatherer, Owner, Request, Want
from ckptfs.dcp.wants import Asked, blob_wants, check_target, payload_wants, saved_as, unpickle
from ckptfs.errors import CkptfsError, ManifestError, StateError
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter

__all__ = ["Source", "Verify", "fetch"]

_BLOB_BYTES = 64 << 20  # whole items that wait for their bytes or for their turn


def fetch(
    source: Source,
    plan: LoadPlan,
    planner: LoadPlanner,
    metadata: Metadata,
    meter: Meter = SILENT,
) -> Counters:
    """Read every item of this rank's plan into the planner's tensors. Local. meter: counts the bytes
    that were asked for, and learns how many there are.

    The planner is asked by the calling thread only. IncompleteCheckpointError: a file is missing.
    IntegrityError: it is short or its bytes differ; both name file, key and rank. After an error
    nothing is read any more, and the tensors are undefined.
    """
    started = time.perf_counter()
    files: dict[str, list[tuple[ReadItem, Any]]] = defaultdict(list)
    for item in plan.items:
        info = _info(metadata, item)
        files[info.relative_path].append((item, info))
    if not files:
        return Counters()
    if meter is not SILENT:
        meter.expect(
            sum(_asked_bytes(*pair, metadata) for pairs in files.values() for pair in pairs)
        )
    try:
        # At 20,000 tensors the collector would take as long as everything else together.
        with gc_paused():
            lanes, work = _read_all(source, files, planner, metadata, meter)
    except CkptfsError as error:
        error.rank = source.rank if error.rank is None else error.rank
        raise
    spent = time.perf_counter() - started
    # Several threads verify side by side; the counters are of this one rank's time.
    verify_s = work.verify_s / lanes.count
    return Counters(
        size_bytes=work.read_bytes,
        payload_bytes=work.payload_bytes,
        files=len(files),
        items=len(plan.items),
        read_s=spent - verify_s,
        verify_s=verify_s,
    )


def _read_all(
    source: Source,
    files: dict[str, list[tuple[ReadItem, Any]]],
    planner: LoadPlanner,
    metadata: Metadata,
    meter: Meter,
) -> tuple[Lanes, _Work]:
    paths = sorted(files)
    with Readers(source) as readers, Lanes(readers.open(paths[0]).concurrency) as lanes:
        work = _Work(lanes, readers, planner, metadata, meter)
        for file in opened(source, paths, readers, lanes):
            items = sorted(files[file.path], key=lambda pair: pair[1].offset)
            file.check_size(max(info.offset + info.length for _, info in items))
            work.read(file, items)
        work.finish()
    return lanes, work


@dataclass(slots=True)
class _Item(Owner):
    """One item of the plan on its way, and what is done when its bytes are there."""

    commit: Callable[[], object] | None = None
    is_planned: bool = False
    blob_bytes: int = 0


@dataclass(slots=True)
class _Reading:
    """A file that is being read: it is closed when nothing of it is missing."""

    file: DataFile
    cutting: Cutting
    gatherer: Gatherer
    missing: int = 0
    is_planned: bool = False


class _Work:
    """Items in reading order: cut into requests, read by the lanes, committed from the front."""

    def __init__(
        self,
        lanes: Lanes,
        readers: Readers,
        planner: LoadPlanner,
        metadata: Metadata,
        meter: Meter,
    ) -> None:
        self._lanes = lanes
        self._readers = readers
        self._planner = planner
        self._metadata = metadata
        self._meter = meter
        self._scratch = Scratch()
        self._items: deque[_Item] = deque()  # not committed yet
        self._blob_bytes = 0  # of them
        self.read_bytes = 0
        self.payload_bytes = 0  # of them, bytes that somebody asked for
        self.verify_s = 0.0

    def read(self, file: DataFile, items: Sequence[tuple[ReadItem, Any]]) -> None:
        """Ask for everything of one file; what is there already is committed on the way."""
        cutting = Cutting.of(file.reader)
        reading = _Reading(file, cutting, Gatherer(cutting))
        for item, info in items:
            owner = _Item()
            for want in self._wants(reading, item, info, owner):
                owner.missing += 1
                self._submit(reading, reading.gatherer.add(want))
            owner.is_planned = True
            self._commit()
        self._submit(reading, reading.gatherer.flush())
        reading.is_planned = True
        self._close_if_done(reading)

    def finish(self) -> None:
        """Return when everything is read and committed."""
        self._commit()
        while self._lanes.wait():
            self._commit()

    def _wants(self, reading: _Reading, item: ReadItem, info: Any, owner: _Item) -> Iterable[Want]:
        """Begin one item: it is the last in line, and these are the ranges that it needs."""
        file, key = reading.file, item.storage_index.fqn
        _refuse_extensions(info, key)
        digests = file.item(info.offset, info.length, key)
        asked = Asked(file, digests, key, owner, reading.cutting)
        if item.type is LoadItemType.BYTE_IO:
            blob = self._blob(reading, owner, info.length)
            owner.commit = lambda: self._planner.load_bytes(item, blob.stream())
            return blob_wants(asked, info.offset, blob)
        saved = saved_as(self._metadata, item)
        target = self._planner.resolve_tensor(item).detach()
        check_target(item, target)
        owner.commit = partial(self._planner.commit_tensor, item, target)
        if digests is not None and digests.payload_length == saved.size_bytes:
            self._items.append(owner)
            return payload_wants(asked, digests, saved, item, target)
        complete = partial(unpickle, file, item, saved, target)
        if self._lanes.count == 1 and not file.verifies:
            # torch reads what it needs, where it needs it: no second copy of the tensor.
            stream = ItemStream(file, info.offset, info.length)
            complete(stream)
            self.read_bytes += stream.read_bytes
            self.payload_bytes += stream.read_bytes
            self._meter.advance(stream.read_bytes)
            self._items.append(owner)
            return ()
        blob = self._blob(reading, owner, info.length, complete)
        return blob_wants(asked, info.offset, blob)

    def _blob(
        self,
        reading: _Reading,
        owner: _Item,
        length: int,
        complete: Callable[[Any], None] | None = None,
    ) -> Blob:
        """Memory for a whole item, when those before it leave room for it."""
        if self._blob_bytes + length > _BLOB_BYTES:
            self._submit(reading, reading.gatherer.flush())
            self._commit()
        while self._blob_bytes and self._blob_bytes + length > _BLOB_BYTES and self._lanes.wait():
            self._commit()
        self._blob_bytes += length
        owner.blob_bytes = length
        self._items.append(owner)
        return Blob(length, complete)

    def _submit(self, reading: _Reading, requests: Iterable[Request]) -> None:
        for request in requests:
            reading.missing += 1
            self._lanes.submit(
                partial(run_request, reading.file, request, self._scratch),
                partial(self._arrived, reading, request),
            )

    def _arrived(self, reading: _Reading, request: Request, ran: Ran) -> None:
        self.read_bytes += ran.size_bytes
        self.verify_s += ran.verify_s
        wanted = 0
        for want in request.wants:
            want.owner.missing -= 1
            wanted += want.stop - want.start
        self.payload_bytes += wanted
        self._meter.advance(wanted)
        reading.missing -= 1
        self._close_if_done(reading)

    def _close_if_done(self, reading: _Reading) -> None:
        if reading.is_planned and not reading.missing:
            self._readers.close(reading.file.path)

    def _commit(self) -> None:
        """Give the planner what is complete, up to the first item that is not."""
        items = self._items
        while items and items[0].is_planned and not items[0].missing:
            item = items.popleft()
            if item.commit is not None:
                item.commit()
            self._blob_bytes -= item.blob_bytes


def _asked_bytes(item: ReadItem, info: Any, metadata: Metadata) -> int:
    """What of a file an item asks for; blocks that it shares with others come on top."""
    if item.type is LoadItemType.BYTE_IO:
        return int(info.length)
    return math.prod(item.lengths) * saved_as(metadata, item).dtype.itemsize


def _refuse_extensions(info: Any, key: str) -> None:
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
