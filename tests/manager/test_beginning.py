"""A job that forgets restore(): what error it gets, and that it costs the run nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckptfs
from ckptfs import CheckpointManager, CommitConflictError, Copy, DirectoryManager, Keep
from ckptfs.commit.session import Place
from ckptfs.control.control import Control
from ckptfs.integrations._support.step_driver import StepDriver
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.storage.registry import open_storage
from ckptfs.testing.world import simulate

Mode = Literal["sync", "async"]


class Job:
    """One kind of job: how it makes its manager, saves a step and continues."""

    def __init__(self, mode: Mode, tmp: Path) -> None:
        self.mode: Mode = mode
        self.tmp = tmp

    def manager(self, run: Path, **options: Any) -> Any:
        """A manager of this job."""
        return CheckpointManager(run, mode=self.mode, **options)

    def save(self, manager: Any, step: int) -> None:
        """Committed when it returns."""
        manager.save(step, state(step))
        manager.wait()

    def restore(self, manager: Any) -> int | None:
        """The step that it continues from."""
        restored = manager.restore(state(-1))
        return None if restored is None else restored.step


class FilesJob(Job):
    """One that saves directories."""

    def manager(self, run: Path, **options: Any) -> Any:
        """A manager of this job."""
        return DirectoryManager(run, mode=self.mode, **options)

    def save(self, manager: Any, step: int) -> None:
        """Committed when it returns."""
        source = self.tmp / f"written-{step}"
        source.mkdir()
        (source / "weights").write_bytes(str(step).encode())
        manager.save(step, source, consume=True)
        manager.wait()

    def restore(self, manager: Any) -> int | None:
        """The step that it continues from."""
        with manager.reading() as opened:
            return None if opened is None else opened.step


def state(step: int) -> dict[str, Any]:
    """A small state that has its step."""
    return {"w": torch.full((4,), float(step))}


@pytest.fixture(
    params=[(Job, "sync"), (Job, "async"), (FilesJob, "sync"), (FilesJob, "async")],
    ids=["state", "state, async", "files", "files, async"],
)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """Every kind of job."""
    kind, mode = request.param
    made: Job = kind(mode, tmp_path)
    return made


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Path:
    """A run that one job brought to step 2000; 1000 and 2000 are there."""
    run = tmp_path / "run"
    with job.manager(run, keep_latest=2) as manager:
        for step in (1000, 2000):
            job.save(manager, step)
    return run


def test_a_job_that_forgets_restore_deletes_nothing(job: Job, run: Path) -> None:
    """Its first save is refused, names the newest commit and every way on; both checkpoints stay."""
    with job.manager(run, keep_latest=1) as manager:
        for step in (10, 1999, 2000):
            with pytest.raises(
                CommitConflictError, match="step_2000 is its newest commit"
            ) as caught:
                job.save(manager, step)
            assert isinstance(caught.value, FileExistsError)
            told = str(caught.value)
            assert "begin_again=True" in told
            assert "another run" in told
            assert "to continue from the newest" in told
        assert manager.steps == [1000, 2000]
    assert sorted(path.name for path in run.glob("step_*")) == ["step_1000", "step_2000"]


def test_it_may_go_on_where_the_run_is(job: Job, run: Path) -> None:
    """What is further than the newest commit begins nothing again: a job that loaded by itself saves on."""
    with job.manager(run, keep_latest=2) as manager:
        job.save(manager, 2010)
        assert manager.steps == [2000, 2010]


def test_after_a_restore_it_saves(job: Job, run: Path) -> None:
    """The ordinary resume, also where the error was met first."""
    with job.manager(run, keep_latest=2) as manager:
        with pytest.raises(CommitConflictError):
            job.save(manager, 1)
        assert job.restore(manager) == 2000
        job.save(manager, 2010)
        assert manager.steps == [2000, 2010]


def test_an_empty_run_begins(job: Job, tmp_path: Path) -> None:
    """The ordinary first job: restore finds nothing, and the first saves are its own, twice the last."""
    run = tmp_path / "fresh"
    with job.manager(run, keep_latest=2) as manager:
        assert job.restore(manager) is None
        for step in (1, 2, 3):
            job.save(manager, step)
        if not isinstance(job, FilesJob):
            job.save(manager, 3)  # as at the end of a training
        assert manager.steps == [2, 3]


def test_a_run_that_came_to_be_after_the_look_is_another_jobs(job: Job, tmp_path: Path) -> None:
    """restore() found nothing; then somebody else saved: that is not begun over either."""
    run = tmp_path / "fresh"
    late = job.manager(run, keep_latest=1)
    assert job.restore(late) is None
    with job.manager(run) as other:
        job.save(other, 50)
    with pytest.raises(CommitConflictError, match="step_50"):
        job.save(late, 10)
    late.close()


def test_beginning_again_is_one_argument(job: Job, run: Path) -> None:
    """begin_again=True: retention lets the old ones go as the new ones come."""
    with job.manager(run, keep_latest=2, begin_again=True) as manager:
        for step in (10, 20):
            job.save(manager, step)
        assert manager.steps == [10, 20]


def test_what_another_loader_took_counts_as_a_restore(job: Job, run: Path) -> None:
    """resumed_at: a framework loaded step 1000 by itself, and trains on from there."""
    with job.manager(run, keep_latest=2) as manager:
        manager.resumed_at(1000)
        job.save(manager, 1010)
        assert manager.steps == [2000, 1010]


def test_what_is_further_stays_until_training_has_passed_it(tmp_path: Path) -> None:
    """After going back retention takes what is behind, and what is ahead once it is not ahead any more."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (1000, 2000):
            manager.save(step, state(step))
    with CheckpointManager(run, keep_latest=2) as manager:
        assert manager.restore(state(0), step=1000) is not None
        manager.save(1010, state(1))
        manager.save(1020, state(1))
        assert manager.steps == [2000, 1010, 1020]
        manager.save(2010, state(1))
        assert manager.steps == [1020, 2010]


def test_a_damaged_newest_that_was_passed_over_stays(tmp_path: Path) -> None:
    """fallback="older": what is missing may come back, so retention leaves the newest alone."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (1000, 2000):
            manager.save(step, state(step))
    for data in (run / "step_2000").rglob("*.distcp"):
        data.rename(tmp_path / "away")
    with CheckpointManager(run, keep_latest=1) as manager:
        restored = manager.restore(state(0), fallback="older")
        assert restored is not None
        assert restored.step == 1000
        manager.save(1010, state(1))
        manager.save(1020, state(1))
        assert manager.steps == [2000, 1020]


def test_going_back_replaces_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step that an earlier job saved is replaced after a restore, with one line; one's own without."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    with CheckpointManager(run) as manager, caplog.at_level(logging.WARNING, "ckptfs"):
        manager.restore(state(0), step=1)
        manager.save(2, state(22))
        manager.save(2, state(23))
        manager.save(3, state(3))
    (line,) = [r.getMessage() for r in caplog.records if "replaces" in r.getMessage()]
    assert "step_2" in line
    assert "restored step 1" in line
    loaded = state(0)
    ckptfs.load(loaded, run / "step_2")
    assert torch.equal(loaded["w"], state(23)["w"])


def test_a_name_that_an_earlier_job_took_is_refused(tmp_path: Path) -> None:
    """A run went back from 100 to 70: a job that restored nothing may save 80, not over the 100 there."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (50, 100, 70):
            manager.save(step, state(step))
    with CheckpointManager(run, keep_latest=1) as manager:
        for _ in range(2):  # asking again changes nothing
            with pytest.raises(CommitConflictError, match="step_100 is committed already"):
                manager.save(100, state(1))
        manager.save(80, state(80))
        assert manager.steps == [100, 80]


def test_each_kind_counts_for_itself(tmp_path: Path) -> None:
    """Weights next to a run are published without restoring it; over published ones only on request."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(1000, state(1000))
    with CheckpointManager(run) as manager:
        manager.save(900, state(900), kind="weights")
        with pytest.raises(CommitConflictError, match="step_1000"):
            manager.save(900, state(900))
    with CheckpointManager(run) as manager:
        manager.save(800, state(800), kind="weights")
        with pytest.raises(CommitConflictError, match="weights_900 is committed already"):
            manager.save(900, state(900), kind="weights")


def test_weights_of_a_job_that_died_early_are_replaced(tmp_path: Path) -> None:
    """It saved weights before its first full checkpoint; restarted, restore() finds nothing, and it continues."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(1, state(1), kind="weights")
    with CheckpointManager(run) as manager:
        assert manager.restore(state(0)) is None
        manager.save(1, state(11), kind="weights")
        manager.save(2, state(2))
        assert manager.steps == [2]
    loaded = state(0)
    ckptfs.load(loaded, run / "weights_1")
    assert torch.equal(loaded["w"], state(11)["w"])


def test_weights_that_nobody_saved_say_nothing_of_the_run(tmp_path: Path) -> None:
    """restore(kind="weights") that finds none forgets no earlier restore, and is no look at the run."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (50, 100):
            manager.save(step, state(step))
    with CheckpointManager(run) as manager:
        assert manager.restore(state(0), step=50) is not None
        assert manager.restore(state(0), kind="weights") is None
        manager.save(60, state(60))
    with CheckpointManager(run) as manager:
        assert manager.restore(state(0), kind="weights") is None
        with pytest.raises(CommitConflictError, match="step_60 is its newest commit"):
            manager.save(10, state(10))


def test_a_failing_job_saves_where_the_name_is_free(tmp_path: Path) -> None:
    """Such a save is never latest, so it begins nothing, before it or after; a name that is taken stays."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        for step in (90, 100):
            manager.save(step, state(step))
    with CheckpointManager(run, keep_latest=1) as manager:
        manager.save(3, state(3), failure=True)
        with pytest.raises(CommitConflictError, match="step_90 is committed already"):
            manager.save(90, state(90), failure=True)
        with pytest.raises(CommitConflictError, match="step_100 is its newest commit"):
            manager.save(4, state(4))
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [90, 100, 3]


def test_a_job_that_has_begun_is_not_stopped(job: Job, tmp_path: Path) -> None:
    """It loaded by its own means, passed the newest commit, and meets a step that was given up."""
    run = tmp_path / "run"
    with job.manager(run) as manager:
        for step in (50, 100):
            job.save(manager, step)
        manager.resumed_at(50)
        job.save(manager, 70)
    with job.manager(run, keep_latest=2) as manager:
        for step in (80, 90, 100, 110):
            job.save(manager, step)
        assert manager.steps == [100, 110]


def test_what_an_overwrite_hid_is_no_past(job: Job, run: Path) -> None:
    """prepare_run(mode="overwrite"), then a manager: it begins again as it was asked to."""
    ckptfs.prepare_run(run, "overwrite").release()
    with job.manager(run, keep_latest=1) as manager:
        assert job.restore(manager) is None
        for step in (10, 1000):
            job.save(manager, step)
        assert manager.steps == [1000]


def test_an_overwrite_that_nobody_followed_is_undone(job: Job, run: Path) -> None:
    """A claim that committed nothing brings the old checkpoints back, and with them the question."""
    ckptfs.prepare_run(run, "overwrite").release()
    ckptfs.prepare_run(run).release()
    with (
        job.manager(run) as manager,
        pytest.raises(CommitConflictError, match="step_2000 is its newest commit"),
    ):
        job.save(manager, 10)


def test_directories_that_come_again_make_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After going back, what was given up is deleted when its step comes again, said in a line each; also
    with a grace for readers, and in each way of saving.
    """
    job, run = FilesJob("async", tmp_path), tmp_path / "run"
    with job.manager(run) as manager:
        for step in (50, 60, 70, 80, 100):
            job.save(manager, step)
        old = {c.step: c.save_id for c in ckptfs.list_checkpoints(run)}
    options = {"keep_latest": 2, "keep_every": 50, "delete_grace_s": 600.0}
    with (
        job.manager(run, **options) as manager,
        caplog.at_level(logging.WARNING, "ckptfs"),
    ):
        with manager.reading(50) as opened:
            assert opened is not None
        job.save(manager, 55)
        assert manager.steps == [50, 60, 70, 80, 100, 55]  # further than this job: its step stays
        job.save(manager, 60)
        with manager.writing(70) as path:
            Path(path, "weights").write_bytes(b"again")
        assert manager.steps == [50, 80, 100, 60, 70]
        manager.begin(80, ["actor"]).abandon()
        assert manager.steps == [50, 100, 60, 70]
        with pytest.raises(CommitConflictError, match="step_70 still has save"):
            job.save(manager, 70)  # its own
    new = {c.step: c.save_id for c in ckptfs.list_checkpoints(run)}
    assert {step for step in new if new[step] != old.get(step)} == {60, 70}
    lines = [r.getMessage() for r in caplog.records if "replaces save" in r.getMessage()]
    assert len(lines) == 3
    assert all("restored step 50" in line for line in lines)


def test_a_directory_that_nothing_came_after_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest commit is not deleted before there is another one, and nothing reports a replacement;
    nor is what the job was restored from, or is before that.
    """
    job, run = FilesJob("sync", tmp_path), tmp_path / "run"
    with job.manager(run) as manager:
        for step in (10, 20, 30):
            job.save(manager, step)
    for options, start, step in [
        ({}, 20, 30),
        ({"begin_again": True}, None, 30),
        ({}, 20, 20),
        ({}, 20, 10),
    ]:
        with job.manager(run, **options) as manager, caplog.at_level(logging.WARNING, "ckptfs"):
            if start is not None:
                manager.resumed_at(start)
            with pytest.raises(CommitConflictError, match=f"step_{step} still has save"):
                job.save(manager, step)
            shutil.rmtree(tmp_path / f"written-{step}")
            assert manager.steps == [10, 20, 30]
    assert "replaces" not in caplog.text


def test_other_names_are_not_the_run(tmp_path: Path) -> None:
    """What is saved next to a run by name, or by a template of another manager, is no job's beginning."""
    run = tmp_path / "run"
    ckptfs.save(state(0), run / "export", step=5000)
    with CheckpointManager(run, name="other-{N}") as manager:
        manager.save(3000, state(3000))
    with CheckpointManager(run) as manager:
        manager.save(1, state(1))
        assert manager.steps == [1]


def test_a_pin_without_a_restore_lets_nothing_go(job: Job, run: Path) -> None:
    """A claim of the run for another reason than to train carries out no policy."""
    with job.manager(run, keep_latest=1) as manager:
        manager.pin(2000)
        manager.wait()
        assert manager.steps == [1000, 2000]


def test_a_checkpoint_of_parts_is_begun_alike(tmp_path: Path) -> None:
    """begin() is refused as save() is."""
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(2000, state(1))
    with CheckpointManager(run) as manager, pytest.raises(CommitConflictError, match="step_2000"):
        manager.begin(10, ["actor", "critic"])
    with DirectoryManager(run, name="files_{N}") as files, files.writing(7) as path:
        Path(path, "a").write_text("a")
    with DirectoryManager(run, name="files_{N}") as files:
        with pytest.raises(CommitConflictError, match="files_7"):
            files.begin(3, ["actor"])
        with pytest.raises(CommitConflictError, match="files_7"), files.writing(3):
            pass


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Callable[..., CheckpointManager]]:
    """Managers of a run with a new disk of its own, and a copy that holds step 1000 and 2000."""
    made = []

    def manager(**options: Any) -> CheckpointManager:
        copies = [Copy(tmp_path / "copy", keep=Keep(1))]
        made.append(CheckpointManager(tmp_path / "run", copies=copies, **options))
        return made[-1]

    with manager() as first:
        for step in (1000, 2000):
            first.save(step, state(step))
            first.wait()
    shutil.rmtree(tmp_path / "run")
    yield manager
    for one in made:
        one.close()


def test_a_copy_that_is_further_is_not_begun_over(
    lost: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    """On new disks, too, a job that forgets restore() learns where the run is; the copy is as it was."""
    with lost() as manager:
        assert manager.restore(state(0), kind="weights") is None  # looks for nothing else
        with pytest.raises(CommitConflictError, match="step_2000") as caught:
            manager.save(10, state(10))
        assert str(tmp_path / "copy" / "step_2000") in str(caught.value)
        manager.wait()
    assert [c.step for c in ckptfs.list_checkpoints(tmp_path / "copy")] == [2000]
    with lost() as manager:
        restored = manager.restore(state(0))
        assert restored is not None
        assert restored.step == 2000
        manager.save(2010, state(2010))


def test_a_copy_that_is_further_stays(
    lost: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    """A copy's retention takes nothing that is further than what is copied, unless it is begun again."""
    with lost() as manager:
        manager.resumed_at(5)
        manager.save(10, state(10))
        manager.wait()
    assert [c.step for c in ckptfs.list_checkpoints(tmp_path / "copy")] == [2000, 10]
    with lost(begin_again=True) as manager:
        manager.save(20, state(20))
        manager.wait()
    assert [c.step for c in ckptfs.list_checkpoints(tmp_path / "copy")] == [20]


def test_a_copy_out_of_reach_keeps_nobody_from_saving(tmp_path: Path) -> None:
    """Whether it is further is not known then, and the log says so."""
    (tmp_path / "blocked").write_text("a file where the copy should be")
    with CheckpointManager(tmp_path / "run", copies=[tmp_path / "blocked"]) as manager:
        manager.save(1, state(1))
        assert manager.steps == [1]


@pytest.mark.parametrize("nodes", [None, ["a", "b"]])
def test_all_ranks_are_told_alike(tmp_path: Path, nodes: list[str] | None) -> None:
    """Every rank gets the same error at the same call, and the next call is in step again."""

    def managed(control: Control, body: Callable[[CheckpointManager], Any]) -> Any:
        disk = tmp_path / (nodes[control.rank] if nodes else "shared")
        ground = RunHandle(Where("/run", Place()), control=control, storage=open_storage(disk))
        with CheckpointManager("/run", keep_latest=2, ground=ground) as manager:
            return body(manager)

    def first(manager: CheckpointManager) -> None:
        manager.save(1000, state(1))
        manager.save(2000, state(1))

    def second(manager: CheckpointManager) -> int | None:
        with pytest.raises(CommitConflictError, match="step_2000"):
            manager.save(10, state(1))
        restored = manager.restore(state(0))
        assert restored is not None
        manager.save(2010, state(1))
        return restored.step

    for end in simulate(2, lambda control: managed(control, first), nodes=nodes):
        end.get()
    ends = simulate(2, lambda control: managed(control, second), nodes=nodes)
    assert [end.get() for end in ends] == [2000, 2000]
    for disk in nodes or ["shared"]:
        assert [c.step for c in ckptfs.list_checkpoints(tmp_path / disk)] == [2000, 2010]


def test_what_stands_on_a_manager_hands_the_argument_on(tmp_path: Path) -> None:
    """A driver of worker groups, which reads nothing: refused without it, begun with it."""
    run = tmp_path / "run"
    with DirectoryManager(run) as manager, manager.writing(2000) as path:
        Path(path, "a").write_text("a")
    driver = StepDriver(run)
    with pytest.raises(CommitConflictError, match="step_2000"), driver.saving(10, ["actor"]):
        pass
    driver.close()
    driver = StepDriver(run, begin_again=True)
    with pytest.raises(ZeroDivisionError), driver.saving(10, ["actor"]):
        raise ZeroDivisionError
    driver.close()
