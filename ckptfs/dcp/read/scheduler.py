"""Read data files into tensors: verified in the same pass, straight into their memory.

    saved item --+-- payload known, host memory contiguous --> read into it, digest it there
                 +-- payload known, anything else -----------> scratch, copied into place
                 +-- payload unknown (objects) --------------> the whole item, then torch's unpickler

    calling thread   targets, wants, requests ... commit, load_bytes       in reading order
    other threads    read, compare with digests, copy                      in any order

``open_in_order`` opens the files in order. A file begins with two requests, one that opens it and one for
its digests; neither waits for the other, so a thousand small files do not take two thousand steps.
``Work`` cuts the items of a load into requests, in reading order (names of files, then offsets), and commits
them in that order. A payload that is known and needed as a whole needs no step after its requests, unless one
of torch's planners has to commit it. If several boxes of one saved tensor are needed, each window of it is
read once for all of them.

The digests say where a payload is. Without digests (files of stock torch) it is where torch puts it, if the
head of the item is as torch writes it; any other item is left to torch.load. The calling thread reads
local files too. Memory in addition to the tensors is at most a window of scratch and one of the reader's for
each thread, and whole items (64 MiB of them, or one that is larger) until they are unpickled.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.read.data_file import (
    Cutting,
    DataFile,
    Gatherer,
    ItemProgress,
    Ran,
    Request,
    Source,
    Want,
    open_data,
    read_digests,
    run_request,
)
from ckptfs.dcp.read.read_plan import OwnTargets, PlannedRead, PlannerTargets, Targets, reads_of
from ckptfs.dcp.read.read_threads import ReadPool, Scratch
from ckptfs.dcp.read.requests import (
    Blob,
    ItemStream,
    PayloadRange,
    SavedItem,
    blob_wants,
    full_wants,
    head_want,
    is_plain,
    payload_wants,
    unpickle,
    usual_want,
)
from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.errors import CkptfsError, StorageError
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.base import DataReader, Reach

__all__ = ["fetch", "fetch_reads"]


class Readers:
    """The open readers, by path; leaving the block closes those that are still open."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: dict[str, DataReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for path in list(self._open):
            self.close(path)

    def open(self, path: str) -> DataReader:
        """Return the reader of a file. Any thread, one per path. IncompleteCheckpointError."""
        if path not in self._open:
            self._open[path] = open_data(self._source, path)
        return self._open[path]

    def close(self, path: str) -> None:
        """Close the reader of a file that is not read any more."""
        self._open.pop(path).close()


@dataclass(slots=True)
class _Opening:
    """A file that is being opened: what its two requests have returned so far."""

    path: str
    missing: int = 2
    reader: DataReader | None = None
    digests: Mapping[int, ItemDigests] | None = None

    def add_reader(self, reader: DataReader) -> None:
        self.reader, self.missing = reader, self.missing - 1

    def add_digests(self, digests: Mapping[int, ItemDigests] | None) -> None:
        self.digests, self.missing = digests, self.missing - 1


def _open_first(source: Source, path: str, readers: Readers) -> _Opening:
    """Send both requests of the first file at once. Its reader determines the number of threads."""
    requests: list[Callable[[], object]] = [
        partial(readers.open, path),
        partial(read_digests, source, path),
    ]
    opened: list[Any] = source.storage.at_once(requests)
    for answer in opened:
        if isinstance(answer, StorageError):
            raise answer
    opening = _Opening(path)
    opening.add_reader(opened[0])
    opening.add_digests(opened[1])
    return opening


def open_in_order(
    source: Source, first: _Opening, paths: Sequence[str], readers: Readers, pool: ReadPool
) -> Iterator[DataFile]:
    """Yield the files in order; as many as the pool has threads are opened ahead."""
    left, ahead = deque(paths), deque([first])
    while left or ahead:
        while left and len(ahead) < pool.count:
            opening = _Opening(left.popleft())
            pool.submit(partial(readers.open, opening.path), opening.add_reader)
            pool.submit(partial(read_digests, source, opening.path), opening.add_digests)
            ahead.append(opening)
        opening = ahead.popleft()
        while opening.missing:
            pool.wait()
        if opening.reader is not None:
            yield DataFile(opening.reader, source, opening.path, opening.digests)


_BLOB_BYTES = 64 << 20  # most memory of whole items that wait for their bytes or their turn

Part = tuple[PlannedRead, torch.Tensor]


@dataclass(slots=True)
class _Item(ItemProgress):
    """One saved item that is being read, and what is done once its bytes are there."""

    parts: Sequence[Part] = ()
    blob: tuple[PlannedRead, Blob] | None = None
    blob_bytes: int = 0
    is_planned: bool = False


@dataclass(slots=True)
class _Reading:
    """A file that is being read; it is closed once none of its requests is missing.

    ``nobody`` is the owner of wants that need no further step once they are read.
    """

    file: DataFile
    cutting: Cutting
    gatherer: Gatherer
    missing: int = 0
    is_planned: bool = False
    nobody: ItemProgress = field(default_factory=ItemProgress)


class Work:
    """The items of a load in reading order: cut into requests, read by threads, committed in order."""

    def __init__(self, pool: ReadPool, readers: Readers, targets: Targets, meter: Meter) -> None:
        self._pool = pool
        self._readers = readers
        self._targets = targets
        self._meter = meter
        self._scratch = Scratch()
        self._items: deque[_Item] = deque()  # not committed yet
        self._blob_bytes = 0  # memory of the whole items among them
        self.read_bytes = 0
        self.payload_bytes = 0  # how many of these bytes were requested
        self.verify_s = 0.0

    def read(self, file: DataFile, reads: Sequence[PlannedRead]) -> None:
        """Request everything of one file; commit on the way what has been read by then."""
        cutting = Cutting.of(file.reader)
        reading = _Reading(file, cutting, Gatherer(cutting))
        for group in _of_one_item(reads):
            if group[0].dtype is None:
                for read in group:
                    self._read_object(reading, read)
            elif len(group) > 1 or not self._read_file(reading, group[0]):
                self._read_tensor(reading, [(read, self._targets.target(read)) for read in group])
            if self._items:
                self._commit()
        self._submit(reading, reading.gatherer.flush())
        reading.is_planned = True
        self._close_if_done(reading)

    def finish(self) -> None:
        """Return once everything is read and committed."""
        self._commit()
        while self._pool.wait():
            self._commit()

    # -- one item ----------------------------------------------------------------------

    def _read_file(self, reading: _Reading, read: PlannedRead) -> bool:
        """Read a tensor that is requested as it was saved: the usual case in most checkpoints.

        Returns False, without having done anything, if ``read`` is not such a tensor.
        """
        if read.box_lengths != read.sizes or read.dtype is None:
            return False
        size = math.prod(read.sizes) * read.dtype.itemsize
        if not size:
            return False
        file = reading.file
        digests = file.item(read.offset, read.length, read.key)
        payload = None
        if digests is None and size <= min(reading.cutting.small, BLOCK_SIZE_BYTES):
            payload = PayloadRange.of(read, None, size)
        if payload is None and (digests is None or digests.payload_length != size):
            return False
        target = self._targets.target(read)
        if not is_plain(target, read.dtype):
            self._read_tensor(reading, [(read, target)])
            return True
        owner = reading.nobody
        if payload is not None or self._targets.commits:
            owner = _Item(parts=[(read, target)], is_planned=True)
            self._items.append(owner)
        out = memory_of(target)
        if digests is not None:
            window_bytes = reading.cutting.window
            wants = full_wants(file, digests, read, owner, out, window_bytes=window_bytes)
        elif payload is not None:
            wants = [usual_want(payload, read, owner, out)]
        for want in wants:
            owner.missing += 1
            complete = reading.gatherer.add(want)
            if complete:
                self._submit(reading, complete)
        return True

    def _read_tensor(self, reading: _Reading, parts: list[Part]) -> None:
        """Read boxes of one saved tensor."""
        read, file = parts[0][0], reading.file
        owner = _Item(parts=parts)
        filled = [part for part in parts if part[1].numel()]
        digests = file.item(read.offset, read.length, read.key)
        saved = SavedItem(file, digests, read.key, owner, reading.cutting)
        assert read.dtype is not None  # noqa: S101 - it is a tensor
        payload = PayloadRange.of(read, digests, math.prod(read.sizes) * read.dtype.itemsize)
        if payload is not None:
            self._items.append(owner)
            if not payload.is_sure and filled:
                self._add(reading, [head_want(saved, payload, read)])
            self._add(reading, payload_wants(saved, payload, filled))
            if owner.is_strange:  # all of its bytes were read while the last wants were added
                owner.is_planned = True
                self._unpickle_strange(reading, owner)
        elif file.reader.reach is Reach.LOCAL and not file.verifies:
            # torch reads from the file only what it needs: no second copy of the tensor.
            self._unpickle(file, owner)
            self._items.append(owner)
        else:
            blob = self._blob(reading, owner, read.length, partial(unpickle, file, parts))
            self._add(reading, blob_wants(saved, read.offset, blob))
        owner.is_planned = True

    def _read_object(self, reading: _Reading, read: PlannedRead) -> None:
        file, owner = reading.file, _Item()
        digests = file.item(read.offset, read.length, read.key)
        saved = SavedItem(file, digests, read.key, owner, reading.cutting)
        blob = self._blob(reading, owner, read.length)
        owner.blob = (read, blob)
        self._add(reading, blob_wants(saved, read.offset, blob))
        owner.is_planned = True

    def _unpickle(self, file: DataFile, owner: _Item) -> None:
        """Let torch unpickle an item that is not laid out as torch writes it today."""
        read = owner.parts[0][0]
        stream = ItemStream(file, read.offset, read.length)
        unpickle(file, owner.parts, stream)
        self.read_bytes += stream.read_bytes
        self.payload_bytes += stream.read_bytes
        self._meter.advance(stream.read_bytes)

    def _blob(
        self,
        reading: _Reading,
        owner: _Item,
        length: int,
        complete: Callable[[io.BytesIO], None] | None = None,
    ) -> Blob:
        """Return memory for a whole item, as soon as the items before it leave room for it."""
        if self._blob_bytes + length > _BLOB_BYTES:
            self._submit(reading, reading.gatherer.flush())
            self._commit()
        while self._blob_bytes and self._blob_bytes + length > _BLOB_BYTES and self._pool.wait():
            self._commit()
        self._blob_bytes += length
        owner.blob_bytes = length
        self._items.append(owner)
        return Blob(length, complete)

    # -- requests ----------------------------------------------------------------------

    def _add(self, reading: _Reading, wants: Iterable[Want]) -> None:
        for want in wants:
            want.owner.missing += 1
            self._submit(reading, reading.gatherer.add(want))

    def _submit(self, reading: _Reading, requests: Iterable[Request]) -> None:
        for request in requests:
            reading.missing += 1
            self._pool.submit(
                partial(run_request, reading.file, request, self._scratch),
                partial(self._arrived, reading, request),
            )

    def _arrived(self, reading: _Reading, request: Request, ran: Ran) -> None:
        self._pool.widen(reading.file.reader.threads)
        self.read_bytes += ran.size_bytes
        self.verify_s += ran.verify_s
        wanted = 0
        for want in request.wants:
            owner = want.owner
            owner.missing -= 1
            wanted += want.stop - want.start
            if owner.is_strange and isinstance(owner, _Item):
                self._unpickle_strange(reading, owner)
        self.payload_bytes += wanted
        self._meter.advance(wanted)
        reading.missing -= 1
        self._close_if_done(reading)

    def _unpickle_strange(self, reading: _Reading, owner: _Item) -> None:
        # Not before the last of its bytes: a later one would overwrite the right values.
        if owner.is_planned and not owner.missing:
            self._unpickle(reading.file, owner)

    def _close_if_done(self, reading: _Reading) -> None:
        if reading.is_planned and not reading.missing:
            self._readers.close(reading.file.path)

    def _commit(self) -> None:
        """Hand over what is complete, up to the first item that is not."""
        items = self._items
        while items and items[0].is_planned and not items[0].missing:
            item = items.popleft()
            if item.blob is not None:
                read, blob = item.blob
                self._targets.load_bytes(read, blob.stream())
            elif self._targets.commits:
                for read, target in item.parts:
                    self._targets.commit(read, target)
            self._blob_bytes -= item.blob_bytes


def _of_one_item(reads: Sequence[PlannedRead]) -> Iterator[Sequence[PlannedRead]]:
    """Yield the reads of each saved item together; they are sorted by offset already."""
    first, count = 0, len(reads)
    while first < count:
        last, here = first + 1, reads[first]
        while last < count and reads[last].offset == here.offset and reads[last].key == here.key:
            last += 1
        yield reads[first:last]
        first = last


def fetch(
    source: Source,
    plan: LoadPlan,
    planner: LoadPlanner,
    metadata: Metadata,
    meter: Meter = SILENT,
) -> Counters:
    """Read every item of this rank's plan into the planner's tensors. Local.

    Only the calling thread calls the planner. Errors are those of ``fetch_reads``.

    Args:
        source: Where to read.
        plan: The plan.
        planner: The planner that made it.
        metadata: The metadata of the checkpoint.
        meter: Gets the number of requested bytes, and counts them.

    Returns:
        What was read.
    """
    return _fetch(source, reads_of(plan, metadata), PlannerTargets(planner), meter)


def fetch_reads(
    source: Source,
    reads: Sequence[PlannedRead],
    load_bytes: Callable[[PlannedRead, io.BytesIO], None],
    meter: Meter = SILENT,
) -> Counters:
    """Read everything into the Reads' tensors. Local.

    After an error nothing is read any more, and the tensors are undefined.

    Args:
        source: Where to read.
        reads: What to read.
        load_bytes: Takes the objects, on the calling thread and in reading order.
        meter: As for ``fetch``.

    Returns:
        What was read.

    Raises:
        IncompleteCheckpointError: A file is missing. It names file and rank.
        IntegrityError: A file is too short, or bytes differ from their digests. It names file and rank, and
            for bytes the key.
    """
    return _fetch(source, reads, OwnTargets(load_bytes), meter)


def _fetch(
    source: Source, reads: Iterable[PlannedRead], targets: Targets, meter: Meter
) -> Counters:
    started = time.perf_counter()
    count = 0
    try:
        # At 20,000 tensors the collector would take as long as everything else together.
        with gc_paused():
            files: dict[str, list[PlannedRead]] = defaultdict(list)
            for read in reads:
                files[read.path].append(read)
                count += 1
            if not files:
                return Counters()
            if meter is not SILENT:
                meter.expect(sum(map(_requested_bytes, (r for f in files.values() for r in f))))
            pool, work = _read_all(source, files, targets, meter)
    except CkptfsError as error:
        error.rank = source.rank if error.rank is None else error.rank
        raise
    spent = time.perf_counter() - started
    # Several threads verify at the same time; the counters show this one rank's time.
    verify_s = work.verify_s / pool.used
    return Counters(
        size_bytes=work.read_bytes,
        payload_bytes=work.payload_bytes,
        files=len(files),
        items=count,
        read_s=max(0.0, spent - verify_s),
        verify_s=verify_s,
    )


def _read_all(
    source: Source, files: dict[str, list[PlannedRead]], targets: Targets, meter: Meter
) -> tuple[ReadPool, Work]:
    paths = sorted(files)
    with contextlib.ExitStack() as stack:
        readers = stack.enter_context(Readers(source))
        first = _open_first(source, paths[0], readers)
        pool = stack.enter_context(ReadPool.of(readers.open(paths[0])))
        work = Work(pool, readers, targets, meter)
        for file in open_in_order(source, first, paths[1:], readers, pool):
            reads = sorted(files[file.path], key=attrgetter("offset"))
            file.check_size(max(read.offset + read.length for read in reads))
            work.read(file, reads)
        work.finish()
    return pool, work


def _requested_bytes(read: PlannedRead) -> int:
    """Return how many bytes of a file a PlannedRead requests, without the rest of shared blocks."""
    if read.dtype is None:
        return read.length
    return math.prod(read.box_lengths) * read.dtype.itemsize
