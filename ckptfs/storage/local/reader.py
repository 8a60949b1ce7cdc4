"""Ranges of one local file, read into the caller's memory over the ``Posix`` seam.

    in the page cache       preadv2(RWF_NOWAIT) into place: a copy, no disk
    not there, a window     O_DIRECT into a reused staging buffer, copied into place
    anything else           preadv into place: small ranges, the end of a file, whatever refuses

A buffered read of a cold file has the kernel take fresh pages and copy out of them; a direct one into
memory that was used before does neither, and leaves the page cache to those who need it. What is
cached is asked at every window, two pages first, so a file may be cached in part. Where a window stops in
the middle, and the file is cached farther on, that page is waited for: of one at which it would read
ahead the kernel says that it is missing, too. Reads that are not answered so (network filesystems) go
through the page cache and its readahead.

Files are never mapped: over NFS a mapped file that is replaced reads as zeros or kills (SIGBUS).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from secrets import randbelow

from ckptfs.errors import IntegrityError, StaleError, StorageError
from ckptfs.storage.base import DataReader, Reach
from ckptfs.storage.local.direct_io import staging, takes_direct
from ckptfs.storage.local.files import open_regular
from ckptfs.storage.local.posix import Posix, core_count
from ckptfs.storage.os_errors import translated, typed
from ckptfs.uri import Uri

__all__ = ["LocalReader", "behind", "first", "scatter"]

log = logging.getLogger(__name__)

CALL_BYTES = 64 << 20  # 64 MiB a system call: Ctrl-C is heard in between
STALE_TRIES = 4
AGAIN_TRIES = 8  # of a call that was interrupted

_WINDOW_BYTES = 8 << 20
_LANES = 4  # a disk answers several at once faster than one after the other
_DIRECT_FROM_BYTES = 1 << 20  # a smaller read waits for the disk and for nothing else
_VIEWS = 1024  # IOV_MAX
_MARKS = 4  # pages of one range that are waited for before it counts as not cached
_FAR_BYTES = (64 << 20, 80 << 20)  # beyond what is read ahead; two, as there may be a mark at one
_PAGE = mmap.PAGESIZE
_DIRECT = getattr(os, "O_DIRECT", 0)
_INTERRUPTED = frozenset({errno.EINTR, errno.EAGAIN})


class _Way(Enum):
    """How the next window of a file is tried first."""

    CACHED = "cached"  # the last one was in the page cache
    ASK = "ask"  # two pages, whether this one is
    BUFFERED = "buffered"  # there is no other way here


class LocalReader(DataReader):
    """Ranged reads at given offsets: no shared position, so any number of threads may read at once.

    A handle that an NFS server calls stale is opened again by name, a few times. direct_bytes: of
    what was read, bytes that went past the page cache.
    """

    reach = Reach.LOCAL
    window_bytes = _WINDOW_BYTES
    concurrency = _LANES

    def __init__(self, posix: Posix, uri: Uri, path: str, flags: int = 0) -> None:
        self._posix = posix
        self._uri = uri
        self._path = path
        self._flags = flags  # O_NOFOLLOW where no link is read through
        self._lock = threading.Lock()
        self._closed = False
        self._way = _Way.ASK if _DIRECT else _Way.BUFFERED
        self._direct_fd: int | None = None
        self._waits = self._way is _Way.BUFFERED
        self._cores = core_count()
        self.direct_bytes = 0
        # Handles that went stale stay open until close: another thread may be reading through one.
        fd, found = open_regular(posix, path, uri, flags)
        self._fds: list[int] = [fd]
        self.size_bytes = found.st_size

    @property
    def threads(self) -> int:
        return _LANES if self._waits else min(_LANES, self._cores)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_views(offset, [buffer.cast("B")])

    def read_steps(self, offset: int, buffer: memoryview, step_bytes: int) -> Iterator[int]:
        view, done = buffer.cast("B"), 0
        while done < len(view):
            # A disk is asked for all at once, the page cache for as little as makes sense.
            end = len(view) if self._way is _Way.ASK else min(done + step_bytes, len(view))
            if self._way is _Way.CACHED:
                done += self._read_cached(offset + done, [view[done:end]])
            if done < end:
                self.read_views(offset + done, [view[done:end]])
                done = end
            yield done

    def read_views(self, offset: int, views: Sequence[memoryview]) -> None:
        size = sum(map(len, views))
        done = 0
        if size >= _DIRECT_FROM_BYTES and self._way is not _Way.BUFFERED:
            done = self._read_cached(offset, views)
            if done < size and self._way is _Way.ASK:
                done += self._read_direct(offset + done, behind(views, done), size - done)
        if done < size:
            self._read_buffered(offset + done, behind(views, done), offset + size)

    def keep_cached(self) -> None:
        self._way, self._waits = _Way.BUFFERED, True

    def close(self) -> None:
        with self._lock:
            fds, self._fds, self._closed = self._fds, [], True
            if self._direct_fd is not None:
                fds.append(self._direct_fd)
                self._direct_fd = None
        for fd in fds:
            self._posix.close(fd)

    # -- the three ways --------------------------------------------------------------------

    def _read_cached(self, offset: int, views: Sequence[memoryview]) -> int:
        """What of it the page cache has, from its start on: bytes."""
        fd, views, done = self._current(), views[:_VIEWS], 0
        is_known = self._way is _Way.CACHED
        try:
            if not is_known:
                # All of a range would be read ahead, although nobody waits for it. A page that was asked for
                # is there for the next who asks: a second one, never the same, tells more.
                page = memoryview(bytearray(1))
                self._posix.preadv_cached(fd, [page], offset)
                other = _PAGE + randbelow(_DIRECT_FROM_BYTES - _PAGE)
                self._posix.preadv_cached(fd, [page], offset + other)
            done = self._posix.preadv_cached(fd, views, offset)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                # Not told here; what else is wrong is met again, and typed, by the buffered read.
                self._way, self._waits = _Way.BUFFERED, True
                return 0
            if not is_known:
                self._ask(fd)
                return 0
        size = sum(map(len, views))
        if done < size:
            done = self._read_past_marks(fd, offset, views, done, size)
        if done < size:
            self._ask(fd)
        else:
            self._way = _Way.CACHED
        return done

    def _read_past_marks(
        self, fd: int, offset: int, views: Sequence[memoryview], done: int, size: int
    ) -> int:
        """Go on behind the first ``done`` bytes while it was a mark that stopped them; how many are
        there then. What fails is left to the other ways, which type it.
        """
        try:
            for _ in range(_MARKS):
                if done == size or not self._goes_on(fd, offset + done):
                    break
                done += self._read_page(fd, behind(views, done), offset + done)
                done += self._has(fd, behind(views, done), offset + done)
        except OSError as error:
            log.debug("%s: not read through a mark: %s", self._uri, error)
        return done

    def _has(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read what is there without a wait; 0: nothing."""
        try:
            return self._posix.preadv_cached(fd, views, offset)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return 0

    def _goes_on(self, fd: int, offset: int) -> bool:
        """Whether the page cache has the file farther on, too.

        If not, what it has here was perhaps only read ahead, and to wait for a page would have still more
        read ahead: a cold file would go through the page cache whole.
        """
        byte = memoryview(bytearray(1))
        far = (min(offset + ahead, self.size_bytes - 1) for ahead in _FAR_BYTES)
        return any(self._has(fd, [byte], at) for at in far)

    def _read_page(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read to the end of the page, whatever it takes; how many bytes.

        Where the kernel would begin to read ahead it answers nothing without a wait, although it has
        the page and all behind it: a mark that an earlier reader left, and that this takes away. Taken
        for the end of what is cached, a mark had the rest of the range read from the disk.
        """
        return self._posix.preadv(fd, first(views, _PAGE - offset % _PAGE), offset)

    def _ask(self, fd: int) -> None:
        """The file is not all in the page cache: from here on each window is asked for."""
        with self._lock:
            if self._direct_fd is None and not self._closed:
                try:
                    self._direct_fd = self._opened_direct(fd)
                except OSError as error:
                    log.debug("%s is read through the page cache: %s", self._uri, error)
            self._way = _Way.BUFFERED if self._direct_fd is None else _Way.ASK
            self._waits = True

    def _opened_direct(self, fd: int) -> int | None:
        """A descriptor past the page cache of the file that ``fd`` is; None: not here."""
        told = self._posix.direct_alignment(fd)
        if not takes_direct(told, self._posix.fs_type(fd), tries=False):
            return None
        direct, found = open_regular(self._posix, self._path, self._uri, _DIRECT | self._flags)
        try:
            self._posix.advise_random(fd)
            # The name may be another file's by now.
            if os.path.samestat(found, self._posix.fstat(fd)):
                return direct
        except BaseException:
            self._posix.close(direct)
            raise
        self._posix.close(direct)
        return None

    def _read_direct(self, offset: int, views: Sequence[memoryview], size: int) -> int:
        """Read it past the page cache; how many bytes of it, fewer where that is refused."""
        fd = self._direct_fd
        if fd is None:
            return 0
        done = 0
        with staging().buffer(_WINDOW_BYTES + 2 * _PAGE) as memory:
            views = list(views)
            while done < size:
                want = min(size - done, _WINDOW_BYTES)
                skip = (offset + done) % _PAGE
                got = self._fill(fd, memory, offset + done - skip, skip + want) - skip
                if got <= 0:
                    break
                got = min(got, want)
                views = scatter(memory[skip : skip + got], views)
                done += got
                if got < want:
                    break  # the file's end, or refused: the buffered read tells which
        with self._lock:
            self.direct_bytes += done
        return done

    def _fill(self, fd: int, memory: memoryview, offset: int, size: int) -> int:
        """Direct reads of at least ``size`` bytes from a whole page on; how many came."""
        wanted = size + -size % _PAGE
        done = 0
        while done < size:
            try:
                count = self._posix.preadv(fd, [memory[done:wanted]], offset + done)
            except OSError as error:
                log.debug("%s: no more direct reads: %s", self._uri, error)
                self._way = _Way.BUFFERED
                break
            done += count
            if count <= 0 or count % _PAGE:
                break  # the rest does not begin where a direct read may
        return done

    def _read_buffered(self, offset: int, views: Sequence[memoryview], end: int) -> None:
        stale, again = 0, 0
        left = [view for view in views if len(view)]
        while left:
            fd = self._current()
            try:
                count = self._posix.preadv(fd, _one_call(left), offset)
            except OSError as error:
                if error.errno in _INTERRUPTED and again < AGAIN_TRIES:
                    again += 1
                    continue
                stale += 1
                if error.errno != errno.ESTALE or stale >= STALE_TRIES:
                    raise typed(error, self._uri, "read") from error
                self._open_again(fd)
                continue
            if count == 0:
                raise IntegrityError(
                    f"the file ends at byte {offset}, {end} were asked for",
                    uri=self._uri,
                    hint="it was truncated, or replaced by a shorter one",
                )
            offset += count
            left = behind(left, count)

    def _current(self) -> int:
        with self._lock:
            if self._closed:
                raise StorageError("the reader is closed", uri=self._uri)
            return self._fds[-1]

    def _open_again(self, stale: int) -> None:
        with self._lock, translated(self._uri, "read"):
            if self._closed or self._fds[-1] != stale:
                return
            fd, found = open_regular(self._posix, self._path, self._uri, self._flags)
            if found.st_size != self.size_bytes:
                self._posix.close(fd)  # no other thread may read what stands there now
                raise StaleError("another file has taken this name", uri=self._uri)
            self._fds.append(fd)


def _one_call(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """As much of them as one system call should read."""
    if len(views) == 1 and len(views[0]) > CALL_BYTES:
        return [views[0][:CALL_BYTES]]
    return views[:_VIEWS]


# -- lists of buffers that one call fills one after the other -----------------------------------

_COPIED_HERE_BYTES = 256 << 10  # giving up the interpreter's lock takes longer than such a copy


def behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them behind their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]] if count else list(views[index:])
        count -= len(view)
    return []


def first(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Their first ``count`` bytes."""
    found = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= len(view)
    return found


def scatter(data: memoryview, views: Sequence[memoryview]) -> list[memoryview]:
    """Copy ``data`` into them, one after the other; what is left of them."""
    at = 0
    for view in views:
        if at == len(data):
            break
        size = min(len(view), len(data) - at)
        if size <= _COPIED_HERE_BYTES:
            view[:size] = data[at : at + size]
        else:
            _copy(view[:size], data[at : at + size])
        at += size
    return behind(views, at)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the interpreter's lock, so that threads copy side by side."""
    byte = ctypes.c_char
    ctypes.memmove(
        ctypes.addressof(byte.from_buffer(target)),
        ctypes.addressof(byte.from_buffer(source)),
        len(source),
    )
