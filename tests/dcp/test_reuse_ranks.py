"""unchanged="reference" over several ranks: other worlds, disks of their own, and a power cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import RunSession
from ckptfs.dcp.incremental.reuse import Unchanged
from ckptfs.dcp.loading import load_at
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.events import SaveResult
from ckptfs.testing.disk import SimulatedDisk
from tests.crash.rig import ONE_DOMAIN, RUN, SOLO, TWO_FULL_DOMAINS, Layout, sessions, values
from tests.dcp.reuse_rig import same

FROZEN = {f"layer{n}": torch.arange(5000.0) + n for n in range(9)}
ONE_BYTES = 5000 * 4


def state(value: float, rank: int) -> dict[str, Any]:
    """Frozen layers that every rank holds, trained ones, and a value of each rank's own."""
    return {**FROZEN, "w": torch.full((100,), float(value)), "mine": torch.full((9,), rank + value)}


def saving(steps: tuple[int, ...], per_rank: tuple[str, ...] = ("mine",)) -> Any:
    """The body of a rank that claims the run and saves these steps."""

    def body(session: RunSession) -> list[SaveResult]:
        options, saved = WriteOptions(unchanged=Unchanged.REFERENCE), []
        with claim(session, takeover=Takeover.FORCE) as run:
            for step in steps:
                spec = SaveSpec(f"step_{step}", step, run=run.generation, per_rank=per_rank)
                target = run.session.storage.root / spec.name
                mine = state(step, session.control.rank)
                saved.append(save_at(mine, run.session, target, spec, options))
        return saved

    return body


def loading(step: int, saved_by: int) -> Any:
    """The body of a rank that loads a step; whether all of it is right."""

    def body(session: RunSession) -> bool:
        rank = session.control.rank
        wanted = state(step, rank)
        if session.control.size != saved_by:
            del wanted["mine"]
        got = {key: torch.zeros_like(value) for key, value in wanted.items()}
        target = session.storage.root / f"step_{step}"
        load_at(got, session, target, locate(session, target.name), strict="mine" in wanted)
        return same(got, wanted)

    return body


def run_all(layout: Layout, base: Path, body: Any, job: str = "one", **more: Any) -> list[Any]:
    """What every rank returned."""
    return values(sessions(layout, str(base), body, job=job, **more))


def inode_bytes(path: Path) -> int:
    """Bytes of the data files below a directory, each inode once."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            if name.endswith(".distcp"):
                seen = os.stat(os.path.join(folder, name))
                found[seen.st_ino] = seen.st_size
    return sum(found.values())


def test_another_number_of_ranks_takes_over_what_it_writes(tmp_path: Path) -> None:
    """Three ranks, then one, then three again, each a new owner: the layers stay where they were."""
    for number, (layout, steps) in enumerate(
        [(ONE_DOMAIN, (1, 2)), (SOLO, (3, 4)), (ONE_DOMAIN, (5, 6))]
    ):
        per_rank = ("mine",) if layout is ONE_DOMAIN else ()
        done = run_all(layout, tmp_path, saving(steps, per_rank), job=str(number))
        last = done[0][-1].total
        assert last.referenced_bytes > 9 * ONE_BYTES
        assert last.size_bytes < ONE_BYTES
    assert inode_bytes(tmp_path / RUN) < 9 * ONE_BYTES + 60_000
    for step, layout in ((1, ONE_DOMAIN), (2, SOLO), (4, SOLO), (5, SOLO), (6, ONE_DOMAIN)):
        saved_by = 1 if step in (3, 4) else 3
        assert all(run_all(layout, tmp_path, loading(step, saved_by)))


def test_each_disk_links_its_own_copies(tmp_path: Path) -> None:
    """On node-local disks every node keeps its own frozen layers once, and loads alone."""
    done = run_all(TWO_FULL_DOMAINS, tmp_path, saving((1, 2, 3)))
    assert done[0][-1].total.size_bytes < ONE_BYTES
    for node in ("a", "b"):
        held = inode_bytes(tmp_path / node)
        assert 9 * ONE_BYTES < held < 9 * ONE_BYTES + 60_000
    assert all(run_all(TWO_FULL_DOMAINS, tmp_path, loading(3, 3)))


def test_a_power_cut_loses_no_link_of_an_acknowledged_save(tmp_path: Path) -> None:
    """After two saves, the second mostly links, everything that was not synced is gone: both load."""
    (tmp_path / "now").mkdir()
    disk = SimulatedDisk(str(tmp_path / "now"))
    run_all(SOLO, tmp_path / "now", saving((1, 2), ()), posix=disk)
    disk.cut()
    disk.materialise(str(tmp_path / "after"))
    for step in (1, 2):
        assert all(run_all(SOLO, tmp_path / "after", loading(step, 1)))
