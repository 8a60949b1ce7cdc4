"""A tensor as torch.save itself writes it, for what ``frames`` does not know.

torch.save hands the tensor's memory to its stream in one piece; that piece is recognised by its
address, so its place in the blob, the payload offset, is known without parsing torch's format. Should
a version of torch hand over something else, the payload is unknown, the file is still right, and
readers fall back to torch.load.
"""

from __future__ import annotations

import numpy as np
import torch

from ckptfs.dcp.filestream import FileStream
from ckptfs.dcp.resolve import memory_of

__all__ = ["save_blob"]

_GATHER_BYTES = 1 << 20


def save_blob(stream: FileStream, tensor: torch.Tensor) -> tuple[int, int]:
    """Append what torch.save writes; the payload's offset and length in it, (0, 0) where not seen.

    tensor: plain, contiguous, on the host.
    """
    sink = _BlobSink(stream, tensor)
    torch.save(tensor, sink)  # type: ignore[arg-type]  # it needs write and flush, no more
    return sink.finish()


class _BlobSink:
    """What torch.save writes to. Small records are gathered, so a blob costs three appends."""

    def __init__(self, stream: FileStream, tensor: torch.Tensor) -> None:
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
