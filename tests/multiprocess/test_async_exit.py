"""The interpreter ends while a save is under way: it is finished, or cleanly abandoned; never a hang.

In every scenario the storage holds back each rank's data file, so the save is under way for sure; it is
released, or not, by the first function that runs at exit.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from tests.multiprocess.harness import Rank, launch, torchrun

RANKS = 2
END_S = 400.0  # a process that has not ended by then hangs
NUMEL = 1 << 21  # 8 MiB: large enough for threads of its own


# -- inside the ranks ----------------------------------------------------------------------------


def state_of(rank: int, value: float) -> dict[str, Any]:
    """One tensor for each rank, under a name of its own."""
    return {f"of_{rank}": torch.full((NUMEL,), value), "step": value}


def leaves(rank: Rank) -> str:
    """Save step_1, begin step_2, and leave as the scenario says."""
    import torch.distributed as dist

    at, how = rank.args["run"], rank.args["how"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    else:
        rank.init_group()
    number = dist.get_rank()
    gate = f"{rank.args['gate']}-{number}"
    os.environ["CKPTFS_TEST_FAULT"] = f"hold={gate}:open_write:*/__{number}_0.distcp:1"
    held = rank.args["held"]
    run = ckptfs.prepare_run(at) if held else None
    ckptfs.async_save(state_of(number, 1.0), f"{rank.args['plain']}/step_1").result(END_S)
    pending = ckptfs.async_save(state_of(number, 2.0), f"{at}/step_2", run=run)
    pending.staged.result(0)
    if how in ("done", "raises", "sys.exit", "no threads"):
        atexit.register(let_go, pending, gate, how)
    dist.destroy_process_group()
    if how == "raises":
        raise ArithmeticError("the loss is not a number")
    if how == "sys.exit":
        sys.exit(3)
    if how == "SIGTERM":
        wait_for(gate)
        rank.tell("leaving")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    return "done"


def let_go(pending: ckptfs.PendingSave, gate: str, how: str) -> None:
    """Runs before anything of ckptfs at exit: the save is under way, and continues from here."""
    assert not pending.done()
    wait_for(gate)
    if how == "no threads":

        def refuse(*args: Any) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        threading._start_new_thread = refuse  # type: ignore[attr-defined]  # as Python does from 3.12 on
    Path(gate).touch()


def wait_for(gate: str) -> None:
    """Return when the storage has reached the operation that is held back."""
    reached = threading.Event()
    while not os.path.exists(f"{gate}.reached"):
        reached.wait(0.01)


# -- the tests -----------------------------------------------------------------------------------


def ended(pid: int) -> bool:
    """Wait until a process is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], END_S)[0])
    finally:
        os.close(handle)


def end(tmp_path: Path, how: str, *, held: bool = False, env: dict[str, str] | None = None) -> str:
    """Run the scenario with two ranks until both processes are gone; their logs."""
    disk = tmp_path / "run"
    args = {
        "run": f"faults+file://{disk}",
        "plain": str(tmp_path / "plain"),
        "gate": str(tmp_path / "gate"),
        "how": how,
        "held": held,
    }
    with launch(leaves, RANKS, args=args, env=env) as ranks:
        pids = [ranks.pid(n) for n in range(RANKS)]
        if how == "SIGTERM":
            ranks.wait("leaving")
        else:
            ranks.results()
        assert all(ended(pid) for pid in pids), ranks.logs()
        return ranks.logs()


def assert_finished(run: Path) -> None:
    """step_2 is there, whole."""
    assert [c.uri.name for c in ckptfs.list_checkpoints(run)] == ["step_2"]
    state = state_of(0, 0.0) | state_of(1, 0.0)
    ckptfs.load(state, run / "step_2")
    assert state["step"] == 2.0
    assert all(torch.equal(state[f"of_{n}"], torch.full((NUMEL,), 2.0)) for n in range(RANKS))


def assert_abandoned(run: Path) -> None:
    """Nothing is committed, and the run's next owner removes what was written."""
    assert ckptfs.list_checkpoints(run) == []
    with ckptfs.prepare_run(run) as held:
        assert os.listdir(run / ".ckptfs/attempts") == []
        ckptfs.save(state_of(0, 3.0), run / "step_3", run=held)
    assert [c.uri.name for c in ckptfs.list_checkpoints(run)] == ["step_3"]


@pytest.mark.parametrize("how", ["raises", "sys.exit", "no threads"])
def test_a_save_under_way_is_finished_when_the_interpreter_ends(tmp_path: Path, how: str) -> None:
    """After an exception, a sys.exit, and on a Python that starts no threads at exit; the process
    group is gone by then.
    """
    log = end(tmp_path, how)
    assert "abandoned" not in log
    assert "is incomplete" not in log  # what follows the commit needs no thread either
    assert_finished(tmp_path / "run")


@pytest.mark.parametrize("how", ["too long", "SIGTERM"])
def test_a_save_that_takes_too_long_is_abandoned_and_removed(tmp_path: Path, how: str) -> None:
    """The storage hangs: after CKPTFS_EXIT_S the process ends, as it does on SIGTERM without a handler;
    nothing is committed and the next owner of the run leaves no byte of it.
    """
    log = end(tmp_path, how, held=how == "SIGTERM", env={"CKPTFS_EXIT_S": "0.2"})
    assert ("abandoned after 0.2 s" in log) == (how == "too long")
    assert_abandoned(tmp_path / "run")


@pytest.mark.parametrize("how", ["done", pytest.param("too long", marks=pytest.mark.campaign)])
def test_the_same_under_torchrun(tmp_path: Path, how: str) -> None:
    """Real interpreters, started by torchrun, end by themselves in both cases."""
    args = {
        "run": f"faults+file://{tmp_path / 'run'}",
        "plain": str(tmp_path / "plain"),
        "gate": str(tmp_path / "gate"),
        "how": how,
        "held": how == "done",
    }
    results = torchrun(
        leaves, RANKS, args=args, env={"CKPTFS_EXIT_S": "20" if how == "done" else "1"}
    )
    assert [r.value for r in results] == ["done"] * RANKS, results[0].log
    if how == "done":
        assert_finished(tmp_path / "run")
    else:
        assert_abandoned(tmp_path / "run")
