"""Four jobs that use what needs N1 to N4 ask for; ranks of tests/nfs/test_needs.py, on two NFS clients.

    parts       N1  ranks save a part of each step; a driver outside of their group saves another one, an
                    object in the step's directory, and commits all of it
    overwrite   N2  an older run is overwritten
    managed     N3  a manager keeps the driver's state, the random generators, a policy that never changes
    background  N4  a manager saves while training runs, and publishes weights

Each continues where its run is, trains to ``args["until"]``, and says what it found and whether its state has
every bit that training in one go would have given. A save that fails ends it; it says how.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckptfs
from ckptfs.errors import CkptfsError
from tests.nfs.inside import join
from tests.nfs.lives import told

__all__ = ["background", "drive", "managed", "overwrite", "parts"]

WAIT_S = 300.0
T = TypeVar("T")


class Training:
    """Small, and every part of it decides about the next step: a wrong bit anywhere shows at the end.

    managed: its generator and position are kept too; otherwise a step's draws depend on its number alone.
    """

    def __init__(self, *, managed: bool = False) -> None:
        self.managed = managed
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(100 + rank)
        self.weights = torch.ones(16, 16)
        self.momentum = torch.zeros(16, 16)
        self.shard = torch.zeros(32, 16)
        self.sharded = DTensor.from_local(self.shard, _mesh(size), [Shard(0)])
        self.policy = torch.arange(4096.0)
        self.data = ckptfs.PerRank({"position": 0, "rank": rank})
        self.rng = ckptfs.RngState()
        self.step = 0

    def train(self) -> None:
        """One step, in place."""
        if not self.managed:
            torch.manual_seed(1000 * self.step + dist.get_rank())
        self.step += 1
        batch = torch.Generator().manual_seed(self.step)
        gradient = torch.randn(16, 16, generator=batch) * self.weights
        self.momentum.mul_(0.9).add_(gradient)
        self.weights.sub_(self.momentum, alpha=0.01)
        self.shard.mul_(0.5).add_(torch.randn(32, 16))  # of this rank's own generator
        self.data.value["position"] += self.step

    def tensors(self) -> dict[str, Any]:
        """What ``ckptfs.save`` takes, live."""
        return {
            "weights": self.weights,
            "momentum": self.momentum,
            "sharded": self.sharded,
            "policy": self.policy,
            "step": self.step,
        }

    def everything(self) -> dict[str, Any]:
        """What a manager takes."""
        return {**self.tensors(), "data": self.data, "rng": self.rng}

    def digest(self) -> str:
        """Of every bit."""
        parts = [self.weights, self.momentum, self.shard, self.policy]
        text = b"".join(part.numpy().tobytes() for part in parts) + str(self.step).encode()
        if self.managed:
            text += repr(self.data.value).encode() + torch.get_rng_state().numpy().tobytes()
        return hashlib.sha256(text).hexdigest()


@functools.cache
def _mesh(size: int) -> DeviceMesh:
    """Of all ranks, made once."""
    return DeviceMesh("cpu", list(range(size)))


def digest_of(until: int, *, managed: bool = False) -> str:
    """What training in one go would give after that step."""
    generators, alone = torch.get_rng_state(), Training(managed=managed)
    for _ in range(until):
        alone.train()
    found = alone.digest()
    torch.set_rng_state(generators)
    return found


def shut(args: dict[str, Any], *, when: bool = True) -> None:
    """Shut the gate that this job's fault asks at every data file: its rank stops at the next one."""
    if when and "gate" in args and dist.get_rank() == args["holder"]:
        Path(f"{args['gate']}.reached").unlink(missing_ok=True)
        Path(args["gate"]).unlink()


def failing(call: Callable[[], T], seen: dict[str, Any]) -> T | None:
    """What the call returned; None where it failed: how, and when by this machine's clock, is put down."""
    try:
        return call()
    except CkptfsError as error:
        seen["error"] = {**told(error), "at_s": time.monotonic()}
        return None


# -- N1 -------------------------------------------------------------------------------------------


def parts(args: dict[str, Any]) -> dict[str, Any]:
    """A rank of the group: takes tickets from the driver, saves its part of each step."""
    rank, _ = join()
    talk = _talk(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    training = Training()
    first = pickle.loads(talk.get("found"))
    seen: dict[str, Any] = {"restored": first}
    if first:
        state = training.tensors()
        ckptfs.load(state, f"{args['run']}/global_step_{first}/actor")
        training.step = state["step"]
    for step in range(first + 1, args["until"] + 1):
        training.train()
        part = pickle.loads(talk.get(f"ticket/{step}"))
        shut(args, when=step == args.get("dies_in"))
        sealed = failing(partial(ckptfs.save, training.tensors(), part), seen)
        if rank == 0:
            talk.set(f"sealed/{step}", pickle.dumps(sealed))
        if sealed is None:
            return seen
        talk.wait([f"committed/{step}"], timedelta(seconds=WAIT_S))
    return {**seen, "same": training.digest() == digest_of(args["until"])}


def drive(args: dict[str, Any]) -> dict[str, Any]:
    """The driver: no rank of any group, on the first node."""
    assert not dist.is_initialized()
    talk = _talk(*args["address"])
    run = args["run"]
    seen: dict[str, Any] = {}
    with ckptfs.prepare_run(run) as held:
        found = ckptfs.latest(run)
        first = 0 if found is None else int(found.step or 0)
        seen["restored"] = first
        if found is not None:
            seen["object"] = ckptfs.load_object(f"{run}/global_step_{first}/data.pt")
            loader: dict[str, Any] = {"loader": {"position": -1}}
            ckptfs.load(loader, f"{run}/global_step_{first}/driver")
            seen["loader"] = loader["loader"]
        talk.set("found", pickle.dumps(first))
        for step in range(first + 1, args["until"] + 1):
            ticket = held_ticket(held, step)
            talk.set(f"ticket/{step}", pickle.dumps(ticket.part("actor")))
            mine = ckptfs.save({"loader": {"position": 10 * step}}, ticket.part("driver"))
            ckptfs.save_object({"step": step}, f"{run}/global_step_{step}/data.pt")
            theirs = pickle.loads(talk.get(f"sealed/{step}"))
            if theirs is None:
                return {**seen, "gave up": step}
            ticket.commit([mine, theirs])
            talk.set(f"committed/{step}", "")
    return {**seen, "steps": [c.step for c in ckptfs.list_checkpoints(run)]}


def held_ticket(held: ckptfs.Run, step: int) -> ckptfs.Ticket:
    """Begin a checkpoint of two parts."""
    from ckptfs.commit.parts.tickets import begin_parts

    return begin_parts(held, f"global_step_{step}", step, ["actor", "driver"])


def _talk(host: str, port: int) -> Any:
    """A line between the driver and the ranks: the group's store, which rank 0 has."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=WAIT_S)
    )


# -- N2 -------------------------------------------------------------------------------------------


def overwrite(args: dict[str, Any]) -> dict[str, Any]:
    """Overwrite what is there by training from the start; args["before"]: steps of an older run."""
    join()
    run, training = args["run"], Training()
    seen: dict[str, Any] = {}
    if args.get("before"):
        with ckptfs.prepare_run(run) as held:
            for step in args["before"]:
                ckptfs.save(training.tensors(), f"{run}/step_{step}", run=held)
    seen["latest"] = getattr(ckptfs.latest(run), "step", None)
    shut(args)
    with ckptfs.prepare_run(run, mode="overwrite") as held:
        for step in range(1, args["until"] + 1):
            training.train()
            save = partial(ckptfs.save, training.tensors(), f"{run}/step_{step}", run=held)
            if failing(save, seen) is None:
                return seen
    loaded = Training()
    state = loaded.tensors()
    ckptfs.load(state, f"{run}/step_{args['until']}")
    loaded.step = state["step"]
    same = loaded.digest() == digest_of(args["until"])
    return {**seen, "same": same, "steps": [c.step for c in ckptfs.list_checkpoints(run)]}


# -- N3 -------------------------------------------------------------------------------------------


def managed(args: dict[str, Any]) -> dict[str, Any]:
    """A manager, each save waited for."""
    rank, _ = join()
    training = Training(managed=True)
    seen: dict[str, Any] = {"referenced": []}
    state: dict[str, Any] = {"training": training.everything()}
    if rank == 0:
        state["driver"] = {"queue": [0]}
    with ckptfs.CheckpointManager(args["run"], keep_latest=1, unchanged="reference") as manager:
        seen["restored"] = _restored(manager, training, state)
        seen["queue"] = state["driver"]["queue"] if rank == 0 else None
        for step in range(training.step + 1, args["until"] + 1):
            training.train()
            state["training"]["step"] = training.step
            if rank == 0:
                state["driver"] = {"queue": [step, 2 * step]}
            shut(args, when=step == args.get("dies_in"))
            saved = failing(partial(manager.save, step, state), seen)
            if saved is None:
                break
            seen["referenced"].append(saved.total.referenced_bytes)  # type: ignore[union-attr]
        if "error" not in seen:
            seen["same"] = training.digest() == digest_of(args["until"], managed=True)
            seen["steps"] = manager.steps
            one = ckptfs.latest(args["run"])
            seen["latest"] = None if one is None else one.step
    return seen


def _restored(manager: ckptfs.CheckpointManager, training: Training, state: Any) -> int:
    """Restore; the step, 0 where there was nothing. Every bit is compared."""
    found = manager.restore(state)
    if found is None:
        return 0
    training.step = state["training"]["step"]
    assert training.digest() == digest_of(training.step, managed=True), "not bit for bit"
    return int(found.step or 0)


# -- N4 -------------------------------------------------------------------------------------------


def background(args: dict[str, Any]) -> dict[str, Any]:
    """A manager that saves behind training; weights are published once."""
    join()
    training = Training(managed=True)
    seen: dict[str, Any] = {"heard": []}
    state: dict[str, Any] = {"training": training.everything()}
    manager = ckptfs.CheckpointManager(
        args["run"], keep_latest=1, mode="async", on_commit=seen["heard"].append
    )
    seen["restored"] = _restored(manager, training, state)
    for step in range(training.step + 1, args["until"] + 1):
        training.train()
        state["training"]["step"] = training.step
        shut(args, when=step == args.get("dies_in"))
        # What was staged is not what training changes from here on.
        if failing(partial(manager.save, step, state), seen) is None:
            break
        if step == args.get("publish"):
            manager.wait(WAIT_S)
            manager.save(step, {"weights": training.weights}, kind="weights")
            manager.wait(WAIT_S)
    failing(manager.wait, seen)
    if "error" not in seen:
        seen["same"] = training.digest() == digest_of(args["until"], managed=True)
        seen["steps"] = manager.steps
        seen["weights"] = manager.latest_of("weights").step  # type: ignore[union-attr]
    failing(manager.close, {})
    return seen
