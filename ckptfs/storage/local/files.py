"""Files on a mounted filesystem: read whole, written whole, streamed, resumed, or replaced.

    read_whole        open, read to the end                   LocalReader (reader.py) reads ranges
    write_whole       O_EXCL, write all, fsync, close
    LocalWriter       .partial-*, fsync, publish(name)        in order; WindowedFile (direct_io.py)
                                                              is written by several threads
    ResumableFile          .partial-kept-<name>, which the next process continues
    ReplacingWriter        a path that a person named, as ``open(path, "wb")`` would treat it

Large buffers go to the kernel as they are, without a copy; small ones are gathered to 1 MiB first.
Files are never mapped: over NFS a mapped file that is replaced reads as zeros or kills (SIGBUS).

One process at a time writes a ResumableFile: it holds a lock (flock), and the lock ends with its process, SIGKILL
included. On a filesystem without locks two processes may write it. They write the same bytes to the same
places, and neither truncates the file before the end, so neither makes a hole in what the other has written.

What a ReplacingWriter does depends on what exists at the path:

    nothing, a regular file    a partial file beside it is renamed over it when it is closed
    a link                     the same, at the link's target; the link stays
    a device, a FIFO           written in place (InPlaceWriter)
    a directory, a socket      refused before the first byte

A rename puts another file there. The new file gets the mode and, where that is permitted, the owner and
group of the old one before any byte is in it. Another hard link of the old file keeps the old bytes.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ckptfs.errors import AlreadyExistsError, IntegrityError, StorageError, UnsupportedError
from ckptfs.storage.base import DataWriter
from ckptfs.storage.local.posix import Posix, without_mark
from ckptfs.storage.os_errors import too_large, translated
from ckptfs.uri import Uri

__all__ = [
    "NEW",
    "FileState",
    "InPlaceWriter",
    "LocalWriter",
    "PartialFile",
    "ReplacingWriter",
    "ResumableFile",
    "WriteMethod",
    "WriteTarget",
    "find_target",
    "is_partial_name",
    "may_exist",
    "method_of",
    "open_regular",
    "partial_name",
    "read_whole",
    "resumable_name",
    "unlink_quietly",
    "write_all",
    "write_whole",
    "writer_is_gone",
]

log = logging.getLogger(__name__)

GATHER_BYTES = 1 << 20  # 1 MiB: smaller writes are collected up to this size
WRITE_BEHIND_BYTES = 8 << 20  # 8 MiB are handed to the disk while the next 8 MiB are copied
CALL_BYTES = 64 << 20  # 64 MiB per system call: Ctrl-C takes effect between two calls

READ = os.O_RDONLY | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_all(posix: Posix, fd: int, data: memoryview) -> None:
    """Write every byte of ``data``, also where a system call writes only some of them.

    Raises:
        OSError: As the kernel reports it; EIO if a write makes no progress.
    """
    sent = 0
    while sent < len(data):
        count = posix.write(fd, data[sent : sent + CALL_BYTES])
        if count <= 0:
            raise OSError(errno.EIO, "write made no progress")
        sent += count


def write_whole(posix: Posix, path: str, data: bytes, *, durable: bool = True) -> None:
    """Make a new file with these bytes.

    The bytes are fsynced (unless ``durable`` is false), the file's name is not. After an error, Ctrl-C
    included, the file may exist: the caller removes it.

    Raises:
        OSError: As the kernel reports it; FileExistsError if ``path`` exists.
    """
    fd = posix.open(path, NEW)
    try:
        write_all(posix, fd, memoryview(data))
        if durable:
            posix.fsync(fd)
    finally:
        posix.close(fd)


def open_regular(posix: Posix, path: str, uri: Uri, flags: int = 0) -> tuple[int, os.stat_result]:
    """Open a regular file for reading.

    A FIFO is opened without waiting for a writer, and nothing is read from a device: both are refused at
    once.

    Args:
        posix: The system calls.
        path: The file.
        uri: Names the file in errors.
        flags: Further flags of open(2), such as O_NOFOLLOW.

    Returns:
        A file descriptor that the caller closes, and the file's stat.

    Raises:
        StorageError: The path is not a regular file.
        OSError: As the kernel reports it.
    """
    fd = _open_without_waiting(posix, path, uri, READ | flags)
    try:
        found = posix.fstat(fd)
        _check_regular(found, uri)
        posix.set_blocking(fd)  # some FUSE servers see the flag at each read and return EAGAIN
    except BaseException:
        posix.close(fd)
        raise
    return fd, found


def _open_without_waiting(posix: Posix, path: str, uri: Uri, flags: int) -> int:
    """Open without waiting for the writer of a FIFO.

    The target of a link is examined before it is opened, because opening a device is enough to rewind a
    tape or to start a watchdog.
    """
    try:
        return posix.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    except BlockingIOError:
        # Another process (a file server on this machine) holds a lease on the file. A blocking open makes
        # the kernel end the lease.
        at_once = 0
    except OSError as error:
        if error.errno != errno.ELOOP or flags & os.O_NOFOLLOW:
            raise
        at_once = os.O_NONBLOCK
    _check_regular(posix.stat(path), uri)
    try:
        return posix.open(path, flags | at_once | os.O_NOCTTY)
    except BlockingIOError:
        return posix.open(path, flags | os.O_NOCTTY)  # a lease, behind the link


def _check_regular(found: os.stat_result, uri: Uri) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        kind = "a FIFO" if stat.S_ISFIFO(found.st_mode) else "a device"
        raise StorageError(
            f"read refused: {kind} stands there, and no regular file",
            errno=errno.EINVAL,
            uri=uri,
            hint="remove it; ckptfs reads regular files alone",
        )


def read_whole(
    posix: Posix, path: str, uri: Uri, *, limit_bytes: int | None = None, flags: int = 0
) -> bytes:
    """Read all bytes of a regular file.

    Args:
        posix: The system calls.
        path: The file.
        uri: Names the file in errors.
        limit_bytes: The largest size that is accepted; None for no limit.
        flags: Further flags of open(2), such as O_NOFOLLOW.

    Raises:
        StorageError: The path is not a regular file, or it is larger than ``limit_bytes``. A larger file
            is refused before it is read, unless it grows meanwhile.
        OSError: As the kernel reports it.
    """
    fd, found = open_regular(posix, path, uri, flags)
    try:
        parts, done, size = list[bytes](), 0, found.st_size
        while limit_bytes is None or size <= limit_bytes:
            part = posix.read(fd, GATHER_BYTES)
            if not part:
                return b"".join(parts)
            parts.append(part)
            done += len(part)
            size = max(size, done)  # the file may grow, and files of /proc have no size
        raise too_large(uri, size, limit_bytes)
    finally:
        posix.close(fd)


class FileState(Enum):
    """The state of a file that is being written."""

    OPEN = "open"
    BROKEN = (
        "broken"  # a step is in progress or has failed: an incomplete file must never be published
    )
    PUBLISHED = "published"
    ABORTED = "aborted"


class PartialFile:
    """A new file under a partial name beside the key, invisible until ``publish(partial)``.

    The common base of all writers. After a failed write the file can only be aborted: ``close`` refuses to
    publish a file with a hole.
    """

    def __init__(
        self, posix: Posix, uri: Uri, partial: str, publish: Callable[[str], None]
    ) -> None:
        self._posix = posix
        self._uri = uri
        self._partial = partial
        self._publish = publish
        self._pid = os.getpid()
        self._fd: int | None = None
        self._state = FileState.BROKEN
        try:
            self._fd = self._open_file()
        except BaseException:
            self.abort()
            raise
        self._state = FileState.OPEN

    def _open_file(self) -> int:
        return self._posix.open(self._partial, NEW)

    def close(self) -> None:
        """Make the bytes durable, then publish the file. See ``Unfinished.close``."""
        if self._state is FileState.PUBLISHED:
            return
        fd = self._open_fd()
        self._state = FileState.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
            self._finish(fd)
        self._state = FileState.PUBLISHED

    def _flush(self, fd: int) -> None:
        """Hand the remaining bytes to the kernel, before the fsync."""

    def _finish(self, fd: int) -> None:
        self._posix.fsync(fd)
        self._fd = None
        self._posix.close(fd)
        self._publish(self._partial)

    def abort(self) -> None:
        """Remove the file. See ``Unfinished.abort``."""
        if self._state in (FileState.PUBLISHED, FileState.ABORTED):
            return
        self._state = FileState.ABORTED
        fd, self._fd = self._fd, None
        if fd is not None:
            self._truncate_quietly(fd)
        self._close_quietly(fd)
        self._discard()

    def _truncate_quietly(self, fd: int) -> None:
        """Free the file's space now.

        An NFS client keeps a removed file, and all of its space, under a name .nfs... as long as it has
        unsent bytes of it, for example because the export is full.
        """
        try:
            self._posix.truncate(fd, 0)
        except OSError as error:
            log.debug("truncate while aborting %s: %s", self._uri, error)

    def _close_quietly(self, fd: int | None) -> None:
        if fd is None:
            return
        try:
            self._posix.close(fd)
        except OSError as error:
            # The bytes are discarded anyway: it does not matter that some were not written.
            log.debug("close while aborting %s: %s", self._uri, error)

    def _discard(self) -> None:
        unlink_quietly(self._posix, self._partial)

    def __del__(self) -> None:
        # Ctrl-C between open_write and its "with" block: nothing else could remove the partial file.
        # A forked child inherits the object but must not remove the file.
        if getattr(self, "_pid", None) == os.getpid():
            self.abort()

    def _open_fd(self) -> int:
        if self._state is not FileState.OPEN or self._fd is None:
            raise StorageError(
                f"the file cannot be written: it is {self._state.value}", uri=self._uri
            )
        return self._fd


class LocalWriter(PartialFile, DataWriter):
    """One new file, written in order."""

    def __init__(
        self, posix: Posix, uri: Uri, partial: str, publish: Callable[[str], None]
    ) -> None:
        self._gathered = bytearray()
        self._written_bytes = 0  # bytes the kernel has
        self._flushed_bytes = 0  # bytes of those that the kernel was told to write to the disk
        super().__init__(posix, uri, partial, publish)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        fd = self._open_fd()
        if len(self._gathered) + len(view) < GATHER_BYTES:
            self._gathered += view
            return len(view)
        self._state = FileState.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
            if len(view) < GATHER_BYTES:
                self._gathered += view
            else:
                self._send(fd, view)
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
        if self._state is not FileState.PUBLISHED:
            self._gathered.clear()
        super().abort()

    def _flush(self, fd: int) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(fd, memoryview(gathered))

    def _send(self, fd: int, view: memoryview) -> None:
        """Write all of ``view`` in pieces, so that the disk works while the next piece is copied.

        The fsync at the end then waits for the last piece and not for the whole file.
        """
        for start in range(0, len(view), WRITE_BEHIND_BYTES):
            piece = view[start : start + WRITE_BEHIND_BYTES]
            write_all(self._posix, fd, piece)
            self._written_bytes += len(piece)
            if self._written_bytes - self._flushed_bytes >= WRITE_BEHIND_BYTES:
                self._posix.write_behind(
                    fd, self._flushed_bytes, self._written_bytes - self._flushed_bytes
                )
                self._flushed_bytes = self._written_bytes


_PARTIAL_NAME = re.compile(r"\.partial-([0-9a-f]{8,64})")
# The writer's pid namespace, its pid, its start time, then random digits.
_PARTIAL_NAME_OF = re.compile(r"\.partial-([0-9a-f]{12})([0-9a-f]{8})([0-9a-f]{12})[0-9a-f]{8}")


def partial_name(path: str) -> str:
    """Return a new partial name in the directory of ``path``, so that the rename never crosses a mount.

    The name identifies the writing process. That distinguishes the file of a killed process from one that a
    living process is writing (``writer_is_gone``).
    """
    return f"{os.path.dirname(path)}/.partial-{_writer_id(os.getpid())}{secrets.token_hex(4)}"


def is_partial_name(name: str) -> bool:
    """Whether ``name`` is a name that ``partial_name`` makes."""
    return _PARTIAL_NAME.fullmatch(name) is not None


def writer_is_gone(name: str) -> bool:
    """Whether the process that was writing a file of this name ran on this node and has ended.

    False also where that is unknown: the process ran on another node, or before this node was restarted.
    """
    found = _PARTIAL_NAME_OF.fullmatch(name)
    if found is None or found[1] != _pid_namespace():
        return False
    pid, started = int(found[2], 16), int(found[3], 16)
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return True
    except (OSError, OverflowError):
        return False  # another user's process, or hidden from us
    return fields[0] in (b"Z", b"X") or int(fields[19]) != started


@functools.lru_cache(maxsize=1)
def _writer_id(pid: int) -> str:
    """Identify this process as part of a name.

    Args:
        pid: This process's id. It is the cache key, because a forked child has another.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            raw = file.read()
        # Compare with /proc: in a pid namespace of its own the process may have another number there.
        if (space := _pid_namespace()) and int(raw.split(maxsplit=1)[0]) == pid:
            return f"{space}{pid:08x}{int(raw.rpartition(b')')[2].split()[19]):012x}"
    except (OSError, ValueError, IndexError):
        pass  # no /proc: only its age shows that a file was left behind
    return secrets.token_hex(4)


def _pid_namespace() -> str:
    """Identify the scope in which a pid is unique: this boot of this machine, and the pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        space = os.fsencode(os.readlink("/proc/self/ns/pid"))
    except OSError:
        return ""
    return hashlib.sha256(boot + space).hexdigest()[:12]


def unlink_quietly(posix: Posix, path: str) -> None:
    """Remove a partial file of this process and only log an error.

    The error that the caller is handling is the one to report.
    """
    try:
        posix.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        # A read-only mount refuses the removal before it looks whether the file exists.
        if may_exist(posix, path):
            log.warning("left behind: %s (%s)", without_mark(path), error)


def may_exist(posix: Posix, path: str) -> bool:
    """Whether anything exists at ``path``; true where that cannot be determined."""
    try:
        posix.stat(path, follow=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


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
        super().__init__(posix, uri, partial, publish)
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
            hint="the same copy is on its way already: wait for it",
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
        raise UnsupportedError("no path leads to the file behind this link", uri=uri)
    return WriteTarget(target, method, found)


def _refused_target(mode: int, uri: Uri) -> StorageError:
    if stat.S_ISDIR(mode):
        return AlreadyExistsError("a directory stands there", errno=errno.EISDIR, uri=uri)
    return UnsupportedError("a socket stands there, or what no bytes are written to", uri=uri)


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
            raise AlreadyExistsError("something else stands there by now", uri=self._uri)
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
