"""How long small operations take, and how fast a large file goes out and comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckptfs.errors import StorageError
from ckptfs.storage.base import Storage
from ckptfs.tools.doctor.seen import Latency, Refusal, Transfer

__all__ = ["look_at_latency", "read_back", "write_whole"]

_SMALL = 8
_PIECE_BYTES = 8 << 20
_BLOCK_BYTES = 16 << 20


def look_at_latency(storage: Storage, rank: int) -> Latency:
    """A few small files: each written durably, looked at and read."""
    base = f"small/{rank}"
    taken: dict[str, list[float]] = {"write": [], "stat": [], "read": []}

    def timed(what: str, act: Callable[[], object]) -> None:
        begun_s = time.perf_counter()
        act()
        taken[what].append(time.perf_counter() - begun_s)

    try:
        storage.make_dir(base)
        for number in range(_SMALL):
            key = f"{base}/{number}"
            timed("write", partial(storage.replace, key, b"small"))
            timed("stat", partial(storage.stat, key))
            timed("read", partial(storage.read, key))
    except StorageError as error:
        return Latency({}, Refusal.of(error), by_reader=len(taken["write"]) > len(taken["read"]))
    return Latency({what: tuple(times) for what, times in taken.items()})


def write_whole(storage: Storage, rank: int, size_bytes: int) -> Transfer:
    """Write this rank's file, durably. Its bytes are random and made before the time is taken."""
    block = memoryview(os.urandom(min(size_bytes, _BLOCK_BYTES)))
    try:
        storage.make_dir("large")
        begun_s = time.perf_counter()
        left = size_bytes
        with storage.open_write(f"large/{rank}", size_hint_bytes=size_bytes) as writer:
            while left > 0:
                at = (size_bytes - left) % len(block)
                piece = block[at : at + min(left, _PIECE_BYTES)]
                writer.lend(piece)
                left -= len(piece)
        storage.sync("large")
        taken_s = time.perf_counter() - begun_s
    except StorageError as error:
        return Transfer(size_bytes, refusal=Refusal.of(error))
    return Transfer(size_bytes, write_s=taken_s, cached=_let_go(storage, rank))


def _let_go(storage: Storage, rank: int) -> str:
    """Ask the kernel to drop what it holds of the file; what may answer the read all the same."""
    path = storage.local_path(f"large/{rank}")
    if path is None:
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError:
        return "this node's memory"
    return "the server's or the disk's memory"


def read_back(storage: Storage, rank: int, mine: Transfer) -> Transfer:
    """Read the file of ``rank``, several ranges at once as a load does; ``mine`` with its time."""
    if mine.refusal is not None:
        return mine
    buffer = memoryview(bytearray(mine.size_bytes))
    try:
        begun_s = time.perf_counter()
        with storage.open_read(f"large/{rank}") as reader:
            step = max(1, reader.window_bytes)
            spans = [(at, buffer[at : at + step]) for at in range(0, mine.size_bytes, step)]
            with ThreadPoolExecutor(max(1, reader.concurrency)) as pool:
                list(pool.map(lambda span: reader.read_into(*span), spans))
        taken_s = time.perf_counter() - begun_s
    except StorageError as error:
        return Transfer(mine.size_bytes, mine.write_s, refusal=Refusal.of(error))
    return Transfer(mine.size_bytes, mine.write_s, taken_s, mine.cached)
