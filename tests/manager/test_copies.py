"""Copies: what is drained, in which order, what the primary waits for, and what a failure costs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import ckptfs
from ckptfs.bench.messages import TargetAsked
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place, open_session
from ckptfs.control.control import SoloControl
from ckptfs.dcp.saving import save_at
from ckptfs.errors import AccessError, NoSpaceError, StateError
from ckptfs.events import CopyCommitted, CopyFailed, Event, SaveResult
from ckptfs.replication.backlog import origin_of
from ckptfs.replication.copier import gather
from ckptfs.replication.tiers import Copier, Copy, _Turn, copies_of, open_copies
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.testing.faults import Fail, Fault, Hold, Plan
from ckptfs.testing.memory_object_store import STORES, MemoryObjects
from ckptfs.uri import Uri


def mine(seal: Seal) -> bool:
    """Every save of these tests is the manager's."""
    return True


class Job:
    """One job of one rank: it holds the primary, and a copier drains it."""

    def __init__(self, primary: Path, *copies: object, **options: Any) -> None:
        self.events: list[Event] = []
        self.copied = threading.Event()
        self.now = 0.0
        self.stack = contextlib.ExitStack()
        self.uri = Uri.parse(primary)
        session = self.stack.enter_context(
            open_session(self.uri, SoloControl(), Place(), write=True)
        )
        self.run = self.stack.enter_context(claim(session))
        self.copier = Copier(
            self.run,
            copies_of(copies, primary),
            mine,
            tell=self._tell,
            clock=lambda: self.now,
            **options,
        )
        self.stack.callback(self.copier.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def save(self, step: int, *, tell: bool = True, kind: Kind = Kind.CHECKPOINT) -> SaveResult:
        """Commit a step; the copier hears of it."""
        result = commit(self.run, step, kind)
        if tell:
            self.copier.after_commit(result)
        return result

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, CopyCommitted):
            self.copied.set()

    def failures(self) -> list[CopyFailed]:
        """The events so far."""
        return [e for e in self.events if isinstance(e, CopyFailed)]


def commit(run: Run, step: int, kind: Kind = Kind.CHECKPOINT) -> SaveResult:
    """One save of the run; a step that is there is replaced."""
    spec = SaveSpec(
        f"{kind.value}_{step}", step, IfExists.REPLACE, run=run.generation, artifact=kind
    )
    return save_at(state_of(step), run.session, run.uri / spec.name, spec)


def state_of(step: int) -> dict[str, Any]:
    """More than one block, other values at each step."""
    return {"w": torch.arange(400_000.0) + step}


def before(primary: Path, *steps: int) -> None:
    """A job without copies committed these, and is gone."""
    uri = Uri.parse(primary)
    with open_session(uri, SoloControl(), Place(), write=True) as session, claim(session) as run:
        for step in steps:
            commit(run, step)


def steps(run: object) -> list[int | None]:
    """Committed steps in commit order."""
    return [c.step for c in ckptfs.list_checkpoints(run)]


def ids(run: object) -> list[str | None]:
    """Committed save_ids in commit order."""
    return [c.save_id for c in ckptfs.list_checkpoints(run)]


def check(run: object, step: int) -> None:
    """A copy is what was saved."""
    state = {"w": torch.zeros(400_000)}
    ckptfs.load(state, f"{Uri.parse(run)}/checkpoint_{step}")  # type: ignore[arg-type]
    assert torch.equal(state["w"], state_of(step)["w"])


@pytest.fixture
def bucket() -> Iterator[MemoryObjects]:
    """An object store with requests that fail as planned; at ``BUCKET``."""
    yield STORES.bucket("copies")
    STORES.drop("copies")


BUCKET = "objects+memory://copies/run"


def test_what_was_left_is_drained_first_and_every_commit_after_it(tmp_path: Path) -> None:
    """After a restart the catalogs are compared; the copy has the same saves in the same order."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    before(primary, 1, 2)
    with Job(primary, copy) as job:
        assert job.copied.wait(60)  # before anybody asked, and before the first save
        assert job.copier.wait() == ()
        assert steps(copy) == [1, 2]
        job.save(3)
        job.save(2)  # trained again from 1: replaced there too, and now the newest
        assert job.copier.wait() == ()
        assert job.copier.waiting() == frozenset()
    assert ids(copy) == ids(primary)
    assert steps(copy) == [1, 3, 2]
    assert (latest := ckptfs.latest(copy)) is not None
    assert latest.step == 2
    for step in (1, 2, 3):
        check(copy, step)
    told = [e for e in job.events if isinstance(e, CopyCommitted)]
    assert [Uri.parse(e.copy_uri).name for e in told[:3]] == [f"checkpoint_{n}" for n in (1, 2, 3)]
    with Job(primary, copy) as job:  # nothing is copied twice
        assert job.copier.wait() == ()
        assert job.events == []


def test_the_primary_waits_for_the_copy_and_for_nothing_else(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """All saves are roots before the first comparison and while the copy refuses; a save that no copy
    needs is none.
    """
    bucket.plan = Plan([Fault("*", "*", None, Fail(AccessError("expired")))])
    primary = tmp_path / "primary"
    before(primary, 1, 2)
    with Job(primary, Copy(BUCKET, keep=Keep(latest=2))) as job:
        three = job.save(3).save_id
        assert job.copier.wait() == ("checkpoint_1", "checkpoint_2", "checkpoint_3")
        assert job.copier.waiting() == set(ids(primary))
        assert len(job.failures()) == 1  # reported once, though it was tried at each turn
        bucket.plan = Plan([])
        assert job.copier.wait() == ()
        assert job.copier.waiting() == frozenset()
    assert steps(BUCKET) == [2, 3]  # of three that waited, what its retention would keep
    assert three in ids(BUCKET)


def test_retention_of_the_primary_waits_for_the_copy(tmp_path: Path, bucket: MemoryObjects) -> None:
    """keep_latest=1 keeps four while the copy is out of reach; once it has them they go."""
    bucket.plan = Plan([Fault("*", "*", None, Fail(AccessError("expired")))])
    primary = tmp_path / "primary"
    with Job(primary, BUCKET) as job:
        retirer = Retirer(job.run, Keep(latest=1), mine)
        for step in (1, 2, 3, 4):
            job.save(step)
            retirer.after_commit(job.run.session, job.copier.waiting())
        assert steps(primary) == [1, 2, 3, 4]
        bucket.plan = Plan([])
        assert job.copier.wait() == ()
        retirer.after_commit(job.run.session, job.copier.waiting())
        assert steps(primary) == [4]
        retirer.close()
    assert steps(BUCKET) == [1, 2, 3, 4]


def test_retention_of_the_primary_waits_for_every_copy(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """Of two copies one has all saves and one is out of reach: what only the first one has stays on
    the primary, round after round, until the second has it too.
    """
    bucket.plan = Plan([Fault("*", "*", None, Fail(AccessError("expired")))])
    primary, near = tmp_path / "primary", tmp_path / "near"
    with Job(primary, near, BUCKET) as job:
        retirer = Retirer(job.run, Keep(latest=1), mine)
        for step in (1, 2, 3):
            job.save(step)
            assert job.copier.wait() == tuple(f"checkpoint_{n}" for n in range(1, step + 1))
            assert job.copier.waiting() == set(ids(primary))
            retirer.after_commit(job.run.session, job.copier.waiting())
        assert steps(near) == steps(primary) == [1, 2, 3]
        bucket.plan = Plan([])
        assert job.copier.wait() == ()
        retirer.after_commit(job.run.session, job.copier.waiting())
        assert steps(primary) == [3]
        retirer.close()
    assert steps(BUCKET) == [1, 2, 3]


def test_a_copy_does_not_wait_for_the_primarys_retention(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """A save is copied from its commit on, while the run is still busy letting an older one go: that
    may take long, and the machine with the only copy may not live so long.
    """
    hold, copy = Hold(), tmp_path / "copy"
    with ckptfs.CheckpointManager(BUCKET, keep_latest=1, copies=[copy]) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        # The next entries are the seal of step 2 and the delete of step 1.
        bucket.plan = Plan([Fault("put", "*/log/*", 2, hold)])
        saving = threading.Thread(target=manager.save, args=(2, state_of(2)))
        saving.start()
        try:
            assert hold.reached.wait(60)
            assert steps(BUCKET) == [1, 2], "step 2 is committed, and step 1 is not deleted yet"
            deadline = time.monotonic() + 30
            while steps(copy) != [1, 2]:
                assert time.monotonic() < deadline, "the copy waits for retention"
                time.sleep(0.01)  # polling for what happens by itself; bounded by the deadline
        finally:
            hold.release.set()
            saving.join()
        assert steps(BUCKET) == [2]


def test_each_copy_has_its_own_retention(tmp_path: Path) -> None:
    """One keeps everything, one the last two, one is only ever given the newest that waits."""
    primary = tmp_path / "primary"
    before(primary, 1, 2, 3)
    all_, two = tmp_path / "all", tmp_path / "two"
    with Job(primary, all_, Copy(two, keep=Keep(latest=2))) as job:
        job.copier.wait()
        job.save(4)
        assert job.copier.wait() == ()
        assert steps(all_) == [1, 2, 3, 4]
        assert steps(two) == [3, 4]
    newest = tmp_path / "newest"
    with Job(primary, Copy(newest, every="latest")) as job:
        assert job.copier.wait() == ()
        job.save(5)
        assert job.copier.wait() == ()
    assert steps(newest) == [4, 5]


def test_a_failed_copy_is_absent_and_tried_again_under_another_id(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """Half-way failures leave nothing; the id of a try that was aborted is spent; the order holds."""
    primary = tmp_path / "primary"
    full = NoSpaceError("quota")
    bucket.plan = Plan([Fault("put", "*/__0_0.xxh3", 1, Fail(full))])
    with Job(primary, BUCKET) as job:
        one = job.save(1).save_id
        two = job.save(2).save_id
        job.copier.wait()
        assert job.copier.wait() == ()
        [failure] = job.failures()
        assert "quota" in failure.error
        first, second = ids(BUCKET)
    assert first is not None
    assert first != one
    assert origin_of(first) == one
    assert second == two
    check(BUCKET, 1)
    assert not [key for key in bucket.objects if f"/{one}/" in key]
    with Job(primary, BUCKET) as job:  # known by its origin
        job.copier.wait()
    assert ids(BUCKET) == [first, second]


def test_a_damaged_save_is_never_committed_as_a_copy_and_holds_up_nobody(tmp_path: Path) -> None:
    """A flipped bit is IntegrityError in CopyFailed; after its tries newer ones are copied and
    retention need not wait for it.
    """
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    before(primary, 1, 2)
    [data] = (primary / "checkpoint_1").glob("*/__0_0.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with Job(primary, Copy(copy, attempts=2)) as job:
        # The first turn is the copier's own; in the second the next one follows at once.
        assert job.copier.wait() == ()
        assert steps(copy) == [2]
        assert job.copier.waiting() == frozenset()
    assert len(job.failures()) == 2
    assert all("__0_0.distcp is damaged" in f.error for f in job.failures())
    check(copy, 2)
    assert not list((copy / ".ckptfs/attempts").iterdir())


def test_after_a_failure_the_next_tries_come_with_the_next_commits_and_rarer(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """Backoff is on the copier's clock and never longer than the next wait()."""
    bucket.plan = Plan([Fault("*", "*", None, Fail(AccessError("expired")))])
    primary = tmp_path / "primary"
    with Job(primary, BUCKET) as job:
        job.save(1)
        job.copier.wait()
        job.copier.wait()

        def asked() -> int:
            count = len(bucket.requests())
            job.save(1)
            idle(job)
            return len(bucket.requests()) - count

        assert asked() == 0
        job.now += 3600
        assert asked() > 0


def idle(job: Job) -> None:
    """Return when the copier has had all its turns, without asking for an urgent one."""
    turn = _Turn(urgent=False)
    job.copier._turns.put((job.copier, turn))
    assert turn.done.wait(60)


def test_a_copy_that_another_job_fills_is_told_once_and_disturbs_nobody(tmp_path: Path) -> None:
    """RunBusyError is an event and a line; saves continue; when the run is free it is drained."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    with open_session(Uri.parse(copy), SoloControl(), Place(), write=True) as session:
        other = claim(session)
        with Job(primary, copy, takeover=Takeover.NEVER) as job:
            for step in (1, 2, 3):
                job.save(step)
                assert job.copier.wait()
            [failure] = job.failures()
            assert "the run is held by" in failure.error
            assert len(job.copier.waiting()) == 3
            other.release()
            assert job.copier.wait() == ()
    assert steps(copy) == [1, 2, 3]


def test_a_copy_that_another_job_took_is_left_alone(tmp_path: Path) -> None:
    """Fenced: nothing more is written there, and the primary waits no longer."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    with Job(primary, copy) as job:
        job.save(1)
        job.copier.wait()
        with (
            open_session(Uri.parse(copy), SoloControl(), Place(), write=True) as session,
            claim(session, takeover=Takeover.FORCE),
        ):
            job.save(2)
            assert job.copier.wait() == ()
            assert job.copier.waiting() == frozenset()
    assert steps(copy) == [1]
    assert steps(primary) == [1, 2]


def test_close_stops_a_copy_that_takes_too_long_and_leaves_nothing(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """Bounded: it is given up between two reads, nothing of it is committed, the next job makes it."""
    hold = Hold()
    bucket.plan = Plan([Fault("put*", "*/__0_0*", 1, hold)])
    primary = tmp_path / "primary"
    with Job(primary, BUCKET) as job:
        job.save(1)
        assert hold.reached.wait(60)
        with pytest.raises(ckptfs.DeadlineError):
            job.copier.wait(timeout_s=0)
        # It notices when the storage answers.
        job.copier._stopped.set()
        hold.release.set()
        assert job.copier.close(timeout_s=60)
    assert steps(BUCKET) == []
    with Job(primary, BUCKET) as job:
        assert job.copier.wait() == ()
    assert steps(BUCKET) == [1]


def test_weights_are_copied_beside_checkpoints_each_with_its_latest(tmp_path: Path) -> None:
    """Kinds, metrics and failure marks travel with a save."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    with Job(primary, Copy(copy, every="latest")) as job:
        idle(job)  # its first look, which would find step 1 on a busy machine
        for step in (1, 2):
            job.save(step, tell=False)
            job.save(step, tell=False, kind=Kind.WEIGHTS)
        idle(job)
        job.copier.wait()
    found = [(c.step, c.kind) for c in ckptfs.list_checkpoints(copy)]
    assert found == [(2, Kind.CHECKPOINT), (2, Kind.WEIGHTS)]


def test_sessions_for_a_restore_only_read_and_an_empty_copy_is_an_empty_run(tmp_path: Path) -> None:
    """Nothing is made where nothing was; an unreachable copy is an error and not an empty one."""
    copies = copies_of([tmp_path / "nothing"], tmp_path / "primary")
    with open_copies(copies, SoloControl()) as sessions:
        assert len(sessions) == 1
    assert not (tmp_path / "nothing").exists()
    STORES.bucket("copies").plan = Plan([Fault("*", "*", None, Fail(AccessError("expired")))])
    gone = copies_of([BUCKET], tmp_path / "primary")
    with pytest.raises(ckptfs.CkptfsError, match="expired"), open_copies(gone, SoloControl()):
        pass
    STORES.drop("copies")


def test_wrong_copies_are_refused_when_they_are_named() -> None:
    """Before anything is claimed: the run itself, the same place twice, an unknown word."""
    for wrong in (["/run"], ["/a", Copy("/a/")]):
        with pytest.raises(StateError, match="a copy must have a place of its own"):
            copies_of(wrong, "file:///run")
    with pytest.raises(StateError, match='"all" or "latest"'):
        Copy("/a", every="some")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="attempts"):
        Copy("/a", attempts=0)


def test_one_checkpoint_is_gathered_by_hand(tmp_path: Path) -> None:
    """Another run, another name; exclusive; a try that was aborted does not spend it; absent is reported."""
    primary, other = tmp_path / "primary", tmp_path / "other"
    before(primary, 1)
    faulty = f"faults+file://{other}/put_aside"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTFS_TEST_FAULT", "fail=ENOSPC:write:*.distcp:1")
        with pytest.raises(ckptfs.CollectiveError, match="No space left"):
            gather(primary / "checkpoint_1", faulty)
    result = gather(primary / "checkpoint_1", other / "put_aside")
    assert (result.step, Uri.parse(result.uri).name) == (1, "put_aside")
    assert origin_of(result.save_id) == ids(primary)[0] != result.save_id
    state = {"w": torch.zeros(400_000)}
    assert ckptfs.load(state, other / "put_aside").verified
    assert torch.equal(state["w"], state_of(1)["w"])
    with pytest.raises(ckptfs.CommitConflictError):
        gather(primary / "checkpoint_1", other / "put_aside")
    with pytest.raises(ckptfs.NotFoundError):
        gather(primary / "checkpoint_2", other / "two")


def test_a_part_is_gathered_as_a_checkpoint_and_a_whole_of_parts_is_copied(tmp_path: Path) -> None:
    """What several groups wrote follows like any save; each part of it can be put elsewhere by hand."""
    primary, copy = tmp_path / "primary", tmp_path / "copy"
    with ckptfs.CheckpointManager(primary, keep_latest=1, copies=[copy]) as manager:
        for step in (1, 2):
            ticket = manager.begin(step, parts=["actor", "driver"])
            sealed = [ckptfs.save(state_of(step), ticket.part(p)) for p in ("actor", "driver")]
            ticket.commit(sealed)
        manager.wait()
        manager.save(3, state_of(3))
        manager.wait()
    assert steps(primary) == [3]
    assert steps(copy) == [1, 2, 3]
    other = tmp_path / "other"
    with ckptfs.CheckpointManager(other) as manager:
        ticket = manager.begin(1, parts=["actor"])
        ticket.commit([ckptfs.save(state_of(1), ticket.part("actor"))])
    gather(other / "step_1/actor", tmp_path / "kept/actor_1")
    state = {"w": torch.zeros(400_000)}
    ckptfs.load(state, tmp_path / "kept/actor_1")
    assert torch.equal(state["w"], state_of(1)["w"])


def test_a_manager_goes_on_from_its_copy_and_copies_on(tmp_path: Path) -> None:
    """N3, whole: retention waits, the disk is lost, the newest comes back from the copy, and what is
    saved from there on follows it there.
    """
    primary, copy = tmp_path / "primary", tmp_path / "copy"

    def manager() -> ckptfs.CheckpointManager:
        return ckptfs.CheckpointManager(primary, keep_latest=1, copies=[copy], mode="async")

    with manager() as first:
        for step in (1, 2, 3):
            first.save(step, state_of(step))
        first.wait()
    assert steps(primary) == [3]
    assert steps(copy) == [1, 2, 3]
    shutil.rmtree(primary)
    with manager() as second:
        state = {"w": torch.zeros(400_000)}
        restored = second.restore(state)
        assert restored is not None
        assert restored.step == 3
        assert restored.uri == str(Uri.parse(copy) / "step_3")
        assert torch.equal(state["w"], state_of(3)["w"])
        second.save(4, state_of(4))
        second.wait()
    assert steps(copy) == [1, 2, 3, 4]


def test_a_disk_that_the_run_left_does_not_take_it_back(tmp_path: Path) -> None:
    """Node-local disks of an earlier allocation: the copy continued from what they hold, so it is the
    newest over all; afterwards both continue in one order.
    """
    primary, copy, left = tmp_path / "primary", tmp_path / "copy", tmp_path / "left"

    def manager() -> ckptfs.CheckpointManager:
        return ckptfs.CheckpointManager(primary, copies=[copy])

    def restored() -> tuple[int | None, float]:
        state = {"w": torch.zeros(400_000)}
        with manager() as reading:
            found = reading.restore(state)
        assert found is not None
        return found.step, float(state["w"][0])

    with manager() as first:
        first.save(1, state_of(1))
        first.wait()
    shutil.copytree(primary, left)
    with manager() as elsewhere:
        elsewhere.save(2, state_of(2))
        elsewhere.wait()
    shutil.rmtree(primary)
    left.rename(primary)
    assert restored() == (2, 2.0)
    with manager() as back:
        back.save(3, state_of(3))
        back.wait()
    assert steps(copy) == [1, 2, 3]
    assert restored() == (3, 3.0)


def test_a_copy_that_took_two_tries_stands_in_for_its_save(
    tmp_path: Path, bucket: MemoryObjects
) -> None:
    """Its id differs, it is the same save: a damaged primary is read from there, and it is not ahead
    of the run that it was copied from.
    """
    primary = tmp_path / "primary"
    bucket.plan = Plan([Fault("put", "*/__0_0.xxh3", 1, Fail(NoSpaceError("quota")))])
    with ckptfs.CheckpointManager(primary, copies=[BUCKET]) as manager:
        manager.save(100, state_of(100))
        manager.wait()
        manager.wait()
        assert ids(BUCKET) != ids(primary)
        bucket.plan = Plan([Fault("put*", "*", None, Fail(NoSpaceError("quota")))])
        manager.save(70, state_of(70))  # trained again from an older one
        manager.wait()
    state = {"w": torch.zeros(400_000)}
    with ckptfs.CheckpointManager(primary, copies=[BUCKET]) as manager:
        assert (found := manager.restore(state)) is not None
        assert found.step == 70
        [data] = (primary / "step_100").glob("*/__0_0.distcp")
        data.unlink()
        assert (found := manager.restore(state, step=100)) is not None
    assert torch.equal(state["w"], state_of(100)["w"])


def test_no_repr_shows_credentials() -> None:
    """Of a copy, and of how it is reached: both are in tracebacks that show locals."""
    copy = Copy(
        "s3://key:s3cret@bucket/run", storage_options={"secret": "s3cret", "x": {"y": "s3cret"}}
    )
    for shown in (repr(copy), repr(copy.place), str([copy])):
        assert "s3cret" not in shown
    assert repr(copy).startswith("Copy('s3://***@bucket/run', ")


def _shows_fields(kind: type) -> bool:
    """Whether the repr is the one that dataclass makes, which shows what the fields do not hide."""
    made = getattr(kind.__repr__, "__wrapped__", None)
    return made is not None and made.__code__.co_filename == "<string>"


def test_no_field_with_storage_options_is_in_a_repr() -> None:
    """Of no dataclass of the package: they hold keys, and a repr is in every traceback that shows locals."""
    found = set[str]()
    for module in pkgutil.walk_packages(ckptfs.__path__, "ckptfs."):
        if module.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):  # what an extra brings
            for kind in vars(importlib.import_module(module.name)).values():
                if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                    found |= {
                        f"{kind.__qualname__}.{field.name}"
                        for field in dataclasses.fields(kind)
                        if field.name == "storage_options" and field.repr and _shows_fields(kind)
                    }
    assert not found
    target = TargetAsked("s3://key:s3cret@bucket", "home", {"secret": "s3cret"})
    assert "s3cret" not in repr(target)
