"""What jobs of the laboratory run under torchrun, on whatever machines: training, and the needs N1, N2.

    training.py train RUN --until 6 [--copy URI] [--mode async] [--reference]
        restores, trains, saves every second step; reports restored, staged, saved, failed, done
    training.py train RUN EXCHANGE        and after it: overwrites RUN-over (N2), gathers step 6, and takes
                                          part in a checkpoint of a driver's in RUN-parts (N1)
    training.py drive RUN-parts EXCHANGE  that driver: a process of its own, in no group
    training.py own RUN --name old --until 3    a job that holds a run and saves: there are two of them

RUN is a path that every rank reaches under the same name: a node's own disk, a shared directory, NFS.
EXCHANGE is a directory of the host, for what Ray would carry from process to process.
Everything that a rank finds is reported to the test (tests/lab/job.py), which judges it; equal
``fingerprint`` of a rank means: the same parameters, optimizer, random state and position, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptfs
from tests.lab.job import WAIT_S, hold, tell

EVERY = 2


# -- a small training ---------------------------------------------------------------------------------


class Training:
    """Everything that one more step changes: FSDP2, AdamW, dropout, where the data is."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        self.rank = dist.get_rank()
        torch.manual_seed(7)  # the same first weights everywhere
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16))
        fully_shard(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.data = {"position": 0}
        torch.manual_seed(100 + self.rank)  # another stream of dropout on every rank

    def state(self) -> dict[str, Any]:
        """What the manager saves and restores."""
        return {
            "net": self.net,
            "optimizer": self.optimizer,
            "data": ckptfs.PerRank(self.data),
            "rng": ckptfs.RngState(),
        }

    def step(self) -> None:
        """One optimizer step on data that differs by rank."""
        import torch

        self.data["position"] += 1
        first = self.data["position"] * 64 + self.rank
        rows = torch.arange(first, first + 64.0).reshape(4, 16).sin()
        self.net(rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fingerprint(self) -> str:
        """One hash over all that this rank holds."""
        import torch

        digest = hashlib.sha256(f"{self.data} {torch.get_rng_state().tolist()}".encode())
        held = [self.net.state_dict(), *self.optimizer.state_dict()["state"].values()]
        for tensors in held:
            for name in sorted(tensors):
                local = getattr(tensors[name], "to_local", lambda t=tensors[name]: t)()
                digest.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
                digest.update(local.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def train(options: argparse.Namespace) -> None:
    """Continue from what is there to step ``--until``."""
    if options.reference:
        alone = Training()
        for _ in range(options.until):
            alone.step()
        tell("reference", fingerprint=alone.fingerprint())
    if options.copy and options.refused:
        with telling("refused"), _manager(options, copies=()) as manager:
            manager.restore(Training().state())
    training = Training()
    with telling("failed"), _manager(options, copies=options.copy) as manager:
        restored = manager.restore(training.state())
        first = 0 if restored is None else int(restored.step or 0)
        tell("restored", step=first, fingerprint=training.fingerprint())
        for step in range(first + 1, options.until + 1):
            training.step()
            if step % EVERY == 0:
                manager.save(step, training.state())
                tell("staged", step=step, latest=manager.latest and manager.latest.step)
                mark = training.fingerprint()
                begun = time.monotonic()
                try:
                    manager.wait()
                finally:
                    tell("waited", step=step, for_s=time.monotonic() - begun)
                tell("saved", step=step, fingerprint=mark)
        tell("done", fingerprint=training.fingerprint(), steps=manager.steps)
    if options.exchange:
        needs(options.run, options.exchange)


def _manager(options: argparse.Namespace, copies: Any) -> ckptfs.CheckpointManager:
    return ckptfs.CheckpointManager(
        options.run, keep_latest=2, mode=options.mode, copies=copies, timeout_s=options.timeout_s
    )


@contextmanager
def telling(event: str) -> Iterator[None]:
    """Tell which error of ckptfs ended the block, and continue; nothing where there was none."""
    begun = time.monotonic()
    try:
        yield
    except ckptfs.CkptfsError as error:
        failures = sorted(getattr(error, "failures", {}) or getattr(error, "silent", ()))
        tell(
            event,
            kind=type(error).__name__,
            text=str(error),
            ranks=failures,
            after_s=time.monotonic() - begun,
        )


# -- N2: overwriting; N1: parts and a driver ----------------------------------------------------------


def needs(run: str, exchange: str) -> None:
    """After a training: overwrite a run next to it, gather, take part in the driver's checkpoint."""
    _overwrite(Path(f"{run}-over"))
    ckptfs.gather(f"{run}/step_6", f"{exchange}/gathered/step_6")
    _take_part(f"{run}-parts", Path(exchange))
    tell("needs met")


def _overwrite(path: Path) -> None:
    import torch
    import torch.distributed as dist

    rank, run = dist.get_rank(), f"faults+file://{path}"
    key = f"w{rank}"

    def seen(event: str) -> None:
        dist.barrier()
        latest = ckptfs.latest(run)
        there = sorted(name for name in os.listdir(path) if name != ".ckptfs")
        tell(event, latest=latest and latest.uri.name, there=there)
        dist.barrier()

    ckptfs.save({key: torch.ones(8)}, f"{run}/step_1")
    (path / f"theirs-{rank}").write_text("not ours")
    with ckptfs.prepare_run(run, mode="overwrite") as held:
        seen("overwriting")
        ckptfs.save({key: torch.zeros(8)}, f"{run}/step_2", run=held)
        seen("overwritten")
    if rank == dist.get_world_size() // 2:  # the owner of the second node's disk, where it has one
        os.environ["CKPTFS_TEST_FAULT"] = "fail=EROFS:create:.ckptfs/log/*:1"
    with telling("not overwritten"):
        ckptfs.prepare_run(run, mode="overwrite").release()
    os.environ.pop("CKPTFS_TEST_FAULT", None)
    seen("after the failure")
    with ckptfs.prepare_run(run):
        seen("resumed")


def _part() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    return {f"actor{rank}": torch.arange(100.0) + rank}


def _take_part(run: str, exchange: Path) -> None:
    import torch
    import torch.distributed as dist

    ticket = _await_pickle(exchange / "ticket")
    sealed = ckptfs.save(_part(), ticket.part("actor"))
    if dist.get_rank() == 0:
        _pickle(sealed, exchange / "sealed")
    decision = _await_pickle(exchange / "decision")
    decision.publish()
    state = {name: torch.zeros_like(tensor) for name, tensor in _part().items()}
    ckptfs.load(state, f"{run}/step_8/actor")
    whole = all(torch.equal(state[name], tensor) for name, tensor in _part().items())
    latest = ckptfs.latest(run)
    tell("parts", whole=whole, latest=latest and latest.uri.name)


def drive(options: argparse.Namespace) -> None:
    """Outside of every group, perhaps where no rank is: objects, a ticket, a part of its own, the commit."""
    exchange, run = Path(options.exchange), options.run
    ckptfs.save_object({"seen": 17}, f"{run}/step_8/data.pt")  # no call made that directory
    with ckptfs.CheckpointManager(run) as manager:
        ticket = manager.begin(8, parts=["actor", "driver"])
        _pickle(ticket, exchange / "ticket")
        mine = ckptfs.save({"loader": {"epoch": 3}}, ticket.part("driver"))
        with telling("incomplete"):
            ticket.commit([mine])
        decision = ticket.commit([mine, _await_pickle(exchange / "sealed")])
        _pickle(decision, exchange / "decision")
    latest = ckptfs.latest(run)
    state: dict[str, Any] = {"loader": {"epoch": 0}}
    ckptfs.load(state, f"{run}/step_8/driver")
    tell("drove", latest=latest and latest.uri.name, **state["loader"])
    tell("object", **ckptfs.load_object(f"{run}/step_8/data.pt"))
    with telling("elsewhere"):
        ckptfs.load({}, f"{run}/step_8/actor", strict=False)
    tell("done")


def _pickle(value: object, path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)


def _await_pickle(path: Path) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.02)
    return pickle.loads(path.read_bytes())


# -- two jobs, one run --------------------------------------------------------------------------------------


def own(options: argparse.Namespace) -> None:
    """Claim the run, by force where it is another's, and save; each when the test says so."""
    import torch
    import torch.distributed as dist

    key = f"w{dist.get_rank()}"
    run = None
    hold("claim")
    with telling("busy"):
        run = ckptfs.prepare_run(options.run, takeover="never")
    if run is None:
        hold("take over")
        run = ckptfs.prepare_run(options.run, takeover="force")
    tell("owns", generation=run.generation.number)
    for step in range(1, options.until + 1):
        name = f"{options.name}_{step}"
        hold(name)
        with telling(f"refused {name}"):
            state = {key: torch.full((1000,), float(step))}
            ckptfs.save(state, f"{options.run}/{name}", step=step, run=run)
            tell(f"saved {name}")
    run.release()
    tell("done", live=[c.uri.name for c in ckptfs.list_checkpoints(options.run)])


# -- the command line -------------------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[argparse.Namespace], None]] = {
    "train": train,
    "drive": drive,
    "own": own,
}


def main() -> int:
    """Run one of them; 1 where a rank got a failure, so that torchrun waits for no rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("run")
    parser.add_argument("exchange", nargs="?", default="")
    parser.add_argument("--until", type=int, default=6)
    parser.add_argument("--copy", action="append", default=[])
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--name", default="step")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--refused", action="store_true", help="first restore without the copy")
    options = parser.parse_args()
    if options.program == "drive":
        drive(options)
        return 0
    import torch.distributed as dist

    dist.init_process_group("gloo")
    PROGRAMS[options.program](options)
    told = Path(os.environ["CKPTFS_LAB_TOLD"], f"{os.environ['RANK']}.jsonl").read_text()
    if '"event": "failed"' in told:
        hold("leave")  # torchrun ends the others with the first that leaves
        sys.stdout.flush()
        os._exit(1)  # torch's own threads may wait for the dead for half an hour
    dist.destroy_process_group()
    return 0


if __name__ == "__main__" and (code := main()):
    sys.exit(code)
