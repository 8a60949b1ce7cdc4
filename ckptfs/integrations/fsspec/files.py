"""A file object over a DataWriter: what Python code calls ``open(..., "wb")``, whole or not at all.

    with fs.open(path, "wb") as file: ...   left normally: visible; by an exception: nothing is
    file.close()                            visible, in except and finally blocks too
    autocommit=False                        after close not yet visible: commit() or discard() decide
    dropped without close()                 nothing

fsspec's own files upload what they buffered when an exception leaves the block; so do wrappers with
an ``__exit__`` that calls ``close()`` and does not pass the reason on (``fsspec.open``,
``io.TextIOWrapper``, pyarrow). Therefore a file that the ``with`` block of a wrapper closes because
of an exception is discarded as well. Any other ``close()`` publishes: a handler that writes a
fallback and closes loses nothing.
"""

from __future__ import annotations

import contextlib
import dis
import io
import sys
from collections.abc import Awaitable, Callable
from types import FrameType, TracebackType
from typing import IO, Any, Self

from ckptfs.errors import NotFoundError, StorageError
from ckptfs.storage.base import DataWriter, Storage

_TRIES = 4
_PART_BYTES = 16 << 20
_WITH_LEFT_BY_ERROR = dis.opmap["WITH_EXCEPT_START"]
# The names of functions of wrappers that only pass on the end of a with block.
_CLOSING = frozenset(("__exit__", "_exit_wrapper", "close", "<listcomp>"))

__all__ = [
    "AsyncFile",
    "CompressedFile",
    "DurableWriter",
    "HeldWriter",
    "PublishedFile",
    "TextFile",
]


class _AtomicFile(io.IOBase):
    """Discards on an exception. io's own ``__exit__`` closes, and so publishes, for any reason."""

    def spoil(self) -> None:
        """Let ``close`` discard the file from now on.

        Called by wrappers when an exception leaves their block.
        """
        raise NotImplementedError

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.spoil()
        self.close()


class PublishedFile(_AtomicFile, io.BufferedIOBase):
    """One file that is being written.

    ``name`` is for people; ``autocommit``: ``close`` publishes it. It has no ``fileno``, because
    writing to that would bypass the storage.
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
        self._failed = self._spoilt = False

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: object) -> int:
        """Append; return the number of bytes."""
        if self.closed or self._writer is None:
            raise ValueError("I/O operation on closed file")
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # whatever has a buffer
        try:
            return self._append(self._writer, view)
        except BaseException:
            self._failed = True
            raise

    def _append(self, writer: DataWriter, view: memoryview) -> int:
        writer.write(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def close(self) -> None:
        """Publish, unless a ``with`` block closes it because of an exception.

        A second call does nothing. Raises StorageError if a write failed before, so that bytes are
        missing; nothing is published then.
        """
        if self.closed:
            return
        if self._spoilt or self._is_left_by_error():
            self.discard()
        elif self._failed:
            self.discard()
            super().close()
            raise StorageError(
                "a write failed before it was closed, so nothing was published", uri=self.name
            )
        elif self.autocommit:
            self.commit()
        super().close()

    def spoil(self) -> None:
        """As ``_AtomicFile.spoil``."""
        self._spoilt = True

    def _is_left_by_error(self) -> bool:
        error = sys.exc_info()[1]
        # A file that was opened while the exception was handled is meant to rescue something.
        if error is None or error is self._before:
            return False
        return _with_block_left_by_error(sys._getframe(2))  # noqa: SLF001 - who calls close

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
        """Leave nothing behind. After commit it does nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def __del__(self) -> None:
        # io's own would close, and publish half a file. Files of a transaction are closed already.
        self.discard()


class EditedFile(PublishedFile):
    """A file that is read and written anywhere in it ("r+b", "w+b").

    ``close`` publishes ``draft`` whole.
    """

    def __init__(
        self, writer: DataWriter, name: str, draft: IO[bytes], *, mode: str, autocommit: bool
    ) -> None:
        super().__init__(writer, name, autocommit=autocommit)
        self._draft, self.mode = draft, mode

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Read ``size`` bytes, by default all that follow."""
        return self._draft.read(-1 if size is None else size)

    def read1(self, size: int = -1) -> bytes:
        """As ``read``."""
        return self._draft.read(size)

    def _append(self, writer: DataWriter, view: memoryview) -> int:
        del writer  # it gets the draft when that is whole
        return self._draft.write(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position in bytes; return the new one."""
        self._draft.seek(offset, whence)
        return self._draft.tell()

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._draft.tell()

    def truncate(self, size: int | None = None) -> int:
        """Cut the file off, or lengthen it by zeros; return the new size in bytes."""
        here = self._draft.tell()
        size = here if size is None else size
        end = self._draft.seek(0, io.SEEK_END) or self._draft.tell()
        if size > end:  # what is held in memory does not grow by truncate
            self._draft.write(bytes(size - end))
        else:
            self._draft.truncate(size)
        self._draft.seek(here)
        return size

    def commit(self) -> None:
        """Make it visible and durable."""
        if self._writer is not None:
            try:
                self._draft.seek(0)
                while chunk := self._draft.read(_PART_BYTES):
                    self._writer.write(chunk)
            except BaseException:
                self.discard()
                raise
        super().commit()
        self._draft.close()

    def discard(self) -> None:
        """Leave what was there as it was."""
        super().discard()
        self._draft.close()


def _with_block_left_by_error(caller: FrameType | None) -> bool:
    """Whether ``caller`` acts for a ``with`` block that an exception leaves.

    Wrappers written in C, and those that call ``close()`` from ``__exit__``, do not pass the
    exception on. The interpreter runs them from the one instruction that ends such a block.
    """
    while caller is not None and caller.f_code.co_name in _CLOSING:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_code[caller.f_lasti] == _WITH_LEFT_BY_ERROR


class DurableWriter(DataWriter):
    """One file with a name that is durable too when ``close`` returns; its directories are made."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage, self._home = storage, key.rpartition("/")[0]
        for left in reversed(range(_TRIES)):
            storage.make_dir(self._home)
            try:
                self._writer = storage.open_over(key)
                break
            except NotFoundError:
                # A commit may remove the empty step directory between the two calls.
                if not left:
                    raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """As ``DataWriter.write``."""
        return self._writer.write(data)

    def close(self) -> None:
        """Make bytes and name durable."""
        self._writer.close()
        self._storage.sync(self._home)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._writer.abort()


class UnderlyingWriter(DataWriter):
    """An object under a key that ckptfs's storage would spell differently, such as ``a//b``.

    The underlying filesystem's own file writes it; it is visible when closed.
    """

    def __init__(self, underlying: Any, path: str) -> None:
        self._file = underlying.open(path, "wb", autocommit=False, block_size=_PART_BYTES)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append; return the number of bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PART_BYTES):
            self._file.write(bytes(view[start : start + _PART_BYTES]))
        return len(view)

    def close(self) -> None:
        """Complete the upload."""
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        """Give the upload up. It does not use ``close``, which would complete the upload."""
        self._file.discard()
        self._file.closed = True


class HeldWriter(DataWriter):
    """A small file that is only used when it is whole: ``take`` receives its bytes on close."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take: Callable[[bytes], None] | None = take
        self._held = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Keep a copy."""
        self._held += data
        return len(data)

    def close(self) -> None:
        """Pass the bytes on."""
        take, self._take = self._take, None
        if take is not None:
            take(bytes(self._held))

    def abort(self) -> None:
        """Forget the bytes."""
        self._take = None


class CompressedFile(_AtomicFile, io.BufferedIOBase):
    """Passes bytes through one of fsspec's compressors into a file that closes with it."""

    def __init__(self, file: PublishedFile, codec: str) -> None:
        from fsspec.compression import compr

        super().__init__()
        self._file, self._through = file, compr[codec](file, mode="w")

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: object) -> int:
        """Append; return the number of bytes before compression."""
        count: int = self._through.write(data)
        return count

    def close(self) -> None:
        """Write the compressor's end, then as ``PublishedFile.close``."""
        if not self.closed:
            try:
                self._through.close()
            except BaseException:
                self.spoil()  # without its end it cannot be read
                raise
            finally:
                self._file.close()
                super().close()

    def spoil(self) -> None:
        """As ``PublishedFile.spoil``."""
        self._file.spoil()

    def __del__(self) -> None:
        _discard_collected(self)


class TextFile(_AtomicFile, io.TextIOWrapper):
    """Passes text into a file that closes with it."""

    def __init__(self, file: PublishedFile | CompressedFile, **text: Any) -> None:
        super().__init__(file, **text)  # type: ignore[arg-type]  # typeshed asks for more than io does
        self._file = file

    def spoil(self) -> None:
        """As ``PublishedFile.spoil``."""
        self._file.spoil()

    def __del__(self) -> None:
        _discard_collected(self)


def _discard_collected(file: CompressedFile | TextFile) -> None:
    """Discard a file that was collected without ``close()``.

    io's own finalizer would publish half of it.
    """
    if not file.closed:
        with contextlib.suppress(Exception):  # no caller can handle an error of a finalizer
            file._file.spoil()  # noqa: SLF001 - one of ours
            file.close()


class AsyncFile:
    """A file with methods that are coroutines, like those of fsspec's ``open_async``.

    ``run`` runs a function on another thread. ``size``: bytes of a file that is read, None of one
    that is written.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]], file: Any, mode: str) -> None:
        self._run, self._file, self.mode = run, file, mode
        self.size: int | None = getattr(file, "size", None) if "r" in mode else None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return bool(self._file.closed)

    def tell(self) -> int:
        """Return the position in bytes."""
        return int(self._file.tell())

    async def read(self, length: int = -1) -> bytes:
        """Read ``length`` bytes, by default all that follow."""
        found: bytes = await self._run(self._file.read, length)
        return found

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position in bytes; return the new one."""
        position: int = await self._run(self._file.seek, offset, whence)
        return position

    async def write(self, data: object) -> int:
        """Append; return the number of bytes."""
        count: int = await self._run(self._file.write, data)
        return count

    async def flush(self) -> None:
        """Do nothing: nothing is published before ``close``."""

    async def close(self) -> None:
        """As ``PublishedFile.close``."""
        await self._run(self._file.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None and isinstance(self._file, PublishedFile):
            self._file.spoil()
        await self.close()
