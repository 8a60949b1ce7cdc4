"""The programs of recovery in one domain: what it does when the log moved on since its plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptfs.commit.delete.trash import move_to_trash, take_trash, trash_of
from ckptfs.commit.log.append import Means, catch_up
from ckptfs.commit.log.entries import Body, Outcome
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.recovery import plan_recovery, report, settle
from ckptfs.commit.ownership.recovery_plan import RecoveryPlan as Recovery
from ckptfs.commit.paths import ATTEMPTS, AttemptKeys
from ckptfs.commit.save.owner_steps import begin, prepare
from ckptfs.commit.save.projection import discard_source, project
from ckptfs.errors import FencedError
from ckptfs.storage.base import Shape, Storage
from ckptfs.testing.faults import Fault, FaultyStorage, Lose, Plan
from tests.commit.logs import G1, G2, G3, fence, memory, write
from tests.commit.test_reclaim import lay
from tests.model.lying import committed_disk
from tests.model.programs import What, ids

LATE = What("late", gen=G1)
MOVING = What("20260101T000000-aaaaaaaaaaaa", gen=G2)


def _judged(storage: Storage) -> Recovery:
    """The plan of a newcomer who found an attempt without a seal."""
    write(storage, [fence(G1)])
    storage.make_dir(ATTEMPTS)
    drive(begin(LATE.keys, G1), storage)
    storage.replace(f"{LATE.keys.data}/__A_0.distcp", LATE.data("A"))
    drive(prepare(LATE.keys, LATE.small()), storage)
    write(storage, [fence(G2)])
    plan = plan_recovery({"A": drive(report("A", G2, storage.capabilities), storage)}, G2)
    assert [record.save_id for record in plan.abort] == ["late"]
    return plan


def test_bytes_stay_where_the_abort_came_too_late() -> None:
    """The plan says abort, and then the seal is there, as it may be where an entry slips in next to a
    fence: the log orders the two, and the save is committed, whole and projected.
    """
    storage = memory()
    plan = _judged(storage)
    write(storage, [LATE.seal(G1, 1)])
    drive(settle(plan, Means("A", storage.capabilities, ids("r")).held_by(G2)), storage)
    assert not drive(catch_up(), storage).save("late").aborted
    assert storage.read("s1/late/__A_0.distcp") == LATE.data("A")
    assert storage.read("s1/.metadata") == LATE.metadata


def test_files_without_their_data_stay_where_the_save_was_sealed_and_is_moving() -> None:
    """Its writer moved the data into a step that was there, and the seal came after our look at the log: what
    looks like the remains of a power cut is the rest of a projection.
    """
    storage = memory()
    write(storage, [fence(G1), fence(G2)])
    storage.make_dir(ATTEMPTS)
    drive(begin(MOVING.keys, G2), storage)
    storage.replace(f"{MOVING.keys.data}/__A_0.distcp", MOVING.data("A"))
    drive(prepare(MOVING.keys, MOVING.small()), storage)
    storage.make_dir("s1")
    storage.rename(MOVING.keys.data, f"s1/{MOVING.save_id}")
    plan = plan_recovery({"A": drive(report("A", G2, storage.capabilities), storage)}, G2)
    assert [record.save_id for record in plan.abort] == [MOVING.save_id]
    write(storage, [MOVING.seal(G2, 1)])
    drive(settle(plan, Means("A", storage.capabilities, ids("r")).held_by(G2)), storage)
    assert not drive(catch_up(), storage).save(MOVING.save_id).aborted
    assert storage.read(f"s1/{MOVING.save_id}/__A_0.distcp") == MOVING.data("A")
    drive(
        project(MOVING.seal(G2, 1), {"A": drive(catch_up(), storage)}, "A", storage.capabilities),
        storage,
    )
    assert storage.read("s1/.metadata") == MOVING.metadata


def test_an_attempt_under_our_own_fence_without_a_file_is_left_alone() -> None:
    """It has its first directory, or both of them: its process may live, and writes the record next."""
    storage = memory()
    write(storage, [fence(G1), fence(G2)])
    first, second = "20260101T000000-aaaaaaaaaaaa", "20260101T000000-bbbbbbbbbbbb"
    for folder in (first, f"{second}/{second}"):
        storage.make_dir(f"{ATTEMPTS}/{folder}")
    plan = plan_recovery({"A": drive(report("A", G2, storage.capabilities), storage)}, G2)
    assert not plan.abort


def test_an_attempt_of_an_older_owner_is_aborted_and_removed() -> None:
    """It will never be sealed: the log says so, and then its bytes go."""
    storage = memory()
    plan = _judged(storage)
    drive(settle(plan, Means("A", storage.capabilities, ids("r")).held_by(G2)), storage)
    assert drive(catch_up(), storage).save("late").aborted
    assert storage.list(ATTEMPTS) == []


def test_a_recovery_that_was_fenced_meanwhile_stops() -> None:
    """A newer owner came between its plan and its first entry: FencedError, and nothing is touched."""
    storage = memory()
    plan = _judged(storage)
    write(storage, [fence(G3)])
    with pytest.raises(FencedError, match="newer owner"):
        drive(settle(plan, Means("A", storage.capabilities, ids("r")).held_by(G2)), storage)
    assert [entry.name for entry in storage.list(ATTEMPTS)] == ["late"]


def test_a_recovery_that_was_fenced_before_it_recorded_a_decision_stops() -> None:
    """The same where it has nothing to abort: a save of two domains is committed, and unrecorded."""
    both = {"A": memory(), "B": memory()}
    saved = What("two", gen=G1, domains=("A", "B"))
    reports = {}
    for domain, place in both.items():
        write(place, [fence(G1), saved.seal(G1, 1), fence(G2)])
        drive(take_trash(G1, place.capabilities, LogState()), place)
        reports[domain] = drive(report(domain, G2, place.capabilities), place)
    plan = plan_recovery(reports, G2)
    assert (plan.abort, plan.decided) == ((), (("two", Outcome.COMMITTED),))
    write(both["A"], [fence(G3)])
    for domain, place in both.items():
        program = settle(plan, Means(domain, place.capabilities, ids("r")).held_by(G2))
        if domain == "A":
            with pytest.raises(FencedError, match="newer owner"):
                drive(program, place)
        else:
            drive(program, place)
            assert drive(catch_up(), place).save("two").decided is Outcome.COMMITTED


@pytest.mark.parametrize("done", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize("key", ["s1/.metadata", "s1/ckptfs.json"])
def test_a_lost_answer_to_a_projection_is_looked_into(key: str, done: bool) -> None:
    """Whether a PUT arrived is read from the object itself: stock readers see the save in any case."""
    place = memory(Shape.OBJECT)
    saved = What("new", gen=G1, caps=place.capabilities)
    bodies: list[Body] = [fence(G1), saved.seal(G1, 1)]
    lay(committed_disk(Shape.OBJECT, bodies), place)
    for name, data in saved.small().items():
        place.replace(f"s1/new/{name}", data)
    storage = FaultyStorage(place, Plan([Fault("replace", key, 1, Lose(done=done))]))
    state = drive(catch_up(), storage)
    drive(project(saved.seal(G1, 1), {"A": state}, "A", place.capabilities), storage)
    for name, data in saved.small().items():
        assert place.read(f"s1/{name}") == data


class _Overtaken(FaultyStorage):
    """A storage on which something else happens just before the first PUT."""

    def __init__(self, inner: Storage, before: Callable[[], object]) -> None:
        super().__init__(inner, Plan([]))
        self._before: list[Callable[[], object]] = [before]

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        while self._before:
            self._before.pop()()
        super().replace(key, data, if_match=if_match)


@pytest.mark.parametrize("shown", [False, True], ids=["fresh", "shown before"])
def test_a_projection_that_is_overtaken_at_its_last_step_does_nothing(shown: bool) -> None:
    """A newer save is committed and shown between its look at the log and its PUT: the etag that it
    read, or the absence, is its condition.
    """
    place = memory(Shape.OBJECT)
    old, new = (What(name, gen=G1, caps=place.capabilities) for name in ("old", "new"))
    for saved in (old, new):
        for name, data in saved.small().items():
            place.replace(f"s1/{saved.save_id}/{name}", data)
    if shown:
        for name in old.small():
            place.replace(f"s1/{name}", b"of an earlier one, old")
    state = write(place, [fence(G1), old.seal(G1, 1)])

    def overtake() -> None:
        now = write(place, [new.seal(G1, 2)])
        drive(project(new.seal(G1, 2), {"A": now}, "A", place.capabilities), place)

    storage = _Overtaken(place, overtake)
    drive(project(old.seal(G1, 1), {"A": state}, "A", place.capabilities), storage)
    for name, data in new.small().items():
        assert place.read(f"s1/{name}") == data


def _waiting(*saves: What, shown: tuple[What, ...] = ()) -> tuple[Storage, LogState]:
    """A filesystem on which these are sealed, in this order, and wait for their projection."""
    place = memory()
    bodies: list[Body] = [fence(G1), *(s.seal(G1, n) for n, s in enumerate((*shown, *saves), 1))]
    lay(committed_disk(place.capabilities.shape, bodies, projected=shown, waiting=saves), place)
    return place, drive(catch_up(), place)


def test_a_projection_goes_on_behind_a_piece_that_is_done() -> None:
    """Another owner died when the data had moved: the step gets its .metadata and its manifest."""
    new = What("new", gen=G1)
    place, state = _waiting(new, shown=(What("old", gen=G1),))
    place.rename(new.keys.data, new.keys.projected_data)
    drive(project(new.seal(G1, 2), {"A": state}, "A", place.capabilities), place)
    assert place.read("s1/.metadata") == new.metadata
    assert place.read("s1/ckptfs.json") == new.small()["ckptfs.json"]
    assert place.list(ATTEMPTS) == []


def test_the_source_of_an_older_save_is_consumed_first() -> None:
    """Two saves of one name wait: the newer is shown, the older one's data is next to it, and nothing
    is left that a process stalled over the older one could rename over the newer.
    """
    old, new = What("old", gen=G1), What("new", gen=G1, replace=True)
    place, state = _waiting(old, new)
    drive(project(new.seal(G1, 2), {"A": state}, "A", place.capabilities), place)
    assert place.read("s1/.metadata") == new.metadata
    assert place.read("s1/old/__A_0.distcp") == old.data("A")
    assert place.list(ATTEMPTS) == []


def test_a_projection_that_slept_does_not_show_the_older_save() -> None:
    """Its writer folded the log, slept, and wakes when a newer save of the name is committed and shown:
    the log as it is now decides, and the newer one stays.
    """
    place = memory(Shape.OBJECT)
    old, new = (What(name, gen=G1, caps=place.capabilities) for name in ("old", "new"))
    for saved in (old, new):
        for name, data in saved.small().items():
            place.replace(f"s1/{saved.save_id}/{name}", data)
    asleep = write(place, [fence(G1), old.seal(G1, 1)])
    awake = write(place, [new.seal(G1, 2)])
    for saved, state in ((new, awake), (old, asleep)):
        program = project(saved.seal(G1, 1), {"A": state}, "A", place.capabilities)
        drive(program, place)
        for name, data in new.small().items():
            assert place.read(f"s1/{name}") == data


def _left(storage: Storage, source: str, target: str) -> None:
    """An earlier try died in the middle of its removal, and the source is there again."""
    for place in (source, target):
        storage.make_dir(place)
        storage.replace(f"{place}/data", b"data")


def test_what_an_earlier_try_left_in_the_trash_does_not_hide_the_source() -> None:
    """The name in the trash is taken by a half-removed piece: both go, and nothing else is said."""
    storage = memory()
    drive(take_trash(G1, storage.capabilities, LogState()), storage)
    source, target = "s1/old", f"{trash_of(G1)}/old.data"
    _left(storage, source, target)
    assert drive(move_to_trash(source, target), storage) is True
    assert storage.list("s1") == []
    assert storage.list(trash_of(G1)) == []
    assert drive(move_to_trash(source, target), storage) is False


def test_what_an_earlier_try_left_does_not_hide_an_attempt() -> None:
    """The same of an attempt that its own process gives up."""
    storage = memory()
    keys = AttemptKeys(Shape.FILESYSTEM, "s1", "given-up")
    storage.make_dir(ATTEMPTS)
    _left(storage, keys.attempt, ".ckptfs/trash/given-up.own")
    drive(discard_source(keys), storage)
    assert storage.list(ATTEMPTS) == []
    assert storage.list(".ckptfs/trash") == []
