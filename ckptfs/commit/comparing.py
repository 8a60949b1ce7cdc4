"""Compares a file that passes by, in order, with the digests of what was written.

check.update(data)   the next bytes; IntegrityError as soon as a block of them differs
check.finish()       there are no more; IntegrityError where some are missing
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from ckptfs.commit.digests import FileDigests
from ckptfs.errors import IntegrityError

__all__ = ["BlockCheck", "Check", "WholeCheck"]

Damaged = Callable[[str], IntegrityError]  # what is wrong -> an error that names the file


class Check:
    """Nothing to compare with: every byte is right."""

    def update(self, data: memoryview) -> None:
        """The next bytes; not kept."""

    def finish(self) -> None:
        """There are no more."""


class BlockCheck(Check):
    """By the digests of a data file's blocks; what lies between two items belongs to none."""

    def __init__(self, digests: FileDigests, damaged: Damaged) -> None:
        self._damaged = damaged
        self._blocks = (
            (item.offset + block.start, item.offset + block.stop, block.digest)
            for item in digests.items
            for block in item.blocks_of(0, item.length)
        )
        self._block = next(self._blocks, None)
        self._state = xxhash.xxh3_64()
        self._at = 0

    def update(self, data: memoryview) -> None:
        """As ``Check.update``, in pieces of any size."""
        first, end = self._at, self._at + len(data)
        while self._block is not None and self._block[0] < end:
            start, stop, digest = self._block
            low, high = max(start, first), min(stop, end)
            piece = data[low - first : high - first]
            if high - low == stop - start:
                found = xxhash.xxh3_64_intdigest(piece)  # a whole block in one call
            else:
                self._state.update(piece)
                if high < stop:
                    break
                found = self._state.intdigest()
                self._state.reset()
            if found != digest:
                raise self._damaged(f"bytes {start} to {stop} differ from what was written")
            self._block = next(self._blocks, None)
        self._at = end

    def finish(self) -> None:
        """As ``Check.finish``."""
        if self._block is not None:
            start, stop, _ = self._block
            raise self._damaged(f"bytes {start} to {stop} are missing: truncated")


class WholeCheck(Check):
    """By one xxh3_128 of the whole file."""

    def __init__(self, digest: str, damaged: Damaged) -> None:
        self._digest, self._damaged = digest, damaged
        self._state = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        """As ``Check.update``."""
        self._state.update(data)

    def finish(self) -> None:
        """As ``Check.finish``."""
        if self._state.hexdigest() != self._digest:
            raise self._damaged("its bytes differ from what was written")
