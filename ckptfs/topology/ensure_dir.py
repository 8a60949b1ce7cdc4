"""ensure_dir: a directory that every rank of every node can use when the call returns.

    owner of each domain    makes it, durably, and leaves this call's token in .ckptfs-dir-<nonce>
    lead of each node       makes it again (existing is success: an operation on the name drops a
                            cached absence), reads the token through the path
    the others              stat it: one client's cache serves all processes of its node
    owner                   removes the token

That a directory exists does not show which one it is: after the directory was renamed aside, a client that had it
cached wrote into the moved one. Only the token, read through the path, shows that two nodes see the same directory.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence

from ckptfs.control.control import Control
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StaleError, StorageError
from ckptfs.storage.base import SMALL_BYTES, Shape, Storage
from ckptfs.topology.storage_domains import Placement

__all__ = ["ensure_dir"]

_TRIES = 20  # 0.05 s apart, 1 s in all: an NFSv3 client is fresh after one tick of the server

log = logging.getLogger("ckptfs.topology")


def ensure_dir(control: Control, storage: Storage, placement: Placement, key: str) -> None:
    """Make ``key`` and its missing ancestors. Collective; one make_dir per node, not per rank.

    On return every rank of every node can open it. Existing is success, and its content stays. On
    an object store nothing is made. After a crash the directory may exist, with an empty token file
    in it.

    Raises:
        CollectiveError: The owner cannot make it, or a node cannot see it.
    """
    if storage.capabilities.shape is Shape.OBJECT:
        control.step("ensure_dir", lambda: None, lambda _: None)
        return
    several = {d.owner: len(d.nodes) > 1 for d in placement.domains}[placement.mine.owner]
    token = f"{key}/.ckptfs-dir-{uuid.uuid4().hex}" if key else f".ckptfs-dir-{uuid.uuid4().hex}"

    def make() -> str | None:
        if not placement.is_owner:
            return None
        storage.make_dir(key)
        if several:
            storage.replace(token, b"")
        return token

    try:
        tokens = control.step("ensure_dir.make", make, _of_owners)
        owner_token = tokens[placement.mine.owner] if several else None
        control.step(
            "ensure_dir.confirm",
            lambda: _confirm(control, storage, placement, key, owner_token),
            lambda _: None,
        )
        control.step("ensure_dir.look", lambda: _look(placement, storage, key), lambda _: None)
    finally:
        if placement.is_owner and several:
            _remove(storage, token)


def _of_owners(answers: Sequence[str | None]) -> dict[int, str]:
    return {rank: token for rank, token in enumerate(answers) if token is not None}


def _confirm(
    control: Control, storage: Storage, placement: Placement, key: str, token: str | None
) -> None:
    if not placement.is_node_lead or placement.is_owner:
        return
    storage.make_dir(key)
    for attempt in range(_TRIES):
        storage.refresh(key)
        try:
            if token is not None:
                storage.read_small(token, SMALL_BYTES)
            return
        except (NotFoundError, StaleError) as error:
            missing = error
            if attempt + 1 < _TRIES:
                time.sleep(0.05)
    raise IncompleteCheckpointError(
        "this node does not see what the owner of its domain has just written in the directory",
        uri=storage.uri(key),
        node=control.world.node,
        hint="the directory was moved during the call, or this mount caches for longer than 1 s",
    ) from missing


def _look(placement: Placement, storage: Storage, key: str) -> None:
    if placement.is_node_lead:
        return
    for attempt in range(_TRIES):
        try:
            found = storage.stat(key)
            break
        except (NotFoundError, StaleError):
            # The lead's mkdir found that it exists. BeeGFS and virtiofs may still answer a stat
            # from a cache (FileExistsError, then is_dir() False).
            if attempt + 1 == _TRIES:
                raise
            storage.refresh(key)
            time.sleep(0.05)
    if not found.is_dir:
        raise NotFoundError("this is a file, not a directory", uri=storage.uri(key))


def _remove(storage: Storage, token: str) -> None:
    try:
        storage.remove(token)
    except StorageError as error:
        log.warning("a probe file was not removed: %s", error)
