"""One new file, written in windows by several threads: past the page cache where that pays.

    views --copy--> aligned buffer --O_DIRECT--> the aligned part of the window      Engine.DIRECT
                                   --buffered--> the rest of the last window
    views -------------------------- pwritev --> the page cache, write-behind        Engine.BUFFERED

A buffered write copies everything into fresh pages of the kernel, which then go to the disk. That takes ten
times the processor time of a direct write. A file is written directly if it is large enough and the
filesystem reports direct writes (statx), or is one that supported them before kernels reported it. Where
the filesystem refuses a direct write after all, at any point, the rest of the file goes through the page cache.

The file has a partial name and is published as the files of ``LocalWriter`` are. Its blocks are
allocated first, so that a full disk is an error before anything is written, and writers do not wait for
each other.

The aligned buffers (``staging``) are kept from window to window and from file to file, because touching
fresh memory takes as long as writing it to a fast disk. They consist of huge pages where there are any: a
direct transfer pins every page of its window.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from itertools import accumulate

from ckptfs.errors import StorageError
from ckptfs.storage.io import Engine, ParallelWriter
from ckptfs.storage.local.files import FileState, PartialFile
from ckptfs.storage.local.posix import DirectAlignment, Posix, core_count
from ckptfs.storage.os_errors import translated
from ckptfs.uri import Uri

__all__ = [
    "DIRECT_FROM_BYTES",
    "BufferPool",
    "PooledBuffer",
    "WindowedFile",
    "buffer_pool",
    "takes_direct",
]

log = logging.getLogger(__name__)

DIRECT_FROM_BYTES = 8 << 20  # smaller files are written faster through the page cache
_WINDOW_BYTES = 8 << 20
_DIRECT_THREADS = 2  # one copies while the other's window is written; more do not help
_BUFFERED_THREADS = 4  # the kernel copies: one per core, at most so many
_VIEWS = 1024  # IOV_MAX
_MAX_INTERRUPTIONS = 100
_EXT4, _XFS = 0xEF53, 0x58465342
_UNREPORTED_DIRECT = frozenset(
    {_EXT4, _XFS}
)  # support direct writes; before Linux 6.1 no kernel reports it
_DIRECT_REFUSED = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EFAULT}
)
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_DIRECT = getattr(os, "O_DIRECT", 0)


class WindowedFile(PartialFile, ParallelWriter):
    """A new file, written in windows. See ``ParallelWriter``.

    Args:
        posix: The system calls.
        uri: Names the file in errors.
        partial: Its path until it is published.
        publish: Renames the partial file to its key.
        size_bytes: The exact size of the file.
        wanted: DIRECT or BUFFERED if the caller insists; None to choose by size and filesystem.
        direct_from_bytes: Without ``wanted``, the smallest file that is written directly.
    """

    def __init__(
        self,
        posix: Posix,
        uri: Uri,
        partial: str,
        publish: Callable[[str], None],
        *,
        size_bytes: int,
        wanted: Engine | None,
        direct_from_bytes: int = DIRECT_FROM_BYTES,
    ) -> None:
        self.window_bytes = _WINDOW_BYTES
        self._size_bytes = size_bytes
        self._direct_fd: int | None = None
        self._is_direct = False
        self._lock = threading.Lock()
        self._in_flight = 0  # write_at calls that have not returned
        self._broken_by: Exception | None = None
        self._written_bytes = 0
        self._direct_bytes = 0
        super().__init__(posix, uri, partial, publish)
        try:
            if wanted is Engine.DIRECT or (wanted is None and size_bytes >= direct_from_bytes):
                with translated(uri, "write"):
                    self._open_direct(try_unreported=wanted is Engine.DIRECT)
        except BaseException:
            self.abort()
            raise
        several = min(core_count(), _BUFFERED_THREADS)
        self.concurrency = _DIRECT_THREADS if self._is_direct else several

    @property
    def engine(self) -> Engine:
        return Engine.DIRECT if self._is_direct else Engine.BUFFERED

    @property
    def direct_bytes(self) -> int:
        return self._direct_bytes

    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        with self._lock:
            if self._broken_by is not None:
                # Or a thread that comes later would be heard first, and hide that the disk is full.
                raise self._broken_by
            fd = self._open_fd()
            self._in_flight += 1
        try:
            with translated(self._uri, "write"):
                if self._is_direct:
                    size = self._write_staged(fd, offset, views)
                else:
                    buffers = list(views)
                    size = sum(map(len, buffers))
                    self._write_all(fd, offset, buffers)
            with self._lock:
                self._written_bytes += size
        except BaseException as error:
            # The file is incomplete now and must never be published, whatever the other threads still write.
            with self._lock:
                if self._state is FileState.OPEN:
                    self._state = FileState.BROKEN
                    self._broken_by = error if isinstance(error, Exception) else None
            raise
        finally:
            self._write_ended()

    def _write_ended(self) -> None:
        """Count a write that returned. The last write of an aborted file closes its descriptors."""
        with self._lock:
            self._in_flight -= 1
            if self._in_flight or self._state is not FileState.ABORTED:
                return
            open_fds = [self._direct_fd, self._fd]
            self._direct_fd = self._fd = None
        for fd in open_fds:
            self._close_quietly(fd)

    # -- past the page cache ---------------------------------------------------------------

    def _open_direct(self, *, try_unreported: bool) -> None:
        fd = self._open_fd()
        if not takes_direct(
            self._posix.direct_alignment(fd), self._posix.fs_type(fd), try_unreported=try_unreported
        ):
            return
        try:
            flags = os.O_WRONLY | os.O_CLOEXEC | _DIRECT
            self._direct_fd = self._posix.open(self._partial, flags)
        except OSError as error:
            log.debug("%s is written through the page cache: %s", self._uri, error)
            return
        if self._size_bytes:
            self._allocate(fd)
        self._is_direct = True

    def _allocate(self, fd: int) -> None:
        for remaining in reversed(range(_MAX_INTERRUPTIONS)):
            try:
                self._posix.allocate(fd, self._size_bytes)
            except (
                InterruptedError
            ):  # Python repeats its own system calls, but not those of the C library
                if not remaining:
                    raise
            except OSError as error:
                if error.errno not in _NO_ALLOCATION:
                    raise
                return
            else:
                return

    def _write_staged(self, fd: int, offset: int, views: Iterable[memoryview]) -> int:
        """Copy one window into an aligned buffer and write it. Returns the window's size in bytes."""
        with buffer_pool().buffer(self.window_bytes) as buffer:
            size = 0
            for view in views:
                end = size + len(view)
                buffer[size:end] = view
                size = end
            aligned = size - size % mmap.PAGESIZE
            done = self._write_direct(offset, buffer[:aligned])
            if done < size:
                self._write_all(fd, offset + done, [buffer[done:size]])
        return size

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """Write whole pages directly.

        Returns:
            How many bytes were written: a multiple of the page size, fewer than all where the filesystem
            refuses direct writes.
        """
        done = 0
        while done < len(data) and self._is_direct and self._direct_fd is not None:
            try:
                count = self._posix.pwritev(self._direct_fd, [data[done:]], offset + done)
            except OSError as error:
                if error.errno not in _DIRECT_REFUSED:
                    raise
                log.debug("%s: no more direct writes: %s", self._uri, error)
                self._is_direct = False
                break
            if count <= 0:
                raise OSError(errno.EIO, "write made no progress")
            done += count
            if count % mmap.PAGESIZE:
                break  # the rest is not aligned: it is written through the page cache
        # The kernel could write back a page that is half direct and half cached with its old first half.
        done -= done % mmap.PAGESIZE
        with self._lock:
            self._direct_bytes += done
        return done

    # -- through the page cache --------------------------------------------------------------

    def _write_all(self, fd: int, offset: int, views: list[memoryview]) -> None:
        """Write every byte of ``views``, also where a system call writes only some of them."""
        views = [view for view in views if len(view)]
        start, first = offset, 0
        while first < len(views):
            batch = views[first : first + _VIEWS]
            sent = self._posix.pwritev(fd, batch, offset)
            if sent <= 0:
                raise OSError(errno.EIO, "write made no progress")
            offset += sent
            ends = list(accumulate(map(len, batch)))
            if sent == ends[-1]:
                first += len(batch)
                continue
            complete = sum(1 for end in ends if end <= sent)
            rest = sent - (ends[complete - 1] if complete else 0)
            first += complete
            views[first] = views[first][rest:]
        if offset > start:
            self._posix.write_behind(fd, start, offset - start)

    # -- the end -----------------------------------------------------------------------------

    def _flush(self, fd: int) -> None:
        if self._written_bytes != self._size_bytes:
            raise StorageError(
                f"{self._written_bytes} of {self._size_bytes} bytes were written", uri=self._uri
            )
        direct, self._direct_fd = self._direct_fd, None
        if direct is not None:
            self._posix.close(direct)

    def abort(self) -> None:
        with self._lock:
            is_over = self._state in (FileState.PUBLISHED, FileState.ABORTED)
            # If we closed the descriptor under a thread that writes, its next write would go into whatever
            # file gets the same descriptor. The last writing thread closes it instead.
            is_busy = self._in_flight > 0
            if is_busy and not is_over:
                self._state = FileState.ABORTED
        if is_over:
            return
        if is_busy:
            self._discard()
            return
        direct, self._direct_fd = self._direct_fd, None
        self._close_quietly(direct)
        super().abort()


def takes_direct(
    alignment: DirectAlignment | None, fs_type: int | None, *, try_unreported: bool
) -> bool:
    """Whether to open a file for direct I/O in windows that begin at whole pages. Pure.

    Args:
        alignment: What the kernel requires; None if it does not say.
        fs_type: The magic number of the filesystem; None if unknown.
        try_unreported: Whether to try where neither kernel nor filesystem says that it works, because the
            caller asked for direct I/O.
    """
    if not _DIRECT:
        return False
    if alignment is None:
        return try_unreported or fs_type in _UNREPORTED_DIRECT
    return (
        0 < alignment.offset_bytes <= mmap.PAGESIZE and 0 < alignment.memory_bytes <= mmap.PAGESIZE
    )


# -- aligned buffers ---------------------------------------------------------------------

_MAX_POOLED = 8
_HUGE_BYTES = 2 << 20
# A common minimum, or buffers of nearly the same size would displace each other.
_MIN_BUFFER_BYTES = (8 << 20) + (64 << 10)


class BufferPool:
    """Touched buffers, kept from window to window and from file to file. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    def buffer(self, size_bytes: int) -> PooledBuffer:
        """Borrow a buffer of at least ``size_bytes``, on whole pages, for a ``with`` block."""
        return PooledBuffer(self, size_bytes)

    def acquire(self, size_bytes: int) -> memoryview:
        """Take a buffer of at least ``size_bytes``, on whole pages, out of the pool, or make one."""
        with self._lock:
            for index, free in enumerate(self._free):
                if len(free) >= size_bytes:
                    return self._free.pop(index)
        return _aligned(max(size_bytes, _MIN_BUFFER_BYTES))

    def release(self, buffer: memoryview) -> None:
        """Return a buffer to the pool; nothing may use it any more."""
        with self._lock:
            if len(self._free) < _MAX_POOLED:
                self._free.append(buffer)


class PooledBuffer:
    """A borrowed buffer."""

    def __init__(self, pool: BufferPool, size_bytes: int) -> None:
        self._pool, self._size_bytes = pool, size_bytes

    def __enter__(self) -> memoryview:
        self._buffer = self._pool.acquire(self._size_bytes)
        return self._buffer

    def __exit__(self, *exc: object) -> None:
        self._pool.release(self._buffer)


@functools.cache
def buffer_pool() -> BufferPool:
    """The pool of this process.

    A forked child makes its own: in the parent another thread may have held the lock at the fork.
    """
    return BufferPool()


os.register_at_fork(after_in_child=buffer_pool.cache_clear)


def _aligned(size_bytes: int) -> memoryview:
    """Allocate memory that begins at a huge page, and consists of huge pages where there are any.

    A direct write of a window pins each of its pages.
    """
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no huge pages: %s", error)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(
            mmap.MADV_DONTFORK
        )  # open(2): no direct I/O from private memory that a fork shares
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + size_bytes]
