"""Looking at a run before a restore: programs that only read, and never take "nothing" for an answer
when there may be something.

    look         this domain's log, and whether it could be read to its end
    leftovers    what lies in a run whose log knows of no checkpoint, and looks like one
    missing      files of a checkpoint that are not there with their size; this rank's share

A restore that finds nothing valid and starts at step 0 loses the run (marin #8760: 8,000 steps).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.log.append import check_whole
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import List, Program, Refresh, StatOf
from ckptfs.commit.paths import CONTROL, LOG, MANIFEST, METADATA, SHARED
from ckptfs.errors import NotFoundError
from ckptfs.storage.base import Entry, Shape

__all__ = ["Missing", "Sight", "leftovers", "look", "missing", "share_of"]


@dataclass(frozen=True, slots=True)
class Sight:
    """What one process sees of a run. domain: its id, None where nobody ever wrote a run. unread: why
    the log cannot be read to its end, None where it was. unlogged: what another program saved after the
    newest commit.
    """

    domain: str | None = None
    state: LogState | None = None
    unread: str | None = None
    unlogged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """One file that is not as it was written: it is not there, or has another size."""

    path: str
    why: str


def look() -> Program[Sight]:
    """Fold this domain's log; see by a listing that nothing lies behind the fold's end."""
    view = yield from read_view()
    if view is None:
        if not (yield from _has_entries()):
            return Sight()
        return Sight(unread=f"{LOG} has entries, and {CONTROL}/domain is missing")
    domain, state = view
    checked = yield from check_whole(state)
    if checked.gap is not None:
        lost, there = checked.gap.missing, checked.gap.there
        why = f"entry {lost} is missing or cannot be seen, and entry {there} is there"
        return Sight(domain, checked.state, why)
    return Sight(domain, checked.state)


def _has_entries() -> Program[bool]:
    yield Refresh(LOG)
    try:
        entries: list[Entry] = yield List(LOG)
    except NotFoundError:
        return False
    # Where entries are advisory their names go on after the number.
    return any(e.name.partition(".")[0].isdecimal() for e in entries)


def leftovers(
    step_of: Callable[[str], int | None], known: Collection[str], *, has_log: bool
) -> Program[tuple[str, ...]]:
    """Directories that look like checkpoints and that no log knows.

    A directory counts when it has a manifest or `.metadata`, and where nobody ever wrote a log also
    when it is called like a step: other tools' checkpoints have neither.
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
    """The part of a domain's files that one of its ``size`` ranks looks at."""
    here = sorted((f for f in files if f.domain in (None, domain)), key=lambda f: f.path)
    return here[number::size]


def missing(files: Sequence[FileRecord], home: str, shape: Shape) -> Program[tuple[Missing, ...]]:
    """Files that are not there, or have another size. On object stores one listing per 1,000 files
    of a directory: an object is whole or not there, and its size is seen when it is opened.
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
