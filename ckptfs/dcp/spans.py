"""Which requests a load makes: byte ranges, cut to windows and gathered into spans. Pure.

    large tensor   |<------- payload, blocks of 1 MiB ------->|
    asked for            |<-------------------->|
    wants              |edge|    direct    |edge|                direct: straight into the tensor

    small items    |a||b| |c|      |d|
    requests       |<------>|      |-|                           one scratch span, three takers

A *want* is a range of a file and who takes its bytes. Wants that are large and need no rounding are
requests by themselves; the others are gathered with their neighbours up to a window. Verified
bytes come in whole blocks: a range that begins or ends inside a block reads all of that block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests
from ckptfs.storage.base import DataReader

__all__ = [
    "Cutting",
    "Gatherer",
    "Owner",
    "Request",
    "Want",
    "blob_cuts",
    "payload_cuts",
    "whole_blocks",
]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a reader's files are cut, in bytes.

    window: one request fetches about so much. small: a want below it is gathered with others.
    gap: wants may lie so far apart in one span; what lies between is thrown away. edge: bytes that
    go through scratch where a range begins or ends inside a block.
    """

    window: int
    small: int
    gap: int
    edge: int

    @staticmethod
    def of(reader: DataReader) -> Cutting:
        """What pays for this reader: few copies on a disk, few requests over a network."""
        window = max(BLOCK_SIZE_BYTES, reader.window_bytes // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES)
        if reader.concurrency > 1:
            # A request costs as much as copying a few MiB.
            return Cutting(window, small=window // 4, gap=256 << 10, edge=window)
        return Cutting(window, small=256 << 10, gap=64 << 10, edge=BLOCK_SIZE_BYTES)


@dataclass(slots=True)
class Owner:
    """Whose wants these are; counts those that are missing. One thread."""

    missing: int = 0


@dataclass(slots=True)
class Want:
    """Bytes ``start`` to ``stop`` of a file, for ``owner``, which errors call ``key``.

    out: where they belong, if that is plain memory. take: is called with the bytes (in ``out`` where
    there is one), on any thread; verifies and delivers them, keeps no reference, returns the seconds
    that verifying took.
    """

    start: int
    stop: int
    owner: Owner
    key: str
    take: Callable[[memoryview], float]
    out: memoryview | None = None


@dataclass(slots=True)
class Request:
    """One ranged read: into ``out``, or where that is None into scratch memory, for all wants."""

    start: int
    stop: int
    wants: list[Want] = field(default_factory=list)
    out: memoryview | None = None

    @property
    def keys(self) -> str:
        """Whose bytes these are, for an error's text."""
        keys = list(dict.fromkeys(want.key for want in self.wants))
        return repr(keys[0]) + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


class Gatherer:
    """Makes requests of wants, which come about in the order of the file."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._span: Request | None = None

    def add(self, want: Want) -> Iterator[Request]:
        """One more want; what is complete by it."""
        cutting, span = self._cutting, self._span
        if want.out is not None and want.stop - want.start > cutting.small:
            yield from self.flush()
            yield Request(want.start, want.stop, [want], want.out)
            return
        if (
            span is not None
            and span.start <= want.start <= span.stop + cutting.gap
            and max(want.stop, span.stop) - span.start <= cutting.window
        ):
            span.wants.append(want)
            span.stop = max(want.stop, span.stop)
            return
        yield from self.flush()
        self._span = Request(want.start, want.stop, [want])

    def flush(self) -> Iterator[Request]:
        """The span that was not complete yet."""
        span, self._span = self._span, None
        if span is None:
            return
        if len(span.wants) == 1 and span.wants[0].out is not None:
            span.out = span.wants[0].out  # alone: no need for scratch
        yield span


def payload_cuts(
    start: int, stop: int, length: int, cutting: Cutting, *, rounded: bool
) -> Iterator[tuple[int, int]]:
    """Cut bytes ``start`` to ``stop`` of a payload of ``length`` into ranges (low, high), in order.

    rounded: each begins and ends where a block does, so the first and the last may stick out.
    """
    low, high = start, stop
    if rounded:
        low, high = whole_blocks(start, stop, length)
    while low < high:
        end = min(high, low + (cutting.edge if low < start else cutting.window))
        if low >= start and end > stop and cutting.edge < cutting.window:
            # Up to the block in which the range ends; that one is a piece by itself.
            inner = stop - stop % BLOCK_SIZE_BYTES
            end = inner if inner > low else end
        yield low, end
        low = end


def whole_blocks(start: int, stop: int, length: int) -> tuple[int, int]:
    """The blocks of a payload of ``length`` that hold its bytes ``start`` to ``stop``."""
    return start - start % BLOCK_SIZE_BYTES, min(stop + -stop % BLOCK_SIZE_BYTES, length)


def blob_cuts(item: ItemDigests | None, length: int, window: int) -> Iterator[tuple[int, int]]:
    """Cut a whole item of ``length`` bytes into ranges of about a window; between blocks where there
    are digests to compare with.
    """
    if item is None:
        yield from ((low, min(low + window, length)) for low in range(0, length, window))
        return
    low = high = 0
    for block in item.blocks_of(0, length):
        if block.stop - low > window and high > low:
            yield low, high
            low = high
        high = block.stop
    if high > low:
        yield low, high
