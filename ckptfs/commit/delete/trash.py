"""The trash of a generation: pieces of a save are renamed into it and unlinked only there.

``trash/<generation>/`` is made once, after that generation's fence. A newer holder empties and removes the older
ones before it projects or saves, so the rename of a stalled deleter finds no target.

A process that removes a save in a run without an owner has its own ``trash/<generation>.<id>/``. Several may remove
under one generation. If they shared a directory, a late one would make again what a newer holder removed, and the
renames of another one would find a target halfway.

A projected file that was moved is read again in the trash, and put back if it belongs to another save
(filesystems):

    take_projected   move step_N/.metadata to the trash, read it there, unlink it or put it back
    put_back         the second half: of a file in the trash, also for the next owner

``.metadata`` and ``ckptfs.json`` are moved by a name that every save of the step has. After this process has read the
old save's file and before it renames it, another process of the same generation may project a newer save, or stock
torch may save there: without the second read that file would be lost. The file is put back by a link. A link never
replaces a file that has appeared there, and it fails after a newer owner removed the trash; the owner then puts the
file back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Generation
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import (
    Create,
    Link,
    List,
    MakeDir,
    Pause,
    Program,
    Read,
    Remove,
    RemoveDir,
    RemoveTree,
    Rename,
    StatOf,
    Sync,
)
from ckptfs.commit.paths import MANIFEST, METADATA, TRASH, staging_key
from ckptfs.commit.save.foreign_metadata import names_save, saves_named
from ckptfs.commit.state import part_name
from ckptfs.errors import AlreadyExistsError, NotFoundError, StorageError, UnsupportedError
from ckptfs.storage.base import Capabilities, Entry, Shape

__all__ = [
    "belongs_to",
    "drop_trash",
    "move_to_trash",
    "names_it",
    "own_trash",
    "put_back",
    "put_back_all",
    "take_projected",
    "take_trash",
    "trash_of",
]


def names_it(key: str, save_id: str) -> Program[bool]:
    """Whether the file under a projected name is this save's."""
    try:
        data: bytes = yield Read(key)
    except NotFoundError:
        return False
    return belongs_to(key, data, save_id)


def take_projected(key: str, save_id: str, trash: str) -> Program[None]:
    """Remove a projected file if it names this save. Another save's file stays, or is put back."""
    moved = f"{trash}/{save_id}.{key.rpartition('/')[2]}"
    # An earlier try of ours may have failed between its rename and its look.
    yield from put_back(moved, key, save_id)
    if not (yield from names_it(key, save_id)):
        return
    try:
        yield Rename(key, moved)
    except NotFoundError:
        return  # gone already, or a newer owner took our trash away: not ours any more
    yield from put_back(moved, key, save_id)


def put_back(moved: str, key: str, save_id: str) -> Program[None]:
    """Unlink a file in the trash if it belongs to this save; otherwise give it its name back."""
    try:
        data: bytes = yield Read(moved)
    except NotFoundError:
        return
    if not belongs_to(key, data, save_id):
        yield from _link_back(moved, key, data)
        # While the file was in the trash, its own remover did not find it under its name.
        state = yield from catch_up()
        for other in _named(key, data, state):
            if state.save(other).deleted:
                yield from take_projected(key, other, moved.rpartition("/")[0])
    yield Remove(moved)


def put_back_all(trash: str, names: Iterable[str], state: LogState) -> Program[None]:
    """For the next owner: put back the files that a dead or stalled remover has in its trash.

    names: of the files there. A remover that continues finds nothing there any more.
    """
    for name in names:
        for piece in (METADATA, MANIFEST):
            save_id = name.removesuffix(f".{piece}")
            home = _home_of(save_id, state) if save_id != name else None
            if home is not None:
                yield from put_back(f"{trash}/{name}", f"{home}/{piece}", save_id)


def _home_of(save_id: str, state: LogState) -> str | None:
    """The directory that a save, or a part of one, is projected to."""
    save = state.save(save_id)
    if save.seal is not None:
        return save.seal.name
    if save.part is not None:
        return part_name(save.part.name, save.part.part)
    seals = (other.seal for other in state.saves.living.values() if other.seal is not None)
    parts = ((seal, ref) for seal in seals for ref in seal.parts)
    return next((part_name(s.name, ref.name) for s, ref in parts if ref.save_id == save_id), None)


def _link_back(moved: str, key: str, data: bytes) -> Program[None]:
    parent, attempt = key.rpartition("/")[0], 0
    while True:
        try:
            yield Link(moved, key)
            break
        except AlreadyExistsError:
            return  # a later file is there, which is as good
        except UnsupportedError:
            # Linux forbids links to the files of other users. A copy does not replace anything either.
            try:
                yield Create(key, data, staging=staging_key(moved.rpartition("/")[2]))
                break
            except AlreadyExistsError:
                return
        except NotFoundError:
            try:
                yield StatOf(moved)
            except NotFoundError:
                return  # a newer owner took our trash away, and puts it back
        # The step directory was empty without this file, and was removed.
        yield MakeDir(parent)
        yield Pause(attempt, f"putting {key} back")
        attempt += 1
    yield Sync(parent)


def belongs_to(key: str, data: bytes, save_id: str) -> bool:
    """Whether the content of a projected file belongs to this save."""
    if key.endswith(MANIFEST):
        return names_save(data) == save_id
    return save_id.encode() in data  # its data paths carry the id


def _named(key: str, data: bytes, state: LogState) -> tuple[str, ...]:
    if key.endswith(MANIFEST):
        save_id = names_save(data)
        return () if save_id is None else (save_id,)
    return tuple(sorted(saves_named(data, state)))


logger = logging.getLogger("ckptfs.commit")

TRIES = 6  # a stalled deleter has a handful of renames left, a file open on this node stays open


def trash_of(generation: Generation) -> str:
    """The trash directory of one generation."""
    return f"{TRASH}/{generation.number}-{generation.nonce}"


def own_trash(generation: Generation, remover: str) -> str:
    """The trash directory of one remover that does not hold the run, under the current generation.

    An owner treats it as one of an older generation than its own (``take_trash`` reads the name).
    """
    return f"{trash_of(generation)}.{remover}"


def drop_trash(own: str) -> Program[None]:
    """Remove the directory of one remover.

    If it cannot be removed, the next owner does it. No error is raised, because the save is
    deleted, or an earlier error says why it is not.
    """
    try:
        yield RemoveDir(own)
    except StorageError as error:
        logger.info("%s was not removed; the next owner of the run tries again: %s", own, error)


def take_trash(generation: Generation, caps: Capabilities, state: LogState) -> Program[None]:
    """Make this generation's trash and remove the older ones.

    Stalled deleters cannot use these any more. Files that do not belong to the deleted saves are
    put back first. Newer ones stay: without its trash their holder could delete nothing.
    """
    if caps.shape is Shape.OBJECT:
        return
    own_trash = trash_of(generation)
    yield MakeDir(own_trash)
    entries: list[Entry] = yield List(TRASH)
    for entry in entries:
        number, _, nonce = entry.name.partition("-")
        if not number.isdecimal():
            # An attempt that its own process gave up, and perhaps still writes to.
            yield from _remove_if_it_can(f"{TRASH}/{entry.name}")
        elif Generation(int(number), nonce) < generation:
            yield from _take_away(f"{TRASH}/{entry.name}", own_trash, state)


def _remove_if_it_can(key: str) -> Program[None]:
    """Remove a directory if possible.

    A directory that does not become empty must not prevent a claim of the run.
    """
    try:
        yield RemoveTree(key)
    except StorageError as error:
        logger.warning("%s was not removed; the next owner of the run tries again: %s", key, error)


def _take_away(older: str, target: str, state: LogState) -> Program[None]:
    """Empty and remove the trash of an older generation.

    A stalled deleter's rename fails only after that.
    """
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
            # Its deleter moved one more file in: try again, otherwise its next rename still finds a
            # target.
            yield Pause(attempt, f"emptying {older}")
        except StorageError as error:
            # No reason not to start: under its new name it disturbs nothing, and the next owner tries again.
            logger.warning("the files in %s were not removed yet: %s", older, error)
            break
        else:
            return
    # A file in it is open on this node (NFS keeps those): take the name away instead.
    try:
        yield Rename(older, f"{target}/{older.rsplit('/', 1)[1]}")
    except NotFoundError:
        return


def move_to_trash(source: str, target: str) -> Program[bool]:
    """Move ``source`` into the trash and remove it there.

    Returns:
        False if ``source`` was gone already, or if a newer holder has removed our trash.
    """
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
