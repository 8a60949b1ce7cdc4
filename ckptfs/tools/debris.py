"""What dead jobs left in a run, found read-only: what ``ckptfs gc`` shows. No torch.

    abandoned attempt   .ckptfs/attempts/<id>, and on object stores the data it put under its step
    deleted save        a delete is in the log, the bytes are still there
    replaced save       the next owner deletes it without being asked: a later one has its name
    trash               bytes on their way out, whose mover died
    late data           data of a save that is deleted and gone, where it lay: written after that
    unneeded data       files in _data that no checkpoint lists any more (object stores)
    temporary file      .ckptfs/tmp, .partial-*: whole names that never came to be
    unfinished upload   parts of an object that nobody completed
    symbolic link       in the place of a directory of the run's own, or in trash or attempts

The log decides what is dead. Where it does not say, age does: an attempt of the owner that stands may
be a save under way, a temporary file may be a live writer's. Everything else is somebody's: files that
the log has never heard of, other runs below, a checkpoint that was copied here under another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckptfs.uri import Uri

__all__ = ["Debris", "Fate", "Found", "Survey"]


class Debris(StrEnum):
    """What it is."""

    ATTEMPT = "abandoned attempt"
    DELETED = "deleted save"
    REPLACED = "replaced save"
    TRASH = "trash"
    LATE = "late data"
    SHARED = "unneeded data"
    TEMPORARY = "temporary file"
    UPLOAD = "unfinished upload"
    LINK = "symbolic link"


class Fate(StrEnum):
    """What ``--delete`` does with it."""

    GOES = "goes"
    YOUNG = "young"  # younger than asked for: somebody may be writing it now
    STAYS = "stays"  # nobody can tell whose it is, or what is needed of it


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that is left. name: of the checkpoint or file; uri: where it lies; keys: what is removed
    of it by itself, relative to the run. size_bytes: None where the store does not tell; of files that
    have hard links elsewhere the space is not freed. age_s: since it was last written to.
    may_live: a save may be under way there, and a new owner would end it.
    """

    debris: Debris
    name: str
    uri: Uri
    files: int | None
    size_bytes: int | None
    age_s: float | None
    fate: Fate
    why: str
    keys: tuple[str, ...] = ()
    may_live: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was found in one run. notes: what could not be looked at."""

    found: tuple[Found, ...]
    notes: tuple[str, ...] = ()
