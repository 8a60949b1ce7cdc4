"""A store that lets nothing be deleted: held by a lock, or credentials that may only write."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

import ckptfs
from ckptfs.storage import object_store
from ckptfs.testing.memory_object_store import STORES, MemoryObjects


@pytest.fixture
def locked() -> Iterator[tuple[str, MemoryObjects]]:
    """A run in a bucket of its own, where every delete is refused."""
    name = uuid4().hex
    store = STORES.bucket(name)
    store.locked = {"*"}
    yield f"objects+memory://{name}/run", store
    STORES.drop(name)


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value)}


def _loaded(uri: str) -> float:
    state = _state(-1)
    ckptfs.load(state, uri)
    return float(state["w"][0])


def test_saves_and_claims_work_without_the_right_to_delete(
    locked: tuple[str, MemoryObjects], caplog: pytest.LogCaptureFixture
) -> None:
    """Saves, replaces, overwrites and claims succeed without a warning on the save; the newest is
    read, and the bytes that had to go are still there, reported once.
    """
    run, store = locked
    with caplog.at_level(logging.WARNING):
        for value in (1, 2, 3):
            with ckptfs.prepare_run(run) as held:
                saved = ckptfs.save(_state(value), f"{run}/step_1", run=held, if_exists="replace")
                assert saved.warnings == ()
                assert ckptfs.save(_state(value), f"{run}/step_{value + 1}", run=held).step
    with ckptfs.prepare_run(run, mode="overwrite") as held:
        ckptfs.save(_state(9), f"{run}/step_9", run=held)
    ckptfs.prepare_run(run).release()
    assert [c.uri.name for c in ckptfs.list_checkpoints(run)] == ["step_9"]
    assert _loaded(f"{run}/step_9") == 9
    assert sum(1 for key in store.objects if key.endswith(".distcp")) == 7
    told = [r.message for r in caplog.records if "tried again" in r.message]
    assert told, "nobody heard that the bytes stay"


def test_the_bytes_go_once_deletes_are_let_again(
    locked: tuple[str, MemoryObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was refused is not forgotten: the next owner deletes it."""
    run, store = locked
    with ckptfs.prepare_run(run) as held:
        ckptfs.save(_state(1), f"{run}/step_1", run=held)
        ckptfs.save(_state(2), f"{run}/step_1", run=held, if_exists="replace")
        ckptfs.save(_state(3), f"{run}/step_2", run=held)
    store.locked = set()
    monkeypatch.setattr(object_store, "_SEEN", {})  # another process: it was refused nothing yet
    with ckptfs.prepare_run(run):
        pass
    assert sum(1 for key in store.objects if key.endswith(".distcp")) == 2
    assert _loaded(f"{run}/step_1") == 2


def test_ensure_dir_asks_an_object_store_nothing(locked: tuple[str, MemoryObjects]) -> None:
    """No request, hence none above the run, where credentials may not reach."""
    run, store = locked
    assert str(ckptfs.ensure_dir(run)) == run
    assert store.requests() == []
    assert store.objects == {}
