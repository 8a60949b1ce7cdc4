"""Block digests: the binary sidecar next to every data file. No I/O; no torch.

    __0_0.distcp   |<-- item 0 -->|<----------------- item 1 ----------------->|
                                  |<- head ->|<------ payload ------>|<- tail ->|
    blocks                        |  b  | b  | 1 MiB | 1 MiB | b     |    b     |
    __0_0.xxh3     magic version | items | one xxh3_64 per block | xxh3_64 of all of this

An item is one blob that torch wrote. Its payload is the raw memory of the tensor inside it, so a
reader can read that range straight into a tensor. Head, payload and tail are each cut into blocks
separately: the blocks of the payload begin with the payload, and a range of a tensor can be verified
without reading anything else of its item. If the payload is not known (pickled objects), its offset
and length are 0 and the whole item is tail. An item with a tensor begins at a multiple of 64; the
zeros before it belong to no item.

Integers are little endian. A decoder accepts exactly what an encoder writes: data that is truncated,
foreign, damaged or of a newer version raises ManifestError before any number in it is used.

A file that is read in order is compared with the digests of what was written:

    check.update(data)   takes the next bytes; IntegrityError as soon as a block differs
    check.finish()       the file has ended; IntegrityError if bytes are missing
    check.sure_bytes     how many bytes from the start are known to be right
    check.compared       how many digests were compared and found right
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptfs.errors import IntegrityError, ManifestError

__all__ = [
    "ALIGNMENT_BYTES",
    "BLOCK_SIZE_BYTES",
    "Block",
    "BlockCheck",
    "BlockDigester",
    "Check",
    "FileDigestCheck",
    "FileDigests",
    "ItemDigests",
    "decode_digests",
    "encode_digests",
    "first_bad_block",
    "padding_before",
]

BLOCK_SIZE_BYTES = 1 << 20
ALIGNMENT_BYTES = 64  # of items with tensors: as torch aligns payloads inside them

_MAGIC = b"ckptfsX3"
_VERSION = 1
_HEADER = struct.Struct("<8sHHIQQ")  # magic, version, 0, block size, items, blocks
_ITEM = struct.Struct("<QQQQ")  # offset, length, payload offset, payload length
_SEAL = struct.Struct("<Q")  # xxh3_64 of everything before it
_LARGEST = 1 << 61  # bytes; sums of three do not overflow

_PADDING = tuple(xxhash.xxh3_64_intdigest(bytes(size)) for size in range(ALIGNMENT_BYTES))

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes ``start`` to ``stop`` of an item, and their xxh3_64."""

    start: int
    stop: int
    digest: int


class ItemDigests(NamedTuple):
    """One blob of a data file. All numbers are bytes.

    Attributes:
        offset: Where it begins, from the file's start.
        length: Its size.
        payload_offset: Where the tensor's memory begins, from the blob's start; 0 where there is none.
        payload_length: The size of that memory; 0 where there is none.
        blocks: The digests in order.
    """

    offset: int
    length: int
    payload_offset: int
    payload_length: int
    blocks: Sequence[int]

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """Head, payload and tail as (start, stop) within the item; any may be empty."""
        begin, end = self.payload_offset, self.payload_offset + self.payload_length
        return ((0, begin), (begin, end), (end, self.length))

    def blocks_of(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks that hold any of the bytes ``start`` to ``stop`` of the item, in order."""
        before = 0
        for low, high in self.regions:
            count = _blocks_in(high - low)
            if start < high and stop > low:
                first = max(start - low, 0) // BLOCK_SIZE_BYTES
                last = (min(stop, high) - low - 1) // BLOCK_SIZE_BYTES
                for index in range(first, last + 1):
                    at = low + index * BLOCK_SIZE_BYTES
                    yield Block(at, min(at + BLOCK_SIZE_BYTES, high), self.blocks[before + index])
            before += count


class FileDigests:
    """The content of one sidecar: the ``items`` of a data file, ordered by offset."""

    def __init__(self, items: Iterable[ItemDigests]) -> None:
        self._items: Sequence[ItemDigests] = tuple(items)

    @property
    def items(self) -> tuple[ItemDigests, ...]:
        """All items."""
        return tuple(self._items)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop (in the file) and digest of every block, and of padding."""
        end = 0
        for item in self._items:
            if 0 < (size := item.offset - end) < ALIGNMENT_BYTES:
                yield end, item.offset, _PADDING[size]
            for block in item.blocks_of(0, item.length):
                yield item.offset + block.start, item.offset + block.stop, block.digest
            end = item.offset + item.length

    def by_offset(self) -> Mapping[int, ItemDigests]:
        """Return the items by their offset in the file.

        An empty item has the same offset as the item after it. Only the one with bytes is kept,
        because an empty item has no bytes to look up.
        """
        return _ByOffset(
            self._items, {item.offset: n for n, item in enumerate(self._items) if item.length}
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileDigests) and self.items == other.items

    def __hash__(self) -> int:
        return hash(self.items)

    def __repr__(self) -> str:
        return f"FileDigests({self.items!r})"


class _DecodedDigests(FileDigests):
    """The content of a decoded sidecar.

    An ``ItemDigests`` is created only when it is accessed: a file of 20,000 items does not create
    those that are never used.
    """

    def __init__(self, table: _Table) -> None:
        self._items = self._table = table

    def by_offset(self) -> Mapping[int, ItemDigests]:
        """See ``FileDigests.by_offset``."""
        return _ByOffset(self._table, self._table.numbers())


class _Table(Sequence[ItemDigests]):
    """The items of a sidecar, each created when it is accessed."""

    def __init__(self, records: _Numbers, first: _Numbers, blocks: array[int]) -> None:
        """Keep the decoded columns of a sidecar.

        Args:
            records: Offset, length, payload offset and payload length of each item.
            first: The index in ``blocks`` of each item's first block, and one more number for the
                end.
            blocks: The digests of all blocks.
        """
        self._records = records
        self._rows: list[list[int]] = records.tolist()
        self._first: list[int] = first.tolist()
        self._blocks = blocks

    def numbers(self) -> dict[int, int]:
        """Return offset -> index for the items that have bytes."""
        filled = np.nonzero(self._records[:, 1])[0]
        return dict(zip(self._records[filled, 0].tolist(), filled.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        first = self._first
        blocks = self._blocks[first[number] : first[number + 1]]
        offset, length, payload_offset, payload_length = self._rows[number]
        # A NamedTuple's own __new__ is a Python function.
        made = (offset, length, payload_offset, payload_length, blocks)
        return tuple.__new__(ItemDigests, made)


class _ByOffset(Mapping[int, ItemDigests]):
    def __init__(self, items: Sequence[ItemDigests], numbers: Mapping[int, int]) -> None:
        self._items = items
        self._numbers = numbers

    def __getitem__(self, offset: int) -> ItemDigests:
        return self._items[self._numbers[offset]]

    def get(self, offset: int, default: Any = None) -> Any:
        """Return the item at this offset, or ``default``.

        Unlike ``Mapping.get`` it raises and catches no exception, which would be slow.
        """
        number = self._numbers.get(offset)
        return default if number is None else self._items[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class BlockDigester:
    """Digests of one item, computed in the pass that writes it.

    ``update`` takes the item's bytes in order, in pieces of any size; ``cut`` ends a region (head,
    payload); ``finish`` returns the digests of the blocks.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self._filled = 0
        self._blocks = array("Q")

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Digest the next bytes; ``data`` must be contiguous and is not kept."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            if self._filled == 0 and len(view) - at >= BLOCK_SIZE_BYTES:
                # A whole block in one call: no state to carry, and xxhash releases the GIL.
                self._blocks.append(xxhash.xxh3_64_intdigest(view[at : at + BLOCK_SIZE_BYTES]))
                at += BLOCK_SIZE_BYTES
                continue
            piece = view[at : at + BLOCK_SIZE_BYTES - self._filled]
            self._state.update(piece)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == BLOCK_SIZE_BYTES:
                self.cut()

    def cut(self) -> None:
        """End the current block: the next byte begins a new one."""
        if self._filled:
            self._blocks.append(self._state.intdigest())
            self._state.reset()
            self._filled = 0

    def finish(self) -> Sequence[int]:
        """Return the digests of all blocks. The digester cannot be used afterwards."""
        self.cut()
        return self._blocks


def padding_before(offset: int) -> int:
    """The number of zeros before an item with a tensor if the last item ended at ``offset``."""
    return -offset % ALIGNMENT_BYTES


def encode_digests(digests: FileDigests) -> bytes:
    """Return the bytes of a sidecar that contains ``digests``."""
    blocks = array("Q")
    for item in digests.items:
        blocks.extend(item.blocks)
    body = b"".join(
        [
            _HEADER.pack(_MAGIC, _VERSION, 0, BLOCK_SIZE_BYTES, len(digests.items), len(blocks)),
            *(
                _ITEM.pack(i.offset, i.length, i.payload_offset, i.payload_length)
                for i in digests.items
            ),
            _little_endian(blocks).tobytes(),
        ]
    )
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def decode_digests(data: bytes, where: object) -> FileDigests:
    """Return the content of a sidecar.

    Args:
        data: All bytes of the sidecar.
        where: The name of the sidecar, for the message.

    Raises:
        ManifestError: The data is not exactly one sidecar: it is truncated, foreign, damaged or of
            a newer version.
    """
    if len(data) < _HEADER.size + _SEAL.size or not data.startswith(_MAGIC):
        raise _damaged(where, "it is not a sidecar of block digests")
    _, version, _, block_size, item_count, block_count = _HEADER.unpack_from(data)
    if version > _VERSION:
        raise ManifestError(
            f"the sidecar has format {version}, but this version reads format {_VERSION}",
            uri=where,
            hint='upgrade ckptfs, or load with verify="off"',
        )
    items_end = _HEADER.size + item_count * _ITEM.size
    blocks_end = items_end + block_count * array("Q").itemsize
    if len(data) != blocks_end + _SEAL.size:
        raise _damaged(where, f"it has {len(data)} bytes instead of {blocks_end + _SEAL.size}")
    if _SEAL.unpack_from(data, blocks_end)[0] != xxhash.xxh3_64_intdigest(data[:blocks_end]):
        raise _damaged(where, "its own digest does not match")
    if version != _VERSION or block_size != BLOCK_SIZE_BYTES:
        raise _damaged(where, f"version {version} with blocks of {block_size} bytes is unknown")
    blocks = array("Q")
    blocks.frombytes(data[items_end:blocks_end])
    records = np.frombuffer(data, "<u8", 4 * item_count, _HEADER.size).reshape(-1, 4)
    return _DecodedDigests(_table(records, _little_endian(blocks), where))


def first_bad_block(item: ItemDigests, start: int, data: memoryview) -> Block | None:
    """Return the first block with a wrong digest, or None if all blocks are right.

    ``data`` holds whole blocks: the item's bytes from ``start``, where a block begins, to the end
    of a block.
    """
    for block in item.blocks_of(start, start + len(data)):
        piece = data[block.start - start : block.stop - start]
        if xxhash.xxh3_64_intdigest(piece) != block.digest:
            return block
    return None


def _table(records: Any, blocks: array[int], where: object) -> _Table:
    """Return the items of a sidecar after checking every one of them."""
    if np.any(records > _LARGEST):
        raise _damaged(where, "it describes more bytes than a file can have")
    numbers: _Numbers = records.astype(np.int64)
    offset, length, payload_offset, payload_length = numbers.T
    # Items may leave gaps (alignment) but never overlap, or a digest would vouch for nothing.
    ends = np.concatenate([np.zeros(1, np.int64), offset + length])
    tail = length - payload_offset - payload_length
    wrong = np.nonzero((offset < ends[:-1]) | (tail < 0))[0]
    if len(wrong):
        at = int(offset[wrong[0]])
        raise _damaged(where, f"the item at offset {at} overlaps another item")
    counts = sum(
        -(-region // BLOCK_SIZE_BYTES) for region in (payload_offset, payload_length, tail)
    )
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    if first[-1] > len(blocks):
        at = int(offset[np.nonzero(first[1:] > len(blocks))[0][0]])
        raise _damaged(where, f"it lacks digests from offset {at} on")
    if first[-1] != len(blocks):
        raise _damaged(where, f"{len(blocks) - int(first[-1])} digests belong to no item")
    return _Table(numbers, first, blocks)


def _blocks_in(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_SIZE_BYTES)


def _little_endian(words: array[int]) -> array[int]:
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _damaged(where: object, why: str) -> ManifestError:
    return ManifestError(
        f"damaged sidecar of block digests: {why}",
        uri=where,
        hint='the data file may be intact: load with verify="off" to read it unverified',
    )


Damaged = Callable[[str], IntegrityError]  # what is wrong -> an error that names the file


class Check:
    """A check that compares nothing and accepts every byte."""

    sure_bytes: int = 0
    compared: int = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes. They are not kept."""

    def finish(self) -> None:
        """End the check: there are no more bytes."""


class BlockCheck(Check):
    """Compare a data file with its block digests; the padding between two items must be zeros.

    start: The comparison begins here. It must be the beginning of a block, such as an earlier
    ``sure_bytes``.
    """

    def __init__(self, digests: FileDigests, damaged: Damaged, start: int = 0) -> None:
        self._damaged = damaged
        self._blocks = (block for block in digests.blocks() if block[1] > start)
        self._block = next(self._blocks, None)
        self._state = xxhash.xxh3_64()
        self._at = self.sure_bytes = start

    def update(self, data: memoryview) -> None:
        """See ``Check.update``. The pieces may have any size."""
        first, end = self._at, self._at + len(data)
        while self._block is not None and self._block[0] < end:
            start, stop, digest = self._block
            low, high = max(start, first), min(stop, end)
            piece = data[low - first : high - first]
            if high - low == stop - start:
                found = xxhash.xxh3_64_intdigest(piece)  # a whole block in one call
            else:
                self._state.update(piece)
                if high < stop:
                    break
                found = self._state.intdigest()
                self._state.reset()
            if found != digest:
                raise self._damaged(f"bytes {start} to {stop} differ from what was written")
            self.sure_bytes = stop
            self.compared += 1
            self._block = next(self._blocks, None)
        self._at = end

    def finish(self) -> None:
        """See ``Check.finish``."""
        if self._block is not None:
            start, stop, _ = self._block
            raise self._damaged(f"bytes {start} to {stop} are missing: truncated")


class FileDigestCheck(Check):
    """Compare a file with one xxh3_128 of the whole file.

    If the digest is None, nothing is compared; ``digest`` then is that of the bytes taken so far.
    """

    def __init__(self, digest: str | None, damaged: Damaged) -> None:
        self._digest, self._damaged = digest, damaged
        self._state = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """The digest of all bytes taken so far."""
        return self._state.hexdigest()

    def update(self, data: memoryview) -> None:
        """See ``Check.update``."""
        self._state.update(data)

    def finish(self) -> None:
        """See ``Check.finish``."""
        if self._digest is None:
            return
        if self.digest != self._digest:
            raise self._damaged("its bytes differ from what was written")
        self.compared = 1
