"""How much lies below some keys, and when it was last written to. Read-only.

    measured(storage, [".ckptfs/attempts/<id>"])    -> Tree(files, size_bytes, newest_s)
    is_link(storage, "kept")                        a way out of the run

What goes away meanwhile counts nothing. On object stores each file is one request, several at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptfs.commit.layout import AttemptKeys, shared_key
from ckptfs.commit.recovery_plan import AttemptRecord
from ckptfs.errors import NotFoundError, SymlinkError
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.tools.lines import side_by_side

__all__ = ["Tree", "attempt_tree", "files_below", "is_link", "listed", "measured"]


@dataclass(frozen=True, slots=True)
class Tree:
    """Files below some keys. newest_s: when the last of them, or an empty directory, was written, on
    the store's clock; None: nobody told.
    """

    files: int = 0
    size_bytes: int = 0
    newest_s: float | None = None

    def __add__(self, other: Tree) -> Tree:
        times = [t for t in (self.newest_s, other.newest_s) if t is not None]
        newest_s = max(times, default=None)
        return Tree(self.files + other.files, self.size_bytes + other.size_bytes, newest_s)


def measured(storage: Storage, keys: Iterable[str]) -> Tree:
    """Of files, and of all below directories."""
    files = [file for key in dict.fromkeys(keys) for file in files_below(storage, key) or [key]]
    return sum(side_by_side(partial(_stat, storage), files), Tree())


def attempt_tree(storage: Storage, record: AttemptRecord) -> Tree:
    """Of all that an attempt has written; on object stores its data lies where the save will have it."""
    shape = storage.capabilities.shape
    keys = AttemptKeys(shape, record.name, record.save_id)
    below = [keys.attempt]
    if shape is Shape.OBJECT:
        below += [shared_key(record.save_id), *([keys.projected_data] if record.name else [])]
    return measured(storage, below)


def files_below(storage: Storage, key: str) -> list[str]:
    """Keys of all files below a directory or prefix; empty where there is none. A link counts as what it
    is: what lies behind one to a directory is not removed with it, and mazes of links have no end.
    """
    found: list[str] = []
    for entry in listed(storage, key):
        below = f"{key}/{entry.name}" if key else entry.name
        if entry.is_dir and not entry.is_link:
            found += files_below(storage, below)
        else:
            found.append(below)
    return found


def listed(storage: Storage, key: str) -> Sequence[Entry]:
    """Names directly below; none where there is no directory."""
    try:
        return storage.list(key)
    except NotFoundError:
        return ()


def is_link(storage: Storage, key: str) -> bool:
    """Whether a name is a symbolic link; never where there are none."""
    path = storage.local_path(key)
    return path is not None and os.path.islink(path)


def _stat(storage: Storage, key: str) -> Tree:
    try:
        stat = storage.stat(key)
    except (NotFoundError, SymlinkError):
        return Tree()  # gone meanwhile, or a link that leads nowhere
    return Tree(0 if stat.is_dir else 1, stat.size_bytes, stat.modified_s)
