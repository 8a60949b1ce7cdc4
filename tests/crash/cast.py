"""The cast of a checkpoint of parts: a driver and two groups, each at its own place.

    with Cast(base, NODES) as cast:      driver on "head", groups on "a" and "b"; or one disk for all
        cast.play("step_2", "two")       begin, save the parts, commit, publish

No torch here: a part is one file that names its owner. All storages share one plan, so that an
operation's number gives the moment in the whole play.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptfs.commit.catalog.catalog import list_live, read_view
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.parts.parts import apply_everywhere, part_attempt, reference_to
from ckptfs.commit.parts.tickets import Decision, SealedPart, Ticket, TicketPart, begin_parts
from ckptfs.commit.paths import ATTEMPTS, TRASH
from ckptfs.commit.save.spec import SaveSpec, WrittenPart
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.commit.state import part_name
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.errors import IncompleteCheckpointError, NotFoundError
from ckptfs.events import Counters, SaveResult
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.uri import Uri

__all__ = ["PARTS", "Cast", "contents"]

ROOT = Uri.parse("/simulated/run")
PARTS = {"actor": "a", "critic": "b", "driver": "head"}  # who saves where
HOME = "head"
NAME_OF = {"one": "step_1", "two": "step_2", "three": "step_3", "uno": "step_1"}


def contents(label: str, part: str) -> bytes:
    """The bytes of one part of one checkpoint."""
    return (f"{label} of {part}\n" * 40).encode()


@dataclass
class Cast:
    """Everybody who takes part. shared: all places are one disk. plan: faults of all of them."""

    base: str
    shared: bool
    plan: Plan | None = None

    def directory(self, node: str) -> str:
        """Where the run is for a node."""
        return f"{self.base}/run" if self.shared else f"{self.base}/{node}/run"

    @contextlib.contextmanager
    def session(self, node: str, *, write: bool = True) -> Iterator[RunSession]:
        """One process of its own on a node."""
        here = World.solo()
        world = replace(here, node=f"{here.node}/{node}", job_id="job:cast")
        storage: Storage = LocalStorage(ROOT, directory=self.directory(node))
        if self.plan is not None:
            storage = FaultyStorage(storage, self.plan)
        if not write:
            storage = ReadOnlyStorage(storage)
        try:
            yield start_session(SoloControl(world), storage, Place(), write=write)
        finally:
            storage.close()

    # -- the play --------------------------------------------------------------------------

    def play(self, label: str, *, publish: bool = True) -> Decision:
        """A driver claims the run and lets everybody save one checkpoint."""
        with self.session(HOME) as session, claim(session) as run:
            return self.act(run, label, publish=publish)

    def act(self, run: Run, label: str, *, publish: bool = True) -> Decision:
        """One checkpoint of a driver that holds the run."""
        ticket = begin_parts(run, NAME_OF[label], None, list(PARTS))
        sealed = [self.save(ticket, part, label) for part in PARTS]
        decision = ticket.commit(sealed)
        if publish:
            self.publish(decision)
        return decision

    def save(self, ticket: Ticket, part: str, label: str) -> SealedPart:
        """One group saves its part."""
        with self.session(PARTS[part]) as session:
            return save_part(session, ticket.part(part), contents(label, part))

    def publish(self, decision: Decision) -> None:
        """The groups make the decision known where they are."""
        for node in ("a", "b"):
            with self.session(node) as session:
                apply_everywhere(session, decision.word)

    # -- looking ---------------------------------------------------------------------------

    def look(self, label: str, part: str, *, at: str | None = None) -> str:
        """What a reader on a node learns of a part: "whole", "none" or "in doubt"."""
        node = at or PARTS[part]
        with self.session(node, write=False) as session:
            try:
                found = locate(session, part_name(NAME_OF[label], part))
            except NotFoundError:
                return "none"
            except IncompleteCheckpointError as error:
                return "in doubt" if "in doubt" in error.message else f"lost: {error}"
            assert found.manifest is not None
            files = [f for f in found.manifest.files if f.path.endswith(".distcp")]
            data = next(f for f in files if f.domain == session.placement.mine.id)
            assert session.storage.read(f"{found.home}/{data.path}") == contents(label, part)
            said = json.loads(session.storage.read(found.metadata))
            assert said == {"label": label, "part": part, "files": [f.path for f in files]}
            return "whole"

    def stock(self, label: str, part: str) -> bool:
        """Whether a reader that knows only step_N/<part> and its .metadata sees a whole part."""
        where = f"{self.directory(PARTS[part])}/{NAME_OF[label]}/{part}"
        if not os.path.exists(f"{where}/.metadata"):
            return False
        files = [f for _, _, names in os.walk(where) for f in names if f.endswith(".distcp")]
        assert len(files) == 1, f"a dangling .metadata in {where}"
        return True

    def listed(self, node: str) -> list[str]:
        """The committed names in a node's own log."""
        with self.session(node, write=False) as session:
            view = drive(read_view(), session.storage)
            return [] if view is None else [seal.name for seal in list_live(dict([view]))]

    def debris(self) -> list[str]:
        """What unfinished saves left anywhere, directories of attempts without a file too."""
        left = []
        for node in ("head",) if self.shared else ("head", "a", "b"):
            left += [str(path) for path in Path(self.directory(node), ATTEMPTS).glob("*")]
            for place in (ATTEMPTS, TRASH):
                where = f"{self.directory(node)}/{place}"
                for root, _, names in os.walk(where):
                    left += [f"{root}/{name}" for name in names]
        return left

    def copy(self, to: str) -> Cast:
        """The same disks at another place."""
        shutil.copytree(self.base, to)
        return Cast(to, self.shared)


def save_part(session: RunSession, ticket: TicketPart, data: bytes) -> SealedPart:
    """As ``ckptfs.save`` does it, with one file of bytes."""
    plan = ticket.plan
    name = part_name(plan.name, plan.part)
    attempt = part_attempt(session, plan, SaveSpec(name, plan.step, run=plan.word.generation))
    label = data.split()[0].decode()

    def write() -> WrittenPart:
        rank = session.control.rank
        with session.storage.open_write(f"{attempt.prefix}__{rank}_0.distcp") as writer:
            writer.write(data)
        path = f"{attempt.save_id}/__{rank}_0.distcp"
        return WrittenPart((FileRecord(path, len(data), session.placement.mine.id),))

    def finish(parts: list[WrittenPart]) -> dict[str, bytes]:
        paths = [file.path for one in parts for file in one.files]
        said = {"label": label, "part": plan.part, "files": paths}
        return {".metadata": json.dumps(said).encode()}

    try:
        attempt.begin()
        done = attempt.commit(write, finish)
    except BaseException:
        attempt.abandon()
        raise
    result = SaveResult(name, plan.step, done.save_id, Counters(), Counters(), (), 0.0)
    return SealedPart(plan.part, plan.of, reference_to(attempt, plan), result)


def value_of(end: Any) -> Any:
    """The value of a simulated rank's end."""
    return end.get()
