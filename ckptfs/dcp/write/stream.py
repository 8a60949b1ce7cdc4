"""Write a file in order, for storage that takes bytes in order: count, digest, gather and pump.

    append --> digests, count --> gathered up to 1 MiB, large pieces as they are --> Pump --> DataWriter

Large pieces are *lent* to the writer: it sends them from their own memory and releases them afterwards.
The pump writes one piece on a thread of its own while the next is digested or copied from a device.

If a tensor's kind has no ``frame``, torch.save itself writes it. torch.save hands the tensor's memory to
its stream in one piece. That piece is recognised by its address, so its offset in the blob (the payload
offset) is known without parsing torch's format. If a version of torch hands over something else,
the payload offset is unknown, the file is still right, and readers fall back to torch.load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ckptfs.commit.digests import BlockDigester, ItemDigests
from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.storage.threads import Pump

__all__ = ["FileStream", "save_blob"]

_DIRECT_BYTES = 256 << 10  # pieces of at least this go to the file by themselves, uncopied
_GATHER_BYTES = 1 << 20  # smaller ones are gathered up to this


@dataclass(slots=True)
class FileStream:
    """The one place where bytes meet the file: it counts, digests, and gathers small pieces."""

    pump: Pump
    position: int = 0
    items: list[ItemDigests] = field(default_factory=list)
    _gathered: bytearray = field(default_factory=bytearray)
    _digester: BlockDigester = field(default_factory=BlockDigester)
    _item_offset: int = 0
    _stays: bool = True
    _direct: bool = False  # bytes of the current item went to the pump uncopied

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

    def pad(self, size_bytes: int) -> None:
        """Add this many zeros between two items. They belong to neither item and are not digested."""
        self._gathered += bytes(size_bytes)
        self.position += size_bytes

    def begin_item(self, *, stays: bool = True) -> None:
        """Begin an item. ``stays``: whether its memory stays unchanged until the file is closed."""
        self._item_offset = self.position
        self._stays, self._direct = stays, False
        self._digester = BlockDigester()

    def append(self, data: bytearray | memoryview) -> None:
        """Add bytes to the current item. The memory of large pieces goes to the writer uncopied."""
        self._digester.update(data)
        self.position += len(data)
        if len(data) >= _DIRECT_BYTES:
            self._flush()
            self._direct = True
            if self._stays:
                self.pump.lend(data)
            else:
                self.pump.write(data)
            return
        self._gathered += data
        if len(self._gathered) >= _GATHER_BYTES:
            self._flush()

    def after_item(self, done: Callable[[], None]) -> None:
        """Call ``done`` when the memory of the item that just ended is not read any more."""
        if self._direct:
            self.pump.then(done)
        else:
            done()  # it was copied

    def cut(self) -> int:
        """Begin a region of digests here; return the offset within the item."""
        self._digester.cut()
        return self.position - self._item_offset

    def end_item(self, payload_offset: int, payload_length: int) -> ItemDigests:
        """End the current item and return its digests.

        Args:
            payload_offset: Where the payload begins within the item; 0 if it has none.
            payload_length: The length of the payload in bytes; 0 if it has none.

        Returns:
            The digests, with offset and length of the item and of its payload.
        """
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
            self.pump.write(full)


def save_blob(stream: FileStream, tensor: torch.Tensor) -> tuple[int, int]:
    """Append what torch.save writes of a plain contiguous tensor on the host.

    Returns:
        The payload's offset and length in the blob; (0, 0) if the payload was not recognised.
    """
    sink = _BlobSink(stream, tensor)
    torch.save(tensor, sink)  # type: ignore[arg-type]  # it needs write and flush, no more
    return sink.finish()


class _BlobSink:
    """The file object that torch.save writes to.

    It gathers small records, so a blob costs three appends.
    """

    def __init__(self, stream: FileStream, tensor: torch.Tensor) -> None:
        self._stream = stream
        self._frame = bytearray()
        self._payload = memory_of(tensor)
        self._address = tensor.data_ptr()
        self._found = (0, 0)
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Take the next bytes; never raise.

        If this raised, torch would try to finish its archive, fail at that too, and raise a RuntimeError that
        hides, for example, that the disk is full. ``finish`` raises the error instead.
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
        """Do nothing: torch.save calls this, but the stream is flushed once per file."""

    def finish(self) -> tuple[int, int]:
        """Return the payload's offset and length in the blob; (0, 0) if it was not recognised.

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
