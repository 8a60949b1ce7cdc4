"""Files that several saves use: where they are, how a save takes one over, and when one may be removed.

    filesystem     link(step_1/<a>/__0_0.distcp -> attempts/<b>/<b>/__0_0.distcp)
                   complete files with their own names: each save is moved and deleted by itself
    object store   data is in _data/<a>/, next to the steps; the manifest of <b> lists it too
                   it is removed with the last save that lists it

A manifest always names the save that wrote the bytes (``origin``), and never one that only uses them: there is no
chain to follow and none to break. No count is kept: the saves that need a file are found in the manifests of the
few saves that refer to its writer in their seals.

For the holder of the run only. A save in progress relies on the files of its base, so the base must not be deleted
in that time: a delete treats the bases of unfinished saves as roots.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckptfs.commit.log.entries import Outcome, Seal
from ckptfs.commit.log.fold import LogState, SaveState
from ckptfs.commit.manifest import FileRecord, decode_manifest
from ckptfs.commit.operations import Link, Program, Read, StatOf
from ckptfs.commit.paths import MANIFEST, AttemptKeys, shared_key
from ckptfs.errors import AlreadyExistsError, ManifestError, NotFoundError
from ckptfs.storage.base import Shape
from ckptfs.uri import Uri

__all__ = ["file_exists", "file_key", "link_file", "needed", "not_needed", "stock_path"]

logger = logging.getLogger("ckptfs.commit")

_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
_PATHS_ONLY = ("hdfs", "viewfs", "webhdfs", "file")  # an authority is a server there, no bucket


def file_key(record: FileRecord, home: str) -> str:
    """The key of a listed file. home: the step directory or attempt, from ``catalog.find``."""
    if record.is_shared:
        return shared_key(record.path)
    return f"{home}/{record.path}" if home else record.path


def stock_path(record: FileRecord, root: Uri) -> str:
    """How ``.metadata`` names a data file: stock readers join it to the step's own path.

    ``../`` would work on ``file://`` only. A rooted path ends the join and begins at the bucket.
    """
    if not record.is_shared:
        return record.path
    where = root / shared_key(record.path)
    if where.protocol in _CONTAINERS and where.userinfo and ":" not in where.userinfo:
        return f"/{where.userinfo}{where.path}"  # container@account
    hosts = where.protocol in _PATHS_ONLY
    return where.path if hosts or not where.authority else f"/{where.authority}{where.path}"


def link_file(homes: Sequence[str], path: str, target: str) -> Program[bool]:
    """Link ``target`` to a file of a committed save; False if the file is not there any more.

    homes: where that save may be, in the direction of its movement. The names are durable after a
    sync of the target's directory. UnsupportedError: no link between these two.
    """
    for home in homes:
        try:
            yield Link(f"{home}/{path}", target)
        except NotFoundError:
            continue  # it is being projected: look where it moves to; or it is deleted
        except AlreadyExistsError:
            # The name contains our save_id: it is our own link, from a call that was repeated.
            return True
        return True
    return False


def file_exists(record: FileRecord) -> Program[bool]:
    """Whether a shared file is where it is listed, with its size."""
    try:
        return bool((yield StatOf(shared_key(record.path))).size_bytes == record.size_bytes)
    except NotFoundError:
        return False


def not_needed(
    seal: Seal, listed: Sequence[FileRecord], state: LogState, shape: Shape
) -> Program[tuple[str, ...] | None]:
    """Keys of the shared files of a deleted save that no other save lists; None if this is unknown.

    listed: what its manifest lists. state: a fold that holds its delete. Saves that are deleted
    count until their bytes are gone, so that each file is removed by the last one that needs it.
    """
    shared = {f.path: f.origin for f in listed if f.is_shared}
    if not shared:
        return ()
    needed: set[str] = set()
    read: dict[str, frozenset[str] | None] = {}
    for origin in dict.fromkeys(shared.values()):
        wanted = {path for path, writer in shared.items() if writer == origin}
        # The newest first: it is the most likely to need such old files.
        for save in reversed([*state.saves.living.values()]):
            if wanted <= needed:
                break
            if save.save_id == seal.save_id or not _may_need(save, origin):
                continue
            if save.save_id not in read:
                read[save.save_id] = yield from _shared_paths(save, shape)
            paths = read[save.save_id]
            if paths is None:
                logger.warning(
                    "files of %s were not removed: save %s may use them, and its manifest "
                    "cannot be read",
                    seal.name,
                    save.save_id,
                )
                return None
            needed |= paths
    return tuple(shared_key(path) for path in shared if path not in needed)


def needed(writer: str, state: LogState, shape: Shape) -> Program[frozenset[str] | None]:
    """Paths of shared files of ``writer`` that some save with bytes lists; None if this is unknown."""
    paths: frozenset[str] = frozenset()
    for save in state.saves.living.values():
        if _may_need(save, writer):
            found = yield from _shared_paths(save, shape)
            if found is None:
                return None
            paths |= found
    return paths


def _may_need(save: SaveState, origin: str | None) -> bool:
    """Whether a save that has bytes is this writer, or its seal refers to it."""
    if save.seal is None or save.gone or save.decided is Outcome.ABORTED:
        return False
    return origin == save.save_id or origin in save.seal.origins


def _shared_paths(save: SaveState, shape: Shape) -> Program[frozenset[str] | None]:
    if save.seal is None:
        return frozenset()
    keys = AttemptKeys(shape, save.seal.name, save.save_id)
    try:
        raw: bytes = yield Read(f"{keys.projected_data}/{MANIFEST}")
        files = decode_manifest(raw, keys.projected_data).files
    except NotFoundError:
        # A manifest is removed after all files that it lists: a delete that died there needs
        # nothing more.
        return frozenset() if save.deleted else None
    except ManifestError:
        return None
    return frozenset(f.path for f in files if f.is_shared)
