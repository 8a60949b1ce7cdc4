"""HostBuffers: host memory that saves borrow, of which there is never more than a bound.

    lease = buffers.lease(size_bytes)      waits while other saves hold what is needed
    lease.memory                           a flat uint8 tensor
    lease.release()                        for the next save: its pages are there already

    available_bytes()    what the host and this process's cgroup still give, None where unknown
    host_memory(n)       n bytes, aligned to huge pages, not inherited by forked children

Touching fresh pages costs ten times what copying into old ones does, so memory is kept from save to
save, and given back by ``close`` or when a larger piece needs its place. Any thread; not for children
of a fork.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckptfs import _torch
from ckptfs.errors import StateError

__all__ = ["HostBuffers", "Lease"]

_HUGE_BYTES = 2 << 20
_CGROUP = "/sys/fs/cgroup"


def available_bytes() -> int | None:
    """Bytes that can be had without pushing anybody out: the host's and the container's, the less."""
    found = [n for n in (_host_bytes(), _cgroup_bytes()) if n is not None]
    return min(found, default=None)


def _host_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass  # not Linux: what sysconf knows has to do
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_bytes() -> int | None:
    """What the container's limit leaves; None without one. File cache that it could drop counts."""
    try:
        limit = _number(f"{_CGROUP}/memory.max")
        used = _number(f"{_CGROUP}/memory.current")
    except (OSError, ValueError):
        return None  # no cgroup v2, or "max": the host's own number decides
    cached = 0
    with contextlib.suppress(OSError, ValueError), open(f"{_CGROUP}/memory.stat") as lines:
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, limit - used + cached)


def _number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())


def host_memory(size_bytes: int) -> torch.Tensor:
    """A flat uint8 tensor over fresh memory. OSError (ENOMEM) where the system refuses.

    Pages come when they are touched first, 2 MiB at a time where the kernel gives huge ones.
    """
    # Private: shared memory, which is mmap's default, has huge pages on few systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, size_bytes) + _HUGE_BYTES, flags=flags)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Without DONTFORK a data loader forked during a save would make us copy every page that
        # the next save stages.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -flat.data_ptr() % _HUGE_BYTES
    return flat[skip : skip + size_bytes]


_UNKNOWN_BYTES = 1 << 30
_SHARE = 2  # by default, one half of what is available, shared by the ranks of the node


class _Slab:
    """One piece of memory, for as long as somebody holds it."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.memory = host_memory(size_bytes)
        self.size_bytes = size_bytes
        self.is_pinned = False
        if pinned:
            unpin = _torch.pin_host_memory(self.memory)
            if unpin is not None:
                self.is_pinned = True
                weakref.finalize(self, unpin)  # before the memory goes


@dataclass(slots=True)
class Lease:
    """A borrowed piece. memory: flat, uint8; it may be longer than was asked for."""

    memory: torch.Tensor
    size_bytes: int
    is_pinned: bool
    _give_back: Callable[[], None]

    def release(self) -> None:
        """Give it back; nobody may read or write it any more. Harmless twice."""
        give_back, self._give_back = self._give_back, _nothing
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        give_back()


def _check(bound_bytes: int | None) -> None:
    if bound_bytes is not None and bound_bytes < 0:
        raise StateError(f"host_memory_bytes is {bound_bytes}; it cannot be negative")


def _nothing() -> None:
    """Released already."""


class HostBuffers:
    """A pool of host memory for staging, shared by the saves of one process.

    bound_bytes: the most that it ever holds; None is half of what the host has available at the first
    lease, divided by the ranks of this node (local_ranks). 0: nothing is ever staged.
    """

    def __init__(self, bound_bytes: int | None = None, *, local_ranks: int = 1) -> None:
        _check(bound_bytes)
        self._bound = bound_bytes
        self._local_ranks = max(1, local_ranks)
        self._idle: list[_Slab] = []
        self._leased: list[_Slab] = []
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._pid = os.getpid()
        self._peak = 0

    @property
    def bound_bytes(self) -> int:
        """The most that this pool ever holds."""
        with self._changed:
            if self._bound is None:
                available = available_bytes()
                # Where nobody tells, this is little enough for any machine that trains.
                free = _UNKNOWN_BYTES if available is None else available + self._held()
                self._bound = free // _SHARE // self._local_ranks
            return self._bound

    def resize(self, bound_bytes: int | None) -> None:
        """Another bound from now on, as in the constructor; idle memory above it goes."""
        _check(bound_bytes)
        with self._changed:
            self._bound = bound_bytes
            self._make_room(0)
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """Memory that it holds now, idle or leased."""
        with self._changed:
            return self._held()

    @property
    def peak_bytes(self) -> int:
        """The most that it has held at any time."""
        return self._peak

    def lease(self, size_bytes: int, *, pinned: bool = False) -> Lease:
        """Borrow at least ``size_bytes``, at most ``bound_bytes``. Blocks while others hold it.

        pinned: page-locked for an accelerator, where that can be had. StateError for more than the
        bound; OSError (ENOMEM) where the system gives no memory.
        """
        with self._changed:
            self._check_size(size_bytes)
            self._forget_after_fork()
            while (slab := self._take(size_bytes)) is None:
                if self._make_room(size_bytes):
                    slab = _Slab(size_bytes, pinned=pinned)
                    break
                self._changed.wait()
                self._check_size(size_bytes)  # resized meanwhile: it would wait for ever
            self._leased.append(slab)
            self._peak = max(self._peak, self._held())
        return Lease(slab.memory, slab.size_bytes, slab.is_pinned, lambda: self._give_back(slab))

    def close(self) -> None:
        """Give idle memory back now, and leased memory when it is released."""
        with self._changed:
            self._closed = True
            self._idle.clear()

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.bound_bytes:
            raise StateError(
                f"{size_bytes} bytes were requested, but the bound is {self.bound_bytes}"
            )

    def _take(self, size_bytes: int) -> _Slab | None:
        """The smallest idle piece that is large enough."""
        fitting = [slab for slab in self._idle if slab.size_bytes >= size_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda slab: slab.size_bytes)
        self._idle.remove(best)
        return best

    def _make_room(self, size_bytes: int) -> bool:
        """Drop idle pieces until ``size_bytes`` more fit under the bound; whether they do."""
        while self._idle and self._held() + size_bytes > self.bound_bytes:
            self._idle.pop(0)
        return self._held() + size_bytes <= self.bound_bytes

    def _held(self) -> int:
        return sum(slab.size_bytes for slab in (*self._idle, *self._leased))

    def _give_back(self, slab: _Slab) -> None:
        with self._changed:
            if slab in self._leased:
                self._leased.remove(slab)
                if not self._closed and self._held() + slab.size_bytes <= self.bound_bytes:
                    self._idle.append(slab)
            self._changed.notify_all()

    def _forget_after_fork(self) -> None:
        # The child has neither the memory (it is not inherited) nor the saves that hold it.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._idle, self._leased = [], []
