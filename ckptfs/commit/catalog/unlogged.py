"""Checkpoints that no log lists: copied here by ``cp -r``, or written by stock torch. Read-only.

    unlogged_names   directories of a run with a name that no live save of the log has
    leftovers        directories that look like checkpoints, in a run that is restored from its beginning
    look_at_directory  one of them: a checkpoint, or what is wrong with it, or None if it is no checkpoint
    list_unlogged    all that can be loaded, the newest last
    newest           the latest checkpoint: of the log, otherwise of the unlogged ones
    newest_unlogged  the same, or an error if that one was removed by hand
    oldest_first     the order of checkpoints that no log orders
    newer_unlogged   those after the run's newest commit: resuming from the commit would silently ignore them
    check_unlogged   the same as an error that says what to do

A manifest is accepted by itself if every listed file exists with its size; ``.metadata`` alone is a plain DCP
checkpoint. A save that the log knows, in whatever state, is not unlogged; a copy of it under another name is.

A checkpoint is newer than the newest commit if it is complete (a ``.metadata``, and all of its files exist), has
no manifest of ours, and was written later than that commit by the storage's clock. The same holds for a
``.metadata`` in the place of the newest commit's that this log did not write. The run was resumed from an older
one. If a storage reports no times, nothing is known to be later.
"""

from __future__ import annotations

import contextlib
import math
import pickletools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ckptfs.commit.catalog.catalog import (
    Checkpoint,
    Origin,
    is_of_log,
    list_live,
    logged,
    missing_files,
    read_view,
)
from ckptfs.commit.delete.deletion_steps import lies_nowhere
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.manifest import Manifest, decode_manifest
from ckptfs.commit.operations import List, Program, Read, ReadAhead, Refresh, StatOf, side_by_side
from ckptfs.commit.paths import (
    CONTROL,
    MANIFEST,
    METADATA,
    SHARED,
    AttemptKeys,
    number_order,
    step_in,
)
from ckptfs.commit.save.foreign_metadata import is_known, names_save, was_to_replace
from ckptfs.commit.state import Views, catalog, latest, piece, split_name
from ckptfs.errors import (
    AmbiguousCheckpointError,
    ArgumentChoice,
    IncompleteCheckpointError,
    ManifestError,
    NotFoundError,
    StorageError,
)
from ckptfs.storage.base import Entry, Shape, Stat
from ckptfs.uri import Uri

__all__ = [
    "Unlogged",
    "UnloggedCheckpoint",
    "check_unlogged",
    "data_paths",
    "is_overwritten",
    "leftovers",
    "list_unlogged",
    "look_at_directory",
    "missing_data",
    "newer_unlogged",
    "newest",
    "newest_unlogged",
    "oldest_first",
    "unlogged_at",
    "unlogged_error",
    "unlogged_names",
    "views_if_gone",
]


@dataclass(frozen=True, slots=True)
class UnloggedCheckpoint:
    """A directory that is a checkpoint, or was going to be one.

    checkpoint is None if it cannot be loaded; ``why`` then says the reason. manifest is None for a plain DCP
    checkpoint, and if it is damaged. modified_s: of ``.metadata`` by the storage (Unix time), if nothing else has a
    time.
    """

    name: str
    checkpoint: Checkpoint | None
    manifest: Manifest | None = None
    why: str = ""
    modified_s: float | None = None

    @property
    def step(self) -> int | None:
        """The step in its manifest; without a manifest, the number at the end of its name."""
        return step_in(self.name) if self.manifest is None else self.manifest.step

    @property
    def written_s(self) -> float:
        """When it was written, Unix time; before everything else if no time is known."""
        if self.manifest is None:
            return float("-inf") if self.modified_s is None else self.modified_s
        try:
            then = datetime.fromisoformat(self.manifest.created_at)
        except ValueError:
            return float("-inf")
        return then.replace(tzinfo=then.tzinfo or UTC).timestamp()


def oldest_first(found: Iterable[UnloggedCheckpoint]) -> list[UnloggedCheckpoint]:
    """Return checkpoints that no log orders, the newest last. Pure.

    They are ordered by their steps, if all have one and the names without a manifest differ only in
    the number. Otherwise they are ordered by the time at which they were written. A copying tool
    need not keep times, and numbers in names of two patterns need not count the same thing.
    """
    ordered = sorted(found, key=lambda one: number_order(one.name))
    steps = {one.name: one.step for one in ordered}
    patterns = {one.name.rstrip("0123456789") for one in ordered if one.manifest is None}
    if None in steps.values() or len(patterns) > 1:
        return sorted(ordered, key=lambda one: one.written_s)
    return sorted(ordered, key=lambda one: steps[one.name] or 0)


def list_unlogged(views: Views, root: Uri, kind: Kind | None = None) -> Program[list[Checkpoint]]:
    """Return the unlogged checkpoints of a run.

    These are directories with a manifest, or `.metadata`, that none of ``views`` knows in any
    state; only those of ``kind``, if given. Names that a live save of the log has are not examined,
    because each examination is a request on an object store.
    """
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return []
    found = []
    for name in unlogged_names(entries, views):
        directory = yield from look_at_directory(name, views, root)
        if directory is not None:
            found.append(directory)
    # A listing has the checkpoints that can be loaded; load() says what is wrong with the others.
    loadable = {one.name: one.checkpoint for one in found if one.checkpoint is not None}
    wanted = (b for b in found if b.name in loadable and kind in (None, loadable[b.name].kind))
    return [loadable[directory.name] for directory in oldest_first(wanted)]


def newest(views: Views, root: Uri, kind: Kind) -> Program[Checkpoint | None]:
    """Return the last commit of a kind in the log, except those of failing runs.

    If there is none, return the last unlogged checkpoint in the order of ``oldest_first``.
    """
    live = latest(views, kind)
    if live is not None:
        return next(c for c in logged(views, root) if c.save_id == live.seal.save_id)
    loose = yield from list_unlogged(views, root, kind)
    return loose[-1] if loose else None


def newest_unlogged(
    views: Views, root: Uri, kind: Kind, shape: Shape
) -> Program[Checkpoint | None]:
    """Return the checkpoint that ``newest`` finds, after checking that it exists.

    Raises:
        IncompleteCheckpointError: Every domain of it is among ``views`` and has nothing of it, and
            its log does not say that it was deleted. Taking an older one would silently skip it.
    """
    found = yield from newest(views, root, kind)
    while (last := latest(views, kind)) is not None:
        now = yield from views_if_gone(last.seal, views, root, shape)
        if now is None:
            break
        views = now
        found = yield from newest(views, root, kind)
    return found


def views_if_gone(seal: Seal, views: Views, root: Uri, shape: Shape) -> Program[Views | None]:
    """Check that some files of a live save exist.

    Reads only. A save with a domain that is not among ``views`` is not checked.

    Returns:
        None if some exist, or if this is unknown. The logs as they are now, if the save was deleted or something
        was committed in between.

    Raises:
        IncompleteCheckpointError: Every domain of it has nothing of it, and the log does not say that it
            was deleted: it was removed by hand.
    """
    if not set(seal.everywhere) <= set(views):
        return None
    for domain in seal.everywhere:
        if not (yield from lies_nowhere(seal, domain, shape)):
            return None
    again = yield from read_view()
    now: Views = {} if again is None else dict([again])
    is_live = any(live.save_id == seal.save_id for live in list_live(now))
    if not is_live or _newest_id(now, seal.artifact) != _newest_id(views, seal.artifact):
        return now
    where = root / seal.name
    raise IncompleteCheckpointError(
        f"{seal.name} was removed by hand: it is the last commit (save {seal.save_id}), and "
        "no file of it exists",
        uri=where,
        hint=f"run ckptfs rm {where} to record that; then the checkpoint before it is the latest",
    )


def _newest_id(views: Views, kind: Kind) -> str | None:
    last = latest(views, kind)
    return None if last is None else last.seal.save_id


def unlogged_names(entries: Iterable[Entry], views: Views) -> list[str]:
    """Return the directories of a run that may be checkpoints that no log knows.

    step_9 comes before step_10.
    """
    known = {CONTROL, SHARED, *(seal.name for seal in list_live(views))}
    return sorted((e.name for e in entries if e.is_dir and e.name not in known), key=number_order)


def leftovers(
    step_of: Callable[[str], int | None], known: Collection[str], *, has_log: bool
) -> Program[tuple[str, ...]]:
    """Return the directories that look like checkpoints and are in no log.

    A restore that finds nothing and starts at step 0 next to them loses the run (marin #8760: 8,000
    steps). Therefore a directory counts if it has a manifest or `.metadata`. If no log was ever
    written, a directory with the name of a step counts too, because checkpoints of other tools have
    neither.
    """
    yield Refresh("")
    try:
        entries: list[Entry] = yield List("")
    except NotFoundError:
        return ()
    found = []
    for entry in entries:
        if not entry.is_dir or entry.name in (CONTROL, SHARED) or entry.name in known:
            continue
        called = not has_log and step_of(entry.name) is not None
        if called or (yield from _is_checkpoint(entry.name)):
            found.append(entry.name)
    return tuple(found)


def _is_checkpoint(name: str) -> Program[bool]:
    for inner in (MANIFEST, METADATA):
        try:
            yield StatOf(f"{name}/{inner}")
        except NotFoundError:
            continue
        return True
    return False


def look_at_directory(name: str, views: Views, root: Uri) -> Program[UnloggedCheckpoint | None]:
    """Examine a directory with a name that no live save has. None: no checkpoint, or the log's."""
    yield Refresh(name)  # a file that this node found missing earlier may exist now
    try:
        raw: bytes = yield Read(f"{name}/{MANIFEST}")
    except NotFoundError:
        # Between the two renames of a projection `.metadata` exists and the manifest does not.
        if any(view.saves.knows_name(name) for view in views.values()):
            return None
        return (yield from _stock(name, root))
    try:
        manifest = decode_manifest(raw, root / name)
    except ManifestError as error:
        return UnloggedCheckpoint(name, None, why=error.message)
    if manifest.save_id == name or is_of_log(name, manifest, views):
        return None  # the data directory of a step that is listed as a run, or a save of the log
    missing = yield from missing_files(manifest, name)
    if not _enough(manifest, missing):
        why = f"{len(missing)} of {len(manifest.files)} files are missing or have another size"
        return UnloggedCheckpoint(name, None, manifest, f"{why}: an interrupted copy")
    checkpoint = Checkpoint(
        root / name,
        manifest.step,
        manifest.save_id,
        manifest.artifact,
        Origin.MANIFEST,
        manifest.base,
        tuple(d.id for d in manifest.domains),
        parts=tuple(ref.name for ref in manifest.parts),
    )
    return UnloggedCheckpoint(name, checkpoint, manifest)


def _stock(name: str, root: Uri) -> Program[UnloggedCheckpoint | None]:
    try:
        stat: Stat = yield StatOf(f"{name}/{METADATA}")
    except NotFoundError:
        return None
    checkpoint = Checkpoint(root / name, step_in(name), None, Kind.CHECKPOINT, Origin.STOCK)
    return UnloggedCheckpoint(name, checkpoint, modified_s=stat.modified_s)


def _enough(manifest: Manifest, missing: tuple[str, ...]) -> bool:
    """Whether nothing is missing, or only files on other nodes' disks.

    Then all files of at least one domain, and all files that belong to every domain, are here.
    """
    lacking = {f.domain for f in manifest.files if f.path in missing}
    complete_domains = [d.id for d in manifest.domains if d.id not in lacking]
    return not lacking or (None not in lacking and bool(complete_domains))


_READ_BYTES = 1 << 20  # up to this size a file is read, which costs as much as any other request


class Unlogged(ArgumentChoice, parameter="unlogged"):
    """What to do about unlogged checkpoints."""

    ERROR = "error"
    IGNORE = "ignore"


def check_unlogged(views: Views, root: Uri, shape: Shape) -> Program[None]:
    """Check that no other program saved a checkpoint after the newest commit.

    Raises:
        AmbiguousCheckpointError: There are such checkpoints.
    """
    names = yield from newer_unlogged(views, shape)
    if names:
        raise unlogged_error(names, _newest(views), root)


def unlogged_error(
    names: tuple[str, ...], newest: Seal | None, root: Uri
) -> AmbiguousCheckpointError:
    """Return the error for checkpoints of another program, and what can be done.

    newest: The commit that would be taken otherwise; None if the log has none for the requested
    step.
    """
    over = [name for name in names if newest is not None and split_name(name)[0] == newest.name]
    if over:
        return AmbiguousCheckpointError(
            f"{over[0]} was overwritten by another program",
            names=names,
            uri=root / over[0],
            hint="another program wrote its .metadata, and stock torch loads that one; move it "
            'away to load ours, or pass unlogged="ignore" to a call that takes the newest',
        )
    if newest is None:
        return AmbiguousCheckpointError(
            f"another program wrote {names[0]}, and the log has no checkpoint of that step",
            names=names,
            uri=root / names[0],
            hint="load it by its name: ckptfs.load reads what stock torch saved",
        )
    those = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    came, last = "was" if len(names) == 1 else "were", newest.name
    return AmbiguousCheckpointError(
        f"{those} {came} saved after {last} by another program",
        names=names,
        uri=root / names[-1],
        hint=f'load the right one by its name, pass unlogged="ignore" to continue with {last}, or '
        "move the others away",
    )


def newer_unlogged(views: Views, shape: Shape) -> Program[tuple[str, ...]]:
    """Return the names of such checkpoints. A save may be sealed during the search, so it searches twice."""
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
    homes = [f"{data}/{_last_piece(newest)}" for data in keys.homes()]
    shows = _first([f"{newest.name}/{METADATA}"])
    own, shown, entries = yield from side_by_side(_first(homes), shows, _entries_of_run())
    if own is None or own.modified_s is None:
        return ()
    found: tuple[str, ...] = ()
    for name in unlogged_names(entries, views):
        if (yield from _came_later(name, views, own.modified_s)):
            found += (name,)
    if (yield from is_overwritten(newest, views, shape, (own, shown))):
        found += (newest.name,)
    return found


def _entries_of_run() -> Program[list[Entry]]:
    yield Refresh("")
    entries: list[Entry] = yield List("")
    return entries


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
            return False  # a copy with a valid manifest, or a save that is being removed
    except NotFoundError:
        pass
    try:
        data: bytes = yield Read(f"{name}/{METADATA}")
    except NotFoundError:
        return False
    if any(is_known(name, data, view) for view in views.values()):
        return False
    # If it is incomplete, its writer has not finished, or died.
    return not (yield from missing_data(name, data))


def missing_data(name: str, metadata: bytes) -> Program[tuple[str, ...]]:
    """Return the data files that a ``.metadata`` names and that do not exist.

    It takes one listing for each directory. If the ``.metadata`` is not a complete pickle, it is
    itself missing, because it cannot be loaded.
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
        present = {entry.name for entry in entries if not entry.is_dir}
        missing += [f"{folder}/{file}" if folder else file for file in files if file not in present]
    return tuple(missing)


def is_overwritten(
    seal: Seal,
    views: Views,
    shape: Shape,
    known: tuple[Stat | None, Stat | None] | None = None,
) -> Program[bool]:
    """Whether another ``.metadata`` has replaced a projected one of this save or of its parts.

    known: The stats of the ``.metadata`` next to the data and of the projected one, for a save
    without parts, if the caller has them.
    """
    if seal.artifact is not Kind.CHECKPOINT:
        return False
    for one in [piece(seal, ref) for ref in seal.parts] or [seal]:
        keys = AttemptKeys(shape, one.name, one.save_id)
        data: bytes | None = None
        homes = [f"{home}/{METADATA}" for home in keys.homes()]
        shows = f"{keys.name}/{METADATA}"
        if known is not None and not seal.parts:
            own, shown = known
        elif shape is Shape.OBJECT:
            looks = (_first(homes), _first([shows]), _small(shows))
            own, shown, data = yield from side_by_side(*looks)
        else:
            # If it names the save, no other program wrote it, and its place and time need not be known.
            data = yield from _small(shows)
            if data is not None and keys.save_id.encode() in data:
                continue
            own, shown = yield from side_by_side(_first(homes), _first([shows]))
        if own is not None and (yield from _is_overwritten(keys, own, shown, views, data)):
            return True
    return False


def unlogged_at(
    views: Views, seals: Sequence[Seal], is_meant: Callable[[str], bool], shape: Shape
) -> Program[tuple[str, ...]]:
    """Return the names of checkpoints that another program saved for one step.

    These are the names of the step's saves that another program saved over. If the log has none,
    they are the complete checkpoints of another program for which ``is_meant`` returns True.
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
    for name in unlogged_names(entries, views):
        if is_meant(name) and (yield from _came_later(name, views, -math.inf)):
            found += (name,)
    return found


def _is_overwritten(
    keys: AttemptKeys, own: Stat, shown: Stat | None, views: Views, data: bytes | None
) -> Program[bool]:
    """Whether another ``.metadata`` is shown in the place of a save's projected one.

    Args:
        keys: The keys of the save.
        own: The stat of the ``.metadata`` next to the data. The projected one has the same size.
        shown: The stat of the one in the projected place, or None.
        views: The folded logs.
        data: The content of the one in the projected place, if it was read with them.
    """
    if shown is None or (
        shown.size_bytes == own.size_bytes and (yield from _is_ours(keys, shown, own))
    ):
        return False
    if data is None:
        try:
            data = yield Read(f"{keys.name}/{METADATA}")
        except NotFoundError:
            return False
    # The logs of other domains may not know the id of a part.
    if keys.save_id.encode() in data or any(is_known(keys.name, data, v) for v in views.values()):
        return False
    # The save was to replace that one, and its writer died before it did: the next owner does it.
    return not (yield from was_to_replace(keys.name, keys.save_id, data))


def _is_ours(keys: AttemptKeys, shown: Stat, own: Stat) -> Program[bool]:
    """Whether a shown ``.metadata`` is ours, as far as this is known without reading it.

    It is if the store says that the bytes are the same. It also is if it is large and was written
    before the manifest: a projection writes the manifest after it, and another program would have
    come later.
    """
    if shown.etag is not None and shown.etag == own.etag:
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


def _small(key: str) -> Program[bytes | None]:
    """The bytes of a small file; None if it is large or cannot be read."""
    try:
        found: tuple[bytes, ...] = yield ReadAhead((key,))
    except StorageError:
        return None
    return found[0] if found else None


def data_paths(metadata: bytes) -> Iterator[str]:
    """Yield the data files that a ``.metadata`` names.

    Nothing is unpickled: its texts are read in order, and the one after ``relative_path`` is a
    path. Data that is no pickle names none.
    """
    with contextlib.suppress(ValueError, EOFError):
        yield from _named_paths(metadata)


def _named_paths(metadata: bytes) -> Iterator[str]:
    """Yield as ``data_paths``.

    Raises:
        ValueError: It is no pickle, or an incomplete one.
    """
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
