"""Reads under way at once: jobs on a few threads, their results on the thread that asked.

    with ReadPool(8, Helping.NO) as pool:
        pool.submit(job, done)      job() on a thread; done(its result) here, at a later call
        while pool.wait(): ...      handles one result after another

Where the asking thread helps it is one of the threads: it runs a job itself when enough of them wait.
With one thread nothing is threaded: ``submit`` runs the job and its ``done`` at once. The first error
is raised by the next call, once; no further job begins, and leaving the block waits for those that
are under way: no thread writes into anybody's memory afterwards.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.storage.base import DataReader, Reach
from ckptfs.storage.threads import Threads, uninterrupted

__all__ = ["Helping", "ReadPool", "Scratch"]

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Callable[[Any], None]]


class Helping(Enum):
    """Whether the thread that asks runs jobs, too."""

    YES = "yes"  # they wait for a disk or for nothing: it would only be idle
    NO = "no"  # they wait for a network: it has results to handle meanwhile


class ReadPool:
    """``count`` jobs at once, and as many again that wait. Used from one thread.

    busy: so many of them, the asking thread among them where it helps, until ``widen`` says more.
    """

    def __init__(
        self, count: int, helping: Helping = Helping.NO, *, busy: int | None = None
    ) -> None:
        self.count = max(1, count)
        self._helps = helping is Helping.YES
        self._busy = self.count if busy is None else busy
        self._can_start = True
        self._started = 0
        self._threads = Threads(self.count, "ckptfs-read")
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way = 0
        self._stopped = threading.Event()

    @staticmethod
    def of(reader: DataReader) -> ReadPool:
        """Those that pay for this reader and its like."""
        helping = Helping.YES if reader.reach is Reach.LOCAL else Helping.NO
        return ReadPool(reader.concurrency, helping, busy=reader.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stopped.set()
        for _ in range(self._started):
            self._waiting.put(None)
        # A second Ctrl-C must not leave either: a read that ends later would write into tensors that
        # another load has filled by then.
        uninterrupted(partial(self._threads.shutdown, wait=True, cancel_futures=True))

    @property
    def used(self) -> int:
        """Threads that have had a part in it, this one among them where it helps."""
        return max(1, self._started + self._helps)

    def widen(self, busy: int) -> None:
        """From now on so many jobs are worth a thread, if they are more than before."""
        if busy > self._busy:
            self._busy = min(busy, self.count)
            self._start_threads()

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run ``job`` soon. Blocks, running one or handling results, while enough of them wait."""
        if self.count == 1:
            done(job())
            return
        while self._under_way >= 2 * self.count:
            self._go_on()
        self._under_way += 1
        self._waiting.put((job, done))
        self._start_threads()
        self._handle_all()

    def wait(self) -> bool:
        """Handle one result; False when nothing is under way."""
        if not self._under_way:
            return False
        self._go_on()
        return True

    def _start_threads(self) -> None:
        # A helper finds its first job itself: a load of one request starts no thread.
        while self._can_start and self._started < min(self._busy, self._under_way) - self._helps:
            try:
                self._threads.submit(self._work)
            except RuntimeError:
                if not self._started and not self._helps:
                    raise
                self._can_start = False  # no more threads on this machine: those that run will do
            else:
                self._started += 1

    def _work(self) -> None:
        while not self._stopped.is_set():
            found = self._waiting.get()
            if found is None or self._stopped.is_set():
                return
            self._run(*found)
            del found  # what it holds is nobody's business while idle

    def _run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
            self._stopped.set()
            self._done.put(_raiser(error))
        else:
            self._done.put(lambda: done(result))

    def _go_on(self) -> None:
        """Handle a result; where none is there yet, help, or wait for one."""
        if self._helps and self._done.empty() and not self._stopped.is_set():
            try:
                found = self._waiting.get_nowait()
            except queue.Empty:
                pass
            else:
                if found is not None:
                    self._run(*found)
        self._handle_one()

    def _handle_all(self) -> None:
        while not self._done.empty():
            self._handle_one()

    def _handle_one(self) -> None:
        handle = self._done.get()
        self._under_way -= 1
        handle()


def _raiser(error: BaseException) -> Callable[[], None]:
    def handle() -> None:
        raise error

    return handle


class Scratch:
    """One reusable buffer per thread: fresh memory of every read would cost page faults."""

    def __init__(self) -> None:
        self._mine = threading.local()

    def of(self, size_bytes: int) -> memoryview:
        """The calling thread's buffer, cut to a size; its last contents are gone."""
        held: memoryview | None = getattr(self._mine, "held", None)
        if held is None or len(held) < size_bytes:
            held = memory_of(torch.empty(size_bytes, dtype=torch.uint8))
            self._mine.held = held
        return held[:size_bytes]
