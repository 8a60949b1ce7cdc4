"""Both kinds of log are never written next to each other, and an entry that cannot be read is no end."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

import ckptfs
from ckptfs.storage import object_store
from ckptfs.testing.memory_object_store import STORES, Manner, Manners, MemoryObjects


@pytest.fixture
def bucket() -> Iterator[tuple[str, MemoryObjects]]:
    """A run in a bucket of its own."""
    name = uuid4().hex
    yield f"objects+memory://{name}/run", STORES.bucket(name)
    STORES.drop(name)


def _save(run: str, step: int) -> ckptfs.SaveResult:
    return ckptfs.save({"w": torch.full((8,), float(step))}, f"{run}/step_{step}")


@pytest.mark.parametrize("first", [Manner.HONOURS, Manner.IGNORES])
def test_a_log_of_the_other_kind_is_refused(
    bucket: tuple[str, MemoryObjects], first: Manner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that begins, or ceases, to honour conditions: StateError, and nothing is written."""
    run, store = bucket
    store.manners = Manners(if_absent=first)
    _save(run, 1)
    _save(run, 2)
    before = dict(store.objects)
    other = Manner.IGNORES if first is Manner.HONOURS else Manner.HONOURS
    store.manners = Manners(if_absent=other)
    monkeypatch.setattr(object_store, "_SEEN", {})  # another process probes again
    with pytest.raises(ckptfs.StateError, match="exclusive creates"):
        _save(run, 3)
    with pytest.raises(ckptfs.StateError, match="exclusive creates"):
        ckptfs.prepare_run(run)
    assert {k: v for k, v in store.objects.items() if "probe" not in k} == before
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1, 2]


@pytest.mark.parametrize("entry", range(6))
def test_an_entry_that_cannot_be_read_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch, entry: int
) -> None:
    """An access error on any entry is raised by readers, who would else show an older history."""
    run = f"faults+memory://{uuid4().hex}/run"
    for step in range(6):
        ckptfs.save({"w": torch.ones(8)}, f"{run}/step_{step}?shape=object")
    monkeypatch.setenv("CKPTFS_TEST_FAULT", f"fail=AccessError:read:*/log/{entry:08d}:1")
    with pytest.raises(ckptfs.AccessError):
        ckptfs.latest(f"{run}?shape=object")
    monkeypatch.delenv("CKPTFS_TEST_FAULT")
    newest = ckptfs.latest(f"{run}?shape=object")
    assert newest is not None
    assert newest.step == 5
