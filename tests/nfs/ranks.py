"""Ranks of a job on the clients of the lab: each a forked process in a gloo group; runs there.

    JobRank(rank, size, port)            who this process is; rank 0, on a, hosts the store of the job
    does(session, Save(uri, 1), Load(uri, 1), Claim(run))     -> an Outcome of each, as a test compares them

What is saved is a tensor of every rank's own, made of a seed, so that a reader knows each bit of it.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptfs
from ckptfs.errors import CkptfsError, CollectiveError

__all__ = [
    "Claim",
    "JobRank",
    "Load",
    "Outcome",
    "Save",
    "does",
    "free_port",
    "is_there",
    "join",
    "outcome_of",
    "state_of",
    "waits_in",
]

STORE_HOST = "10.77.0.2"  # a
SIZE_BYTES = 4 << 20


@dataclass(frozen=True)
class JobRank:
    """One rank of a job. timeout_s: of its calls, the longest silence that is waited out."""

    rank: int
    size: int
    port: int
    timeout_s: float


@dataclass(frozen=True)
class Save:
    """Save what this seed makes."""

    uri: str
    seed: int
    size_bytes: int = SIZE_BYTES


@dataclass(frozen=True)
class Load:
    """Load it, and compare each bit with what this seed makes."""

    uri: str
    seed: int
    size_bytes: int = SIZE_BYTES


@dataclass(frozen=True)
class Claim:
    """Take the run over, as the next start does, and leave it; ``names`` is what it holds."""

    uri: str


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank. error "": it worked. kinds: class of each failed rank's error."""

    error: str = ""
    text: str = ""
    kinds: tuple[tuple[int, str], ...] = ()
    names: tuple[str, ...] = ()
    took_s: float = 0.0

    @property
    def told(self) -> tuple[str, str, tuple[tuple[int, str], ...]]:
        """What has to be equal on all ranks."""
        return self.error, self.text, self.kinds


def does(job_rank: JobRank, *acts: Save | Load | Claim) -> tuple[Outcome, ...]:
    """One call after the other, whatever each comes to."""
    join(job_rank)
    return tuple(_outcome(job_rank, act) for act in acts)


def _outcome(job_rank: JobRank, act: Save | Load | Claim) -> Outcome:
    started = time.monotonic()
    try:
        found = _do(job_rank, act)
    except CkptfsError as error:
        return outcome_of(error, time.monotonic() - started)
    return found


def _do(job_rank: JobRank, act: Save | Load | Claim) -> Outcome:
    if isinstance(act, Save):
        state = state_of(job_rank.rank, act.seed, act.size_bytes)
        ckptfs.save(state, act.uri, per_rank=["mine"], timeout_s=job_rank.timeout_s)
        return Outcome()
    if isinstance(act, Load):
        state = state_of(job_rank.rank, act.seed + 1, act.size_bytes)
        ckptfs.load(state, act.uri, timeout_s=job_rank.timeout_s)
        meant = state_of(job_rank.rank, act.seed, act.size_bytes)
        same = torch.equal(state["mine"], meant["mine"])
        return Outcome() if same else Outcome("Different", act.uri)
    with ckptfs.prepare_run(act.uri, timeout_s=job_rank.timeout_s):
        return Outcome(names=tuple(c.uri.name for c in ckptfs.list_checkpoints(act.uri)))


def join(job_rank: JobRank) -> None:
    """Become a rank of the job."""
    os.environ["GLOO_SOCKET_IFNAME"] = "vec0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{STORE_HOST}:{job_rank.port}",
        rank=job_rank.rank,
        world_size=job_rank.size,
    )


def state_of(rank: int, seed: int, size_bytes: int) -> dict[str, Any]:
    """A rank's own tensor, the same for the same numbers."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return {"mine": torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=made)}


def outcome_of(error: CkptfsError, took_s: float) -> Outcome:
    """What a test compares of an error."""
    failures = error.failures if isinstance(error, CollectiveError) else {}
    kinds = tuple((r, f.type.rsplit(".", 1)[-1]) for r, f in sorted(failures.items()))
    return Outcome(type(error).__name__, str(error), kinds, took_s=took_s)


# -- for the test, next to the ranks ------------------------------------------------------------------


def free_port() -> int:
    """A port without a listener, here."""
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - a network of three machines
        return int(server.getsockname()[1])


def is_there(path: str) -> bool:
    """Whether a file of this machine is there."""
    return os.path.exists(path)


def waits_in(pid: int) -> bool:
    """Whether a thread of that process is in an uninterruptible wait (state D)."""
    try:
        stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
        return any(stat.read_text().rpartition(")")[2].split()[0] == "D" for stat in stats)
    except OSError:
        return False
