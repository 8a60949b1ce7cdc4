"""Waiting for the other ranks of a step, and what ends it: an answer, or an alarm that all are told.

result(future)     the answer; while it is out the monitor is asked, five times a second
an alarm           is offered as the step's verdict, unless the coordinator is already deciding
hangs(...)         this rank's own part waits for its storage: ends the step for all, and tells whoever
asked to hear of it
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptfs.errors import CkptfsError, ControlPlaneLostError
from ckptfs.topology.client import StoreClient, answer
from ckptfs.topology.heartbeat import Alarm, Monitor
from ckptfs.topology.stepkeys import StepKeys
from ckptfs.topology.verdict import Verdict, decode_verdict, encode_verdict, log_left_out
from ckptfs.topology.world import World

__all__ = ["LEAVE_S", "Ground", "Waits"]

T = TypeVar("T")

_SLICE_S = 0.2  # how often a waiting caller looks at the monitor
LEAVE_S = 10.0  # closing never takes longer than this over a store that does not answer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What all clones of one control share."""

    source: Any  # keeps the group's store alive: this process may be its host
    pulse: StoreClient  # the heartbeat's client; also raises alarms, and never waits
    monitor: Monitor
    worlds: tuple[World, ...]
    timeout_s: float
    pid: int
    closes_at_exit: bool


class Waits:
    """The waits of one control. Local; ``result`` on the caller's thread, ``hangs`` on one of its own."""

    def __init__(self, ground: Ground, rank: int) -> None:
        self._ground = ground
        self._rank = rank

    def result(self, future: Future[T], keys: StepKeys, label: str) -> T:
        """The result of an operation that waits for other ranks, as long as they are alive."""
        monitor = self._ground.monitor
        begun, ended = time.monotonic(), False
        while True:
            try:
                return future.result(_SLICE_S)
            except (RuntimeError, OSError) as error:
                if future.done():
                    return self._finished(future, keys)
                if not isinstance(error, TimeoutError):
                    raise
            if monitor.lost is not None:
                raise monitor.with_gone(monitor.lost)
            alarm = None if ended else monitor.alarm(keys, time.monotonic() - begun)
            if alarm is not None:
                ended = self._raise_alarm(alarm, keys, label)

    def _finished(self, future: Future[T], keys: StepKeys) -> T:
        """The result, or: this rank's client broke. Tell the others if the store still answers."""
        try:
            return answer(future, 0.0)
        except ControlPlaneLostError as error:
            shown = self._ground.monitor.with_gone(error)
            data = encode_verdict(Verdict(error=shown))
            try:
                self._ground.pulse.call_short(lambda store: keys.end(store, data), LEAVE_S)
            except CkptfsError:
                log.debug("nobody could be told: %s", error)  # the store is gone for all of us
            raise shown from error

    def _raise_alarm(self, alarm: Alarm, keys: StepKeys, label: str) -> bool:
        """Offer the alarm as the step's verdict; False where it has to be looked at again."""
        error = alarm.error(label, self._ground.worlds, self._ground.timeout_s)
        data = encode_verdict(Verdict(error=error, final=bool(alarm.dead)))

        ours: list[bool] = []

        def end(store: Any) -> bool:
            # Everybody has called and the coordinator is at work: its answer counts, not the fate
            # of a rank that has already said what it had to say.
            if not keys.claim(store, "alarm") and not alarm.names(0):
                return False
            ours.append(keys.end(store, data))
            return True

        try:
            ended = self._ground.pulse.call_short(end, self._ground.timeout_s)
        except ControlPlaneLostError as lost:
            raise self._ground.monitor.with_gone(lost) from lost
        if any(ours):
            # Not each time that it was made: while the coordinator decides, that is five times a second.
            log_left_out(error, self._ground.worlds)
        return ended

    def hangs(
        self,
        keys: StepKeys,
        label: str,
        hears: Callable[[CkptfsError], None] | None,
        why: str,
        goes_on: Callable[[], bool],
    ) -> None:
        """This rank's part of the step hangs in its storage: end it for all, and tell ``hears``.

        On a thread of its own: the one that hangs can be told nothing. What it is told is what the
        step ends with; a part that has returned in the meantime hears it there.
        """
        if not goes_on():
            return
        try:
            self._raise_alarm(Alarm(stuck={self._rank: why}), keys, label)
            with contextlib.closing(StoreClient(self._ground.source, "ckptfs-hangs")) as client:
                data = client.call(keys.read_verdict, self._ground.timeout_s)
            error = decode_verdict(data).error
        except CkptfsError as lost:
            error = lost
        if error is not None and hears is not None and goes_on():
            hears(error)
