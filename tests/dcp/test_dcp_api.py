"""torch's own dcp.save, async_save and dcp.load over StorageWriter and StorageReader, on real ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Rank, launch, torchrun

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _state(rank: Rank) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.size,))
    return {
        "w": distribute_tensor(torch.arange(24.0).reshape(12, 2), mesh, [Shard(0)]),
        "n": {"step": 7, "plain": torch.ones(3)},
        "own": {"seed": rank.number},
    }


def _emptied(rank: Rank) -> dict[str, Any]:
    import torch

    state = _state(rank)
    state["w"].to_local().zero_()
    return state | {"n": {"step": 0, "plain": torch.zeros(3)}, "own": {"seed": -1}}


def _seen(state: dict[str, Any]) -> list[Any]:
    return [state["w"].to_local().tolist(), state["n"]["step"], state["n"]["plain"].tolist()]


def save_and_load(rank: Rank) -> Any:
    """One save in the asked-for way, then a load with our reader and one with stock's."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    import ckptfs
    from ckptfs.dcp.planner import SavePlanner

    warnings.simplefilter("ignore")
    rank.init_group()
    uri, mode = rank.args["uri"], rank.args["mode"]
    state, expected = _state(rank), _seen(_state(rank))
    planner = SavePlanner() if rank.args.get("planner") else None
    writer = ckptfs.StorageWriter(uri, per_rank=["own.*"], timeout_s=60)
    if mode == "sync":
        dcp.save(state, storage_writer=writer, planner=planner)
    else:
        kind = AsyncCheckpointerType[mode]
        dcp.async_save(
            state, storage_writer=writer, planner=planner, async_checkpointer_type=kind
        ).result()  # type: ignore[union-attr]
    ours = _emptied(rank)
    dcp.load(ours, storage_reader=ckptfs.StorageReader(uri))
    stock = _emptied(rank)
    del stock["own"]
    dcp.load(stock, checkpoint_id=uri)
    dist.barrier()
    same = _seen(ours) == expected and _seen(stock) == expected
    return [same, ours["own"]["seed"]]


@pytest.mark.parametrize("mode", ["sync", "THREAD"])
@pytest.mark.parametrize("planner", [False, True])
def test_saved_by_torch_loads_by_us_and_by_stock(
    tmp_path: Path, mode: str, planner: bool
) -> None:
    """dcp.save and async_save through StorageWriter give a checkpoint that both readers load."""
    args = {"uri": str(tmp_path / "run" / "step_1"), "mode": mode, "planner": planner}
    with launch(save_and_load, 4, args=args) as ranks:
        results = ranks.results(timeout_s=60)
    assert [(r.error or {}).get("traceback") for r in results] == [None] * 4
    assert [r.value for r in results] == [[True, rank] for rank in range(4)]
