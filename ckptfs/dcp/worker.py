"""SaveWorker: one background thread that saves, one save after the other.

    worker = SaveWorker("saves of run_1")        on every rank, with a control of its own
    future = worker.submit("saving step_100", job)
    worker.wait(timeout_s)    all that was submitted so far is done
    worker.close(timeout_s)

Jobs run in the order in which they were submitted, so the collective calls in them meet on all ranks.
A failure is logged where it happens, at once: a future that nobody asks keeps no secret.

At the end of the interpreter, by whatever way it ends normally (the script is done, an exception, a
sys.exit), saves under way get ``exit_s`` seconds (CKPTFS_EXIT_S, 60) and are abandoned then: the
thread ends with the process, nothing of them is committed, and the run's next owner removes what
they wrote.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfs.control.control import Control
from ckptfs.errors import StateError

__all__ = ["SaveWorker", "exit_s"]

logger = logging.getLogger("ckptfs.dcp")

T = TypeVar("T")


def exit_s() -> float:
    """``CKPTFS_EXIT_S``, else 60 s: what saves under way get when the interpreter ends."""
    text = os.environ.get("CKPTFS_EXIT_S", "60")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise StateError(f"CKPTFS_EXIT_S={text!r} is not a number of seconds")
    return value


@dataclass(slots=True)
class _Job:
    what: str
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class SaveWorker:
    """A thread for saves. Any thread may call; it belongs to the process that made it.

    Make it after the control that its jobs use: at exit the last that was made ends first, and a
    control must outlive the jobs. One that a job opens itself goes through ``keeping``.
    """

    def __init__(self, name: str = "ckptfs-save") -> None:
        self._name = name
        self._exit_s = exit_s()
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._controls: list[Control] = []
        self._closed = False
        self._ending = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def submit(self, what: str, run: Callable[[], T]) -> Future[T]:
        """Run it after what was submitted before. StateError once closed. Never waits.

        what: for messages. The future cannot be cancelled.
        """
        job = _Job(what, run)
        job.future.set_running_or_notify_cancel()
        with self._news:
            if self._closed or self._pid != os.getpid():
                raise StateError(f"{what}: no more saves, this is closed or a child of a fork")
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._news.notify_all()
        return job.future

    @property
    def unfinished(self) -> int:
        """Jobs that run or wait."""
        with self._news:
            return len(self._jobs) + (self._running is not None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs or waits; whether that came within ``timeout_s`` (None: for ever)."""
        with self._news:
            return self._news.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more, finish what was submitted, for up to ``timeout_s`` (None: for ever); whether
        all is done. What has not begun by then never will; what runs goes on. Harmless twice.
        """
        with self._news:
            self._closed = True
            self._news.notify_all()
            if threading.current_thread() is self._thread:
                return not self._jobs
            done = self._news.wait_for(self._is_idle, timeout_s)
            dropped = list(self._jobs)
            self._jobs.clear()
        for job in dropped:
            self._drop(job)
        if not self._ending:
            atexit.unregister(self._at_exit)
        return done

    @contextlib.contextmanager
    def keeping(self, control: Control) -> Iterator[Control]:
        """For a control that a job opens, with ``closes_at_exit=False``: closed after the block, or at
        exit once the job was abandoned, so that other ranks do not wait for this one.
        """
        self._controls.append(control)
        try:
            with control:
                yield control
        finally:
            self._controls.remove(control)

    def _is_idle(self) -> bool:
        return not self._jobs and self._running is None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                value = job.run()
            except BaseException as error:
                logger.error("%s failed: %s", job.what, error, exc_info=error)  # noqa: TRY400 - once, whatever it is
                job.future.set_exception(error)
            else:
                job.future.set_result(value)
            self._ended()  # after the future: who waits for all finds every one settled
            del job  # idle, this thread holds nothing of the last save

    def _next(self) -> _Job | None:
        with self._news:
            self._news.wait_for(lambda: self._jobs or self._closed)
            self._running = self._jobs.popleft() if self._jobs else None
            return self._running

    def _ended(self) -> None:
        with self._news:
            self._running = None
            self._news.notify_all()

    def _drop(self, job: _Job) -> None:
        error = StateError(f"{job.what}: abandoned before it began")
        logger.error("%s", error)
        job.future.set_exception(error)

    def _at_exit(self) -> None:
        if self._pid != os.getpid():
            return  # a fork that ends as an interpreter: the thread is the parent's
        self._ending = True
        if self._is_idle():
            return
        logger.info("the interpreter ends while %d saves are in progress", self.unfinished)
        if not self.close(self._exit_s):
            running = self._running
            logger.error(
                "%s: abandoned after %g s; unless it was sealed, nothing of it is committed, "
                "and the next owner of the run removes it",
                "a save" if running is None else running.what,
                self._exit_s,
            )
            for control in list(self._controls):
                control.close()
