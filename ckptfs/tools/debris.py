"""The kinds of debris that dead jobs leave in a run, their sizes, and the rules for them.

    abandoned attempt   .ckptfs/attempts/<id>, and on object stores the data it put under its step
    deleted save        a delete is in the log, the bytes are still there
    replaced save       a later save has its name; the next owner deletes it
    trash               bytes that were being deleted when the deleter died
    late data           data of a save that is deleted and gone, written to its old place after that
    unneeded data       files in _data that no checkpoint lists any more (object stores)
    temporary file      .ckptfs/tmp, .partial-*: files that never got their final names; in a directory
                        of single files, which has no log, this is the only kind
    unfinished upload   parts of an object that was never completed
    symbolic link       in place of one of the run's own directories, or in trash or attempts

The log decides what is dead. If it does not say, age decides: an attempt of the current owner may be a
save under way, and a temporary file may belong to a live writer, unless its name shows that its writer
was a process of this machine that has ended. Everything else belongs to the user: files that are not in
the log, other runs below, a checkpoint that was copied here under another name.

    measured(storage, [".ckptfs/attempts/<id>"])    -> Tree(files, size_bytes, newest_s)

A file that disappears during a measurement is not counted. On object stores each file takes one
request, several at once. Read-only, no torch.
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
    """The files below some keys.

    Attributes:
        files: Number of files.
        size_bytes: Their total size in bytes.
        newest_s: When the newest file or empty directory was written, in seconds of Unix time on the
            server's clock; None if not known.
    """

    files: int = 0
    size_bytes: int = 0
    newest_s: float | None = None

    def __add__(self, other: Tree) -> Tree:
        times = [t for t in (self.newest_s, other.newest_s) if t is not None]
        newest_s = max(times, default=None)
        return Tree(self.files + other.files, self.size_bytes + other.size_bytes, newest_s)


def measured(storage: Storage, keys: Iterable[str]) -> Tree:
    """Measure the files ``keys`` of ``storage``, and all files below directories among them.

    Args:
        storage: The run's.
        keys: Files and directories.

    Returns:
        Their count, bytes and newest time.
    """
    files = [file for key in dict.fromkeys(keys) for file in files_below(storage, key) or [key]]
    return sum(side_by_side(partial(_stat, storage), files), Tree())


def attempt_tree(storage: Storage, record: AttemptRecord) -> Tree:
    """Measure everything that an attempt has written.

    On object stores this includes its data, which is already at its final place.

    Args:
        storage: The run's.
        record: The attempt.

    Returns:
        Its count of files, bytes and newest time.
    """
    shape = storage.capabilities.shape
    keys = AttemptKeys(shape, record.name, record.save_id)
    below = [keys.attempt]
    if shape is Shape.OBJECT:
        below += [shared_key(record.save_id), *([keys.projected_data] if record.name else [])]
    return measured(storage, below)


def files_below(storage: Storage, key: str) -> list[str]:
    """List the keys of all files below a directory or prefix; empty if it does not exist.

    A link counts as one file and is not followed: removing it does not remove what is behind it, and
    links may form cycles.

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
    """List the names directly below ``key`` in ``storage``; empty if there is no such directory."""
    try:
        return storage.list(key)
    except NotFoundError:
        return ()


def is_link(storage: Storage, key: str) -> bool:
    """Whether ``key`` is a symbolic link; False if ``storage`` has no symbolic links."""
    path = storage.local_path(key)
    return path is not None and os.path.islink(path)


def _stat(storage: Storage, key: str) -> Tree:
    try:
        stat = storage.stat(key)
    except (NotFoundError, SymlinkError):
        return Tree()  # removed since it was listed, or a link that leads nowhere
    return Tree(0 if stat.is_dir else 1, stat.size_bytes, stat.modified_s)


DAY_S = (
    24 * 3600.0
)  # an attempt of the current owner is left alone for this long after its last write


class Debris(StrEnum):
    """A kind of debris.

    Attributes:
        ATTEMPT: An attempt that was abandoned.
        DELETED: Bytes of a deleted save.
        REPLACED: Bytes of a save that was replaced, or hidden by an overwrite.
        TRASH: What was moved to the trash.
        LATE: Data of a deleted save that a delayed write brought back.
        SHARED: Files in ``_data`` of an object store that no checkpoint lists.
        TEMPORARY: A temporary file.
        UPLOAD: An upload that was not finished.
        LINK: A symbolic link in place of a control directory, or inside one.
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
    """What ``--delete`` does with a piece of debris.

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
    """One piece of debris.

    Attributes:
        debris: Its kind.
        name: The name of the checkpoint or file.
        uri: Where it is.
        files: Number of files; None if the storage does not say.
        size_bytes: Their bytes; None if the storage does not say. The space of files with further hard
            links is not freed.
        age_s: Seconds since it was last written to; None if the storage does not say.
        fate: What ``collect`` does with it.
        why: The reason.
        keys: Its keys, relative to the run; empty for attempts and saves, which recovery removes.
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
    """Everything that was found in one run.

    Attributes:
        found: The debris.
        notes: What could not be read.
    """

    found: tuple[Found, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptFate:
    """The fate of an attempt without a seal.

    Attributes:
        fate: What ``collect`` does with it.
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
    """The fate of an attempt without a seal, for ``ls`` and ``gc`` alike. Pure.

    It does not matter whether the owner's process has ended: the attempt may belong to a plain save of
    another process. The age counts also for an attempt without a data directory: a tool that looks without
    holding the run may have read the log before the save was sealed, and its files after that.

    Args:
        record: The attempt, as its first file describes it.
        state: The log of the domain that holds the attempt.
        has_files: Whether any file was written below it.
        age_s: Seconds since the last write below the attempt; None if the storage does not say.
        is_sending: Whether one of its files has an unfinished upload that is younger than a week.
        older_than_s: An attempt of the current owner counts as live for this many seconds after its last
            write; 0: it never does.
    """
    known = state.save(record.save_id)
    if known.aborted or known.decided is not None or known.deleted:
        return AttemptFate(Fate.GOES, "it is aborted in the log")
    if record.base is not None and record.base < state.generation:
        return AttemptFate(Fate.GOES, "a newer owner took the run, so it cannot commit any more")
    if older_than_s > 0:
        # Also without attempt.json, which may not be written yet.
        if age_s is None or age_s < older_than_s:
            return AttemptFate(Fate.YOUNG, "a save may be in progress", may_live=True)
        # The age of single parts is not known: the last one may have been sent a moment ago.
        if is_sending:
            why = "one of its files has an unfinished upload: a save may be in progress"
            return AttemptFate(Fate.YOUNG, why, may_live=True)
    # A sealed save also has no data directory for a moment: its projection moves it under the name.
    if record.has_no_data_directory and known.seal is None and known.part is None:
        return AttemptFate(Fate.GOES, "a power cut took its data directory, so its save has died")
    if record.base is None and has_files:
        return AttemptFate(Fate.STAYS, "its attempt.json is missing or damaged")
    return AttemptFate(Fate.GOES, "nothing was written to it within the age limit", may_live=True)


def is_sending(save_id: str, uploads: Iterable[UnfinishedUpload]) -> bool:
    """Whether ``uploads`` has one of the save ``save_id`` that is younger than a week. Pure."""
    return any(save_id in u.key.split("/") and u.age_s < ORPHAN_S for u in uploads)
