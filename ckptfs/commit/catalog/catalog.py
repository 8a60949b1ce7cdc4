"""The catalog of a run: which checkpoints exist. Read-only.

It appends, probes and repairs nothing, and needs only read permission. There are three sources, in this
order:

    1. the run log of the domains that can be reached   (a save is live when they say so)
    2. a manifest next to `.metadata`                   (copied here by `cp -r`: valid by itself)
    3. `.metadata` alone                                (plain torch.distributed.checkpoint)

This module lists the first; ``unlogged`` lists the other two.

One process reads a run without talking to any other rank:

    with looking_at(run_uri, options) as look:
        look.root  look.storage  look.views      {} if there never was a run

    with opened_log(run_uri, options) as storage:
        drive(read_view(), storage)              for a reader that continues after a damaged entry

No reader reads entries behind a gap. Before something is done that they could forbid:

    check_log(views)               whether readers see all of the log: no gap, and its domain is known
    look_at_log()                  the log of this domain, and why it cannot be read to its end
    refuse_partial_log(look)       ManifestError if they do not
    refuse_newer(look)             ManifestError if a newer version wrote what this one does not know

If nothing was found, these say whether the URI of a run is a checkpoint or a file, and whether the URI of a
checkpoint is a run:

    refuse_no_run(root, shape)     StateError where the root is a checkpoint or a file
    check_run_uri(control, root)   the same from all ranks, before a run is made there
    is_run(name)                   whether a run of ckptfs has this name
    checkpoint_error, run_error    the error, with the call that was probably meant
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.log.advisory_log import with_log
from ckptfs.commit.log.append import FoundHint, Gap, catch_up, check_complete
from ckptfs.commit.log.entries import Generation, Kind, PartRef, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord, Manifest, decode_manifest, digest_of
from ckptfs.commit.operations import (
    AtOnce,
    List,
    Program,
    Read,
    ReadAhead,
    Refresh,
    StatOf,
    drive,
    read_limited,
    side_by_side,
)
from ckptfs.commit.paths import CONTROL, DOMAIN, LOG, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.state import (
    Standing,
    Views,
    catalog,
    living,
    piece,
    seal_of,
    split_name,
    standing,
)
from ckptfs.control.control import Control
from ckptfs.errors import (
    AccessError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleError,
    StateError,
    StorageError,
)
from ckptfs.storage.base import Entry, Shape, Stat, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri, options_of

__all__ = [
    "CheckedViews",
    "Checkpoint",
    "LocatedCheckpoint",
    "Look",
    "Origin",
    "Sight",
    "check_log",
    "check_run_uri",
    "checkpoint_error",
    "find",
    "is_of_log",
    "is_run",
    "list_live",
    "live_of",
    "logged",
    "look_at_log",
    "looking_at",
    "missing_files",
    "opened_log",
    "part_of",
    "read_domain",
    "read_view",
    "refuse_newer",
    "refuse_no_run",
    "refuse_partial_log",
    "refuse_parts",
    "run_error",
    "sealed_metadata",
    "unlogged",
    "unprojected",
]


class Origin(StrEnum):
    """Why a checkpoint is believed.

    Attributes:
        LOG: The run's log says that it is committed.
        MANIFEST: A manifest is next to `.metadata`, as after ``cp -r``.
        STOCK: There is `.metadata` alone, as plain torch.distributed.checkpoint writes it.
    """

    LOG = "log"
    MANIFEST = "manifest"
    STOCK = "stock"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint of a run, as ``latest`` and ``list_checkpoints`` return it.

    Attributes:
        uri: Where it is; load it from there.
        step: Completed optimizer steps; None where no source names them.
        save_id: The id of the save; None for a plain DCP checkpoint.
        kind: A checkpoint, weights or a directory.
        origin: Why it is believed: the log, a manifest, or stock torch's `.metadata`.
        generation: The run's owner that saved it; None without a log.
        domains: Ids of the domains that hold it.
        pinned: Retention leaves it alone.
        parts: Of one that several groups wrote; each is loaded from ``uri / part``.
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
class LocatedCheckpoint:
    """Where the files of a checkpoint are now: file paths of the manifest are relative to ``home``.

    home: key of the step directory or of the attempt that has not been projected yet.
    manifest: None for a plain DCP checkpoint. metadata: key of the `.metadata` to read. metadata_bytes: its
    content, if it was read together with the manifest; not yet compared with its digest.
    """

    home: str
    metadata: str
    manifest: Manifest | None
    seal: Seal | None
    metadata_bytes: bytes | None = None

    @property
    def shared(self) -> frozenset[str]:
        """The files of the manifest that are below ``_data/`` of the run."""
        files = () if self.manifest is None else self.manifest.files
        return frozenset(f.path for f in files if f.is_shared)


def sealed_metadata(storage: Storage, found: LocatedCheckpoint) -> bytes:
    """Return the content of the checkpoint's ``.metadata``.

    If there is a manifest with its digest, the bytes are compared with that.

    IntegrityError: it was changed after the commit. IncompleteCheckpointError: it is missing although there
    is a manifest.
    """
    manifest, where = found.manifest, storage.uri(found.metadata)
    try:
        raw = found.metadata_bytes
        if raw is None:
            raw = read_limited(storage, found.metadata)
    except NotFoundError as error:
        if manifest is None:
            raise
        raise IncompleteCheckpointError(
            "the metadata is missing",
            uri=where,
            hint="ckptfs verify shows what else is damaged; restore the file, or load another "
            "checkpoint",
        ) from error
    if manifest is not None:
        path = f"{manifest.save_id}/{METADATA}"
        # There are several if domains have their own copies; a copied directory may come from any of them.
        sealed = {f.digest for f in manifest.files if f.path == path}
        if sealed and digest_of(raw) not in sealed:
            raise IntegrityError(
                "the metadata differs from what was saved",
                uri=where,
                hint="the file was changed after the commit; load another checkpoint",
            )
    return raw


def read_domain() -> Program[str | None]:
    """Return the id of the domain that this process sees, or None if there never was a run here."""
    yield Refresh(CONTROL)
    return (yield from _domain())


def _domain() -> Program[str | None]:
    try:
        data: bytes = yield Read(DOMAIN)
    except NotFoundError:
        return None
    return data.decode(errors="replace").strip() or None


def read_view(hint: FoundHint | None = None) -> Program[tuple[str, LogState] | None]:
    """Return the domain id and the folded log that this process sees, or None if there is no run.

    hint: As for ``catch_up``.
    """
    # Without a hint ``catch_up`` refreshes this directory before either of the two reads in it.
    own = _domain() if hint is None else read_domain()
    domain, state = yield from side_by_side(own, catch_up(hint=hint))
    return None if domain is None else (domain, state)


def list_live(views: Views) -> list[Seal]:
    """Seals of the live saves, oldest first."""
    return [live.seal for live in catalog(views)]


def live_of(name: str, views: Views, where: Uri) -> Seal | None:
    """Return the live save of a name, or None if the logs have none.

    Raises:
        IncompleteCheckpointError: It is in doubt because a domain is out of reach. The message
            names the domain.
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
                f"{name} is in doubt: its domains {', '.join(lost)} cannot be reached",
                uri=where,
                hint="start on the nodes that hold them, or load an older checkpoint by name",
            )
    for promised in (save.part for view in views.values() for save in view.saves.living.values()):
        if promised is None or promised.name != name:
            continue
        if standing(promised.save_id, views) is Standing.IN_DOUBT:
            raise IncompleteCheckpointError(
                f"{name} is in doubt: only its home, domain {promised.home} on "
                f"{promised.home_host}, knows whether it was committed, and cannot be reached",
                uri=where,
                hint="call decision.publish() on these nodes, start where the home is reached, or "
                "load an older checkpoint by name",
            )
    return None


def part_of(seal: Seal, part: str | None, where: Uri) -> tuple[Seal, str]:
    """Return the save to search for, and a text that says where it is if it is a part.

    It is a part of ``seal``, or ``seal`` itself if it has no parts.

    Raises:
        StateError: No part is given, and ``seal`` has parts: it cannot be loaded itself.
        NotFoundError: It has no such part.
    """
    names = ", ".join(ref.name for ref in seal.parts)
    if part is None:
        refuse_parts(seal.parts, seal.name, where)
        return seal, ""
    ref = next((ref for ref in seal.parts if ref.name == part), None)
    if ref is None:
        raise NotFoundError(
            f"{seal.name} has no part {part}",
            uri=where,
            hint=f"its parts are {names}" if names else "it was saved without parts",
        )
    pairs = zip(ref.domains, ref.hosts, strict=False)
    held = "; ".join(f"domain {domain} on {host}" for domain, host in pairs)
    return piece(seal, ref), f"part {part} of {seal.name} is in {held}" if held else ""


def refuse_parts(parts: Sequence[PartRef], name: str, where: Uri) -> None:
    """Raise StateError if a save that was requested as one consists of parts."""
    if parts:
        raise StateError(
            f"{name} consists of parts: {', '.join(ref.name for ref in parts)}",
            uri=where,
            hint=f"load one of them: {name}/{parts[0].name}",
        )


def _named(seal: Seal | None, name: str) -> bool:
    return seal is not None and seal.name == split_name(name)[0]


def find(
    seal: Seal, shape: Shape, where: Uri, *, with_metadata: bool = False
) -> Program[LocatedCheckpoint]:
    """Find the files of a sealed save, before or after its projection.

    It accepts only the manifest with the sealed digest.

    with_metadata: The caller reads the ``.metadata`` next. On an object store a small one is read
    at the same time as the manifest.

    Raises:
        NotFoundError: It is in neither place. The caller folds again: it was superseded or deleted
            in between, otherwise it is damaged.
    """
    keys = AttemptKeys(shape, seal.name, seal.save_id)
    for data in keys.homes():
        # In the order in which the save moves: the attempt first, then the place that it moves to.
        yield from _afresh(data.rsplit("/", 1)[0] if shape is Shape.FILESYSTEM else "")
        ahead = with_metadata and shape is Shape.OBJECT and seal.artifact is Kind.CHECKPOINT
        try:
            raw, metadata = yield from _manifest_and_metadata(data, ahead=ahead)
        except (NotFoundError, StaleError):
            continue
        if digest_of(raw) != seal.digest:
            raise IntegrityError(
                f"the manifest of {seal.name} differs from the one that was sealed",
                uri=f"{where}/{seal.save_id}/{MANIFEST}",
                hint="the file was changed after the commit; restore it or load another checkpoint",
            )
        manifest = decode_manifest(raw, f"{where}/{seal.save_id}/{MANIFEST}")
        return LocatedCheckpoint(
            data.rsplit("/", 1)[0], f"{data}/{METADATA}", manifest, seal, metadata
        )
    raise NotFoundError(
        f"save {seal.save_id} of {seal.name} is neither in progress nor projected: it was "
        "removed by hand, or this node cannot see it; if it was removed, run ckptfs rm "
        f"{where}",
        uri=where,
        hint="after that, latest is the checkpoint before it",
    )


def _manifest_and_metadata(data: str, *, ahead: bool) -> Program[tuple[bytes, bytes | None]]:
    """Read the manifest and, with ``ahead``, the ``.metadata``; None if that is large or cannot be read."""
    if not ahead:
        raw: bytes = yield Read(f"{data}/{MANIFEST}")
        return raw, None
    manifest, metadata = yield AtOnce(
        (Read(f"{data}/{MANIFEST}"), ReadAhead((f"{data}/{METADATA}",)))
    )
    if isinstance(manifest, StorageError):
        raise manifest
    found = () if isinstance(metadata, StorageError) else metadata
    return manifest, found[0] if found else None


def _afresh(directory: str) -> Program[None]:
    """Drop a network client's cache of a directory and of its name.

    A client that knew an attempt still finds its files under the old name after the projection,
    until they vanish during a load. A client that knew a deleted step still finds it under its
    name.
    """
    if directory:
        yield Refresh(directory.rpartition("/")[0])
    yield Refresh(directory)


def unlogged(name: str, views: Views, where: Uri) -> Program[LocatedCheckpoint]:
    """Find a checkpoint that no log lists: copied here, or written by stock torch.

    A save that the log knows as deleted, overwritten or aborted is not one of them, even if files
    of it are left; a copy of it under another name is one.
    """
    yield from _afresh(name)
    try:
        raw: bytes = yield Read(f"{name}/{MANIFEST}")
    except NotFoundError:
        if any(view.saves.knows_name(name) for view in views.values()):
            raise _gone(name, where) from None
        yield from _stock(name, where)
        return LocatedCheckpoint(name, f"{name}/{METADATA}", None, None)
    manifest = decode_manifest(raw, f"{where}/{MANIFEST}")
    if is_of_log(name, manifest, views):
        raise _gone(name, where)
    # The directory may have been renamed when it was copied, so its name does not matter.
    return LocatedCheckpoint(name, f"{name}/{manifest.save_id}/{METADATA}", manifest, None)


def is_of_log(name: str, manifest: Manifest, views: Views) -> bool:
    """Whether the files under ``name`` are a save of the log, and not a copy of one."""
    known = any(manifest.save_id in view.saves for view in views.values())
    return known and manifest.name == name


def missing_files(manifest: Manifest, home: str) -> Program[tuple[str, ...]]:
    """Return the listed files that do not exist below ``home`` with their size.

    A copy may have been interrupted. This is only checked for checkpoints that no log lists.
    """
    listed: dict[str, list[FileRecord]] = {}
    for record in manifest.files:
        # Each domain has its own `.metadata` under one path. In a gathered copy any of them is right.
        listed.setdefault(record.path, []).append(record)
    missing: tuple[str, ...] = ()
    for folder in {file_key(records[0], home).rpartition("/")[0] for records in listed.values()}:
        yield Refresh(folder)  # a copy may have continued since this node listed it
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
        hint="call list_checkpoints() on its parent to see what exists",
    )


def _stock(name: str, where: Uri) -> Program[None]:
    try:
        yield StatOf(f"{name}/{METADATA}")
    except NotFoundError as error:
        raise NotFoundError(
            "no committed checkpoint there",
            uri=where,
            hint="call list_checkpoints() on its parent to see what exists; an interrupted save "
            "leaves no checkpoint",
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


@dataclass(frozen=True, slots=True)
class Look:
    """What one process sees. views: the log of the domain that it reaches."""

    root: Uri
    storage: Storage
    views: Mapping[str, LogState]


@contextlib.contextmanager
def looking_at(run_uri: Any, storage_options: Mapping[str, Any] | None) -> Iterator[Look]:
    """Yield the run as it is now. On leaving, its storage is closed. Errors are the storage's."""
    root = Uri.parse(run_uri)
    plain = open_storage(root, {**options_of(run_uri), **(storage_options or {})})
    try:
        storage: Storage = plain
        try:
            view = drive(read_view(), plain)
            if view is None or not view[1].next:
                # No entry of an ordinary log: it is empty, or of the kind without exclusive creates.
                storage = with_log(plain, plain.capabilities, write=False)
                view = view if storage is plain else drive(read_view(), storage)
        except ManifestError as error:
            error.uri = str(storage.uri(error.uri or ""))  # an entry is read by its key
            raise
        yield Look(root, storage, {} if view is None else dict([view]))
    finally:
        plain.close()


@contextlib.contextmanager
def opened_log(run_uri: Any, storage_options: Mapping[str, Any] | None) -> Iterator[Storage]:
    """Yield the storage of a run, with its log as an ordinary one. On leaving, it is closed."""
    plain = open_storage(Uri.parse(run_uri), {**options_of(run_uri), **(storage_options or {})})
    try:
        yield with_log(plain, plain.capabilities, write=False)
    finally:
        plain.close()


@dataclass(frozen=True, slots=True)
class CheckedViews:
    """The logs that one process reaches, and what of them no reader sees.

    views: The folds, continued by what was appended since. gap: An entry that is missing; no reader
    continues after it. lost_domain: There are entries, but no id of the domain that they belong to.
    """

    views: Views
    gap: Gap | None = None
    lost_domain: bool = False


def check_log(views: Views) -> Program[CheckedViews]:
    """Check that readers see all of the log. It takes one listing, and reads only.

    What they do not see may be a newer checkpoint, a pin or a delete. An append behind a gap would
    permanently take the number of the missing entry.
    """
    if not views:
        return CheckedViews(views, lost_domain=(yield from _has_entries()))
    found: dict[str, LogState] = {}
    gap: Gap | None = None
    for domain, state in views.items():
        checked = yield from check_complete(state)
        found[domain], gap = checked.state, gap or checked.gap
    return CheckedViews(found, gap)


def _has_entries() -> Program[bool]:
    yield Refresh(LOG)
    try:
        entries: list[Entry] = yield List(LOG)
    except NotFoundError:
        return False
    # The names of advisory entries continue after the number.
    return any(entry.name.partition(".")[0].isdecimal() for entry in entries)


@dataclass(frozen=True, slots=True)
class Sight:
    """What one process sees of a run.

    Attributes:
        domain: The id of its domain; None: no run was ever written here.
        unread: Why the log cannot be read to its end; None: it was.
        unlogged: What another program saved after the newest commit.
    """

    domain: str | None = None
    state: LogState | None = None
    unread: str | None = None
    unlogged: tuple[str, ...] = ()


def look_at_log() -> Program[Sight]:
    """Fold this domain's log, and check that readers see all of it."""
    view = yield from read_view()
    checked = yield from check_log({} if view is None else dict([view]))
    why = f"{LOG} has entries, but {CONTROL}/domain is missing" if checked.lost_domain else None
    if checked.gap is not None:
        lost, present = checked.gap.missing, checked.gap.there
        why = f"entry {lost} is missing or not visible here, but entry {present} exists"
    if view is None:
        return Sight(unread=why)
    domain, _ = view
    return Sight(domain, checked.views[domain], why)


def refuse_partial_log(look: Look) -> Program[None]:
    """Check that readers see all of the log in ``look``, by ``check_log``.

    Raises:
        ManifestError: An entry is missing and later ones are there, or the id of the domain is gone.
    """
    checked = yield from check_log(look.views)
    if checked.gap is not None:
        raise ManifestError(
            f"the run log has a gap: entry {checked.gap.missing} is missing, but entry "
            f"{checked.gap.there} exists",
            uri=look.root / LOG,
            hint="ckptfs never removes an entry: restore it; until then the entries after it are "
            "ignored",
        )
    if checked.lost_domain:
        raise ManifestError(
            f"{DOMAIN} is missing next to a run log, so its content is unknown",
            uri=look.root,
            hint="its id is in the seals (ckptfs log): write it back, or copy the checkpoints "
            "that you need into another run",
        )


def refuse_newer(look: Look) -> None:
    """Check that this version understands the log in ``look``.

    What a newer version wrote may be a hold or a reference. So nothing is deleted by such a log.

    Raises:
        ManifestError: A newer version wrote something that this one does not know.
    """
    if any(state.foreign for state in look.views.values()):
        raise ManifestError(
            "a newer version of ckptfs wrote to this run: what it meant is not known here",
            uri=look.root,
            hint="upgrade ckptfs",
        )


def unprojected(
    checkpoint: Uri, path: str, storage_options: Mapping[str, Any] | None
) -> Uri | None:
    """Local. Find a file of a committed checkpoint if the committer died before the projection.

    path: as in the step directory: ``.metadata``, ``ckptfs.json`` or a data path of the manifest. None:
    the log knows no such checkpoint.
    """
    with looking_at(checkpoint.parent, storage_options) as look:
        seal = live_of(checkpoint.name, look.views, checkpoint)
        if seal is None or seal.parts:
            return None
        try:
            found = drive(find(seal, look.storage.capabilities.shape, checkpoint), look.storage)
        except NotFoundError:
            return None
    home = look.root / found.home
    return home / (f"{seal.save_id}/{path}" if path in (METADATA, MANIFEST) else path)


def refuse_no_run(root: Uri, shape: Shape) -> Program[None]:
    """Raise StateError if the root of the storage is a checkpoint or a file.

    It would look like an empty run, and training would begin at step 0.
    """
    yield Refresh("")
    for inside in (MANIFEST, METADATA):
        if (yield from _stat(inside)) is not None:
            raise checkpoint_error(root)
    found = yield from _stat("")
    # Some tools make an object of no bytes for a directory.
    if found is not None and not found.is_dir and (found.size_bytes or shape is Shape.FILESYSTEM):
        raise StateError(
            "a file, not a run",
            uri=root,
            hint="a run is a directory, or a prefix of a bucket: give that one, or a new one",
        )


def check_run_uri(
    control: Control,
    root: Uri,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> None:
    """Raise StateError if a run would be made in a checkpoint. Collective.

    Call this before anything is written there. storage: The storage at the root, if the caller has
    one.
    """

    def local() -> StateError | None:
        if control.rank != 0:
            return None
        here = storage or open_storage(root, storage_options)
        try:
            drive(_refuse_checkpoint(root), here)
        except StateError as error:
            return error  # a value, so that it is raised as its type
        finally:
            if here is not storage:
                here.close()
        return None

    def decide(answers: Sequence[StateError | None]) -> None:
        if answers[0] is not None:
            raise answers[0]

    control.step("a run or a checkpoint", local, decide)


def _refuse_checkpoint(root: Uri) -> Program[None]:
    if (yield from read_domain()) is None:
        for inside in (MANIFEST, METADATA):
            if (yield from _stat(inside)) is not None:
                raise checkpoint_error(root)


def is_run(name: str) -> Program[bool]:
    """Whether ckptfs made a run with this name, empty or not."""
    return (yield from _stat(f"{name}/{DOMAIN}")) is not None


def checkpoint_error(root: Uri) -> StateError:
    """Return the error of a call that takes a run and was given a checkpoint."""
    return StateError(
        "a checkpoint, not a run",
        uri=root,
        hint=f"its run is {root.parent}; ckptfs.load(state, uri) loads this checkpoint",
    )


def run_error(uri: Uri, hint: str = "") -> StateError:
    """Return the error of a call that takes a checkpoint and was given a run."""
    return StateError(
        "a run, not a checkpoint",
        uri=uri,
        hint=hint
        or "ckptfs.latest(uri).uri is its newest checkpoint; CheckpointManager(uri).restore(state) "
        "loads that one",
    )


def _stat(key: str) -> Program[Stat | None]:
    try:
        stat: Stat = yield StatOf(key)
    except (NotFoundError, AccessError):
        return None  # other keys than the run's own need not be readable
    return stat
