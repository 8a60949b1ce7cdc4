"""One file of an HDFS, written once or read by ranges.

    Writer   bytes -> DataNode, under a .partial-* name; closed: renamed to the key
    Reader   DataNodes -> the caller's buffers

Neither keeps a copy of what passes through it.
"""

from __future__ import annotations

from typing import Final

from ckptfs.errors import IntegrityError, StorageError
from ckptfs.storage.base import DataReader, DataWriter
from ckptfs.storage.hdfs_aside import Aside, beside
from ckptfs.storage.hdfs_client import Sink, Source
from ckptfs.uri import Uri

__all__ = ["Reader", "Writer"]

_GATHER_BYTES: Final = 1 << 20  # smaller writes are sent together
_WINDOW_BYTES: Final = 16 << 20  # a range costs an operation of the NameNode


class Writer(DataWriter):
    """One file, under a name of its own until it is closed. Nothing is sent before 1 MiB or close.

    Large buffers are sent from where they are: ``write`` copies nothing, so there is no ``lend``.
    """

    def __init__(self, aside: Aside, uri: Uri, target: str) -> None:
        self._aside = aside
        self._uri = uri
        self._target = target
        self._tried: list[str] = []
        self._small = bytearray()
        self._sink: Sink | None = None
        self._done = False
        self._broken = False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._done or self._broken:
            raise StorageError("the file cannot be written any more", uri=self._uri)
        view = memoryview(data).cast("B")
        self._broken = True  # until this write is whole
        if len(self._small) + len(view) < _GATHER_BYTES:
            self._small += view
        else:
            self._flush()
            self._opened().send(view)
        self._broken = False
        return len(view)

    def close(self) -> None:
        if self._done:
            return
        if self._broken:
            raise StorageError("the file cannot be closed: a write failed", uri=self._uri)
        self._broken = True
        self._flush()
        self._opened().finish()
        self._aside.publish(self._tried.pop(), self._target, self._uri)
        self._done = True
        self._forget()

    def abort(self) -> None:
        if self._done:
            return
        self._done = True
        self._small = bytearray()
        if self._sink is not None and self._sink.drop() and self._tried:
            self._aside.drop(self._tried.pop())
        self._forget()

    def _opened(self) -> Sink:
        # Only here can another DataNode be tried, under another name: what was sent is not kept.
        if self._sink is None:
            self._sink = self._aside.begin(beside(self._target), self._tried)
        return self._sink

    def _flush(self) -> None:
        if self._small:
            self._opened().send(memoryview(self._small))
            self._small = bytearray()

    def _forget(self) -> None:
        """Take away what tries that broke off may have made."""
        while self._tried:
            self._aside.drop(self._tried.pop(), late=True)


class Reader(DataReader):
    """Ranges of one file, each an operation of the NameNode and a connection to a DataNode."""

    def __init__(
        self, aside: Aside, uri: Uri, source: Source, size_bytes: int, concurrency: int
    ) -> None:
        self._aside = aside
        self._uri = uri
        self._source = source
        self._closed = False
        self.size_bytes = size_bytes
        self.concurrency = concurrency
        self.window_bytes = _WINDOW_BYTES

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise StorageError("the reader is closed", uri=self._uri)
        view = buffer.cast("B")
        if offset + len(view) > self.size_bytes:
            raise IntegrityError(
                f"the file has {self.size_bytes} bytes, {offset + len(view)} were asked for",
                uri=self._uri,
            )
        if len(view):
            self._aside.again(lambda: self._source.read_into(offset, view))

    def close(self) -> None:
        self._closed = True
        self._source.close()
