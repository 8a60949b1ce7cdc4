"""The byte layout of a rank's data files, and the threads that write them.

    <save_id>/__{rank}_{n}.distcp     blobs, one after another: exactly what torch.save wrote of a
                                      tensor, or the bytes that the planner made of an object
    <save_id>/__{rank}_{n}.xxh3       block digests of the file beside it (commit/digests.py)

One file per writer thread, one thread by default, no file for a rank that has nothing to save.
``write_files`` plans the files, runs one engine call per file and counts. An *engine* writes one
file; ``ckptfs.dcp.engine`` has the buffered one, and another (O_DIRECT, parallel parts) only has to
have its signature. The errors of all threads count: the first stops the others, every one is told.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs.commit.digests import FileDigests, encode_digests
from ckptfs.commit.manifest import digest_of
from ckptfs.dcp.resolve import Resolve
from ckptfs.errors import CkptfsError
from ckptfs.events import Counters
from ckptfs.storage.base import Storage
from ckptfs.storage.under_way import carried

__all__ = [
    "DATA_SUFFIX",
    "SIDECAR_SUFFIX",
    "Cancelled",
    "FileTask",
    "FileWritten",
    "Placed",
    "WriteEngine",
    "Written",
    "data_name",
    "sidecar_name",
    "split_items",
    "write_files",
]

_log = logging.getLogger(__name__)

DATA_SUFFIX = ".distcp"
SIDECAR_SUFFIX = ".xxh3"


def data_name(rank: int, number: int) -> str:
    """The name of a rank's ``number``-th data file, as stock DCP names it."""
    return f"__{rank}_{number}{DATA_SUFFIX}"


def sidecar_name(data: str) -> str:
    """The name (or path) of the sidecar of a data file."""
    return data.removesuffix(DATA_SUFFIX) + SIDECAR_SUFFIX


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the item at ``position`` of the rank's plan lies in its file, in bytes."""

    position: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FileTask:
    """One file to write: its key and the items, each with its position in the rank's plan."""

    key: str
    items: Sequence[tuple[int, WriteItem]]


@dataclass(frozen=True, slots=True)
class FileWritten:
    """One file that is complete and durable (its name is, after a sync of the directory)."""

    size_bytes: int
    payload_bytes: int
    placed: tuple[Placed, ...]
    digests: FileDigests
    stage_s: float
    write_s: float


class WriteEngine(Protocol):
    """Writes one file; called from several threads at once, each with its own task.

    It asks ``resolve`` for a tensor when it writes it, not before, for objects as soon as it likes
    (their sizes are part of the file's), and calls ``cancelled.raise_if_set()`` between items. On any exception nothing of the file is left.
    """

    def __call__(
        self, storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
    ) -> FileWritten:
        """Write the file of ``task``."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank wrote. ``names`` of data files; ``placed[n]`` are the items of the n-th, and
    ``digests[n]`` theirs, in the same order. sidecars: size and digest of each data file's sidecar.
    """

    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    sidecars: tuple[tuple[int, str], ...]
    placed: tuple[tuple[Placed, ...], ...]
    counters: Counters
    digests: tuple[FileDigests, ...] = ()


_Done = tuple[FileWritten, tuple[int, str], float]  # of one file; size and digest of its sidecar


class _Stopped(Exception):  # noqa: N818 - not an error: another thread has that
    """Another writer thread failed."""


@dataclass(slots=True)
class Cancelled:
    """Tells writer threads that one of them failed."""

    event: threading.Event = field(default_factory=threading.Event)

    def raise_if_set(self) -> None:
        """Leave this thread when another one failed: its files will never be committed."""
        if self.event.is_set():
            raise _Stopped


def split_items(items: Sequence[WriteItem], files: int) -> list[list[tuple[int, WriteItem]]]:
    """Share items among at most ``files`` files of about equal size.

    In each file objects come first and tensors then, both in the order of the plan: stock's order.
    """
    numbered = sorted(enumerate(items), key=lambda pair: _order(*pair))
    if files <= 1 or len(items) <= 1:
        return [numbered] if numbered else []
    buckets: list[list[tuple[int, WriteItem]]] = [[] for _ in range(min(files, len(items)))]
    loads = [0] * len(buckets)
    for position, item in sorted(numbered, key=lambda pair: -_weight_bytes(pair[1])):
        lightest = loads.index(min(loads))
        buckets[lightest].append((position, item))
        loads[lightest] += _weight_bytes(item)
    return [sorted(bucket, key=lambda pair: _order(*pair)) for bucket in buckets]


def write_files(
    storage: Storage,
    prefix: str,
    rank: int,
    items: Sequence[WriteItem],
    resolve: Resolve,
    *,
    engine: WriteEngine,
    threads: int = 1,
    buckets: Sequence[Sequence[tuple[int, WriteItem]]] | None = None,
    first: int = 0,
) -> Written:
    """Write a rank's items into data files and sidecars under ``prefix`` (ends with "/").

    threads: files written at once. buckets: which items (with their positions) make a file, instead
    of one file for each thread. first: the number of the first file. On return all of it is durable, names too. After an error or a crash there may be whole files
    of an attempt that will never be committed; none is partial. Errors are the storage's.
    """
    buckets = split_items(items, threads) if buckets is None else buckets
    names = [data_name(rank, first + number) for number in range(len(buckets))]
    tasks = [FileTask(prefix + name, bucket) for name, bucket in zip(names, buckets, strict=True)]
    cancelled = Cancelled()

    def job(task: FileTask) -> _Done:
        written = engine(storage, task, resolve, cancelled)
        started = time.perf_counter()
        sidecar = encode_digests(written.digests)
        with storage.open_write(sidecar_name(task.key), size_hint_bytes=len(sidecar)) as out:
            out.write(sidecar)
        told = len(sidecar), digest_of(sidecar)
        return written, told, time.perf_counter() - started

    done = _run_all([functools.partial(job, task) for task in tasks], cancelled, threads)
    started = time.perf_counter()
    if done:
        storage.sync(prefix.rstrip("/"))
    sync_s = time.perf_counter() - started
    return Written(
        names=tuple(names),
        sizes_bytes=tuple(written.size_bytes for written, _, _ in done),
        sidecars=tuple(sidecar for _, sidecar, _ in done),
        placed=tuple(written.placed for written, _, _ in done),
        counters=Counters(
            size_bytes=sum(written.size_bytes + size for written, (size, _), _ in done),
            payload_bytes=sum(written.payload_bytes for written, _, _ in done),
            files=2 * len(done),
            items=sum(len(written.placed) for written, _, _ in done),
            stage_s=max((written.stage_s for written, _, _ in done), default=0.0),
            write_s=max((written.write_s + extra for written, _, extra in done), default=0.0),
            sync_s=sync_s,
        ),
        digests=tuple(written.digests for written, _, _ in done),
    )


def _run_all(
    jobs: Sequence[Callable[[], _Done]], cancelled: Cancelled, at_once: int
) -> list[_Done]:
    """Run every job, so many at once; all their results, or one error for all of them.

    torch's own writer loses the error of every thread but the first, and commits without the
    files of the lost ones (pytorch #191391).
    """
    results: dict[int, _Done] = {}
    errors: list[BaseException] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)

    def work() -> None:
        while not cancelled.event.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = jobs[number]()
            except _Stopped:
                pass  # the thread that failed has the error
            except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
                errors.append(error)
                cancelled.event.set()

    threads = [
        threading.Thread(target=carried(work), name=f"ckptfs-write-{n}", daemon=True)
        for n in range(min(at_once, len(jobs)) - 1)
    ]
    started = _start(threads)
    try:
        work()  # also what is left where threads did not start
        for thread in started:
            thread.join()
    except BaseException:
        # Ctrl-C while waiting: no thread may go on writing into a directory that is cleaned up.
        cancelled.event.set()
        for thread in started:
            thread.join()
        raise
    if errors:
        raise _as_one(errors)
    return [results[number] for number in range(len(jobs))]


def _start(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Start them; those that started. None starts any more while the interpreter is ending."""
    started: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started


def _as_one(errors: Sequence[BaseException]) -> BaseException:
    """The first error; where several threads failed, its text names the others too."""
    first = next((e for e in errors if not isinstance(e, Exception)), errors[0])
    others = [e for e in errors if e is not first]
    if not others:
        return first
    told = "; ".join(f"{type(e).__name__}: {e}" for e in others)
    _log.error("%d writer threads failed; also: %s", len(errors), told)
    if isinstance(first, CkptfsError):
        whole = copy.copy(first)
        whole.message = f"{first.message} (and {len(others)} more writer threads failed: {told})"
        whole.__cause__ = first
        return whole
    return first


def _order(position: int, item: WriteItem) -> tuple[bool, int]:
    return item.type is not WriteItemType.BYTE_IO, position


def _weight_bytes(item: WriteItem) -> int:
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return 1
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize + 1
