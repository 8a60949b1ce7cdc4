"""The bytes of a copy: who reads which file, and each compared with its digests as it passes by.

    manifest    __0_0.distcp + .xxh3   __1_0.distcp + .xxh3   ...
    tasks       a data file and its sidecar are one; .metadata is written anew
    shares      a domain's files among the ranks of that domain, by size: each byte is read once
    one task    ranged reads, a few ahead -> compared, block by block -> one writer

What differs from its digests is an IntegrityError before the copied file gets its name, so a damaged
source is never committed as a copy. In memory: as many windows as the reader wants under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from ckptfs.commit.comparing import BlockCheck, Check, WholeCheck
from ckptfs.commit.digests import decode_digests
from ckptfs.commit.layout import METADATA
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.commit.shared_data import file_key
from ckptfs.commit.spec import WrittenPart
from ckptfs.errors import (
    AnswerLostError,
    IncompleteCheckpointError,
    IntegrityError,
    StateError,
    StorageError,
    TransientError,
)
from ckptfs.events import Counters
from ckptfs.storage.base import DataReader, Storage

__all__ = [
    "CopyTask",
    "ReadAhead",
    "Readable",
    "Writable",
    "copy_share",
    "new_path",
    "share_out",
    "tasks_of",
    "windows",
]


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One file to copy, with the digests that lie beside it; as the source's manifest lists them."""

    record: FileRecord
    sidecar: FileRecord | None = None

    @property
    def size_bytes(self) -> int:
        """Of both."""
        return self.record.size_bytes + (0 if self.sidecar is None else self.sidecar.size_bytes)


@dataclass(frozen=True, slots=True)
class Readable:
    """Where a rank reads the source's files. home: as ``catalog.find`` tells."""

    storage: Storage
    home: str
    rank: int

    def key(self, record: FileRecord) -> str:
        """The key of a listed file."""
        return file_key(record, self.home)


@dataclass(frozen=True, slots=True)
class Writable:
    """Where a rank writes the copy: ``prefix`` of the attempt (ends with "/"), its save_id, domain."""

    storage: Storage
    prefix: str
    save_id: str
    domain: str


def tasks_of(manifest: Manifest) -> tuple[CopyTask, ...]:
    """What is to be copied of a save: every listed file but ``.metadata``. Pure.

    On node-local disks every domain lists its own copies of replicated items; all are copied.
    """
    by_place = {(f.path, f.domain): f for f in manifest.files}
    beside = {(f.digests, f.domain) for f in manifest.files if f.digests is not None}
    metadata = f"{manifest.save_id}/{METADATA}"
    tasks = {
        f.path: CopyTask(f, None if f.digests is None else by_place.get((f.digests, f.domain)))
        for f in manifest.files
        if f.path != metadata and (f.path, f.domain) not in beside
    }
    return tuple(tasks.values())


def share_out(
    tasks: Sequence[CopyTask], readers: Mapping[str | None, Sequence[int]], ranks: int
) -> tuple[tuple[CopyTask, ...], ...]:
    """Which rank copies which files: the largest first, each to the least loaded rank that sees it.
    Pure; every rank comes to the same answer.

    readers: the ranks that see a domain's files; None: files that every domain has.
    """
    shares: list[list[CopyTask]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    order = sorted(tasks, key=lambda t: (-t.size_bytes, t.record.path, t.record.domain or ""))
    for task in order:
        rank = min(readers[task.record.domain], key=lambda r: (load[r], r))
        # A file costs a few requests whatever its size: many small ones are shared out too.
        load[rank] += task.size_bytes + 1
        shares[rank].append(task)
    return tuple(tuple(share) for share in shares)


def new_path(record: FileRecord, source_id: str, save_id: str) -> str:
    """The path of a file in the copy: in its own directory, also where the source shares it. Pure."""
    first, _, rest = record.path.partition("/")
    # Two writers of shared files may have used one name.
    return f"{save_id}/{rest}" if first == source_id else f"{save_id}/{first}.{rest}"


def copy_share(
    tasks: Sequence[CopyTask],
    source: Readable,
    target: Writable,
    source_id: str,
    stopped: threading.Event | None = None,
) -> WrittenPart:
    """Local. Copy this rank's files below ``target.prefix``; durable on return, names too.

    IntegrityError, ManifestError: the source is damaged. IncompleteCheckpointError: a file of it is
    missing or cannot be read. StateError: ``stopped`` was set. Else the target's errors. Files that
    were copied before stay in the attempt, which nobody will commit.
    """
    started = time.perf_counter()
    files: list[FileRecord] = []
    with contextlib.ExitStack() as stack:
        share = _Share(source, target, source_id, ReadAhead(stack), stopped)
        for task in tasks:
            files += share.copy(task)
    if files:
        target.storage.sync(target.prefix.rstrip("/"))
    size = sum(f.size_bytes for f in files)
    counters = Counters(
        size_bytes=size,
        payload_bytes=sum(t.record.size_bytes for t in tasks),
        files=len(files),
        items=len(tasks),
        write_s=time.perf_counter() - started,
    )
    return WrittenPart(tuple(files), counters)


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's share on its way."""

    source: Readable
    target: Writable
    source_id: str
    pool: ReadAhead
    stopped: threading.Event | None

    def copy(self, task: CopyTask) -> list[FileRecord]:
        """One file and its sidecar, as the copy's manifest lists them."""
        sidecar = b""
        if task.sidecar is not None:
            with _reading(self.source, task.sidecar):
                sidecar = self.source.storage.read(self.source.key(task.sidecar))
        made = self._copy_data(task, sidecar)
        if task.sidecar is None:
            return [made]
        self._go_on(task.sidecar)
        beside = new_path(task.sidecar, self.source_id, self.target.save_id)
        with self.target.storage.open_write(self._key(beside), size_hint_bytes=len(sidecar)) as to:
            to.write(sidecar)
        return [
            replace(made, digests=beside),
            FileRecord(beside, len(sidecar), self.target.domain),
        ]

    def _copy_data(self, task: CopyTask, sidecar: bytes) -> FileRecord:
        source, record = self.source, task.record
        path = new_path(record, self.source_id, self.target.save_id)
        check = _check_of(task, sidecar, source)
        with _reading(source, record):
            reader = source.storage.open_read(source.key(record))
        with reader:
            if reader.size_bytes != record.size_bytes:
                why = f"it has {reader.size_bytes} bytes, {record.size_bytes} are listed"
                raise _damaged(source, record, why)
            with self.target.storage.open_write(
                self._key(path), size_hint_bytes=record.size_bytes
            ) as writer:
                for data in windows(reader, self.pool, lambda: _reading(source, record)):
                    self._go_on(record)
                    check.update(data)
                    writer.write(data)
                # Before the file gets its name: nobody shall find a damaged copy.
                check.finish()
        return FileRecord(path, record.size_bytes, self.target.domain, None, record.digest)

    def _key(self, path: str) -> str:
        return self.target.prefix + path.partition("/")[2]

    def _go_on(self, record: FileRecord) -> None:
        if self.stopped is not None and self.stopped.is_set():
            raise StateError(
                "the copy was stopped half way",
                uri=self.source.storage.uri(self.source.key(record)),
                rank=self.source.rank,
                hint="nothing of it is committed; the next owner of the run copies it",
            )


# -- one file -----------------------------------------------------------------------------------


class ReadAhead:
    """Threads for reads ahead, made by the first reader that wants some."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, count: int, read: Callable[[], memoryview]) -> Future[memoryview]:
        """Read on a thread, one of ``count``."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="ckptfs-copy")
            self._stack.callback(self._threads.shutdown, wait=True, cancel_futures=True)
        return self._threads.submit(read)


def windows(
    reader: DataReader, pool: ReadAhead, reading: Callable[[], AbstractContextManager[None]]
) -> Iterator[memoryview]:
    """The file's bytes in order; each view is good until the next is asked for."""
    window = max(1, reader.window_bytes)
    starts = range(0, reader.size_bytes, window)
    ahead = max(1, min(reader.concurrency, len(starts)))
    spare = [bytearray(min(window, reader.size_bytes)) for _ in range(ahead)]

    def read(start: int, buffer: bytearray) -> memoryview:
        view = memoryview(buffer)[: min(window, reader.size_bytes - start)]
        with reading():
            reader.read_into(start, view)
        return view

    if ahead == 1:
        for start in starts:
            yield read(start, spare[0])
        return
    under_way: deque[tuple[Future[memoryview], bytearray]] = deque()
    left = iter(starts)

    def begin() -> None:
        start = next(left, None)
        if start is not None:
            buffer = spare.pop()
            under_way.append((pool.submit(ahead, lambda: read(start, buffer)), buffer))

    try:
        for _ in range(ahead):
            begin()
        while under_way:
            future, buffer = under_way.popleft()
            yield future.result()
            spare.append(buffer)
            begin()
    finally:
        for future, _ in under_way:
            future.cancel()


def _check_of(task: CopyTask, sidecar: bytes, source: Readable) -> Check:
    def damaged(why: str) -> IntegrityError:
        return _damaged(source, task.record, why)

    if task.sidecar is not None:
        where = source.storage.uri(source.key(task.sidecar))
        return BlockCheck(decode_digests(sidecar, where), damaged)
    digest = task.record.digest
    return Check() if digest is None else WholeCheck(digest, damaged)


@contextlib.contextmanager
def _reading(source: Readable, record: FileRecord) -> Iterator[None]:
    """What is wrong with the source is told as such: the place that it is copied to is not at fault."""
    try:
        yield
    except (TransientError, AnswerLostError):
        raise  # worth another try, whichever side it is
    except StorageError as error:
        raise IncompleteCheckpointError(
            f"{record.path} cannot be copied: {error.message}",
            uri=source.storage.uri(source.key(record)),
            rank=source.rank,
            hint="restore the file, or go on without a copy of this checkpoint",
        ) from error


def _damaged(source: Readable, record: FileRecord, why: str) -> IntegrityError:
    return IntegrityError(
        f"data file {record.path} is damaged, and was not copied: {why}",
        uri=source.storage.uri(source.key(record)),
        rank=source.rank,
        hint="restore the file, or load another checkpoint",
    )
