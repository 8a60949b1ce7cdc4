"""One save, or one load, of a large state in a process of its own, and what memory it took.

    with launch(measured, 1, args={"do": "save", "uri": ..., "options": {...}, "gib": 1.0}) as ranks:

The state is one tensor of 128 MiB, and its first 6 MiB, under many keys, half of the bytes each: large
ones go out from where they are, of small ones several share a part. What is measured is what ckptfs
holds in addition to it.
Returns the most resident memory above what was resident before, in bytes, and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import ckptfs
from tests.multiprocess.harness import Rank

PIECE_BYTES, SMALL_BYTES = 128 << 20, 6 << 20


def resident(what: str) -> int:
    """VmRSS, or VmHWM, the most since it was last reset."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{what}:"))
    return int(line.split()[1]) << 10


def peak_of(call: Callable[[], object]) -> tuple[int, float]:
    """Bytes that were resident at most while it ran, above those before; its seconds."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark begins again
    before, started = resident("VmRSS"), time.perf_counter()
    call()
    return resident("VmHWM") - before, time.perf_counter() - started


def state_of(piece: torch.Tensor, gib: float) -> dict[str, Any]:
    """So many GiB under many keys in no more memory than ``piece``."""
    half = int(gib * (1 << 29))
    few, many = half // PIECE_BYTES, half // SMALL_BYTES
    small = piece[: SMALL_BYTES // 4]
    return {f"large{n}": piece for n in range(few)} | {f"small{n}": small for n in range(many)}


def save(asked: dict[str, Any]) -> tuple[int, float]:
    """Save float32, after a warm-up."""
    uri, options = asked["uri"], asked["options"]
    piece = torch.rand(PIECE_BYTES // 4)
    ckptfs.save({"w": piece[:10]}, f"{uri}/warm/step_1", storage_options=options)
    state = state_of(piece, asked["gib"])
    return peak_of(lambda: ckptfs.save(state, f"{uri}/run/step_1", storage_options=options))


def load(asked: dict[str, Any]) -> tuple[int, float]:
    """Load what ``save`` saved, into tensors of ``dtype``.

    The server keeps sizes and no bytes, so what comes are zeros: nothing to compare with.
    """
    uri, options = asked["uri"], asked["options"]
    ckptfs.load({"w": torch.zeros(10)}, f"{uri}/warm/step_1", storage_options=options)
    piece = torch.ones(PIECE_BYTES // 4, dtype=getattr(torch, asked["dtype"]))
    target = state_of(piece, asked["gib"])

    def act() -> None:
        ckptfs.load(
            target, f"{uri}/run/step_1", storage_options=options, verify="off", strict=False
        )

    found = peak_of(act)
    assert not piece.any()
    return found


def measured(rank: Rank) -> object:
    """Do what is asked for."""
    most_bytes, seconds = save(rank.args) if rank.args["do"] == "save" else load(rank.args)
    return {"bytes": most_bytes, "s": seconds}
