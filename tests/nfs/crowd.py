"""The ranks of one job on both clients: real processes, a real process group, steered by a test.

    with Crowd(lab, body, {"run": run}) as crowd:        four ranks: 0 and 1 on a, 2 and 3 on b
        crowd.wait_at(gate)                              a fault's hold was met, see Gate
        lab.b.kill()
        crowd.gone(lab.b)
        values = crowd.values(ranks=[0, 1])              what the bodies returned

``body(args)`` runs in a process of its own that was forked from one with torch in memory, and finds
RANK, WORLD_SIZE, MASTER_ADDR and their like in its environment, as under torchrun. Leaving the block
kills what still runs.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from tests.lab.nfs import Forked, Machine, NfsLab
from tests.nfs.concurrent import at_once
from tests.nfs.inside import stands_at, touch

__all__ = ["Crowd", "Ended", "Gate"]

_PORTS = range(20_000, 30_000)
RESULT_S = 240.0  # of a job that takes seconds on an idle machine


@dataclass(frozen=True)
class Gate:
    """Where a rank stops until it is opened: a file in a machine's own /tmp."""

    machine: Machine
    path: str = field(default_factory=lambda: f"/tmp/gate-{uuid.uuid4().hex[:12]}")

    def fault(self, operation: str, key: str, nth: int, *, rank: int) -> dict[str, str]:
        """What makes the rank stop before the nth such operation."""
        return {"CKPTFS_TEST_FAULT": f"hold={self.path}:{operation}:{key}:{nth}@{rank}"}

    def open(self) -> None:
        """Let it continue."""
        self.machine.call(touch, self.path)


Body = Callable[[dict[str, Any]], Any]
Environment = Mapping[str, str]
Ended = Any | BaseException


class Crowd:
    """One job; a context manager.

    per_node: ranks on each of ``nodes`` (default: both clients). job: its name for the scheduler;
    jobs of one name take a run over from each other. own: what a rank finds in its environment
    besides, by its number.
    """

    def __init__(
        self,
        lab: NfsLab,
        body: Body,
        args: Mapping[str, Any],
        *,
        per_node: int = 2,
        nodes: Sequence[Machine] | None = None,
        job: str = "",
        own: Callable[[int], Environment] | None = None,
    ) -> None:
        lab.warm()
        self._machines = lab.nodes if nodes is None else nodes
        self.size = per_node * len(self._machines)
        self._number = random.choice(_PORTS)
        self._over: set[int] = set()  # ranks that need not be killed any more

        def fork(node: int) -> list[Forked]:
            machine, forked = self._machines[node], []
            for local in range(per_node):
                rank = node * per_node + local
                environment = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.size),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(per_node),
                    "MASTER_ADDR": self._machines[0].address,
                    "MASTER_PORT": str(self._number),
                    "GLOO_SOCKET_IFNAME": machine.interface,
                    "CKPTFS_JOB_ID": job or f"job-{self._number}",
                    **(own(rank) if own else {}),
                }
                forked.append(machine.fork(body, dict(args), environment=environment))
            return forked

        # To fork takes a machine a while; they do it side by side.
        of_each = at_once(*(partial(fork, node) for node in range(len(self._machines))))
        self._forked: list[Forked] = [forked for node in of_each for forked in node]

    @property
    def address(self) -> tuple[str, int]:
        """Where rank 0 has the group's store."""
        return self._machines[0].address, self._number

    def machine(self, rank: int) -> Machine:
        """The one that a rank runs on."""
        return self._forked[rank].machine

    def gone(self, machine: Machine) -> None:
        """All on this machine went with its kernel."""
        self._over |= {n for n, forked in enumerate(self._forked) if forked.machine is machine}

    def wait_at(self, gate: Gate) -> None:
        """Return when a rank is at the gate; AssertionError where one of this job has ended instead."""
        deadline = time.monotonic() + RESULT_S
        while not gate.machine.call(stands_at, gate.path):
            ended = [rank for rank, forked in enumerate(self._forked) if forked.has_ended()]
            assert not ended, f"nobody came to the gate: {self.ends(ranks=ended)}"
            assert time.monotonic() < deadline, "nobody came to the gate"
            time.sleep(0.05)

    def values(self, *, ranks: Sequence[int] | None = None, timeout_s: float = RESULT_S) -> Any:
        """What the bodies of these ranks (None: all) returned; raises what the first of them raised."""
        for end in (ends := self.ends(ranks=ranks, timeout_s=timeout_s)):
            if isinstance(end, BaseException):
                raise end
        return ends

    def ends(
        self, *, ranks: Sequence[int] | None = None, timeout_s: float = RESULT_S
    ) -> list[Ended]:
        """Their values, or the exceptions that they raised; ConnectionError for one that was killed."""
        found: list[Ended] = []
        for rank in self._chosen(ranks):
            try:
                found.append(self._forked[rank].result(timeout_s))
            except Exception as error:  # noqa: BLE001 - how it ended is what is asked
                found.append(error)
                if isinstance(error, TimeoutError):
                    continue
            self._over.add(rank)
        return found

    def _chosen(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.size) if ranks is None else ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank, forked in enumerate(self._forked):
            if rank not in self._over:
                with contextlib.suppress(ProcessLookupError):
                    forked.end()
