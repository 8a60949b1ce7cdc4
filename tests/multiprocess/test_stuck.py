"""A rank with storage that never answers: the others learn who hangs, where, and at which path.

The call that does not return is a real one: the open of a named pipe without a writer. Its process
lives and its heart beats, as with a hard mount that lost its server (tests/nfs/test_stuck.py).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.save import sealing
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.control.control import Control, open_control
from ckptfs.retention.deletion import Retirer
from ckptfs.storage.base import Storage
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri
from tests.multiprocess.harness import Rank, launch
from tests.multiprocess.test_async_exit import ended

TIMEOUT_S = 3.0
END_S = 400.0


def wait_for_pipe(storage: Storage) -> None:
    """As long as somebody else has not opened the pipe: a system call that does not return."""
    os.close(Posix().open(f"{storage.local_path('')}/pipe", os.O_RDONLY))


def meets(rank: Rank) -> list[int]:
    """One rank's part of a step reads the pipe; then a step that all can do."""
    rank.init_group()
    storage = open_storage(Uri.parse(rank.args["run"]))

    def local() -> int:
        if rank.number in rank.args["stuck"]:
            wait_for_pipe(storage)
        return 1

    with open_control(timeout_s=TIMEOUT_S) as control:
        try:
            control.step("first", local)
        except Exception as error:
            rank.tell("raised", error=str(error), kind=type(error).__name__)
            if rank.number not in rank.args["stuck"]:
                rank.hold("again")
            if not rank.args["again"]:
                raise
        return list(control.step("second", lambda: rank.number))


def works_beside(rank: Rank) -> int:
    """A thread outside the steps reads the pipe; a step takes longer than timeout_s."""
    rank.init_group()
    storage = open_storage(Uri.parse(rank.args["run"]))
    chore = threading.Thread(target=wait_for_pipe, args=(storage,), daemon=True)
    if rank.number == 1 and rank.args["before"]:
        chore.start()

    def local() -> int:
        if rank.number == 1:
            if not rank.args["before"]:
                chore.start()
            rank.tell("at work")
            rank.hold("done")
        return 1

    with open_control(timeout_s=TIMEOUT_S) as control:
        return sum(control.step("long", local))


def works_on_two(rank: Rank) -> int:
    """A thread with a clone of the control has a part in the pipe; a step of the control itself continues."""
    rank.init_group()
    storage = open_storage(Uri.parse(rank.args["run"]))

    def beside() -> int:
        if rank.number == 1:
            wait_for_pipe(storage)
        return 1

    def local() -> int:
        if rank.number == 1:
            rank.hold("done")
        return 1

    def aside(control: Control) -> None:
        try:
            control.step("beside", beside)
        except ckptfs.CollectiveError as error:
            rank.tell("raised", error=str(error))

    with open_control(timeout_s=TIMEOUT_S) as control:
        thread = threading.Thread(target=aside, args=(control.clone(),), daemon=True)
        thread.start()
        done = sum(control.step("long", local))
        thread.join(END_S)
        return done


def seals_aside(rank: Rank) -> tuple[str, str]:
    """Save in the background. Rank 0, which seals, hangs then, or when it projects what is sealed."""
    rank.init_group()
    if rank.number == 0:
        storage = open_storage(Uri.parse(rank.args["pipes"]))
        at: tuple[Any, str] = (SaveAttempt, "_finish_here")
        if rank.args["at"] == "seal":
            at = (sealing, "append_here")
        follow = getattr(*at)

        def never(*args: Any) -> Any:
            wait_for_pipe(storage)
            return follow(*args)

        setattr(*at, never)
    state = {f"of_{rank.number}": torch.ones(4)}
    pending = ckptfs.async_save(state, rank.args["run"] + "/step_1", timeout_s=TIMEOUT_S)
    try:
        result = pending.result(END_S)
    except ckptfs.CommitInDoubtError as error:
        end = ("in doubt", str(error))
    else:
        end = ("committed", str(result.warnings))
    rank.tell("told", end=end)
    rank.hold("end")
    return end


def retains_aside(rank: Rank) -> None:
    """A manager saves in the background. Retention of rank 0, which holds the log, hangs after that."""
    rank.init_group()
    with (
        open_control(timeout_s=END_S, name="test") as control,
        ckptfs.CheckpointManager(
            rank.args["run"], mode="async", keep_latest=1, timeout_s=TIMEOUT_S
        ) as manager,
    ):
        pending = manager.save(1, {"w": torch.ones(4)})
        assert isinstance(pending, ckptfs.PendingSave)
        pending.result(END_S)
        if rank.number == 0:
            storage = open_storage(Uri.parse(rank.args["pipes"]))
            at: tuple[Any, str] = (Retirer, "_survey")
            survey = getattr(*at)

            def never(*args: Any) -> Any:
                wait_for_pipe(storage)
                return survey(*args)

            setattr(*at, never)
        pending = manager.save(2, {"w": torch.ones(4)})
        assert isinstance(pending, ckptfs.PendingSave)
        result = pending.result(END_S)
        control.step("meet", lambda: None)
        rank.tell("met", save_id=result.save_id)
        rank.hold("end")


def saves_aside(rank: Rank) -> str:
    """Save in the background, wait for it, and end as a script does. One rank's fsync never returns."""
    atexit.register(Path(f"{rank.args['mark']}-{rank.number}").touch)  # the first to come goes last
    os.environ["CKPTFS_EXIT_S"] = "1"
    rank.init_group()
    if rank.number in rank.args["stuck"]:
        hang(rank.args["pipe"])
    state = {f"of_{rank.number}": torch.full((1 << 20,), 1.0)}
    pending = ckptfs.async_save(state, rank.args["run"] + "/step_1", timeout_s=TIMEOUT_S)
    with pytest.raises(ckptfs.CollectiveError) as raised:
        pending.result(END_S)
    return str(raised.value)


def hang(pipe: str) -> None:
    """From now on every fsync of a data file of this process opens the pipe first."""
    fsync = Posix.fsync

    def never(self: Posix, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if "attempts" in path.parts and path.name.startswith(".partial-"):
            self.open(pipe, os.O_RDONLY)
        fsync(self, fd)

    Posix.fsync = never  # type: ignore[method-assign]


def piped(path: Path) -> dict[str, Any]:
    """Arguments: a directory with a pipe in it."""
    os.mkfifo(path / "pipe")
    return {"run": f"file://{path}"}


@pytest.mark.parametrize("stuck", [0, 2])
def test_a_rank_whose_storage_does_not_answer_is_named_with_the_path(
    tmp_path: Path, stuck: int
) -> None:
    """CollectiveError on all others, the coordinator or not; it comes back, and the next step works."""
    args = {**piped(tmp_path), "stuck": [stuck], "again": True}
    with launch(meets, 3, args=args) as ranks:
        others = [number for number in range(3) if number != stuck]
        told = [ranks.wait("raised", rank=number, timeout_s=END_S) for number in others]
        for one in told:
            assert one["kind"] == "CollectiveError"
            assert f"rank {stuck} on " in one["error"]
            assert f"open of {tmp_path}/pipe has not returned for" in one["error"]
            assert "hard mount" in one["error"]
        assert one["error"] == told[0]["error"]
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        late = ranks.wait("raised", rank=stuck, timeout_s=END_S)
        assert late["error"] == told[0]["error"]
        for number in others:
            ranks.release("again", rank=number)
        assert ranks.values() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("before", [True, False])
def test_a_chore_that_hangs_beside_a_long_step_ends_nothing(tmp_path: Path, before: bool) -> None:
    """What others wait for is the step, and that is at work, whichever of the two began first."""
    with launch(works_beside, 2, args={**piped(tmp_path), "before": before}) as ranks:
        ranks.wait("at work", rank=1)
        ranks.stay_without("result", for_s=3 * TIMEOUT_S)
        ranks.release("done", rank=1)
        assert ranks.values() == [2, 2]


def test_a_step_of_one_control_that_hangs_ends_no_step_of_another(tmp_path: Path) -> None:
    """Only those who wait for the part that hangs get the error, with that path."""
    with launch(works_on_two, 2, args=piped(tmp_path)) as ranks:
        told = ranks.wait("raised", rank=0, timeout_s=END_S)
        assert "beside" in told["error"]
        assert f"open of {tmp_path}/pipe has not returned for" in told["error"]
        ranks.stay_without("result", for_s=2 * TIMEOUT_S)
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        assert ranks.wait("raised", rank=1, timeout_s=END_S)["error"] == told["error"]
        ranks.release("done", rank=1)
        assert ranks.values() == [2, 2]


@pytest.mark.parametrize(("at", "end"), [("seal", "in doubt"), ("finish", "committed")])
def test_a_save_that_hangs_in_its_commit_has_not_failed(tmp_path: Path, at: str, end: str) -> None:
    """Its own caller gets what all have, while it hangs: no error that says that it failed."""
    (tmp_path / "run").mkdir()
    args = {"pipes": piped(tmp_path)["run"], "run": f"file://{tmp_path}/run", "at": at}
    with launch(seals_aside, 2, args=args) as ranks:
        told = ranks.wait("told", rank=1, timeout_s=END_S)["end"]
        assert told[0] == end
        assert f"open of {tmp_path}/pipe has not returned for" in told[1]
        assert ranks.wait("told", rank=0, timeout_s=END_S)["end"] == told
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        deadline = time.monotonic() + END_S
        while ckptfs.latest(args["run"]) is None:  # what hung continues, and seals
            assert time.monotonic() < deadline
        for number in range(2):
            ranks.release("end", rank=number)
        ranks.values()


def test_a_save_whose_followers_hang_is_committed_for_its_own_caller(tmp_path: Path) -> None:
    """Retention of one rank hangs after the commit; all callers have the result, and meet in a step."""
    (tmp_path / "run").mkdir()
    args = {"pipes": piped(tmp_path)["run"], "run": f"file://{tmp_path}/run"}
    with launch(retains_aside, 2, args=args) as ranks:
        met = [ranks.wait("met", rank=number, timeout_s=END_S) for number in range(2)]
        assert met[0]["save_id"] == met[1]["save_id"]
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        for number in range(2):
            ranks.release("end", rank=number)
        ranks.values()


@pytest.mark.parametrize("stuck", [[0], [1], [0, 1]], ids=str)
def test_an_asynchronous_save_that_hangs_is_told_to_its_own_caller(
    tmp_path: Path, stuck: list[int]
) -> None:
    """Everybody has the same error, those that hang too, all of them even; and every interpreter ends."""
    args = {**piped(tmp_path), "stuck": stuck, "mark": str(tmp_path / "ended")}
    args["pipe"] = str(tmp_path / "pipe")
    with launch(saves_aside, 2, args=args) as ranks:
        told = ranks.values(timeout_s=END_S)
        assert told[0] == told[1]
        assert f"open of {tmp_path}/pipe has not returned for" in told[0]
        whose = [f"rank {number} on " for number in stuck] + ["ranks 0, 1 on "] * (len(stuck) > 1)
        assert any(who in told[0] for who in whose)
        assert all(ended(ranks.pid(number)) for number in range(2)), ranks.logs()
    assert {path.name for path in tmp_path.glob("ended-*")} == {"ended-0", "ended-1"}
