"""A run's chores: deletes and sweeps that training must not wait for, one after another in a thread.

    background.submit("clearing step_100", chore)      returns at once
    background.drain(timeout_s)                        waits for what was submitted so far
    background.close(timeout_s)                        waits for what is under way, drops the rest

A chore that fails is logged and does not end the thread; what it left undone is in the run log, so
the next chore of its kind, or the next owner of the run, does it again. Nothing that decides over a
commit ever runs here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ckptfs.errors import CkptfsError

__all__ = ["Background"]

logger = logging.getLogger(__name__)

Chore = Callable[[], object]


class Background:
    """One daemon thread, started by the first chore. Any thread may submit."""

    def __init__(self) -> None:
        self._chores: queue.SimpleQueue[tuple[str, Chore] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, what: str, chore: Chore) -> None:
        """Do it after those submitted before; dropped, with a line in the log, once closed."""
        with self._lock:
            if self._closed:
                logger.info("%s is left to the next owner of the run", what)
                return
            self._chores.put((what, chore))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="ckptfs-background", daemon=True
                )
                self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait for what was submitted so far, for up to ``timeout_s``; whether all of it is done."""
        done = threading.Event()
        with self._lock:
            if self._closed or self._thread is None:
                return True
            self._chores.put(("waiting", done.set))
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish what was submitted, for up to ``timeout_s``; whether all was done. Harmless twice."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._chores.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("chores of the run go on after its release; the next owner ends them")
        return not thread.is_alive()

    def _work(self) -> None:
        while (task := self._chores.get()) is not None:
            what, chore = task
            started = time.monotonic()
            try:
                chore()
            except (CkptfsError, OSError) as error:
                logger.warning("%s failed, and is tried again later: %s", what, error)
            else:
                logger.debug("%s took %.1f s", what, time.monotonic() - started)
