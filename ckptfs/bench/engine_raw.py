"""The limits of a storage: move as many bytes as the state has, without making a checkpoint.

raw on a directory        one file per rank, O_DIRECT from 4 threads, 8 MiB each, fsync; cold loads read
                          the same way into memory that was used before; warm loads read or map the page
                          cache into the tensors, in the way that was fastest in the warm-up round.
                          If O_DIRECT is refused (tmpfs), I/O is buffered.
raw on an object store    obstore by itself: one multipart put; ranges of 16 MiB, 8 at once, discarded.
                          Without obstore, and on other storages: fsspec, objects of 64 MiB, 8 at once.
raw:direct, raw:buffered  one way each, by two threads with 16 MiB, from memory as large as the state

``raw`` chooses its way; the other two are for ratios to a known way. They read every byte of the state
from, and load it into, separate memory that was touched before. A limit that moved one buffer again and
again would be served from the processor's cache.

    raw:direct      save: O_DIRECT, fallocate, fsync     cold load: O_DIRECT, four threads of 8 MiB
    raw:buffered    save: pwrite, fsync                  cold load: preadv into the tensors
    both                                                 warm load: preadv into the tensors
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from ckptfs.bench.engines import Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.engines_checkpoint import fsync
from ckptfs.bench.results import Engine
from ckptfs.bench.target import fsspec_options, fsspec_uri
from ckptfs.bench.workloads import State, local_of
from ckptfs.errors import StateError
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.storage.clients.obstore import ObstoreClient
from ckptfs.storage.object_store import ObjectStorage

__all__ = [
    "BareFile",
    "RawFile",
    "RawFsspec",
    "RawObstore",
    "Way",
    "bytes_of",
    "fill",
    "noise",
    "open_raw",
    "parts_of",
    "rounded",
    "size_of",
    "takes_direct",
    "write_all",
]

_BLOCK_BYTES = 4096  # O_DIRECT: offset, length and memory are multiples of it


def size_of(state: State) -> int:
    """Return the bytes of all tensors of ``state`` on this rank."""
    return sum(local_of(tensor).nbytes for tensor in state.values())


def parts_of(part: memoryview, size: int) -> Iterator[memoryview]:
    """Yield ``part`` repeatedly, until ``size`` bytes were yielded; the last piece is cut."""
    for start in range(0, size, len(part)):
        yield part[: min(len(part), size - start)]


def rounded(size: int) -> int:
    """The smallest multiple of a block that is not below ``size``."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def write_all(
    write: Callable[[int, memoryview, int], int], fd: int, data: memoryview, at: int
) -> None:
    """Write all bytes.

    Args:
        write: As ``os.pwrite``; it may write only some of the bytes.
        fd: The file.
        data: The bytes.
        at: The offset in the file to begin at.
    """
    while data:
        done = write(fd, data, at)
        data, at = data[done:], at + done


def fill(fd: int, buffer: memoryview, at: int, wanted: int) -> None:
    """Read into a buffer.

    Args:
        fd: The file.
        buffer: The buffer to fill.
        at: The offset in the file to begin at.
        wanted: The least number of bytes to read.

    Raises:
        EOFError: The file has fewer bytes.
    """
    filled = 0
    while filled < wanted:
        done = os.preadv(fd, [buffer[filled:]], at + filled)
        if not done:
            raise EOFError(f"{wanted - filled} bytes are missing")
        filled += done


def noise(size: int) -> memoryview:
    """Return ``size`` bytes of page-aligned noise; some storages would handle zeros too cheaply."""
    memory = memoryview(mmap.mmap(-1, size))
    random = torch.Generator().manual_seed(size)
    noise = torch.empty(size // 8, dtype=torch.int64).random_(generator=random)
    memory[:] = bytes_of(noise)
    return memory


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which is contiguous and on the CPU."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def takes_direct(directory: str) -> bool:
    """Whether files in the existing ``directory`` can be opened with O_DIRECT."""
    if not hasattr(os, "O_DIRECT"):
        return False
    path = os.path.join(directory, f"direct-{os.getpid()}")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError:
        return False
    else:
        os.close(fd)
        return True
    finally:
        if os.path.exists(path):
            os.unlink(path)


# -- one way alone ---------------------------------------------------------------------------------


_T = TypeVar("_T")
# -- one way alone ---------------------------------------------------------------------------------


_MOST_VIEWS = 1024  # of one preadv: IOV_MAX


class Way(Enum):
    """How the bytes move. The value is the part of the engine's name after the colon.

    Attributes:
        DIRECT: With O_DIRECT, past the page cache.
        BUFFERED: Through the page cache.
    """

    DIRECT = "direct"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class _Shape:
    """How many threads move how many bytes each at a time."""

    threads: int
    window_bytes: int


_MOVES = _Shape(2, 16 << 20)
_READS_DIRECT = _Shape(4, 8 << 20)  # one reader does not use a disk's full speed


class BareFile(Driver):
    """One file with as many bytes as this rank's state, written and read in one way.

    Args:
        setting: The target, the ranks and the durability.
        way: The way.
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
                # The read of the last block asks for a whole block, and stops at the end of the file.
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
        """Return the state's bytes in one piece of memory, made once, in the warm-up round."""
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
    """Yield (offset, tensors' memory) by about a window each: small tensors share one read."""
    start = at = 0
    views: list[memoryview] = []
    for tensor in state.values():
        data = bytes_of(local_of(tensor))
        for cut in range(0, len(data), _MOVES.window_bytes):
            view = data[cut : cut + _MOVES.window_bytes]
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
            used = min(done, len(views[0]))
            done -= used
            views = [views[0][used:], *views[1:]] if used < len(views[0]) else views[1:]


def _together(threads: int, one: Callable[[_T], None], all_: Sequence[_T]) -> None:
    """Call ``one`` for each item on several threads, this one included; raise the first error."""
    waiting, lock = iter(all_), threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    item = next(waiting)  # StopIteration ends the loop
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


# -- the shortest way to a target ------------------------------------------------------------------


_CHUNK_BYTES = 8 << 20
_THREADS = 4
_PART_BYTES = 16 << 20
_OBJECT_BYTES = 64 << 20
_AT_ONCE = 8
_MAPS = hasattr(mmap, "MAP_POPULATE")


def open_raw(setting: Setting, variant: str | None = None) -> Driver:
    """Return the driver with the shortest way to the target, of those that are installed.

    Args:
        setting: The target, the ranks and the durability.
        variant: A fixed way, see ``BareFile``; None: the default.

    Raises:
        StateError: The way is O_DIRECT, and the target does not support it.
    """
    if variant is not None:
        return BareFile(setting, Way(variant))
    if setting.home.place.is_local:
        return RawFile(setting)
    storage = setting.home.storage
    fast = isinstance(storage, ObjectStorage) and isinstance(storage.client, ObstoreClient)
    return RawObstore(setting) if fast else RawFsspec(setting)


_Pieces = list[tuple[memoryview, int]]  # memory of a tensor, and its offset in the file
_Way = Callable[[int, _Pieces], None]


def _read(fd: int, pieces: _Pieces) -> None:
    for piece, start in pieces:
        fill(fd, piece, start, len(piece))


def _read_together(fd: int, pieces: _Pieces) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda p: fill(fd, p[0], p[1], len(p[0])), pieces))


def _copy_mapped(fd: int, pieces: _Pieces) -> None:
    with mmap.mmap(fd, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ) as mapped:

        def copy(piece: memoryview, start: int) -> None:
            found = np.frombuffer(mapped, np.uint8, len(piece), start)
            np.copyto(np.frombuffer(piece, np.uint8), found)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda p: copy(*p), pieces))


_WARM_WAYS: tuple[_Way, ...] = (_read, _read_together, *([_copy_mapped] if _MAPS else []))


def _took_s(way: _Way, fd: int, pieces: _Pieces) -> float:
    started = time.perf_counter()
    way(fd, pieces)
    return time.perf_counter() - started


class RawFile(Driver):
    """One file with as many bytes as this rank's state, for ``setting``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._direct = takes_direct(os.fspath(self.home.root.local_path))
        self._warm_way: _Way | None = None
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put(noise(_CHUNK_BYTES))

    def about(self) -> Engine:
        how = "O_DIRECT" if self._direct else "buffered"
        return Engine(
            "raw",
            f"{how}, {_THREADS} threads of {_CHUNK_BYTES >> 20} MiB",
            "file and directory fsynced" if self.setting.durable else "no fsync",
            "nothing",
            is_limit=True,
        )

    def save(self, state: State, at: Attempt) -> None:
        os.makedirs(at.path, exist_ok=True)
        path, size = self._path(at), size_of(state)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._flag, 0o666)
        try:
            os.posix_fallocate(fd, 0, max(1, size))

            def write(buffer: memoryview, start: int, end: int) -> None:
                # The last block is written whole, and truncated below.
                length = rounded(end - start) if self._direct else end - start
                write_all(os.pwrite, fd, buffer[:length], start)

            self._each(size, write)
            os.ftruncate(fd, size)
            if self.setting.durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if self.setting.durable:
            fsync(at.path)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        if cached is Cached.WARM:
            self._load_warm(target, at)
            return
        size = size_of(target)
        fd = os.open(self._path(at), os.O_RDONLY | self._flag)
        try:

            def read(buffer: memoryview, start: int, end: int) -> None:
                # The read of the last block asks for a whole block, and stops at the end of the file.
                length = rounded(end - start) if self._direct else end - start
                fill(fd, buffer[:length], start, end - start)

            self._each(size, read)
        finally:
            os.close(fd)

    def _load_warm(self, target: State, at: Attempt) -> None:
        """Read into the tensors, as a load would that copies nothing twice.

        The fastest way depends on the machine, so the first call, in the warm-up round, tries all ways.
        """
        views = [bytes_of(local_of(tensor)) for tensor in target.values()]
        ends = accumulate((len(view) for view in views), initial=0)
        pieces = [
            (view[a : a + _CHUNK_BYTES], start + a)
            for view, (start, _) in zip(views, pairwise(ends), strict=True)
            for a in range(0, len(view), _CHUNK_BYTES)
        ]
        fd = os.open(self._path(at), os.O_RDONLY)
        try:
            if self._warm_way is None:
                # Twice each: the first round touches the memory that is measured.
                tried = [(_took_s(way, fd, pieces), way) for way in _WARM_WAYS * 2]
                self._warm_way = min(tried, key=lambda one: one[0])[1]
            else:
                self._warm_way(fd, pieces)
        finally:
            os.close(fd)

    def _each(self, size: int, move: Callable[[memoryview, int, int], None]) -> None:
        def one(start: int) -> None:
            buffer = self._buffers.get()
            try:
                move(buffer, start, min(start + _CHUNK_BYTES, size))
            finally:
                self._buffers.put(buffer)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(one, range(0, size, _CHUNK_BYTES)))

    @property
    def _flag(self) -> int:
        return os.O_DIRECT if self._direct else 0

    def _path(self, at: Attempt) -> str:
        return os.path.join(at.path, f"rank_{self.setting.group.rank}")


class RawObstore(Driver):
    """obstore without ckptfs, configured as ckptfs configures it, for ``setting``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        storage = self.home.storage
        assert isinstance(storage, ObjectStorage)  # noqa: S101 - open_raw checked it
        assert isinstance(storage.client, ObstoreClient)  # noqa: S101
        self._store = storage.client.library_store(_PART_BYTES)
        self._part = noise(_PART_BYTES)

    def about(self) -> Engine:
        version = version_text("obstore")
        return Engine(
            "raw",
            f"{version}: multipart put and ranges of {_PART_BYTES >> 20} MiB, {_AT_ONCE} at once",
            "every object's answer",
            "nothing",
            is_limit=True,
        )

    def save(self, state: State, at: Attempt) -> None:
        import obstore

        obstore.put(
            self._store,
            self._key(at),
            parts_of(self._part, size_of(state)),
            use_multipart=True,
            chunk_size=_PART_BYTES,
            max_concurrency=_AT_ONCE,
        )

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        import obstore

        size, key = size_of(target), self._key(at)

        def get(start: int) -> None:
            obstore.get_range(self._store, key, start=start, end=min(start + _PART_BYTES, size))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(get, range(0, size, _PART_BYTES)))

    def _key(self, at: Attempt) -> str:
        path = (self.home.root / at.name).path.lstrip("/")
        return f"{path}/rank_{self.setting.group.rank}"


class RawFsspec(Driver):
    """fsspec's library by itself, for ``setting``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import fsspec

        options = fsspec_options(self.home) | {"skip_instance_cache": True}
        protocol = self.home.place.protocol
        self._filesystem: Any = fsspec.filesystem(
            "s3" if protocol == "s3a" else protocol, **options
        )
        self._object = bytes(noise(_OBJECT_BYTES))

    def about(self) -> Engine:
        known = PROTOCOLS.get(self.home.place.protocol)
        version = version_text(known.usual if known else "fsspec")
        return Engine(
            "raw",
            f"{version}: objects of {_OBJECT_BYTES >> 20} MiB, {_AT_ONCE} at once",
            "every object's answer",
            "nothing",
            is_limit=True,
        )

    def save(self, state: State, at: Attempt) -> None:
        def put(path: str, size: int) -> None:
            self._filesystem.pipe_file(path, self._object[:size])

        self._each(size_of(state), at, put)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        def get(path: str, size: int) -> None:
            # By keyword: the second argument of s3fs is a version, so half of the range would be lost.
            if len(self._filesystem.cat_file(path, start=0, end=size)) != size:
                raise EOFError(f"{path} is not {size} bytes")

        self._each(size_of(target), at, get)

    def _each(self, size: int, at: Attempt, move: Callable[[str, int], None]) -> None:
        uri = fsspec_uri(at.place)
        root = self._filesystem._strip_protocol(uri)  # noqa: SLF001 - its public spelling
        rank = self.setting.group.rank

        def one(start: int) -> None:
            move(f"{root}/rank_{rank}_{start}", min(_OBJECT_BYTES, size - start))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(one, range(0, size, _OBJECT_BYTES)))
