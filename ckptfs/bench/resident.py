"""What of files is in this machine's page cache: how much (mincore(2), which reads nothing itself), and out
with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["evict", "resident_share"]

_WINDOW_BYTES = 1 << 30  # mapped at once


def evict(files: Iterable[Path]) -> None:
    """Take the files out of the page cache; needs no privileges.

    Args:
        files: The files.

    Raises:
        OSError: One cannot be opened or written.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that were not written yet would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_share(files: Iterable[Path]) -> float | None:
    """Measure the share of the files' pages that can be read without the disk.

    Args:
        files: The files. They have to be one's own: of others' the kernel says "all".

    Returns:
        0.0 to 1.0; None: not known.

    Raises:
        OSError: A file cannot be opened.
    """
    if sys.platform != "linux":
        return None
    resident = pages = 0
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            for start in range(0, size, _WINDOW_BYTES):
                found = _pages(file.fileno(), start, min(_WINDOW_BYTES, size - start))
                if found is None:
                    return None
                resident += sum(page & 1 for page in found)
                pages += len(found)
    return resident / pages if pages else 0.0


def _pages(fd: int, start: int, length: int) -> bytes | None:
    """A byte of each page; its lowest bit says whether it is there."""
    try:
        # A private mapping that is never written: ctypes takes the address of writable memory only.
        mapped = mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=start)
    except OSError:
        return None
    with mapped:
        found = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapped)
        library = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = library.mincore(address, ctypes.c_size_t(length), found)
        del first  # else the mapping could not be closed
        return None if failed else bytes(found)
