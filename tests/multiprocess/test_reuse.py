"""unchanged="reference" on real ranks: sharded tensors, torch's own dcp.save, another mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.multiprocess.harness import Rank, launch

ROWS, COLUMNS = 64, 4096
FROZEN_BYTES = ROWS * COLUMNS * 4


def state(rank: Rank, value: float, dim: int = 0) -> dict[str, Any]:
    """A frozen sharded tensor, a trained one, a replicated one, and a value of each rank's own."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.size,))
    frozen = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    return {
        "frozen": distribute_tensor(frozen, mesh, [Shard(dim)]),
        "trained": distribute_tensor(torch.full((8, 8), float(value)), mesh, [Shard(dim)]),
        "replicated": torch.arange(5000),
        "step": int(value),
    }


def right(rank: Rank, uri: str, value: float, dim: int = 0) -> bool:
    """Whether a checkpoint loads as ``state``."""
    import torch

    import ckptfs

    got = state(rank, -1.0, dim)
    got["frozen"].to_local().zero_()
    got["replicated"].zero_()
    ckptfs.load(got, uri)
    wanted = state(rank, value, dim)
    return (
        torch.equal(got["frozen"].to_local(), wanted["frozen"].to_local())
        and torch.equal(got["trained"].to_local(), wanted["trained"].to_local())
        and torch.equal(got["replicated"], wanted["replicated"])
        and got["step"] == wanted["step"]
    )


def saves(rank: Rank) -> dict[str, Any]:
    """Three saves of ours, two of torch's; what each wrote, and whether all load, in two meshes."""
    import torch.distributed.checkpoint as dcp

    import ckptfs

    rank.init_group()
    run, wrote = str(rank.args["run"]), []
    with ckptfs.prepare_run(run) as held:
        for step in (1, 2, 3):
            saved = ckptfs.save(
                state(rank, step), f"{run}/step_{step}", run=held, unchanged="reference"
            )
            wrote.append(saved.total.size_bytes)
        writer = ckptfs.StorageWriter(f"{run}/step_4", run=held, unchanged="reference")
        for step in (4, 5):
            # torch calls reset(checkpoint_id) on the writer: it is one for both.
            dcp.save(state(rank, step), checkpoint_id=f"{run}/step_{step}", storage_writer=writer)
    return {
        "wrote": wrote,
        "right": [right(rank, f"{run}/step_{n}", n) for n in (1, 2, 3, 4, 5)],
        "other": [right(rank, f"{run}/step_{n}", n, dim=1) for n in (3, 5)],
    }


def test_sharded_frozen_tensors_are_stored_once_by_us_and_by_dcp(tmp_path: Path) -> None:
    """Two ranks, five saves, three through ckptfs.save and two through torch's dcp.save: the frozen
    shards are one file each on the disk, and every step loads, resharded too.
    """
    with launch(saves, 2, args={"run": str(tmp_path / "run")}) as ranks:
        values = ranks.values()
    for value in values:
        assert value["wrote"][0] > FROZEN_BYTES
        assert max(value["wrote"][1:]) < 20_000
        assert all(value["right"])
        assert all(value["other"])
    inodes: dict[int, tuple[int, int]] = {}
    for path in (tmp_path / "run").rglob("*.distcp"):
        seen = os.stat(path)
        inodes[seen.st_ino] = (seen.st_size, seen.st_nlink)
    assert sum(size for size, _ in inodes.values()) < FROZEN_BYTES + 200_000
    large = [links for size, links in inodes.values() if size > FROZEN_BYTES // 4]
    assert large == [5, 5]
