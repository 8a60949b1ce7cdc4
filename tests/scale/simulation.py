"""A world of thousands of ranks, simulated: what one save costs, counted to the last operation.

    costs = run_world(Sizes(ranks=4096), Kind.SHARED, directory)
    costs["save"].calls        {"create": 8197, "rename": 8198, "mkdir": 3, ...}
    costs["save"].steps        what each collective step sent, in bytes

The real code runs on every rank: topology's probe and ``ensure_dir``, the claim of the run, the plan
of the save with torch's own planner, every phase of the commit, projection, retention, ``latest``. Only
three things are not real: ranks are threads that take turns (``lockstep``), tensors are a few bytes,
and fsync is counted and left out. Storage is the real backend over a directory, one directory per node
where disks are node-local, or the real object store over a server in memory.

    open      sit down at a new run: who shares what     retain    let one older save go, bytes and all
    ensure    one ``ensure_dir``                          release   leave the run
    prepare   claim the run                               resume    claim it again
    save      one save of the held run                    latest    one process asks what is newest
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.catalog.unlogged import newest
from ckptfs.commit.log.entries import Kind as Artifact
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.lease import LeaseTimes
from ckptfs.commit.ownership.run import Run, agreeing_target
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, RunSession, agree_uri, start_session
from ckptfs.control.control import Control
from ckptfs.dcp.planning.save_planner import SavePlanner
from ckptfs.dcp.planning.state_dicts import LocalFacts
from ckptfs.dcp.saving import WriteOptions, plan_at
from ckptfs.dcp.write.pipeline import PLANNING, finish_save, write
from ckptfs.errors import StateError
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.testing.memory_object_store import SMALL_LIMITS, MemoryObjectClient, MemoryObjects
from ckptfs.topology.ensure_dir import ensure_dir
from ckptfs.uri import Uri
from tests.scale.counted import Calls, CountedPosix
from tests.scale.lockstep import StepCost, lockstep

__all__ = ["Cost", "Kind", "Shard", "Sizes", "run_world"]

_LONG_S = 1e6  # no lease is rewritten while a world is counted
_ROWS = 4  # of a tensor, on each rank
_COUNT = "(count)"


class Kind(enum.Enum):
    """Where the run is.

    Attributes:
        SHARED: A shared directory.
        LOCAL: Node-local disks.
        OBJECTS: An object store.
    """

    SHARED = "shared directory"
    LOCAL = "node-local disks"
    OBJECTS = "object store"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a simulated world is.

    Attributes:
        ranks: How many ranks.
        per_node: How many of them on each node.
        tensors: How many tensors, each sharded over all ranks.
    """

    ranks: int
    per_node: int = 8
    tensors: int = 1

    @property
    def nodes(self) -> int:
        """How many nodes that makes."""
        return -(-self.ranks // self.per_node)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one phase cost.

    Attributes:
        calls: Operations at all storage together, by name.
        steps: The steps of the control plane.
    """

    calls: dict[str, int]
    steps: tuple[StepCost, ...]

    def read_bytes(self, ranks: int) -> int:
        """Return the bytes that ``ranks`` ranks read from the store that they talk through."""
        return sum(step.read_bytes(ranks) for step in self.steps)


def run_world(sizes: Sizes, kind: Kind, directory: Path) -> dict[str, Cost]:
    """Run the phases above. One at a time.

    Args:
        sizes: How large the world is.
        kind: Where the run is.
        directory: A fresh directory.

    Returns:
        What each phase cost, by name.
    """
    ground = _Ground(sizes, kind, directory)
    nodes = [f"node{rank // sizes.per_node}" for rank in range(sizes.ranks)]
    ends, steps = lockstep(sizes.ranks, lambda control: _live(control, ground), nodes=nodes)
    for end in ends:
        end.get()
    costs, mine = {}, []
    phases = iter(ground.phases)
    for step in steps:
        if step.label != _COUNT:
            mine.append(step)
            continue
        name, calls = next(phases)
        costs[name] = Cost(calls, tuple(mine))
        mine = []
    return costs


@dataclass
class _Ground:
    """What all ranks stand on, and what was counted so far."""

    sizes: Sizes
    kind: Kind
    directory: Path
    calls: Calls = field(default_factory=Calls)
    server: MemoryObjects = field(
        default_factory=lambda: MemoryObjects(limits=replace(SMALL_LIMITS, delete_batch=1000))
    )
    phases: list[tuple[str, dict[str, int]]] = field(default_factory=list)

    def storage(self, node: str) -> Storage:
        """The run, as one process of a node opens it."""
        if self.kind is Kind.OBJECTS:
            return ObjectStorage(Uri.parse("s3://bucket/run"), MemoryObjectClient(self.server))
        where = self.directory / ("all" if self.kind is Kind.SHARED else node) / "run"
        where.parent.mkdir(parents=True, exist_ok=True)
        posix = CountedPosix(self.calls, durable=False)
        return LocalStorage(Uri.parse("file:///data/run"), directory=str(where), posix=posix)

    def taken(self) -> dict[str, int]:
        """What was asked since the last time."""
        if self.kind is not Kind.OBJECTS:
            return self.calls.taken()
        counts = dict(sorted(self.server.counts().items()))
        self.server.plan.trace.clear()
        return counts


def _live(control: Control, ground: _Ground) -> None:
    """What every rank does."""
    storage = ground.storage(control.world.node)
    try:
        session = _sit(control, storage)
        _count(control, ground, "open")
        ensure_dir(control, storage, session.placement, "logs")
        _count(control, ground, "ensure")
        with claim(session, times=LeaseTimes(_LONG_S)) as run:
            _count(control, ground, "prepare")
            retirer = Retirer(run, Keep(latest=1), lambda _: True)
            _save(run, ground.sizes, 1)
            _count(control, ground, "first save")
            _save(run, ground.sizes, 2)
            _count(control, ground, "save")
            retirer.after_commit(run.session)
            retirer.make_room()
            _count(control, ground, "retain")
            retirer.close()
        _count(control, ground, "release")
        with claim(session, times=LeaseTimes(_LONG_S)):
            _count(control, ground, "resume")
            if control.rank == 0:
                _latest(storage)
            _count(control, ground, "latest")
    finally:
        storage.close()


def _sit(control: Control, storage: Storage) -> RunSession:
    agree_uri(control, str(storage.root))
    return start_session(control, storage, Place(), write=True)


def _count(control: Control, ground: _Ground, name: str) -> None:
    """Collective. When nothing is under way any more, what was done since the last time."""

    def note(_: Sequence[None]) -> None:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()  # the log's timestamp is moved a little after an entry
        ground.phases.append((name, ground.taken()))

    control.step(_COUNT, lambda: None, note)


def _save(run: Run, sizes: Sizes, step: int) -> None:
    """As ``ckptfs.dcp.saving.save_at``, without the result that each rank makes of all ranks' numbers."""
    session = run.session
    storage = session.storage
    given = str(storage.uri(f"step_{step}"))
    target, agreeing = agreeing_target(run, given, PLANNING)
    domains = {d.id: d.ranks for d in session.placement.domains}
    attempt = SaveAttempt(session, SaveSpec(target.name, step, run=run.generation))
    planned, _ = plan_at(Shard(sizes), session, attempt, WriteOptions(threads=1), agreeing)
    attempt.begin()
    attempt.commit(
        lambda: write(
            planned,
            storage,
            attempt.prefix,
            attempt.save_id,
            domain=session.placement.mine.id,
            sync_names=not session.placement.is_owner,
        ),
        lambda parts: finish_save(
            planned,
            parts,
            save_id=attempt.save_id,
            checkpoint_id=str(target),
            domains=domains,
            root=storage.root,
        ),
    )


def _latest(storage: Storage) -> None:
    view = drive(read_view(), storage)
    views = {} if view is None else dict([view])
    found = drive(newest(views, storage.root, Artifact.CHECKPOINT), storage)
    if found is None or found.step != 2:
        raise StateError(f"the newest is {found}, not the second save", uri=storage.root)


class Shard:
    """A rank's share: its rows of each tensor, and one small tensor that every rank has. A ``Share``.

    Args:
        sizes: How large the world is.

    Attributes:
        planner: Plans the save.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.planner = SavePlanner()
        self._sizes = sizes

    def plan(self, rank: int, per_rank: Sequence[str] = ()) -> SavePlan:
        """Return the items of ``rank``; ``per_rank`` is ignored."""
        del per_rank
        keys = [f"layers.{n}.weight" for n in range(self._sizes.tensors)]
        items = [*_items(keys, rank, self._sizes.ranks), *_items(["scale"], 0, 1)]
        paths = {key: tuple(key.split(".")) for key in [*keys, "scale"]}
        return SavePlan(items, planner_data=LocalFacts(paths, {"scale": 1}))

    def take_on(self, items: Sequence[WriteItem]) -> None:
        """Nothing to prepare for ``items``."""

    def resolve(self, item: WriteItem) -> torch.Tensor:
        """Return the data of any ``item``: a few bytes."""
        del item
        return torch.zeros(_ROWS)


def _items(keys: Sequence[str], place: int, places: int) -> Iterator[WriteItem]:
    """A piece of each tensor, one of ``places``, as a planner makes it: each with its own data."""
    chunk = ChunkStorageMetadata(torch.Size([_ROWS * place]), torch.Size([_ROWS]))
    properties = TensorProperties(dtype=torch.float32)
    size = torch.Size([_ROWS * places])
    for key in keys:
        sharded = key != "scale"
        index = MetadataIndex(key, chunk.offsets if sharded else None)
        kind = WriteItemType.SHARD if sharded else WriteItemType.TENSOR
        yield WriteItem(index, kind, tensor_data=TensorWriteData(chunk, properties, size))
