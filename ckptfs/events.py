"""What a save or a load did: values counted by the writers and readers themselves. No torch.

    Counters      bytes, files, items and seconds per phase of one rank, or of all
    SaveResult    where, which save, counters of this rank, of every rank, and the total
    LoadResult    the same for a load, and the keys that strict=False skipped

Nothing here was learned by a stat or a walk: every byte was counted when it was written or read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Counters", "LoadResult", "SaveResult"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Counters:
    """One rank's work, or all ranks' together.

    size_bytes of all data files and their sidecars; payload_bytes of tensors and objects in them;
    files and items; seconds spent: plan (flattening, checks, exchange of plans), stage (device to
    host), write, sync (making names durable), read, verify, commit.
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
    """A save that is committed. ``wall_s``: seconds from the call to the commit on this rank."""

    uri: str
    step: int | None
    save_id: str
    mine: Counters
    total: Counters
    per_rank: tuple[Counters, ...]
    wall_s: float
    warnings: tuple[str, ...] = ()


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


def _values(counters: Counters) -> list[Any]:
    return [getattr(counters, field.name) for field in fields(Counters)]
