"""Newcomers that meet: none takes a run if its owner came after the look that judged it free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.paths import LOG
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import Control, SoloControl
from ckptfs.control.world import World
from ckptfs.errors import CollectiveError, FencedError, RunBusyError
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Action, FaultyStorage, Plan
from ckptfs.testing.world import simulate
from ckptfs.uri import Uri
from tests.crash import rig

ENDLESS = LeaseTimes(rewrite_s=0.1, still_s=3600.0)  # who waits for it fails the test


class _AtTheFence(Plan):
    """Does something once, just before the first entry is appended to the run log; nth: or a later one."""

    def __init__(self, before: Callable[[], None], *, nth: int = 1) -> None:
        super().__init__()
        self._before = before
        self._nth = nth
        self.armed = True

    def begin(self, op: str, key: str) -> Action | None:
        if self.armed and op == "create" and key.startswith(f"{LOG}/"):
            self._nth -= 1
            if self._nth == 0:
                self.armed = False
                self._before()
        return super().begin(op, key)


class _AfterTheFence(_AtTheFence):
    """Does something once, just after this rank's first entry is in the log."""

    def begin(self, op: str, key: str) -> Action | None:
        if self.armed and op != "create" and self._appended:
            self.armed = False
            self._before()
        self._appended = self._appended or (op == "create" and key.startswith(f"{LOG}/"))
        return Plan.begin(self, op, key)

    _appended = False


def sit(run: Path, job: str, plan: Plan | None = None) -> RunSession:
    """A session of one process that is a job of that name on a node of its own."""
    here = World.solo()
    world = replace(here, node=f"{here.node}/{job}", job_id=f"job:{job}")
    storage = FaultyStorage(LocalStorage(Uri.parse(str(run))), plan or Plan())
    return start_session(SoloControl(world), storage, Place(), write=True)


def log_of(run: Path) -> LogState:
    """What the log of a run says by now."""
    return drive(catch_up(), LocalStorage(Uri.parse(str(run))))


@pytest.mark.parametrize("takeover", [Takeover.NEVER, Takeover.DEAD, Takeover.AUTO])
def test_a_newcomer_that_looked_before_does_not_rob_who_came_first(
    tmp_path: Path, takeover: Takeover
) -> None:
    """Two come to a released run; one owns it before the other fences: that one is refused."""
    for number in range(8):  # the nonces of the two decide which fence would be the newer one
        path = tmp_path / f"run{number}"
        claim(sit(path, "before")).release()
        owner: list[tuple[RunSession, Run]] = []

        def come_first(path: Path = path, owner: list[tuple[RunSession, Run]] = owner) -> None:
            session = sit(path, "first")
            owner.append((session, claim(session, takeover=takeover, times=ENDLESS)))

        late = sit(path, "late", _AtTheFence(come_first))
        with pytest.raises(RunBusyError, match="job:first"):
            claim(late, takeover=takeover, times=ENDLESS)
        session, run = owner[0]
        rig.save(session, "step_1", "one", run)
        assert log_of(path).generation == run.generation
        run.release()


def test_a_newcomer_takes_what_was_released_since_it_looked(tmp_path: Path) -> None:
    """Who is refused looks again: a run that was taken and released in between is free."""
    path = tmp_path / "run"
    claim(sit(path, "before")).release()
    late = sit(path, "late", _AtTheFence(lambda: claim(sit(path, "first")).release()))
    with claim(late, takeover=Takeover.NEVER) as run:
        assert run.generation.number == 3
        rig.save(late, "step_1", "one", run)


@pytest.mark.parametrize("takeover", [Takeover.FORCE, Takeover.AUTO])
@pytest.mark.parametrize("settling", [False, True], ids=["reporting", "settling"])
def test_who_was_fenced_out_while_it_recovered_does_not_rob_the_newer_owner(
    tmp_path: Path, takeover: Takeover, *, settling: bool
) -> None:
    """Between the fence of a claim and its end another one of the same job takes the run, by the same
    takeover, and lives. The first one ends with an error, and the other continues.
    """
    path = tmp_path / "run"
    before = sit(path, "job")
    run = claim(before)
    # An attempt that has to be aborted: the entry behind the fence.
    SaveAttempt(before, SaveSpec("step_1", None, run=run.generation)).begin()
    owner: list[tuple[RunSession, Run]] = []

    def come() -> None:
        session = sit(path, "job")
        owner.append((session, claim(session, takeover=takeover, times=ENDLESS)))

    plan = _AtTheFence(come, nth=2) if settling else _AfterTheFence(come)
    with pytest.raises((FencedError, RunBusyError), match=r"settle failed|is held by") as caught:
        claim(sit(path, "job", plan), takeover=takeover, times=ENDLESS)
    assert isinstance(caught.value, CollectiveError) == settling
    session, newer = owner[0]
    log = log_of(path)
    assert (log.generation, log.released) == (newer.generation, False)
    rig.save(session, "step_2", "two", newer)
    newer.release()


def test_who_got_a_part_of_the_domains_gives_it_back(tmp_path: Path) -> None:
    """A newcomer that took one domain and met an owner in the other releases all of its fences,
    and the owner continues.
    """
    paths = {node: tmp_path / node / "run" for node in ("a", "b")}
    taken, owner = threading.Event(), list[tuple[RunSession, Run]]()

    def come_first() -> None:
        assert taken.wait(120)
        session = sit(paths["b"], "first")
        owner.append((session, claim(session, takeover=Takeover.NEVER)))

    def both(control: Control, *, racing: bool) -> Run:
        node = "ab"[control.rank]
        here = _AfterTheFence(taken.set) if node == "a" else _AtTheFence(come_first)
        plan = here if racing else Plan()
        storage = FaultyStorage(LocalStorage(Uri.parse(str(paths[node]))), plan)
        session = start_session(control, storage, Place(scope="node"), write=True)
        return claim(session, takeover=Takeover.NEVER)

    first = simulate(2, lambda c: both(c, racing=False), nodes=["a", "b"], job_id="before")
    for end in first:
        end.get().release()
    ends = simulate(2, lambda c: both(c, racing=True), nodes=["a", "b"], job_id="late")
    for end in ends:
        with pytest.raises(RunBusyError, match="job:first"):
            end.get()
    assert log_of(paths["a"]).generation.number == 2
    assert log_of(paths["a"]).released
    session, run = owner[0]
    assert log_of(paths["b"]).generation == run.generation
    rig.save(session, "step_1", "one", run)
    run.release()
