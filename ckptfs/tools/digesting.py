"""Compare data files with their digests, many at once; the progress survives a kill. No torch.

    files -> segments of up to 256 MiB -> ``jobs`` threads, windows of 16 MiB -> ranges that differ
                                       -> Resumed: which segments are done, in one small JSON file

Every block that differs is found, not only the first. Each thread holds one window in memory.

    {"version": 1, "verified": {"<uri>": {"proof": "...", "segment": 268435456, "done": [0, 1]}}}

A copy has another URI and counts as another file. ``proof`` identifies the digests that the bytes were
compared with, and the size, time and etag that the file had then. A file is verified again if it was
rewritten or if its digests changed. The JSON file is replaced by a rename, at most once a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ckptfs.commit.digests import FileDigests
from ckptfs.errors import IntegrityError, StateError, StorageError
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.base import DataReader, Storage

__all__ = ["BadRange", "Compared", "DeepFile", "Resumed", "compare_files"]

_VERSION = 1
_EVERY_S = 1.0


class Resumed:
    """The segments that this call and earlier ones verified, kept in a file. Any thread.

    The file is written at once, so that an unwritable place is found before the work. If the file cannot
    be written or is not a state file, that is a StateError: a verification that was meant to be
    resumable must not run without it.

    Args:
        path: The file; None remembers nothing.
        every_s: At least this many seconds pass between two writes of the file.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, every_s: float = _EVERY_S) -> None:
        self._path = None if path is None else Path(path)
        self._every_s = every_s
        self._lock = threading.Lock()
        self._written = -math.inf  # so that the first segment is recorded at once
        self._is_dirty = False
        self._done: dict[str, dict[str, Any]] = (
            {} if self._path is None else _read_state(self._path)
        )
        if self._path is not None:
            self._write(self._path)
            self._written = -math.inf

    def has(self, name: str, proof: str, segment: int, segment_bytes: int) -> bool:
        """Whether this segment was verified against the same digests.

        Args:
            name: The file's URI.
            proof: Identifies its digests and the file as it is now.
            segment: The number of the segment.
            segment_bytes: The size of segments in bytes.
        """
        known = self._done.get(name)
        return (
            known is not None
            and known["proof"] == proof
            and known["segment"] == segment_bytes
            and segment in known["done"]
        )

    def add(self, name: str, proof: str, segment: int, segment_bytes: int) -> None:
        """Record a verified segment. The arguments are as for ``Resumed.has``."""
        if self._path is None:
            return
        with self._lock:
            known = self._done.get(name)
            if known is None or (known["proof"], known["segment"]) != (proof, segment_bytes):
                known = self._done[name] = {"proof": proof, "segment": segment_bytes, "done": []}
            known["done"].append(segment)
            self._is_dirty = True
            if time.monotonic() - self._written >= self._every_s:
                self._write(self._path)

    def write(self) -> None:
        """Write the file if it is out of date."""
        with self._lock:
            if self._path is not None and self._is_dirty:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        record = {"version": _VERSION, "verified": self._done}
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        try:
            with partial.open("w") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())  # without it a power cut may leave an empty file
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise StateError(
                f"what was verified cannot be written down: {error}",
                uri=path,
                hint="name a file in a directory that exists and may be written",
            ) from error
        self._written, self._is_dirty = time.monotonic(), False


def _read_state(path: Path) -> dict[str, dict[str, Any]]:
    try:
        record = json.loads(path.read_text())
        if record["version"] != _VERSION:
            raise ValueError(f"version {record['version']} is not {_VERSION}")
        return {
            str(name): {
                "proof": str(known["proof"]),
                "segment": int(known["segment"]),
                "done": [int(number) for number in known["done"]],
            }
            for name, known in record["verified"].items()
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StateError(
            f"what was verified cannot be read: {error}",
            uri=path,
            hint="name a file of ckptfs verify --resume, or one that does not exist yet",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"not a state file of a verification: {error}",
            uri=path,
            hint="name a file of ckptfs verify --resume, or one that does not exist yet",
        ) from error


_WINDOW_BYTES = 16 << 20
SEGMENT_BYTES = 256 << 20

_Block = tuple[int, int, int]  # start and stop in the file, digest


@dataclass(frozen=True, slots=True)
class DeepFile:
    """One file to compare.

    Attributes:
        key: Its key in the storage.
        name: Its URI, for ``Resumed``.
        path: Its path in the manifest.
        size_bytes: How many of its bytes to compare.
        proof: Identifies these digests and the file as it is now.
        digests: The digests of its blocks; None if ``whole`` is given.
        whole: xxh3_128 of the whole file; None if ``digests`` is given.
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
    """A range of a file that differs from its digests or cannot be read.

    Attributes:
        file: The file.
        start: The first byte.
        stop: The byte after the last one.
        blocks: How many blocks of digests differ.
        why: Why the storage could not read the range; "" if it could.
    """

    file: DeepFile
    start: int
    stop: int
    blocks: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """The result for one file.

    Attributes:
        bad: The ranges that differ.
        compared_bytes: Bytes that were compared, by this call or an earlier one.
        resumed_bytes: The part of these bytes that an earlier call compared.
    """

    bad: tuple[BadRange, ...]
    compared_bytes: int
    resumed_bytes: int


@dataclass(slots=True)
class _DigestJob:
    """One segment of a file: ``stop - start`` bytes in blocks; no blocks for a whole file."""

    file: DeepFile
    number: int
    start: int
    stop: int
    blocks: Sequence[_Block] = ()


_Run = Callable[[_DigestJob], list[BadRange]]


@dataclass(slots=True)
class _SharedReaders:
    """The open readers, one per file, shared by all threads."""

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

    A range that the storage cannot read counts as bad. A file that is gone, forbidden or out of reach
    raises an error instead. After a kill the file of ``resumed`` has the finished segments.

    Args:
        storage: The run's.
        files: What to compare.
        jobs: How many segments are compared at the same time.
        resumed: The segments that earlier calls verified.
        meter: Counts the bytes that are read.
        segment_bytes: The size of a segment in bytes.

    Returns:
        The result for each file, by its key.

    Raises:
        StorageError: The storage cannot be used: no permission, no network.
    """
    shared = _SharedReaders(storage)
    todo: list[_DigestJob] = []
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

    def run(job: _DigestJob) -> list[BadRange]:
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


def _run_all(todo: Sequence[_DigestJob], run: _Run, jobs: int) -> list[BadRange]:
    with ThreadPoolExecutor(jobs, thread_name_prefix="ckptfs-verify") as pool:
        futures: list[Future[list[BadRange]]] = [pool.submit(run, job) for job in todo]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # After the first failure, or Ctrl-C, no more jobs are begun.
            pool.shutdown(wait=True, cancel_futures=True)
        failed = next((f for f in futures if not f.cancelled() and f.exception()), None)
        if failed is not None:
            failed.result()
        return [bad for future in futures for bad in future.result()]


def _jobs_of(file: DeepFile, segment_bytes: int) -> Iterator[_DigestJob]:
    if file.digests is None:
        yield _DigestJob(file, 0, 0, file.size_bytes)
        return
    blocks: list[_Block] = []
    number = held = 0
    for start, stop, digest in file.digests.blocks():
        if stop > file.size_bytes:
            continue  # the file is too short, which is a finding already
        if blocks and held + stop - start > segment_bytes:
            yield _DigestJob(file, number, 0, held, tuple(blocks))
            blocks, number, held = [], number + 1, 0
        blocks.append((start, stop, digest))
        held += stop - start
    if blocks:
        yield _DigestJob(file, number, 0, held, tuple(blocks))


def _compare(
    shared: _SharedReaders, job: _DigestJob, held: threading.local, meter: Meter
) -> list[BadRange]:
    window = getattr(held, "window", None)
    if window is None:
        window = held.window = memoryview(bytearray(_WINDOW_BYTES))
    try:
        reader = shared.reader(job.file)
    except IsADirectoryError as error:
        return [BadRange(job.file, 0, job.file.size_bytes, 0, str(error))]
    if job.file.whole is not None:
        return _compare_file(reader, job.file, job.file.whole, window, meter)
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


def _compare_file(
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
    """Read into ``part``. Return "", or why it failed: a disk error, or the file is too short."""
    try:
        reader.read_into(start, part)
    except IntegrityError as error:
        return error.message
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # no permission, no network: that says nothing about these bytes
        return error.message
    return ""


def _windows(blocks: Sequence[_Block]) -> Iterator[tuple[int, int, list[_Block]]]:
    """Yield (start, stop, blocks) for groups of adjacent blocks that fit into one window."""
    here: list[_Block] = []
    for block in blocks:
        if here and (block[0] != here[-1][1] or block[1] - here[0][0] > _WINDOW_BYTES):
            yield here[0][0], here[-1][1], here
            here = []
        here.append(block)
    if here:
        yield here[0][0], here[-1][1], here


def _merged(found: Sequence[BadRange]) -> Iterator[BadRange]:
    """Join adjacent ranges of the same file and reason into one."""
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
