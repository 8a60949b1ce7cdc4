"""The write engines: how one data file gets from tensors to a storage, and which of them does it.

    layout known, storage takes windows     windows.py      several threads, direct or buffered
    anything else                           filestream.py   one stream in order, one pump thread

Both write the same bytes: what torch writes around a tensor comes from ``frames``, and in between lies
the tensor's memory, so nothing is copied to be framed and no CRC is computed. What frames do not know,
torch.save writes into the stream itself. Where items begin, ``digests.padding_before`` tells both.

``engine_for`` is the caller's word. By default the storage says: windows past the page cache on a disk
that takes them, through it on other mounts, a stream to object stores, memory and HDFS.
"""

from __future__ import annotations

import functools
import io
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs import _torch
from ckptfs.commit.digests import ALIGNMENT_BYTES, FileDigests, ItemDigests, padding_before
from ckptfs.dcp.blobsink import save_blob
from ckptfs.dcp.crew import Cancelled
from ckptfs.dcp.filestream import FileStream, Pump
from ckptfs.dcp.laid import Laid, framed, lay_out
from ckptfs.dcp.layout import FileTask, FileWritten, Placed, WriteEngine
from ckptfs.dcp.resolve import Loan, Resolve, host_tensor, memory_of
from ckptfs.dcp.windows import DiffersError, Windows
from ckptfs.errors import ArgumentChoice, StateError
from ckptfs.storage.base import Storage
from ckptfs.storage.io import Engine, ParallelWriter

__all__ = ["WriteEngineName", "auto_engine", "engine_for", "stream_engine"]

_FRAME_BYTES = 4 << 10  # torch.save's own bytes around a tensor: 1.5 KiB, and some for its future
_DIMENSION_BYTES = 64  # and for each dimension


class WriteEngineName(ArgumentChoice, parameter="engine"):
    """auto: what the storage is fast with. direct: past the page cache wherever it is possible.
    buffered: through it. The last two mean files; other stores are always written in a stream.
    """

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"


_WANTED = {
    WriteEngineName.AUTO: None,
    WriteEngineName.DIRECT: Engine.DIRECT,
    WriteEngineName.BUFFERED: Engine.BUFFERED,
}


def engine_for(name: WriteEngineName) -> WriteEngine:
    """The engine of that name."""
    return functools.partial(_write_file, wanted=_WANTED[name])


def auto_engine(
    storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
) -> FileWritten:
    """Write one file as the storage is fast with. A ``WriteEngine``."""
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
    wanted: Engine | None,
) -> FileWritten:
    started = time.perf_counter()
    objects = _objects(task, resolve)
    laid = lay_out(task.items, {position: _bytes_of(loan) for position, loan in objects.items()})
    if laid:
        size_bytes = laid[-1].offset + laid[-1].length
        writer = storage.open_parallel(task.key, size_bytes=size_bytes, engine=wanted)
        if writer is not None:
            windows = Windows(laid, writer, resolve, cancelled)
            try:
                return _windowed(windows, writer, task, laid, objects, started)
            except DiffersError as error:
                if windows.gave_back:
                    raise StateError(
                        "a tensor is not of the dtype and shape that was planned for it",
                        uri=storage.uri(task.key),
                        hint="state must not change while it is saved",
                    ) from error
                # A planner that converts what it resolves: such a file is written in order.
    return _streamed(storage, task, resolve, cancelled, objects, started)


def _windowed(  # noqa: PLR0917 - as below
    windows: Windows,
    writer: ParallelWriter,
    task: FileTask,
    laid: Sequence[Laid],
    objects: Mapping[int, Loan],
    started: float,
) -> FileWritten:
    made_s = time.perf_counter() - started
    with writer:
        windows.write(max(1, writer.concurrency // task.at_once))
        digests = windows.digests  # of all items, or nothing is published
        for loan in objects.values():
            loan.done()
    stage_s = made_s + windows.stage_s
    return FileWritten(
        size_bytes=laid[-1].offset + laid[-1].length,
        payload_bytes=_payload_bytes(digests),
        placed=tuple(Placed(one.position, one.offset, one.length) for one in laid),
        digests=FileDigests(digests),
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
    with (
        storage.open_write(task.key, size_hint_bytes=hint) as writer,
        FileStream(Pump(writer)) as stream,
    ):
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
    return FileWritten(
        size_bytes=stream.position,
        payload_bytes=_payload_bytes(stream.items),
        placed=tuple(placed),
        digests=FileDigests(tuple(stream.items)),
        stage_s=stage_s,
        write_s=time.perf_counter() - started - stage_s,
        engine=Engine.STREAMED,
    )


def _append(stream: FileStream, data: torch.Tensor | io.BytesIO, *, stays: bool) -> ItemDigests:
    if isinstance(data, torch.Tensor):
        stream.pad(padding_before(stream.position))
    stream.begin_item(stays=stays)
    if isinstance(data, io.BytesIO):
        stream.append(data.getbuffer())
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
    """Objects are as large as their pickles turn out: made first, they tell the size of the file."""
    return {
        position: _loan(resolve(item))
        for position, item in task.items
        if item.type is WriteItemType.BYTE_IO
    }


def _loan(data: torch.Tensor | io.BytesIO | Loan) -> Loan:
    return data if isinstance(data, Loan) else Loan(data)


def _bytes_of(loan: Loan) -> memoryview:
    assert isinstance(loan.data, io.BytesIO)  # noqa: S101 - the type of its item says so
    return loan.data.getbuffer()


def _payload_bytes(items: Sequence[ItemDigests]) -> int:
    return sum(item.payload_length or item.length for item in items)


def _size_bound(items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, Loan]) -> int:
    """No less than the file's size and little more: stores limit the number of a file's parts."""
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
