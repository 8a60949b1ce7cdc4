"""How the machine looks at a run: by our own readers, by stock torch, and by listing the disks.

    sight = look(site)            every live save, in commit order, loaded bit for bit
    stock_look(site, saved)       what torch.distributed.checkpoint alone makes of its directory
    disks(site)                   what is there, on each disk

None of them changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.operations import drive
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.commit.state import catalog
from ckptfs.dcp.loading import load_at
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.testing.world import ThreadControl, thread_worlds
from ckptfs.uri import Uri
from tests.manager.machine_model import Saved
from tests.manager.machine_site import RUN, Site, run_all

ROWS = 40


def state_of(label: int, rank: int) -> dict[str, Any]:
    """What one rank saves: weights that all ranks hold, a part of its own, a leaf."""
    return {
        "model": {"w": torch.arange(ROWS, dtype=torch.int64) + 1000 * label},
        f"part{rank}": torch.full((ROWS,), 1000 * label + rank, dtype=torch.int32),
        "label": label,
    }


def empty_state(ranks: Iterable[int]) -> dict[str, Any]:
    """Something to load the parts of these ranks into."""
    parts = {f"part{r}": torch.full((ROWS,), -1, dtype=torch.int32) for r in ranks}
    return {"model": {"w": torch.full((ROWS,), -1, dtype=torch.int64)}, **parts, "label": -1}


def label_in(state: Mapping[str, Any], ranks: Iterable[int]) -> int:
    """The label that every bit of a loaded state agrees with."""
    label = int(state["label"])
    for rank in ranks:
        wanted = state_of(label, rank)
        assert torch.equal(state["model"]["w"], wanted["model"]["w"]), f"w is not of {label}"
        assert torch.equal(state[f"part{rank}"], wanted[f"part{rank}"]), f"part{rank} of {label}"
    return label


@dataclass(frozen=True)
class Seen:
    """One live save: what it says of itself, and the label that its bytes show."""

    name: str
    save_id: str
    label: int
    failure: bool
    pinned: bool


def look(site: Site) -> list[Seen]:
    """Every live save in commit order, loaded through every disk, with storage that cannot write."""
    nodes = list(dict.fromkeys(site.layout.nodes)) if not site.layout.shared else ["a"]
    out: dict[int, list[Seen]] = {}
    errors: list[BaseException] = []

    def read(control: ThreadControl) -> None:
        try:
            rank = site.layout.nodes.index(control.world.node)
            storage = ReadOnlyStorage(site.plain(Uri.parse(RUN), rank))
            session = start_session(control, storage, Place(), write=False)
            out[control.rank] = _read(site, session)
            assert storage.refused == 0, "a reader tried to write"
        except BaseException as error:  # noqa: BLE001 - raised below, on the machine's thread
            errors.append(error)
            control.die()

    run_all(read, thread_worlds(len(nodes), nodes=nodes, timeout_s=120.0))
    if errors:
        raise errors[0]
    assert all(seen == out[0] for seen in out.values()), "the disks show different runs"
    return out[0]


def _read(site: Site, session: RunSession) -> list[Seen]:
    told = session.control.step("views", lambda: drive(read_view(), session.storage))
    views = dict(t for t in told if t is not None)
    seen = []
    for live in catalog(views):
        seal = live.seal
        found = locate(session, seal.name)
        assert found.manifest is not None
        ranks = parts_here(site, session.control.world.node, found.manifest.world_size)
        state = empty_state(ranks)
        load_at(state, session, Uri.parse(RUN) / seal.name, found)
        pinned = any(view.save(seal.save_id).pinned for view in views.values())
        label = label_in(state, ranks)
        seen.append(Seen(seal.name, seal.save_id, label, seal.failure, pinned))
    return seen


def parts_here(site: Site, node: str, world: int) -> list[int]:
    """The ranks with parts on a node's disk."""
    nodes = site.layout.nodes[:world]
    return [r for r, n in enumerate(nodes) if site.layout.shared or n == node]


def stock_look(site: Site, saved: Saved) -> None:
    """Stock torch loads it from each disk: all that every rank has, and the parts of that node.

    A bucket in this process's memory is nothing that it can open.
    """
    if site.bucket is not None:
        return
    for node in dict.fromkeys(site.layout.nodes[: saved.world]):
        mine = parts_here(site, node, saved.world)
        state = empty_state(mine)
        dcp.load(state, checkpoint_id=site.directory(node) / saved.name, no_dist=True)
        assert label_in(state, mine) == saved.label


@dataclass(frozen=True)
class Disk:
    """What is on one disk. steps: the files of each directory of the run, relative to it."""

    steps: Mapping[str, frozenset[str]]
    attempts: frozenset[str]
    trash: frozenset[str]


def disks(site: Site) -> list[Disk]:
    """Every disk, in order of the nodes."""
    if site.bucket is not None:
        return [_bucket([key.removeprefix("run/") for key in list(site.bucket.objects)])]
    return [_disk(directory) for directory in site.directories()]


def _disk(run: Path) -> Disk:
    steps = {
        name: frozenset(
            os.path.relpath(os.path.join(top, file), run / name)
            for top, _, files in os.walk(run / name)
            for file in files
        )
        for name in _names(run)
        if name != ".ckptfs"
    }
    trash = run / ".ckptfs" / "trash"
    return Disk(
        steps,
        frozenset(_names(run / ".ckptfs" / "attempts")),
        frozenset(f"{g}/{name}" for g in _names(trash) for name in _names(trash / g)),
    )


def _bucket(keys: list[str]) -> Disk:
    attempts = {key.split("/")[2] for key in keys if key.startswith(".ckptfs/attempts/")}
    steps: dict[str, set[str]] = {}
    for key in keys:
        name, _, path = key.partition("/")
        if name != ".ckptfs":
            steps.setdefault(name, set()).add(path)
    held = {name: frozenset(paths) for name, paths in steps.items()}
    return Disk(held, frozenset(attempts), frozenset())


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
