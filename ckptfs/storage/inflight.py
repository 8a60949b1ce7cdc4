"""The system calls of storage that this process waits for: which, at which path, since when.

    with under_way("fsync", fd):        every call of ``Posix``
        os.fsync(fd)
    with part_of(mark()) as part:       what this thread calls now belongs to that part of some work
    thread(target=carried(work))        and what this one calls, too
    waited_for(part)                    of its calls, the one that has been under way for longest, or None

A thread in a dead hard mount cannot be interrupted, and can tell nobody. Another thread of its process
can: the heartbeat asks here, and the other ranks are told. Nothing here does any I/O, and no lock is held
over a call. Work is handed to other threads by ``carried``, or by ``Threads``, which does that; a chore
that a thread of its own does belongs to no part.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import ParamSpec, TypeVar

__all__ = ["Waited", "carried", "mark", "part_of", "path_of", "under_way", "waited_for"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waited:
    """A call that has not returned. number: no two calls of a process have the same, later ones a larger.

    part: of which work it is a part; 0: of none.
    """

    number: int
    name: str
    where: str | int
    part: int = 0

    @property
    def text(self) -> str:
        """For a message: ``fsync of /nfs/run/...``. A descriptor's path is what the kernel calls it."""
        return f"{self.name} of {path_of(self.where)}"


def path_of(where: str | int) -> str:
    """The path of what is open under a descriptor, as far as the kernel tells it; a path is itself.

    For what outlives the descriptor: one that is being closed has none any more.
    """
    if isinstance(where, str):
        return where
    try:
        return os.readlink(f"/proc/self/fd/{where}")
    except OSError:
        return f"descriptor {where}"


_NUMBERS = count(1)
# By thread: a thread waits for one call at a time. Only ever changed by the thread itself, and for
# whoever looks a copy is made in one step.
_WAITED: dict[int, Waited] = {}
os.register_at_fork(after_in_child=_WAITED.clear)


class _Mine(threading.local):
    """Of which part this thread's calls are."""

    part = 0


_MINE = _Mine()


class under_way:  # noqa: N801 - used as a with statement, and cheaper than a generator
    """What is inside is one call; of calls inside calls the inner one counts."""

    __slots__ = ("_outer", "_thread", "_waited")

    def __init__(self, name: str, where: str | int) -> None:
        self._waited = Waited(next(_NUMBERS), name, where, _MINE.part)
        self._thread = threading.get_ident()
        self._outer: Waited | None = None

    def __enter__(self) -> None:
        self._outer = _WAITED.get(self._thread)
        _WAITED[self._thread] = self._waited

    def __exit__(self, *exc: object) -> None:
        if self._outer is None:
            _WAITED.pop(self._thread, None)
        else:
            _WAITED[self._thread] = self._outer


def mark() -> int:
    """A number that no other call and no other part of this process has."""
    return next(_NUMBERS)


@contextlib.contextmanager
def part_of(part: int) -> Iterator[int]:
    """Inside, the calls of this thread belong to that part, and not to the one around it."""
    outer, _MINE.part = _MINE.part, part
    try:
        yield part
    finally:
        _MINE.part = outer


def carried(work: Callable[P, T]) -> Callable[P, T]:
    """That work for another thread, whose calls belong then to the part that this thread is at."""
    part = _MINE.part
    if not part:
        return work

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with part_of(part):
            return work(*args, **kwargs)

    return run


def waited_for(part: int) -> Waited | None:
    """The first call of that part, on whatever thread, of those that have not returned. Any thread."""
    waited = [one for one in list(_WAITED.values()) if one.part == part]
    return min(waited, key=lambda one: one.number, default=None)
