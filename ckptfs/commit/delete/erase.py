"""Removes the bytes of one save: our own files, piece by piece, and nothing that is in their place.

    filesystems      its projection sources, then what was projected: rename to the trash, unlink there
    object stores    by keys: what its manifest lists, then the manifest, then the attempt's record

Only our own files are removed: the data directory by its unique name, ``.metadata`` and ``ckptfs.json`` while they
name this very save, and the listed plain names of a directory artifact. Files of other programs are never touched,
and neither is anything behind a link, or on another disk, in the place of a directory of ours.

``.metadata`` and ``ckptfs.json`` have fixed names: after this process has read the old save's files and before it
renames them, another process of the same generation may project a newer save. So a file that was moved is read
again in the trash, and put back if it belongs to another save (``trash``).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

from ckptfs.commit.delete.shared_data import not_needed
from ckptfs.commit.delete.trash import move_to_trash, names_it, take_projected
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord, decode_manifest
from ckptfs.commit.operations import (
    Program,
    Read,
    Remove,
    RemoveDir,
    RemoveMany,
    RemoveTree,
    StatOf,
    Sync,
)
from ckptfs.commit.paths import ATTEMPTS, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.save.projection import drop_record, project
from ckptfs.commit.state import Standing, pieces, standing, successor_here
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

logger = logging.getLogger("ckptfs.commit")

LEFT = "the bytes of %s were not removed: they are not where they were written: %s"


def erase(
    whole: Seal,
    views: Mapping[str, LogState],
    domain: str,
    trash: str,
    caps: Capabilities,
) -> Program[bool]:
    """Remove the bytes and return whether they are gone. They are not while a successor in doubt leaves ``.metadata`` to
    this save, or if something else is in the place of its directory.

    trash: the caller's own directory, made before the delete was entered and never again.
    """
    mine = pieces(whole, domain)
    if caps.shape is Shape.FILESYSTEM:
        # Its projection sources first, or somebody who stalls over them projects a deleted save.
        for seal in mine:
            keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
            yield from move_to_trash(keys.attempt, f"{trash}/{seal.save_id}.attempt")
        # Also where none was there: its projection took the name away, and a power cut may bring it back.
        yield from _sync_if_there(ATTEMPTS)
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
    """Object stores: remove everything of one save. The files in its manifest are removed without a listing.

    projected: no other save has its name, so the plain names are its own. deleted: a committed save, and a log
    that has its delete; shared files are removed if no other save needs them. Returns False, and removes nothing,
    if that is unknown.
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
    """Whether a link (or a file) is in the place of a directory of ours.

    It tries to remove the directory, which fails for a real directory that is not empty: no cache can answer that,
    and removing an empty one does no harm.
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
    """The top names that a directory artifact put next to its data directory."""
    files = yield from _plain_files(keys)
    return list(dict.fromkeys(path.split("/", 1)[0] for path in files))


def _plain_files(keys: AttemptKeys) -> Program[list[str]]:
    """The files that a directory artifact put next to its data directory, according to its manifest."""
    paths = [f.path for f in (yield from listed_files(keys)) if not f.is_shared]
    return [path for path in paths if path.split("/", 1)[0] != keys.save_id]


def _sync_if_there(key: str) -> Program[None]:
    try:
        yield Sync(key)
    except NotFoundError:
        return
