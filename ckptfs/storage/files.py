"""Whole files and streams over the ``Posix`` seam: the short functions under the local backend.

    write_whole   O_EXCL, write all, fsync, close         read_whole   open, read to the end
    LocalWriter   .partial-* -> fsync -> publish(name)    LocalReader  preadv into the caller's buffer

Large buffers go to the kernel as they are, without a copy; small ones are gathered to 1 MiB first.
Files are never mapped: over NFS a mapped file that is replaced reads as zeros or kills (SIGBUS).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from enum import Enum

from ckptfs.errors import IntegrityError, StaleError, StorageError
from ckptfs.storage.base import DataReader, DataWriter
from ckptfs.storage.failures import translated, typed
from ckptfs.storage.posix import Posix
from ckptfs.uri import Uri

__all__ = ["LocalReader", "LocalWriter", "read_whole", "unlink_quietly", "write_all", "write_whole"]

log = logging.getLogger(__name__)

GATHER_BYTES = 1 << 20  # 1 MiB: smaller writes are gathered up to here
BEHIND_BYTES = 8 << 20  # 8 MiB: so much is handed to the disk while the next is copied
CALL_BYTES = 64 << 20  # 64 MiB a system call: Ctrl-C is heard in between
STALE_TRIES = 4

_LOOK = os.O_RDONLY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_all(posix: Posix, fd: int, data: memoryview) -> None:
    """Write every byte, however short the kernel's answers are."""
    sent = 0
    while sent < len(data):
        count = posix.write(fd, data[sent : sent + CALL_BYTES])
        if count <= 0:
            raise OSError(errno.EIO, "write made no progress")
        sent += count


def write_whole(posix: Posix, path: str, data: bytes, *, durable: bool = True) -> None:
    """A new file with these bytes, fsynced; its name is not. After an error, Ctrl-C included, the
    caller removes it.
    """
    fd = posix.open(path, _NEW)
    try:
        write_all(posix, fd, memoryview(data))
        if durable:
            posix.fsync(fd)
    finally:
        posix.close(fd)


def read_whole(posix: Posix, path: str) -> bytes:
    """All bytes of a file."""
    fd = posix.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := posix.read(fd, GATHER_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        posix.close(fd)


class _State(Enum):
    OPEN = "open"
    BROKEN = "broken"  # a step is under way, or failed: what is missing must never be published
    PUBLISHED = "published"
    ABORTED = "aborted"


class LocalWriter(DataWriter):
    """One new file: a partial file beside the key, then ``publish(partial)`` puts it in place.

    After a failed write the file can only be aborted: ``close`` refuses to publish a hole.
    """

    def __init__(
        self, posix: Posix, uri: Uri, partial: str, publish: Callable[[str], None]
    ) -> None:
        self._posix = posix
        self._uri = uri
        self._partial = partial
        self._publish = publish
        self._gathered = bytearray()
        self._sent = 0  # bytes the kernel has
        self._behind = 0  # of them, bytes the disk was told to take
        self._pid = os.getpid()
        self._fd: int | None = None
        self._state = _State.BROKEN
        try:
            self._fd = self._opened()
        except BaseException:
            self.abort()
            raise
        self._state = _State.OPEN

    def _opened(self) -> int:
        return self._posix.open(self._partial, _NEW)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        fd = self._open_fd()
        if len(self._gathered) + len(view) < GATHER_BYTES:
            self._gathered += view
            return len(view)
        self._state = _State.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
            if len(view) < GATHER_BYTES:
                self._gathered += view
            else:
                self._send(fd, view)
        self._state = _State.OPEN
        return len(view)

    def flush(self) -> None:
        """Hand the gathered bytes to the kernel; nothing becomes visible or durable by it."""
        fd = self._open_fd()
        self._state = _State.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
        self._state = _State.OPEN

    def close(self) -> None:
        if self._state is _State.PUBLISHED:
            return
        fd = self._open_fd()
        self._state = _State.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
            self._finish(fd)
        self._state = _State.PUBLISHED

    def _finish(self, fd: int) -> None:
        self._posix.fsync(fd)
        self._fd = None
        self._posix.close(fd)
        self._publish(self._partial)

    def abort(self) -> None:
        if self._state in (_State.PUBLISHED, _State.ABORTED):
            return
        self._state = _State.ABORTED
        self._gathered.clear()
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                self._posix.close(fd)
            except OSError as error:
                # The bytes are thrown away: that some did not arrive is no news.
                log.debug("close while aborting %s: %s", self._uri, error)
        self._discard()

    def _discard(self) -> None:
        unlink_quietly(self._posix, self._partial)

    def __del__(self) -> None:
        # Ctrl-C between open_write and its "with" block: nobody else could remove the partial file.
        # A forked child inherits the object, but not the file.
        if getattr(self, "_pid", None) == os.getpid():
            self.abort()

    def _flush(self, fd: int) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(fd, memoryview(gathered))

    def _send(self, fd: int, view: memoryview) -> None:
        """Write all of it, a piece at a time, so that the disk works while the next is copied.

        The fsync at the end then waits for the last piece and not for the whole file.
        """
        for start in range(0, len(view), BEHIND_BYTES):
            piece = view[start : start + BEHIND_BYTES]
            write_all(self._posix, fd, piece)
            self._sent += len(piece)
            if self._sent - self._behind >= BEHIND_BYTES:
                self._posix.write_behind(fd, self._behind, self._sent - self._behind)
                self._behind = self._sent

    def _open_fd(self) -> int:
        if self._state is not _State.OPEN or self._fd is None:
            raise StorageError(
                f"the file cannot be written: it is {self._state.value}", uri=self._uri
            )
        return self._fd


class LocalReader(DataReader):
    """Ranged reads by pread: no shared position, so any number of threads may read at once.

    A handle that an NFS server calls stale is opened again by name, a few times.
    """

    def __init__(self, posix: Posix, uri: Uri, path: str) -> None:
        self._posix = posix
        self._uri = uri
        self._path = path
        self._lock = threading.Lock()
        self._closed = False
        # Handles that went stale stay open until close: another thread may be reading through one.
        self._fds: list[int] = [posix.open(path, _LOOK)]
        try:
            self.size_bytes = posix.fstat(self._fds[0]).st_size
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        done, stale = 0, 0
        while done < len(view):
            fd = self._current()
            part = view[done : done + CALL_BYTES]
            try:
                count = self._posix.preadv(fd, [part], offset + done)
            except OSError as error:
                stale += 1
                if error.errno != errno.ESTALE or stale >= STALE_TRIES:
                    raise typed(error, self._uri, "read") from error
                self._open_again(fd)
                continue
            if count == 0:
                raise IntegrityError(
                    f"the file ends at byte {offset + done}, {offset + len(view)} were asked for",
                    uri=self._uri,
                    hint="it was truncated, or replaced by a shorter one",
                )
            done += count

    def close(self) -> None:
        with self._lock:
            fds, self._fds, self._closed = self._fds, [], True
        for fd in fds:
            self._posix.close(fd)

    def _current(self) -> int:
        with self._lock:
            if self._closed:
                raise StorageError("the reader is closed", uri=self._uri)
            return self._fds[-1]

    def _open_again(self, stale: int) -> None:
        with self._lock, translated(self._uri, "read"):
            if self._closed or self._fds[-1] != stale:
                return
            fd = self._posix.open(self._path, _LOOK)
            self._fds.append(fd)
            if self._posix.fstat(fd).st_size != self.size_bytes:
                raise StaleError("another file has taken this name", uri=self._uri)


def unlink_quietly(posix: Posix, path: str) -> None:
    """Remove our own partial file; the error that brought us here is the one to report."""
    try:
        posix.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("left behind: %s (%s)", path, error)
