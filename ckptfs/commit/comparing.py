"""Compares a file that passes by, in order, with the digests of what was written.

check.update(data)   the next bytes; IntegrityError as soon as a block of them differs
check.finish()       there are no more; IntegrityError where some are missing
check.sure_bytes     so many from the start are known to be right
check.compared       so many digests were found right
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

    sure_bytes: int = 0
    compared: int = 0

    def update(self, data: memoryview) -> None:
        """The next bytes; not kept."""

    def finish(self) -> None:
        """There are no more."""


class BlockCheck(Check):
    """By the digests of a data file's blocks; the padding between two items is zeros.

    start: compare from there on only; where a block begins, as ``sure_bytes`` tells.
    """

    def __init__(self, digests: FileDigests, damaged: Damaged, start: int = 0) -> None:
        self._damaged = damaged
        self._blocks = (block for block in digests.blocks() if block[1] > start)
        self._block = next(self._blocks, None)
        self._state = xxhash.xxh3_64()
        self._at = self.sure_bytes = start

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
            self.sure_bytes = stop
            self.compared += 1
            self._block = next(self._blocks, None)
        self._at = end

    def finish(self) -> None:
        """As ``Check.finish``."""
        if self._block is not None:
            start, stop, _ = self._block
            raise self._damaged(f"bytes {start} to {stop} are missing: truncated")


class WholeCheck(Check):
    """By one xxh3_128 of the whole file; None: there is none to compare with, but ``digest`` tells it
    when all has passed.
    """

    def __init__(self, digest: str | None, damaged: Damaged) -> None:
        self._digest, self._damaged = digest, damaged
        self._state = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """Of what has passed by."""
        return self._state.hexdigest()

    def update(self, data: memoryview) -> None:
        """As ``Check.update``."""
        self._state.update(data)

    def finish(self) -> None:
        """As ``Check.finish``."""
        if self._digest is None:
            return
        if self.digest != self._digest:
            raise self._damaged("its bytes differ from what was written")
        self.compared = 1
