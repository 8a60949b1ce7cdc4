"""A checkpoint or a file where a run is meant, and a run where a checkpoint is. Read-only.

    refuse_no_run(root, shape)     StateError where the root is a checkpoint or a file
    check_run_uri(control, root)   the same from all ranks, before a run is made there
    is_run(name)                   whether a run of ckptfs lies under a name
    checkpoint_error, run_error    what to say, and the call that was meant

Asked only where nothing was found: who finds a log, or a checkpoint, pays nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptfs.commit.catalog import read_domain
from ckptfs.commit.layout import DOMAIN, MANIFEST, METADATA
from ckptfs.commit.ops import Program, Refresh, StatOf, drive
from ckptfs.errors import AccessError, NotFoundError, StateError
from ckptfs.storage.base import Shape, Stat, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.topology.control import Control
from ckptfs.uri import Uri

__all__ = ["check_run_uri", "checkpoint_error", "is_run", "refuse_no_run", "run_error"]


def refuse_no_run(root: Uri, shape: Shape) -> Program[None]:
    """StateError where the root of the storage is a checkpoint, or a file: it only looks like an empty run,
    and training would begin at step 0.
    """
    yield Refresh("")
    for inside in (MANIFEST, METADATA):
        if (yield from _stat(inside)) is not None:
            raise checkpoint_error(root)
    found = yield from _stat("")
    # An object of no bytes is what some tools make for a directory.
    if found is not None and not found.is_dir and (found.size_bytes or shape is Shape.FILESYSTEM):
        raise StateError(
            "a file, not a run",
            uri=root,
            hint="a run is a directory, or a prefix of a bucket: give that one, or a new one",
        )


def check_run_uri(
    control: Control,
    root: Uri,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> None:
    """Collective, before anything is written there. StateError: a run would be made in a checkpoint.

    storage: at the root, where the caller has one.
    """

    def local() -> StateError | None:
        if control.rank != 0:
            return None
        here = storage or open_storage(root, storage_options)
        try:
            drive(_refuse_checkpoint(root), here)
        except StateError as error:
            return error  # a value, so that it is raised as its type
        finally:
            if here is not storage:
                here.close()
        return None

    def decide(answers: Sequence[StateError | None]) -> None:
        if answers[0] is not None:
            raise answers[0]

    control.step("a run or a checkpoint", local, decide)


def _refuse_checkpoint(root: Uri) -> Program[None]:
    if (yield from read_domain()) is None:
        for inside in (MANIFEST, METADATA):
            if (yield from _stat(inside)) is not None:
                raise checkpoint_error(root)


def is_run(name: str) -> Program[bool]:
    """Whether a run that ckptfs made lies there, empty or not."""
    return (yield from _stat(f"{name}/{DOMAIN}")) is not None


def checkpoint_error(root: Uri) -> StateError:
    """For a call that takes a run and was given a checkpoint."""
    return StateError(
        "a checkpoint, not a run",
        uri=root,
        hint=f"its run is {root.parent}; ckptfs.load(state, uri) loads this checkpoint",
    )


def run_error(uri: Uri, hint: str = "") -> StateError:
    """For a call that takes a checkpoint and was given a run."""
    return StateError(
        "a run, not a checkpoint",
        uri=uri,
        hint=hint
        or "ckptfs.latest(uri).uri is its newest checkpoint; CheckpointManager(uri).restore(state) "
        "loads that one",
    )


def _stat(key: str) -> Program[Stat | None]:
    try:
        stat: Stat = yield StatOf(key)
    except (NotFoundError, AccessError):
        return None  # what lies beside the run's own keys need not be permitted
    return stat
