"""The kernel of one client dies in the middle of a save of four jobs; it boots again, and they start again.

    with Wreck(lab, lab.b) as wreck:
        wreck.survivors["N3"]        how the ranks of the other client ended
        wreck.again("N3")            the job once more: on both clients, and what its ranks say
    lost_under_torchrun(lab, "N3", args)       one job of the real launcher that loses client b the same way

Each job waits at the close of a data file that rank 3 (rank 1, where the first client dies) has written.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tests.lab.nfs import Ended, Forked, Machine, NfsLab, Program
from tests.nfs import needs
from tests.nfs.crowd import RESULT_S, Crowd, Gate
from tests.nfs.inside import stands_at
from tests.nfs.launched import said

__all__ = ["JOBS", "TIMEOUT_S", "Wreck", "lost_under_torchrun", "under_torchrun"]

TIMEOUT_S = 30  # the longest silence of a rank that is waited out; a dead machine says nothing


@dataclass(frozen=True)
class Job:
    """body: of its ranks. until: steps in all. args: of its first start, in which the machine dies."""

    body: Callable[[dict[str, Any]], dict[str, Any]]
    until: int
    args: Mapping[str, Any]


JOBS = {
    "N1": Job(needs.parts, 3, {"dies_in": 2}),
    "N2": Job(needs.overwrite, 2, {"before": [5, 7]}),
    "N3": Job(needs.managed, 4, {"dies_in": 3}),
    "N4": Job(needs.background, 5, {"dies_in": 3, "publish": 2}),
}


class Wreck:
    """A context manager; entering it takes as long as a client needs to boot and to import torch."""

    def __init__(self, lab: NfsLab, victim: Machine) -> None:
        self.lab = lab
        self.victim = victim
        self.runs: dict[str, str] = {}
        self.survivors: dict[str, list[Any]] = {}
        self.died_s = 0.0  # by the other client's clock
        self.driver: Any = None  # what the survivor said; None where it died too

    def __enter__(self) -> Self:
        lab, holder = self.lab, 3 if self.victim is self.lab.b else 1
        self.runs = {name: lab.fresh(name) for name in JOBS}
        with contextlib.ExitStack() as stack:
            crowds: dict[str, Crowd] = {}
            for name, job in JOBS.items():
                gate = Gate(self.victim)
                gate.open()  # until the job itself shuts it
                pending_deletes = {**job.args, "gate": gate.path, "holder": holder}
                fault = f"hold={gate.path}:close:*__{holder}_*.distcp:*@{holder}"
                crowds[name] = stack.enter_context(self._start(name, pending_deletes, fault))
                if name == "N1":
                    driver = self._drive(crowds[name], self._args(name))
                crowds[name].wait_at(gate)  # one after the other: a machine has one processor
            self.died_s = (lab.a if self.victim is lab.b else lab.b).seconds()
            self.victim.kill()
            for crowd in crowds.values():
                crowd.gone(self.victim)
            self.victim.begin()
            left = [n for n in range(4) if crowds["N1"].machine(n) is not self.victim]
            for name, crowd in crowds.items():
                self.survivors[name] = crowd.ends(ranks=left)
            if self.victim is lab.b:
                self.driver = driver.result(RESULT_S)
        self.victim.answer()
        lab.mount(self.victim)
        self.victim.warm()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to put back: the machine is up and mounted."""

    def again(self, name: str) -> list[Any]:
        """Start a job again, undisturbed; what its ranks said. Of N1 the driver's words come first."""
        with self._start(name) as crowd:
            first = []
            if name == "N1":
                first = [self._drive(crowd, self._args(name)).result(RESULT_S)]
            return [*first, *crowd.values()]

    def again_by_torchrun(self, name: str) -> list[Any]:
        """The same under the real launcher; not N1: its driver is none of its ranks."""
        programs = under_torchrun(self.lab, name, self._args(name))
        ends = [program.wait(RESULT_S) for program in programs]
        assert [end.status for end in ends] == [0, 0], "\n".join(end.output for end in ends)
        values = {**said(ends[0].output), **said(ends[1].output)}
        return [values[rank] for rank in range(4)]

    def behind(self, name: str) -> str:
        """A job's run on the server's own disk."""
        return self.lab.behind(self.runs[name])

    def _args(self, name: str) -> dict[str, Any]:
        return {"run": f"faults+file://{self.runs[name]}", "until": JOBS[name].until}

    def _start(
        self, name: str, pending_deletes: Mapping[str, Any] | None = None, fault: str = ""
    ) -> Crowd:
        args = {**self._args(name), **(pending_deletes or {})}
        environment = {"CKPTFS_TIMEOUT_S": str(TIMEOUT_S), "CKPTFS_TEST_FAULT": fault}
        return Crowd(self.lab, JOBS[name].body, args, job=name, own=lambda _: environment)

    def _drive(self, crowd: Crowd, args: Mapping[str, Any]) -> Forked:
        environment = {"CKPTFS_JOB_ID": "N1", "CKPTFS_TIMEOUT_S": str(TIMEOUT_S)}
        told = {**args, "address": crowd.address}
        return self.lab.a.fork(needs.drive, told, environment=environment)


def under_torchrun(
    lab: NfsLab, name: str, args: Mapping[str, Any], *, fault: str = ""
) -> tuple[Program, Program]:
    """Start a job on both clients by the real launcher; not N1: its driver is none of its ranks."""
    words = ["-m", "tests.nfs.launched", JOBS[name].body.__name__, json.dumps(dict(args))]
    environment = {
        "CKPTFS_TIMEOUT_S": str(TIMEOUT_S),
        "CKPTFS_JOB_ID": name,
        "CKPTFS_TEST_FAULT": fault,
    }
    return lab.torchrun(words, environment=environment)


def lost_under_torchrun(lab: NfsLab, name: str, args: Mapping[str, Any]) -> tuple[Ended, float]:
    """The kernel of client b dies in the middle of a save of such a job, with rank 3 in the close of a
    data file, and its launcher with it; it boots again. How the launcher on a ended, and what was said there;
    when b died, by a's clock.
    """
    gate = Gate(lab.b)
    gate.open()  # until the job itself shuts it
    pending_deletes = {**args, **JOBS[name].args, "gate": gate.path, "holder": 3}
    fault = f"hold={gate.path}:close:*__3_*.distcp:*@3"
    programs = under_torchrun(lab, name, pending_deletes, fault=fault)
    deadline = time.monotonic() + RESULT_S
    while not lab.b.call(stands_at, gate.path):
        for program in programs:
            now = program.peek()
            assert now.status is None, f"it ended before: {now.output}"
        assert time.monotonic() < deadline, "nobody came to the gate"
        time.sleep(0.5)  # each look costs the machine that has to get there
    died_s = lab.a.seconds()
    lab.b.kill()
    try:
        return programs[0].wait(RESULT_S), died_s
    finally:
        lab.b.boot()
        lab.mount(lab.b)
