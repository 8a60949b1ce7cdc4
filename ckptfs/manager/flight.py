"""The saves that are on their way, oldest first, and who hears when one failed.

    flight.settle(limit)   waits until fewer than limit are left; raises what failed, once
    flight.poll()          raises what is known to have failed; does not take it away

Every rank starts the same saves in the same order and waits for the same ones before the same call,
so a failure is raised on all ranks at the same call: a rank that raised alone would leave the
others waiting in a collective call that it never makes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Protocol

from ckptfs.events import SaveResult

__all__ = ["Flight", "Pending"]


class Pending(Protocol):
    """A save on its way, as ``async_save`` returns it."""

    uri: str

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait; raises what the save raised, TimeoutError after timeout_s."""

    def done(self) -> bool:
        """Whether it is committed or failed, as far as this rank knows."""


class Flight:
    """One thread: the one that makes the manager's calls."""

    def __init__(self) -> None:
        self._saves: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, save: Pending) -> None:
        """One more is on its way."""
        self._saves.append(save)

    def oldest_is_done(self) -> bool:
        """Whether this rank knows the outcome of the oldest one."""
        return not self._saves or self._saves[0].done()

    def is_done(self) -> bool:
        """Whether this rank knows the outcome of all of them."""
        return all(save.done() for save in self._saves)

    def wait_done(self, timeout_s: float | None) -> bool:
        """Wait until all have ended, for up to ``timeout_s``; whether they have. Settles nothing."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self._saves:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(Exception):  # the save's own failure: settle raises it
                save.result(left)
        return self.is_done()

    def settle(self, limit: int) -> SaveResult | None:
        """Wait until fewer than ``limit`` are on their way; the result of the last that was waited for.

        Raises the first failure after all that had to be waited for have ended; it is raised once.
        """
        last: SaveResult | None = None
        failed: BaseException | None = None
        while len(self._saves) >= max(1, limit):
            try:
                last = self._saves[0].result()
            except Exception as error:  # noqa: BLE001 - raised below, after the others
                failed = failed or error
            self._saves.popleft()
        if failed is not None:
            raise failed
        return last

    def poll(self) -> None:
        """Raise the failure of a save that has ended, if there is one. It is raised again by the next
        ``settle``: ranks do not poll at the same moment.
        """
        for save in self._saves:
            if save.done():
                save.result(0)
