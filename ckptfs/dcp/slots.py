"""At most so many writers of a run on a node, also where they are processes that know nothing of each other.

    with writer_slot(run_uri, node, limit):      waits for one of ``limit`` slots
        write                                    a slot is a lock (flock) on a file in a directory of
                                                 this user's, which the kernel frees when its holder dies

Containers with a ``/tmp`` of their own do not see each other's slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator

from ckptfs.errors import StateError

__all__ = ["slot_directory", "writer_slot"]

_LOOK_S = (0.005, 0.1)  # from, to: a slot that comes free is found so soon


@contextlib.contextmanager
def writer_slot(
    run: str, node: str, limit: int | None, look: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Hold one of ``limit`` slots (None: no limit). Waits as long as it takes; look: how to rest."""
    if limit is None:
        yield
        return
    if limit < 1:
        raise StateError(f"writers_per_node is {limit}; at least one has to write")
    held = _acquire(run, node, limit, look)
    try:
        yield
    finally:
        os.close(held)


def _acquire(run: str, node: str, limit: int, look: Callable[[float], None]) -> int:
    name = hashlib.sha256(f"{node}\0{run}".encode()).hexdigest()[:32]
    paths = [f"{slot_directory()}/{name}-{number}" for number in range(limit)]
    first = os.getpid() % limit  # so that not all try the same one first
    rest_s, longest_s = _LOOK_S
    while True:
        for path in paths[first:] + paths[:first]:
            held = _try(path)
            if held is not None:
                return held
        look(rest_s)
        rest_s = min(2 * rest_s, longest_s)


def _try(path: str) -> int | None:
    # Never unlinked: a lock on an unlinked file would be one that nobody else sees.
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except BaseException:
        os.close(held)
        raise
    return held


def slot_directory() -> str:
    """This user's own directory for locks. StateError where somebody else made it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = f"{base}/ckptfs-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StateError(
            f"{path} belongs to somebody else",
            hint="set XDG_RUNTIME_DIR to a directory of your own, or leave writers_per_node out",
        )
    return path
