"""Copies of checkpoints in a run, told from the log's own: ``gc`` leaves them alone. Read-only, no torch.

homes_of            where each save put its data: the same id anywhere else is a copy
names_save          whether what lies in a directory calls itself that save
listed_by_copies    shared data that copies need
"""

from __future__ import annotations

from ckptfs.commit import foreign
from ckptfs.commit.beside import look_beside, names_beside
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import MANIFEST, METADATA
from ckptfs.commit.looking import Look
from ckptfs.commit.manifest import decode_manifest
from ckptfs.commit.ops import drive, read_limited
from ckptfs.commit.pieces import part_name
from ckptfs.errors import ManifestError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.tools.measured import listed

__all__ = ["homes_of", "listed_by_copies", "names_save"]


def homes_of(state: LogState) -> dict[str, str]:
    """Of every save that the log has a name for: the directory where its data lies. Pure."""
    homes = {}
    for save in state.saves.values():
        if save.seal is not None:
            homes[save.save_id] = save.seal.name
        elif save.part is not None:
            homes[save.save_id] = part_name(save.part.name, save.part.part)
    return homes


def names_save(storage: Storage, directory: str, save_id: str) -> bool:
    """Whether the manifest in a directory, or without one its ``.metadata``, tells of that save.

    True where the manifest is damaged: nobody can tell. Errors are the storage's.
    """
    try:
        named = foreign.names_save(read_limited(storage, f"{directory}/{MANIFEST}"))
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
    """Paths below ``_data`` that checkpoints list which were copied here, with an id that the log knows
    or without one. None: one of them is unreadable.
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
