"""Where an export may land, and what it may replace: decided before a byte is written.

    refuse_place   by the names alone: the source itself, above it, inside it; what belongs to a run
    refuse_taken   by what is there: a run, a checkpoint, a link, anything that no export wrote

``--overwrite`` replaces one file by one file, or a directory in which there is nothing but files with
the names that an export of this format gives. All else stays: whoever wants it gone removes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.paths import CONTROL, MANIFEST, is_save_id
from ckptfs.errors import AccessError, AlreadyExistsError, NotFoundError, StateError, UriError
from ckptfs.storage.base import Entry, Storage
from ckptfs.uri import Uri

__all__ = ["There", "look", "refuse_place", "refuse_taken", "strangers"]

_SAME = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "wasb"}
_MOST = 3


@dataclass(frozen=True, slots=True)
class There:
    """What is at the target: nothing, a link, a file, or a directory.

    Attributes:
        is_link: It is a symbolic link.
        is_file: It is a file.
        is_dir: It is a directory.
        entries: The names in the directory.
        links: Those of the names that are symbolic links.
    """

    is_link: bool = False
    is_file: bool = False
    is_dir: bool = False
    entries: tuple[Entry, ...] = ()
    links: frozenset[str] = frozenset()

    @property
    def is_something(self) -> bool:
        """Whether it would be overwritten. An empty directory would not."""
        return self.is_link or self.is_file or bool(self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the entries."""
        return tuple(entry.name for entry in self.entries)


# -- by the names alone ---------------------------------------------------------------


def refuse_place(
    source: Uri,
    target: Uri,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> None:
    """Check that an export may be written to a place. Nothing is written; links in local paths are resolved.

    Args:
        source: The checkpoint.
        target: The place.
        source_options: For the source: what fsspec's filesystem of that protocol takes; None: no options.
        target_options: The same for the target; None: no options.

    Raises:
        StateError: The target is the source, above or inside it, or part of a run.
        UriError: The target has no name.
    """
    if not target.name:
        raise UriError("an export has a name of its own", uri=target, hint="name a place below it")
    # The last name is not followed: a link there is refused for what it is.
    to = [*_components(target.parent), target.name]
    # By its letters too: a link may lead out of a run, and the name of it still is the run's.
    for one in (*to, *target.path.split("/")):
        if one == CONTROL or is_save_id(one):
            raise StateError(
                f"{one!r} belongs to a run: an export is never written there",
                uri=target,
                hint="export to another directory",
            )
    same = (_kind(source), source.authority) == (_kind(target), target.authority)
    if not same or _endpoints(source, source_options) != _endpoints(target, target_options):
        return
    at = _components(source)
    shared = min(len(at), len(to))
    if at[:shared] == to[:shared]:
        where = "inside" if len(to) > len(at) else "above" if len(to) < len(at) else "at"
        raise StateError(
            f"the target is {where} the source of the export",
            uri=target,
            hint="export to another directory",
        )


def _kind(uri: Uri) -> str:
    """Wrappers of a storage, and other spellings of it, lead to the same place."""
    inner = uri.protocol.rpartition("+")[2]
    return _SAME.get(inner, inner)


def _components(uri: Uri) -> list[str]:
    path = os.path.realpath(uri.path) if _kind(uri) == "file" else uri.path
    return [part for part in path.split("/") if part]


def _endpoints(uri: Uri, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Buckets of one name on two servers are two places."""
    told = {**uri.options, **(options or {})}
    return {key: str(value) for key, value in told.items() if "endpoint" in key}


# -- by what is there -----------------------------------------------------------------


def refuse_taken(
    storage: Storage, target: Uri, *, ours: re.Pattern[str] | None, overwrite: bool
) -> There:
    """Check that what is at a target may be replaced.

    Args:
        storage: Of the directory above.
        target: The place.
        ours: The names in a directory that an export of this format has; None of a format that is one file.
        overwrite: Whether an earlier export may be replaced.

    Returns:
        What is there.

    Raises:
        StateError: It is never overwritten.
        AlreadyExistsError: Something is there, and ``overwrite`` is False.
    """
    there = look(storage, target.name)
    _refuse_checkpoints(storage, target, there)
    reason = _reason(there, ours)
    if there.is_something and not overwrite:
        hint = "another name" if reason else "another name, or --overwrite"
        raise AlreadyExistsError("something is there already", uri=target, hint=hint)
    if reason is not None:
        raise StateError(
            f"{reason}: --overwrite does not replace that",
            uri=target,
            hint="export to another name, or remove by hand what may go",
        )
    return there


def look(storage: Storage, name: str) -> There:
    """Return what is at ``name`` in ``storage``. Links are seen as such, not followed."""
    if _is_link(storage, name):
        return There(is_link=True)
    is_dir = False
    try:
        if not storage.stat(name).is_dir:
            return There(is_file=True)
        is_dir = True
    except (NotFoundError, NotADirectoryError):
        pass  # an object store has no directories: only a listing tells
    try:
        entries = tuple(storage.list(name))
    except (NotFoundError, NotADirectoryError):
        return There()
    links = frozenset(e.name for e in entries if _is_link(storage, f"{name}/{e.name}"))
    return There(is_dir=is_dir or bool(entries), entries=entries, links=links)


def strangers(there: There, ours: re.Pattern[str]) -> list[str]:
    """Return the names in ``there`` that no export of this format gave (``ours``): other files, every directory,
    every link. Pure.
    """
    return [
        entry.name
        for entry in there.entries
        if entry.is_dir or entry.name in there.links or not ours.fullmatch(entry.name)
    ]


def _refuse_checkpoints(storage: Storage, target: Uri, there: There) -> None:
    if {CONTROL, MANIFEST} & set(there.names):
        what = "that is a run, or a checkpoint of one: an export never overwrites it"
    elif _is_checkpoint(storage):
        what = "that is inside a checkpoint: an export is never written there"
    else:
        return
    hint = "export to another name; ckptfs rm deletes checkpoints"
    raise StateError(what, uri=target, hint=hint)


def _is_checkpoint(parent: Storage) -> bool:
    try:
        return not parent.stat(MANIFEST).is_dir
    except (NotFoundError, NotADirectoryError, AccessError):
        return False  # above the target nothing need be permitted, nor be there


def _reason(there: There, ours: re.Pattern[str] | None) -> str | None:
    """Why what is there stays. Pure."""
    if there.is_link:
        return "a symbolic link is there"
    if ours is None:
        return "a directory is there, and this format is one file" if there.is_dir else None
    if there.is_file:
        return "a file is there, and this format is a directory"
    strange = strangers(there, ours)
    return f"no export of this format wrote {_listed(strange)}" if strange else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(repr(name) for name in names[:_MOST]) + more


def _is_link(storage: Storage, key: str) -> bool:
    path = storage.local_path(key)
    return path is not None and os.path.islink(path)
