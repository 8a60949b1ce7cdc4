"""Pause the cyclic garbage collector while ckptfs makes many objects that all survive.

    with gc_paused():      for a plan, metadata, a pickle: no collection begins by itself inside

At 20,000 tensors collections take half the time of planning. Use it for our own computation only, never
around a wait for other ranks or a user's ``state_dict()``, which may take hours. The longest use is the
reading of this rank's files, where small tensors make as many objects as planning does.

The collector belongs to the process, and ``_COLLECTOR`` is the one count of who has paused it. It is a
global, although the house rules allow none, because two counts would undo each other. Other code turns the
collector off and on too (``gc.disable``, ``timeit``, training loops), perhaps in another thread during a
pause. That is a separate switch, so it is not touched here: a pause sets the first threshold to 0, and the
last pause to end restores it. If other code sets a threshold during a pause, that threshold stays.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


class _Collector:
    """Who has paused the collector, and the first threshold before that.

    Whichever line Ctrl-C interrupts, the collector comes back, at the latest after the next pause.
    """

    def __init__(self) -> None:
        # Reentrant: a signal's handler may save while this thread is in here.
        self._lock = threading.RLock()
        self._holders: set[object] = set()
        self._threshold = 0
        self._is_ours = False  # that the threshold is 0

    def hold_off(self, holder: object) -> None:
        with self._lock:
            self._holders.add(holder)
            threshold = gc.get_threshold()[0]
            if threshold:
                self._threshold, self._is_ours = threshold, True
                gc.set_threshold(0)

    def let_go(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._come_back()

    def start_anew(self) -> None:
        """Reset in a forked child, which has neither the threads that paused nor the lock's owner."""
        self._lock, self._holders = threading.RLock(), set()
        self._come_back()

    def _come_back(self) -> None:
        if self._is_ours and gc.get_threshold()[0] == 0:
            gc.set_threshold(self._threshold)
        self._is_ours = False


_COLLECTOR = _Collector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COLLECTOR.start_anew)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let no collection begin by itself inside the block. Any thread; may be nested to any depth.

    An exception in the block ends the pause too. ``gc.collect()``, ``gc.enable()`` and ``gc.disable()`` do
    what they always do.
    """
    holder = object()
    try:
        _COLLECTOR.hold_off(holder)
        yield
    finally:
        _COLLECTOR.let_go(holder)
