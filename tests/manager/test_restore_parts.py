"""Restoring a part of a checkpoint that several groups wrote, by the group that it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.session import Place, open_session
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, IncompleteCheckpointError, NotFoundError, StateError
from ckptfs.manager.restore import RestoreOutcome, restore
from ckptfs.manager.restore_candidates import Fallback, RestoreRequest
from ckptfs.manager.run_setup import Template
from ckptfs.uri import Uri

PARTS = ["actor", "critic"]


def save_parts(uri: str, step: int, nodes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One checkpoint, each part saved on its node, committed on the driver's."""
    monkeypatch.setenv("CKPTFS_NODE", nodes["driver"])
    with ckptfs.CheckpointManager(uri) as manager:
        ticket = manager.begin(step, parts=PARTS)
        sealed = []
        for name in PARTS:
            monkeypatch.setenv("CKPTFS_NODE", nodes[name])
            value = float(step + len(name))
            sealed.append(ckptfs.save({"w": torch.full((3,), value)}, ticket.part(name)))
        monkeypatch.setenv("CKPTFS_NODE", nodes["driver"])
        ticket.commit(sealed)


def restore_part(uri: str, **request: Any) -> tuple[RestoreOutcome | None, list[float]]:
    """What a group gets that restores alone."""
    state = {"w": torch.zeros(3)}
    asked = RestoreRequest(Template("step_{N}").step_of, **request)
    with open_session(Uri.parse(uri), SoloControl(World.solo()), Place(), write=False) as session:
        return restore([session], state, asked), state["w"].tolist()


def refused(uri: str, **request: Any) -> CkptfsError:
    """The error instead."""
    with pytest.raises(CkptfsError) as caught:
        restore_part(uri, **request)
    return caught.value


def test_each_group_restores_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest, or a step by number; damage to another group's part is that group's business, and a
    whole of parts, or a part that is not there, is an error that lists the parts.
    """
    uri = str(tmp_path / "run")
    everywhere = dict.fromkeys(["driver", *PARTS], "a")
    for step in (1, 2):
        save_parts(uri, step, everywhere, monkeypatch)
    next((tmp_path / "run/step_2/critic").rglob("*.distcp")).unlink()
    outcome, values = restore_part(uri, part="actor")
    assert outcome is not None
    assert (outcome.restored.step, values) == (2, [7.0] * 3)
    assert outcome.restored.uri.endswith("/step_2/actor")
    older, values = restore_part(uri, part="critic", step=1)
    assert older is not None
    assert values == [7.0] * 3
    assert isinstance(refused(uri, part="critic"), IncompleteCheckpointError)
    whole, unknown = refused(uri), refused(uri, part="reward")
    assert isinstance(whole, StateError)
    assert isinstance(unknown, NotFoundError)
    assert "actor, critic" in str(whole)
    assert "actor, critic" in str(unknown)


def test_groups_do_not_choose_an_older_step_each_for_itself(tmp_path: Path) -> None:
    """fallback="older" of a part could give each group another step."""
    error = refused(str(tmp_path), part="actor", fallback=Fallback.OLDER)
    assert isinstance(error, StateError)
    assert "each group could take a different step" in str(error)


def test_a_part_whose_home_is_not_reached_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of its own that did not learn of the commit, the newest part is in doubt, and neither
    nothing nor an older step.
    """
    uri = f"nodes+file://{tmp_path}"
    nodes = {"driver": "home", "actor": "far", "critic": "home"}
    save_parts(uri, 1, nodes, monkeypatch)
    monkeypatch.setenv("CKPTFS_NODE", "far")
    assert "in doubt" in str(refused(uri, part="actor"))
    save_parts(uri, 2, nodes, monkeypatch)
    monkeypatch.setenv("CKPTFS_NODE", "far")
    error = refused(uri, part="actor")
    assert "step_2" in str(error)
    assert "in doubt" in str(error)
    outcome, _ = restore_part(uri, part="actor", step=1)  # the second save reported the first
    assert outcome is not None
