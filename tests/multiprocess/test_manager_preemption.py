"""Preemption of real ranks: a signal to one of them, or to torchrun, and all save the same step.

torchrun   to one rank; to the agent, with data loader workers in the same process group
launch     one rank of four, from outside; a rank that is killed instead; a save on failure
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from tests.multiprocess.harness import Rank, launch, torchrun

LIMIT = 100_000  # steps: a signal that is lost ends the test, and fails it


def schedule_of(control: Any, **options: Any) -> Any:
    """What a manager with ``preempt_signals=("SIGTERM",)`` asks."""
    from ckptfs.manager.preemption import PreemptSignals
    from ckptfs.manager.schedule import Rules, Schedule

    signals = PreemptSignals(("SIGTERM",))
    return Schedule(Rules(**options), lambda: control, signals=signals)


class Numbers:
    """A data set without end."""

    def __len__(self) -> int:
        return LIMIT

    def __getitem__(self, number: int) -> int:
        return number


def train(rank: Rank) -> dict[str, Any]:
    """Train, save by steps and when preempted, stop when preempted."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from ckptfs.manager.manager import CheckpointManager
    from ckptfs.manager.preemption import WorkerShield

    dist.init_process_group("gloo")
    before = signal.getsignal(signal.SIGTERM)
    saved = []
    loader: Any = DataLoader(
        Numbers(),  # type: ignore[arg-type] # a Dataset by its methods
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=WorkerShield(("SIGTERM",)),
    )
    weight = torch.zeros(4)
    manager = CheckpointManager(
        rank.args["uri"], every_steps=50, preempt_signals=("SIGTERM",), mode=rank.args["mode"]
    )
    with manager:
        for step, _ in enumerate(loader, start=1):
            dist.all_reduce(weight)
            if dist.get_rank() == 1 and step == 70:
                os.kill(
                    os.getpid() if rank.args["victim"] == "rank" else os.getppid(), signal.SIGTERM
                )
            if manager.should_save(step):
                manager.save(step, {"w": weight, "step": step})
                saved.append(step)
            if manager.preempted:
                break
    dist.destroy_process_group()
    return {"saved": saved, "restored": signal.getsignal(signal.SIGTERM) is before}


def steps_of(run: Path) -> list[int]:
    """The committed steps of a run."""
    import ckptfs

    return sorted(c.step for c in ckptfs.list_checkpoints(run) if c.step is not None)


def test_sigterm_to_one_rank_under_torchrun(tmp_path: Path) -> None:
    """One rank of two gets the signal: both save the same step soon after it, and end with exit code 0."""
    args = {"uri": str(tmp_path), "victim": "rank", "mode": "sync"}
    results = torchrun(train, 2, args=args, warm=True)
    values = [r.value for r in results]
    assert values[0] is not None, results[0].log
    assert values[0] == values[1]
    assert values[0]["restored"]
    assert values[0]["saved"] == steps_of(tmp_path)
    assert 70 < values[0]["saved"][-1] < LIMIT
    assert "exitcode" not in results[0].log


def test_sigterm_to_torchrun_itself(tmp_path: Path) -> None:
    """The agent passes it to every process of its workers: both ranks save one step and end."""
    results = torchrun(train, 2, args={"uri": str(tmp_path), "victim": "agent", "mode": "async"})
    values = [r.value for r in results]
    assert values[0] is not None, results[0].log
    assert values[0] == values[1]
    assert values[0]["saved"] == steps_of(tmp_path)
    assert 70 < values[0]["saved"][-1] < LIMIT
    assert "closing signal SIGTERM" in results[0].log
    assert "forcefully exiting" not in results[0].log


# -- from outside, without a launcher --------------------------------------------------------------


def asks(rank: Rank) -> list[int]:
    """Ask step after step, in lockstep as training is, until preempted."""
    import torch
    import torch.distributed as dist

    from ckptfs.control.control import open_control

    rank.init_group()
    with open_control() as control:
        schedule = schedule_of(control)
        due = []
        for step in range(1, LIMIT):
            dist.all_reduce(torch.zeros(1))
            if schedule(step):
                due.append(step)
            if schedule.preempted:
                break
            if step == 10:
                rank.tell("under way")
        schedule.close()
    return due


def test_a_signal_from_outside_to_the_last_rank() -> None:
    """Whenever it comes, four real ranks answer True at the same call."""
    with launch(asks, 4) as ranks:
        ranks.wait("under way")
        os.kill(ranks.pid(3), signal.SIGTERM)
        values = ranks.values()
    assert len(values[0]) == 1
    assert values == [values[0]] * 4


def asks_alone(rank: Rank) -> list[str]:
    """Ask without a collective of the group, so that only should_save can notice a dead rank."""
    from ckptfs.control.control import open_control
    from ckptfs.errors import CkptfsError

    rank.init_group()
    said: list[str] = []
    with contextlib.suppress(CkptfsError), open_control(timeout_s=20.0) as control:
        schedule = schedule_of(control)
        try:
            for step in range(1, LIMIT):
                schedule(step)
                if step == 10:
                    rank.tell("under way")
        except CkptfsError as error:
            said.append(type(error).__name__)
            with contextlib.suppress(CkptfsError):
                schedule(LIMIT)
                said.append("went on")
        schedule.close(0.0)
    return said


def test_a_killed_rank_is_an_error_of_should_save() -> None:
    """The others raise the usual error, not later than the control plane notices; and again."""
    with launch(asks_alone, 3) as ranks:
        ranks.wait("under way")
        ranks.kill(2)
        results = ranks.results(ranks=[0, 1])
    assert [r.value for r in results] == [["CollectiveError"]] * 2, results[0].log


def fails(rank: Rank) -> dict[str, Any]:
    """A save, then two on failure: rank 1 comes too late to the first one."""
    import torch

    import ckptfs

    rank.init_group()
    said = []
    with ckptfs.CheckpointManager(rank.args["uri"], keep_latest=2) as manager:
        state = {"w": torch.arange(4.0)}
        manager.save(1, state)
        if rank.number == 1:
            rank.hold("others gave up")
        try:
            manager.save(2, state, failure=True, reach_s=20.0 if rank.number == 1 else 0.2)
            said.append("saved")
        except ckptfs.CkptfsError as error:
            said.append(type(error).__name__)
        rank.tell("first", steps=manager.steps)
        rank.hold("second")
        manager.save(3, state, failure=True, reach_s=20.0)
        assert manager.latest
        return {"said": said, "steps": manager.steps, "latest": manager.latest.step}


def test_a_save_on_failure_needs_all_ranks_in_time(tmp_path: Path) -> None:
    """The ranks that came give up, the late one gets the error, nothing is written; with all there, it is made,
    and is never the latest.
    """
    with launch(fails, 3, args={"uri": str(tmp_path)}) as ranks:
        ranks.wait("first", rank=0)
        ranks.wait("first", rank=2)
        ranks.release("others gave up", rank=1)
        assert ranks.wait("first", rank=1) == {"steps": [1]}
        assert not (tmp_path / "step_2").exists()
        ranks.release("second")
        values = ranks.values()
    assert [v["said"] for v in values] == [
        ["DeadlineError"],
        ["CollectiveError"],
        ["DeadlineError"],
    ]
    assert all((v["steps"], v["latest"]) == ([1, 3], 1) for v in values)
