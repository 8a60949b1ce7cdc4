"""The buffered write engine: one pass over the data, no copy of large tensors.

    torch.save(tensor) --head---> bytearray --+
                       --memory-------------> FileStream --> digests, count --> DataWriter.write
                       --tail---> bytearray --+

torch.save hands the tensor's memory to its stream in one piece; that piece is recognised by its
address, so its place in the blob, the payload offset, is known without parsing torch's format.
Should a version of torch hand over something else, the payload is unknown, the file is still
right, and readers fall back to torch.load.
"""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from ckptfs.commit.digests import BlockDigester, FileDigests, ItemDigests
from ckptfs.dcp.layout import Cancelled, FileTask, FileWritten, Placed
from ckptfs.dcp.resolve import Resolve, host_tensor, memory_of
from ckptfs.storage.base import DataWriter, Storage

__all__ = ["buffered_engine"]

_DIRECT_BYTES = 256 << 10  # pieces of at least this go to the file by themselves, uncopied
_GATHER_BYTES = 1 << 20  # smaller ones are gathered up to this


def buffered_engine(
    storage: Storage, task: FileTask, resolve: Resolve, cancelled: Cancelled
) -> FileWritten:
    """Write one file through the storage's own writer. A ``WriteEngine``."""
    started = time.perf_counter()
    stage_s = 0.0
    placed: list[Placed] = []
    with storage.open_write(task.key) as writer:
        stream = _FileStream(writer)
        for position, item in task.items:
            cancelled.raise_if_set()
            began = time.perf_counter()
            data = resolve(item)
            if isinstance(data, torch.Tensor):
                data = host_tensor(data)
            stage_s += time.perf_counter() - began
            digests = _write_item(stream, data)
            placed.append(Placed(position, digests.offset, digests.length))
        stream.flush()
    return FileWritten(
        size_bytes=stream.position,
        payload_bytes=sum(item.payload_length or item.length for item in stream.items),
        placed=tuple(placed),
        digests=FileDigests(tuple(stream.items)),
        stage_s=stage_s,
        write_s=time.perf_counter() - started - stage_s,
    )


def _write_item(stream: _FileStream, data: torch.Tensor | io.BytesIO) -> ItemDigests:
    stream.begin_item()
    if isinstance(data, torch.Tensor):
        blob = _BlobSink(stream, data)
        torch.save(data, blob)  # type: ignore[arg-type]  # it needs write and flush, no more
        return stream.end_item(*blob.finish())
    with data.getbuffer() as view:
        stream.append(view)
    return stream.end_item(0, 0)


@dataclass(slots=True)
class _FileStream:
    """The one place where bytes meet the file: it counts, digests, and gathers small pieces."""

    writer: DataWriter
    position: int = 0
    items: list[ItemDigests] = field(default_factory=list)
    _gathered: bytearray = field(default_factory=bytearray)
    _digester: BlockDigester = field(default_factory=BlockDigester)
    _item_offset: int = 0

    def begin_item(self) -> None:
        self._item_offset = self.position
        self._digester = BlockDigester()

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes of the current item; ``data`` may be reused on return."""
        self._digester.update(data)
        self.position += len(data)
        if len(data) >= _DIRECT_BYTES:
            self.flush()
            self.writer.write(data)
            return
        self._gathered += data
        if len(self._gathered) >= _GATHER_BYTES:
            self.flush()

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

    def flush(self) -> None:
        if self._gathered:
            self.writer.write(self._gathered)
            self._gathered.clear()


class _BlobSink:
    """What torch.save writes to. Small records are gathered, so a blob costs three appends."""

    def __init__(self, stream: _FileStream, tensor: torch.Tensor) -> None:
        self._stream = stream
        self._frame = bytearray()
        self._payload = memory_of(tensor)
        self._address = tensor.data_ptr()
        self._found = (0, 0)

    def write(self, data: bytes | memoryview) -> int:
        size = len(data)
        if size == len(self._payload) and size and self._is_payload(data):
            self._release()
            start = self._stream.cut()
            self._stream.append(self._payload)
            self._stream.cut()
            self._found = (start, size)
            # One tensor has one payload; a second piece of the same address is not it.
            self._payload = memoryview(b"")
        elif size >= _GATHER_BYTES:
            self._release()
            self._stream.append(data)
        else:
            self._frame += data
        return size

    def flush(self) -> None:
        """torch.save asks for it; the stream is flushed once per file."""

    def finish(self) -> tuple[int, int]:
        """The payload's offset and length in the blob, (0, 0) when it was not seen."""
        self._release()
        return self._found

    def _release(self) -> None:
        if self._frame:
            self._stream.append(self._frame)
            self._frame = bytearray()

    def _is_payload(self, data: bytes | memoryview) -> bool:
        piece = np.frombuffer(data, dtype=np.uint8)
        return bool(piece.__array_interface__["data"][0] == self._address)
