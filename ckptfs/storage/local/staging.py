"""Buffers for direct reads and writes: aligned, touched, kept for the next window and the next file.

    with staging().buffer(size_bytes) as memory: ...        at least that long, on whole pages

Touching fresh memory takes as long as writing it to a fast disk; a few buffers are kept for the
process. They are of huge pages where there are any: a direct transfer pins every page of its window.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import threading

__all__ = ["Buffer", "Staging", "staging"]

log = logging.getLogger(__name__)

_KEPT_BUFFERS = 8
_HUGE_BYTES = 2 << 20
# Or buffers of nearly the same size would push each other out.
_LEAST_BYTES = (8 << 20) + (64 << 10)


class Staging:
    """Buffers that are kept, touched, from window to window and from file to file. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[memoryview] = []

    def buffer(self, size_bytes: int) -> Buffer:
        """One for the time of a with statement."""
        return Buffer(self, size_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of at least that size, on whole pages."""
        with self._lock:
            for index, kept in enumerate(self._kept):
                if len(kept) >= size_bytes:
                    return self._kept.pop(index)
        return _aligned(max(size_bytes, _LEAST_BYTES))

    def give(self, buffer: memoryview) -> None:
        """Nobody uses it any more."""
        with self._lock:
            if len(self._kept) < _KEPT_BUFFERS:
                self._kept.append(buffer)


class Buffer:
    """A borrowed buffer."""

    def __init__(self, staging: Staging, size_bytes: int) -> None:
        self._staging, self._size_bytes = staging, size_bytes

    def __enter__(self) -> memoryview:
        self._taken = self._staging.take(self._size_bytes)
        return self._taken

    def __exit__(self, *exc: object) -> None:
        self._staging.give(self._taken)


@functools.cache
def staging() -> Staging:
    """This process's. A fork's child has its own: another thread may hold the lock of this one."""
    return Staging()


os.register_at_fork(after_in_child=staging.cache_clear)


def _aligned(size_bytes: int) -> memoryview:
    """Fresh memory that begins at a huge page, of huge pages where there are any: a direct write of
    a window pins each of its pages.
    """
    memory = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no huge pages: %s", error)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)  # open(2): no fork beside direct I/O from private pages
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + size_bytes]
