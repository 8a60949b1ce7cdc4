"""The bytes of one save, taken away: what is ours, piece by piece, and nothing that stands in its place.

    filesystems      its projection sources, then what was projected: rename to the trash, unlink there
    object stores    by keys: what its manifest lists, then the manifest, then the attempt's record

Only what is ours goes: the data directory by its unique name, ``.metadata`` and ``ckptfs.json`` while
they name this very save, the listed plain names of a directory artifact. Foreign files are never
touched, nor is what stands behind a link or on another disk in the place of a directory of ours.

``.metadata`` and ``ckptfs.json`` have fixed names: between the look that finds the old save's and the
rename, another process of the same generation may project a newer save. So what was moved is looked
at in the trash, and put back where it is another's (``returning``).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import ATTEMPTS, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.manifest import FileRecord, decode_manifest
from ckptfs.commit.ops import Program, Read, Remove, RemoveDir, RemoveMany, RemoveTree, StatOf, Sync
from ckptfs.commit.pieces import pieces
from ckptfs.commit.project import drop_record, project
from ckptfs.commit.protocol import Standing, standing, successor_here
from ckptfs.commit.returning import names_it, take_projected
from ckptfs.commit.shared_data import not_needed
from ckptfs.commit.trash import move_to_trash
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    ManifestError,
    NotFoundError,
    SymlinkError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.base import Capabilities, Shape

__all__ = ["LEFT", "erase", "is_link", "listed_files", "wipe_objects"]

logger = logging.getLogger(__name__)

LEFT = "the bytes of %s stay, they are not where they were written: %s"


def erase(
    whole: Seal,
    views: Mapping[str, LogState],
    domain: str,
    trash: str,
    caps: Capabilities,
) -> Program[bool]:
    """Whether the bytes are gone; not while a successor in doubt leaves ``.metadata`` to this one, and
    not where something else stands in the place of its directory.

    trash: the caller's own directory, made before the delete was entered and never again.
    """
    mine = pieces(whole, domain)
    if caps.shape is Shape.FILESYSTEM:
        # Its projection sources first, or somebody who stalls over them projects a deleted save.
        waited = False
        for seal in mine:
            keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
            target = f"{trash}/{seal.save_id}.attempt"
            waited = (yield from move_to_trash(keys.attempt, target)) or waited
        if waited:
            yield Sync(ATTEMPTS)
    successor = successor_here(views[domain], whole)
    if successor is not None:
        if standing(successor.save_id, views) is not Standing.COMMITTED:
            return False
        # From here `.metadata` is the successor's: ours to leave alone.
        try:
            yield from project(successor, views, domain, caps)
        except SymlinkError as error:
            logger.warning(LEFT, whole.name, error)
            return False
    names = set() if successor is None else {seal.name for seal in pieces(successor, domain)}
    if caps.shape is Shape.FILESYSTEM and (yield from is_link(whole.name)):
        logger.warning(LEFT, whole.name, "a link, or no directory")
        return False
    whole_gone = True
    for seal in mine:
        keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
        if caps.shape is Shape.OBJECT:
            log = (seal, views[domain])
            done = yield from wipe_objects(keys, projected=seal.name not in names, deleted=log)
        else:
            done = yield from _erase_real(keys, seal, trash, alone=seal.name not in names)
        if not done and caps.shape is Shape.OBJECT:
            return False
        whole_gone = whole_gone and done
    if not whole_gone:
        return False
    if successor is not None and successor.parts and not whole.parts:
        # Each part of the successor has a `.metadata` of its own: this one is nobody else's.
        yield from _drop_metadata(whole, trash, caps)
    return True


def wipe_objects(
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
            if (yield from names_it(key, keys.save_id)):
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


def listed_files(keys: AttemptKeys) -> Program[list[FileRecord]]:
    """What a save's own manifest lists, each path once; empty where it was never written or is gone."""
    try:
        raw: bytes = yield Read(f"{keys.projected_data}/{MANIFEST}")
        files = decode_manifest(raw, keys.projected_data).files
        return list({file.path: file for file in files}.values())
    except (NotFoundError, ManifestError):
        return []


def _erase_real(keys: AttemptKeys, seal: Seal, trash: str, *, alone: bool) -> Program[bool]:
    """Never stops a claim for what somebody moved away and linked, or mounted, in its place."""
    if seal.name.count("/") and (yield from is_link(seal.name)):
        logger.warning(LEFT, seal.name, "a link, or no directory")
        return False
    try:
        return (yield from _erase_files(keys, seal, trash, alone=alone))
    except (UnsupportedError, SymlinkError) as error:
        logger.warning(LEFT, seal.name, error)
        return False


def _erase_files(keys: AttemptKeys, seal: Seal, trash: str, *, alone: bool) -> Program[bool]:
    """Filesystems: what was projected of one piece. alone: no successor has its name."""
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


def _drop_metadata(seal: Seal, trash: str, caps: Capabilities) -> Program[None]:
    key = f"{seal.name}/{METADATA}"
    if caps.shape is Shape.FILESYSTEM:
        yield from take_projected(key, seal.save_id, trash)
    elif (yield from names_it(key, seal.save_id)):
        yield Remove(key)


def _unproject(keys: AttemptKeys, seal: Seal, trash: str) -> Program[None]:
    """Take `.metadata` first: stock readers see the whole save or nothing."""
    for piece in (METADATA, MANIFEST):
        yield from take_projected(f"{keys.name}/{piece}", keys.save_id, trash)
    # Or after a power cut `.metadata` is back and its data is not.
    yield from _sync_if_there(keys.name)
    if seal.artifact is Kind.DIRECTORY:
        for top in (yield from _plain_names(keys)):
            yield from move_to_trash(f"{keys.name}/{top}", f"{trash}/{seal.save_id}.{top}")


def _plain_names(keys: AttemptKeys) -> Program[list[str]]:
    """The top names that a directory artifact put beside its data directory."""
    files = yield from _plain_files(keys)
    return list(dict.fromkeys(path.split("/", 1)[0] for path in files))


def _plain_files(keys: AttemptKeys) -> Program[list[str]]:
    """What a directory artifact put beside its data directory, by its own manifest."""
    paths = [f.path for f in (yield from listed_files(keys)) if not f.is_shared]
    return [path for path in paths if path.split("/", 1)[0] != keys.save_id]


def _sync_if_there(key: str) -> Program[None]:
    try:
        yield Sync(key)
    except NotFoundError:
        return
