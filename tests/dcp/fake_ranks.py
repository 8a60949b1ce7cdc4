"""Many ranks one after the other in one process: torch's fake process group, real DTensors.

stock_save(path, 4, build)    the checkpoint that stock DCP writes of build(rank) on 4 ranks
our_save(storage, 4, build)   ours, through the same functions as ckptfs.save
load(...)                     any planner and metadata, rank by rank
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import describe, encode_metadata
from ckptfs.dcp.planning.save_planner import SavePlanner, local_plan
from ckptfs.dcp.planning.state_dicts import original_item, unwrap_stateful, view_for
from ckptfs.dcp.read.data_file import Source, Verify
from ckptfs.dcp.read.load_planner import LoadPlanner
from ckptfs.dcp.read.scheduler import fetch
from ckptfs.dcp.write.pipeline import storage_data_of, written_part
from ckptfs.dcp.write.rank_files import WriteEngine, auto_engine, sidecar_name, write_files
from ckptfs.storage.base import Storage

Build = Callable[[int], dict[str, Any]]
SAVE_ID = "save-1"


@contextlib.contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """This process is rank ``rank`` of ``size`` for as long as the block lasts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def stock_save(path: Path, size: int, build: Build) -> None:
    """What dcp.save with stock's planner and writer leaves in ``path``."""
    planners, writers, plans = [], [], []
    for rank in range(size):
        with fake_rank(rank, size):
            planner, writer = DefaultSavePlanner(), FileSystemWriter(path)
            planner.set_up_planner(unwrap_stateful(build(rank)), None, rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            planners.append(planner)
            writers.append(writer)
    chosen, metadata = planners[0].create_global_plan(plans)
    chosen = writers[0].prepare_global_plan(chosen)
    results = []
    for rank in range(size):
        with fake_rank(rank, size):
            plan = planners[rank].finish_plan(chosen[rank])
            results.append(writers[rank].write_data(plan, planners[rank]).wait())
    writers[0].finish(metadata, results)


def our_save(
    storage: Storage,
    size: int,
    build: Build,
    *,
    per_rank: Sequence[str] = (),
    threads: int = 1,
    engine: WriteEngine = auto_engine,
) -> Metadata:
    """What ckptfs.save leaves at the storage's root, without the commit around it."""
    planners, plans, parts = [], [], []
    for rank in range(size):
        with fake_rank(rank, size):
            planners.append(SavePlanner())
            plans.append(local_plan(planners[rank], build(rank), rank, per_rank))
    chosen, metadata = planners[0].create_global_plan(plans)
    storage.make_dir(SAVE_ID)
    for rank in range(size):
        with fake_rank(rank, size):
            written = write_files(
                storage,
                f"{SAVE_ID}/",
                rank,
                chosen[rank].items,
                functools.partial(_resolve, planners[rank], rank),
                engine=engine,
                threads=threads,
            )
            parts.append(written_part(written, SAVE_ID, None))
    indexes = [[item.index for item in plan.items] for plan in chosen]
    described = describe(
        metadata, storage_data_of(indexes, parts), checkpoint_id="here", save_id=SAVE_ID
    )
    storage.replace(".metadata", encode_metadata(described))
    return described


def _resolve(planner: SavePlanner, rank: int, item: Any) -> Any:
    return planner.resolve_data(original_item(item, rank))


def source(storage: Storage, *, rank: int = 0, verify: Verify = Verify.READ) -> Source:
    """Where ``our_save`` or ``stock_save`` wrote."""
    sidecars = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in storage.list(SAVE_ID):
            if entry.name.endswith(".distcp"):
                path = f"{SAVE_ID}/{entry.name}"
                sidecars[path] = sidecar_name(path)
    return Source(storage, "", sidecars, verify, rank)


def load(
    storage: Storage,
    size: int,
    build: Build,
    *,
    verify: Verify = Verify.READ,
    strict: bool = True,
    saved_world: int | None = None,
    view: Callable[[dict[str, Any]], Any] = lambda state: state,
) -> list[Any]:
    """Load into build(rank) on every rank; returns what ``view`` makes of each."""
    results = []
    for rank in range(size):
        with fake_rank(rank, size):
            metadata = decode_metadata(storage.read(".metadata"), storage.uri(".metadata"))
            state = unwrap_stateful(build(rank))
            planner = LoadPlanner(strict=strict)
            planner.set_up_planner(state, metadata, rank == 0)
            planner.metadata = view_for(metadata, rank, size, saved_world, planner.state_dict)
            plan = planner.finish_plan(planner.create_local_plan())
            fetch(source(storage, rank=rank, verify=verify), plan, planner, planner.metadata)
            results.append(view(state))
    return results
