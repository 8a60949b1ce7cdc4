"""List the checkpoints at a URI, as ``ckptfs ls`` shows them. Read-only, no torch.

    look_at(uri)    -> Run          it has a log, or checkpoints are in it
                    -> OneOf        one checkpoint, and its files if they are wanted
                    -> Runs         a directory or prefix above runs

    newest(uri)     -> Newest       the last commit of a kind, and when it was made

If nothing is there, that is a NotFoundError. On an object store an empty place does not exist.

A run is listed from its folded log, its attempts and its directories, which is cheap. Then sizes, ranks
and times of the wanted checkpoints are read: one small read each, several at once.

committed     by the log; also ``not projected`` if stock torch does not see it yet
in doubt      a domain that decides is out of reach from here
on its way    an attempt without a seal; ``abandoned`` if its writer can no longer finish it
foreign       not in the log of the run: another program, such as stock torch, saved it, and it is whole
damaged       its manifest is missing or is another one, or a foreign one is not whole. The files of our
              own checkpoints are not checked: ``verify`` does that
deleted       by the log, with bytes still there; ``aborted``, ``replaced``, ``overwritten``: history
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.catalog.catalog import (
    CheckedViews,
    Look,
    Origin,
    check_log,
    find,
    list_live,
    looking_at,
    refuse_no_run,
    refuse_partial_log,
)
from ckptfs.commit.catalog.unlogged import (
    UnloggedCheckpoint,
    check_unlogged,
    look_at_directory,
    newest_unlogged,
    oldest_first,
    unlogged_names,
)
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.recovery import AttemptRecord, read_record
from ckptfs.commit.paths import ATTEMPTS, CONTROL, MANIFEST, METADATA, number_order
from ckptfs.commit.state import (
    Live,
    Standing,
    catalog,
    commits,
    hidden,
    living,
    seal_of,
    standing,
    used_overwrites,
)
from ckptfs.errors import AccessError, CkptfsError, NotFoundError, StorageError, UnsupportedError
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.storage.local.files import is_partial_name
from ckptfs.tools.debris import DAY_S, Fate, Tree, attempt_fate, attempt_tree, is_sending
from ckptfs.tools.lines import (
    HISTORY,
    Checkpoint,
    Holding,
    Run,
    Sort,
    State,
    age_s,
    as_foreign,
    as_overwritten,
    began_at,
    from_beside,
    from_seal,
    holding_of,
    in_order,
    side_by_side,
)
from ckptfs.uri import Uri

__all__ = [
    "File",
    "Newest",
    "OneOf",
    "RunFound",
    "Runs",
    "Wanted",
    "list_run",
    "look_at",
    "newest",
]

_NEWER = "the log has entries of a newer version, which are not understood here: upgrade ckptfs"


def list_run(
    look: Look,
    *,
    everything: bool = False,
    kinds: Collection[Kind] = (),
    names: Collection[str] = (),
    sort: Sort = Sort.COMMIT,
    limit: int | None = None,
) -> Run:
    """The checkpoints of a run: first those outside the log, then those of the log in commit order.

    Another order can be chosen with ``sort``. Local, read-only.

    Args:
        look: What this process sees of the run.
        everything: List history too, and check whether stock readers see each checkpoint.
        kinds: List only these kinds; empty: all.
        names: List only these names; empty: all.
        sort: The order.
        limit: List only this many, the last ones of the order; None: all.

    Raises:
        NotFoundError: Nothing is there.
        ManifestError: The log is damaged.
    """
    found = _candidates(look, names)
    shown = [one for one in found if everything or one.line.state not in HISTORY]
    withheld = len(found) - len(shown)
    if limit is not None and sort is Sort.COMMIT and not kinds:
        shown = shown[max(0, len(shown) - limit) :]  # lines that are not shown are not read
    loose: list[Checkpoint] = []
    if limit is None or len(shown) < limit or sort is not Sort.COMMIT or kinds:
        loose = _unlogged_lines(look, names)
    lives = catalog(look.views)
    newest = lives[-1].seal if lives else None

    def detailed(one: _Candidate) -> Checkpoint:
        line = one.detailed(look, everything=everything)
        return (
            line if one.seal is None or one.seal != newest else as_overwritten(line, newest, look)
        )

    lines = [*loose, *side_by_side(detailed, shown)]
    lines = in_order([line for line in lines if not kinds or line.kind in kinds], sort)
    if limit is not None:
        lines = lines[max(0, len(lines) - limit) :]
    return Run(look.root, holding_of(look.views), tuple(lines), withheld, _notes(look))


# -- candidates -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What is known of a save without a separate read. seal: None for an attempt."""

    line: Checkpoint
    seal: Seal | None = None

    def detailed(self, look: Look, *, everything: bool) -> Checkpoint:
        """Return the line with what the manifest adds."""
        if self.seal is None:
            return self.line
        return from_seal(self.line, self.seal, look, everything=everything)


def _candidates(look: Look, names: Collection[str]) -> list[_Candidate]:
    attempts = _attempts(look)
    found = [*_logged(look, attempts), *_unsealed(look, attempts)]
    return [one for one in found if not names or one.line.name in names]


def _unlogged_lines(look: Look, names: Collection[str]) -> list[Checkpoint]:
    """Return lines for checkpoints that are not in the log, the oldest first."""
    entries = [Entry(name, is_dir=True) for name in names] or look.storage.list("")

    def find_in(name: str) -> UnloggedCheckpoint | None:
        return drive(look_at_directory(name, look.views, look.root), look.storage)

    found = side_by_side(find_in, unlogged_names(entries, look.views))
    lines = [
        from_beside(Checkpoint(look.root / one.name, one.name, State.COMMITTED, None), one)
        for one in oldest_first(one for one in found if one is not None)
    ]
    # Without a log, checkpoints of other programs are ordinary ones.
    return side_by_side(lambda line: as_foreign(line, look), lines) if look.views else lines


def _logged(look: Look, attempts: Sequence[AttemptRecord]) -> list[_Candidate]:
    """Return the saves of the log: history and commits in commit order, then saves in doubt."""
    lives = commits(look.views)
    live = {one.seal.save_id for one in catalog(look.views)}
    order = {one.seal.save_id: at for at, one in enumerate(lives)}
    names = {one.save_id: one.name for one in attempts}
    found: list[tuple[int, _Candidate]] = []
    for save_id in dict.fromkeys([*living(look.views), *names]):
        seal = seal_of(save_id, look.views)
        if standing(save_id, look.views) is Standing.ABORTED:
            name = names.get(save_id, "") if seal is None else seal.name
            if name:  # otherwise nothing is left of it; ``ckptfs log`` shows it
                line = Checkpoint(look.root / name, name, State.ABORTED, Origin.LOG)
                line = replace(line, save_id=save_id, created_at=began_at(save_id))
                found.append((-1, _Candidate(line)))
        elif seal is not None:
            state, note = _state_of(seal, look, lives, live)
            if state is not None:
                line = _line(look, seal, state, note)
                found.append((order.get(save_id, len(order)), _Candidate(line, seal)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _state_of(
    seal: Seal, look: Look, lives: Sequence[Live], live: Collection[str]
) -> tuple[State | None, str]:
    """Return the state of a sealed save and the reason; None if nothing of it is left."""
    views = look.views
    match standing(seal.save_id, views):
        case Standing.COMMITTED if seal.save_id in live:
            return State.COMMITTED, ""
        case Standing.COMMITTED:
            is_hidden = hidden(seal, views, used_overwrites(views, lives))
            return (State.OVERWRITTEN if is_hidden else State.REPLACED), ""
        case Standing.DELETED:
            saves = [view.save(seal.save_id) for view in views.values()]
            if all(save.gone for save in saves if save.seal is not None):
                return None, ""
            return State.DELETED, "its bytes are still there"
        case Standing.IN_DOUBT:
            lost = sorted(set(seal.domains) - set(views))
            return State.IN_DOUBT, f"out of reach: domain {', '.join(lost)}"
        case _:
            return State.IN_DOUBT, "not sealed in all of its domains"


def _line(look: Look, seal: Seal, state: State, note: str) -> Checkpoint:
    return Checkpoint(
        look.root / seal.name,
        seal.name,
        state,
        Origin.LOG,
        seal.step,
        seal.artifact,
        seal.save_id,
        began_at(seal.save_id),
        parts=tuple(ref.name for ref in seal.parts),
        pinned=any(view.save(seal.save_id).pinned for view in look.views.values()),
        failure=seal.failure,
        generation=seal.base.number,
        domains=seal.everywhere,
        note=note,
    )


def _attempts(look: Look) -> list[AttemptRecord]:
    try:
        entries = look.storage.list(ATTEMPTS)
    except NotFoundError:
        return []
    ids = [e.name for e in entries if e.is_dir and not e.is_link]
    caps = look.storage.capabilities
    return side_by_side(lambda one: drive(read_record(one, caps), look.storage), ids)


def _unsealed(look: Look, attempts: Iterable[AttemptRecord]) -> list[_Candidate]:
    """Return the attempts that no log has settled."""
    found = []
    for record in attempts:
        saves = [view.save(record.save_id) for view in look.views.values()]
        if any(s.seal is not None or s.aborted or s.decided is not None for s in saves):
            continue
        created_at = began_at(record.save_id)
        state, note = State.SAVING, ""
        if any(save.part is not None for save in saves):
            note = "this part is complete; other parts are not"
        elif look.views:
            state, note = _attempt_state(look, record, created_at)
        name = record.name or record.save_id
        base = None if record.base is None else record.base.number
        line = Checkpoint(look.root / name, name, state, None, save_id=record.save_id)
        found.append(_Candidate(replace(line, created_at=created_at, generation=base, note=note)))
    return found


def _attempt_state(look: Look, record: AttemptRecord, created_at: str | None) -> tuple[State, str]:
    """Return the state of an attempt, by the same rule as ``gc``, and the reason.

    An attempt that began less than a day ago is not measured, because its last write cannot be older.
    Measuring takes one request for each file on an object store.
    """
    (state,) = look.views.values()
    age, tree, sending = age_s(created_at), Tree(), False
    if (age is None or age >= DAY_S) and not (record.base and record.base < state.generation):
        tree = attempt_tree(look.storage, record)
        if tree.newest_s is not None:
            age = max(0.0, time.time() - tree.newest_s)
        with contextlib.suppress(AccessError, UnsupportedError):
            sending = is_sending(record.save_id, look.storage.unfinished_uploads())
    decision = attempt_fate(
        record,
        state,
        has_files=bool(tree.files),
        age_s=age,
        is_sending=sending,
        older_than_s=DAY_S,
    )
    match decision.fate:
        case Fate.GOES:
            why = "nothing was written to it for a day" if decision.may_live else decision.why
            return State.ABANDONED, why
        case Fate.STAYS:
            return State.ABANDONED, decision.why
        case Fate.YOUNG:
            return State.SAVING, "nothing was written yet" if record.base is None else ""


def _notes(look: Look) -> tuple[str, ...]:
    note = _partial_note(drive(check_log(look.views), look.storage))
    notes = [note, *(_NEWER for view in look.views.values() if view.foreign)]
    return tuple(note for note in notes if note)


def _partial_note(checked: CheckedViews) -> str:
    """Return a note that says what of the log no reader sees; "" if they see all of it. Pure."""
    if checked.lost_domain:
        return f"{CONTROL}/domain is missing: the log is not read, and each checkpoint is judged by its own files"
    if checked.gap is None:
        return ""
    missing = checked.gap.missing
    return f"entry {missing} of the log is missing, and what comes after it is not read: ckptfs log"


_DEPTH = 3  # levels of directories below the given place that are searched for runs


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to show of a place; see ``list_run``.

    Attributes:
        everything: List history too, and check whether stock readers see each checkpoint.
        kinds: List only these kinds; empty: all.
        sort: The order.
        limit: List only this many, the last ones of the order; None: all.
        files: For one checkpoint, list its files too.
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
        path: Its path relative to the checkpoint's directory.
        size_bytes: Its bytes.
        domain: The id of the domain that holds it; None if all do.
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
        lines: The save of that name, followed by older saves of the same name.
        files: Its files; None if they were not wanted.
    """

    uri: Uri
    holding: Holding
    lines: tuple[Checkpoint, ...]
    files: tuple[File, ...] | None = None


@dataclass(frozen=True, slots=True)
class Newest:
    """The latest checkpoint.

    Attributes:
        checkpoint: The checkpoint; None if there is none.
        notes: What is unusual about its run; see ``Run``.
    """

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFound:
    """A run below the place that was listed.

    Attributes:
        uri: The run.
        holding: Who holds it; None if that is not known.
        checkpoints: Number of checkpoints.
        latest: The name of the latest; None if there is none.
        step: Its completed optimizer steps; None if there is no number.
        created_at: When it was made, in ISO 8601; None if that is not known.
        trouble: Why the run could not be read; "" if it could.
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
        wanted: What to show of it.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

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
            names.discard(CONTROL)  # an empty directory: no run was begun here
        # A run that is being made, or has lost its domain, is still a run.
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
    """The last committed checkpoint of a kind, as ``ckptfs.latest`` finds it, and when it was made.

    Local, read-only.

    Args:
        run_uri: The run.
        kind: A checkpoint, weights or a directory.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Raises:
        NotFoundError: Nothing is there.
        ManifestError: The log has a gap, so the checkpoint found could be an old one.
        IncompleteCheckpointError: The last one was removed by hand.
        AmbiguousCheckpointError: Stock torch saved a checkpoint into the run after its newest commit.
    """
    with looking_at(run_uri, storage_options) as look:
        if look.views:  # without a log, or its domain, each checkpoint speaks for itself
            drive(refuse_partial_log(look), look.storage)
        shape = look.storage.capabilities.shape
        if kind is not Kind.WEIGHTS:
            drive(check_unlogged(look.views, look.root, shape), look.storage)
        found = drive(newest_unlogged(look.views, look.root, kind, shape), look.storage)
        if found is not None:
            run = list_run(look, names=[found.uri.name])
            # There may be other lines of that name, such as an attempt to replace it.
            lines = [one for one in run.checkpoints if one.save_id == found.save_id]
            return Newest(lines[0] if lines else None, run.notes)
        if not look.views:
            drive(refuse_no_run(look.root, shape), look.storage)
            _refuse_absent(look, _entries(look.storage, ""))
        return Newest(None)


_SINGLE_FILES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def _no_run(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield notes on a place that is not a run. Pure."""
    files = sorted(e.name for e in entries if not e.is_dir and e.name.endswith(_SINGLE_FILES))
    if files:
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")  # noqa: PLR2004
        yield f"no run, a directory of single files: {shown}; ckptfs inspect shows one of them"
        halves = sum(1 for e in entries if is_partial_name(e.name))
        if halves:
            yield f"{halves} temporary files (.partial-*) of interrupted writes: ckptfs gc shows them"
    elif any(e.name == CONTROL for e in entries):
        yield f"no run: {CONTROL} is empty"


def _refuse_absent(look: Look, entries: list[Entry] | None) -> list[Entry]:
    if entries:
        return entries
    shape = look.storage.capabilities.shape
    drive(refuse_no_run(look.root, shape), look.storage)  # a file and an absent place list alike
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
    """Return the checkpoint of that name in its parent; None if the parent has none.

    must: there is a checkpoint for sure, so errors of the parent are raised.
    """
    if target.parent == target or not target.name:
        return None
    with contextlib.ExitStack() as stack:
        try:
            look = stack.enter_context(looking_at(target.parent, options))
            run = _list(look, wanted, [target.name])
        except StorageError:
            if must:
                raise
            return None  # the directory above a run may be forbidden
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
    """Yield the runs below a place, searched level by level. Does not search inside runs."""
    level = [entry.name for entry in entries if entry.is_dir]
    runs: list[str] = []
    for _ in range(_DEPTH):
        below: list[str] = []
        for key, found in zip(level, side_by_side(_lister(look.storage), level), strict=True):
            names = {entry.name for entry in found}
            if CONTROL in names and _entries(look.storage, f"{key}/{CONTROL}"):
                runs.append(key)
            elif names & {MANIFEST, METADATA}:
                runs.append(key.rpartition("/")[0])  # a checkpoint: its directory is a run
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
            return []  # removed since, or forbidden

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
