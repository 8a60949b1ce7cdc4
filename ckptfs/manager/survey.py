"""Looking at a run before a restore.

    look         this domain's log, and whether it could be read to its end
    leftovers    what looks like a checkpoint in a run, although its log knows of none
    missing      files of a checkpoint that are not there with their size; this rank's share

These programs only read. They never report that there is nothing when there may be something: a
restore that finds nothing valid and starts at step 0 loses the run (marin #8760: 8,000 steps).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptfs.commit.catalog.catalog import check_log, read_view
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import List, Program, Refresh, StatOf
from ckptfs.commit.paths import CONTROL, LOG, MANIFEST, METADATA, SHARED
from ckptfs.errors import NotFoundError
from ckptfs.storage.base import Entry, Shape

__all__ = ["Missing", "Sight", "leftovers", "look", "missing", "share_of"]


@dataclass(frozen=True, slots=True)
class Sight:
    """What one process sees of a run.

    Attributes:
        domain: The id of its domain; None: no run was ever written here.
        unread: Why the log cannot be read to its end; None: it was.
        unlogged: What another program saved after the newest commit.
    """

    domain: str | None = None
    state: LogState | None = None
    unread: str | None = None
    unlogged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """One file that is not as it was written: it is absent, or has another size."""

    path: str
    why: str


def look() -> Program[Sight]:
    """Fold this domain's log, and check that readers see all of it."""
    view = yield from read_view()
    checked = yield from check_log({} if view is None else dict([view]))
    why = f"{LOG} has entries, and {CONTROL}/domain is missing" if checked.lost_domain else None
    if checked.gap is not None:
        lost, present = checked.gap.missing, checked.gap.there
        why = f"entry {lost} is missing or cannot be seen, and entry {present} is there"
    if view is None:
        return Sight(unread=why)
    domain, _ = view
    return Sight(domain, checked.views[domain], why)


def leftovers(
    step_of: Callable[[str], int | None], known: Collection[str], *, has_log: bool
) -> Program[tuple[str, ...]]:
    """Return the directories that look like checkpoints and are in no log.

    A directory counts if it has a manifest or `.metadata`. If no log was ever written, a directory
    with the name of a step counts too, because checkpoints of other tools have neither.
    """
    yield Refresh("")
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return ()
    found = []
    for entry in entries:
        if not entry.is_dir or entry.name in (CONTROL, SHARED) or entry.name in known:
            continue
        called = not has_log and step_of(entry.name) is not None
        if called or (yield from _is_checkpoint(entry.name)):
            found.append(entry.name)
    return tuple(found)


def _is_checkpoint(name: str) -> Program[bool]:
    for inner in (MANIFEST, METADATA):
        try:
            yield StatOf(f"{name}/{inner}")
        except NotFoundError:
            continue
        return True
    return False


def share_of(files: Sequence[FileRecord], domain: str, number: int, size: int) -> list[FileRecord]:
    """Return the part of a domain's files that one of its ``size`` ranks checks."""
    here = sorted((f for f in files if f.domain in (None, domain)), key=lambda f: f.path)
    return here[number::size]


def missing(files: Sequence[FileRecord], home: str, shape: Shape) -> Program[tuple[Missing, ...]]:
    """Return the files that are absent, or have another size.

    On object stores this takes one listing per 1,000 files of a directory: an object is whole or
    not there, and its size is checked when it is opened.
    """
    if shape is Shape.OBJECT:
        return (yield from _not_listed(files, home))
    found: tuple[Missing, ...] = ()
    for record in files:
        try:
            size = (yield StatOf(file_key(record, home))).size_bytes
        except NotFoundError:
            found += (Missing(record.path, "is missing"),)
            continue
        if size != record.size_bytes:
            why = f"has {size} bytes, {record.size_bytes} were written"
            found += (Missing(record.path, why),)
    return found


def _not_listed(files: Sequence[FileRecord], home: str) -> Program[tuple[Missing, ...]]:
    found: tuple[Missing, ...] = ()
    for directory, records in _by_directory(files, home):
        try:
            entries: list[Entry] = yield List(directory)
        except NotFoundError:
            entries = []
        names = {entry.name for entry in entries}
        gone = [r for r in records if posixpath.basename(r.path) not in names]
        found += tuple(Missing(r.path, "is missing") for r in gone)
    return found


def _by_directory(files: Sequence[FileRecord], home: str) -> Iterator[tuple[str, list[FileRecord]]]:
    directories: dict[str, list[FileRecord]] = {}
    for record in files:
        directory = posixpath.dirname(file_key(record, home))
        directories.setdefault(directory, []).append(record)
    yield from directories.items()
