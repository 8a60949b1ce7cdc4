"""Single files with names and an end that a framework decides: order, failures, and what is never removed."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptfs.dcp.object_file import copy_file, read_object, write_object
from ckptfs.errors import IntegrityError, NoSpaceError, NotFoundError
from ckptfs.integrations._support.object_files import ObjectFiles, written_before
from ckptfs.storage import registry
from ckptfs.storage.base import Storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Hold, Plan
from ckptfs.uri import Uri

Plant = Callable[..., Plan]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Puts faults around every storage that is opened from then on."""
    held: list[Hold] = []

    def planted(*faults: Fault) -> Plan:
        plan, choose = Plan(list(faults)), registry._factory
        held.extend(f.action for f in faults if isinstance(f.action, Hold))

        def chosen(uri: Uri) -> registry.Factory:
            factory = choose(uri)

            def opened(place: Uri, options: Mapping[str, Any]) -> Storage:
                return FaultyStorage(factory(place, options), plan)

            return opened

        monkeypatch.setattr(registry, "_factory", chosen)
        return plan

    yield planted
    for hold in held:
        hold.release.set()


def full_at(op: str, key: str, nth: int | None = 1) -> Fault:
    """No space at that operation."""
    return Fault(op, key, nth, Fail(OSError(errno.ENOSPC, "no space left")))


def names(path: Path) -> list[str]:
    """What a person sees there; hidden files too."""
    return sorted(found.name for found in path.iterdir())


DIES = """
import sys, torch
from tests.faults import victim
victim.install()
from ckptfs.integrations._support.object_files import ObjectFiles
ObjectFiles().save({"w": torch.zeros(1 << 18)}, sys.argv[1])
"""


def killed_before_its_file_has_a_name(target: Path) -> Path:
    """What a process leaves that is killed (SIGKILL) when all is written but the name."""
    before = set(names(target.parent))
    environment = {**os.environ, "CKPTFS_TEST_FAULT": "kill-before:close:*:1"}
    ended = subprocess.run([sys.executable, "-c", DIES, str(target)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = set(names(target.parent)) - before
    assert left.startswith(".partial-")
    assert (target.parent / left).stat().st_size > 1 << 20
    return target.parent / left


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path, mode: str) -> None:
    """What its dead writers left goes before the save, what has lain for a day after it; that of a living
    writer, of another machine and what bears no such name stay.
    """
    left = killed_before_its_file_has_a_name(tmp_path / "last.ckpt")
    living = registry.open_storage(Uri.parse(tmp_path)).open_write("other.ckpt")
    (mine,) = (name for name in names(tmp_path) if f"{os.getpid():08x}" in name)
    elsewhere = f".partial-{'0' * 12}{left.name[21:]}"
    old = f".partial-{'0' * 16}"
    stays = ["notes", ".partial-notes", f".partial-{'1' * 16}", elsewhere, mine]
    for name in (*stays, old):
        (tmp_path / name).touch()
    os.utime(tmp_path / old, (time.time() - 2 * 86400,) * 2)
    files = ObjectFiles(mode=mode)
    files.save({"n": 1}, tmp_path / "next.ckpt")
    files.close()
    assert names(tmp_path) == sorted([*stays, "next.ckpt"])
    living.close()
    assert (tmp_path / "other.ckpt").exists()


def test_a_full_disk_gets_the_space_of_a_killed_save_first(tmp_path: Path, plant: Plant) -> None:
    """What it left goes before anything is written: the save may need that space."""
    left = killed_before_its_file_has_a_name(tmp_path / "last.ckpt")
    plant(full_at("open_write", "*"))
    files = ObjectFiles()
    with pytest.raises(NoSpaceError):
        files.save({"n": 1}, tmp_path / "last.ckpt")
    assert not left.exists()
    files.close()


def test_a_file_is_removed_once_what_replaces_it_is_committed(tmp_path: Path, plant: Plant) -> None:
    """While the new file is on its way the old one is there; afterwards only the new one."""
    hold = Hold()
    plant(Fault("close", "b", 1, hold))
    changed: list[str] = []
    files = ObjectFiles(mode="async", changed=changed.append)
    files.save({"n": 1}, tmp_path / "a")
    files.save({"n": 2}, tmp_path / "b")
    files.remove(tmp_path / "a")
    assert hold.reached.wait(120)
    assert (tmp_path / "a").exists()
    hold.release.set()
    files.close()
    assert names(tmp_path) == ["b"]
    assert changed == [f"{tmp_path}/{name}" for name in "aba"]


def test_a_removal_that_waits_comes_with_the_next_commit_or_not_at_all(
    tmp_path: Path, plant: Plant
) -> None:
    """After a failed save the old file stays; the next committed one lets it go; a name that is saved
    again stays.
    """
    plant(full_at("close", "b"))
    files = ObjectFiles(mode="async", max_in_flight=9)
    for name in ("a", "z", "b"):
        files.save({"n": 1}, tmp_path / name)
    files.remove(tmp_path / "a")
    files.remove(tmp_path / "z")
    with pytest.raises(NoSpaceError):
        files.close()
    assert names(tmp_path) == ["a", "z"]
    files.save({"n": 3}, tmp_path / "z")
    files.close()
    assert names(tmp_path) == ["z"]


def test_an_asynchronous_failure_is_raised_by_the_next_call_once(
    tmp_path: Path, plant: Plant
) -> None:
    """The call after it raises, saves nothing, and clears it; the one after that saves. What failed
    with it is reported too.
    """
    hold = Hold()  # until both were called: the second call would raise what failed before it
    plant(Fault("open_write", "a", 1, hold), full_at("close", "[ab]", None))
    files = ObjectFiles(mode="async")
    files.save({"n": 1}, tmp_path / "a")
    files.save({"n": 1}, tmp_path / "b")
    hold.release.set()
    with pytest.raises(NoSpaceError, match="/a") as caught:
        files.wait()
    assert "another save failed" in caught.value.__notes__[0]
    files.save({"n": 1}, tmp_path / "b")
    with pytest.raises(NoSpaceError, match="/b"):
        files.close()
    files.save({"n": 2}, tmp_path / "c")
    files.close()
    assert names(tmp_path) == ["c"]


def test_an_asynchronous_save_holds_the_state_of_the_call(tmp_path: Path, plant: Plant) -> None:
    """Tensors and anything else may be changed when the call returns."""
    hold = Hold()
    plant(Fault("open_write", "a", 1, hold))
    files, state = ObjectFiles(mode="async"), {"t": torch.zeros(3), "more": {"n": 1}}
    files.save(state, tmp_path / "a")
    state["t"].add_(1)  # type: ignore[attr-defined]
    state["more"]["n"] = 2  # type: ignore[index]
    hold.release.set()
    loaded = files.load(tmp_path / "a")
    assert (loaded["t"].tolist(), loaded["more"]) == ([0, 0, 0], {"n": 1})


def test_strangers_and_what_was_loaded_stay(tmp_path: Path) -> None:
    """Removed is what this object wrote, and what an earlier process did, once something was saved
    with it; not what was loaded, by whatever name, and not what no record has.
    """
    for name in ("stranger", "before", "elsewhere/before", "start"):
        write_object({}, Uri.parse(tmp_path / name))
    (tmp_path / "link").symlink_to("start")
    files = pickle.loads(pickle.dumps(ObjectFiles()))
    files.load(tmp_path / "link")
    files.adopt([tmp_path / "before", tmp_path / "elsewhere/before", tmp_path / "start", "s3:/x"])
    files.remove(tmp_path / "before")
    assert (tmp_path / "before").exists()
    files.save({}, tmp_path / "mine")
    for name in ("stranger", "before", "elsewhere/before", "start", "link", "mine"):
        files.remove(tmp_path / name)
    assert names(tmp_path) == ["elsewhere", "link", "start", "stranger"]
    assert names(tmp_path / "elsewhere") == ["before"]


def test_a_run_that_goes_on_removes_what_its_checkpoint_remembers(tmp_path: Path) -> None:
    """Except the file that somebody else has loaded for it, and what a link to that names."""
    for name in ("best", "kth", "start"):
        write_object({}, Uri.parse(tmp_path / name))
    (tmp_path / "last").symlink_to("start")
    state = {
        "best_model_path": str(tmp_path / "start"),
        "best_k_models": {str(tmp_path / "best"): 1.0},
        "kth_best_model_path": str(tmp_path / "kth"),
        "last_model_path": "",
    }
    files = ObjectFiles()
    files.adopt(written_before({"callbacks": {"ModelCheckpoint": state, "other": {}}}))
    files.loaded(Uri.parse(tmp_path / "last"))
    files.save({}, tmp_path / "new")
    for name in ("best", "kth", "start", "last"):
        files.remove(tmp_path / name)
    assert names(tmp_path) == ["last", "new", "start"]
    assert written_before([]) == written_before({"callbacks": None}) == []


def test_a_removal_that_fails_is_tried_again_and_fails_no_save(
    tmp_path: Path, plant: Plant
) -> None:
    """The save that comes after it is committed, and then the file goes."""
    plant(Fault("remove", "a", 1, Fail(OSError(errno.EIO, "broken"))))
    files = ObjectFiles()
    for name in ("a", "b"):
        files.save({}, tmp_path / name)
    files.remove(tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]
    files.save({}, tmp_path / "c")
    assert names(tmp_path) == ["b", "c"]


@pytest.mark.parametrize("nth", [1, 2, 5, 9])
def test_a_write_that_fails_anywhere_is_its_own_error(
    tmp_path: Path, plant: Plant, nth: int
) -> None:
    """Not torch's "unexpected pos", and the file that was there stays."""
    target = Uri.parse(tmp_path / "a")
    write_object({"n": 1}, target)
    plant(full_at("write", "a", nth))
    with pytest.raises(NoSpaceError):
        write_object({"t": torch.zeros(99)}, target)
    assert names(tmp_path) == ["a"]
    assert read_object(target) == {"n": 1}


@pytest.mark.parametrize("place", ["file", "memory"])
def test_what_is_written_is_what_torch_writes(tmp_path: Path, place: str) -> None:
    """Streamed, read back, and copied out, byte for byte what torch.save makes of it."""
    state: dict[str, Any] = {"t": torch.arange(1000.0), "text": "x"}
    root = str(tmp_path) if place == "file" else f"memory://{tmp_path.name}"
    target = Uri.parse(f"{root}/deep/down/a")
    write_object(state, target)
    copy_file(target, str(tmp_path / "copy"))
    loaded = torch.load(tmp_path / "copy")
    assert torch.equal(loaded["t"], state["t"])
    assert torch.equal(read_object(target, weights_only=True)["t"], state["t"])
    with pytest.raises(NotFoundError):
        read_object(Uri.parse(f"{root}/b"))
    (tmp_path / "copy").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(IntegrityError, match="copy"):
        read_object(Uri.parse(tmp_path / "copy"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_of_links_only_those_between_files_of_the_run_are_removed(
    tmp_path: Path, mode: str
) -> None:
    """A link that leads elsewhere is somebody's own; so is one in a directory that nothing was saved into.
    What a link leads to stays, and a link that the run was resumed from.
    """
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    files = ObjectFiles(mode=mode)
    files.save({"n": 1}, run / "a.ckpt")
    for name, target in (("out", other / "x"), ("in", "a.ckpt"), ("broken", "b.ckpt")):
        (run / name).symlink_to(target)
    (run / "resumed").symlink_to("a.ckpt")
    (other / "link").symlink_to(run / "a.ckpt")
    files.wait()
    files.load(run / "resumed")
    for path in (run / "out", run / "in", run / "broken", run / "resumed", other / "link"):
        files.remove(path)
    files.close()
    assert sorted(os.listdir(run)) == ["a.ckpt", "out", "resumed"]
    assert os.listdir(other) == ["link"]
