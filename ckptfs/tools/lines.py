"""The lines of a listing: their fields, where these come from, and the order of lines. No torch.

    State         what a checkpoint is, at first look
    Checkpoint    one line; ``from_seal`` and ``from_beside`` add to it what a manifest says
    Run           all lines, and who holds the run
    Holding       the newest owner of a run, as its log and this machine show it:

    free      the run has no owner, or its owner released it
    held      the owner did not release the run; only its own machine knows at once whether it lives
    gone      the owner was a process of this machine and has ended: the next job takes the run

``prepare_run`` decides by itself, and watches the lease if the owner is on another machine. Everything
here is read-only and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from ckptfs.commit.catalog.catalog import Look, Origin, find
from ckptfs.commit.catalog.unlogged import UnloggedCheckpoint, is_overwritten, missing_data
from ckptfs.commit.log.entries import GENESIS, Fence, Generation, Kind, Seal
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.ownership.lease import alive_here, describe, who_am_i
from ckptfs.commit.paths import ATTEMPTS, MANIFEST, METADATA, number_order
from ckptfs.commit.save.foreign_metadata import names_save
from ckptfs.commit.state import Views, piece
from ckptfs.control.world import World
from ckptfs.errors import IntegrityError, ManifestError, NotFoundError, StaleError
from ckptfs.uri import Uri

__all__ = [
    "HISTORY",
    "Checkpoint",
    "Hold",
    "Holding",
    "Run",
    "Sort",
    "State",
    "age_s",
    "as_foreign",
    "as_overwritten",
    "began_at",
    "from_beside",
    "from_seal",
    "holding_of",
    "in_order",
    "side_by_side",
    "time_text",
]


class Hold(StrEnum):
    """Whether a process holds the run.

    Attributes:
        FREE: No process holds it.
        HELD: A process holds it, as far as is known.
        GONE: Its owner was a process of this node and has died.
    """

    FREE = "free"
    HELD = "held"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Holding:
    """The newest owner of a run.

    Attributes:
        hold: Whether it holds the run.
        generation: Its number; 0 if the run was never claimed, and then the other fields are empty.
        host: The owner's host, even if the owner has left.
        pid: The owner's process id.
        job: The owner's job; None if it had no name.
    """

    hold: Hold
    generation: int = 0
    host: str = ""
    pid: int = 0
    job: str | None = None

    @property
    def told(self) -> str:
        """The holding in words."""
        if self.hold is Hold.FREE:
            return "free"
        fence = Fence(Generation(self.generation, ""), host=self.host, pid=self.pid, job=self.job)
        gone = ", but its process has ended" if self.hold is Hold.GONE else ""
        return f"held by {describe(fence)}{gone}"


def holding_of(views: Views) -> Holding:
    """Return who holds a run, by the logs ``views`` that were reached."""
    if not views:
        return Holding(Hold.FREE)
    newest = max(views.values(), key=lambda view: view.generation)
    fence = newest.fence
    if fence.generation == GENESIS:
        return Holding(Hold.FREE)
    holder = (fence.generation.number, fence.host, fence.pid, fence.job)
    held = [view for view in views.values() if view.generation == newest.generation]
    if all(view.released for view in held):
        return Holding(Hold.FREE, *holder)
    if fence.node == who_am_i(World.solo()).node and not alive_here(fence):
        return Holding(Hold.GONE, *holder)
    return Holding(Hold.HELD, *holder)


_AT_ONCE = 16  # requests

T = TypeVar("T")
R = TypeVar("R")


class State(StrEnum):
    """What a checkpoint is, at first look.

    Attributes:
        COMMITTED: Committed and visible.
        UNPROJECTED: Committed, but stock readers do not see it yet.
        IN_DOUBT: It is not known from here whether it is committed.
        SAVING: A save that is under way.
        ABANDONED: An attempt that no process will finish: a newer owner came, or nothing was written to
            it for a day.
        FOREIGN: Another program, such as stock torch, saved it into the run, and it is whole.
        DAMAGED: Files of it are missing or changed; the note says which.
        REPLACED: A newer save has its name.
        OVERWRITTEN: Taken out of the catalog by ``mode="overwrite"``.
        DELETED: Deleted.
        ABORTED: A save that was aborted.
    """

    COMMITTED = "committed"
    UNPROJECTED = "not projected"
    IN_DOUBT = "in doubt"
    SAVING = "on its way"
    ABANDONED = "abandoned"
    FOREIGN = "foreign"
    DAMAGED = "damaged"
    REPLACED = "replaced"
    OVERWRITTEN = "overwritten"
    DELETED = "deleted"
    ABORTED = "aborted"


# Shown only on request: checkpoints in these states cannot be loaded.
HISTORY = frozenset({State.REPLACED, State.OVERWRITTEN, State.DELETED, State.ABORTED})


class Sort(StrEnum):
    """The order of a listing. The last line is the newest, or the largest.

    Attributes:
        COMMIT: The order of the commits.
        STEP: By step.
        NAME: By name.
        AGE: By age.
        SIZE: By size.
    """

    COMMIT = "commit"
    STEP = "step"
    NAME = "name"
    AGE = "age"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One line of a listing. A field is None if no source has it.

    Plain DCP checkpoints, for example, have no manifest with sizes, ranks and times.

    Attributes:
        uri: Where it is.
        name: Its name in the run.
        state: What it is, at first look.
        origin: Where it is recorded; None for attempts.
        step: Completed optimizer steps.
        kind: A checkpoint, weights or a directory.
        save_id: The id of the save.
        created_at: When it was made, in ISO 8601, UTC.
        size_bytes: Bytes of its files.
        files: Number of files.
        ranks: How many ranks saved it.
        parts: The names of its parts, if several groups wrote it.
        pinned: Whether retention leaves it alone.
        failure: Whether a failing run saved it.
        generation: The number of the run's owner that saved it.
        domains: Ids of the domains that hold it.
        note: Why it is in its state.
        manifest: The manifest; None if it was not read.
    """

    uri: Uri
    name: str
    state: State
    origin: Origin | None
    step: int | None = None
    kind: Kind | None = None
    save_id: str | None = None
    created_at: str | None = None
    size_bytes: int | None = None
    files: int | None = None
    ranks: int | None = None
    parts: tuple[str, ...] = ()
    pinned: bool = False
    failure: bool = False
    generation: int | None = None
    domains: tuple[str, ...] = ()
    note: str = ""
    manifest: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        uri: The run.
        holding: Who holds it.
        checkpoints: Its checkpoints.
        withheld: How many lines of its history were left out.
        notes: What is unusual about it.
    """

    uri: Uri
    holding: Holding
    checkpoints: tuple[Checkpoint, ...]
    withheld: int = 0
    notes: tuple[str, ...] = ()


def in_order(lines: Sequence[Checkpoint], sort: Sort) -> list[Checkpoint]:
    """Return the ``lines`` in the order ``sort``. Lines that are equal in it keep their order."""
    key = _KEYS.get(sort)
    return list(lines) if key is None else sorted(lines, key=key)


_KEYS: dict[Sort, Callable[[Checkpoint], tuple[Any, ...]]] = {
    Sort.STEP: lambda one: (-1 if one.step is None else one.step, one.created_at or ""),
    Sort.NAME: lambda one: (number_order(one.name), one.created_at or ""),
    Sort.AGE: lambda one: (one.created_at or "",),
    Sort.SIZE: lambda one: (-1 if one.size_bytes is None else one.size_bytes,),
}


def side_by_side(ask: Callable[[T], R], of: Sequence[T]) -> list[R]:
    """Return the results of ``ask`` for each of ``of``, in order.

    Several calls run at once, because on a network each takes a round trip.

    Args:
        ask: Called on threads.
        of: The arguments.
    """
    if len(of) < 2:  # noqa: PLR2004
        return [ask(one) for one in of]
    with ThreadPoolExecutor(min(_AT_ONCE, len(of)), thread_name_prefix="ckptfs-look") as pool:
        return list(pool.map(ask, of))


def began_at(save_id: str | None) -> str | None:
    """Return when a save began, by its ``save_id``; None if ckptfs did not make that id."""
    try:
        began = datetime.strptime((save_id or "")[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return time_text(began.timestamp())


def time_text(unix_s: float) -> str:
    """Return ``unix_s``, in seconds since the epoch, as ISO 8601 text in UTC."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def age_s(created_at: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds from ``created_at`` to ``now``; None if ``created_at`` is no time.

    Args:
        created_at: A time in ISO 8601; None if it is not known.
        now: A later time; None: the time of this machine's clock.
    """
    if not created_at:
        return None
    try:
        then = datetime.fromisoformat(created_at)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds()


_UNPROJECTED = "stock torch does not see it; the next owner of the run projects it"


def from_beside(line: Checkpoint, beside: UnloggedCheckpoint) -> Checkpoint:
    """Return ``line`` with what was found in a directory that is not in the log, ``beside``."""
    checkpoint, manifest = beside.checkpoint, beside.manifest
    if checkpoint is None:
        line = replace(line, state=State.DAMAGED, note=beside.why)
        if manifest is not None:
            line = replace(line, step=manifest.step, kind=manifest.artifact)
        return _with_manifest(line, manifest)
    line = replace(
        line,
        origin=checkpoint.origin,
        step=checkpoint.step,
        kind=checkpoint.kind,
        save_id=checkpoint.save_id,
        parts=checkpoint.parts,
        domains=checkpoint.domains,
        created_at=None if beside.modified_s is None else time_text(beside.modified_s),
    )
    return _with_manifest(line, manifest)


def as_foreign(line: Checkpoint, look: Look) -> Checkpoint:
    """Return the ``line`` of a checkpoint of another program, with whether it is whole.

    Args:
        line: The line so far. It is returned as it is unless its origin is stock torch.
        look: Reads the files.
    """
    if line.origin is not Origin.STOCK:
        return line
    try:
        metadata = look.storage.read(f"{line.name}/{METADATA}")
        missing = drive(missing_data(line.name, metadata), look.storage)
    except NotFoundError:
        return line  # it was removed while we looked
    if not missing:
        return replace(
            line, state=State.FOREIGN, note="ckptfs did not write it; load it by its name"
        )
    lost = f"{missing[0]} is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
    why = f"of the files that its {METADATA} names, {lost}"
    if missing == (METADATA,):
        why = f"its {METADATA} is damaged or incomplete"
    return replace(
        line, state=State.DAMAGED, note=f"it is incomplete, and ckptfs did not write it: {why}"
    )


def as_overwritten(line: Checkpoint, seal: Seal, look: Look) -> Checkpoint:
    """Return the ``line`` of the newest commit, with a note if another program saved over it.

    Args:
        line: The line so far.
        seal: The newest commit.
        look: Reads the files.
    """
    shape = look.storage.capabilities.shape
    if not drive(is_overwritten(seal, look.views, shape), look.storage):
        return line
    note = f"another program overwrote its {METADATA}"
    return replace(line, note=f"{line.note}; {note}" if line.note else note)


def _with_manifest(line: Checkpoint, manifest: Manifest | None) -> Checkpoint:
    if manifest is None:
        return line
    return replace(
        line,
        created_at=manifest.created_at or line.created_at,
        size_bytes=manifest.size_bytes,
        files=len(manifest.files),
        ranks=manifest.world_size,
        manifest=manifest,
    )


def from_seal(line: Checkpoint, seal: Seal, look: Look, *, everything: bool) -> Checkpoint:
    """Return a line with what the sealed manifest says.

    Args:
        line: The line so far.
        seal: The save.
        look: What this process sees of the run.
        everything: Check also whether stock readers see it.
    """
    shape = look.storage.capabilities.shape
    try:
        found = drive(find(seal, shape, line.uri), look.storage)
    except (NotFoundError, StaleError, IntegrityError, ManifestError) as error:
        if line.state is not State.COMMITTED:
            return line  # history: its files are expected to be gone
        is_lost = isinstance(error, NotFoundError | StaleError)
        note = f"{MANIFEST} of save {seal.save_id} is missing" if is_lost else error.message
        return replace(line, state=State.DAMAGED, note=note)
    line = _with_manifest(line, found.manifest)
    for ref in seal.parts:
        line = _with_part(line, piece(seal, ref), look)
    if line.state is State.COMMITTED:
        waits = found.home.startswith(f"{ATTEMPTS}/") or (
            everything and not _is_projected(seal, look)
        )
        if waits:
            line = replace(line, state=State.UNPROJECTED, note=_UNPROJECTED)
    return line


def _with_part(line: Checkpoint, part: Seal, look: Look) -> Checkpoint:
    """Add the files and bytes of a part to a line, or a note if it cannot be seen from here."""
    try:
        found = drive(find(part, look.storage.capabilities.shape, line.uri), look.storage)
    except (NotFoundError, StaleError, IntegrityError, ManifestError):
        name = part.name.rpartition("/")[2]
        note = f"part {name} cannot be seen from here"
        return replace(line, note=f"{line.note}; {note}" if line.note else note)
    manifest = found.manifest
    if manifest is None:
        return line
    return replace(
        line,
        size_bytes=(line.size_bytes or 0) + manifest.size_bytes,
        files=(line.files or 0) + len(manifest.files),
    )


def _is_projected(seal: Seal, look: Look) -> bool:
    """Whether ``ckptfs.json`` in the step directory names this save, and ``.metadata`` is there."""
    try:
        if names_save(read_limited(look.storage, f"{seal.name}/{MANIFEST}")) != seal.save_id:
            return False
        # A directory artifact has no .metadata; in a checkpoint of parts each part has its own.
        if seal.artifact is not Kind.DIRECTORY and not seal.parts:
            look.storage.stat(f"{seal.name}/{METADATA}")
    except NotFoundError:
        return False
    return True
