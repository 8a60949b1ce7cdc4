"""What each of eight ranks does to count NFS operations: one save of one sharded state, three ways in turn.

    ours    ckptfs.save into an open run
    dcp     torch.distributed.checkpoint.save with its FileSystemWriter
    verl    every rank makes the directory and saves three files of its own with torch.save; a barrier;
            rank 0 writes in place which step is the latest

The kernel counts per mount, in /proc/self/mountstats: one rank per node reads that before and after each
save, while all ranks wait. Claiming and releasing the run are outside.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from tests.nfs.inside import join

__all__ = ["MOUNT", "WAYS", "count_saves", "operations"]

WAYS = ("ours", "dcp", "verl")
MOUNT = "/nfs"
LAYERS = 12
ROWS, COLUMNS = 256, 64  # of each of a layer's matrices, over all ranks

Counts = dict[str, int]


def operations(text: str, mount: str) -> Counts:
    """The operations of one NFS mount so far, by name, from the text of mountstats. Pure."""
    _, _, ours = text.partition(f" mounted on {mount} with fstype nfs")
    ours, _, _ = ours.partition("\ndevice ")
    _, _, table = ours.partition("per-op statistics\n")
    rows = [line.split(":") for line in table.splitlines() if ":" in line]
    found = {name.strip(): int(numbers.split()[0]) for name, numbers in rows}
    return {name: count for name, count in found.items() if count}


def count_saves(args: dict[str, Any]) -> list[dict[str, Counts]]:
    """For each round the operations of each way on this rank's node; nothing from other local ranks."""
    import torch.distributed as dist

    rank, size = join()
    state = _state(rank, size)
    rounds = []
    for number in range(args["rounds"]):
        counted = {}
        for way in WAYS:
            held = _claim(args["run"]) if way == "ours" else None
            dist.barrier()
            before = _look()
            dist.barrier()
            match way:
                case "ours":
                    _save_ours(state, f"{args['run']}/ours/step_{number}", held)
                case "dcp":
                    _save_dcp(state, f"{args['run']}/dcp/step_{number}")
                case _:
                    _save_verl(state, f"{args['run']}/verl/global_step_{number}", rank, size)
            dist.barrier()
            after = _look()
            dist.barrier()
            if held is not None:
                held.release()
            counted[way] = {name: n for name in after if (n := after[name] - before.get(name, 0))}
        rounds.append(counted)
    return rounds if os.environ["LOCAL_RANK"] == "0" else []


def _look() -> Counts:
    if os.environ["LOCAL_RANK"] != "0":
        return {}
    return operations(Path("/proc/self/mountstats").read_text(), MOUNT)


def _state(rank: int, size: int) -> dict[str, Any]:
    """A model and its optimizer's two moments, sharded by rows, and what is replicated."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", list(range(size)))

    def matrix(number: int) -> Any:
        local = torch.full((ROWS // size, COLUMNS), float(rank * 100 + number))
        return DTensor.from_local(local, mesh, [Shard(0)])

    names = [f"layers.{n}.{part}" for n in range(LAYERS) for part in ("attention", "feed_forward")]
    model = {name: matrix(number) for number, name in enumerate(names)}
    moments = {
        f"{name}.{moment}": matrix(-number)
        for number, name in enumerate(names)
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return {"model": model, "optimizer": moments, "norm": torch.ones(COLUMNS), "step": 1}


def _claim(run: str) -> Any:
    import ckptfs

    return ckptfs.prepare_run(f"{run}/ours")


def _save_ours(state: dict[str, Any], target: str, held: Any) -> None:
    import ckptfs

    ckptfs.save(state, target, run=held)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):  # the log is touched a moment after an entry
            thread.join()


def _save_dcp(state: dict[str, Any], target: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=dcp.FileSystemWriter(target))


def _save_verl(state: dict[str, Any], target: str, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    os.makedirs(f"{target}/actor", exist_ok=True)
    extra = {"rng": torch.get_rng_state(), "step": state["step"], "norm": state["norm"]}
    parts = {"model": _local(state["model"]), "optim": _local(state["optimizer"])}
    for name, part in {**parts, "extra_state": extra}.items():
        torch.save(part, f"{target}/actor/{name}_world_size_{size}_rank_{rank}.pt")
    dist.barrier()
    if rank == 0:
        Path(target).parent.joinpath("latest_checkpointed_iteration.txt").write_text("1")


def _local(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.to_local() for name, tensor in tensors.items()}
