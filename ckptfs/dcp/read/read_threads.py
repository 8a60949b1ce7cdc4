"""Run several reads at the same time: jobs on a few threads, results on the calling thread.

    with ReadPool(8, Helping.NO) as pool:
        pool.submit(job, done)      job() on a thread; done(its result) here, at a later call
        while pool.wait(): ...      handles one result after another

If the calling thread helps, it is one of the threads: it runs a job itself when enough of them wait. With
one thread nothing is threaded: ``submit`` runs the job and its ``done`` at once. The next call raises the
first error, once. After an error no further job begins, and leaving the block waits for the jobs that are
running: after that no thread writes into the memory of a tensor.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptfs.storage.base import DataReader, Reach
from ckptfs.storage.threads import Threads, uninterrupted

__all__ = ["Helping", "ReadPool", "Scratch"]

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Callable[[Any], None]]


class Helping(Enum):
    """Whether the calling thread runs jobs too."""

    YES = "yes"  # jobs wait for a disk or for nothing: the calling thread would only be idle
    NO = "no"  # jobs wait for a network: the calling thread has results to handle in the meantime


class ReadPool:
    """Runs ``count`` jobs at once, and queues as many again. Used from one thread.

    ``busy`` is how many threads are started, the calling thread included if it helps, until ``widen``
    raises it.
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
        """Return a pool of the size that pays for this reader and similar ones."""
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
        """How many threads have taken part, the calling thread included if it helps."""
        return max(1, self._started + self._helps)

    def widen(self, busy: int) -> None:
        """Allow ``busy`` threads from now on, if that is more than before."""
        if busy > self._busy:
            self._busy = min(busy, self.count)
            self._start_threads()

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run ``job`` soon. While enough jobs wait, this blocks, runs one, or handles results."""
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
        """Handle one result; return False if no job is left."""
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
                self._can_start = False  # no more threads on this machine: the running ones suffice
            else:
                self._started += 1

    def _work(self) -> None:
        while not self._stopped.is_set():
            found = self._waiting.get()
            if found is None or self._stopped.is_set():
                return
            self._run(*found)
            del found  # an idle thread must not keep its last job's memory alive

    def _run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
            self._stopped.set()
            self._done.put(_raiser(error))
        else:
            self._done.put(lambda: done(result))

    def _go_on(self) -> None:
        """Handle one result; if there is none yet, help, or wait for one."""
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
    """One reusable buffer per thread, because fresh memory for every read would cost page faults."""

    def __init__(self) -> None:
        self._local = threading.local()

    def of(self, size_bytes: int) -> memoryview:
        """Return the calling thread's buffer, cut to a size; its last contents are lost."""
        held: memoryview | None = getattr(self._local, "held", None)
        if held is None or len(held) < size_bytes:
            # Here: who reads no tensor needs no buffer, and does without the import.
            import torch

            from ckptfs.dcp.write.host_memory import memory_of

            held = memory_of(torch.empty(size_bytes, dtype=torch.uint8))
            self._local.held = held
        return held[:size_bytes]
