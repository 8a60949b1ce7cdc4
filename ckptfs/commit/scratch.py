"""A directory on the local disk that all ranks of a node share for a while, and that goes with them.

    <parent>/<prefix>xxxx/
      files/    what it is for
      users/    one name per rank, with the pid and start time of its process
      place     whose pids these are

The last rank to leave removes it. What killed processes left, the next one that is made there removes:
no process of its users lives. No rank waits for another to leave.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

from ckptfs.commit.owners import start_ticks, who_am_i
from ckptfs.topology.control import Control

__all__ = ["NodeScratch", "sweep"]

_FILES, _USERS, _PLACE = "files", "users", "place"


class NodeScratch:
    """Seen from one rank. ``make`` is the lead's; it tells the others, who set ``target``.

    prefix: of its name. parent: where, by default the temporary directory. mates: the node's ranks.
    """

    def __init__(self, control: Control, prefix: str, parent: str | None = None) -> None:
        self._control = control
        self._prefix = prefix
        self._parent = parent or tempfile.gettempdir()
        self.node = control.world.node
        self.mates = [r for r, world in enumerate(control.worlds) if world.node == self.node]
        self.target = ""

    @property
    def is_lead(self) -> bool:
        """Whether this rank is the lowest of its node."""
        return self.mates[0] == self._control.rank

    @property
    def path(self) -> str:
        """The directory for files."""
        return self.target

    def make(self) -> str:
        """On the lead. Returns the path, to be told to the node's other ranks."""
        os.makedirs(self._parent, exist_ok=True)
        place = who_am_i(self._control.world).node
        sweep(self._parent, self._prefix, place)
        top = tempfile.mkdtemp(prefix=self._prefix, dir=self._parent)
        os.mkdir(os.path.join(top, _USERS))
        for rank in self.mates:
            pid = self._control.worlds[rank].pid
            _write(os.path.join(top, _USERS, f"{rank}.{pid}.{start_ticks(pid)}"), "")
        _write(os.path.join(top, _PLACE), place)
        self.target = os.path.join(top, _FILES)
        os.mkdir(self.target)
        return self.target

    def leave(self) -> None:
        """This rank needs it no more; the last one of the node removes it."""
        top = os.path.dirname(self.target)
        users = os.path.join(top, _USERS)
        with contextlib.suppress(OSError):
            for name in os.listdir(users):
                if name.startswith(f"{self._control.rank}."):
                    os.unlink(os.path.join(users, name))
            os.rmdir(users)  # succeeds for the last one only
            shutil.rmtree(top, ignore_errors=True)

    def discard(self) -> None:
        """After a failure of all ranks: nothing of it stays. Every rank may call."""
        if self.target:
            shutil.rmtree(os.path.dirname(self.target), ignore_errors=True)


def sweep(parent: str, prefix: str, place: str) -> None:
    """Local. Remove directories whose users, all of this pid namespace, are gone. place: this
    process's; another container's pids mean nothing here.
    """
    for name in os.listdir(parent):
        top = os.path.join(parent, name)
        if not name.startswith(prefix) or _read(os.path.join(top, _PLACE)) != place:
            continue
        with contextlib.suppress(OSError):
            there = os.path.join(top, _USERS)
            # Gone: the last one was killed while it removed the rest.
            users = [u.split(".") for u in os.listdir(there)] if os.path.isdir(there) else []
            if not any(start_ticks(int(pid)) == ticks for _, pid, ticks in users):
                shutil.rmtree(top, ignore_errors=True)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None
