"""What becomes of a manager's run when something breaks: real processes, real signals.

Each test is a row of docs/howto/what-happens-when.md. A first job meets its fault in the middle of a
save; what it reported and what the next one finds is what counts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.errors import CkptfsError
from tests.multiprocess.harness import Rank, Ranks, Result, describe, launch, torchrun

ROWS = 64


# -- what ranks do ------------------------------------------------------------------------------


def state_of(rank: Rank, step: int) -> dict[str, Any]:
    """A sharded and a replicated tensor that tell ``step``."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    local = torch.full((ROWS // rank.size, 8), float(step))
    if rank.size == 1:
        return {"w": local, "b": torch.full((3,), float(step))}
    mesh = DeviceMesh("cpu", list(range(rank.size)))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.full((3,), float(step))}


def values_of(state: dict[str, Any]) -> set[float]:
    """The values on this rank."""
    local = getattr(state["w"], "to_local", lambda: state["w"])()
    return {*local.flatten().tolist(), *state["b"].tolist()}


class DiesWhenAsked:
    """A model that takes its process along when its state is taken."""

    def state_dict(self) -> dict[str, Any]:
        """SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Not used."""


class Lives(DiesWhenAsked):
    """The same on a rank that lives on."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing in it."""
        return {"nothing": 0}


def train(rank: Rank) -> Any:
    """Restore, save ``steps`` steps as the arguments say, report each call's outcome."""
    from ckptfs.manager.manager import CheckpointManager

    rank.init_group()
    args = rank.args
    uri = args["uri"] if args.get("plain") else f"faults+file://{args['uri']}"
    manager = CheckpointManager(
        uri, keep_latest=args.get("keep", 2), mode=args.get("mode", "async"), timeout_s=args["t"]
    )
    state = state_of(rank, -1)
    restored = manager.restore(state)
    first = 0 if restored is None else int(restored.step or 0)
    assert restored is None or values_of(state) == {float(first)}
    rank.tell("restored", step=first)
    told: list[Any] = [first]
    for step in range(first + 1, first + 1 + args["steps"]):
        if args.get("hold") == step:
            rank.tell("holding")
            rank.hold("go on")
        saved = state_of(rank, step)
        if args.get("dies"):
            saved["model"] = DiesWhenAsked() if rank.number == args["dies"] else Lives()
        told.append(_outcome(lambda: manager.save(step, saved)))  # noqa: B023 - called here
        told.append(_outcome(manager.wait))
    told.append(_outcome(manager.close))
    return told


def _outcome(call: Any) -> Any:
    try:
        call()
    except CkptfsError as error:
        found = describe(error)
        kind = found["type"].rsplit(".", 1)[-1]
        return [kind, sorted(found["data"].get("failures", {})), str(error)]
    return "done"


def next_job(run: Path, size: int = 2) -> tuple[int, list[int | None]]:
    """The step that a fresh job restores, and the steps that are there once it has saved one more."""
    with launch(train, size, args={"uri": str(run), "steps": 1, "t": 30}) as ranks:
        values = ranks.values()
    assert all(value == values[0] for value in values)
    assert values[0][1:] == ["done"] * 3, values[0]
    assert os.listdir(run / ".ckptfs" / "attempts") == []
    return values[0][0], [c.step for c in ckptfs.list_checkpoints(run)]


@contextlib.contextmanager
def job(
    run: Path, size: int = 2, *, faults: Mapping[int, str] | None = None, **args: Any
) -> Iterator[Ranks]:
    """Ranks that train in ``run``; faults: of single ranks."""
    plans = faults or {}
    env = {"CKPTFS_JOB_ID": args.pop("job", "one")}
    store = args.pop("store", "test")
    with launch(
        train,
        size,
        args={"uri": str(run), "steps": 2, "t": 30, **args},
        env=lambda rank: {**env, "CKPTFS_TEST_FAULT": plans.get(rank, "")},
        store=store,
    ) as ranks:
        yield ranks


# -- a writer fails (N4) -------------------------------------------------------------------------


def test_n4_a_failing_writer_is_told_on_all_ranks_and_costs_nothing(tmp_path: Path) -> None:
    """One of four ranks cannot write: all four raise at the same next call, the old checkpoint stays
    although keep_latest is 1, latest stays, and the save after it works.
    """
    run = tmp_path / "run"
    faults = {2: "fail=ENOSPC:open_write:*__2_0.distcp:2"}
    with job(run, 4, faults=faults, keep=1, steps=3, hold=3) as ranks:
        ranks.wait("holding")
        assert [c.step for c in ckptfs.list_checkpoints(run)] == [1]
        ranks.release("go on")
        values = ranks.values()
    assert all(value == values[0] for value in values)
    raised = values[0].pop(4)
    assert values[0] == [0, *["done"] * 6]
    assert raised[:2] == ["CollectiveError", ["2"]]
    assert "No space left" in raised[2]
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [3]


def test_n4_latest_moves_with_the_commit_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a save is being written, and while it is being sealed, latest is the one before; nothing
    is deleted; tensors that change during the save change nothing.
    """
    import torch

    from ckptfs.manager.manager import CheckpointManager

    run, gate = tmp_path / "run", tmp_path / "gate"
    # The log: fence, seal of 1, seal of 2.
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"hold={gate}:create:*/log/*:3")
    with CheckpointManager(f"faults+file://{run}", keep_latest=1, mode="async") as manager:
        state = {"w": torch.ones(1000)}
        manager.save(1, state)
        manager.wait()
        state["w"].fill_(2.0)
        pending = manager.save(2, state)
        state["w"].fill_(3.0)
        _await(Path(f"{gate}.reached"))
        assert [c.step for c in ckptfs.list_checkpoints(run)] == [1]
        assert ckptfs.latest(run).step == manager.latest.step == 1  # type: ignore[union-attr]
        assert manager.poll() == 1
        gate.touch()
        manager.wait(240)
        assert pending.uri.endswith("step_2")
        assert [c.step for c in ckptfs.list_checkpoints(run)] == [2]
    loaded = {"w": torch.zeros(1000)}
    ckptfs.load(loaded, run / "step_2")
    assert torch.equal(loaded["w"], torch.full((1000,), 2.0))


def _await(path: Path, timeout_s: float = 120.0) -> None:
    """Until another thread has made the file."""
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if path.exists():
            return
        waiting.wait(0.005)
    raise AssertionError(f"{path} did not come")


# -- a rank dies ---------------------------------------------------------------------------------


def test_a_rank_dies_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """While its state is staged, while it writes, and just after it sealed: the other learns who died
    and ends by itself; the next job restores the old checkpoint, or the new one once it was sealed,
    and nothing of any attempt is left.
    """
    run = tmp_path / "run"
    deaths: list[dict[str, Any]] = [
        {"victim": 1, "dies": 1},
        {"victim": 1, "faults": {1: "kill-half:write:*__1_0.distcp:1"}},
        {"victim": 0, "faults": {0: "kill-after:create:*/log/*:2"}},
    ]
    for death in deaths:
        victim = death.pop("victim")
        with job(run, steps=1, **death) as ranks:
            ends = ranks.results()
        assert ends[victim].died
        _was_told(ends[1 - victim], victim)
        assert ends[1 - victim].value[0] == 0, "it restored what was never committed"
    assert next_job(run) == (1, [1, 2])


def _was_told(end: Result, victim: int) -> None:
    assert not end.died, end.log
    assert end.error is None, end.error
    kind, ranks, text = next(told for told in end.value[1:] if told != "done")
    # Lost while it sealed: whether the seal is there, the next call finds out.
    assert (kind, ranks) in [("CollectiveError", [str(victim)]), ("CommitInDoubtError", [])]
    assert f"rank {victim} " in text


def test_a_rank_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    """SIGSTOP in the middle of a save, then SIGCONT: the save is committed as if nothing had been."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    with job(run, faults={1: f"hold={gate}:write:*__1_0.distcp:1"}, steps=1) as ranks:
        _await(Path(f"{gate}.reached"))
        ranks.freeze(1)
        gate.touch()
        ranks.thaw(1)
        assert ranks.values() == [[0, "done", "done", "done"]] * 2
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1]


def test_a_rank_that_stands_still_for_too_long_is_named(tmp_path: Path) -> None:
    """After timeout_s of silence the others get a DeadlineError that names it; nothing is committed;
    when it wakes it gets the error too.
    """
    run, gate = tmp_path / "run", tmp_path / "gate"
    faults = {1: f"hold={gate}:write:*__1_0.distcp:1"}
    with job(run, faults=faults, steps=1, t=6) as ranks:
        _await(Path(f"{gate}.reached"))
        ranks.freeze(1)
        (first,) = ranks.results(ranks=[0])
        gate.touch()
        ranks.thaw(1)
        (second,) = ranks.results(ranks=[1])
    raised = next(told for told in first.value[1:] if told != "done")
    assert raised[0] == "DeadlineError"
    assert "rank 1 on" in raised[2]
    assert second.error is not None or second.value[1:] != ["done"] * 3
    assert ckptfs.list_checkpoints(run) == []


@pytest.mark.campaign
def test_the_control_plane_is_lost_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """The process that hosts the store dies: every rank gets an error and ends, none hangs."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    faults = {1: f"hold={gate}:write:*__1_0.distcp:1"}
    with job(run, faults=faults, steps=1, t=5, store="apart") as ranks:
        _await(Path(f"{gate}.reached"))
        ranks.kill_store()
        gate.touch()
        ends = ranks.results()
    for end in ends:
        raised = next(told for told in end.value[1:] if told != "done")
        assert raised[0] in {"ControlPlaneLostError", "DeadlineError", "CollectiveError"}
    assert ckptfs.list_checkpoints(run) == []


# -- the process ends with a save on its way ---------------------------------------------------------


class LossIsNanError(Exception):
    """What training fails of."""


def leave(rank: Rank) -> Any:
    """Save, and go in the way that the arguments say, without waiting for it."""
    from ckptfs.manager.manager import CheckpointManager

    rank.init_group()
    run, how = rank.args["uri"], rank.args["how"]
    manager = CheckpointManager(f"faults+file://{run}", mode="async")
    manager.save(1, state_of(rank, 1))
    if how == "exception" and rank.number == 0:
        raise LossIsNanError
    if how == "exception":
        sys.exit(3)
    return "left"


@pytest.mark.parametrize("how", ["return", "exception"])
def test_a_process_that_ends_finishes_its_save(tmp_path: Path, how: str) -> None:
    """The script ends by its last line, or by an exception on one rank and sys.exit on the other:
    what was staged is committed first, and the exception is the user's own.
    """
    run = tmp_path / "run"
    slow = {"CKPTFS_TEST_FAULT": f"hold={tmp_path / 'gate'}:open_write:*__0_0.distcp:1"}
    with (
        launch(
            leave,
            2,
            args={"uri": str(run), "how": how},
            env=lambda rank: slow if rank == 0 else {},
            launcher_env=True,
        ) as ranks,
        gone(ranks),
    ):
        _await(tmp_path / "gate.reached")
        (tmp_path / "gate").touch()
        ends = ranks.results()
    kinds = ["", ""] if how == "return" else ["LossIsNanError", "SystemExit"]
    assert [end.error_type for end in ends] == kinds
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1]


@contextlib.contextmanager
def gone(ranks: Ranks, size: int = 2) -> Iterator[None]:
    """On leaving the block, wait until every process has ended by itself."""
    with contextlib.ExitStack() as stack:
        ends = [os.pidfd_open(ranks.pid(rank)) for rank in range(size)]
        for end in ends:
            stack.callback(os.close, end)
        yield
        for end in ends:
            assert select.select([end], [], [], 60)[0], ranks.logs()


# -- two jobs, and one that comes again ------------------------------------------------------------


def test_a_second_job_is_told_who_has_the_run_and_disturbs_nobody(tmp_path: Path) -> None:
    """RunBusyError with host, pid, job and last commit; the first job saves on."""
    from ckptfs.manager.manager import CheckpointManager

    run = tmp_path / "run"
    with job(run, 1, hold=2, job="first", plain=True) as ranks:
        ranks.wait("holding")
        pid = ranks.pid(0)
        second = CheckpointManager(run, takeover="never")
        assert second.steps == [1]
        with pytest.raises(ckptfs.RunBusyError) as caught:
            second.save(2, {"x": 1})
        second.close()
        ranks.release("go on")
        assert ranks.values() == [[0, *["done"] * 5]]
    for part in (f"host {socket.gethostname()} ", f"pid {pid},", "job:first", "last commit step_1"):
        assert part in str(caught.value)
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2]


def test_a_dead_owner_is_taken_over_without_a_person(tmp_path: Path) -> None:
    """Another job on the same node sees that the process is gone, and does not wait for its lease."""
    run = tmp_path / "run"
    with job(run, 2, hold=2, job="first") as ranks:
        ranks.wait("holding")
        with gone(ranks):
            ranks.kill(0)
            ranks.kill(1)
    assert next_job(run, 1) == (1, [1, 2])


def come_again(rank: Rank) -> Any:
    """Under torchrun: one rank dies in the first incarnation's second save; the next one continues."""
    import torch.distributed as dist

    from ckptfs.manager.manager import CheckpointManager

    dist.init_process_group("gloo")
    with CheckpointManager(f"faults+file://{rank.args['uri']}", mode="async") as manager:
        state = state_of(rank, -1)
        restored = manager.restore(state)
        first = 0 if restored is None else int(restored.step or 0)
        for step in range(first + 1, 4):
            manager.save(step, state_of(rank, step))
            manager.wait()
    return [os.environ["TORCHELASTIC_RESTART_COUNT"], first]


@pytest.mark.campaign
def test_torchrun_restarts_the_job_and_it_goes_on_by_itself(tmp_path: Path) -> None:
    """A rank is killed while it writes step 2; the launcher starts all again, they take the run over
    at once, restore step 1, and save on.
    """
    run = tmp_path / "run"
    results = torchrun(
        come_again,
        2,
        args={"uri": str(run)},
        env={
            "CKPTFS_TEST_FAULT": "kill:open_write:*__1_0.distcp:2@1.0",
            # Or torch's own group finds the addresses of the incarnation before in a shared store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        max_restarts=1,
    )
    assert [r.error for r in results] == [None, None], results[0].log
    assert [r.value for r in results] == [["1", 1]] * 2
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2, 3]
    assert os.listdir(run / ".ckptfs" / "attempts") == []


# -- clocks --------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock goes back by years between two jobs: latest, retention and takeover work as before."""
    import datetime as dt

    import torch

    from ckptfs.commit.save import spec
    from ckptfs.manager.manager import CheckpointManager

    class Past(dt.datetime):
        """1999."""

        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Past:
            """Always the same moment, too."""
            return cls(1999, 12, 31, 23, 59, 59, tzinfo=tz)

    with CheckpointManager(tmp_path, keep_latest=2) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), float(step))})
    monkeypatch.setattr(spec, "datetime", Past)
    with CheckpointManager(tmp_path, keep_latest=2, takeover="never") as manager:
        assert manager.restore({"w": torch.zeros(3)}) is not None
        for step in (3, 2):
            manager.save(step, {"w": torch.full((3,), float(step))})
            latest = manager.latest
            assert latest is not None
            assert latest.step == step
        assert latest is not None
        assert str(latest.save_id).startswith("1999")
        assert manager.steps == [3, 2]
