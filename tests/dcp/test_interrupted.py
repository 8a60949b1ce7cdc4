"""Ctrl-C, once and again, and memory that was given back: no byte goes where it does not belong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.dcp.read.read_threads import ReadPool
from ckptfs.dcp.write.host_memory import memory_of
from ckptfs.dcp.write.parallel_windows import Cancelled, run_all
from ckptfs.errors import CkptfsError, StateError
from ckptfs.storage.io import FileEngine
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.local.writers import WindowedFile
from ckptfs.uri import Uri
from tests.measures import descriptors_below

WINDOW_BYTES = 8 << 20


class Held(Posix):
    """Writes of other threads than the main one wait for ``go``; ``first`` is set after the first."""

    def __init__(self) -> None:
        self.reached, self.go, self.first = threading.Event(), threading.Event(), threading.Event()
        self.written = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As the kernel's, later."""
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            self.go.wait(60)
        sent = super().pwritev(fd, buffers, offset)
        self.written += 1
        self.first.set()
        return sent


def test_after_ctrl_c_no_thread_writes_any_more(tmp_path: Path) -> None:
    """An interruption while a thread is inside a write: it has returned before the error is raised."""
    posix = Held()
    writer = WindowedFile(
        posix,
        Uri.parse(str(tmp_path / "x")),
        str(tmp_path / ".partial-x"),
        lambda _: None,
        size_bytes=2 * WINDOW_BYTES,
        wanted=FileEngine.BUFFERED,
    )
    numbers = iter(range(2))
    lock = threading.Lock()

    def work() -> None:
        with lock:
            number = next(numbers)
        if threading.current_thread() is threading.main_thread():
            posix.reached.wait(60)
        writer.write_at(number * WINDOW_BYTES, [memoryview(bytes(WINDOW_BYTES))])

    def interrupt() -> None:
        posix.reached.wait(60)
        posix.first.wait(60)  # the main thread has written its window
        for _ in range(2):  # the first may find the main thread still at its own window
            if not returned.is_set():
                os.kill(os.getpid(), signal.SIGINT)
            returned.wait(0.3)  # where it waits for no one it is back at once
        posix.go.set()

    def interrupted() -> None:
        try:
            run_all([work, work], Cancelled(), 2)
        finally:
            written.append(posix.written)
            returned.set()

    returned, written = threading.Event(), list[int]()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), writer:
        interrupted()
    assert written == [2]
    thread.join()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_aborted_under_a_write_is_closed_by_that_write(tmp_path: Path) -> None:
    """Its descriptor is not reused before: what is opened in that time keeps its bytes."""
    posix = Held()
    writer = WindowedFile(
        posix,
        Uri.parse(str(tmp_path / "x")),
        str(tmp_path / ".partial-x"),
        lambda _: None,
        size_bytes=WINDOW_BYTES,
        wanted=FileEngine.BUFFERED,
    )
    thread = threading.Thread(
        target=lambda: writer.write_at(0, [memoryview(bytes(WINDOW_BYTES))]), daemon=True
    )
    thread.start()
    posix.reached.wait(60)
    writer.abort()
    innocent = tmp_path / "innocent"
    assert descriptors_below(tmp_path) == [str(tmp_path / ".partial-x")]
    with innocent.open("w+b") as file:
        file.write(b"precious")
        file.flush()
        posix.go.set()
        thread.join()
        assert innocent.read_bytes() == b"precious"
    assert descriptors_below(tmp_path) == []


def test_lanes_are_not_left_while_one_reads() -> None:
    """However often Ctrl-C comes: nothing is written into the caller's memory afterwards."""
    memory, reached, go = bytearray(4), threading.Event(), threading.Event()

    def job() -> None:
        reached.set()
        go.wait(60)
        memory[:] = b"LATE"

    def interrupt() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # three of them, not one: signals of one kind are not counted
        go.set()

    def read() -> None:
        with ReadPool(2) as pool:
            pool.submit(job, lambda _: None)
            reached.wait(60)
            thread.start()
            raise KeyboardInterrupt

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        read()
    assert bytes(memory) == b"LATE"
    memory[:] = b"GOOD"
    thread.join()
    assert bytes(memory) == b"GOOD"


@pytest.mark.parametrize("left_bytes", [0, 2000])
def test_a_tensor_whose_memory_was_given_back_is_not_saved(tmp_path: Path, left_bytes: int) -> None:
    """As sharded training frees parameters: an error, not what is there now; and nothing is committed."""
    tensor = torch.arange(1000, dtype=torch.float32)
    tensor.untyped_storage().resize_(left_bytes)
    with pytest.raises(CkptfsError, match="no memory of its size"):
        ckptfs.save({"w": tensor, "whole": torch.ones(3)}, tmp_path / "run" / "step_1")
    assert ckptfs.latest(tmp_path / "run") is None
    with pytest.raises(StateError):
        memory_of(tensor)


def test_a_tensor_whose_memory_was_given_back_is_not_loaded_into(tmp_path: Path) -> None:
    """What is there belongs to somebody else."""
    uri = tmp_path / "run" / "step_1"
    ckptfs.save({"w": torch.arange(1000, dtype=torch.float32)}, uri)
    target = torch.zeros(1000)
    target.untyped_storage().resize_(2000)
    with pytest.raises(CkptfsError, match="no memory of its size"):
        ckptfs.load({"w": target}, uri)
