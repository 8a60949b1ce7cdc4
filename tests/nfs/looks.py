"""Small functions that run on the clients of the lab; imported there by name."""

from __future__ import annotations

import os

__all__ = ["answers", "exists", "exists_after_refresh", "free_bytes"]


def exists(path: str) -> bool:
    """A plain look: what the client's cache says, for up to 30 s."""
    return os.path.exists(path)


def exists_after_refresh(path: str) -> bool:
    """A look after the parent was opened."""
    os.close(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY))
    return os.path.exists(path)


def free_bytes(path: str) -> int:
    """What is left for users other than root, on the filesystem of a path."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def answers(path: str) -> bool:
    """Whether the server of a soft mount answers; where it does not, only after the mount's own patience."""
    try:
        os.statvfs(path)
    except OSError:
        return False
    return True
