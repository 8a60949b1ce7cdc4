"""A held run: what a claim gives to every rank, and how it is left in peace.

    held = claim(seat)          the fence stands, the lease is kept
    save(..., run=held)         checks that the target lies in it
    held.release()              chores end, the lease stops, the owners append "released"

Without the release, after a crash, the next owner waits for the lease to stand still.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ckptfs.commit.decisions import Refusal
from ckptfs.commit.entries import Generation, Release, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.lease import Keeper
from ckptfs.commit.log import Appended, Refused, append
from ckptfs.commit.ops import Program, drive
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import fresh_ids, now_text
from ckptfs.errors import (
    CkptfsError,
    StateError,
    StorageError,
)
from ckptfs.uri import Uri

__all__ = ["Run", "release_fence"]

logger = logging.getLogger(__name__)

CHORES_S = 30.0  # how long a release waits for deletes under way


@dataclass
class Run:
    """A held run. Pass it to ``save(..., run=run)``; leaving the ``with`` block releases it.

    uri: the run. generation: (number, nonce) of the fence. in_doubt: names of saves whose domains
    are out of reach. Every rank holds one; release() is local and only owners write. aside: where its
    asynchronous saves run; they end before it is released. plans: what ``ckptfs.dcp`` knows of the last
    save, so that the next one need not say it again.
    """

    uri: Uri
    generation: Generation
    seat: Seat
    in_doubt: tuple[str, ...] = ()
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    aside: Any = field(default=None, repr=False)
    plans: Any = field(default=None, repr=False)
    _keeper: Keeper | None = field(default=None, repr=False)
    _released: bool = field(default=False, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def check(self, target: Uri) -> None:
        """StateError unless ``target`` lies directly in this run and the run is still held."""
        if target.parent != self.uri:
            raise StateError(
                "the checkpoint is not directly in the run that was passed",
                uri=target,
                hint=f"the run is {self.uri}",
            )
        self.check_held()

    def check_held(self) -> None:
        """StateError once the run was released: nobody talks through its control plane any more."""
        if self._released:
            raise StateError("the run was released", uri=self.uri, hint="prepare it again")

    def release(self) -> None:
        """Leave in peace, so that the next owner need not wait. Local; harmless twice.

        Without it, after a crash, the next owner waits for the lease to stand still.
        """
        if self._released or os.getpid() != self._pid:
            return  # in the child of a fork: it is the parent's, who goes on
        if self.aside is not None:
            self.aside.close()
        self._released, self.plans = True, None
        with self.closing:
            if self.seat.background is not None:
                self.seat.background.close(CHORES_S)
            if self._keeper is not None:
                self._keeper.stop()
            if self.seat.placement.is_owner:
                self._append_release()

    def _append_release(self) -> None:
        try:
            known = self.seat.known.state if self.seat.caps.exclusive_create else None
            world = self.seat.control.world
            stamp = Stamp(now_text(), world.hostname, os.getpid(), self.seat.control.rank)
            program = release_fence(self.generation, fresh_ids(), known, stamp)
            drive(program, self.seat.storage, deadline_s=10.0)
        except (StorageError, CkptfsError) as error:
            logger.warning("the run was not released, the next owner will wait: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None and self.aside is not None and os.getpid() == self._pid:
            # A storage that hangs must not keep the exception from its reader.
            aside, self.aside = self.aside, None
            aside.leave()
        self.release()


def release_fence(
    generation: Generation, ids: Iterator[str], known: LogState | None, stamp: Stamp
) -> Program[Appended | Refused[Refusal]]:
    """Append that the owner of ``generation`` left; refused where it is not the newest any more."""

    def decide(state: LogState) -> Release | Refused[Refusal]:
        if state.generation != generation or state.released:
            return Refused(Refusal.NOTHING, state)
        return Release(generation)

    return (yield from append(decide, write_id=next(ids), stamp=stamp, state=known))
