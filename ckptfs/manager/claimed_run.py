"""A manager's run: opening, claiming and releasing it, and the pointer file for foreign readers.

``RunHandle`` holds what a manager works with, and opens it when it is first needed:

    RunHandle(where).control   the control plane, opened at the first collective call
          .reading()           a session that appends nothing: for restore, steps, latest
          .claim()             the claimed run, from the first save until close

A manager that only restores never claims the run, so an evaluation job does not disturb the job
that trains.

``Pointer`` is a small file in the run, next to its step directories. It names the newest
checkpoint, for readers that do not know ckptfs:

    run/global_step100/
    run/latest                 "global_step100"

The pointer moves after the commit and before retention, and is replaced as a whole. A reader finds
the name of a committed checkpoint in it at any time and after any crash. ckptfs itself never relies
on it: the log decides which checkpoint is the newest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.catalog.catalog import check_run_uri, list_live
from ckptfs.commit.catalog.locate import owner_view
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.operations import read_limited
from ckptfs.commit.ownership.claim import Mode, Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.session import (
    Place,
    RunSession,
    agree_uri,
    control_for,
    open_session,
    start_session,
)
from ckptfs.control.control import Control
from ckptfs.errors import NotFoundError, StateError
from ckptfs.manager.schedule import Rendezvous
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri

__all__ = ["Pointer", "RunHandle", "Where"]

logger = logging.getLogger("ckptfs.manager")


@dataclass(frozen=True, slots=True)
class Where:
    """What the user passed about the place: the run, how to reach it, and who takes part."""

    uri: Any
    place: Place
    process_group: Any = None
    timeout_s: float | None = None
    takeover: Takeover = Takeover.AUTO


class RunHandle:
    """What a manager works with. Opened piece by piece, closed as a whole.

    Only the thread that makes the manager's calls may use it.
    """

    def __init__(
        self, where: Where, *, control: Control | None = None, storage: Storage | None = None
    ) -> None:
        """Use the caller's ``control`` and ``storage`` where given, instead of opening them.

        The caller stays responsible for closing both.
        """
        self.where = where
        self.owner = "a manager"  # the name in messages of the object that claims the run
        self._storage = storage
        self._stack = contextlib.ExitStack()
        self._controls = contextlib.ExitStack()  # closed last; nothing in it refers to the run
        self._guests = contextlib.ExitStack()  # users of control and run: closed first
        self._control: Control | None = control
        self._root: Uri | None = None
        self._rendezvous: Rendezvous | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def control(self) -> Control:
        """The control plane. Collective at its first use.

        Raises StateError if there are several ranks and no process group, or if the manager is
        closed.
        """
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
        if self._rendezvous is None and self._control.size > 1:
            # Made now, while all ranks are present: when a run fails, some of them are missing.
            self._rendezvous = Rendezvous(self._control)
            self._guests.callback(self._rendezvous.close)
        return self._control

    @property
    def root(self) -> Uri:
        """The run's absolute URI, the same on all ranks. Collective at its first use."""
        if self._root is None:
            self._root = agree_uri(self.control, self.where.uri)
        return self._root

    @contextlib.contextmanager
    def reading(self) -> Iterator[RunSession]:
        """Yield a session that needs read permission only. Collective."""
        with self._open_session(write=False) as session:
            yield session

    def claim(self, *, defer_deletes: bool = False) -> Run:
        """Claim the run. Collective, and called once.

        Raises RunBusyError if a living owner holds the run.
        """
        self.check_open()
        options = self.where.place.storage_options
        check_run_uri(self.control, self.root, options, self._storage)
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(self._open_session(write=True))
            run = claim(
                session,
                Mode.RESUME,
                self.where.takeover,
                defer_deletes=defer_deletes,
                caller=Caller(self.owner, behind=self._controls),
            )
            run.closing.push(stack.pop_all())
        self._stack.callback(run.release)
        return run

    def reach_all(self, what: str, timeout_s: float) -> None:
        """Return when every rank has called this, or fail on every rank. Collective.

        It is for a run that fails. Raises DeadlineError or CollectiveError if not all ranks called
        within ``timeout_s`` seconds.
        """
        if self.control.size > 1 and self._rendezvous is not None:
            self._rendezvous.reach(what, timeout_s)

    def before_release(self, close: Callable[[], object]) -> None:
        """Register a function to call when the manager closes, before the run is released."""
        self._guests.callback(close)

    def _open_session(self, *, write: bool) -> contextlib.AbstractContextManager[RunSession]:
        # Not a generator: the run keeps the context until its end, and a generator's frame would keep
        # the manager alive.
        if self._storage is not None:
            session = start_session(self.control, self._storage, self.where.place, write=write)
            return contextlib.nullcontext(session)
        return open_session(self.root, self.control, self.where.place, write=write)

    @property
    def is_closed(self) -> bool:
        """Whether close() was called, or this is the child of a fork: the run is its parent's."""
        return self._closed or os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise StateError if it is closed."""
        if self.is_closed:
            raise StateError("the manager is closed", uri=self._root, hint="make another one")

    def close(self) -> None:
        """Release the run and leave the control plane. Local. A second call does nothing."""
        if not self.is_closed:
            self._closed = True
            with self._controls, self._stack:
                self._guests.close()


# -- the pointer file ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pointer:
    """A small file in the run that names its newest checkpoint.

    Attributes:
        file: Its name, directly in the run.
        text: Makes the content of the file from the name of a checkpoint.
    """

    file: str = "latest"
    text: Callable[[str], str] = str

    def __post_init__(self) -> None:
        if not self.file or "/" in self.file or self.file.startswith("."):
            raise StateError(f"pointer {self.file!r} is not the name of a file in the run")

    def read(self, storage: Storage) -> str | None:
        """Return the content of the file, or None if there is none. Local.

        Another program may have written the file.
        """
        try:
            return read_limited(storage, self.file).decode().strip()
        except NotFoundError:
            return None

    def move(self, session: RunSession, name: str) -> None:
        """Let the file name the checkpoint ``name``. Collective, after a commit.

        The change is durable when this returns. Errors of the storage are raised.
        """
        data = self.text(name).encode()

        def replace() -> None:
            if session.placement.is_owner:
                session.storage.replace(self.file, data)

        session.control.step(f"move {self.file}", replace)

    def follow(self, session: RunSession, is_ours: Callable[[Seal], bool]) -> None:
        """Let the file name the newest checkpoint of the log. Collective, after a claim.

        An earlier job may have died after its commit and before it moved the pointer. The pointer
        may name only saves for which ``is_ours`` is true.
        """

        def replace() -> None:
            view = owner_view(session)
            lives = [] if view is None else list_live(dict([view]))
            names = [seal.name for seal in lives if is_ours(seal) and not seal.failure]
            if not names and view is not None and view[1].saves:
                # no checkpoint of ours is left that it could name
                session.storage.remove(self.file)
            if names:
                session.storage.replace(self.file, self.text(names[-1]).encode())

        session.control.step(f"follow with {self.file}", replace)
