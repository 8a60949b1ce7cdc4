"""The background tasks ("chores") of a run: deletes and sweeps, one after another in a thread.

    background.submit("clearing step_100", chore)      returns at once
    background.drain(timeout_s)                        waits for all chores submitted so far
    background.close(timeout_s)                        finishes the submitted chores, then ends

So training does not wait for them. If a chore fails, this is logged and the thread continues. The run log shows
what is left to do, so the next chore of its kind, or the next owner of the run, does it again. Nothing that
decides whether a save is committed ever runs here.
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

_FIRST_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0


class Background:
    """One daemon thread, started by the first chore. Any thread may submit.

    stopped: Set when a close gave up waiting. Chores check it between two operations.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._chores: queue.SimpleQueue[tuple[str, Chore] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stopped = threading.Event()

    def submit(self, what: str, chore: Chore) -> None:
        """Run a chore after those that were submitted before.

        After a close, and while the store refuses what chores do, the chore is dropped with a line
        in the log.
        """
        with self._lock:
            if self._closed:
                logger.info("%s is left to the next owner of the run", what)
                return
            if self._clock() < self._paused_until:
                logger.debug("%s waits: the last chore was refused", what)
                return
            self._chores.put((what, chore))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="ckptfs-background", daemon=True
                )
                self._thread.start()

    def end_with(self, owner: object) -> None:
        """End the thread when ``owner``, which submits, is garbage-collected without a close."""
        weakref.finalize(owner, self._chores.put, None).atexit = False

    def drain(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for all chores submitted so far. Returns whether all ended."""
        done = threading.Event()
        with self._lock:
            if self._closed or self._thread is None:
                return True
            self._chores.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the submitted chores for up to ``timeout_s``. Returns whether all ended.

        Calling it twice is harmless.
        """
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
                self._pause(what, error)
            except (CkptfsError, OSError) as error:
                logger.warning("%s failed; it is tried again later: %s", what, error)
            except Exception:
                # A bug in a chore must not end the thread: the next one would never be done.
                logger.exception("%s failed; it is tried again later", what)
            else:
                self._pause_s = 0.0
            # An idle thread keeps nothing alive, in particular not the run that a chore was for.
            del task, what, chore

    def _pause(self, what: str, error: AccessError) -> None:
        """Pause after credentials or a lock forbade a chore.

        This is reported once. Each pause is longer than the one before.
        """
        level = logging.INFO if self._pause_s else logging.WARNING
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._paused_until = self._clock() + self._pause_s
        logger.log(level, "%s failed; it is tried again later: %s", what, error)
