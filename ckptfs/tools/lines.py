"""What a line of a listing says, and its order. Pure, no torch.

State         what a checkpoint is, at first look
Checkpoint    one line
Run           all of them, and who holds the run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from ckptfs.commit.catalog.catalog import Origin
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.paths import number_order
from ckptfs.tools.holding import Holding
from ckptfs.uri import Uri

__all__ = [
    "HISTORY",
    "Checkpoint",
    "Run",
    "Sort",
    "State",
    "age_s",
    "began_at",
    "in_order",
    "side_by_side",
    "time_text",
]

_AT_ONCE = 16  # requests

T = TypeVar("T")
R = TypeVar("R")


class State(StrEnum):
    """What a checkpoint is, at first look.

    Attributes:
        COMMITTED: Committed and visible.
        UNPROJECTED: Committed, and stock readers do not see it yet.
        IN_DOUBT: Not known from here whether it is committed.
        SAVING: A save that is under way.
        ABANDONED: An attempt that no process will finish: a newer owner came, or nothing was written to it
            for a day.
        FOREIGN: Another program, such as stock torch, saved it into the run, and it is whole.
        DAMAGED: Files of it are missing or changed; the note says which.
        REPLACED: A newer save has its name.
        OVERWRITTEN: Taken out of the catalog by ``mode="overwrite"``.
        DELETED: Deleted.
        ABORTED: A save that was given up.
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


# What is shown only when asked for: nobody can load it.
HISTORY = frozenset({State.REPLACED, State.OVERWRITTEN, State.DELETED, State.ABORTED})


class Sort(StrEnum):
    """The order of a listing. The last one is the newest, or the largest.

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
    """One line of a listing. None where no source says: sizes, ranks and times of plain DCP checkpoints are in
    no manifest.

    Attributes:
        uri: Where it is.
        name: Its name in the run.
        state: What it is, at first look.
        origin: Why it is believed; None of attempts.
        step: Completed optimizer steps.
        kind: A checkpoint, weights or a directory.
        save_id: The id of the save.
        created_at: When, in ISO 8601, UTC.
        size_bytes: Bytes of its files.
        files: How many files.
        ranks: How many ranks saved it.
        parts: The parts of one that several groups wrote.
        pinned: Retention leaves it alone.
        failure: Saved by a run that was failing.
        generation: The number of the run's owner that saved it.
        domains: Ids of the domains that hold it.
        note: Why it is in its state.
        manifest: The manifest, where it was read.
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
        withheld: Lines of its history that were not to be listed.
        notes: What is odd about it.
    """

    uri: Uri
    holding: Holding
    checkpoints: tuple[Checkpoint, ...]
    withheld: int = 0
    notes: tuple[str, ...] = ()


def in_order(lines: Sequence[Checkpoint], sort: Sort) -> list[Checkpoint]:
    """The ``lines`` in the order ``sort``; those that the order does not tell apart stay as they are."""
    key = _KEYS.get(sort)
    return list(lines) if key is None else sorted(lines, key=key)


_KEYS: dict[Sort, Callable[[Checkpoint], tuple[Any, ...]]] = {
    Sort.STEP: lambda one: (-1 if one.step is None else one.step, one.created_at or ""),
    Sort.NAME: lambda one: (number_order(one.name), one.created_at or ""),
    Sort.AGE: lambda one: (one.created_at or "",),
    Sort.SIZE: lambda one: (-1 if one.size_bytes is None else one.size_bytes,),
}


def side_by_side(ask: Callable[[T], R], of: Sequence[T]) -> list[R]:
    """Return the results of ``ask`` for each of ``of``, several at once: on a network each takes a round trip."""
    if len(of) < 2:  # noqa: PLR2004
        return [ask(one) for one in of]
    with ThreadPoolExecutor(min(_AT_ONCE, len(of)), thread_name_prefix="ckptfs-look") as pool:
        return list(pool.map(ask, of))


def began_at(save_id: str | None) -> str | None:
    """Return when a save began, by its ``save_id``; None: the id is none of ckptfs."""
    try:
        began = datetime.strptime((save_id or "")[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return time_text(began.timestamp())


def time_text(unix_s: float) -> str:
    """Return ``unix_s``, seconds since the epoch, as ISO 8601, UTC."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def age_s(created_at: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds since ``created_at`` by this machine's clock, or until ``now``; None where no time is
    known.
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
