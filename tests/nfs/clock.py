"""The server's clock, stopped: what happens until it runs again happens within one tick, however slow the machine is.

    with stopped(lab): ...        two changes of a directory leave the same time on it, as they do
                                  within 4 or 10 ms on a server that was not tampered with

An NFSv3 client notices a changed directory by that time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from tests.lab.nfs import NfsLab

__all__ = ["stopped"]


@contextlib.contextmanager
def stopped(lab: NfsLab) -> Iterator[None]:
    """The lab's server does not see the time pass; afterwards it is right again.

    Nearly: where a tick falls into the change itself, that change is in the next one.
    """
    pids = lab.server.call(_stop)
    try:
        yield
    finally:
        lab.server.call(_go_on, pids, time.time())


def _stop() -> list[int]:
    """Set the clock back: after a tick before anybody else runs, and whenever no other process runs."""
    now = time.time()
    return [_forked(_set_after_ticks, now), _forked(_set_when_idle, now)]


def _forked(function: Callable[[float], None], now: float) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function(now)
        finally:
            os._exit(1)
    return pid


def _set_after_ticks(now: float) -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while True:
        time.clock_settime(time.CLOCK_REALTIME, now)
        time.sleep(0.001)


def _set_when_idle(now: float) -> None:
    os.nice(19)
    while True:
        time.clock_settime(time.CLOCK_REALTIME, now)


def _go_on(pids: list[int], now: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    time.clock_settime(time.CLOCK_REALTIME, now)
