"""Helpers for tests of the commit layer: saves, seals, views, and a run on a storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from ckptfs.commit.log.append import Appended, append, make_log
from ckptfs.commit.log.entries import (
    Body,
    Entry,
    Fence,
    FenceMode,
    Generation,
    Kind,
    Seal,
    Snapshot,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry, snapshot_of, state_from_snapshot
from ckptfs.commit.operations import drive
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.uri import Uri

G0, G1, G2, G3 = (
    Generation(0, ""),
    Generation(1, "x"),
    Generation(2, "y"),
    Generation(3, "z"),
)
_numbers = itertools.count()


def seal(
    save_id: str,
    name: str | None = None,
    *,
    base: Generation = G1,
    seq: int = 1,
    fenced: bool = True,
    step: int | None = None,
    domains: tuple[str, ...] = ("A",),
    **more: Any,
) -> Seal:
    """A seal; the name is the save's own unless given."""
    return Seal(
        save_id, base, seq, fenced, name or f"n-{save_id}", step,
        more.pop("artifact", Kind.CHECKPOINT), domains, "digest", **more,
    )  # fmt: skip


def folded(*bodies: Body) -> LogState:
    """The fold of these entries."""
    state = LogState()
    for body in bodies:
        state = fold_entry(state, body)
    return state


def reread(state: LogState) -> LogState:
    """The same state, as who reads its snapshot finds it."""
    entry = decode_entry(encode_entry(Entry("w", snapshot_of(state))), "a snapshot")
    assert isinstance(entry.body, Snapshot)
    return state_from_snapshot(state.next, entry.body)


def fence(generation: Generation, mode: FenceMode = FenceMode.RESUME) -> Fence:
    """A fence that says no more than it must."""
    return Fence(generation, mode)


def memory(shape: Shape = Shape.FILESYSTEM) -> MemoryStorage:
    """A store of its own."""
    return MemoryStorage(Uri.parse("memory://test/run"), shape=shape, stores=MemoryStoreRegistry())


def write(storage: Storage, bodies: Iterable[Body], prefix: str = "w") -> LogState:
    """Append entries to the storage's log, whatever they say."""
    drive(make_log(), storage)
    state = LogState()
    for body in bodies:
        done = drive(
            append(lambda _, b=body: b, write_id=f"{prefix}{next(_numbers)}"),  # type: ignore[misc]
            storage,
        )
        assert isinstance(done, Appended)
        state = done.state
    return state
