"""Files on a mounted filesystem: read whole, written whole, streamed, resumed, or replaced.

    read_whole        open, read to the end                   LocalReader (reader.py) reads ranges
    write_whole       O_EXCL, write all, fsync, close
    LocalWriter       .partial-*, fsync, publish(name)        in order; WindowedFile (direct_io.py)
                                                              is written by several threads
    KeptFile          .partial-kept-<name>, which the next process continues
    OverWriter        a path that a person named, as ``open(path, "wb")`` would treat it

Large buffers go to the kernel as they are, without a copy; small ones are gathered to 1 MiB first.
Files are never mapped: over NFS a mapped file that is replaced reads as zeros or kills (SIGBUS).

One process at a time writes a KeptFile: it holds a lock (flock), and the lock ends with its process, SIGKILL
included. On a filesystem without locks two processes may write it. They write the same bytes to the same
places, and neither truncates the file before the end, so neither makes a hole in what the other has written.

What an OverWriter does depends on what stands at the path:

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
    "KeptFile",
    "LocalWriter",
    "OverWriter",
    "PartialFile",
    "WriteMethod",
    "WriteTarget",
    "is_partial_name",
    "kept_name",
    "look_at_target",
    "method_of",
    "open_regular",
    "partial_name",
    "read_whole",
    "stands",
    "unlink_quietly",
    "write_all",
    "write_whole",
    "writer_is_gone",
]

log = logging.getLogger(__name__)

GATHER_BYTES = 1 << 20  # 1 MiB: smaller writes are gathered up to here
BEHIND_BYTES = 8 << 20  # 8 MiB: so much is handed to the disk while the next is copied
CALL_BYTES = 64 << 20  # 64 MiB a system call: Ctrl-C is heard in between

READ = os.O_RDONLY | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


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
    fd = posix.open(path, NEW)
    try:
        write_all(posix, fd, memoryview(data))
        if durable:
            posix.fsync(fd)
    finally:
        posix.close(fd)


def open_regular(posix: Posix, path: str, uri: Uri, flags: int = 0) -> tuple[int, os.stat_result]:
    """A regular file to read from, and what it is. StorageError of anything else, at once: a FIFO is
    opened without waiting for its writer, and of a device nothing is read. OSError as the kernel gave it.
    """
    fd = _opened(posix, path, uri, READ | flags)
    try:
        found = posix.fstat(fd)
        _check_regular(found, uri)
        posix.set_blocking(fd)  # some FUSE servers see the flag at each read, and answer EAGAIN
    except BaseException:
        posix.close(fd)
        raise
    return fd, found


def _opened(posix: Posix, path: str, uri: Uri, flags: int) -> int:
    """Without waiting for the writer of a FIFO. What a link leads to is looked at before: to open a device is
    enough to rewind a tape or to start a watchdog.
    """
    try:
        return posix.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    except BlockingIOError:
        # Somebody holds a lease on the file (a file server on this machine); it ends when asked for.
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
    """All bytes of a regular file; StorageError of anything else, and of one that has more than
    ``limit_bytes``, before they are read.
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
            size = max(size, done)  # it may grow, and of what it makes up /proc tells no size
        raise too_large(uri, size, limit_bytes)
    finally:
        posix.close(fd)


class FileState(Enum):
    """Of a file on its way."""

    OPEN = "open"
    BROKEN = "broken"  # a step is under way, or failed: what is missing must never be published
    PUBLISHED = "published"
    ABORTED = "aborted"


class PartialFile:
    """A new file that nobody sees: under a partial name beside the key, until ``publish(partial)``.

    What its writers have in common. After a failed write it can only be aborted: ``close`` refuses
    to publish a hole.
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
            self._fd = self._opened()
        except BaseException:
            self.abort()
            raise
        self._state = FileState.OPEN

    def _opened(self) -> int:
        return self._posix.open(self._partial, NEW)

    def close(self) -> None:
        """Durable, then published. See ``DataWriter.close``."""
        if self._state is FileState.PUBLISHED:
            return
        fd = self._open_fd()
        self._state = FileState.BROKEN
        with translated(self._uri, "write"):
            self._flush(fd)
            self._finish(fd)
        self._state = FileState.PUBLISHED

    def _flush(self, fd: int) -> None:
        """Before the fsync: hand over what is not the kernel's yet."""

    def _finish(self, fd: int) -> None:
        self._posix.fsync(fd)
        self._fd = None
        self._posix.close(fd)
        self._publish(self._partial)

    def abort(self) -> None:
        """Leave nothing behind. See ``DataWriter.abort``."""
        if self._state in (FileState.PUBLISHED, FileState.ABORTED):
            return
        self._state = FileState.ABORTED
        fd, self._fd = self._fd, None
        if fd is not None:
            self._empty(fd)
        self._let_go(fd)
        self._discard()

    def _empty(self, fd: int) -> None:
        """Give its space back now. What an NFS client could not send, of a full export for one, holds a
        removed file under the name .nfs... and with it all of its space.
        """
        try:
            self._posix.truncate(fd, 0)
        except OSError as error:
            log.debug("truncate while aborting %s: %s", self._uri, error)

    def _let_go(self, fd: int | None) -> None:
        if fd is None:
            return
        try:
            self._posix.close(fd)
        except OSError as error:
            # The bytes are thrown away: that some did not arrive is no news.
            log.debug("close while aborting %s: %s", self._uri, error)

    def _discard(self) -> None:
        unlink_quietly(self._posix, self._partial)

    def __del__(self) -> None:
        # Ctrl-C between open_write and its "with" block: nobody else could remove the partial file.
        # A forked child inherits the object, but not the file.
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
        self._sent = 0  # bytes the kernel has
        self._behind = 0  # of them, bytes the disk was told to take
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
        """Hand the gathered bytes to the kernel; nothing becomes visible or durable by it."""
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


_PARTIAL = re.compile(r"\.partial-([0-9a-f]{8,64})")
# Where the writer's pid means something, its pid, when it started; what follows is random.
_WRITER = re.compile(r"\.partial-([0-9a-f]{12})([0-9a-f]{8})([0-9a-f]{12})[0-9a-f]{8}")


def partial_name(path: str) -> str:
    """A name of our own in the directory of ``path``: rename never crosses a mount. It tells who writes, so
    that what a killed process left can be told from what a living one is writing.
    """
    return f"{os.path.dirname(path)}/.partial-{_writer(os.getpid())}{secrets.token_hex(4)}"


def is_partial_name(name: str) -> bool:
    """Whether a file of ours on its way is called so."""
    return _PARTIAL.fullmatch(name) is not None


def writer_is_gone(name: str) -> bool:
    """Whether the process that was writing a file of this name ran here and has ended. False also where
    nobody can tell: of another node, or before a restart of this one.
    """
    found = _WRITER.fullmatch(name)
    if found is None or found[1] != _pid_space():
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
def _writer(pid: int) -> str:
    """A process as part of a name. pid: this process's; a forked child has another."""
    try:
        with open("/proc/self/stat", "rb") as file:
            raw = file.read()
        # As /proc has it: in a pid namespace of its own the process may have another number there.
        if (space := _pid_space()) and int(raw.split(maxsplit=1)[0]) == pid:
            return f"{space}{pid:08x}{int(raw.rpartition(b')')[2].split()[19]):012x}"
    except (OSError, ValueError, IndexError):
        pass  # no /proc: its age alone tells of a file that is left
    return secrets.token_hex(4)


def _pid_space() -> str:
    """Within which a pid names one process: this boot of this machine, and its pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        space = os.fsencode(os.readlink("/proc/self/ns/pid"))
    except OSError:
        return ""
    return hashlib.sha256(boot + space).hexdigest()[:12]


def unlink_quietly(posix: Posix, path: str) -> None:
    """Remove our own partial file; the error that brought us here is the one to report."""
    try:
        posix.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        # A read-only mount refuses before it looks whether the name is there at all.
        if stands(posix, path):
            log.warning("left behind: %s (%s)", without_mark(path), error)


def stands(posix: Posix, path: str) -> bool:
    """Whether there is anything of that name; true where nobody can tell."""
    try:
        posix.stat(path, follow=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


# -- resumable files ------------------------------------------------------------------------

# Everybody knows the name: a link that somebody put there would be written through.
_GO_ON = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_TAKEN = frozenset({errno.EAGAIN, errno.EACCES})
_TRIES = 4
_LONG_BYTES = 100  # a name as long as the filesystem takes (255, some 143) leaves no room for more


def kept_name(path: str) -> str:
    """Where a file lies until it is whole. Every process finds it again."""
    folder, name = os.path.split(path)
    raw = os.fsencode(name)
    if len(raw) > _LONG_BYTES:
        name = hashlib.sha256(raw).hexdigest()[:32]
    return f"{folder}/.partial-kept-{name}"


class KeptFile(LocalWriter):
    """See ``Storage.open_kept``. size_bytes: of the whole file."""

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
        self._sent = self._behind = size_bytes

    def _opened(self) -> int:
        """The file of that name, ours alone: between open and lock another may have published it."""
        for _ in range(_TRIES):
            fd = self._posix.open(self._partial, _GO_ON)
            try:
                self._lock(fd)
                mine = self._posix.fstat(fd)
                named = self._posix.stat(self._partial, follow=False)
                if stat.S_ISREG(mine.st_mode) and mine.st_ino == named.st_ino:
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                self._posix.close(fd)
                raise
            self._posix.close(fd)
        raise self._taken()

    def _lock(self, fd: int) -> None:
        try:
            self._posix.lock(fd)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._taken() from error
            if error.errno not in _NO_LOCKS:
                raise

    def _taken(self) -> AlreadyExistsError:
        return AlreadyExistsError(
            "another process is writing this file",
            uri=self._uri,
            hint="the same copy is on its way already: wait for it",
        )

    def _finish(self, fd: int) -> None:
        if self._posix.fstat(fd).st_size > self._sent:
            self._posix.truncate(fd, self._sent)
        super()._finish(fd)

    def _empty(self, fd: int) -> None:
        """What is there stays."""

    def _discard(self) -> None:
        """What is there stays."""


# -- paths that a person named ---------------------------------------------------------------

_PERMISSIONS = 0o1777  # set-user-id does not outlive a write of others, and need not
_PRIVATE = 0o600
# A FIFO and most devices have nothing that could be made durable.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS})


class WriteMethod(Enum):
    """How bytes come to what stands at a path."""

    NEW = "new"
    REPLACE = "replace"
    IN_PLACE = "in place"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """Where to write. path: behind all links. like: of a regular file that is replaced."""

    path: str
    method: WriteMethod
    like: os.stat_result | None = None


def method_of(mode: int) -> WriteMethod:
    """For something of this st_mode. Pure."""
    if stat.S_ISREG(mode):
        return WriteMethod.REPLACE
    special = stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode)
    return WriteMethod.IN_PLACE if special else WriteMethod.REFUSED


def look_at_target(posix: Posix, path: str, uri: Uri) -> WriteTarget:
    """What stands at ``path``. AlreadyExistsError: a directory. UnsupportedError: a socket, or a file
    that no path leads to any more.
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
            raise _refused(found.st_mode, uri)
        target = posix.resolve(path)
        behind = posix.stat(target, follow=False)
    if (behind.st_dev, behind.st_ino) != (found.st_dev, found.st_ino):
        raise UnsupportedError("no path leads to the file behind this link", uri=uri)
    return WriteTarget(target, method, found)


def _refused(mode: int, uri: Uri) -> StorageError:
    if stat.S_ISDIR(mode):
        return AlreadyExistsError("a directory stands there", errno=errno.EISDIR, uri=uri)
    return UnsupportedError("a socket stands there, or what no bytes are written to", uri=uri)


class OverWriter(LocalWriter):
    """A new file that takes the place of nothing or of a regular file, with that one's mode and owner."""

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

    def _opened(self) -> int:
        like = self._target.like
        if like is None:
            return super()._opened()
        # Private until it has its owner: nobody whom the old one was closed to opens the new one.
        fd = self._fd = self._posix.open(self._partial, NEW, _PRIVATE)
        self._resemble(fd, like)
        return fd

    def _resemble(self, fd: int, like: os.stat_result) -> None:
        mine = self._posix.fstat(fd)
        for owner, group in ((like.st_uid, -1), (-1, like.st_gid)):
            if (owner, group) in ((mine.st_uid, -1), (-1, mine.st_gid)):
                continue
            try:
                self._posix.fchown(fd, owner, group)
            except PermissionError:
                continue  # it stays ours, as what we make is
        self._posix.fchmod(fd, stat.S_IMODE(like.st_mode) & _PERMISSIONS)

    def _finish(self, fd: int) -> None:
        # Somebody may have put something else there since: a device is not replaced then, either.
        try:
            found = self._posix.stat(self._target.path, follow=False)
        except FileNotFoundError:
            found = None
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise AlreadyExistsError("something else stands there by now", uri=self._uri)
        super()._finish(fd)


class InPlaceWriter(DataWriter):
    """A device or a FIFO, written as ``open(path, "wb")`` does; what was written stays written."""

    def __init__(self, posix: Posix, uri: Uri, path: str) -> None:
        self._posix, self._uri = posix, uri
        self._fd: int | None = None
        with translated(uri, "write"):
            self._fd = posix.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """All of it, now."""
        if self._fd is None:
            raise StorageError("the file is closed", uri=self._uri)
        view = memoryview(data).cast("B")
        with translated(self._uri, "write"):
            write_all(self._posix, self._fd, view)
        return len(view)

    def close(self) -> None:
        """Durable, where there is something to be durable."""
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
        """Close it: nothing that was written can be taken back."""
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                self._posix.close(fd)
            except OSError:
                return

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.abort()
