"""Where a copy is to lie, looked at before anything is written there.

    refuse_nested    not inside a checkpoint, nor in what is a run's own
    is_run           a checkpoint keeps its name in one
    loose_at         a checkpoint of that name that no log knows: by stock torch, or copied by hand
    told_if_held     a living job may go on from the copy

All of it is local and read-only; the coordinator asks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ckptfs.commit.beside import Beside, look_beside
from ckptfs.commit.entries import GENESIS
from ckptfs.commit.layout import CONTROL, DOMAIN, SHARED
from ckptfs.commit.looking import looking_at
from ckptfs.commit.opening import Place
from ckptfs.commit.ops import Program, Refresh, drive
from ckptfs.commit.owners import alive_here, describe
from ckptfs.commit.protocol import Views, catalog
from ckptfs.commit.resuming import origin_of
from ckptfs.dcp.copy_source import stock_manifest
from ckptfs.errors import (
    AccessError,
    CkptfsError,
    ManifestError,
    NotFoundError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["Loose", "is_run", "loose_at", "refuse_nested", "told_if_held"]

# What lies above a run need not be permitted to be read, and need not be a place at all.
_ABOVE = (AccessError, NotFoundError, ManifestError, UnsupportedError, UriError)


def is_run(at: Uri, place: Place) -> bool:
    """Local, read-only. Whether a run of ckptfs is there."""
    with looking_at(at, place.storage_options) as look, contextlib.suppress(NotFoundError):
        return bool(look.views) or bool(look.storage.stat(DOMAIN).size_bytes)
    return False


def refuse_nested(root: Uri, place: Place, checkpoint: Uri | None) -> None:
    """UriError where a run at ``root`` would lie inside a checkpoint, or in a run's own directories.

    checkpoint: what is copied, if it is one: a copy within it would change the source.
    """
    if CONTROL in root.path.split("/"):
        raise UriError(f"{CONTROL} is a run's own", uri=root, hint="copy it beside the run")
    if checkpoint is not None and _is_inside(root, checkpoint):
        raise UriError(
            "that is inside the checkpoint that is copied",
            uri=root,
            hint="name the copy beside it: RUN/NAME",
        )
    for above in _runs_above(root, place):
        inside = root.path[len(above.path.rstrip("/")) + 1 :].split("/")[0]
        with looking_at(above, place.storage_options) as look:
            names = {SHARED, *(live.seal.name for live in catalog(look.views))}
        if inside in names:
            raise UriError(
                f"that is inside {inside} of the run {above}",
                uri=root,
                hint="copy it beside that one, or into a run of its own",
            )


def _is_inside(one: Uri, other: Uri) -> bool:
    same = (one.protocol, one.authority) == (other.protocol, other.authority)
    return same and f"{one.path}/".startswith(f"{other.path}/")


def _runs_above(root: Uri, place: Place) -> list[Uri]:
    lineage = [root.parent] if root.name else []
    while lineage and lineage[-1].name:
        lineage.append(lineage[-1].parent)
    found: list[Uri] = []
    if not lineage:
        return found
    top = lineage[-1]
    # One storage for all: opening one costs more than looking.
    with (
        contextlib.suppress(*_ABOVE),
        contextlib.closing(open_storage(top, place.storage_options)) as storage,
    ):
        for above in lineage:
            key = above.path[len(top.path.rstrip("/")) + 1 :]
            with contextlib.suppress(*_ABOVE):
                storage.stat(f"{key}/{DOMAIN}" if key else DOMAIN)
                found.append(above)
    return found


@dataclass(frozen=True, slots=True)
class Loose:
    """A checkpoint that no log knows. origin: as of any save, None where it cannot be read.
    why: what keeps it from being loaded, "" where it can be.
    """

    origin: str | None
    why: str


def loose_at(name: str, views: Views, storage: Storage) -> Loose | None:
    """What has the name without the log's knowing; None: nothing, or the log tells."""
    beside = drive(_beside(name, views, storage.root), storage)
    if beside is None:
        return None
    origin = None
    if beside.manifest is not None:
        origin = origin_of(beside.manifest.save_id)
    elif beside.checkpoint is not None:
        with contextlib.suppress(CkptfsError):  # it is no other's, whatever is wrong with it
            origin = stock_manifest(storage, name).save_id
    return Loose(origin, beside.why)


def _beside(name: str, views: Views, root: Uri) -> Program[Beside | None]:
    yield Refresh(name)
    return (yield from look_beside(name, views, root))


def told_if_held(views: Views, node: str, name: str) -> tuple[str, ...]:
    """A warning where a job that goes on from the target's latest would go on from the copy ``name``:
    the run's owner neither left nor is known to be dead. node: this one's, as in ``Owner``.
    """
    newest = max(views.values(), key=lambda view: view.generation, default=None)
    if newest is None or newest.generation == GENESIS or newest.released:
        return ()
    if newest.fence.node == node and not alive_here(newest.fence):
        return ()
    told = (
        f"the target is held by {describe(newest.fence)}: its latest will be the copy {name}, until "
        "that job commits the next"
    )
    return (told,)
