"""torch.distributed.checkpoint through ckptfs.StorageWriter and StorageReader, in all its variants.

One launch of three ranks runs every scenario in order (``SCENARIOS``), one of two runs those of DCP's
own process; each test reads its own. What more is shown of the pair, failures above all, is in
tests/dcp/test_dcp_api.py.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.planners import Doubling, FewerPlanner, HalfPlanner, RenamingPlanner
from tests.integrations.running import Kill, Mode, Store, story
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, every_one, launch

pytestmark = pytest.mark.integrations

RANKS = 3


# -- inside the ranks ----------------------------------------------------------------------------


def state_of(ranks: int | list[int], value: float = 1.0) -> dict[str, Any]:
    """A sharded tensor, a replicated one, and plain values in a nest."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", list(range(ranks)) if isinstance(ranks, int) else ranks)
    whole = torch.arange(24.0).reshape(12, 2) * value
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "nest": {"plain": torch.full((3,), value), "step": int(value), "list": [1, {"a": 2}]},
    }


def seen(state: dict[str, Any]) -> list[Any]:
    """Its values on this rank."""
    local = state["sharded"].to_local() if hasattr(state["sharded"], "to_local") else None
    nest = state["nest"]
    return [local.tolist() if local is not None else None, nest["plain"].tolist(), nest["step"]]


def same(uri: str, ranks: int | list[int], value: float = 1.0, **how: Any) -> list[bool]:
    """Whether our reader and stock's find what was saved. how: for dcp.load."""
    found = []
    for reader in (ckptfs.StorageReader(uri), dcp.FileSystemReader(uri)):
        state = state_of(ranks, 0.0)
        dcp.load(state, storage_reader=reader, **how)
        found.append(seen(state) == seen(state_of(ranks, value)))
    return found


def failure(call: Callable[[], Any]) -> list[str]:
    """What a call raises: its type, and those of ours in torch's exception; or that it does not."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        inner = sorted({type(e[0]).__name__ for e in getattr(error, "failures", {}).values()})
        return [type(error).__name__, *inner]
    return ["nothing"]


def checkpoint_id_alone(rank: Rank, uri: str) -> Any:
    """A writer and a reader made without a URI, for several checkpoints."""
    writer, reader = ckptfs.StorageWriter(), ckptfs.StorageReader()
    for number in (1, 2):
        state = state_of(rank.size, number)
        dcp.save(state, storage_writer=writer, checkpoint_id=f"{uri}_{number}")
    found: list[Any] = []
    for number in (1, 2):
        state = state_of(rank.size, 0.0)
        dcp.load(state, storage_reader=reader, checkpoint_id=f"{uri}_{number}")
        found.append(seen(state) == seen(state_of(rank.size, number)))
    found.append(failure(lambda: dcp.save(state, storage_writer=ckptfs.StorageWriter())))
    found.append(failure(lambda: dcp.load(state, storage_reader=ckptfs.StorageReader())))
    return found


def save_planners(rank: Rank, uri: str) -> Any:
    """DefaultSavePlanner's options, and planners of users."""
    found: dict[str, Any] = {}
    for name, planner in {
        "flat": DefaultSavePlanner(flatten_sharded_tensors=False),
        "lowest": DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        "cached": DefaultSavePlanner(enable_plan_caching=True),
        "half": HalfPlanner(),
    }.items():
        writer = ckptfs.StorageWriter(f"{uri}_{name}")
        state = {**state_of(rank.size), "tenth": torch.tensor(0.1)}
        dcp.save(state, storage_writer=writer, planner=planner)
        found[name] = same(f"{uri}_{name}", rank.size)
    metadata: Any = dcp.FileSystemReader(f"{uri}_half").read_metadata()
    found["dtype"] = str(metadata.state_dict_metadata["sharded"].properties.dtype)
    tenth = {"tenth": torch.tensor(0.0)}
    dcp.load(tenth, storage_reader=ckptfs.StorageReader(f"{uri}_half"))
    found["tenth"] = tenth["tenth"].item()
    return found


def nested(rank: Rank, uri: str) -> Any:
    """flatten_state_dict=False on both sides: a nest is one object."""
    nest = {"nest": {"a": [1, 2], "t": torch.ones(2)}}
    whole = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(nest, storage_writer=ckptfs.StorageWriter(uri), planner=whole)
    found = []
    for reader in (ckptfs.StorageReader(uri), dcp.FileSystemReader(uri)):
        state: dict[str, Any] = {"nest": {}}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(state, storage_reader=reader, planner=planner)
        found.append([state["nest"]["a"], state["nest"]["t"].tolist()])
    return found


def load_planners(rank: Rank, uri: str) -> Any:
    """DefaultLoadPlanner's options, and planners of users."""
    old = {"old": state_of(rank.size)}
    dcp.save(old, storage_writer=ckptfs.StorageWriter(f"{uri}_old"))
    dcp.save(state_of(rank.size), storage_writer=ckptfs.StorageWriter(f"{uri}_new"))
    renamed = state_of(rank.size, 0.0)
    reader = ckptfs.StorageReader(f"{uri}_old")
    dcp.load(renamed, storage_reader=reader, planner=RenamingPlanner())
    fewer = state_of(rank.size, 0.0)
    reader = ckptfs.StorageReader(f"{uri}_new")
    dcp.load(fewer, storage_reader=reader, planner=FewerPlanner())
    more = {**state_of(rank.size, 0.0), "new": torch.zeros(2)}
    strict = failure(lambda: dcp.load(dict(more), storage_reader=reader))
    dcp.load(more, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    expected = seen(state_of(rank.size))
    return [
        seen(renamed) == expected,
        seen(fewer) == [expected[0], [0.0] * 3, 0],
        strict,
        seen(more) == expected and more["new"].tolist() == [0.0, 0.0],
    ]


def by_keys(rank: Rank, uri: str) -> Any:
    """Without a state dict to load into: torch asks the reader for its metadata twice."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    dcp.save(state_of(rank.size), storage_writer=ckptfs.StorageWriter(uri))
    loaded = _load_state_dict_from_keys({"nest.plain"}, storage_reader=ckptfs.StorageReader(uri))
    whole: Any = None
    if rank.number == 0:
        dcp_to_torch_save(uri, f"{uri}.pt")
        whole = torch.load(f"{uri}.pt")["sharded"].flatten().tolist() == list(map(float, range(24)))
    return [loaded["nest"]["plain"].tolist(), whole]


def subgroups(rank: Rank, uri: str) -> Any:
    """Ranks 1 and 2, rank 0 at work elsewhere; the writer does not know the group."""
    import torch.distributed as dist

    group = dist.new_group([1, 2])
    if rank.number == 0:
        alone = {"x": torch.ones(2)}
        dcp.save(alone, storage_writer=ckptfs.StorageWriter(f"{uri}_alone"), no_dist=True)
        return None
    members = [1, 2]
    dcp.save(state_of(members), storage_writer=ckptfs.StorageWriter(uri), process_group=group)
    found = same(uri, members, process_group=group)
    future: Any = dcp.async_save(
        state_of(members, 2.0),
        storage_writer=ckptfs.StorageWriter(f"{uri}_async"),
        process_group=group,
    )
    future.result()
    return [*found, *same(f"{uri}_async", members, 2.0, process_group=group)]


class Announcing(ckptfs.StorageWriter):
    """Says over the default group's store that this rank has come to a save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As it is, and a key."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        store_of_all().set("announced", "yes")


def store_of_all() -> Any:
    """The default group's store."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def groups_alike(rank: Rank) -> Any:
    """Two groups and one URI as it is typed, on disks of their own: rank 2 is first, its peer saves twice."""
    import torch.distributed as dist

    rank.init_group()
    groups, found = [dist.new_group([0, 1]), dist.new_group([1, 2])], []
    for number in {0: [0], 1: [0, 1], 2: [1]}[rank.number]:
        folder = Path(rank.args["folder"]) / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        kind = Announcing if rank.number == 2 else ckptfs.StorageWriter
        if number == 0:
            store_of_all().wait(["announced"])
        writer = kind("run/step_1", process_group=groups[number], timeout_s=400)
        state = {"x": torch.full((2,), float(number))}
        saved = failure(
            lambda: dcp.save(state, storage_writer=writer, process_group=groups[number])  # noqa: B023
        )
        found.append([number, saved])
    return found


def alone(rank: Rank, uri: str) -> Any:
    """no_dist: rank 0 saves, synchronously and not, and loads what all ranks saved."""
    dcp.save(state_of(rank.size), storage_writer=ckptfs.StorageWriter(uri))
    if rank.number > 0:
        return None
    whole: dict[str, Any] = {"sharded": torch.zeros(12, 2), "nest": {"plain": torch.zeros(3)}}
    dcp.load(whole, storage_reader=ckptfs.StorageReader(uri), no_dist=True)
    future: Any = dcp.async_save(
        whole, storage_writer=ckptfs.StorageWriter(f"{uri}_mine"), no_dist=True
    )
    future.result()
    again = {"sharded": torch.zeros(12, 2)}
    dcp.load(again, storage_reader=ckptfs.StorageReader(f"{uri}_mine"), no_dist=True)
    return [whole["sharded"].sum().item(), again["sharded"].sum().item()]


def stagers(rank: Rank, uri: str) -> Any:
    """Stock's stagers, one that stages in the background, and somebody's own."""
    found = {}
    for name, stager, value in (
        ("background", DefaultStager(StagingOptions(False, False, True, False)), 1.0),  # noqa: FBT003
        ("blocking", BlockingAsyncStager(), 1.0),
        ("own", Doubling(), 2.0),
    ):
        state = state_of(rank.size)
        writer = ckptfs.StorageWriter(f"{uri}_{name}")
        told: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        if hasattr(told, "staging_completion"):
            told.staging_completion.result()
            told = told.upload_completion
        state["sharded"].to_local().fill_(-1.0)  # it is staged: training continues
        told.result()
        found[name] = same(f"{uri}_{name}", rank.size, value)
        stager.close()
    return found


def async_fails(rank: Rank, uri: str) -> Any:
    """A background save that rank 1 cannot write, then one that it can."""
    if rank.number == 1:
        os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:close:*__1_0.distcp:1"
    future: Any = dcp.async_save(
        state_of(rank.size), storage_writer=ckptfs.StorageWriter(f"faults+file://{uri}")
    )
    failed = failure(future.result)
    os.environ.pop("CKPTFS_TEST_FAULT", None)
    future = dcp.async_save(state_of(rank.size), storage_writer=ckptfs.StorageWriter(uri))
    future.result()
    return [failed, same(uri, rank.size)]


def held_run(rank: Rank, uri: str) -> Any:
    """A held run fences what is saved, wherever checkpoint_id moves the writer within it."""
    folder = os.path.dirname(uri) + "_held"
    with ckptfs.prepare_run(folder) as run:
        writer = ckptfs.StorageWriter(run=run)
        dcp.save(state_of(rank.size), storage_writer=writer, checkpoint_id=f"{folder}/step_1")
        there = failure(
            lambda: dcp.save(state_of(rank.size), storage_writer=writer, checkpoint_id=uri)
        )
        with ckptfs.prepare_run(folder, takeover="force"):
            fenced = failure(
                lambda: dcp.save(
                    state_of(rank.size), storage_writer=writer, checkpoint_id=f"{folder}/step_2"
                )
            )
    return [there, fenced, [c.step for c in ckptfs.list_checkpoints(folder)]]


class Talks:
    """An object that loads by a collective of its own kind: two in another order would hang."""

    def __init__(self, reduces: bool) -> None:
        self.reduces = reduces
        self.loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Nothing: torch's save, unlike its load, calls objects in each rank's own order."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A word with all others."""
        assert state == {}
        self._talk()
        self.loaded = True

    def _talk(self) -> None:
        import torch.distributed as dist

        mine = torch.ones(2)
        if self.reduces:
            dist.all_reduce(mine)
        else:
            dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], mine)


def in_one_order(rank: Rank, uri: str) -> Any:
    """Ranks that have their objects in another order; each object talks to all."""

    def state() -> dict[str, Any]:
        parts = [("a", Talks(reduces=True)), ("b", Talks(reduces=False)), ("n", {"step": 1})]
        return dict(parts if rank.number == 0 else parts[::-1])

    dcp.save(state(), storage_writer=ckptfs.StorageWriter(uri))
    ckptfs.save(state(), f"{uri}_own")
    found = []
    for place in (uri, f"{uri}_own"):
        loaded = state()
        dcp.load(loaded, storage_reader=ckptfs.StorageReader(place))
        found += [loaded["a"].loaded, loaded["b"].loaded]
        loaded = state()
        ckptfs.load(loaded, place)
        found += [loaded["a"].loaded, loaded["b"].loaded]
    return found


SCENARIOS: list[Callable[[Rank, str], Any]] = [
    checkpoint_id_alone,
    save_planners,
    nested,
    load_planners,
    by_keys,
    subgroups,
    alone,
    stagers,
    async_fails,
    held_run,
    in_one_order,
]


def run_scenarios(rank: Rank) -> dict[str, Any]:
    """All of them in order; a scenario's unexpected error is its result."""
    warnings.simplefilter("ignore")
    rank.init_group()
    claims = {scenario.__name__: scenario for scenario in SCENARIOS}
    return every_one(rank, claims, rank.args["run"])


def own_process(rank: Rank) -> Any:
    """async_save in DCP's own process: planner and stager, a failure, then one that never ends."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    warnings.simplefilter("ignore")
    rank.init_group()
    run, kind = rank.args["run"], AsyncCheckpointerType.PROCESS
    os.environ["CKPTFS_TEST_FAULT"] = rank.args["fault"]  # its process has it from here

    def save(step: int, **how: Any) -> Any:
        uri = f"{how.pop('scheme', '')}{run}/step_{step}"
        writer = ckptfs.StorageWriter(uri, if_exists="replace")
        state = state_of(rank.size, step)
        return dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, **how)

    shared = DefaultStager(StagingOptions(False, True, False, False))  # noqa: FBT003
    save(1, planner=HalfPlanner(), async_stager=shared).result()
    found: list[Any] = [same(f"{run}/step_1", rank.size)]
    found.append(failure(save(2, scheme="faults+file://").result))
    save(2).result()
    found.append(same(f"{run}/step_2", rank.size, 2.0))
    rank.tell("found", found=found)
    rank.hold("go")
    save(3, scheme="faults+file://")
    process: Any = executor._CHECKPOINT_PROCESS
    rank.tell("saving", process=process._save_process.pid)
    rank.hold("never")
    return None


def after_own_process(rank: Rank) -> Any:
    """What is there, and whether it can continue."""
    warnings.simplefilter("ignore")
    rank.init_group()
    run = rank.args["run"]
    there = [c.step for c in ckptfs.list_checkpoints(run)]
    state = state_of(rank.size, 0.0)
    dcp.load(state, storage_reader=ckptfs.StorageReader(f"{run}/step_2"))
    with ckptfs.prepare_run(run) as held:
        writer = ckptfs.StorageWriter(f"{run}/step_3", run=held)
        dcp.save(state_of(rank.size, 3.0), storage_writer=writer)
    return [there, seen(state) == seen(state_of(rank.size, 2.0)), same(f"{run}/step_3", 2, 3.0)]


# -- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Every scenario's result on every rank."""
    run = tmp_path_factory.mktemp("dcp") / "run"
    with launch(run_scenarios, RANKS, args={"run": str(run)}) as ranks:
        yield ranks.values()


def test_killed_mid_save_it_resumes_bit_identically(store: Store, mode: Mode, cell: Cell) -> None:
    """The example of the page, killed when a rank's part of the fourth save is written."""
    with cell("DCP", store, mode, package="torch"):
        story("dcp", store, mode, kill=Kill("close", "*__1_0.distcp", nth=4, rank=1))


def test_checkpoint_id_may_tell_each_place(outcomes: Any) -> None:
    """One writer and one reader made without a URI serve several; without any place, an error."""
    for outcome in outcomes:
        first, second, save, load = outcome["checkpoint_id_alone"]
        assert first
        assert second
        assert save == ["CheckpointException", "StateError"]
        assert load[0] == "CheckpointException"


def test_save_planners_are_obeyed(outcomes: Any) -> None:
    """Options of DefaultSavePlanner and a planner that changes dtypes: both readers read them."""
    for outcome in outcomes:
        assert outcome["save_planners"] == {
            "flat": [True, True],
            "lowest": [True, True],
            "cached": [True, True],
            "half": [True, True],
            "dtype": "torch.float16",
            "tenth": torch.tensor(0.1).half().item(),
        }
        assert outcome["nested"] == [[[1, 2], [1.0, 1.0]]] * 2


def test_load_planners_are_obeyed(outcomes: Any) -> None:
    """A planner that renames, one that loads less, and allow_partial_load, which is off by default."""
    for outcome in outcomes:
        renamed, fewer, strict, more = outcome["load_planners"]
        assert renamed
        assert fewer
        assert more
        assert strict == ["CheckpointException", "RuntimeError"]


def test_torchs_own_tools_read_it(outcomes: Any) -> None:
    """Loading by keys alone, and dcp_to_torch_save."""
    wholes = []
    for outcome in outcomes:
        plain, whole = outcome["by_keys"]
        assert plain == [1.0] * 3
        wholes.append(whole)
    assert wholes == [True, None, None]


def test_subgroups_without_rank_0_save_and_load(outcomes: Any) -> None:
    """process_group= of dcp.save and async_save is enough; rank 0 saves by itself at the same time."""
    assert [o["subgroups"] for o in outcomes] == [None, [True] * 4, [True] * 4]


def test_groups_that_save_at_once_by_one_name(tmp_path: Path) -> None:
    """A relative path, or a disk of each node: what a rank says to its group no other group hears."""
    saved = ["nothing"]
    with launch(groups_alike, RANKS, args={"folder": str(tmp_path)}) as ranks:
        assert ranks.values() == [
            [[0, saved]],
            [[0, saved], [1, saved]],
            [[1, saved]],
        ]
    for number in (0, 1):
        state = {"x": torch.zeros(2)}
        dcp.load(state, storage_reader=ckptfs.StorageReader(tmp_path / f"{number}/run/step_1"))
        assert state["x"].tolist() == [number, number]


def test_no_dist_on_one_rank_of_many(outcomes: Any) -> None:
    """One rank loads what all saved, and saves by itself, in the background too."""
    assert [o["alone"] for o in outcomes] == [[276.0, 276.0], None, None]


def test_stagers_are_obeyed(outcomes: Any) -> None:
    """A stager in the background, a blocking one and one of somebody's own; tensors may change."""
    for outcome in outcomes:
        assert outcome["stagers"] == {
            "background": [True, True],
            "blocking": [True, True],
            "own": [True, True],
        }


def test_a_background_failure_reaches_every_rank(outcomes: Any) -> None:
    """The future of every rank has the failed rank's error, and the next save works."""
    for outcome in outcomes:
        failed, after = outcome["async_fails"]
        assert failed == ["CheckpointException", "NoSpaceError"]
        assert after == [True, True]


def test_objects_that_talk_are_called_in_one_order(outcomes: Any) -> None:
    """Whatever order each rank has them in, by every way in and out."""
    for outcome in outcomes:
        assert outcome["in_one_order"] == [True] * 8


def test_a_held_run_fences_the_writer(outcomes: Any) -> None:
    """checkpoint_id cannot lead it out of its run, and after a takeover it commits nothing."""
    for outcome in outcomes:
        elsewhere, fenced, steps = outcome["held_run"]
        assert elsewhere == ["CheckpointException", "StateError"]
        assert fenced == ["CheckpointException", "FencedError"]
        assert steps == [1]


def test_dcps_own_process_fails_and_dies_without_harm(tmp_path: Path) -> None:
    """PROCESS: planner, shared stager; its failure is raised on all ranks; killed, it leaves step 2."""
    run, held = tmp_path / "run", tmp_path / "held"
    held.touch()  # no rank is held before it is gone
    faults = f"hold={held}:open_write:*__?_0.distcp:1;fail=ENOSPC:close:*__1_0.distcp:1"
    args = {"run": str(run), "fault": faults}
    with launch(own_process, 2, args=args, warm=False) as ranks:
        found = [ranks.wait("found", rank=n)["found"] for n in range(2)]
        held.unlink()
        reached = Path(f"{held}.reached")
        reached.unlink()
        ranks.release("go")
        processes = [ranks.wait("saving", rank=n)["process"] for n in range(2)]
        deadline = time.monotonic() + 240
        while not reached.exists():
            assert time.monotonic() < deadline, ranks.logs()
            time.sleep(0.02)  # polling for what another process does; bounded by the deadline
        for number, process in enumerate(processes):
            os.kill(process, signal.SIGKILL)
            ranks.kill(number)
    assert found == [[[True, True], ["CheckpointException", "NoSpaceError"], [True, True]]] * 2
    with launch(after_own_process, 2, args=args) as ranks:
        assert ranks.values() == [[[1, 2], True, [True, True]]] * 2


class WorkerFails(DefaultSavePlanner):
    """Data that cannot be had on any thread but the caller's, which waits until one has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed, self.caller = threading.Event(), threading.current_thread()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if threading.current_thread() is not self.caller:
            self.failed.set()
            raise OSError(errno.EIO, "the device is gone")
        assert self.failed.wait(240)
        return super().resolve_data(write_item)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_a_worker_thread_is_not_swallowed(tmp_path: Path) -> None:
    """pytorch #191391: stock commits without the files of the thread that failed; ours does not."""
    state = {f"t{n}": torch.ones(4) for n in range(8)}
    stock = dcp.FileSystemWriter(f"{tmp_path}/stock", thread_count=2)
    dcp.save(state, storage_writer=stock, planner=WorkerFails(), no_dist=True)
    assert Path(tmp_path, "stock", ".metadata").exists(), "stock calls it saved"
    for name in ("stock", "ours"):
        reader = dcp.FileSystemReader(f"{tmp_path}/{name}")
        blank = {key: torch.zeros(4) for key in state}
        with pytest.raises(CheckpointException):
            dcp.load(blank, storage_reader=reader, no_dist=True)
    ours = ckptfs.StorageWriter(f"{tmp_path}/ours", threads=2)
    with pytest.raises(CheckpointException, match="the device is gone"):
        dcp.save(state, storage_writer=ours, planner=WorkerFails(), no_dist=True)
    assert [c.uri.name for c in ckptfs.list_checkpoints(tmp_path)] == ["stock"]


class SecondFails(DefaultSavePlanner):
    """The first tensor is written, the second cannot be had."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "b":
            raise OSError(errno.EIO, "the device is gone")
        return super().resolve_data(write_item)


def test_stock_leaves_a_truncated_object(lab_s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's bug: a save that fails mid-file uploads what it had, under the final name."""
    for name, value in lab_s3.environment.items():
        monkeypatch.setenv(name, value)
    state = {"a": torch.ones(1000), "b": torch.ones(1000)}
    run = lab_s3.uri(f"run-{uuid.uuid4().hex[:8]}")
    with pytest.raises(CheckpointException):
        dcp.save(state, checkpoint_id=f"{run}/stock", planner=SecondFails(), no_dist=True)
    ours = ckptfs.StorageWriter(f"{run}/ours")
    with pytest.raises(CheckpointException, match="the device is gone"):
        dcp.save(state, storage_writer=ours, planner=SecondFails(), no_dist=True)
    files = fsspec.filesystem("s3")
    there = [name.split("/")[-2:] for name in files.find(run) if "/.ckptfs/" not in name]
    assert there == [["stock", "__0_0.distcp"]]


def test_stock_and_ours_read_each_other_by_uri(store: Store) -> None:
    """On S3 through plain s3://, which stock reads with s3fs."""
    value = {"a": torch.arange(5.0), "b": {"c": 7}}
    dcp.save(value, storage_writer=ckptfs.StorageWriter(store / "step_1"), no_dist=True)
    dcp.save(value, checkpoint_id=store / "step_2", no_dist=True)
    ways: list[dict[str, Any]] = [
        {"checkpoint_id": store / "step_1"},
        {"storage_reader": ckptfs.StorageReader(store / "step_2")},
    ]
    for how in ways:
        state: dict[str, Any] = {"a": torch.zeros(5), "b": {"c": 0}}
        dcp.load(state, no_dist=True, **how)
        assert state["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert state["b"] == {"c": 7}


def test_places_that_are_none_are_told(store: Store, tmp_path: Path) -> None:
    """A file in the way, a missing bucket, an unknown scheme, nothing there: typed, and named."""
    blocked = str(tmp_path / "file")
    Path(blocked).touch()
    nowhere = {"file": f"{blocked}/run/step_1", "s3": "s3://there-is-no-such-bucket/run/step_1"}
    state = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointException) as failed:
        dcp.save(state, storage_writer=ckptfs.StorageWriter(nowhere[store.kind]), no_dist=True)
    [(error, _)] = failed.value.failures.values()
    assert isinstance(error, ckptfs.CollectiveError | ckptfs.StorageError)
    assert nowhere[store.kind].removesuffix("/run/step_1") in str(error)
    with pytest.raises(CheckpointException, match="step_9"):
        dcp.load(state, storage_reader=ckptfs.StorageReader(store / "step_9"), no_dist=True)
    with pytest.raises(CheckpointException, match="no backend knows nosuch"):
        dcp.save(state, storage_writer=ckptfs.StorageWriter("nosuch://a/b/c"), no_dist=True)


# -- one process ---------------------------------------------------------------------------------


class Watched(dict[str, Any]):
    """A state dict that says which keys were put into it."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.puts: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.puts.append(key)
        super().__setitem__(key, value)


class Nothing:
    """An object with an empty state, as a disabled GradScaler has."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """{}."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember it."""
        self.loads.append(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("own", [True, False])
def test_objects_with_an_empty_state_are_loaded_in_place(tmp_path: Path, own: bool) -> None:
    """They are given {}, and stay in the state dict; plain values are put there again. An empty state
    dict saves and loads too.
    """
    uri = tmp_path / "step_1"

    def save(state: dict[str, Any], place: Path) -> None:
        if own:
            ckptfs.save(state, place)
        else:
            dcp.save(state, storage_writer=ckptfs.StorageWriter(place))

    def load(state: dict[str, Any], place: Path) -> None:
        if own:
            ckptfs.load(state, place)
        else:
            dcp.load(state, storage_reader=ckptfs.StorageReader(place))

    save({"object": Nothing(), "plain": {"t": torch.ones(2), "n": [1, 2]}}, uri)
    state = Watched(object=Nothing(), plain={"t": torch.zeros(2), "n": []})
    kept = state["object"]
    load(state, uri)
    assert state["object"] is kept
    assert kept.loads == [{}]
    assert "object" not in state.puts
    assert (state["plain"]["t"].tolist(), state["plain"]["n"]) == ([1.0, 1.0], [1, 2])
    save({}, tmp_path / "step_2")
    load({}, tmp_path / "step_2")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nested_states_are_filled_in_place(tmp_path: Path) -> None:
    """What get_state_dict returned is the same object after a load, with the saved values: a learning
    rate too, which is no tensor.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def pair(lr: float) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 3)
        return model, torch.optim.Adam(model.parameters(), lr=lr)

    old, old_optimizer = pair(0.1)
    weights, moments = get_state_dict(old, old_optimizer)
    saved = {"model": weights, "optimizer": moments}
    dcp.save(saved, storage_writer=ckptfs.StorageWriter(tmp_path / "step_1"))
    model, optimizer = pair(0.2)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=ckptfs.StorageReader(tmp_path / "step_1"))
    assert state["model"] is weights
    assert state["optimizer"] is moments
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.weight, old.weight)
