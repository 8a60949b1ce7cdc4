"""What ``cp`` copies: looked up on the coordinator, decided by the catalogs of both places.

    what_is          a checkpoint, or a run of several                     by the source only
    refuse_nested    not inside a checkpoint or a run's own directories    by the target only
    plan_one         one checkpoint and the name that it gets
    plan_run         what the target lacks of a run, oldest first

    source's log     10   20   30   40
    target's log     10   20  (30 deleted)       copied: 40; 30 is copied if it is requested by its step

Two saves are the same if they have the same origin: a copy's id begins with that of its original. A
name is taken if the target's log lists it, or if a checkpoint without a log has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from ckptfs.commit.catalog.catalog import find, live_of, looking_at, part_of, unlogged
from ckptfs.commit.catalog.unlogged import (
    UnloggedCheckpoint,
    check_unlogged,
    list_unlogged,
    look_at_directory,
    newest,
)
from ckptfs.commit.log.entries import GENESIS, Kind, Seal
from ckptfs.commit.operations import Program, Refresh, drive
from ckptfs.commit.ownership.lease import alive_here, describe
from ckptfs.commit.paths import CONTROL, DOMAIN, SHARED
from ckptfs.commit.save.shared_attempt import origin_of
from ckptfs.commit.session import Place
from ckptfs.commit.state import Views, catalog, history, latest, piece, save_named, split_name
from ckptfs.errors import (
    AccessError,
    AmbiguousCheckpointError,
    CkptfsError,
    CommitConflictError,
    ManifestError,
    NotFoundError,
    UnsupportedError,
    UriError,
)
from ckptfs.replication.checkpoint_copy import Original, stock_manifest
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = [
    "Copied",
    "CopyReport",
    "Item",
    "Lookout",
    "Loose",
    "Plan",
    "Status",
    "Subject",
    "Wanted",
    "is_run",
    "loose_at",
    "plan_one",
    "plan_run",
    "refuse_nested",
    "warning_if_held",
    "what_is",
]


# -- where it will be: local, read-only ------------------------------------------------------------

# Reading above a run may not be permitted, and there may be nothing to read.
_ABOVE = (AccessError, NotFoundError, ManifestError, UnsupportedError, UriError)


def is_run(at: Uri, place: Place) -> bool:
    """Whether a run of ckptfs is there. Local, read-only."""
    with looking_at(at, place.storage_options) as look, contextlib.suppress(NotFoundError):
        return bool(look.views) or bool(look.storage.stat(DOMAIN).size_bytes)
    return False


def refuse_nested(root: Uri, place: Place, checkpoint: Uri | None) -> None:
    """Raise UriError if a run at ``root`` would be in a checkpoint, or in a run's own directories.

    ``checkpoint`` is what is copied, if it is one: a copy within it would change the source.
    """
    if CONTROL in root.path.split("/"):
        raise UriError(
            f"{CONTROL} belongs to the run itself",
            uri=root,
            hint="copy it to a place outside the run",
        )
    if checkpoint is not None and _is_inside(root, checkpoint):
        raise UriError(
            "that is inside the checkpoint to copy",
            uri=root,
            hint="name the copy next to it: RUN/NAME",
        )
    for above in _runs_above(root, place):
        inside = root.path[len(above.path.rstrip("/")) + 1 :].split("/")[0]
        with looking_at(above, place.storage_options) as look:
            names = {SHARED, *(live.seal.name for live in catalog(look.views))}
        if inside in names:
            raise UriError(
                f"that is inside {inside} of the run {above}",
                uri=root,
                hint="copy it next to that one, or into a run of its own",
            )


def _is_inside(one: Uri, other: Uri) -> bool:
    same = (one.protocol, one.authority) == (other.protocol, other.authority)
    return same and f"{one.path}/".startswith(f"{other.path}/")


def _runs_above(root: Uri, place: Place) -> list[Uri]:
    lineage = [root.parent] if root.name else []
    while lineage and lineage[-1].name:
        lineage.append(lineage[-1].parent)
    found: list[Uri] = []
    if not lineage:
        return found
    top = lineage[-1]
    # One storage for all of them: opening one costs more than a look.
    with (
        contextlib.suppress(*_ABOVE),
        contextlib.closing(open_storage(top, place.storage_options)) as storage,
    ):
        for above in lineage:
            key = above.path[len(top.path.rstrip("/")) + 1 :]
            with contextlib.suppress(*_ABOVE):
                storage.stat(f"{key}/{DOMAIN}" if key else DOMAIN)
                found.append(above)
    return found


@dataclass(frozen=True, slots=True)
class Loose:
    """A checkpoint that no log lists.

    Attributes:
        origin: As of any save; None if it cannot be read.
        why: Why it cannot be loaded; "" if it can be.
    """

    origin: str | None
    why: str


def loose_at(name: str, views: Views, storage: Storage) -> Loose | None:
    """Return the checkpoint with this name that no log lists; None if there is none."""
    found = drive(_find_directory(name, views, storage.root), storage)
    if found is None:
        return None
    origin = None
    if found.manifest is not None:
        origin = origin_of(found.manifest.save_id)
    elif found.checkpoint is not None:
        with contextlib.suppress(CkptfsError):  # if it is damaged, its origin stays unknown
            origin = stock_manifest(storage, name).save_id
    return Loose(origin, found.why)


def _find_directory(name: str, views: Views, root: Uri) -> Program[UnloggedCheckpoint | None]:
    yield Refresh(name)
    return (yield from look_at_directory(name, views, root))


def warning_if_held(views: Views, node: str, name: str) -> tuple[str, ...]:
    """Return a warning if another job may resume from the copy ``name``, the target's new latest.

    That is so if the run's owner neither left nor is known to be dead. ``node`` is this process's,
    as in ``Owner``.
    """
    newest = max(views.values(), key=lambda view: view.generation, default=None)
    if newest is None or newest.generation == GENESIS or newest.released:
        return ()
    if newest.fence.node == node and not alive_here(newest.fence):
        return ()
    warning = (
        f"the target is held by {describe(newest.fence)}: its latest will be the copy {name}, until "
        "that job commits the next"
    )
    return (warning,)


# -- what is copied --------------------------------------------------------------------------------

_LOOKS = 16  # manifests that are read at once


class Subject(Enum):
    """What a URI names."""

    CHECKPOINT = "checkpoint"
    RUN = "run"


class Status(StrEnum):
    """What is to be done with one checkpoint, and what was done.

    Attributes:
        TO_COPY: The target lacks it.
        TO_REPLACE: Another save has the name.
        COPIED: It was copied.
        THERE: The target has it already.
        DELETED: The target had it and deleted it; it is copied again only if the call names its
            step.
        GONE: The source deleted it after it was planned.
    """

    TO_COPY = "to copy"
    TO_REPLACE = "to replace"
    COPIED = "copied"
    THERE = "already there"
    DELETED = "deleted there"
    GONE = "gone meanwhile"

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
    def is_given(self) -> bool:
        """Whether certain checkpoints were requested."""
        return self.latest or self.step is not None


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint.

    Attributes:
        name: Its name at the target.
        origin: The id of the save that its bytes come from.
        size_bytes: None if the coordinator does not see it.
        note: A warning about it, before it is copied.
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
    """All checkpoints, in the order in which they are copied."""

    items: tuple[Item, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lookout:
    """What the coordinator sees of both places.

    Attributes:
        overwrite: Replace another save that has the name.
        node: The node of this process, as in ``Owner``.
    """

    storage: Storage
    root: Uri
    source: Views
    target: Views
    there: Storage
    overwrite: bool
    node: str


def what_is(at: Uri, place: Place) -> Subject:
    """Return what the URI names. Local, read-only. Raises NotFoundError if it names neither."""
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
        hint="run ckptfs ls on its parent to see what exists; an interrupted save leaves no "
        "checkpoint",
    )


def _is_part(at: Uri, place: Place) -> bool:
    step = at.parent
    if not step.name:
        return False
    with (
        contextlib.suppress(CkptfsError),  # reading above it may not be permitted
        looking_at(step.parent, place.storage_options) as look,
    ):
        checkpoint = live_of(step.name, look.views, step)
        return checkpoint is not None and any(ref.name == at.name for ref in checkpoint.parts)
    return False


# -- one --------------------------------------------------------------------------------------------


def plan_one(here: Lookout, name: str, target_name: str | None) -> Plan:
    """Plan to copy the checkpoint ``name`` of the source.

    Raises CommitConflictError if another save has its name at the target.
    """
    where = here.storage.uri(name)
    step, part = split_name(name)
    checkpoint = live_of(step, here.source, where)
    seal = checkpoint
    if checkpoint is not None and part is not None:
        seal = part_of(checkpoint, part, where)[0]
    item = _described(here, Original(name, seal), target_name or name.rpartition("/")[2])
    placed = (_placed(here, item, is_given=True),)
    return Plan(placed, _warnings(here, placed))


# -- a run ------------------------------------------------------------------------------------------


def plan_run(here: Lookout, wanted: Wanted) -> Plan:
    """Plan to copy what the target lacks of the source.

    Raises NotFoundError if nothing there matches ``wanted``. Raises CommitConflictError if another
    save has one of the names at the target; nothing is copied then.
    """
    originals = _wanted(here, wanted)

    def look(one: Original) -> Item | None:
        try:
            item = _described(here, one, one.name)
        except NotFoundError:
            if wanted.step is not None:
                raise
            return None  # it was removed after it was listed
        return _placed(here, item, is_given=wanted.is_given)

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
        unlogged = drive(list_unlogged(here.source, here.root), here.storage)
        # Checkpoints without a log come first, so that the target's newest commit is the log's newest.
        found = [*(Original(c.uri.name) for c in unlogged), *sealed]
    if wanted.step is not None:
        steps = {c.uri.name: c.step for c in unlogged}
        found = [
            one
            for one in found
            if (steps.get(one.name) if one.seal is None else one.seal.step) == wanted.step
        ]
    if not found:
        what = "no checkpoint" if wanted.step is None else f"no checkpoint of step {wanted.step}"
        raise NotFoundError(
            f"{what} exists", uri=here.root, hint="run ckptfs ls on the run to see what exists"
        )
    return found


def _refuse_unlogged(here: Lookout) -> None:
    """Raise AmbiguousCheckpointError if another program saved after the newest commit."""
    shape = here.storage.capabilities.shape
    try:
        drive(check_unlogged(here.source, here.root, shape), here.storage)
    except AmbiguousCheckpointError as error:
        error.hint = "copy the one that you mean by its name"
        raise


def _warnings(here: Lookout, items: Sequence[Item]) -> tuple[str, ...]:
    notes = tuple(item.note for item in items if item.note)
    return (*notes, *_rolls_back(here, items), *_held(here, items))


def _held(here: Lookout, items: Sequence[Item]) -> tuple[str, ...]:
    training = [i for i in items if i.kind is Kind.CHECKPOINT and not i.failure]
    last = next((item for item in reversed(training) if item.status is Status.TO_COPY), None)
    return () if last is None else warning_if_held(here.target, here.node, last.name)


def _rolls_back(here: Lookout, items: Sequence[Item]) -> tuple[str, ...]:
    """Return a warning if the target's latest will be older than one that it has."""
    order = [origin_of(live.seal.save_id) for live in history(here.source)]
    training = [i for i in items if i.kind is Kind.CHECKPOINT and not i.failure]
    last = next((item for item in reversed(training) if item.status.is_due), None)
    current = latest(here.target, Kind.CHECKPOINT)
    if last is None or current is None:
        return ()
    current_origin = origin_of(current.seal.save_id)
    known = last.origin in order and current_origin in order
    if not known or order.index(last.origin) >= order.index(current_origin):
        return ()
    warning = (
        f"the latest there will be {last.name}, which is older than {current.seal.name}: the order "
        "of commits is the order of copying"
    )
    return (warning,)


# -- both -------------------------------------------------------------------------------------------


def _described(here: Lookout, original: Original, name: str) -> Item:
    """Describe a checkpoint by its seal and its manifest.

    Raises IntegrityError or ManifestError if it is damaged.
    """
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
    """Return its size by its manifest; None if this process does not see it, but other ranks do."""
    try:
        manifest = drive(
            find(seal, here.storage.capabilities.shape, here.root), here.storage
        ).manifest
    except NotFoundError:
        return None
    return (
        None if manifest is None else sum({f.path: f.size_bytes for f in manifest.files}.values())
    )


def _placed(here: Lookout, item: Item, *, is_given: bool) -> Item:
    """Return the item with what is to be done about it, by what has the name at the target."""
    existing = save_named(item.name, here.target)
    if existing is not None:
        if origin_of(existing.save_id) == item.origin:
            return replace(item, status=Status.THERE)
        _may_replace(here, item, f"it is another save ({existing.save_id})")
        return replace(item, status=Status.TO_REPLACE)
    loose = loose_at(item.name, here.target, here.there)
    if loose is not None and loose.origin == item.origin:
        # A copy that was made without ckptfs and interrupted is made whole.
        return item if loose.why else replace(item, status=Status.THERE)
    if loose is not None:
        _may_replace(here, item, "it is another checkpoint, which no log lists")
        note = f"no log lists the {item.name} that is replaced: its data files stay next to those of the copy"
        return replace(item, status=Status.TO_REPLACE, note=note)
    if not is_given and _is_deleted_copy(here, item):
        return replace(item, status=Status.DELETED)
    return item


def _may_replace(here: Lookout, item: Item, what: str) -> None:
    plain = item.kind is Kind.DIRECTORY
    if here.overwrite and not plain:
        return
    hint = "copy it under another name, or replace that one with --overwrite"
    if plain:
        hint = "copy it under another name: ckptfs never replaces a directory of files"
    raise CommitConflictError(
        f"{item.name} exists already, and {what}", uri=here.there.root / item.name, hint=hint
    )


def _is_deleted_copy(here: Lookout, item: Item) -> bool:
    return any(
        origin_of(save.save_id) == item.origin and not save.aborted
        for view in here.target.values()
        for save in view.saves.of_name(item.name)
    )


# -- what it came to -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copied:
    """What happened to one checkpoint.

    Attributes:
        name: Its name at the target.
        kind: "checkpoint", "weights" or "directory".
        step: Completed optimizer steps; None if there is no number.
        uri: Where it is at the target.
        save_id: The id of the copy; None before it was copied.
        status: What was done.
        size_bytes: Bytes of its files; None if the coordinator does not see them.
        copied_bytes: Bytes that were copied to the target now.
        resumed_bytes: Bytes that were there from an interrupted try.
        digests: How many digests were compared.
        seconds: How long it took.
    """

    name: str
    kind: str
    step: int | None
    uri: str
    save_id: str | None
    status: Status
    size_bytes: int | None
    copied_bytes: int = 0
    resumed_bytes: int = 0
    digests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of a call of ``copy_to``.

    Attributes:
        source: The source's URI.
        target: The target's URI.
        checkpoints: What happened to each checkpoint.
        seconds: How long the call took.
        rank: The rank of this process.
        warnings: What was noticed, one line each.
        is_dry_run: Nothing was copied.
    """

    source: str
    target: str
    checkpoints: tuple[Copied, ...]
    seconds: float
    rank: int = 0
    warnings: tuple[str, ...] = ()
    is_dry_run: bool = False

    @property
    def copied_bytes(self) -> int:
        """Bytes that were sent to the target now."""
        return sum(one.copied_bytes for one in self.checkpoints)

    @property
    def skipped_bytes(self) -> int:
        """Bytes that were there before: of complete copies, and from interrupted tries."""
        complete = sum(
            one.size_bytes or 0 for one in self.checkpoints if one.status is Status.THERE
        )
        return complete + sum(one.resumed_bytes for one in self.checkpoints)

    @property
    def digests(self) -> int:
        """How many digests were compared."""
        return sum(one.digests for one in self.checkpoints)
