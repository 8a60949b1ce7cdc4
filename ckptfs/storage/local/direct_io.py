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

__all__ = ["DIRECT_FROM_BYTES", "Buffer", "Staging", "WindowedFile", "staging", "takes_direct"]

log = logging.getLogger(__name__)

DIRECT_FROM_BYTES = 8 << 20  # smaller files are written before a disk has begun
_WINDOW_BYTES = 8 << 20
_DIRECT_THREADS = 2  # one copies while the other's window is on its way; more gain nothing
_BUFFERED_THREADS = 4  # the kernel copies: as many as there are cores, up to here
_VIEWS = 1024  # IOV_MAX
_INTERRUPTIONS = 100
_EXT4, _XFS = 0xEF53, 0x58465342
_TRIED = frozenset({_EXT4, _XFS})  # these take direct writes; before Linux 6.1 no kernel says so
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EFAULT})
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_DIRECT = getattr(os, "O_DIRECT", 0)


class WindowedFile(PartialFile, ParallelWriter):
    """See ``ParallelWriter``. wanted: DIRECT and BUFFERED are the caller's word; None: what pays here."""

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
        self._written_bytes = 0
        self._direct_bytes = 0
        super().__init__(posix, uri, partial, publish)
        try:
            if wanted is Engine.DIRECT or (wanted is None and size_bytes >= direct_from_bytes):
                with translated(uri, "write"):
                    self._begin_direct(tries=wanted is Engine.DIRECT)
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
            fd = self._open_fd()
            self._in_flight += 1
        try:
            with translated(self._uri, "write"):
                if self._is_direct:
                    size = self._write_staged(fd, offset, views)
                else:
                    held = list(views)
                    size = sum(map(len, held))
                    self._write_all(fd, offset, held)
            with self._lock:
                self._written_bytes += size
        except BaseException:
            # What is missing now must never be published, whatever the other threads still write.
            with self._lock:
                if self._state is FileState.OPEN:
                    self._state = FileState.BROKEN
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        """A write has returned. The last one of an aborted file closes it."""
        with self._lock:
            self._in_flight -= 1
            if self._in_flight or self._state is not FileState.ABORTED:
                return
            left = [self._direct_fd, self._fd]
            self._direct_fd = self._fd = None
        for fd in left:
            self._let_go(fd)

    # -- past the page cache ---------------------------------------------------------------

    def _begin_direct(self, *, tries: bool) -> None:
        fd = self._open_fd()
        if not takes_direct(self._posix.direct_alignment(fd), self._posix.fs_type(fd), tries=tries):
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
        for remaining in reversed(range(_INTERRUPTIONS)):
            try:
                self._posix.allocate(fd, self._size_bytes)
            except InterruptedError:  # Python calls its own functions again, not the C library's
                if not remaining:
                    raise
            except OSError as error:
                if error.errno not in _NO_ALLOCATION:
                    raise
                return
            else:
                return

    def _write_staged(self, fd: int, offset: int, views: Iterable[memoryview]) -> int:
        """Copy one window into a buffer and write that; how many bytes it had."""
        with staging().buffer(self.window_bytes) as buffer:
            size = 0
            for view in views:
                end = size + len(view)
                buffer[size:end] = view
                size = end
            whole = size - size % mmap.PAGESIZE
            done = self._write_direct(offset, buffer[:whole])
            if done < size:
                self._write_all(fd, offset + done, [buffer[done:size]])
        return size

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """How many bytes of these are written: whole pages. Fewer where direct writes are refused."""
        done = 0
        while done < len(data) and self._is_direct and self._direct_fd is not None:
            try:
                count = self._posix.pwritev(self._direct_fd, [data[done:]], offset + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                log.debug("%s: no more direct writes: %s", self._uri, error)
                self._is_direct = False
                break
            if count <= 0:
                raise OSError(errno.EIO, "write made no progress")
            done += count
            if count % mmap.PAGESIZE:
                break  # the rest does not begin where a direct write may: it goes the other way
        # A page that is half direct and half cached could be written back with its old first half.
        done -= done % mmap.PAGESIZE
        with self._lock:
            self._direct_bytes += done
        return done

    # -- through the page cache --------------------------------------------------------------

    def _write_all(self, fd: int, offset: int, views: list[memoryview]) -> None:
        """Write every byte, however short the kernel's answers are."""
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
            whole = sum(1 for end in ends if end <= sent)
            begun = sent - (ends[whole - 1] if whole else 0)
            first += whole
            views[first] = views[first][begun:]
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
            # Closed under a thread that writes, its next write would go into whatever file is given the
            # same descriptor: the last of them closes it.
            is_busy = self._in_flight > 0
            if is_busy and not is_over:
                self._state = FileState.ABORTED
        if is_over:
            return
        if is_busy:
            self._discard()
            return
        direct, self._direct_fd = self._direct_fd, None
        self._let_go(direct)
        super().abort()


def takes_direct(told: DirectAlignment | None, fs_type: int | None, *, tries: bool) -> bool:
    """Whether a file is worth opening for direct writes in windows that begin at whole pages.

    tries: the caller asked for it, so that what nobody knows is tried.
    """
    if not _DIRECT:
        return False
    if told is None:
        return tries or fs_type in _TRIED
    return 0 < told.offset_bytes <= mmap.PAGESIZE and 0 < told.memory_bytes <= mmap.PAGESIZE


# -- aligned buffers ---------------------------------------------------------------------

_KEPT_BUFFERS = 8
_HUGE_BYTES = 2 << 20
# Or buffers of nearly the same size would push each other out.
_LEAST_BYTES = (8 << 20) + (64 << 10)


class Staging:
    """Buffers that are kept, touched, from window to window and from file to file. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[memoryview] = []

    def buffer(self, size_bytes: int) -> Buffer:
        """One for the time of a with statement."""
        return Buffer(self, size_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of at least that size, on whole pages."""
        with self._lock:
            for index, kept in enumerate(self._kept):
                if len(kept) >= size_bytes:
                    return self._kept.pop(index)
        return _aligned(max(size_bytes, _LEAST_BYTES))

    def give(self, buffer: memoryview) -> None:
        """Nobody uses it any more."""
        with self._lock:
            if len(self._kept) < _KEPT_BUFFERS:
                self._kept.append(buffer)


class Buffer:
    """A borrowed buffer."""

    def __init__(self, staging: Staging, size_bytes: int) -> None:
        self._staging, self._size_bytes = staging, size_bytes

    def __enter__(self) -> memoryview:
        self._taken = self._staging.take(self._size_bytes)
        return self._taken

    def __exit__(self, *exc: object) -> None:
        self._staging.give(self._taken)


@functools.cache
def staging() -> Staging:
    """This process's. A fork's child has its own: another thread may hold the lock of this one."""
    return Staging()


os.register_at_fork(after_in_child=staging.cache_clear)


def _aligned(size_bytes: int) -> memoryview:
    """Fresh memory that begins at a huge page, of huge pages where there are any: a direct write of
    a window pins each of its pages.
    """
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no huge pages: %s", error)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)  # open(2): no fork beside direct I/O from private pages
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + size_bytes]
