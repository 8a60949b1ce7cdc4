"""The arguments and the results of a save. Pure."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ckptfs.commit.log.entries import Generation, Kind
from ckptfs.commit.manifest import FileRecord
from ckptfs.errors import ArgumentChoice, StateError
from ckptfs.events import Counters, SaveResult

__all__ = [
    "Committed",
    "IfExists",
    "SaveSpec",
    "SmallFile",
    "WrittenPart",
    "fresh_ids",
    "fresh_save_id",
    "now_text",
    "save_id_at",
]

# A small file next to the manifest: the same in every domain, or one for each domain id.
SmallFile = bytes | Mapping[str, bytes]


class IfExists(ArgumentChoice, parameter="if_exists"):
    """What to do if the name is committed already."""

    ERROR = "error"
    REPLACE = "replace"  # the old one stays until the new one is committed


def checked_step(step: int) -> int:
    """Return the step as Python's own int; those of numpy and torch are accepted.

    Raises:
        StateError: It is no integer, or below 0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise StateError(
            f"step is {step!r}, which is not an integer",
            hint="it counts completed optimizer steps",
        ) from None
    if number < 0:
        raise StateError(f"step is {number}; it counts completed optimizer steps")
    return number


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """The arguments of a save.

    Attributes:
        name: The name under the run.
        step: Completed optimizer steps; None where there is no number.
        if_exists: What to do if the name is committed already.
        artifact: A checkpoint, weights or a directory.
        run: The generation of a held run; None is an unfenced save.
        failure: Whether the run that saves is failing.
        references: save_ids with files that this save uses.
        per_rank: Keys that every rank keeps for itself.
        metrics: Numbers about the model, for retention.
        save_id: The id of the save that this one is a copy of; None takes a fresh id.
        world_size: The number of ranks of the save that this one is a copy of; None counts the
            ranks that save.
        spares_foreign: Another program's checkpoint under that name is an error even if a save of
            ours would be replaced, because the caller did not ask to replace it.
        wait_s: If the save claims the run for itself, how long it waits for others that do so too.
    """

    name: str
    step: int | None
    if_exists: IfExists = IfExists.ERROR
    artifact: Kind = Kind.CHECKPOINT
    run: Generation | None = None
    failure: bool = False
    references: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    save_id: str | None = None
    world_size: int | None = None
    spares_foreign: bool = False
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        """Convert a step of numpy or torch, because it cannot be written.

        A copy of a save keeps the step that it has.
        """
        if self.step is not None and not isinstance(self.step, float):
            object.__setattr__(self, "step", checked_step(self.step))


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one rank wrote.

    Attributes:
        files: Its files, with paths relative to the step directory.
        counters: How much it wrote, and how long that took.
        payload: Opaque bytes for the ``finish`` function on the coordinator.
    """

    files: tuple[FileRecord, ...]
    counters: Counters = Counters()
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Committed:
    """A save that every domain sealed.

    Attributes:
        save_id: The id of the save.
        counters: The counters of each rank.
        commit_s: How long the commit took.
        warnings: What the projection left to the next writer.
        replaced_bytes: How many bytes of older saves of its name are still there.
    """

    save_id: str
    counters: tuple[Counters, ...]
    commit_s: float
    warnings: tuple[str, ...] = ()
    replaced_bytes: int = 0

    def result(
        self, uri: str, step: int | None, rank: int, wall_s: float, warned: tuple[str, ...] = ()
    ) -> SaveResult:
        """Return the result for rank ``rank``. warned: Warnings from before the commit."""
        per_rank = tuple(c.plus(Counters(commit_s=self.commit_s)) for c in self.counters)
        return SaveResult(
            uri=uri,
            step=step,
            save_id=self.save_id,
            mine=per_rank[rank],
            total=Counters.together(per_rank),
            per_rank=per_rank,
            wall_s=wall_s,
            warnings=(*warned, *self.warnings),
            replaced_bytes=self.replaced_bytes,
        )


def fresh_save_id() -> str:
    """Return a unique id for a save that begins now."""
    return save_id_at(datetime.now(UTC))


def save_id_at(began: datetime) -> str:
    """Return the id of a save: the second in which it began (UTC), and 12 hex digits.

    The first four digits are the fraction of the second, in 1/65536, so that the ids of consecutive
    saves sort in their order. The other eight are random.
    """
    fraction = (began.microsecond << 16) // 1_000_000
    return f"{began:%Y%m%dT%H%M%S}-{fraction:04x}{secrets.token_hex(4)}"


def fresh_ids() -> Iterator[str]:
    """Yield unique write ids. The time makes them readable, the random digits make them unique."""
    while True:
        yield f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(8)}"


def now_text() -> str:
    """Return the wall clock, for people; no decision reads it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
