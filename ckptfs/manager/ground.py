"""What a manager stands on: its control plane, a seat for reading, and the run once it is claimed.

    Ground(place).control      opened at the first collective call
          .reading()           a seat that appends nothing: restore, steps, latest
          .run()               claimed at the first save, held until close

A manager that only restores never claims: an evaluation job disturbs nobody.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat, sit_down
from ckptfs.commit.run import Mode, Run, Takeover, claim
from ckptfs.commit.seat import Seat
from ckptfs.errors import StateError
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
        self._storage = storage
        self._stack = contextlib.ExitStack()
        self._control: Control | None = control
        self._root: Uri | None = None
        self._run: Run | None = None
        self._closed = False

    @property
    def control(self) -> Control:
        """Collective at its first use. StateError: several ranks and no process group, or closed."""
        self._check_open()
        if self._control is None:
            control = self._stack.enter_context(
                control_for(self.where.process_group, self.where.timeout_s)
            )
            if control.size > 1 and not control.world.has_group:
                raise StateError(
                    f"WORLD_SIZE is {control.size}, but torch.distributed is not initialised",
                    rank=control.rank,
                    hint="call torch.distributed.init_process_group() before using the manager",
                )
            self._control = control
        return self._control

    @property
    def root(self) -> Uri:
        """The run, absolute, the same on all ranks. Collective at its first use."""
        if self._root is None:
            self._root = agree_uri(self.control, self.where.uri)
        return self._root

    @property
    def held(self) -> Run | None:
        """The run, if this manager holds it already."""
        return self._run

    @contextlib.contextmanager
    def reading(self) -> Iterator[Seat]:
        """Collective. A seat that needs read permission only."""
        with self._sit(write=False) as seat:
            yield seat

    def run(self) -> Run:
        """Collective at its first use: claim the run. RunBusyError: a living owner holds it."""
        self._check_open()
        if self._run is None:
            with contextlib.ExitStack() as stack:
                seat = stack.enter_context(self._sit(write=True))
                run = claim(seat, Mode.RESUME, self.where.takeover)
                run.closing = stack.pop_all()
            self._stack.callback(run.release)
            self._run = run
        return self._run

    @contextlib.contextmanager
    def _sit(self, *, write: bool) -> Iterator[Seat]:
        if self._storage is not None:
            yield sit_down(self.control, self._storage, self.where.place, write=write)
            return
        with open_seat(self.root, self.control, self.where.place, write=write) as seat:
            yield seat

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the manager is closed", uri=self._root, hint="make another one")

    def close(self) -> None:
        """Local: release the run and leave the control plane. Harmless twice."""
        if not self._closed:
            self._closed = True
            self._stack.close()
