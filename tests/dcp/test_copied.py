"""Stock checkpoints that a program copies to ``ckptfs+X://``, file by file, in any order."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.generic import rsync
from torch.distributed.checkpoint import FileSystemWriter

import ckptfs
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.errors import CommitConflictError, StorageError
from ckptfs.integrations.fsspec import (
    CheckpointFileSystem,
    FileCheckpoints,
    MemoryCheckpoints,
    arrivals,
)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Each test is a process of its own, as far as ids are agreed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_HERE", arrivals._Process())
        yield


class OwnData:
    """What a planner of somebody else's puts into planner_data."""


class OwnPlanner(dcp.DefaultSavePlanner):
    """A planner with planner_data of a class of its own."""

    def create_global_plan(self, all_plans: Any) -> Any:
        """As torch's, with that class in the metadata."""
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = OwnData()
        return plans, metadata


class OwnNames(FileSystemWriter):
    """Stock's writer, with files in a subfolder or under names of its own."""

    def __init__(self, path: Path, rename: Callable[[str], str]) -> None:
        super().__init__(path)
        self._rename = rename

    def finish(self, metadata: Any, results: Any) -> None:
        """As torch's, once the files have their other names."""
        infos = [result for one in results for result in one]
        for name in {info.storage_data.relative_path for info in infos}:
            target = Path(self.path, self._rename(name))
            target.parent.mkdir(exist_ok=True)
            os.replace(Path(self.path, name), target)
        for info in infos:
            object.__setattr__(
                info.storage_data, "relative_path", self._rename(info.storage_data.relative_path)
            )
        super().finish(metadata, results)


def state(value: float) -> dict[str, Any]:
    """Some tensors."""
    return {"w": torch.full((30, 10), value), "n": torch.tensor(value)}


def loaded(url: str) -> float:
    """The value that a checkpoint was made with, read by stock torch; it is whole."""
    into = state(0.0)
    dcp.load(into, checkpoint_id=url, no_dist=True)
    assert torch.equal(into["w"], torch.full_like(into["w"], float(into["n"])))
    return float(into["n"])


def stock(path: Path, kind: str, value: float = 3.0) -> Path:
    """A checkpoint of stock torch."""
    renames: dict[str, Callable[[str], str]] = {
        "subfolder": lambda name: f"prefix_0/{name}",
        "names": lambda name: name.replace(".distcp", ".bin"),
    }
    if kind in renames:
        writer = OwnNames(path, renames[kind])
        dcp.save(state(value), storage_writer=writer, no_dist=True)
    else:
        planner = OwnPlanner() if kind == "classes" else None
        writer2 = FileSystemWriter(path, single_file_per_rank=False)  # several shards
        dcp.save(state(value), storage_writer=writer2, planner=planner, no_dist=True)
    return path


def files(path: Path) -> list[str]:
    """Names below a directory, sorted."""
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def committed(run: str) -> list[str]:
    """Names of the checkpoints in the log of a run."""
    return [c.uri.name for c in ckptfs.list_checkpoints(run) if c.save_id]


def by_put(source: Path, target: Path) -> None:
    """fs.put of the directory: .metadata comes first."""
    FileCheckpoints().put(f"{source}/", str(target), recursive=True)


def by_cp(source: Path, target: Path) -> None:
    """One file after another, .metadata last."""
    for name in reversed(files(source)):
        FileCheckpoints().put_file(str(source / name), f"{target}/{name}")


def by_rsync(source: Path, target: Path) -> None:
    """fsspec's own rsync, several files at once."""
    rsync(f"file://{source}", f"ckptfs+file://{target}")


def by_rename(source: Path, target: Path) -> None:
    """Temporary names, then renamed, as rsync has it."""
    fs = FileCheckpoints()
    for name in reversed(files(source)):
        home, _, base = f"{target}/{name}".rpartition("/")
        fs.put_file(str(source / name), f"{home}/.{base}.a1B2c3")
        fs.mv(f"{home}/.{base}.a1B2c3", f"{home}/{base}")


COPIES = [by_put, by_cp, by_rsync, by_rename]
Copying = Callable[[Path, Path], None]


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("kind", ["subfolder", "classes", "names"])
def test_what_is_not_recognised_lies_plainly(tmp_path: Path, kind: str, copy: Copying) -> None:
    """Shards in subfolders, planner_data of another class, and files of other names keep their own
    names, byte for byte, whatever copies them; the next owner of the run and its saves leave them alone.
    """
    source, run = stock(tmp_path / "made", kind), tmp_path / "run"
    copy(source, run / "step_3")
    with ckptfs.prepare_run(run) as held:
        ckptfs.save({"w": torch.ones(3)}, run / "step_4", run=held)
    FileCheckpoints().makedirs(f"{run}/step_3", exist_ok=True)
    assert files(run / "step_3") == files(source)
    for name in files(source):
        assert (run / "step_3" / name).read_bytes() == (source / name).read_bytes()
    assert loaded(f"ckptfs+file://{run}/step_3") == loaded(str(run / "step_3")) == 3


@pytest.mark.parametrize("copy", COPIES)
def test_a_whole_stock_save_loads_after_an_owner_came(tmp_path: Path, copy: Copying) -> None:
    """What stock torch wrote with default settings is readable by its URL and by its path after the copy,
    whatever made it, and after the next owner and its save.
    """
    source, run = stock(tmp_path / "made", "stock"), tmp_path / "run"
    copy(source, run / "step_3")
    with ckptfs.prepare_run(run) as held:
        ckptfs.save({"w": torch.ones(3)}, run / "step_4", run=held)
    assert loaded(f"ckptfs+file://{run}/step_3") == loaded(str(run / "step_3")) == 3


@pytest.mark.parametrize("fs_type", [FileCheckpoints, MemoryCheckpoints])
def test_a_whole_stock_save_is_one_commit_in_any_order(
    tmp_path: Path, fs_type: type[CheckpointFileSystem]
) -> None:
    """In every order of its files a stock save that is copied in is committed with its last, and its
    plain names are gone then; before that, each file is under its own name.
    """
    source = stock(tmp_path / "made", "stock")
    fs, bare = fs_type(skip_instance_cache=True), fs_type.target
    assert len(files(source)) == 3
    for number, order in enumerate(itertools.permutations(files(source))):
        run = f"{tmp_path if bare == 'file' else uuid.uuid4().hex}/run{number}"
        for count, name in enumerate(order):
            assert fs.exists(f"{run}/step_3") == bool(count)
            assert committed(f"{bare}://{run}") == []
            fs.pipe(f"{run}/step_3/{name}", (source / name).read_bytes())
        assert committed(f"{bare}://{run}") == ["step_3"]
        assert not [
            n for n in fs.ls(f"{run}/step_3", detail=False) if n.endswith((".distcp", ".tmp"))
        ]
        assert loaded(f"ckptfs+{bare}://{run}/step_3") == 3


def test_a_lone_file_of_that_name_is_visible(tmp_path: Path) -> None:
    """A file that is merely called notes.distcp or __0_0.distcp, and the metadata of one rank, are plain
    files, and stay that through an owner of the run and its save.
    """
    fs, run = FileCheckpoints(), tmp_path / "run"
    names = ("notes.distcp", "__0_0.distcp", ".metadata.tmp", "__0.metadata")
    for name in names:
        fs.pipe(f"{run}/step_1/{name}", b"mine")
        assert fs.cat(f"{run}/step_1/{name}") == b"mine"
    with ckptfs.prepare_run(run) as held:
        ckptfs.save({"w": torch.ones(3)}, run / "step_1", run=held)
    for name in names:
        assert (run / "step_1" / name).read_bytes() == b"mine"
    fs.rm(f"{run}/step_1/notes.distcp")
    assert not fs.exists(f"{run}/step_1/notes.distcp")


def test_half_a_copy_stays_and_the_next_copy_is_whole(tmp_path: Path) -> None:
    """A copy that ended half way is not removed by an owner, and not mixed with the next copy of the
    name, which is committed whole.
    """
    old, new = stock(tmp_path / "old", "stock", 1.0), stock(tmp_path / "new", "stock", 2.0)
    fs, run = FileCheckpoints(), tmp_path / "run"
    half = files(old)[0], files(old)[-1]
    for name in half:
        fs.pipe(f"{run}/step_3/{name}", (old / name).read_bytes())
    ckptfs.prepare_run(run).release()
    for name in half:
        assert (run / "step_3" / name).read_bytes() == (old / name).read_bytes()
    by_put(new, run / "step_3")
    assert loaded(f"{run}/step_3") == 2


def test_a_committed_name_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    """Copying a stock checkpoint onto a committed one is CommitConflictError, by writing and by renaming,
    and the committed one stays whole; once it is removed the copy is committed.
    """
    source, run = stock(tmp_path / "made", "stock", 2.0), tmp_path / "run"
    dcp.save(state(1.0), checkpoint_id=f"ckptfs+file://{run}/step_3", no_dist=True)
    fs = FileCheckpoints()
    before = files(run / "step_3")
    for name in files(source):
        with pytest.raises(CommitConflictError):
            fs.open(f"{run}/step_3/{name}", "wb")
    fs.pipe(f"{run}/mine", b"x")
    with pytest.raises(CommitConflictError):
        fs.mv(f"{run}/mine", f"{run}/step_3/.metadata")
    assert files(run / "step_3") == before
    assert loaded(f"{run}/step_3") == 1
    fs.rm(f"{run}/step_3", recursive=True)
    by_put(source, run / "step_3")
    assert committed(str(run)) == ["step_3"]
    assert loaded(f"{run}/step_3") == 2


def test_a_commit_that_fails_leaves_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the commit of a copy fails, its files stay as they came, with their metadata, nothing is left
    in the control directory, and a warning says why.
    """
    source, run = stock(tmp_path / "made", "stock"), tmp_path / "run"

    def fail(*_: object) -> None:
        raise StorageError("no space")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(SaveAttempt, "_prepare", fail)
        by_put(source, run / "step_3")
    assert "no space" in caplog.text
    assert files(run / "step_3") == files(source)
    ckptfs.prepare_run(run).release()
    assert files(run / "step_3") == files(source)
    assert loaded(f"{run}/step_3") == 3


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["_prepare", "_finish"])
def test_a_kill_in_the_commit_loses_nothing(tmp_path: Path, when: str) -> None:
    """A process that dies in the commit of a copy, before or after the seal, leaves every file that was
    copied in, the metadata under its own or torch's temporary name; after the next owner it is readable.
    """
    source, run = stock(tmp_path / "made", "stock"), tmp_path / "run"

    def die(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveAttempt, when, die)
        patch.setattr(SaveAttempt, "abandon", die)
        with pytest.raises(Killed):
            by_put(source, run / "step_3")
    ckptfs.prepare_run(run).release()
    if not committed(str(run)):
        for name in files(source):
            assert (run / "step_3" / name).read_bytes() == (source / name).read_bytes()
    assert loaded(f"{run}/step_3") == 3


def test_a_stock_copy_with_the_shell_is_never_touched(tmp_path: Path) -> None:
    """``cp -r`` behind our back, then an owner and a save next to it: every file stays."""
    source, run = stock(tmp_path / "made", "stock"), tmp_path / "run"
    ckptfs.save({"w": torch.ones(3)}, run / "step_1")
    shutil.copytree(source, run / "step_3")
    with ckptfs.prepare_run(run) as held:
        ckptfs.save({"w": torch.ones(3)}, run / "step_2", run=held)
    assert files(run / "step_3") == files(source)
