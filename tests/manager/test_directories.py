"""DirectoryManager: what a framework wrote as files is committed whole, kept, opened, or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.commit.directory_checkpoints.read import sweep
from ckptfs.commit.directory_checkpoints.write import LocalFile, share_files, writing_directory
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import Control
from ckptfs.errors import AccessError
from ckptfs.events import SaveFailed
from ckptfs.manager.directory_manager import DirectoryManager
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.memory_object_store import STORES, MemoryObjects
from ckptfs.testing.world import End, simulate

Body = Callable[[DirectoryManager, int], Any]


@pytest.fixture
def bucket() -> Iterator[tuple[str, MemoryObjects]]:
    """A run's URI in an object store of its own."""
    name = f"directories-{uuid.uuid4().hex[:8]}"
    yield f"objects+memory://{name}/run", STORES.bucket(name)
    STORES.drop(name)


@pytest.fixture(params=["mounted", "objects"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run where ``open`` works, and one where it does not."""
    if request.param == "mounted":
        return str(tmp_path / "run")
    uri: str = request.getfixturevalue("bucket")[0]
    return uri


def write_files(top: Path, files: dict[str, bytes]) -> Path:
    """A directory with these files."""
    for name, data in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)
    return top


def files_of(top: str | Path) -> dict[str, bytes]:
    """What a tool finds below a path, without what ckptfs keeps there."""
    found = {}
    for path in Path(top).rglob("*"):
        name = str(path.relative_to(top))
        if path.is_file() and name != "ckptfs.json" and not name.startswith("20"):
            found[name] = path.read_bytes()
    return found


def on_ranks(
    uri: str, nodes: Sequence[str], body: Body, scratch: Path, **options: Any
) -> list[End[Any]]:
    """``body(manager, rank)`` on simulated ranks."""

    def rank(control: Control) -> Any:
        ground = RunHandle(Where(uri, Place()), control=control, storage=open_storage(uri))
        with DirectoryManager(uri, ground=ground, scratch=scratch, **options) as manager:
            return body(manager, control.rank)

    return simulate(len(nodes), rank, nodes=nodes)


KINDS: tuple[Literal["checkpoint", "directory"], ...] = ("checkpoint", "directory")
FILES = {"model.bin": b"m" * 70_000, "sub/dir/empty": b"", "sub/config.json": b"{}"}


def test_what_was_written_is_what_is_read(run: str, tmp_path: Path) -> None:
    """Files, directories and bytes come back; retention keeps the newest; steps count."""
    source = write_files(tmp_path / "source", FILES)
    with DirectoryManager(run, keep_latest=2, scratch=tmp_path / "scratch") as manager:
        with manager.reading() as nothing:
            assert nothing is None
        for step in (1, 2, 3):
            manager.save(step, source, {"loss": 1.0 / step})
        assert manager.steps == [2, 3]
        with manager.reading() as opened:
            assert opened is not None
            assert (opened.step, opened.uri.name) == (3, "step_3")
            assert files_of(opened.path) == FILES
        with manager.reading(2) as older:
            assert older is not None
            assert older.step == 2
        with pytest.raises(ckptfs.NotFoundError), manager.reading(1):
            pass
    assert files_of(source) == FILES  # not consumed
    assert not any((tmp_path / "scratch").glob("ckptfs-*"))


def test_a_block_writes_what_it_commits(run: str, tmp_path: Path) -> None:
    """All ranks of a node write into one path; it is committed when all have left."""

    def body(manager: DirectoryManager, rank: int) -> str:
        with manager.writing(1) as path:
            (Path(path) / f"rng_{rank}").write_text(str(rank))
        with manager.reading() as opened:
            assert opened is not None
            assert files_of(opened.path) == {"rng_0": b"0", "rng_1": b"1"}
        return path

    ends = on_ranks(run, ["a", "a"], body, tmp_path / "scratch")
    assert ends[0].get() == ends[1].get()
    assert not any((tmp_path / "scratch").glob("ckptfs-*"))


def test_a_block_that_one_rank_leaves_by_an_error_commits_nothing(run: str, tmp_path: Path) -> None:
    """The other ranks hear of it, listeners too, and the step can be saved afterwards."""
    heard: list[object] = []

    def write(path: str, rank: int) -> None:
        (Path(path) / f"rng_{rank}").write_text("half")
        if rank == 1:
            raise OSError("disk of rank 1")

    def body(manager: DirectoryManager, rank: int) -> list[int]:
        with (
            pytest.raises((ckptfs.CollectiveError, OSError), match="disk of rank 1"),
            manager.writing(1) as path,
        ):
            write(path, rank)
        assert manager.steps == []
        with manager.writing(1) as path:
            (Path(path) / "whole").write_text("whole")
        with manager.reading() as opened:
            assert opened is not None
            assert files_of(opened.path) == {"whole": b"whole"}
        return manager.steps

    ends = on_ranks(run, ["a", "a"], body, tmp_path / "scratch", listeners=[heard.append])
    assert [end.get() for end in ends] == [[1], [1]]
    assert [type(event) for event in heard].count(SaveFailed) == 1


def test_a_shared_source_is_sent_once_by_all_its_ranks(
    bucket: tuple[str, MemoryObjects], tmp_path: Path
) -> None:
    """Two nodes see one directory: every byte goes up once, and ranks of both nodes send."""
    source = write_files(tmp_path / "source", {f"f{n}": bytes([n]) * 10_000 for n in range(8)})

    def body(manager: DirectoryManager, rank: int) -> ckptfs.SaveResult:
        result = manager.save(1, source)
        assert isinstance(result, ckptfs.SaveResult)
        return result

    ends = on_ranks(bucket[0], ["a", "a", "b", "b"], body, tmp_path / "scratch")
    result = ends[0].get()
    assert [counters.files for counters in result.per_rank] == [2, 2, 2, 2]
    assert result.total.size_bytes == 80_000


class _Telling:
    """A control that says when its rank has done its part of the first step of a save."""

    def __init__(self, inner: Control, told: threading.Event) -> None:
        self._inner, self._told = inner, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, label: str, local: Callable[[], Any], decide: Any = None) -> Any:
        if label not in {"all have written", "list files"}:
            return self._inner.step(label, local, decide)
        value = local()
        self._told.set()
        return self._inner.step(label, lambda: value, decide)


def test_a_rank_that_writes_late_is_waited_for(tmp_path: Path) -> None:
    """The lead of a node has called, another rank writes still: its file is in the commit."""
    source = write_files(tmp_path / "source", {"rank_0": b"0"})
    lead_came = threading.Event()

    def rank(control: Control) -> dict[str, bytes]:
        number = control.rank
        told = cast("Control", _Telling(control, lead_came)) if number == 0 else control
        where = Where(tmp_path / "run", Place())
        storage = open_storage(str(tmp_path / "run"))
        with DirectoryManager(
            tmp_path / "run", ground=RunHandle(where, control=told, storage=storage)
        ) as manager:
            manager.save(1, write_files(tmp_path / "first", {"f": b""}))  # the run is claimed
            lead_came.clear()
            control.step("cleared", lambda: None)
            if number == 1:
                assert lead_came.wait(120)
                write_files(source, {"rank_1": b"1"})
            manager.save(2, source)
            with manager.reading() as opened:
                assert opened is not None
                return files_of(opened.path)

    ends = simulate(2, rank, nodes=["a", "a"])
    assert [end.get() for end in ends] == [{"rank_0": b"0", "rank_1": b"1"}] * 2


def test_each_node_brings_its_own_files(run: str, tmp_path: Path) -> None:
    """Node-local sources: all files are in the checkpoint, one that every node has is there once."""
    nodes = {"a": {"rng_0": b"0", "config": b"same"}, "b": {"rng_1": b"1", "config": b"same"}}
    for node, files in nodes.items():
        write_files(tmp_path / node, files)
        os.utime(tmp_path / node / "config", ns=(1, ord(node)))  # not one file: two alike

    def body(manager: DirectoryManager, rank: int) -> dict[str, bytes]:
        manager.save(1, tmp_path / "ab"[rank])
        with manager.reading() as opened:
            assert opened is not None
            return files_of(opened.path)

    wanted = {"rng_0": b"0", "rng_1": b"1", "config": b"same"}
    ends = on_ranks(run, ["a", "b"], body, tmp_path / "scratch")
    assert [end.get() for end in ends] == [wanted, wanted]


@pytest.mark.parametrize(
    ("other", "told"),
    [(b"other", "another file 'config'"), (b"longer", r"'config' \(5 and 6 bytes\)")],
    ids=["bytes", "size"],
)
def test_nodes_that_hold_different_files_under_one_name_save_nothing(
    run: str, tmp_path: Path, other: bytes, told: str
) -> None:
    """Which of two is meant is unknown: an error on all ranks that names the file."""
    write_files(tmp_path / "a", {"config": b"these"})
    write_files(tmp_path / "b", {"config": other})
    for node in "ab":
        os.utime(tmp_path / node / "config", ns=(1, ord(node)))

    def body(manager: DirectoryManager, rank: int) -> list[int]:
        with pytest.raises(ckptfs.StateError, match=told):
            manager.save(1, tmp_path / "ab"[rank])
        return manager.steps

    ends = on_ranks(run, ["a", "b"], body, tmp_path / "scratch")
    assert [end.get() for end in ends] == [[], []]


def test_a_failed_upload_is_every_ranks_error_and_costs_nothing(
    bucket: tuple[str, MemoryObjects], tmp_path: Path
) -> None:
    """Asynchronous: raised on all ranks at the next call; the source stays, the older one too."""
    uri, store = bucket

    def body(manager: DirectoryManager, rank: int) -> list[int]:
        manager.save(1, write_files(tmp_path / f"one-{rank}", {f"r{rank}": b"1"}))
        manager.wait()
        source = write_files(tmp_path / f"two-{rank}", {f"r{rank}": b"2"})
        if rank == 0:
            store.plan = Plan([Fault("put", "*/step_2/r1", 1, Fail(AccessError("refused")))])
        manager.save(2, source, consume=True)
        with pytest.raises(ckptfs.CollectiveError, match="refused"):
            manager.save(3, source)
        assert files_of(source) == {f"r{rank}": b"2"}
        store.plan = Plan([])
        manager.save(3, source, consume=True)
        manager.wait()
        assert not source.exists()
        return manager.steps

    ends = on_ranks(uri, ["a", "b"], body, tmp_path / "scratch", mode="async")
    assert [end.get() for end in ends] == [[1, 3], [1, 3]]


def test_a_committed_step_is_not_replaced(run: str, tmp_path: Path) -> None:
    """Files with fixed names never overwrite: the committed ones stay as they are."""
    one = write_files(tmp_path / "one", {"f": b"1"})
    two = write_files(tmp_path / "two", {"f": b"2"})
    with DirectoryManager(run, scratch=tmp_path / "scratch") as manager:
        manager.save(1, one)
        with pytest.raises(ckptfs.CommitConflictError):
            manager.save(1, two)
        with manager.reading() as opened:
            assert opened is not None
            assert files_of(opened.path) == {"f": b"1"}


def test_a_pointer_never_names_what_is_deleted(tmp_path: Path) -> None:
    """It goes back with the newest, and goes with the last; one that cannot move fails no save."""
    source = write_files(tmp_path / "source", FILES)
    run = tmp_path / "run"
    with DirectoryManager(run, pointer="latest") as manager:
        manager.save(1, source)
        manager.save(2, source)
        manager.delete(2)
        assert (run / "latest").read_text() == "step_1"
        manager.delete(1)
        assert not (run / "latest").exists()
        manager.save(3, source)
    plan = Plan([Fault("replace", "latest", 1, Fail(AccessError("refused")))])
    storage = FaultyStorage(open_storage(str(run)), plan)
    ground = RunHandle(Where(run, Place()), storage=storage)
    with DirectoryManager(run, pointer="latest", ground=ground) as manager:
        manager.save(4, source)
        assert manager.steps == [3, 4]
        assert (run / "latest").read_text() == "step_4"


def test_a_rank_that_cannot_make_its_directory_is_told_to_all(
    bucket: tuple[str, MemoryObjects],
) -> None:
    """Before it could write a byte: the others do not wait for it at the end of their blocks."""
    uri, _ = bucket

    def rank(control: Control) -> str:
        session = start_session(control, open_storage(uri), Place(), write=True)
        spec = SaveSpec("export", None, artifact=Kind.DIRECTORY)
        if control.rank == 1:
            plan = Plan([Fault("make_dir", "export", None, Fail(AccessError("no room")))])
            session = replace(session, storage=FaultyStorage(session.storage, plan))
        with (
            pytest.raises((ckptfs.CollectiveError, OSError), match="no room") as caught,
            writing_directory(session, spec, []),
        ):
            pass
        return type(caught.value).__name__

    ends = simulate(2, rank, timeout_s=120)
    assert {end.get() for end in ends} <= {"CollectiveError", "AccessError"}
    assert ends[0].get() == "CollectiveError"


def test_a_deleted_step_can_be_saved_again(run: str, tmp_path: Path) -> None:
    """delete takes a directory out of the run, and its name is free."""
    source = write_files(tmp_path / "source", FILES)
    with DirectoryManager(run, scratch=tmp_path / "scratch") as manager:
        manager.save(1, source)
        manager.save(2, source)
        manager.delete(2)
        assert manager.steps == [1]
        manager.save(2, source)
        assert manager.steps == [1, 2]


def _damage(run: str, store: MemoryObjects | None, *, remove: bool) -> None:
    if store is None:
        path = Path(run) / "step_2" / "model.bin"
        if remove:
            path.unlink()
        else:
            path.write_bytes(b"x" * len(FILES["model.bin"]))
        return
    key = "run/step_2/model.bin"
    if remove:
        del store.objects[key]
    else:
        store.objects[key].data = b"x" * len(FILES["model.bin"])


def test_a_missing_file_is_an_error_and_never_an_older_checkpoint_unasked(
    run: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """It names what is missing; fallback="older" goes back, and says what it passed over."""
    store = request.getfixturevalue("bucket")[1] if "memory" in run else None
    source = write_files(tmp_path / "source", FILES)
    with DirectoryManager(run, scratch=tmp_path / "scratch") as manager:
        manager.save(1, source)
        manager.save(2, source)
        _damage(run, store, remove=True)
        with (
            pytest.raises(ckptfs.IncompleteCheckpointError, match=r"model\.bin"),
            manager.reading(),
        ):
            pass
        with manager.reading(fallback="older") as opened:
            assert opened is not None
            assert opened.step == 1
            assert "step_2" in opened.skipped[0]


def test_a_changed_file_is_found_while_it_is_downloaded(
    bucket: tuple[str, MemoryObjects], tmp_path: Path
) -> None:
    """Every byte is compared with its digest; the error names the file, and no half download stays."""
    uri, store = bucket
    source = write_files(tmp_path / "source", FILES)
    with DirectoryManager(uri, scratch=tmp_path / "scratch") as manager:
        manager.save(2, source)
        _damage(uri, store, remove=False)
        kept = tmp_path / "kept"
        for into in (None, kept):
            with (
                pytest.raises(
                    ckptfs.CollectiveError, match=r"model\.bin differs from what was committed"
                ),
                manager.reading(into=into),
            ):
                pass
        assert not kept.exists()
        assert list(tmp_path.glob(".kept*")) == []
        assert not any((tmp_path / "scratch").glob("ckptfs-*"))


def test_a_download_stays_until_its_last_reader_has_left(
    bucket: tuple[str, MemoryObjects], tmp_path: Path
) -> None:
    """Ranks of a node share it and leave when they like: no rank waits, none loses its files."""
    left = threading.Event()

    def body(manager: DirectoryManager, rank: int) -> dict[str, bytes]:
        manager.save(1, write_files(tmp_path / "source", FILES))
        with manager.reading() as opened:
            assert opened is not None
            if rank == 1:
                assert left.wait(120)
            found = files_of(opened.path)
        left.set()
        return found

    ends = on_ranks(bucket[0], ["a", "a"], body, tmp_path / "scratch")
    assert [end.get() for end in ends] == [FILES, FILES]
    assert not any((tmp_path / "scratch").glob("ckptfs-*"))


def test_into_keeps_the_files(run: str, tmp_path: Path) -> None:
    """A directory of the caller's appears whole and stays; one that has files is refused."""
    source = write_files(tmp_path / "source", FILES)
    kept = tmp_path / "deep" / "kept"
    with DirectoryManager(run, scratch=tmp_path / "scratch") as manager:
        manager.save(1, source)
        with manager.reading(into=kept) as opened:
            assert opened is not None
            assert opened.path == str(kept)
    assert files_of(kept) == FILES
    with (
        pytest.raises(ckptfs.CkptfsError, match="has files"),
        ckptfs.checkpoint_dir(f"{run}/step_1", "read", into=kept),
    ):
        pass


def test_any_checkpoint_can_be_read_as_a_directory(
    bucket: tuple[str, MemoryObjects], tmp_path: Path
) -> None:
    """A sharded checkpoint on an object store, downloaded, is what stock torch reads."""
    import torch
    import torch.distributed.checkpoint as dcp

    uri, _ = bucket
    ckptfs.save({"w": torch.arange(10)}, f"{uri}/step_1")
    ckptfs.save_object({"loader": 3}, f"{uri}/step_1/driver.pt")
    loaded = {"w": torch.zeros(10, dtype=torch.int64)}
    with ckptfs.checkpoint_dir(f"{uri}/step_1", "read") as path:
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        assert torch.load(Path(path) / "driver.pt") == {"loader": 3}
    assert torch.equal(loaded["w"], torch.arange(10))
    assert not Path(path).exists()


def test_what_was_never_committed_is_not_read(bucket: tuple[str, MemoryObjects]) -> None:
    """Plain names are on an object store before the commit: they are no checkpoint."""
    uri, store = bucket

    def write() -> None:
        with ckptfs.checkpoint_dir(f"{uri}/export") as path:
            write_files(Path(path), FILES)

    store.plan = Plan([Fault("put", "*/log/*", 1, Fail(AccessError("refused")))])
    with contextlib.suppress(ckptfs.CkptfsError):
        write()
    store.plan = Plan([])
    assert "run/export/model.bin" in store.objects
    with (
        pytest.raises(ckptfs.IncompleteCheckpointError, match="never committed"),
        ckptfs.checkpoint_dir(f"{uri}/export", "read"),
    ):
        pass


def test_what_other_tools_wrote_is_read_as_it_is(run: str) -> None:
    """A directory without any manifest, two levels deep; a name that is not there is NotFoundError."""
    ckptfs.save_object([1], f"{run}/theirs/global_step1/zero.pt")
    with ckptfs.checkpoint_dir(f"{run}/theirs", "read") as path:
        assert os.listdir(f"{path}/global_step1") == ["zero.pt"]
    with pytest.raises(ckptfs.NotFoundError), ckptfs.checkpoint_dir(f"{run}/nothing", "read"):
        pass


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("missing", "no such directory"),
        ("empty", "no file"),
        ("link", "linked is a link to a directory"),
        ("run", "this is a run"),
    ],
)
def test_sources_that_cannot_be_saved_are_refused(tmp_path: Path, what: str, told: str) -> None:
    """A clear error on all ranks, before anything is begun."""
    source = tmp_path / "source"
    if what != "missing":
        source.mkdir()
    if what in {"link", "run"}:
        write_files(source, FILES)
    if what == "link":
        write_files(tmp_path / "elsewhere", {"f": b"1"})
        (source / "linked").symlink_to(tmp_path / "elsewhere")
    if what == "run":
        (source / ".ckptfs").mkdir()
    with (
        DirectoryManager(tmp_path / "run") as manager,
        pytest.raises(ckptfs.CkptfsError, match=told),
    ):
        manager.save(1, source)
    assert ckptfs.list_checkpoints(tmp_path / "run") == []


def test_retention_of_state_dicts_leaves_directories_alone(tmp_path: Path) -> None:
    """And the other way round: two managers of one run keep what the other one saved."""
    import torch

    source = write_files(tmp_path / "source", {"f": b"1"})
    with DirectoryManager(tmp_path / "run", keep_latest=1) as files:
        files.save(1, source)
    with ckptfs.CheckpointManager(tmp_path / "run", keep_latest=1) as states:
        states.save(2, {"w": torch.ones(2)})
        states.save(3, {"w": torch.ones(2)})
        assert states.steps == [3]
    with DirectoryManager(tmp_path / "run", keep_latest=1) as files:
        assert files.steps == [1]
        files.save(4, source)
        assert files.steps == [4]
    newest = [ckptfs.latest(tmp_path / "run", kind) for kind in KINDS]
    assert [found and found.step for found in newest] == [3, 4]
    assert [c.step for c in ckptfs.list_checkpoints(tmp_path / "run")] == [3, 4]


def test_downloads_of_dead_processes_go(tmp_path: Path) -> None:
    """What a killed reader left is removed by the next; that of a living one, or of another
    container, stays.
    """
    me = f"0.{os.getpid()}.{Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}"
    kinds = {
        "dead": ("0.999999.1", "here"),
        "living": (me, "here"),
        "apart": ("0.999999.1", "there"),
    }
    for name, (user, place) in kinds.items():
        top = tmp_path / f"ckptfs-read-{name}"
        (top / "users").mkdir(parents=True)
        (top / "users" / user).touch()
        (top / "place").write_text(place)
    (tmp_path / "ckptfs-read-other").mkdir()  # of no owner that we know
    sweep(str(tmp_path), "ckptfs-read-", "here")
    left = sorted(path.name.removeprefix("ckptfs-read-") for path in tmp_path.iterdir())
    assert left == ["apart", "living", "other"]


def test_what_would_be_lost_is_not_consumed(tmp_path: Path) -> None:
    """The directory of a step, one above the run: nothing is removed, nothing is committed."""
    run = tmp_path / "deep" / "run"
    with DirectoryManager(run) as manager:
        manager.save(1, write_files(tmp_path / "source", FILES))
        mine = write_files(run / "step_2", {"f": b"2"})
        for source in (mine, run / "step_1", tmp_path / "deep"):
            with pytest.raises(ckptfs.CkptfsError, match=r"part of the run|is a run"):
                manager.save(2, source, consume=True)
        assert manager.steps == [1]
        assert files_of(mine) == {"f": b"2"}
        assert files_of(run / "step_1") == FILES


@settings(deadline=None, max_examples=60)
@given(
    seen=st.lists(st.sets(st.sampled_from("abcdef"), max_size=6), min_size=1, max_size=4),
    per_node=st.integers(1, 3),
    apart=st.booleans(),
)
def test_each_file_is_sent_once_by_a_rank_that_sees_it(
    seen: list[set[str]], per_node: int, apart: bool
) -> None:
    """In every domain, whatever nodes see: nothing is left out, nothing is sent twice."""
    nodes = [f"n{n}" for n in range(len(seen)) for _ in range(per_node)]
    listings: list[tuple[LocalFile, ...] | None] = [None] * len(nodes)
    for node, files in enumerate(seen):
        listings[node * per_node] = tuple(LocalFile(f, ord(f), 7) for f in sorted(files))
    everyone = list(range(len(nodes)))
    domains = [everyone[n : n + per_node] for n in everyone[::per_node]] if apart else [everyone]
    if not any(seen):
        with pytest.raises(ckptfs.IncompleteCheckpointError):
            share_files(listings, nodes, domains)
        return
    shares = share_files(listings, nodes, domains)
    for ranks in domains:
        sent = [file.path for rank in ranks for file in shares[rank].send]
        there = {f for rank in ranks for f in seen[rank // per_node]}
        assert sorted(sent) == sorted(there)
        for rank in ranks:
            assert {f.path for f in shares[rank].send} <= seen[rank // per_node]
