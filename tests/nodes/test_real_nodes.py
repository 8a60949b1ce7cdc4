"""Tensors on nodes that do not see each other's disk: two of them, one path, real DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.lab.nodes import Nodes
from tests.multiprocess.harness import Rank, launch


def save_and_load(rank: Rank) -> object:
    """Save over node-local disks both ways, load on every node, then ask for the wrong shards."""
    import time

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import ckptfs

    rank.init_group()
    run = str(rank.args["run"])
    mesh = init_device_mesh("cpu", (rank.size,))
    full = torch.arange(64.0).reshape(8, 8)

    def state(fill: torch.Tensor, dim: int = 0) -> dict[str, Any]:
        leaf = int(fill.max().item())
        return {"w": distribute_tensor(fill, mesh, [Shard(dim)]), "step": leaf, "rep": fill + 0}

    saved = ckptfs.save(state(full), f"{run}/step_1")
    # Where a node does not see the domain that orders them, two plain saves are ordered by their ids, which
    # have whole seconds.
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)
    dcp.save(state(full + 1), storage_writer=ckptfs.StorageWriter(f"{run}/step_2"))
    got = [state(torch.zeros(8, 8)) for _ in range(2)]
    ckptfs.load(got[0], f"{run}/step_1")
    dcp.load(got[1], storage_reader=ckptfs.StorageReader(f"{run}/step_2"))
    try:
        ckptfs.load(state(torch.zeros(8, 8), dim=1), f"{run}/step_1")
    except ckptfs.CkptfsError as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        refused = "nothing"
    return {
        "save_id": saved.save_id,
        "one": bool((got[0]["w"].full_tensor() == full).all()),
        "two": bool((got[1]["w"].full_tensor() == full + 1).all()),
        "refused": refused,
        "metadata": Path(run, "step_1/.metadata").is_file(),
        "mine": sorted(p.name for p in Path(run, "step_1", saved.save_id).glob("*.distcp")),
        "leaf": got[0]["step"],
        "latest": str(ckptfs.latest(run)),
    }


def test_row7_node_local_saves_are_whole_on_every_node(trainers: Nodes) -> None:
    """Row 7: each node has `.metadata` and its own shards, every rank loads, and a sharding that
    needs the other node's files is an error that says where they are.
    """
    with launch(
        save_and_load,
        4,
        args={"run": "/scratch/real"},
        warm=True,
        prefix=lambda rank: trainers[rank // 2].prefix,
    ) as ranks:
        values = ranks.values(timeout_s=240)
    for number, value in enumerate(values):
        assert value["one"]
        assert value["leaf"] == 63
        assert value["two"]
        assert value["metadata"]
        first = 0 if number < 2 else 2
        assert value["mine"] == [f"__{first}_0.distcp", f"__{first + 1}_0.distcp"]
        assert "step_2" in value["latest"]
        assert "holds it, written by ranks" in value["refused"]
    assert len({value["save_id"] for value in values}) == 1
