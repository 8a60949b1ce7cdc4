"""One open data file: its requests, its digests, and errors that name it.

open_data, read_digests    the two requests that begin a file; any thread
DataFile                   reader and digests together; stateless, so any thread may use it
run_request                one ranged read of it, and the delivery of its bytes
verify_file                the whole file against its digests, for tools

How a load divides a file into requests, with windows and spans:

    large tensor   |<------- payload, blocks of 1 MiB ------->|
    requested            |<-------------------->|
    wants              |edge|    direct    |edge|                direct: straight into the tensor

    small items    |a||b| |c|      |d|
    requests       |<------>|      |-|                           one span: one read, three takers

A *want* is a range of a file and the place that its bytes go to. A large want is a request by itself. Small
wants are combined with their neighbours, up to the size of a window. Verified bytes are read in whole
blocks: a range that begins or ends inside a block reads the whole block, and no block of a saved tensor is
read twice, however many of its parts are requested.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from xxhash import xxh3_64_intdigest

from ckptfs.commit.catalog.catalog import LocatedCheckpoint
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
    "ItemProgress",
    "Ran",
    "Request",
    "Source",
    "Verify",
    "Want",
    "blob_cuts",
    "block_range",
    "open_data",
    "payload_cuts",
    "read_digests",
    "run_request",
    "source_of",
    "verify_file",
]

_TOGETHER = (
    500  # wants of one span: with the gaps between them still fewer buffers than one preadv takes
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a reader's files are divided into requests; all sizes in bytes.

    Attributes:
        window: About how much one request fetches.
        small: A want below this size is combined with others.
        gap: How far apart two wants of one span may be; the bytes between them are read and thrown away.
        together: How many wants one span may have. None: any number.
    """

    window: int
    small: int
    gap: int
    together: int | None = None

    @staticmethod
    def of(reader: DataReader) -> Cutting:
        """Return what pays for this reader: few copies on a disk, few requests over a network."""
        window = max(BLOCK_SIZE_BYTES, reader.window_bytes // BLOCK_SIZE_BYTES * BLOCK_SIZE_BYTES)
        if reader.reach is Reach.REMOTE and reader.concurrency > 1:
            # A request costs as much as copying a few MiB.
            return Cutting(window, small=window // 4, gap=256 << 10)
        return Cutting(window, small=256 << 10, gap=64 << 10, together=_TOGETHER)


@dataclass(slots=True)
class ItemProgress:
    """The item that some wants belong to, and how many of its wants are not read yet. One thread.

    Attributes:
        missing: The number of wants that are not read yet.
        is_strange: Whether a head was found that torch does not write today. Set by any thread.
    """

    missing: int = 0
    is_strange: bool = False


@dataclass(slots=True)
class Want:
    """Bytes ``start`` to ``stop`` of a file, for ``owner``.

    The functions are called on any thread.

    Attributes:
        start: Where the range begins in the file.
        stop: Where it ends.
        owner: The item that the bytes belong to.
        key: Its name in error messages.
        out: The memory that the bytes go to, if that is plain memory.
        blocks: The expected digests, block by block from ``start`` on; all blocks but the last have the full
            size.
        check: Compares the bytes if blocks can have any size; returns the seconds it took.
        take: Is called with the bytes (in ``out`` if that is given) once they are verified; it keeps no
            reference to them.
    """

    start: int
    stop: int
    owner: ItemProgress
    key: str
    out: memoryview | None = None
    blocks: Sequence[int] = ()
    check: Callable[[memoryview], float] | None = None
    take: Callable[[memoryview], None] | None = None


@dataclass(slots=True)
class Request:
    """One ranged read for all of its wants.

    Attributes:
        start: Where the range begins in the file.
        stop: Where it ends.
        wants: The wants that are inside it.
        out: The memory to read into. None: scratch memory.
        scatters: Whether each want has its ``out`` and no two wants overlap.
    """

    start: int
    stop: int
    wants: list[Want] = field(default_factory=list)
    out: memoryview | None = None
    scatters: bool = False

    @property
    def keys(self) -> str:
        """The keys that these bytes are for, as text for an error message."""
        keys = list(dict.fromkeys(want.key for want in self.wants))
        return repr(keys[0]) + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


class Gatherer:
    """Combines wants into requests. The wants come about in the order of the file."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._span: Request | None = None

    def add(self, want: Want) -> Sequence[Request]:
        """Add a want; return the requests that are complete now."""
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
        """Return the span that was not complete yet."""
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
    """Cut the ``needed`` bytes of a payload into ranges (low, high), in order and disjoint.

    Args:
        needed: Ranges of the payload, in any order; they may overlap.
        direct: Ranges that have memory of their own. Cuts are made at their ends.
        length: The length of the payload.
        window: The largest range.
        rounded: Whether each range has to begin and end at a block's border, so that the first and the last
            may extend beyond what is needed.

    Yields:
        The ranges.
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
        needed = (block_range(start, stop, length) for start, stop in needed)
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


def block_range(start: int, stop: int, length: int) -> tuple[int, int]:
    """Return the range of the blocks that contain bytes ``start`` to ``stop`` of a payload."""
    return start - start % BLOCK_SIZE_BYTES, min(stop + -stop % BLOCK_SIZE_BYTES, length)


def blob_cuts(item: ItemDigests | None, length: int, window: int) -> Iterator[tuple[int, int]]:
    """Cut a whole item of ``length`` bytes into ranges of about a window.

    If there are digests to compare with, the cuts are between blocks.
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


_LARGEST_GAP_BYTES = 1 << 20  # no Cutting throws away more than this between two wants


class Verify(ArgumentChoice, parameter="verify"):
    """Whether the bytes that are read are compared with their digests."""

    READ = "read"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Source:
    """Where this rank reads a checkpoint's files.

    Attributes:
        storage: The storage.
        home: The key of the directory that data paths are relative to.
        sidecars: The path of the digests of each data file. Empty for checkpoints that ckptfs did not write;
            they load unverified.
        verify: Whether digests are compared.
        rank: This rank, for error messages.
        shared: Paths of files that are not in a step directory, because several checkpoints share them.
        layouts: The items of each data file by offset, where another format says where payloads are.
            Digests, if there are any, are still in the sidecar.
        ranks: How many ranks load from the checkpoint at once, perhaps on one machine.
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
        """Return the key of a path of the manifest."""
        if path in self.shared:
            return shared_key(path)
        return f"{self.home}/{path}" if self.home else path


def source_of(
    storage: Storage, found: LocatedCheckpoint, verify: Verify, rank: int, ranks: int = 1
) -> Source:
    """Return where this rank reads data files and their digests."""
    files = () if found.manifest is None else found.manifest.files
    sidecars = {f.path: f.digests for f in files if f.digests is not None}
    return Source(storage, found.home, sidecars, verify, rank, found.shared, ranks=ranks)


@dataclass(frozen=True, slots=True)
class DataFile:
    """One open data file with its digests. It does not change, so threads share it."""

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
        """Return the digests of an item; IntegrityError if the sidecar belongs to another file."""
        if self.digests is None or not length:
            return None
        found = self.digests.get(offset)
        if found is None or found.length != length:
            if self.verifies:
                raise self.damaged(f"its digests do not know {key!r}: they are of another file")
            return None
        return found

    def check_size(self, end: int) -> None:
        """Raise IntegrityError unless the file has at least ``end`` bytes."""
        if end > self.reader.size_bytes:
            raise self.damaged(
                f"it has {self.reader.size_bytes} bytes, the checkpoint needs {end}: truncated"
            )

    def compare(self, item: ItemDigests, start: int, key: str, data: memoryview) -> float:
        """Compare whole blocks of an item, from its byte ``start`` on; return the seconds it took.

        IntegrityError names the damaged range.
        """
        began = time.perf_counter()
        bad = first_bad_block(item, start, data)
        if bad is not None:
            raise self.differs(item.offset + bad.start, item.offset + bad.stop, key)
        return time.perf_counter() - began

    def differs(self, low: int, high: int, key: str) -> IntegrityError:
        """Return an error that says that bytes ``low`` to ``high`` of the file are wrong."""
        return self.damaged(f"bytes {low} to {high}, of {key!r}, differ from what was written")

    def damaged(self, why: str) -> IntegrityError:
        """Return an error about this file."""
        return IntegrityError(
            f"data file {self.path} is damaged: {why}",
            uri=self.source.storage.uri(self.source.key(self.path)),
            rank=self.source.rank,
            hint="restore the file, or load another checkpoint; tensors loaded so far are undefined",
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """What one request did: the bytes that it read, and the seconds that verification took."""

    size_bytes: int
    verify_s: float


def run_request(file: DataFile, request: Request, scratch: Scratch) -> Ran:
    """Read one request and deliver its bytes. Any thread. Errors name the file and the keys."""
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
    """Add to a storage error which bytes could not be read, and for which keys."""
    try:
        yield
    except CkptfsError as error:
        where = f"bytes {request.start} to {request.stop} of {file.path}, for {request.keys}"
        error.message = f"{error.message} ({where})"
        raise


def _read_alone(file: DataFile, request: Request, out: memoryview) -> float:
    """Read a want into its memory; return the seconds that verification took.

    Each block is compared while it is in the processor's cache.
    """
    [want] = request.wants
    verify_s, at = 0.0, 0
    for end in _steps(file, request, out):
        if want.blocks:
            verify_s += _compared(file, want, out[:end], at)
        at = end
    return verify_s


def _compared(file: DataFile, want: Want, data: memoryview, start: int) -> float:
    """Compare the blocks of ``data``, a want's first bytes, from ``start`` on; return the seconds."""
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
    """Read each want of a span into its own memory; throw away the bytes between them."""
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

    IntegrityError names the range. IncompleteCheckpointError: the file or its digests are missing.
    """
    started = time.perf_counter()
    digests = read_digests(source, path) or {}
    scratch = Scratch()
    ran: list[Ran] = []
    with open_data(source, path) as reader, ReadPool.of(reader) as pool:
        file = DataFile(reader, source, path, digests)
        file.check_size(max((item.offset + item.length for item in digests.values()), default=0))
        for request in _requests_of_file(file, digests.values(), Cutting.of(reader)):
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


def _requests_of_file(
    file: DataFile, items: Iterable[ItemDigests], cutting: Cutting
) -> Iterator[Request]:
    gatherer = Gatherer(cutting)
    for item in items:
        key = f"the item at {item.offset}"
        for low, high in blob_cuts(item, item.length, cutting.window):
            check = partial(file.compare, item, low, key)
            want = Want(item.offset + low, item.offset + high, ItemProgress(), key, check=check)
            yield from gatherer.add(want)
    yield from gatherer.flush()


def open_data(source: Source, path: str) -> DataReader:
    """Open a data file; IncompleteCheckpointError if it is missing."""
    try:
        reader = source.storage.open_read(source.key(path))
    except NotFoundError as error:
        raise IncompleteCheckpointError(
            f"data file {path} is missing",
            uri=source.storage.uri(source.key(path)),
            hint="restore it, or load another checkpoint",
        ) from error
    if source.ranks > 1:
        # All ranks read what is replicated. It should be read from the disk once, not once per rank.
        reader.keep_cached()
    return reader


def read_digests(source: Source, path: str) -> Mapping[int, ItemDigests] | None:
    """Return the digests of a data file by item offset; if it has none, its layout or None.

    With verify="off" a damaged sidecar is not an error: it would only have given payload offsets.
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
