"""How a rank leaves a control: nobody waits for it afterwards, and the store is left clean.

    coordinator    lingers until all have read the last verdict: its process may host the store;
                   deletes what was for a dead rank alone
    every rank     answers the step that somebody may still call, "I have left"
    the last one   deletes what is left of the control

What a rank that was killed leaves behind stays in the store: a few small keys, under a nonce that
nobody uses again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckptfs.errors import CkptfsError, Failure
from ckptfs.topology.client import StoreClient, drop
from ckptfs.topology.heartbeat import Monitor
from ckptfs.topology.stepkeys import StepKeys
from ckptfs.topology.verdict import Said, Verdict, collective_error, encode_said, encode_verdict
from ckptfs.topology.world import World

__all__ = ["bury", "leave", "linger"]

_LINGER_S = 10.0
_LAST_S = 1.0  # the dead never read; the living, when somebody died, may be about to

log = logging.getLogger(__name__)


def linger(pulse: StoreClient, monitor: Monitor, last: StepKeys) -> None:
    """Coordinator: wait until every rank has read the verdict of ``last``, 10 s at most."""
    deadline = time.monotonic() + _LINGER_S
    try:
        while not pulse.call_short(last.is_acknowledged, _LINGER_S):
            if monitor.alarm(last):
                deadline = min(deadline, time.monotonic() + _LAST_S)
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
    except CkptfsError as error:
        log.debug("no reason to linger: %s", error)


def bury(pulse: StoreClient, monitor: Monitor, step: StepKeys) -> None:
    """Coordinator: delete the pieces of ``step`` that the dead have not read: they may be large."""
    alarm = monitor.alarm(step)
    dead = () if alarm is None else tuple(alarm.dead)

    def drop_all(store: Any) -> None:
        for rank in dead:
            step.drop_piece(store, rank)

    try:
        if dead:
            pulse.call_short(drop_all, _LAST_S)
    except CkptfsError as error:
        log.debug("what is left of %s stays: %s", step, error)


def leave(
    store: Any, keys: StepKeys, rank: int, worlds: Sequence[World], monitor: Monitor | None
) -> None:
    """Say goodbye in the step that would come next; an operation on a store.

    monitor: the control's, stopped; None for a clone, whose control lives on.
    """
    world = worlds[rank]
    why = f"closed its control, or ended: {world.place}"
    failure = Failure(rank, world.node, "ckptfs.errors.CollectiveError", why)
    if rank == 0:
        error = collective_error("the next step", {0: failure}, worlds)
        keys.end(store, encode_verdict(Verdict(error=error, final=True)))
    else:
        keys.arrive(store, rank, encode_said(Said("", failure=failure)))
    if monitor is not None:
        monitor.farewell(store)
    keys.acknowledge(store)  # so that the coordinator does not linger for this rank
    if store.add(f"{keys.prefix}/closed", 1) == keys.size:
        _clean(store, keys, monitor)


def _clean(store: Any, keys: StepKeys, monitor: Monitor | None) -> None:
    for number in {max(0, keys.number - 1), keys.number}:
        step = replace(keys, number=number)
        step.drop_values(store)
        step.drop(store)
    store.delete_key(f"{keys.prefix}/closed")
    if monitor is not None:
        drop(store, f"{keys.prefix}/go")
        drop(store, f"{keys.prefix}/table")
        for name in monitor.keys():  # noqa: SIM118 - not a mapping
            store.delete_key(name)
