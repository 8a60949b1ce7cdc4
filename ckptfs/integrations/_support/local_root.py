"""A directory on a node's own disk that shows what a run at a URI holds: its newest checkpoint.

    root/global_step100/     the newest checkpoint, and those that are being written or sent
    root/latest              its name, replaced as a whole: a crash leaves the old or the new one
    root/.ckptfs/            an empty file for each directory that was made here; no other is removed

It is for frameworks that write and read directories below a path that their user chose. One process
per node makes the calls that change something (``on_nodes``); nodes may share the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from ckptfs.commit.paths import CONTROL
from ckptfs.control.control import Control
from ckptfs.errors import CommitConflictError, StateError
from ckptfs.storage.inflight import WatchedFile, in_flight, remove_tree

__all__ = ["LocalRoot", "is_lead"]

logger = logging.getLogger("ckptfs.integrations")

_FETCHED = "fetched"


class LocalRoot:
    """The root, seen from one process.

    ``pointer`` is the name of the file that names the newest.
    """

    def __init__(self, path: str | os.PathLike[str], pointer: str = "latest") -> None:
        self.path = os.path.abspath(path)
        self._pointer = pointer
        self._marks = os.path.join(self.path, CONTROL)
        self._fetched = os.path.join(self._marks, _FETCHED)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` is this root, also by another spelling or a link."""
        return os.path.realpath(path) == os.path.realpath(self.path)

    def folder(self, name: str) -> str:
        """Return the directory of a checkpoint."""
        return os.path.join(self.path, name)

    def holds(self, name: str, path: str) -> bool:
        """Whether ``path`` is that directory or something in it."""
        return Path(os.path.abspath(path)).is_relative_to(self.folder(name))

    def on_nodes(self, control: Control, label: str, act: Callable[[], None]) -> None:
        """Run ``act`` once per node; errors reach all ranks. Collective."""
        control.step(label, lambda: act() if is_lead(control) else None)

    def bring(
        self,
        control: Control,
        fetch: Callable[[contextlib.ExitStack, str], str | None],
        *,
        newest: bool,
    ) -> str | None:
        """Fetch a checkpoint and give it its name here, on every node; return that name.

        Collective. ``fetch`` opens, on the stack, a checkpoint that is downloaded into the given
        directory, and returns its name; None if there is none. With ``newest``, the pointer then
        names it, and the others are removed.
        """
        self.on_nodes(control, "clear", lambda: remove_tree(self._fetched))
        with contextlib.ExitStack() as stack:
            name = fetch(stack, self._fetched)
        if name is None:
            return None
        self.on_nodes(control, "make room", lambda: self.make_room(name))
        self.on_nodes(control, "place it", lambda: self._place(name))
        if newest:
            self.on_nodes(control, "keep it", lambda: self.keep(name))
        return name

    def make_room(self, name: str) -> None:
        """Make sure that old files do not get in the way of a new checkpoint, or become part of it.

        What a killed save left is removed; what was not made here is moved aside.
        """
        folder = self.folder(name)
        with in_flight("stat", folder):
            exists = os.path.lexists(folder)
        if exists:
            if os.path.exists(self._mark(name)):
                # Another node, which shares the disk, may be doing the same.
                remove_tree(folder)
            else:
                moved_to = f"{folder}.before"
                # Checked again: another node that shares the disk may have moved it since.
                if os.path.lexists(moved_to) and os.path.lexists(folder):
                    raise CommitConflictError(
                        f"neither {folder} nor {moved_to} was written by this run",
                        hint="move one of them away",
                    )
                logger.warning(
                    "%s was not written by this run: it was moved to %s", folder, moved_to
                )
                # The other node was first.
                with contextlib.suppress(FileNotFoundError), in_flight("rename", moved_to):
                    os.rename(folder, moved_to)
        with in_flight("mkdir", self._marks):
            os.makedirs(self._marks, exist_ok=True)
            Path(self._mark(name)).touch()

    def _place(self, name: str) -> None:
        try:
            with in_flight("rename", self.folder(name)):
                os.rename(self._fetched, self.folder(name))
        except FileNotFoundError:
            # Another node, which shares the disk, was first.
            if not os.path.isdir(self.folder(name)):
                raise

    def keep(self, name: str, *leaving: str) -> None:
        """Make this checkpoint the newest, and remove the others that were made here.

        The pointer names it, durably. Those of killed processes are removed too. ``leaving`` names
        checkpoints under way; they stay.
        """
        target = os.path.join(self.path, self._pointer)
        # Not named by the pid: nodes that share the disk may be containers, where every lead is process 1.
        part = f"{target}.{uuid.uuid4().hex}.tmp"
        try:
            with WatchedFile(part, "wb") as file:
                file.write(name.encode())
                file.sync()
            with in_flight("rename", target):
                os.replace(part, target)
        finally:
            Path(part).unlink(missing_ok=True)
        self.forget(name, *leaving)

    def refuse_leftovers(self) -> None:
        """Refuse to resume from another run's checkpoint, if nothing was ever saved at the URI.

        Raises StateError if the pointer names a checkpoint that was made here all the same: it is
        another run's, and a framework that reads the pointer would resume from it.
        """
        try:
            with WatchedFile(os.path.join(self.path, self._pointer)) as file:
                text = file.read().decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return
        name = text.strip()
        if os.path.isfile(self._mark(name)):
            raise StateError(
                f"{self._pointer} at {self.path} names {name} of another run: nothing was ever saved"
                " at this URI",
                hint="give the run a root of its own, or remove the existing files",
            )

    def forget(self, *name: str) -> None:
        """Remove the directories that were made here, except the ``name`` ones.

        Those of killed processes are removed too.
        """
        for other in os.listdir(self._marks) if os.path.isdir(self._marks) else ():
            if other not in {*name, _FETCHED}:
                remove_tree(self.folder(other))
                Path(self._mark(other)).unlink(missing_ok=True)

    def _mark(self, name: str) -> str:
        return os.path.join(self._marks, name)


def is_lead(control: Control) -> bool:
    """Whether this rank is the lowest of its node."""
    nodes = [world.node for world in control.worlds]
    return nodes.index(control.world.node) == control.rank
