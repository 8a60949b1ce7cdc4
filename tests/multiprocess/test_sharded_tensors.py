"""ShardedTensors, as the older FullyShardedDataParallel hands them over: ranks without a shard, ranks
with several.
"""

from __future__ import annotations

from typing import Any

import pytest

import ckptfs
from tests.multiprocess.harness import Rank, launch

ROWS = 12
# Rows of each shard, rank by rank: none on one, several on another, one each.
LAYOUTS: dict[str, list[list[int]]] = {
    "none on the last": [[0, 6], []],
    "none on the first": [[], [0, 6]],
    "several": [[0, 4], [2, 8, 10]],
    "one each": [[0], [6]],
    "whole on one": [[0], []],
}


def narrow(rank: Rank) -> Any:
    """A model under FullyShardedDataParallel: one rank holds nothing of one parameter."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(3)
    net = FullyShardedDataParallel(nn.Linear(8, 1), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer


def train(net: Any, optimizer: Any, steps: int) -> None:
    """Steps on data that all ranks have alike."""
    import torch

    for step in range(steps):
        net(torch.arange(24.0).reshape(3, 8).sin() + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(net: Any) -> list[float]:
    """What the whole model answers; collective."""
    import torch

    with torch.no_grad():
        answer: list[float] = net(torch.ones(2, 8)).flatten().tolist()
    return answer


def resumes(rank: Rank) -> Any:
    """Train, save by the manager and by a plain call, train on; then again from what was saved."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rank.init_group()
    run, plain = rank.args["run"], rank.args["plain"]
    net, optimizer = narrow(rank)
    train(net, optimizer, 2)
    with ckptfs.CheckpointManager(run) as manager:
        manager.save(2, {"net": net, "opt": optimizer})
    model, moments = get_state_dict(net, optimizer)
    ckptfs.save({"model": model, "optim": moments}, plain)
    saved = seen(net)
    train(net, optimizer, 2)
    later = seen(net)
    told = []
    for way in ("manager", "plain"):
        net, optimizer = narrow(rank)
        if way == "manager":
            with ckptfs.CheckpointManager(run) as manager:
                manager.restore({"net": net, "opt": optimizer})
        else:
            train(net, optimizer, 1)  # so that there are moments to load into
            model, moments = get_state_dict(net, optimizer)
            ckptfs.load({"model": model, "optim": moments}, plain)
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
        here = seen(net)
        train(net, optimizer, 2)
        told.append([way, here == saved, seen(net) == later])
    return told


def cut(rank: Rank, begins: list[list[int]], value: float | None) -> Any:
    """A ShardedTensor of ROWS rows; each shard ends where the next one begins."""
    import torch
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )

    whole = torch.arange(ROWS * 3.0).reshape(ROWS, 3)
    ends = [*sorted(row for rows in begins for row in rows)[1:], ROWS]
    places = {
        row: (number, end)
        for end, (row, number) in zip(
            ends, sorted((row, n) for n, rows in enumerate(begins) for row in rows), strict=True
        )
    }
    shards, described = [], []
    for row, (number, end) in places.items():
        told = ShardMetadata([row, 0], [end - row, 3], placement=f"rank:{number}/cpu")
        described.append(told)
        if number == rank.number:
            data = whole[row:end].clone() if value is None else torch.full((end - row, 3), value)
            shards.append(Shard(data, told))
    metadata = ShardedTensorMetadata(described, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=dist.group.WORLD
    )


def every_layout(rank: Rank) -> Any:
    """Each layout saved, and loaded into each: whether every shard has its rows."""
    import torch

    rank.init_group()
    whole = torch.arange(ROWS * 3.0).reshape(ROWS, 3)
    told = {}
    for saved, begins in LAYOUTS.items():
        place = f"{rank.args['run']}/{saved.replace(' ', '_')}"
        if rank.args["aside"]:
            ckptfs.async_save({"t": cut(rank, begins, None), "n": 1}, place).result()
        else:
            ckptfs.save({"t": cut(rank, begins, None), "n": 1}, place)
        for loaded, others in LAYOUTS.items():
            state = {"t": cut(rank, others, -1.0), "n": 0}
            ckptfs.load(state, place)
            told[f"{saved} into {loaded}"] = all(
                torch.equal(
                    shard.tensor, whole[shard.metadata.shard_offsets[0] :][: len(shard.tensor)]
                )
                for shard in state["t"].local_shards()
            )
    return told


def test_fsdp_of_a_parameter_that_a_rank_holds_nothing_of_resumes(tmp_path: Any) -> None:
    """``Linear(8, 1)`` under FullyShardedDataParallel on 2 ranks: the manager and a plain load give back
    what was saved, and training continues as it would have.
    """
    args = {"run": f"{tmp_path}/run", "plain": f"{tmp_path}/plain"}
    with launch(resumes, 2, args=args) as ranks:
        for result in ranks.results():
            assert result.value == [["manager", True, True], ["plain", True, True]], result


@pytest.mark.parametrize("aside", [False, True])
def test_sharded_tensors_load_into_any_other_layout(tmp_path: Any, aside: bool) -> None:
    """No shard on a rank, several on another, one each: each is saved, in the background too, and loads
    into each.
    """
    with launch(every_layout, 2, args={"run": f"{tmp_path}/run", "aside": aside}) as ranks:
        for result in ranks.results():
            assert result.value == {
                f"{saved} into {loaded}": True for saved in LAYOUTS for loaded in LAYOUTS
            }, result
