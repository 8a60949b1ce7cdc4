"""One open data file, and what may be believed of it: its digests, and errors that name it.

open_data, read_digests    the two requests that begin a file; any thread
DataFile                   reader and digests together; stateless, so any thread may use it
run_request                one ranged read of it, handed to those who want its bytes
verify_file                all of it against its digests, for tools
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from xxhash import xxh3_64_intdigest

from ckptfs.commit.digests import (
    BLOCK_SIZE_BYTES,
    ItemDigests,
    decode_digests,
    first_bad_block,
)
from ckptfs.commit.layout import shared_key
from ckptfs.commit.ops import read_limited
from ckptfs.dcp.lanes import Lanes, Scratch
from ckptfs.dcp.spans import Cutting, Gatherer, Owner, Request, Want, blob_cuts
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
    "DataFile",
    "Ran",
    "Source",
    "Verify",
    "open_data",
    "read_digests",
    "run_request",
    "verify_file",
]


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
    with open_data(source, path) as reader, Lanes.of(reader) as lanes:
        file = DataFile(reader, source, path, digests)
        file.check_size(max((item.offset + item.length for item in digests.values()), default=0))
        for request in _whole_file(file, digests.values(), Cutting.of(reader)):
            lanes.submit(partial(run_request, file, request, scratch), ran.append)
        while lanes.wait():
            pass
    verify_s = sum(one.verify_s for one in ran) / lanes.used
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
