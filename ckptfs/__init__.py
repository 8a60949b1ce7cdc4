"""ckptfs: sharded checkpoints by URI, committed whole on every rank and node, or not at all.

    CheckpointManager             when to save, what to keep, where to resume -> Restored
    DirectoryManager              the same for directories that a framework writes
    save, async_save, load        a sharded state dict, from every rank -> PendingSave
    save_object, load_object      one picklable object, from any process
    checkpoint_dir, ensure_dir    a directory that all ranks may use, made once per domain
    prepare_run -> Run            claim a run: fences every older writer
    latest, list_checkpoints      what is committed there -> Checkpoint
    StorageWriter, StorageReader  for torch.distributed.checkpoint itself
    RngState, PerRank             what every rank keeps for itself, for a manager's state
    Best, Keep, Copy              what stays, and where it is copied
    LogListener and others        receive the events of a manager
    Ticket, SealedPart, Decision  one checkpoint of several groups of processes
    wait_for_new                  the next checkpoint, for evaluation jobs and inference servers
    World                         the ranks that take part, and their nodes
    SaveResult, LoadResult        bytes, files and seconds, from the writers' own counters
    CkptfsError and subclasses    see ckptfs.errors

Names are imported when they are first used (PEP 562): ``import ckptfs`` costs milliseconds and does
not import torch, so a launcher, a command line or a dashboard may import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import ckptfs.storage.inflight as _inflight  # noqa: F401 - records have their fields from the first one on
from ckptfs._version import __version__
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AmbiguousCheckpointError,
    AnswerLostError,
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    CommitInDoubtError,
    ControlPlaneLostError,
    CredentialsError,
    DeadlineError,
    Failure,
    FencedError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    MissingDriverError,
    NoSpaceError,
    NotFoundError,
    RunBusyError,
    StaleError,
    StateError,
    StorageError,
    SymlinkError,
    TransientError,
    UnsupportedError,
    UriError,
)

if TYPE_CHECKING:
    from ckptfs.api import (
        checkpoint_dir,
        ensure_dir,
        latest,
        list_checkpoints,
        load_object,
        prepare_run,
        save_object,
    )
    from ckptfs.commit.catalog.catalog import Checkpoint
    from ckptfs.commit.ownership.run import Run
    from ckptfs.commit.parts.tickets import Decision, SealedPart, Ticket
    from ckptfs.control.world import World
    from ckptfs.dcp.api import load, save
    from ckptfs.dcp.async_api import async_save
    from ckptfs.dcp.pending import PendingSave
    from ckptfs.dcp.torch_hooks.storage_reader import StorageReader
    from ckptfs.dcp.torch_hooks.storage_writer import StorageWriter
    from ckptfs.events import LoadResult, Restored, SaveResult, SaveSkipped
    from ckptfs.manager.directory_manager import DirectoryManager, OpenedDirectory
    from ckptfs.manager.listeners import EveryRank, LogListener, MetricsListener
    from ckptfs.manager.manager import CheckpointManager
    from ckptfs.manager.preemption import WorkerShield
    from ckptfs.manager.prometheus import PrometheusTextfile
    from ckptfs.manager.rng import RngState
    from ckptfs.manager.state_dict import PerRank
    from ckptfs.manager.telemetry import TelemetryListener
    from ckptfs.manager.waiting import Watcher, wait_for_new
    from ckptfs.replication.copier import gather
    from ckptfs.replication.tiers import Copy
    from ckptfs.retention.policy import Best, Keep

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "AmbiguousCheckpointError",
    "AnswerLostError",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "CkptfsError",
    "CollectiveError",
    "CommitConflictError",
    "CommitInDoubtError",
    "ControlPlaneLostError",
    "Copy",
    "CredentialsError",
    "DeadlineError",
    "Decision",
    "DirectoryManager",
    "EveryRank",
    "Failure",
    "FencedError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "Keep",
    "LoadResult",
    "LogListener",
    "ManifestError",
    "MetricsListener",
    "MissingDriverError",
    "NoSpaceError",
    "NotFoundError",
    "OpenedDirectory",
    "PendingSave",
    "PerRank",
    "PrometheusTextfile",
    "Restored",
    "RngState",
    "Run",
    "RunBusyError",
    "SaveResult",
    "SaveSkipped",
    "SealedPart",
    "StaleError",
    "StateError",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "SymlinkError",
    "TelemetryListener",
    "Ticket",
    "TransientError",
    "UnsupportedError",
    "UriError",
    "Watcher",
    "WorkerShield",
    "World",
    "__version__",
    "async_save",
    "checkpoint_dir",
    "ensure_dir",
    "gather",
    "latest",
    "list_checkpoints",
    "load",
    "load_object",
    "prepare_run",
    "save",
    "save_object",
    "wait_for_new",
]

# Where each lazy name lives. tests/test_exports.py holds this, the imports above and __all__ equal.
_HOMES = {
    "checkpoint_dir": "ckptfs.api",
    "ensure_dir": "ckptfs.api",
    "latest": "ckptfs.api",
    "list_checkpoints": "ckptfs.api",
    "load_object": "ckptfs.api",
    "prepare_run": "ckptfs.api",
    "save_object": "ckptfs.api",
    "Checkpoint": "ckptfs.commit.catalog.catalog",
    "Run": "ckptfs.commit.ownership.run",
    "Decision": "ckptfs.commit.parts.tickets",
    "SealedPart": "ckptfs.commit.parts.tickets",
    "Ticket": "ckptfs.commit.parts.tickets",
    "load": "ckptfs.dcp.api",
    "save": "ckptfs.dcp.api",
    "async_save": "ckptfs.dcp.async_api",
    "PendingSave": "ckptfs.dcp.pending",
    "StorageReader": "ckptfs.dcp.torch_hooks.storage_reader",
    "StorageWriter": "ckptfs.dcp.torch_hooks.storage_writer",
    "LoadResult": "ckptfs.events",
    "Restored": "ckptfs.events",
    "SaveResult": "ckptfs.events",
    "SaveSkipped": "ckptfs.events",
    "Copy": "ckptfs.replication.tiers",
    "DirectoryManager": "ckptfs.manager.directory_manager",
    "OpenedDirectory": "ckptfs.manager.directory_manager",
    "gather": "ckptfs.replication.copier",
    "EveryRank": "ckptfs.manager.listeners",
    "LogListener": "ckptfs.manager.listeners",
    "MetricsListener": "ckptfs.manager.listeners",
    "CheckpointManager": "ckptfs.manager.manager",
    "WorkerShield": "ckptfs.manager.preemption",
    "PrometheusTextfile": "ckptfs.manager.prometheus",
    "Best": "ckptfs.retention.policy",
    "Keep": "ckptfs.retention.policy",
    "RngState": "ckptfs.manager.rng",
    "PerRank": "ckptfs.manager.state_dict",
    "TelemetryListener": "ckptfs.manager.telemetry",
    "Watcher": "ckptfs.manager.waiting",
    "wait_for_new": "ckptfs.manager.waiting",
    "World": "ckptfs.control.world",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value  # asked once: the next look-up does not come here
    return value


def __dir__() -> list[str]:
    """List every public name, imported yet or not."""
    return sorted({*globals(), *__all__})
