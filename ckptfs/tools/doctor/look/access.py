"""Permissions: each kind of operation once, under a name of this rank's own."""

from __future__ import annotations

from collections.abc import Callable

from ckptfs.errors import AccessError, CkptfsError, CredentialsError, NotFoundError, StorageError
from ckptfs.storage.base import Shape
from ckptfs.tools.doctor.corner import Corner
from ckptfs.tools.doctor.seen import Access, Op, Refusal, Why

__all__ = ["is_shut", "look_at_access", "reach"]

_DIR = "access"


def reach(corner: Corner) -> CkptfsError | None:
    """The error where the place cannot be reached at all: no credentials, no bucket, no server.

    One listing of the run. Being refused it is no such error: writing may be permitted all the same.
    """
    try:
        corner.run.refresh("")
        corner.run.list("")
    except CredentialsError as error:
        return error
    except AccessError:
        return None
    except NotFoundError as error:
        return error if corner.run.capabilities.shape is Shape.OBJECT else None
    except CkptfsError as error:
        return error
    return None


def look_at_access(corner: Corner, rank: int) -> Access:
    """List the run, then make, write, read, list and delete in the corner. Never raises StorageError."""
    storage, key = corner.storage, f"{_DIR}/rank-{rank}"
    tried: dict[Op, Refusal | None] = {}

    def attempt(op: Op, act: Callable[[], object]) -> bool:
        try:
            act()
        except StorageError as error:
            tried[op] = Refusal.of(error)
            return False
        tried[op] = tried.get(op)
        return True

    def make() -> None:
        corner.make()
        storage.make_dir(_DIR)

    attempt(Op.LIST, lambda: _list(corner))
    files = storage.capabilities.shape is Shape.FILESYSTEM
    if not attempt(Op.MAKE if files else Op.WRITE, make):
        return Access(tried)
    if attempt(Op.WRITE, lambda: storage.replace(key, b"doctor")):
        attempt(Op.READ, lambda: _read(corner, key))
        if tried[Op.LIST] is None:
            attempt(Op.LIST, lambda: storage.list(_DIR))
        attempt(Op.DELETE, lambda: _delete(corner, key))
    return Access(tried)


def _list(corner: Corner) -> None:
    try:
        corner.run.list("")
    except NotFoundError:
        return  # a run that nobody made yet; that it can be made is tried next


def _read(corner: Corner, key: str) -> None:
    if corner.storage.read(key) != b"doctor" or corner.storage.stat(key).size_bytes != len(
        b"doctor"
    ):
        raise StorageError("what was read is not what was written", uri=corner.storage.uri(key))


def _delete(corner: Corner, key: str) -> None:
    corner.storage.remove(key)
    try:
        corner.storage.stat(key)
    except NotFoundError:
        return
    raise StorageError("it is still there after it was deleted", uri=corner.storage.uri(key))


def is_shut(seen: Access) -> bool:
    """Whether neither reading nor writing is permitted."""
    refused = {Why.ACCESS, Why.READ_ONLY}
    found = seen.tried.values()
    return bool(found) and all(tried is not None and tried.why in refused for tried in found)
