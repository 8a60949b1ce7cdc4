"""Checkpoints of another program that came after the newest commit of a run. Read-only.

    newer_unlogged   their names: going on from the newest commit would pass them by without a word
    check_unlogged   the same as an error that says what to do

One counts that is whole (a ``.metadata`` whose files are there), has no manifest of ours, and was
written later than the newest commit, by the storage's clock; so does a ``.metadata`` in the place of the
newest commit's that this log did not write. What is older is what the run went on from. Where a storage
tells no time, nothing is known to be later.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator

from ckptfs.commit.beside import names_beside
from ckptfs.commit.catalog import read_view
from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.foreign import is_known, names_save, was_to_replace
from ckptfs.commit.layout import MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.ops import List, Program, Read, Refresh, StatOf
from ckptfs.commit.protocol import Views, catalog
from ckptfs.errors import ArgumentChoice, NotFoundError, StateError
from ckptfs.storage.base import Entry, Shape, Stat
from ckptfs.uri import Uri

__all__ = [
    "Unlogged",
    "check_unlogged",
    "data_paths",
    "is_overwritten",
    "newer_unlogged",
    "unlogged_error",
]


class Unlogged(ArgumentChoice):
    """What to do about them."""

    ERROR = "error"
    IGNORE = "ignore"


def check_unlogged(views: Views, root: Uri, shape: Shape) -> Program[None]:
    """StateError where another program's checkpoints came after the newest commit."""
    names = yield from newer_unlogged(views, shape)
    if names:
        raise unlogged_error(names, _newest(views), root)


def unlogged_error(names: tuple[str, ...], newest: Seal | None, root: Uri) -> StateError:
    """What to say, and what can be done. newest: the commit that would be taken else."""
    last = "the newest commit" if newest is None else newest.name
    if newest is not None and newest.name in names:
        return StateError(
            f"{newest.name} was saved over, and not by ckptfs",
            uri=root / newest.name,
            hint="its .metadata is another program's: stock torch loads that one; move it away to load "
            'ours, or pass unlogged="ignore" where the newest is taken',
        )
    those = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    came = "was" if len(names) == 1 else "were"
    return StateError(
        f"{those} {came} saved after {last}, and not by ckptfs",
        uri=root / names[-1],
        hint='load what you mean by its name, pass unlogged="ignore" to go on with '
        f"{last}, or move the others away",
    )


def newer_unlogged(views: Views, shape: Shape) -> Program[tuple[str, ...]]:
    """The names of such checkpoints; a save may be sealed meanwhile, so it is looked twice."""
    names = yield from _look(views, shape)
    if not names:
        return ()
    again = yield from read_view()
    if again is None:
        return names
    return (yield from _look({**views, again[0]: again[1]}, shape))


def _newest(views: Views) -> Seal | None:
    lives = catalog(views)
    return lives[-1].seal if lives else None


def _look(views: Views, shape: Shape) -> Program[tuple[str, ...]]:
    newest = _newest(views)
    if newest is None:
        return ()
    keys = AttemptKeys(shape, newest.name, newest.save_id)
    manifest = yield from _first([f"{data}/{MANIFEST}" for data in keys.homes()])
    if manifest is None or manifest.modified_s is None:
        return ()
    yield Refresh("")
    entries: list[Entry] = yield List("")
    found: tuple[str, ...] = ()
    for name in names_beside(entries, views):
        if (yield from _came_later(name, views, manifest.modified_s)):
            found += (name,)
    if (yield from is_overwritten(newest, views, shape)):
        found += (newest.name,)
    return found


def _came_later(name: str, views: Views, after_s: float) -> Program[bool]:
    yield Refresh(name)
    stat = yield from _first([f"{name}/{METADATA}"])
    if stat is None or stat.modified_s is None or stat.modified_s <= after_s:
        return False
    try:
        if names_save((yield Read(f"{name}/{MANIFEST}"))) is not None:
            return False  # a copy, which its manifest vouches for, or a save whose removal is under way
    except NotFoundError:
        pass
    try:
        data: bytes = yield Read(f"{name}/{METADATA}")
    except NotFoundError:
        return False
    if any(is_known(name, data, view) for view in views.values()):
        return False
    for path in sorted(set(data_paths(data))):
        if path.startswith("/") or ".." in path.split("/"):
            return False
        if (yield from _first([f"{name}/{path}"])) is None:
            return False  # not whole: whoever writes it is not done, or died
    return True


def is_overwritten(seal: Seal, views: Views, shape: Shape) -> Program[bool]:
    """Whether another ``.metadata`` stands where the projection put this save's. Its size tells first,
    because a large one takes long to read: data paths of ours are longer than those of stock.
    """
    if seal.artifact is not Kind.CHECKPOINT or seal.parts:
        return False
    keys = AttemptKeys(shape, seal.name, seal.save_id)
    shown = yield from _first([f"{keys.name}/{METADATA}"])
    mine = yield from _first([f"{data}/{METADATA}" for data in keys.homes()])
    if shown is None or mine is None or shown.size_bytes == mine.size_bytes:
        return False
    try:
        data: bytes = yield Read(f"{keys.name}/{METADATA}")
    except NotFoundError:
        return False
    if any(is_known(keys.name, data, view) for view in views.values()):
        return False
    # It was told to replace that one, and its writer died before it did: the next owner does.
    return not (yield from was_to_replace(seal.name, seal.save_id, data))


def _first(keys: list[str]) -> Program[Stat | None]:
    for key in keys:
        try:
            stat: Stat = yield StatOf(key)
        except NotFoundError:
            continue
        return stat
    return None


def data_paths(metadata: bytes) -> Iterator[str]:
    """The data files that a ``.metadata`` names. Nothing is unpickled: its texts are looked at in order,
    and the one after ``relative_path`` is a path. What is no pickle names none.
    """
    memo: dict[int, object] = {}
    last: object = None
    before: object = None
    try:
        for opcode, argument, _ in pickletools.genops(metadata):
            match opcode.name:
                case "MEMOIZE":
                    memo[len(memo)] = last
                    continue
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memo[int(argument or 0)] = last
                    continue
                case "GET" | "BINGET" | "LONG_BINGET":
                    before, last = last, memo.get(int(argument or 0))
                case _:
                    before, last = last, argument if isinstance(argument, str) else None
            if before == "relative_path" and isinstance(last, str):
                yield last
    except (ValueError, EOFError):
        return
