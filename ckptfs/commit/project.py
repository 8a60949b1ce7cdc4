"""The projection: what stock readers and ``ls`` see of a committed save, in one domain.

Done by the domain's owner after the commit, and repeated by any later holder: every step may have
happened already, so every source is consumed once and "not found" means that this piece is done and
the next is to be looked at. Before a save is projected, the sources of all earlier ones of its name
are consumed, projected or not.

    filesystem, fresh name     rename(attempts/<id> -> step_N)
    filesystem, name in use    move <id>/ in, then .metadata and ckptfs.json over the old ones
    object store               conditional PUT of ckptfs.json and .metadata
    parts                      each to step_N/<part> in the same way, then what is the whole's own

Never an exchange, never the old one aside first: with two recoverers both lose data. Our own
readers follow the log and do not need any of this.
"""

from __future__ import annotations

import json
import logging

from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.fold import LogState, SaveState
from ckptfs.commit.layout import ATTEMPTS, MANIFEST, METADATA, TRASH, AttemptKeys
from ckptfs.commit.log import catch_up
from ckptfs.commit.ops import (
    List,
    MakeDir,
    Pause,
    Program,
    Read,
    Remove,
    RemoveDir,
    RemoveTree,
    Rename,
    Replace,
    StatOf,
    Sync,
)
from ckptfs.commit.pieces import piece_ids, pieces
from ckptfs.commit.protocol import Standing, Views, commits, standing, successor_here
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NotFoundError,
    SymlinkError,
    TransientError,
)
from ckptfs.storage.base import Capabilities, Shape

__all__ = ["discard_source", "drop_record", "names_save", "project", "project_all"]

logger = logging.getLogger(__name__)


def project(seal: Seal, views: Views, domain: str, caps: Capabilities) -> Program[None]:
    """Project a committed save, after the sources of every earlier save of its name are consumed.

    Otherwise whoever stalls over an earlier source wakes up and renames it over the newer.
    """
    if caps.shape is Shape.FILESYSTEM:
        for save in _earlier(seal, views[domain]):
            yield from _retire(save, views, domain, caps)
    for piece in pieces(seal, domain):
        yield from _project_one(piece, caps, views[domain], whole=seal)


def _earlier(seal: Seal, state: LogState) -> list[SaveState]:
    """Saves of the same name sealed before this one whose bytes may still be here, oldest first."""
    mine = state.save(seal.save_id).sealed_at
    return [
        save
        for save in sorted(state.saves.values(), key=lambda s: s.sealed_at or 0)
        if save.seal is not None
        and save.seal.name == seal.name
        and save.sealed_at is not None
        and mine is not None
        and save.sealed_at < mine
        and not save.gone
    ]


def _retire(save: SaveState, views: Views, domain: str, caps: Capabilities) -> Program[None]:
    """Consume the source of a save that a later commit of its name overtook.

    Its data moves to where it would lie, because readers, pins and references may still want it;
    its copies of ``.metadata`` and ``ckptfs.json`` go, because nobody may ever project them now.
    """
    seal = save.seal
    if seal is None:
        return
    kept = not save.deleted
    if kept and seal.artifact is Kind.DIRECTORY:
        if standing(seal.save_id, views) is Standing.COMMITTED:
            # Its data are the plain names themselves. Filesystems only: nothing asks the log.
            yield from _project_one(seal, caps, LogState(), whole=seal)
        return
    for piece in pieces(seal, domain):
        keys = AttemptKeys(caps.shape, piece.name, piece.save_id)
        if kept:
            yield from _settle_data(keys)
        yield from discard_source(keys)


def _settle_data(keys: AttemptKeys) -> Program[None]:
    """Move the data of an overtaken save to the step directory; until it is seen there or nowhere."""
    attempt = 0
    while True:
        for key in (keys.projected_data, keys.data):
            try:
                yield StatOf(key)
                break
            except NotFoundError:
                continue
        else:
            return
        if key == keys.projected_data:
            return
        yield MakeDir(keys.name)
        try:
            yield Rename(keys.data, keys.projected_data)
        except (NotFoundError, AlreadyExistsError):
            yield Pause(attempt, f"moving {keys.data}")
            attempt += 1


def discard_source(keys: AttemptKeys) -> Program[None]:
    """Take an attempt's directory away from everybody, by a rename, and unlink it there."""
    yield MakeDir(TRASH)
    target = f"{TRASH}/{keys.save_id}.own"
    try:
        yield Rename(keys.attempt, target)
    except NotFoundError:
        return
    except AlreadyExistsError:
        yield RemoveTree(target)  # an earlier try of the same died half-way
        try:
            yield Rename(keys.attempt, target)
        except NotFoundError:
            return
    yield RemoveTree(target)
    yield Sync(ATTEMPTS)


def project_all(views: Views, domain: str, caps: Capabilities) -> Program[None]:
    """Project what was committed and is not projected yet; for the holder of a new fence.

    On filesystems that lies in ``attempts/``; on object stores its record does. Where a projection
    could not be conditional, every name's newest commit is compared: a stalled writer may have put
    an older one back.
    """
    try:
        waiting = {entry.name for entry in (yield List(ATTEMPTS))}
    except NotFoundError:
        return
    newest = {
        live.seal.name: live.seal for live in commits(views) if domain in live.seal.everywhere
    }
    unsettled = [
        save.seal
        for save in views[domain].saves.values()
        if save.seal is not None and not waiting.isdisjoint(piece_ids(save.seal))
    ]
    names = {seal.name for seal in unsettled}
    if caps.shape is Shape.OBJECT and not caps.conditional_replace:
        names = set(newest)
    for name, seal in newest.items():
        if name in names and standing(seal.save_id, views) is Standing.COMMITTED:
            try:
                yield from project(seal, views, domain, caps)
            except SymlinkError as error:
                # Somebody moved the step away and linked it back. Readers find the save in its attempt.
                logger.warning("%s is committed and can not be put there: %s", name, error)
    if caps.shape is Shape.OBJECT:
        yield from _drop_records(unsettled, newest, views, domain, caps)


def _drop_records(
    unsettled: list[Seal],
    newest: dict[str, Seal],
    views: Views,
    domain: str,
    caps: Capabilities,
) -> Program[None]:
    """Remove the records of saves that nobody will ever project: overtaken, or deleted and gone.

    Otherwise every later claim would look at them again.
    """
    for seal in unsettled:
        overtaken = newest.get(seal.name, seal).save_id != seal.save_id
        match standing(seal.save_id, views):
            case Standing.COMMITTED if overtaken:
                pass
            case Standing.DELETED if all(v.save(seal.save_id).gone for v in views.values()):
                pass
            case _:
                continue
        for piece in pieces(seal, domain):
            yield from drop_record(AttemptKeys(caps.shape, piece.name, piece.save_id))


def _project_one(seal: Seal, caps: Capabilities, state: LogState, *, whole: Seal) -> Program[None]:
    """One piece of ``whole``; a save without parts is its only one."""
    keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
    if caps.shape is Shape.OBJECT:
        yield from _project_object(seal, keys, caps, state, whole=whole)
        return
    if seal is not whole:
        yield from _project_part(seal, keys)
        return
    try:
        yield Rename(keys.attempt, keys.name)
    except NotFoundError:
        return  # moved already, whole
    except AlreadyExistsError:
        yield from _project_pieces(seal, keys)
    yield Sync("")
    yield Sync(ATTEMPTS)


def _project_part(seal: Seal, keys: AttemptKeys) -> Program[None]:
    """Into ``step_N/``, which is made here, and which a delete of an older save may take away."""
    step, attempt = keys.name.rsplit("/", 1)[0], 0
    while True:
        yield MakeDir(step)
        try:
            yield Rename(keys.attempt, keys.name)
            break
        except AlreadyExistsError:
            yield from _project_pieces(seal, keys)
            break
        except NotFoundError:
            try:
                yield StatOf(f"{keys.data}/{MANIFEST}")
            except NotFoundError:
                return  # moved already, whole
            yield Pause(attempt, f"making {step}")
            attempt += 1
    yield Sync(step)
    yield Sync(ATTEMPTS)


def _project_pieces(seal: Seal, keys: AttemptKeys) -> Program[None]:
    """Into a directory that exists: somebody's files, or an older save of the name."""
    if seal.artifact is Kind.DIRECTORY:
        # The manifest's two copies last: while the immutable one has not moved, a reader that found
        # it looks here first and then there; when it has, every plain name has too.
        last = (keys.save_id, MANIFEST)
        names = [entry.name for entry in (yield from _names(keys.attempt))]
        pieces = [*(name for name in names if name not in last), *last]
    else:
        # Data first: until `.metadata` is replaced, the old save stays whole for stock readers.
        pieces = [keys.save_id, METADATA, MANIFEST]
    for piece in pieces:
        yield from _move(f"{keys.attempt}/{piece}", f"{keys.name}/{piece}")
        if piece == keys.save_id:
            yield Sync(keys.name)
    yield Sync(keys.name)
    try:
        yield RemoveDir(keys.attempt)
    except AlreadyExistsError:
        return  # a piece is left; the next holder goes on


def _names(key: str) -> Program[list]:  # type: ignore[type-arg]
    try:
        names: list = yield List(key)  # type: ignore[type-arg]
    except NotFoundError:
        return []
    return names


def _move(source: str, target: str) -> Program[None]:
    """Move one piece; a directory that both sides have is merged name by name."""
    try:
        yield Rename(source, target)
    except NotFoundError:
        return  # this piece was moved already: stopping at it would leave a dangling .metadata
    except AlreadyExistsError:
        yield MakeDir(target)
        for entry in (yield from _names(source)):
            yield from _move(f"{source}/{entry.name}", f"{target}/{entry.name}")
        try:
            yield RemoveDir(source)
        except AlreadyExistsError:
            return


def _project_object(
    seal: Seal, keys: AttemptKeys, caps: Capabilities, state: LogState, *, whole: Seal
) -> Program[None]:
    # Where entries may slip in below what was folded, only a whole fold tells who is newest.
    known = state if caps.exclusive_create else None
    # A directory artifact has no `.metadata`, and of a whole of parts each part has its own.
    bare = seal.artifact is Kind.DIRECTORY or bool(seal.parts)
    for file in (MANIFEST,) if bare else (METADATA, MANIFEST):
        try:
            data: bytes = yield Read(f"{keys.projected_data}/{file}")
        except NotFoundError:
            return  # deleted meanwhile, or removed by hand: no reason for a save or a claim to fail
        yield from _put(whole, f"{keys.name}/{file}", data, caps, known)
    # Its record has done its work; recovery need not look at this save again.
    yield from drop_record(keys)


def drop_record(keys: AttemptKeys) -> Program[None]:
    """Remove an attempt's record on an object store, where that is permitted: it only saves the
    next claim a look. Credentials that may not delete must not keep a run from being claimed.
    """
    try:
        yield Remove(keys.record)
    except AccessError as error:
        logger.debug("the record of save %s stays: %s", keys.save_id, error)


def _put(
    seal: Seal, key: str, data: bytes, caps: Capabilities, known: LogState | None
) -> Program[None]:
    """Put a projected object unless the save is no longer the newest of its name.

    The etag is read before the log is folded: a stalled writer that wakes finds the etag changed.
    """
    attempt = 0
    while True:
        try:
            etag = (yield StatOf(key)).etag
            if (yield Read(key)) == data:
                return
        except NotFoundError:
            etag = ""
        if not _is_newest(seal, (yield from catch_up(known))):
            return
        try:
            yield Replace(key, data, etag if caps.conditional_replace else None)
            return
        except (AlreadyExistsError, AnswerLostError, TransientError) as error:
            # A lost answer is never taken for done: look again until the key reads as ours.
            yield Pause(attempt, f"projecting {key}: {error}")
            attempt += 1


def _is_newest(seal: Seal, state: LogState) -> bool:
    """Whether the save is still the one to show: neither deleted nor overtaken in this log."""
    mine = state.save(seal.save_id)
    return not (mine.deleted or mine.aborted) and successor_here(state, seal) is None


def names_save(manifest: bytes) -> str | None:
    """The save_id that a projected ``ckptfs.json`` names, or None where it is not ours."""
    try:
        return str(json.loads(manifest)["save_id"])
    except (ValueError, KeyError, TypeError):
        return None
