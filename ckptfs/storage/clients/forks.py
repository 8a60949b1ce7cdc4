"""A lock that a fork does not inherit as locked.

thread A holds the lock, opening a client   |  thread B forks: the child has B only, and a plain
                                            |  lock stays locked there for ever
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

__all__ = ["ProcessLock"]


class ProcessLock:
    """``with lock:``, among the threads of one process. Each process has its own, made when first used.

    What it guards is the parent's too after a fork: whoever locks looks whose it is.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        pid = os.getpid()
        # setdefault: of two threads that come first at once, both get the same lock.
        (self._locks.get(pid) or self._locks.setdefault(pid, threading.Lock())).acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._locks[os.getpid()].release()
