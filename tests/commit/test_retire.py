"""The programs of retention in one domain: what may be entered, when bytes go, and what waits."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from ckptfs.commit.decisions import AT_ENTRY, Cause, Refusal, may_pin, reason_to_keep, waiting
from ckptfs.commit.delete.deletion_steps import (
    Erasure,
    erase_retired,
    pin,
    retire,
)
from ckptfs.commit.delete.trash import trash_of
from ckptfs.commit.log.append import HolderMeans, Means, RefusedAppend, catch_up
from ckptfs.commit.log.entries import Body, Decided, Delete, Kind, Outcome, Pin
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import decode_manifest, encode_manifest
from ckptfs.commit.operations import drive, take_turns
from ckptfs.commit.save.owner_steps import clear, finish
from ckptfs.errors import AlreadyExistsError, FencedError, NotFoundError, StorageError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.memory import MemoryStorage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Hold, Plan
from tests.commit.logs import G1, G2, fence, folded, memory, seal, write
from tests.commit.test_reclaim import lay
from tests.model.programs import What, ids
from tests.model.scenarios import committed_disk

OLD, NEW = What("old", "s1", gen=G1), What("new", "s2", gen=G1)


@pytest.fixture(params=[Shape.FILESYSTEM, Shape.OBJECT], ids=lambda shape: shape.value)
def storage(request: pytest.FixtureRequest) -> Iterator[MemoryStorage]:
    """A run with two committed, projected saves and a foreign file in the older one's step."""
    place = memory(request.param)
    bodies: list[Body] = [fence(G1), OLD.seal(G1, 1), NEW.seal(G1, 2)]
    foreign = {"s1/notes.txt": b"notes"}
    lay(committed_disk(request.param, bodies, projected=(OLD, NEW), foreign=foreign), place)
    yield place
    place.close()


def fold(storage: Storage) -> LogState:
    """The log as it is now."""
    return drive(catch_up(), storage)


def means(storage: Storage, who: str = "r") -> HolderMeans:
    """What an owner brings."""
    return Means("A", storage.capabilities, ids(who)).held_by(G1)


def let_go(storage: Storage) -> object:
    """Retention lets the older one go."""
    program = retire(OLD.seal(G1, 1), means(storage), None, reason="keep", together={"old"})
    return drive(program, storage)


def test_the_entry_comes_alone_and_the_bytes_whenever(storage: MemoryStorage) -> None:
    """After the entry the save is deleted and whole; erased, it is gone, and the foreign file stays."""
    let_go(storage)
    assert [s.save_id for s in waiting(fold(storage))] == ["old"]
    assert storage.read("s1/old/.metadata") == OLD.metadata
    assert storage.read("s1/.metadata") == OLD.metadata
    what, state = drive(erase_retired("old", means(storage), None), storage)
    assert (what, state.save("old").gone) == (Erasure.GONE, True)
    assert waiting(state) == []
    assert [entry.name for entry in storage.list("s1")] == ["notes.txt"]
    assert storage.read("s2/new/.metadata") == NEW.metadata


OBJECTS = pytest.mark.parametrize("storage", [Shape.OBJECT], indirect=True, ids=["object"])


@OBJECTS
def test_what_another_program_put_under_its_names_stays(storage: MemoryStorage) -> None:
    """Stock torch saved into the step after the commit: its `.metadata` is no part of what goes."""
    let_go(storage)
    storage.replace("s1/.metadata", b"metadata of stock torch")
    known = fold(storage)
    assert drive(erase_retired("old", means(storage), known), storage)[0] is Erasure.GONE
    assert storage.read("s1/.metadata") == b"metadata of stock torch"
    assert [entry.name for entry in storage.list("s1")] == [".metadata", "notes.txt"]


@OBJECTS
def test_a_copy_of_the_manifest_that_somebody_shortened_hides_no_file(
    storage: MemoryStorage,
) -> None:
    """The copy under the plain name counts while it is the one that was sealed; else the one next to the data."""
    let_go(storage)
    sealed = decode_manifest(storage.read("s1/old/ckptfs.json"), "s1")
    short = tuple(file for file in sealed.files if file.path.endswith(".metadata"))
    assert 0 < len(short) < len(sealed.files)
    storage.replace("s1/ckptfs.json", encode_manifest(replace(sealed, files=short)))
    known = fold(storage)
    assert drive(erase_retired("old", means(storage), known), storage)[0] is Erasure.GONE
    assert [entry.name for entry in storage.list("s1")] == ["notes.txt"]


@OBJECTS
def test_a_manifest_goes_after_what_only_it_tells_of(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for several keys removes them in any order: where it dies, those next to other people's
    files are known from the manifest alone.
    """
    plain = What("plain", "s3", gen=G1, artifact=Kind.DIRECTORY, caps=storage.capabilities)
    state = write(storage, [plain.seal(G1, 3), Delete("plain", G1)], prefix="a")
    lay(committed_disk(Shape.OBJECT, [], projected=(plain,)), storage)
    remove, removed = storage.remove_many, list[set[str]]()

    def note(keys: Sequence[str]) -> None:
        removed.append(set(keys))
        remove(keys)

    monkeypatch.setattr(storage, "remove_many", note)
    done, _ = drive(erase_retired("plain", means(storage), state), storage)
    assert done is Erasure.GONE
    (at,) = (n for n, keys in enumerate(removed) if "s3/model-A.bin" in keys)
    (last,) = (n for n, keys in enumerate(removed) if "s3/plain/ckptfs.json" in keys)
    assert at < last
    with pytest.raises(NotFoundError):
        storage.read("s3/model-A.bin")


@OBJECTS
def test_what_came_after_the_fold_is_seen_by_the_create(storage: MemoryStorage) -> None:
    """The entry is tried before the log is read: a pin took its number, and it is decided again."""
    known = fold(storage)
    drive(pin("old", means(storage, "p"), G1, None, pinned=True), storage)
    going = retire(OLD.seal(G1, 1), means(storage), known, reason="keep", together={"old"})
    assert isinstance(drive(going, storage), RefusedAppend)
    assert not fold(storage).save("old").deleted


def test_clearing_leaves_alone_what_is_spared(storage: MemoryStorage) -> None:
    """The next save's clearing ends deletes that died half-way, but none that only waits; asked while
    it runs, because retention enters deletes at the same time.
    """
    let_go(storage)
    spared = {"old"}
    drive(clear(means(storage, "c"), None, spared), storage)
    assert storage.read("s1/old/.metadata") == OLD.metadata
    spared.clear()
    drive(clear(means(storage, "d"), None, spared), storage)
    assert fold(storage).save("old").gone


def test_a_fenced_owner_enters_and_erases_nothing(storage: MemoryStorage) -> None:
    """A newer generation in the log: neither an entry nor a byte."""
    let_go(storage)
    write(storage, [fence(G2)])
    before = fold(storage)
    refused = drive(
        retire(NEW.seal(G1, 2), means(storage, "x"), None, reason="keep", together={"new"}),
        storage,
    )
    assert isinstance(refused, RefusedAppend)
    assert refused.reason is Refusal.FENCED
    assert drive(erase_retired("old", means(storage, "y"), None), storage) == (
        Erasure.FENCED,
        before,
    )
    assert fold(storage) == before
    assert storage.read("s1/old/.metadata") == OLD.metadata


def test_a_pin_that_came_first_is_respected(storage: MemoryStorage) -> None:
    """Pinned after the decision and before the entry: it stays."""
    drive(pin("old", means(storage, "p"), G1, None, pinned=True), storage)
    refused = let_go(storage)
    assert isinstance(refused, RefusedAppend)
    assert refused.reason is Refusal.NOTHING
    assert waiting(fold(storage)) == []


def test_erasing_twice_changes_nothing(storage: MemoryStorage) -> None:
    """A later call finds it gone and appends nothing."""
    let_go(storage)
    drive(erase_retired("old", means(storage), None), storage)
    before = fold(storage)
    assert drive(erase_retired("old", means(storage, "z"), None), storage)[0] is Erasure.GONE
    assert fold(storage) == before


@pytest.mark.parametrize("storage", [Shape.FILESYSTEM], indirect=True, ids=["filesystem"])
def test_another_try_empties_what_the_first_left_in_the_trash(storage: MemoryStorage) -> None:
    """Renamed, not removed: its place is empty, so only the trash shows what is left to do."""
    let_go(storage)
    full = Fault("remove_tree", "*.data", 1, Fail(OSError(errno.ENOTEMPTY, "not empty")))
    with pytest.raises(AlreadyExistsError):
        drive(erase_retired("old", means(storage), None), FaultyStorage(storage, Plan([full])))
    assert [e.name for e in storage.list(trash_of(G1))] == ["old.data"]
    what, _ = drive(erase_retired("old", means(storage, "e"), None, again=True), storage)
    assert what is Erasure.GONE
    assert storage.list(trash_of(G1)) == []


@pytest.mark.parametrize("storage", [Shape.FILESYSTEM], indirect=True, ids=["filesystem"])
def test_bytes_wait_while_a_successor_of_the_name_is_in_doubt(storage: MemoryStorage) -> None:
    """Sealed here and perhaps not elsewhere: `.metadata` may be the old one's for good."""
    let_go(storage)
    again = seal("again", "s1", seq=3, domains=("A", "B"))
    write(storage, [again], prefix="a")
    assert drive(erase_retired("old", means(storage), None), storage)[0] is Erasure.LATER
    assert storage.read("s1/old/.metadata") == OLD.metadata
    write(storage, [Decided("again", Outcome.ABORTED)], prefix="b")
    assert drive(erase_retired("old", means(storage, "e"), None), storage)[0] is Erasure.GONE


def test_removing_and_projecting_one_name_take_turns(storage: MemoryStorage) -> None:
    """From the look at `.metadata` to its removal no other process projects there, or its files
    would go with it; the long unlinking of the data keeps no process waiting.
    """
    let_go(storage)
    turn, short, long = threading.Lock(), Hold(), Hold()
    objects = storage.capabilities.shape is Shape.OBJECT
    removal = ("remove_many", "remove_many") if objects else ("rename", "remove_tree")
    data = "s1/old/*" if objects else "*.data"
    plan = Plan([Fault(removal[0], "s1/.metadata", 1, short), Fault(removal[1], data, 1, long)])
    faulty = FaultyStorage(storage, plan)
    erasing = threading.Thread(
        target=lambda: drive(take_turns(erase_retired("old", means(storage), None), turn), faulty),
        daemon=True,
    )
    erasing.start()
    assert short.reached.wait(60)
    assert turn.locked()
    short.release.set()
    assert long.reached.wait(60)
    again = What("again", "s1", gen=G1)
    lay(committed_disk(storage.capabilities.shape, [], waiting=(again,)), storage)
    state = write(storage, [again.seal(G1, 3)], prefix="a")
    assert turn.acquire(timeout=60)
    turn.release()
    done = finish(again.seal(G1, 3), Means("A", storage.capabilities, ids("f")), state)
    drive(take_turns(done, turn), storage)
    long.release.set()
    erasing.join(60)
    assert fold(storage).save("old").gone
    if not objects:
        assert storage.read("s1/.metadata") == again.metadata
    assert not turn.locked()


def test_a_program_that_fails_or_is_stopped_gives_its_turn_back(storage: MemoryStorage) -> None:
    """Whatever ends it, between two operations or inside a long one."""
    let_go(storage)
    turn, stop = threading.Lock(), threading.Event()
    stop.set()
    with pytest.raises(FencedError):
        drive(take_turns(erase_retired("old", means(storage), None), turn), storage, stopped=stop)
    assert not turn.locked()
    for op, key in (("read", "*/log/*"), ("remove_*", "*")):
        plan = Plan([Fault(op, key, 1, Fail(OSError(errno.EIO, "no")))])
        with pytest.raises(StorageError):
            drive(
                take_turns(erase_retired("old", means(storage, op), None), turn),
                FaultyStorage(storage, plan),
            )
        assert not turn.locked()


def test_what_is_referred_to_may_not_go_unless_its_users_go() -> None:
    """A reference of anything that stays or is not settled holds; of a deleted or aborted one not."""
    base, user = seal("base"), seal("user", seq=2, references=("base",))

    def kept(*bodies: Body, going: tuple[str, ...] = ("base",)) -> Cause | None:
        found = reason_to_keep("base", {"A": folded(*bodies)}, AT_ENTRY, going)
        return None if found is None else found.cause

    assert kept(base, user) is Cause.USED
    assert kept(base, user, going=("base", "user")) is None
    assert kept(base, user, Delete("user", G1)) is None
    assert kept(base, user, Decided("user", Outcome.ABORTED)) is None
    assert kept(base, Pin("base")) is Cause.PINNED


def test_only_what_is_sealed_and_there_is_pinned() -> None:
    """Unknown, deleted, or pinned already: nothing to say. A newer owner: not ours to say."""
    one = seal("one")
    assert may_pin(folded(fence(G1), one), "one", G1, pinned=True) == Pin("one")
    unpin = may_pin(folded(fence(G1), one, Pin("one")), "one", G1, pinned=False)
    assert unpin == Pin("one", pinned=False)
    for state, reason in (
        (folded(fence(G1)), Refusal.NOTHING),
        (folded(fence(G1), one, Pin("one")), Refusal.NOTHING),
        (folded(fence(G1), one, Delete("one", G1)), Refusal.NOTHING),
        (folded(fence(G1), one, fence(G2)), Refusal.FENCED),
    ):
        refused = may_pin(state, "one", G1, pinned=True)
        assert isinstance(refused, RefusedAppend)
        assert refused.reason is reason


@pytest.mark.parametrize("storage", [Shape.FILESYSTEM], indirect=True, ids=["filesystem"])
def test_bytes_behind_another_mount_wait(storage: MemoryStorage) -> None:
    """What cannot be renamed away stays and is not called gone; who comes when it can removes it."""
    let_go(storage)
    for key in ("s1/.metadata", "s1/old"):
        far = Fault("rename", key, 1, Fail(OSError(errno.EXDEV, "another disk")))
        again = FaultyStorage(storage, Plan([far]))
        what, state = drive(erase_retired("old", means(storage, key[-1]), None), again)
        assert (what, state.save("old").gone) == (Erasure.LATER, False)
        assert storage.read("s1/old/.metadata") == OLD.metadata
    assert drive(erase_retired("old", means(storage, "z"), None), storage)[0] is Erasure.GONE
    assert [entry.name for entry in storage.list("s1")] == ["notes.txt"]
