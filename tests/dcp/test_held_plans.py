"""Saves of a held run: the structure of a plan travels once, whichever way it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri
from tests.scale.lockstep import lockstep


def _state(step: int) -> dict[str, Any]:
    layers = {f"layers.{n}.weight": torch.full((4, 3), float(step)) for n in range(200)}
    return {"model": layers, "step": step}


def test_a_saves_plan_is_known_to_the_next_save_of_the_run(tmp_path: Path) -> None:
    """The first save says all of it, the second hashes and values; another claim knows nothing."""

    def saves(control: Control, first: int) -> None:
        storage = LocalStorage(Uri.parse(tmp_path / "run"))
        with claim(start_session(control, storage, Place(), write=True)) as held:
            for step in (first, first + 1):
                ckptfs.save(_state(step), tmp_path / "run" / f"step_{step}", run=held)
        assert held.plans is None, "what nobody can use any more holds no memory"

    def live(control: Control) -> None:
        saves(control, 1)
        saves(control, 3)

    ends, steps = lockstep(2, live)
    for end in ends:
        end.get()
    said = [step.said_bytes for step in steps if step.label == "plan the save"]
    assert len(said) == 4, "nobody was asked twice"
    whole, short, again, _ = said
    assert short < whole / 2
    assert again == whole
    found: dict[str, Any] = {
        "model": {key: torch.zeros(4, 3) for key in _state(0)["model"]},
        "step": 0,
    }
    ckptfs.load(found, tmp_path / "run" / "step_2")
    assert found["step"] == 2
    assert all(torch.equal(t, torch.full((4, 3), 2.0)) for t in found["model"].values())


@pytest.mark.parametrize("first", ["save", "async_save"])
def test_saves_in_the_background_share_what_the_run_knows(tmp_path: Path, first: str) -> None:
    """A save of either kind, then one of the other: the decision is made once, and both load."""
    with ckptfs.prepare_run(tmp_path / "run") as held:
        kinds = [first, "async_save" if first == "save" else "save"]
        decided = []
        for step, kind in enumerate(kinds, 1):
            uri = tmp_path / "run" / f"step_{step}"
            if kind == "save":
                ckptfs.save(_state(step), uri, run=held)
            else:
                ckptfs.async_save(_state(step), uri, run=held).result(60)
            decided.append(held.plans.decision.described)
        assert decided[0] is decided[1]
    for step in (1, 2):
        found: dict[str, Any] = {
            "model": {key: torch.zeros(4, 3) for key in _state(0)["model"]},
            "step": 0,
        }
        ckptfs.load(found, tmp_path / "run" / f"step_{step}")
        assert found["step"] == step
