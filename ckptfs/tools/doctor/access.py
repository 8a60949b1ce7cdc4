"""Permissions: try each kind of operation once, under a separate name for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from ckptfs.control.world import World
from ckptfs.errors import AccessError, CkptfsError, CredentialsError, NotFoundError, StorageError
from ckptfs.storage.base import Shape
from ckptfs.tools.doctor.report import Finding, Theme, Verdict, on_ranks
from ckptfs.tools.doctor.session import (
    FailedOperation,
    Findings,
    ScratchDirectory,
    Session,
    Why,
    check,
)

__all__ = [
    "Access",
    "Op",
    "is_shut",
    "judge_access",
    "look_at_access",
    "may_write",
    "permissions",
    "reach",
]

_DIR = "access"


class Op(Enum):
    """The operations of a training job, by the permissions that they need."""

    LIST = "list"
    MAKE = "make directories"
    WRITE = "write"
    READ = "read"
    DELETE = "delete"


# Each operation that was tried; None if it worked. Operations that depend on a refused one are absent.
Access = Mapping[Op, FailedOperation | None]

_NAMES = {
    Op.LIST: "list",
    Op.MAKE: "make-directories",
    Op.WRITE: "write",
    Op.READ: "read",
    Op.DELETE: "delete",
}
_MEANING = {
    Op.LIST: "runs cannot be listed: `ckptfs ls`, `latest` without a hint and cleaning up fail",
    Op.MAKE: "no run can be made here",
    Op.WRITE: "training cannot save here; restoring may work",
    Op.READ: "nothing that was saved can be restored, and a save cannot prove what it wrote",
    Op.DELETE: "retention and cleaning up fail: the place fills up",
}
_READ_ONLY = (
    "read-only: a job can restore from here and cannot save; training would fail at its first save"
)
_MISSING = FailedOperation(Why.OTHER, "not tried")


def reach(scratch: ScratchDirectory) -> CkptfsError | None:
    """Return the error if the place cannot be reached at all: no credentials, no bucket, no server.

    It lists the run once. A refused listing is no such error, because writing may still be permitted.
    """
    try:
        scratch.run.refresh("")
        scratch.run.list("")
    except CredentialsError as error:
        return error
    except AccessError:
        return None
    except NotFoundError as error:
        return error if scratch.run.capabilities.shape is Shape.OBJECT else None
    except CkptfsError as error:
        return error
    return None


def look_at_access(scratch: ScratchDirectory, rank: int) -> Access:
    """List the run, then make, write, read, list and delete in the scratch directory.

    A StorageError becomes a FailedOperation in the result.
    """
    storage, key = scratch.storage, f"{_DIR}/rank-{rank}"
    tried: dict[Op, FailedOperation | None] = {}

    def attempt(op: Op, act: Callable[[], object]) -> bool:
        try:
            act()
        except StorageError as error:
            tried[op] = FailedOperation.of(error)
            return False
        tried[op] = tried.get(op)
        return True

    def make() -> None:
        scratch.make()
        storage.make_dir(_DIR)

    attempt(Op.LIST, lambda: _list(scratch))
    files = storage.capabilities.shape is Shape.FILESYSTEM
    if not attempt(Op.MAKE if files else Op.WRITE, make):
        return tried
    if attempt(Op.WRITE, lambda: storage.replace(key, b"doctor")):
        attempt(Op.READ, lambda: _read(scratch, key))
        if tried[Op.LIST] is None:
            attempt(Op.LIST, lambda: storage.list(_DIR))
        attempt(Op.DELETE, lambda: _delete(scratch, key))
    return tried


def _list(scratch: ScratchDirectory) -> None:
    try:
        scratch.run.list("")
    except NotFoundError:
        return  # the run does not exist yet; making it is tried next


def _read(scratch: ScratchDirectory, key: str) -> None:
    if scratch.storage.read(key) != b"doctor" or scratch.storage.stat(key).size_bytes != len(
        b"doctor"
    ):
        raise StorageError("what was read is not what was written", uri=scratch.storage.uri(key))


def _delete(scratch: ScratchDirectory, key: str) -> None:
    scratch.storage.remove(key)
    try:
        scratch.storage.stat(key)
    except NotFoundError:
        return
    raise StorageError("it is still there after it was deleted", uri=scratch.storage.uri(key))


def is_shut(answers: Access) -> bool:
    """Whether neither reading nor writing is permitted."""
    refused = {Why.ACCESS, Why.READ_ONLY}
    found = answers.values()
    return bool(found) and all(tried is not None and tried.why in refused for tried in found)


def may_write(answers: Sequence[Access]) -> bool:
    """Whether every rank could write. If not, checks that write are left out."""
    return all(s.get(Op.WRITE, _MISSING) is None for s in answers)


@check()
def permissions(session: Session) -> Findings:
    """Make a finding for each operation that some rank tried."""
    return judge_access(session.worlds, session.access)


def judge_access(worlds: Sequence[World], answers: Sequence[Access]) -> Findings:
    """Return a finding for each operation that some rank tried, in the order of operations."""
    ops = [op for op in Op if any(op in s for s in answers)]
    return tuple(_judge(worlds, answers, op) for op in ops)


def _judge(worlds: Sequence[World], answers: Sequence[Access], op: Op) -> Finding:
    refused = {rank: r for rank, s in enumerate(answers) if (r := s.get(op)) is not None}
    if not refused:
        return Finding(_NAMES[op], Theme.ACCESS, Verdict.OK, "permitted")
    first = next(iter(refused.values()))
    where = on_ranks(worlds, refused)
    read_only = first.why is Why.READ_ONLY or (
        first.why is Why.ACCESS and op in (Op.MAKE, Op.WRITE) and _reads(answers)
    )
    advice = first.hint or (
        "mount it read-write, or give the job's user the right to write"
        if read_only
        else "free space, or ask for quota"
        if first.why is Why.NO_SPACE
        else "give the job's user this right on the run's directory"
    )
    return Finding(
        _NAMES[op],
        Theme.ACCESS,
        Verdict.FAIL,
        f"{where}{first.text}",
        _READ_ONLY if read_only else _MEANING[op],
        advice,
        {"why": first.why.value, "ranks": sorted(refused)},
    )


def _reads(answers: Sequence[Access]) -> bool:
    return any(s.get(Op.LIST, _MISSING) is None for s in answers)
