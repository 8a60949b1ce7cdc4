"""Loads from the page cache: what each block costs, counted, and how many threads have a part in it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfs.dcp.read.read_plan import PlannedRead
from ckptfs.dcp.read.read_threads import Helping, ReadPool
from ckptfs.dcp.read.scheduler import fetch_reads
from ckptfs.storage.registry import open_storage
from tests.dcp.fake_ranks import our_save, source

MIB = 1 << 20
BLOCKS = 24  # of the tensor: three windows
CALLS_PER_BLOCK = 16
_READ, _COMPARED = "preadv", "xxh3_64_intdigest"


@pytest.fixture
def one_core() -> Iterator[None]:
    """This thread, and those that it starts, have one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def told_of_a_load(place: Path, blocks: int) -> list[tuple[int, str]]:
    """Thread, and "" for a call of Python or the name of a built-in function, of all calls of a load
    of one tensor of so many blocks, out of the page cache.
    """
    saved = torch.arange(blocks * MIB // 8)
    storage = open_storage(place)
    metadata = our_save(storage, 1, lambda _: {"w": saved})
    for path in place.rglob("*.distcp"):
        path.read_bytes()  # it is in the page cache now, perhaps with marks of readahead,
        path.read_bytes()  # which another reader takes away
    blank = torch.zeros_like(saved)
    reads = [
        PlannedRead("w", at.relative_path, at.offset, at.length, saved.shape, saved.dtype,
             torch.Size([0]), saved.shape, blank)
        for at in metadata.storage_data.values()
    ]  # fmt: skip
    told: list[tuple[int, str]] = []

    def note(_frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            told.append((threading.get_ident(), ""))
        elif event == "c_call":
            told.append((threading.get_ident(), arg.__name__))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        fetch_reads(source(storage), reads, lambda _read, _stream: None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert torch.equal(blank, saved)
    return told


@pytest.mark.usefixtures("one_core")
def test_each_block_is_compared_once_and_before_the_next_one_is_read(tmp_path: Path) -> None:
    """But for the first window, with a place that is not known yet, reads and comparisons of blocks
    take turns: a block is compared while it is in the processor's cache.
    """
    told = [name for _, name in told_of_a_load(tmp_path, BLOCKS) if name in (_READ, _COMPARED)]
    first, last = told.index(_COMPARED), 2 * (BLOCKS - 8)
    assert told.count(_COMPARED) - 1 == BLOCKS  # one is of the digests' own file
    assert told[-last:] == [_READ, _COMPARED] * (BLOCKS - 8)
    assert told.count(_READ) <= 2 + 8 + BLOCKS - 8, told[first:]


@pytest.mark.usefixtures("one_core")
def test_a_block_of_a_large_tensor_costs_few_calls_of_python(tmp_path: Path) -> None:
    """Each more of them at most so many, reading and comparing together."""

    def calls(blocks: int) -> int:
        told = told_of_a_load(tmp_path / str(blocks), blocks)
        return sum(not name for _, name in told)

    few, many = calls(BLOCKS), calls(3 * BLOCKS)
    assert (many - few) / (2 * BLOCKS) < CALLS_PER_BLOCK, (few, many)


@pytest.mark.usefixtures("one_core")
def test_the_page_cache_is_read_by_no_more_threads_than_there_are_cores(tmp_path: Path) -> None:
    """With one core the thread that loads reads all of it: others would only take turns with it."""
    told = told_of_a_load(tmp_path, BLOCKS)
    if not tells_what_is_cached(tmp_path):
        pytest.skip("this filesystem does not tell what is in the page cache")
    assert {thread for thread, name in told if name == _READ} == {threading.get_ident()}


def tells_what_is_cached(place: Path) -> bool:
    """Whether reads there can be answered from the page cache alone."""
    path = place / "asked"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def test_lanes_begin_narrow_and_widen_when_somebody_waits() -> None:
    """One at first: every job on the thread that asks; four from then on: four jobs meet each other."""
    ran: list[int] = []
    meeting = threading.Barrier(4, timeout=120)

    def here() -> None:
        ran.append(threading.get_ident())

    def submit(job: Callable[[], object], count: int) -> None:
        for _ in range(count):
            pool.submit(job, lambda _: None)

    with ReadPool(4, Helping.YES, busy=1) as pool:
        submit(here, 20)
        while pool.wait():
            pass
        assert set(ran) == {threading.get_ident()}
        assert pool.used == 1
        submit(meeting.wait, 4)
        pool.widen(4)
        while pool.wait():
            pass
        assert pool.used == 4
        pool.widen(9)
        pool.widen(1)
        submit(meeting.wait, 8)
        while pool.wait():
            pass
        assert pool.used == 4
