"""Files that arrive one by one and become one commit, as the fsspec protocols hand them over."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

import ckptfs
from ckptfs import _torch
from ckptfs.commit.decisions import may_fence
from ckptfs.commit.delete.delete_checkpoint import delete_checkpoint
from ckptfs.commit.log.append import append
from ckptfs.commit.log.entries import Fence, FenceMode, Generation, Stamp
from ckptfs.commit.operations import drive
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.errors import (
    CkptfsError,
    CommitConflictError,
    FencedError,
    IncompleteCheckpointError,
    NotFoundError,
    StateError,
    StorageError,
)
from ckptfs.integrations.fsspec import (
    CheckpointFileSystem,
    FileCheckpoints,
    MemoryCheckpoints,
    arrivals,
)
from ckptfs.replication.copier import copy_to
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fault, FaultyStorage, Hold, Plan
from ckptfs.uri import Uri

SHARDS = ("__0_0.distcp", "__1_0.distcp")
LENGTH = 16


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Each test is a process of its own, as far as ids are agreed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_HERE", arrivals._Process())
        yield


def metadata(files: tuple[str, ...] = SHARDS) -> bytes:
    """What torch's writer writes for one item in each of the files."""
    index = {file: MetadataIndex(file) for file in files}
    return pickle.dumps(
        Metadata(
            state_dict_metadata={file: BytesStorageMetadata() for file in files},
            storage_data={index[f]: _torch.storage_info(f, 0, LENGTH) for f in files},
            storage_meta=StorageMeta(checkpoint_id="ckptfs+file:///x", save_id="torch's"),
        )
    )


def write(fs: CheckpointFileSystem, path: str, data: bytes) -> None:
    """One file, as torch's writer hands it over."""
    torchs = FileSystem()
    torchs.fs = fs
    with torchs.create_stream(path, "wb") as stream:
        stream.write(data)


def put(fs: CheckpointFileSystem, step: str, tag: int, files: tuple[str, ...] = SHARDS) -> None:
    """Shards and their metadata, not yet moved."""
    for file in files:
        write(fs, f"{step}/{file}", tagged(tag))
    write(fs, f"{step}/.metadata.tmp", metadata(files))


def commit(fs: CheckpointFileSystem, step: str) -> None:
    """As torch's writer ends."""
    if fs.exists(f"{step}/.metadata"):
        fs.rm(f"{step}/.metadata")
    fs.mv(f"{step}/.metadata.tmp", f"{step}/.metadata")


def fail(fs: CheckpointFileSystem, step: str) -> None:
    """A writer's error in the middle of a shard."""
    torchs = FileSystem()
    torchs.fs = fs

    def half() -> None:
        with torchs.create_stream(f"{step}/{SHARDS[0]}", "wb") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises((KeyError, FencedError)):  # the latter where the run was taken in between
        half()


def tagged(tag: int) -> bytes:
    """Bytes of one shard that name who wrote them."""
    return f"{tag:016d}".encode()


def seen(fs: CheckpointFileSystem, step: str) -> list[int] | None:
    """The tags of the shards that the visible metadata refers to, None where there is none."""
    if not fs.exists(f"{step}/.metadata"):
        return None
    with fs.open(f"{step}/.metadata") as file:
        found = pickle.load(file)
    return [int(fs.cat(f"{step}/{i.relative_path}")) for i in found.storage_data.values()]


ACTIONS = st.lists(
    st.sampled_from(["0", "1", "0", "1", "fail", "commit", "commit", "restart", "fence", "rm"]),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(ACTIONS)
def test_whatever_arrives_is_never_mixed(actions: list[str]) -> None:
    """In any order of shards, repeats, failures, new processes, fences, removals and commits, what is
    visible is the last commit that succeeded, and that consists of one save's shards alone.
    """
    run = f"{uuid.uuid4().hex}/run"
    step, fs, last = f"{run}/step_1", MemoryCheckpoints(skip_instance_cache=True), None
    mine: dict[str, int] = {}
    fenced = False
    for tag, action in enumerate(actions, start=1):
        match action:
            case "0" | "1":
                name = SHARDS[int(action)]
                try:
                    write(fs, f"{step}/{name}", tagged(tag))
                    mine[name] = tag
                except FencedError:
                    assert fenced
                    mine, fenced = {}, False
            case "fail":
                mine, fenced = {}, False
                fail(fs, step)
            case "restart":
                arrivals._HERE._alone.clear()
                fs, mine, fenced = MemoryCheckpoints(skip_instance_cache=True), {}, False
            case "fence":
                ckptfs.prepare_run(f"memory://{run}").release()
                fenced = bool(mine)
            case "rm":
                if last is not None:
                    fs.rm(step, recursive=True)
                    last = None
            case "commit":
                whole = [mine[name] for name in SHARDS] if len(mine) == len(SHARDS) else None
                try:
                    write(fs, f"{step}/.metadata.tmp", metadata())
                    commit(fs, step)
                except (IncompleteCheckpointError, FencedError):
                    assert fenced or whole is None
                else:
                    assert whole is not None
                    last = whole
                mine, fenced = {}, False
        assert seen(fs, step) == last
        assert seen(MemoryCheckpoints(skip_instance_cache=True), step) == last


def test_a_committer_that_died_before_the_projection_is_read_through(tmp_path: Path) -> None:
    """A save is sealed and its process dies: through the protocol its files are there, as for
    ``latest``, though no step directory is.
    """
    fs = FileCheckpoints(skip_instance_cache=True)
    step = f"{tmp_path}/run/step_1"
    put(fs, step, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveAttempt, "_finish", lambda *_: ((), 0))
        commit(fs, step)
    assert not Path(step).exists()
    assert seen(fs, step) == [7, 7]
    found = ckptfs.latest(f"{tmp_path}/run")
    assert found is not None
    assert found.step == 1


def test_the_old_one_stays_until_the_new_is_committed(tmp_path: Path) -> None:
    """Removing ``.metadata`` of a checkpoint shows no reader anything; the commit that follows replaces
    it, and without that removal it is CommitConflictError.
    """
    fs, step = FileCheckpoints(skip_instance_cache=True), f"{tmp_path}/run/step_1"
    put(fs, step, 1)
    commit(fs, step)
    put(fs, step, 2)
    with pytest.raises(CommitConflictError):
        fs.mv(f"{step}/.metadata.tmp", f"{step}/.metadata")
    put(fs, step, 3)
    fs.rm(f"{step}/.metadata")
    assert seen(fs, step) == [1, 1]
    assert (Path(step) / ".metadata").exists()  # for stock readers of the bare path too
    fs.mv(f"{step}/.metadata.tmp", f"{step}/.metadata")
    assert seen(fs, step) == [3, 3]


def test_a_failed_save_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    """What a failed save left is invisible, and gone when the next one begins; an empty directory that
    its writers made is gone with its first file.
    """
    fs, step = FileCheckpoints(skip_instance_cache=True), f"{tmp_path}/run/step_1"
    fs.makedirs(step)
    write(fs, f"{step}/{SHARDS[1]}", tagged(1))
    assert not Path(step).exists()
    fail(fs, step)
    attempts = tmp_path / "run" / ".ckptfs" / "attempts"
    assert len(list(attempts.iterdir())) == 1
    fs.makedirs(step, exist_ok=True)
    assert list(attempts.iterdir()) == []
    put(fs, step, 2)
    commit(fs, step)
    assert seen(fs, step) == [2, 2]


def test_shards_of_earlier_tries_are_not_in_the_commit(tmp_path: Path) -> None:
    """A shard that arrived and that the metadata does not refer to is not committed."""
    fs, step = FileCheckpoints(skip_instance_cache=True), f"{tmp_path}/run/step_1"
    write(fs, f"{step}/__9_0.distcp", tagged(9))
    put(fs, step, 1)
    commit(fs, step)
    assert [p.name for p in Path(step).rglob("__9_0.distcp")] == []
    assert seen(fs, step) == [1, 1]


def test_deleting_by_name(tmp_path: Path) -> None:
    """A pinned checkpoint stays; a deleted one is gone from log and disk, foreign files next to it
    stay, its name is free again; a name that no log knows is False.
    """
    fs, step = FileCheckpoints(skip_instance_cache=True), f"{tmp_path}/run/step_1"
    put(fs, step, 1)
    commit(fs, step)
    storage = open_storage(Uri.parse(tmp_path / "run"))
    (Path(step) / "notes.txt").write_text("mine")
    assert delete_checkpoint(storage, "step_2") is False
    assert delete_checkpoint(storage, "step_1") is True
    assert sorted(p.name for p in Path(step).iterdir()) == ["notes.txt"]
    assert ckptfs.latest(f"{tmp_path}/run") is None
    put(fs, step, 2)
    commit(fs, step)
    assert seen(fs, step) == [2, 2]
    with ckptfs.CheckpointManager(f"{tmp_path}/run") as manager:
        manager.pin(1)
    with pytest.raises(StateError, match="pinned"):
        delete_checkpoint(storage, "step_1")
    assert seen(fs, step) == [2, 2]


def test_a_file_that_does_not_wait_cannot_be_taken_back(tmp_path: Path) -> None:
    """Removing a shard that never arrived is NotFoundError; one that waits goes."""
    fs, step = FileCheckpoints(skip_instance_cache=True), f"{tmp_path}/run/step_1"
    with pytest.raises(NotFoundError):
        fs.rm(f"{step}/{SHARDS[0]}")
    put(fs, step, 1)
    fs.rm(f"{step}/{SHARDS[0]}")
    with pytest.raises(IncompleteCheckpointError, match="never arrived"):
        commit(fs, step)


def test_a_fence_that_recovery_did_not_follow_fences_too(tmp_path: Path) -> None:
    """A new owner's entry alone, before it came to abort anything, stops the commit of a save that
    began under the older generation: the record of its first file counts, not the moment of the commit.
    """
    fs, step = FileCheckpoints(skip_instance_cache=True), f"{tmp_path}/run/step_1"
    put(fs, step, 1)
    storage = open_storage(Uri.parse(tmp_path / "run"))
    fence = Fence(Generation(1, "newer"), FenceMode.RESUME, "host", 1, None, "node", "0")
    drive(append(lambda state: may_fence(state, fence), write_id="w", stamp=Stamp()), storage)
    with pytest.raises(FencedError):
        commit(fs, step)
    assert seen(fs, step) is None
    put(fs, step, 2)
    commit(fs, step)
    assert seen(fs, step) == [2, 2]


def test_one_process_of_all_commits(tmp_path: Path) -> None:
    """A second rename of the same arrivals, while the first is on its way, is CommitConflictError, and
    the checkpoint of the first is whole.
    """
    first, second = (FileCheckpoints(skip_instance_cache=True) for _ in range(2))
    step = f"{tmp_path}/run/step_1"
    put(first, step, 1)
    prepare = SaveAttempt._prepare

    def meanwhile(self: SaveAttempt, files: Any) -> None:
        with pytest.raises(CommitConflictError):
            second.mv(f"{step}/.metadata.tmp", f"{step}/.metadata")
        prepare(self, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveAttempt, "_prepare", meanwhile)
        commit(first, step)
    assert seen(second, step) == [1, 1]


def test_a_deleter_that_stands_still_moves_nothing_of_a_successor(tmp_path: Path) -> None:
    """A process that continues a delete of another fences first: its trash is gone then."""
    run = str(tmp_path / "run")

    def save(data: bytes) -> None:
        with ckptfs.checkpoint_dir(f"{run}/step_1") as path:
            Path(path, "model.bin").write_bytes(data)

    save(b"1")
    first = Hold()
    plan = Plan([Fault("rename", "step_1/model.bin", 1, first)])
    slow = FaultyStorage(open_storage(run), plan)
    ends: list[object] = []

    def delete() -> None:
        try:
            ends.append(delete_checkpoint(slow, "step_1"))
        except CkptfsError as error:
            ends.append(type(error))

    stalled = threading.Thread(target=delete)
    stalled.start()
    assert first.reached.wait(120)
    assert delete_checkpoint(open_storage(run), "step_1")
    save(b"2")
    first.release.set()
    stalled.join(120)
    assert ends in ([FencedError], [StorageError])
    with ckptfs.checkpoint_dir(f"{run}/step_1", "read") as path:
        assert Path(path, "model.bin").read_bytes() == b"2"


def test_what_an_older_save_left_is_not_the_checkpoint(tmp_path: Path) -> None:
    """Removing a stale data directory of a step removes that, and the live save stays."""
    run = tmp_path / "run"
    ckptfs.save({"w": 1}, run / "step_1")
    stale = run / "step_1" / "20200101T000000-0123456789ab"
    stale.mkdir()
    FileCheckpoints().rm(str(stale), recursive=True)
    assert not stale.exists()
    assert [c.step for c in ckptfs.list_checkpoints(run)] == [1]


def test_a_refused_overwrite_leaves_no_copy_behind(tmp_path: Path) -> None:
    """The run is held: each try is RunBusyError, and none of them stays on the disk."""
    run = tmp_path / "run"
    fs = FileCheckpoints()
    put(fs, f"{run}/step_1", 1)
    commit(fs, f"{run}/step_1")
    with ckptfs.prepare_run(run):
        for tag in (2, 3):
            put(fs, f"{run}/step_1", tag)
            with pytest.raises(ckptfs.RunBusyError):
                commit(fs, f"{run}/step_1")
        assert list((run / ".ckptfs" / "attempts").iterdir()) == []
    assert seen(fs, f"{run}/step_1") == [1, 1]


# -- ids of saves -----------------------------------------------------------------------------------


def test_put_of_a_copy_keeps_its_data(tmp_path: Path) -> None:
    """A checkpoint that ``ckptfs cp`` made, and one that was copied on from there, keep their data
    when they are put by fsspec: their shards are below the id of a copy, and wait for no commit.
    """
    value = torch.arange(3000.0)
    ckptfs.save({"w": value}, tmp_path / "a/step_100")
    dcp.save({"w": value}, checkpoint_id=str(tmp_path / "stock/step_100"))
    for made in ("a", "stock"):
        copy_to(
            Uri.parse(tmp_path / made / "step_100"), Uri.parse(tmp_path / f"{made}-copy/step_100")
        )
        copy_to(
            Uri.parse(tmp_path / f"{made}-copy/step_100"),
            Uri.parse(tmp_path / f"{made}-again/step_100"),
        )
        for copied in (f"{made}-copy", f"{made}-again"):
            files = FileCheckpoints()
            put = tmp_path / f"{copied}-put"
            files.put(f"{tmp_path}/{copied}/step_100", f"{put}/step_100", recursive=True)
            assert not (put / "step_100/.ckptfs").exists()
            into = {"w": torch.zeros(3000)}
            ckptfs.load(into, put / "step_100")
            assert torch.equal(into["w"], value)
            newest = ckptfs.latest(put)
            assert newest is not None
            assert newest.uri.name == "step_100"
