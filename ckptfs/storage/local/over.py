"""Writing to a path that a person named, whatever stands there: what a plain ``open(path, "wb")`` means.

    nothing, a regular file    whole when closed: a partial file beside it, renamed over it
    a link                     the same at what it leads to; the link stays
    a device, a FIFO           written in place
    a directory, a socket      refused before the first byte

A rename puts another file there: so the new one gets the mode and, where that is permitted, the owner
and group of the old one before any byte is in it. Another hard link of the old one keeps the old bytes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ckptfs.errors import AlreadyExistsError, StorageError, UnsupportedError
from ckptfs.storage.base import DataWriter
from ckptfs.storage.local.files import NEW, LocalWriter, write_all
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.os_errors import translated
from ckptfs.uri import Uri

__all__ = [
    "InPlaceWriter",
    "OverWriter",
    "WriteMethod",
    "WriteTarget",
    "look_at_target",
    "method_of",
]

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
