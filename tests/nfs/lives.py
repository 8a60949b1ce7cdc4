"""What each rank of a job does in tests/nfs/test_jobs.py: restore, check every bit, save, tell.

    live           one life of a job; a rank may be killed at a random moment
    older, newer   two jobs that want one run; each on a node of its own

The state of a step is known to the last bit, on each rank another one.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckptfs
from ckptfs.errors import CkptfsError
from tests.nfs.inside import join

__all__ = ["live", "look", "newer", "older", "told"]

ROWS, COLUMNS = 64, 256  # of each rank
FACTOR = 1_000_003  # of the step, so that no two steps look alike


def state_of(rank: int, size: int, step: int, *, salt: int = 0) -> dict[str, Any]:
    """The state of a step: a sharded matrix, a replicated vector, a number. salt: which job's step it is."""
    local = torch.arange(ROWS * COLUMNS, dtype=torch.int64).reshape(ROWS, COLUMNS)
    local += rank * local.numel() + step * FACTOR + salt
    sharded = DTensor.from_local(local, _mesh(size), [Shard(0)])
    return {"w": sharded, "b": torch.arange(COLUMNS) * step + salt, "step": step}


@functools.cache
def _mesh(size: int) -> DeviceMesh:
    """Of all ranks, made once."""
    return DeviceMesh("cpu", list(range(size)))


def differs(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The keys with bits that are not as they should be; "" for none."""
    bad = [
        key
        for key, same in (
            ("w", torch.equal(found["w"].to_local(), wanted["w"].to_local())),
            ("b", torch.equal(found["b"], wanted["b"])),
            ("step", found["step"] == wanted["step"]),
        )
        if not same
    ]
    return " ".join(bad)


def told(error: CkptfsError) -> dict[str, Any]:
    """An error as a test compares it."""
    return {"type": type(error).__name__, "text": str(error), "outcome": error.outcome}


# -- one life, with a death in it -----------------------------------------------------------------


def live(args: dict[str, Any]) -> dict[str, Any]:
    """Claim, restore, save the next steps. kill_after_s: this rank's SIGKILL, from when all are there.

    Returns what was restored and whether each bit was right, the steps that were committed, whether it
    came to a save, how long it lived, and the error that ended it with the seconds after which the
    failing call raised it.
    """
    rank, size = join()
    if rank == args.get("victim") and "kill_after_s" in args:
        _die_after(args["kill_after_s"])
    born = begun = time.monotonic()
    seen: dict[str, Any] = {
        "restored": 0,
        "wrong": "",
        "committed": [],
        "saving": False,
        "error": None,
    }
    try:
        with ckptfs.prepare_run(args["run"]) as held:
            found = ckptfs.latest(args["run"])
            if found is not None:
                step = int(found.step or 0)
                state = state_of(rank, size, 0, salt=-1)
                # Every second life as a job that passes its run on, every second as one that does not.
                ckptfs.load(state, found.uri, run=held if step % 2 else None)
                seen["restored"], seen["wrong"] = step, differs(state, state_of(rank, size, step))
            for step in range(seen["restored"] + 1, seen["restored"] + 1 + args["saves"]):
                seen["saving"], begun = True, time.monotonic()
                ckptfs.save(state_of(rank, size, step), f"{args['run']}/step_{step}", run=held)
                seen["committed"].append(step)
    except CkptfsError as error:
        seen["error"] = {**told(error), "after_s": time.monotonic() - begun}
    return {**seen, "lived_s": time.monotonic() - born}


def _die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


# -- two jobs -------------------------------------------------------------------------------------


def older(args: dict[str, Any]) -> dict[str, Any]:
    """Commit step 1; save step 2, in which a fault stops one rank; then try step 3."""
    rank, size = join()
    run = args["run"]
    held = ckptfs.prepare_run(run)
    ckptfs.save(state_of(rank, size, 1), f"{run}/step_1", run=held)
    ends = []
    for step in (2, 3):
        try:
            ckptfs.save(state_of(rank, size, step), f"{run}/step_{step}", run=held)
            ends.append({"type": "", "text": "", "outcome": "committed"})
        except CkptfsError as error:
            ends.append(told(error))
    held.release()
    return {"ends": ends}


def newer(args: dict[str, Any]) -> dict[str, Any]:
    """Take the run over, check what is there, commit another step 2."""
    rank, size = join()
    run = args["run"]
    with ckptfs.prepare_run(run, takeover="force") as held:
        found = ckptfs.latest(run)
        assert found is not None
        state = state_of(rank, size, 0)
        ckptfs.load(state, found.uri)
        wrong = differs(state, state_of(rank, size, int(found.step or 0)))
        ckptfs.save(state_of(rank, size, 2, salt=7), f"{run}/step_2", run=held)
    return {"found": found.step, "wrong": wrong}


def look(args: dict[str, Any]) -> dict[str, Any]:
    """What is committed, and whether each of these steps is whole and of the right job."""
    rank, size = join()
    wrong = {}
    for step, salt in args["steps"].items():
        state = state_of(rank, size, 0, salt=-1)
        ckptfs.load(state, f"{args['run']}/step_{step}")
        wrong[step] = differs(state, state_of(rank, size, step, salt=salt))
    return {"steps": [c.step for c in ckptfs.list_checkpoints(args["run"])], "wrong": wrong}
