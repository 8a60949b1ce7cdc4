"""A save that shall replace another program's checkpoint, and dies between commit and projection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import IfExists, SaveSpec, WrittenPart
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.commit.state import catalog
from ckptfs.control.control import SoloControl
from ckptfs.errors import StateError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan, When
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from ckptfs.testing.world import SimulatedDeath
from ckptfs.uri import Uri

STOCK = b"what stock torch wrote"

# Where the writer dies: after the seal, at an operation of its projection.
DEATHS = [
    (Shape.FILESYSTEM, Fault("rename", ".ckptfs/attempts/*", 1, Fail(SimulatedDeath()))),
    (Shape.FILESYSTEM, Fault("rename", ".ckptfs/attempts/*", 2, Fail(SimulatedDeath()))),
    (
        Shape.FILESYSTEM,
        Fault("rename", ".ckptfs/attempts/*", 2, Fail(SimulatedDeath(), When.AFTER)),
    ),
    (Shape.OBJECT, Fault("replace", "step_1/.metadata", 1, Fail(SimulatedDeath()))),
]


class _Place:
    """A run on one of the two shapes of storage."""

    def __init__(self, shape: Shape, tmp_path: Path) -> None:
        self._shape, self._path = shape, tmp_path / "run"
        self._server = MemoryObjects()

    def storage(self) -> Storage:
        if self._shape is Shape.OBJECT:
            root = Uri.parse("s3://bucket/run")
            return ObjectStorage(root, MemoryObjectClient(self._server))
        return LocalStorage(Uri.parse(str(self._path)))

    def session(self, plan: Plan | None = None, *, write: bool = True) -> RunSession:
        storage = self.storage()
        if plan is not None:
            storage = FaultyStorage(storage, plan)
        return start_session(SoloControl(), storage, Place(), write=write)

    def put(self, key: str, data: bytes) -> None:
        storage = self.storage()
        storage.make_dir(key.rpartition("/")[0])
        with storage.open_write(key) as writer:
            writer.write(data)


def save(session: RunSession) -> None:
    """Replace step_1, as if_exists="replace" does: the run is claimed for the call."""
    with claim(session) as run:
        attempt = SaveAttempt(
            run.session, SaveSpec("step_1", 1, IfExists.REPLACE, run=run.generation)
        )

        def write() -> WrittenPart:
            with session.storage.open_write(f"{attempt.prefix}__0_0.distcp") as writer:
                writer.write(b"data")
            path = f"{attempt.save_id}/__0_0.distcp"
            return WrittenPart((FileRecord(path, 4, session.placement.mine.id),))

        attempt.begin()
        # As torch's has it: with paths below the save's id, by which the log knows its save.
        metadata = json.dumps({"label": "ours", "path": f"{attempt.save_id}/__0_0.distcp"})
        attempt.commit(write, lambda _: {".metadata": metadata.encode()})


@pytest.mark.parametrize(("shape", "death"), DEATHS)
def test_the_next_owner_replaces_what_was_to_be_replaced(
    tmp_path: Path, shape: Shape, death: Fault
) -> None:
    """Readers get the new one from its commit on, and the next owner puts it in the place of the foreign
    one, as was asked for.
    """
    place = _Place(shape, tmp_path)
    place.put("step_1/.metadata", STOCK)
    with pytest.raises(SimulatedDeath):
        save(place.session(Plan([death])))
    assert place.storage().read("step_1/.metadata") == STOCK
    reader = place.session(write=False)
    assert locate(reader, "step_1").seal is not None
    claim(place.session()).release()
    assert b"ours" in place.storage().read("step_1/.metadata")
    assert locate(place.session(write=False), "step_1").seal is not None


@pytest.mark.parametrize(("shape", "death"), [DEATHS[0], DEATHS[-1]])
def test_another_one_that_came_meanwhile_is_left_alone(
    tmp_path: Path, shape: Shape, death: Fault
) -> None:
    """Only the one that stood there when the save began: a later one is somebody's work."""
    place = _Place(shape, tmp_path)
    place.put("step_1/.metadata", STOCK)
    with pytest.raises(SimulatedDeath):
        save(place.session(Plan([death])))
    place.put("step_1/.metadata", STOCK + b" again")
    claim(place.session()).release()
    assert place.storage().read("step_1/.metadata") == STOCK + b" again"
    with pytest.raises(StateError, match="overwritten"):
        locate(place.session(write=False), "step_1")


@pytest.mark.parametrize("shape", [Shape.FILESYSTEM, Shape.OBJECT])
def test_one_that_comes_back_after_the_projection_is_another_program_s(
    tmp_path: Path, shape: Shape
) -> None:
    """The record says what was replaced once, and no more than once."""
    place = _Place(shape, tmp_path)
    place.put("step_1/.metadata", STOCK)
    save(place.session())
    assert b"ours" in place.storage().read("step_1/.metadata")
    storage = place.storage()
    storage.remove("step_1/.metadata")
    place.put("step_1/.metadata", STOCK)
    with pytest.raises(StateError, match="overwritten"):
        locate(place.session(write=False), "step_1")
    claim(place.session()).release()
    assert place.storage().read("step_1/.metadata") == STOCK
    view = drive(read_view(), place.storage())
    assert view is not None
    assert [live.seal.name for live in catalog(dict([view]))] == ["step_1"]
