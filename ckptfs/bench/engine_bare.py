"""The limit of a directory by one way alone: two threads of 16 MiB, memory as large as the state.

    raw:direct      save: O_DIRECT, fallocate, fsync     cold load: O_DIRECT, four threads of 8 MiB
    raw:buffered    save: pwrite, fsync                  cold load: preadv into the tensors
    both                                                 warm load: preadv into the tensors

Every byte of the state is read from, and brought to, memory of its own that was touched before: a limit
that moves one buffer again and again would be served by the processor's cache. ``raw`` without a word
may choose its way; these are for ratios that name it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from ckptfs.bench.engine_files import fsync
from ckptfs.bench.engines import Attempt, Cached, Driver, Setting
from ckptfs.bench.raw_io import bytes_of, rounded, size_of, takes_direct, write_all
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State, local_of
from ckptfs.errors import StateError

__all__ = ["BareFile", "Way"]

_T = TypeVar("_T")
_MOST_VIEWS = 1024  # of one preadv: IOV_MAX


class Way(Enum):
    """How bytes pass; the value is what is after the colon.

    Attributes:
        DIRECT: Past the page cache.
        BUFFERED: Through the page cache.
    """

    DIRECT = "direct"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class _Shape:
    """How many threads move how much at once."""

    threads: int
    window_bytes: int


_MOVES = _Shape(2, 16 << 20)
_READS_DIRECT = _Shape(4, 8 << 20)  # a disk answers one reader slower than it can


class BareFile(Driver):
    """One file of this rank's size, written and read one way.

    Args:
        setting: What it works with.
        way: Which way.
    """

    def __init__(self, setting: Setting, way: Way) -> None:
        super().__init__(setting)
        self._way = way
        self._memory: memoryview | None = None
        self._windows: list[tuple[int, list[memoryview]]] | None = None
        if way is Way.DIRECT and not takes_direct(os.fspath(self.home.root.local_path)):
            raise StateError(f"{self.home.place} takes no O_DIRECT", hint="ask for raw:buffered")

    def about(self) -> Engine:
        return Engine(
            f"raw:{self._way.value}",
            f"{self._way.value}, {_MOVES.threads} threads of {_MOVES.window_bytes >> 20} MiB",
            "file and directory fsynced" if self.setting.durable else "no fsync",
            "nothing",
            is_limit=True,
        )

    def save(self, state: State, at: Attempt) -> None:
        os.makedirs(at.path, exist_ok=True)
        size, memory = size_of(state), self._bytes_of(state)
        flag = os.O_DIRECT if self._way is Way.DIRECT else 0
        fd = os.open(self._path(at), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o666)
        try:
            if self._way is Way.DIRECT:
                os.posix_fallocate(fd, 0, max(1, size))

            def write(start: int) -> None:
                write_all(os.pwrite, fd, memory[start : start + _MOVES.window_bytes], start)

            _together(_MOVES.threads, write, range(0, size, _MOVES.window_bytes))
            os.ftruncate(fd, size)
            if self.setting.durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if self.setting.durable:
            fsync(at.path)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        if cached is Cached.COLD and self._way is Way.DIRECT:
            self._load_direct(target, at)
            return
        if self._windows is None:
            self._windows = list(_windows(target))
        fd = os.open(self._path(at), os.O_RDONLY)
        try:

            def read(window: tuple[int, list[memoryview]]) -> None:
                _read_views(fd, *window)

            _together(_MOVES.threads, read, self._windows)
        finally:
            os.close(fd)

    def _load_direct(self, target: State, at: Attempt) -> None:
        memory, size = self._bytes_of(target), size_of(target)
        fd = os.open(self._path(at), os.O_RDONLY | os.O_DIRECT)
        try:

            def read(start: int) -> None:
                end = min(start + _READS_DIRECT.window_bytes, len(memory))
                # The last block is asked for whole, and its read ends with the file.
                done = start
                while done < min(end, size):
                    got = os.preadv(fd, [memory[done:end]], done)
                    if not got:
                        raise EOFError(f"{size - done} bytes are missing")
                    done += got

            _together(_READS_DIRECT.threads, read, range(0, size, _READS_DIRECT.window_bytes))
        finally:
            os.close(fd)

    def _bytes_of(self, state: State) -> memoryview:
        """The state's bytes one after the other, made once, in the round that counts for nobody."""
        size = size_of(state)
        if self._memory is None or len(self._memory) != rounded(size):
            memory = memoryview(mmap.mmap(-1, max(1, rounded(size))))
            at = 0
            for tensor in state.values():
                view = bytes_of(local_of(tensor))
                memory[at : at + len(view)] = view
                at += len(view)
            self._memory = memory
        return self._memory

    def _path(self, at: Attempt) -> str:
        return os.path.join(at.path, f"rank_{self.setting.group.rank}")


def _windows(state: State) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, tensors' memory from there on), about a window each: small tensors share one read."""
    start = at = 0
    views: list[memoryview] = []
    for tensor in state.values():
        whole = bytes_of(local_of(tensor))
        for cut in range(0, len(whole), _MOVES.window_bytes):
            view = whole[cut : cut + _MOVES.window_bytes]
            if views and (
                at - start + len(view) > _MOVES.window_bytes or len(views) == _MOST_VIEWS
            ):
                yield start, views
                start, views = at, []
            views.append(view)
            at += len(view)
    if views:
        yield start, views


def _read_views(fd: int, at: int, views: list[memoryview]) -> None:
    left = sum(map(len, views))
    while left:
        done = os.preadv(fd, views, at)
        if not done:
            raise EOFError(f"{left} bytes are missing")
        at, left = at + done, left - done
        while done and left:
            taken = min(done, len(views[0]))
            done -= taken
            views = [views[0][taken:], *views[1:]] if taken < len(views[0]) else views[1:]


def _together(threads: int, one: Callable[[_T], None], all_: Sequence[_T]) -> None:
    """``one`` of each, by so many threads, this one among them; the first error is raised here."""
    waiting, lock = iter(all_), threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    item = next(waiting)  # StopIteration: nothing is left
                if failed:
                    return
                one(item)
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failed.append(error)

    others = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    for other in others:
        other.start()
    work()
    for other in others:
        other.join()
    if failed:
        raise failed[0]
