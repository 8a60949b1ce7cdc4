"""What a rank saw, as values: they are pickled to the coordinator, which judges. No I/O.

``Refusal`` stands for an operation that was refused or failed: its text, typed by what a judge asks.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    CkptfsError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    UnsupportedError,
)
from ckptfs.storage.clients.bucket_rules import Lock, Rule, Versioning
from ckptfs.uri import mask_credentials

__all__ = [
    "FEW_LOOKS",
    "Access",
    "Arrivals",
    "Clocks",
    "Latency",
    "Mounted",
    "Multipart",
    "Names",
    "Op",
    "Race",
    "Refusal",
    "Replaced",
    "Room",
    "Rules",
    "Transfer",
    "Why",
]


FEW_LOOKS = 20  # of a reader while a file is replaced; fewer show nothing


class Why(Enum):
    """Why an operation failed, as far as a verdict depends on it."""

    READ_ONLY = "read-only"
    ACCESS = "not permitted"
    NO_SPACE = "no space"
    UNSUPPORTED = "cannot do that"
    NOT_FOUND = "not found"
    EXISTS = "exists already"
    OTHER = "failed"


_WHYS: tuple[tuple[type[CkptfsError], Why], ...] = (
    (AccessError, Why.ACCESS),
    (NoSpaceError, Why.NO_SPACE),
    (UnsupportedError, Why.UNSUPPORTED),
    (NotFoundError, Why.NOT_FOUND),
    (StaleError, Why.NOT_FOUND),
    (AlreadyExistsError, Why.EXISTS),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An operation that failed. text and hint: the error's, credentials masked."""

    why: Why
    text: str
    hint: str = ""

    @staticmethod
    def of(error: CkptfsError) -> Refusal:
        """What the error says."""
        if getattr(error, "errno", None) == errno.EROFS:
            why = Why.READ_ONLY
        else:
            why = next((w for kind, w in _WHYS if isinstance(error, kind)), Why.OTHER)
        return Refusal(why, mask_credentials(error.message), mask_credentials(error.hint or ""))


class Op(Enum):
    """What a training job does to a place, by the permission that it needs."""

    LIST = "list"
    MAKE = "make directories"
    WRITE = "write"
    READ = "read"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Access:
    """Each operation that was tried: None where it worked. What depends on a refused one is absent."""

    tried: Mapping[Op, Refusal | None]


@dataclass(frozen=True, slots=True)
class Race:
    """One rank's part in the races for names. wins: by round, the marks of those of its threads that
    were told they had won. lies: what the name held afterwards, by round ("" where nothing).
    """

    wins: tuple[tuple[str, ...], ...] = ()
    holds: tuple[str, ...] = ()
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Replaced:
    """A file that was replaced ``times`` times while a reader looked: torn or missing looks, of all.

    by_reader: the refusal is of a look, not of what was looked at.
    """

    times: int
    looks: int
    missing: int
    torn: int
    refusal: Refusal | None = None
    by_reader: bool = False


@dataclass(frozen=True, slots=True)
class Multipart:
    """An upload in two parts, another that was aborted, and whether that was listed before.

    forgets: the store drops unfinished uploads by itself, and nothing lists them.
    """

    completed: Refusal | None
    aborted: Refusal | None
    listed: Refusal | None
    forgets: bool = False


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When this rank saw what others wrote. seen_s: by writing rank, seconds; None: never seen."""

    seen_s: Mapping[int, float | None]
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """offset_s of the place's clock against this node's, at least and at most; None: nobody tells.

    rank_s: of this rank's clock against rank 0's, at least and at most.
    """

    place_s: tuple[float, float] | None
    rank_s: tuple[float, float]
    source: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes and inodes, None where nobody tells; refusal of a write for want of space."""

    free_bytes: int | None
    free_inodes: int | None
    full: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Mounted:
    """The mount below a path: its type, where it comes from, its options. None: no mounted place."""

    kind: str
    source: str
    options: tuple[str, ...]
    at: str


@dataclass(frozen=True, slots=True)
class Rules:
    """A bucket's rules as a client gave them; a Refusal in place of what could not be asked.

    prefix: of the run inside the bucket, with its slash.
    """

    prefix: str
    versioning: Versioning | Refusal
    lock: Lock | Refusal | None
    lifecycle: tuple[Rule, ...] | Refusal


@dataclass(frozen=True, slots=True)
class Names:
    """Kinds of names that were tried: None where the name came back as it was given."""

    case_kept: bool | None
    refused: Mapping[str, Refusal | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of each small operation, by its name, in the order they were done.

    by_reader: the refusal is of a look or a read.
    """

    taken_s: Mapping[str, tuple[float, ...]]
    refusal: Refusal | None = None
    by_reader: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """One file written and read. cached: what may have answered the read; "" where nothing."""

    size_bytes: int
    write_s: float | None = None
    read_s: float | None = None
    cached: str = ""
    refusal: Refusal | None = None
