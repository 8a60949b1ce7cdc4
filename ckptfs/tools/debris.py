"""What dead jobs leave in a run, and how much of it there is: values and rules. Read-only, no torch.

    abandoned attempt   .ckptfs/attempts/<id>, and on object stores the data it put under its step
    deleted save        a delete is in the log, the bytes are still there
    replaced save       a later one has its name; the next owner deletes it
    trash               bytes on their way out, whose mover died
    late data           data of a save that is deleted and gone, where it was: written after that
    unneeded data       files in _data that no checkpoint lists any more (object stores)
    temporary file      .ckptfs/tmp, .partial-*: whole names that never came to be; in a directory of single
                        files, which has no log, the only kind
    unfinished upload   parts of an object that nobody completed
    symbolic link       in the place of a directory of the run's own, or in trash or attempts

The log decides what is dead. Where it does not say, age does: an attempt of the current owner may
be a save under way, a temporary file may be a live writer's, unless its name says that it is of a process of
this machine that has ended. Everything else belongs to a person: files that the log has never heard of, other
runs below, a checkpoint that was copied here under another name.

    measured(storage, [".ckptfs/attempts/<id>"])    -> Tree(files, size_bytes, newest_s)

A file that disappears during a measurement counts nothing. On object stores each file is one request,
several at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from ckptfs.commit.log.fold import LogState
from ckptfs.commit.ownership.claim import ORPHAN_S
from ckptfs.commit.ownership.recovery_plan import AttemptRecord
from ckptfs.commit.paths import AttemptKeys, shared_key
from ckptfs.errors import NotFoundError, SymlinkError
from ckptfs.storage.base import Entry, Shape, Storage, UnfinishedUpload
from ckptfs.tools.lines import side_by_side
from ckptfs.uri import Uri

__all__ = [
    "DAY_S",
    "AttemptFate",
    "Debris",
    "Fate",
    "Found",
    "Survey",
    "Tree",
    "attempt_fate",
    "attempt_tree",
    "files_below",
    "is_link",
    "is_sending",
    "listed",
    "measured",
]


@dataclass(frozen=True, slots=True)
class Tree:
    """Files below some keys.

    Attributes:
        files: How many.
        size_bytes: Their bytes.
        newest_s: When the last of them, or an empty directory, was written, in seconds of Unix time on the
            server's clock; None: not known.
    """

    files: int = 0
    size_bytes: int = 0
    newest_s: float | None = None

    def __add__(self, other: Tree) -> Tree:
        times = [t for t in (self.newest_s, other.newest_s) if t is not None]
        newest_s = max(times, default=None)
        return Tree(self.files + other.files, self.size_bytes + other.size_bytes, newest_s)


def measured(storage: Storage, keys: Iterable[str]) -> Tree:
    """Return files, bytes and age of the files ``keys`` of ``storage``, and of all below directories among them."""
    files = [file for key in dict.fromkeys(keys) for file in files_below(storage, key) or [key]]
    return sum(side_by_side(partial(_stat, storage), files), Tree())


def attempt_tree(storage: Storage, record: AttemptRecord) -> Tree:
    """Measure all that an attempt has written.

    On object stores its data is where the save will have it.

    Args:
        storage: The run's.
        record: The attempt.

    Returns:
        Its files, bytes and age.
    """
    shape = storage.capabilities.shape
    keys = AttemptKeys(shape, record.name, record.save_id)
    below = [keys.attempt]
    if shape is Shape.OBJECT:
        below += [shared_key(record.save_id), *([keys.projected_data] if record.name else [])]
    return measured(storage, below)


def files_below(storage: Storage, key: str) -> list[str]:
    """List the keys of all files below a directory or prefix; empty where there is none.

    A link counts as what it is: what is behind one to a directory is not removed with it, and mazes of links
    have no end.

    Args:
        storage: The run's.
        key: The directory or prefix.
    """
    found: list[str] = []
    for entry in listed(storage, key):
        below = f"{key}/{entry.name}" if key else entry.name
        if entry.is_dir and not entry.is_link:
            found += files_below(storage, below)
        else:
            found.append(below)
    return found


def listed(storage: Storage, key: str) -> Sequence[Entry]:
    """List names directly below ``key`` in ``storage``; none where there is no directory."""
    try:
        return storage.list(key)
    except NotFoundError:
        return ()


def is_link(storage: Storage, key: str) -> bool:
    """Whether the name ``key`` in ``storage`` is a symbolic link; never where there are none."""
    path = storage.local_path(key)
    return path is not None and os.path.islink(path)


def _stat(storage: Storage, key: str) -> Tree:
    try:
        stat = storage.stat(key)
    except (NotFoundError, SymlinkError):
        return Tree()  # gone meanwhile, or a link that leads nowhere
    return Tree(0 if stat.is_dir else 1, stat.size_bytes, stat.modified_s)


DAY_S = (
    24 * 3600.0
)  # an attempt of the owner that stands is left alone for so long after its last write


class Debris(StrEnum):
    """What is left.

    Attributes:
        ATTEMPT: An attempt that was given up.
        DELETED: Bytes of a deleted save.
        REPLACED: Bytes of a save that was replaced, or hidden by an overwrite.
        TRASH: What was moved to the trash.
        LATE: Data of a deleted save that a delayed write brought back.
        SHARED: Files in ``_data`` of an object store that no checkpoint lists.
        TEMPORARY: A temporary file.
        UPLOAD: An upload that was not finished.
        LINK: A symbolic link in the place of a control directory, or in one.
    """

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
    """What ``--delete`` does with it.

    Attributes:
        GOES: Removes it.
        YOUNG: Leaves it, because it is younger than the limit: a process may be writing it now.
        STAYS: Leaves it, because it is not known what it belongs to, or what needs it.
    """

    GOES = "goes"
    YOUNG = "young"
    STAYS = "stays"


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that is left.

    Attributes:
        debris: What it is.
        name: The name of the checkpoint or file.
        uri: Where it is.
        files: How many files; None where the storage does not say.
        size_bytes: Their bytes; None where the storage does not say. Of files that have hard links elsewhere
            the space is not freed.
        age_s: Seconds since it was last written to; None where the storage does not say.
        fate: What is done with it.
        why: The reason.
        keys: What is removed of it by itself, relative to the run.
        may_live: A save may be under way there, and a new owner would end it.
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
    """All that was found in one run.

    Attributes:
        found: What is left.
        notes: What could not be read.
    """

    found: tuple[Found, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptFate:
    """What is known of an attempt without a seal.

    Attributes:
        fate: What is done with it.
        why: The reason.
        may_live: A save may be under way there, and a new owner would end it.
    """

    fate: Fate
    why: str
    may_live: bool = False


def attempt_fate(
    record: AttemptRecord,
    state: LogState,
    *,
    has_files: bool,
    age_s: float | None,
    is_sending: bool,
    older_than_s: float,
) -> AttemptFate:
    """The one opinion of ``ls`` and ``gc`` of an attempt that no entry has settled for good. Pure.

    A process that is gone decides nothing: the attempt may be a plain save's, of another process.

    Args:
        record: The attempt, as its first file describes it.
        state: The log of the domain that holds the attempt.
        has_files: Anything was written below it.
        age_s: Seconds since the last write below the attempt; None where the storage does not say.
        is_sending: A part of one of its files was uploaded a short time ago.
        older_than_s: How many seconds after its last write an attempt of the present owner may live; 0: not
            at all.
    """
    known = state.save(record.save_id)
    if known.aborted or known.decided is not None or known.deleted:
        return AttemptFate(Fate.GOES, "aborted in the log")
    if record.base is not None and record.base < state.generation:
        return AttemptFate(Fate.GOES, "a newer owner took the run: it can not commit any more")
    if older_than_s > 0:
        # Also without attempt.json: it may be on its way itself.
        if age_s is None or age_s < older_than_s:
            return AttemptFate(Fate.YOUNG, "a save may be under way", may_live=True)
        # The parts of a file have no age here: the last one may have come a moment ago.
        if is_sending:
            why = "a file of it is being sent, or was: a save may be under way"
            return AttemptFate(Fate.YOUNG, why, may_live=True)
    if record.base is None and has_files:
        return AttemptFate(Fate.STAYS, "its attempt.json is missing or damaged")
    return AttemptFate(Fate.GOES, "nothing was written for that long", may_live=True)


def is_sending(save_id: str, uploads: Iterable[UnfinishedUpload]) -> bool:
    """Whether a file of the save ``save_id`` is among ``uploads`` that were active a short time ago. Pure."""
    return any(save_id in u.key.split("/") and u.age_s < ORPHAN_S for u in uploads)
