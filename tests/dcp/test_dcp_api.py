"""torch's own dcp.save, async_save and dcp.load over StorageWriter and StorageReader, on real ranks.

One launch of three ranks runs every scenario in order (``SCENARIOS``); each test reads its own. That
later scenarios succeed after earlier ones failed is part of what is shown.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, every_one, launch

RANKS = 3


# -- inside the ranks ----------------------------------------------------------------------------


def _state(rank: Rank, size: int | None = None, ranks: Any = None) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", list(range(rank.size)) if ranks is None else ranks)
    return {
        "w": distribute_tensor(torch.arange(24.0).reshape(12, 2), mesh, [Shard(0)]),
        "n": {"step": 7, "plain": torch.ones(3)},
        "own": {"seed": rank.number},
    }


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    state["w"].to_local().zero_()
    return state | {"n": {"step": 0, "plain": torch.zeros(3)}, "own": {"seed": -1}}


def _seen(state: dict[str, Any]) -> list[Any]:
    return [state["w"].to_local().tolist(), state["n"]["step"], state["n"]["plain"].tolist()]


def _loads(rank: Rank, uri: str, ranks: Any = None, group: Any = None) -> list[Any]:
    """Is it equal through our reader, through stock's, and which rank's seed came back."""
    import torch.distributed.checkpoint as dcp

    import ckptfs

    expected = _seen(_state(rank, ranks=ranks))
    ours = _blank(_state(rank, ranks=ranks))
    reader = ckptfs.StorageReader(uri, process_group=group)
    dcp.load(ours, storage_reader=reader, process_group=group)
    stock = _blank(_state(rank, ranks=ranks))
    del stock["own"]
    dcp.load(stock, checkpoint_id=uri.removeprefix("faults+file://"), process_group=group)
    return [_seen(ours) == expected, _seen(stock) == expected, ours["own"]["seed"]]


def _writer(uri: str, **options: Any) -> Any:
    import ckptfs

    return ckptfs.StorageWriter(uri, per_rank=["own.*"], timeout_s=600, **options)


def _save(rank: Rank, uri: str, planner: Any = None, **options: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    dcp.save(_state(rank), storage_writer=_writer(uri, **options), planner=planner)


def _failures(rank: Rank, call: Callable[[], Any]) -> dict[str, Any]:
    """How a save failed: torch's exception, ours by rank, and how long it took."""
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return {
            "type": type(error).__name__,
            "failures": {
                str(r): [type(e[0]).__name__, str(e[0])]
                for r, e in getattr(error, "failures", {}).items()
            },
            "s": time.monotonic() - started,
            "text": str(error)[-2000:],
        }
    return {"type": None}


@contextlib.contextmanager
def _fault(rank: Rank, on: int, fault: str) -> Iterator[None]:
    if rank.number == on:
        os.environ["CKPTFS_TEST_FAULT"] = fault
    try:
        yield
    finally:
        os.environ.pop("CKPTFS_TEST_FAULT", None)


def sync(rank: Rank, uri: str) -> Any:
    """dcp.save with stock's planner."""
    _save(rank, uri)
    return _loads(rank, uri)


def own_planner(rank: Rank, uri: str) -> Any:
    """dcp.save with our planner and two writer threads."""
    from ckptfs.dcp.planning.save_planner import SavePlanner

    _save(rank, uri, SavePlanner(), threads=2)
    return _loads(rank, uri)


def async_thread(rank: Rank, uri: str) -> Any:
    """async_save in a thread."""
    import torch.distributed.checkpoint as dcp

    future: Any = dcp.async_save(_state(rank), storage_writer=_writer(uri))
    future.result()
    return _loads(rank, uri)


def reset_to_another_uri(rank: Rank, uri: str) -> Any:
    """Two saves with one writer."""
    import torch.distributed.checkpoint as dcp

    writer = _writer(uri + "_first")
    dcp.save(_state(rank), storage_writer=writer)
    dcp.save(_state(rank), storage_writer=writer, checkpoint_id=uri)
    return [_loads(rank, uri), _loads(rank, uri + "_first")]


def write_fails(rank: Rank, uri: str) -> Any:
    """No space for the data of rank 1."""
    import torch.distributed.checkpoint as dcp

    writer = _writer("faults+file://" + uri)  # kept: dropping it would tell its agent too
    with _fault(rank, 1, "fail=ENOSPC:write:*__1_0.distcp:1"):
        failed = _failures(rank, lambda: dcp.save(_state(rank), storage_writer=writer))
    left = _left_of_attempts(uri)
    _save(rank, uri)  # the name is free, and every agent is ready again
    return [failed, _loads(rank, uri), left]


def _left_of_attempts(uri: str) -> list[str]:
    """What is in attempts/ once the agents have cleaned up, or after two minutes."""
    attempts, deadline = Path(uri).parent / ".ckptfs" / "attempts", time.monotonic() + 120
    while (left := os.listdir(attempts)) and time.monotonic() < deadline:
        time.sleep(0.02)  # polling for what happens by itself; bounded by the deadline
    return left


def begin_fails(rank: Rank, uri: str) -> Any:
    """The owner cannot make the attempt's directory."""
    with _fault(rank, 0, "fail=EIO:make_dir:*/attempts/*:1"):
        failed = _failures(rank, lambda: _save(rank, "faults+file://" + uri))
    _save(rank, uri)
    return [failed, _loads(rank, uri)]


def seal_fails(rank: Rank, uri: str) -> Any:
    """The log is full."""
    with _fault(rank, 0, "fail=ENOSPC:create:*/log/*:*"):
        failed = _failures(rank, lambda: _save(rank, "faults+file://" + uri))
    import ckptfs

    there = [c.uri.name for c in ckptfs.list_checkpoints(os.path.dirname(uri))]
    return [failed, os.path.basename(uri) in there]


def planner_fails(rank: Rank, uri: str) -> Any:
    """A rank raises between begin and write_data."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    class Fails(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            if rank.number == 1:
                raise ValueError("planner of rank 1")
            return super().finish_plan(new_plan)

    failed = _failures(rank, lambda: _save(rank, uri, Fails()))
    _save(rank, uri)
    return [failed, _loads(rank, uri)]


def replacing_is_given_up(rank: Rank, uri: str) -> Any:
    """A replacing save, which claims the run, dies between two hooks; a new writer tries again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner

    class Fails(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            if rank.number == 1:
                raise ValueError("planner of rank 1")
            return super().finish_plan(new_plan)

    _save(rank, uri)
    first = _writer(uri, if_exists="replace")  # stays alive: its agent gets no word
    state = _state(rank)
    failed = _failures(rank, lambda: dcp.save(state, storage_writer=first, planner=Fails()))
    _save(rank, uri, if_exists="replace")
    return [failed, _loads(rank, uri), first.checkpoint_id]


def name_taken(rank: Rank, uri: str) -> Any:
    """The name is committed; then it is replaced, as it is by default."""
    _save(rank, uri)
    failed = _failures(rank, lambda: _save(rank, uri, if_exists="error"))
    _save(rank, uri)
    return [failed, _loads(rank, uri)]


def plan_caching(rank: Rank, uri: str) -> Any:
    """Three saves with stock's plan cache."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    found = []
    for number in range(3):
        _save(rank, f"{uri}_{number}", DefaultSavePlanner(enable_plan_caching=True))
        found.append(_loads(rank, f"{uri}_{number}"))
    return found


def no_dist(rank: Rank, uri: str) -> Any:
    """Every rank by itself."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ckptfs

    mine = f"{uri}_{rank.number}"
    dcp.save(
        {"x": torch.full((2,), float(rank.number))}, storage_writer=_writer(mine), no_dist=True
    )
    state = {"x": torch.zeros(2)}
    dcp.load(state, storage_reader=ckptfs.StorageReader(mine), no_dist=True)
    return state["x"].tolist()


def subgroup(rank: Rank, uri: str) -> Any:
    """Ranks 1 and 2 only."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    group = dist.new_group([1, 2])
    if rank.number == 0:
        return None
    writer = _writer(uri, process_group=group)
    dcp.save(_state(rank, ranks=[1, 2]), storage_writer=writer, process_group=group)
    return _loads(rank, uri, ranks=[1, 2], group=group)


def without_collectives(rank: Rank, uri: str) -> Any:
    """What torch calls use_collectives=False."""
    import torch.distributed.checkpoint as dcp

    writer = _writer(uri)
    return _failures(
        rank, lambda: dcp.save(_state(rank), storage_writer=writer, use_collectives=False)
    )


def missing(rank: Rank, uri: str) -> Any:
    """Load what is not there."""
    return _failures(rank, lambda: _loads(rank, uri))


def damaged(rank: Rank, uri: str) -> Any:
    """Load what was cut and changed."""
    import torch.distributed as dist

    _save(rank, uri)
    if rank.number == 0:
        [data] = Path(uri).glob("*/__1_0.distcp")
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw[:-200])
    dist.barrier()
    return _failures(rank, lambda: _loads(rank, uri))


def replaced_meanwhile(rank: Rank, uri: str) -> Any:
    """Rank 0 has found the checkpoint when it is replaced; the others find the new one."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ckptfs

    def state(value: float) -> dict[str, Any]:
        return {f"w{n}": torch.full((4,), value) for n in range(rank.size)}

    dcp.save(state(1.0), storage_writer=_writer(uri))

    class Reader(ckptfs.StorageReader):
        def read_metadata(self) -> Any:
            if rank.number:
                rank.store().wait(["replaced"])
                return super().read_metadata()
            found = super().read_metadata()
            new = _writer(uri, if_exists="replace")
            dcp.save(state(2.0), storage_writer=new, no_dist=True)
            rank.store().set("replaced", b"1")
            return found

    failed = _failures(rank, lambda: dcp.load(state(0.0), storage_reader=Reader(uri)))
    again = state(0.0)
    dcp.load(again, storage_reader=ckptfs.StorageReader(uri))
    return [failed, again["w0"].tolist()]


def agents_are_gone(rank: Rank, uri: str) -> Any:
    """Every agent of every scenario before has ended, its store client too."""
    deadline = time.monotonic() + 120
    while True:
        names = [t.name for t in threading.enumerate() if t.name.startswith("ckptfs-")]
        left = [n for n in names if n.startswith(("ckptfs-dcp", "ckptfs-agent", "ckptfs-orders"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)  # polling for threads that end by themselves; bounded by the deadline


SCENARIOS: list[Callable[[Rank, str], Any]] = [
    sync,
    own_planner,
    async_thread,
    reset_to_another_uri,
    write_fails,
    begin_fails,
    seal_fails,
    planner_fails,
    replacing_is_given_up,
    name_taken,
    plan_caching,
    no_dist,
    subgroup,
    without_collectives,
    missing,
    damaged,
    replaced_meanwhile,
    agents_are_gone,
]


def run_scenarios(rank: Rank) -> dict[str, Any]:
    """All of them in order; a scenario's unexpected error is its result."""
    warnings.simplefilter("ignore")
    rank.init_group()
    claims = {scenario.__name__: scenario for scenario in SCENARIOS}
    return every_one(rank, claims, rank.args["run"], tail="_1")


def async_process(rank: Rank) -> Any:
    """async_save in torch's own process, twice."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    warnings.simplefilter("ignore")
    rank.init_group()
    found = []
    for number in range(2):
        uri = f"{rank.args['run']}/step_{number}"
        future: Any = dcp.async_save(
            _state(rank),
            storage_writer=_writer(uri),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()
        found.append(_loads(rank, uri))
    return found


# -- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every scenario's result on every rank."""
    run = tmp_path_factory.mktemp("dcp") / "run"
    with launch(run_scenarios, RANKS, args={"run": str(run)}) as ranks:
        results = ranks.results()
    assert [r.error and r.error["traceback"] for r in results] == [None] * RANKS
    return [r.value for r in results]


def good(rank: int) -> list[Any]:
    """Right through our reader, right through stock's, and its own seed."""
    return [True, True, rank]


@pytest.mark.parametrize("name", ["sync", "own_planner", "async_thread"])
def test_saved_by_torch_loads_by_us_and_by_stock(outcomes: Any, name: str) -> None:
    """dcp.save and async_save through StorageWriter give what both readers load, per_rank too."""
    assert [o[name] for o in outcomes] == [good(rank) for rank in range(RANKS)]


def test_one_writer_saves_several_checkpoints(outcomes: Any) -> None:
    """reset(checkpoint_id) moves the writer; both checkpoints are whole."""
    assert [o["reset_to_another_uri"] for o in outcomes] == [[good(r)] * 2 for r in range(RANKS)]


@pytest.mark.parametrize(
    ("name", "where", "kind"),
    [
        ("write_fails", "1", "NoSpaceError"),
        ("begin_fails", "0", "CollectiveError"),
        ("name_taken", "0", "CommitConflictError"),
        ("planner_fails", "1", "ValueError"),
        ("replacing_is_given_up", "1", "ValueError"),
    ],
)
def test_a_failure_on_one_rank_reaches_all_and_the_next_save_works(
    outcomes: Any, name: str, where: str, kind: str
) -> None:
    """Every rank gets torch's CheckpointException with the failed rank's error, and soon."""
    for rank, outcome in enumerate(outcomes):
        failed, after, *_ = outcome[name]
        assert failed["type"] == "CheckpointException"
        assert failed["failures"][where][0] == kind, failed
        assert failed["s"] < 60
        assert after == good(rank)


def test_agents_clean_up_at_once(outcomes: Any) -> None:
    """A failed write leaves no attempt behind, while torch's writer still exists."""
    assert [o["write_fails"][2] for o in outcomes] == [[]] * RANKS


def test_a_seal_that_fails_commits_nothing(outcomes: Any) -> None:
    """The log is full: every rank hears it, and the name is not there."""
    for outcome in outcomes:
        failed, there = outcome["seal_fails"]
        assert failed["type"] == "CheckpointException"
        assert not there


def test_stock_plan_caching_does_not_bring_old_saves_back(outcomes: Any) -> None:
    """The save_id does not travel in the plan: three cached saves are three checkpoints."""
    assert [o["plan_caching"] for o in outcomes] == [[good(r)] * 3 for r in range(RANKS)]


def test_participants_are_the_plans_not_the_world(outcomes: Any) -> None:
    """no_dist: each rank alone. A subgroup: its ranks only, rank 0 is not waited for."""
    assert [o["no_dist"] for o in outcomes] == [[float(r)] * 2 for r in range(RANKS)]
    assert [o["subgroup"] for o in outcomes] == [None, good(1), good(2)]


def test_use_collectives_false_is_refused(outcomes: Any) -> None:
    """Without collectives DCP hangs its ranks on one error: StateError before anything."""
    assert [o["without_collectives"]["type"] for o in outcomes] == ["StateError"] * RANKS


def test_a_missing_checkpoint_is_told_with_its_uri(outcomes: Any) -> None:
    """Loading what is not there: an error on all ranks that has our text."""
    for outcome in outcomes:
        assert outcome["missing"]["type"] == "CheckpointException"
        assert "missing_1" in outcome["missing"]["text"]


def test_a_damaged_file_is_named_by_the_ranks_that_read_it(outcomes: Any) -> None:
    """IntegrityError with file and rank in torch's failures, on every rank."""
    for outcome in outcomes:
        kinds = {kind for kind, _ in outcome["damaged"]["failures"].values()}
        assert kinds == {"IntegrityError"}
        assert "__1_0.distcp" in outcome["damaged"]["text"]


def test_ranks_that_found_different_saves_load_neither(outcomes: Any) -> None:
    """The checkpoint is replaced while ranks look for it: no mixture of the two, but an error on all
    that says so; the next load takes the new one.
    """
    for outcome in outcomes:
        failed, again = outcome["replaced_meanwhile"]
        assert failed["type"] == "CheckpointException"
        (error,) = failed["failures"].values()
        assert error[0] == "IncompleteCheckpointError"
        assert "found different saves" in error[1]
        assert again == [2.0] * 4


@pytest.mark.parametrize("lost", ["w1", "step"])
def test_a_save_of_which_an_item_was_not_written_is_not_committed(
    tmp_path: Path, lost: str
) -> None:
    """What is described and not written (by a planner or a writer that loses an item) is named; nothing
    is committed, and the name is free.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    import ckptfs
    from ckptfs.errors import IncompleteCheckpointError

    class Losing(ckptfs.StorageWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            items = [item for item in plan.items if item.index.fqn != lost]
            return super().write_data(SavePlan(items), planner)

    state = {"w0": torch.ones(3), "w1": torch.ones(5), "step": 3}
    uri = str(tmp_path / "run" / "step_1")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=Losing(uri))
    (error,) = [found for found, _ in caught.value.failures.values()]
    assert isinstance(error, IncompleteCheckpointError)
    assert f"planned but not written: {lost!r}" in str(error)
    assert ckptfs.list_checkpoints(tmp_path / "run") == []
    dcp.save(state, storage_writer=ckptfs.StorageWriter(uri))
    assert [c.uri.name for c in ckptfs.list_checkpoints(tmp_path / "run")] == ["step_1"]


class _Executes:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("whose", ["none", "stock", "derived", "own"])
def test_objects_that_execute_are_refused_whatever_planner_loads_them(
    tmp_path: Path, whose: str
) -> None:
    """Stock's planner unpickles with everything allowed, one that derives from it too: the reader
    looks at each object first, names it, and nothing of it has run. A caller that trusts it says so.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.api import CheckpointException

    import ckptfs
    from ckptfs.dcp.read.load_planner import LoadPlanner
    from ckptfs.errors import StateError

    class Derived(DefaultLoadPlanner):
        pass

    planners: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "stock": DefaultLoadPlanner,
        "derived": Derived,
        "own": LoadPlanner,
    }
    owned, uri = tmp_path / "owned", str(tmp_path / "run" / "step_1")
    state = {"w": torch.ones(3), "plain": {"a": [1, 2]}, "evil": _Executes(str(owned))}
    dcp.save(state, storage_writer=ckptfs.StorageWriter(uri))

    def load(**options: Any) -> dict[str, Any]:
        found = {"w": torch.zeros(3), "plain": {"a": [0, 0]}, "evil": None}
        reader = ckptfs.StorageReader(uri, **options)
        dcp.load(found, storage_reader=reader, planner=planners[whose]())
        return found

    with pytest.raises(CheckpointException) as caught:
        load()
    (error,) = [found for found, _ in caught.value.failures.values()]
    assert isinstance(error, StateError)
    assert "'evil'" in str(error)
    assert not owned.exists()
    if whose != "own":  # that one is ckptfs's, and has a switch of its own
        assert "weights_only=False" in str(error)
        found = load(weights_only=False)
        assert found["plain"] == {"a": [1, 2]}
        assert owned.exists()


def test_no_agent_outlives_its_save(outcomes: Any) -> None:
    """After all the failures above no agent thread is left waiting."""
    assert [o["agents_are_gone"] for o in outcomes] == [[]] * RANKS


def test_async_save_in_a_process(tmp_path: Path) -> None:
    """The writer goes pickled into torch's own process and commits from there, twice."""
    with launch(async_process, 2, args={"run": str(tmp_path / "run")}) as ranks:
        results = ranks.results()
    assert [r.error and r.error["traceback"] for r in results] == [None] * 2
    assert [r.value for r in results] == [[good(rank)] * 2 for rank in range(2)]
