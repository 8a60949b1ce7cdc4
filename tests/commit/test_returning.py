"""What a removal moves by a name that others use too: looked at again, and put back where it is theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptfs
from ckptfs.commit.delete import erase as erasing
from ckptfs.commit.delete.deletion_steps import Erasure, erase_retired, retire
from ckptfs.commit.delete.trash import trash_of
from ckptfs.commit.log.append import Means
from ckptfs.commit.log.entries import Body
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.projection import project
from ckptfs.errors import UnsupportedError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.testing.memory_object_store import Manner, Manners
from ckptfs.uri import Uri
from tests.commit.logs import G1, G2, G3, fence, memory
from tests.commit.test_reclaim import fold, lay, recover
from tests.model.disk import Disk
from tests.model.programs import What, ids
from tests.model.scenarios import committed_disk
from tests.storage.objects import bucket

A, B = What("aaa", gen=G1), What("bbb", gen=G1, replace=True)
STOCK = b"what stock torch wrote"


@pytest.fixture(params=["memory", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A filesystem where b replaced a: a is projected, b is committed and still on its way."""
    place: Storage = memory()
    if request.param == "local":
        place = LocalStorage(Uri.parse(str(tmp_path)))
    bodies: list[Body] = [fence(G1), A.seal(G1, 1), B.seal(G1, 2)]
    lay(committed_disk(Shape.FILESYSTEM, bodies, projected=(A,), waiting=(B,)), place)
    yield place
    place.close()


class Meanwhile(FaultyStorage):
    """Lets something happen right before one rename, or the link that follows it."""

    def __init__(self, inner: Storage, before: str, then: Callable[[], None]) -> None:
        super().__init__(inner, Plan([]))
        self._before, self._then = before, then

    def rename(self, source: str, target: str) -> None:
        if (source, self._before) == ("s1/.metadata", "rename"):
            self._then()
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        if (target, self._before) == ("s1/.metadata", "link"):
            self._then()
        super().link(source, target)


class Linkless(Meanwhile):
    """Files of another user: no link may be made to them."""

    def link(self, source: str, target: str) -> None:
        raise UnsupportedError("link failed: Operation not permitted", uri=self.uri(target))


def let_go_and_erase(storage: Storage) -> Erasure:
    """Retention lets a go, by a session that knows nothing of the one that saves b."""
    means = Means("A", storage.capabilities, ids("r")).held_by(G1)
    state = drive(
        retire(A.seal(G1, 1), means, fold(storage), reason="keep", together={"aaa"}), storage
    ).state
    return drive(erase_retired("aaa", means, state), storage)[0]


def show_b(storage: Storage) -> None:
    """The other session projects b."""
    drive(project(B.seal(G1, 2), {"A": fold(storage)}, "A", storage.capabilities), storage)


def _erase_alone(storage: Storage) -> None:
    """The removal of a as a process sees it that folded the log before b was sealed."""
    drive(erasing._unproject(A.keys, A.seal(G1, 1), trash_of(G1)), storage)


@pytest.mark.parametrize("kind", [Meanwhile, Linkless])
def test_a_projection_between_the_look_and_the_rename_comes_back(
    storage: Storage, kind: type[Meanwhile]
) -> None:
    """A removal that has seen the old .metadata moves the new one away, sees that, and puts it back."""
    _erase_alone(kind(storage, "rename", lambda: show_b(storage)))
    assert storage.read("s1/.metadata") == B.metadata
    assert storage.read("s1/ckptfs.json") == B.small()["ckptfs.json"]
    assert storage.list(trash_of(G1)) == []


def test_what_comes_back_replaces_nothing(storage: Storage) -> None:
    """What came to stand under the name while the moved file lay in the trash is newer, and stays."""

    def stock() -> None:
        storage.replace("s1/.metadata", STOCK)

    def show() -> None:
        show_b(storage)

    _erase_alone(Meanwhile(Meanwhile(storage, "link", stock), "rename", show))
    assert storage.read("s1/.metadata") == STOCK


def test_what_stock_torch_wrote_meanwhile_comes_back(storage: Storage) -> None:
    """A stock checkpoint that is saved over the projection while its save is removed is not lost."""
    _erase_alone(Meanwhile(storage, "rename", lambda: storage.replace("s1/.metadata", STOCK)))
    assert storage.read("s1/.metadata") == STOCK


@pytest.mark.parametrize("moved", [B.metadata, STOCK])
def test_the_next_owner_puts_back_what_a_dead_remover_left(storage: Storage, moved: bytes) -> None:
    """A remover died between its rename and its look: the file is back where it was, the rest goes."""
    show_b(storage)
    storage.remove("s1/.metadata")
    storage.replace(f"{trash_of(G1)}/aaa.{METADATA}", moved)
    storage.replace(f"{trash_of(G1)}/aaa.ckptfs.json", A.small()["ckptfs.json"])
    recover(storage, G2)
    assert storage.read("s1/.metadata") == moved
    assert storage.read("s1/ckptfs.json") == B.small()["ckptfs.json"]


def test_a_deleted_save_is_not_put_back(storage: Storage) -> None:
    """A save that was deleted while its .metadata lay in the trash does not come back to stock readers."""

    def show_and_delete() -> None:
        show_b(storage)
        means = Means("A", storage.capabilities, ids("other")).held_by(G1)
        together = retire(B.seal(G1, 2), means, fold(storage), reason="keep", together={"bbb"})
        drive(together, storage)

    _erase_alone(Meanwhile(storage, "rename", show_and_delete))
    assert "s1/.metadata" not in {f"s1/{entry.name}" for entry in storage.list("s1")}


@pytest.mark.parametrize("piece", [".metadata", "ckptfs.json"])
def test_the_next_owner_repairs_a_lost_projection(storage: Storage, piece: str) -> None:
    """What stock readers lost of a committed save that replaced another is there after a claim."""
    show_b(storage)
    assert let_go_and_erase(storage) is Erasure.GONE
    storage.remove(f"s1/{piece}")
    recover(storage, G2)
    assert storage.read(f"s1/{piece}") == B.small()[piece]


# -- what is foreign stays -----------------------------------------------------------------------

PLACES: dict[str, Callable[[Path], Storage]] = {
    "filesystem": lambda path: LocalStorage(Uri.parse(str(path))),
    "s3": lambda path: _bucket(Manners()),
    "s3 without if-match": lambda path: _bucket(Manners(if_match=Manner.IGNORES)),
}


def _bucket(manners: Manners) -> Storage:
    server, place = bucket()
    server.manners = manners
    place.probe(".ckptfs")
    return place


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """Each kind of place, with a committed and projected, and b committed and on its way."""
    place = PLACES[request.param](tmp_path)
    caps = place.capabilities
    assert caps.conditional_replace is (request.param == "s3")
    shape = caps.shape
    lay(_disk(shape), place)
    yield place
    place.close()


def _disk(shape: Shape) -> Disk:
    bodies: list[Body] = [fence(G1), A.seal(G1, 1), B.seal(G1, 2)]
    if shape is Shape.FILESYSTEM:
        return committed_disk(shape, bodies, projected=(A,), waiting=(B,))
    home = {f"s1/bbb/{name}": data for name, data in B.small().items()}
    home |= {f"s1/{B.data_path('A')}": B.data("A"), ".ckptfs/attempts/bbb/attempt.json": b"{}"}
    return committed_disk(shape, bodies, projected=(A,), foreign=home)


def test_a_projection_replaces_what_this_log_wrote(place: Storage) -> None:
    """Over the .metadata of a save that the log knows goes the one of the save that replaced it."""
    show_b(place)
    assert place.read("s1/.metadata") == B.metadata


@pytest.mark.parametrize("recovers", [False, True], ids=["saver", "next owner"])
def test_a_foreign_metadata_is_left_alone_and_told(
    place: Storage, caplog: pytest.LogCaptureFixture, *, recovers: bool
) -> None:
    """Neither a projection nor a recovery replaces what stock torch saved under the name; once it was
    moved away the next owner shows what was committed.
    """
    place.replace("s1/.metadata", STOCK)
    with caplog.at_level(logging.WARNING):
        recover(place, G2) if recovers else show_b(place)
    assert place.read("s1/.metadata") == STOCK
    assert "another program wrote s1/.metadata, so it was left alone" in caplog.text
    place.remove("s1/.metadata")
    recover(place, G3)
    assert place.read("s1/.metadata") == B.metadata


def test_a_lost_projection_is_not_repaired_over_a_foreign_one(
    place: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock torch saved over what was projected long ago: a claim leaves that alone, and says so."""
    show_b(place)
    place.replace("s1/.metadata", STOCK)
    with caplog.at_level(logging.WARNING):
        recover(place, G2)
    assert place.read("s1/.metadata") == STOCK
    # Where a replace is conditional no process can have put an older one back: nothing is compared there.
    assert ("another program wrote" in caplog.text) is (
        place.capabilities.shape is Shape.FILESYSTEM or not place.capabilities.conditional_replace
    )


# -- one process, two sessions ----------------------------------------------------------------------


def test_a_second_session_of_a_run_shares_turns_and_spared_deletes(tmp_path: Path) -> None:
    """A StorageWriter of a held run opens a session of its own; it leaves alone what the run's holder
    removes later, and takes turns with him.
    """
    run = f"{tmp_path}/run"
    with ckptfs.prepare_run(run) as held:
        ckptfs.save({"w": torch.ones(2)}, f"{run}/step_1", run=held)
        session = held.session
        first = next(iter(fold(session.storage).saves.values())).seal
        assert first is not None
        session.deferred_deletes.add(first.save_id)
        means = session.means().held_by(held.generation)
        program = partial(retire, first, means, None, reason="keep")
        drive(program(together={first.save_id}), session.storage)
        writer = ckptfs.StorageWriter(f"{run}/step_2", run=held)
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
        assert (tmp_path / "run/step_1/.metadata").exists()
        assert not fold(session.storage).save(first.save_id).gone
