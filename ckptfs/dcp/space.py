"""Will it fit? Planned bytes and inodes against free space, per domain, before a byte is written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptfs.commit.seat import Seat
from ckptfs.dcp.layout import files_for
from ckptfs.dcp.pipeline import PlannedSave
from ckptfs.errors import NoSpaceError
from ckptfs.storage.base import Space
from ckptfs.topology.verdict import apart

__all__ = ["Room", "check_space"]

logger = logging.getLogger(__name__)

_SMALL_FILES = 8  # record, manifests, metadata, log entry and their directories


@dataclass(frozen=True, slots=True)
class _Need:
    domain: str
    size_bytes: int
    files: int
    space: Space | None


@dataclass(frozen=True, slots=True)
class Room:
    """What a save writes in the domain of this rank, and what was free there before it began.

    warnings: a sentence for each domain that was too small. free_bytes: None where it is not known.
    """

    warnings: tuple[str, ...]
    planned_bytes: int
    free_bytes: int | None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """A NoSpaceError that passes says how much is missing."""
        try:
            yield
        except NoSpaceError as error:
            error.message = f"{error.message}: {self._missing()}"
            raise

    def _missing(self) -> str:
        text = f"{_megabytes(self.planned_bytes)} to write"
        if self.free_bytes is None:
            return text
        text += f", {_megabytes(self.free_bytes)} were free"
        missing = self.planned_bytes - self.free_bytes
        return f"{_megabytes(missing)} missing ({text})" if missing > 0 else text


def check_space(seat: Seat, planned: PlannedSave, threads: int | None, *, required: bool) -> Room:
    """Collective. What is to be written and what is free, or NoSpaceError on all ranks.

    Advice, not a reservation: others write to the disk too, and quotas need not show.
    """
    placement = seat.placement

    def local() -> _Need:
        at_once = files_for(seat.storage, "", planned.items, threads)
        files = 2 * min(at_once, len(planned.items))
        space = seat.storage.space() if placement.is_owner else None
        return _Need(placement.mine.id, planned.size_bytes, files, space)

    def decide(needs: Sequence[_Need]) -> tuple[tuple[str, ...], tuple[int, int | None]]:
        short = tuple(text for text in _shortages(needs) if text)
        if short and required:
            raise NoSpaceError(
                "; ".join(short),
                uri=seat.storage.root,
                hint="nothing was written; free space, or pass require_space=False to try",
            )
        rooms = _rooms(needs)
        return apart(short, [rooms[need.domain] for need in needs])

    warnings, (planned_bytes, free_bytes) = seat.control.step("space", local, decide)
    if placement.is_owner:
        for text in warnings:
            logger.warning("%s: %s", seat.storage.root, text)
    return Room(warnings, planned_bytes, free_bytes)


def _rooms(needs: Sequence[_Need]) -> dict[str, tuple[int, int | None]]:
    """For each domain the planned bytes of its ranks and what is free. Pure."""
    rooms: dict[str, tuple[int, int | None]] = {}
    for need in needs:
        planned, free = rooms.get(need.domain, (0, None))
        here = None if need.space is None else need.space.free_bytes
        rooms[need.domain] = (planned + need.size_bytes, free if here is None else here)
    return rooms


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


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
