"""One load under way: saved items in reading order, cut into requests, committed from the front.

    read(file, reads)    wants and requests of one file; what the lanes have brought is committed
    finish()             waits for the rest

    whole, known          wants of a window each, no owner where nobody waits      20,000 cost little
    any boxes, known      a want per window of the saved tensor, for all who ask for a part of it
    unknown               all of the item, for torch's unpickler

Everything here runs on the calling thread; the lanes run ``run_request`` alone.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ckptfs.commit.digests import BLOCK_SIZE_BYTES
from ckptfs.dcp.blobs import Blob, ItemStream
from ckptfs.dcp.datafile import DataFile, Ran, run_request
from ckptfs.dcp.lanes import Lanes, Scratch
from ckptfs.dcp.planned import Taker
from ckptfs.dcp.readers import Readers
from ckptfs.dcp.reads import Read
from ckptfs.dcp.resolve import memory_of
from ckptfs.dcp.spans import Cutting, Gatherer, Owner, Request, Want
from ckptfs.dcp.wants import (
    Asked,
    Payload,
    blob_wants,
    head_want,
    is_plain,
    payload_wants,
    unpickle,
    usual_want,
    whole_wants,
)
from ckptfs.progress import Meter
from ckptfs.storage.base import Reach

__all__ = ["Work"]

_BLOB_BYTES = 64 << 20  # whole items that wait for their bytes or for their turn

Part = tuple[Read, torch.Tensor]


@dataclass(slots=True)
class _Item(Owner):
    """One saved item on its way, and what is done when its bytes are there."""

    parts: Sequence[Part] = ()
    blob: tuple[Read, Blob] | None = None
    blob_bytes: int = 0
    is_planned: bool = False


@dataclass(slots=True)
class _Reading:
    """A file that is being read: it is closed when nothing of it is missing.

    nobody: the owner of what needs no more than to be there.
    """

    file: DataFile
    cutting: Cutting
    gatherer: Gatherer
    missing: int = 0
    is_planned: bool = False
    nobody: Owner = field(default_factory=Owner)


class Work:
    """Items in reading order: cut into requests, read by the lanes, committed from the front."""

    def __init__(self, lanes: Lanes, readers: Readers, taker: Taker, meter: Meter) -> None:
        self._lanes = lanes
        self._readers = readers
        self._taker = taker
        self._meter = meter
        self._scratch = Scratch()
        self._items: deque[_Item] = deque()  # not committed yet
        self._blob_bytes = 0  # of them
        self.read_bytes = 0
        self.payload_bytes = 0  # of them, bytes that somebody asked for
        self.verify_s = 0.0

    def read(self, file: DataFile, reads: Sequence[Read]) -> None:
        """Ask for everything of one file; what is there already is committed on the way."""
        cutting = Cutting.of(file.reader)
        reading = _Reading(file, cutting, Gatherer(cutting))
        for group in _of_one_item(reads):
            if group[0].dtype is None:
                for read in group:
                    self._read_object(reading, read)
            elif len(group) > 1 or not self._read_whole(reading, group[0]):
                self._read_tensor(reading, [(read, self._taker.target(read)) for read in group])
            if self._items:
                self._commit()
        self._submit(reading, reading.gatherer.flush())
        reading.is_planned = True
        self._close_if_done(reading)

    def finish(self) -> None:
        """Return when everything is read and committed."""
        self._commit()
        while self._lanes.wait():
            self._commit()

    # -- one item ----------------------------------------------------------------------

    def _read_whole(self, reading: _Reading, read: Read) -> bool:
        """A tensor that is asked for as it was saved: most items of most checkpoints.

        False: nothing was done, it is not one.
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
            payload = Payload.of(read, None, size)
        if payload is None and (digests is None or digests.payload_length != size):
            return False
        target = self._taker.target(read)
        if not is_plain(target, read.dtype):
            self._read_tensor(reading, [(read, target)])
            return True
        owner = reading.nobody
        if payload is not None or self._taker.commits:
            owner = _Item(parts=[(read, target)], is_planned=True)
            self._items.append(owner)
        out = memory_of(target)
        if digests is not None:
            window_bytes = reading.cutting.window
            wants = whole_wants(file, digests, read, owner, out, window_bytes=window_bytes)
        elif payload is not None:
            wants = [usual_want(payload, read, owner, out)]
        for want in wants:
            owner.missing += 1
            complete = reading.gatherer.add(want)
            if complete:
                self._submit(reading, complete)
        return True

    def _read_tensor(self, reading: _Reading, parts: list[Part]) -> None:
        """Boxes of one saved tensor."""
        read, file = parts[0][0], reading.file
        owner = _Item(parts=parts)
        filled = [part for part in parts if part[1].numel()]
        digests = file.item(read.offset, read.length, read.key)
        asked = Asked(file, digests, read.key, owner, reading.cutting)
        assert read.dtype is not None  # noqa: S101 - it is a tensor
        payload = Payload.of(read, digests, math.prod(read.sizes) * read.dtype.itemsize)
        if payload is not None:
            self._items.append(owner)
            if not payload.is_sure and filled:
                self._add(reading, [head_want(asked, payload, read)])
            self._add(reading, payload_wants(asked, payload, filled))
            if owner.is_strange:  # all of it came while the rest was asked for
                owner.is_planned = True
                self._unpickle_strange(reading, owner)
        elif file.reader.reach is Reach.LOCAL and not file.verifies:
            # torch reads what it needs, where it needs it: no second copy of the tensor.
            self._unpickle(file, owner)
            self._items.append(owner)
        else:
            blob = self._blob(reading, owner, read.length, partial(unpickle, file, parts))
            self._add(reading, blob_wants(asked, read.offset, blob))
        owner.is_planned = True

    def _read_object(self, reading: _Reading, read: Read) -> None:
        file, owner = reading.file, _Item()
        digests = file.item(read.offset, read.length, read.key)
        asked = Asked(file, digests, read.key, owner, reading.cutting)
        blob = self._blob(reading, owner, read.length)
        owner.blob = (read, blob)
        self._add(reading, blob_wants(asked, read.offset, blob))
        owner.is_planned = True

    def _unpickle(self, file: DataFile, owner: _Item) -> None:
        """What torch does not write so today: torch finds it."""
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

    # -- requests ----------------------------------------------------------------------

    def _add(self, reading: _Reading, wants: Iterable[Want]) -> None:
        for want in wants:
            want.owner.missing += 1
            self._submit(reading, reading.gatherer.add(want))

    def _submit(self, reading: _Reading, requests: Iterable[Request]) -> None:
        for request in requests:
            reading.missing += 1
            self._lanes.submit(
                partial(run_request, reading.file, request, self._scratch),
                partial(self._arrived, reading, request),
            )

    def _arrived(self, reading: _Reading, request: Request, ran: Ran) -> None:
        self._lanes.widen(reading.file.reader.threads)
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
        # Not before the last of its bytes: one that came later would lie over the right ones.
        if owner.is_planned and not owner.missing:
            self._unpickle(reading.file, owner)

    def _close_if_done(self, reading: _Reading) -> None:
        if reading.is_planned and not reading.missing:
            self._readers.close(reading.file.path)

    def _commit(self) -> None:
        """Give on what is complete, up to the first item that is not."""
        items = self._items
        while items and items[0].is_planned and not items[0].missing:
            item = items.popleft()
            if item.blob is not None:
                read, blob = item.blob
                self._taker.load_bytes(read, blob.stream())
            elif self._taker.commits:
                for read, target in item.parts:
                    self._taker.commit(read, target)
            self._blob_bytes -= item.blob_bytes


def _of_one_item(reads: Sequence[Read]) -> Iterator[Sequence[Read]]:
    """Those that read the same saved item, together; sorted by offset as they are."""
    first, count = 0, len(reads)
    while first < count:
        last, here = first + 1, reads[first]
        while last < count and reads[last].offset == here.offset and reads[last].key == here.key:
            last += 1
        yield reads[first:last]
        first = last
