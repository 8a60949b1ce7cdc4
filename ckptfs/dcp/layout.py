"""The byte layout of a rank's data files, and the threads that write them.

    <save_id>/__{rank}_{n}.distcp     blobs, one after another: exactly what torch.save wrote of a
                                      tensor, or the bytes that the planner made of an object
    <save_id>/__{rank}_{n}.xxh3       block digests of the file beside it (commit/digests.py)

One file per writer thread, by default as many as the storage gains by (one, but in memory), no file for a
rank that has nothing to save.
``write_files`` plans the files, runs one engine call per file and counts. An *engine* writes one
file; ``ckptfs.dcp.engine`` has them. The errors of all threads count: the first stops the others,
every one is told.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs.commit.digests import FileDigests, encode_digests
from ckptfs.commit.manifest import digest_of
from ckptfs.dcp.crew import Cancelled, run_all
from ckptfs.dcp.resolve import Resolve
from ckptfs.events import Counters
from ckptfs.storage.base import Storage
from ckptfs.storage.io import Engine

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
    "files_for",
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
    """One file to write: its key and the items, each with its position in the rank's plan.

    at_once: files that this rank writes at the same time, which share its threads.
    """

    key: str
    items: Sequence[tuple[int, WriteItem]]
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class FileWritten:
    """One file that is complete and durable (its name is, after a sync of the directory).

    direct_bytes: of them, those that went past the page cache. engine: how it was written.
    """

    size_bytes: int
    payload_bytes: int
    placed: tuple[Placed, ...]
    digests: FileDigests
    stage_s: float
    write_s: float
    engine: Engine = Engine.STREAMED
    direct_bytes: int = 0


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


def files_for(
    storage: Storage, prefix: str, items: Sequence[WriteItem], threads: int | None
) -> int:
    """How many files a rank writes at once: what was asked for, else what pays there."""
    if threads is not None:
        return threads
    return storage.files_at_once(prefix.rstrip("/"), sum(map(_weight_bytes, items)))


def write_files(
    storage: Storage,
    prefix: str,
    rank: int,
    items: Sequence[WriteItem],
    resolve: Resolve,
    *,
    engine: WriteEngine,
    threads: int | None = None,
    buckets: Sequence[Sequence[tuple[int, WriteItem]]] | None = None,
    first: int = 0,
) -> Written:
    """Write a rank's items into data files and sidecars under ``prefix`` (ends with "/").

    threads: files written at once; None: as many as pay here. buckets: which items (with their
    positions) make a file, instead of one file for each thread. first: the number of the first file. On return all of it is durable, names too. After an error or a crash there may be whole files
    of an attempt that will never be committed; none is partial. Errors are the storage's.
    """
    threads = files_for(storage, prefix, items, threads)
    buckets = split_items(items, threads) if buckets is None else buckets
    names = [data_name(rank, first + number) for number in range(len(buckets))]
    at_once = max(1, min(threads, len(names)))
    tasks = [
        FileTask(prefix + name, bucket, at_once)
        for name, bucket in zip(names, buckets, strict=True)
    ]
    cancelled = Cancelled()

    def job(task: FileTask) -> _Done:
        written = engine(storage, task, resolve, cancelled)
        started = time.perf_counter()
        sidecar = encode_digests(written.digests)
        with storage.open_write(sidecar_name(task.key), size_hint_bytes=len(sidecar)) as out:
            out.write(sidecar)
        told = len(sidecar), digest_of(sidecar)
        return written, told, time.perf_counter() - started

    done = run_all([functools.partial(job, task) for task in tasks], cancelled, threads)
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
            direct_bytes=sum(written.direct_bytes for written, _, _ in done),
            stage_s=max((written.stage_s for written, _, _ in done), default=0.0),
            write_s=max((written.write_s + extra for written, _, extra in done), default=0.0),
            sync_s=sync_s,
        ),
        digests=tuple(written.digests for written, _, _ in done),
    )


def _order(position: int, item: WriteItem) -> tuple[bool, int]:
    return item.type is not WriteItemType.BYTE_IO, position


def _weight_bytes(item: WriteItem) -> int:
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return 1
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize + 1
