"""ckptfs: sharded checkpoints by URI, committed whole on every rank and node, or not at all.

    save, load                    a sharded state dict, from every rank
    save_object, load_object      one picklable object, from any process
    checkpoint_dir, ensure_dir    a directory that all ranks may use, made once per domain
    prepare_run -> Run            claim a run: fences every older writer
    latest, list_checkpoints      what is committed there -> Checkpoint
    StorageWriter, StorageReader  for torch.distributed.checkpoint itself
    World                         who takes part, and on which node
    SaveResult, LoadResult        bytes, files and seconds, from the writers' own counters
    CkptfsError and its tree      see ckptfs.errors

Names are imported when they are first used (PEP 562): ``import ckptfs`` costs milliseconds and does
not import torch, so a launcher, a command line or a dashboard may import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptfs._version import __version__
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
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
    from ckptfs.commit.catalog import Checkpoint
    from ckptfs.commit.run import Run
    from ckptfs.dcp.api import load, save
    from ckptfs.dcp.reader import StorageReader
    from ckptfs.dcp.writer import StorageWriter
    from ckptfs.events import LoadResult, SaveResult
    from ckptfs.topology.world import World

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "AnswerLostError",
    "Checkpoint",
    "CkptfsError",
    "CollectiveError",
    "CommitConflictError",
    "CommitInDoubtError",
    "ControlPlaneLostError",
    "CredentialsError",
    "DeadlineError",
    "Failure",
    "FencedError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "LoadResult",
    "ManifestError",
    "MissingDriverError",
    "NoSpaceError",
    "NotFoundError",
    "Run",
    "RunBusyError",
    "SaveResult",
    "StaleError",
    "StateError",
    "StorageError",
    "StorageReader",
    "StorageWriter",
    "TransientError",
    "UnsupportedError",
    "UriError",
    "World",
    "__version__",
    "checkpoint_dir",
    "ensure_dir",
    "latest",
    "list_checkpoints",
    "load",
    "load_object",
    "prepare_run",
    "save",
    "save_object",
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
    "Checkpoint": "ckptfs.commit.catalog",
    "Run": "ckptfs.commit.run",
    "load": "ckptfs.dcp.api",
    "save": "ckptfs.dcp.api",
    "StorageReader": "ckptfs.dcp.reader",
    "StorageWriter": "ckptfs.dcp.writer",
    "LoadResult": "ckptfs.events",
    "SaveResult": "ckptfs.events",
    "World": "ckptfs.topology.world",
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
