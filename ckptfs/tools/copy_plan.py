"""What ``cp`` is to copy: looked up on the coordinator, decided by the catalogs of both places.

    what_is      a checkpoint, or a run of several                     by the source alone
    plan_one     one checkpoint and the name that it gets
    plan_run     what of a run the target lacks, oldest first

    source's log     10   20   30   40
    target's log     10   20  (30 deleted)       copied: 40; 30 is copied if it is asked for by its step

Two saves are one if they have the same origin: a copy's id begins with that of its original. A name
is taken by what the target's log tells, and by what lies there without a log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from ckptfs.commit.beside import list_unlogged, newest
from ckptfs.commit.catalog import find, live_of, part_of, unlogged
from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.looking import looking_at
from ckptfs.commit.opening import Place
from ckptfs.commit.ops import drive
from ckptfs.commit.pieces import piece, split_name
from ckptfs.commit.protocol import Views, catalog, history, latest, name_taken
from ckptfs.commit.resuming import origin_of
from ckptfs.commit.unlogged import check_unlogged
from ckptfs.dcp.copy_source import Original, stock_manifest
from ckptfs.errors import (
    AmbiguousCheckpointError,
    CkptfsError,
    CommitConflictError,
    NotFoundError,
)
from ckptfs.storage.base import Storage
from ckptfs.tools.copy_place import loose_at, told_if_held
from ckptfs.uri import Uri

__all__ = [
    "Item",
    "Lookout",
    "Plan",
    "Status",
    "Subject",
    "Wanted",
    "plan_one",
    "plan_run",
    "what_is",
]

_LOOKS = 16  # manifests that are read at once


class Subject(Enum):
    """What a URI names."""

    CHECKPOINT = "checkpoint"
    RUN = "run"


class Status(StrEnum):
    """What is to be done about one checkpoint, and what was."""

    TO_COPY = "to copy"
    TO_REPLACE = "to replace"  # another save has the name
    COPIED = "copied"
    THERE = "already there"
    DELETED = "deleted there"  # the target had it; it is not brought back unasked
    GONE = "gone meanwhile"  # the source deleted it after it was planned

    @property
    def is_due(self) -> bool:
        """Whether there is something to copy."""
        return self in (Status.TO_COPY, Status.TO_REPLACE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which checkpoints of a run: those of one step, the latest, or all that are missing."""

    step: int | None = None
    latest: bool = False

    @property
    def is_told(self) -> bool:
        """Whether somebody asked for certain ones."""
        return self.latest or self.step is not None


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint. name: at the target. origin: the id of the save whose bytes they are.
    size_bytes: None where the coordinator does not see it. note: what to know before it is copied.
    """

    original: Original
    origin: str
    name: str
    kind: Kind
    step: int | None
    status: Status
    size_bytes: int | None = None
    failure: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of them, in the order in which they are copied."""

    items: tuple[Item, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lookout:
    """What the coordinator sees of both places. overwrite: replace what another save has. node: of
    this process, as in ``Owner``.
    """

    storage: Storage
    root: Uri
    source: Views
    target: Views
    there: Storage
    overwrite: bool
    node: str


def what_is(at: Uri, place: Place) -> Subject:
    """Local, read-only. NotFoundError: there is neither."""
    options = place.storage_options
    if at.name:
        with looking_at(at.parent, options) as look:
            if any(view.saves.knows_name(at.name) for view in look.views.values()):
                return Subject.CHECKPOINT
            with contextlib.suppress(NotFoundError):
                drive(unlogged(at.name, look.views, look.root), look.storage)
                return Subject.CHECKPOINT
        if _is_part(at, place):
            return Subject.CHECKPOINT
    with looking_at(at, options) as look:
        if look.views:
            return Subject.RUN
        if drive(list_unlogged(look.views, look.root), look.storage):
            return Subject.RUN
    raise NotFoundError(
        "neither a checkpoint nor a run is there",
        uri=at,
        hint="see ckptfs ls of its parent; an interrupted save leaves none",
    )


def _is_part(at: Uri, place: Place) -> bool:
    step = at.parent
    if not step.name:
        return False
    with (
        contextlib.suppress(CkptfsError),  # what lies above need not be permitted to be read
        looking_at(step.parent, place.storage_options) as look,
    ):
        whole = live_of(step.name, look.views, step)
        return whole is not None and any(ref.name == at.name for ref in whole.parts)
    return False


# -- one --------------------------------------------------------------------------------------------


def plan_one(here: Lookout, name: str, target_name: str | None) -> Plan:
    """The checkpoint ``name`` of the source. CommitConflictError: another save has its name there."""
    where = here.storage.uri(name)
    step, part = split_name(name)
    whole = live_of(step, here.source, where)
    seal = whole
    if whole is not None and part is not None:
        seal = part_of(whole, part, where)[0]
    item = _described(here, Original(name, seal), target_name or name.rpartition("/")[2])
    placed = (_placed(here, item, told=True),)
    return Plan(placed, _warnings(here, placed))


# -- a run ------------------------------------------------------------------------------------------


def plan_run(here: Lookout, wanted: Wanted) -> Plan:
    """What of the source the target lacks. NotFoundError: nothing there is what was wanted.

    CommitConflictError: another save has one of the names there; nothing is copied then.
    """
    originals = _wanted(here, wanted)

    def look(one: Original) -> Item | None:
        try:
            item = _described(here, one, one.name)
        except NotFoundError:
            if wanted.step is not None:
                raise
            return None  # somebody removed it after it was listed
        return _placed(here, item, told=wanted.is_told)

    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptfs-look") as pool:
        found = list(pool.map(look, originals))
    placed = tuple(item for item in found if item is not None)
    return Plan(placed, _warnings(here, placed))


def _wanted(here: Lookout, wanted: Wanted) -> list[Original]:
    sealed = [Original(live.seal.name, live.seal) for live in catalog(here.source)]
    if wanted.latest:
        _refuse_unlogged(here)
        live = latest(here.source, Kind.CHECKPOINT) or latest(here.source)
        if live is not None:
            return [Original(live.seal.name, live.seal)]
        loose = drive(newest(here.source, here.root, Kind.CHECKPOINT), here.storage)
        found = [] if loose is None else [Original(loose.uri.name)]
    else:
        beside = drive(list_unlogged(here.source, here.root), here.storage)
        # What no log orders comes first: the newest commit there is the log's newest.
        found = [*(Original(c.uri.name) for c in beside), *sealed]
    if wanted.step is not None:
        steps = {c.uri.name: c.step for c in beside}
        found = [
            one
            for one in found
            if (steps.get(one.name) if one.seal is None else one.seal.step) == wanted.step
        ]
    if not found:
        what = "no checkpoint" if wanted.step is None else f"no checkpoint of step {wanted.step}"
        raise NotFoundError(f"{what} is there", uri=here.root, hint="see ckptfs ls of the run")
    return found


def _refuse_unlogged(here: Lookout) -> None:
    """AmbiguousCheckpointError where another program saved after the newest commit."""
    shape = here.storage.capabilities.shape
    try:
        drive(check_unlogged(here.source, here.root, shape), here.storage)
    except AmbiguousCheckpointError as error:
        error.hint = "copy the one that you mean by its name"
        raise


def _warnings(here: Lookout, items: Sequence[Item]) -> tuple[str, ...]:
    notes = tuple(item.note for item in items if item.note)
    return (*notes, *_going_back(here, items), *_held(here, items))


def _held(here: Lookout, items: Sequence[Item]) -> tuple[str, ...]:
    training = [i for i in items if i.kind is Kind.CHECKPOINT and not i.failure]
    last = next((item for item in reversed(training) if item.status is Status.TO_COPY), None)
    return () if last is None else told_if_held(here.target, here.node, last.name)


def _going_back(here: Lookout, items: Sequence[Item]) -> tuple[str, ...]:
    """A warning where the target's latest will be older than one that it has."""
    order = [origin_of(live.seal.save_id) for live in history(here.source)]
    training = [i for i in items if i.kind is Kind.CHECKPOINT and not i.failure]
    last = next((item for item in reversed(training) if item.status.is_due), None)
    there = latest(here.target, Kind.CHECKPOINT)
    if last is None or there is None:
        return ()
    newest_there = origin_of(there.seal.save_id)
    known = last.origin in order and newest_there in order
    if not known or order.index(last.origin) >= order.index(newest_there):
        return ()
    warning = (
        f"the latest there will be {last.name}, which is older than {there.seal.name}: the order of "
        "commits is the order of copying"
    )
    return (warning,)


# -- both -------------------------------------------------------------------------------------------


def _described(here: Lookout, original: Original, name: str) -> Item:
    """What it is, by its seal and its manifest. IntegrityError, ManifestError: it is damaged."""
    seal = original.seal
    if seal is None:
        found = drive(unlogged(original.name, here.source, here.root), here.storage)
        manifest = found.manifest or stock_manifest(here.storage, original.name)
        origin, size = origin_of(manifest.save_id), manifest.size_bytes
        return Item(original, origin, name, manifest.artifact, manifest.step, Status.TO_COPY, size)
    pieces = [piece(seal, ref) for ref in seal.parts] or [seal]
    sizes = [_size_of(here, one) for one in pieces]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    return Item(
        original,
        origin_of(seal.save_id),
        name,
        seal.artifact,
        seal.step,
        Status.TO_COPY,
        total,
        seal.failure,
    )


def _size_of(here: Lookout, seal: Seal) -> int | None:
    """By its manifest; None where this process does not see it: the ranks that do will tell."""
    try:
        manifest = drive(
            find(seal, here.storage.capabilities.shape, here.root), here.storage
        ).manifest
    except NotFoundError:
        return None
    return (
        None if manifest is None else sum({f.path: f.size_bytes for f in manifest.files}.values())
    )


def _placed(here: Lookout, item: Item, *, told: bool) -> Item:
    """What is to be done about it, by who has the name there."""
    taken = name_taken(item.name, here.target)
    if taken is not None:
        if origin_of(taken.save_id) == item.origin:
            return replace(item, status=Status.THERE)
        _may_replace(here, item, f"is another save ({taken.save_id})")
        return replace(item, status=Status.TO_REPLACE)
    loose = loose_at(item.name, here.target, here.there)
    if loose is not None and loose.origin == item.origin:
        # An interrupted copy by hand is made whole.
        return item if loose.why else replace(item, status=Status.THERE)
    if loose is not None:
        _may_replace(here, item, "is another checkpoint, which no log knows")
        note = (
            f"the {item.name} that is replaced is known to no log: data files of it stay beside "
            "those of the copy"
        )
        return replace(item, status=Status.TO_REPLACE, note=note)
    if not told and _was_there(here, item):
        return replace(item, status=Status.DELETED)
    return item


def _may_replace(here: Lookout, item: Item, what: str) -> None:
    plain = item.kind is Kind.DIRECTORY
    if here.overwrite and not plain:
        return
    hint = "copy it under another name, or replace that one with --overwrite"
    if plain:
        hint = "copy it under another name: a directory of files is never replaced"
    raise CommitConflictError(
        f"{item.name} is there already, and {what}", uri=here.there.root / item.name, hint=hint
    )


def _was_there(here: Lookout, item: Item) -> bool:
    return any(
        origin_of(save.save_id) == item.origin and not save.aborted
        for view in here.target.values()
        for save in view.saves.of_name(item.name)
    )
