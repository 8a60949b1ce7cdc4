"""Who holds a run: how a fence names its process, and whether that process still lives here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptfs.commit.entries import Fence
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
    return Owner(
        world.hostname, os.getpid(), world.job_id, _place(world.node), start_ticks(os.getpid())
    )


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
    """Whether the fence's process, one of this node, still runs."""
    return bool(fence.started) and start_ticks(fence.pid) == fence.started


def describe(fence: Fence) -> str:
    """The holder, for a message."""
    job = f", job {fence.job}" if fence.job else ""
    return f"host {fence.host} pid {fence.pid}{job} (generation {fence.generation.number})"
