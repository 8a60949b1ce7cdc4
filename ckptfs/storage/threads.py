"""A thread pool for requests: a ``ThreadPoolExecutor`` that behaves differently when the process ends.

The standard pool accepts no work once the main thread has returned. A save that continues in another
thread (``async_save`` at the end of a script) would fail half-way. The standard pool also joins its threads
when the interpreter ends, so a thread that waits in a dead mount would keep the process alive forever. The threads
of this pool are daemon threads that nothing joins at the end: only a thread that waits for a result keeps
the process alive. They start when there is work, and end after some idle seconds or at ``shutdown``. Their
system calls belong to the task that submitted the work (``inflight``).

A ``Pump`` writes one piece of a file on a thread of its own while its caller reads, digests or copies the next:

    read ahead --> compared --> Pump --> DataWriter

``ProcessLock`` is a lock that a fork does not inherit as locked:

    thread A holds the lock, opening a client   |  thread B forks: the child has B only, and a plain
                                                |  lock stays locked there permanently
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from ckptfs.storage.inflight import with_task
from ckptfs.storage.io import DataWriter

__all__ = ["ProcessLock", "Pump", "Threads", "uninterrupted"]

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


class ProcessLock:
    """A lock among the threads of one process, used as ``with lock:``.

    Each process has its own, made when it is first used. After a fork, the child has a copy of the
    guarded data that still belongs to the parent, so the code inside the lock checks which process
    made the data.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        pid = os.getpid()
        # setdefault: if two threads come first at the same time, both get the same lock.
        (self._locks.get(pid) or self._locks.setdefault(pid, threading.Lock())).acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._locks[os.getpid()].release()


_PUMP_BYTES = 4 << 20  # files with a piece of this get a thread; smaller ones are not worth it
_AHEAD = 1  # pieces that wait for the pump: one more staged tensor in memory, not two


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes for the writer."""

    data: bytearray | memoryview
    is_lent: bool  # the caller does not change them until the file is closed


class Pump:
    """Writes pieces in order, on a thread of its own from the first large piece.

    The caller makes the next piece while one is being written. Leaving the ``with`` block normally
    waits until all pieces are written. Leaving it by an exception writes nothing more, and waits
    for the write in progress: the writer may be aborted after that.
    """

    def __init__(self, writer: DataWriter) -> None:
        self._writer = writer
        self._pieces: queue.SimpleQueue[_Piece | Callable[[], None] | None] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(_AHEAD)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is None:
            self.finish()
        else:
            self.stop(exc)

    def write(self, data: bytearray | memoryview) -> None:
        """Write ``data``, now or soon.

        ``data`` must not change until two more pieces have been passed, or until ``finish``
        returns.

        Raises:
            BaseException: The error of an earlier piece.
        """
        self._put(_Piece(data, is_lent=False))

    def lend(self, data: bytearray | memoryview) -> None:
        """Write as ``write`` does; ``data`` must not change until the file is closed."""
        self._put(_Piece(data, is_lent=True))

    def _put(self, piece: _Piece) -> None:
        if self._thread is None and (len(piece.data) < _PUMP_BYTES or not self._start()):
            self._write(piece)
            return
        if self._error is not None:
            raise self._error
        self._free_slots.acquire()
        self._pieces.put(piece)

    def then(self, done: Callable[[], None]) -> None:
        """Call ``done`` when all earlier pieces are written. It is not called if writing fails."""
        if self._thread is None:
            done()
        else:
            self._pieces.put(done)

    def _start(self) -> bool:
        thread = threading.Thread(target=with_task(self._run), name="ckptfs-pump", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False  # no threads left, or the interpreter is ending: written without one
        self._thread = thread
        return True

    def _write(self, piece: _Piece) -> None:
        if piece.is_lent:
            self._writer.lend(piece.data)
        else:
            self._writer.write(piece.data)

    def finish(self) -> None:
        """Return when all pieces are written.

        Raises:
            BaseException: The error of a write.
        """
        if self._thread is not None:
            self._pieces.put(None)
            try:
                self._ended.wait()
            except BaseException as error:
                self.stop(error)
                raise
            self._thread = None
        if self._error is not None:
            raise self._error

    def stop(self, why: BaseException) -> None:
        """Write nothing more and return when nothing is being written."""
        self._error = self._error or why
        if self._thread is not None:
            self._pieces.put(None)
            uninterrupted(self._ended.wait)  # it must not write to an aborted writer
            self._thread = None

    def _run(self) -> None:
        try:
            self._pump()
        finally:
            self._ended.set()

    def _pump(self) -> None:
        # After an error it still takes pieces: otherwise put() would block forever.
        while (piece := self._pieces.get()) is not None:
            if isinstance(piece, _Piece):
                self._free_slots.release()
            if self._error is None:
                try:
                    if isinstance(piece, _Piece):
                        self._write(piece)
                    else:
                        piece()
                except BaseException as error:  # noqa: BLE001 - raised by put() or finish()
                    self._error = error
            del piece  # while waiting for the next, this one may be the last to hold a staged copy
