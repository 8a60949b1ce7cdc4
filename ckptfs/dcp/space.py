"""Will it fit? Planned bytes and inodes against free space, per domain, before a byte is written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.commit.seat import Seat
from ckptfs.dcp.layout import files_for
from ckptfs.dcp.pipeline import PlannedSave
from ckptfs.errors import NoSpaceError
from ckptfs.storage.base import Space

__all__ = ["check_space"]

logger = logging.getLogger(__name__)

_SMALL_FILES = 8  # record, manifests, metadata, log entry and their directories


@dataclass(frozen=True, slots=True)
class _Need:
    domain: str
    size_bytes: int
    files: int
    space: Space | None


def check_space(
    seat: Seat, planned: PlannedSave, threads: int | None, *, required: bool
) -> tuple[str, ...]:
    """Collective. A warning per domain that is too small, or NoSpaceError on all ranks.

    Advice, not a reservation: others write to the disk too, and quotas need not show.
    """
    placement = seat.placement

    def local() -> _Need:
        at_once = files_for(seat.storage, "", planned.items, threads)
        files = 2 * min(at_once, len(planned.items))
        space = seat.storage.space() if placement.is_owner else None
        return _Need(placement.mine.id, planned.size_bytes, files, space)

    def decide(needs: Sequence[_Need]) -> tuple[str, ...]:
        short = tuple(text for text in _shortages(needs) if text)
        if short and required:
            raise NoSpaceError(
                "; ".join(short),
                uri=seat.storage.root,
                hint="nothing was written; free space, or pass require_space=False to try",
            )
        return short

    warnings = seat.control.step("space", local, decide)
    if placement.is_owner:
        for text in warnings:
            logger.warning("%s: %s", seat.storage.root, text)
    return warnings


def _shortages(needs: Sequence[_Need]) -> list[str]:
    """What each domain lacks, as a sentence. Pure."""
    lacking = []
    for domain in dict.fromkeys(need.domain for need in needs):
        here = [need for need in needs if need.domain == domain]
        space = next((need.space for need in here if need.space is not None), None)
        if space is None:
            continue
        size = sum(need.size_bytes for need in here)
        files = sum(need.files for need in here) + _SMALL_FILES
        if space.free_bytes is not None and size > space.free_bytes:
            lacking.append(f"domain {domain}: {size} bytes planned, {space.free_bytes} free")
        if space.free_inodes is not None and files > space.free_inodes:
            lacking.append(
                f"domain {domain}: {files} files planned, {space.free_inodes} inodes free"
            )
    return lacking
