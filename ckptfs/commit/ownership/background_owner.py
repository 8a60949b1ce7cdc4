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
import weakref
from collections.abc import Callable

from ckptfs.errors import AccessError, CkptfsError

__all__ = ["Background"]

logger = logging.getLogger("ckptfs.commit")

Chore = Callable[[], object]

_FIRST_REST_S = 60.0
_LONGEST_REST_S = 3600.0


class Background:
    """One daemon thread, started by the first chore. Any thread may submit.

    stopped: set when a close gave up waiting; chores look at it between two operations.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest_s = 0.0
        self._rest_until = 0.0
        self._chores: queue.SimpleQueue[tuple[str, Chore] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stopped = threading.Event()

    def submit(self, what: str, chore: Chore) -> None:
        """Do it after those submitted before; dropped, with a line in the log, once closed, and
        while the store refuses what chores do.
        """
        with self._lock:
            if self._closed:
                logger.info("%s is left to the next owner of the run", what)
                return
            if self._clock() < self._rest_until:
                logger.debug("%s waits: the last chore was refused", what)
                return
            self._chores.put((what, chore))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="ckptfs-background", daemon=True
                )
                self._thread.start()

    def end_with(self, owner: object) -> None:
        """Have the thread end when ``owner``, who submits, was collected without a close."""
        weakref.finalize(owner, self._chores.put, None).atexit = False

    def drain(self, timeout_s: float) -> bool:
        """Wait for what was submitted so far, for up to ``timeout_s``; whether all of it is done."""
        done = threading.Event()
        with self._lock:
            if self._closed or self._thread is None:
                return True
            self._chores.put(done)
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
            self.stopped.set()
            logger.warning(
                "a background task still works on the run after its release; the next owner "
                "completes it"
            )
        return not thread.is_alive()

    def _work(self) -> None:
        while (task := self._chores.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
                continue
            what, chore = task
            try:
                chore()
            except AccessError as error:
                self._rest(what, error)
            except (CkptfsError, OSError) as error:
                logger.warning("%s failed; it is tried again later: %s", what, error)
            except Exception:
                # A bug in a chore must not end the thread: the next one would never be done.
                logger.exception("%s failed; it is tried again later", what)
            else:
                self._rest_s = 0.0
            # Idle, this thread keeps nothing alive: not the run that a chore was for.
            del task, what, chore

    def _rest(self, what: str, error: AccessError) -> None:
        """Credentials or a lock forbid it: reported once, and tried less and less often."""
        level = logging.INFO if self._rest_s else logging.WARNING
        self._rest_s = min(max(_FIRST_REST_S, 2 * self._rest_s), _LONGEST_REST_S)
        self._rest_until = self._clock() + self._rest_s
        logger.log(level, "%s failed; it is tried again later: %s", what, error)
