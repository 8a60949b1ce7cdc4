"""Storage that counts what it is asked: every call to the kernel, or every request to a bucket.

    calls = Calls()
    LocalStorage(uri, directory=..., posix=CountedPosix(calls))      the system calls of the real backend
    calls.taken()                                                    {"mkdir": 3, "create": 2, ...}

A call counts whether it succeeds or not: "exists" and "not found" are answers of the server too. What
is counted are operations on names and on what makes them durable; reads and writes of bytes through an
open file are not.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

from ckptfs.storage.local.posix import Identity, Posix

__all__ = ["Calls", "CountedPosix"]


class Calls:
    """How often each operation was asked for. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, op: str, times: int = 1) -> None:
        """Count operation ``op`` so many ``times`` more."""
        with self._lock:
            self._counts[op] += times

    def taken(self) -> dict[str, int]:
        """Return everything since the last call of this, by name."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(sorted(counts.items()))


class CountedPosix(Posix):
    """The real kernel, counted.

        create     open(2) that makes a file           open      open(2) of a file that is there
        open dir   open(2) of a directory              list      scandir
        sync       fsync of a file                     sync dir  fsync of a directory
        mkdir  rename  link  unlink  rmdir  stat  readlink  utime  statvfs      as they are called

    Args:
        calls: What counts.
        durable: False counts each fsync and leaves it out: a world that is simulated loses no power. A directory is
            then known by its inode number alone, so that counts do not depend on the ticks of a clock.
    """

    def __init__(self, calls: Calls, *, durable: bool = True) -> None:
        self.calls = calls
        self._durable = durable
        self._directories: set[int] = set()

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        is_dir = bool(flags & os.O_DIRECTORY)
        self.calls.add("open dir" if is_dir else "create" if flags & os.O_CREAT else "open")
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        if is_dir:
            self._directories.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._directories.discard(fd)
        super().close(fd)

    def fsync(self, fd: int) -> None:
        self.calls.add("sync dir" if fd in self._directories else "sync")
        if self._durable:
            super().fsync(fd)

    def identity(self, fd: int) -> Identity:
        found = super().identity(fd)
        return found if self._durable else found._replace(born_ns=1)

    def link(self, source: str, target: str) -> None:
        self.calls.add("link")
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self.calls.add("rename")
        super().rename(source, target)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.calls.add("mkdir")
        super().mkdir(path, mode)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        self.calls.add("unlink")
        super().unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        self.calls.add("rmdir")
        super().rmdir(path, dir_fd=dir_fd)

    def scandir(self, where: str | int) -> list[tuple[str, bool, bool]]:
        self.calls.add("list")
        return super().scandir(where)

    def stat(self, path: str, *, dir_fd: int | None = None, follow: bool = True) -> os.stat_result:
        self.calls.add("stat")
        return super().stat(path, dir_fd=dir_fd, follow=follow)

    def readlink(self, path: str) -> str | None:
        self.calls.add("readlink")
        return super().readlink(path)

    def utime(self, path: str) -> None:
        self.calls.add("utime")
        super().utime(path)

    def statvfs(self, path: str) -> Any:
        self.calls.add("statvfs")
        return super().statvfs(path)
