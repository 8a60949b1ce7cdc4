"""What one upload may hold, and how many of its parts may be under way.

    buffer    memory for one part: one that a part has left, or fresh; waits while there is no room
    begin     a part goes out; waits while enough are under way
    end       it is done, or failed: its buffer is free, its error is everybody's

Waiting needs nothing but this upload's own parts, so no two uploads can wait for each other.
"""

from __future__ import annotations

import threading

import numpy as np

__all__ = ["Room"]


class Room:
    """The bounds of one upload. memory_bytes: of all buffers. concurrency: parts under way at once."""

    def __init__(self, memory_bytes: int, concurrency: int) -> None:
        self._memory_bytes = memory_bytes
        self._concurrency = concurrency
        self._changed = threading.Condition()
        self._spare: list[memoryview] = []
        self.held_bytes = 0
        self.under_way = 0
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    def buffer(self, size_bytes: int) -> memoryview:
        """Memory for one part, whatever is in it. Waits; raises a part's error."""
        with self._changed:
            while self._spare:
                found = self._spare.pop()
                if len(found) == size_bytes:
                    return found
                self.held_bytes -= len(found)
            self._changed.wait_for(lambda: self._fits(size_bytes))
            self._check()
            self.held_bytes += size_bytes
        # Nobody touches what no byte is copied to: most of a part may be lent.
        return np.empty(size_bytes, dtype=np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """A buffer that never went out."""
        with self._changed:
            self.held_bytes -= len(buffer)

    def begin(self) -> None:
        """A part goes out. Waits while enough are under way; raises a part's error."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or self.under_way < self._concurrency
            )
            self._check()
            self.under_way += 1

    def end(self, buffer: memoryview | None, error: BaseException | None) -> None:
        """A part is done, or failed; its buffer is free."""
        with self._changed:
            self.under_way -= 1
            if buffer is not None:
                self._spare.append(buffer)
            if error is not None and self.error is None:
                self.error = error
                self.stopped.set()
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when nothing is under way; raises a part's error."""
        with self._changed:
            self._changed.wait_for(lambda: self.under_way == 0)
            self._check()

    def stop(self, wait_s: float) -> bool:
        """No part is tried again; whether all under way ended within ``wait_s``."""
        self.stopped.set()
        with self._changed:
            done = self._changed.wait_for(lambda: self.under_way == 0, wait_s)
            while self._spare:
                self.held_bytes -= len(self._spare.pop())
            return done

    def _fits(self, size_bytes: int) -> bool:
        while self._spare and self.held_bytes + size_bytes > self._memory_bytes:
            self.held_bytes -= len(self._spare.pop())
        return (
            self.error is not None
            or self.under_way == 0  # a part that is larger than the bound goes alone
            or self.held_bytes + size_bytes <= self._memory_bytes
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
