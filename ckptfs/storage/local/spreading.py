"""How many files a process writes its bytes into, on a mounted filesystem. Pure but for one question.

    tmpfs, ramfs    as many as there are cores, up to four, none smaller than 64 MiB for it
    others          one

A file lets one thread write at a time. On a disk and over a network that does not matter, since the
bytes wait for something else; in memory the copy that the thread makes is all that a write costs.
"""

from __future__ import annotations

import os
from typing import Final

from ckptfs.storage.local.posix import Posix

__all__ = ["core_count", "files_at_once"]

_IN_MEMORY: Final = frozenset({0x01021994, 0x858458F6})  # f_type of tmpfs and ramfs
_MOST_FILES: Final = 4
_LEAST_BYTES: Final = 64 << 20


def core_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def files_at_once(posix: Posix, folder: str, size_bytes: int) -> int:
    """How many files in a directory; 1 where nobody tells what it is on."""
    most = min(core_count(), _MOST_FILES, size_bytes // _LEAST_BYTES)
    return most if most > 1 and _fs_type(posix, folder) in _IN_MEMORY else 1


def _fs_type(posix: Posix, folder: str) -> int | None:
    try:
        fd = posix.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return posix.fs_type(fd)
    finally:
        posix.close(fd)
