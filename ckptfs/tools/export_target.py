"""The target of an export: what it may be, what it may replace, and how it appears as a whole.

    refuse_place   refuses by names: the source itself, above it or inside it; what belongs to a run
    refuse_taken   refuses by what exists: a run, a checkpoint, a link, anything that no export wrote
    open_target    the place to write to:

    filesystem     .NAME.partial-<id>/ next to the target, then one rename
    object store   files under their names, the marker (index, .metadata) last; removed again on failure

``--overwrite`` replaces one file by one file, or a directory that contains only files with the names
that an export of this format gives. Everything else is refused and left in place.

On a filesystem the old directory is moved aside and checked once more, the new one takes its name, and
the old files are removed by their names. A crash in between leaves both, under names that say so.

On an object store the old marker is removed before the first of its files is replaced. From then until
the new marker is written there is no export. An export that fails before that leaves the old one intact.
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

__all__ = [
    "ExistingTarget",
    "ExportTarget",
    "look",
    "open_target",
    "refuse_place",
    "refuse_taken",
    "strangers",
]

_SAME = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "wasb"}
_MOST = 3


@dataclass(frozen=True, slots=True)
class ExistingTarget:
    """What is at the target: nothing, a link, a file, or a directory.

    Attributes:
        is_link: Whether it is a symbolic link.
        is_file: Whether it is a file.
        is_dir: Whether it is a directory.
        entries: The entries of the directory.
        links: The names in the directory that are symbolic links.
    """

    is_link: bool = False
    is_file: bool = False
    is_dir: bool = False
    entries: tuple[Entry, ...] = ()
    links: frozenset[str] = frozenset()

    @property
    def is_something(self) -> bool:
        """Whether an export would overwrite it; False for an empty directory."""
        return self.is_link or self.is_file or bool(self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries."""
        return tuple(entry.name for entry in self.entries)


# -- by the names alone ---------------------------------------------------------------


def refuse_place(
    source: Uri,
    target: Uri,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> None:
    """Check by the names alone that an export may be written to a place.

    Nothing is written. Links in local paths are resolved.

    Args:
        source: The checkpoint.
        target: The place.
        source_options: Options for fsspec's filesystem of the source; None: no options.
        target_options: The same for the target; None: no options.

    Raises:
        StateError: The target is the source, above or inside it, or part of a run.
        UriError: The target has no name.
    """
    if not target.name:
        raise UriError("an export has a name of its own", uri=target, hint="name a place below it")
    # The last name is not resolved: a link at the target itself is refused later, as a link.
    to = [*_components(target.parent), target.name]
    # Check the path as given too: a link may lead out of a run, but its name belongs to the run.
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
    """Return the storage protocol without wrappers and in one spelling, for comparison."""
    inner = uri.protocol.rpartition("+")[2]
    return _SAME.get(inner, inner)


def _components(uri: Uri) -> list[str]:
    path = os.path.realpath(uri.path) if _kind(uri) == "file" else uri.path
    return [part for part in path.split("/") if part]


def _endpoints(uri: Uri, options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the endpoint options: buckets of the same name on two servers are two places."""
    merged = {**uri.options, **(options or {})}
    return {key: str(value) for key, value in merged.items() if "endpoint" in key}


# -- by what is there -----------------------------------------------------------------


def refuse_taken(
    storage: Storage, target: Uri, *, ours: re.Pattern[str] | None, overwrite: bool
) -> ExistingTarget:
    """Check that what exists at a target may be replaced.

    Args:
        storage: The storage of the directory above.
        target: The place.
        ours: Matches the names that an export of this format writes into its directory; None if the
            format is one file.
        overwrite: Whether an earlier export may be replaced.

    Returns:
        What exists there.

    Raises:
        StateError: What exists there is never overwritten.
        AlreadyExistsError: Something exists there, and ``overwrite`` is False.
    """
    existing = look(storage, target.name)
    _refuse_checkpoints(storage, target, existing)
    reason = _reason(existing, ours)
    if existing.is_something and not overwrite:
        hint = "another name" if reason else "another name, or --overwrite"
        raise AlreadyExistsError("something is there already", uri=target, hint=hint)
    if reason is not None:
        raise StateError(
            f"{reason}: --overwrite does not replace that",
            uri=target,
            hint="export to another name, or remove by hand what may go",
        )
    return existing


def look(storage: Storage, name: str) -> ExistingTarget:
    """Return what is at ``name`` in ``storage``. Links are reported as links, not followed."""
    if _is_link(storage, name):
        return ExistingTarget(is_link=True)
    is_dir = False
    try:
        if not storage.stat(name).is_dir:
            return ExistingTarget(is_file=True)
        is_dir = True
    except (NotFoundError, NotADirectoryError):
        pass  # an object store has no directories: only a listing shows what is there
    try:
        entries = tuple(storage.list(name))
    except (NotFoundError, NotADirectoryError):
        return ExistingTarget()
    links = frozenset(e.name for e in entries if _is_link(storage, f"{name}/{e.name}"))
    return ExistingTarget(is_dir=is_dir or bool(entries), entries=entries, links=links)


def strangers(existing: ExistingTarget, ours: re.Pattern[str]) -> list[str]:
    """Return the names in ``existing`` that no export of this format wrote, by the pattern ``ours``.

    These are files with other names, and all directories and links. Pure.

    Args:
        existing: What exists at the target.
        ours: Matches the names that an export of this format writes.
    """
    return [
        entry.name
        for entry in existing.entries
        if entry.is_dir or entry.name in existing.links or not ours.fullmatch(entry.name)
    ]


def _refuse_checkpoints(storage: Storage, target: Uri, existing: ExistingTarget) -> None:
    if {CONTROL, MANIFEST} & set(existing.names):
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
        return False  # the directory above the target may be forbidden or missing


def _reason(existing: ExistingTarget, ours: re.Pattern[str] | None) -> str | None:
    """Return why an export must not replace what exists there; None if it may. Pure."""
    if existing.is_link:
        return "a symbolic link is there"
    if ours is None:
        return "a directory is there, and this format is one file" if existing.is_dir else None
    if existing.is_file:
        return "a file is there, and this format is a directory"
    strange = strangers(existing, ours)
    return f"no export of this format wrote {_listed(strange)}" if strange else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(repr(name) for name in names[:_MOST]) + more


def _is_link(storage: Storage, key: str) -> bool:
    path = storage.local_path(key)
    return path is not None and os.path.islink(path)


logger = logging.getLogger("ckptfs.tools")


@dataclass(slots=True)
class ExportTarget:
    """A directory that an export is written into.

    Attributes:
        storage: The storage of the directory above.
        prefix: Where files are written; "" or ending in "/".
        written: The keys written so far.
    """

    storage: Storage
    prefix: str
    written: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        """Return the key to write a file ``name`` to. New files are removed if the export fails."""
        self.written.append(f"{self.prefix}{name}")
        return self.written[-1]

    def put(self, name: str, data: bytes) -> None:
        """Write one small file ``name`` with ``data``."""
        with self.storage.open_write(self.key(name), size_hint_bytes=len(data)) as writer:
            writer.write(data)


@contextlib.contextmanager
def open_target(
    target: Uri,
    storage_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
    ours: re.Pattern[str],
    markers: Sequence[str],
) -> Iterator[ExportTarget]:
    """A directory to write into. It exists when the block is left without an exception.

    Args:
        target: The directory.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        overwrite: Replace an earlier export of this format.
        ours: Matches the names that an export of this format writes.
        markers: The names of the files by which readers find an export.

    Raises:
        AlreadyExistsError: Something exists there and ``overwrite`` is False, or something was written
            there during the export.
        StateError: What exists there is not an export of this format; it stays.
        StorageError: The storage failed.
    """
    storage = open_storage(target.parent, storage_options)
    try:
        existing = refuse_taken(storage, target, ours=ours, overwrite=overwrite)
        if storage.capabilities.shape is Shape.FILESYSTEM:
            with _through_partial(storage, target, ours, existing) as made:
                yield made
        else:
            with _in_place(storage, target.name, existing.names, markers) as made:
                yield made
    finally:
        storage.close()


@contextlib.contextmanager
def _through_partial(
    storage: Storage, target: Uri, ours: re.Pattern[str], existing: ExistingTarget
) -> Iterator[ExportTarget]:
    name, unique = target.name, next(fresh_ids())
    partial, old = f".{name}.partial-{unique}", f".{name}.replaced-{unique}"
    replaced: ExistingTarget | None = None
    storage.make_dir(partial)
    try:
        yield ExportTarget(storage, f"{partial}/")
        storage.sync(partial)
        if existing.is_something:
            storage.rename(name, old)
            replaced = _checked_again(storage, target, old, ours)
        storage.rename(partial, name)
        storage.sync("")
    except BaseException:
        with contextlib.suppress(StorageError):
            storage.remove_tree(partial)
        if existing.is_something and not _exists(storage, name):
            with contextlib.suppress(StorageError):
                storage.rename(old, name)
        raise
    if replaced is not None:
        _remove(storage, old, replaced)


def _checked_again(
    storage: Storage, target: Uri, old: str, ours: re.Pattern[str]
) -> ExistingTarget:
    """Return what was moved aside. StateError if it now has something that no export wrote."""
    replaced = look(storage, old)
    strange = strangers(replaced, ours)
    if strange or not replaced.is_dir:
        what = repr(strange[0]) if strange else "something else"
        raise StateError(
            f"{what} appeared during the export and was left in place",
            uri=target,
            hint="another name",
        )
    return replaced


def _remove(storage: Storage, old: str, replaced: ExistingTarget) -> None:
    """Remove the old export by the names seen before; files that appeared later stay."""
    try:
        storage.remove_many([f"{old}/{name}" for name in replaced.names])
        storage.remove_dir(old)
    except StorageError as error:
        logger.warning("the old export stays as %s: %s", storage.uri(old), error)


def _exists(storage: Storage, key: str) -> bool:
    try:
        storage.stat(key)
    except StorageError:
        return False
    return True


@dataclass(slots=True)
class _InPlace(ExportTarget):
    """An export that writes files under their final names, each by one PUT.

    old: the names of the older export. markers: see ``open_target``. removed_markers: the bytes of the old
    markers that were removed. before: the ETag of each old file when its replacement began.
    """

    old: Sequence[str] = ()
    markers: Sequence[str] = ()
    removed_markers: dict[str, bytes] = field(default_factory=dict)
    before: dict[str, str | None] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """As ``ExportTarget.key``. Removes the old markers before the first data file is replaced."""
        if name in self.old:
            if name not in self.markers:
                self._take_markers()
            self.before[name] = _etag(self.storage, f"{self.prefix}{name}")
        return ExportTarget.key(self, name)

    def _take_markers(self) -> None:
        for name in self.markers:
            if name in self.old and name not in self.removed_markers:
                key = f"{self.prefix}{name}"
                self.removed_markers[name] = read_limited(self.storage, key)
                self.storage.remove_many([key])

    def undo(self, error: BaseException) -> None:
        """Remove new files. Restore the old markers if all old data files are unchanged."""
        replaced = {name for name in self.before if self._is_replaced(name)}
        if replaced & set(self.markers):
            return  # the new marker exists, or may exist: the files that it names stay
        old = {f"{self.prefix}{name}" for name in self.old}
        self.storage.remove_many([key for key in self.written if key not in old])
        # After a lost answer or Ctrl-C a PUT may still arrive, and two exports would be mixed.
        in_doubt = isinstance(error, AnswerLostError) or not isinstance(error, Exception)
        if not replaced and not in_doubt:
            for name, data in self.removed_markers.items():
                self.storage.replace(f"{self.prefix}{name}", data)

    def _is_replaced(self, name: str) -> bool:
        """Whether an old file was replaced; True also if that cannot be known."""
        if name in self.removed_markers:
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
    storage: Storage, name: str, old_names: Sequence[str], markers: Sequence[str]
) -> Iterator[ExportTarget]:
    made = _InPlace(storage, f"{name}/", old=old_names, markers=markers)
    try:
        yield made
    except BaseException as error:
        with contextlib.suppress(StorageError):
            made.undo(error)
        raise
    written = set(made.written)
    storage.remove_many([f"{name}/{n}" for n in old_names if f"{name}/{n}" not in written])
