"""SaveWorker: one background thread that runs saves one after another.

    worker = SaveWorker("saves of run_1")        on every rank, with a control of its own
    future = worker.submit("saving step_100", job)
    worker.wait(timeout_s)    all that was submitted so far is done
    worker.close(timeout_s)

Jobs run in the order in which they were submitted, so the collective calls in them meet on all ranks. A
failure is logged at once, so that it is visible even if its future is never read.

When the interpreter ends normally (the script is done, an exception, a sys.exit), saves in progress get
``exit_s`` seconds (CKPTFS_EXIT_S, 60) and are then abandoned: the thread ends with the process, nothing of
them is committed unless it was sealed before, and the run's next owner removes what they wrote.
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
    """Return ``CKPTFS_EXIT_S``, or 60: the seconds for saves in progress at the interpreter's end."""
    text = os.environ.get("CKPTFS_EXIT_S", "60")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise StateError(f"CKPTFS_EXIT_S={text!r} is not a number of seconds")
    return value


@dataclass(slots=True)
class _SaveJob:
    what: str
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class SaveWorker:
    """A thread for saves. Any thread may call it; it belongs to the process that made it.

    Make it after the control that its jobs use: at exit, the object that was made last is closed first, and a
    control must outlive the jobs. A control that a job opens itself is passed to ``keeping``.
    """

    def __init__(self, name: str = "ckptfs-save") -> None:
        self._name = name
        self._exit_s = exit_s()
        self._jobs: deque[_SaveJob] = deque()
        self._running: _SaveJob | None = None
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._controls: list[Control] = []
        self._closed = False
        self._ending = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def submit(self, what: str, run: Callable[[], T]) -> Future[T]:
        """Run a job after the jobs that were submitted before it. Never waits.

        ``what`` is for messages. The future cannot be cancelled. StateError if the worker is closed.
        """
        job = _SaveJob(what, run)
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
        """How many jobs are running or waiting."""
        with self._news:
            return len(self._jobs) + (self._running is not None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no job runs or waits; return whether that happened within ``timeout_s``.

        None: no limit.
        """
        with self._news:
            return self._news.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no more jobs, and finish those that were submitted; return whether all are done.

        This waits for up to ``timeout_s`` (None: no limit). Jobs that have not begun by then never will; a
        running job continues. Calling this twice does no harm.
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
        """Yield a control that a job opened with ``closes_at_exit=False``; close it after that.

        If the job is abandoned at exit, the control is closed then, so that other ranks do not wait for this
        one.
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
            self._ended()  # after the future: when ``wait`` returns, every future is done
            del job  # an idle thread must not keep the last save alive

    def _next(self) -> _SaveJob | None:
        with self._news:
            self._news.wait_for(lambda: self._jobs or self._closed)
            self._running = self._jobs.popleft() if self._jobs else None
            return self._running

    def _ended(self) -> None:
        with self._news:
            self._running = None
            self._news.notify_all()

    def _drop(self, job: _SaveJob) -> None:
        error = StateError(f"{job.what}: abandoned before it began")
        logger.error("%s", error)
        job.future.set_exception(error)

    def _at_exit(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child that ends normally: the thread belongs to the parent
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
