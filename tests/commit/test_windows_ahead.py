"""Windows of a file in order, read ahead: how long each keeps its bytes, and who owns their memory."""

from __future__ import annotations

import contextlib
import threading

import pytest

from ckptfs.commit.directory_checkpoints.read import DownloadThreads, windows
from ckptfs.errors import NoSpaceError
from ckptfs.storage.base import DataReader
from ckptfs.storage.io import DataWriter, Reach, buffer_pool, is_aligned
from ckptfs.storage.threads import Pump

MIB = 1 << 20


class Numbered(DataReader):
    """A file in which every byte has the number of its window."""

    def __init__(self, size_bytes: int, *, window_bytes: int, at_once: int, reach: Reach) -> None:
        self.size_bytes, self.window_bytes = size_bytes, window_bytes
        self.concurrency, self.reach = at_once, reach
        self.starts: list[int] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.starts.append(offset)
        buffer[:] = bytes([offset // self.window_bytes]) * len(buffer)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("lasting", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 150])
def test_a_window_keeps_its_bytes_until_so_many_more_were_asked_for(
    at_once: int, lasting: int, first: int
) -> None:
    """A writer on another thread still has the last ones when the next is read."""
    reader = Numbered(950, window_bytes=100, at_once=at_once, reach=Reach.REMOTE)
    with contextlib.ExitStack() as stack:
        held: list[tuple[int, memoryview]] = []
        size = 0
        for view in windows(
            reader, DownloadThreads(stack), contextlib.nullcontext, first, lasting=lasting
        ):
            held.append(((first + size) // 100, view))
            size += len(view)
            for number, last in held[-1 - lasting :]:
                assert set(last) == {number}
    assert first + size == 950
    assert sorted(reader.starts) == [first, *range(first - first % 100 + 100, 950, 100)]


def test_large_windows_of_a_local_file_are_aligned_memory_that_is_given_back() -> None:
    """What direct I/O may use as it is; of a store over the network plain memory, which costs what it has."""
    for reach, aligned in ((Reach.LOCAL, True), (Reach.REMOTE, False)):
        reader = Numbered(5 * MIB, window_bytes=2 * MIB, at_once=2, reach=reach)
        with contextlib.ExitStack() as stack:
            views = [*windows(reader, DownloadThreads(stack), contextlib.nullcontext, lasting=9)]
            assert [is_aligned(view) for view in views] == [aligned] * 3
            lent = {id(view.obj) for view in views}
        with contextlib.ExitStack() as stack:
            again = {id(stack.enter_context(buffer_pool().buffer(1)).obj) for _ in range(8)}
            assert (lent <= again) is aligned


class Recording(DataWriter):
    """Keeps what it is given; the write of that number fails."""

    def __init__(self, fails_at: int = 0) -> None:
        self.fails_at, self.pieces = fails_at, list[bytes]()
        self.writing, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        assert not self.is_over, "written after the end"
        self.writing.set()
        self.go_on.wait(60)
        if len(self.pieces) + 1 == self.fails_at:
            raise NoSpaceError("full")
        self.pieces.append(bytes(data[:1]))
        return len(data)

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = True


def test_a_pump_writes_all_in_order_before_its_block_ends() -> None:
    """Pieces that are large enough for a thread."""
    with Recording() as writer, Pump(writer) as pump:
        for number in range(6):
            pump.write(memoryview(bytes([number]) * (4 * MIB)))
    assert writer.pieces == [bytes([number]) for number in range(6)]


def test_what_fails_on_the_pump_s_thread_is_raised_in_its_block() -> None:
    """By the next piece or by the end of the block, and nothing is written after it."""
    writer = Recording(fails_at=2)

    def write() -> None:
        with writer, Pump(writer) as pump:
            for number in range(6):
                pump.write(memoryview(bytes([number]) * (4 * MIB)))

    with pytest.raises(NoSpaceError):
        write()
    assert writer.pieces == [b"\0"]


def test_a_pump_that_is_left_by_an_error_waits_for_the_write_in_progress() -> None:
    """Or that would continue through a descriptor that is closed, and then another file's."""
    writer = Recording()
    writer.go_on.clear()

    class Leaving(Pump):
        """The write continues when the block is being left, and not before."""

        def stop(self, why: BaseException) -> None:
            writer.go_on.set()
            super().stop(why)

    def write() -> None:
        with writer, Leaving(writer) as pump:
            pump.write(memoryview(bytes(4 * MIB)))
            assert writer.writing.wait(60)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert writer.pieces == [b"\0"]
