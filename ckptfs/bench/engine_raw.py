"""The limit of a storage: as many bytes as the state has, and nothing of a checkpoint.

a directory       one file a rank, O_DIRECT from 4 threads, 8 MiB each, fsync; cold reads the same
                  way into memory that was used before, warm ones from the page cache into the
                  tensors, read or mapped: whichever was faster in the warm-up round. Where
                  O_DIRECT is refused (tmpfs), buffered.
an object store   obstore by itself: one multipart put, ranges of 16 MiB, 8 at once, dropped.
                  Where it is not installed, or elsewhere: fsspec, objects of 64 MiB, 8 at once.
"""

from __future__ import annotations

import mmap
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ckptfs.bench.engine_bare import BareFile, Way
from ckptfs.bench.engine_files import fsync
from ckptfs.bench.engines import Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.places import fsspec_options, fsspec_uri
from ckptfs.bench.raw_io import (
    bytes_of,
    fill,
    noise,
    parts_of,
    rounded,
    size_of,
    takes_direct,
    write_all,
)
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State, local_of
from ckptfs.storage.clients.choose import PROTOCOLS
from ckptfs.storage.clients.obstore import ObstoreClient
from ckptfs.storage.object_store import ObjectStorage

__all__ = ["RawFile", "RawFsspec", "RawObstore", "open_raw"]

_CHUNK_BYTES = 8 << 20
_THREADS = 4
_PART_BYTES = 16 << 20
_OBJECT_BYTES = 64 << 20
_AT_ONCE = 8
_MAPS = hasattr(mmap, "MAP_POPULATE")


def open_raw(setting: Setting, variant: str | None = None) -> Driver:
    """Return the shortest way to the target that is installed.

    Args:
        setting: What it works with.
        variant: One way alone, see ``engine_bare``; None: the default.

    Raises:
        StateError: The target takes no O_DIRECT, and that is the way.
    """
    if variant is not None:
        return BareFile(setting, Way(variant))
    if setting.home.place.is_local:
        return RawFile(setting)
    storage = setting.home.storage
    fast = isinstance(storage, ObjectStorage) and isinstance(storage.client, ObstoreClient)
    return RawObstore(setting) if fast else RawFsspec(setting)


_Pieces = list[tuple[memoryview, int]]  # memory of a tensor, and where in the file its bytes are
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
    """One file of this rank's size, for ``setting``."""

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
                # The last block is written whole, and cut off below.
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
                # The last block is asked for whole, and its read ends with the file.
                length = rounded(end - start) if self._direct else end - start
                fill(fd, buffer[:length], start, end - start)

            self._each(size, read)
        finally:
            os.close(fd)

    def _load_warm(self, target: State, at: Attempt) -> None:
        """Into the tensors: what a load that copies nothing twice would cost.

        Which way is fastest is the machine's: the first call, in the warm-up round, tries all.
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
                # Twice each: the first touches what it is measured on.
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
        assert isinstance(storage, ObjectStorage)  # noqa: S101 - open_raw looked
        assert isinstance(storage.client, ObstoreClient)  # noqa: S101
        self._store = storage.client.library_store(_PART_BYTES)
        self._part = noise(_PART_BYTES)

    def about(self) -> Engine:
        told = version_text("obstore")
        return Engine(
            "raw",
            f"{told}: multipart put and ranges of {_PART_BYTES >> 20} MiB, {_AT_ONCE} at once",
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
        told = version_text(known.usual if known else "fsspec")
        return Engine(
            "raw",
            f"{told}: objects of {_OBJECT_BYTES >> 20} MiB, {_AT_ONCE} at once",
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
            # By name: the second argument of s3fs is a version, and half of the range would be lost.
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
