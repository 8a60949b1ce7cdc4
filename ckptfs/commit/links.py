"""Symbolic links where a run keeps its own files, and attempts that name no checkpoint: refused.

    control_is_plain    before a fence: nothing in ``.ckptfs`` is a link, every attempt names a checkpoint
    name_is_plain       before a save: its name is no link

Looks only, so that the error comes before anything is fenced, written or deleted. That nothing goes
through a link which is put there later is the storage's own rule (``LocalStorage``).
"""

from __future__ import annotations

import json

from ckptfs.commit.layout import ATTEMPTS, CONTROL, SHARED, TRASH, AttemptKeys
from ckptfs.commit.ops import List, Program, Read, RefuseLink
from ckptfs.errors import ManifestError, NotFoundError, UriError
from ckptfs.storage.base import Entry, Shape
from ckptfs.uri import check_key

__all__ = ["control_is_plain", "is_checkpoint_name", "name_is_plain"]


def control_is_plain(shape: Shape) -> Program[None]:
    """SymlinkError: a link stands in the place of a directory of the run's own, or of an attempt, or of
    a generation's trash. ManifestError: an attempt names no checkpoint. Reads only.
    """
    if shape is Shape.OBJECT:
        return
    # Whoever claims makes the other directories, and making one refuses a link in its place.
    yield RefuseLink(TRASH)
    for folder in (ATTEMPTS, TRASH):
        for entry in (yield from _names(folder)):
            if entry.is_link:
                yield RefuseLink(f"{folder}/{entry.name}")
            elif folder == ATTEMPTS:
                yield from _refuse_name(entry.name, shape)


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


def _refuse_name(save_id: str, shape: Shape) -> Program[None]:
    key = AttemptKeys(shape, "?", save_id).record
    try:
        raw = json.loads((yield Read(key)))
        name, is_part = raw["name"], bool(raw.get("of", ""))
    except (NotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # recovery leaves alone what says nothing
    if not is_checkpoint_name(str(name), is_part=is_part):
        raise ManifestError(
            f"{key} names {str(name)!r}, which is no checkpoint of this run",
            hint=f"nothing was changed; remove {ATTEMPTS}/{save_id} by hand",
        )
