"""Two users of one group share a run that both may write to: neither reaches what is the other's alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.errors import CkptfsError
from ckptfs.replication.copier import copy_to
from ckptfs.tools.collecting import collect
from tests.hostile.place import picture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")

GROUP, OWNER, OTHER = 54321, 54322, 54323
LIMIT_S = 120  # of one child; a FIFO would hold it forever

# Children of a process without threads: one that is forked next to the threads of other tests may find a
# lock held forever.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "ckptfs.dcp.api", __name__])


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. error: the class of what it raised and whether that is ckptfs's own; None: nothing."""

    error: str | None
    typed: bool


def as_user(user: int, body: Callable[[], object]) -> Ended:
    """Run ``body``, which can be pickled, in a child that is this user, in the group that both are in."""
    receiving, sending = PROCESSES.Pipe(duplex=False)
    with receiving:
        child = PROCESSES.Process(target=_become, args=(user, body, sending))
        child.start()
        sending.close()  # so that a child that dies without an answer is seen
        try:
            ended = receiving.recv()
        except EOFError:
            ended = None
        child.join()
    assert isinstance(ended, Ended), f"no answer: it ended with {child.exitcode}"
    return ended


def _become(user: int, body: Callable[[], object], sending: Connection) -> None:
    ended = Ended("did not come so far", typed=False)
    try:
        signal.alarm(LIMIT_S)
        os.setgroups([])
        os.setgid(GROUP)
        os.setuid(user)
        os.umask(0o002)
        body()
        ended = Ended(None, typed=True)
    except BaseException as error:  # noqa: BLE001 - passed to the parent
        ended = Ended(f"{type(error).__name__}: {error}", isinstance(error, CkptfsError))
    finally:
        sending.send(ended)


@dataclass(frozen=True, slots=True)
class Shared:
    """run: writable for the group, of OWNER. private: OWNER's alone. ``beside``: anybody's."""

    run: Path
    private: Path
    beside: Path


@pytest.fixture
def shared() -> Iterator[Shared]:
    """A run with one checkpoint of OWNER's."""
    top = Path(tempfile.mkdtemp(prefix="two-users-"))
    top.chmod(0o755)
    run, private, beside = top / "run", top / "private", top / "beside"
    for path, mode in ((run, 0o2775), (private, 0o700), (beside, 0o2777)):
        path.mkdir()
        os.chown(path, OWNER, GROUP)
        path.chmod(mode)
    (private / "Documents").mkdir()
    (private / "Documents" / "thesis").write_text("weeks of work")
    for path in (private / "Documents", private / "Documents" / "thesis"):
        os.chown(path, OWNER, GROUP)
    try:
        assert as_user(OWNER, partial(saves, run, 1)) == Ended(None, typed=True)
        yield Shared(run, private, beside)
    finally:
        shutil.rmtree(top)


def saves(run: Path, step: int) -> None:
    """Continue the run, as a job does."""
    with ckptfs.prepare_run(run, takeover="force") as held:
        ckptfs.save({"w": torch.full((4,), float(step))}, run / f"step_{step}", run=held)


def loads(run: Path, step: int) -> None:
    """AssertionError where it is not what was saved."""
    state = {"w": torch.zeros(4)}
    ckptfs.load(state, run / f"step_{step}")
    assert torch.equal(state["w"], torch.full((4,), float(step)))


def fifo(path: Path) -> None:
    """In the place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path, target: Path) -> None:
    """In the place of a directory, which is moved aside."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}-aside"))
    path.symlink_to(target)


PLANTS: dict[str, Callable[[Shared], None]] = {
    "the trash is a link": lambda on: link(on.run / ".ckptfs" / "trash", on.private),
    "attempts are a link": lambda on: link(on.run / ".ckptfs" / "attempts", on.private),
    "the log is a link": lambda on: link(on.run / ".ckptfs" / "log", on.private),
    "the next step is a link": lambda on: link(on.run / "step_2", on.private),
    "the lease is a FIFO": lambda on: fifo(on.run / ".ckptfs" / "lease"),
    "the domain is a FIFO": lambda on: fifo(on.run / ".ckptfs" / "domain"),
    "the next entry is a FIFO": lambda on: os.mkfifo(
        on.run / ".ckptfs" / "log" / f"{len(list((on.run / '.ckptfs' / 'log').iterdir())):08d}"
    ),
    "the domain is a link": lambda on: link(
        on.run / ".ckptfs" / "domain", on.private / "Documents" / "thesis"
    ),
    "a checkpoint holds a link": lambda on: link(
        on.run / "step_1" / "config.json", on.private / "Documents" / "thesis"
    ),
    "a name is no text": lambda on: os.mkdir(os.path.join(os.fsencode(on.run), b"step_\xff\x1b")),
}


def everything(on: Shared, step: int) -> list[Callable[[], object]]:
    """What the owner of the private directory does with the run."""
    return [
        partial(ckptfs.latest, on.run),
        partial(loads, on.run, 1),
        partial(saves, on.run, step),
        partial(collect, on.run, 0.0),
        partial(copy_to, on.run / "step_1", on.beside / f"copy_{step}" / "step_1"),
    ]


def puts(plant: str, on: Shared) -> None:
    """One of PLANTS."""
    PLANTS[plant](on)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_another_user_plants_leads_to_nothing_of_ones_own(shared: Shared, plant: str) -> None:
    """OTHER may write to the run and not even list the private directory of OWNER; whatever is put into the
    run, OWNER's and root's own commands touch nothing there, carry nothing away, wait for no one and end
    with a typed error or as they should.
    """
    before = picture(shared.private)
    planted = as_user(OTHER, partial(puts, plant, shared))
    assert planted.error is None, planted.error
    for step, user in ((2, OWNER), (3, 0)):
        for does in everything(shared, step):
            ended = as_user(user, does)
            assert ended.typed, ended.error
    assert picture(shared.private) == before
    carried = [p for p in shared.beside.rglob("*") if p.is_file()]
    assert all(b"weeks of work" not in path.read_bytes() for path in carried)


def test_the_second_user_goes_on_and_the_first_one_after_that(shared: Shared) -> None:
    """What has nothing planted in it is shared as before: each loads what the other saved."""
    for step, user in ((2, OTHER), (3, OWNER)):
        for does in (saves, loads):
            assert as_user(user, partial(does, shared.run, step)) == Ended(None, typed=True)
    assert as_user(OTHER, partial(loads, shared.run, 3)) == Ended(None, typed=True)


def test_what_a_group_may_not_write_stays(shared: Shared) -> None:
    """A run without the group's right to write is read by OTHER, and refused by a typed error."""
    for path in (shared.run, *shared.run.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            path.chmod(path.stat().st_mode & ~0o022)
    before = picture(shared.run)
    assert as_user(OTHER, partial(loads, shared.run, 1)) == Ended(None, typed=True)
    refused = as_user(OTHER, partial(saves, shared.run, 2))
    assert refused.typed
    assert refused.error is not None
    assert "AccessError" in refused.error
    assert picture(shared.run) == before
