"""What a manager stands on: its control plane, a seat for reading, and the run once it is claimed.

    Ground(place).control      opened at the first collective call
          .reading()           a seat that appends nothing: restore, steps, latest
          .claim()             at the first save; held until close

A manager that only restores never claims: an evaluation job disturbs nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.claim import Mode, Takeover, claim
from ckptfs.commit.misplaced import check_run_uri
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat, sit_down
from ckptfs.commit.run import Caller, Run
from ckptfs.commit.seat import Seat
from ckptfs.errors import StateError
from ckptfs.manager.rally import Rally
from ckptfs.storage.base import Storage
from ckptfs.topology.control import Control
from ckptfs.uri import Uri

__all__ = ["Ground", "Where"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Where:
    """What the user said of the place: the run, how to reach it, and who takes part."""

    uri: Any
    place: Place
    process_group: Any = None
    timeout_s: float | None = None
    takeover: Takeover = Takeover.AUTO


class Ground:
    """Opened piece by piece, closed as one. One thread: the one that makes the manager's calls."""

    def __init__(
        self, where: Where, *, control: Control | None = None, storage: Storage | None = None
    ) -> None:
        """control, storage: the caller's own, instead of opening them; they stay the caller's."""
        self.where = where
        self.owner = "a manager"  # what claims the run, for messages
        self._storage = storage
        self._stack = contextlib.ExitStack()
        self._controls = contextlib.ExitStack()  # closed last; nothing in it refers to the run
        self._guests = contextlib.ExitStack()  # who uses control and run: they leave first
        self._control: Control | None = control
        self._root: Uri | None = None
        self._rally: Rally | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def control(self) -> Control:
        """Collective at its first use. StateError: several ranks and no process group, or closed."""
        self.check_open()
        if self._control is None:
            control = self._controls.enter_context(
                control_for(self.where.process_group, self.where.timeout_s)
            )
            if control.size > 1 and not control.world.has_group:
                raise StateError(
                    f"WORLD_SIZE is {control.size}, but torch.distributed is not initialised",
                    rank=control.rank,
                    hint="call torch.distributed.init_process_group() before using the manager",
                )
            self._control = control
        if self._rally is None and self._control.size > 1:
            # Now, while all ranks are here: when a run fails, some of them are not.
            self._rally = Rally(self._control)
            self._guests.callback(self._rally.close)
        return self._control

    @property
    def root(self) -> Uri:
        """The run, absolute, the same on all ranks. Collective at its first use."""
        if self._root is None:
            self._root = agree_uri(self.control, self.where.uri)
        return self._root

    @contextlib.contextmanager
    def reading(self) -> Iterator[Seat]:
        """Collective. A seat that needs read permission only."""
        with self._sit(write=False) as seat:
            yield seat

    def claim(self, *, defer_deletes: bool = False) -> Run:
        """Collective, once: claim the run. RunBusyError: a living owner holds it."""
        self.check_open()
        options = self.where.place.storage_options
        check_run_uri(self.control, self.root, options, self._storage)
        with contextlib.ExitStack() as stack:
            seat = stack.enter_context(self._sit(write=True))
            run = claim(
                seat,
                Mode.RESUME,
                self.where.takeover,
                defer_deletes=defer_deletes,
                caller=Caller(self.owner, behind=self._controls),
            )
            run.closing.push(stack.pop_all())
        self._stack.callback(run.release)
        return run

    def reach_all(self, what: str, timeout_s: float) -> None:
        """Collective, for a run that fails: return when every rank has called, or fail everywhere.

        DeadlineError, CollectiveError: not all came within timeout_s.
        """
        if self.control.size > 1 and self._rally is not None:
            self._rally.reach(what, timeout_s)

    def before_release(self, close: Callable[[], object]) -> None:
        """Call this when the manager closes, before the run is released."""
        self._guests.callback(close)

    def _sit(self, *, write: bool) -> contextlib.AbstractContextManager[Seat]:
        # No generator: its frame, which the run keeps for its end, would keep the manager alive.
        if self._storage is not None:
            seat = sit_down(self.control, self._storage, self.where.place, write=write)
            return contextlib.nullcontext(seat)
        return open_seat(self.root, self.control, self.where.place, write=write)

    @property
    def is_closed(self) -> bool:
        """Whether close() was called, or this is the child of a fork: the run is the parent's."""
        return self._closed or os.getpid() != self._pid

    def check_open(self) -> None:
        """StateError once it is closed."""
        if self.is_closed:
            raise StateError("the manager is closed", uri=self._root, hint="make another one")

    def close(self) -> None:
        """Local: release the run and leave the control plane. Harmless twice."""
        if not self.is_closed:
            self._closed = True
            with self._controls, self._stack:
                self._guests.close()
