"""Where an export lands: a directory that appears whole, as far as the storage can do that.

    filesystem     .NAME.partial-<id>/ beside it, then one rename
    object store   files under their names, the marker (index, .metadata) last; removed again if it fails

Overwriting is asked for, and takes nothing but the files of an older export (see ``taken``). On a
filesystem the old directory is moved aside and looked at once more, the new one takes its name, the old
files are removed by their names: a crash between leaves both, under names that say so. On an object store
the old marker goes before the first of its files is replaced: from then until the new one is there, there
is no export. One that fails before that leaves the old export as it was.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.operations import read_limited
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.errors import AnswerLostError, NotFoundError, StateError, StorageError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.tools.taken import There, look, refuse_taken, strangers
from ckptfs.uri import Uri

__all__ = ["Landing", "landing"]

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
