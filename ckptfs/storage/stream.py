"""A file object over a DataWriter: what Python code calls ``open(..., "wb")``, whole or not at all.

    with fs.open(path, "wb") as file: ...   left normally: visible; by an exception: nothing is
    file.close()                            the same, told by the exception that is being handled
    autocommit=False                        closed is not yet visible: commit() or discard() decide
    dropped without close()                 nothing

fsspec's own files upload what they buffered when an exception leaves the block; so do wrappers that
close without telling why (``fsspec.open``, ``io.TextIOWrapper``). A file that is closed while an
exception is on its way that was not there when it was opened is therefore thrown away.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import TracebackType

from ckptfs.errors import NotFoundError
from ckptfs.storage.base import DataWriter, Storage

_TRIES = 4

__all__ = ["CompressedFile", "DurableWriter", "HeldWriter", "PublishedFile"]


class PublishedFile(io.BufferedIOBase):
    """One file on its way. name: for people. autocommit: whether ``close`` publishes it.

    No ``fileno``: whoever writes past ``write`` would write past the storage.
    """

    def __init__(
        self,
        writer: DataWriter,
        name: str,
        *,
        autocommit: bool = True,
    ) -> None:
        super().__init__()
        self.name = self.path = name
        self.mode = "wb"
        self.autocommit = autocommit
        self._writer: DataWriter | None = writer
        self._before = sys.exc_info()[1]
        self._size = 0
        self._failed = False

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: object) -> int:
        """Append; the number of bytes."""
        if self.closed or self._writer is None:
            raise ValueError("I/O operation on closed file")
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # whatever has a buffer
        try:
            self._writer.write(view)
        except BaseException:
            self._failed = True
            raise
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def close(self) -> None:
        """Publish, unless an exception is on its way or a write failed; harmless twice."""
        if self.closed:
            return
        error = sys.exc_info()[1]
        if self._failed or (error is not None and error is not self._before):
            self.discard()
        elif self.autocommit:
            self.commit()
        super().close()

    def commit(self) -> None:
        """Make it visible and durable."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except BaseException:
            writer.abort()
            super().close()
            raise

    def discard(self) -> None:
        """Leave nothing behind; harmless after commit."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # io's own would close, and publish half a file. What a transaction holds is closed already.
        self.discard()


class DurableWriter(DataWriter):
    """One file whose name is durable too when ``close`` returns; its directories are made."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage, self._home = storage, key.rpartition("/")[0]
        for left in reversed(range(_TRIES)):
            storage.make_dir(self._home)
            try:
                self._writer = storage.open_write(key)
                break
            except NotFoundError:
                # An empty step directory makes room for its committed one between two calls.
                if not left:
                    raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """As ``DataWriter.write``."""
        return self._writer.write(data)

    def close(self) -> None:
        """Bytes and name."""
        self._writer.close()
        self._storage.sync(self._home)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._writer.abort()


class HeldWriter(DataWriter):
    """A small file that is only looked at when it is whole: ``take`` gets its bytes on close."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take: Callable[[bytes], None] | None = take
        self._held = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Keep a copy."""
        self._held += data
        return len(data)

    def close(self) -> None:
        """Hand it over."""
        take, self._take = self._take, None
        if take is not None:
            take(bytes(self._held))

    def abort(self) -> None:
        """Forget it."""
        self._take = None


class CompressedFile(io.BufferedIOBase):
    """Bytes on their way through one of fsspec's compressors into a file that closes with it."""

    def __init__(self, file: io.BufferedIOBase, codec: str) -> None:
        from fsspec.compression import compr

        super().__init__()
        self._file, self._through = file, compr[codec](file, mode="w")

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: object) -> int:
        """Append; the number of bytes before compression."""
        count: int = self._through.write(data)
        return count

    def close(self) -> None:
        """Publish, unless an exception is on its way."""
        if not self.closed:
            try:
                self._through.close()
            finally:
                self._file.close()
                super().close()
