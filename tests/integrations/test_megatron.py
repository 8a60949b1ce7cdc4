"""Megatron-Core's dist_checkpointing: one commit for common.pt, the shards and metadata.json."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Store, story
from tests.multiprocess.harness import Rank, describe, launch

pytestmark = pytest.mark.integrations
pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")


def test_the_example_is_killed_and_resumes(tmp_path: Path, cell: Cell) -> None:
    """Rank 0 dies at the commit of its third iteration; the next job continues from the second, and the
    tracker names what is committed.
    """
    store = Store("file", str(tmp_path / "run"))
    kill = Kill("create", "*.ckptfs/log/*", nth=4, rank=0)
    with cell("Megatron-Core", store, "sync", package="megatron-core"):
        told = story("megatron", store, "sync", kill=kill)
    assert told.resumed.resumed == "2"
    names = [one.uri.name for one in ckptfs.list_checkpoints(store.uri)]
    assert names == ["iter_0000005", "iter_0000006"]
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "6"


def _begin(rank: Rank, timeout_s: float) -> None:
    import torch.distributed as dist

    rank.meet()
    limit = timedelta(seconds=timeout_s)
    store, number = rank.store(), rank.number
    dist.init_process_group("gloo", store=store, rank=number, world_size=rank.size, timeout=limit)


def _sharded(rank: Rank, value: float) -> dict[str, Any]:
    import torch
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    size = (rank.size,)
    cut = ShardedTensor.from_rank_offsets(
        "w", torch.full((1000,), value + rank.number), (0, rank.number, rank.size)
    )
    copy = ShardedTensor.from_rank_offsets("b", torch.full((4,), value), replica_id=rank.number)
    mine = ShardedObject("rng", {"of": rank.number}, size, (rank.number,))
    return {"w": cut, "b": copy, "rng": mine, "iteration": int(value)}


def _values(state: dict[str, Any]) -> list[Any]:
    return [float(state["w"][0]), float(state["b"][0]), state["rng"], state["iteration"]]


def _uri_to_stock(rank: Rank) -> object:
    """A URI where stock wants a directory, with a group that gives up after 3 s."""
    from megatron.core import dist_checkpointing

    from ckptfs.integrations.megatron import TorchShards

    _begin(rank, 3.0)
    try:
        dist_checkpointing.save(_sharded(rank, 1.0), "s3://bucket/run/iter_0000001", TorchShards())
    except Exception as error:  # noqa: BLE001 - whatever it is, the test says
        return describe(error)["type"]
    return None


def test_stock_sends_rank_0_away_and_lets_the_others_wait(tmp_path: Path) -> None:
    """Stock: a URI is taken for a local path, rank 0 alone fails at once, and rank 1 is left in a
    collective until its group gives up.
    """
    with launch(_uri_to_stock, 2) as ranks:
        first, second = (result.value for result in ranks.results())
    assert first.endswith("FileNotFoundError")
    assert second is not None
    assert not second.endswith("FileNotFoundError")


def _whole_story(rank: Rank) -> object:
    """Save, fail on rank 1, save again, load with stock's own loader; and what stock saved."""
    from megatron.core import dist_checkpointing

    from ckptfs.integrations.megatron import ITERATIONS, TRACKER, TorchShards

    _begin(rank, 400.0)
    run = rank.args["run"]
    with ckptfs.DirectoryManager(run, name=ITERATIONS, pointer=TRACKER) as manager:
        with manager.reading() as nothing:
            assert nothing is None
        with manager.writing(1) as path:
            dist_checkpointing.save(_sharded(rank, 1.0), path, TorchShards())
        try:
            with manager.writing(2) as path, _full_disk(rank.number == 1):
                dist_checkpointing.save(_sharded(rank, 2.0), path, TorchShards())
            failed = None
        except ckptfs.CkptfsError as error:
            failed = [type(error).__name__, str(error)]
        steps = manager.steps
        with manager.writing(2) as path:
            dist_checkpointing.save(_sharded(rank, 3.0), path, TorchShards())
        with manager.reading() as opened:
            assert opened is not None
            read = dist_checkpointing.load(_sharded(rank, 0.0), opened.path)
    stock = dist_checkpointing.load(_sharded(rank, 0.0), f"{run}/iter_0000001")
    return [failed, steps, _values(read), _values(stock)]


class _full_disk:  # noqa: N801 - used as a function
    """No file of this process may grow beyond 1 KiB."""

    def __init__(self, here: bool) -> None:
        self.here, self.limits = here, resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        if self.here:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def test_an_error_on_one_rank_reaches_all_and_stock_reads_the_rest(tmp_path: Path) -> None:
    """A full disk under rank 1 fails the save on both, at once and with nothing to be seen; the next one
    is whole. Megatron's own loader reads it where it is, sharded objects and common state too.
    """
    run = tmp_path / "run"
    with launch(_whole_story, 2, args={"run": str(run)}) as ranks:
        results = ranks.results()
    assert [result.error for result in results] == [None, None]
    told: list[Any] = [result.value for result in results]
    for number, (failed, steps, read, stock) in enumerate(told):
        assert failed[0] == "CollectiveError"
        assert "rank 1" in failed[1]
        assert "too large" in failed[1]
        assert steps == [1]
        assert read == [3.0 + number, 3.0, {"of": number}, 3]
        assert stock == [1.0 + number, 1.0, {"of": number}, 1]
    assert told[0][0] == told[1][0]
    listed = sorted(name for name in os.listdir(run) if not name.startswith("."))
    assert listed == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
