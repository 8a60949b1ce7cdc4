"""One data file, open for reading: ranges of its items, verified against its digests.

    payload   a range of a tensor's memory, rounded to whole blocks where it must be verified
    blob      a whole item: pickled objects
    tensor    a whole item through torch.load(weights_only=True): files that stock torch wrote

Small items that lie close together are read in one request.
"""

from __future__ import annotations

import io
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests, decode_digests, first_bad_block
from ckptfs.errors import (
    CkptfsError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
)
from ckptfs.events import Counters
from ckptfs.storage.base import DataReader, Storage

__all__ = [
    "WINDOW_BYTES",
    "DataFile",
    "Source",
    "Verify",
    "gather",
    "open_data",
    "read_digests",
    "verify_file",
]

WINDOW_BYTES = 4 << 20
_SMALL_BYTES = 256 << 10  # items up to this are gathered
_GAP_BYTES = 64 << 10  # and may lie this far apart


class Verify(Enum):
    """Whether the bytes that are read are compared with their digests."""

    READ = "read"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint's files lie for this rank.

    home: key of the directory that data paths are relative to. sidecars: path of a data file ->
    path of its digests; empty for checkpoints that ckptfs did not write, which load unverified.
    """

    storage: Storage
    home: str
    sidecars: Mapping[str, str] = field(default_factory=dict)
    verify: Verify = Verify.READ
    rank: int | None = None

    def key(self, path: str) -> str:
        """The key of a path that is relative to the checkpoint."""
        return f"{self.home}/{path}" if self.home else path


def gather(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans (start, stop) that are worth one request each: neighbouring small items, in order."""
    spans: list[tuple[int, int]] = []
    for offset, length in ranges:
        if length > _SMALL_BYTES:
            continue
        stop = offset + length
        if spans and offset - spans[-1][1] <= _GAP_BYTES and stop - spans[-1][0] <= WINDOW_BYTES:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((offset, stop))
    return spans


class DataFile:
    """One open data file with its digests. One thread."""

    def __init__(
        self,
        reader: DataReader,
        source: Source,
        path: str,
        digests: Mapping[int, ItemDigests] | None,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._reader = reader
        self._source = source
        self._path = path
        self._digests = digests
        self._verify = source.verify is Verify.READ and digests is not None
        self._spans = spans
        self._held = (0, 0, memoryview(b""))  # the span in memory: start, stop, bytes
        self._block: tuple[int, bytes] | None = None  # the last verified partial block
        self.read_bytes = 0
        self.verify_s = 0.0

    def item(self, info: Any, key: str) -> ItemDigests | None:
        """The digests of an item; IntegrityError when the sidecar is of another file."""
        if self._digests is None or not info.length:
            return None
        found = self._digests.get(info.offset)
        if found is None or found.length != info.length:
            if self._verify:
                raise self.damaged(f"its digests do not know {key!r}: they are of another file")
            return None
        return found

    def payload(self, item: ItemDigests, start: int, out: memoryview, key: str) -> None:
        """Fill ``out`` with the payload's bytes from ``start``, verified by whole blocks."""
        base = item.offset + item.payload_offset
        if not self._verify:
            self._raw(base + start, out)
            return
        at, stop = start, start + len(out)
        while at < stop:
            block = at - at % BLOCK_SIZE_BYTES
            block_stop = min(block + BLOCK_SIZE_BYTES, item.payload_length)
            if at == block and stop >= block_stop:
                # Whole blocks up to a window: the digest is taken while they are in the cache.
                last = min(stop, at + WINDOW_BYTES)
                last = last if last == item.payload_length else last - last % BLOCK_SIZE_BYTES
                piece = out[at - start : last - start]
                self._raw(base + at, piece)
                self._compare(item, item.payload_offset + at, piece, key)
                at = last
                continue
            data = self._whole_block(item, block, block_stop, key)
            last = min(stop, block_stop)
            out[at - start : last - start] = data[at - block : last - block]
            at = last

    def blob(self, info: Any, item: ItemDigests | None, key: str) -> bytes:
        """All bytes of an item, verified where there are digests."""
        data = bytearray(info.length)
        self._raw(info.offset, memoryview(data))
        if self._verify and item is not None:
            self._compare(item, 0, memoryview(data), key)
        return bytes(data)

    def check(self, item: ItemDigests) -> None:
        """Read and compare all blocks of an item."""
        if item.offset + item.length > self._reader.size_bytes:
            raise self.damaged(f"it has {self._reader.size_bytes} bytes: truncated")
        for block in item.blocks_of(0, item.length):
            data = memoryview(bytearray(block.stop - block.start))
            self._raw(item.offset + block.start, data)
            self._compare(item, block.start, data, f"the item at {item.offset}")

    def tensor(self, info: Any, item: ItemDigests | None, key: str) -> torch.Tensor:
        """The tensor in a blob whose payload is not known, by torch.load(weights_only=True)."""
        stream: Any = _ItemStream(self, info.offset, info.length)
        if item is not None and self._verify:
            stream = io.BytesIO(self.blob(info, item, key))
        try:
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
        except CkptfsError:
            raise
        except Exception as error:
            # A damaged blob raises anything from RuntimeError to UnpicklingError.
            raise self.damaged(f"{key!r} is not what torch.save wrote: {error}") from error
        if not isinstance(loaded, torch.Tensor):
            raise self.damaged(f"{key!r} holds a {type(loaded).__name__}, not a tensor")
        return loaded

    def damaged(self, why: str) -> IntegrityError:
        """An error about this file."""
        return IntegrityError(
            f"data file {self._path} is damaged: {why}",
            uri=self._source.storage.uri(self._source.key(self._path)),
            rank=self._source.rank,
            hint="restore the file, or load another checkpoint; tensors loaded so far are undefined",
        )

    def raw(self, offset: int, out: memoryview) -> None:
        """Unverified bytes, for the stream that torch.load reads."""
        self._raw(offset, out)

    def _raw(self, offset: int, out: memoryview) -> None:
        self.read_bytes += len(out)
        stop = offset + len(out)
        if not self._held[0] <= offset or not stop <= self._held[1]:
            at = bisect_right(self._spans, (offset, 1 << 63)) - 1
            if at < 0 or stop > self._spans[at][1]:
                self._reader.read_into(offset, out)
                return
            start, end = self._spans[at]
            held = memoryview(bytearray(end - start))
            self._reader.read_into(start, held)
            self._held = (start, end, held)
        out[:] = self._held[2][offset - self._held[0] : stop - self._held[0]]

    def _whole_block(self, item: ItemDigests, start: int, stop: int, key: str) -> bytes:
        """One verified block of the payload; the last one is kept, its neighbour's range asks too."""
        at = item.offset + item.payload_offset + start
        if self._block is None or self._block[0] != at:
            data = bytearray(stop - start)
            self._raw(at, memoryview(data))
            self._compare(item, item.payload_offset + start, memoryview(data), key)
            self._block = (at, bytes(data))
        return self._block[1]

    def _compare(self, item: ItemDigests, start: int, data: memoryview, key: str) -> None:
        began = time.perf_counter()
        bad = first_bad_block(item, start, data)
        self.verify_s += time.perf_counter() - began
        if bad is not None:
            low, high = item.offset + bad.start, item.offset + bad.stop
            raise self.damaged(f"bytes {low} to {high}, of {key!r}, differ from what was written")


class _ItemStream(io.RawIOBase):
    """A seekable view of one item, for torch.load."""

    def __init__(self, file: DataFile, offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        if count:
            self._file.raw(self._offset + self._at, view[:count])
            self._at += count
        return count


def verify_file(source: Source, path: str) -> Counters:
    """Compare every byte of every item of a data file with its digests. Local; for tools.

    IntegrityError names the range; IncompleteCheckpointError: the file or its digests are missing.
    """
    started = time.perf_counter()
    digests = read_digests(source, path) or {}
    with open_data(source, path) as reader:
        file = DataFile(reader, source, path, digests, ())
        for item in digests.values():
            file.check(item)
    return Counters(
        size_bytes=file.read_bytes,
        files=1,
        items=len(digests),
        read_s=time.perf_counter() - started - file.verify_s,
        verify_s=file.verify_s,
    )


def open_data(source: Source, path: str) -> DataReader:
    """Open a data file; IncompleteCheckpointError when it is missing."""
    try:
        return source.storage.open_read(source.key(path))
    except NotFoundError as error:
        raise IncompleteCheckpointError(
            f"data file {path} is missing",
            uri=source.storage.uri(source.key(path)),
            hint="restore it, or load another checkpoint",
        ) from error


def read_digests(source: Source, path: str) -> dict[int, ItemDigests] | None:
    """The digests of a data file by item offset; None where it has none.

    With verify="off" a damaged sidecar is no obstacle: it would only have told payload offsets.
    """
    sidecar = source.sidecars.get(path)
    if sidecar is None:
        return None
    where = source.storage.uri(source.key(sidecar))
    try:
        return decode_digests(source.storage.read(source.key(sidecar)), where).by_offset()
    except (NotFoundError, ManifestError) as error:
        if source.verify is Verify.OFF:
            return None
        if isinstance(error, ManifestError):
            raise
        raise IncompleteCheckpointError(
            f"the digests of {path} are missing", uri=where, hint='load with verify="off"'
        ) from error
