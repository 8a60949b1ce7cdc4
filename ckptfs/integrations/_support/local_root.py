"""A directory on a node's own disk that shows what a run at a URI holds: its newest checkpoint.

    root/global_step100/     the newest checkpoint, and those that are being written or sent
    root/latest              its name, replaced whole: a crash leaves the old or the new one
    root/.ckptfs/            one empty file for each directory that was made here: only these are removed

For frameworks that write and read directories below a path of their user's. What changes something is
called by one process per node (``on_nodes``); nodes may share the disk.
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
    """Seen from one process. path: the root. pointer: the name of the file that names the newest."""

    def __init__(self, path: str | os.PathLike[str], pointer: str = "latest") -> None:
        self.path = os.path.abspath(path)
        self._pointer = pointer
        self._marks = os.path.join(self.path, CONTROL)
        self._fetched = os.path.join(self._marks, _FETCHED)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is this root, by whatever way."""
        return os.path.realpath(path) == os.path.realpath(self.path)

    def folder(self, name: str) -> str:
        """The directory of a checkpoint."""
        return os.path.join(self.path, name)

    def holds(self, name: str, path: str) -> bool:
        """Whether a path is that directory or lies in it."""
        return Path(os.path.abspath(path)).is_relative_to(self.folder(name))

    def on_nodes(self, control: Control, label: str, act: Callable[[], None]) -> None:
        """Collective. Once per node; errors reach all ranks."""
        control.step(label, lambda: act() if is_lead(control) else None)

    def bring(
        self,
        control: Control,
        fetch: Callable[[contextlib.ExitStack, str], str | None],
        *,
        newest: bool,
    ) -> str | None:
        """Collective. What ``fetch`` brings gets its name here, on every node; returns that.

        fetch: opens, on the stack, a checkpoint that is downloaded into the directory it is given, and
        says its name; None: there is nothing. newest: the pointer names it, and the others go.
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
        """Old files are not in the way of a new checkpoint, and not part of it: what a killed save left is
        removed, and what was not made here is moved aside.
        """
        folder = self.folder(name)
        with in_flight("stat", folder):
            there = os.path.lexists(folder)
        if there:
            if os.path.exists(self._mark(name)):
                # Another node, which shares the disk, may be doing the same.
                remove_tree(folder)
            else:
                aside = f"{folder}.before"
                # Asked again: another node, which shares the disk, may have moved it between.
                if os.path.lexists(aside) and os.path.lexists(folder):
                    raise CommitConflictError(
                        f"neither {folder} nor {aside} was written by this run",
                        hint="move one of them away",
                    )
                logger.warning("%s was not written by this run: it was moved to %s", folder, aside)
                # That node was first.
                with contextlib.suppress(FileNotFoundError), in_flight("rename", aside):
                    os.rename(folder, aside)
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

    def keep(self, name: str, *going: str) -> None:
        """This is the newest: the pointer says so, durably, and the others that were made here go, those of
        killed processes too. going: what is on its way stays.
        """
        target = os.path.join(self.path, self._pointer)
        # Not by its pid: nodes that share the disk may be containers, where every lead is process 1.
        part = f"{target}.{uuid.uuid4().hex}.tmp"
        try:
            with WatchedFile(part, "wb") as file:
                file.write(name.encode())
                file.sync()
            with in_flight("rename", target):
                os.replace(part, target)
        finally:
            Path(part).unlink(missing_ok=True)
        self.forget(name, *going)

    def refuse_leftovers(self) -> None:
        """Nothing was ever saved at the URI. StateError: the pointer names a checkpoint that was made here
        all the same, so of another run; a framework that reads it would go on from that one.
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

    def forget(self, *kept: str) -> None:
        """Remove the directories that were made here, by killed processes too, but for some."""
        for other in os.listdir(self._marks) if os.path.isdir(self._marks) else ():
            if other not in {*kept, _FETCHED}:
                remove_tree(self.folder(other))
                Path(self._mark(other)).unlink(missing_ok=True)

    def _mark(self, name: str) -> str:
        return os.path.join(self._marks, name)


def is_lead(control: Control) -> bool:
    """Whether this rank is the lowest of its node."""
    nodes = [world.node for world in control.worlds]
    return nodes.index(control.world.node) == control.rank
