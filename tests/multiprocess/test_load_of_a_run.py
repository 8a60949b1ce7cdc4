"""``ckptfs.load(run=held)``: the ranks talk through the control plane of a run that they hold.

together   a rank that died between the two calls is named at once; a save continues in the background
alone      any checkpoint, also when somebody else owns the run by now; nothing once it was released
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.errors import StateError
from tests.multiprocess.harness import WAIT_S, Rank, launch

SILENCE_S = 600.0  # far beyond what a test waits: no rank is named by silence


def state_of(rank: int, step: int) -> dict[str, Any]:
    """A value that all ranks have, and one for each."""
    return {"w": torch.full((1000,), float(step)), f"own_{rank}": torch.arange(10) * step}


def load_after_a_death(rank: Rank) -> float:
    """All hold the run and save; rank 2 never comes to the load."""
    rank.init_group()
    run = rank.args["run"]
    with ckptfs.prepare_run(run, timeout_s=SILENCE_S) as held:
        ckptfs.save(state_of(rank.number, 1), f"{run}/step_1", run=held)
        found = state_of(rank.number, 0)
        rank.tell("saved")
        if rank.number == 2:
            rank.hold("never")
        ckptfs.load(found, f"{run}/step_1", run=held)
        return float(found["w"][0])


def load_beside_a_save(rank: Rank) -> list[float]:
    """Step 1 is loaded while all ranks are in a step of the save of step 2, both through the held run."""
    rank.init_group()
    run = rank.args["run"]
    preparing, loaded = threading.Event(), threading.Event()
    follow = SaveAttempt._prepare

    def waits(attempt: SaveAttempt, *args: Any) -> Any:
        preparing.set()
        assert loaded.wait(WAIT_S)
        return follow(attempt, *args)

    with ckptfs.prepare_run(run, timeout_s=SILENCE_S) as held:
        ckptfs.save(state_of(rank.number, 1), f"{run}/step_1", run=held)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SaveAttempt, "_prepare", waits)
            pending = ckptfs.async_save(state_of(rank.number, 2), f"{run}/step_2", run=held)
            assert preparing.wait(WAIT_S)
            found = state_of(rank.number, 0)
            try:
                ckptfs.load(found, f"{run}/step_1", run=held)
            finally:
                loaded.set()
            pending.result()
        values = [float(found["w"][0])]
        ckptfs.load(found, f"{run}/step_2", run=held)
        return [*values, float(found["w"][0]), float(found[f"own_{rank.number}"][1])]


def test_a_rank_that_died_between_claim_and_load_is_named_at_once(tmp_path: Path) -> None:
    """A load that opened a control plane of its own would know it by its silence alone."""
    with launch(load_after_a_death, 3, args={"run": str(tmp_path / "run")}) as ranks:
        ranks.wait("saved")
        ranks.kill(2)
        for result in ranks.results(ranks=[0, 1]):
            assert result.error_type == "CollectiveError", result.log
            assert result.error
            assert list(result.error["data"]["failures"]) == ["2"]
            assert "its process is gone" in result.error["message"]


def test_a_load_while_a_save_of_the_run_goes_on(tmp_path: Path) -> None:
    """The save in the background has steps of its own: neither takes the other's answers."""
    with launch(load_beside_a_save, 2, args={"run": str(tmp_path / "run")}) as ranks:
        assert ranks.values() == [[1.0, 2.0, 2.0]] * 2


def test_any_checkpoint_loads_through_a_held_run(tmp_path: Path) -> None:
    """A warm start from elsewhere; and from the run itself, though a newer job owns it by now."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    ckptfs.save(state_of(0, 5), elsewhere / "step_5")
    with ckptfs.prepare_run(run) as held:
        found = state_of(0, 0)
        assert ckptfs.load(found, elsewhere / "step_5", run=held).step == 5
        assert found["w"][0] == 5
        ckptfs.save(state_of(0, 6), run / "step_6", run=held)
        with ckptfs.prepare_run(run, takeover="force"):
            ckptfs.load(found, run / "step_6", run=held)
        assert found["w"][0] == 6


def test_a_released_run_is_refused(tmp_path: Path) -> None:
    """Before anything is read: its control plane is closed."""
    with ckptfs.prepare_run(tmp_path) as held:
        ckptfs.save(state_of(0, 1), tmp_path / "step_1", run=held)
    found = state_of(0, 0)
    with pytest.raises(StateError, match="the run was released"):
        ckptfs.load(found, tmp_path / "step_1", run=held)
    assert found["w"][0] == 0
