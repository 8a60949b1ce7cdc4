"""Who holds a run: how a fence names its process, and whether that process still lives here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptfs.commit.entries import Fence
from ckptfs.topology.pulse import Life, is_gone
from ckptfs.topology.world import World

__all__ = ["Owner", "alive_here", "describe", "start_ticks", "who_am_i"]


@dataclass(frozen=True, slots=True)
class Owner:
    """One process: host for people; node and pid namespace, pid and start time for identity."""

    host: str
    pid: int
    job: str | None
    node: str
    started: str


def who_am_i(world: World) -> Owner:
    """This process as an owner of a run."""
    life = Life.of_this_process()
    # As /proc has it: in a pid namespace the process's own number may be somebody else's there.
    pid, started = (os.getpid(), "") if life is None else (life.pid, str(life.start_ticks))
    return Owner(world.hostname, pid, world.job_id, _place(world.node), started)


def _place(node: str) -> str:
    # Pids mean something only within one pid namespace.
    try:
        return f"{node} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return node


def start_ticks(pid: int) -> str:
    """The process's start time in clock ticks since boot: a reused pid has another one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def alive_here(fence: Fence) -> bool:
    """Whether the fence's process, one of this node, still runs; True also where nobody can tell."""
    if not fence.started.isdigit():
        return True  # it had no /proc to read its start from: its lease tells
    if not is_gone(Life(fence.pid, int(fence.started))):
        return True
    # A /proc that shows the pid with another start has answered: it is somebody else's by now.
    return not os.path.exists(f"/proc/{fence.pid}") and _is_hidden(fence.pid)


def _is_hidden(pid: int) -> bool:
    """Whether /proc (hidepid) keeps another user's process from us: signals know of it all the same."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def describe(fence: Fence) -> str:
    """The holder, for a message."""
    job = f", job {fence.job}" if fence.job else ""
    return f"host {fence.host} pid {fence.pid}{job} (generation {fence.generation.number})"
