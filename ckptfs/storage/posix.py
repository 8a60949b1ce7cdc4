"""Every system call of the local backend, one thin method each.

    LocalStorage --> Posix          --> the kernel
    LocalStorage --> SimulatedDisk  --> a disk that forgets what was not synced (ckptfs.testing.disk)

A method here decides nothing: no retry, no default, no translation of errors. What it may do is
what its manual page says; OSError comes out as it is. Whoever replaces it sees the exact sequence
of calls on which durability rests.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

__all__ = ["Posix"]

Buffer = bytes | bytearray | memoryview


_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The C library's function; Python's os module does not have it."""
    if sys.platform != "linux":
        return None
    function: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int] | None", function)


_sync_file_range = _find_sync_file_range()


class Posix:
    """The real kernel. Stateless: one instance may serve all threads and be pickled."""

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        """open(2) or openat(2); the mode is narrowed by the umask and default ACLs as usual."""
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """close(2); a network filesystem may report a failed write here."""
        os.close(fd)

    def write(self, fd: int, data: Buffer) -> int:
        """write(2); may be short."""
        return os.write(fd, data)

    def seek(self, fd: int, offset: int) -> None:
        """lseek(2) from the start."""
        os.lseek(fd, offset, os.SEEK_SET)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """ftruncate(2)."""
        os.ftruncate(fd, size_bytes)

    def lock(self, fd: int) -> None:
        """flock(2), exclusive, without waiting; ends with the last descriptor, so with its process."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read(self, fd: int, size_bytes: int) -> bytes:
        """read(2); may be short, b"" at the end."""
        return os.read(fd, size_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """preadv(2) into the given buffers; may be short, 0 at the end."""
        return os.preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """fsync(2) of a file (its bytes) or of a directory (its names)."""
        os.fsync(fd)

    def write_behind(self, fd: int, offset: int, size_bytes: int) -> None:
        """sync_file_range(2), WRITE only: start moving these bytes to the disk, wait for nothing.

        A hint: it makes nothing durable, and where it does not exist nothing happens.
        """
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, size_bytes, _SYNC_FILE_RANGE_WRITE)

    def link(self, source: str, target: str) -> None:
        """link(2): one of many wins the target."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """rename(2)."""
        os.rename(source, target)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        """mkdir(2)."""
        os.mkdir(path, mode)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """unlink(2)."""
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        """rmdir(2)."""
        os.rmdir(path, dir_fd=dir_fd)

    def scandir(self, where: str | int) -> list[tuple[str, bool]]:
        """(name, is it a directory) of everything in a directory, unsorted; links are followed."""
        with os.scandir(where) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        """stat(2), or lstat(2) with follow=False."""
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow)

    def fstat(self, fd: int) -> os.stat_result:
        """fstat(2)."""
        return os.fstat(fd)

    def utime(self, path: str) -> None:
        """utime(2) with the server's own clock."""
        os.utime(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """statvfs(2)."""
        return os.statvfs(path)
