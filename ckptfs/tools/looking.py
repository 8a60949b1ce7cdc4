"""What lies at a URI: a run, one checkpoint, or runs further down. Read-only, no torch.

    look_at(uri)    -> Run          it has a log, or checkpoints lie in it
                    -> OneOf        one checkpoint, and its files where they are asked for
                    -> Runs         a directory or prefix above runs

    newest(uri)     -> Newest       the last commit of a kind, and when it was made

NotFoundError: nothing is there. On an object store an empty place is no place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.catalog.catalog import (
    Look,
    Origin,
    find,
    list_live,
    looking_at,
    refuse_gap,
    refuse_no_run,
)
from ckptfs.commit.catalog.unlogged import check_unlogged, newest_there
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import CONTROL, MANIFEST, METADATA, number_order
from ckptfs.errors import CkptfsError, NotFoundError, StorageError
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.storage.local.files import is_partial_name
from ckptfs.tools.holding import Holding, holding_of
from ckptfs.tools.lines import Checkpoint, Run, Sort, State, began_at, side_by_side
from ckptfs.tools.listing import list_run
from ckptfs.uri import Uri

__all__ = ["File", "Newest", "OneOf", "RunFound", "Runs", "Wanted", "look_at", "newest"]

_DEPTH = 3  # directories between what was asked for and a run


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is shown of a place; see ``list_run``.

    Attributes:
        everything: History too, and whether stock readers see each.
        kinds: Only these; empty: all.
        sort: The order.
        limit: So many, the last of the order; None: all.
        files: The files too, of one checkpoint.
    """

    everything: bool = False
    kinds: tuple[Kind, ...] = ()
    sort: Sort = Sort.COMMIT
    limit: int | None = None
    files: bool = False


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint.

    Attributes:
        path: From its directory.
        size_bytes: Its bytes.
        domain: The id of the domain that holds it; None for all.
    """

    path: str
    size_bytes: int
    domain: str | None = None


@dataclass(frozen=True, slots=True)
class OneOf:
    """One checkpoint of a run.

    Attributes:
        uri: Where it is.
        holding: Who holds the run.
        lines: The save of that name, older ones of the name after it.
        files: Its files; None where they were not wanted.
    """

    uri: Uri
    holding: Holding
    lines: tuple[Checkpoint, ...]
    files: tuple[File, ...] | None = None


@dataclass(frozen=True, slots=True)
class Newest:
    """The latest checkpoint.

    Attributes:
        checkpoint: The checkpoint; None: there is none.
        notes: What is odd about its run, as of ``Run``.
    """

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFound:
    """A run below the place that was listed.

    Attributes:
        uri: The run.
        holding: Who holds it; None where that is not known.
        checkpoints: How many.
        latest: The name of the latest; None where there is none.
        step: Its completed optimizer steps; None where there is no number.
        created_at: When it was made, in ISO 8601; None where that is not known.
        trouble: Why nothing is known of the run.
    """

    uri: Uri
    holding: Holding | None
    checkpoints: int = 0
    latest: str | None = None
    step: int | None = None
    created_at: str | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Runs:
    """A place above runs.

    Attributes:
        uri: The place.
        runs: The runs below it.
    """

    uri: Uri
    runs: tuple[RunFound, ...]


def look_at(
    uri: Any, wanted: Wanted = Wanted(), storage_options: Mapping[str, Any] | None = None
) -> Run | OneOf | Runs:
    """Find what is at a URI. Local, read-only.

    Args:
        uri: A run, a checkpoint, or a place above runs.
        wanted: What is shown of it.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Returns:
        A run, one checkpoint of a run, or the runs below.

    Raises:
        NotFoundError: Nothing is there.
        ManifestError: A run's log is damaged.
        StorageError: The storage failed.
    """
    with looking_at(uri, storage_options) as look:
        if look.views:
            return _list(look, wanted)
        entries = _entries(look.storage, "")
        names = {entry.name for entry in entries or ()}
        if CONTROL in names and not _entries(look.storage, CONTROL):
            names.discard(CONTROL)  # an empty directory: nobody began a run here
        # A run that is being made, or has lost its domain, is still one.
        if CONTROL in names and not names & {MANIFEST, METADATA}:
            return _list(look, wanted)
        one = _one_of(look.root, wanted, storage_options, must=bool(names & {MANIFEST, METADATA}))
        if one is not None:
            return one
        entries = _refuse_absent(look, entries)
        run = _list(look, wanted)
        if not run.checkpoints and any(entry.is_dir for entry in entries):
            found = tuple(_runs_below(look, entries, storage_options))
            if found:
                return Runs(look.root, found)
        return run if run.checkpoints else replace(run, notes=(*run.notes, *_no_run(entries)))


def newest(run_uri: Any, kind: Kind, storage_options: Mapping[str, Any] | None = None) -> Newest:
    """The last committed checkpoint of a kind, as ``ckptfs.latest`` finds it, and when it was made. Local,
    read-only.

    Args:
        run_uri: The run.
        kind: A checkpoint, weights or a directory.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Raises:
        NotFoundError: Nothing is there.
        ManifestError: The log has a gap, so that what is found may be an old one.
        IncompleteCheckpointError: The last one was removed by hand.
        AmbiguousCheckpointError: Stock torch saved a checkpoint into the run after its newest commit.
    """
    with looking_at(run_uri, storage_options) as look:
        refuse_gap(look)
        shape = look.storage.capabilities.shape
        if kind is not Kind.WEIGHTS:
            drive(check_unlogged(look.views, look.root, shape), look.storage)
        found = drive(newest_there(look.views, look.root, kind, shape), look.storage)
        if found is not None:
            run = list_run(look, names=[found.uri.name])
            # Of the name there may be other lines: an attempt to replace it.
            lines = [one for one in run.checkpoints if one.save_id == found.save_id]
            return Newest(lines[0] if lines else None, run.notes)
        if not look.views:
            drive(refuse_no_run(look.root, shape), look.storage)
            _refuse_absent(look, _entries(look.storage, ""))
        return Newest(None)


_SINGLE_FILES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def _no_run(entries: Sequence[Entry]) -> Iterator[str]:
    """What lies in a place that is no run. Pure."""
    files = sorted(e.name for e in entries if not e.is_dir and e.name.endswith(_SINGLE_FILES))
    if files:
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")  # noqa: PLR2004
        yield f"no run, a directory of single files: {shown}; ckptfs inspect shows one of them"
        halves = sum(1 for e in entries if is_partial_name(e.name))
        if halves:
            yield f"{halves} files that never got their name (.partial-*): ckptfs gc shows whose"
    elif any(e.name == CONTROL for e in entries):
        yield f"no run: {CONTROL} is empty"


def _refuse_absent(look: Look, entries: list[Entry] | None) -> list[Entry]:
    if entries:
        return entries
    shape = look.storage.capabilities.shape
    drive(refuse_no_run(look.root, shape), look.storage)  # a file lists like a place that is absent
    if entries is None or shape is Shape.OBJECT:
        raise NotFoundError(
            "nothing exists there",
            uri=look.root,
            hint="run ckptfs ls on the parent to see what exists",
        )
    return entries


def _list(look: Look, wanted: Wanted, names: Collection[str] = ()) -> Run:
    return list_run(
        look,
        everything=wanted.everything or bool(names),
        kinds=wanted.kinds,
        names=names,
        sort=wanted.sort,
        limit=wanted.limit,
    )


def _entries(storage: Storage, key: str) -> list[Entry] | None:
    try:
        return storage.list(key)
    except NotFoundError as error:
        if error.of_bucket:
            raise
        return None


# -- one checkpoint -------------------------------------------------------------------------


def _one_of(
    target: Uri, wanted: Wanted, options: Mapping[str, Any] | None, *, must: bool
) -> OneOf | None:
    """The checkpoint of that name in its parent; None where that knows none. must: there is one."""
    if target.parent == target or not target.name:
        return None
    with contextlib.ExitStack() as stack:
        try:
            look = stack.enter_context(looking_at(target.parent, options))
            run = _list(look, wanted, [target.name])
        except StorageError:
            if must:
                raise
            return None  # above a run nothing need be permitted
        if not run.checkpoints:
            return None
        lines = tuple(sorted(run.checkpoints, key=lambda one: _RANK.get(one.state, 9)))
        files = tuple(_files(look, lines[0])) if wanted.files else None
        return OneOf(target, run.holding, lines, files)


_RANK = {
    State.COMMITTED: 0,
    State.UNPROJECTED: 0,
    State.FOREIGN: 0,
    State.IN_DOUBT: 1,
    State.DAMAGED: 2,
}


def _files(look: Look, line: Checkpoint) -> Iterator[File]:
    if line.manifest is not None:
        for record in sorted(line.manifest.files, key=lambda one: number_order(one.path)):
            yield File(record.path, record.size_bytes, record.domain)
    elif line.origin is Origin.STOCK:
        names = (e.name for e in look.storage.list(line.name) if not e.is_dir)
        found = sorted(names, key=number_order)
        sizes = side_by_side(lambda name: look.storage.stat(f"{line.name}/{name}"), found)
        for name, stat in zip(found, sizes, strict=True):
            yield File(name, stat.size_bytes)


# -- runs further down ----------------------------------------------------------------------


def _runs_below(
    look: Look, entries: Sequence[Entry], options: Mapping[str, Any] | None
) -> Iterator[RunFound]:
    """Runs below the place, level by level; what lies in a run is not looked at."""
    level = [entry.name for entry in entries if entry.is_dir]
    runs: list[str] = []
    for _ in range(_DEPTH):
        below: list[str] = []
        for key, found in zip(level, side_by_side(_lister(look.storage), level), strict=True):
            names = {entry.name for entry in found}
            if CONTROL in names and _entries(look.storage, f"{key}/{CONTROL}"):
                runs.append(key)
            elif names & {MANIFEST, METADATA}:
                runs.append(key.rpartition("/")[0])  # a checkpoint: what holds it is a run
            else:
                below += [f"{key}/{entry.name}" for entry in found if entry.is_dir]
        level = [key for key in below if key.rpartition("/")[0] not in runs]
    yield from side_by_side(
        lambda key: _summary(look.root / key, options), sorted(set(runs), key=number_order)
    )


def _lister(storage: Storage) -> Any:
    def entries(key: str) -> list[Entry]:
        try:
            return storage.list(key)
        except StorageError:
            return []  # gone meanwhile, or not for us to see

    return entries


def _summary(uri: Uri, options: Mapping[str, Any] | None) -> RunFound:
    try:
        with looking_at(uri, options) as look:
            live = [seal for seal in list_live(look.views) if not seal.failure]
            holding = holding_of(look.views)
            if not live:
                run = list_run(look)
                loose = [one for one in run.checkpoints if one.state is State.COMMITTED]
                if not loose:
                    return RunFound(uri, holding)
                last = ([one for one in loose if one.kind is Kind.CHECKPOINT] or loose)[-1]
                return RunFound(uri, holding, len(loose), last.name, last.step, last.created_at)
            states = [seal for seal in live if seal.artifact is Kind.CHECKPOINT]
            seal = (states or live)[-1]
            created_at = began_at(seal.save_id)
            with contextlib.suppress(CkptfsError):
                found = drive(find(seal, look.storage.capabilities.shape, uri), look.storage)
                created_at = found.manifest.created_at if found.manifest else created_at
            return RunFound(uri, holding, len(live), seal.name, seal.step, created_at)
    except CkptfsError as error:
        return RunFound(uri, None, trouble=error.message)
