"""The data files of a rank: their items, the engines that write one, the threads that write all.

    <save_id>/__{rank}_{n}.distcp     blobs, one after another: exactly what torch.save wrote of a
                                      tensor, or the bytes that the planner made of an object
    <save_id>/__{rank}_{n}.xxh3       its sidecar: the block digests of that file (commit/digests.py)

Each writer thread writes one file. By default there are as many files as make the storage faster: one,
except on a filesystem in memory. A rank that has nothing to save has no file.
``write_files`` plans the files, calls an engine once per file, and counts. The first error stops the other
threads, and the errors of all threads are reported. An *engine* writes one file and its sidecar:

    layout known, storage takes windows     parallel_windows   several threads, direct or buffered
    anything else                           stream             one stream in order, one pump thread

Both write the same bytes. What torch writes around a tensor comes from ``file_layout.frame``, and the
tensor's memory is written between head and tail as it is. So nothing is copied to add the frame, and no CRC
is computed. A tensor without a frame is written into the stream by torch.save. Both engines take the start
of each item from ``digests.padding_before``.

The caller chooses with ``engine_for``. By default the storage decides: windows past the page cache on a disk
that supports them, through it on other mounts, a stream to object stores, memory and HDFS.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs import _torch
from ckptfs.commit.digests import (
    ALIGNMENT_BYTES,
    FileDigests,
    ItemDigests,
    encode_digests,
    padding_before,
)
from ckptfs.commit.manifest import digest_of
from ckptfs.dcp.write.file_layout import ItemLayout, framed, lay_out
from ckptfs.dcp.write.host_memory import Loan, Resolve, host_tensor, memory_of
from ckptfs.dcp.write.parallel_windows import Cancelled, DiffersError, Windows, run_all
from ckptfs.dcp.write.stream import FileStream, save_blob
from ckptfs.errors import ArgumentChoice, StateError, StorageError
from ckptfs.events import Counters
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.io import DataWriter, FileEngine, ParallelWriter
from ckptfs.storage.threads import Pump

__all__ = [
    "DATA_SUFFIX",
    "SIDECAR_SUFFIX",
    "Cancelled",
    "FileTask",
    "FileWritten",
    "Placed",
    "RankFiles",
    "Sidecar",
    "WriteEngine",
    "WriteEngineName",
    "auto_engine",
    "data_name",
    "engine_for",
    "files_for",
    "sidecar_name",
    "sidecar_of",
    "split_items",
    "stream_engine",
    "write_files",
]

_log = logging.getLogger("ckptfs.dcp")

DATA_SUFFIX = ".distcp"
SIDECAR_SUFFIX = ".xxh3"


def data_name(rank: int, number: int) -> str:
    """Return the name of a rank's ``number``-th data file, as stock DCP names it."""
    return f"__{rank}_{number}{DATA_SUFFIX}"


def sidecar_name(data: str) -> str:
    """Return the name (or path) of the sidecar of a data file."""
    return data.removesuffix(DATA_SUFFIX) + SIDECAR_SUFFIX


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the item at ``position`` of the rank's plan is in its file; offset and length in bytes."""

    position: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FileTask:
    """One file to write: its key and its items, each with its position in the rank's plan.

    ``at_once`` is how many files this rank writes at the same time; they share its threads. Without
    ``has_sidecar`` no digests are written next to it: an export is for other programs.
    """

    key: str
    items: Sequence[tuple[int, WriteItem]]
    at_once: int = 1
    has_sidecar: bool = True


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The file of a data file's digests: its size, and the digest of its own bytes."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileWritten:
    """A data file and its sidecar, complete and durable (their names once the directory is synced).

    Attributes:
        name: The name of the data file in its directory.
        size_bytes: The size of the data file.
        payload_bytes: The bytes of payloads; an item without a known payload counts whole.
        placed: Where each item is.
        digests: The block digests of its items, in the order of ``placed``.
        sidecar: The file that holds these digests; None if the task asks for none.
        stage_s: Seconds spent on getting the data ready.
        write_s: Seconds of the rest of the time.
        engine: How it was written.
        direct_bytes: How many bytes went past the page cache.
    """

    name: str
    size_bytes: int
    payload_bytes: int
    placed: tuple[Placed, ...]
    digests: FileDigests
    sidecar: Sidecar | None
    stage_s: float
    write_s: float
    engine: FileEngine = FileEngine.STREAMED
    direct_bytes: int = 0


class WriteEngine(Protocol):
    """Writes one file, and its sidecar. It is called from several threads, each with its own task.

    An engine calls ``resolve`` for a tensor only when it writes it. For objects it may call it at any
    time, because their sizes determine the file's size. Between items it calls
    ``cancelled.raise_if_set()``. After an exception a file is left whole or not at all.
    """

    def __call__(
        self, storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
    ) -> FileWritten:
        """Write the file of ``task``."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank wrote: its data files, and what was counted over all of them."""

    files: tuple[FileWritten, ...]
    counters: Counters


def sidecar_of(file: FileWritten) -> Sidecar:
    """Return the sidecar of a file that ``write_files`` wrote."""
    assert file.sidecar is not None  # noqa: S101 - its tasks ask for one
    return file.sidecar


def split_items(items: Sequence[WriteItem], files: int) -> list[list[tuple[int, WriteItem]]]:
    """Distribute items over at most ``files`` files of about equal size.

    In each file objects come first and tensors follow, both in the order of the plan, as in stock DCP.
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
    """Return how many files a rank writes at once: ``threads``, or if that is None what pays there."""
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
    sync_names: bool = True,
) -> RankFiles:
    """Write a rank's items into data files and sidecars under ``prefix``.

    When this returns everything is durable, including the names (without ``sync_names`` the caller has to
    sync the directory). After an error or a crash, complete files of an attempt that will never be
    committed may be left; none is partial. Errors are the storage's.

    Args:
        storage: Where to write.
        prefix: The directory of the files; ends with "/".
        rank: The rank that writes; part of the files' names.
        items: The rank's plan.
        resolve: Returns the data of an item.
        engine: Writes one file.
        threads: How many files are written at once. None: as many as pay there.
        buckets: The items of each file, with their positions in the plan. None: one file per thread.
        first: The number of the first file.
        sync_names: Whether to sync the directory.

    Returns:
        What was written.
    """
    threads = files_for(storage, prefix, items, threads)
    buckets = split_items(items, threads) if buckets is None else buckets
    at_once = max(1, min(threads, len(buckets)))
    cancelled = Cancelled()
    jobs = [
        functools.partial(
            engine,
            storage,
            FileTask(prefix + data_name(rank, number), bucket, at_once),
            resolve,
            cancelled,
        )
        for number, bucket in enumerate(buckets, first)
    ]
    files = run_all(jobs, cancelled, threads)
    started = time.perf_counter()
    if files and sync_names:
        storage.sync(prefix.rstrip("/"))
    counters = Counters(
        size_bytes=sum(file.size_bytes + sidecar_of(file).size_bytes for file in files),
        payload_bytes=sum(file.payload_bytes for file in files),
        files=2 * len(files),
        items=sum(len(file.placed) for file in files),
        direct_bytes=sum(file.direct_bytes for file in files),
        stage_s=max((file.stage_s for file in files), default=0.0),
        write_s=max((file.write_s for file in files), default=0.0),
        sync_s=time.perf_counter() - started,
    )
    return RankFiles(tuple(files), counters)


def _order(position: int, item: WriteItem) -> tuple[bool, int]:
    return item.type is not WriteItemType.BYTE_IO, position


def _weight_bytes(item: WriteItem) -> int:
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return 1
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize + 1


_FRAME_BYTES = 4 << 10  # what torch.save writes around a tensor: 1.5 KiB, and a reserve
_DIMENSION_BYTES = 64  # and this much more for each dimension


class WriteEngineName(ArgumentChoice, parameter="engine"):
    """How files are written; other stores than files are always written in a stream.

    "auto" does what is fast on the storage, "direct" goes past the page cache wherever that is
    possible, "buffered" goes through it.
    """

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"


_WANTED = {
    WriteEngineName.AUTO: None,
    WriteEngineName.DIRECT: FileEngine.DIRECT,
    WriteEngineName.BUFFERED: FileEngine.BUFFERED,
}


def engine_for(name: WriteEngineName) -> WriteEngine:
    """Return the engine with that name."""
    return functools.partial(_write_file, wanted=_WANTED[name])


def auto_engine(
    storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
) -> FileWritten:
    """Write one file in the way that is fast on its storage. A ``WriteEngine``."""
    return _write_file(storage, task, resolve, cancelled, wanted=None)


def stream_engine(
    storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
) -> FileWritten:
    """Write one file in order through ``Storage.open_write``. A ``WriteEngine``."""
    started = time.perf_counter()
    objects = _objects(task, resolve)
    return _streamed(storage, task, resolve, cancelled, objects, started)


def _write_file(
    storage: Storage,
    task: FileTask,
    resolve: Resolve,
    cancelled: Cancelled,
    *,
    wanted: FileEngine | None,
) -> FileWritten:
    started = time.perf_counter()
    objects = _objects(task, resolve)
    layout = lay_out(task.items, {position: _bytes_of(loan) for position, loan in objects.items()})
    if layout:
        size_bytes = layout[-1].offset + layout[-1].length
        writer = storage.open_parallel(task.key, size_bytes=size_bytes, engine=wanted)
        if writer is not None:
            windows = Windows(layout, writer, resolve, cancelled)
            try:
                return _windowed(storage, windows, writer, task, layout, objects, started)
            except DiffersError as error:
                if windows.gave_back:
                    raise StateError(
                        "a tensor is not of the dtype and shape that was planned for it",
                        uri=storage.uri(task.key),
                        hint="state must not change while it is saved",
                    ) from error
                # The planner converts what it resolves: such a file is written in order.
    return _streamed(storage, task, resolve, cancelled, objects, started)


def _windowed(  # noqa: PLR0917 - as below
    storage: Storage,
    windows: Windows,
    writer: ParallelWriter,
    task: FileTask,
    layout: Sequence[ItemLayout],
    objects: Mapping[int, Loan],
    started: float,
) -> FileWritten:
    made_s = time.perf_counter() - started
    with writer:
        windows.write(max(1, writer.concurrency // task.at_once))
        digests = windows.digests  # raises unless all items are there, so nothing is published
        for loan in objects.values():
            loan.done()
    sidecar = _write_sidecar(storage, task, FileDigests(digests)) if task.has_sidecar else None
    stage_s = made_s + windows.stage_s
    return FileWritten(
        name=posixpath.basename(task.key),
        size_bytes=layout[-1].offset + layout[-1].length,
        payload_bytes=_payload_bytes(digests),
        placed=tuple(Placed(one.position, one.offset, one.length) for one in layout),
        digests=FileDigests(digests),
        sidecar=sidecar,
        stage_s=stage_s,
        write_s=max(0.0, time.perf_counter() - started - stage_s),
        engine=writer.engine,
        direct_bytes=writer.direct_bytes,
    )


def _streamed(  # noqa: PLR0917 - a file, its data, and how far it came
    storage: Storage,
    task: FileTask,
    resolve: Resolve,
    cancelled: Cancelled,
    objects: Mapping[int, Loan],
    started: float,
) -> FileWritten:
    placed: list[Placed] = []
    stage_s = time.perf_counter() - started
    hint = _size_bound(task.items, objects)
    writer = storage.open_write(task.key, size_hint_bytes=hint)
    try:
        with FileStream(Pump(writer)) as stream:
            for position, item in task.items:
                cancelled.raise_if_set()
                began = time.perf_counter()
                loan = objects.get(position) or _loan(resolve(item))
                data = loan.data
                if isinstance(data, torch.Tensor):
                    data = host_tensor(data)
                stage_s += time.perf_counter() - began
                digests = _append(stream, data, stays=loan.stays)
                stream.after_item(loan.done)
                placed.append(Placed(position, digests.offset, digests.length))
                del data, loan  # or a staged copy would live while the next one is made
        known = FileDigests(tuple(stream.items))
        sidecar = _close(storage, writer, task, known)
    except BaseException:
        writer.abort()
        raise
    if sidecar is None and task.has_sidecar:
        sidecar = _write_sidecar(storage, task, known)
    return FileWritten(
        name=posixpath.basename(task.key),
        size_bytes=stream.position,
        payload_bytes=_payload_bytes(stream.items),
        placed=tuple(placed),
        digests=known,
        sidecar=sidecar,
        stage_s=stage_s,
        write_s=time.perf_counter() - started - stage_s,
        engine=FileEngine.STREAMED,
    )


def _close(
    storage: Storage, writer: DataWriter, task: FileTask, digests: FileDigests
) -> Sidecar | None:
    """Close the file. On an object store write its sidecar at the same time: both are requests.

    Returns None if it did not write one.
    """
    if storage.capabilities.shape is not Shape.OBJECT or not task.has_sidecar:
        writer.close()
        return None
    write_sidecar = functools.partial(_write_sidecar, storage, task, digests)
    calls: list[Callable[[], Sidecar | None]] = [writer.close, write_sidecar]
    answers = storage.at_once(calls)
    for answer in answers:
        if isinstance(answer, StorageError):
            raise answer
    return next(answer for answer in answers if isinstance(answer, Sidecar))


def _write_sidecar(storage: Storage, task: FileTask, digests: FileDigests) -> Sidecar:
    encoded = encode_digests(digests)
    with storage.open_write(sidecar_name(task.key), size_hint_bytes=len(encoded)) as out:
        out.write(encoded)
    return Sidecar(len(encoded), digest_of(encoded))


def _append(stream: FileStream, data: torch.Tensor | io.BytesIO, *, stays: bool) -> ItemDigests:
    if isinstance(data, torch.Tensor):
        stream.pad(padding_before(stream.position))
    stream.begin_item(stays=stays)
    if isinstance(data, io.BytesIO):
        stream.append(_memory_of_object(data))
        return stream.end_item(0, 0)
    around = framed(data.dtype, data.shape)
    if around is None or data.is_quantized or _torch.is_wrapper_subclass(data):
        return stream.end_item(*save_blob(stream, data))
    stream.append(around.head)
    size = around.frame.payload_length
    if size:
        start = stream.cut()
        stream.append(memory_of(data))
        stream.cut()
        stream.append(around.tail)
        return stream.end_item(start, size)
    return stream.end_item(0, 0)


def _objects(task: FileTask, resolve: Resolve) -> dict[int, Loan]:
    """Return the data of the objects, made first: the file's size depends on their pickled sizes."""
    return {
        position: _loan(resolve(item))
        for position, item in task.items
        if item.type is WriteItemType.BYTE_IO
    }


def _loan(data: torch.Tensor | io.BytesIO | Loan) -> Loan:
    return data if isinstance(data, Loan) else Loan(data)


def _bytes_of(loan: Loan) -> memoryview:
    assert isinstance(loan.data, io.BytesIO)  # noqa: S101 - the type of its item says so
    return _memory_of_object(loan.data)


def _memory_of_object(data: io.BytesIO) -> memoryview:
    """Return the bytes of an object's stream, without a copy.

    This does not use getbuffer(). An error that is kept would keep that view, and from Python 3.13 on a
    BytesIO that is collected together with a view of it reports a BufferError in the middle of unrelated
    code.
    """
    return memoryview(data.getvalue())


def _payload_bytes(items: Sequence[ItemDigests]) -> int:
    return sum(item.payload_length or item.length for item in items)


def _size_bound(items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, Loan]) -> int:
    """Return a bound that is not below the file's size and only a little above it.

    Stores limit the number of a file's parts.
    """
    total = 0
    for position, item in items:
        made = objects.get(position)
        if made is not None:
            total += len(_bytes_of(made))
        elif item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            total += math.prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            total += _FRAME_BYTES + _DIMENSION_BYTES * len(chunk.sizes) + ALIGNMENT_BYTES
    return total
