"""What a save or a load did: values counted by the writers and readers themselves. No torch.

    Counters      bytes, files, items and seconds per phase of one rank, or of all
    SaveResult    where, which save, counters of this rank, of every rank, and the total
    LoadResult    the same for a load, and the keys that strict=False skipped
    Event         what a manager reports to its listeners: one closed union of small values

No number here comes from a stat or a walk: every byte was counted when it was written or read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from ckptfs.text import size_text

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

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Counters:
    """One rank's work, or all ranks' together. Amounts in bytes, times in seconds.

    Attributes:
        size_bytes: Bytes of all data files and their sidecars.
        payload_bytes: Bytes of tensors and objects in them.
        files: Data files.
        items: Tensors and objects.
        plan_s: Seconds of flattening, checks, exchange of plans.
        stage_s: Seconds of copying from device to host.
        write_s: Seconds of writing.
        sync_s: Seconds of making names durable.
        read_s: Seconds of reading.
        verify_s: Seconds of comparing digests.
        commit_s: Seconds of the commit.
        referenced_bytes: Bytes of items that had not changed and were not written again
            (``unchanged="reference"``).
        direct_bytes: Bytes written past the page cache (``engine="direct"``, or if that is faster);
            0 if all went through it, or to an object store.
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
        """Return this work and then ``other`` on the same rank: all numbers are added."""
        return Counters(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @staticmethod
    def together(parts: Iterable[Counters]) -> Counters:
        """Return all ranks' ``parts`` together. Amounts add up; each phase has the seconds of its
        slowest rank.
        """
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
        """Return flat numbers for a metrics logger, ``mib_per_s`` included."""
        return asdict(self) | {"mib_per_s": self.mib_per_s}


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A save that is committed.

    Attributes:
        uri: The checkpoint.
        step: Completed optimizer steps; None if there is no number.
        save_id: The id of the save.
        mine: The counters of this rank.
        total: The counters of all ranks together.
        per_rank: The counters of each rank, in order of rank.
        wall_s: Seconds from the call to the commit on this rank.
        warnings: What was noticed, one line each.
        replaced_bytes: Bytes of older saves of the name, by their manifests, that are still there,
            over all domains: in a held run until its next commit, else only what is pinned or
            referenced.
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
        return f"saved {_summary(self)}{left}{warned}"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load that is done.

    Attributes:
        uri: The checkpoint.
        step: Completed optimizer steps; None if there is no number.
        save_id: The id of the save; None for a checkpoint that ckptfs did not write.
        mine: The counters of this rank.
        total: The counters of all ranks together.
        per_rank: The counters of each rank, in order of rank.
        wall_s: Seconds that the call took on this rank.
        verified: Whether every byte was compared with its digest.
        missing_keys: Keys that the checkpoint lacks and that kept their values.
        unexpected_keys: Keys of the checkpoint that the state lacks.
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
        text = f"loaded {_summary(self)}" + ("" if self.verified else ", not verified")
        for what, keys in (("missing", self.missing_keys), ("unexpected", self.unexpected_keys)):
            if keys:
                text += f", {len(keys)} {what} keys"
        return text


def _summary(result: SaveResult | LoadResult) -> str:
    """Return what, how much and how long, for all ranks."""
    shown = size_text(result.total.size_bytes)
    step = "" if result.step is None else f" (step {result.step})"
    ranks = f" by {len(result.per_rank)} ranks" if len(result.per_rank) > 1 else ""
    return f"{result.uri}{step}: {shown}{ranks} in {result.wall_s:.2f} s"


# -- the events of a manager, in the order in which they happen on this rank -----------------------


@dataclass(frozen=True, slots=True)
class SaveBegan:
    """``save`` was called.

    Attributes:
        uri: The checkpoint.
        step: Completed optimizer steps.
        kind: "checkpoint", "weights" or "directory".
        mode: "sync" or "async".
    """

    uri: str
    step: int
    kind: str
    mode: str


@dataclass(frozen=True, slots=True)
class Staged:
    """The caller may change its tensors.

    Attributes:
        uri: The checkpoint.
        step: Completed optimizer steps; None if there is no number.
        size_bytes: Bytes of this rank's state.
        stall_s: Seconds that the call held the training thread.
    """

    uri: str
    step: int | None
    size_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Written:
    """This rank's part is durable; nothing is committed yet.

    Attributes:
        uri: The checkpoint.
        step: Completed optimizer steps; None if there is no number.
        mine: The counters of this rank.
    """

    uri: str
    step: int | None
    mine: Counters


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """The checkpoint exists.

    Attributes:
        result: What was saved.
        kind: "checkpoint", "weights" or "directory".
        stall_s: Seconds that the call held the training thread; for a synchronous save the whole call.
    """

    result: SaveResult
    kind: str
    stall_s: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Nothing was committed, or that is not known.

    Attributes:
        uri: The checkpoint.
        step: Completed optimizer steps.
        error: The class of the error, a colon, and its text.
        outcome: "failed" if nothing was committed, "unknown" if that is not known.
    """

    uri: str
    step: int
    error: str
    outcome: str


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """``if_slow="skip"``: the save before it was still under way on some rank.

    Attributes:
        uri: The checkpoint that was not saved.
        step: Its completed optimizer steps.
        in_flight: How many saves were under way.
    """

    uri: str
    step: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention decided after a commit.

    Attributes:
        kept: How many checkpoints it keeps.
        going: Those that it deletes.
    """

    kept: int
    going: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """A checkpoint's bytes are gone in this rank's domain.

    Attributes:
        uri: The checkpoint.
        save_id: The id of the save.
        reason: Why it was deleted.
    """

    uri: str
    save_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteFailed:
    """It is deleted in the log, its bytes are still here, and deleting them is tried again.

    Attributes:
        uri: The checkpoint.
        save_id: The id of the save.
        error: The class of the error, a colon, and its text.
    """

    uri: str
    save_id: str
    error: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore is done; what ``restore`` returns.

    Attributes:
        uri: The checkpoint, in the run or in one of its copies.
        step: Completed optimizer steps; None if there is no number.
        skipped: Newer checkpoints that could not be loaded and why, newest first.
        wall_s: Seconds that the restore took on this rank.
        dropped: Keys of what ranks of another world size kept for themselves (``per_rank="drop"``).
        copy_of: The URI of the run if ``uri`` is in one of its copies, because the run's own place
            has lost that save or is behind; None: read from the run.
    """

    uri: str
    step: int | None
    skipped: tuple[str, ...]
    wall_s: float
    dropped: tuple[str, ...] = ()
    copy_of: str | None = None


@dataclass(frozen=True, slots=True)
class CopyCommitted:
    """A committed checkpoint is whole at a copy's place too.

    Attributes:
        uri: The checkpoint in the run.
        copy_uri: The copy of it.
        size_bytes: Bytes of the copy.
        wall_s: Seconds that the copy took.
    """

    uri: str
    copy_uri: str
    size_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """The copy is tried again; the original stays until it is whole.

    Attributes:
        uri: The checkpoint in the run.
        copy_uri: Where the copy was to be.
        error: The class of the error, a colon, and its text.
    """

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
