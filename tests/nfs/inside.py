"""Small things that tests let the clients of the lab do; imported there by name, so imports are few."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

__all__ = ["join", "stands_at", "touch", "touch_at_exit", "tree"]


def touch(path: str) -> None:
    """Make an empty file."""
    Path(path).touch()


def touch_at_exit(path: str) -> None:
    """Make an empty file when this process leaves its interpreter."""
    atexit.register(touch, path)


def stands_at(gate: str) -> bool:
    """Whether a process waits at a fault's gate, which is shut."""
    return os.path.exists(f"{gate}.reached") and not os.path.exists(gate)


def tree(path: str) -> list[str]:
    """All files below a directory, relative to it, sorted."""
    return sorted(str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file())


def join() -> tuple[int, int]:
    """Join the process group that the environment names; rank and size."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()
