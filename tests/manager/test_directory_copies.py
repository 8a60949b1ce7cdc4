"""Tiers of directories and of parts: drained to a bucket, the disk lost, resumed from the bucket."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch

import ckptfs
from ckptfs.commit.session import Place
from ckptfs.control.control import Control
from ckptfs.errors import CommitConflictError, IncompleteCheckpointError, StateError
from ckptfs.events import CopyCommitted, CopyFailed, Event, Restored
from ckptfs.integrations._support.step_driver import PartSaver, StepDriver, reading_part
from ckptfs.manager.directory_manager import DirectoryManager
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.replication.copier import gather
from ckptfs.storage.registry import open_storage
from ckptfs.testing.memory_object_store import STORES
from ckptfs.testing.world import simulate
from tests.manager.test_directories import files_of, write_files


@pytest.fixture
def bucket() -> Iterator[str]:
    """A run's URI in an object store of its own."""
    name = f"tiers-{uuid.uuid4().hex[:8]}"
    STORES.bucket(name)
    yield f"objects+memory://{name}/run"
    STORES.drop(name)


def trained(step: int) -> dict[str, bytes]:
    """What a framework writes at a step: one file of several blocks, small ones, one in a folder."""
    block = step.to_bytes(4, "big")
    return {"model.bin": block * 700_000, "sub/empty": b"", "sub/config.json": b"{%d}" % step}


def write_part(part: str, path: str) -> None:
    """A group's files."""
    Path(path, "w").write_text(part)


Mode = Literal["sync", "async"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_lost_disk_is_resumed_from_the_bucket_bit_for_bit(
    bucket: str, tmp_path: Path, mode: Mode
) -> None:
    """Saved on a local disk and drained; the disk is lost; the newest comes back from the bucket, what is
    saved from there on follows it there, and retention of either place is its own.
    """
    disk, scratch, events = tmp_path / "disk", tmp_path / "scratch", list[Event]()
    copies = [ckptfs.Copy(bucket, keep=ckptfs.Keep(latest=3))]

    def job() -> DirectoryManager:
        return DirectoryManager(
            disk,
            keep_latest=1,
            copies=copies,
            mode=mode,
            scratch=scratch,
            listeners=[events.append],
        )

    with job() as manager:
        for step in (1, 2):
            manager.save(step, write_files(tmp_path / f"s{step}", trained(step)), consume=True)
        manager.wait()
        assert manager.steps == [2]
    shutil.rmtree(disk)
    with job() as manager:
        with manager.reading() as opened:
            assert opened is not None
            assert (opened.step, opened.uri.full) == (2, f"{bucket}/step_2")
            assert files_of(opened.path) == trained(2)
        with manager.writing(3) as path:
            write_files(Path(path), trained(3))
        manager.wait()
        assert manager.steps == [3]
    with DirectoryManager(bucket, scratch=scratch) as other:
        assert other.steps == [1, 2, 3]
        with other.reading() as opened:
            assert opened is not None
            assert files_of(opened.path) == trained(3)
    told = [event for event in events if isinstance(event, CopyCommitted)]
    assert [event.copy_uri.rsplit("/", 1)[1] for event in told] == ["step_1", "step_2", "step_3"]
    [restored] = [event for event in events if isinstance(event, Restored)]
    assert restored.copy_of == f"file://{disk}"


def test_a_damaged_directory_is_read_from_its_copy(bucket: str, tmp_path: Path) -> None:
    """A file that is missing on the disk is no reason to go back while a copy has all of the step."""
    disk = tmp_path / "disk"
    with DirectoryManager(disk, copies=[bucket]) as manager:
        manager.save(1, write_files(tmp_path / "s1", trained(1)))
        manager.wait()
    (disk / "step_1/model.bin").unlink()
    both = DirectoryManager(disk, copies=[bucket], scratch=tmp_path / "scratch")
    with both, both.reading() as opened:
        assert opened is not None
        assert opened.uri.full == f"{bucket}/step_1"
        assert files_of(opened.path) == trained(1)
    with DirectoryManager(disk) as alone, pytest.raises(IncompleteCheckpointError):
        alone.reading().__enter__()


def test_a_step_that_comes_again_replaces_the_one_in_the_copy(bucket: str, tmp_path: Path) -> None:
    """The job went back, and its steps come again: the copy has what was committed last under each name."""
    disk, events = tmp_path / "disk", list[Event]()
    with DirectoryManager(disk, copies=[bucket]) as manager:
        for step in (1, 2, 3):
            manager.save(step, write_files(tmp_path / f"s{step}", trained(step)))
    with DirectoryManager(disk, copies=[bucket], listeners=[events.append]) as manager:
        with manager.reading(1) as opened:
            assert opened is not None
        manager.save(2, write_files(tmp_path / "again", trained(20)))
        manager.wait()
    assert [e for e in events if isinstance(e, CopyFailed)] == []
    with DirectoryManager(bucket, scratch=tmp_path / "scratch") as other:
        assert other.steps == [1, 3, 2]
        with other.reading() as opened:
            assert opened is not None
            assert files_of(opened.path) == trained(20)


def test_disks_of_two_nodes_become_one_directory_in_the_copy(tmp_path: Path) -> None:
    """Each node holds the files of its rank; the copy has them all, and every new node reads them."""

    def rank(control: Control) -> None:
        node = control.world.node
        run, disk = str(tmp_path / "run"), str(tmp_path / node / "run")
        ground = RunHandle(
            Where(run, Place({}, "node")), control=control, storage=open_storage(disk)
        )
        with DirectoryManager(
            run, ground=ground, copies=[tmp_path / "shared"], scratch=tmp_path / "scratch"
        ) as manager:
            source = tmp_path / node / "source"
            manager.save(1, write_files(source, {f"{node}.bin": node.encode() * 100_000}))
            manager.wait()

    for end in simulate(2, rank, nodes=["a", "b"]):
        end.get()
    with DirectoryManager(tmp_path / "shared") as other, other.reading() as opened:
        assert opened is not None
        assert files_of(opened.path) == {f"{n}.bin": n.encode() * 100_000 for n in "ab"}


def test_parts_and_what_lies_beside_them_are_drained_and_resumed(
    bucket: str, tmp_path: Path
) -> None:
    """A driver's step of two groups is one checkpoint in the bucket too; after the loss of the disk the
    driver gets its own files, and each group finds its part where the driver's came from.
    """
    disk, saver = tmp_path / "disk", PartSaver(is_async=False)
    first = StepDriver(str(disk), name="step_{N}", copies=[bucket])
    with first, first.saving(1, ["actor", "critic"]) as saving:
        for part in ("actor", "critic"):
            saver.save(saving.part(part), partial(write_part, part))
        Path(saving.path, "data.pt").write_text("d1")
    shutil.rmtree(disk)
    with StepDriver(str(disk), name="step_{N}", copies=[bucket]) as driver:
        assert driver.fetch(lambda step: str(tmp_path / f"got{step}")) == 1
        source = driver.fetched_from(1)
        assert source is not None
        assert source.full == f"{bucket}/step_1"
        assert driver.fetched_from(2) is None
    assert [p.name for p in (tmp_path / "got1").iterdir()] == ["data.pt"]
    for part in ("actor", "critic"):
        with reading_part(source / part, Place()) as (path, _):
            assert path is not None
            assert Path(path, "w").read_text() == part


def test_parts_of_tensors_are_drained_again_after_a_try_that_failed(tmp_path: Path) -> None:
    """The first try of a copy dies at its commit; the next makes it, with every part."""
    disk, copy = tmp_path / "disk", f"faults+file://{tmp_path}/copy"
    state, events = {"w": torch.arange(300_000.0)}, list[Event]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTFS_TEST_FAULT", "fail=ENOSPC:write:*.distcp:2")
        with ckptfs.CheckpointManager(disk, copies=[copy], listeners=[events.append]) as manager:
            ticket = manager.begin(1, parts=["actor", "critic"])
            ticket.commit([ckptfs.save(state, ticket.part(p)) for p in ("actor", "critic")])
            manager.wait()
            manager.wait()
    assert len([e for e in events if isinstance(e, CopyFailed)]) == 1
    for part in ("actor", "critic"):
        loaded = {"w": torch.zeros(300_000)}
        assert ckptfs.load(loaded, tmp_path / "copy/step_1" / part).verified
        assert torch.equal(loaded["w"], state["w"])


def test_gather_takes_directories_and_wholes_of_parts(tmp_path: Path) -> None:
    """As ``ckptfs cp`` does; a name that is taken stays."""
    disk = tmp_path / "disk"
    with DirectoryManager(disk) as manager:
        manager.save(1, write_files(tmp_path / "s1", trained(1)))
    gather(disk / "step_1", tmp_path / "kept/one")
    assert files_of(tmp_path / "kept/one") == trained(1)
    with pytest.raises(CommitConflictError):
        gather(disk / "step_1", tmp_path / "kept/one")
    run, state = tmp_path / "run", {"w": torch.arange(300_000.0)}
    with ckptfs.CheckpointManager(run) as states:
        ticket = states.begin(1, parts=["actor"])
        ticket.commit([ckptfs.save(state, ticket.part("actor"))])
    result = gather(run / "step_1", tmp_path / "kept/whole")
    assert result.total.payload_bytes > 1_200_000
    loaded = {"w": torch.zeros(300_000)}
    ckptfs.load(loaded, tmp_path / "kept/whole/actor")
    assert torch.equal(loaded["w"], state["w"])


def test_a_place_is_given_once(tmp_path: Path) -> None:
    """The run is no copy of itself."""
    with pytest.raises(StateError, match="a place of its own"):
        DirectoryManager(tmp_path, copies=[tmp_path])
