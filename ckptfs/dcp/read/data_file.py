"""One open data file: its requests, its digests, and errors that name it.

open_data, read_digests    the two requests that begin a file; any thread
DataFile                   reader and digests together; stateless, so any thread may use it
run_request                one ranged read of it, handed to those who want its bytes
verify_file                all of it against its digests, for tools

Which requests a load makes of it, cut to windows and gathered into spans:

    large tensor   |<------- payload, blocks of 1 MiB ------->|
    requested            |<-------------------->|
    wants              |edge|    direct    |edge|                direct: straight into the tensor

    small items    |a||b| |c|      |d|
    requests       |<------>|      |-|                           one span: one read, three takers

A *want* is a range of a file and who takes its bytes. Wants that are large are requests by
themselves; the others are gathered with their neighbours up to a window. Verified bytes come in
whole blocks: a range that begins or ends inside a block reads all of that block, and no block twice
for one saved tensor, however many parts of it are requested.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from xxhash import xxh3_64_intdigest

from ckptfs.commit.digests import (
    BLOCK_SIZE_BYTES,
    ItemDigests,
    decode_digests,
    first_bad_block,
)
from ckptfs.commit.operations import read_limited
from ckptfs.commit.paths import shared_key
from ckptfs.dcp.read.read_threads import ReadPool, Scratch
from ckptfs.errors import (
    ArgumentChoice,
    CkptfsError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
)
from ckptfs.events import Counters
from ckptfs.storage.base import DataReader, Reach, Storage

__all__ = [
    "Cutting",
    "DataFile",
    "Gatherer",
    "Owner",
    "Ran",
    "Request",
    "Source",
    "Verify",
    "Want",
    "blob_cuts",
    "open_data",
    "payload_cuts",
    "read_digests",
    "run_request",
    "verify_file",
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


_LARGEST_GAP_BYTES = 1 << 20  # no cutting throws away more between two wants


class Verify(ArgumentChoice, parameter="verify"):
    """Whether the bytes that are read are compared with their digests."""

    READ = "read"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint's files lie for this rank.

    home: key of the directory that data paths are relative to. sidecars: path of a data file ->
    path of its digests; empty for checkpoints that ckptfs did not write, which load unverified.
    shared: paths that lie beside the step directories instead. layouts: path of a data file -> its
    items by offset, where another format tells where payloads lie; digests, if there are any, lie in
    the sidecar all the same. ranks: how many load from it at once, perhaps on one machine.
    """

    storage: Storage
    home: str
    sidecars: Mapping[str, str] = field(default_factory=dict)
    verify: Verify = Verify.READ
    rank: int | None = None
    shared: frozenset[str] = frozenset()
    layouts: Mapping[str, Mapping[int, ItemDigests]] = field(default_factory=dict)
    ranks: int = 1

    def key(self, path: str) -> str:
        """The key of a path of the manifest."""
        if path in self.shared:
            return shared_key(path)
        return f"{self.home}/{path}" if self.home else path


@dataclass(frozen=True, slots=True)
class DataFile:
    """One open data file with its digests; nothing in it changes, so threads share it."""

    reader: DataReader
    source: Source
    path: str
    digests: Mapping[int, ItemDigests] | None

    @property
    def verifies(self) -> bool:
        """Whether what is read is compared with digests."""
        known = self.digests is not None and self.digests is not self.source.layouts.get(self.path)
        return known and self.source.verify is Verify.READ

    def item(self, offset: int, length: int, key: str) -> ItemDigests | None:
        """The digests of an item; IntegrityError when the sidecar is of another file."""
        if self.digests is None or not length:
            return None
        found = self.digests.get(offset)
        if found is None or found.length != length:
            if self.verifies:
                raise self.damaged(f"its digests do not know {key!r}: they are of another file")
            return None
        return found

    def check_size(self, end: int) -> None:
        """IntegrityError unless the file has ``end`` bytes."""
        if end > self.reader.size_bytes:
            raise self.damaged(
                f"it has {self.reader.size_bytes} bytes, the checkpoint needs {end}: truncated"
            )

    def compare(self, item: ItemDigests, start: int, key: str, data: memoryview) -> float:
        """Compare whole blocks of an item, from ``start`` of it on; the seconds it took.

        IntegrityError names the damaged range.
        """
        began = time.perf_counter()
        bad = first_bad_block(item, start, data)
        if bad is not None:
            raise self.differs(item.offset + bad.start, item.offset + bad.stop, key)
        return time.perf_counter() - began

    def differs(self, low: int, high: int, key: str) -> IntegrityError:
        """An error about bytes ``low`` to ``high`` of it."""
        return self.damaged(f"bytes {low} to {high}, of {key!r}, differ from what was written")

    def damaged(self, why: str) -> IntegrityError:
        """An error about this file."""
        return IntegrityError(
            f"data file {self.path} is damaged: {why}",
            uri=self.source.storage.uri(self.source.key(self.path)),
            rank=self.source.rank,
            hint="restore the file, or load another checkpoint; tensors loaded so far are undefined",
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """What one request did."""

    size_bytes: int
    verify_s: float


def run_request(file: DataFile, request: Request, scratch: Scratch) -> Ran:
    """Read one request and deliver it. Any thread. Errors name the file and the keys."""
    verify_s = 0.0
    data: memoryview | None = None
    if request.out is not None:
        verify_s += _read_alone(file, request, request.out)
    elif request.scatters and file.reader.reach is Reach.LOCAL:
        with _named(file, request):
            _read_scattered(file, request, scratch)
    else:
        data = scratch.of(request.stop - request.start)
        with _named(file, request):
            file.reader.read_into(request.start, data)
    is_compared = request.out is not None
    for want in request.wants:
        here = want.out
        if data is not None:
            found = data[want.start - request.start : want.stop - request.start]
            if here is None:
                here = found
            else:
                here[:] = found
        assert here is not None  # noqa: S101 - nothing is read into nowhere
        if want.blocks and not is_compared:
            verify_s += _compared(file, want, here, 0)
        elif want.check is not None:
            verify_s += want.check(here)
        if want.take is not None:
            want.take(here)
    return Ran(request.stop - request.start, verify_s)


@contextlib.contextmanager
def _named(file: DataFile, request: Request) -> Iterator[None]:
    """Whatever the storage cannot read: for whom it was."""
    try:
        yield
    except CkptfsError as error:
        where = f"bytes {request.start} to {request.stop} of {file.path}, for {request.keys}"
        error.message = f"{error.message} ({where})"
        raise


def _read_alone(file: DataFile, request: Request, out: memoryview) -> float:
    """Read a want into place, comparing each block while it is in the processor's cache; seconds."""
    [want] = request.wants
    verify_s, at = 0.0, 0
    for end in _steps(file, request, out):
        if want.blocks:
            verify_s += _compared(file, want, out[:end], at)
        at = end
    return verify_s


def _compared(file: DataFile, want: Want, data: memoryview, start: int) -> float:
    """Compare the blocks of ``data``, a want's first bytes, from ``start`` on; the seconds it took."""
    began = time.perf_counter()
    for at in range(start, len(data), BLOCK_SIZE_BYTES):
        block = data[at : at + BLOCK_SIZE_BYTES]
        if xxh3_64_intdigest(block) != want.blocks[at // BLOCK_SIZE_BYTES]:
            raise file.differs(want.start + at, want.start + at + len(block), want.key)
    return time.perf_counter() - began


def _steps(file: DataFile, request: Request, out: memoryview) -> Iterator[int]:
    with _named(file, request):
        yield from file.reader.read_steps(request.start, out, BLOCK_SIZE_BYTES)


def _read_scattered(file: DataFile, request: Request, scratch: Scratch) -> None:
    """Read each want of a span into its own place; what lies between them is thrown away."""
    waste = scratch.of(_LARGEST_GAP_BYTES)
    views = []
    at = request.start
    for want in request.wants:
        if want.start > at:
            views.append(waste[: want.start - at])
        if want.out is not None:
            views.append(want.out)
        at = want.stop
    file.reader.read_views(request.start, views)


def verify_file(source: Source, path: str) -> Counters:
    """Compare every byte of every item of a data file with its digests. Local; for tools.

    IntegrityError names the range; IncompleteCheckpointError: the file or its digests are missing.
    """
    started = time.perf_counter()
    digests = read_digests(source, path) or {}
    scratch = Scratch()
    ran: list[Ran] = []
    with open_data(source, path) as reader, ReadPool.of(reader) as pool:
        file = DataFile(reader, source, path, digests)
        file.check_size(max((item.offset + item.length for item in digests.values()), default=0))
        for request in _whole_file(file, digests.values(), Cutting.of(reader)):
            pool.submit(partial(run_request, file, request, scratch), ran.append)
        while pool.wait():
            pass
    verify_s = sum(one.verify_s for one in ran) / pool.used
    return Counters(
        size_bytes=sum(one.size_bytes for one in ran),
        files=1,
        items=len(digests),
        read_s=time.perf_counter() - started - verify_s,
        verify_s=verify_s,
    )


def _whole_file(
    file: DataFile, items: Iterable[ItemDigests], cutting: Cutting
) -> Iterator[Request]:
    gatherer = Gatherer(cutting)
    for item in items:
        key = f"the item at {item.offset}"
        for low, high in blob_cuts(item, item.length, cutting.window):
            check = partial(file.compare, item, low, key)
            want = Want(item.offset + low, item.offset + high, Owner(), key, check=check)
            yield from gatherer.add(want)
    yield from gatherer.flush()


def open_data(source: Source, path: str) -> DataReader:
    """Open a data file; IncompleteCheckpointError when it is missing."""
    try:
        reader = source.storage.open_read(source.key(path))
    except NotFoundError as error:
        raise IncompleteCheckpointError(
            f"data file {path} is missing",
            uri=source.storage.uri(source.key(path)),
            hint="restore it, or load another checkpoint",
        ) from error
    if source.ranks > 1:
        # What is replicated all of them read: once from the disk, and not once for each.
        reader.keep_cached()
    return reader


def read_digests(source: Source, path: str) -> Mapping[int, ItemDigests] | None:
    """The digests of a data file by item offset; where it has none its layout, or None.

    With verify="off" a damaged sidecar is no obstacle: it would only have told payload offsets.
    """
    sidecar = source.sidecars.get(path)
    if sidecar is None:
        return source.layouts.get(path)
    where = source.storage.uri(source.key(sidecar))
    try:
        return decode_digests(read_limited(source.storage, source.key(sidecar)), where).by_offset()
    except (NotFoundError, ManifestError) as error:
        if source.verify is Verify.OFF:
            return source.layouts.get(path)
        if isinstance(error, ManifestError):
            raise
        raise IncompleteCheckpointError(
            f"the digests of {path} are missing", uri=where, hint='load with verify="off"'
        ) from error
