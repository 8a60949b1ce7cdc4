"""Checkpoints beside the log: copied here by ``cp -r``, or written by stock torch. Read-only.

    names_beside    directories of a run whose name no live save of the log has
    look_beside     one of them: a checkpoint, what is wrong with it, or None: it is none
    list_unlogged   all that can be loaded, the newest last
    newest          the latest of both: of the log, else of what lies beside it
    newest_there    the same, or an error where that was removed by hand
    oldest_first    the order of what no log orders

A manifest is believed by itself if every listed file is there with its size; ``.metadata`` alone is a
plain DCP checkpoint. What the log has heard of, in whatever state, is the log's to tell, but for a copy of
it under another name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ckptfs.commit.catalog import (
    Checkpoint,
    Origin,
    is_of_log,
    list_live,
    logged,
    missing_files,
    read_view,
)
from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.layout import CONTROL, MANIFEST, METADATA, SHARED, number_order, step_in
from ckptfs.commit.manifest import Manifest, decode_manifest
from ckptfs.commit.ops import List, Program, Read, Refresh, StatOf
from ckptfs.commit.protocol import Views, latest
from ckptfs.commit.removal import lies_nowhere
from ckptfs.errors import IncompleteCheckpointError, ManifestError, NotFoundError
from ckptfs.storage.base import Entry, Shape, Stat
from ckptfs.uri import Uri

__all__ = [
    "Beside",
    "list_unlogged",
    "look_beside",
    "names_beside",
    "newest",
    "newest_there",
    "oldest_first",
]


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

    @property
    def step(self) -> int | None:
        """As its manifest says; where there is none, the number that ends its name."""
        return step_in(self.name) if self.manifest is None else self.manifest.step

    @property
    def written_s(self) -> float:
        """When it was written, Unix time; before everything else where nobody told."""
        if self.manifest is None:
            return float("-inf") if self.modified_s is None else self.modified_s
        try:
            then = datetime.fromisoformat(self.manifest.created_at)
        except ValueError:
            return float("-inf")
        return then.replace(tzinfo=then.tzinfo or UTC).timestamp()


def oldest_first(found: Iterable[Beside]) -> list[Beside]:
    """Checkpoints that no log orders, the newest last. Pure.

    By their steps, where all have one and the names without a manifest differ in nothing but the number;
    else by the time at which they were written. A copying tool need not keep times, and a number in
    names of two patterns need not count the same thing.
    """
    ordered = sorted(found, key=lambda one: number_order(one.name))
    steps = {one.name: one.step for one in ordered}
    patterns = {one.name.rstrip("0123456789") for one in ordered if one.manifest is None}
    if None in steps.values() or len(patterns) > 1:
        return sorted(ordered, key=lambda one: one.written_s)
    return sorted(ordered, key=lambda one: steps[one.name] or 0)


def list_unlogged(views: Views, root: Uri, kind: Kind | None = None) -> Program[list[Checkpoint]]:
    """Checkpoints beside the log: directories with a manifest, or `.metadata`, that none of
    ``views`` has heard of, in whatever state; of one kind where one is given. Names that a live save of the log has are not looked
    at: on an object store each look is a request.
    """
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return []
    found = []
    for name in names_beside(entries, views):
        beside = yield from look_beside(name, views, root)
        if beside is not None:
            found.append(beside)
    # Listing names what can be loaded; load() says what is wrong with the rest.
    whole = {one.name: one.checkpoint for one in found if one.checkpoint is not None}
    wanted = (b for b in found if b.name in whole and kind in (None, whole[b.name].kind))
    return [whole[beside.name] for beside in oldest_first(wanted)]


def newest(views: Views, root: Uri, kind: Kind) -> Program[Checkpoint | None]:
    """The last commit of a kind that the log knows, those of failing runs apart; where it knows none,
    the last of what lies beside it, in the order of ``oldest_first``.
    """
    live = latest(views, kind)
    if live is not None:
        return next(c for c in logged(views, root) if c.save_id == live.seal.save_id)
    loose = yield from list_unlogged(views, root, kind)
    return loose[-1] if loose else None


def newest_there(views: Views, root: Uri, kind: Kind, shape: Shape) -> Program[Checkpoint | None]:
    """As ``newest``. IncompleteCheckpointError: every domain of it is among ``views`` and has nothing of it,
    and its log does not say that it was deleted: to take an older one would pass over it without a word.
    """
    found = yield from newest(views, root, kind)
    while (lost := (yield from _removed(views, kind, shape))) is not None:
        again = yield from read_view()
        now: Views = {} if again is None else dict([again])
        last = latest(now, kind)
        if last is not None and last.seal.save_id == lost.save_id:
            where = root / lost.name
            raise IncompleteCheckpointError(
                f"{lost.name} was removed by hand: it is the last commit (save {lost.save_id}), and "
                "nothing of it is there",
                uri=where,
                hint=f"ckptfs rm {where} records that, and the one before is the latest",
            )
        # Deleted or replaced meanwhile.
        views = now
        found = yield from newest(views, root, kind)
    return found


def _removed(views: Views, kind: Kind, shape: Shape) -> Program[Seal | None]:
    last = latest(views, kind)
    if last is None or not set(last.seal.everywhere) <= set(views):
        return None
    for domain in last.seal.everywhere:
        if not (yield from lies_nowhere(last.seal, domain, shape)):
            return None
    return last.seal


def names_beside(entries: Iterable[Entry], views: Views) -> list[str]:
    """Of what lies directly in a run, the directories that may be checkpoints no log knows; step_9
    before step_10.
    """
    known = {CONTROL, SHARED, *(seal.name for seal in list_live(views))}
    return sorted((e.name for e in entries if e.is_dir and e.name not in known), key=number_order)


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
    checkpoint = Checkpoint(root / name, step_in(name), None, Kind.CHECKPOINT, Origin.STOCK)
    return Beside(name, checkpoint, modified_s=stat.modified_s)


def _enough(manifest: Manifest, missing: tuple[str, ...]) -> bool:
    """Whether nothing is missing, or only what lies on other nodes' disks: one domain's files and
    all that belong to every domain are here.
    """
    lacking = {f.domain for f in manifest.files if f.path in missing}
    whole = [d.id for d in manifest.domains if d.id not in lacking]
    return not lacking or (None not in lacking and bool(whole))
