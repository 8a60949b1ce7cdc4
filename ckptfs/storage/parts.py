"""How an object is cut into parts: sizes from its size, within the store's limits. Pure.

    size known      equal parts, 16 MiB or as much more as nine tenths of the parts allowed ask for
    size unknown    16 MiB, and from part 1500 (of 10,000) on parts that grow with the object

A part is what one upload must be able to hold, so it is no larger than needed: with S3's limits a
file of 150 GB still goes in parts of 16 MiB, one of 5 TiB in parts of 583 MiB. Parts that grow reach
5 TiB too, the last of them 3.4 GiB: tell the size where it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.errors import UnsupportedError
from ckptfs.storage.clients.base import Limits

__all__ = ["Cut", "plan_parts"]

_USUAL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of one object's parts. first_bytes: of the first. told_bytes: the size that was told."""

    limits: Limits
    first_bytes: int
    told_bytes: int | None

    def part_bytes(self, number: int, offset: int) -> int:
        """The size of part ``number`` (from 0), which begins at ``offset``; the last may be smaller.

        UnsupportedError: the store takes no such part.
        """
        limits = self.limits
        if number >= limits.max_parts or offset >= limits.max_object_bytes:
            raise UnsupportedError(
                f"the file is larger than {offset} bytes, the most that the store takes in "
                f"{number} parts (it takes {limits.max_parts} parts, "
                f"{limits.max_object_bytes} bytes)",
                hint="a larger part_size_bytes, more ranks, or more files",
            )
        if limits.equal_parts or (self.told_bytes is not None and offset < self.told_bytes):
            return self.first_bytes
        steps = max(1, limits.max_parts * 3 // 20)
        return _fitted(limits, max(self.first_bytes, -(-offset // steps)))


def plan_parts(
    limits: Limits, *, size_hint_bytes: int | None, asked_bytes: int | None, room_bytes: int
) -> Cut:
    """How to cut an object of about that size.

    asked_bytes: what the user set, else 16 MiB. room_bytes: what the upload may hold; a part is
    larger only where the object's size leaves no choice. UnsupportedError: no object may be so large.
    """
    size = size_hint_bytes or 0
    if size > limits.max_object_bytes:
        raise UnsupportedError(
            f"a file of {size} bytes: the store takes at most {limits.max_object_bytes}",
            hint="save with more ranks, or in more files",
        )
    wanted = min(asked_bytes or _USUAL_BYTES, room_bytes)
    # A tenth of the parts is kept for a file that turns out larger than it was told to be.
    needed = -(-size // max(1, limits.max_parts * 9 // 10))
    first = _fitted(limits, max(wanted, needed))
    return Cut(limits, first, size_hint_bytes)


def _fitted(limits: Limits, size_bytes: int) -> int:
    """Within the limits, and a multiple where the store asks for one."""
    unit = limits.part_multiple_bytes
    most = min(limits.max_part_bytes, limits.max_single_put_bytes) // unit * unit
    least = -(-limits.min_part_bytes // unit) * unit
    return min(max(-(-size_bytes // unit) * unit, least), most)
