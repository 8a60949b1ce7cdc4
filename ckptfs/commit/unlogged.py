"""Checkpoints of another program that came after the newest commit of a run. Read-only.

    newer_unlogged   their names: going on from the newest commit would pass them by without a word
    check_unlogged   the same as an error that says what to do

One counts that is whole (a ``.metadata`` whose files are there), has no manifest of ours, and was
written later than the newest commit, by the storage's clock; so does a ``.metadata`` in the place of the
newest commit's that this log did not write. What is older is what the run went on from. Where a storage
tells no time, nothing is known to be later.
"""

from __future__ import annotations

import contextlib
import math
import pickletools
from collections.abc import Callable, Iterator, Sequence

from ckptfs.commit.beside import names_beside
from ckptfs.commit.catalog import read_view
from ckptfs.commit.entries import Kind, Seal
from ckptfs.commit.foreign import is_known, names_save, was_to_replace
from ckptfs.commit.layout import MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.ops import List, Program, Read, Refresh, StatOf
from ckptfs.commit.pieces import piece, split_name
from ckptfs.commit.protocol import Views, catalog
from ckptfs.errors import AmbiguousCheckpointError, ArgumentChoice, NotFoundError
from ckptfs.storage.base import Entry, Shape, Stat
from ckptfs.uri import Uri

__all__ = [
    "Unlogged",
    "check_unlogged",
    "data_paths",
    "is_overwritten",
    "missing_data",
    "newer_unlogged",
    "unlogged_at",
    "unlogged_error",
]


_READ_BYTES = 1 << 20  # up to this a file is read: that costs as much as any other request


class Unlogged(ArgumentChoice, parameter="unlogged"):
    """What to do about them."""

    ERROR = "error"
    IGNORE = "ignore"


def check_unlogged(views: Views, root: Uri, shape: Shape) -> Program[None]:
    """AmbiguousCheckpointError where another program's checkpoints came after the newest commit."""
    names = yield from newer_unlogged(views, shape)
    if names:
        raise unlogged_error(names, _newest(views), root)


def unlogged_error(
    names: tuple[str, ...], newest: Seal | None, root: Uri
) -> AmbiguousCheckpointError:
    """What to say, and what can be done. newest: the commit that would be taken else, None where the log
    has none for the step that was asked for.
    """
    over = [name for name in names if newest is not None and split_name(name)[0] == newest.name]
    if over:
        return AmbiguousCheckpointError(
            f"{over[0]} was saved over, and not by ckptfs",
            names=names,
            uri=root / over[0],
            hint="its .metadata is another program's: stock torch loads that one; move it away to load "
            'ours, or pass unlogged="ignore" where the newest is taken',
        )
    if newest is None:
        return AmbiguousCheckpointError(
            f"{names[0]} is another program's, and the log knows no checkpoint of that step",
            names=names,
            uri=root / names[0],
            hint="load it by its name: ckptfs.load takes what stock torch saved",
        )
    those = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    came, last = "was" if len(names) == 1 else "were", newest.name
    return AmbiguousCheckpointError(
        f"{those} {came} saved after {last}, and not by ckptfs",
        names=names,
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
    mine = yield from _first([f"{data}/{_last_piece(newest)}" for data in keys.homes()])
    if mine is None or mine.modified_s is None:
        return ()
    yield Refresh("")
    entries: list[Entry] = yield List("")
    found: tuple[str, ...] = ()
    for name in names_beside(entries, views):
        if (yield from _came_later(name, views, mine.modified_s)):
            found += (name,)
    if (yield from is_overwritten(newest, views, shape, mine)):
        found += (newest.name,)
    return found


def _has_metadata(seal: Seal) -> bool:
    return seal.artifact is Kind.CHECKPOINT and not seal.parts


def _last_piece(seal: Seal) -> str:
    """A small file that was written just before the commit, so that its time is that of the commit."""
    return METADATA if _has_metadata(seal) else MANIFEST


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
    # Not whole: whoever writes it is not done, or died.
    return not (yield from missing_data(name, data))


def missing_data(name: str, metadata: bytes) -> Program[tuple[str, ...]]:
    """Of the data files that a ``.metadata`` names, those that are not there; one listing a directory. It is
    missing itself where it is no pickle from its first byte to its last: nobody loads that.
    """
    folders: dict[str, list[str]] = {}
    missing = []
    try:
        paths = sorted(set(_named_paths(metadata)))
    except (ValueError, EOFError):
        return (METADATA,)
    for path in paths:
        if path.startswith("/") or ".." in path.split("/"):
            missing.append(path)
        else:
            folder, _, file = path.rpartition("/")
            folders.setdefault(folder, []).append(file)
    for folder, files in folders.items():
        key = f"{name}/{folder}" if folder else name
        try:
            entries: list[Entry] = yield List(key)
        except NotFoundError:
            entries = []
        there = {entry.name for entry in entries if not entry.is_dir}
        missing += [f"{folder}/{file}" if folder else file for file in files if file not in there]
    return tuple(missing)


def is_overwritten(
    seal: Seal, views: Views, shape: Shape, known: Stat | None = None
) -> Program[bool]:
    """Whether another ``.metadata`` stands where the projection put this save's, or one of its parts'.

    known: of the ``.metadata`` beside the data, of a save without parts, where it was looked at.
    """
    if seal.artifact is not Kind.CHECKPOINT:
        return False
    for one in [piece(seal, ref) for ref in seal.parts] or [seal]:
        keys = AttemptKeys(shape, one.name, one.save_id)
        mine = None if seal.parts else known
        if mine is None:
            mine = yield from _first([f"{data}/{METADATA}" for data in keys.homes()])
        if mine is not None and (yield from _is_overwritten(keys, mine, views)):
            return True
    return False


def unlogged_at(
    views: Views, seals: Sequence[Seal], is_meant: Callable[[str], bool], shape: Shape
) -> Program[tuple[str, ...]]:
    """Of one step: the names of its saves that another program saved over; where the log has none, of the
    whole checkpoints of another program that ``is_meant`` takes for it.
    """
    found: tuple[str, ...] = ()
    for seal in seals:
        if (yield from is_overwritten(seal, views, shape)):
            found += (seal.name,)
    if seals:
        return found
    yield Refresh("")
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return ()
    for name in names_beside(entries, views):
        if is_meant(name) and (yield from _came_later(name, views, -math.inf)):
            found += (name,)
    return found


def _is_overwritten(keys: AttemptKeys, mine: Stat, views: Views) -> Program[bool]:
    """mine: of the ``.metadata`` beside the data. What was projected from it has its size."""
    shown = yield from _first([f"{keys.name}/{METADATA}"])
    if shown is None or (
        shown.size_bytes == mine.size_bytes and (yield from _is_ours(keys, shown, mine))
    ):
        return False
    try:
        data: bytes = yield Read(f"{keys.name}/{METADATA}")
    except NotFoundError:
        return False
    # Of a part other domains' logs may not know the id.
    if keys.save_id.encode() in data or any(is_known(keys.name, data, v) for v in views.values()):
        return False
    # It was told to replace that one, and its writer died before it did: the next owner does.
    return not (yield from was_to_replace(keys.name, keys.save_id, data))


def _is_ours(keys: AttemptKeys, shown: Stat, mine: Stat) -> Program[bool]:
    """Without a read: the store says that the bytes are the same; or it is large, and was written before
    the manifest, which a projection puts there after it, where another program would have come later.
    """
    if shown.etag is not None and shown.etag == mine.etag:
        return True
    if shown.size_bytes <= _READ_BYTES:
        return False
    manifest = yield from _first([f"{keys.name}/{MANIFEST}"])
    if manifest is None or manifest.modified_s is None or shown.modified_s is None:
        return False
    if keys.shape is Shape.FILESYSTEM:
        return shown.modified_s <= manifest.modified_s
    return shown.modified_s < manifest.modified_s  # in seconds: one may hold both programs' writes


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
    with contextlib.suppress(ValueError, EOFError):
        yield from _named_paths(metadata)


def _named_paths(metadata: bytes) -> Iterator[str]:
    """As ``data_paths``. ValueError: it is no pickle, or not all of one."""
    memo: dict[int, object] = {}
    last: object = None
    before: object = None
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
