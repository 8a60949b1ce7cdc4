"""Memory for staging that is there before the first save: who owns it, and what becomes of it.

Counted at the one place where host memory is made, and by the page faults of the thread that copies.
"""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs import _torch
from ckptfs.dcp.staging import buffers as module
from ckptfs.dcp.staging.buffers import HostBuffers, Lease
from ckptfs.dcp.staging.staging import size_of_copy, size_of_tensors

MIB = 1 << 20
WAIT_S = 120.0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all host memory that is made from now on."""
    sizes: list[int] = []
    real = module.host_memory

    def counted(size_bytes: int) -> torch.Tensor:
        sizes.append(size_bytes)
        return real(size_bytes)

    monkeypatch.setattr(module, "host_memory", counted)
    return sizes


@contextmanager
def _held_by_its_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, ...]]:
    """A reservation's thread stays with its memory from the first event on, until the second is set."""
    started, go = threading.Event(), threading.Event()

    def pin(memory: torch.Tensor, device: int | None = None) -> None:
        started.set()
        assert go.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(_torch, "pin_host_memory", pin)
        try:
            yield started, go
        finally:
            go.set()


class _Waited(threading.Condition):
    """Sets an event when somebody waits for it."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(threading.RLock())
        self._event = event

    def wait(self, timeout: float | None = None) -> bool:
        self._event.set()
        return super().wait(timeout)


# -- the pool ------------------------------------------------------------------------------------


def test_the_next_lease_gets_what_was_reserved(made: list[int]) -> None:
    """All of it was touched; the lease makes no memory, and neither does a second reservation."""
    buffers = HostBuffers(32 * MIB)
    assert buffers.reserve(8 * MIB + 5).result(WAIT_S) == 8 * MIB + 5
    assert buffers.held_bytes == 8 * MIB + 5
    lease = buffers.lease(8 * MIB)
    assert buffers.reserve(8 * MIB).result(WAIT_S) == 0
    lease.release()
    assert made == [8 * MIB + 5]


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="no page faults by thread")
def test_copying_into_reserved_memory_meets_no_fresh_page() -> None:
    """A fresh piece of 64 MiB costs at least a fault for every huge page; a reserved one costs none."""

    def faults(lease: Lease) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        ctypes.memset(lease.memory.data_ptr(), 1, lease.memory.numel())
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    fresh, reserved = HostBuffers(64 * MIB), HostBuffers(64 * MIB)
    reserved.reserve(64 * MIB).result(WAIT_S)
    assert faults(fresh.lease(64 * MIB)) >= 32
    assert faults(reserved.lease(64 * MIB)) < 8


def test_the_bound_holds_for_what_is_reserved(made: list[int]) -> None:
    """More than the bound is as much as the bound; what saves hold is not taken from them."""
    buffers = HostBuffers(4 * MIB)
    assert buffers.reserve(9 * MIB).result(WAIT_S) == 4 * MIB
    lease = buffers.lease(4 * MIB)
    buffers.resize(6 * MIB)
    assert buffers.reserve(5 * MIB).result(WAIT_S) == 0
    lease.release()
    assert HostBuffers(0).reserve(MIB).result(WAIT_S) == 0
    assert made == [4 * MIB]
    assert buffers.peak_bytes == 4 * MIB


def test_a_lease_that_comes_early_takes_what_is_being_touched(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the thread is off the memory, which then is its own, and makes none in addition."""
    buffers = HostBuffers(16 * MIB)
    with _held_by_its_thread(monkeypatch) as (started, go):
        buffers._changed = _Waited(go)
        touched = buffers.reserve(3 * MIB, pinned=True)
        assert started.wait(WAIT_S)
        assert buffers.lease(2 * MIB).size_bytes == 3 * MIB
    assert touched.result(WAIT_S) == 3 * MIB
    assert made == [3 * MIB]


def test_what_is_touched_is_left_as_soon_as_it_is_needed() -> None:
    """A thread that was asked to stop touches nothing more."""
    slab = module._Slab(16 * MIB)
    slab.stop = True
    assert slab.touch() == 0


def test_a_state_that_needs_more_gets_it_and_the_rest_goes(made: list[int]) -> None:
    """What was reserved for a smaller state is not kept without a use; a smaller state uses it."""
    buffers = HostBuffers(32 * MIB)
    buffers.reserve(2 * MIB).result(WAIT_S)
    lease = buffers.lease(3 * MIB)
    assert buffers.held_bytes == 3 * MIB
    lease.release()
    buffers.reserve(5 * MIB).result(WAIT_S)
    assert buffers.held_bytes == 8 * MIB  # the one that a save had stays
    buffers.reserve(7 * MIB).result(WAIT_S)
    assert buffers.held_bytes == 10 * MIB
    assert made == [2 * MIB, 3 * MIB, 5 * MIB, 7 * MIB]


def test_memory_that_cannot_be_had_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The system refuses: training continues, and so does a save that fits."""
    buffers = HostBuffers(1 << 61)
    assert buffers.reserve(1 << 60).result(WAIT_S) == 0
    assert "no memory is reserved for asynchronous saves" in caplog.text
    assert buffers.held_bytes == 0
    buffers.lease(MIB).release()


def test_a_closed_pool_reserves_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was being touched when it was closed is given back."""
    buffers = HostBuffers(4 * MIB)
    with _held_by_its_thread(monkeypatch) as (started, go):
        touched = buffers.reserve(3 * MIB, pinned=True)
        assert started.wait(WAIT_S)
        buffers.close()
        go.set()
    touched.result(WAIT_S)
    assert buffers.held_bytes == 0
    assert buffers.reserve(MIB).result(WAIT_S) == 0
    assert buffers.held_bytes == 0


FORKS = """
import os, threading
from ckptfs import _torch
from ckptfs.dcp.staging.buffers import HostBuffers

buffers, touching, end = HostBuffers(1 << 22), threading.Event(), threading.Event()

def pin(memory, device):
    touching.set()
    end.wait()

def hold():
    with buffers._changed:
        locked.set()
        forked.wait()

_torch.pin_host_memory = pin
buffers.reserve(3 << 20, pinned=True)
touching.wait()
locked, forked = threading.Event(), threading.Event()
threading.Thread(target=hold).start()
locked.wait()
child = os.fork()
if child == 0:
    code = 1
    try:
        assert buffers.held_bytes == 0
        buffers.lease(2 << 20).memory[:9].fill_(1)
        assert buffers.reserve(2 << 20).result() == 0  # the lease has it
        buffers.close()
        code = 0
    finally:
        os._exit(code)
forked.set()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
end.set()
raise SystemExit(code)
"""


def test_the_child_of_a_fork_begins_with_an_empty_pool() -> None:
    """A fork while memory is touched and another thread has the lock: the child's pool is its own."""
    forking = [sys.executable, "-W", "ignore", "-c", FORKS]
    ended = subprocess.run(forking, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_interpreter_ends_while_memory_is_touched() -> None:
    """The thread is waited for: coming back from torch later it would end the process with an abort."""
    script = (
        "from ckptfs.dcp.staging.buffers import HostBuffers\n"
        "HostBuffers(1 << 30).reserve(1 << 28)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# -- sizes ---------------------------------------------------------------------------------------


def test_the_size_is_what_staging_borrows(made: list[int], tmp_path: Path) -> None:
    """Shared memory once, views as far as they show; what a restore reckons is no less."""
    whole = torch.zeros(MIB)
    state = {"a": whole, "b": {"tied": whole, "view": whole[:10]}, "l": [torch.zeros(3), 7, "text"]}
    size = size_of_copy(state)
    assert 4 * MIB + 12 <= size.size_bytes < 4 * MIB + 200
    assert not size.on_device
    assert size_of_tensors(state).size_bytes >= size.size_bytes
    ckptfs.async_save(state, tmp_path / "run" / "step_1", host_memory_bytes=9 * MIB).result(WAIT_S)
    assert made == [size.size_bytes]


# -- the manager ---------------------------------------------------------------------------------


def _state(numel: int = MIB) -> dict[str, Any]:
    return {"w": torch.ones(numel), "step": 3, "own": ckptfs.PerRank({"seed": torch.ones(5)})}


def _is_saved(run: Path, step: int, state: dict[str, Any]) -> bool:
    got = {"w": torch.zeros_like(state["w"])}
    ckptfs.load(got, run / f"step_{step}", strict=False)
    return torch.equal(got["w"], state["w"])


def test_a_managers_first_save_uses_what_it_reserved(made: list[int], tmp_path: Path) -> None:
    """Staging makes no memory, and nothing else of the job changes."""
    state = _state()
    with ckptfs.CheckpointManager(tmp_path, mode="async") as manager:
        touched = manager.reserve(state).result(WAIT_S)
        assert touched >= 4 * MIB
        assert made == [touched]
        manager.save(1, state)
        manager.wait()
        assert manager.reserve(state).result(WAIT_S) == 0
    assert made == [touched]
    assert _is_saved(tmp_path, 1, state)


def test_a_restore_reserves_by_itself(made: list[int], tmp_path: Path) -> None:
    """The state of a fresh process, an optimizer without state too: its first save makes no memory."""

    def build() -> dict[str, Any]:
        model = torch.nn.Linear(256, 256)
        return {"model": model, "adam": torch.optim.Adam(model.parameters())}

    trained = build()
    trained["model"](torch.ones(256)).sum().backward()
    trained["adam"].step()
    with ckptfs.CheckpointManager(tmp_path) as manager:
        assert manager.reserve(trained).result(WAIT_S) == 0  # nothing is staged by such a manager
        manager.save(1, trained)
        manager.restore(trained)
    assert made == []
    fresh = build()
    with ckptfs.CheckpointManager(tmp_path, mode="async") as manager:
        manager.restore(fresh)
        assert len(made) == 1
        manager.save(2, fresh)
        manager.wait()
        assert len(made) == 1
    assert made[0] >= 3 * 4 * 256 * 257


def test_the_state_may_change_after_it_was_reserved_for(made: list[int], tmp_path: Path) -> None:
    """A larger one is saved from other memory, and what was reserved is not kept in addition."""
    larger = _state(2 * MIB)
    with ckptfs.CheckpointManager(tmp_path, mode="async") as manager:
        manager.reserve(_state()).result(WAIT_S)
        manager.save(1, larger)
        larger["w"].fill_(5.0)
        manager.wait()
        assert manager._staging_buffers().held_bytes == made[-1]
    assert len(made) == 2
    assert _is_saved(tmp_path, 1, _state(2 * MIB))


def test_a_state_that_cannot_be_saved_is_the_saves_affair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank that raised from it would leave the others alone in their next call."""
    wrong = {"w": torch.zeros(1), "made": object()}
    with ckptfs.CheckpointManager(tmp_path, mode="async") as manager:
        assert manager.reserve(wrong).result(WAIT_S) == 0
        assert "no memory is reserved" in caplog.text
    with pytest.raises(ckptfs.StateError, match="closed"):
        manager.reserve(_state())


def test_a_manager_that_never_saved_gives_the_memory_back(tmp_path: Path) -> None:
    """Closing is enough; nothing was claimed or written."""
    with ckptfs.CheckpointManager(tmp_path / "run", mode="async") as manager:
        manager.reserve(_state()).result(WAIT_S)
        pool = manager._staging_buffers()
        assert pool.held_bytes
    assert pool.held_bytes == 0
    assert not (tmp_path / "run").exists()
