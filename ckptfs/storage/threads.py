"""A thread pool for requests: a ``ThreadPoolExecutor`` that behaves differently when the process ends.

The standard pool accepts no work once the main thread has returned. A save that continues in another
thread (``async_save`` at the end of a script) would fail half-way. The standard pool also joins its threads
when the interpreter ends, so a thread that waits in a dead mount would keep the process for ever. The threads
of this pool are daemon threads that nothing joins at the end: only a thread that waits for a result keeps
the process alive. They start when there is work, and end after some idle seconds or at ``shutdown``. Their
system calls belong to the task that submitted the work (``inflight``).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from ckptfs.storage.inflight import with_task

__all__ = ["Threads", "uninterrupted"]

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_S = 10.0


def uninterrupted(wait: Callable[[], object]) -> None:
    """Return only when ``wait`` has returned, however often Ctrl-C interrupts it.

    For waits that must not end early: threads may still be writing into memory, or through a descriptor, that
    is reused a moment later. The last interruption is raised at the end.

    Args:
        wait: Called again after each interruption. It must not be ``Thread.join``: after an interruption
            Python 3.11 takes the thread for ended.
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
    """At most ``size`` daemon threads that do work in order. A forked child cannot use its parent's pool."""

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
        """As ``Executor.submit``.

        Raises:
            RuntimeError: The pool was shut down, or no thread could be started.
        """
        future: Future[T] = Future()
        work = with_task(fn)
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
        """As ``Executor.shutdown``. A thread that waits for a cancelled future is woken up.

        A thread of the pool does not wait for itself, and a forked child not for its parent's threads.
        """
        if os.getpid() != self._pid:
            self._closed = (
                True  # without the lock: a thread of the parent may have held it at the fork
            )
            return
        cancelled: list[Future[Any]] = []
        with self._changed:
            self._closed = True
            if cancel_futures:
                cancelled = [future for future, _ in self._waiting]
                self._waiting.clear()
            self._changed.notify_all()
        for future in cancelled:  # outside the lock: callbacks take locks of their own
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
            # The machine allows no more threads: one of the running threads will do the work.

    def _run(self) -> None:
        ident = threading.get_ident()
        self._workers.add(ident)
        try:
            self._work()
        finally:
            self._workers.discard(ident)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                    future.set_exception(error)
            del task, future, call  # an idle thread must hold no reference to lent memory

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
