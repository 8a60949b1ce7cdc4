"""Rows 2, 3, 9, 18 and 21 of the needs: what goes wrong elsewhere, on stock torch, and not here.

Each test has both halves: stock torch with the failure, so that the test is known to see it, and
ckptfs in the same circumstances.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

import ckptfs
from ckptfs.errors import CkptfsError, UriError
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Action, FaultyStorage, Plan
from tests.multiprocess.harness import Rank, Result, describe, launch

ROWS = 8


def sharded(rank: Rank, value: float) -> dict[str, Any]:
    """Each rank's rows, and a replicated tensor, tell ``value``."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", list(range(rank.size)))
    local = torch.full((ROWS // rank.size, 3), value)
    return {"w": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.full((4,), value)}


def whole(value: float) -> dict[str, Any]:
    """The same state, unsharded, for one process."""
    return {"w": torch.full((ROWS, 3), float(value)), "b": torch.full((4,), float(value))}


def values_of(state: dict[str, Any]) -> set[float]:
    """Every value that occurs in a whole state; one of them unless it is a mix."""
    return {v for tensor in state.values() for v in tensor.flatten().tolist()}


def stock_values(directory: Path | str) -> set[float]:
    """What stock DCP loads from a directory, in one process, without complaint."""
    state = whole(-1)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return values_of(state)


def our_values(uri: Path | str) -> set[float]:
    """What ckptfs loads."""
    state = whole(-1)
    ckptfs.load(state, uri)
    return values_of(state)


# -- row 2: overwriting, killed half way ---------------------------------------------------------


def stock_overwrites(rank: Rank) -> None:
    """Stock DCP saves 1, then 2 over it; rank 1 dies before its data, rank 0 after its own."""
    rank.init_group()
    where = rank.args["at"]
    dcp.save(sharded(rank, 1.0), checkpoint_id=where)

    class Dies(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if rank.number == 1:
                rank.hold("die")
            future = super().write_data(plan, planner)
            future.wait()
            rank.tell("wrote")
            rank.hold("die")
            return future

    dcp.save(sharded(rank, 2.0), storage_writer=Dies(where), checkpoint_id=where)


def we_replace(rank: Rank) -> Any:
    """ckptfs saves 1, then 2 over it; rank 1 is killed half way through its data."""
    rank.init_group()
    where = rank.args["at"]
    ckptfs.save(sharded(rank, 1.0), where)
    if rank.number == 1:
        os.environ["CKPTFS_TEST_FAULT"] = "kill-half:write:*__1_0.distcp:1"
    try:
        ckptfs.save(sharded(rank, 2.0), f"faults+file://{where}", if_exists="replace")
    except CkptfsError as error:
        return describe(error)
    return None


def test_row2_an_overwrite_killed_half_way(tmp_path: Path) -> None:
    """Stock then loads a mix of old and new without an error; here it is the old one, bit for bit."""
    stock, ours = tmp_path / "stock" / "step_1", tmp_path / "run" / "step_1"
    with launch(stock_overwrites, 2, args={"at": str(stock)}) as ranks:
        ranks.wait("wrote", rank=0)
        ranks.kill(0)
        ranks.kill(1)
        ranks.results()
    assert stock_values(stock) == {1.0, 2.0}, "the control: no error, and half of each"
    with launch(we_replace, 2, args={"at": str(ours)}) as ranks:
        alive, dead = ranks.results()
    assert dead.died
    assert alive.value["type"].endswith("CollectiveError")
    assert list(alive.value["data"]["failures"]) == ["1"]
    for _ in range(2):
        assert our_values(ours) == stock_values(ours) == {1.0}
        ckptfs.prepare_run(tmp_path / "run", takeover="force").release()
    assert list((tmp_path / "run" / ".ckptfs" / "attempts").iterdir()) == []


# -- row 3: the window without .metadata ---------------------------------------------------------


def stock_dies_in_finish(rank: Rank) -> None:
    """Overwrite with stock DCP and die in the window: the rename is the first thing after it opens."""
    where = rank.args["at"]
    dcp.save(whole(1.0), checkpoint_id=where, no_dist=True)
    assert stock_values(where) == {1.0}

    class Dies(FileSystem):
        def rename(self, path: Any, new_path: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = dcp.FileSystemWriter(where)
    writer.fs = Dies()
    dcp.save(whole(2.0), storage_writer=writer, checkpoint_id=where, no_dist=True)


class Watching(Plan):
    """No fault, but ``look()`` before every storage operation; remembers what it saw."""

    def __init__(self, look: Callable[[], set[float]]) -> None:
        super().__init__([])
        self._look = look
        self._one_at_a_time = threading.Lock()
        self.seen: list[tuple[str, str, set[float]]] = []

    def begin(self, op: str, key: str) -> Action | None:
        """Look, then continue."""
        with self._one_at_a_time:
            self.seen.append((op, key, self._look()))
        return super().begin(op, key)


_plans: dict[str, Plan] = {}


def open_watched(uri: Any, storage_options: Any) -> FaultyStorage:
    """A backend for this test: a local disk under the plan that was left for its path."""
    inner = LocalStorage(uri.with_protocol("file"))
    return FaultyStorage(inner, _plans[inner.root.path], root=uri)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run with a watch on every storage operation; its URI without the protocol."""
    site = tmp_path / "site"
    (site / "watched-1.dist-info").mkdir(parents=True)
    (site / "watched-1.dist-info" / "METADATA").write_text("Name: watched\nVersion: 1\n")
    (site / "watched-1.dist-info" / "entry_points.txt").write_text(
        "[ckptfs.backends]\nwatched = watched_disk:open_watched\n"
    )
    (site / "watched_disk.py").write_text(
        f"import sys\nopen_watched = sys.modules[{__name__!r}].open_watched\n"
    )
    monkeypatch.syspath_prepend(site)
    yield str(tmp_path / "run")
    _plans.clear()


def test_row3_stock_finish_has_a_window_without_metadata(tmp_path: Path) -> None:
    """The control: killed between its removal and the rename, nothing can be loaded any more."""
    where = tmp_path / "step_1"
    with launch(stock_dies_in_finish, 1, args={"at": str(where)}) as ranks:
        assert ranks.results()[0].died, ranks.logs()
    assert not (where / ".metadata").exists()
    with pytest.raises(dcp.api.CheckpointException):
        stock_values(where)


def test_row3_while_we_replace_every_moment_has_a_whole_checkpoint(watched: str) -> None:
    """Before each operation of two replaces stock loads the old or the new state, never neither."""
    where = f"{watched}/step_1"
    ckptfs.save(whole(1.0), where)
    for old, new in ((1.0, 2.0), (2.0, 3.0)):
        plan = _plans[watched] = Watching(lambda: stock_values(where))
        with ckptfs.prepare_run(f"watched://{watched}") as held:
            ckptfs.save(whole(new), f"watched://{where}", run=held, if_exists="replace")
        found = [values for _, _, values in plan.seen]
        assert len(found) > 50
        assert all(len(values) == 1 for values in found), "a mix"
        order = [values.copy().pop() for values in found]
        assert order == sorted(order), "back in time"
        assert {order[0], *our_values(where), *stock_values(where)} == {old, new}
        assert (old in order, new in order) == (True, True)


# -- row 9: rank 0 raises before the barrier -----------------------------------------------------


class Broken:
    """A model with a state that cannot be taken."""

    def state_dict(self) -> dict[str, Any]:
        """Out of memory, say."""
        raise MemoryError("no memory for the state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not used."""


class Whole(Broken):
    """The same one on a rank where it can."""

    def state_dict(self) -> dict[str, Any]:
        """Something to save."""
        return {"x": torch.ones(3)}


def told(call: Callable[[], object]) -> dict[str, Any]:
    """How a call failed."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return describe(error)
    return {"type": "", "message": "", "data": {}}


def rank_0_raises(rank: Rank) -> Any:
    """On stock: rank 0 never comes to the save. With ckptfs: in the state, in a block, and never."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    rank.init_group()
    run = rank.args["run"]
    impatient = dist.new_group(timeout=timedelta(seconds=6))
    stock: dict[str, Any] = {}
    if rank.number != 0:  # rank 0 raised and was caught further up: its process lives
        stock = told(
            lambda: dcp.save(whole(1), checkpoint_id=f"{run}/stock", process_group=impatient)
        )
    state = {"model": Broken() if rank.number == 0 else Whole()}
    in_state = told(lambda: ckptfs.save(state, f"{run}/step_1"))

    def leave_a_block() -> None:
        with ckptfs.checkpoint_dir(f"{run}/d_1") as path:
            Path(path, f"part-{rank.number}").write_text("x")
            if rank.number == 0:
                raise MemoryError("no memory in the block")

    in_block = told(leave_a_block)
    rank.tell("done")
    never: dict[str, Any] = {}
    if rank.number == 0:
        rank.hold("end")
    else:
        never = told(lambda: ckptfs.save(whole(1), f"{run}/step_1", timeout_s=6))
    return {"stock": stock, "state": in_state, "block": in_block, "never": never}


def test_row9_rank_0_raises_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Stock's other ranks learn nothing until a watchdog ends them; ours hear what rank 0 met."""
    with launch(rank_0_raises, 3, args={"run": str(tmp_path / "run")}) as ranks:
        others = ranks.results(ranks=[1, 2])
        ranks.release("end", rank=0)
        first = ranks.results(ranks=[0])[0]
    assert [r.error for r in (first, *others)] == [None] * 3
    for result in others:
        assert "no memory" not in result.value["stock"]["message"]
        assert result.value["stock"]["type"], "the control: the watchdog of 6 s ended it"
    all_of_them: list[Result] = [first, *others]
    for result in all_of_them:
        raised = result.value["state"]
        assert raised["type"].endswith("CollectiveError")
        assert list(raised["data"]["failures"]) == ["0"]
        assert "no memory for the state" in raised["message"]
    assert first.value["block"]["type"].endswith("MemoryError"), "its own exception, untouched"
    for result in others:
        assert "no memory in the block" in result.value["block"]["message"]
        assert result.value["never"]["type"].endswith("DeadlineError")
        assert result.value["never"]["data"]["silent"] == [0]
    assert ckptfs.list_checkpoints(tmp_path / "run") == []


# -- row 18: a URI handed to a Path --------------------------------------------------------------


@pytest.mark.parametrize(
    "uri",
    [Path("s3://bucket/run/step_1"), "s3:/bucket/run/step_1", Path("gs://b/run/step_1")],
    ids=["Path", "text", "gs"],
)
def test_row18_a_uri_that_was_a_path_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: Path | str
) -> None:
    """Stock makes ./s3:; here every public function is a UriError that shows how to write it."""
    monkeypatch.chdir(tmp_path)

    def directory() -> None:
        with ckptfs.checkpoint_dir(uri):
            pass

    for call in (
        lambda: ckptfs.save({"x": 1}, uri),
        lambda: ckptfs.load({"x": 1}, uri),
        lambda: ckptfs.save_object(1, uri),
        lambda: ckptfs.load_object(uri),
        lambda: ckptfs.ensure_dir(uri),
        lambda: ckptfs.prepare_run(uri),
        lambda: ckptfs.latest(uri),
        lambda: ckptfs.list_checkpoints(uri),
        directory,
    ):
        with pytest.raises(UriError, match="://"):
            call()
    # torch asks the writer for its checkpoint_id before anything: no CheckpointException around it.
    with pytest.raises(UriError, match="://"):
        dcp.save({"x": 1}, storage_writer=ckptfs.StorageWriter(uri), no_dist=True)
    assert os.listdir(tmp_path) == []
    with contextlib.suppress(FileExistsError):
        dcp.save({"x": 1}, storage_writer=dcp.FileSystemWriter(uri), no_dist=True)
    [made] = os.listdir(tmp_path)
    assert made.endswith(":"), "the control"


# -- row 21: memory:// with two ranks ------------------------------------------------------------


def memory_by_two(rank: Rank) -> Any:
    """Stock over fsspec's memory, ckptfs over both memories."""
    import fsspec
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    warnings.simplefilter("ignore")
    rank.init_group()
    dcp.save(sharded(rank, 1.0), storage_writer=FsspecWriter("memory://stock"))
    stock = sorted(
        os.path.basename(path) for path in fsspec.filesystem("memory").ls("/stock", detail=False)
    )
    ours = [
        told(lambda uri=uri: ckptfs.save(sharded(rank, 1.0), uri))  # type: ignore[misc]
        for uri in ("memory://store/run/step_1", "fsspec+memory://store/run/step_1")
    ]
    return {"stock": stock, "ours": ours, "empty": fsspec.filesystem("memory").find("/store") == []}


@pytest.mark.parametrize("launcher_env", [True, False], ids=["torchrun", "by hand"])
def test_row21_memory_with_two_processes_is_refused(*, launcher_env: bool) -> None:
    """Stock "succeeds" with half a checkpoint in each process; ours is an error on all ranks."""
    with launch(memory_by_two, 2, launcher_env=launcher_env) as ranks:
        values = ranks.values()
    assert [".metadata" in v["stock"] for v in values] == [True, False], "the control"
    for value in values:
        for raised in value["ours"]:
            assert raised["type"].endswith(("UriError", "CollectiveError")), raised
            assert "one process" in raised["message"]
        assert value["empty"]
