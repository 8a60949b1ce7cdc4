"""What a save or a load did: values counted by the writers and readers themselves. No torch.

    Counters      bytes, files, items and seconds per phase of one rank, or of all
    SaveResult    where, which save, counters of this rank, of every rank, and the total
    LoadResult    the same for a load, and the keys that strict=False skipped
    Event         what a manager tells its listeners: one closed union of small values

Nothing here was learned by a stat or a walk: every byte was counted when it was written or read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "CopyCommitted",
    "CopyFailed",
    "Counters",
    "DeleteFailed",
    "Deleted",
    "Event",
    "LoadResult",
    "Restored",
    "Retained",
    "SaveBegan",
    "SaveCommitted",
    "SaveFailed",
    "SaveResult",
    "SaveSkipped",
    "Staged",
    "Written",
]

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Counters:
    """One rank's work, or all ranks' together.

    size_bytes of all data files and their sidecars; payload_bytes of tensors and objects in them;
    files and items; seconds spent: plan (flattening, checks, exchange of plans), stage (device to
    host), write, sync (making names durable), read, verify, commit. referenced_bytes: of items that
    had not changed and were not written again (unchanged="reference"). direct_bytes: written past the
    page cache (engine="direct", or where that pays); 0 where all went through it, or to an object store.
    """

    size_bytes: int = 0
    payload_bytes: int = 0
    files: int = 0
    items: int = 0
    plan_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    read_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    referenced_bytes: int = 0
    direct_bytes: int = 0

    @property
    def data_s(self) -> float:
        """Seconds in which data moved."""
        return self.stage_s + self.write_s + self.sync_s + self.read_s + self.verify_s

    @property
    def mib_per_s(self) -> float:
        """MiB per second of data movement, 0.0 when nothing moved."""
        return self.size_bytes / _MIB / self.data_s if self.data_s > 0 else 0.0

    def plus(self, other: Counters) -> Counters:
        """Both, one after the other on the same rank: everything adds up."""
        return Counters(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @staticmethod
    def together(parts: Iterable[Counters]) -> Counters:
        """All ranks at once: amounts add up, of each phase the slowest rank's seconds count."""
        total = Counters()
        for part in parts:
            total = Counters(
                *(
                    max(a, b) if field.name.endswith("_s") else a + b
                    for field, a, b in zip(
                        fields(Counters), _values(total), _values(part), strict=True
                    )
                )
            )
        return total

    def as_dict(self) -> dict[str, float]:
        """Flat numbers for a metrics logger, mib_per_s included."""
        return asdict(self) | {"mib_per_s": self.mib_per_s}


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A save that is committed. ``wall_s``: seconds from the call to the commit on this rank.

    ``replaced_bytes``: of older saves of the name, as their manifests say, what still lies there, over all
    domains: in a held run until its next commit, else only what is pinned or referenced.
    """

    uri: str
    step: int | None
    save_id: str
    mine: Counters
    total: Counters
    per_rank: tuple[Counters, ...]
    wall_s: float
    warnings: tuple[str, ...] = ()
    replaced_bytes: int = 0

    def __str__(self) -> str:
        """One line; ``repr`` has every counter."""
        warned = f", {len(self.warnings)} warnings" if self.warnings else ""
        left = (
            f", {size_text(self.replaced_bytes)} of older ones stay" if self.replaced_bytes else ""
        )
        return f"saved {_told(self)}{left}{warned}"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load that is done. ``save_id`` is None for a checkpoint that ckptfs did not write;
    ``verified`` tells whether every byte was compared with its digest.
    """

    uri: str
    step: int | None
    save_id: str | None
    mine: Counters
    total: Counters
    per_rank: tuple[Counters, ...]
    wall_s: float
    verified: bool
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line; ``repr`` has every counter."""
        told = f"loaded {_told(self)}" + ("" if self.verified else ", not verified")
        for what, keys in (("missing", self.missing_keys), ("unexpected", self.unexpected_keys)):
            if keys:
                told += f", {len(keys)} {what} keys"
        return told


def size_text(size_bytes: int | None) -> str:
    """``1.4 GiB``; bytes below one KiB are exact; ``-`` where nobody told."""
    if size_bytes is None:
        return "-"
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < _KIB or unit == "TiB":
            break
        value /= _KIB
    return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def _told(result: SaveResult | LoadResult) -> str:
    """What, how much, how long: of all ranks."""
    shown = size_text(result.total.size_bytes)
    step = "" if result.step is None else f" (step {result.step})"
    ranks = f" by {len(result.per_rank)} ranks" if len(result.per_rank) > 1 else ""
    return f"{result.uri}{step}: {shown}{ranks} in {result.wall_s:.2f} s"


# -- what a manager tells its listeners, in the order in which it happens on this rank ------------


@dataclass(frozen=True, slots=True)
class SaveBegan:
    """``save`` was called. mode: "sync" or "async"."""

    uri: str
    step: int
    kind: str
    mode: str


@dataclass(frozen=True, slots=True)
class Staged:
    """The caller may change its tensors. stall_s: seconds that the call held the training thread."""

    uri: str
    step: int | None
    size_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Written:
    """This rank's part is durable; nothing is committed yet."""

    uri: str
    step: int | None
    mine: Counters


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """The checkpoint exists. stall_s: as in Staged, for a synchronous save the whole call."""

    result: SaveResult
    kind: str
    stall_s: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Nothing was committed (outcome "failed"), or that is not known ("unknown").

    error: the class of the error, a colon, and its text.
    """

    uri: str
    step: int
    error: str
    outcome: str


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """if_slow="skip": the save before it was still on its way on some rank."""

    uri: str
    step: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention looked at after a commit: how many it keeps, which it lets go."""

    kept: int
    going: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """A checkpoint's bytes are gone in this rank's domain."""

    uri: str
    save_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteFailed:
    """It is deleted in the log, its bytes are still here, and it is tried again."""

    uri: str
    save_id: str
    error: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore is done; what ``restore`` returns. step: None where nobody told one. skipped: newer
    checkpoints that could not be loaded and why, newest first. dropped: keys of what ranks of another
    world size kept for themselves (``per_rank="drop"``). copy_of: the URI of the run where ``uri`` lies in
    one of its copies, because the run's own place has lost that save or is behind; None: read from the run.
    """

    uri: str
    step: int | None
    skipped: tuple[str, ...]
    wall_s: float
    dropped: tuple[str, ...] = ()
    copy_of: str | None = None


@dataclass(frozen=True, slots=True)
class CopyCommitted:
    """A committed checkpoint is whole at a copy's place too."""

    uri: str
    copy_uri: str
    size_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """The copy is tried again; the original stays until it is whole."""

    uri: str
    copy_uri: str
    error: str


Event = (
    SaveBegan
    | Staged
    | Written
    | SaveCommitted
    | SaveFailed
    | SaveSkipped
    | Retained
    | Deleted
    | DeleteFailed
    | Restored
    | CopyCommitted
    | CopyFailed
)


def _values(counters: Counters) -> list[Any]:
    return [getattr(counters, field.name) for field in fields(Counters)]
