"""A link that somebody put into a run leads no save, claim, delete or gc out of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.commit.log.entries import GENESIS
from ckptfs.commit.ownership.recovery import encode_record
from ckptfs.commit.paths import ATTEMPTS, CONTROL, LOG, TMP, TRASH
from ckptfs.errors import CkptfsError, CollectiveError, SymlinkError
from ckptfs.tools.collecting import collect, look_for_debris
from ckptfs.tools.debris import Debris, Fate
from ckptfs.uri import Uri

NAMES = ("Documents", "20251122T101124-8d2008231d0d")


def state(value: int = 1) -> dict[str, torch.Tensor]:
    """Another one for each value."""
    return {"weight": torch.full((4, 4), float(value))}


def picture(top: Path) -> str:
    """A digest of everything below: names, kinds, modes, bytes, targets of links."""
    digest = hashlib.sha256()
    for path in sorted(top.rglob("*")):
        digest.update(f"{path.relative_to(top)} {path.lstat().st_mode}".encode())
        digest.update(os.readlink(path).encode() if path.is_symlink() else b"")
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, and every directory of the run's own."""
    run = tmp_path / "run"
    with ckptfs.prepare_run(run) as held:
        ckptfs.save(state(1), run / "step_1", run=held)
        ckptfs.save(state(2), run / "step_2", run=held)
    return run


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's directory, with names that a run's own directories have as well."""
    victim = tmp_path / "victim"
    for name in NAMES:
        (victim / name / name).mkdir(parents=True)
        (victim / name / name / "precious").write_text("weeks of work")
    (victim / "secret.txt").write_text("secret")
    (victim / "20261122T101124-8d2008231d0d").write_text("the name of an entry on its way")
    return victim


def linked(run: Path, key: str, victim: Path) -> None:
    """A link in the place of a directory of the run; what was there is now next to the run."""
    place = run / key
    if place.exists():
        place.rename(run.parent / "aside")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(victim)


def claims(run: Path) -> None:
    """As a job that starts."""
    with ckptfs.prepare_run(run):
        pass


def replaces(run: Path) -> None:
    """A plain save over a checkpoint."""
    ckptfs.save(state(3), run / "step_2", if_exists="replace")


def goes_on(run: Path) -> None:
    """As a job that resumes."""
    weights = state(0)
    with ckptfs.CheckpointManager(run, keep_latest=1) as manager:
        manager.restore(weights)
        manager.save(3, weights)


def cleans(run: Path) -> None:
    """``ckptfs gc --delete``."""
    collect(run, 0.0)


def name_of(found: ckptfs.Checkpoint | None) -> str:
    """The last component."""
    assert found is not None
    return Uri.parse(found.uri).name


WRITERS = [claims, replaces, goes_on, cleans]
PLACES = [
    CONTROL,
    LOG,
    TMP,
    ATTEMPTS,
    TRASH,
    f"{TRASH}/1-x",
    f"{TRASH}/x",
    f"{ATTEMPTS}/{NAMES[1]}",
]


def is_of(error: CkptfsError, kind: type[CkptfsError]) -> bool:
    """Whether it is that error, or all ranks failed with it."""
    return isinstance(error, kind) or (isinstance(error, CollectiveError) and error.all_are(kind))


@pytest.mark.parametrize("writes", WRITERS)
@pytest.mark.parametrize("key", PLACES)
def test_a_link_among_the_runs_own_directories_is_refused_by_name(
    run: Path, victim: Path, key: str, writes: Callable[[Path], None]
) -> None:
    """Claiming, replacing, continuing and gc name the link, and neither it nor the log nor what is behind
    it has changed.
    """
    linked(run, key, victim)
    before, mine = picture(victim), picture(run)
    with pytest.raises(CkptfsError) as caught:
        writes(run)
    assert is_of(caught.value, SymlinkError)
    assert key in str(caught.value)
    assert picture(victim) == before
    assert picture(run) == mine


@pytest.mark.parametrize("folder", [CONTROL, LOG, TMP, ATTEMPTS, TRASH])
def test_a_link_into_another_run_changes_nothing_there(
    run: Path, tmp_path: Path, folder: str
) -> None:
    """No fence lands in another run's log, and its save under way is not deleted."""
    other = tmp_path / "other"
    ckptfs.save(state(1), other / "step_1")
    attempt = other / ATTEMPTS / NAMES[1] / NAMES[1]
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_bytes(encode_record(NAMES[1], "step_9", GENESIS))
    (other / TRASH).mkdir(exist_ok=True)
    linked(run, folder, other / folder)
    before = picture(other)
    for writes in WRITERS:
        with pytest.raises(CkptfsError):
            writes(run)
    assert picture(other) == before


def test_a_save_without_a_run_goes_through_no_link(run: Path, victim: Path) -> None:
    """Neither does a plain save, nor what it removes after it failed."""
    for key in (CONTROL, LOG, TMP, ATTEMPTS):
        linked(run, key, victim)
        before = picture(victim)
        with pytest.raises(CkptfsError) as caught:
            ckptfs.save(state(3), run / "step_3")
        assert is_of(caught.value, SymlinkError)
        assert picture(victim) == before
        (run / key).unlink()
        (run.parent / "aside").rename(run / key)
    assert name_of(ckptfs.latest(run)) == "step_2"


def test_a_run_that_is_a_link_itself_stays_fine(run: Path, tmp_path: Path) -> None:
    """The root of a run may be reached through links, as before."""
    (tmp_path / "alias").symlink_to(run)
    for writes in (claims, replaces, goes_on, cleans):
        writes(tmp_path / "alias")
    assert name_of(ckptfs.latest(run)) == "step_3"


NO_NAMES = ["../../victim", "/etc", "a/b", "", ".", CONTROL, "_data", "a\nb", ".ckptfs/log"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_an_attempt_that_names_no_checkpoint_is_passed_by(
    run: Path, victim: Path, name: str
) -> None:
    """attempt.json names one component. Anything else names nothing: neither is what it leads to touched,
    nor does it keep anybody from the run.
    """
    made_up = run / ATTEMPTS / "log" / "log"
    made_up.mkdir(parents=True)
    (made_up / "attempt.json").write_bytes(encode_record("log", name, GENESIS))
    before = picture(victim)
    assert name_of(ckptfs.latest(run)) == "step_2"
    (found,) = look_for_debris(run, 0.0).found
    assert found.debris is Debris.ATTEMPT
    for writes in (claims, replaces, goes_on, cleans):
        writes(run)
    assert picture(victim) == before
    assert (run / CONTROL / "domain").exists()
    assert name_of(ckptfs.latest(run)) == "step_3"


def test_an_attempt_of_a_step_that_was_linked_back_is_left_behind_the_link(
    run: Path, victim: Path
) -> None:
    """A step was moved away and linked back, and an attempt names it: the claim continues, and what has the
    attempt's name behind the link stays.
    """
    step = run / "step_9"
    step.symlink_to(victim)
    attempt = run / ATTEMPTS / NAMES[0] / NAMES[0]
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_bytes(encode_record(NAMES[0], "step_9", GENESIS))
    before = picture(victim)
    claims(run)
    assert picture(victim) == before
    assert not attempt.exists()


def dir_save(path: Path) -> None:
    """Plain names, as somebody else has there."""
    with ckptfs.checkpoint_dir(path, "write") as directory:
        Path(directory, "secret.txt").write_text("overwritten")


def plain_save(path: Path) -> None:
    """A save without a run."""
    ckptfs.save(state(7), path)


def replacing_save(path: Path) -> None:
    """A save that may replace."""
    ckptfs.save(state(7), path, if_exists="replace")


@pytest.mark.parametrize("saves", [plain_save, replacing_save, dir_save])
def test_a_save_to_a_name_that_is_a_link_does_not_write_through_it(
    run: Path, victim: Path, saves: Callable[[Path], None]
) -> None:
    """It is refused with the link's name and commits nothing; other names are saved as before."""
    (run / "step_3").symlink_to(victim)
    before, log = picture(victim), picture(run / LOG)
    with pytest.raises(SymlinkError, match="step_3 is a symbolic link"):
        saves(run / "step_3")
    assert picture(victim) == before
    if saves is not replacing_save:  # that one claims the run for the call, and releases it
        assert picture(run / LOG) == log
    assert list((run / ATTEMPTS).iterdir()) == []
    ckptfs.save(state(4), run / "step_4")
    assert name_of(ckptfs.latest(run)) == "step_4"


def test_a_step_that_was_moved_and_linked_back_is_loaded_and_the_run_goes_on(
    run: Path, tmp_path: Path
) -> None:
    """Loading goes through the link, claiming and saving work; only a save to that name is refused."""
    moved = tmp_path / "elsewhere" / "step_2"
    moved.parent.mkdir()
    (run / "step_2").rename(moved)
    (run / "step_2").symlink_to(moved)
    before = picture(moved)
    with ckptfs.CheckpointManager(run) as manager:
        weights = state(0)
        restored = manager.restore(weights)
        assert restored is not None
        assert torch.equal(weights["weight"], state(2)["weight"])
        manager.save(3, weights)
        with pytest.raises(CkptfsError):
            manager.save(2, weights)
    ckptfs.load(weights, run / "step_2")
    claims(run)
    assert name_of(ckptfs.latest(run)) == "step_3"
    assert picture(moved) == before


def test_gc_shows_a_link_for_what_it_is(run: Path, victim: Path) -> None:
    """The dry run lists the link and nothing behind it; without a log it can only name it."""
    for key in (CONTROL, LOG):
        linked(run, key, victim)
        with pytest.raises(SymlinkError, match=f"{key} is a symbolic link"):
            look_for_debris(run, 0.0)
        (run / key).unlink()
        (run.parent / "aside").rename(run / key)
    for key in (TMP, ATTEMPTS, TRASH, f"{TRASH}/1-x", f"{ATTEMPTS}/{NAMES[1]}"):
        linked(run, key, victim)
        found = look_for_debris(run, 0.0).found
        assert [(one.debris, one.name, one.fate) for one in found] == [
            (Debris.LINK, key, Fate.STAYS)
        ]
        (run / key).unlink()
        if (run.parent / "aside").exists():
            (run.parent / "aside").rename(run / key)


def test_links_are_found_by_whoever_lists(run: Path, victim: Path) -> None:
    """ls works with an attempt that is a link."""
    linked(run, f"{ATTEMPTS}/{NAMES[1]}", victim)
    assert [name_of(one) for one in ckptfs.list_checkpoints(run)] == ["step_1", "step_2"]
