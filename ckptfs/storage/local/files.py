"""Files on a mounted filesystem: read whole, written whole, and the base of every unfinished file.

    read_file         open, read to the end                   LocalReader (reader.py) reads ranges
    write_file        O_EXCL, write all, fsync, close
    PartialFile       .partial-*, fsync, publish(name)        the base of all writers (writers.py)

Files are never mapped: over NFS a mapped file that is replaced reads as zeros or kills (SIGBUS).
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
from enum import Enum

from ckptfs.errors import StorageError
from ckptfs.storage.local.posix import Posix, without_mark
from ckptfs.storage.os_errors import too_large, translated
from ckptfs.uri import Uri

__all__ = [
    "NEW",
    "FileState",
    "PartialFile",
    "is_partial_name",
    "may_exist",
    "open_regular",
    "partial_name",
    "read_file",
    "unlink_quietly",
    "write_all",
    "write_file",
    "writer_is_gone",
]

log = logging.getLogger("ckptfs.storage")

GATHER_BYTES = 1 << 20  # 1 MiB: smaller writes are collected up to this size
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


def write_file(posix: Posix, path: str, data: bytes, *, durable: bool = True) -> None:
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

    The target of a link, also of one among the directories of a marked path, is examined before it is
    opened, because opening a device is enough to rewind a tape or to start a watchdog.
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
        path = without_mark(path)  # links are followed from here on
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
            f"read refused: it is {kind}, not a regular file",
            errno=errno.EINVAL,
            uri=uri,
            hint="remove it; ckptfs reads regular files only",
        )


def read_file(
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
            is refused before it is read, unless it grows during the read.
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
    """A new file under a partial name next to the key, invisible until ``publish(partial)``.

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
