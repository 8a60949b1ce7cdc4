"""N1: an object of a process outside the group, in a step directory that ranks are committing.

    driver   save_object(run/global_step_N/data.pt)    no group, no collective
    ranks    save(run/global_step_N)                   two of them

Three processes live through all steps; the store of the test paces them and nothing else.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, launch

UNHELD = 12  # so many steps are saved by calls of their own, the others under a held run
MOST_VERSIONS = 6  # of one object; the disk is the ranks' too
GROUP = 2  # ranks 0 and 1; the process after them is the driver


class Order(Enum):
    """When the driver saves its object, by the step's number."""

    FIRST = 0  # there is no step directory yet
    AFTER = 1  # the step is committed
    ALL_ALONG = 2  # again and again, from before the save begins until it is committed
    LATE = 3  # from the moment when the attempt is complete, so at the seal and the projection

    @classmethod
    def of(cls, step: int) -> Order:
        """The order of one step."""
        return cls(step % len(cls))


def data_of(step: int, version: int = 0) -> dict[str, Any]:
    """The driver's object; large enough not to be written by one small write."""
    return {"step": step, "version": version, "seen": list(range(step, step + 2000))}


def state_of(rank: int, step: int) -> dict[str, Any]:
    """What one rank brings to a checkpoint."""
    import torch

    return {f"w{rank}": torch.arange(16.0) + step, "step": step}


def take_part(rank: Rank) -> object:
    """Ranks 0 and 1 save; the process after them drives."""
    return _drive(rank) if rank.number == GROUP else _save_all(rank)


def _save_all(rank: Rank) -> object:
    import torch.distributed as dist

    import ckptfs

    store = rank.store()
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=GROUP)
    run, steps = str(rank.args["run"]), int(rank.args["steps"])

    def save(step: int, held: ckptfs.Run | None) -> None:
        if Order.of(step) in (Order.FIRST, Order.ALL_ALONG):
            store.wait([f"object/{step}"])
        ckptfs.save(state_of(rank.number, step), f"{run}/global_step_{step}", run=held)
        if rank.number == 0:
            store.set(f"saved/{step}", "")

    for step in range(UNHELD):
        save(step, None)
    with ckptfs.prepare_run(run) as held:
        for step in range(UNHELD, steps):
            save(step, held)
    store.wait([f"object/{steps - 1}"])
    return _change_everything(rank, run)


def _change_everything(rank: Rank, run: str) -> object:
    """Replace a step, then overwrite the run; its steps hold the driver's objects."""
    import ckptfs

    def replace(held: ckptfs.Run, value: int) -> None:
        target = f"{run}/global_step_0"
        ckptfs.save(state_of(rank.number, value), target, run=held, if_exists="replace")

    rank.tell("saved")
    rank.hold("replace")
    with ckptfs.prepare_run(run) as held:
        replace(held, 1000)
        replace(held, 1001)
    rank.tell("replaced")
    rank.hold("overwrite")
    with ckptfs.prepare_run(run, mode="overwrite") as held:
        ckptfs.save(state_of(rank.number, 2000), f"{run}/global_step_1", run=held)
    return "done"


def _drive(rank: Rank) -> object:
    """Save the object of every step in its order; returns the last version of each."""
    import torch.distributed as dist

    import ckptfs

    assert not dist.is_initialized()
    store = rank.store()
    run = str(rank.args["run"])
    versions = []
    for step in range(int(rank.args["steps"])):
        target, saved, version = f"{run}/global_step_{step}/data.pt", f"saved/{step}", 0
        order = Order.of(step)
        if order is Order.AFTER:
            store.wait([saved])
        elif order is Order.LATE:
            while not (_is_complete(run, step) or store.check([saved])):
                os.sched_yield()
        ckptfs.save_object(data_of(step), target)
        store.set(f"object/{step}", "")
        again = order in (Order.ALL_ALONG, Order.LATE)
        while again and version < MOST_VERSIONS and not store.check([saved]):
            version += 1
            ckptfs.save_object(data_of(step, version), target)
        versions.append(version)
        store.wait([saved])
    rank.tell("saved")
    return versions


def _is_complete(run: str, step: int) -> bool:
    """Whether an attempt has its manifest and waits for its seal."""
    attempts = f"{run}/.ckptfs/attempts"
    try:
        names = os.listdir(attempts)
    except FileNotFoundError:
        return False
    return any(os.path.exists(f"{attempts}/{name}/ckptfs.json") for name in names)


def objects_of(run: Path) -> dict[str, bytes]:
    """The driver's objects as they are there."""
    return {p.parent.name: p.read_bytes() for p in run.glob("*/data.pt")}


def check_objects(run: Path, versions: list[int]) -> dict[str, bytes]:
    """Every object is the last one that was saved; returns their bytes."""
    import ckptfs

    for step, version in enumerate(versions):
        found = ckptfs.load_object(run / f"global_step_{step}" / "data.pt")
        assert found == data_of(step, version)
    return objects_of(run)


def check_steps(run: Path, values: dict[int, int]) -> None:
    """Every step in ``values`` is committed, loads, and has stock's ``.metadata``."""
    import torch

    import ckptfs

    committed = {c.step for c in ckptfs.list_checkpoints(run)}
    for step, value in values.items():
        assert step in committed
        target = run / f"global_step_{step}"
        assert (target / ".metadata").is_file()
        state: dict[str, Any] = {"w0": torch.zeros(16), "w1": torch.zeros(16), "step": -1}
        ckptfs.load(state, target)
        for rank in range(GROUP):
            assert torch.equal(state[f"w{rank}"], torch.arange(16.0) + value)
        assert state["step"] == value


@pytest.mark.parametrize("steps", [32, pytest.param(200, marks=pytest.mark.campaign)])
def test_n1_an_outsiders_objects_and_the_ranks_checkpoints_never_hurt_each_other(
    tmp_path: Path, steps: int
) -> None:
    """N1: many steps, object first, after, all along and at the seal: nothing fails, all is there;
    replacing a step and overwriting the run leave the driver's objects where they are.
    """
    run = tmp_path / "run"
    with launch(take_part, GROUP + 1, args={"run": str(run), "steps": steps}) as ranks:
        ranks.wait("saved")
        versions = ranks.results(ranks=[GROUP])[0].value
        before = check_objects(run, versions)
        check_steps(run, {step: step for step in range(steps)})
        ranks.release("replace")
        for rank in range(GROUP):
            ranks.wait("replaced", rank=rank)
        assert objects_of(run) == before
        check_steps(run, {0: 1001, 1: 1, steps - 1: steps - 1})
        ranks.release("overwrite")
        ends = ranks.results(ranks=range(GROUP))
        assert [end.value for end in ends] == ["done"] * GROUP, ranks.logs()
        assert objects_of(run) == before
        check_steps(run, {1: 2000})
        assert [p.parent.name for p in run.glob("*/.metadata")] == ["global_step_1"]
    raced = [v for step, v in enumerate(versions) if Order.of(step) is Order.ALL_ALONG]
    assert sum(v > 0 for v in raced) > len(raced) / 2, "the driver did not save along"
    left = {p.name for p in (run / "global_step_2").iterdir()}
    assert left == {"data.pt"}, "overwriting leaves what is foreign, and only that"
