"""Data files held against their digests, many at once; what was done survives a kill. No torch.

    files -> segments of up to 256 MiB -> ``jobs`` threads, windows of 16 MiB -> ranges that differ
                                       -> Progress: which segments are done, in one small JSON file

Every block that differs is found, not only the first. In memory: one window for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import xxhash

from ckptfs.commit.digests import FileDigests
from ckptfs.errors import IntegrityError, StorageError
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.base import DataReader, Storage
from ckptfs.tools.resuming import Resumed

__all__ = ["BadRange", "Compared", "DeepFile", "compare_files"]

_WINDOW_BYTES = 16 << 20
SEGMENT_BYTES = 256 << 20

_Block = tuple[int, int, int]  # start and stop in the file, digest


@dataclass(frozen=True, slots=True)
class DeepFile:
    """One file to compare.

    Attributes:
        key: Where it is.
        name: Its URI, for ``Resumed``.
        path: As the manifest lists it.
        size_bytes: How many bytes are there.
        proof: Of these digests, and of the file as it is now.
        digests: Those of its blocks; None where ``whole`` has one of all.
        whole: xxh3_128 of all of it; None where ``digests`` has those of blocks.
    """

    key: str
    name: str
    path: str
    size_bytes: int
    proof: str
    digests: FileDigests | None = None
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class BadRange:
    """Bytes of a file that differ.

    Attributes:
        file: The file.
        start: The first byte.
        stop: The byte after the last one.
        blocks: How many blocks of digests differ.
        why: Why the storage could not read them; "" where it could.
    """

    file: DeepFile
    start: int
    stop: int
    blocks: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of one file.

    Attributes:
        bad: The ranges that differ.
        compared_bytes: Bytes that were compared, by this call or an earlier one.
        resumed_bytes: Bytes of these that an earlier call compared.
    """

    bad: tuple[BadRange, ...]
    compared_bytes: int
    resumed_bytes: int


@dataclass(slots=True)
class _Job:
    """One segment of a file: ``stop - start`` bytes, in these blocks or in the whole file."""

    file: DeepFile
    number: int
    start: int
    stop: int
    blocks: Sequence[_Block] = ()


_Run = Callable[[_Job], list[BadRange]]


@dataclass(slots=True)
class _Shared:
    """Readers of files that are open, one for all threads."""

    storage: Storage
    readers: dict[str, DataReader] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reader(self, file: DeepFile) -> DataReader:
        with self.lock:
            if file.key not in self.readers:
                self.readers[file.key] = self.storage.open_read(file.key)
            return self.readers[file.key]

    def done(self, file: DeepFile) -> None:
        with self.lock:
            self.left[file.key] -= 1
            reader = None if self.left[file.key] else self.readers.pop(file.key, None)
        if reader is not None:
            reader.close()

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


def compare_files(
    storage: Storage,
    files: Sequence[DeepFile],
    *,
    jobs: int,
    resumed: Resumed,
    meter: Meter = SILENT,
    segment_bytes: int = SEGMENT_BYTES,
) -> dict[str, Compared]:
    """Compare every byte that has a digest. Local, read-only.

    What the storage cannot read is a bad range; that it is gone, not permitted or out of reach is raised.
    After a kill the segments that were done are in the file of ``resumed``.

    Args:
        storage: The run's.
        files: What to compare.
        jobs: Files, or pieces of them, at once.
        resumed: What earlier calls did.
        meter: Counts the bytes that are read.
        segment_bytes: How many bytes are read at a time.

    Returns:
        What came of each file, by its key.

    Raises:
        StorageError: The storage cannot be used: no permission, no network.
    """
    shared = _Shared(storage)
    todo: list[_Job] = []
    sizes, before = (
        dict.fromkeys((f.key for f in files), 0),
        dict.fromkeys((f.key for f in files), 0),
    )
    for file in files:
        for job in _jobs_of(file, segment_bytes):
            size = job.stop - job.start
            sizes[file.key] += size
            if resumed.has(file.name, file.proof, job.number, segment_bytes):
                before[file.key] += size
                meter.advance(size)
            else:
                shared.left[file.key] = shared.left.get(file.key, 0) + 1
                todo.append(job)
    held = threading.local()

    def run(job: _Job) -> list[BadRange]:
        try:
            bad = _compare(shared, job, held, meter)
        finally:
            shared.done(job.file)
        if not bad:
            resumed.add(job.file.name, job.file.proof, job.number, segment_bytes)
        return bad

    try:
        found = list(_merged(_run_all(todo, run, jobs)))
    finally:
        shared.close()
        resumed.write()
    return {
        key: Compared(tuple(b for b in found if b.file.key == key), size, before[key])
        for key, size in sizes.items()
    }


def _run_all(todo: Sequence[_Job], run: _Run, jobs: int) -> list[BadRange]:
    with ThreadPoolExecutor(jobs, thread_name_prefix="ckptfs-verify") as pool:
        going: list[Future[list[BadRange]]] = [pool.submit(run, job) for job in todo]
        try:
            wait(going, return_when=FIRST_EXCEPTION)
        finally:
            # The first failure, or Ctrl-C: what has not begun stays undone.
            pool.shutdown(wait=True, cancel_futures=True)
        failed = next((f for f in going if not f.cancelled() and f.exception()), None)
        if failed is not None:
            failed.result()
        return [bad for future in going for bad in future.result()]


def _jobs_of(file: DeepFile, segment_bytes: int) -> Iterator[_Job]:
    if file.digests is None:
        yield _Job(file, 0, 0, file.size_bytes)
        return
    blocks: list[_Block] = []
    number = held = 0
    for start, stop, digest in file.digests.blocks():
        if stop > file.size_bytes:
            continue  # that it is cut short is told already
        if blocks and held + stop - start > segment_bytes:
            yield _Job(file, number, 0, held, tuple(blocks))
            blocks, number, held = [], number + 1, 0
        blocks.append((start, stop, digest))
        held += stop - start
    if blocks:
        yield _Job(file, number, 0, held, tuple(blocks))


def _compare(shared: _Shared, job: _Job, held: threading.local, meter: Meter) -> list[BadRange]:
    window = getattr(held, "window", None)
    if window is None:
        window = held.window = memoryview(bytearray(_WINDOW_BYTES))
    try:
        reader = shared.reader(job.file)
    except IsADirectoryError as error:
        return [BadRange(job.file, 0, job.file.size_bytes, 0, str(error))]
    if job.file.whole is not None:
        return _compare_whole(reader, job.file, job.file.whole, window, meter)
    bad: list[BadRange] = []
    for start, stop, blocks in _windows(job.blocks):
        part = window[: stop - start]
        why = _read(reader, start, part)
        for low, high, digest in blocks:
            piece = part[low - start : high - start]
            if why or xxhash.xxh3_64_intdigest(piece) != digest:
                bad.append(BadRange(job.file, low, high, 1, why))
        meter.advance(sum(high - low for low, high, _ in blocks))
    return bad


def _compare_whole(
    reader: DataReader, file: DeepFile, digest: str, window: memoryview, meter: Meter
) -> list[BadRange]:
    state = xxhash.xxh3_128()
    for at in range(0, file.size_bytes, len(window)):
        part = window[: file.size_bytes - at]
        why = _read(reader, at, part)
        if why:
            return [BadRange(file, at, at + len(part), 0, why)]
        state.update(part)
        meter.advance(len(part))
    if state.hexdigest() == digest:
        return []
    return [BadRange(file, 0, file.size_bytes, 0)]


def _read(reader: DataReader, start: int, part: memoryview) -> str:
    """Nothing where it was read, else why not: the disk failed, or the file ends before."""
    try:
        reader.read_into(start, part)
    except IntegrityError as error:
        return error.message
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # no permission, no network: it says nothing of these bytes
        return error.message
    return ""


def _windows(blocks: Sequence[_Block]) -> Iterator[tuple[int, int, list[_Block]]]:
    """Neighbouring blocks, as many as a window holds."""
    here: list[_Block] = []
    for block in blocks:
        if here and (block[0] != here[-1][1] or block[1] - here[0][0] > _WINDOW_BYTES):
            yield here[0][0], here[-1][1], here
            here = []
        here.append(block)
    if here:
        yield here[0][0], here[-1][1], here


def _merged(found: Sequence[BadRange]) -> Iterator[BadRange]:
    """Neighbours are one range."""
    last: BadRange | None = None
    for bad in sorted(found, key=lambda b: (b.file.key, b.start)):
        if last is not None and (last.file, last.stop, last.why) == (bad.file, bad.start, bad.why):
            last = BadRange(last.file, last.start, bad.stop, last.blocks + bad.blocks, last.why)
            continue
        if last is not None:
            yield last
        last = bad
    if last is not None:
        yield last
