"""What this process's parts of collective steps wait for in their storage, and for how long.

    with hanging.working(keys, tell):     a part of a step, on any thread
        local()
    hanging.at(elapsed_s)                 at every beat, what is stuck: nothing as long as all moves, else
                                          by control {prefix: (step, "fsync of /nfs/run/... has not
                                          returned for 600 s")}

Only system calls of that part count, on its own thread or on one that was handed a piece of it: a chore
beside it may hang as long as it likes, and so may the step of another control.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptfs.storage.inflight import in_task, new_task, oldest_call
from ckptfs.topology.pulse import Patience
from ckptfs.topology.stepkeys import StepKeys

__all__ = ["Hanging", "Stuck"]

Tell = Callable[[str, Callable[[], bool]], None]
Stuck = dict[str, tuple[int, str]]  # by a control's prefix: the number of its step, and at what


@dataclass
class _Part:
    keys: StepKeys
    tell: Tell
    patience: Patience
    is_reported: bool = False


class Hanging:
    """The parts of steps that this process works at. ``at`` from one thread, ``working`` from any.

    timeout_s: the longest system call that is no fault. longest_tick_s: as of ``Patience``.
    """

    def __init__(self, timeout_s: float, longest_tick_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_tick_s = longest_tick_s
        self._parts: dict[int, _Part] = {}

    @contextlib.contextmanager
    def working(self, keys: StepKeys, tell: Tell) -> Iterator[None]:
        """This thread does its part of a step: what it waits for now, others wait for too.

        tell: called once, on a thread of its own, if that is one system call for timeout_s: at what
        it hangs, and who says whether the part is still at work.
        """
        with in_task(new_task()) as part:
            self._parts[part] = _Part(keys, tell, Patience(self._longest_tick_s))
            try:
                yield
            finally:
                self._parts.pop(part, None)

    def at(self, elapsed_s: float) -> Stuck:
        """So much time has passed since the last call; what the parts hang at."""
        stuck: Stuck = {}
        for number, part in list(self._parts.items()):
            waited = oldest_call(number)
            waited_s = part.patience.tick(elapsed_s, waited)
            if waited is None or waited_s < self._timeout_s:
                part.is_reported = False
                continue
            text = f"{waited.text} has not returned for {waited_s:.0f} s"
            # A name that is no text would not travel.
            text = text.encode("utf-8", "backslashreplace").decode()
            stuck[part.keys.prefix] = part.keys.number, text
            part.is_reported = part.is_reported or self._report(number, part, text)
        return stuck

    def _report(self, number: int, part: _Part, text: str) -> bool:
        thread = threading.Thread(
            target=part.tell,
            args=(text, lambda: number in self._parts),
            name="ckptfs-hangs",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            return False  # no threads left, or the interpreter is ending: again at the next beat
        return True
