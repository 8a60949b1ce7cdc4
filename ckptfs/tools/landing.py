"""The target of an export: what it may be and may replace, and how it appears whole.

    refuse_place   by the names alone: the source itself, above it, inside it; what belongs to a run
    refuse_taken   by what is there: a run, a checkpoint, a link, anything that no export wrote
    landing        the place to write to:

    filesystem     .NAME.partial-<id>/ next to it, then one rename
    object store   files under their names, the marker (index, .metadata) last; removed again if it fails

``--overwrite`` replaces one file by one file, or a directory in which there is nothing but files with
the names that an export of this format gives; everything else is refused and left in place. On a
filesystem the old directory is moved aside and looked at once more, the new one takes its name, the old
files are removed by their names: a crash between leaves both, under names that say so. On an object store
the old marker goes before the first of its files is replaced: from then until the new one is there, there
is no export. One that fails before that leaves the old export as it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.operations import read_limited
from ckptfs.commit.paths import CONTROL, MANIFEST, is_save_id
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NotFoundError,
    StateError,
    StorageError,
    UriError,
)
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["Landing", "There", "landing", "look", "refuse_place", "refuse_taken", "strangers"]

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


logger = logging.getLogger("ckptfs.tools")


@dataclass(slots=True)
class Landing:
    """A directory that an export is written into.

    Attributes:
        storage: Of the directory above.
        prefix: Where files are written, "" or ending in "/".
        written: The keys so far.
    """

    storage: Storage
    prefix: str
    written: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        """Return the key to write a file ``name`` to; what is new is removed if the export fails."""
        self.written.append(f"{self.prefix}{name}")
        return self.written[-1]

    def put(self, name: str, data: bytes) -> None:
        """Write one small file ``name`` with ``data``."""
        with self.storage.open_write(self.key(name), size_hint_bytes=len(data)) as writer:
            writer.write(data)


@contextlib.contextmanager
def landing(
    target: Uri,
    storage_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    ours: re.Pattern[str],
    markers: Sequence[str],
) -> Iterator[Landing]:
    """A directory to write into; it is there when the block is left without an exception.

    Args:
        target: The directory.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.
        overwrite: Replace an earlier export of this format.
        ours: The names that an export of this format has.
        markers: The names by which readers find it.

    Raises:
        AlreadyExistsError: Something is there and ``overwrite`` is False, or it was written in between.
        StateError: What is there is no export of this format; it stays.
        StorageError: The storage failed.
    """
    storage = open_storage(target.parent, storage_options)
    try:
        there = refuse_taken(storage, target, ours=ours, overwrite=overwrite)
        if storage.capabilities.shape is Shape.FILESYSTEM:
            with _beside(storage, target, ours, there) as made:
                yield made
        else:
            with _in_place(storage, target.name, there.names, markers) as made:
                yield made
    finally:
        storage.close()


@contextlib.contextmanager
def _beside(
    storage: Storage, target: Uri, ours: re.Pattern[str], there: There
) -> Iterator[Landing]:
    name, unique = target.name, next(fresh_ids())
    partial, old = f".{name}.partial-{unique}", f".{name}.replaced-{unique}"
    aside: There | None = None
    storage.make_dir(partial)
    try:
        yield Landing(storage, f"{partial}/")
        storage.sync(partial)
        if there.is_something:
            storage.rename(name, old)
            aside = _looked_again(storage, target, old, ours)
        storage.rename(partial, name)
        storage.sync("")
    except BaseException:
        with contextlib.suppress(StorageError):
            storage.remove_tree(partial)
        if there.is_something and not _is_there(storage, name):
            with contextlib.suppress(StorageError):
                storage.rename(old, name)
        raise
    if aside is not None:
        _remove(storage, old, aside)


def _looked_again(storage: Storage, target: Uri, old: str, ours: re.Pattern[str]) -> There:
    """What was moved aside. StateError: what no export wrote came while this one was written."""
    aside = look(storage, old)
    strange = strangers(aside, ours)
    if strange or not aside.is_dir:
        what = repr(strange[0]) if strange else "something else"
        raise StateError(
            f"{what} appeared during the export and was left in place",
            uri=target,
            hint="another name",
        )
    return aside


def _remove(storage: Storage, old: str, aside: There) -> None:
    """By the names that were looked at: what came after that is nobody's to remove."""
    try:
        storage.remove_many([f"{old}/{name}" for name in aside.names])
        storage.remove_dir(old)
    except StorageError as error:
        logger.warning("the old export stays as %s: %s", storage.uri(old), error)


def _is_there(storage: Storage, key: str) -> bool:
    try:
        storage.stat(key)
    except StorageError:
        return False
    return True


@dataclass(slots=True)
class _InPlace(Landing):
    """Files under their final names, each replaced at once by one PUT.

    old: the names of the older export. markers: see ``landing``. taken: the bytes of its markers that
    were removed. before: the ETag of each old file when its replacement began.
    """

    old: Sequence[str] = ()
    markers: Sequence[str] = ()
    taken: dict[str, bytes] = field(default_factory=dict)
    before: dict[str, str | None] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """As ``Landing.key``. The old marker goes before the first file that it stands for changes."""
        if name in self.old:
            if name not in self.markers:
                self._take_markers()
            self.before[name] = _etag(self.storage, f"{self.prefix}{name}")
        return Landing.key(self, name)

    def _take_markers(self) -> None:
        for name in self.markers:
            if name in self.old and name not in self.taken:
                key = f"{self.prefix}{name}"
                self.taken[name] = read_limited(self.storage, key)
                self.storage.remove_many([key])

    def undo(self, error: BaseException) -> None:
        """Remove what is only new; bring the old marker back if all that it stands for is unchanged."""
        replaced = {name for name in self.before if self._is_replaced(name)}
        if replaced & set(self.markers):
            return  # the new marker is there, or may be: what it names stays
        old = {f"{self.prefix}{name}" for name in self.old}
        self.storage.remove_many([key for key in self.written if key not in old])
        # After a lost answer or Ctrl-C a PUT may still arrive, and two exports would be mixed.
        in_doubt = isinstance(error, AnswerLostError) or not isinstance(error, Exception)
        if not replaced and not in_doubt:
            for name, data in self.taken.items():
                self.storage.replace(f"{self.prefix}{name}", data)

    def _is_replaced(self, name: str) -> bool:
        """Also where nobody can know."""
        if name in self.taken:
            return False
        before = self.before[name]
        return before is None or _etag(self.storage, f"{self.prefix}{name}") != before


def _etag(storage: Storage, key: str) -> str | None:
    try:
        return storage.stat(key).etag
    except NotFoundError:
        return None


@contextlib.contextmanager
def _in_place(
    storage: Storage, name: str, there: Sequence[str], markers: Sequence[str]
) -> Iterator[Landing]:
    made = _InPlace(storage, f"{name}/", old=there, markers=markers)
    try:
        yield made
    except BaseException as error:
        with contextlib.suppress(StorageError):
            made.undo(error)
        raise
    kept = set(made.written)
    storage.remove_many([f"{name}/{n}" for n in there if f"{name}/{n}" not in kept])
