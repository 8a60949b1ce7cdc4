"""ckptfs.async_save in one process: what its caller holds, the thread behind it, the node's writers."""

from __future__ import annotations

import gc
import logging
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.dcp.pending import PendingSave, Phase, SaveProgress
from ckptfs.dcp.saving import slot_directory, writer_slot
from ckptfs.dcp.worker import SaveWorker, exit_s
from ckptfs.errors import (
    CollectiveError,
    CommitConflictError,
    DeadlineError,
    StateError,
    UriError,
)
from ckptfs.events import Counters, SaveResult

WAIT_S = 120.0


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "lr": value}


# -- what the caller holds -----------------------------------------------------------------------


def test_a_save_tells_where_it_is_and_what_it_came_to(tmp_path: Path) -> None:
    """Futures in their order, the result of a synchronous save, and progress that ends at all."""
    at = tmp_path / "run/step_7"
    pending = ckptfs.async_save(_state(1.0), at)
    assert (pending.uri, pending.step) == (at.as_uri(), 7)
    assert pending.staged.done()
    result = pending.result(WAIT_S)
    assert pending.committed.result(0) is result
    assert pending.durable.result(0).items == 2
    assert (result.uri, result.step) == (at.as_uri(), 7)
    assert pending.progress() == SaveProgress(Phase.COMMITTED, 4000, 2, 4000, 2)
    assert pending.progress().fraction == 1.0
    assert "committed" in repr(pending)


def test_waiting_has_a_deadline_and_the_save_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """result(timeout_s) says how far the save is, and may be asked again."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"hold={gate}:close:*.distcp:1")
    pending = ckptfs.async_save(_state(1.0), f"faults+file://{tmp_path}/run/step_1")
    with pytest.raises(DeadlineError, match=r"not committed within 0\.01 s"):
        pending.result(0.01)
    assert not pending.committed.cancel()  # ranks that wait for this one cannot be called back
    gate.touch()
    assert pending.result(WAIT_S).step == 1


def test_a_failure_that_nobody_asks_for_is_logged(tmp_path: Path) -> None:
    """A PendingSave that is dropped leaves its error, with the traceback, in the log at once."""
    ckptfs.save(_state(1.0), tmp_path / "step_1")
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.put(self.format(record))

    handler, logger = Listening(), logging.getLogger("ckptfs.dcp")
    logger.addHandler(handler)
    try:
        ckptfs.async_save(_state(2.0), tmp_path / "step_1")
        gc.collect()
        text = told.get(timeout=WAIT_S)
    finally:
        logger.removeHandler(handler)
    assert "step_1 failed: step_1 is committed already" in text
    assert "Traceback" in text


def test_what_the_caller_got_wrong_is_told_as_it_is_by_save(tmp_path: Path) -> None:
    """Conflicts and URIs arrive as their own types; what can be known at once is raised at once."""
    ckptfs.async_save(_state(1.0), tmp_path / "step_1").result(WAIT_S)
    again = ckptfs.async_save(_state(2.0), tmp_path / "step_1")
    assert isinstance(again.committed.exception(WAIT_S), CommitConflictError)
    assert again.progress().phase is Phase.FAILED
    odd = ckptfs.async_save(_state(2.0), "s3://")
    assert isinstance(odd.committed.exception(WAIT_S), UriError)
    leaf = ckptfs.async_save({"f": lambda: None}, tmp_path / "step_2")
    assert isinstance(leaf.staged.exception(0), StateError)
    error = leaf.committed.exception(WAIT_S)
    assert isinstance(error, CollectiveError)
    assert isinstance(error.__cause__, StateError)
    with ckptfs.prepare_run(tmp_path / "other") as run:
        astray = ckptfs.async_save(_state(1.0), tmp_path / "step_4", run=run)
        assert isinstance(astray.committed.exception(WAIT_S), StateError)
    with pytest.raises(StateError, match="negative"):
        ckptfs.async_save(_state(1.0), tmp_path / "step_3", host_memory_bytes=-1)
    assert [c.uri.name for c in ckptfs.list_checkpoints(tmp_path)] == ["step_1"]


def test_leaving_a_run_waits_for_its_saves_in_their_order(tmp_path: Path) -> None:
    """Saves of one run commit one after the other and before the run is released."""
    with ckptfs.prepare_run(tmp_path) as run:
        saves = [ckptfs.async_save(_state(n), tmp_path / f"step_{n}", run=run) for n in range(1, 5)]
    assert all(save.done() for save in saves)
    assert [c.step for c in ckptfs.list_checkpoints(tmp_path)] == [1, 2, 3, 4]
    with pytest.raises(StateError, match="no more saves"):
        ckptfs.async_save(_state(5.0), tmp_path / "step_5", run=run)


def test_an_exception_leaves_a_run_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage hangs and training raises: the exception is out after CKPTFS_EXIT_S seconds."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"hold={gate}:close:*.distcp:1")
    monkeypatch.setenv("CKPTFS_EXIT_S", "0.1")
    at = f"faults+file://{tmp_path}/run"
    saves: list[PendingSave] = []

    def train() -> None:
        with ckptfs.prepare_run(at) as run:
            saves.append(ckptfs.async_save(_state(1.0), f"{at}/step_1", run=run))
            raise ArithmeticError("the loss is not a number")

    with pytest.raises(ArithmeticError):
        train()
    [pending] = saves
    assert not pending.done()
    gate.touch()
    pending.committed.exception(WAIT_S)


def test_a_replaced_step_is_claimed_for_by_the_thread(tmp_path: Path) -> None:
    """if_exists="replace" without a run works as in save."""
    ckptfs.save(_state(1.0), tmp_path / "step_1")
    ckptfs.async_save(_state(2.0), tmp_path / "step_1", if_exists="replace").result(WAIT_S)
    got = _state(0.0)
    ckptfs.load(got, tmp_path / "step_1")
    assert got["lr"] == 2.0


# -- the thread ----------------------------------------------------------------------------------


def test_jobs_run_in_order_and_a_failure_does_not_end_the_thread() -> None:
    """What was submitted first is done first; errors are in the futures, all of them settled."""
    worker, done = SaveWorker(), []

    def job(number: int) -> int:
        done.append(number)
        if number == 1:
            raise ValueError("the test asked for it")
        return number

    futures = [worker.submit(f"job {n}", lambda n=n: job(n)) for n in range(4)]  # type: ignore[misc]
    assert worker.wait(WAIT_S)
    assert done == [0, 1, 2, 3]
    assert all(future.done() for future in futures)
    assert isinstance(futures[1].exception(), ValueError)
    assert worker.close(WAIT_S)
    with pytest.raises(StateError, match="no more saves"):
        worker.submit("late", lambda: None)


def test_what_has_not_begun_when_time_is_up_is_told_so() -> None:
    """close(timeout) lets the running job end and fails those that wait."""
    worker, go, reached = SaveWorker(), threading.Event(), threading.Event()

    def first() -> str:
        reached.set()
        go.wait(WAIT_S)
        return "done"

    running, waiting = worker.submit("first", first), worker.submit("second", lambda: None)
    assert reached.wait(WAIT_S)
    assert worker.unfinished == 2
    assert not worker.close(0.0)
    assert isinstance(waiting.exception(0), StateError)
    go.set()
    assert running.result(WAIT_S) == "done"


def test_the_time_at_exit_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 s unless CKPTFS_EXIT_S says otherwise; nonsense is refused by name."""
    monkeypatch.delenv("CKPTFS_EXIT_S", raising=False)
    assert exit_s() == 60.0
    monkeypatch.setenv("CKPTFS_EXIT_S", "2.5")
    assert exit_s() == 2.5
    monkeypatch.setenv("CKPTFS_EXIT_S", "soon")
    with pytest.raises(StateError, match="CKPTFS_EXIT_S='soon'"):
        exit_s()


# -- the node's writers --------------------------------------------------------------------------


def test_a_dead_writer_frees_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a process that was killed is taken by the next one; that of a living one is not."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    script = (
        "from ckptfs.dcp.saving import writer_slot\n"
        "with writer_slot('run', 'node', 1):\n"
        "    print('held', flush=True)\n"
        "    input()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    looks: list[float] = []

    def look(rest_s: float) -> None:
        looks.append(rest_s)
        holder.kill()  # it was there while we looked
        holder.wait(WAIT_S)

    with writer_slot("run", "other node", 1), writer_slot("other run", "node", 1):
        assert looks == []
    with writer_slot("run", "node", 1, look):
        assert len(looks) == 1
    holder.stdout.close()
    assert holder.stdin
    holder.stdin.close()


def test_slots_lie_in_a_directory_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that somebody else could have planted is refused; no slot is taken without a limit."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with writer_slot("run", "node", None):
        assert list(tmp_path.iterdir()) == []
    assert os.stat(slot_directory()).st_mode & 0o777 == 0o700
    os.rmdir(slot_directory())
    os.symlink(tmp_path, f"{tmp_path}/ckptfs-{os.getuid()}")
    with pytest.raises(StateError, match="belongs to another user"):
        slot_directory()
    with pytest.raises(StateError, match="at least one"), writer_slot("run", "node", 0):
        pass


def test_a_pending_save_is_made_without_a_thread() -> None:
    """Its futures run from the start and are settled once."""
    pending = PendingSave("file:///x/step_1", 1)
    pending.fail(StateError("no"))
    assert isinstance(pending.committed.exception(0), StateError)
    assert isinstance(pending.durable.exception(0), StateError)
    assert not pending.staged.done()  # the caller's own
    pending.has_staged(None)
    assert pending.staged.result(0) is None


def test_of_two_ends_of_a_pending_save_the_first_counts() -> None:
    """One that was given up stays failed, in its futures and its phase, when its thread comes back."""
    pending = PendingSave("file:///x/step_1", 1)
    pending.fail(StateError("it hung"))
    pending.watch().enter(Phase.COMMIT)
    pending.succeed(SaveResult(pending.uri, 1, "id", Counters(), Counters(), (), 0.0))
    assert pending.progress().phase is Phase.FAILED
    assert isinstance(pending.committed.exception(0), StateError)
