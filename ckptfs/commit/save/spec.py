"""What a save is asked to do and what it came to: the values that travel with an attempt. Pure."""

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

# A small file beside the manifest: the same in every domain, or one for each domain id.
SmallFile = bytes | Mapping[str, bytes]


class IfExists(ArgumentChoice, parameter="if_exists"):
    """What to do when the name is committed already."""

    ERROR = "error"
    REPLACE = "replace"  # the old one stays until the new one is committed


def whole_step(step: int) -> int:
    """The step as Python's own int: numpy's and torch's are taken. StateError for what is none, and below 0."""
    try:
        whole = operator.index(step)
    except TypeError:
        raise StateError(
            f"step is {step!r}, which is not an integer",
            hint="it counts completed optimizer steps",
        ) from None
    if whole < 0:
        raise StateError(f"step is {whole}; it counts completed optimizer steps")
    return whole


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """What is saved: the name under the run, its step, and under which generation.

    run: the generation of a held run; None is an unfenced save. metrics: numbers about the model, for
    retention. save_id, world_size: of the save that this one is a copy of; None takes a fresh id, and
    counts the ranks that save. spares_foreign: what another program saved under that name is an error
    even where a save of ours would be replaced, because nobody asked for that. wait_s: where it claims the
    run for itself, how long it waits for others that do so too.
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
        """A step of numpy's or torch's cannot be written. A copy of a save keeps what it says."""
        if self.step is not None and not isinstance(self.step, float):
            object.__setattr__(self, "step", whole_step(self.step))


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one rank wrote: its files (paths relative to the step directory), how long it took, and
    an opaque payload for the ``finish`` function on the coordinator.
    """

    files: tuple[FileRecord, ...]
    counters: Counters = Counters()
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Committed:
    """A save that every domain sealed. warnings: what the projection left to the next writer.
    replaced_bytes: of older saves of its name, what still lies there.
    """

    save_id: str
    counters: tuple[Counters, ...]
    commit_s: float
    warnings: tuple[str, ...] = ()
    replaced_bytes: int = 0

    def result(
        self, uri: str, step: int | None, rank: int, wall_s: float, warned: tuple[str, ...] = ()
    ) -> SaveResult:
        """What rank ``rank`` returns of it. warned: what was to be said before the commit."""
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
    """The unique id of a save that begins now."""
    return save_id_at(datetime.now(UTC))


def save_id_at(began: datetime) -> str:
    """A save's id: the second in which it began (UTC), and 12 hex digits. The first four of these are the
    fraction of the second, in 1/65536, so that the ids of saves one after the other sort in their order; the
    other eight are random.
    """
    fraction = (began.microsecond << 16) // 1_000_000
    return f"{began:%Y%m%dT%H%M%S}-{fraction:04x}{secrets.token_hex(4)}"


def fresh_ids() -> Iterator[str]:
    """Unique write ids; the time makes them readable, the randomness unique."""
    while True:
        yield f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(8)}"


def now_text() -> str:
    """Return the wall clock, for people; no decision reads it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
