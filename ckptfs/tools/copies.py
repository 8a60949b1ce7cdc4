"""Copies of checkpoints in a run, told from the log's own: ``gc`` leaves them alone. Read-only, no torch.

homes_of            where each save put its data: the same id anywhere else is a copy
names_save          whether what lies in a directory calls itself that save
listed_by_copies    shared data that copies need
"""

from __future__ import annotations

from ckptfs.commit.catalog.catalog import Look
from ckptfs.commit.catalog.unlogged import look_beside, names_beside
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import decode_manifest
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import MANIFEST, METADATA
from ckptfs.commit.save import foreign_metadata
from ckptfs.commit.state import part_name
from ckptfs.errors import ManifestError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.tools.measured import listed

__all__ = ["homes_of", "listed_by_copies", "names_save"]


def homes_of(state: LogState) -> dict[str, str]:
    """Return the directory with the data of every save that the log ``state`` has a name for. Pure."""
    homes = {}
    for save in state.saves.values():
        if save.seal is not None:
            homes[save.save_id] = save.seal.name
        elif save.part is not None:
            homes[save.save_id] = part_name(save.part.name, save.part.part)
    return homes


def names_save(storage: Storage, directory: str, save_id: str) -> bool:
    """Whether the manifest in a directory, or without one its ``.metadata``, names a save.

    Args:
        storage: The run's.
        directory: The directory.
        save_id: The id of the save.

    Returns:
        True also where the manifest is damaged, because then it may.
    """
    try:
        named = foreign_metadata.names_save(read_limited(storage, f"{directory}/{MANIFEST}"))
        return named is None or named == save_id
    except ManifestError:
        return True
    except NotFoundError:
        pass
    try:
        return save_id.encode() in read_limited(storage, f"{directory}/{METADATA}")
    except NotFoundError:
        return False


def listed_by_copies(look: Look) -> frozenset[str] | None:
    """Return paths below ``_data`` that copied checkpoints list.

    Those are checkpoints that were copied here, with an id that the log knows or without one.

    Args:
        look: What this process sees of the run.

    Returns:
        The paths; None: one of the checkpoints is unreadable.
    """
    (state,) = look.views.values()
    homes, paths = homes_of(state), set[str]()
    for name in names_beside(listed(look.storage, ""), look.views):
        beside = drive(look_beside(name, look.views, look.root), look.storage)
        if beside is not None and beside.manifest is None:
            if beside.checkpoint is None:
                return None
            continue
        # A copy of what the log knows is the log's for look_beside: it does not tell what it lists.
        try:
            raw = read_limited(look.storage, f"{name}/{MANIFEST}")
            manifest = decode_manifest(raw, look.root / name)
        except NotFoundError:
            continue
        except ManifestError:
            return None
        if homes.get(manifest.save_id) != name:
            paths |= {file.path for file in manifest.files if file.is_shared}
    return frozenset(paths)
