"""The buffered write engine: one pass over the data, no copy of large tensors.

    torch.save(tensor) --head---> bytearray --+
                       --memory-------------> FileStream --> digests, count --> Pump --> DataWriter
                       --tail---> bytearray --+

torch.save hands the tensor's memory to its stream in one piece; that piece is recognised by its
address, so its place in the blob, the payload offset, is known without parsing torch's format.
Should a version of torch hand over something else, the payload is unknown, the file is still
right, and readers fall back to torch.load.

torch.save computes a CRC of every tensor, which takes as long as writing it: the pump writes one
piece on a thread of its own while torch works on the next.

Large pieces are *lent* to the writer: it sends them from where they lie and lets go of them when it
has. A tensor of the caller's is not held longer by that. A copy that was staged from a device, or made
contiguous, lives until the writer lets go: at most two of the largest and what the writer has under
way, beside the one that waits for the pump. A ``Loan`` that does not stay is written and never lent, and
told when the writer has it: its memory is the caller's again.
"""

from __future__ import annotations

import io
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ckptfs.commit.digests import BlockDigester, FileDigests, ItemDigests
from ckptfs.dcp.layout import Cancelled, FileTask, FileWritten, Placed
from ckptfs.dcp.resolve import Loan, Resolve, host_tensor, memory_of
from ckptfs.storage.base import DataWriter, Storage
from ckptfs.storage.under_way import carried

__all__ = ["buffered_engine"]

_DIRECT_BYTES = 256 << 10  # pieces of at least this go to the file by themselves, uncopied
_GATHER_BYTES = 1 << 20  # smaller ones are gathered up to this
_PUMP_BYTES = 4 << 20  # files with a piece of this get a thread; smaller ones are not worth it
_FRAME_BYTES = 4 << 10  # torch.save's own bytes around a tensor: 1.5 KiB, and some for its future
_DIMENSION_BYTES = 64  # and for each dimension
_AHEAD = 1  # pieces that wait for the pump: one staged tensor more in memory, no two


def buffered_engine(
    storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
) -> FileWritten:
    """Write one file through the storage's own writer. A ``WriteEngine``."""
    started = time.perf_counter()
    placed: list[Placed] = []
    # Objects are as large as their pickles turn out: made first, they tell the size of the file.
    objects = {
        position: _loan(resolve(item))
        for position, item in task.items
        if item.type is WriteItemType.BYTE_IO
    }
    stage_s = time.perf_counter() - started
    hint = _size_bound(task.items, objects)
    with (
        storage.open_write(task.key, size_hint_bytes=hint) as writer,
        _FileStream(_Pump(writer)) as stream,
    ):
        for position, item in task.items:
            cancelled.raise_if_set()
            began = time.perf_counter()
            loan = objects.pop(position, None) or _loan(resolve(item))
            data = loan.data
            if isinstance(data, torch.Tensor):
                data = host_tensor(data)
            stage_s += time.perf_counter() - began
            digests = _write_item(stream, data, stays=loan.stays)
            stream.after_item(loan.done)
            placed.append(Placed(position, digests.offset, digests.length))
            del data, loan  # or a staged copy would live while the next one is made
    return FileWritten(
        size_bytes=stream.position,
        payload_bytes=sum(item.payload_length or item.length for item in stream.items),
        placed=tuple(placed),
        digests=FileDigests(tuple(stream.items)),
        stage_s=stage_s,
        write_s=time.perf_counter() - started - stage_s,
    )


def _loan(data: torch.Tensor | io.BytesIO | Loan) -> Loan:
    return data if isinstance(data, Loan) else Loan(data)


def _size_bound(items: Sequence[tuple[int, WriteItem]], objects: Mapping[int, Loan]) -> int:
    """No less than the file's size and little more: stores limit the number of a file's parts."""
    total = 0
    for position, item in items:
        made = objects.get(position)
        if made is not None and isinstance(made.data, io.BytesIO):
            total += made.data.getbuffer().nbytes
        elif item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            total += math.prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            total += _FRAME_BYTES + _DIMENSION_BYTES * len(chunk.sizes)
    return total


def _write_item(
    stream: _FileStream, data: torch.Tensor | io.BytesIO, *, stays: bool
) -> ItemDigests:
    stream.begin_item(stays=stays)
    if isinstance(data, torch.Tensor):
        blob = _BlobSink(stream, data)
        torch.save(data, blob)  # type: ignore[arg-type]  # it needs write and flush, no more
        return stream.end_item(*blob.finish())
    stream.append(data.getbuffer())
    return stream.end_item(0, 0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes for the writer. is_lent: nobody changes them until the file is closed."""

    data: bytearray | memoryview
    is_lent: bool


class _Pump:
    """Writes pieces in order, on a thread once a large one comes; their memory must stay as it is."""

    def __init__(self, writer: DataWriter) -> None:
        self._writer = writer
        self._pieces: queue.SimpleQueue[_Piece | Callable[[], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, piece: _Piece) -> None:
        """Write this piece, now or soon. Raises what writing an earlier one raised."""
        if self._thread is None and (len(piece.data) < _PUMP_BYTES or not self._start()):
            self._write(piece)
            return
        if self._error is not None:
            raise self._error
        self._room.acquire()
        self._pieces.put(piece)

    def then(self, done: Callable[[], None]) -> None:
        """Call ``done`` when all that was put is written; never, when writing fails."""
        if self._thread is None:
            done()
        else:
            self._pieces.put(done)

    def _start(self) -> bool:
        thread = threading.Thread(target=carried(self._run), name="ckptfs-pump", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False  # no threads left, or the interpreter is ending: written without one
        self._thread = thread
        return True

    def _write(self, piece: _Piece) -> None:
        if piece.is_lent:
            self._writer.lend(piece.data)
        else:
            self._writer.write(piece.data)

    def finish(self) -> None:
        """Return when all is written; raises what writing raised."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def stop(self, why: BaseException) -> None:
        """Write nothing more and return when nothing is being written."""
        self._error = self._error or why
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        # After an error it goes on taking pieces, or put() would block for ever.
        while (piece := self._pieces.get()) is not None:
            if isinstance(piece, _Piece):
                self._room.release()
            if self._error is None:
                try:
                    if isinstance(piece, _Piece):
                        self._write(piece)
                    else:
                        piece()
                except BaseException as error:  # noqa: BLE001 - raised by put() or finish()
                    self._error = error
            del piece  # while waiting for the next, this one may be the last to hold a staged copy


@dataclass(slots=True)
class _FileStream:
    """The one place where bytes meet the file: it counts, digests, and gathers small pieces."""

    pump: _Pump
    position: int = 0
    items: list[ItemDigests] = field(default_factory=list)
    _gathered: bytearray = field(default_factory=bytearray)
    _digester: BlockDigester = field(default_factory=BlockDigester)
    _item_offset: int = 0
    _stays: bool = True
    _direct: bool = False  # bytes of the current item went to the pump from where they lie

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.pump.stop(exc)
            return
        try:
            self._flush()
        except BaseException as error:
            self.pump.stop(error)
            raise
        self.pump.finish()

    def begin_item(self, *, stays: bool = True) -> None:
        """stays: whether its memory stays as it is until the file is closed."""
        self._item_offset = self.position
        self._stays, self._direct = stays, False
        self._digester = BlockDigester()

    def append(self, data: bytearray | memoryview) -> None:
        """Bytes of the current item; of large ones the memory goes to the writer, uncopied."""
        self._digester.update(data)
        self.position += len(data)
        if len(data) >= _DIRECT_BYTES:
            self._flush()
            self._direct = True
            self.pump.put(_Piece(data, is_lent=self._stays))
            return
        self._gathered += data
        if len(self._gathered) >= _GATHER_BYTES:
            self._flush()

    def after_item(self, done: Callable[[], None]) -> None:
        """Call ``done`` when nobody reads the memory of the item that just ended any more."""
        if self._direct:
            self.pump.then(done)
        else:
            done()  # it was copied

    def cut(self) -> int:
        """Begin a region of digests here; returns the offset within the item."""
        self._digester.cut()
        return self.position - self._item_offset

    def end_item(self, payload_offset: int, payload_length: int) -> ItemDigests:
        item = ItemDigests(
            offset=self._item_offset,
            length=self.position - self._item_offset,
            payload_offset=payload_offset,
            payload_length=payload_length,
            blocks=self._digester.finish(),
        )
        self.items.append(item)
        return item

    def _flush(self) -> None:
        if self._gathered:
            full, self._gathered = self._gathered, bytearray()
            self.pump.put(_Piece(full, is_lent=False))


class _BlobSink:
    """What torch.save writes to. Small records are gathered, so a blob costs three appends."""

    def __init__(self, stream: _FileStream, tensor: torch.Tensor) -> None:
        self._stream = stream
        self._frame = bytearray()
        self._payload = memory_of(tensor)
        self._address = tensor.data_ptr()
        self._found = (0, 0)
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Take the next bytes. Never raises: torch would finish its archive on the way out, fail at
        that too, and its RuntimeError would hide that the disk is full.
        """
        if self._error is None:
            try:
                self._take(data)
            except BaseException as error:  # noqa: BLE001 - raised by finish()
                self._error = error
        return len(data)

    def _take(self, data: bytes | memoryview) -> None:
        size = len(data)
        if size == len(self._payload) and size and self._is_payload(data):
            self._release()
            start = self._stream.cut()
            # Our own view of the same memory: torch's is gone when this returns.
            self._stream.append(self._payload)
            self._stream.cut()
            self._found = (start, size)
            # One tensor has one payload; a second piece of the same address is not it.
            self._payload = memoryview(b"")
        else:
            self._frame += data
            if len(self._frame) >= _GATHER_BYTES:
                self._release()

    def flush(self) -> None:
        """torch.save asks for it; the stream is flushed once per file."""

    def finish(self) -> tuple[int, int]:
        """The payload's offset and length in the blob, (0, 0) when it was not seen.

        Raises what a write raised.
        """
        if self._error is not None:
            raise self._error
        self._release()
        return self._found

    def _release(self) -> None:
        if self._frame:
            self._stream.append(self._frame)
            self._frame = bytearray()

    def _is_payload(self, data: bytes | memoryview) -> bool:
        piece = np.frombuffer(data, dtype=np.uint8)
        return bool(piece.__array_interface__["data"][0] == self._address)
