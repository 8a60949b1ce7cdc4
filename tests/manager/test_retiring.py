"""Retention carried out on real disks: what goes and when, what stays, and that nothing dies of it."""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.paths import LOG
from ckptfs.commit.session import RunSession
from ckptfs.errors import NoSpaceError, NotFoundError
from ckptfs.events import Counters, Deleted, DeleteFailed, Event, Retained
from ckptfs.manager.run_setup import Template
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.testing.faults import Fail, Fault, Lose, Plan, When
from ckptfs.uri import Uri
from tests.crash import rig
from tests.crash.rig import ONE_DOMAIN, SOLO, TWO_DOMAINS, Layout

STEPS = Template("step_{N}")


def mine(seal: Seal) -> bool:
    """Whether the manager of these tests made it."""
    return seal.artifact is Kind.CHECKPOINT and STEPS.step_of(seal.name) is not None


@contextmanager
def holding(
    session: RunSession,
    keep: int | None = 1,
    *,
    grace_s: float = 0.0,
    tell: Callable[[Event], None] = lambda _: None,
    clock: Callable[[], float] | None = None,
) -> Iterator[tuple[Run, Retirer]]:
    """A held run with its retention, as a manager holds it."""
    with claim(session, defer_deletes=grace_s > 0) as run:
        more: dict[str, Any] = {} if clock is None else {"clock": clock}
        retirer = Retirer(run, Keep(keep), mine, grace_s=grace_s, tell=tell, **more)
        try:
            yield run, retirer
        finally:
            retirer.close(30.0)


def step(run: Run, retirer: Retirer, number: int) -> Retained | None:
    """One save, what retention makes of it, and the bytes gone."""
    rig.save(run.session, f"step_{number}", str(number), run)
    retained = retirer.after_commit(run.session)
    retirer.make_room()
    run.session.control.step("rest", lambda: None)
    return retained


def world(
    base: Path,
    body: Callable[[RunSession], Any],
    layout: Layout = SOLO,
    *,
    plans: Mapping[int, Plan] | None = None,
    posix: Posix | None = None,
) -> list[Any]:
    """The values of ``body`` on all ranks of one job."""
    ends = rig.sessions(layout, str(base), body, job="job", plans=plans, posix=posix)
    return rig.values(ends)


def steps_in(directory: str) -> list[str]:
    """What a person lists there."""
    return sorted(name for name in os.listdir(directory) if name != ".ckptfs")


def disks(base: Path, layout: Layout) -> dict[str, list[str]]:
    """What is on each disk."""
    return {node: steps_in(path) for node, path in layout.directories(str(base)).items()}


def entries(base: Path, layout: Layout = SOLO) -> dict[str, list[dict[str, Any]]]:
    """The log of each disk."""
    found = {}
    for node, path in layout.directories(str(base)).items():
        names = sorted(os.listdir(f"{path}/.ckptfs/log"))
        found[node] = [json.loads(Path(path, ".ckptfs/log", name).read_text()) for name in names]
    return found


def debris(base: Path, layout: Layout = SOLO) -> list[str]:
    """Everything in attempts/ and below trash/."""
    found = []
    for path in layout.directories(str(base)).values():
        found += [f"attempts/{name}" for name in os.listdir(f"{path}/.ckptfs/attempts")]
        for generation in os.listdir(f"{path}/.ckptfs/trash"):
            found += [f"trash/{n}" for n in os.listdir(f"{path}/.ckptfs/trash/{generation}")]
    return found


@pytest.mark.parametrize("layout", [SOLO, ONE_DOMAIN, TWO_DOMAINS])
def test_every_disk_keeps_the_last_and_nothing_of_the_others(
    tmp_path: Path, layout: Layout
) -> None:
    """After each save every domain holds the last two and no byte of older ones, in two generations,
    and every rank hears the same of it.
    """

    def body(session: RunSession) -> list[Retained | None]:
        told = []
        with holding(session, 2) as (run, retirer):
            for number in range(3 * run.generation.number, 3 * run.generation.number + 3):
                told.append(step(run, retirer, number))
                for names in disks(tmp_path, layout).values():
                    assert f"step_{number}" in names
                    assert len(names) <= 2
                session.control.step("looked", lambda: None)
            assert retirer.debris() == 0
        return told

    first, second = world(tmp_path, body, layout), world(tmp_path, body, layout)
    assert all(told == first[0] for told in first)
    assert [None if t is None else t.kept for t in first[0]] == [1, 2, 2]
    assert [t.going for t in second[0]] == [(f"file:///simulated/run/step_{n}",) for n in (4, 5, 6)]
    assert set(map(tuple, disks(tmp_path, layout).values())) == {("step_7", "step_8")}
    assert debris(tmp_path, layout) == []


class Counting(LocalStorage):
    """Counts the entries that are read, snapshots apart."""

    entries = snapshots = 0

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        data = super().read_small(key, limit_bytes)
        if key.startswith(f"{LOG}/"):
            is_snapshot = b'"kind":"snapshot"' in data
            self.snapshots += is_snapshot
            self.entries += not is_snapshot
        return data


def cold_reads(base: Path) -> tuple[int, int]:
    """How many snapshots and entries a new process reads of the run's log."""
    (path,) = SOLO.directories(str(base)).values()
    storage = Counting(Uri.parse(path))
    drive(catch_up(), storage)
    return storage.snapshots, storage.entries


def test_a_new_process_reads_one_snapshot_and_at_most_a_hundred_entries(tmp_path: Path) -> None:
    """After each of many saves, and while a policy lets all of them go at once."""
    found = []

    def keep_all(session: RunSession) -> None:
        with holding(session, None) as (run, retirer):
            for number in range(95):
                step(run, retirer, number)
                found.append(cold_reads(tmp_path))

    def keep_one(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            for number in range(95, 100):
                step(run, retirer, number)
                found.append(cold_reads(tmp_path))

    world(tmp_path, keep_all)
    world(tmp_path, keep_one)
    assert max(found) <= (1, 100)
    assert found[-1][0] == 1
    # A reader in the middle of it reads as many as are behind the snapshot.
    (log_,) = entries(tmp_path).values()
    kinds = "".join("S" if one["kind"] == "snapshot" else "." for one in log_)
    assert len(kinds) > 280
    assert max(map(len, kinds.split("S"))) <= 100


@pytest.mark.parametrize("layout", [ONE_DOMAIN, TWO_DOMAINS])
def test_what_is_long_gone_is_not_believed_wherever_it_is_put_back(
    tmp_path: Path, layout: Layout
) -> None:
    """Only what lives is sent between ranks; a name that nothing lives under is looked up in all that
    ever was.
    """

    def body(session: RunSession) -> None:
        with holding(session) as (run, retirer):
            for number in range(4):
                step(run, retirer, number)
        if session.placement.is_owner:
            session.storage.make_dir("step_1")
            session.storage.replace("step_1/.metadata", b"put back")
        session.control.step("put back", lambda: None)
        with pytest.raises(NotFoundError, match="was deleted, overwritten or aborted"):
            locate(session, "step_1")
        assert locate(session, "step_3").seal is not None

    world(tmp_path, body, layout)


def test_row13_the_old_goes_after_the_new_is_committed(tmp_path: Path) -> None:
    """With keep_latest=1 no delete is in a log before the seal of the successor in every log, and no
    byte is touched before the delete is.
    """
    plans = {rank: Plan() for rank in range(2)}

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            for number in range(4):
                step(run, retirer, number)

    world(tmp_path, body, TWO_DOMAINS, plans=plans)
    logs = entries(tmp_path, TWO_DOMAINS)
    for rank, log in enumerate(logs.values()):
        ids = [e["save_id"] for e in log if e["kind"] == "seal"]
        for at, entry in enumerate(log):
            if entry["kind"] == "delete":
                successor = ids[ids.index(entry["save_id"]) + 1]
                for other in logs.values():
                    assert successor in [e["save_id"] for e in other if e["kind"] == "seal"]
                before = log[:at]
                assert successor in [e["save_id"] for e in before if e["kind"] == "decided"]
        operations = [(o.op, o.key) for o in plans[rank].trace]
        for number, save_id in enumerate(ids[:-1]):
            deleted = next(
                at for at, e in enumerate(log) if e["kind"] == "delete" and e["save_id"] == save_id
            )
            entered = operations.index(("create", f".ckptfs/log/{deleted:08d}"))
            touched = operations.index(("rename", f"step_{number}/.metadata"))
            assert entered < touched


def test_row12_a_save_that_fails_costs_nothing(tmp_path: Path) -> None:
    """With keep_latest=1 the second save fails: the first stays, whole, until the third is there."""
    plan = Plan()

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 1)
            plan.add(Fault("write", "*.distcp", 1, Fail(OSError(errno.ENOSPC, "full"))))
            with pytest.raises(Exception, match="No space left"):
                step(run, retirer, 2)
            retirer.after_commit(run.session)
            assert rig.look(SOLO, str(tmp_path), ["step_1", "step_2"]).state == {"step_1": "1"}
            step(run, retirer, 3)

    world(tmp_path, body, plans={0: plan})
    assert disks(tmp_path, SOLO) == {"a": ["step_3"]}


def test_row14_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A user's backup of a step, notes in a step that goes, saves with other names: untouched."""
    run_dir = Path(SOLO.directory(str(tmp_path), "a"))

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 1)
            rig.save(run.session, "step_1_backup", "mine", run)
            rig.save(run.session, "my_step_1", "mine", run)
            (run_dir / "step_1" / "notes.txt").write_text("notes")
            (run_dir / "step_1.old").mkdir()
            (run_dir / "step_1.old" / "model.pt").write_text("theirs")
            for number in (2, 3):
                step(run, retirer, number)

    world(tmp_path, body)
    assert steps_in(str(run_dir)) == [
        "my_step_1",
        "step_1",
        "step_1.old",
        "step_1_backup",
        "step_3",
    ]
    assert os.listdir(run_dir / "step_1") == ["notes.txt"]
    assert (run_dir / "step_1.old" / "model.pt").read_text() == "theirs"
    sight = rig.look(SOLO, str(tmp_path), ["step_1", "step_1_backup", "my_step_1", "step_3"])
    assert set(sight.state) == {"step_1_backup", "my_step_1", "step_3"}


class _HeldOpen(Posix):
    """NFS: a file that is open on this node cannot be unlinked for good while ``held``."""

    def __init__(self) -> None:
        self.held = True

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        name = os.path.basename(path)
        if self.held and name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        if self.held and name.startswith("__0_0") and dir_fd is not None:
            os.rename(path, f".nfs{name}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            return
        super().unlink(path, dir_fd=dir_fd)


class _Appears(Posix):
    """A file appears in every directory that is removed below trash, ``times`` times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        if self.times and dir_fd is None and ".ckptfs/trash/" in path and path.endswith(".data"):
            self.times -= 1
            Path(path, f"late-{self.times}").write_text("late")
        super().rmdir(path, dir_fd=dir_fd)


@pytest.mark.parametrize("posix", [_HeldOpen(), _Appears(1), _Appears(20)], ids=["held", "1", "20"])
def test_row29_a_directory_that_will_not_be_empty_kills_nobody(
    tmp_path: Path, posix: Posix
) -> None:
    """A file held open, or one that appears, in a directory that is being removed: training
    continues, so do its saves, and when it is over nothing is left.
    """

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            for number in range(4):
                step(run, retirer, number)
        if isinstance(posix, _HeldOpen):
            posix.held = False
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 4)

    world(tmp_path, body, posix=posix)
    assert disks(tmp_path, SOLO) == {"a": ["step_4"]}
    assert debris(tmp_path) == []


@pytest.mark.parametrize(
    ("op", "key", "error"),
    [
        ("rename", "step_1/*", errno.EIO),
        ("remove_tree", ".ckptfs/trash/*", errno.ENOTEMPTY),
        ("rename", "step_1/*", errno.EACCES),
        ("sync", "step_1", errno.ENOSPC),
    ],
)
def test_a_delete_that_fails_is_told_once_and_tried_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, op: str, key: str, error: int
) -> None:
    """Training continues, one warning, an event for each try, and the tries get rarer; when the disk
    permits it, it goes, and no debris is left.
    """
    plan = Plan()
    now, told = [0.0], list[Event]()

    def body(session: RunSession) -> list[int]:
        tried = []
        with holding(session, 1, tell=told.append, clock=lambda: now[0]) as (run, retirer):
            step(run, retirer, 1)
            plan.add(Fault(op, key, None, Fail(OSError(error, os.strerror(error)))))
            for number in range(2, 12):
                step(run, retirer, number)
                tried.append(sum(isinstance(e, DeleteFailed) for e in told))
                assert retirer.debris() >= 1
                now[0] += 10.0
            plan.faults.clear()
            now[0] += 3600.0
            step(run, retirer, 12)
            assert retirer.debris() == 0
        return tried

    with caplog.at_level(logging.INFO):
        (tried,) = world(tmp_path, body, plans={0: plan})
    if op != "remove_tree":  # its pattern is that of all saves
        assert tried == [1, 2, 2, 2, 3, 3, 3, 3, 3, 3]
        # Of this run: a lease of another test, with a run that is not released yet, may warn at this moment, too.
        warnings = [
            record
            for record in caplog.records
            if record.levelno >= logging.WARNING and "/simulated/run" in record.getMessage()
        ]
        assert len(warnings) == 1
        assert "step_1 could not be deleted" in warnings[0].message
    assert disks(tmp_path, SOLO) == {"a": ["step_12"]}
    assert debris(tmp_path) == []
    gone = [e.uri.rpartition("/")[2] for e in told if isinstance(e, Deleted)]
    assert sorted(gone) == sorted(f"step_{n}" for n in range(1, 12))


@pytest.mark.parametrize("action", [Fail(OSError(errno.EIO, "no")), Lose()])
def test_an_entry_that_fails_in_one_domain_is_entered_later(
    tmp_path: Path, action: Fail | Lose
) -> None:
    """Deleted in one log and not in the other: it is deleted for everybody, and the next commit, or
    the same append where only the answer was lost, completes it in the other.
    """
    plan = Plan()
    told: list[Event] = []

    def body(session: RunSession) -> None:
        tell = told.append if session.control.rank == 1 else lambda _: None
        with holding(session, 1, tell=tell) as (run, retirer):
            step(run, retirer, 1)
            rig.save(run.session, "step_2", "2", run)
            if session.control.rank == 1:
                plan.add(Fault("create", "*/log/*", 1, action))
            retirer.after_commit(run.session)
            sight = rig.look(TWO_DOMAINS, str(tmp_path), ["step_1", "step_2"])
            assert sight.state == {"step_2": "2"}
            session.control.step("seen", lambda: None)
            step(run, retirer, 3)

    world(tmp_path, body, TWO_DOMAINS, plans={1: plan})
    assert disks(tmp_path, TWO_DOMAINS) == {"a": ["step_3"], "b": ["step_3"]}
    failed = [e for e in told if isinstance(e, DeleteFailed)]
    assert len(failed) == (1 if isinstance(action, Fail) else 0)


def test_an_entry_whose_answer_was_lost_for_good_is_found_again(tmp_path: Path) -> None:
    """It seemed to fail and is in the log: the bytes go after the next commit."""
    plan = Plan()

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 1)
            rig.save(run.session, "step_2", "2", run)
            plan.add(Fault("create", "*/log/*", 1, Lose()))
            plan.add(Fault("create", "*/log/*", 2, Fail(OSError(errno.EIO, "no"))))
            retirer.after_commit(run.session)
            plan.faults.clear()
            assert [e["kind"] for e in entries(tmp_path)["a"]][-1] == "delete"
            assert "step_1" in disks(tmp_path, SOLO)["a"]
            step(run, retirer, 3)

    world(tmp_path, body, plans={0: plan})
    assert disks(tmp_path, SOLO) == {"a": ["step_3"]}


def test_a_deleted_save_stays_whole_for_its_grace(tmp_path: Path) -> None:
    """Out of the catalog at once, on the disk for delete_grace_s: neither the next saves nor what they
    replace take its bytes before, and the first commit after it does.
    """
    now = [0.0]
    run_dir = SOLO.directory(str(tmp_path), "a")

    def body(session: RunSession) -> None:
        with holding(session, 1, grace_s=100.0, clock=lambda: now[0]) as (run, retirer):
            step(run, retirer, 1)
            for number in range(2, 6):
                step(run, retirer, number)
                rig.save(run.session, "other", str(number), run, replace=True)
                now[0] += 10.0
            assert retirer.debris() == 0
            assert steps_in(run_dir) == ["other", *(f"step_{n}" for n in range(1, 6))]
            sight = rig.look(SOLO, str(tmp_path), [f"step_{n}" for n in range(1, 6)])
            assert sight.state == {"step_5": "5"}
            data = Path(run_dir, "step_1", _only_id(run_dir, 1), "__0_0.distcp").read_bytes()
            assert data == rig.contents("1", 0)
            now[0] = 111.0  # of step_1 and step_2 it is over
            step(run, retirer, 6)
            assert steps_in(run_dir) == ["other", "step_3", "step_4", "step_5", "step_6"]

    world(tmp_path, body)


def _only_id(run_dir: str, number: int) -> str:
    (found,) = (p.name for p in Path(run_dir, f"step_{number}").iterdir() if p.is_dir())
    return found


class CallsAfter(Posix):
    """The system calls of a process in which something happens right after a delete is in the log."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def link(self, source: str, target: str) -> None:
        """link(2) of an entry, and what else happens at that moment."""
        super().link(source, target)
        if b'"kind":"delete"' in Path(target).read_bytes():
            self._call()


def test_a_save_that_commits_while_a_delete_is_entered_leaves_its_bytes_for_the_grace(
    tmp_path: Path,
) -> None:
    """Saves clear what the log says is deleted, on other threads too: one that comes between the entry
    of a delete with a grace and whatever follows it finds that these bytes are not its business.
    """
    run_dir = SOLO.directory(str(tmp_path), "a")
    beside: list[Callable[[], object]] = []
    meanwhile: list[list[str]] = []

    def call() -> None:
        if beside:
            beside.pop()()
            meanwhile.append(steps_in(run_dir))

    def body(session: RunSession) -> None:
        with holding(session, 1, grace_s=100.0) as (run, retirer):
            step(run, retirer, 1)
            other = replace(run.session, control=session.control.clone(), background=None)

            def save() -> None:
                rig.save(other, "other", "x", run)

            def aside() -> None:
                thread = threading.Thread(target=save)
                thread.start()
                thread.join()

            beside.append(aside)
            step(run, retirer, 2)
            assert meanwhile == [["other", "step_1", "step_2"]]
            data = Path(run_dir, "step_1", _only_id(run_dir, 1), "__0_0.distcp").read_bytes()
            assert data == rig.contents("1", 0)
            assert rig.look(SOLO, str(tmp_path), ["step_1", "step_2"]).state == {"step_2": "2"}

    world(tmp_path, body, posix=CallsAfter(call))


def test_a_grace_ends_without_another_save(tmp_path: Path) -> None:
    """The last save of a job too: a timer, not the next commit, removes the bytes; again each time."""
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()

    def tell(event: Event) -> None:
        if isinstance(event, Deleted):
            gone.put(event.uri[-1])

    def body(session: RunSession) -> None:
        with holding(session, 1, grace_s=0.05, tell=tell) as (run, retirer):
            rig.save(run.session, "step_1", "x", run)
            for number in (2, 3):
                rig.save(run.session, f"step_{number}", "x", run)
                retirer.after_commit(run.session)
                assert gone.get(timeout=60) == str(number - 1)

    world(tmp_path, body)
    assert disks(tmp_path, SOLO) == {"a": ["step_3"]}


@pytest.mark.parametrize("grace_s", [0.0, 100.0])
def test_a_new_owner_gives_readers_the_grace_anew(tmp_path: Path, grace_s: float) -> None:
    """Deleted and whole when the process died: with a grace it stays that long again, without one it
    is gone before the claim returns.
    """
    now = [0.0]
    run_dir = SOLO.directory(str(tmp_path), "a")

    def body(session: RunSession) -> None:
        with holding(session, 1, grace_s=100.0, clock=lambda: now[0]) as (run, retirer):
            step(run, retirer, 1)
            step(run, retirer, 2)
        assert steps_in(run_dir) == ["step_1", "step_2"]
        with holding(session, 1, grace_s=grace_s, clock=lambda: now[0]) as (run, retirer):
            assert steps_in(run_dir) == (["step_1", "step_2"] if grace_s else ["step_2"])
            now[0] += 99.0
            step(run, retirer, 3)
            assert ("step_1" in steps_in(run_dir)) is (grace_s > 0)
            now[0] += 2.0
            step(run, retirer, 4)
            assert "step_1" not in steps_in(run_dir)

    world(tmp_path, body)


def test_pins_outlive_the_process_and_end(tmp_path: Path) -> None:
    """Pinned in every domain by one generation, respected by the next, gone once it is unpinned."""
    ids: list[str] = []

    def first(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            ids.append(rig.save(run.session, "step_1", "1", run))
            retirer.after_commit(run.session)
            retirer.pin(run.session, ids[0])
            retirer.pin(run.session, ids[0])  # saying it again is no error
            step(run, retirer, 2)

    def second(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 3)
            assert set(map(tuple, disks(tmp_path, TWO_DOMAINS).values())) == {("step_1", "step_3")}
            session.control.step("seen", lambda: None)
            retirer.pin(run.session, ids[0], pinned=False)
            step(run, retirer, 4)

    world(tmp_path, first, TWO_DOMAINS)
    for log in entries(tmp_path, TWO_DOMAINS).values():
        assert [e["kind"] for e in log].count("pin") == 1
    world(tmp_path, second, TWO_DOMAINS)
    assert disks(tmp_path, TWO_DOMAINS) == {"a": ["step_4"], "b": ["step_4"]}


@pytest.mark.parametrize("keep", [None, 1])
def test_a_pinned_step_that_is_saved_again_stays_pinned(tmp_path: Path, keep: int | None) -> None:
    """The new one is kept by the pin, the replaced bytes go as they would without it, and unpinning
    the step ends it.
    """

    def body(session: RunSession) -> None:
        with holding(session, keep) as (run, retirer):
            old = rig.save(run.session, "step_1", "old", run)
            retirer.pin(run.session, old)
            new = rig.save(run.session, "step_1", "new", run, replace=True)
            retirer.after_commit(run.session)
            for number in (2, 3):
                step(run, retirer, number)
            for path in TWO_DOMAINS.directories(str(tmp_path)).values():
                assert _only_id(path, 1) == new
            session.control.step("seen", lambda: None)
            retirer.pin(run.session, new, pinned=False)
            step(run, retirer, 4)

    world(tmp_path, body, TWO_DOMAINS)
    left = ["step_4"] if keep else ["step_1", "step_2", "step_3", "step_4"]
    assert disks(tmp_path, TWO_DOMAINS) == {"a": left, "b": left}


def test_only_live_saves_are_pinned(tmp_path: Path) -> None:
    """NotFoundError on every rank for a deleted save and for one that never was."""

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            old = rig.save(run.session, "step_1", "1", run)
            step(run, retirer, 2)
            for wrong in (old, "never"):
                with pytest.raises(NotFoundError, match="not a live checkpoint"):
                    retirer.pin(run.session, wrong)

    world(tmp_path, body, TWO_DOMAINS)


def test_a_pin_that_comes_while_it_is_decided_is_respected(tmp_path: Path) -> None:
    """The append looks at the log again: what was pinned after the decision stays."""
    plan = Plan()

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            old = rig.save(run.session, "step_1", "1", run)
            rig.save(run.session, "step_2", "2", run)
            decide = retirer._decide

            def pinned_meanwhile(reports: Sequence[Any]) -> Any:
                verdict = decide(reports)
                retirer.pin(run.session, old)
                return verdict

            retirer._decide = pinned_meanwhile  # type: ignore[method-assign]
            retirer.after_commit(run.session)
            retirer.make_room()

    world(tmp_path, body, plans={0: plan})
    assert disks(tmp_path, SOLO) == {"a": ["step_1", "step_2"]}


def test_what_a_rank_still_needs_stays(tmp_path: Path) -> None:
    """Roots of any rank count: the restored save goes with the first commit that does not name it."""

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            old = rig.save(run.session, "step_1", "1", run)
            roots = [old] if session.control.rank == 1 else []
            rig.save(run.session, "step_2", "2", run)
            retained = retirer.after_commit(run.session, roots)
            assert retained == Retained(2, ())
            step(run, retirer, 3)

    world(tmp_path, body, TWO_DOMAINS)
    assert disks(tmp_path, TWO_DOMAINS) == {"a": ["step_3"], "b": ["step_3"]}


def test_a_step_that_is_saved_again_outlives_its_deleted_self(tmp_path: Path) -> None:
    """A rewound run saves step_1 again while the deleted one waits for its grace: only the old goes."""
    now = [0.0]

    def body(session: RunSession) -> None:
        with holding(session, 2, grace_s=100.0, clock=lambda: now[0]) as (run, retirer):
            for number in (1, 2, 3):
                step(run, retirer, number)
            rig.save(run.session, "step_1", "again", run, replace=True)
            retirer.after_commit(run.session)
            now[0] += 101.0
            rig.save(run.session, "step_4", "4", run)
            retirer.after_commit(run.session)
            retirer.make_room()

    world(tmp_path, body)
    sight = rig.look(SOLO, str(tmp_path), ["step_1", "step_2", "step_3", "step_4"])
    assert sight.state == {"step_1": "again", "step_4": "4"}
    run_dir = SOLO.directory(str(tmp_path), "a")
    assert len([p for p in Path(run_dir, "step_1").iterdir() if p.is_dir()]) == 1


def test_a_fenced_owner_deletes_nothing(tmp_path: Path) -> None:
    """A process that slept through a takeover may decide what it likes: no entry, no byte."""

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 1)
            rig.save(run.session, "step_2", "2", run)
            with claim(session):
                before = entries(tmp_path)
                assert retirer.after_commit(run.session) is not None
                retirer.make_room()
                assert entries(tmp_path) == before

    world(tmp_path, body)
    assert disks(tmp_path, SOLO) == {"a": ["step_1", "step_2"]}


def test_a_rank_that_cannot_read_its_log_only_delays_retention(tmp_path: Path) -> None:
    """No error reaches the caller on any rank; the next commit deletes what this one could not."""
    plan = Plan()

    def body(session: RunSession) -> None:
        with holding(session, 1) as (run, retirer):
            step(run, retirer, 1)
            rig.save(run.session, "step_2", "2", run)
            if session.control.rank == 1:
                plan.add(Fault("read", "*/log/*", 1, Fail(NoSpaceError("no"), When.BEFORE)))
            assert retirer.after_commit(run.session) is None
            step(run, retirer, 3)

    world(tmp_path, body, TWO_DOMAINS, plans={1: plan})
    assert disks(tmp_path, TWO_DOMAINS) == {"a": ["step_3"], "b": ["step_3"]}


def test_the_first_save_says_what_the_run_will_need(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each disk's owner logs its own share and what keep_latest will take there, and warns where that
    is more than is free.
    """
    size = 1 << 50

    def body(session: RunSession) -> list[str | None]:
        with holding(session, 3) as (run, retirer):
            step(run, retirer, 1)
            small = [Counters(size_bytes=1 << 20)] * session.control.size
            large = [Counters(size_bytes=size)] * session.control.size
            return [retirer.log_needs(small), retirer.log_needs(large)]

    with caplog.at_level(logging.INFO):
        told = world(tmp_path, body, rig.TWO_FULL_DOMAINS)
    assert told[1] == [None, None], "rank 1 owns nothing"
    assert "takes 2.10 MB" in told[0][0]
    assert "needs 8.39 MB" in told[0][0]
    assert "takes 1.05 MB" in told[2][0]
    assert "more than are free" in told[2][1]
    levels = {r.levelno for r in caplog.records if "more than are free" in r.message}
    assert levels == {logging.WARNING}
