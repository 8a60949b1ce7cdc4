"""A run in memory, of either shape, that is saved to with unchanged="reference", and may be killed.

    run = Run(Shape.OBJECT)
    run.save("step_1", state)        run.load("step_1", like)      run.delete("step_1")
    run.restart(plan)                the process is dead; another one claims the run

One rank, no thread: every operation is counted and comes in the same order each time.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import torch

from ckptfs.commit.catalog.catalog import list_live
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.delete.deletion_steps import delete_save
from ckptfs.commit.log.append import Means, catch_up
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.manifest import decode_manifest
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.run import _OWNED
from ckptfs.commit.ownership.run import Run as HeldRun
from ckptfs.commit.paths import SHARED
from ckptfs.commit.save.spec import IfExists, SaveSpec, fresh_ids
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.dcp.incremental.reuse import Cut, Memory, Unchanged
from ckptfs.dcp.loading import load_at
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.events import SaveResult
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.uri import Uri

__all__ = ["Run", "same", "shared_in", "walk"]

ROOT = Uri.parse("memory://reuse/run")
SMALL = Cut(3000, 2000)


class Run:
    """One run over all of its owners. cut: how files are cut; small, so that little data shows it."""

    def __init__(self, shape: Shape, cut: Cut = SMALL, *, storage: Storage | None = None) -> None:
        self.shape = shape
        self.cut = cut
        self.stores = MemoryStoreRegistry()
        self.plain: Storage = storage or MemoryStorage(ROOT, shape=shape, stores=self.stores)
        self.held: HeldRun | None = None
        self._ids = fresh_ids()
        self.restart()

    def restart(self, plan: Plan | None = None) -> None:
        """The owner of the run is gone; another process takes it, and is hurt as ``plan`` says."""
        self.bury()
        storage = self.plain if plan is None else FaultyStorage(self.plain, plan)
        session = start_session(SoloControl(World.solo()), storage, Place(), write=True)
        held = claim(session, takeover=Takeover.FORCE)
        # Deletes here and now: in a thread their operations would come in another order each time.
        self.held = dataclasses.replace(
            held, session=dataclasses.replace(held.session, background=None)
        )
        for run in (held, self.held):
            # Collected, it would be released by a thread, at any moment: the dead release nothing.
            run._ownership.left.set()
            _OWNED.remove(run._ownership)
        self.options = self.fresh_options()

    def fresh_options(self) -> WriteOptions:
        """As of a process that has not saved yet."""
        return WriteOptions(unchanged=Unchanged.REFERENCE, memory=Memory(cut=self.cut))

    def copied(self) -> Run:
        """The same bytes in a store of their own, and no owner."""
        other = copy.copy(self)
        other.stores, other.held = MemoryStoreRegistry(), None
        other.plain = MemoryStorage(ROOT, shape=self.shape, stores=other.stores)
        mine, its = (s.tree(ROOT.authority, self.shape) for s in (self.stores, other.stores))
        its.files, its.dirs = dict(mine.files), set(mine.dirs)
        return other

    def bury(self) -> None:
        """End what the dead process would not do any more; nothing is released."""
        if self.held is not None and self.held._keeper is not None:
            self.held._keeper.stop()
        self.held = None

    # -- what its owner does ---------------------------------------------------------------

    def save(self, name: str, state: dict[str, Any], kind: Kind = Kind.CHECKPOINT) -> SaveResult:
        """One save, over an older one of the name if there is one."""
        assert self.held is not None
        spec = SaveSpec(name, None, IfExists.REPLACE, artifact=kind, run=self.held.generation)
        return save_at(state, self.held.session, self.plain.root / name, spec, self.options)

    def delete(self, name: str) -> None:
        """Delete the live save of a name, entry and bytes."""
        assert self.held is not None
        session, state = self.held.session, drive(catch_up(), self.plain)
        domain = session.placement.mine.id
        program = delete_save(
            self.seal(name),
            {domain: state},
            Means(domain, session.caps, self._ids).held_by(self.held.generation),
            reason="the test",
        )
        drive(program, session.storage)

    # -- what can be seen -------------------------------------------------------------------

    def load(self, name: str, like: dict[str, Any]) -> dict[str, Any]:
        """What is under a name, through a session that may only read."""
        session = start_session(SoloControl(World.solo()), self.plain, Place(), write=False)
        blank = copy.deepcopy(like)
        for value in blank.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        load_at(blank, session, self.plain.root / name, locate(session, name))
        return blank

    def seals(self) -> list[Seal]:
        """The live saves, oldest first."""
        return list_live(self._views())

    def _views(self) -> dict[str, Any]:
        state = drive(catch_up(), self.plain)
        ids = {d for save in state.saves.values() if save.seal for d in save.seal.domains}
        return dict.fromkeys(ids, state)

    def seal(self, name: str) -> Seal:
        """The live save of a name."""
        return next(seal for seal in self.seals() if seal.name == name)

    def names(self) -> list[str]:
        """Of the live saves, oldest first."""
        return [seal.name for seal in self.seals()]

    def shared_files(self) -> set[str]:
        """Keys below ``_data/``, without that."""
        return {key.removeprefix(f"{SHARED}/") for key in walk(self.plain, SHARED)}


def walk(storage: Storage, key: str) -> list[str]:
    """The keys of all files below a key."""
    try:
        entries = storage.list(key)
    except FileNotFoundError:
        return []
    below = [(f"{key}/{entry.name}".lstrip("/"), entry.is_dir) for entry in entries]
    return list(itertools.chain.from_iterable(walk(storage, k) if d else [k] for k, d in below))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are equal bit by bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) and value.dtype == other[key].dtype
        if isinstance(value, torch.Tensor)
        else value == other[key]
        for key, value in one.items()
    )


def shared_in(storage: Storage, key: str) -> set[str]:
    """The shared files that one manifest lists."""
    return {f.path for f in decode_manifest(storage.read(key), key).files if f.is_shared}
