"""Jobs on two NFS clients that meet known failures of today's tools; ranks of tests/nfs/test_jobs.py.

    mkdirs     row 8   every rank makes one directory
    branches   row 10  ranks decide by what they see whether there is something to resume from
    hosts      row 22  two machines of one name, with private disks of equal device and inode numbers
    removals   row 29  a directory is removed while a process of the same node holds a file in it open

Each does it as scripts do and as ckptfs does, and says what came of both.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

import ckptfs
from tests.nfs.inside import join

__all__ = ["branches", "hosts", "mkdirs", "removals"]


def state_of(step: int) -> dict[str, Any]:
    """The same on all ranks."""
    return {"w": torch.arange(1000.0) + step}


def same(run: str, step: int) -> bool:
    """Whether a step loads with every bit; collective."""
    state = {"w": torch.zeros(1000)}
    ckptfs.load(state, f"{run}/step_{step}")
    return torch.equal(state["w"], state_of(step)["w"])


# -- row 8 ----------------------------------------------------------------------------------------


def mkdirs(args: dict[str, Any]) -> dict[str, Any]:
    """Absent, then there: as stock DCP does it on every rank, then by ckptfs."""
    rank, _ = join()
    failed = {"stock": 0, "ours": 0}
    for number in range(args["rounds"]):
        for way in failed:
            directory = f"{args['run']}/{way}-{number}/deep/step"
            for again in range(2):
                assert os.path.exists(directory) is bool(again)
                dist.barrier()
                try:
                    if way == "stock":
                        FileSystem().mkdir(Path(directory))
                    else:
                        ckptfs.ensure_dir(directory)
                except (OSError, ckptfs.CkptfsError):
                    failed[way] += 1
                dist.barrier()
                Path(directory, f"{rank}-{again}").write_text("x")
                dist.barrier()
    return failed


# -- row 10 ---------------------------------------------------------------------------------------


def branches(args: dict[str, Any]) -> dict[str, Any]:
    """Ranks of node a commit a step; all ranks, who had looked before, ask where to continue."""
    rank, size = join()
    run = args["run"]
    mates = dist.new_group([n for n in range(size) if n < size // 2])
    manager = ckptfs.CheckpointManager(run)
    marker = f"{run}/step_1/.metadata"
    first = (os.path.exists(marker), ckptfs.latest(run), manager.restore(state_of(0)))
    assert first == (False, None, None)
    dist.barrier()
    if rank < size // 2:
        ckptfs.save(state_of(1), f"{run}/step_1", process_group=mates)
    dist.barrier()
    plain = os.path.exists(marker)
    dist.barrier()
    state = state_of(0)
    restored = manager.restore(state)
    newest = ckptfs.latest(run)
    manager.close()
    return {
        "plain": plain,
        "restored": None if restored is None else restored.step,
        "latest": None if newest is None else newest.step,
        "same": torch.equal(state["w"], state_of(1)["w"]),
    }


# -- row 22 ---------------------------------------------------------------------------------------


def hosts(args: dict[str, Any]) -> dict[str, Any]:
    """Save to a private disk and to the share, under one hostname for both machines."""
    rank, _ = join()
    ours = socket.gethostname()
    dist.barrier()
    private = f"/scratch/{args['name']}"
    try:
        socket.sethostname("node")
        os.makedirs(private, exist_ok=True)
        dist.barrier()
        found: dict[str, Any] = {}
        for where, run in (("private", f"{private}/run"), ("shared", f"{args['run']}/run")):
            with ckptfs.prepare_run(run) as held:
                ckptfs.save({f"w{rank}": torch.full((10,), float(rank))}, f"{run}/step_1", run=held)
                found[where] = len(held.session.placement.domains)
            dist.barrier()
            files = [p.name for p in Path(run).rglob("*.distcp")]
            found[f"{where} files"] = sorted(files)
        status = os.stat(private)
        found["seen"] = [socket.gethostname(), status.st_dev, status.st_ino]
        dist.barrier()  # the rank next to this one gives the machine its own name back
        return found
    finally:
        socket.sethostname(ours)
        shutil.rmtree(private, ignore_errors=True)


# -- row 29 ---------------------------------------------------------------------------------------


def removals(args: dict[str, Any]) -> dict[str, Any]:
    """A rank holds a file open that the rank next to it removes; then a manager's retention does."""
    rank, _ = join()
    run = args["run"]
    plain = f"{args['run']}-plain"
    if rank == 0:
        os.mkdir(plain)
        Path(plain, "data").write_text("x" * 1000)
    dist.barrier()
    held = open(f"{plain}/data") if rank == 1 else None  # noqa: SIM115 - held over what follows
    dist.barrier()
    error = 0
    if rank == 0:
        try:
            shutil.rmtree(plain)
        except OSError as failed:
            error = failed.errno or -1
    dist.barrier()
    if held is not None:
        held.close()
    with ckptfs.CheckpointManager(run, keep_latest=1) as manager:
        manager.save(1, state_of(1))
        reader = None
        if rank == 1:
            data = next(Path(run, "step_1").rglob("*.distcp"))
            reader = data.open("rb")
        dist.barrier()
        manager.save(2, state_of(2))
        manager.save(3, state_of(3))
        steps = manager.steps
        if reader is not None:
            assert reader.read(), "what a reader has open stays readable on its own node"
            reader.close()
    with ckptfs.prepare_run(run):
        left = steps, [c.step for c in ckptfs.list_checkpoints(run)], same(run, 3)
    return {"plain": error, "steps": left}
