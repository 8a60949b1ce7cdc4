"""What a held run deletes on an object store: in parallel with the caller, by known names, until it is gone."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import ckptfs
from ckptfs.storage.registry import open_storage


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run on an object-shaped memory with its operations traced into tmp_path/trace.0."""
    monkeypatch.setenv("CKPTFS_TEST_TRACE", str(tmp_path / "trace"))
    return f"faults+memory://{uuid4().hex}/run"


def _at(run: str, name: str) -> str:
    return f"{run}/{name}?shape=object"


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value)}


def _operations(tmp_path: Path) -> list[tuple[str, str]]:
    (trace,) = tmp_path.glob("trace.*")
    rows = (line.split(" ", 2) for line in trace.read_text().splitlines())
    return [(row[1], row[2] if len(row) > 2 else "") for row in rows]


def _left(run: str, name: str) -> list[str]:
    storage = open_storage(f"{run}?shape=object")
    try:
        return [entry.name for entry in storage.list(name)]
    finally:
        storage.close()


def test_a_replaced_save_goes_by_the_names_in_its_manifest(run: str, tmp_path: Path) -> None:
    """Its data, sidecars and manifests are gone after the release, and nothing was listed for it."""
    with ckptfs.prepare_run(f"{run}?shape=object") as held:
        first = ckptfs.save(_state(1), _at(run, "step_1"), run=held).save_id
        second = ckptfs.save(_state(2), _at(run, "step_1"), if_exists="replace", run=held).save_id
        begun = len(_operations(tmp_path))
        ckptfs.save(_state(3), _at(run, "step_2"), run=held)
    operations = _operations(tmp_path)[begun:]
    assert ("remove_many", f"step_1/{first}/__0_0.distcp") in operations
    assert not [key for op, key in operations if op in ("list", "remove_tree")]
    assert _left(run, f"step_1/{first}") == []
    assert second in _left(run, "step_1")
    state = _state(0)
    ckptfs.load(state, _at(run, "step_1"))
    assert state["w"][0] == 2


def test_a_delete_that_fails_is_told_and_tried_again(
    run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save that dooms two succeeds, the other one goes, and the next save's chores do the rest."""
    monkeypatch.setenv("CKPTFS_TEST_FAULT", "fail=TransientError:remove_many:*:1")
    with ckptfs.prepare_run(f"{run}?shape=object") as held:
        names = ("step_1", "step_2")
        saved = [ckptfs.save(_state(1), _at(run, n), run=held).save_id for n in names]
        homes = [f"{name}/{save_id}" for name, save_id in zip(names, saved, strict=True)]
    with (
        caplog.at_level(logging.WARNING),
        ckptfs.prepare_run(f"{run}?shape=object", mode="overwrite") as held,
    ):
        ckptfs.save(_state(3), _at(run, "step_3"), run=held)
        assert held.session.background is not None
        assert held.session.background.drain(30)
        assert "clearing what step_3 replaced failed" in caplog.text
        assert [bool(_left(run, home)) for home in homes] == [True, False]
        ckptfs.save(_state(4), _at(run, "step_4"), run=held)
    assert [_left(run, home) for home in homes] == [[], []]


def test_old_uploads_are_swept_when_a_run_is_claimed(run: str, tmp_path: Path) -> None:
    """Once per claim, by the owner, before it can have any of its own under way."""
    ckptfs.prepare_run(f"{run}?shape=object").release()
    assert [op for op, _ in _operations(tmp_path)].count("sweep_uploads") == 1
