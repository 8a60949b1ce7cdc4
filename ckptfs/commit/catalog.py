"""What is there: the catalog of a run, read-only.

Appends nothing, probes nothing, repairs nothing, needs read permission only. Three sources, in this
order:

    1. the run log of the domains that can be reached   (a save is live when they say so)
    2. a manifest beside `.metadata`                    (copied here by `cp -r`: valid by itself)
    3. `.metadata` alone                                (plain torch.distributed.checkpoint)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.commit.entries import Generation, Kind, Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import CONTROL, DOMAIN, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.log import catch_up
from ckptfs.commit.manifest import Manifest, decode_manifest, digest_of
from ckptfs.commit.ops import List, Program, Read, Refresh, StatOf
from ckptfs.commit.protocol import Standing, Views, catalog, seal_of, standing
from ckptfs.errors import (
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleError,
)
from ckptfs.storage.base import Entry, Shape
from ckptfs.uri import Uri

__all__ = [
    "Checkpoint",
    "Found",
    "Origin",
    "find",
    "list_live",
    "list_unlogged",
    "live_of",
    "logged",
    "missing_files",
    "read_domain",
    "read_view",
    "unlogged",
]


class Origin(StrEnum):
    """Why a checkpoint is believed."""

    LOG = "log"
    MANIFEST = "manifest"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint of a run, as ``latest`` and ``list_checkpoints`` return it.

    save_id is None for a plain DCP checkpoint. step: completed optimizer steps, None if not told.
    domains: ids of the domains that hold it. generation: of the run's owner that saved it.
    """

    uri: Uri
    step: int | None
    save_id: str | None
    kind: Kind
    origin: Origin
    generation: Generation | None = None
    domains: tuple[str, ...] = ()
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Where the files of a checkpoint lie now: file paths of the manifest are relative to ``home``.

    home: key of the step directory or of the attempt that has not been projected yet.
    manifest: None for a plain DCP checkpoint. metadata: key of the `.metadata` to read.
    """

    home: str
    metadata: str
    manifest: Manifest | None
    seal: Seal | None


def read_domain() -> Program[str | None]:
    """The id of the domain seen here, or None: nobody ever wrote a run here."""
    yield Refresh(CONTROL)
    try:
        data: bytes = yield Read(DOMAIN)
    except NotFoundError:
        return None
    return data.decode(errors="replace").strip() or None


def read_view() -> Program[tuple[str, LogState] | None]:
    """This place's domain id and folded log, or None where there is no run."""
    domain = yield from read_domain()
    if domain is None:
        return None
    return domain, (yield from catch_up())


def list_live(views: Views) -> list[Seal]:
    """Seals of the live saves, oldest first."""
    return [live.seal for live in catalog(views)]


def live_of(name: str, views: Views, where: Uri) -> Seal | None:
    """The live save of a name; None if the logs know no live one.

    IncompleteCheckpointError: it is in doubt because a domain is out of reach, and says which.
    """
    for seal in list_live(views):
        if seal.name == name:
            return seal
    ids = {s for v in views.values() for s, save in v.saves.items() if _named(save.seal, name)}
    for save_id in ids:
        doubtful = seal_of(save_id, views)
        if doubtful is not None and standing(save_id, views) is Standing.IN_DOUBT:
            lost = sorted(set(doubtful.domains) - set(views))
            raise IncompleteCheckpointError(
                f"{name} is in doubt: its domains {', '.join(lost)} are out of reach",
                uri=where,
                hint="start on the nodes that hold them, or load an older checkpoint by name",
            )
    return None


def _named(seal: Seal | None, name: str) -> bool:
    return seal is not None and seal.name == name


def find(seal: Seal, shape: Shape, where: Uri) -> Program[Found]:
    """Find a sealed save's files, wherever its projection has got to.

    Believes only a manifest whose digest is the sealed one. NotFoundError: in neither place; the
    caller folds again (it was superseded or deleted meanwhile, else it is damaged).
    """
    keys = AttemptKeys(shape, seal.name, seal.save_id)
    for data in keys.homes():
        # The direction of movement: the attempt first, then where it moves to.
        yield Refresh(data.rsplit("/", 1)[0] if shape is Shape.FILESYSTEM else "")
        try:
            raw: bytes = yield Read(f"{data}/{MANIFEST}")
        except (NotFoundError, StaleError):
            continue
        if digest_of(raw) != seal.digest:
            raise IntegrityError(
                f"the manifest of {seal.name} is not the one that was sealed",
                uri=f"{where}/{seal.save_id}/{MANIFEST}",
                hint="the file was changed after the commit; restore it or load another checkpoint",
            )
        manifest = decode_manifest(raw, f"{where}/{seal.save_id}/{MANIFEST}")
        return Found(data.rsplit("/", 1)[0], f"{data}/{METADATA}", manifest, seal)
    raise NotFoundError(
        f"save {seal.save_id} of {seal.name} is neither on its way nor projected",
        uri=where,
        hint="its files were removed by hand, or this node cannot see them",
    )


def unlogged(name: str, views: Views, where: Uri) -> Program[Found]:
    """A checkpoint that no log knows: copied here, or written by stock torch.

    What the log knows as deleted, overwritten or aborted is not believed, whatever still lies here.
    """
    yield Refresh(name)
    try:
        raw: bytes = yield Read(f"{name}/{MANIFEST}")
    except NotFoundError:
        if any(_named(save.seal, name) for v in views.values() for save in v.saves.values()):
            raise _gone(name, where) from None
        yield from _stock(name, where)
        return Found(name, f"{name}/{METADATA}", None, None)
    manifest = decode_manifest(raw, f"{where}/{MANIFEST}")
    if any(manifest.save_id in v.saves for v in views.values()):
        raise _gone(name, where)
    # The directory may have been renamed by whoever copied it: its own name does not matter.
    return Found(name, f"{name}/{manifest.save_id}/{METADATA}", manifest, None)


def missing_files(manifest: Manifest, home: str) -> Program[tuple[str, ...]]:
    """Listed files that are not below ``home`` with their size: a copy may have been interrupted.

    Asked only where no log vouches for the checkpoint.
    """
    sizes: dict[str, set[int]] = {}
    for record in manifest.files:
        # Domains have a `.metadata` each under one path; gathered together any of them is right.
        sizes.setdefault(record.path, set()).add(record.size_bytes)
    missing: tuple[str, ...] = ()
    for path, right in sizes.items():
        try:
            found = (yield StatOf(f"{home}/{path}")).size_bytes in right
        except NotFoundError:
            found = False
        if not found:
            missing += (path,)
    return missing


def _gone(name: str, where: Uri) -> NotFoundError:
    return NotFoundError(
        f"{name} was deleted, overwritten or aborted",
        uri=where,
        hint="see list_checkpoints() of its parent for what is there",
    )


def _stock(name: str, where: Uri) -> Program[None]:
    try:
        yield StatOf(f"{name}/{METADATA}")
    except NotFoundError as error:
        raise NotFoundError(
            "no committed checkpoint there",
            uri=where,
            hint="see list_checkpoints() of its parent; an interrupted save leaves none",
        ) from error


def list_unlogged(views: Views, root: Uri) -> Program[list[Checkpoint]]:
    """Checkpoints beside the log: directories with a manifest, or `.metadata`, that none of
    ``views`` has heard of, in whatever state. Names that a live save of the log has are not looked
    at: on an object store each look is a request.
    """
    live = {seal.name for seal in list_live(views)}
    known = frozenset(save_id for view in views.values() for save_id in view.saves)
    # Between the two renames of a projection `.metadata` is there and the manifest is not.
    names = {
        save.seal.name
        for view in views.values()
        for save in view.saves.values()
        if save.seal is not None
    }
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return []
    found = []
    for name in _candidates(entries):
        if name in live:
            continue
        try:
            raw: bytes = yield Read(f"{name}/{MANIFEST}")
        except NotFoundError:
            checkpoint = None if name in names else (yield from _list_stock(name, root))
        else:
            checkpoint = yield from _from_manifest(raw, name, root, known)
        if checkpoint is not None:
            found.append(checkpoint)
    return found


def _candidates(entries: list[Entry]) -> Iterator[str]:
    return (e.name for e in entries if e.is_dir and e.name != CONTROL)


def _list_stock(name: str, root: Uri) -> Program[Checkpoint | None]:
    try:
        yield StatOf(f"{name}/{METADATA}")
    except NotFoundError:
        return None
    return Checkpoint(root / name, None, None, Kind.CHECKPOINT, Origin.STOCK)


def _from_manifest(
    raw: bytes, name: str, root: Uri, known: frozenset[str]
) -> Program[Checkpoint | None]:
    try:
        manifest = decode_manifest(raw, root / name)
    except ManifestError:
        return None  # listing names what can be loaded; load() says what is wrong with the rest
    if manifest.save_id in known:
        return None
    if not _enough(manifest, (yield from missing_files(manifest, name))):
        return None  # an interrupted copy
    return Checkpoint(
        root / name,
        manifest.step,
        manifest.save_id,
        manifest.artifact,
        Origin.MANIFEST,
        manifest.base,
        tuple(d.id for d in manifest.domains),
    )


def _enough(manifest: Manifest, missing: tuple[str, ...]) -> bool:
    """Whether nothing is missing, or only what lies on other nodes' disks: one domain's files and
    all that belong to every domain are here.
    """
    lacking = {f.domain for f in manifest.files if f.path in missing}
    whole = [d.id for d in manifest.domains if d.id not in lacking]
    return not lacking or (None not in lacking and bool(whole))


def logged(views: Views, root: Uri) -> list[Checkpoint]:
    """The live saves of the reached logs, oldest commit first."""
    return [
        Checkpoint(
            root / seal.name,
            seal.step,
            seal.save_id,
            seal.artifact,
            Origin.LOG,
            seal.base,
            seal.domains,
            any(v.save(seal.save_id).pinned for v in views.values()),
        )
        for seal in list_live(views)
    ]
