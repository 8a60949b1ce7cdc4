"""The trash of a generation: where pieces of a save go by rename, to be unlinked there and nowhere else.

``trash/<generation>/`` is made once, after that generation's fence. A newer holder empties and
removes the older ones before it projects or saves, so a stalled deleter's rename finds no target.

Whoever removes a save of a run that nobody holds has ``trash/<generation>.<id>/`` for itself: several may
come under one generation, and one that made a common directory late would make again what a newer
holder took away, so that another one's renames find a target halfway.
"""

from __future__ import annotations

import logging

from ckptfs.commit.entries import Generation
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import TRASH
from ckptfs.commit.ops import List, MakeDir, Pause, Program, RemoveDir, RemoveTree, Rename
from ckptfs.commit.returning import put_back_all
from ckptfs.errors import AlreadyExistsError, NotFoundError, StorageError
from ckptfs.storage.base import Capabilities, Entry, Shape

__all__ = ["drop_trash", "move_to_trash", "own_trash", "take_trash", "trash_of"]

logger = logging.getLogger(__name__)

TRIES = 6  # a stalled deleter has a handful of renames left, a file open on this node stays open


def trash_of(generation: Generation) -> str:
    """The trash directory of one generation."""
    return f"{TRASH}/{generation.number}-{generation.nonce}"


def own_trash(generation: Generation, remover: str) -> str:
    """The trash directory of one remover that holds nothing, under the generation that stands.

    To an owner it is one of an older generation than its own (``take_trash`` reads the name).
    """
    return f"{trash_of(generation)}.{remover}"


def drop_trash(own: str) -> Program[None]:
    """Remove the directory of one remover. What stays of it is the next owner's, and no reason to
    raise: the save is deleted, or it is said elsewhere why it is not.
    """
    try:
        yield RemoveDir(own)
    except StorageError as error:
        logger.info("%s stays until the next owner comes: %s", own, error)


def take_trash(generation: Generation, caps: Capabilities, state: LogState) -> Program[None]:
    """Make this generation's trash and take the older ones away from whoever stalls over them, after
    what was not theirs went back to its place.

    Newer ones are left alone: without its trash their holder could delete nothing.
    """
    if caps.shape is Shape.OBJECT:
        return
    mine = trash_of(generation)
    yield MakeDir(mine)
    entries: list[Entry] = yield List(TRASH)
    for entry in entries:
        number, _, nonce = entry.name.partition("-")
        if not number.isdecimal():
            # An own attempt that somebody gave up, and perhaps still writes to.
            yield from _remove_if_it_can(f"{TRASH}/{entry.name}")
        elif Generation(int(number), nonce) < generation:
            yield from _take_away(f"{TRASH}/{entry.name}", mine, state)


def _remove_if_it_can(key: str) -> Program[None]:
    """Remove what is in nobody's way; a directory that will not be empty must not keep a run from
    being claimed.
    """
    try:
        yield RemoveTree(key)
    except StorageError as error:
        logger.warning("%s stays until the next owner tries: %s", key, error)


def _take_away(older: str, mine: str, state: LogState) -> Program[None]:
    """Empty an older trash and remove it: only then does a stalled deleter's rename fail."""
    for attempt in range(TRIES):
        try:
            entries: list[Entry] = yield List(older)
        except NotFoundError:
            return
        try:
            yield from put_back_all(older, [entry.name for entry in entries], state)
            for entry in entries:
                yield RemoveTree(f"{older}/{entry.name}")
            yield RemoveDir(older)
        except AlreadyExistsError:
            # Its deleter put one more thing in: look again, or its next rename still finds a target.
            yield Pause(attempt, f"emptying {older}")
        except StorageError as error:
            # No reason not to start: without its name it is in nobody's way, and the next owner tries.
            logger.warning("what lies in %s stays for now: %s", older, error)
            break
        else:
            return
    # A file in it is open on this node (NFS keeps those): take the name away instead.
    try:
        yield Rename(older, f"{mine}/{older.rsplit('/', 1)[1]}")
    except NotFoundError:
        return


def move_to_trash(source: str, target: str) -> Program[bool]:
    """Whether it was there to be moved and removed."""
    try:
        yield Rename(source, target)
    except NotFoundError:
        return False  # gone already, or a newer holder took our trash away: not ours any more
    except AlreadyExistsError:
        yield RemoveTree(target)  # left by our own earlier try under this generation
        try:
            yield Rename(source, target)
        except NotFoundError:
            return False
    yield RemoveTree(target)
    return True
