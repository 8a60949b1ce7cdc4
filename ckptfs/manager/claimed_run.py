"""A manager's run: how it is reached, claimed and released, and the pointer file for foreign readers.

What a manager stands on: its control plane, a seat for reading, and the run once it is claimed.

    Ground(place).control      opened at the first collective call
          .reading()           a seat that appends nothing: restore, steps, latest
          .claim()             at the first save; held until close

A manager that only restores never claims: an evaluation job disturbs nobody.

A small file beside the steps of a run that names the newest one, for readers that are not ours.

    run/global_step100/
    run/latest                 "global_step100"

It moves after the commit and before retention has its turn, replaced whole: whoever reads it, at any
time and after any crash, finds the name of a committed checkpoint. It is for them alone: what is the
newest, the log decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.catalog.catalog import check_run_uri, list_live, read_view
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.ownership.claim import Mode, Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.session import Place, Seat, agree_uri, control_for, open_seat, sit_down
from ckptfs.control.control import Control
from ckptfs.errors import NotFoundError, StateError
from ckptfs.manager.schedule import Rally
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri

__all__ = ["Ground", "Pointer", "Where"]

logger = logging.getLogger("ckptfs.manager")


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
                    f"WORLD_SIZE is {control.size}, but torch.distributed is not initialized",
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


# -- the pointer file ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pointer:
    """file: its name, directly in the run. text: what it says, from a checkpoint's name."""

    file: str = "latest"
    text: Callable[[str], str] = str

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or self.file.startswith("."):
            raise StateError(f"pointer {self.file!r} is not the name of a file in the run")

    def read(self, storage: Storage) -> str | None:
        """Local. What it says, by whoever wrote it; None where there is none."""
        try:
            return read_limited(storage, self.file).decode().strip()
        except NotFoundError:
            return None

    def move(self, seat: Seat, name: str) -> None:
        """Collective, after a commit. Durable when it returns; the errors are the storage's."""
        data = self.text(name).encode()

        def replace() -> None:
            if seat.placement.is_owner:
                seat.storage.replace(self.file, data)

        seat.control.step(f"move {self.file}", replace)

    def follow(self, seat: Seat, is_ours: Callable[[Seal], bool]) -> None:
        """Collective, after a claim: what a job that died between a commit and the move left undone."""

        def replace() -> None:
            view = drive(read_view(), seat.storage) if seat.placement.is_owner else None
            lives = [] if view is None else list_live(dict([view]))
            names = [seal.name for seal in lives if is_ours(seal) and not seal.failure]
            if not names and view is not None and view[1].saves:
                seat.storage.remove(self.file)  # of ours nothing is left that it could name
            if names:
                seat.storage.replace(self.file, self.text(names[-1]).encode())

        seat.control.step(f"follow with {self.file}", replace)
