"""All ranks within a deadline, or none of them: what a save on failure needs.

    rank 0   reach ----------------.
    rank 1   reach --------.       |            everybody came in time: reach returns everywhere
    rank 2      (its own exception, or stuck)   else: an error on every rank that calls, now or later

A collective call waits for a rank as long as that one lives, and a rank that trains on lives. Here a
caller gives up after ``timeout_s``, and giving up is final: two steps, of which the second asks every
rank whether it is still there. So nobody goes on while another has given up, whoever comes late.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait

from ckptfs.errors import DeadlineError
from ckptfs.topology.control import Control

__all__ = ["Rally"]

logger = logging.getLogger(__name__)


class Rally:
    """Meetings of all ranks, over a clone of the control. Made by all ranks in the same order."""

    def __init__(self, control: Control) -> None:
        self._control = control.clone()
        self._under_way: _Meeting | None = None

    def reach(self, label: str, timeout_s: float) -> None:
        """Return when every rank has called, on all of them; the thread that made it.

        DeadlineError: not all came within ``timeout_s`` of this rank's call; nobody will return.
        CollectiveError: another rank gave up first, ended or left. After a meeting that this rank
        gave up, the late ones have to come to that one first, in the time of the next.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._under_way is not None and not self._under_way.is_over(timeout_s):
            raise self._late(label, timeout_s)
        meeting = _Meeting(self._control, label)
        self._under_way = meeting
        threading.Thread(target=meeting.hold, name="ckptfs-rally", daemon=True).start()
        if not meeting.is_over(max(0.0, deadline_s - time.monotonic())) and meeting.give_up():
            raise self._late(label, timeout_s)
        meeting.outcome.result()  # once confirmed, only a death can keep the others from it

    def close(self) -> None:
        """Leave; harmless twice."""
        self._control.close()

    def _late(self, label: str, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"{label}: not every rank came within {timeout_s:g} s",
            rank=self._control.rank,
            node=self._control.world.node,
            hint="nothing was saved; the ranks that did not come have the reason in their logs",
        )


class _Meeting:
    """One meeting as one rank sees it. It has given up, or confirmed, never both."""

    def __init__(self, control: Control, label: str) -> None:
        self._control = control
        self._label = label
        self._lock = threading.Lock()
        self._gave_up = False
        self._confirmed = False
        self.outcome: Future[None] = Future()

    def is_over(self, timeout_s: float) -> bool:
        """Wait for the outcome, good or bad, for up to ``timeout_s``."""
        return bool(wait((self.outcome,), timeout_s).done)

    def give_up(self) -> bool:
        """False where it is too late for that: all have come."""
        with self._lock:
            self._gave_up = not self._confirmed and not self.outcome.done()
            return self._gave_up

    def hold(self) -> None:
        """Both steps; ends when all ranks have come, in time or not, or have left."""
        try:
            self._control.step(self._label, _here, _all)
            self._control.step(f"{self._label}: confirm", self._confirm, _all)
        except BaseException as error:  # noqa: BLE001 - raised by reach, on the thread that called
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)

    def _confirm(self) -> None:
        with self._lock:
            if self._gave_up:
                raise DeadlineError("did not wait any longer for the others")
            self._confirmed = True


def _here() -> None:
    """Present."""


def _all(_: list[None]) -> None:
    """Everybody is."""
