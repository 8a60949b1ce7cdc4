"""New files: in windows by several threads, or in order by one; past the page cache where that pays.

    WindowedFile      views --copy--> aligned buffer --O_DIRECT--> the aligned part of the window   Engine.DIRECT
                                                     --buffered--> the rest of the last window
                      views ------------------------- pwritev --> the page cache, write-behind      Engine.BUFFERED
    LocalWriter       in order: a large file's whole pages --O_DIRECT--> the disk, from aligned memory without a copy
                                the rest, and small files --------------> the page cache
    ResumableFile     .partial-kept-<name>, which the next process continues
    ReplacingWriter   a path that a person named, as ``open(path, "wb")`` would treat it

A buffered write copies everything into fresh pages of the kernel, which then go to the disk. That takes ten
times the processor time of a direct write. A file is written directly if it is large enough and the
filesystem reports direct writes (statx), or is one that supported them before kernels reported it. Where
the filesystem refuses a direct write after all, at any point, the rest of the file goes through the page cache.

A WindowedFile's blocks are allocated first, so that a full disk is an error before anything is written, and
writers do not wait for each other. A LocalWriter hands large buffers to the kernel as they are, without a copy,
unless they are not aligned and go past the page cache; small ones are gathered first.

One process at a time writes a ResumableFile: it holds a lock (flock), and the lock ends with its process, SIGKILL
included. On a filesystem without locks two processes may write it. They write the same bytes to the same
places, and neither truncates the file before the end, so neither makes a hole in what the other has written.

What a ReplacingWriter does depends on what exists at the path:

    nothing, a regular file    a partial file next to it is renamed over it when it is closed
    a link                     the same, at the link's target; the link stays
    a device, a FIFO           written in place (InPlaceWriter)
    a directory, a socket      refused before the first byte

A rename puts another file there. The new file gets the mode and, where that is permitted, the owner and
group of the old one before any byte is in it. Another hard link of the old file keeps the old bytes.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from ckptfs.errors import AlreadyExistsError, IntegrityError, StorageError, UnsupportedError
from ckptfs.storage.io import DataWriter, FileEngine, ParallelWriter, buffer_pool, is_aligned
from ckptfs.storage.local.files import (
    CALL_BYTES,
    GATHER_BYTES,
    NEW,
    FileState,
    PartialFile,
    write_all,
)
from ckptfs.storage.local.posix import Posix, core_count, takes_direct
from ckptfs.storage.os_errors import translated
from ckptfs.uri import Uri

__all__ = [
    "DIRECT_FROM_BYTES",
    "InPlaceWriter",
    "LocalWriter",
    "ReplacingWriter",
    "ResumableFile",
    "WindowedFile",
    "WriteMethod",
    "WriteTarget",
    "find_target",
    "method_of",
    "resumable_name",
]

log = logging.getLogger("ckptfs.storage")

DIRECT_FROM_BYTES = 8 << 20  # smaller files are written faster through the page cache
_WINDOW_BYTES = 8 << 20
_WRITE_BEHIND_BYTES = 8 << 20  # 8 MiB are handed to the disk while the next 8 MiB are copied
_DIRECT_THREADS = 2  # one copies while the other's window is written; more do not help
_BUFFERED_THREADS = 4  # the kernel copies: one per core, at most so many
_VIEWS = 1024  # IOV_MAX
_MAX_INTERRUPTIONS = 100

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
        wanted: FileEngine | None,
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
            if wanted is FileEngine.DIRECT or (wanted is None and size_bytes >= direct_from_bytes):
                with translated(uri, "write"):
                    self._open_direct(try_unreported=wanted is FileEngine.DIRECT)
        except BaseException:
            self.abort()
            raise
        several = min(core_count(), _BUFFERED_THREADS)
        self.concurrency = _DIRECT_THREADS if self._is_direct else several

    @property
    def engine(self) -> FileEngine:
        return FileEngine.DIRECT if self._is_direct else FileEngine.BUFFERED

    @property
    def direct_bytes(self) -> int:
        return self._direct_bytes

    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        with self._lock:
            if self._broken_by is not None:
                # Otherwise the error of a later thread could be raised first, and hide that the disk is full.
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
        if not self._is_direct or self._direct_fd is None:
            return 0
        done, is_refused = _write_pages(self._posix, self._direct_fd, data, offset)
        if is_refused:
            log.debug("%s: no more direct writes", self._uri)
            self._is_direct = False
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
            sent_bytes = sent - (ends[complete - 1] if complete else 0)
            first += complete
            views[first] = views[first][sent_bytes:]
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


def _write_pages(posix: Posix, fd: int, data: memoryview, offset: int) -> tuple[int, bool]:
    """Write whole pages to a descriptor of O_DIRECT.

    Returns:
        How many bytes were written: a multiple of the page size, fewer than all where the filesystem refuses
        a direct write or does it in part. And whether it refused one.

    Raises:
        OSError: As the kernel reports it; EIO if a write makes no progress.
    """
    done, is_refused = 0, False
    while done < len(data):
        try:
            count = posix.pwritev(fd, [data[done : done + CALL_BYTES]], offset + done)
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise
            is_refused = True
            break
        if count <= 0:
            raise OSError(errno.EIO, "write made no progress")
        done += count
        if count % mmap.PAGESIZE:
            break  # the rest is not aligned: it is written through the page cache
    # The kernel could write back a page that is half direct and half cached with its old first half.
    return done - done % mmap.PAGESIZE, is_refused


# -- in order, by one thread ----------------------------------------------------------------


class LocalWriter(PartialFile, DataWriter):
    """One new file, written in order: a large one past the page cache, if its filesystem takes that.

    Args:
        posix: The system calls.
        uri: Names the file in errors.
        partial: Its path until it is published.
        publish: Renames the partial file to its key.
        size_bytes: About the size of the whole file; 0 if it is small or unknown.
    """

    def __init__(
        self,
        posix: Posix,
        uri: Uri,
        partial: str,
        publish: Callable[[str], None],
        *,
        size_bytes: int = 0,
    ) -> None:
        self._gathered = bytearray()
        self._written_bytes = 0  # bytes the kernel has
        self._flushed_bytes = 0  # how many of them the kernel was asked to write to the disk
        self._direct_fd: int | None = None
        self._staging: memoryview | None = None  # gathers pieces that are not whole pages
        self._staged_bytes = 0
        super().__init__(posix, uri, partial, publish)
        if size_bytes >= DIRECT_FROM_BYTES:
            try:
                with translated(uri, "write"):
                    self._open_direct()
            except BaseException:
                self.abort()
                raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        fd = self._open_fd()
        is_gathered = self._direct_fd is None and len(self._gathered) + len(view) < GATHER_BYTES
        if is_gathered:
            self._gathered += view
            return len(view)
        self._state = FileState.BROKEN
        with translated(self._uri, "write"):
            if self._direct_fd is not None:
                self._write_direct(fd, view)
            else:
                self._write_buffered(fd, view)
        self._state = FileState.OPEN
        return len(view)

    def flush(self) -> None:
        """Hand the collected bytes to the kernel. This makes nothing visible or durable."""
        fd = self._open_fd()
        self._state = FileState.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
        self._state = FileState.OPEN

    def abort(self) -> None:
        if self._state not in (FileState.PUBLISHED, FileState.ABORTED):
            self._gathered.clear()
            self._drop_staging()
            direct, self._direct_fd = self._direct_fd, None
            self._close_quietly(direct)
        super().abort()

    def _flush(self, fd: int) -> None:
        if self._direct_fd is not None:
            self._send_staged(fd)
        if self._direct_fd is not None:
            self._leave_direct(fd)
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(fd, memoryview(gathered))

    def _write_buffered(self, fd: int, view: memoryview) -> None:
        self._flush(fd)
        if len(view) < GATHER_BYTES:
            self._gathered += view
        else:
            self._send(fd, view)

    def _send(self, fd: int, view: memoryview) -> None:
        """Write all of ``view`` in pieces, so that the disk works while the next piece is copied.

        The fsync at the end then waits for the last piece and not for the whole file.
        """
        for start in range(0, len(view), _WRITE_BEHIND_BYTES):
            piece = view[start : start + _WRITE_BEHIND_BYTES]
            write_all(self._posix, fd, piece)
            self._written_bytes += len(piece)
            if self._written_bytes - self._flushed_bytes >= _WRITE_BEHIND_BYTES:
                self._posix.write_behind(
                    fd, self._flushed_bytes, self._written_bytes - self._flushed_bytes
                )
                self._flushed_bytes = self._written_bytes

    # -- past the page cache ---------------------------------------------------------------

    def _open_direct(self) -> None:
        fd = self._open_fd()
        alignment, fs_type = self._posix.direct_alignment(fd), self._posix.fs_type(fd)
        if not takes_direct(alignment, fs_type, try_unreported=False):
            return
        try:
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | _DIRECT
            direct = self._posix.open(self._partial, flags)
        except OSError as error:
            log.debug("%s is written through the page cache: %s", self._uri, error)
            return
        self._direct_fd = direct
        if not os.path.samestat(self._posix.fstat(direct), self._posix.fstat(fd)):
            # The name of a resumable file is known to others, who may have put another file there.
            self._leave_direct(fd)

    def _write_direct(self, fd: int, view: memoryview) -> None:
        """Write whole pages of aligned memory from where they are, and stage everything else."""
        begun = self._written_bytes % mmap.PAGESIZE
        if begun:
            # An earlier process left this page half full, and the page cache has the first half.
            size = min(mmap.PAGESIZE - begun, len(view))
            self._send(fd, view[:size])
            view = view[size:]
        while len(view) and self._direct_fd is not None:
            are_pages = self._staged_bytes % mmap.PAGESIZE == 0 and len(view) >= mmap.PAGESIZE
            if are_pages and is_aligned(view):
                self._send_staged(fd)
                pages = view[: len(view) - len(view) % mmap.PAGESIZE]
                view = view[self._send_pages(fd, pages) :]
            else:
                view = view[self._stage(view) :]
                if self._staged_bytes == _WINDOW_BYTES:
                    self._send_staged(fd)
        if len(view):
            self._write_buffered(fd, view)

    def _stage(self, view: memoryview) -> int:
        """Copy the start of ``view`` into the staging buffer, as much as fits. Returns its size in bytes."""
        if self._staging is None:
            self._staging = buffer_pool().acquire(_WINDOW_BYTES)
        size = min(len(view), _WINDOW_BYTES - self._staged_bytes)
        end = self._staged_bytes + size
        self._staging[self._staged_bytes : end] = view[:size]
        self._staged_bytes = end
        return size

    def _send_staged(self, fd: int) -> None:
        """Write what is staged; what is no whole page goes through the page cache, and all after it."""
        if self._staging is None:
            return
        staged, self._staged_bytes = self._staging[: self._staged_bytes], 0
        pages = staged[: len(staged) - len(staged) % mmap.PAGESIZE]
        done = self._send_pages(fd, pages)
        if done < len(staged):
            self._leave_direct(fd)
            self._send(fd, staged[done:])

    def _send_pages(self, fd: int, pages: memoryview) -> int:
        """Write whole pages directly. Returns how many bytes, fewer than all where that works no longer."""
        if self._direct_fd is None:
            return 0
        done, _ = _write_pages(self._posix, self._direct_fd, pages, self._written_bytes)
        self._written_bytes += done
        self._flushed_bytes = self._written_bytes
        if done < len(pages):
            self._leave_direct(fd)
        return done

    def _leave_direct(self, fd: int) -> None:
        """Write through the page cache from here on."""
        direct, self._direct_fd = self._direct_fd, None
        if direct is not None:
            self._posix.close(direct)
            self._posix.seek(fd, self._written_bytes)

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        self._staged_bytes = 0
        if staging is not None:
            buffer_pool().release(staging)

    def _finish(self, fd: int) -> None:
        self._drop_staging()
        super()._finish(fd)


# -- resumable files ------------------------------------------------------------------------

# The name is predictable, so O_NOFOLLOW: otherwise we would write through a link that somebody put there.
_RESUME = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_LOCKED = frozenset({errno.EAGAIN, errno.EACCES})
_TRIES = 4
# A name that is as long as the filesystem allows (255 bytes, on some 143) cannot get a prefix.
_LONG_NAME_BYTES = 100


def resumable_name(path: str) -> str:
    """Where a resumable file is until it is complete: the same path for each process, of long names a hash."""
    folder, name = os.path.split(path)
    raw = os.fsencode(name)
    if len(raw) > _LONG_NAME_BYTES:
        name = hashlib.sha256(raw).hexdigest()[:32]
    return f"{folder}/.partial-kept-{name}"


class ResumableFile(LocalWriter):
    """A partial file that outlives an abort and its process. See ``Storage.open_kept``.

    Args:
        posix: The system calls.
        uri: Names the file in errors.
        partial: Its path until it is published (``resumable_name``).
        publish: Renames the partial file to its key.
        size_bytes: The size of the complete file.
    """

    def __init__(
        self,
        posix: Posix,
        uri: Uri,
        partial: str,
        publish: Callable[[str], None],
        size_bytes: int,
    ) -> None:
        super().__init__(posix, uri, partial, publish, size_bytes=size_bytes)
        fd = self._open_fd()
        with translated(uri, "write"):
            self.there_bytes = min(posix.fstat(fd).st_size, size_bytes)

    def read_there(self, offset: int, buffer: memoryview) -> None:
        fd, done = self._open_fd(), 0
        while done < len(buffer):
            with translated(self._uri, "read"):
                count = self._posix.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                raise IntegrityError(f"what was left ends at byte {offset + done}", uri=self._uri)
            done += count

    def skip(self, size_bytes: int) -> None:
        fd = self._open_fd()
        with translated(self._uri, "write"):
            self._posix.seek(fd, size_bytes)
        self._written_bytes = self._flushed_bytes = size_bytes

    def _open_file(self) -> int:
        """Open and lock the file. Between open and lock another process may publish it: try again then."""
        for _ in range(_TRIES):
            fd = self._posix.open(self._partial, _RESUME)
            try:
                self._lock(fd)
                own = self._posix.fstat(fd)
                named = self._posix.stat(self._partial, follow=False)
                if stat.S_ISREG(own.st_mode) and own.st_ino == named.st_ino:
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                self._posix.close(fd)
                raise
            self._posix.close(fd)
        raise self._locked_elsewhere()

    def _lock(self, fd: int) -> None:
        try:
            self._posix.lock(fd)
        except OSError as error:
            if error.errno in _LOCKED:
                raise self._locked_elsewhere() from error
            if error.errno not in _NO_LOCKS:
                raise

    def _locked_elsewhere(self) -> AlreadyExistsError:
        return AlreadyExistsError(
            "another process is writing this file",
            uri=self._uri,
            hint="another process makes the same copy now: wait for it",
        )

    def _finish(self, fd: int) -> None:
        if self._posix.fstat(fd).st_size > self._written_bytes:
            self._posix.truncate(fd, self._written_bytes)
        super()._finish(fd)

    def _truncate_quietly(self, fd: int) -> None:
        """Keep the bytes: the next process continues with them."""

    def _discard(self) -> None:
        """Keep the file: the next process continues with it."""


# -- paths that a person named ---------------------------------------------------------------

_PERMISSIONS = 0o1777  # without set-user-id, which no write of another user preserves either
_PRIVATE = 0o600
# A FIFO and most devices cannot be synced.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS})


class WriteMethod(Enum):
    """How bytes are written to what exists at a path."""

    NEW = "new"
    REPLACE = "replace"
    IN_PLACE = "in place"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """Where to write, and how."""

    path: str  # with all links resolved
    method: WriteMethod
    like: os.stat_result | None = None  # the regular file that is replaced


def method_of(mode: int) -> WriteMethod:
    """How to write to something of this st_mode. Pure."""
    if stat.S_ISREG(mode):
        return WriteMethod.REPLACE
    special = stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode)
    return WriteMethod.IN_PLACE if special else WriteMethod.REFUSED


def find_target(posix: Posix, path: str, uri: Uri) -> WriteTarget:
    """Find out what exists at ``path`` and how to write to it.

    Raises:
        AlreadyExistsError: It is a directory.
        UnsupportedError: It is a socket, or a file that no path leads to any more.
    """
    with translated(uri, "write"):
        try:
            found = posix.stat(path)
        except FileNotFoundError:
            return WriteTarget(posix.resolve(path), WriteMethod.NEW)
        method = method_of(found.st_mode)
        if method is WriteMethod.IN_PLACE:
            return WriteTarget(path, method)
        if method is WriteMethod.REFUSED:
            raise _refused_target(found.st_mode, uri)
        target = posix.resolve(path)
        behind = posix.stat(target, follow=False)
    if (behind.st_dev, behind.st_ino) != (found.st_dev, found.st_ino):
        raise UnsupportedError("this link leads to a file that has no path", uri=uri)
    return WriteTarget(target, method, found)


def _refused_target(mode: int, uri: Uri) -> StorageError:
    if stat.S_ISDIR(mode):
        return AlreadyExistsError("a directory has this name", errno=errno.EISDIR, uri=uri)
    return UnsupportedError(
        "a socket, or something else that takes no bytes, has this name", uri=uri
    )


class ReplacingWriter(LocalWriter):
    """A new file that replaces a regular file, if there is one, and takes over its mode and owner."""

    def __init__(
        self,
        posix: Posix,
        uri: Uri,
        partial: str,
        publish: Callable[[str], None],
        target: WriteTarget,
    ) -> None:
        self._target = target
        super().__init__(posix, uri, partial, publish)

    def _open_file(self) -> int:
        like = self._target.like
        if like is None:
            return super()._open_file()
        # Private until it has its owner: a user who may not read the old file cannot open the new one.
        fd = self._fd = self._posix.open(self._partial, NEW, _PRIVATE)
        self._copy_permissions(fd, like)
        return fd

    def _copy_permissions(self, fd: int, like: os.stat_result) -> None:
        own = self._posix.fstat(fd)
        for owner, group in ((like.st_uid, -1), (-1, like.st_gid)):
            if (owner, group) in ((own.st_uid, -1), (-1, own.st_gid)):
                continue
            try:
                self._posix.fchown(fd, owner, group)
            except PermissionError:
                continue  # it keeps our owner, as any file that we make
        self._posix.fchmod(fd, stat.S_IMODE(like.st_mode) & _PERMISSIONS)

    def _finish(self, fd: int) -> None:
        # Another process may have put something else there since. A device is not replaced then either.
        try:
            found = self._posix.stat(self._target.path, follow=False)
        except FileNotFoundError:
            found = None
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise AlreadyExistsError("another file has this name now", uri=self._uri)
        super()._finish(fd)


class InPlaceWriter(DataWriter):
    """A device or a FIFO, written as ``open(path, "wb")`` does. Nothing that was written is taken back."""

    def __init__(self, posix: Posix, uri: Uri, path: str) -> None:
        self._posix, self._uri = posix, uri
        self._fd: int | None = None
        with translated(uri, "write"):
            self._fd = posix.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data`` at once."""
        if self._fd is None:
            raise StorageError("the file is closed", uri=self._uri)
        view = memoryview(data).cast("B")
        with translated(self._uri, "write"):
            write_all(self._posix, self._fd, view)
        return len(view)

    def close(self) -> None:
        """Sync what can be synced, and close."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with translated(self._uri, "write"):
            try:
                self._posix.fsync(fd)
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise
            finally:
                self._posix.close(fd)

    def abort(self) -> None:
        """Close: what was written cannot be taken back."""
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                self._posix.close(fd)
            except OSError:
                return

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.abort()
