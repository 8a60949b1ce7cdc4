"""The projection: what stock readers and ``ls`` see of a committed save, in one domain.

The domain's owner projects after the commit, and any later holder repeats it. Every step may have
happened already, so every source is consumed once, and "not found" means that this piece is done and
the next one follows. Before a save is projected, the sources of all earlier saves of its name are
consumed, whether they were projected or not.

    filesystem, fresh name     rename(attempts/<id> -> step_N)
    filesystem, name in use    move <id>/ in, then .metadata and ckptfs.json over the old ones
    object store               conditional PUT of ckptfs.json and .metadata
    parts                      each to step_N/<part> in the same way, then the whole's own files

Files are never exchanged, and the old ones are never moved aside first: if two processes recover at the same
time, both ways lose data. ckptfs' own readers follow the log and do not need the projection.

A ``.metadata`` is replaced only if a save that this log knows wrote it. Any other is foreign, most likely a
checkpoint that stock torch saved under the same name. It is left alone with a message in the Python log, and the
source waits in ``attempts/`` (on object stores: its record) until the next owner tries again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptfs.commit.delete.trash import trash_of
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Generation, Kind, Seal
from ckptfs.commit.log.fold import LogState, SaveState
from ckptfs.commit.manifest import digest_of
from ckptfs.commit.operations import (
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
    Replace,
    StatOf,
    Sync,
    Write,
    side_by_side,
)
from ckptfs.commit.paths import ATTEMPTS, MANIFEST, METADATA, TRASH, AttemptKeys
from ckptfs.commit.save.foreign_metadata import is_known, was_to_replace
from ckptfs.commit.state import (
    Standing,
    Views,
    commits,
    piece_ids,
    pieces,
    standing,
    successor_here,
)
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NotFoundError,
    SymlinkError,
    TransientError,
)
from ckptfs.storage.base import Capabilities, Shape

__all__ = [
    "InHand",
    "discard_source",
    "drop_record",
    "names_saved_twice",
    "project",
    "project_all",
]

logger = logging.getLogger("ckptfs.commit")

TRIES = 3  # a projection hardly meets more than one removal of its name; the next owner continues

FOREIGN = (
    "another program wrote %s, so it was left alone: stock torch reads that one, ckptfs "
    "reads save %s of %s; move it away, and the next save or prepare_run projects ours"
)


@dataclass(frozen=True, slots=True)
class InHand:
    """What the writer of a save knows when it projects the save, so that nothing is read again."""

    files: Mapping[str, bytes]  # its small files, by name
    is_fresh: bool  # nothing existed under its name when the save began
    leaves_record: bool  # whether the attempt's record is removed later, by another task


def project(
    seal: Seal,
    views: Views,
    domain: str,
    caps: Capabilities,
    *,
    replaces: str | None = None,
    in_hand: InHand | None = None,
) -> Program[None]:
    """Project a committed save, after the sources of every earlier save of its name are consumed.

    Otherwise a process that stalls before an earlier projection could wake up and rename that source over the newer
    one. replaces: the digest of a foreign ``.metadata`` that the caller wants replaced, if it is still there.
    in_hand: of the save's writer, on object stores.
    """
    if caps.shape is Shape.FILESYSTEM:
        for save in _earlier(seal, views[domain]):
            yield from _retire(save, views, domain, caps)
    for piece in pieces(seal, domain):
        piece_in_hand = in_hand if piece is seal else None
        yield from _project_one(
            piece, caps, views[domain], checkpoint=seal, replaces=replaces, in_hand=piece_in_hand
        )


def _earlier(seal: Seal, state: LogState) -> list[SaveState]:
    """Saves of the same name that were sealed before this one and may still have bytes here, oldest first."""
    sealed_at = state.save(seal.save_id).sealed_at
    return [
        save
        for save in sorted(state.saves.living.values(), key=lambda s: s.sealed_at or 0)
        if save.seal is not None
        and save.seal.name == seal.name
        and save.sealed_at is not None
        and sealed_at is not None
        and save.sealed_at < sealed_at
        and not save.gone
    ]


def _retire(save: SaveState, views: Views, domain: str, caps: Capabilities) -> Program[None]:
    """Consume the source of a save that a later commit of its name overtook.

    Its data moves to its projected place, because readers, pins and references may still need it. Its copies of
    ``.metadata`` and ``ckptfs.json`` are removed, because they must never be projected now.
    """
    seal = save.seal
    if seal is None:
        return
    keeps_data = not save.deleted
    if keeps_data and seal.artifact is Kind.DIRECTORY:
        if standing(seal.save_id, views) is Standing.COMMITTED:
            # The plain names are its data.
            yield from _project_one(seal, caps, views[domain], checkpoint=seal)
        return
    for piece in pieces(seal, domain):
        keys = AttemptKeys(caps.shape, piece.name, piece.save_id)
        if keeps_data:
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
    """Move an attempt's directory to the trash by a rename, and unlink it there."""
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


def names_saved_twice(state: LogState) -> set[str]:
    """Names under which a removal and a projection may have met."""
    saves = state.saves
    names = Counter(save.seal.name for save in saves.living.values() if save.seal is not None)
    return {name for name, count in names.items() if count > 1 or saves.settled.knows_name(name)}


def project_all(
    views: Views,
    domain: str,
    caps: Capabilities,
    holder: Generation,
    doubtful: Collection[str],
) -> Program[None]:
    """Project what was committed and is not projected yet; for the holder of a new fence.

    On filesystems such a save is in ``attempts/``; on object stores its record is. If a projection
    could not be conditional, the newest commit of every name is compared: a stalled writer may have
    put an older one back.

    doubtful: Names with a projection that a process may have moved away before it died.
    """
    try:
        waiting = {entry.name for entry in (yield List(ATTEMPTS))}
    except NotFoundError:
        return
    newest = {
        live.seal.name: live.seal for live in commits(views) if domain in live.seal.everywhere
    }
    known = views[domain].saves
    unsettled = [
        save.seal
        for save in known.living.values()
        if save.seal is not None and not waiting.isdisjoint(piece_ids(save.seal))
    ]
    late = (known[save_id] for save_id in sorted(waiting - known.living.keys()) if save_id in known)
    unsettled += [save.seal for save in late if save.seal is not None]
    names = {seal.name for seal in unsettled}
    if caps.shape is Shape.OBJECT and not caps.conditional_replace:
        names = set(newest)
    for name, seal in newest.items():
        if standing(seal.save_id, views) is not Standing.COMMITTED:
            continue
        try:
            if name in names:
                yield from project(seal, views, domain, caps)
            if name in doubtful and caps.shape is Shape.FILESYSTEM:
                for piece in pieces(seal, domain):
                    yield from _repair(piece, holder, views[domain])
        except SymlinkError as error:
            # The step was moved away and linked back by hand. Readers find the save in its attempt.
            logger.warning("%s is committed, but it cannot be put at its place: %s", name, error)
    if caps.shape is Shape.OBJECT:
        yield from _drop_records(unsettled, newest, views, domain, caps)


def _repair(seal: Seal, holder: Generation, state: LogState) -> Program[None]:
    """Filesystems: restore the projected files that a removal moved and did not put back.

    It links them from our trash. A newer owner removes the trash, so a process that stalls here cannot show a save
    that was deleted in between. An existing file is not touched.
    """
    keys = AttemptKeys(Shape.FILESYSTEM, seal.name, seal.save_id)
    for file in _projected_files(seal):
        key = f"{keys.name}/{file}"
        try:
            found: bytes = yield Read(key)
        except NotFoundError:
            pass
        else:
            if file == METADATA and not (yield from _is_ours(seal.name, found, state)):
                logger.warning(FOREIGN, key, seal.save_id, seal.name)
                return
            continue
        copy = f"{trash_of(holder)}/{seal.save_id}.{file}"
        try:
            data: bytes = yield Read(f"{keys.projected_data}/{file}")
            yield Write(copy, data)
            yield Link(copy, key)
        except (NotFoundError, AlreadyExistsError):
            pass  # removed by hand, or done by another process
        else:
            logger.warning("%s was missing; it was put back", key)
            yield Sync(keys.name)
        yield Remove(copy)


def _projected_files(seal: Seal) -> tuple[str, ...]:
    """The small files that a piece of a save shows next to its data directory.

    A directory artifact has no ``.metadata``, and of a whole of parts each part has its own.
    """
    without_metadata = seal.artifact is Kind.DIRECTORY or bool(seal.parts)
    return (MANIFEST,) if without_metadata else (METADATA, MANIFEST)


def _is_ours(name: str, metadata: bytes, state: LogState) -> Program[bool]:
    """Whether the log knows the save that wrote a ``.metadata``.

    The save may have been sealed after the fold.
    """
    return is_known(name, metadata, state) or is_known(name, metadata, (yield from catch_up(state)))


def _may_replace(
    seal: Seal, key: str, present: bytes, state: LogState, replaces: str | None
) -> Program[bool]:
    """Whether a save may replace an existing ``.metadata`` with its own."""
    name = key.rpartition("/")[0]
    if digest_of(present) == replaces or (yield from _is_ours(name, present, state)):
        return True
    if replaces is None and (yield from was_to_replace(name, seal.save_id, present)):
        return True
    logger.warning(FOREIGN, key, seal.save_id, name)
    return False


def _drop_records(
    unsettled: list[Seal],
    newest: dict[str, Seal],
    views: Views,
    domain: str,
    caps: Capabilities,
) -> Program[None]:
    """Remove the records of saves that will never be projected: overtaken, or deleted and gone.

    Otherwise every later claim would read them again.
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


def _project_one(
    seal: Seal,
    caps: Capabilities,
    state: LogState,
    *,
    checkpoint: Seal,
    replaces: str | None = None,
    in_hand: InHand | None = None,
) -> Program[None]:
    """Project one piece of ``checkpoint``. A save without parts has only one."""
    keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
    if caps.shape is Shape.OBJECT:
        yield from _project_object(
            seal, keys, caps, state, checkpoint=checkpoint, replaces=replaces, in_hand=in_hand
        )
        return
    if seal is not checkpoint:
        yield from _project_part(seal, keys, state, replaces)
        return
    for _ in range(TRIES):
        try:
            yield Rename(keys.attempt, keys.name)
            break
        except NotFoundError:
            return  # moved already, whole
        except AlreadyExistsError:
            # A removal by another process may take the directory away while pieces move into it.
            if (yield from _project_pieces(seal, keys, state, replaces)):
                break
    # Not ``attempts/``: if the old name comes back after a power cut, the save is found there and
    # projected again. The next save syncs that directory when it makes its own, and so does a
    # delete.
    yield Sync("")


def _project_part(
    seal: Seal, keys: AttemptKeys, state: LogState, replaces: str | None
) -> Program[None]:
    """Project a part into ``step_N/``.

    The directory is made here, and a delete of an older save may remove it in between.
    """
    step, attempt = keys.name.rsplit("/", 1)[0], 0
    while True:
        yield MakeDir(step)
        try:
            yield Rename(keys.attempt, keys.name)
            break
        except AlreadyExistsError:
            yield from _project_pieces(seal, keys, state, replaces)
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


def _project_pieces(
    seal: Seal, keys: AttemptKeys, state: LogState, replaces: str | None
) -> Program[bool]:
    """Project into an existing directory, with other files or with an older save of the name.

    Returns whether nothing more can be done.
    """
    try:
        yield StatOf(f"{keys.attempt}/{METADATA}")
        existing: bytes = yield Read(f"{keys.name}/{METADATA}")
    except NotFoundError:
        pass  # nothing will be replaced
    else:
        key = f"{keys.name}/{METADATA}"
        if not (yield from _may_replace(seal, key, existing, state, replaces)):
            return True
    if seal.artifact is Kind.DIRECTORY:
        # The manifest's two copies last. As long as the immutable copy has not moved, a reader that
        # found it looks in the attempt first and then in the step. When it has moved, every plain
        # name has moved too.
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
        return False  # a piece is left
    return True


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
    seal: Seal,
    keys: AttemptKeys,
    caps: Capabilities,
    state: LogState,
    *,
    checkpoint: Seal,
    replaces: str | None,
    in_hand: InHand | None,
) -> Program[None]:
    # If entries may appear below the end of the fold, only a fold of the whole log shows the newest save.
    known, names = state if caps.exclusive_create else None, _projected_files(seal)
    if in_hand is not None and in_hand.files.keys() >= set(names):
        contents = [in_hand.files[name] for name in names]
    else:
        try:
            looks = [_read(f"{keys.projected_data}/{name}") for name in names]
            contents = list((yield from side_by_side(*looks)))
        except NotFoundError:
            return  # deleted in between, or removed by hand: no reason for a save or a claim to fail
    files = {f"{keys.name}/{name}": data for name, data in zip(names, contents, strict=True)}
    is_fresh = in_hand is not None and in_hand.is_fresh and caps.conditional_replace
    done = is_fresh and (yield from _put_fresh(files))
    if not done and not (yield from _put(checkpoint, files, caps, known, replaces=replaces)):
        return
    if in_hand is None or not in_hand.leaves_record:
        # Its record is not needed any more; recovery need not look at this save again.
        yield from drop_record(keys)


def drop_record(keys: AttemptKeys) -> Program[None]:
    """Remove an attempt's record on an object store, if that is permitted.

    It only saves the next claim a request. A run must stay usable with credentials that may not
    delete.
    """
    try:
        yield Remove(keys.record)
    except AccessError as error:
        logger.debug("the record of save %s stays: %s", keys.save_id, error)


def _put_fresh(files: Mapping[str, bytes]) -> Program[bool]:
    """Put projected objects under a name that was free before the seal was appended.

    A fold has to follow that check, and the append was this fold, because its create showed that it
    was the end of the log. Returns False if the name is taken now, or if an answer was lost.
    """
    try:
        for key, data in files.items():
            # `.metadata` first: no manifest of ours may be next to another program's file.
            yield Replace(key, data, "")
    except (AlreadyExistsError, AnswerLostError, TransientError) as error:
        logger.debug("projecting %s: %s", ", ".join(files), error)  # the caller reads what is there
        return False
    return True


def _put(
    checkpoint: Seal,
    files: Mapping[str, bytes],
    caps: Capabilities,
    known: LogState | None,
    *,
    replaces: str | None,
) -> Program[bool]:
    """Put projected objects unless the save is no longer the newest of its name.

    The etags are read before the log is folded: a stalled writer that wakes finds an etag changed.
    Returns False if the existing ``.metadata`` is foreign.
    """
    left, attempt = dict(files), 0
    while True:
        stand = dict(zip(left, (yield from side_by_side(*map(_stand, left))), strict=True))
        left = {key: data for key, data in left.items() if stand[key][1] != data}
        if not left:
            return True
        state = yield from catch_up(known)
        if not _is_newest(checkpoint, state):
            return True
        for key, data in list(left.items()):
            etag, existing = stand[key]
            if (
                key.endswith(f"/{METADATA}")
                and existing is not None
                and not (yield from _may_replace(checkpoint, key, existing, state, replaces))
            ):
                return False
            try:
                # `.metadata` first: no manifest of ours may be next to another program's `.metadata`.
                yield Replace(key, data, etag if caps.conditional_replace else None)
            except (AlreadyExistsError, AnswerLostError, TransientError) as error:
                # A lost answer is never taken for success: read the key again until it has our
                # bytes.
                yield Pause(attempt, f"projecting {key}: {error}")
                attempt += 1
                break
            del left[key]
        if not left:
            return True


def _stand(key: str) -> Program[tuple[str | None, bytes | None]]:
    """Return the etag and the bytes of the object under a key; "" and None if there is none."""
    try:
        etag: str | None = (yield StatOf(key)).etag
        data: bytes = yield Read(key)
    except NotFoundError:
        return "", None
    return etag, data


def _read(key: str) -> Program[bytes]:
    data: bytes = yield Read(key)
    return data


def _is_newest(seal: Seal, state: LogState) -> bool:
    """Whether the projection should show this save.

    It must be neither deleted nor overtaken in this log.
    """
    save = state.save(seal.save_id)
    return not (save.deleted or save.aborted) and successor_here(state, seal) is None
