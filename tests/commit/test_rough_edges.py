"""What a storage does now and then, met where it was not expected."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptfs
from ckptfs.commit import session
from ckptfs.commit.log.append import append, catch_up, make_log
from ckptfs.commit.log.entries import Pin
from ckptfs.commit.operations import Program, Read, ReadAhead, Refresh, Sync, drive, perform
from ckptfs.commit.ownership.lease import LeaseTimes, moves
from ckptfs.commit.ownership.recovery import report
from ckptfs.commit.paths import LEASE, LOG, log_key
from ckptfs.commit.save.shared_attempt import _once
from ckptfs.commit.session import Place, open_session
from ckptfs.control.control import Control
from ckptfs.errors import (
    AccessError,
    CollectiveError,
    CommitInDoubtError,
    ManifestError,
    StorageError,
    TransientError,
)
from ckptfs.storage.base import Storage
from ckptfs.storage.memory import MemoryStorage
from ckptfs.testing.faults import Fault, FaultyStorage, Lose, Plan
from ckptfs.testing.world import simulate
from ckptfs.uri import Uri
from tests.commit.logs import G0, memory
from tests.crash import rig


def traced(program: Program[Any], storage: Storage) -> list[Any]:
    """The operations of a program, as they came."""
    ops: list[Any] = []
    reply: Any = None
    failure: Exception | None = None
    while True:
        try:
            op = program.send(reply) if failure is None else program.throw(failure)
        except StopIteration:
            return ops
        ops.append(op)
        reply = failure = None
        try:
            reply = perform(op, storage)
        except StorageError as error:
            failure = error


def long_log(entries: int) -> MemoryStorage:
    """A run with so many entries."""
    storage = memory()
    drive(make_log(), storage)
    for number in range(entries):
        drive(append(lambda _, n=number: Pin(f"p{n}"), write_id=f"w{number}"), storage)  # type: ignore[misc]
    return storage


def is_probe(op: Any) -> bool:
    """Whether it may find the end of the log."""
    keys = op.keys if isinstance(op, ReadAhead) else (op.key,) if isinstance(op, Read) else ()
    return any(key.startswith(f"{LOG}/") for key in keys)


@pytest.mark.parametrize("entries", [0, 1, 2, 7, 40])
def test_the_log_is_opened_anew_before_each_look_for_its_end(entries: int) -> None:
    """Whatever was read before: what a client cached as absent a moment ago may be there by now."""
    ops = traced(catch_up(), long_log(entries))
    probes = [n for n, op in enumerate(ops) if isinstance(op, ReadAhead) and is_probe(op)]
    assert probes
    assert all(ops[n - 1] == Refresh(LOG) for n in probes)


def test_what_was_folded_is_durable_before_it_is_acted_on() -> None:
    """An entry that was read must not vanish by a power cut after a recovery went by it."""
    storage = long_log(3)
    ops = traced(report("A", G0, storage.capabilities), storage)
    last = max(n for n, op in enumerate(ops) if is_probe(op))
    assert ops[last + 1] == Sync(LOG)


def test_a_damaged_entry_in_our_place_leaves_the_append_in_doubt() -> None:
    """It exists, and its owner is unknown: a server that restarted may have made it ours."""
    storage = long_log(1)

    class Damaging(Plan):
        def begin(self, op: str, key: str) -> Any:
            if op == "create":
                storage.create(key, b"torn", staging=".ckptfs/tmp/x")
            return super().begin(op, key)

    program: Program[Any] = append(lambda _: Pin("mine"), write_id="mine")
    with pytest.raises(CommitInDoubtError, match="cannot be read"):
        drive(program, FaultyStorage(storage, Damaging()))
    assert storage.read(log_key(1)) == b"torn"


def test_a_damaged_entry_that_a_seal_meets_is_told_as_that(tmp_path: Path) -> None:
    """It fails the save for certain, and names the entry: no rank lost another."""
    base = str(tmp_path)
    home = rig.SOLO.directories(base)["a"]

    def body(session: Any) -> None:
        class Late(Plan):
            def begin(self, op: str, key: str) -> Any:
                # Behind the survey, before the seal: between them somebody damages the next entry.
                if op == "write" and key.endswith(".distcp"):
                    (Path(home) / log_key(1)).write_bytes(b"torn")
                return super().begin(op, key)

        session.storage.plan = Late()
        rig.save(session, "step_2", "two")

    rig.values(
        rig.sessions(rig.SOLO, base, lambda session: rig.save(session, "step_1", "one"), job="j")
    )
    (end,) = rig.sessions(rig.SOLO, base, body, job="j", plans={0: Plan()})
    with pytest.raises(
        CollectiveError, match="could not seal step_2: not a run log entry"
    ) as failed:
        end.get()
    assert failed.value.all_are(ManifestError)


def test_a_lease_that_cannot_be_read_for_a_moment_says_nothing() -> None:
    """Neither that its owner lives, nor that it is gone; where it cannot be read to the end, the error says so."""
    times = LeaseTimes(rewrite_s=1.0, still_s=5.0)

    def watch(answers: list[bytes | Exception]) -> bool:
        clock = itertools.count()
        storage = memory()
        left = iter(answers)

        class Flaky(type(storage)):  # type: ignore[misc]
            def read(self, key: str) -> bytes:
                assert key == LEASE
                answer = next(left)
                if isinstance(answer, Exception):
                    raise answer
                return answer

        storage.__class__ = Flaky
        return moves(storage, times, clock=lambda: float(next(clock)), wait=lambda _: None)

    busy = TransientError("slow down")
    assert watch([b"1", busy, busy, b"1", b"2"])
    assert not watch([b"1", busy, b"1", busy, b"1", b"1", b"1", b"1"])
    assert not watch([busy, busy, b"1", b"1", b"1", b"1", b"1", b"1", b"1", b"1"])
    with pytest.raises(TransientError):
        watch([b"1", b"1", busy, busy, busy, busy, busy, busy])


@pytest.mark.parametrize("done", [True, False])
def test_a_file_that_one_of_many_makes_after_a_lost_answer(done: bool) -> None:
    """It is made, whether the lost answer's was done or not, and read only once it is there."""
    storage = memory()
    storage.make_dir(".ckptfs/tmp")
    faulty = FaultyStorage(storage, Plan([Fault("create", "manifest", 1, Lose(done=done))]))
    assert drive(_once("manifest", b"ours", exclusive=True), faulty) == b"ours"
    assert storage.read("manifest") == b"ours"


def test_a_rank_that_could_open_its_storage_closes_it_where_another_could_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is everybody's; what this rank had opened by then is not left open."""
    closed: list[int] = []
    here = threading.local()  # each rank is a thread

    def open_storage(uri: Uri, options: Any) -> Storage:
        if here.rank == 1:
            raise AccessError("not here")
        storage, rank = memory(), here.rank
        monkeypatch.setattr(storage, "close", lambda: closed.append(rank))
        return storage

    def body(control: Control) -> None:
        here.rank = control.rank
        with open_session(Uri.parse("file:///simulated/run"), control, Place(), write=True):
            pass

    monkeypatch.setattr(session, "open_storage", open_storage)
    for end in simulate(2, body, nodes=["a", "b"]):
        with pytest.raises(CollectiveError, match="not here"):
            end.get()
    assert closed == [0]


@pytest.mark.parametrize("files", ["are still there", "are gone"])
def test_a_writer_that_is_given_up_while_it_writes_says_why(tmp_path: Path, files: str) -> None:
    """A save that was given up ends with that reason, not with the state of a future, nor with the file
    that its agent removed in the meantime.
    """
    writer = ckptfs.StorageWriter(tmp_path / "run/step_1", timeout_s=30)

    class Resets(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            desk = writer._handover
            assert desk is not None
            desk.cancel("a test")
            assert files == "are still there" or desk.ended.wait(60)
            return super().resolve_data(write_item)

    with pytest.raises(dcp.api.CheckpointException, match="the save was abandoned: a test"):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=Resets(), no_dist=True)
