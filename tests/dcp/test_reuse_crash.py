"""The process dies at every operation of a save that builds on another, and of the deletes at the same time.

After each death another process claims the run: every live save loads bit for bit, the save that
died is there or is not, and the next save by reference works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptfs.storage.base import Shape
from ckptfs.testing.world import SimulatedDeath
from tests.crash.rig import HALVES, Mortal
from tests.dcp.reuse_rig import Run, same, shared_in, walk

HALF = HALVES - {"remove_tree"} | {"remove_many"}  # of one file there is no half to remove
FROZEN = {"base": torch.arange(1500.0), "policy": torch.ones(600), "note": "kept"}


def state(value: float) -> dict[str, Any]:
    """Mostly frozen."""
    return FROZEN | {"w": torch.full((40,), value), "step": int(value)}


def before(shape: Shape) -> Run:
    """Three saves; the first wrote what all of them hold."""
    run = Run(shape)
    for value in (1, 2, 3):
        run.save(f"step_{value}", state(value))
    return run


def save_more(run: Run) -> None:
    """One more save."""
    run.save("step_4", state(4))


def delete_the_writer(run: Run) -> None:
    """The save that wrote what all of them use."""
    run.delete("step_1")


def replace_it(run: Run) -> None:
    """Over the newest, and one more: the replaced one goes."""
    run.save("step_3", state(4))
    run.save("step_4", state(5))


def moments(first: Run, victim: Callable[[Run], None]) -> list[tuple[int, str]]:
    """Every place where the victim can die, found by letting it live once."""
    plan, trial = Mortal(None, "before", alone=True), first.copied()
    trial.restart(plan)
    claimed = len(plan.names)
    victim(trial)
    trial.bury()
    found = []
    for nth, (op, _) in enumerate(plan.names[claimed:], claimed + 1):
        found += [(nth, "before")]
        found += [(nth, "half")] if op in HALF else []
        found += [(nth, "after")] if op in ("create", "link", "remove_many") else []
    return found


def deaths(shape: Shape, victim: Callable[[Run], None], stride: int) -> set[tuple[str, ...]]:
    """Which names were live after each death; every one was judged."""
    first = before(shape)
    first.bury()
    ends = set()
    for nth, when in moments(first, victim)[::stride]:
        run = first.copied()
        run.restart(Mortal(nth, when, alone=True))
        with pytest.raises(SimulatedDeath):
            victim(run)
        run.restart()
        ends.add(tuple(run.names()))
        judge(run)
        run.bury()
    return ends


@pytest.mark.parametrize("shape", list(Shape))
def test_a_save_that_references_is_killed_at_every_operation(shape: Shape) -> None:
    """Old or new and bit for bit, every older save too; saving by reference still works."""
    assert len(deaths(shape, save_more, 1)) == 2, "the commit was not among the deaths"


@pytest.mark.parametrize("shape", list(Shape))
def test_the_writer_of_the_bytes_is_deleted_and_the_owner_is_killed(shape: Shape) -> None:
    """At every operation: those that use its bytes stay whole, and what no save uses goes."""
    assert len(deaths(shape, delete_the_writer, 1)) == 2, "the delete was not among the deaths"


@pytest.mark.campaign
@pytest.mark.parametrize("victim", [save_more, delete_the_writer, replace_it])
@pytest.mark.parametrize("shape", list(Shape))
def test_campaign_killed_at_every_operation(shape: Shape, victim: Callable[[Run], None]) -> None:
    """All of them, replacing included."""
    assert len(deaths(shape, victim, 1)) > 1


def judge(run: Run) -> None:
    """Everything live is whole, nothing else is shared, and the run can be continued."""
    for name in run.names():
        found = run.load(name, state(0))
        assert same(found, state(found["step"])), name
    listed: set[str] = set()
    for key in walk(run.plain, ""):
        if key.endswith("/ckptfs.json") and key.count("/") == 2:
            listed |= shared_in(run.plain, key)
    assert run.shared_files() == listed
    saved = run.save("step_9", state(9))
    assert saved.total.referenced_bytes > 8000
    assert same(run.load("step_9", state(0)), state(9))
