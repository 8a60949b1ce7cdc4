"""Checkpoints beside the log: copied here by ``cp -r``, or written by stock torch. Read-only.

    names_beside    directories of a run whose name no live save of the log has
    look_beside     one of them: a checkpoint, what is wrong with it, or None: it is none
    list_unlogged   all that can be loaded
    newest          the latest of both: of the log, else of what lies beside it

A manifest is believed by itself if every listed file is there with its size; ``.metadata`` alone is a
plain DCP checkpoint. What the log has heard of, in whatever state, is the log's to tell, but for a copy of
it under another name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.commit.catalog import (
    Checkpoint,
    Origin,
    is_of_log,
    list_live,
    logged,
    missing_files,
)
from ckptfs.commit.entries import Kind
from ckptfs.commit.layout import CONTROL, MANIFEST, METADATA, SHARED
from ckptfs.commit.manifest import Manifest, decode_manifest
from ckptfs.commit.ops import List, Program, Read, Refresh, StatOf
from ckptfs.commit.protocol import Views, latest
from ckptfs.errors import ManifestError, NotFoundError
from ckptfs.storage.base import Entry, Stat
from ckptfs.uri import Uri

__all__ = ["Beside", "list_unlogged", "look_beside", "names_beside", "newest"]


@dataclass(frozen=True, slots=True)
class Beside:
    """A directory that is a checkpoint, or was to be one. checkpoint is None where it cannot be
    loaded, and ``why`` not; manifest is None of a plain DCP checkpoint, and where it is damaged.
    modified_s: of ``.metadata``, where nothing else tells a time, as the storage does (Unix time).
    """

    name: str
    checkpoint: Checkpoint | None
    manifest: Manifest | None = None
    why: str = ""
    modified_s: float | None = None


def list_unlogged(views: Views, root: Uri) -> Program[list[Checkpoint]]:
    """Checkpoints beside the log: directories with a manifest, or `.metadata`, that none of
    ``views`` has heard of, in whatever state. Names that a live save of the log has are not looked
    at: on an object store each look is a request.
    """
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return []
    found = []
    for name in names_beside(entries, views):
        beside = yield from look_beside(name, views, root)
        # Listing names what can be loaded; load() says what is wrong with the rest.
        if beside is not None and beside.checkpoint is not None:
            found.append(beside.checkpoint)
    return found


def newest(views: Views, root: Uri, kind: Kind) -> Program[Checkpoint | None]:
    """The last commit of a kind that the log knows, those of failing runs apart; where it knows none,
    of what lies beside it the one with the largest step.
    """
    live = latest(views, kind)
    if live is not None:
        return next(c for c in logged(views, root) if c.save_id == live.seal.save_id)
    loose = [c for c in (yield from list_unlogged(views, root)) if c.kind is kind]
    return max(loose, key=lambda c: -1 if c.step is None else c.step, default=None)


def names_beside(entries: Iterable[Entry], views: Views) -> list[str]:
    """Of what lies directly in a run, the directories that may be checkpoints no log knows."""
    live = {seal.name for seal in list_live(views)}
    return [e.name for e in entries if e.is_dir and e.name not in {CONTROL, SHARED, *live}]


def look_beside(name: str, views: Views, root: Uri) -> Program[Beside | None]:
    """What a directory is that no live save has the name of; None: no checkpoint, or the log's."""
    yield Refresh(name)  # what was missing in it when this node looked before may be there by now
    try:
        raw: bytes = yield Read(f"{name}/{MANIFEST}")
    except NotFoundError:
        # Between the two renames of a projection `.metadata` is there and the manifest is not.
        if any(view.saves.knows_name(name) for view in views.values()):
            return None
        return (yield from _stock(name, root))
    try:
        manifest = decode_manifest(raw, root / name)
    except ManifestError as error:
        return Beside(name, None, why=error.message)
    if manifest.save_id == name or is_of_log(name, manifest, views):
        return None  # the data directory of a step that is listed as a run; or the log tells
    missing = yield from missing_files(manifest, name)
    if not _enough(manifest, missing):
        why = f"{len(missing)} of {len(manifest.files)} files are missing or have another size"
        return Beside(name, None, manifest, f"{why}: an interrupted copy")
    checkpoint = Checkpoint(
        root / name,
        manifest.step,
        manifest.save_id,
        manifest.artifact,
        Origin.MANIFEST,
        manifest.base,
        tuple(d.id for d in manifest.domains),
        parts=tuple(ref.name for ref in manifest.parts),
    )
    return Beside(name, checkpoint, manifest)


def _stock(name: str, root: Uri) -> Program[Beside | None]:
    try:
        stat: Stat = yield StatOf(f"{name}/{METADATA}")
    except NotFoundError:
        return None
    checkpoint = Checkpoint(root / name, None, None, Kind.CHECKPOINT, Origin.STOCK)
    return Beside(name, checkpoint, modified_s=stat.modified_s)


def _enough(manifest: Manifest, missing: tuple[str, ...]) -> bool:
    """Whether nothing is missing, or only what lies on other nodes' disks: one domain's files and
    all that belong to every domain are here.
    """
    lacking = {f.domain for f in manifest.files if f.path in missing}
    whole = [d.id for d in manifest.domains if d.id not in lacking]
    return not lacking or (None not in lacking and bool(whole))
