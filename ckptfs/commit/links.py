"""Symbolic links where a run keeps its own files: refused.

    control_is_plain    before a fence: nothing in ``.ckptfs`` is a link
    name_is_plain       before a save: its name is no link

Looks only, so that the error comes before anything is fenced, written or deleted. That nothing goes
through a link which is put there later is the storage's own rule (``LocalStorage``).
"""

from __future__ import annotations

from ckptfs.commit.layout import ATTEMPTS, CONTROL, SHARED, TRASH
from ckptfs.commit.ops import List, Program, RefuseLink
from ckptfs.errors import NotFoundError, UriError
from ckptfs.storage.base import Entry, Shape
from ckptfs.uri import check_key

__all__ = ["control_is_plain", "is_checkpoint_name", "name_is_plain"]


def control_is_plain(shape: Shape) -> Program[None]:
    """SymlinkError: a link stands in the place of a directory of the run's own, or of an attempt, or of
    a generation's trash. Reads only.
    """
    if shape is Shape.OBJECT:
        return
    # Whoever claims makes the other directories, and making one refuses a link in its place.
    yield RefuseLink(TRASH)
    for folder in (ATTEMPTS, TRASH):
        for entry in (yield from _names(folder)):
            if entry.is_link:
                yield RefuseLink(f"{folder}/{entry.name}")


def name_is_plain(name: str, shape: Shape) -> Program[None]:
    """SymlinkError: the checkpoint's name, or that of its whole, is a link: a save would write to
    where it leads.
    """
    if shape is Shape.OBJECT:
        return
    whole, part, _ = name.partition("/")
    yield RefuseLink(whole)
    if part:
        yield RefuseLink(name)


def is_checkpoint_name(name: str, *, is_part: bool) -> bool:
    """Whether a save may have this name: one component, of a part two, and not the run's own. Pure.

    What an attempt that died says is its name is moved to the trash from there.
    """
    try:
        check_key(name)
    except UriError:
        return False
    whole, *rest = name.split("/")
    return len(rest) == int(is_part) and whole not in ("", CONTROL, SHARED)


def _names(folder: str) -> Program[list[Entry]]:
    try:
        found: list[Entry] = yield List(folder)
    except NotFoundError:
        return []
    return found
