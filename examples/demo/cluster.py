"""Two nodes on this machine: one torchrun agent each, two ranks each, and what a scheduler does.

    Cluster.run("first", [...])     both agents start   ->  both end well          -> End
                                    one agent fails     ->  the other is ended too -> End
    Cluster.close()                 nothing that was started is left, whatever happened

CKPTFS_NODE makes the agents two nodes for ckptfs, as two hosts would be by themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

NODES = 2
RANKS_PER_NODE = 2
GRACE_S = 10.0  # from SIGTERM to SIGKILL
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class End:
    """How a job ended. logs: one per node. killed_ranks: those that ended by SIGKILL."""

    ok: bool
    wall_s: float
    logs: tuple[Path, ...]
    killed_ranks: tuple[int, ...]

    def tail(self, lines: int = 30) -> str:
        """The ends of all logs, for a person who must find out what went wrong."""
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-lines:])
            for log in self.logs
        )


class Cluster:
    """Starts jobs one after the other; ``with`` it, or close() it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._agents: list[subprocess.Popen[bytes]] = []
        self._mark = f"CKPTFS_DEMO_CLUSTER={uuid.uuid4().hex}"  # agents and ranks inherit it
        logs.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        name: str,
        script: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> End:
        """Run one job to its end. TimeoutError after timeout_s; it is ended then, too."""
        started = time.monotonic()
        port = _free_port()
        logs = tuple(self._logs / f"{name}-node{node}.log" for node in range(NODES))
        self._agents = [
            _start_agent(node, port, script, logs[node], {**(environment or {}), **self._marked()})
            for node in range(NODES)
        ]
        try:
            while any(agent.poll() is None for agent in self._agents):
                if any(agent.poll() for agent in self._agents):
                    break  # one node failed: a scheduler ends the others
                if time.monotonic() - started > timeout_s:
                    raise TimeoutError(f"the job {name!r} takes longer than {timeout_s:g} s")
                time.sleep(0.02)
        finally:
            self.close()
        return End(
            ok=all(agent.returncode == 0 for agent in self._agents),
            wall_s=time.monotonic() - started,
            logs=logs,
            killed_ranks=tuple(sorted(rank for log in logs for rank in _killed_ranks(log))),
        )

    def close(self) -> None:
        """End every agent and every rank that is still there."""
        living = [agent for agent in self._agents if agent.poll() is None]
        for agent in living:
            agent.terminate()  # torchrun then ends its ranks
        deadline = time.monotonic() + GRACE_S
        for agent in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.1, deadline - time.monotonic()))
        for agent in living:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        # Only now: a living agent could start one more. torchrun forgets ranks when the signal
        # comes between their start and its own note of them, and an agent that was killed
        # ends none.
        while ranks := _processes_with(self._mark):
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _marked(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return {name: value}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_agent(
    node: int, port: int, script: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(NODES), "--nproc-per-node", str(RANKS_PER_NODE)]
    command += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += ["--max-restarts", "0", *script]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    everywhere = {
        "CKPTFS_NODE": f"node{node}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),  # the demo also runs where nothing is installed
    }
    if sys.platform == "linux":
        everywhere["GLOO_SOCKET_IFNAME"] = (
            "lo"  # a host name that resolves to nowhere is no obstacle
        )
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **everywhere, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us, and we end the agents in order
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _killed_ranks(log: Path) -> Iterator[int]:
    """Ranks that torchrun's own report says ended by signal 9."""
    pattern = r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: -9\b"
    for found in re.finditer(pattern, log.read_text()):
        yield int(found[1])


def _processes_with(mark: str) -> list[int]:
    """Living processes with this variable. Linux; elsewhere none is found."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked, or is not ours
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
