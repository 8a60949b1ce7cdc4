"""What is there: the catalog of a run, read-only.

Appends nothing, probes nothing, repairs nothing, needs read permission only. Three sources, in this
order:

    1. the run log of the domains that can be reached   (a save is live when they say so)
    2. a manifest beside `.metadata`                    (copied here by `cp -r`: valid by itself)
    3. `.metadata` alone                                (plain torch.distributed.checkpoint)

What the logs tell is here; listing the other two is ``beside``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.commit.entries import Generation, Kind, PartRef, Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import CONTROL, DOMAIN, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.log import catch_up
from ckptfs.commit.manifest import FileRecord, Manifest, decode_manifest, digest_of
from ckptfs.commit.ops import Program, Read, Refresh, StatOf
from ckptfs.commit.pieces import piece, split_name
from ckptfs.commit.protocol import Standing, Views, catalog, living, seal_of, standing
from ckptfs.commit.shared_data import file_key
from ckptfs.errors import (
    IncompleteCheckpointError,
    IntegrityError,
    NotFoundError,
    StaleError,
    StateError,
)
from ckptfs.storage.base import Shape, Stat
from ckptfs.uri import Uri

__all__ = [
    "Checkpoint",
    "Found",
    "Origin",
    "find",
    "is_of_log",
    "list_live",
    "live_of",
    "logged",
    "missing_files",
    "part_of",
    "read_domain",
    "read_view",
    "refuse_parts",
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
    domains: ids of the domains that hold it. generation: of the run's owner that saved it. parts: of
    one that several groups wrote; each is loaded from ``uri / part``.
    """

    uri: Uri
    step: int | None
    save_id: str | None
    kind: Kind
    origin: Origin
    generation: Generation | None = None
    domains: tuple[str, ...] = ()
    pinned: bool = False
    parts: tuple[str, ...] = ()


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
    ids = [s for s in living(views) if _named(seal_of(s, views), name)]
    for save_id in ids:
        doubtful = seal_of(save_id, views)
        if doubtful is not None and standing(save_id, views) is Standing.IN_DOUBT:
            lost = sorted(set(doubtful.domains) - set(views))
            raise IncompleteCheckpointError(
                f"{name} is in doubt: its domains {', '.join(lost)} are out of reach",
                uri=where,
                hint="start on the nodes that hold them, or load an older checkpoint by name",
            )
    for promised in (save.part for view in views.values() for save in view.saves.living.values()):
        if promised is None or promised.name != name:
            continue
        if standing(promised.save_id, views) is Standing.IN_DOUBT:
            raise IncompleteCheckpointError(
                f"{name} is in doubt: whether it was committed is known in its home, domain "
                f"{promised.home} on {promised.home_host}, which is out of reach",
                uri=where,
                hint="call decision.publish() on these nodes, start where the home is reached, or "
                "load an older checkpoint by name",
            )
    return None


def part_of(whole: Seal, part: str | None, where: Uri) -> tuple[Seal, str]:
    """The save to look for: a part of it, or the whole that has none; and who holds the part.

    StateError: a whole of parts is nothing to load. NotFoundError: it has no such part.
    """
    names = ", ".join(ref.name for ref in whole.parts)
    if part is None:
        refuse_parts(whole.parts, whole.name, where)
        return whole, ""
    ref = next((ref for ref in whole.parts if ref.name == part), None)
    if ref is None:
        raise NotFoundError(
            f"{whole.name} has no part {part}",
            uri=where,
            hint=f"its parts are {names}" if names else "it was saved whole",
        )
    pairs = zip(ref.domains, ref.hosts, strict=False)
    held = "; ".join(f"domain {domain} on {host}" for domain, host in pairs)
    return piece(whole, ref), f"part {part} of {whole.name} lies in {held}" if held else ""


def refuse_parts(parts: Sequence[PartRef], name: str, where: Uri) -> None:
    """StateError where what was asked for is a whole of parts."""
    if parts:
        raise StateError(
            f"{name} consists of parts: {', '.join(ref.name for ref in parts)}",
            uri=where,
            hint=f"load one of them: {name}/{parts[0].name}",
        )


def _named(seal: Seal | None, name: str) -> bool:
    return seal is not None and seal.name == split_name(name)[0]


def find(seal: Seal, shape: Shape, where: Uri) -> Program[Found]:
    """Find a sealed save's files, wherever its projection has got to.

    Believes only a manifest whose digest is the sealed one. NotFoundError: in neither place; the
    caller folds again (it was superseded or deleted meanwhile, else it is damaged).
    """
    keys = AttemptKeys(shape, seal.name, seal.save_id)
    for data in keys.homes():
        # The direction of movement: the attempt first, then where it moves to.
        yield from _afresh(data.rsplit("/", 1)[0] if shape is Shape.FILESYSTEM else "")
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
        f"save {seal.save_id} of {seal.name} is neither on its way nor projected: it was removed by "
        f"hand, which ckptfs rm {where} records, or this node does not see it",
        uri=where,
        hint="once that is recorded, latest is the one before",
    )


def _afresh(directory: str) -> Program[None]:
    """Drop what a network client cached of a directory, and of its name.

    A client that knew an attempt still finds its files under the old name after the projection, until
    that vanishes in the middle of a load; one that knew a deleted step finds that one under its name.
    """
    if directory:
        yield Refresh(directory.rpartition("/")[0])
    yield Refresh(directory)


def unlogged(name: str, views: Views, where: Uri) -> Program[Found]:
    """A checkpoint that no log knows: copied here, or written by stock torch.

    What the log knows as deleted, overwritten or aborted is not believed, whatever still lies here; a
    copy of it under another name is.
    """
    yield from _afresh(name)
    try:
        raw: bytes = yield Read(f"{name}/{MANIFEST}")
    except NotFoundError:
        if any(view.saves.knows_name(name) for view in views.values()):
            raise _gone(name, where) from None
        yield from _stock(name, where)
        return Found(name, f"{name}/{METADATA}", None, None)
    manifest = decode_manifest(raw, f"{where}/{MANIFEST}")
    if is_of_log(name, manifest, views):
        raise _gone(name, where)
    # The directory may have been renamed by whoever copied it: its own name does not matter.
    return Found(name, f"{name}/{manifest.save_id}/{METADATA}", manifest, None)


def is_of_log(name: str, manifest: Manifest, views: Views) -> bool:
    """Whether what lies under ``name`` is a save of the log, and no copy that somebody made of one."""
    known = any(manifest.save_id in view.saves for view in views.values())
    return known and manifest.name == name


def missing_files(manifest: Manifest, home: str) -> Program[tuple[str, ...]]:
    """Listed files that are not below ``home`` with their size: a copy may have been interrupted.

    Asked only where no log vouches for the checkpoint.
    """
    listed: dict[str, list[FileRecord]] = {}
    for record in manifest.files:
        # Domains have a `.metadata` each under one path; gathered together any of them is right.
        listed.setdefault(record.path, []).append(record)
    missing: tuple[str, ...] = ()
    for folder in {file_key(records[0], home).rpartition("/")[0] for records in listed.values()}:
        yield Refresh(folder)  # a copy that went on since this node looked before
    for path, records in listed.items():
        try:
            found: Stat = yield StatOf(file_key(records[0], home))
        except NotFoundError:
            missing += (path,)
            continue
        if found.size_bytes not in {record.size_bytes for record in records}:
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
            seal.everywhere,
            any(v.save(seal.save_id).pinned for v in views.values()),
            tuple(ref.name for ref in seal.parts),
        )
        for seal in list_live(views)
    ]
