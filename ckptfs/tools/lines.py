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

from ckptfs.commit.catalog import Origin
from ckptfs.commit.entries import Kind
from ckptfs.commit.layout import number_order
from ckptfs.commit.manifest import Manifest
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
    """What a checkpoint is, at first look."""

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
    """The order of a listing. The last one is the newest, or the largest."""

    COMMIT = "commit"
    STEP = "step"
    NAME = "name"
    AGE = "age"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One line. None where nobody told: sizes, ranks and times of plain DCP checkpoints are in no
    manifest. origin: what it is believed by; None of attempts. created_at: ISO 8601, UTC. note: why
    it is in its state. manifest: where it was read.
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
    """A run. withheld: lines of its history that were not asked for. notes: what is odd about it."""

    uri: Uri
    holding: Holding
    checkpoints: tuple[Checkpoint, ...]
    withheld: int = 0
    notes: tuple[str, ...] = ()


def in_order(lines: Sequence[Checkpoint], sort: Sort) -> list[Checkpoint]:
    """The lines in that order; those that the order does not tell apart stay as they are."""
    key = _KEYS.get(sort)
    return list(lines) if key is None else sorted(lines, key=key)


_KEYS: dict[Sort, Callable[[Checkpoint], tuple[Any, ...]]] = {
    Sort.STEP: lambda one: (-1 if one.step is None else one.step, one.created_at or ""),
    Sort.NAME: lambda one: (number_order(one.name), one.created_at or ""),
    Sort.AGE: lambda one: (one.created_at or "",),
    Sort.SIZE: lambda one: (-1 if one.size_bytes is None else one.size_bytes,),
}


def side_by_side(ask: Callable[[T], R], of: Sequence[T]) -> list[R]:
    """``ask`` of each, several at once: on a network each takes a round trip."""
    if len(of) < 2:  # noqa: PLR2004
        return [ask(one) for one in of]
    with ThreadPoolExecutor(min(_AT_ONCE, len(of)), thread_name_prefix="ckptfs-look") as pool:
        return list(pool.map(ask, of))


def began_at(save_id: str | None) -> str | None:
    """When a save began, by its id; None: it is somebody else's name."""
    try:
        began = datetime.strptime((save_id or "")[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return time_text(began.timestamp())


def time_text(unix_s: float) -> str:
    """ISO 8601, UTC."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def age_s(created_at: str | None, now: datetime | None = None) -> float | None:
    """Seconds since then by this machine's clock; None where nobody told."""
    if not created_at:
        return None
    try:
        then = datetime.fromisoformat(created_at)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds()
