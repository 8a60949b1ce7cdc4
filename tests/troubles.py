"""Real errors, each made by the mistake or failure that people meet.

TROUBLES["RunBusyError"](where)    does what goes wrong in an empty directory; it raises
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

import ckptfs
from ckptfs.storage.os_errors import lost_answer
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["TROUBLES", "state"]


def state() -> dict[str, Any]:
    """A small training state."""
    return {"model": {"weight": torch.arange(6.0), "bias": torch.zeros(2)}, "step": 1}


@contextlib.contextmanager
def fault(text: str) -> Iterator[None]:
    """What ``faults+file://`` does during the call."""
    os.environ["CKPTFS_TEST_FAULT"] = text
    try:
        yield
    finally:
        del os.environ["CKPTFS_TEST_FAULT"]


def saved(where: Path, name: str = "step_1") -> Path:
    """A committed checkpoint."""
    ckptfs.save(state(), where / name)
    return where / name


def data_of(step: Path, pattern: str) -> Path:
    """One file of a checkpoint, below its save id."""
    (found,) = step.glob(f"*/{pattern}")
    return found


def uri(where: Path) -> None:
    ckptfs.latest("s4://bucket/run")


def missing_driver(where: Path) -> None:
    ckptfs.latest("oci://bucket/run")


def wrong_state(where: Path) -> None:
    step = saved(where)
    ckptfs.load({"model": {"weights": torch.zeros(6)}}, step)


def ambiguous(where: Path) -> None:
    saved(where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state(), checkpoint_id=str(where / "step_3"), no_dist=True)
    metadata = where / "step_3/.metadata"
    later = (where / "step_1/.metadata").stat().st_mtime + 60
    os.utime(metadata, (later, later))
    ckptfs.latest(where)


def storage(where: Path) -> None:
    with fault("fail=EIO:open_write:*:1"):
        ckptfs.save(state(), f"faults+file://{where}/step_1")


def not_found(where: Path) -> None:
    saved(where)
    ckptfs.load(state(), where / "step_2")


def already_exists(where: Path) -> None:
    step = saved(where)
    (where / "into").mkdir()
    (where / "into" / "notes.txt").write_text("mine")
    with ckptfs.checkpoint_dir(step, mode="read", into=where / "into"):
        pass


def access(where: Path) -> None:
    with fault("fail=EACCES:make_dir:*:1"):
        ckptfs.save(state(), f"faults+file://{where}/step_1")


def credentials(where: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "client_kwargs": {"region_name": "us-east-1"}}
    ckptfs.latest("s3://bucket/run", storage_options=options)


def no_space(where: Path) -> None:
    with fault("fail=ENOSPC:open_write:*:1"):
        ckptfs.save(state(), f"faults+file://{where}/step_1")


def stale(where: Path) -> None:
    saved(where)
    with fault("fail=ESTALE:read:.ckptfs/domain:*"):
        ckptfs.list_checkpoints(f"faults+file://{where}")


def planted_link(where: Path) -> None:
    saved(where)
    (where / ".ckptfs" / "trash").symlink_to(where.parent)
    with ckptfs.prepare_run(where):
        raise AssertionError("a link was taken for the trash")


def transient(where: Path) -> None:
    with fault("fail=EBUSY:open_write:*.distcp:1"):
        ckptfs.save(state(), f"faults+file://{where}/step_1")


def answer_lost(where: Path) -> None:
    # What a network filesystem answers when its server went away in the middle of a rename.
    gone = OSError(errno.EIO, "Input/output error")
    raise lost_answer(gone, Uri.parse(str(where)) / "step_1/.metadata", "write")


def unsupported(where: Path) -> None:
    storage = open_storage("memory://troubles/run", {"shape": "object"})
    storage.rename("step_1", "step_2")


def collective(where: Path) -> None:
    step = saved(where)
    data_of(step, "*.distcp").write_bytes(b"short")
    ckptfs.load(state(), step)


def deadline(where: Path) -> None:
    with fault(f"hold={where}/go:open_write:*:1"):
        pending = ckptfs.async_save(state(), f"faults+file://{where}/run/step_1")
        try:
            pending.result(timeout_s=0.1)
        finally:
            (where / "go").touch()
            pending.result()


def fenced(where: Path) -> None:
    run = ckptfs.prepare_run(where)
    with ckptfs.prepare_run(where, takeover="force"):
        try:
            ckptfs.save(state(), where / "step_1", run=run)
        finally:
            run.release()


_HOLDS = """
import sys
import ckptfs
with ckptfs.prepare_run(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def run_busy(where: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(where)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        ckptfs.prepare_run(where, takeover="never")


def commit_conflict(where: Path) -> None:
    saved(where)
    ckptfs.save(state(), where / "step_1")


def in_doubt(where: Path) -> None:
    with fault("lose-undone:create:.ckptfs/log/*:1;fail=EIO:create:.ckptfs/log/*:2"):
        ckptfs.save(state(), f"faults+file://{where}/step_1")


def incomplete(where: Path) -> None:
    step = saved(where)
    data_of(step, "ckptfs.json").unlink()
    ckptfs.load(state(), step)


def integrity(where: Path) -> None:
    step = saved(where)
    manifest = data_of(step, "ckptfs.json")
    manifest.write_text(manifest.read_text().replace("step_1", "step_9"))
    ckptfs.load(state(), step)


def manifest(where: Path) -> None:
    saved(where)
    (where / ".ckptfs" / "log" / "00000000").write_text("not JSON\n")
    ckptfs.list_checkpoints(where)


TROUBLES: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        "UriError": uri,
        "MissingDriverError": missing_driver,
        "StateError": wrong_state,
        "AmbiguousCheckpointError": ambiguous,
        "StorageError": storage,
        "NotFoundError": not_found,
        "AlreadyExistsError": already_exists,
        "AccessError": access,
        "CredentialsError": credentials,
        "NoSpaceError": no_space,
        "StaleError": stale,
        "SymlinkError": planted_link,
        "TransientError": transient,
        "AnswerLostError": answer_lost,
        "UnsupportedError": unsupported,
        "CollectiveError": collective,
        "DeadlineError": deadline,
        "FencedError": fenced,
        "RunBusyError": run_busy,
        "CommitConflictError": commit_conflict,
        "CommitInDoubtError": in_doubt,
        "IncompleteCheckpointError": incomplete,
        "IntegrityError": integrity,
        "ManifestError": manifest,
    }
)
