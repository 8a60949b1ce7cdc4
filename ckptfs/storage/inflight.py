"""The system calls that this process waits for: which call, on which path, since when.

    with under_way("fsync", fd):        every call of ``Posix`` is registered like this
        os.fsync(fd)
    with part_of(mark()) as part:       the calls of this thread belong to this part of some work
    thread(target=carried(work))        and so do the calls of that thread
    waited_for(part)                    the call of this part that has waited longest, or None

    with WatchedFile(path) as file:     as open(path, "rb", buffering=0); mode "wb" writes
        file.read(size)
    walk(top)                           as os.walk
    remove_tree(top)                    as shutil.rmtree with ignore_errors=True

A thread in a dead hard mount cannot be interrupted and cannot report anything. Another thread of its process
can: the heartbeat asks here and tells the other ranks. Nothing here does any I/O, and no lock is held
during a call. Hand work to other threads with ``carried``, or with ``Threads``, which uses it. Work that a
thread does on its own account belongs to no part.

``WatchedFile``, ``walk`` and ``remove_tree`` are for the plain files of a user. They too may lie in a mount
whose server is gone, and a rank that hangs there is reported with the path. Each call is registered by
itself, because many calls that return are no hang.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "Waited",
    "WatchedFile",
    "carried",
    "mark",
    "part_of",
    "path_of",
    "remove_tree",
    "under_way",
    "waited_for",
    "walk",
]


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


# -- a user's own files --------------------------------------------------------------------------


class WatchedFile(io.FileIO):
    """An unbuffered file: reads and writes may be short. ``sync`` is fsync."""

    def __init__(self, path: str, mode: str = "rb") -> None:
        with under_way("open", path):
            super().__init__(path, mode)

    def read(self, size: int | None = -1, /) -> bytes:
        """As ``FileIO.read``."""
        with under_way("read", self.fileno()):
            return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any, /) -> int:
        """As ``FileIO.readinto``."""
        with under_way("read", self.fileno()):
            return super().readinto(buffer)

    def write(self, data: Any, /) -> int:
        """As ``FileIO.write``."""
        with under_way("write", self.fileno()):
            return super().write(data)

    def sync(self) -> None:
        """fsync(2)."""
        with under_way("fsync", self.fileno()):
            os.fsync(self.fileno())

    def close(self) -> None:
        """As ``FileIO.close``; a network filesystem writes here what it holds back."""
        if self.closed:
            return
        with under_way("close", self.fileno()):
            super().close()


def walk(top: str, *, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """As ``os.walk``; links to directories are not followed."""
    found = os.walk(top, topdown=topdown)
    while True:
        with under_way("listing", top):
            one = next(found, None)
        if one is None:
            return
        yield one


def remove_tree(top: str) -> None:
    """Remove a directory and what is in it, as far as that can be; absent is fine."""
    if os.path.islink(top):
        return
    for folder, folders, names in walk(top, topdown=False):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError), under_way("unlink", path):
                if name in folders and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)
    with contextlib.suppress(OSError), under_way("rmdir", top):
        os.rmdir(top)
