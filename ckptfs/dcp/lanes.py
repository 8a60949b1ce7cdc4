"""Reads under way at once: jobs on a few threads, their results on the thread that asked.

    with Lanes(8) as lanes:
        lanes.submit(job, done)      job() on a thread; done(its result) here, at a later call
        while lanes.wait(): ...      handles one result after another

With one lane nothing is threaded: ``submit`` runs the job and its ``done`` at once. The first error
is raised by the next call, once; no further job begins, and leaving the block waits for those that
are under way: no thread writes into anybody's memory afterwards.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from ckptfs.dcp.resolve import memory_of
from ckptfs.storage.threads import Threads

__all__ = ["Lanes", "Scratch"]

T = TypeVar("T")


class Lanes:
    """``count`` jobs at once, and as many again that wait. Used from one thread."""

    def __init__(self, count: int) -> None:
        self.count = max(1, count)
        self._threads: Threads | None = None
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way = 0
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if self.count > 1:
            self._threads = Threads(self.count, "ckptfs-read")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stopped.set()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run ``job`` soon. Blocks, handling results, while as many wait as run."""
        if self._threads is None:
            done(job())
            return
        while self._under_way >= 2 * self.count:
            self._handle_one()
        self._under_way += 1
        self._threads.submit(self._run, job, done)

    def wait(self) -> bool:
        """Handle one result; False when nothing is under way."""
        if not self._under_way:
            return False
        self._handle_one()
        return True

    def _run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        if self._stopped.is_set():
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
            self._stopped.set()
            self._done.put(_raiser(error))
        else:
            self._done.put(lambda: done(result))

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
