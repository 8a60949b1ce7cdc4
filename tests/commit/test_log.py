"""The run log: one entry per append, whatever answers are lost and whichever others append."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.commit import paths
from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.log import append as log
from ckptfs.commit.log.append import (
    Appended,
    FoundHint,
    Gap,
    RefusedAppend,
    append,
    catch_up,
    check_complete,
    gap_in,
    make_log,
    write_snapshot,
)
from ckptfs.commit.log.entries import (
    Body,
    Entry,
    Foreign,
    Pin,
    Snapshot,
    body_fields,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry
from ckptfs.commit.operations import Program, drive
from ckptfs.commit.paths import DOMAIN, HINT, LOG, log_key
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import SoloControl
from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CommitInDoubtError,
    ManifestError,
    NoSpaceError,
    NotFoundError,
    TransientError,
)
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Lose, Plan, When
from ckptfs.uri import Uri
from tests.commit.logs import G1, fence, memory, seal, write

CREATE = f"{LOG}/*"
Done = Appended | RefusedAppend[str]


def entries(storage: Storage) -> list[Entry]:
    """Every entry, read around the code under test."""
    names = [e.name for e in storage.list(LOG)]
    assert names == [f"{n:08d}" for n in range(len(names))], "a gap in the log"
    return [decode_entry(storage.read(f"{LOG}/{name}"), name) for name in names]


def pin(name: str, storage: Storage, state: LogState | None = None) -> Appended:
    """Append one entry that says its own write id."""
    done: Done = drive(append(lambda _: Pin(name), write_id=name, state=state), storage)
    assert isinstance(done, Appended)
    return done


# -- one writer ---------------------------------------------------------------------------------


def test_entries_are_numbered_without_gaps_and_read_back() -> None:
    """Three appends are entries 0, 1, 2, and a cold fold sees all of them."""
    storage = memory()
    write(storage, [fence(G1), seal("a"), Pin("a")])
    assert [type(e.body).__name__ for e in entries(storage)] == ["Fence", "Seal", "Pin"]
    assert drive(catch_up(), storage).next == 3


def test_a_log_that_is_not_there_is_empty() -> None:
    """Reading needs nothing to exist and makes nothing."""
    storage = memory()
    assert drive(catch_up(), storage) == LogState()
    with pytest.raises(NotFoundError):
        storage.list("")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("create", CREATE, 1, Lose()),
        Fault("create", CREATE, 1, Lose(done=False)),
        Fault("create", CREATE, 1, Lose(later=True, after=1)),
        Fault("create", CREATE, 1, Lose(later=True, after=2)),
        Fault("create", CREATE, 1, Lose(later=True, after=9)),
        Fault("create", CREATE, 1, Fail(TransientError("throttled"), When.BEFORE)),
        Fault("read", CREATE, 1, Fail(TransientError("throttled"), When.BEFORE)),
    ],
    ids=["done", "undone", "late", "later", "after the next entry", "throttled", "read"],
)
def test_a_lost_or_late_answer_appends_exactly_once(fault: Fault) -> None:
    """The own write id is read back: the entry is there once and the caller gets its number."""
    storage = memory()
    drive(make_log(), storage)
    plan = Plan([fault])
    first = pin("mine", FaultyStorage(storage, plan))
    assert first.number == 0
    pin("next", FaultyStorage(storage, plan))
    plan.deliver()
    assert [e.write_id for e in entries(storage)] == ["mine", "next"]


def test_exists_with_another_ones_bytes_is_folded_and_decided_again() -> None:
    """What was right at n may be wrong at n+1: the decision sees the entry that took the number."""
    storage = memory()
    write(storage, [fence(G1)])
    stale = drive(catch_up(), storage)
    write(storage, [seal("other")])
    seen: list[int] = []

    def decide(state: LogState) -> Body | RefusedAppend[str]:
        seen.append(state.next)
        return RefusedAppend("taken", state) if "other" in state.saves else Pin("x")

    class Late(MemoryStorage):
        """Shows entry 1 only after a create of it failed, as a stale client would."""

        def read_small(self, key: str, limit_bytes: int) -> bytes:
            if key == log_key(1) and not seen[1:]:
                seen.append(-1)
                raise NotFoundError("not seen yet")
            return super().read_small(key, limit_bytes)

    late = Late.__new__(Late)
    late.__dict__.update(storage.__dict__)
    outcome = drive(append(decide, write_id="w", state=stale), late)
    assert isinstance(outcome, RefusedAppend)
    assert len(entries(storage)) == 2


def test_no_certain_answer_until_the_deadline_is_in_doubt_and_deletes_nothing() -> None:
    """A storage that stops answering: the caller gets that error, and nothing was removed."""
    storage = memory()
    drive(make_log(), storage)
    faulty = FaultyStorage(storage, Plan([Fault("create", CREATE, None, Lose(done=False))]))
    program: Program[Done] = append(lambda _: Pin("x"), write_id="x")
    with pytest.raises(CommitInDoubtError) as caught:
        drive(program, faulty, deadline_s=0.05)
    assert caught.value.outcome == "unknown"
    assert entries(storage) == []


def test_a_sure_failure_after_a_lost_answer_is_in_doubt_too() -> None:
    """Permission refused after an answer was lost says nothing about the first try."""
    storage = memory()
    drive(make_log(), storage)
    plan = Plan(
        [
            Fault("create", CREATE, 1, Lose(done=False)),
            Fault("create", CREATE, 2, Fail(AccessError("no"), When.BEFORE)),
        ]
    )
    with pytest.raises(CommitInDoubtError):
        pin("x", FaultyStorage(storage, plan))


def test_a_sure_failure_is_itself() -> None:
    """No space for the entry: NoSpaceError, outcome failed, and the log is as before."""
    storage = memory()
    drive(make_log(), storage)
    plan = Plan([Fault("create", CREATE, 1, Fail(NoSpaceError("full"), When.BEFORE))])
    with pytest.raises(NoSpaceError) as caught:
        pin("x", FaultyStorage(storage, plan))
    assert caught.value.outcome == "failed"
    assert entries(storage) == []


def test_a_damaged_entry_stops_the_fold_with_its_name() -> None:
    """An entry that is none is never skipped: what follows it would mean something else."""
    storage = memory()
    write(storage, [fence(G1), seal("a")])
    storage.replace(log_key(0), b"\x00\x00")
    with pytest.raises(ManifestError, match="00000000"):
        drive(catch_up(), storage)


# -- snapshots ----------------------------------------------------------------------------------


class Counting(MemoryStorage):
    """Counts reads of log entries."""

    reads = 0

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        self.reads += key.startswith(LOG)
        return super().read_small(key, limit_bytes)


def _long_log(storage: Storage, length: int) -> LogState:
    drive(make_log(), storage)
    state = pin("first", storage).state
    while state.next < length:
        state = pin(f"p{state.next % 50}", storage, state).state
        state = drive(write_snapshot(state, write_id=f"s{state.next}"), storage)
    return state


def test_a_cold_fold_of_ten_thousand_entries_reads_few() -> None:
    """A snapshot every hundred entries, found through the hint: the fold is the same, the reads
    are a hundredth.
    """
    stores = MemoryStoreRegistry()
    storage = Counting(Uri.parse("memory://t/run"), stores=stores)
    state = _long_log(storage, 10_000)
    storage.reads = 0
    cold = drive(catch_up(), storage)
    assert storage.reads <= log.SNAPSHOT_EVERY + 2
    assert cold == state
    storage.remove(HINT)
    assert drive(catch_up(), storage).saves == state.saves


@pytest.mark.parametrize(
    "hint",
    [
        b"",
        b"garbage",
        b"{}",
        b"[1]",
        b'{"snapshot": 3}',
        b'{"snapshot": 99999999}',
        b'{"snapshot": -1}',
        b'{"snapshot": null}',
        b'{"snapshot": Infinity}',
        b'{"snapshot": 4000000000000000000000}',
        b'{"snapshot": [[[[0]]]]}',
        b"[" * 100_000,
    ],
)
def test_the_hint_is_no_authority(hint: bytes) -> None:
    """Whatever is there, the fold is right."""
    storage = memory()
    state = _long_log(storage, 230)
    storage.replace(HINT, hint)
    assert drive(catch_up(), storage).saves == state.saves


@pytest.mark.parametrize("age", ["now", "older", "before the first"])
def test_a_hint_that_was_read_before_is_as_good(age: str) -> None:
    """A reader at an object store has it with the domain's id: an old one leads to an older snapshot, none to the
    first entry.
    """
    storage = Counting(Uri.parse("memory://t/run"), stores=MemoryStoreRegistry())
    state = _long_log(storage, 230)
    older = json.dumps({"snapshot": log.SNAPSHOT_EVERY - 1}).encode()
    data = {"now": storage.read(HINT), "older": older, "before the first": None}[age]
    storage.remove(HINT)
    storage.reads = 0
    assert drive(catch_up(hint=FoundHint(data)), storage).saves == state.saves
    assert storage.reads < {"now": 70, "older": 160, "before the first": 250}[age]


def test_a_session_of_a_reader_has_the_hint_and_reads_no_other() -> None:
    """Its first answers come with the domain's id."""
    storage = memory(Shape.OBJECT)
    state = _long_log(storage, 230)
    storage.replace(DOMAIN, b"d")
    session = start_session(SoloControl(), storage, Place(), write=False)
    assert session.hint == FoundHint(storage.read(HINT))
    storage.remove(HINT)
    view = drive(read_view(session.hint), session.storage)
    assert view is not None
    assert view[1].saves == state.saves


def test_a_fold_from_the_first_entry_holds_one_snapshot_at_a_time() -> None:
    """Where no hint names a snapshot all entries are read, snapshots too: each says all that was before,
    and together they are as much as the square of the log.
    """
    storage = memory()
    state = LogState()
    drive(make_log(), storage)
    for number in range(200):
        body: Body = Snapshot({"saves": [{"save_id": f"{n}"} for n in range(2000)]})
        body = body if number % 2 else Pin("x")
        storage.create(log_key(number), encode_entry(Entry(f"w{number}", body)), staging="s")
        state = fold_entry(state, body)
    tracemalloc.start()
    try:
        found = drive(catch_up(), storage)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.next, found.snapshot_at) == (200, 199)
    # Eight of 16 entries that are read at once are snapshots, of half a MB; all together are 50 MB.
    assert peak < 16 * 800_000


@pytest.mark.parametrize("large", [0, 20, 39])
def test_a_large_entry_is_read_by_itself(large: int) -> None:
    """Many entries are read at once, each of at most a MiB. One that has more, as a snapshot of thousands of
    saves, is folded like any other.
    """
    storage = memory()
    bodies: list[Body] = [Pin(f"p{n}") for n in range(40)]
    bodies[large] = Snapshot({"saves": [{"save_id": f"{n:020}"} for n in range(60_000)]})
    state = write(storage, bodies)
    assert storage.stat(log_key(large)).size_bytes > paths.AHEAD_BYTES
    again = drive(catch_up(), storage)
    assert again.next == 40
    assert again == state


def _rewritten(storage: Storage, edit: Callable[[dict[str, Any]], None]) -> None:
    """The newest snapshot says something else, as if another version had written it."""
    number = json.loads(storage.read(HINT))["snapshot"]
    record = json.loads(storage.read(log_key(number)))
    edit(record)
    storage.replace(log_key(number), json.dumps(record).encode())


UNREADABLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "a new outcome": lambda r: r["state"]["saves"][0].update(decided="postponed"),
    "a new kind": lambda r: r["state"]["saves"][0].update(
        seal=body_fields(seal("s")) | {"artifact": "dream"}
    ),
    "a new fence mode": lambda r: r["state"]["fence"].update(mode="share"),
    "a field that is gone": lambda r: r["state"].pop("released"),
    "a field of a save that is gone": lambda r: r["state"]["saves"][0].pop("pinned"),
    "no saves": lambda r: r["state"].update(saves=None),
    "a save that is none": lambda r: r["state"].update(saves=[7]),
    "a name with a path": lambda r: r["state"]["saves"][0].update(save_id="../x"),
    "a number for ever": lambda r: r["state"]["fence"].update(generation=[1e400, ""]),
    "a flag that is a word": lambda r: r["state"]["saves"][0].update(deleted="no"),
    "a place that is a word": lambda r: r["state"].update(fence_at="last"),
    "an overwrite without a place": lambda r: r["state"].update(overwrites=[[[1, "a"]]]),
}


@pytest.mark.parametrize("edit", UNREADABLE.values(), ids=UNREADABLE)
def test_a_snapshot_that_cannot_be_read_is_passed_over(
    edit: Callable[[dict[str, Any]], None],
) -> None:
    """A newer version's words or damage in a snapshot: the entries below it still say everything."""
    storage = memory()
    state = _long_log(storage, 230)
    _rewritten(storage, edit)
    found = drive(catch_up(), storage)
    assert (found.saves, found.fence, found.next) == (state.saves, state.fence, state.next)
    pin("after", storage)


def test_no_snapshot_above_a_foreign_entry_or_fields() -> None:
    """Kinds and fields of a newer version: everything is read, nothing is summed up."""
    for foreign in (
        b'{"kind":"quota","id":"f","at":"","by_host":"","by_pid":0,"by_rank":null,"v":2}',
        encode_entry(Entry("f", Pin("x"))).replace(b'{"at"', b'{"colour":1,"at"'),
    ):
        storage = memory()
        write(storage, [fence(G1)])
        storage.create(log_key(1), foreign, staging=".ckptfs/tmp/f")
        state = drive(catch_up(), storage)
        assert state.next == 2
        assert state.foreign
        for _ in range(log.SNAPSHOT_EVERY):
            state = pin("p", storage, state).state
        after = drive(write_snapshot(state, write_id="s"), storage)
        assert after.snapshot_at == -1
    assert decode_entry(b'{"kind":"quota","id":"f"}', "f").body == Foreign("quota")


def test_a_snapshot_that_cannot_be_written_fails_nothing() -> None:
    """The log is slower to read without it, and that is all."""
    storage = memory()
    state = _long_log(storage, 90)
    while state.next - state.snapshot_at < log.SNAPSHOT_EVERY:
        state = pin("p", storage, state).state
    plan = Plan([Fault("create", CREATE, 1, Fail(NoSpaceError("full"), When.BEFORE))])
    assert drive(write_snapshot(state, write_id="s"), FaultyStorage(storage, plan)) == state
    plan = Plan([Fault("replace", HINT, 1, Fail(AnswerLostError("?"), When.BEFORE))])
    drive(write_snapshot(state, write_id="s"), FaultyStorage(storage, plan))


# -- races --------------------------------------------------------------------------------------

THREADS = 8


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(100, id="eight hundred"),
        pytest.param(500, id="four thousand", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("place", ["memory", "memory-object", "local"])
def test_racing_appends_lose_and_double_none(place: str, each: int, tmp_path: Path) -> None:
    """Eight threads append a hundred (or five hundred) entries each: all are there, once, whole, in
    order.
    """
    stores = MemoryStoreRegistry()

    def opened() -> Storage:
        if place == "local":
            return LocalStorage(Uri.parse(str(tmp_path)))
        shape = Shape.OBJECT if place == "memory-object" else Shape.FILESYSTEM
        return MemoryStorage(Uri.parse("memory://t/run"), shape=shape, stores=stores)

    drive(make_log(), opened())
    numbers: dict[str, int] = {}
    failures: list[BaseException] = []

    def work(who: int) -> None:
        storage, state = opened(), None
        try:
            for turn in range(each):
                name = f"{who}-{turn}"
                done = pin(name, storage, state)
                numbers[name], state = done.number, done.state
        except BaseException as error:  # noqa: BLE001 - passed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = [e.write_id for e in entries(opened())]
    assert len(found) == THREADS * each
    assert {name: n for n, name in enumerate(found)} == numbers


def test_two_hundred_processes_race_for_one_log(tmp_path: Path) -> None:
    """Real processes at one directory: every append is there once and nothing is left in tmp."""
    processes, appends = 200, 2
    subprocess.run(
        [sys.executable, "-m", "tests.commit.racers", str(tmp_path), str(processes), str(appends)],
        check=True,
        timeout=240,
    )
    storage = LocalStorage(Uri.parse(str(tmp_path)))
    counted = Counter(e.write_id for e in entries(storage))
    assert set(counted.values()) == {1}
    assert len(counted) == processes * appends
    assert storage.list(".ckptfs/tmp") == []


# -- gaps -------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.sets(st.integers(0, 11)), st.booleans())
def test_a_gap_is_found_wherever_it_is(length: int, lost: set[int], advisory: bool) -> None:
    """Whatever entries of a log are lost: a gap is found, with the first of them, exactly if a later
    entry is there, whether entries are named by their number or by number and write id.
    """
    there = [n for n in range(length) if n not in lost]
    end = next(n for n in range(length + 1) if n not in there)
    names = [f"{n:08d}.w" if advisory else f"{n:08d}" for n in there]
    # An advisory log is counted through: its fold ends after as many entries as there are.
    found = gap_in([*names, ".partial-x"], len(there) if advisory else end)
    if there and there[-1] > end:
        assert found is not None
        assert found.missing == end
        assert found.there in there
        assert found.there > end
    else:
        assert found is None


def test_entries_that_come_between_two_looks_are_no_gap() -> None:
    """A log that grew after it was folded is whole, and is folded to its end."""
    storage = memory()
    write(storage, [fence(G1)])
    old = drive(catch_up(), storage)
    write(storage, [Pin(str(number)) for number in range(5)])
    checked = drive(check_complete(old), storage)
    assert (checked.gap, checked.state.next) == (None, 6)
    storage.remove(log_key(4))
    found = drive(check_complete(old), storage)
    assert (found.gap, found.state.next) == (Gap(4, 5), 4)


def test_a_file_whose_name_no_entry_can_have_is_no_gap() -> None:
    """A stray file in the log, of 200 digits too, keeps no owner from the run; one of 8 is a missing entry."""
    stray = ["notes.txt", "9" * 200, "9" * 200 + ".w", "\u0663\u0663"]
    assert gap_in(["00000000", *stray], 1) is None
    assert gap_in(["00000000", "00000003", *stray], 1) == Gap(1, 3)
