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

from ckptfs.commit.ownership.recovery_plan import AttemptRecord
from ckptfs.commit.paths import AttemptKeys, shared_key
from ckptfs.errors import NotFoundError, SymlinkError
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.tools.lines import side_by_side

__all__ = ["Tree", "attempt_tree", "files_below", "is_link", "listed", "measured"]


@dataclass(frozen=True, slots=True)
class Tree:
    """Files below some keys.

    Attributes:
        files: How many.
        size_bytes: Their bytes.
        newest_s: When the last of them, or an empty directory, was written, in seconds of Unix time on the
            server's clock; None: not known.
    """

    files: int = 0
    size_bytes: int = 0
    newest_s: float | None = None

    def __add__(self, other: Tree) -> Tree:
        times = [t for t in (self.newest_s, other.newest_s) if t is not None]
        newest_s = max(times, default=None)
        return Tree(self.files + other.files, self.size_bytes + other.size_bytes, newest_s)


def measured(storage: Storage, keys: Iterable[str]) -> Tree:
    """Return files, bytes and age of the files ``keys`` of ``storage``, and of all below directories among them."""
    files = [file for key in dict.fromkeys(keys) for file in files_below(storage, key) or [key]]
    return sum(side_by_side(partial(_stat, storage), files), Tree())


def attempt_tree(storage: Storage, record: AttemptRecord) -> Tree:
    """Measure all that an attempt has written.

    On object stores its data is where the save will have it.

    Args:
        storage: The run's.
        record: The attempt.

    Returns:
        Its files, bytes and age.
    """
    shape = storage.capabilities.shape
    keys = AttemptKeys(shape, record.name, record.save_id)
    below = [keys.attempt]
    if shape is Shape.OBJECT:
        below += [shared_key(record.save_id), *([keys.projected_data] if record.name else [])]
    return measured(storage, below)


def files_below(storage: Storage, key: str) -> list[str]:
    """List the keys of all files below a directory or prefix; empty where there is none.

    A link counts as what it is: what is behind one to a directory is not removed with it, and mazes of links
    have no end.

    Args:
        storage: The run's.
        key: The directory or prefix.
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
    """List names directly below ``key`` in ``storage``; none where there is no directory."""
    try:
        return storage.list(key)
    except NotFoundError:
        return ()


def is_link(storage: Storage, key: str) -> bool:
    """Whether the name ``key`` in ``storage`` is a symbolic link; never where there are none."""
    path = storage.local_path(key)
    return path is not None and os.path.islink(path)


def _stat(storage: Storage, key: str) -> Tree:
    try:
        stat = storage.stat(key)
    except (NotFoundError, SymlinkError):
        return Tree()  # gone meanwhile, or a link that leads nowhere
    return Tree(0 if stat.is_dir else 1, stat.size_bytes, stat.modified_s)
