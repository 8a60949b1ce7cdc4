"""A few threads for requests. As ``ThreadPoolExecutor``, but for the end of the process.

The standard pool takes no work once the main thread has returned, and a save that goes on in another
thread (``async_save`` at the end of a script) would fail half-way for that. It also joins its threads
when the interpreter ends: one that waits in a dead mount would keep it for ever. These are daemon threads
that nobody joins then: whoever waits for a result keeps the process alive, and nothing else does. They
start when there is work, and end after some idle seconds or at ``shutdown``. What they do belongs to
the part of a step that submitted it (``under_way``).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from ckptfs.storage.inflight import carried

__all__ = ["Threads", "uninterrupted"]

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_S = 10.0


def uninterrupted(wait: Callable[[], object]) -> None:
    """Return when ``wait`` has returned, however often Ctrl-C comes; the last one is raised then.

    For what must not be left early: threads that write into memory, or through a descriptor, which are
    somebody else's a moment later. ``wait`` is called again after each interruption; it must not be
    ``Thread.join``, which Python 3.11 believes over once it was interrupted.
    """
    interruption: BaseException | None = None
    while True:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - raised below
            interruption = error
        else:
            break
    if interruption is not None:
        raise interruption


class Threads(Executor):
    """At most ``size`` threads, work in order. Belongs to the process that made it."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._pid = os.getpid()
        self._workers: set[int] = set()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ``Executor.submit``. RuntimeError after shutdown, or where no thread can be started."""
        future: Future[T] = Future()
        work = carried(fn)
        with self._changed:
            if self._closed:
                raise RuntimeError("these threads were shut down")
            self._waiting.append((future, lambda: work(*args, **kwargs)))
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._running < self._size:
                self._start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the standard's
        """As ``Executor.shutdown``. Whoever waits for a cancelled future is told.

        One of these threads does not wait for itself, nor a child of a fork for those of its parent.
        """
        if os.getpid() != self._pid:
            self._closed = True  # without the lock: a thread that is not here may hold it
            return
        cancelled: list[Future[Any]] = []
        with self._changed:
            self._closed = True
            if cancel_futures:
                cancelled = [future for future, _ in self._waiting]
                self._waiting.clear()
            self._changed.notify_all()
        for future in cancelled:  # outside of the lock: callbacks take locks of their own
            future.cancel()
            future.set_running_or_notify_cancel()
        if wait and threading.get_ident() not in self._workers:
            with self._changed:
                self._changed.wait_for(lambda: not self._running)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._running += 1
        try:
            thread.start()
        except RuntimeError:
            self._running -= 1
            if not self._running:
                self._waiting.pop()
                raise
            # No more threads on this machine: those that run will come to it.

    def _run(self) -> None:
        mine = threading.get_ident()
        self._workers.add(mine)
        try:
            self._work()
        finally:
            self._workers.discard(mine)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                    future.set_exception(error)
            del task, future, call  # while idle, nothing that was lent is held

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
            self._idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._running -= 1
            self._changed.notify_all()
            return None
