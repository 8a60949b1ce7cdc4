"""World: this process among its peers, from a process group, a launcher, or neither.

    process group (torch.distributed)   rank and size are the group's; subgroups work
    torchrun's environment              RANK and WORLD_SIZE; there may be no group yet
    neither                             one process: World.solo()

A *node* is the set of processes with the same boot id and the same mount namespace, because these
see the same mounts through the same page cache. A hostname never decides: containers share or
reuse it. ``CKPTFS_NODE`` is appended if it is set. It can split a node (containers that share a mount
namespace, simulated nodes in a test), and can never join two.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs import _torch
from ckptfs.errors import StateError

__all__ = ["Life", "World", "is_gone", "job_id_from", "node_id"]

# Each names one submitted job for as long as it runs, requeues and restarts included; the prefix
# keeps equal numbers of two schedulers apart. CKPTFS_JOB_ID is for launchers that set none of them.
_JOB_VARIABLES = {
    "CKPTFS_JOB_ID": "job",
    "SLURM_JOB_ID": "slurm",
    "PBS_JOBID": "pbs",
    "LSB_JOBID": "lsf",
    "FLUX_JOB_ID": "flux",
    "JOBSET_UID": "jobset",
    "SKYPILOT_TASK_ID": "skypilot",
    "TORCHELASTIC_RUN_ID": "torchrun",
}
# torchrun's default run id is "none": every job that did not choose one has it.
_NOBODY = frozenset({"", "none"})


@dataclass(frozen=True, slots=True)
class Life:
    """One process, as /proc shows it. start_ticks distinguishes later processes with its pid."""

    pid: int
    start_ticks: int

    @staticmethod
    def of_this_process() -> Life | None:
        """Return this process's life by the pid namespace of its node's /proc, or None."""
        return _own_life()


@functools.cache
def _own_life() -> Life | None:
    """Look once: neither number changes while the process lives. The child of a fork looks again."""
    try:
        # Not os.getpid(): inside a pid namespace /proc may show the outer numbers.
        pid = int(os.readlink("/proc/self"))
        return Life(pid, _start_ticks(Path(f"/proc/{pid}/stat").read_text()))
    except (OSError, ValueError, IndexError):
        return None  # no /proc to look at: silence is what ends a call then


os.register_at_fork(after_in_child=_own_life.cache_clear)


def is_gone(life: Life) -> bool:
    """Whether that process has ended: no such pid, a zombie, or a later process of that pid."""
    try:
        stat = Path(f"/proc/{life.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # hidden from us is not gone
    state = stat.rpartition(")")[2].split()[0]
    return state in "ZX" or _start_ticks(stat) != life.start_ticks


def _start_ticks(stat: str) -> int:
    # The name in parentheses may hold anything, so count from its end: field 22 is the start.
    return int(stat.rpartition(")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class World:
    """One process among ``size``.

    Attributes:
        rank: 0 ... size - 1, the group's where there is one.
        size: How many processes there are.
        local_rank: The launcher's number of this process on this machine, 0 without one.
        local_size: The launcher's number of processes on this machine, 1 without one.
        node: What the module says; opaque, compare for equality.
        hostname: For messages only.
        pid: As the node's /proc has it, which in a pid namespace may be another number than the process
            itself sees.
        job_id: The name of this job by the scheduler or torchrun; None where it has no name of its own.
        has_group: torch.distributed is initialised, so that tensors can be sharded over ``size``; without it
            only directory calls make sense.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    hostname: str
    pid: int
    job_id: str | None = None
    has_group: bool = False

    @staticmethod
    def solo() -> World:
        """Return one process alone, in spite of what a launcher says."""
        return _here(rank=0, size=1, has_group=False)

    @staticmethod
    def detect(process_group: Any = None) -> World:
        """Return this process as the group sees it, else as torchrun does, else alone. Local; no I/O but /proc.

        Args:
            process_group: A torch ProcessGroup; None is the default group where one is initialised.

        Raises:
            StateError: This process is not a member of the group, or the environment is half set.
        """
        if process_group is not None or _torch.has_default_group():
            rank, size = _torch.rank_and_size(process_group)
            if rank < 0:
                raise StateError(
                    "this process is not a member of process_group",
                    hint="make a collective call over a group on the members of the group only",
                )
            return _here(rank=rank, size=size, has_group=True)
        rank, size = _launched(os.environ)
        return _here(rank=rank, size=size, has_group=False)

    @property
    def site(self) -> str:
        """The node of this process, for a person: its hostname, CKPTFS_NODE first if set."""
        return "/".join([*self.node.split("/", 2)[2:], self.hostname])

    @property
    def place(self) -> str:
        """Where this process runs, for a person: ``host-7 (pid 42)``, CKPTFS_NODE first if set."""
        return f"{self.site} (pid {self.pid})"


def node_id() -> str:
    """Return ``<boot id>/<mount namespace>[/<CKPTFS_NODE>]`` of this process."""
    named = os.environ.get("CKPTFS_NODE", "")
    return _boot_and_mounts() + (f"/{named}" if named else "")


@functools.cache
def _boot_and_mounts() -> str:
    """Look once: a process gets a mount namespace of its own before its first call of ckptfs, if it ever does. The
    child of a fork may move, and looks again.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        # No /proc (macOS, a hardened sandbox): the host's name and address family are used instead.
        # The probe still finds what is shared; only the number of probes depends on this.
        boot, mounts = f"host-{socket.gethostname()}", "mnt:[0]"
    return f"{boot}/{mounts}"


os.register_at_fork(after_in_child=_boot_and_mounts.cache_clear)


def job_id_from(environment: Mapping[str, str]) -> str | None:
    """Return the job's name, such as ``slurm:4711``, or None if the environment has none."""
    for variable, kind in _JOB_VARIABLES.items():
        value = environment.get(variable, "").strip()
        if value.lower() not in _NOBODY:
            return f"{kind}:{value}"
    return None


def _launched(environment: Mapping[str, str]) -> tuple[int, int]:
    given = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if not all(given.values()):
        return 0, 1
    try:
        rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise StateError(
            f"RANK={given['RANK']!r} and WORLD_SIZE={given['WORLD_SIZE']!r} contradict each other",
            hint="start with torchrun, or unset both for a single process",
        )
    return rank, size


def _here(*, rank: int, size: int, has_group: bool) -> World:
    env = os.environ
    launched = size > 1 and env.get("LOCAL_RANK", "").isdigit()
    life = Life.of_this_process()
    return World(
        rank=rank,
        size=size,
        local_rank=int(env["LOCAL_RANK"]) if launched else 0,
        local_size=int(env.get("LOCAL_WORLD_SIZE") or 1) if launched else 1,
        node=node_id(),
        hostname=socket.gethostname(),
        pid=os.getpid() if life is None else life.pid,
        job_id=job_id_from(env),
        has_group=has_group,
    )
