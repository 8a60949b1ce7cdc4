"""Jobs of one call on a few threads: all their results, or one error that tells all of theirs.

The first error stops the others; none is lost. torch's own writer loses the error of every thread but
the first, and commits without the files of the lost ones (pytorch #191391).
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ckptfs.errors import CkptfsError
from ckptfs.storage.inflight import with_task
from ckptfs.storage.threads import uninterrupted

__all__ = ["Cancelled", "run_all"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Stopped(Exception):  # noqa: N818 - not an error: another thread has that
    """Another writer thread failed."""


@dataclass(slots=True)
class Cancelled:
    """Tells writer threads that one of them failed."""

    event: threading.Event = field(default_factory=threading.Event)

    def raise_if_set(self) -> None:
        """Leave this thread when another one failed: its files will never be committed."""
        if self.event.is_set():
            raise _Stopped


def run_all(jobs: Sequence[Callable[[], T]], cancelled: Cancelled, at_once: int) -> list[T]:
    """Run every job, so many at once, the caller's thread among them; their results in order.

    Raises one error for all; the thread's own _Stopped where somebody else set ``cancelled``. No job
    runs any more when this returns or raises.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)

    def work() -> None:
        while not cancelled.event.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = jobs[number]()
            except _Stopped:
                cancelled.event.set()  # the thread that failed has the error
            except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
                errors.append(error)
                cancelled.event.set()

    ends = [threading.Event() for _ in range(min(at_once, len(jobs)) - 1)]

    def work_until(end: threading.Event) -> None:
        try:
            work()
        finally:
            end.set()

    threads = [
        threading.Thread(
            target=with_task(partial(work_until, end)), name=f"ckptfs-write-{n}", daemon=True
        )
        for n, end in enumerate(ends)
    ]
    started = _start(threads)

    def wait() -> None:
        for end in ends[: len(started)]:
            end.wait()

    try:
        work()  # also what is left where threads did not start
        wait()
    except BaseException:
        # Ctrl-C while waiting: no thread may go on writing into a directory that is cleaned up, or
        # through a descriptor that is another file's by then.
        cancelled.event.set()
        uninterrupted(wait)
        raise
    if errors:
        raise _as_one(errors)
    if len(results) < len(jobs):
        cancelled.raise_if_set()
    return [results[number] for number in range(len(jobs))]


def _start(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Start them; those that started. None starts any more while the interpreter is ending."""
    started: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started


def _as_one(errors: Sequence[BaseException]) -> BaseException:
    """The first error; where several threads failed, its text counts the others, and the log has them."""
    first = next((e for e in errors if not isinstance(e, Exception)), errors[0])
    others = [e for e in errors if e is not first]
    if not others:
        return first
    told = "; ".join(f"{type(e).__name__}: {e}" for e in others)
    _log.error("%d writer threads failed; also: %s", len(errors), told)
    if isinstance(first, CkptfsError):
        whole = copy.copy(first)
        kinds = ", ".join(dict.fromkeys(type(e).__name__ for e in others))
        whole.message = f"{first.message} (and {len(others)} more writer threads failed: {kinds})"
        whole.__cause__ = first
        return whole
    return first
