"""One new file, written in windows by several threads: past the page cache where that pays.

    views --copy--> staging buffer --O_DIRECT--> the aligned part of the window      Engine.DIRECT
                                   --buffered--> what is left of the last window
    views -------------------------- pwritev --> the page cache, write-behind        Engine.BUFFERED

A buffered write copies everything into fresh pages of the kernel's, which then go to the disk: ten
times the processor time of a direct one. Direct are files that are large enough, where the filesystem
says that it takes direct writes (statx), or is one of those known to before kernels said so. Wherever
it refuses one after all, at any point, the rest of the file goes through the page cache.

The file lies under a partial name and is published as those of ``LocalWriter`` are. Its blocks are
allocated first: a full disk is told before anything is written, and writers do not wait for each other.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from itertools import accumulate

from ckptfs.errors import StorageError
from ckptfs.storage.local.files import FileState, PartialFile
from ckptfs.storage.local.posix import DirectAlignment, Posix
from ckptfs.storage.local.spreading import core_count
from ckptfs.storage.local.staging import staging
from ckptfs.storage.os_errors import translated
from ckptfs.storage.parallel import Engine, ParallelWriter
from ckptfs.uri import Uri

__all__ = ["DIRECT_FROM_BYTES", "WindowedFile", "takes_direct"]

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
