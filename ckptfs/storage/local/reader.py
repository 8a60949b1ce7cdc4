"""Ranges of one local file, read into the caller's memory over the ``Posix`` seam.

    in the page cache       preadv2(RWF_NOWAIT) into place: a copy, no disk
    not there, a window     O_DIRECT into a reused staging buffer, copied into place; or into place at once, where
                            that is memory of the buffer pool
    anything else           preadv into place: small ranges, the end of a file, whatever refuses

For a buffered read of a cold file the kernel takes fresh pages and copies out of them. A direct read into
memory that was used before does neither, and leaves the page cache to others. Before each window two pages
are probed with RWF_NOWAIT, because a file may be cached in part. RWF_NOWAIT also returns EAGAIN for a cached
page that carries a readahead marker. So where a window stops in the middle although the file is cached
farther on, that page is read with a wait. Filesystems without RWF_NOWAIT (network filesystems) are read
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
from ckptfs.storage.io import DataReader, Reach, buffer_pool, is_aligned
from ckptfs.storage.local.files import open_regular
from ckptfs.storage.local.posix import Posix, core_count, takes_direct
from ckptfs.storage.os_errors import translated, typed
from ckptfs.uri import Uri

__all__ = ["LocalReader", "drop_bytes", "scatter", "take_bytes"]

log = logging.getLogger("ckptfs.storage")

CALL_BYTES = 64 << 20  # 64 MiB per system call: Ctrl-C takes effect between two calls
STALE_TRIES = 4
INTERRUPTED_TRIES = 8  # repetitions of an interrupted call

_WINDOW_BYTES = 8 << 20
_MAX_THREADS = 4  # a disk serves several reads at once faster than one after the other
_DIRECT_FROM_BYTES = 1 << 20  # a smaller read costs little but the wait for the disk
_VIEWS = 1024  # IOV_MAX
_MAX_MARKERS = 4  # readahead markers per range before the rest counts as not cached
_AHEAD_BYTES = (64 << 20, 80 << 20)  # beyond the readahead; two, because one may carry a marker
_PAGE = mmap.PAGESIZE
_DIRECT = getattr(os, "O_DIRECT", 0)
_INTERRUPTED = frozenset({errno.EINTR, errno.EAGAIN})


class _Mode(Enum):
    """How the next window of a file is read first."""

    CACHED = "cached"  # from the page cache: the last window was there
    PROBE = "probe"  # two pages are probed for whether the window is cached
    BUFFERED = "buffered"  # through the page cache: nothing else works here


class LocalReader(DataReader):
    """Ranged reads at given offsets: no shared position, so any number of threads may read at once.

    A handle that an NFS server calls stale is opened again by name, a few times. ``direct_bytes`` counts the
    bytes that were read past the page cache.
    """

    reach = Reach.LOCAL
    window_bytes = _WINDOW_BYTES
    concurrency = _MAX_THREADS

    def __init__(self, posix: Posix, uri: Uri, path: str, flags: int = 0) -> None:
        self._posix = posix
        self._uri = uri
        self._path = path
        self._flags = flags  # O_NOFOLLOW where no link may be followed
        self._lock = threading.Lock()
        self._closed = False
        self._mode = _Mode.PROBE if _DIRECT else _Mode.BUFFERED
        self._direct_fd: int | None = None
        self._waits_for_disk = self._mode is _Mode.BUFFERED
        self._cores = core_count()
        self.direct_bytes = 0
        # Handles that went stale stay open until close: another thread may be reading through one.
        fd, found = open_regular(posix, path, uri, flags)
        self._fds: list[int] = [fd]
        self.size_bytes = found.st_size

    @property
    def threads(self) -> int:
        return _MAX_THREADS if self._waits_for_disk else min(_MAX_THREADS, self._cores)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_views(offset, [buffer.cast("B")])

    def read_steps(self, offset: int, buffer: memoryview, step_bytes: int) -> Iterator[int]:
        view, done = buffer.cast("B"), 0
        while done < len(view):
            # From a disk read all at once, from the page cache in small steps.
            end = len(view) if self._mode is _Mode.PROBE else min(done + step_bytes, len(view))
            if self._mode is _Mode.CACHED:
                done += self._read_cached(offset + done, [view[done:end]])
            if done < end:
                self.read_views(offset + done, [view[done:end]])
                done = end
            yield done

    def read_views(self, offset: int, views: Sequence[memoryview]) -> None:
        size = sum(map(len, views))
        done = 0
        if size >= _DIRECT_FROM_BYTES and self._mode is not _Mode.BUFFERED:
            done = self._read_cached(offset, views)
            if done < size and self._mode is _Mode.PROBE:
                done += self._read_direct(offset + done, drop_bytes(views, done), size - done)
        if done < size:
            self._read_buffered(offset + done, drop_bytes(views, done), offset + size)

    def keep_cached(self) -> None:
        self._mode, self._waits_for_disk = _Mode.BUFFERED, True

    def close(self) -> None:
        with self._lock:
            fds, self._fds, self._closed = self._fds, [], True
            if self._direct_fd is not None:
                fds.append(self._direct_fd)
                self._direct_fd = None
        for fd in fds:
            self._posix.close(fd)

    # -- cached, direct, buffered ----------------------------------------------------------

    def _read_cached(self, offset: int, views: Sequence[memoryview]) -> int:
        """Read what the page cache has of a range, from its start on. Returns the number of bytes."""
        fd, views, done = self._current_fd(), views[:_VIEWS], 0
        is_cached = self._mode is _Mode.CACHED
        try:
            if not is_cached:
                # Probing the whole range would start a readahead that nothing waits for. And a page that
                # was probed once is cached for the next probe: a second page, at random, is a better sign.
                page = memoryview(bytearray(1))
                self._posix.preadv_cached(fd, [page], offset)
                other = _PAGE + randbelow(_DIRECT_FROM_BYTES - _PAGE)
                self._posix.preadv_cached(fd, [page], offset + other)
            done = self._posix.preadv_cached(fd, views, offset)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                # RWF_NOWAIT does not work here. Any other error is met again, and typed, by the buffered
                # read.
                self._mode, self._waits_for_disk = _Mode.BUFFERED, True
                return 0
            if not is_cached:
                self._start_probing(fd)
                return 0
        size = sum(map(len, views))
        if done < size:
            done = self._read_past_markers(fd, offset, views, done, size)
        if done < size:
            self._start_probing(fd)
        else:
            self._mode = _Mode.CACHED
        return done

    def _read_past_markers(
        self, fd: int, offset: int, views: Sequence[memoryview], done: int, size: int
    ) -> int:
        """Continue after the first ``done`` bytes as long as it was a readahead marker that stopped the read.

        An error is left to the direct or buffered read, which types it.

        Returns:
            How many bytes of the range have been read then.
        """
        try:
            for _ in range(_MAX_MARKERS):
                if done == size or not self._is_cached_ahead(fd, offset + done):
                    break
                done += self._read_page(fd, drop_bytes(views, done), offset + done)
                done += self._read_available(fd, drop_bytes(views, done), offset + done)
        except OSError as error:
            log.debug("%s: not read past a readahead marker: %s", self._uri, error)
        return done

    def _read_available(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read what is cached, without a wait. Returns the number of bytes, 0 if there are none."""
        try:
            return self._posix.preadv_cached(fd, views, offset)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return 0

    def _is_cached_ahead(self, fd: int, offset: int) -> bool:
        """Whether the page cache has the file farther on, too.

        If not, the cached part may be nothing but readahead. Waiting for a page would then trigger more
        readahead, and a cold file would pass through the page cache as a whole.
        """
        byte = memoryview(bytearray(1))
        offsets = (min(offset + ahead, self.size_bytes - 1) for ahead in _AHEAD_BYTES)
        return any(self._read_available(fd, [byte], at) for at in offsets)

    def _read_page(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Read to the end of the page, with a wait if need be. Returns the number of bytes.

        At a page where the kernel would start a readahead, RWF_NOWAIT returns nothing although the page and
        all after it are cached. An earlier reader left this marker, and a read with a wait removes it. If the
        marker were taken for the end of the cached part, the rest of the range would be read from the disk.
        """
        return self._posix.preadv(fd, take_bytes(views, _PAGE - offset % _PAGE), offset)

    def _start_probing(self, fd: int) -> None:
        """Probe each window from now on: the file is not entirely in the page cache."""
        with self._lock:
            if self._direct_fd is None and not self._closed:
                try:
                    self._direct_fd = self._open_direct(fd)
                except OSError as error:
                    log.debug("%s is read through the page cache: %s", self._uri, error)
            self._mode = _Mode.BUFFERED if self._direct_fd is None else _Mode.PROBE
            self._waits_for_disk = True

    def _open_direct(self, fd: int) -> int | None:
        """Open the file of ``fd`` for direct reads, too. None where that is not possible."""
        alignment = self._posix.direct_alignment(fd)
        if not takes_direct(alignment, self._posix.fs_type(fd), try_unreported=False):
            return None
        direct, found = open_regular(self._posix, self._path, self._uri, _DIRECT | self._flags)
        try:
            self._posix.advise_random(fd)
            # The name may belong to another file by now.
            if os.path.samestat(found, self._posix.fstat(fd)):
                return direct
        except BaseException:
            self._posix.close(direct)
            raise
        self._posix.close(direct)
        return None

    def _read_direct(self, offset: int, views: Sequence[memoryview], size: int) -> int:
        """Read past the page cache. Returns how many bytes, fewer than ``size`` where that is refused."""
        fd = self._direct_fd
        if fd is None:
            return 0
        done = 0
        if len(views) == 1 and offset % _PAGE == 0 and is_aligned(views[0]):
            done = self._fill_in_place(fd, views[0], offset)
        if done < size:
            done += self._fill_staged(fd, offset + done, drop_bytes(views, done), size - done)
        with self._lock:
            self.direct_bytes += done
        return done

    def _fill_staged(self, fd: int, offset: int, views: list[memoryview], size: int) -> int:
        """Read directly into a staging buffer and copy into ``views``. Returns how many bytes were read."""
        done = 0
        with buffer_pool().buffer(_WINDOW_BYTES + 2 * _PAGE) as memory:
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
                    break  # the end of the file, or refused: the buffered read finds out which
        return done

    def _fill_in_place(self, fd: int, view: memoryview, offset: int) -> int:
        """Read the whole pages of ``view`` directly, without a copy. Returns how many bytes were read."""
        pages = view[: len(view) - len(view) % _PAGE]
        done = 0
        while done < len(pages):
            size = min(_WINDOW_BYTES, len(pages) - done)
            got = self._fill(fd, pages[done : done + size], offset + done, size)
            done += got
            if got < size:
                break
        return done

    def _fill(self, fd: int, memory: memoryview, offset: int, size: int) -> int:
        """Read at least ``size`` bytes directly from a page boundary on. Returns how many were read."""
        wanted = size + -size % _PAGE
        done = 0
        while done < size:
            try:
                count = self._posix.preadv(fd, [memory[done:wanted]], offset + done)
            except OSError as error:
                log.debug("%s: no more direct reads: %s", self._uri, error)
                self._mode = _Mode.BUFFERED
                break
            done += count
            if count <= 0 or count % _PAGE:
                break  # the rest is not aligned for a direct read
        return done

    def _read_buffered(self, offset: int, views: Sequence[memoryview], end: int) -> None:
        stale, interrupted = 0, 0
        left = [view for view in views if len(view)]
        while left:
            fd = self._current_fd()
            try:
                count = self._posix.preadv(fd, _one_call(left), offset)
            except OSError as error:
                if error.errno in _INTERRUPTED and interrupted < INTERRUPTED_TRIES:
                    interrupted += 1
                    continue
                stale += 1
                if error.errno != errno.ESTALE or stale >= STALE_TRIES:
                    raise typed(error, self._uri, "read") from error
                self._reopen(fd)
                continue
            if count == 0:
                raise IntegrityError(
                    f"the file ends at byte {offset}, but {end} were requested",
                    uri=self._uri,
                    hint="it was truncated, or replaced by a shorter one",
                )
            offset += count
            left = drop_bytes(left, count)

    def _current_fd(self) -> int:
        with self._lock:
            if self._closed:
                raise StorageError("the reader is closed", uri=self._uri)
            return self._fds[-1]

    def _reopen(self, stale: int) -> None:
        with self._lock, translated(self._uri, "read"):
            if self._closed or self._fds[-1] != stale:
                return
            fd, found = open_regular(self._posix, self._path, self._uri, self._flags)
            if found.st_size != self.size_bytes:
                self._posix.close(fd)  # no other thread may read from this other file
                raise StaleError("another file has this name now", uri=self._uri)
            self._fds.append(fd)


def _one_call(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return as many of ``views`` as one system call should read."""
    if len(views) == 1 and len(views[0]) > CALL_BYTES:
        return [views[0][:CALL_BYTES]]
    return views[:_VIEWS]


# -- lists of buffers that one call fills one after the other -----------------------------------

_COPY_WITH_LOCK_BYTES = 256 << 10  # releasing the interpreter's lock takes longer than such a copy


def drop_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return ``views`` without their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]] if count else list(views[index:])
        count -= len(view)
    return []


def take_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the first ``count`` bytes of ``views``."""
    found = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= len(view)
    return found


def scatter(data: memoryview, views: Sequence[memoryview]) -> list[memoryview]:
    """Copy ``data`` into ``views``, one after the other. Returns what is left of them."""
    at = 0
    for view in views:
        if at == len(data):
            break
        size = min(len(view), len(data) - at)
        if size <= _COPY_WITH_LOCK_BYTES:
            view[:size] = data[at : at + size]
        else:
            _copy(view[:size], data[at : at + size])
        at += size
    return drop_bytes(views, at)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the interpreter's lock, so that several threads copy at once."""
    byte = ctypes.c_char
    ctypes.memmove(
        ctypes.addressof(byte.from_buffer(target)),
        ctypes.addressof(byte.from_buffer(source)),
        len(source),
    )
