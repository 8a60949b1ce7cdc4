"""Checkpoints of parts under a manager: retention and listeners treat them as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.events import SaveCommitted

PARTS = ("actor", "driver")


def _save(manager: Any, step: int) -> Any:
    ticket = manager.begin(step, PARTS)
    sealed = [ckptfs.save({"w": torch.full((9,), step)}, ticket.part(part)) for part in PARTS]
    return ticket.commit(sealed)


def _on(monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    monkeypatch.setenv("CKPTFS_NODE", node)


def test_retention_deletes_a_checkpoint_of_parts_as_one(tmp_path: Path) -> None:
    """Of five steps the last two stay, with all of their parts; nothing of the others does."""
    run = str(tmp_path / "run")
    told: list[object] = []
    with ckptfs.CheckpointManager(run, keep_latest=2, listeners=[told.append]) as manager:
        for step in range(1, 6):
            _save(manager, step)
        assert manager.steps == [4, 5]
    left = {name for name in os.listdir(run) if not name.startswith(".")}
    assert left == {"step_4", "step_5"}
    for part in PARTS:
        state = {"w": torch.zeros(9, dtype=torch.long)}
        ckptfs.load(state, f"{run}/step_5/{part}")
        assert state["w"].tolist() == [5] * 9
    committed = [event.result for event in told if isinstance(event, SaveCommitted)]
    assert [result.step for result in committed] == [1, 2, 3, 4, 5]
    assert all(result.total.payload_bytes >= 2 * 9 * 8 for result in committed)


@pytest.mark.parametrize("manager_of", [ckptfs.CheckpointManager, ckptfs.DirectoryManager])
def test_a_begin_that_fails_counts_as_no_save(tmp_path: Path, manager_of: Any) -> None:
    """A caller that catches the error is still asked to save that step; a begin that succeeds settles it."""
    with manager_of(tmp_path / "run", every_steps=10) as manager:
        with pytest.raises(ckptfs.CkptfsError):
            manager.begin(10, ["a/b"])
        assert manager.should_save(10)
        manager.begin(10, PARTS)
        assert not manager.should_save(10)


def test_a_ticket_that_is_committed_late_does_not_take_the_run_back(tmp_path: Path) -> None:
    """What began after it stays the latest, and retention keeps that, not the late one."""
    run = str(tmp_path / "run")
    with ckptfs.CheckpointManager(run, keep_latest=1) as manager:
        late, later = manager.begin(1, PARTS), manager.begin(2, PARTS)
        for ticket in (later, late):
            ticket.commit([ckptfs.save({"w": torch.ones(9)}, ticket.part(p)) for p in PARTS])
        assert manager.steps == [2]
        late = manager.begin(3, PARTS)
        parts = [ckptfs.save({"w": torch.full((9,), 3)}, late.part(p)) for p in PARTS]
        manager.save(4, {"w": torch.full((9,), 4)})
        late.commit(parts)
        assert manager.steps == [4]


def test_a_groups_disk_follows_with_its_next_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What retention deleted at home is removed from a disk out of home's reach at the next save there:
    it holds at most one checkpoint more than it would.
    """
    run = f"nodes+file://{tmp_path}/@node/run"
    _on(monkeypatch, "head")
    with ckptfs.CheckpointManager(run, keep_latest=2) as manager:
        for step in range(1, 7):
            ticket = manager.begin(step, PARTS)
            _on(monkeypatch, "a")
            actor = ckptfs.save({"w": torch.full((9,), step)}, ticket.part("actor"))
            held = {n for n in os.listdir(tmp_path / "a/run") if n.startswith("step")}
            assert len(held) <= 3, held
            _on(monkeypatch, "head")
            driver = ckptfs.save({"w": torch.full((9,), step)}, ticket.part("driver"))
            ticket.commit([actor, driver])
        manager.wait()
        last = manager.begin(7, PARTS)
        _on(monkeypatch, "a")
        ckptfs.save({"w": torch.zeros(9)}, last.part("actor"))
        _on(monkeypatch, "head")
        last.abandon()
    held = {n for n in os.listdir(tmp_path / "a/run") if n.startswith("step")}
    assert held == {"step_5", "step_6"}
