"""One rank of a job under torture: restore, check every bit, train, save, tell what became of it.

The state of step n is known to the last bit, so a restored one is checked whole, not by a sample.
Training changes the tensors in place right after ``save`` has returned: what a save still reads then
shows up as a wrong bit after the next restore.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.multiprocess.harness import Rank, describe

__all__ = ["LASTING", "train"]

COLUMNS = 1024
LASTING = "ckptfs-collected"  # releases the runs that somebody dropped; made by the first run
FACTOR = 1_000_003  # of the step, so that no two steps look alike


class State:
    """A sharded matrix, a replicated vector, a counter: all say which step they are of."""

    def __init__(self, rank: Rank, size_bytes: int) -> None:
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        rows = max(1, size_bytes // 4 // COLUMNS // rank.size)
        mesh = DeviceMesh("cpu", list(range(rank.size)))
        self.first = rank.number * rows * COLUMNS
        self.local = torch.empty(rows, COLUMNS, dtype=torch.int32)
        self.sharded = DTensor.from_local(self.local, mesh, [Shard(0)])
        self.bias = torch.empty(COLUMNS, dtype=torch.int64)
        self.become(0)

    def become(self, step: int) -> None:
        """What training makes of them by ``step``, in place."""
        import torch

        torch.arange(self.first, self.first + self.local.numel(), out=self.local.view(-1))
        self.local.add_((step * FACTOR) % (1 << 30))
        torch.arange(COLUMNS, out=self.bias)
        self.bias.add_(step * FACTOR)
        self.step = step

    def items(self) -> dict[str, Any]:
        """The state dict; the tensors are the live ones."""
        return {"model": {"w": self.sharded, "b": self.bias}, "step": self.step}

    def wrong(self, loaded: dict[str, Any]) -> str:
        """What differs from the state of the step that it says it is of, "" for nothing."""
        step = int(loaded["step"])
        local, bias = self.local.clone(), self.bias.clone()
        self.become(step)
        bad = [
            name
            for name, found, wanted in (("w", local, self.local), ("b", bias, self.bias))
            if not bool((found == wanted).all())
        ]
        return f"{bad} of step {step}" if bad else ""


def train(rank: Rank) -> Any:
    """The body of a rank. Reports restored, began, committed, failed, used; returns "done"."""
    import torch

    from ckptfs.events import Event, SaveCommitted, SaveFailed
    from ckptfs.manager.listeners import EveryRank
    from ckptfs.manager.manager import CheckpointManager

    torch.set_num_threads(1)
    rank.init_group()
    args = rank.args
    tell = Teller(rank)

    def hear(event: Event) -> None:
        match event:
            case SaveCommitted(result):
                tell.failures = 0
                tell("committed", step=result.step)
            case SaveFailed(step=step, error=error, outcome=outcome):
                tell("failed", step=step, error=error, outcome=outcome)

    state = State(rank, args["bytes"])
    manager = CheckpointManager(args["uri"], listeners=[EveryRank(hear)], **args["options"])
    step = _restore(tell, manager, state)
    for number in range(args["saves"]):
        step += 1
        state.become(step)
        tell("began", step=step)
        save = functools.partial(manager.save, step, state.items())
        if not tell.guard(step, save):
            tell.guard(step, save)  # the first call reported an earlier save, and saved nothing
        state.become(step + 1)  # the next step's tensors are not what is being saved
        if number % 4 == 3:
            tell.guard(step, lambda: manager.wait(120.0))
            tell("used", **_used())
        if tell.failures >= 3:
            return "gave up"
    tell.guard(step, lambda: manager.wait(120.0))
    manager.close()
    for thread in threading.enumerate():
        # Asked to end; what stays is a leak. The one of LASTING stays for as long as the process.
        if thread.name.startswith("ckptfs") and thread.name != LASTING:
            thread.join(120)
    tell("closed", **_used())
    return "done"


class Teller:
    """The line to the test, shared by the threads of this rank. failures: calls that raised since
    the last commit.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._line = threading.Lock()
        self.failures = 0

    def __call__(self, event: str, **data: object) -> None:
        with self._line:
            self._rank.tell(event, at_s=time.monotonic(), **data)

    def guard(self, step: int, call: Callable[[], object]) -> bool:
        """A failed save is no end of training: the next one may work. Whether this one did."""
        from ckptfs.errors import CkptfsError

        try:
            call()
        except CkptfsError as error:
            self.failures += 1
            # Each try of a claim opens the storage again, and would meet the same fault each time.
            os.environ.pop("CKPTFS_TEST_FAULT", None)
            told = describe(error)
            self("raised", step=step, type=told["type"], error=told["message"])
            return False
        return True


def _restore(tell: Teller, manager: Any, state: State) -> int:
    """Restore into tensors that hold nothing of any step; check every bit."""
    state.local.fill_(-1)
    state.bias.fill_(-1)
    loaded = {**state.items(), "step": -1}
    restored = manager.restore(loaded)
    step = 0 if restored is None else int(restored.step)
    tell("restored", step=step, wrong="" if restored is None else state.wrong(loaded))
    state.become(step)
    return step


def _used() -> dict[str, Any]:
    """What this process holds: descriptors, threads, memory."""
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGESIZE"),
    }
