"""What the ranks of one job on both clients do together; each function runs in every rank.

Imported on the clients by name. See ``together.in_ranks``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing

from ckptfs import checkpoint_dir
from ckptfs.control.control import open_control
from ckptfs.storage.registry import open_storage
from ckptfs.topology.ensure_dir import ensure_dir
from ckptfs.topology.storage_domains import probe_domains
from tests.nfs.runs import read_step

__all__ = ["identities", "make_directories", "probe_all", "read_together", "write_listed"]


def identities(path: str) -> tuple[int, int]:
    """What a program that compares devices goes by."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def probe_all(rank: int, runs: Mapping[str, str]) -> dict[str, tuple[list[list[int]], list[str]]]:
    """For each run: the domains' ranks, and what is in a directory that all have written to."""
    found = {}
    with open_control() as control:
        for name, run in runs.items():
            with closing(open_storage(run)) as storage:
                placement = probe_domains(control, storage)
                ensure_dir(control, storage, placement, "step_1/data")
                with open(f"{run}/step_1/data/rank{rank}", "xb"):
                    control.step("written", lambda: None)
                storage.refresh("step_1/data")
                listed = sorted(os.listdir(f"{run}/step_1/data"))
                found[name] = ([list(d.ranks) for d in placement.domains], listed)
                control.step("looked", lambda: None)
    return found


def make_directories(rank: int, run: str, rounds: int) -> dict[str, int]:
    """Rounds of "rank 0 makes a directory, everybody writes into it": how many failed on this rank.

    Each rank looks for the directory first, as programs do. barrier: made plainly, then a barrier; ours:
    ``ensure_dir``. exist_ok: made by every rank, as programs that know of it do.
    """
    failed = {"barrier": 0, "ours": 0, "exist_ok": 0}
    with open_control() as control, closing(open_storage(run)) as storage:
        placement = probe_domains(control, storage)
        for n in range(rounds):
            for how in failed:
                key = f"{how}_{n}"
                os.path.exists(f"{run}/{key}")
                control.step("looked", lambda: None)
                if how == "ours":
                    ensure_dir(control, storage, placement, key)
                else:
                    if rank == 0 or how == "exist_ok":
                        os.makedirs(f"{run}/{key}", exist_ok=True)
                    control.step("made", lambda: None)
                try:
                    with open(f"{run}/{key}/rank{rank}", "xb"):
                        pass
                except FileNotFoundError:
                    failed[how] += 1
    return failed


def read_together(rank: int, run: str, name: str) -> dict[str, bytes]:
    """What all ranks read of a step together."""
    del rank
    return read_step(run, name)


def write_listed(rank: int, run: str, name: str) -> None:
    """A step; rank 0 writes its last files when rank 1 has just listed it."""
    with open_control() as control, checkpoint_dir(f"{run}/{name}") as path:
        if rank == 0:
            _write(path, "m0")
        control.step("one is there", lambda: None)
        if rank == 1:
            _write(path, "m1")
            os.listdir(path)
        control.step("it was listed", lambda: None)
        if rank == 0:
            for n in range(6):
                _write(path, f"a{n}")
        control.step("all are there", lambda: None)


def _write(path: str, name: str) -> None:
    with open(f"{path}/{name}", "xb") as file:
        file.write(name.encode())
