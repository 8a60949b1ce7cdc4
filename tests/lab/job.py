"""One program over several machines under the real torchrun, steered by a test through files.

    in the program                              in the test
    tell("saved", step=2)          -------->    job.wait("saved")          from every rank, or some
    hold("go")                     <--------    job.release("go")
    CKPTFS_TEST_FAULT=job.fault("stop", ...)    job.reached("stop")        a fault's hold was met

    with Job(machines, [script, "/scratch/run"], home=tmp_path, nproc_per_node=2) as job:
        job.wait("saved", ranks=[0, 1])
        machines[1].kill()
        ...

A ``Machine`` is whatever can start a process: a ``Node`` of tests/lab/nodes.py, a client of an NFS
laboratory. What they share with the test is ``home``, a directory of the host that is at the same path
on every machine; nothing else is asked of them. Every wait has a deadline, and ends at once where the
program has ended without saying what is waited for. Leaving the block ends what runs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tests.lab.process import REPOSITORY

_TOLD = "CKPTFS_LAB_TOLD"
_PORTS = range(17_000, 32_000)
WAIT_S = 240.0  # of an event that takes seconds on an idle machine; an end is seen at once
Facts = dict[str, Any]


# -- in the program ------------------------------------------------------------------------------


def tell(event: str, **facts: object) -> None:
    """Append an event to this rank's file."""
    line = json.dumps({"event": event, **facts}, default=str)
    with open(f"{os.environ[_TOLD]}/{os.environ['RANK']}.jsonl", "a") as file:
        file.write(line + "\n")


def hold(name: str) -> None:
    """Wait until the test releases ``name``."""
    tell("holds", name=name)
    while not os.path.exists(f"{os.environ[_TOLD]}/{name}.open"):
        time.sleep(0.01)


# -- in the test -----------------------------------------------------------------------------------


class Process(Protocol):
    """What was started; subprocess.Popen is one."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status."""

    def kill(self) -> None:
        """SIGKILL."""


class Machine(Protocol):
    """Something that can start a process. address: where the others reach it; interface: the one of that address."""

    name: str
    address: str
    interface: str

    def start(self, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str]) -> Process:
        """Start a program with its output appended to a file of the host; env: on top of its own."""

    def clear(self) -> None:
        """SIGKILL to whatever ``start`` has started there, and to the children of that."""


class JobError(AssertionError):
    """The job did not do what the test waited for; with the ends of its logs."""


class Job:
    """One run of torchrun; a context manager. Machines have their ranks in the order of addresses.

    program: a script and its arguments. run_id: torchrun's; jobs of one id are one job to ckptfs.
    env: of every machine; each rank finds RANK there besides. warm: fork the ranks from their agent, see
    tests/lab/launcher.py.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        program: Sequence[str],
        *,
        home: Path,
        nproc_per_node: int = 2,
        env: Mapping[str, str] | None = None,
        run_id: str | None = None,
        python: str = sys.executable,
        warm: bool = False,
    ) -> None:
        self.machines = list(machines)
        self.size = nproc_per_node * len(machines)
        self.home = home / f"job-{uuid.uuid4().hex[:8]}"
        self.home.mkdir(parents=True)
        end = f"{machines[0].address}:{random.choice(_PORTS)}"
        told = {
            _TOLD: str(self.home),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
            ),
            **(env or {}),
        }
        words = [
            *(python, "-m", "tests.lab.launcher" if warm else "torch.distributed.run"),
            *("--nnodes", str(len(machines))),
            *("--nproc-per-node", str(nproc_per_node), "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", end),
            *("--rdzv-id", run_id or uuid.uuid4().hex),
        ]
        self._agents: list[Process] = []
        try:
            for machine in self.machines:
                local = ["--local-addr", machine.address]
                network = {"GLOO_SOCKET_IFNAME": machine.interface}
                agent = machine.start(
                    [*words, *local, *program], log=self._log(machine), env={**told, **network}
                )
                self._agents.append(agent)
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.size)

    def told(self, rank: int) -> list[Facts]:
        """All that a rank has reported so far."""
        try:
            text = (self.home / f"{rank}.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def find(self, event: str, rank: int) -> Facts | None:
        """The first such event of a rank, if it came."""
        return next((facts for facts in self.told(rank) if facts["event"] == event), None)

    def wait(
        self, event: str, *, ranks: Collection[int] | None = None, timeout_s: float = WAIT_S
    ) -> dict[int, Facts]:
        """The event from each of the ranks (None: all)."""
        wanted = self.ranks if ranks is None else ranks
        found: dict[int, Facts] = {}

        def all_there() -> bool:
            for rank in wanted:
                if rank not in found and (facts := self.find(event, rank)) is not None:
                    found[rank] = facts
            return len(found) == len(wanted)

        self.until(all_there, f"{event!r} from ranks {list(wanted)}", timeout_s)
        return found

    def release(self, name: str) -> None:
        """Let every rank out of ``hold(name)``."""
        (self.home / f"{name}.open").touch()

    def reached(self, gate: Path, *, timeout_s: float = WAIT_S) -> None:
        """Return when a fault's ``hold=gate`` was met."""
        self.until(Path(f"{gate}.reached").exists, f"the fault holds at {gate}", timeout_s)

    def statuses(
        self, machines: Collection[int] | None = None, *, timeout_s: float = WAIT_S
    ) -> list[int]:
        """Wait until torchrun has ended on these machines (None: all); its exit statuses."""
        agents = [self._agents[n] for n in machines or range(len(self._agents))]
        deadline = time.monotonic() + timeout_s
        while any(agent.poll() is None for agent in agents):
            if time.monotonic() > deadline:
                raise JobError(f"torchrun still runs after {timeout_s:.0f} s\n{self.logs()}")
            time.sleep(0.02)
        return [agent.wait() for agent in agents]

    def succeed(self, *, timeout_s: float = WAIT_S) -> None:
        """Wait for the end; JobError where it is no success."""
        if any(self.statuses(timeout_s=timeout_s)):
            raise JobError(f"the job failed\n{self.logs()}")

    def logs(self) -> str:
        """The end of what each machine printed, and all that ranks reported."""
        parts = []
        for machine in self.machines:
            text = self._log(machine).read_text(errors="replace")
            parts.append(f"--- {machine.name}\n{text[-4000:]}")
        parts += [f"--- rank {rank} told {self.told(rank)}" for rank in self.ranks]
        return "\n".join(parts)

    def close(self) -> None:
        """End what runs, on machines that are up; harmless twice."""
        for machine, agent in zip(self.machines, self._agents, strict=False):
            if agent.poll() is None:
                agent.kill()
                machine.clear()  # an agent that was killed ends no rank
            agent.wait(120)

    def _log(self, machine: Machine) -> Path:
        return self.home / f"{machine.name}.log"

    def until(self, done: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Return when it is so; JobError when the job ends before, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not done():
            ended = all(agent.poll() is not None for agent in self._agents)
            if ended and not done():
                raise JobError(f"the job ended before {what}\n{self.logs()}")
            if time.monotonic() > deadline:
                raise JobError(f"not within {timeout_s:.0f} s: {what}\n{self.logs()}")
            time.sleep(0.01)  # between two looks: the wait itself is the condition above

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
