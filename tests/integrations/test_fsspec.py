"""fsspec protocols: stock DCP, pyarrow, Lightning and upath with nothing but ``ckptfs+`` in a URI."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, launch

pytestmark = pytest.mark.integrations


def state(value: float) -> dict[str, Any]:
    """Two items, one of them larger than a stream's buffer."""
    return {"w": torch.full((300, 1000), value), "n": torch.tensor(value)}


def ours(store: Store, name: str = "") -> str:
    """The ckptfs+ URL of a name in the store."""
    root = store.uri if "://" in store.uri else f"file://{store.uri}"
    return f"ckptfs+{root}/{name}" if name else f"ckptfs+{root}"


def loaded(url: str) -> float:
    """The value that a checkpoint was made with, read by stock torch; it is whole."""
    into = state(0.0)
    dcp.load(into, checkpoint_id=url)
    assert torch.equal(into["w"], torch.full_like(into["w"], float(into["n"])))
    return float(into["n"])


# -- ranks ------------------------------------------------------------------------------------------


def sharded(value: float, size: int) -> dict[str, Any]:
    """Two tensors over all ranks and one on each."""
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", list(range(size)))
    w, v = torch.arange(64.0) + value, torch.full((8000,), value)
    cut = {k: distribute_tensor(t, mesh, [Shard(0)]) for k, t in (("v", v), ("w", w))}
    return {**cut, "n": torch.tensor(value)}


class Breaking(DefaultSavePlanner):
    """Fails with "no space" when the last item is to be written."""

    left = 1

    def resolve_data(self, write_item: Any) -> Any:
        """The item; the second one is not."""
        if self.left == 0:
            raise OSError(28, "No space left on device")
        self.left -= 1
        return super().resolve_data(write_item)


def saves_by_uri(rank: Rank) -> dict[str, Any]:
    """Every way to save, a failing rank, an overwrite; what each reader finds."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    rank.init_group()
    root, bare = rank.args["ours"], rank.args["bare"]
    dcp.save(sharded(1, rank.size), checkpoint_id=f"{root}/step_1")
    threaded: Any = dcp.async_save(sharded(2, rank.size), checkpoint_id=f"{root}/step_2")
    threaded.result()
    kind = AsyncCheckpointerType.PROCESS
    if rank.args["process"]:
        future: Any = dcp.async_save(
            sharded(3, rank.size), checkpoint_id=f"{root}/step_3", async_checkpointer_type=kind
        )
        future.result()
    failed = ""
    try:
        planner = Breaking() if rank.number == 1 else None
        dcp.save(sharded(4, rank.size), checkpoint_id=f"{root}/step_2", planner=planner)
    except CheckpointException as error:
        failed = str(error)
    kept = values(f"{root}/step_2", rank.size)
    dcp.save(sharded(5, rank.size), checkpoint_id=f"{root}/step_2")
    names = [c.uri.name for c in ckptfs.list_checkpoints(bare)]
    return {
        "failed": failed,
        "kept": kept,
        "names": names,
        "read": {n: [values(f"{u}/{n}", rank.size) for u in (root, bare)] for n in names},
    }


def values(url: str, size: int) -> list[float]:
    """By stock torch, and where the URL is a bare one by ckptfs too."""
    into = sharded(0, size)
    dcp.load(into, checkpoint_id=url)
    found = [float(into["n"]), float(into["w"].full_tensor()[0])]
    if not url.startswith("ckptfs+"):
        into = sharded(0, size)
        ckptfs.load(into, url)
        found += [float(into["n"]), float(into["w"].full_tensor()[0])]
    return found


def test_two_ranks_save_by_uri_alone(store: Store) -> None:
    """Synchronous, in a thread and in a process, saved by stock torch's FsspecWriter: each is one
    commit that torch reads through both URLs and ckptfs too; a rank that fails in the middle of its
    file fails all, the old checkpoint stays, and the next save replaces it.
    """
    args = {"ours": ours(store), "bare": store.uri, "process": store.kind == "file"}
    with launch(saves_by_uri, 2, args=args, env=store.env) as ranks:
        results = ranks.results()
    assert [r.error for r in results] == [None] * 2
    told = [r.value for r in results]
    for said in told:
        assert "No space left" in said["failed"]
        assert said["kept"] == [2, 2]
        want = {"step_1": 1, "step_2": 5} | ({"step_3": 3} if args["process"] else {})
        assert sorted(said["names"]) == sorted(want)
        assert said["read"] == {n: [[v, v], [v, v, v, v]] for n, v in want.items()}


def dies_in_its_file(rank: Rank) -> None:
    """Rank 1 stops in the middle of its data file, to be killed."""
    rank.init_group()

    class Standing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            rank.tell("writing")
            rank.hold("never")

    planner = Standing() if rank.number == rank.args["dies"] else None
    dcp.save(sharded(2, rank.size), checkpoint_id=rank.args["url"], planner=planner)


def saves_once(rank: Rank) -> None:
    """A value at a URL."""
    rank.init_group()
    dcp.save(sharded(rank.args["value"], rank.size), checkpoint_id=rank.args["url"])


def test_a_killed_rank_leaves_the_old_checkpoint(store: Store) -> None:
    """kill -9 of a rank (local), or of the coordinator (S3), in the middle of a data file that
    overwrites: the old checkpoint is whole, and the next launch replaces it.
    """
    url, dies = ours(store, "step_1"), int(store.kind == "file")
    with launch(saves_once, 2, args={"url": url, "value": 1}, env=store.env) as ranks:
        assert [r.error for r in ranks.results()] == [None, None]
    with launch(dies_in_its_file, 2, args={"url": url, "dies": dies}, env=store.env) as ranks:
        ranks.wait("writing", rank=dies)
        ranks.kill(dies)
        ranks.kill(1 - dies)
    before: dict[str, Any] = {"v": torch.zeros(8000), "w": torch.zeros(64), "n": torch.tensor(0.0)}
    for place in (url, f"{store.uri}/step_1"):
        dcp.load(before, checkpoint_id=place)
        assert float(before["n"]) == 1
        assert torch.equal(before["w"], torch.arange(64.0) + 1)
    with launch(saves_once, 2, args={"url": url, "value": 3}, env=store.env) as ranks:
        assert [r.error for r in ranks.results()] == [None, None]
    dcp.load(before, checkpoint_id=url)
    assert float(before["n"]) == 3


def saves_alone(rank: Rank) -> str:
    """One of two programs that know nothing of each other and save the same step."""
    rank.tell("ready")
    rank.hold("go")
    try:
        dcp.save(state(rank.number + 1.0), checkpoint_id=rank.args["url"], no_dist=True)
    except CheckpointException as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_two_programs_that_save_one_step(store: Store) -> None:
    """Two launches that save the same name at once: what is there afterwards is one of them, whole."""
    url = ours(store, "step_1")
    with launch(saves_alone, 2, args={"url": url}, env=store.env, store="none") as ranks:
        ranks.wait("ready")
        ranks.release("go")
        told = [str(result.value) for result in ranks.results()]
    assert "saved" in told
    assert loaded(url) in [n + 1 for n, said in enumerate(told) if said == "saved"]


def test_killed_resumed_bit_identical(store: Store, mode: Mode, cell: Cell) -> None:
    """The example, killed before the commit of its third save (local) or right after it, before stock
    readers see it (S3): it resumes from the second or the third, to the state of an undisturbed run.
    """
    when: Literal["before", "after"] = "before" if store.kind == "file" else "after"
    kill = Kill("create", "*.ckptfs/log/*", nth=3, rank=0, when=when)
    with cell("DCP by URI", store, mode, package="torch"):
        assert (
            story("fsspec", store, mode, kill=kill).resumed.resumed
            == {"before": "2", "after": "3"}[when]
        )


# -- files that arrive ------------------------------------------------------------------------------


class Halfway(DefaultSavePlanner):
    """Fails after the first items of a file are written."""

    left = 2

    def resolve_data(self, write_item: Any) -> Any:
        """The item; the third one is not."""
        if self.left == 0:
            raise OSError(28, "No space left on device")
        self.left -= 1
        return super().resolve_data(write_item)


def test_half_a_file_is_never_published(lab_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's writer leaves a truncated object under its final key when a save fails in the middle of a
    file, and its metadata next to it would be believed; through ckptfs+ no key appears.
    """
    for name, value in lab_s3.environment.items():
        monkeypatch.setenv(name, value)
    big = {f"w{i}": torch.full((1000, 700), float(i)) for i in range(4)}
    stock, mine = lab_s3.fresh("stock") + "/step_1", lab_s3.fresh("run") + "/step_1"
    for url in (stock, f"ckptfs+{mine}"):
        with pytest.raises(CheckpointException, match="No space left"):
            dcp.save(big, checkpoint_id=url, planner=Halfway())
    s3 = fsspec.filesystem("s3", skip_instance_cache=True)
    left = s3.find(stock, detail=True)
    assert [name.rpartition("/")[2] for name in left] == ["__0_0.distcp"]  # torch's bug, shown
    assert next(iter(left.values()))["size"] < 4 * 2_800_000
    assert [name for name in s3.find(mine) if name.endswith(".distcp")] == []
    dcp.save(big, checkpoint_id=f"ckptfs+{mine}")
    assert [name.rpartition("/")[2] for name in s3.find(mine)].count("__0_0.distcp") == 1


def test_a_lost_thread_error_is_no_checkpoint(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several threads torch's writer loses the error of one and calls the save a success, with
    items missing; here the commit is refused.
    """
    lost: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lost.append)
    big = {f"w{i}": torch.full((10, 7), float(i)) for i in range(8)}

    def save(url: str) -> None:
        writer = FsspecWriter(url, thread_count=4)
        dcp.save(big, storage_writer=writer, planner=ThreadsFail())

    save("memory://lost/step_1")  # "success", and three of four threads failed: torch's bug, shown
    assert len(lost) == 3
    with pytest.raises(CheckpointException):
        dcp.load({k: torch.zeros(10, 7) for k in big}, checkpoint_id="memory://lost/step_1")
    with pytest.raises(CheckpointException) as failed:
        save(ours(store, "step_1"))
    assert isinstance(failed.value.failures[0][0], ckptfs.IncompleteCheckpointError)
    assert ckptfs.latest(store.uri) is None


class ThreadsFail(DefaultSavePlanner):
    """Fails in every thread but the first."""

    def resolve_data(self, write_item: Any) -> Any:
        """The item, on the thread that saves."""
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return super().resolve_data(write_item)


class Stops(Exception):  # noqa: N818 - a stand-in for SIGKILL, not an error
    """The process ends here."""


@contextlib.contextmanager
def stopping(call: str) -> Iterator[None]:
    """FsspecWriter's process ends before the named call of its filesystem."""

    def stop(*args: object) -> None:
        raise Stops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, call, stop)
        yield


def test_an_overwritten_checkpoint_stays_until_the_commit(store: Store) -> None:
    """Whatever call of an overwriting save is the last one (before its metadata, between the removal of
    the old metadata and the rename of the new), the old checkpoint is whole for stock readers of the
    bare URL, while stock's own writer leaves none there.
    """
    url, bare = ours(store, "step_1"), f"{store.uri}/step_1"
    dcp.save(state(1), checkpoint_id=url)
    for value, call in ((2, "rm_file"), (3, "rename")):
        with stopping(call), pytest.raises(CheckpointException):
            dcp.save(state(value), checkpoint_id=url)
        assert loaded(bare) == loaded(url) == 1
    dcp.save(state(4), checkpoint_id=url)
    assert loaded(bare) == loaded(url) == 4
    stock = "memory://stock/step_1"
    dcp.save(state(1), checkpoint_id=stock)
    with stopping("rename"), pytest.raises(CheckpointException):
        dcp.save(state(2), checkpoint_id=stock)
    assert not fsspec.filesystem("memory").exists(
        "/stock/step_1/.metadata"
    )  # torch's window, shown


def test_what_arrives_is_invisible_until_the_commit(store: Store) -> None:
    """Shards and metadata on their way are in no listing of ours, in no catalog and not in the step; a
    plain file next to them is.
    """
    run, url = ours(store), ours(store, "step_7")
    fs, path = fsspec.core.url_to_fs(run, skip_instance_cache=True)
    with stopping("rename"), pytest.raises(CheckpointException):
        dcp.save(state(1), checkpoint_id=url)
    for fresh in (fs, fsspec.core.url_to_fs(run, skip_instance_cache=True)[0]):
        assert not fresh.exists(url)
        assert not fresh.isdir(url)
        assert fresh.find(run) == []
        assert [n for n in fresh.ls(run, detail=False) if "step_7" in n] == []
        with pytest.raises(FileNotFoundError):
            fresh.ls(url)
    assert ckptfs.latest(store.uri) is None
    fs.pipe(f"{url}/note.json", b"{}")
    assert fs.ls(url, detail=False) == [f"{path}/step_7/note.json"]
    dcp.save(state(2), checkpoint_id=url)
    assert {"note.json", ".metadata", "ckptfs.json"} < {
        name.rpartition("/")[2] for name in fs.ls(url, detail=False)
    }
    assert loaded(url) == 2


@pytest.mark.parametrize("planted", ["removed", "short"])
def test_a_missing_shard_is_no_checkpoint(store: Store, planted: str) -> None:
    """A shard that is gone, or shorter than its items, when the metadata is moved into place:
    IncompleteCheckpointError, nothing visible, and the next save is whole.
    """
    url = ours(store, "step_1")
    rename = FileSystem.rename

    def plant(self: Any, path: str, new_path: str) -> None:
        if planted == "removed":
            self.fs.rm(f"{url}/__0_0.distcp")
        else:
            self.fs.pipe(f"{url}/__0_0.distcp", b"short")
        rename(self, path, new_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "rename", plant)
        with pytest.raises(CheckpointException, match=r"__0_0\.distcp") as failed:
            dcp.save(state(1), checkpoint_id=url)
    error = failed.value.failures[0][0]
    assert isinstance(error, ckptfs.IncompleteCheckpointError)
    assert ckptfs.latest(store.uri) is None
    dcp.save(state(2), checkpoint_id=url)
    assert loaded(url) == 2


def test_a_fence_between_shard_and_commit_wins(store: Store) -> None:
    """Somebody claims the run while files arrive: the commit is FencedError and nothing is visible;
    the next save has a new id and succeeds.
    """
    url = ours(store, "step_1")
    rename = FileSystem.rename

    def claim_first(self: Any, path: str, new_path: str) -> None:
        ckptfs.prepare_run(store.uri).release()
        rename(self, path, new_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "rename", claim_first)
        with pytest.raises(CheckpointException) as failed:
            dcp.save(state(1), checkpoint_id=url)
    assert isinstance(failed.value.failures[0][0], ckptfs.FencedError | FileNotFoundError)
    assert ckptfs.latest(store.uri) is None
    dcp.save(state(2), checkpoint_id=url)
    assert loaded(url) == 2


def test_removing_a_checkpoint_leaves_saves_on_their_way(store: Store) -> None:
    """rm(recursive) of a committed step deletes it for every reader and its bytes, and a save of
    another step that is half way commits afterwards: what torchtitan's purge does.
    """
    run = ours(store)
    fs, _ = fsspec.core.url_to_fs(run, skip_instance_cache=True)
    dcp.save(state(1), checkpoint_id=f"{run}/step_1")
    rename = FileSystem.rename

    def purge_first(self: Any, path: str, new_path: str) -> None:
        fs.rm(f"{run}/step_1", recursive=True)
        rename(self, path, new_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "rename", purge_first)
        dcp.save(state(2), checkpoint_id=f"{run}/step_2")
    assert [c.uri.name for c in ckptfs.list_checkpoints(store.uri)] == ["step_2"]
    assert not fs.exists(f"{run}/step_1")
    assert loaded(f"{run}/step_2") == 2
    dcp.save(state(3), checkpoint_id=f"{run}/step_1")  # the name is free again
    assert loaded(f"{run}/step_1") == 3


def test_a_held_run_is_not_touched(store: Store) -> None:
    """While a living owner in another process holds the run, removing and replacing by URI are
    RunBusyErrors and the checkpoint stays.
    """
    url = ours(store, "step_1")
    dcp.save(state(1), checkpoint_id=url)
    with launch(holds_the_run, 1, args={"uri": store.uri}, env=store.env, store="none") as ranks:
        ranks.wait("held")
        fs, _ = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        with pytest.raises(ckptfs.RunBusyError):
            fs.rm(url, recursive=True)
        with pytest.raises(CheckpointException) as failed:
            dcp.save(state(2), checkpoint_id=url)
        assert isinstance(failed.value.failures[0][0], ckptfs.RunBusyError)
        ranks.release("leave")
        ranks.results()
    assert loaded(url) == 1


def holds_the_run(rank: Rank) -> None:
    """An owner that lives."""
    with ckptfs.prepare_run(rank.args["uri"]):
        rank.tell("held")
        rank.hold("leave")


# -- plain files ------------------------------------------------------------------------------------


class Interrupted(Exception):  # noqa: N818 - what a program raises in the middle of a file
    """Something went wrong in the middle."""


def write_half(file: Any, half: Any = b"half") -> None:
    """An exception in the middle of the block."""
    with file as opened:
        opened.write(half)
        raise Interrupted


def interrupted_writes(fs: Any, url: str) -> dict[str, bool]:
    """Every way to write, with a block left by an exception; whether something is there afterwards."""
    options = fs.storage_options

    files: dict[str, Callable[[str], Any]] = {
        "block.bin": lambda url: fs.open(url, "wb"),
        "fsspec.bin": lambda url: fsspec.open(url, "wb", **options),
        "text.txt": lambda url: fs.open(url, "w"),
        "packed.gz": lambda url: fs.open(url, "wb", compression="gzip"),
    }

    def dropped() -> None:
        fs.open(f"{url}/dropped.bin", "wb").write(b"half")
        raise Interrupted

    def in_transaction() -> None:
        with fs.transaction:
            with fs.open(f"{url}/transaction.bin", "wb") as file:
                file.write(b"whole")
            raise Interrupted

    for name, opening in files.items():
        with pytest.raises(Interrupted):
            write_half(opening(f"{url}/{name}"), "half" if name == "text.txt" else b"half")
    for write in (dropped, in_transaction):
        with pytest.raises(Interrupted):
            write()
    names = (*files, "dropped.bin", "transaction.bin")
    return {name: fs.exists(f"{url}/{name}") for name in names}


def test_an_exception_inside_open_publishes_nothing(store: Store) -> None:
    """A file that is left by an exception, whatever opened it, leaves nothing under its name; fsspec's
    own filesystems publish the half of it.
    """
    url = ours(store, "plain")
    fs, _ = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    assert not any(interrupted_writes(fs, url).values())
    with fs.open(f"{url}/kept.txt", "w") as file:
        file.write("old")
    with pytest.raises(Interrupted):
        write_half(fs.open(f"{url}/kept.txt", "w"), "new")
    assert fs.read_text(f"{url}/kept.txt") == "old"
    stock = url.removeprefix("ckptfs+").replace("plain", "stock")
    bare, _ = fsspec.core.url_to_fs(stock, **({"auto_mkdir": True} if store.kind == "file" else {}))
    with pytest.raises(Interrupted):
        write_half(bare.open(f"{stock}/half.bin", "wb"))
    assert bare.exists(f"{stock}/half.bin")  # fsspec's own, shown


def test_plain_files_as_fsspec_users_know_them(store: Store) -> None:
    """Text, compression, append, exclusive creation, transactions, put, get, copy, move, globs, sizes
    and removals do what s3fs and LocalFileSystem do; an emergency file written in an except block too.
    """
    url = ours(store, "plain")
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    fs.makedirs(url, exist_ok=True)
    fs.pipe({f"{url}/a.bin": b"12345", f"{url}/deep/b.bin": b"123"})
    assert fs.find(url) == [f"{path}/a.bin", f"{path}/deep/b.bin"]
    assert fs.du(url) == 8
    assert fs.glob(f"{url}/**/*.bin") == fs.find(url)
    assert [sorted(files) for _, _, files in fs.walk(url)] == [["a.bin"], ["b.bin"]]
    assert fs.cat_file(f"{url}/a.bin", 1, 3) == b"23"
    assert fs.info(f"{url}/a.bin")["size"] == 5
    assert fs.modified(f"{url}/a.bin").year > 2000
    with fs.open(f"{url}/a.bin", "ab") as file:
        file.write(b"67")
    assert fs.cat(f"{url}/a.bin") == b"1234567"
    with pytest.raises(FileExistsError):
        fs.open(f"{url}/a.bin", "xb")
    with fs.open(f"{url}/t.txt.gz", "wt", compression="infer") as file:
        file.write("packed")
    with fs.open(f"{url}/t.txt.gz", "rt", compression="infer") as file:
        assert file.read() == "packed"
    with fs.transaction:
        fs.pipe(f"{url}/one", b"1")
        fs.pipe(f"{url}/two", b"2")
        assert not fs.exists(f"{url}/one")
    assert fs.cat([f"{url}/one", f"{url}/two"]) == {f"{path}/one": b"1", f"{path}/two": b"2"}
    try:
        raise Interrupted
    except Interrupted:
        fs.pipe(f"{url}/emergency.ckpt", b"saved")
    assert fs.cat(f"{url}/emergency.ckpt") == b"saved"
    fs.mv(f"{url}/one", f"{url}/moved")
    fs.copy(f"{url}/two", f"{url}/copied")
    fs.touch(f"{url}/touched")
    assert not fs.exists(f"{url}/one")
    assert fs.sizes([f"{url}/moved", f"{url}/copied", f"{url}/touched"]) == [1, 1, 0]
    fs.rm([f"{url}/moved", f"{url}/copied"])
    fs.rm(f"{url}/*.bin")
    assert not fs.exists(f"{url}/a.bin")
    assert fs.isdir(f"{url}/deep")
    fs.rm(f"{url}/deep", recursive=True)
    assert not fs.exists(f"{url}/deep")
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{url}/deep", recursive=True)


def test_put_and_get_whole_checkpoints(store: Store, tmp_path: Path) -> None:
    """fs.put of a directory that stock torch wrote becomes one commit with its last file; fs.get and
    fs.put of one that ckptfs wrote make copies that load.
    """
    run = ours(store)
    fs, _ = fsspec.core.url_to_fs(run, skip_instance_cache=True)
    dcp.save(state(3), checkpoint_id=str(tmp_path / "stock"))
    fs.put(f"{tmp_path}/stock", f"{run}/step_3", recursive=True)
    assert loaded(f"{run}/step_3") == 3
    assert ckptfs.latest(store.uri).uri.name == "step_3"  # type: ignore[union-attr]
    fs.get(f"{run}/step_3", f"{tmp_path}/copy", recursive=True)
    assert loaded(str(tmp_path / "copy")) == 3
    fs.put(f"{tmp_path}/copy", f"{run}/best/step_3", recursive=True)
    assert loaded(f"{run}/best/step_3") == 3
    into = state(0)
    ckptfs.load(into, f"{store.uri}/best/step_3")
    assert float(into["n"]) == 3


def test_pyarrow_by_uri(store: Store, tmp_path: Path) -> None:
    """``fsspec+ckptfs+...`` through pyarrow, as Ray's storage_path: streams, selectors, copy_files of a
    checkpoint directory both ways, delete_dir.
    """
    from pyarrow import fs as arrow

    dcp.save(state(5), checkpoint_id=str(tmp_path / "made"))
    fs, top = arrow.FileSystem.from_uri(f"fsspec+{ours(store)}")
    fs.create_dir(f"{top}/exp")
    with fs.open_output_stream(f"{top}/exp/marker.json") as file:
        file.write(b"{}")
    with pytest.raises(Interrupted):
        write_half(fs.open_output_stream(f"{top}/exp/half.json"))
    here = arrow.LocalFileSystem()
    arrow.copy_files(str(tmp_path / "made"), f"{top}/exp/ck", here, fs)
    found = fs.get_file_info(arrow.FileSelector(f"{top}/exp", recursive=True))
    names = {info.path.removeprefix(f"{top}/exp/") for info in found}
    assert {"marker.json", "ck/.metadata"} < names
    assert "half.json" not in names
    assert loaded(ours(store, "exp/ck")) == 5
    assert [c.uri.name for c in ckptfs.list_checkpoints(f"{store.uri}/exp") if c.save_id] == ["ck"]
    arrow.copy_files(f"{top}/exp/ck", str(tmp_path / "back"), fs, here)
    assert loaded(str(tmp_path / "back")) == 5
    fs.delete_dir(f"{top}/exp/ck")
    assert fs.get_file_info(f"{top}/exp/ck").type == arrow.FileType.NotFound
    assert ckptfs.list_checkpoints(f"{store.uri}/exp") == []
    fs.delete_dir_contents(f"{top}/exp")
    assert fs.get_file_info(f"{top}/exp/marker.json").type == arrow.FileType.NotFound


def test_lightning_by_uri(store: Store) -> None:
    """ModelCheckpoint(dirpath="ckptfs+...") writes, keeps the best two, and resumes."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    def trained(epochs: int, resume: str | None = None) -> ModelCheckpoint:
        kept = ModelCheckpoint(
            dirpath=ours(store, "pl"), save_top_k=2, monitor="epoch", mode="max", save_last=True
        )
        trainer = lightning.Trainer(
            max_epochs=epochs, limit_train_batches=1, limit_val_batches=0, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[kept], accelerator="cpu",
        )  # fmt: skip
        trainer.fit(BoringModel(), ckpt_path=resume)
        assert trainer.current_epoch == epochs
        return kept

    kept = trained(3)
    fs, path = fsspec.core.url_to_fs(ours(store, "pl"), skip_instance_cache=True)
    names = [name.removeprefix(f"{path}/") for name in fs.find(path)]
    assert names == ["epoch=1-step=2.ckpt", "epoch=2-step=3.ckpt", "last.ckpt"]
    trained(4, resume=kept.last_model_path)


# -- instances --------------------------------------------------------------------------------------


def test_upath_by_uri(store: Store) -> None:
    """UPath("ckptfs+...") joins, lists, writes, pickles, and is what ckptfs itself takes."""
    from upath import UPath

    path = UPath(ours(store), **store.storage_options)
    (path / "a" / "x.txt").parent.mkdir(parents=True, exist_ok=True)
    (path / "a" / "x.txt").write_text("hello")
    assert [p.name for p in path.iterdir()] == ["a"]
    assert [p.name for p in path.rglob("*.txt")] == ["x.txt"]
    assert pickle.loads(pickle.dumps(path / "a")) == path / "a"
    ckptfs.save_object({"epoch": 3}, path / "driver.pt")
    assert ckptfs.load_object(path / "driver.pt") == {"epoch": 3}


def test_options_are_kept_and_never_shown(lab_s3: Server) -> None:
    """Flat, nested under "s3" and through a chain, options reach the store and pickles, and are in no
    repr, no JSON; without them the same URL has no credentials.
    """
    options, url = lab_s3.storage_options(), f"ckptfs+{lab_s3.fresh('opt')}/step_1"
    chained = url.replace("ckptfs+", "ckptfs::")
    made = [
        fsspec.core.url_to_fs(url, **options)[0],
        fsspec.core.url_to_fs(url, s3=options)[0],
        fsspec.core.url_to_fs(chained, s3=options)[0],
    ]
    for number, fs in enumerate(pickle.loads(pickle.dumps(made))):
        writer = FsspecWriter(
            url if number < 2 else chained, **({"s3": options} if number else options)
        )
        dcp.save(state(number), storage_writer=writer)
        reader = FsspecReader(
            url if number < 2 else chained, **({"s3": options} if number else options)
        )
        into = state(9)
        dcp.load(into, storage_reader=reader)
        assert float(into["n"]) == number
        assert fs.exists(f"{url}/.metadata")
        for shown in (repr(fs), fs.to_json(), str(fs.to_dict())):
            assert options["secret"] not in shown
            assert options["key"] not in shown
        assert type(fs).from_json(fs.to_json()) is not None
        assert options["secret"] in fs.to_json(include_password=True)
    with pytest.raises(ckptfs.StorageError, match="redentials"):
        fsspec.core.url_to_fs(url, endpoint_url=options["endpoint_url"])[0].ls(url)


def test_what_cannot_be_meant_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing driver, a URL without a scheme, another bucket, torch without collectives and an
    unknown mode are typed errors that say what to do.
    """
    monkeypatch.setitem(sys.modules, "adlfs", None)
    known = sys.modules["fsspec.registry"]
    monkeypatch.delitem(known.__dict__["_registry"], "az", raising=False)
    with pytest.raises(ckptfs.MissingDriverError, match="azure"):
        fsspec.filesystem("ckptfs+az", skip_instance_cache=True).ls("container/run")
    with pytest.raises(ckptfs.UriError, match="scheme"):
        fsspec.core.url_to_fs(f"ckptfs::{tmp_path}")[0].ls(f"ckptfs::{tmp_path}")
    with pytest.raises(ckptfs.UriError, match="behind it"):
        fsspec.filesystem("ckptfs").ls("anything")
    fs = fsspec.filesystem("ckptfs+file")
    with pytest.raises(ckptfs.UnsupportedError, match="whole"):
        fs.open(f"{tmp_path}/x", "a+b")
    torchs = FileSystem()
    torchs.fs = fs
    alone = torchs.create_stream(f"{tmp_path}/step/__0.metadata.tmp", "wb")
    with pytest.raises(ckptfs.UnsupportedError, match="collectives"), alone:
        pass
    dcp.save(state(1), checkpoint_id=f"ckptfs+file://{tmp_path}/run/step_1")
    with pytest.raises(ckptfs.UnsupportedError, match="keeps its name"):
        fs.mv(f"{tmp_path}/run/step_1", f"{tmp_path}/run/step_2")


def test_a_fork_begins_anew(store: Store) -> None:
    """A process forked in the middle of its parent's save has clients of its own, saves elsewhere by
    itself and does not touch the parent's attempt.
    """
    url = ours(store, "step_1")
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    assert not fs.exists(f"{url}/note")
    torchs = FileSystem()
    torchs.fs = fs
    with torchs.create_stream(f"{url}/__0_0.distcp", "wb") as file:
        file.write(b"parent's")
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                with torchs.create_stream(f"{url}/__0_0.distcp", "wb") as mine:
                    mine.write(b"child's")
                fs.pipe(f"{url}/note", b"child")
                code = int(not fs.exists(f"{url}/note"))
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    bare, _ = fsspec.core.url_to_fs(url.removeprefix("ckptfs+"), use_listings_cache=False)
    left = [n for n in bare.find(path.rpartition("/")[0]) if n.endswith("__0_0.distcp")]
    assert sorted(bare.cat(left).values()) == [b"child's", b"parent's"]
    assert fs.cat(f"{url}/note") == b"child"
