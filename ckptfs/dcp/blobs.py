"""Whole items: objects, and tensors in files whose payloads nobody noted (stock torch's).

Blob           the item's bytes, from as many reads as it takes; any thread brings a piece
load_tensor    torch.load(weights_only=True) of them, with a typed error for anything it raises
ItemStream     the same item as a stream over the file: for disks, where seeking is cheap

Where a payload is known it goes into its tensor, and nothing here is needed.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import torch

from ckptfs.dcp.datafile import DataFile
from ckptfs.dcp.pickle_scan import check_archive
from ckptfs.errors import CkptfsError

__all__ = ["Blob", "ItemStream", "load_tensor"]


class Blob:
    """``length`` bytes of one item; ``complete(stream)`` runs when all are there, on the thread that
    brought the last.
    """

    def __init__(self, length: int, complete: Callable[[io.BytesIO], None] | None = None) -> None:
        self.data = bytearray(length)
        self._missing = length
        self._complete = complete
        self._lock = threading.Lock()

    def out(self, low: int, high: int) -> memoryview:
        """Where the bytes ``low`` to ``high`` of the item belong."""
        return memoryview(self.data)[low:high]

    def arrived(self, count: int) -> None:
        """So many more bytes are where they belong. Any thread; nothing arrives twice."""
        with self._lock:
            self._missing -= count
            is_last = not self._missing
        if is_last and self._complete is not None:
            self._complete(self.stream())

    def stream(self) -> io.BytesIO:
        """All bytes, to read from."""
        return io.BytesIO(self.data)


def load_tensor(file: DataFile, stream: Any, key: str) -> torch.Tensor:
    """The tensor that ``torch.save`` wrote into this stream; IntegrityError for anything else."""
    try:
        check_archive(stream)
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except CkptfsError:
        raise
    except Exception as error:
        # A damaged blob raises anything from RuntimeError to UnpicklingError.
        raise file.damaged(f"{key!r} is not what torch.save wrote: {error}") from error
    if not isinstance(loaded, torch.Tensor):
        raise file.damaged(f"{key!r} holds a {type(loaded).__name__}, not a tensor")
    return loaded


class ItemStream(io.RawIOBase):
    """A seekable view of one item; unverified."""

    def __init__(self, file: DataFile, offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0
        self.read_bytes = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes from the item's start."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As of any stream; the end is the item's."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or as much of it as the item has bytes left."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        if count:
            self._file.reader.read_into(self._offset + self._at, view[:count])
            self._at += count
            self.read_bytes += count
        return count
