"""Taking a run over from a real process: one that lives, is stopped, died or left.

The owner is another process with its own job and node, so that only its lease can speak for it.
Where a newcomer must not wait, its patience is longer than the test may last.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.catalog.catalog import list_live, read_view
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Mode, Takeover, claim
from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.paths import ATTEMPTS, LOG, TRASH
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, FencedError, RunBusyError
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Action, FaultyStorage, Plan
from ckptfs.uri import Uri
from tests.crash import rig
from tests.multiprocess.harness import Rank, Ranks, launch

SHORT = LeaseTimes(rewrite_s=0.1, still_s=1.0)
ENDLESS = LeaseTimes(rewrite_s=0.1, still_s=3600.0)  # who waits for it fails the test
OWNER = {"CKPTFS_JOB_ID": "old", "CKPTFS_NODE": "there"}


class _Announced(Plan):
    """Stops an owner's save at one storage operation until the test lets it continue."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self._wanted = ("", "")

    def stop_at(self, op: str, part: str) -> None:
        """Stop at the next ``op`` with ``part`` in its key."""
        self._wanted = (op, part)

    def begin(self, op: str, key: str) -> Action | None:
        wanted_op, part = self._wanted
        if wanted_op and op == wanted_op and part in key:
            self._wanted = ("", "")
            self._rank.tell("stopped", key=key)
            self._rank.hold("go on")
        return None


# Where an owner's save may be when it is frozen.
STOPS = {
    "begin": ("open_write", "attempt.json"),
    "begun": ("sync", f"{ATTEMPTS}/"),
    "write": ("close", ".distcp"),
    "prepare": ("open_write", ".metadata"),
    "seal": ("create", f"{LOG}/"),
}


def own(rank: Rank) -> object:
    """Claim, commit step_1, and then do what the test says: save, or release."""
    plan = _Announced(rank)
    root = Uri.parse(str(rank.args["run"]))
    storage = FaultyStorage(LocalStorage(root), plan)
    session = start_session(SoloControl(), storage, Place(), write=True)
    run = claim(session, times=SHORT)
    rig.save(session, "step_1", "one", run)
    rank.tell("holding", number=run.generation.number)
    said = rank.hold("do")
    if said["what"] == "release":
        run.release()
        return "released"
    if said["stop"]:
        plan.stop_at(*STOPS[said["stop"]])
    try:
        rig.save(session, "step_2", "late", run)
    except CkptfsError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return "committed"


@contextmanager
def newcomer(run: str, *, node: str = "here", job: str | None = "new") -> Iterator[RunSession]:
    """A session of this process, seen as a job of that name on that node."""
    here = World.solo()
    world = replace(here, node=f"{here.node}/{node}", job_id=None if job is None else f"job:{job}")
    storage = LocalStorage(Uri.parse(run))
    yield start_session(SoloControl(world), storage, Place(), write=True)
    storage.close()


@dataclass
class Held:
    """A run that a living process holds, with step_1 committed in it."""

    run: str
    ranks: Ranks

    def entries(self) -> list[str]:
        """The names in the run log."""
        return sorted(os.listdir(f"{self.run}/{LOG}"))

    def tell(self, what: str, stop: str = "") -> None:
        """Let the owner save or release, and stop in the middle of it."""
        self.ranks.release("do", what=what, stop=stop)

    def end(self) -> Any:
        """What the owner says when it is done."""
        return self.ranks.values()[0]

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has buried it."""
        handle = os.pidfd_open(self.ranks.pid(0))
        self.ranks.kill(0)
        assert select.select([handle], [], [], 120)[0]
        os.close(handle)

    def catalog(self) -> dict[str, str]:
        """The committed names and the save that each shows."""
        with newcomer(self.run) as session:
            view = drive(read_view(), session.storage)
            assert view is not None
            return {seal.name: seal.save_id for seal in list_live(dict([view]))}

    def leftovers(self) -> list[str]:
        """What unfinished saves left: their directories, and what waits in somebody's trash."""
        places = [*Path(self.run, ATTEMPTS).glob("*"), *Path(self.run, TRASH).glob("*/*")]
        return [str(place) for place in places]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """An owner that lives: another job, another node."""
    run = str(tmp_path / "run")
    with launch(own, 1, args={"run": run}, store="none", env=OWNER) as ranks:
        ranks.wait("holding")
        yield Held(run, ranks)


def take(session: RunSession, **how: Any) -> Run:
    """A claim that releases nothing at the end: the caller does."""
    return claim(session, Mode.RESUME, **{"times": ENDLESS, **how})


def test_living_owner_is_named_and_keeps_its_run(held: Held) -> None:
    """A newcomer learns host, pid, job and last commit of the owner, and the owner continues."""
    before = held.entries()
    with newcomer(held.run) as session, pytest.raises(RunBusyError) as caught:
        take(session)
    text = str(caught.value)
    for part in (
        f"host {socket.gethostname()} ",
        f"pid {held.ranks.pid(0)},",
        "job job:old ",
        "last commit step_1",
        held.run,
        'takeover="force"',
    ):
        assert part in text
    assert held.entries() == before, "a refused newcomer wrote into the log"
    held.tell("save")
    assert held.end() == "committed"
    assert set(held.catalog()) == {"step_1", "step_2"}


def test_frozen_owner_loses_the_run_after_still_s_and_is_fenced_when_it_wakes(held: Held) -> None:
    """Only a lease that stood still for still_s is taken; the sleeper's save then changes nothing."""
    held.ranks.freeze(0)
    with newcomer(held.run) as session:
        begun = time.monotonic()
        with take(session, times=SHORT) as run:
            assert time.monotonic() - begun >= SHORT.still_s
            assert run.generation.number == 2
            rig.save(session, "step_3", "three", run)
            before, entries = held.catalog(), held.entries()
            held.ranks.thaw(0)
            held.tell("save")
            ended = held.end()
            assert ended["type"] == "FencedError"
            assert "generation 2" in ended["text"]
            assert f"pid {os.getpid()}" in ended["text"]
            assert held.catalog() == before
            assert held.entries() == entries
            assert not held.leftovers()


@pytest.mark.parametrize("point", STOPS)
def test_owner_frozen_inside_a_save_is_fenced_and_leaves_no_byte(held: Held, point: str) -> None:
    """Wherever its save stood still, it ends in FencedError and the next claim finds the disk clean."""
    held.tell("save", stop=point)
    held.ranks.wait("stopped")
    held.ranks.freeze(0)
    with newcomer(held.run) as session:
        with take(session, times=SHORT) as run:
            rig.save(session, "step_3", "three", run)
            before = held.catalog()
            assert set(before) == {"step_1", "step_3"}
            held.ranks.thaw(0)
            held.ranks.release("go on")
            ended = held.end()
            assert held.catalog() == before
        assert ended["type"] == "FencedError", ended
        with take(session):
            assert held.catalog() == before
            assert not held.leftovers()
    assert not os.path.exists(f"{held.run}/step_2")


def test_released_run_is_free_at_once(held: Held) -> None:
    """After release() no process watches a lease, also with takeover="never"."""
    held.tell("release")
    assert held.end() == "released"
    with newcomer(held.run) as session, take(session, takeover=Takeover.NEVER) as run:
        assert run.generation.number == 2


def test_dead_process_of_the_same_node_is_not_waited_for(held: Held) -> None:
    """A pid that is gone from this very node has no lease to keep."""
    held.kill()
    with newcomer(held.run, node="there") as session, take(session) as run:
        assert run.generation.number == 2


def test_dead_process_of_another_node_is_given_its_lease(held: Held) -> None:
    """A pid says nothing about another node: the newcomer waits until the lease stood still."""
    held.kill()
    with newcomer(held.run, node="elsewhere") as session:
        begun = time.monotonic()
        with take(session, times=SHORT):
            assert time.monotonic() - begun >= SHORT.still_s


def test_living_process_of_the_same_node_is_watched(held: Held) -> None:
    """The same node alone is no reason to take a run from a process that lives."""
    with newcomer(held.run, node="there") as session, pytest.raises(RunBusyError):
        take(session)


def test_same_job_takes_over_at_once(held: Held) -> None:
    """A restart of the same job fences its former self without waiting, from any node."""
    with newcomer(held.run, job="old") as session, take(session) as run:
        assert run.generation.number == 2
        held.tell("save")
        assert held.end()["type"] == "FencedError"


def test_takeover_never_does_not_wait_even_for_a_dead_owner(held: Held) -> None:
    """takeover="never" is RunBusyError at once, be the owner alive or dead."""
    for node in ("here", "there"):
        with newcomer(held.run, node=node) as session, pytest.raises(RunBusyError, match="job:old"):
            take(session, takeover=Takeover.NEVER)
    held.kill()
    with newcomer(held.run, node="there") as session, pytest.raises(RunBusyError, match="job:old"):
        take(session, takeover=Takeover.NEVER)


def test_takeover_force_takes_a_living_owners_run(held: Held) -> None:
    """takeover="force" asks no one; the living owner is fenced at its next save."""
    with newcomer(held.run) as session, take(session, takeover=Takeover.FORCE) as run:
        assert run.generation.number == 2
        rig.save(session, "step_3", "three", run)
        before = held.catalog()
        held.tell("save")
        assert held.end()["type"] == FencedError.__name__
        assert held.catalog() == before
