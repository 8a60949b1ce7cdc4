"""Removes the bytes of one save: our own files, piece by piece, and nothing that is in their place.

    filesystems      its projection sources, then what was projected: rename to the trash, unlink there
    object stores    by keys: the plain names, then its data directory in one request; where the manifest lists anything
                     outside that, those files first

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptfs.commit.delete.shared_data import not_needed
from ckptfs.commit.delete.trash import belongs_to, move_to_trash, names_it, take_projected
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord, decode_manifest, digest_of
from ckptfs.commit.operations import (
    AtOnce,
    Program,
    Read,
    Remove,
    RemoveDir,
    RemoveMany,
    RemoveTree,
    StatOf,
    Sync,
    all_at_once,
)
from ckptfs.commit.paths import ATTEMPTS, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.save.projection import drop_record, project
from ckptfs.commit.state import Standing, pieces, standing, successor_here
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    ManifestError,
    NotFoundError,
    StorageError,
    SymlinkError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.base import Capabilities, Shape

__all__ = [
    "LEFT",
    "ProjectedFiles",
    "erase",
    "is_link",
    "listed_files",
    "look_at_names",
    "wipe_objects",
]

logger = logging.getLogger("ckptfs.commit")

LEFT = "the bytes of %s were not removed: they are not where they were written: %s"


def erase(
    save: Seal,
    views: Mapping[str, LogState],
    domain: str,
    trash: str,
    caps: Capabilities,
    *,
    found: Mapping[str, ProjectedFiles] | None = None,
) -> Program[bool]:
    """Remove the bytes of a save and return whether they are gone.

    They are not while a successor in doubt leaves ``.metadata`` to this save, or if something else
    is in the place of its directory.

    Args:
        save: The save.
        views: The folded logs.
        domain: This domain.
        trash: The caller's own directory, made before the delete was entered and never again.
        caps: The capabilities of the storage.
        found: On an object store, what was just read under the names of the save and of its parts,
            by save_id. What is not in it is read.
    """
    pieces_here = pieces(save, domain)
    if caps.shape is Shape.FILESYSTEM:
        # Its projection sources first: otherwise a process that stalls over them projects a deleted save.
        for seal in pieces_here:
            keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
            yield from move_to_trash(keys.attempt, f"{trash}/{seal.save_id}.attempt")
        # Also if there was none: its projection moved the name away, and a power cut may bring it
        # back.
        yield from _sync_if_present(ATTEMPTS)
    successor = successor_here(views[domain], save)
    if successor is not None:
        if standing(successor.save_id, views) is not Standing.COMMITTED:
            return False
        # From here `.metadata` belongs to the successor, and is left alone.
        try:
            yield from project(successor, views, domain, caps)
        except SymlinkError as error:
            logger.warning(LEFT, save.name, error)
            return False
    names = set() if successor is None else {seal.name for seal in pieces(successor, domain)}
    if caps.shape is Shape.FILESYSTEM and (yield from is_link(save.name)):
        logger.warning(LEFT, save.name, "a link, or no directory")
        return False
    all_gone = True
    for seal in pieces_here:
        keys = AttemptKeys(caps.shape, seal.name, seal.save_id)
        if caps.shape is Shape.OBJECT:
            here = None if found is None else found.get(seal.save_id)
            alone = seal.name not in names
            done = yield from _erase_objects(keys, seal, views[domain], alone=alone, found=here)
        else:
            done = yield from _erase_real(keys, seal, trash, alone=seal.name not in names)
        if not done and caps.shape is Shape.OBJECT:
            return False
        all_gone = all_gone and done
    if not all_gone:
        return False
    if successor is not None and successor.parts and not save.parts:
        # Each part of the successor has a `.metadata` of its own: no other save uses this one.
        yield from _drop_metadata(save, trash, caps)
    return True


def wipe_objects(keys: AttemptKeys, *, projected: bool) -> Program[None]:
    """Remove everything of a save that is in no log or gone from it, on an object store.

    The files in its manifest are removed without a listing. projected: No other save has its name,
    so the plain names are its own.
    """
    listed = (yield from listed_files(keys)) if keys.name else []
    if projected:
        found = yield from look_at_names(keys.name)
        yield from all_at_once([Remove(key) for key in found.of_save(keys)])
    here = _own_files(keys, listed, projected=projected)
    if here:
        yield RemoveMany(here)
        # The manifest after the files that it lists: after a crash, the next process finds them by it.
        yield Remove(f"{keys.projected_data}/{MANIFEST}")
    elif keys.name:
        yield RemoveTree(keys.projected_data)
    yield from drop_record(keys)  # last: the next holder finds the rest by it


@dataclass(frozen=True, slots=True)
class ProjectedFiles:
    """The content of the two plain names of a step on an object store, or None."""

    metadata: bytes | None
    manifest: bytes | None

    def of_save(self, keys: AttemptKeys) -> list[str]:
        """Return the keys of the files that name this save."""
        both = ((METADATA, self.metadata), (MANIFEST, self.manifest))
        return [
            key
            for key, data in ((f"{keys.name}/{piece}", data) for piece, data in both)
            if data is not None and belongs_to(key, data, keys.save_id)
        ]


def look_at_names(name: str) -> Program[ProjectedFiles]:
    """Read both files at the same time."""
    answers = yield AtOnce(tuple(Read(f"{name}/{piece}") for piece in (METADATA, MANIFEST)))
    for answer in answers:
        if isinstance(answer, StorageError) and not isinstance(answer, NotFoundError):
            raise answer
    return ProjectedFiles(*(None if isinstance(a, StorageError) else a for a in answers))


def _erase_objects(
    keys: AttemptKeys, seal: Seal, state: LogState, *, alone: bool, found: ProjectedFiles | None
) -> Program[bool]:
    """Remove one piece of a committed save, on an object store.

    It returns False and removes nothing if it is unknown whether another save needs its shared
    files.

    state: A log that has its delete. alone: No successor has its name, so the plain names are its
    own.
    """
    names: list[str] = []
    manifest: bytes | None = None
    if alone:
        found = found or (yield from look_at_names(keys.name))
        names = found.of_save(keys)
        # Reading the copy under the plain name saves a request, but a copy that was shortened would
        # hide files.
        if found.manifest is not None and digest_of(found.manifest) == seal.digest:
            manifest = found.manifest
    listed = _listed_in(manifest, keys) or (yield from listed_files(keys))
    shared = yield from not_needed(seal, listed, state, keys.shape)
    if shared is None:
        return False
    if names:
        # Before its data: stock readers see the whole save or nothing.
        yield RemoveMany(tuple(names))
    here = _own_files(keys, listed, projected=alone)
    if not here and not shared:
        yield RemoveTree(keys.projected_data)
        yield from drop_record(keys)
        return True
    inside = all(key.startswith(f"{keys.projected_data}/") for key in here)
    if not inside or any(f.is_shared for f in listed):
        yield RemoveMany((*here, *shared))
        here = ()
    # Only the manifest lists files in other places, so it is removed after them. Without it the data directory is listed.
    yield from _remove_with_record((*here, f"{keys.projected_data}/{MANIFEST}"), keys)
    return True


def _remove_with_record(files: tuple[str, ...], keys: AttemptKeys) -> Program[None]:
    """Remove files and the attempt's record, if permitted.

    The record is not needed to find a committed save, because the log has its delete.
    """
    try:
        yield RemoveMany((*files, keys.record))
    except AccessError:
        yield RemoveMany(files)
        yield from drop_record(keys)


def _own_files(
    keys: AttemptKeys, listed: Sequence[FileRecord], *, projected: bool
) -> tuple[str, ...]:
    """The keys of the listed files that no other save uses; with its plain names if no other save has them."""
    own = f"{keys.save_id}/"
    paths = (f.path for f in listed if not f.is_shared)
    return tuple(f"{keys.name}/{path}" for path in paths if projected or path.startswith(own))


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
        return False  # a mount point, or another program's directory: the renames show it
    return False


def listed_files(keys: AttemptKeys) -> Program[list[FileRecord]]:
    """Return what a save's own manifest lists, each path once.

    Empty if the manifest was never written or is gone.
    """
    try:
        raw: bytes = yield Read(f"{keys.projected_data}/{MANIFEST}")
    except NotFoundError:
        return []
    return _listed_in(raw, keys)


def _listed_in(manifest: bytes | None, keys: AttemptKeys) -> list[FileRecord]:
    if manifest is None:
        return []
    try:
        files = decode_manifest(manifest, keys.projected_data).files
    except ManifestError:
        return []
    return list({file.path: file for file in files}.values())


def _erase_real(keys: AttemptKeys, seal: Seal, trash: str, *, alone: bool) -> Program[bool]:
    """Remove a piece, unless something else was linked or mounted in its place.

    Such a link or mount must not stop a claim of the run, so it is only logged.
    """
    if seal.name.count("/") and (yield from is_link(seal.name)):
        logger.warning(LEFT, seal.name, "a link, or no directory")
        return False
    try:
        return (yield from _erase_files(keys, seal, trash, alone=alone))
    except (UnsupportedError, SymlinkError) as error:
        logger.warning(LEFT, seal.name, error)
        return False


def _erase_files(keys: AttemptKeys, seal: Seal, trash: str, *, alone: bool) -> Program[bool]:
    """Remove the projected files of one piece, on a filesystem.

    alone: No successor has its name.
    """
    if alone:
        yield from _unproject(keys, seal, trash)
    yield from move_to_trash(keys.projected_data, f"{trash}/{seal.save_id}.data")
    # After the "gone" entry no process looks here again: no power cut may bring the names back.
    yield from _sync_if_present(keys.name)
    try:
        yield StatOf(trash)
    except NotFoundError:
        # Every rename above may have failed because its target directory was gone: the next holder
        # looks again.
        return False
    if alone:
        try:
            yield RemoveDir(keys.name)
        except AlreadyExistsError:
            return True  # the files of another program, which has to remove them
        yield from _sync_if_present(keys.name.rpartition("/")[0])
    return True


def _drop_metadata(seal: Seal, trash: str, caps: Capabilities) -> Program[None]:
    key = f"{seal.name}/{METADATA}"
    if caps.shape is Shape.FILESYSTEM:
        yield from take_projected(key, seal.save_id, trash)
    elif (yield from names_it(key, seal.save_id)):
        yield Remove(key)


def _unproject(keys: AttemptKeys, seal: Seal, trash: str) -> Program[None]:
    """Remove the projected files, `.metadata` first: readers see all of the save or nothing."""
    for piece in (METADATA, MANIFEST):
        yield from take_projected(f"{keys.name}/{piece}", keys.save_id, trash)
    # Otherwise, after a power cut, `.metadata` could exist without its data.
    yield from _sync_if_present(keys.name)
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


def _sync_if_present(key: str) -> Program[None]:
    try:
        yield Sync(key)
    except NotFoundError:
        return
