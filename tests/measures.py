"""What the code under test holds of this process: its descriptors, its threads; what it logged.

A count of all descriptors or threads sees those of other tests, of Python and of libraries, too: it changes
while a test runs that has nothing to do with them. tests/test_measures.py lists who measures a process.
"""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

__all__ = ["descriptors_below", "own_threads", "warned"]

_TABLE = "/proc/self/fd"


def descriptors_below(path: str | os.PathLike[str]) -> list[str]:
    """What this process has open at this path or below it, sorted; deleted files too.

    Empty where the system has no table of descriptors in /proc.
    """
    root = os.path.realpath(path)
    found = []
    for fd in os.listdir(_TABLE) if os.path.isdir(_TABLE) else ():
        with contextlib.suppress(OSError):  # closed since, or the descriptor of the listing itself
            target = os.readlink(f"{_TABLE}/{fd}").removesuffix(" (deleted)")
            if target == root or target.startswith(f"{root}/"):
                found.append(target)
    return sorted(found)


def own_threads(prefix: str = "ckptfs") -> set[threading.Thread]:
    """The living threads with names that begin so."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without the lease of an earlier test, which is rewritten every 5 s and warns where its directory
    is gone.
    """
    return [message for message in caplog.messages if "lease could not be rewritten" not in message]
