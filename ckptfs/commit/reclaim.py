"""Everything that deletes. Entry first, bytes later; always by rename, never by name.

A recursive delete of ``attempts/<id>`` through a stale NFS client emptied the committed step, 20
times of 20; renaming it first gave "not found". So a save goes in four moves:

    1. an entry says so (delete, abort), appended under the holder's fence
    2. rename, piece by piece, to fresh unique names in ``trash/<generation>/``; "not found" means
       that this piece is done
    3. unlink below those names only
    4. an entry says that the bytes are gone: from here a plain save may take the name

Only what is ours is renamed: the data directory by its unique name, ``.metadata`` and
``ckptfs.json`` while they name this very save, the listed plain names of a directory artifact.
Foreign files are never touched, nor is what stands behind a link or on another disk in the place of a
directory of ours: its save stays "deleted", and whoever put it there removes it. Between 1 and 4 nobody else projects to the name, so what was read
in a check still holds at the rename.

``trash/<generation>/`` is made once, after that generation's fence. A newer holder empties and
removes the older ones before it projects or saves, so a stalled deleter's rename finds no target.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping

from ckptfs.commit.entries import Delete, Generation, Kind, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import (
    ATTEMPTS,
    MANIFEST,
    METADATA,
    PARTIAL_PREFIX,
    TRASH,
    AttemptKeys,
    shared_key,
)
from ckptfs.commit.log import Appended, Refused, append
from ckptfs.commit.manifest import FileRecord, decode_manifest
from ckptfs.commit.ops import (
    List,
    MakeDir,
    Pause,
    Program,
    Read,
    Remove,
    RemoveDir,
    RemoveMany,
    RemoveTree,
    Rename,
    StatOf,
    Sync,
)
from ckptfs.commit.pieces import pieces
from ckptfs.commit.project import discard_source, drop_record, names_save, project
from ckptfs.commit.protocol import (
    Refusal,
    Standing,
    may_delete,
    may_forget,
    standing,
    successor_here,
)
from ckptfs.commit.shared_data import not_needed
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    ManifestError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.base import Capabilities, Entry, Shape

__all__ = [
    "delete_save",
    "discard_attempt",
    "discard_own_attempt",
    "enter_delete",
    "finish_delete",
    "is_link",
    "listed_files",
    "move_to_trash",
    "remove_empty_attempt",
    "take_trash",
    "trash_of",
    "wipe_leftovers",
]

logger = logging.getLogger(__name__)

_LEFT = "the bytes of %s stay, they are not where they were written: %s"
TRIES = 6  # a stalled deleter has a handful of renames left, a file open on this node stays open


def trash_of(generation: Generation) -> str:
    """The trash directory of one generation."""
    return f"{TRASH}/{generation.number}-{generation.nonce}"


def take_trash(generation: Generation, caps: Capabilities) -> Program[None]:
    """Make this generation's trash and take the older ones away from whoever stalls over them.

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
            yield from _take_away(f"{TRASH}/{entry.name}", mine)


def _remove_if_it_can(key: str) -> Program[None]:
    """Remove what is in nobody's way; a directory that will not be empty must not keep a run from
    being claimed.
    """
    try:
        yield RemoveTree(key)
    except StorageError as error:
        logger.warning("%s stays until the next owner tries: %s", key, error)


def _take_away(older: str, mine: str) -> Program[None]:
    """Empty an older trash and remove it: only then does a stalled deleter's rename fail."""
    for attempt in range(TRIES):
        try:
            entries: list[Entry] = yield List(older)
        except NotFoundError:
            return
        try:
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


def delete_save(
    seal: Seal,
    views: Mapping[str, LogState],
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    reason: str,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    still: Callable[[LogState], bool] = lambda _: True,
) -> Program[Appended | Refused[Refusal]]:
    """Delete one committed save in this domain: the entry, its bytes, the entry that they are gone.

    views: what is known of all domains. still: as for ``enter_delete``.
    """
    outcome = yield from enter_delete(
        seal, views[domain], holder, reason=reason, ids=ids, stamp=stamp, still=still
    )
    if isinstance(outcome, Refused) and (
        outcome.reason is Refusal.FENCED or not outcome.state.save(seal.save_id).deleted
    ):
        return outcome
    now = {**views, domain: outcome.state}
    return (yield from finish_delete(seal, now, domain, holder, caps, ids=ids, stamp=stamp))


def enter_delete(
    seal: Seal,
    state: LogState | None,
    holder: Generation,
    *,
    reason: str,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    still: Callable[[LogState], bool] = lambda _: True,
) -> Program[Appended | Refused[Refusal]]:
    """The entry alone: from here the save is deleted, and its bytes may go at any time.

    still: asked of this domain's log at every try of the append; what was to be deleted may be
    pinned, or the newest again, by then.
    """

    def decide(seen: LogState) -> Delete | Refused[Refusal]:
        if not still(seen):
            return Refused(Refusal.NOTHING, seen)
        return may_delete(seen, seal.save_id, holder, reason)

    return (yield from append(decide, write_id=next(ids), stamp=stamp, state=state))


def finish_delete(
    seal: Seal,
    views: Mapping[str, LogState],
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
) -> Program[Appended | Refused[Refusal]]:
    """Remove the bytes of a save whose delete lies in this domain's log, and say so there."""
    erased = yield from _erase(seal, views, domain, holder, caps)
    if not erased:
        return Refused(Refusal.NOTHING, views[domain])
    return (
        yield from append(
            lambda seen: may_forget(seen, seal.save_id, holder),
            write_id=next(ids),
            stamp=stamp,
            state=views[domain],
        )
    )


def _erase(
    whole: Seal,
    views: Mapping[str, LogState],
    domain: str,
    holder: Generation,
    caps: Capabilities,
) -> Program[bool]:
    """Whether the bytes are gone; not while a successor in doubt leaves ``.metadata`` to this one, and
    not where something else stands in the place of its directory.
    """
    mine = pieces(whole, domain)
    if caps.shape is Shape.FILESYSTEM:
        # Its projection sources first, or somebody who stalls over them projects a deleted save.
        waited = False
        for seal in mine:
            keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
            target = f"{trash_of(holder)}/{seal.save_id}.attempt"
            waited = (yield from move_to_trash(keys.attempt, target)) or waited
        if waited:
            yield Sync(ATTEMPTS)
    successor = successor_here(views[domain], whole)
    if successor is not None:
        if standing(successor.save_id, views) is not Standing.COMMITTED:
            return False
        # From here `.metadata` is the successor's: ours to leave alone.
        yield from project(successor, views, domain, caps)
    names = set() if successor is None else {seal.name for seal in pieces(successor, domain)}
    if caps.shape is Shape.FILESYSTEM and (yield from is_link(whole.name)):
        logger.warning(_LEFT, whole.name, "a link, or no directory")
        return False
    whole_gone = True
    for seal in mine:
        keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
        if caps.shape is Shape.OBJECT:
            log = (seal, views[domain])
            done = yield from _wipe_objects(keys, projected=seal.name not in names, deleted=log)
        else:
            done = yield from _erase_real(keys, seal, holder, alone=seal.name not in names)
        if not done and caps.shape is Shape.OBJECT:
            return False
        whole_gone = whole_gone and done
    if not whole_gone:
        return False
    if successor is not None and successor.parts and not whole.parts:
        # Each part of the successor has a `.metadata` of its own: this one is nobody else's.
        yield from _drop_metadata(whole, holder, caps)
    return True


def is_link(name: str) -> Program[bool]:
    """Whether a link (or a file) stands in the place of a directory of ours.

    Asked by a removal, which a real directory with anything in it refuses: no cache can answer that,
    and an empty one is in the way of nobody.
    """
    try:
        yield RemoveDir(name)
    except AlreadyExistsError as error:
        return error.errno == errno.ENOTDIR
    except (TransientError, AccessError):
        return False  # a mount point is busy, another's directory stays: the renames tell
    return False


def _erase_real(keys: AttemptKeys, seal: Seal, holder: Generation, *, alone: bool) -> Program[bool]:
    """Never stops a claim for what somebody moved away and linked, or mounted, in its place."""
    if seal.name.count("/") and (yield from is_link(seal.name)):
        logger.warning(_LEFT, seal.name, "a link, or no directory")
        return False
    try:
        return (yield from _erase_files(keys, seal, holder, alone=alone))
    except UnsupportedError as error:
        logger.warning(_LEFT, seal.name, error)
        return False


def _erase_files(
    keys: AttemptKeys, seal: Seal, holder: Generation, *, alone: bool
) -> Program[bool]:
    """Filesystems: what was projected of one piece. alone: no successor has its name."""
    trash = trash_of(holder)
    if alone:
        yield from _unproject(keys, seal, trash)
    yield from move_to_trash(keys.projected_data, f"{trash}/{seal.save_id}.data")
    # Nobody looks again once the log says "gone": no power cut may bring the names back.
    yield from _sync_if_there(keys.name)
    try:
        yield StatOf(trash)
    except NotFoundError:
        # Every rename above may have failed for want of a target: the next holder looks again.
        return False
    if alone:
        try:
            yield RemoveDir(keys.name)
        except AlreadyExistsError:
            return True  # somebody else's files: theirs to remove
        yield from _sync_if_there(keys.name.rpartition("/")[0])
    return True


def _drop_metadata(seal: Seal, holder: Generation, caps: Capabilities) -> Program[None]:
    key = f"{seal.name}/{METADATA}"
    if (yield from _names_it(key, seal.save_id)):
        if caps.shape is Shape.OBJECT:
            yield Remove(key)
        else:
            yield from move_to_trash(key, f"{trash_of(holder)}/{seal.save_id}.{METADATA}")


def _unproject(keys: AttemptKeys, seal: Seal, trash: str) -> Program[None]:
    """Take `.metadata` first: stock readers see the whole save or nothing."""
    for piece in (METADATA, MANIFEST):
        if (yield from _names_it(f"{keys.name}/{piece}", keys.save_id)):
            yield from move_to_trash(f"{keys.name}/{piece}", f"{trash}/{seal.save_id}.{piece}")
    # Or after a power cut `.metadata` is back and its data is not.
    yield from _sync_if_there(keys.name)
    if seal.artifact is Kind.DIRECTORY:
        for top in (yield from _plain_names(keys)):
            yield from move_to_trash(f"{keys.name}/{top}", f"{trash}/{seal.save_id}.{top}")


def _names_it(key: str, save_id: str) -> Program[bool]:
    try:
        data: bytes = yield Read(key)
    except NotFoundError:
        return False
    if key.endswith(MANIFEST):
        return names_save(data) == save_id
    return save_id.encode() in data  # its data paths carry the id


def _plain_names(keys: AttemptKeys) -> Program[list[str]]:
    """The top names that a directory artifact put beside its data directory."""
    files = yield from _plain_files(keys)
    return list(dict.fromkeys(path.split("/", 1)[0] for path in files))


def _plain_files(keys: AttemptKeys) -> Program[list[str]]:
    """What a directory artifact put beside its data directory, by its own manifest."""
    paths = [f.path for f in (yield from listed_files(keys)) if not f.is_shared]
    return [path for path in paths if path.split("/", 1)[0] != keys.save_id]


def listed_files(keys: AttemptKeys) -> Program[list[FileRecord]]:
    """What a save's own manifest lists, each path once; empty where it was never written or is gone."""
    try:
        raw: bytes = yield Read(f"{keys.projected_data}/{MANIFEST}")
        files = decode_manifest(raw, keys.projected_data).files
        return list({file.path: file for file in files}.values())
    except (NotFoundError, ManifestError):
        return []


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


def _sync_if_there(key: str) -> Program[None]:
    try:
        yield Sync(key)
    except NotFoundError:
        return


def discard_attempt(
    save_id: str, name: str, holder: Generation, caps: Capabilities
) -> Program[None]:
    """Remove the bytes of an attempt whose abort was folded back as effective.

    It was never committed, hence never projected. name is "" where its record was lost.
    """
    keys = AttemptKeys(caps.shape, name, save_id)
    trash = trash_of(holder)
    if caps.shape is Shape.OBJECT:
        yield from _wipe_attempt(keys)
        return
    yield from move_to_trash(keys.attempt, f"{trash}/{save_id}.attempt")
    if name:
        try:
            yield from move_to_trash(keys.projected_data, f"{trash}/{save_id}.data")
        except UnsupportedError as error:
            # Another disk stands there; what was never committed was never moved to it.
            logger.warning(_LEFT, name, error)


def discard_own_attempt(save_id: str, name: str, caps: Capabilities) -> Program[None]:
    """Remove an attempt that this process began, knows unsealed, and has appended an abort for."""
    keys = AttemptKeys(caps.shape, name, save_id)
    if caps.shape is Shape.OBJECT:
        yield from _wipe_attempt(keys)
        return
    yield from discard_source(keys)


def _wipe_objects(
    keys: AttemptKeys, *, projected: bool, deleted: tuple[Seal, LogState] | None = None
) -> Program[bool]:
    """Object stores: everything of one save. What its manifest lists goes without a listing.

    projected: its name is nobody else's, so what stands under plain names is its own. deleted: a
    committed save and a log that holds its delete: of what it shares with other saves goes what
    none of them needs. False, and all of it stays, where that cannot be told.
    """
    listed = (yield from listed_files(keys)) if keys.name else []
    alone: tuple[str, ...] = ()
    if deleted is not None:
        found = yield from not_needed(deleted[0], listed, deleted[1], keys.shape)
        if found is None:
            return False
        alone = found
    if projected:
        for piece in (METADATA, MANIFEST):
            key = f"{keys.name}/{piece}"
            if (yield from _names_it(key, keys.save_id)):
                yield Remove(key)
    own = f"{keys.save_id}/"
    here = [f.path for f in listed if not f.is_shared and (projected or f.path.startswith(own))]
    if here:
        yield RemoveMany((*(f"{keys.name}/{path}" for path in here), *alone))
        # The manifest after all that it lists: by it whoever goes on after a crash finds them.
        yield Remove(f"{keys.projected_data}/{MANIFEST}")
    elif keys.name:
        yield RemoveTree(keys.projected_data)
    yield from drop_record(keys)  # last: by it the next holder finds the rest
    return True


def _wipe_attempt(keys: AttemptKeys) -> Program[None]:
    """Object stores: everything of a save that was never committed, so nobody shares it."""
    yield RemoveTree(shared_key(keys.save_id))
    yield from _wipe_objects(keys, projected=False)


def wipe_leftovers(seals: list[Seal], domain: str, caps: Capabilities) -> Program[None]:
    """Object stores: take away what a delayed PUT wrote after its save was deleted and gone."""
    if caps.shape is not Shape.OBJECT or not seals:
        return
    present = {entry.name for entry in (yield List(""))}
    for seal in seals:
        if seal.name in present:
            for piece in pieces(seal, domain):
                keys = AttemptKeys(caps.shape, piece.name, piece.save_id)
                yield from _wipe_objects(keys, projected=True)


def remove_empty_attempt(save_id: str) -> Program[None]:
    """Remove the directories of an attempt that died before its record was whole.

    One that has a file may be another's and alive, who is writing data. A living one without: it sees
    that its directory is gone, and makes it again (``saving.begin``).
    """
    data = f"{ATTEMPTS}/{save_id}/{save_id}"
    try:
        entries: list[Entry] = yield List(data)
    except NotFoundError:
        entries = []  # it died between the two directories
    if not all(entry.name.startswith(PARTIAL_PREFIX) for entry in entries):
        return
    for entry in entries:
        # Half of a record. The name is unique to its writer: nobody else's file can be meant.
        yield Remove(f"{data}/{entry.name}")
    for key in (data, f"{ATTEMPTS}/{save_id}"):
        try:
            yield RemoveDir(key)
        except AlreadyExistsError:
            return
