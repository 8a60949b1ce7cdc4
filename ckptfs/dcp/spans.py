"""Which requests a load makes: byte ranges, cut to windows and gathered into spans. Pure.

    large tensor   |<------- payload, blocks of 1 MiB ------->|
    asked for            |<-------------------->|
    wants              |edge|    direct    |edge|                direct: straight into the tensor

    small items    |a||b| |c|      |d|
    requests       |<------>|      |-|                           one span: one read, three takers

A *want* is a range of a file and who takes its bytes. Wants that are large are requests by
themselves; the others are gathered with their neighbours up to a window. Verified bytes come in
whole blocks: a range that begins or ends inside a block reads all of that block, and no block twice
for one saved tensor, however many parts of it are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests
from ckptfs.storage.base import DataReader, Reach

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

_TOGETHER = (
    500  # wants of one span: with what lies between them fewer buffers than one preadv takes
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a reader's files are cut, in bytes.

    window: one request fetches about so much. small: a want below it is gathered with others.
    gap: wants may lie so far apart in one span; what lies between is thrown away. together: wants
    of one span, None: any number.
    """

    window: int
    small: int
    gap: int
    together: int | None = None

    @staticmethod
    def of(reader: DataReader) -> Cutting:
        """What pays for this reader: few copies on a disk, few requests over a network."""
        window = max(BLOCK_SIZE_BYTES, reader.window_bytes // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES)
        if reader.reach is Reach.REMOTE and reader.concurrency > 1:
            # A request costs as much as copying a few MiB.
            return Cutting(window, small=window // 4, gap=256 << 10)
        return Cutting(window, small=256 << 10, gap=64 << 10, together=_TOGETHER)


@dataclass(slots=True)
class Owner:
    """Whose wants these are; counts those that are missing. One thread.

    is_strange: a head was seen that torch does not write today; set by any thread.
    """

    missing: int = 0
    is_strange: bool = False


@dataclass(slots=True)
class Want:
    """Bytes ``start`` to ``stop`` of a file, for ``owner``, which errors call ``key``.

    out: where they belong, if that is plain memory. blocks: what they must be, block by block from
    ``start`` on; each but the last is of the full size. check: compares all of them where blocks are of
    any size; returns the seconds it took. take: is given the bytes (in ``out`` where there is one) when
    they are right, and keeps no reference. All on any thread.
    """

    start: int
    stop: int
    owner: Owner
    key: str
    out: memoryview | None = None
    blocks: Sequence[int] = ()
    check: Callable[[memoryview], float] | None = None
    take: Callable[[memoryview], None] | None = None


@dataclass(slots=True)
class Request:
    """One ranged read: into ``out``, or where that is None into scratch memory, for all wants.

    scatters: each want has its ``out``, and they lie one behind the other.
    """

    start: int
    stop: int
    wants: list[Want] = field(default_factory=list)
    out: memoryview | None = None
    scatters: bool = False

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

    def add(self, want: Want) -> Sequence[Request]:
        """One more want; what is complete by it."""
        cutting, span = self._cutting, self._span
        start, stop, out = want.start, want.stop, want.out
        if out is not None and stop - start > cutting.small:
            return (*self.flush(), Request(start, stop, [want], out))
        if (
            span is not None
            and span.start <= start <= span.stop + cutting.gap
            and max(stop, span.stop) - span.start <= cutting.window
            and (cutting.together is None or len(span.wants) < cutting.together)
        ):
            if out is None or start < span.stop:
                span.scatters = False
            span.wants.append(want)
            span.stop = max(stop, span.stop)
            return ()
        complete = self.flush()
        self._span = Request(start, stop, [want], scatters=out is not None)
        return complete

    def flush(self) -> Sequence[Request]:
        """The span that was not complete yet."""
        span, self._span = self._span, None
        if span is None:
            return ()
        if len(span.wants) == 1:
            span.out = span.wants[0].out  # alone: no need for scratch
        return (span,)


def payload_cuts(
    needed: Iterable[tuple[int, int]],
    direct: Iterable[tuple[int, int]],
    length: int,
    window: int,
    *,
    rounded: bool,
) -> Iterator[tuple[int, int]]:
    """Cut the ``needed`` bytes of a payload of ``length`` into ranges (low, high), in order and disjoint.

    needed: in any order, overlapping or not. direct: ranges that have memory of their own; what they
    hold in whole is cut where they begin and end. rounded: each begins and ends where a block does,
    so the first and the last may stick out of what is needed.
    """
    edges: set[int] = set()
    for start, stop in direct:
        low, high = start, stop
        if rounded:
            low = start + -start % BLOCK_SIZE_BYTES
            high = stop if stop == length else stop - stop % BLOCK_SIZE_BYTES
        if low < high:
            edges.update((low, high))
    if rounded:
        needed = (whole_blocks(start, stop, length) for start, stop in needed)
    cuts = sorted(edges)
    at = 0
    for low, high in _merged(needed):
        while at < len(cuts) and cuts[at] <= low:
            at += 1
        begin = low
        while begin < high:
            limit = cuts[at] if at < len(cuts) and cuts[at] < high else high
            end = min(limit, begin + window)
            yield begin, end
            begin = end
            if begin == limit:
                at += 1


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    low = high = -1
    for start, stop in sorted(ranges):
        if start > high:
            if high > low:
                yield low, high
            low, high = start, stop
        else:
            high = max(high, stop)
    if high > low:
        yield low, high


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
