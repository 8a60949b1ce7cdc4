"""Deleting on a real storage: what is ours goes, what is not stays, and the log says when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.commit.catalog.catalog import find
from ckptfs.commit.decisions import Refusal
from ckptfs.commit.delete.delete_checkpoint import remove_unheld
from ckptfs.commit.delete.deletion_steps import Erasure, delete_save, retire
from ckptfs.commit.delete.trash import own_trash, trash_of
from ckptfs.commit.log.append import Means, catch_up
from ckptfs.commit.log.entries import GENESIS, Body, Generation
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.recovery import plan_recovery, report, settle
from ckptfs.commit.paths import ATTEMPTS, PARTIAL_PREFIX, TRASH, AttemptKeys
from ckptfs.commit.save.owner_steps import begin
from ckptfs.errors import NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import FaultyStorage, Plan, parse_faults
from ckptfs.uri import Uri
from tests.commit.logs import G1, G2, fence, memory, write
from tests.model.disk import Disk
from tests.model.programs import What, ids
from tests.model.scenarios import committed_disk

A = What("aaa", gen=G1)


def lay(disk: Disk, storage: Storage) -> None:
    """Put a model disk on a storage."""
    for path, data in sorted(disk.files.items()):
        if data is None:
            storage.make_dir(path)
        else:
            storage.replace(path, data)


@pytest.fixture(params=["memory", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A filesystem, in memory and on disk, with one committed, projected save and a foreign file."""
    place: Storage = memory()
    if request.param == "local":
        place = LocalStorage(Uri.parse(str(tmp_path)))
    bodies: list[Body] = [fence(G1), A.seal(G1, 1)]
    foreign = {"s1/notes.txt": b"notes"}
    lay(committed_disk(place.capabilities.shape, bodies, projected=(A,), foreign=foreign), place)
    yield place
    place.close()


def fold(storage: Storage) -> LogState:
    """The log as it is now."""
    return drive(catch_up(), storage)


def delete(storage: Storage, by: Generation = G1) -> None:
    """The holder deletes the save."""
    caps, views = storage.capabilities, {"A": fold(storage)}
    means = Means("A", caps, ids(f"d{by.number}")).held_by(by)
    drive(delete_save(A.seal(G1, 1), views, means, reason="asked"), storage)


def recover(storage: Storage, gen: Generation) -> LogState:
    """A newcomer takes the run."""
    write(storage, [fence(gen)], prefix=f"f{gen.number}")
    found = drive(report("A", gen, storage.capabilities), storage)
    plan = plan_recovery({"A": found}, gen)
    program = settle(plan, Means("A", storage.capabilities, ids(f"r{gen.number}")).held_by(gen))
    return drive(program, storage)


def test_a_deleted_save_goes_and_a_foreign_file_stays(storage: Storage) -> None:
    """Data, .metadata and manifest are gone, the log says so, and the notes are where they were."""
    delete(storage)
    assert fold(storage).save("aaa").gone
    assert [entry.name for entry in storage.list("s1")] == ["notes.txt"]
    assert storage.list(trash_of(G1)) == []
    with pytest.raises(NotFoundError):
        drive(find(A.seal(G1, 1), storage.capabilities.shape, Uri.parse("memory://t/s1")), storage)


def test_an_empty_step_directory_goes_too(storage: Storage) -> None:
    """What a person lists is committed checkpoints, nothing else."""
    storage.remove("s1/notes.txt")
    delete(storage)
    assert [entry.name for entry in storage.list("")] == [".ckptfs"]


def test_without_its_trash_nothing_is_said_to_be_gone(storage: Storage) -> None:
    """A deleter that lost its trash to another moved nothing: the next holder completes it."""
    storage.remove_tree(TRASH)
    delete(storage)
    state = fold(storage)
    assert state.save("aaa").deleted
    assert not state.save("aaa").gone
    assert storage.read("s1/.metadata") == A.metadata
    assert recover(storage, G2).save("aaa").gone
    assert [entry.name for entry in storage.list("s1")] == ["notes.txt"]


def test_a_fenced_deleter_removes_nothing(storage: Storage) -> None:
    """Under an older generation neither the entry nor the bytes change."""
    recover(storage, G2)
    delete(storage, by=G1)
    assert not fold(storage).save("aaa").deleted
    assert storage.read("s1/aaa/.metadata") == A.metadata


def test_a_newcomer_removes_older_trash_and_leaves_newer(storage: Storage) -> None:
    """Older trash directories go with all that is in them; a newer holder keeps his, and so does who
    removes a save without a fence.
    """
    third = Generation(3, "z")
    newer = {trash_of(third), own_trash(third, "remover")}
    for directory in newer:
        storage.make_dir(directory)
    storage.replace(f"{trash_of(G1)}/old", b"x")
    storage.make_dir(own_trash(G1, "remover"))
    storage.replace(f"{own_trash(G1, 'remover')}/old", b"x")
    storage.make_dir(own_trash(GENESIS, "remover"))
    storage.make_dir(f"{TRASH}/some.own")
    recover(storage, G2)
    names = {entry.name for entry in storage.list(TRASH)}
    assert {f"{TRASH}/{name}" for name in names} == {*newer, trash_of(G2)}


def remove_unfenced(
    storage: Storage, state: LogState, who: str
) -> tuple[Refusal | Erasure, LogState]:
    """Somebody who fences nothing, and has looked at the log before, removes the save."""
    means = Means("A", storage.capabilities, ids(who)).held_by(G1)
    return drive(remove_unheld(A.seal(G1, 1), means, state), storage)


def test_whoever_removes_without_a_fence_leaves_no_directory(storage: Storage) -> None:
    """The trash of its own goes with the bytes that went through it; one that comes late leaves none."""
    before = storage.list(TRASH)
    looked = fold(storage)
    assert remove_unfenced(storage, looked, "d")[0] is Erasure.GONE
    assert [entry.name for entry in storage.list("s1")] == ["notes.txt"]
    assert remove_unfenced(storage, looked, "e")[0] is Erasure.LATER
    assert storage.list(TRASH) == before


def test_bytes_of_a_delete_that_another_entered_are_left_to_that_one(storage: Storage) -> None:
    """Two that move the pieces of one save under one generation might take a successor's."""
    means = Means("A", storage.capabilities, ids("d")).held_by(G1)
    program = retire(A.seal(G1, 1), means, None, reason="removed", together={"aaa"})
    drive(program, storage)
    assert remove_unfenced(storage, fold(storage), "e")[0] is Erasure.LATER
    assert storage.read("s1/.metadata") == A.metadata


def test_of_a_living_attempt_nothing_is_swept(storage: Storage) -> None:
    """A save that began under the new fence writes its data; half a record of a dead one goes."""
    keys = AttemptKeys(storage.capabilities.shape, "s2", "living")
    dead = AttemptKeys(storage.capabilities.shape, "s2", "dead")
    drive(begin(keys, G2), storage)
    half = f"{keys.data}/{PARTIAL_PREFIX}0123456789abcdef"
    storage.replace(half, b"half of its data")
    storage.make_dir(dead.data)
    storage.replace(f"{dead.data}/{PARTIAL_PREFIX}0123456789abcdef", b"{")
    recover(storage, G2)
    assert storage.read(half) == b"half of its data"
    assert [entry.name for entry in storage.list(ATTEMPTS)] == ["living"]


@pytest.mark.parametrize("error", ["NotFoundError", "StaleError"])
def test_a_save_whose_directory_was_swept_makes_it_again(error: str) -> None:
    """Swept between its making and its record: a network client may say so in two ways."""
    plan = Plan(parse_faults(f"fail={error}:open_write:*/attempt.json:1"))
    storage = FaultyStorage(memory(), plan)
    keys = AttemptKeys(storage.capabilities.shape, "s2", "bbb")
    drive(begin(keys, G2), storage)
    assert b'"bbb"' in storage.read(keys.record)
