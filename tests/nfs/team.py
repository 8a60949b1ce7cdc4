"""A job over both clients of the lab: start its ranks, stop one at a chosen operation, hear how all end.

gate = Gate(lab.b)
ranks = start(lab, does, Save(f"faults+file://{run}/step_2", 2), gate=gate.at("close", "*.distcp"))
gate.wait_reached(ranks)
lab.restart_server()
gate.release()
for outcomes in ends(ranks): ...
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.lab.nfs import Forked, Machine, NfsLab
from tests.nfs.ranks import JobRank, free_port, is_there, waits_in

__all__ = ["END_S", "Gate", "all_say", "ends", "start", "until", "wait_stuck"]

END_S = 500.0  # of a job that takes seconds on an idle machine
PATIENT_S = 400.0  # the silence that a job waits out which is not tested for that


@dataclass(frozen=True)
class Gate:
    """Where the rank of one machine stops, until it is released; a file in the machine's own /tmp."""

    machine: Machine
    path: str = field(default_factory=lambda: f"/tmp/gate-{uuid.uuid4().hex[:8]}")
    fault: str = ""

    def at(self, operation: str, key: str) -> Gate:
        """Before the first such operation of a storage ``faults+...``."""
        return replace(self, fault=f"hold={self.path}:{operation}:{key}:1")

    def wait_reached(self, ranks: Sequence[Forked]) -> None:
        """Return when the rank is there; AssertionError where one of the job has ended instead."""

        def is_reached() -> bool:
            if self.machine.call(is_there, f"{self.path}.reached"):
                return True
            assert not any(rank.has_ended() for rank in ranks), f"not reached: {ends(ranks)}"
            return False

        until(is_reached, f"{self.path} reached")

    def release(self) -> None:
        """Let it continue."""
        self.machine.call(_touch, self.path)


def start(
    lab: NfsLab,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = PATIENT_S,
    gate: Gate | None = None,
) -> list[Forked]:
    """``function(RunSession(...), *args)`` as one rank on each client, rank 0 on a."""
    port = lab.a.call(free_port)
    ranks = []
    for rank, node in enumerate(lab.nodes):
        here = {} if gate is None or gate.machine is not node else {"CKPTFS_TEST_FAULT": gate.fault}
        job_rank = JobRank(rank, 2, port, timeout_s)
        ranks.append(node.fork(function, job_rank, *args, environment=here))
    return ranks


def ends(ranks: Sequence[Forked]) -> list[Any]:
    """What all returned, in order of rank."""
    return [rank.result(END_S) for rank in ranks]


def all_say(ranks: Sequence[Forked]) -> tuple[Any, ...]:
    """The outcomes of one rank's acts, after every rank had the same."""
    outcomes = ends(ranks)
    told = [tuple(one.told for one in each) for each in outcomes]
    assert told[1:] == told[:-1], told
    return tuple(outcomes[0])


def wait_stuck(rank: Forked) -> None:
    """Return when a thread of this rank waits in its kernel, uninterruptibly."""
    until(lambda: rank.machine.call(waits_in, rank.pid), f"{rank.machine.name} waits for storage")


def until(is_so: Callable[[], bool], what: str) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + END_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {END_S:g} s: {what}")
        time.sleep(0.05)


def _touch(path: str) -> None:
    Path(path).touch()
