"""HostBuffers: host memory that saves borrow; all of it together never exceeds a bound.

    lease = buffers.lease(size_bytes)      waits while other saves hold what is needed
    lease.memory                           a flat uint8 tensor
    lease.release()                        for the next save: its pages are there already
    buffers.reserve(size_bytes)            a thread touches memory that the next lease gets

    available_bytes()    what the host and this process's cgroup still have, None where unknown
    host_memory(n)       n bytes, aligned to huge pages, not inherited by forked children

Touching fresh pages takes ten times as long as copying into old ones. So memory is kept from save to save,
and freed by ``close`` or when a larger piece needs its place. Any thread may use a pool. The child of a fork
begins with an empty pool.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from ckptfs import _torch
from ckptfs.errors import StateError

__all__ = ["HostBuffers", "Lease"]

logger = logging.getLogger("ckptfs.dcp")

_HUGE_BYTES = 2 << 20
_TOUCH_BYTES = 2 * _HUGE_BYTES  # touched at once by a reservation; the longest wait of a lease
_CGROUP = "/sys/fs/cgroup"


def available_bytes() -> int | None:
    """Return the bytes available without swapping: the smaller number of host and container."""
    found = [n for n in (_host_bytes(), _cgroup_bytes()) if n is not None]
    return min(found, default=None)


def _host_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass  # not Linux: use what sysconf knows
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_bytes() -> int | None:
    """Return what the container's limit leaves, including droppable cache; None without a limit."""
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
    """Return a flat uint8 tensor over fresh memory. OSError (ENOMEM) if the system refuses.

    Pages are allocated on first touch, 2 MiB at a time where the kernel gives huge ones.
    """
    # Private: shared memory, which is mmap's default, has huge pages on few systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, size_bytes) + _HUGE_BYTES, flags=flags)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Without DONTFORK, a data loader that is forked during a save would force the kernel to copy
        # every page that the next save stages into.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -flat.data_ptr() % _HUGE_BYTES
    return flat[skip : skip + size_bytes]


_UNKNOWN_BYTES = 1 << 30
_SHARE = 2  # by default, half of what is available, divided among the ranks of the node


class _Slab:
    """One piece of memory; it exists as long as a list or a lease holds it.

    Attributes:
        memory: The memory.
        size_bytes: Its size.
        is_pinned: Whether it is page-locked.
        is_unused: Whether it was reserved and no lease has had it so far.
        is_touched: Whether it has all its pages.
        stop: Set to make the thread that touches its pages leave it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.memory = host_memory(size_bytes)
        self.size_bytes = size_bytes
        self.is_pinned = False
        self.is_unused = False
        self.is_touched = False
        self.stop = False

    def pin(self, device: int | None = None) -> None:
        """Page-lock it for an accelerator if possible: for ``device``, or this thread's device."""
        unpin = _torch.pin_host_memory(self.memory, device)
        if unpin is not None:
            self.is_pinned = True
            weakref.finalize(self, unpin)  # before the memory goes

    def touch(self) -> int:
        """Touch all pages, until ``stop``; return the bytes. No other thread may use the memory."""
        touched = 0
        while touched < self.size_bytes and not self.stop:
            piece = self.memory[touched : touched + _TOUCH_BYTES]
            piece[:: mmap.PAGESIZE].zero_()
            touched += len(piece)
        self.is_touched = touched == self.size_bytes
        return touched


@dataclass(slots=True)
class Lease:
    """A borrowed piece of memory.

    Attributes:
        memory: Flat, uint8; it may be longer than requested.
        size_bytes: Its size.
        is_pinned: Whether it is page-locked.
        is_touched: Whether all of it has pages; the borrower sets this once it has filled it.
        touch_later: Whether a thread touches the rest of it after the release.
    """

    memory: torch.Tensor
    size_bytes: int
    is_pinned: bool
    is_touched: bool
    _give_back: Callable[[Lease], None]
    touch_later: bool = False

    def release(self) -> None:
        """Give it back; it must not be read or written any more. Calling this twice does no harm."""
        give_back, self._give_back = self._give_back, _nothing
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        give_back(self)


class _TouchingThreads:
    """The threads of this process that touch memory; at the end of the interpreter they are joined.

    A thread that returned from torch after that would abort the process.
    """

    def __init__(self) -> None:
        self._slabs: dict[threading.Thread, _Slab] = {}
        self._lock = threading.Lock()
        self._ended = False
        # Registered at import, so that it runs after the functions that end saves: they start no thread later.
        atexit.register(self._leave)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def start(self, slab: _Slab, touch: Callable[[], None]) -> None:
        """Start a thread that calls ``touch``. RuntimeError if no thread can be started."""

        def run() -> None:
            try:
                touch()
            finally:
                self._slabs.pop(threading.current_thread(), None)

        thread = threading.Thread(target=run, name="ckptfs-reserve", daemon=True)
        with self._lock:
            if self._ended:
                raise RuntimeError("the interpreter ends")
            self._slabs[thread] = slab
            try:
                thread.start()
            except BaseException:
                del self._slabs[thread]
                raise

    def _leave(self) -> None:
        with self._lock:
            self._ended = True
            left = list(self._slabs.items())
        for thread, slab in left:
            slab.stop = True
            thread.join()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._slabs = {}


_TOUCHING = _TouchingThreads()


def _check(bound_bytes: int | None) -> None:
    if bound_bytes is not None and bound_bytes < 0:
        raise StateError(f"host_memory_bytes is {bound_bytes}; it cannot be negative")


def _nothing(_: Lease) -> None:
    """Do nothing: the lease is released already."""


class HostBuffers:
    """A pool of host memory for staging, shared by the saves of one process.

    ``bound_bytes`` is the most that it ever holds. None is half of what the host has available at the first
    lease, divided by the ranks of this node (``local_ranks``). With 0 nothing is ever staged.
    """

    def __init__(self, bound_bytes: int | None = None, *, local_ranks: int = 1) -> None:
        _check(bound_bytes)
        self._bound = bound_bytes
        self._local_ranks = max(1, local_ranks)
        self._idle: list[_Slab] = []
        self._leased: list[_Slab] = []
        self._touched: list[_Slab] = []  # by threads that reserve
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._pid = os.getpid()
        self._peak = 0

    @property
    def bound_bytes(self) -> int:
        """The most that this pool ever holds."""
        with self._lock():
            if self._bound is None:
                available = available_bytes()
                # If it is unknown what is available, this is small enough for any machine that trains.
                free = _UNKNOWN_BYTES if available is None else available + self._held()
                self._bound = free // _SHARE // self._local_ranks
            return self._bound

    def resize(self, bound_bytes: int | None) -> None:
        """Set another bound, as in the constructor; idle memory above it is freed."""
        _check(bound_bytes)
        with self._lock():
            self._bound = bound_bytes
            if not self._evict(0):
                self._stop_touching()
            self._changed.notify_all()

    @property
    def held_bytes(self) -> int:
        """The memory that it holds now, idle or leased."""
        with self._lock():
            return self._held()

    @property
    def peak_bytes(self) -> int:
        """The most that it has held at any time."""
        return self._peak

    def lease(self, size_bytes: int, *, pinned: bool = False) -> Lease:
        """Borrow at least ``size_bytes``, at most ``bound_bytes``; block while other saves hold it.

        Args:
            size_bytes: How much.
            pinned: Whether to page-lock it for an accelerator, if possible.

        Returns:
            The lease.

        Raises:
            StateError: ``size_bytes`` is above the bound.
            OSError: The system gives no memory (ENOMEM).
        """
        with self._lock():
            self._check_size(size_bytes)
            while (slab := self._take(size_bytes)) is None:
                # A piece that is being touched is taken as it is, or freed, once its thread has left it.
                if self._stop_touching() or not self._evict(size_bytes):
                    self._changed.wait()
                    self._check_size(size_bytes)  # after a resize the wait might never end
                    continue
                self._drop_unused()
                slab = _Slab(size_bytes)
                if pinned:
                    slab.pin()
                break
            slab.is_unused = False
            self._leased.append(slab)
            self._peak = max(self._peak, self._held())
        return Lease(
            slab.memory,
            slab.size_bytes,
            slab.is_pinned,
            slab.is_touched,
            partial(self._give_back, slab),
        )

    def reserve(self, size_bytes: int, *, pinned: bool = False) -> Future[int]:
        """Provide memory for a lease of ``size_bytes``, or of the bound, in advance. Never waits.

        A thread touches it. Nothing is done if there is a piece of that size already, or if saves hold too
        much of the bound. A lease that comes before all of it is touched takes it as it is. Nothing is
        raised: if memory or a thread cannot be had, that is logged.

        Returns:
            A future that is done when the thread is, with the number of bytes that it touched.
        """
        done: Future[int] = Future()
        done.set_running_or_notify_cancel()
        slab = None
        try:
            with self._lock():
                slab = self._to_reserve(size_bytes)
            if slab is not None:
                pin = partial(slab.pin, _torch.cuda_device()) if pinned else None
                _TOUCHING.start(slab, partial(self._touch, slab, pin, done))
                return done
        except (OSError, RuntimeError) as error:  # no memory, no thread
            logger.warning("no memory is reserved for asynchronous saves: %s", error)
            if slab is not None:
                self._put_back(slab)
        done.set_result(0)
        return done

    def close(self) -> None:
        """Free idle memory now, and leased memory when it is released."""
        with self._lock():
            self._closed = True
            self._stop_touching()
            self._idle.clear()

    def _to_reserve(self, size_bytes: int) -> _Slab | None:
        """Return a piece for a thread to touch; None if there is one already, or no room for it."""
        size_bytes = min(size_bytes, self.bound_bytes)
        if self._closed or size_bytes <= 0:
            return None
        if any(slab.size_bytes >= size_bytes for slab in self._slabs()):
            return None
        self._stop_touching()  # smaller pieces were for another state
        self._drop_unused()
        if not self._evict(size_bytes):
            return None
        slab = _Slab(size_bytes)
        slab.is_unused = True
        self._touched.append(slab)
        self._peak = max(self._peak, self._held())
        return slab

    def _touch(self, slab: _Slab, pin: Callable[[], None] | None, done: Future[int]) -> None:
        """Run the thread of a reservation."""
        touched = 0
        try:
            touched = slab.touch()
            if pin is not None and not self._closed:
                pin()
        except Exception as error:  # noqa: BLE001 - the next save touches it by itself
            logger.warning("memory for asynchronous saves is not reserved: %s", error)
        finally:
            self._put_back(slab)
            done.set_result(touched)

    def _put_back(self, slab: _Slab) -> None:
        """Make a piece that no thread touches any more available to waiting and later leases."""
        with self._lock():
            if slab in self._touched:
                self._touched.remove(slab)
                if not self._closed and self._held() + slab.size_bytes <= self.bound_bytes:
                    self._idle.append(slab)
            self._changed.notify_all()

    def _stop_touching(self) -> bool:
        """Tell threads to leave what they touch; return whether there are any."""
        for slab in self._touched:
            slab.stop = True
        return bool(self._touched)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.bound_bytes:
            raise StateError(
                f"{size_bytes} bytes were requested, but the bound is {self.bound_bytes}"
            )

    def _take(self, size_bytes: int) -> _Slab | None:
        """Return the smallest idle piece that is large enough; None if there is none."""
        fitting = [slab for slab in self._idle if slab.size_bytes >= size_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda slab: slab.size_bytes)
        self._idle.remove(best)
        return best

    def _evict(self, size_bytes: int) -> bool:
        """Drop idle pieces until ``size_bytes`` more fit under the bound; return whether they do."""
        while self._idle and self._held() + size_bytes > self.bound_bytes:
            self._idle.pop(0)
        return self._held() + size_bytes <= self.bound_bytes

    def _drop_unused(self) -> None:
        """Drop reserved pieces: they are too small for the state that came."""
        self._idle = [slab for slab in self._idle if not slab.is_unused]

    def _slabs(self) -> list[_Slab]:
        return [*self._idle, *self._leased, *self._touched]

    def _held(self) -> int:
        return sum(slab.size_bytes for slab in self._slabs())

    def _give_back(self, slab: _Slab, lease: Lease) -> None:
        slab.is_touched = lease.is_touched
        with self._lock():
            if slab not in self._leased:
                return
            self._leased.remove(slab)
            slab.stop = False
            self._touched.append(slab)
        if lease.touch_later and not slab.is_touched and not self._closed:
            with contextlib.suppress(RuntimeError):  # no thread: the next save touches it
                _TOUCHING.start(slab, partial(self._touch, slab, None, Future()))
                return
        self._put_back(slab)

    def _lock(self) -> threading.Condition:
        # The child of a fork has neither the memory (it is not inherited) nor the threads that hold it, and
        # one of them may have held the lock.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._idle, self._leased, self._touched = [], [], []
            self._changed = threading.Condition(threading.RLock())
        return self._changed
