"""Find and remove what dead jobs left in a run: ``ckptfs gc``. ``debris`` lists the kinds.

    look_for_debris(uri)    read-only: what was left, and what would be removed
    collect(uri)            removes it: first as the next owner of the run would, then the rest
    runs_at(uri)            the run at the URI, or the runs below it

``collect`` takes the run for a moment, as a new job does: it appends a fence, and recovery aborts
unfinished saves, completes deletes and empties the trash. Then it removes what recovery does not know:
late data, shared data that no checkpoint lists, temporary files, uploads. Finally it releases the run.

A directory of single files, such as Lightning's, has no log, and nothing is claimed there. Temporary
files are removed there if their writer was a process of this machine and has ended, or by their age.

A fence ends every save under way, including a plain save without a run and a ``cp`` into the run. So
nothing is fenced and nothing is removed

    - if there is nothing to remove;
    - while the owner lives, by its pid on this node or by its lease elsewhere; a run of the same job
      is not taken either;
    - while an attempt of the current owner's generation is younger than ``older_than_s``, counted from
      its last write. Attempts that are dead by the log are removed at any age;
    - after ``prepare_run(mode="overwrite")``, until something is committed: a fence would bring the
      older checkpoints back;
    - while the clocks of this machine and of the store differ by more than five minutes, unless
      ``older_than_s`` is 0: the ages would be wrong. A file in ``.ckptfs/tmp`` shows the store's time;
    - if the log has a gap, has lost its domain, or was written by a newer version.

A plain save that begins between these checks and the fence fails with FencedError; nothing is lost.
After a crash at any point no committed checkpoint has lost a byte, and the next call does the rest.

An id alone proves nothing: a user's copy of a checkpoint has the same id, and a run below has its own
ids. So data is late only where its own save put it, and an upload is ours only under an id of this run.
Copies of checkpoints inside a run are recognised by their place (``homes_of``) and left alone. No torch.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckptfs.commit.catalog.catalog import (
    Look,
    looking_at,
    refuse_newer,
    refuse_no_run,
    refuse_partial_log,
)
from ckptfs.commit.catalog.unlogged import look_at_directory, unlogged_names
from ckptfs.commit.decisions import fence_brings_back, pending_deletes, waiting
from ckptfs.commit.delete.deletion_steps import discard_late
from ckptfs.commit.delete.erase import listed_files
from ckptfs.commit.delete.shared_data import needed, not_needed
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Generation, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import decode_manifest
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.ownership.claim import ORPHAN_S, Takeover, claim
from ckptfs.commit.ownership.recovery import AttemptRecord, DomainLog, attempts_here, plan_recovery
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.paths import (
    ATTEMPTS,
    CONTROL,
    MANIFEST,
    METADATA,
    PARTIAL_PREFIX,
    SHARED,
    TMP,
    TRASH,
    AttemptKeys,
    is_save_id,
    shared_key,
    staging_key,
)
from ckptfs.commit.save import foreign_metadata
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.commit.session import Place, open_session
from ckptfs.commit.state import Standing, part_name, pieces, standing
from ckptfs.control.control import SoloControl
from ckptfs.errors import (
    AccessError,
    ManifestError,
    NotFoundError,
    RunBusyError,
    StateError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import Entry, Shape, Storage, UnfinishedUpload
from ckptfs.storage.local.files import is_partial_name, writer_is_gone
from ckptfs.tools.debris import (
    DAY_S,
    Debris,
    Fate,
    Found,
    Survey,
    Tree,
    attempt_fate,
    attempt_tree,
    files_below,
    is_link,
    is_sending,
    listed,
    measured,
)
from ckptfs.tools.lines import Hold, Holding, age_s, began_at, holding_of, side_by_side
from ckptfs.tools.listing import OneOf, Runs, look_at
from ckptfs.uri import Uri, options_of

__all__ = [
    "OLDER_THAN_S",
    "Collected",
    "collect",
    "homes_of",
    "listed_by_copies",
    "look_for_debris",
    "names_save",
    "runs_at",
    "survey_debris",
]


def homes_of(state: LogState) -> dict[str, str]:
    """Return the data directory of every save that has a name in ``state``, by save id. Pure."""
    homes = {}
    for save in state.saves.values():
        if save.seal is not None:
            homes[save.save_id] = save.seal.name
        elif save.part is not None:
            homes[save.save_id] = part_name(save.part.name, save.part.part)
    return homes


def names_save(storage: Storage, directory: str, save_id: str) -> bool:
    """Whether the manifest in a directory names a save; its ``.metadata`` if there is no manifest.

    Args:
        storage: The run's.
        directory: The directory.
        save_id: The id of the save.

    Returns:
        True also if the manifest is damaged, because it may have named the save.
    """
    try:
        named = foreign_metadata.names_save(read_limited(storage, f"{directory}/{MANIFEST}"))
        return named is None or named == save_id
    except ManifestError:
        return True
    except NotFoundError:
        pass
    try:
        return save_id.encode() in read_limited(storage, f"{directory}/{METADATA}")
    except NotFoundError:
        return False


def listed_by_copies(look: Look) -> frozenset[str] | None:
    """Return the paths below ``_data`` that checkpoints list that were copied into this run.

    It makes no difference whether the log knows the id of such a checkpoint.

    Args:
        look: What this process sees of the run.

    Returns:
        The paths; None if one of the checkpoints is unreadable.
    """
    (state,) = look.views.values()
    homes, paths = homes_of(state), set[str]()
    for name in unlogged_names(listed(look.storage, ""), look.views):
        unlogged = drive(look_at_directory(name, look.views, look.root), look.storage)
        if unlogged is not None and unlogged.manifest is None:
            if unlogged.checkpoint is None:
                return None
            continue
        # look_at_directory takes a copy of a checkpoint of the log for the log's own: it lists no files.
        try:
            raw = read_limited(look.storage, f"{name}/{MANIFEST}")
            manifest = decode_manifest(raw, look.root / name)
        except NotFoundError:
            continue
        except ManifestError:
            return None
        if homes.get(manifest.save_id) != name:
            paths |= {file.path for file in manifest.files if file.is_shared}
    return frozenset(paths)


_WRITE_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8,32}")
_PARTIAL = re.compile(re.escape(PARTIAL_PREFIX) + r"((probe-)?[0-9a-f]{8,64}|kept-.+)")


def survey_debris(look: Look, older_than_s: float = DAY_S) -> Survey:
    """Find what dead jobs left in a run, as one process sees it. Local, read-only.

    Without a log, only temporary files of writers of single files are found.

    Args:
        look: What this process sees of the run.
        older_than_s: Things that may be in use are removed only if they were last written at least this
            many seconds ago.

    Returns:
        What was found.

    Raises:
        ManifestError: An entry of the log is damaged.
        StorageError: The storage failed.
    """
    if not look.views:
        return Survey(tuple(_loose(look.storage, look.root, older_than_s)))
    finder = _Finder(look, older_than_s)
    links = tuple(_links(look))
    attempts = tuple(finder.attempts())
    found = (
        *links,
        *attempts,
        *finder.deleted(),
        *finder.replaced(),
        *finder.trash(),
        *finder.in_step_directories(),
        *finder.shared(),
        *finder.temporary(),
        *finder.uploads({one.uri.name for one in attempts if one.fate is Fate.YOUNG}),
    )
    return Survey(found, finder.notes)


def _links(look: Look) -> Iterator[Found]:
    """Yield links in places where only the run's own directories belong. They are never followed.

    The files behind a link belong to others, and their names could be taken for debris of this run.
    """
    here = [key for key in (TMP, ATTEMPTS, TRASH) if is_link(look.storage, key)]
    for folder in (ATTEMPTS, TRASH):
        if folder not in here:
            entries = listed(look.storage, folder)
            here += [f"{folder}/{entry.name}" for entry in entries if entry.is_link]
    why = "ckptfs does not follow it and does not claim a run that has it: remove the link"
    for key in here:
        yield Found(Debris.LINK, key, look.root / key, None, None, None, Fate.STAYS, why, (key,))


def _loose(storage: Storage, root: Uri, older_than_s: float) -> Iterator[Found]:
    """Yield temporary files in a directory of single files: they never got their final name."""
    for entry in listed(storage, ""):
        if not entry.is_dir and is_partial_name(entry.name):
            yield _temporary(storage, root, entry.name, older_than_s)


def _temporary(storage: Storage, root: Uri, key: str, older_than_s: float) -> Found:
    name, tree = key.rpartition("/")[2], measured(storage, [key])
    since_s = None if tree.newest_s is None else max(0.0, time.time() - tree.newest_s)
    age = age_s(began_at(name)) if since_s is None else since_s
    fate, why = Fate.GOES, "it was written, but never renamed to its final name"
    if writer_is_gone(name):
        why = "its writer died before it was renamed to its final name"
    elif age is None or age < older_than_s:
        fate, why = Fate.YOUNG, "it may still be written"
    return Found(
        Debris.TEMPORARY, key, root / key, tree.files, tree.size_bytes, age, fate, why, (key,)
    )


class _Finder:
    def __init__(self, look: Look, older_than_s: float) -> None:
        self._look, self._older_than_s = look, older_than_s
        self._storage: Storage = look.storage
        self._caps = look.storage.capabilities
        ((self._domain, self._state),) = look.views.items()
        self._now_s = time.time()
        self._records: dict[str, AttemptRecord] = {}
        if not is_link(self._storage, ATTEMPTS):
            attempts = drive(attempts_here(self._caps), self._storage)
            self._records = {record.save_id: record for record in attempts}
        self._uploads: tuple[UnfinishedUpload, ...] = ()
        self.notes: tuple[str, ...] = ()
        try:
            self._uploads = self._storage.unfinished_uploads()
        except AccessError as error:
            self.notes = (
                f"unfinished uploads were not checked, because access is denied: {error.message}",
            )
        except UnsupportedError as error:
            self.notes = (
                f"unfinished uploads were not checked, because this storage cannot list them: {error.message}",
            )

    # -- by the log ---------------------------------------------------------------------

    def attempts(self) -> Iterator[Found]:
        """Yield attempts that the log aborted or the next owner would abort, and those in doubt."""
        report = DomainLog(self._domain, self._state, tuple(self._records.values()))
        next_owner = Generation(self._state.generation.number + 1, "")
        plan = plan_recovery({self._domain: report}, next_owner)
        dead = {record.save_id for record in (*plan.abort, *plan.released)}
        doubtful = {seal.save_id for seal in plan.in_doubt}
        for record in self._records.values():
            if record.save_id in dead or record.base is None:
                yield self._attempt(record)
            elif record.save_id in doubtful:
                why = "in doubt: a domain that decides about it cannot be reached"
                yield replace(self._attempt(record), fate=Fate.STAYS, why=why, may_live=False)

    def _attempt(self, record: AttemptRecord) -> Found:
        keys = AttemptKeys(self._caps.shape, record.name, record.save_id)
        tree = attempt_tree(self._storage, record)
        age_s = self._age_s(tree, record.save_id)
        decision = attempt_fate(
            record,
            self._state,
            has_files=bool(tree.files),
            age_s=age_s,
            is_sending=is_sending(record.save_id, self._uploads),
            older_than_s=self._older_than_s,
        )
        return Found(
            Debris.ATTEMPT,
            record.name or record.save_id,
            self._look.root / keys.attempt,
            tree.files,
            tree.size_bytes,
            age_s,
            decision.fate,
            decision.why,
            may_live=decision.may_live,
        )

    def deleted(self) -> Iterator[Found]:
        """Yield saves that are deleted in the log while their bytes are still here."""
        for seal in waiting(self._state):
            yield self._save(Debris.DELETED, seal, "it is deleted in the log")

    def replaced(self) -> Iterator[Found]:
        """Yield saves that the next owner of the run deletes by itself."""
        for doom in pending_deletes(self._look.views):
            if self._domain in doom.seal.everywhere:
                why = f"{doom.reason}, and a later save was committed"
                yield self._save(Debris.REPLACED, doom.seal, why)

    def _save(self, debris: Debris, seal: Seal, why: str) -> Found:
        tree = Tree()
        for one in pieces(seal, self._domain):
            keys = AttemptKeys(self._caps.shape, one.name, one.save_id)
            own = drive(listed_files(keys), self._storage)
            alone = drive(not_needed(one, own, self._state, self._caps.shape), self._storage)
            plain = [
                f"{one.name}/{f.path}"
                for f in own
                if not f.is_shared and not f.path.startswith(f"{one.save_id}/")
            ]
            tree += measured(
                self._storage, {keys.data, keys.projected_data, *plain, *(alone or ())}
            )
        where = self._look.root / seal.name
        age_s = self._age_s(tree, seal.save_id)
        return Found(debris, seal.name, where, tree.files, tree.size_bytes, age_s, Fate.GOES, why)

    def trash(self) -> Iterator[Found]:
        """Yield what a deleter moved into the trash and did not remove before it died."""
        if is_link(self._storage, TRASH):
            return
        for entry in listed(self._storage, TRASH):
            if entry.is_link:
                continue
            key = f"{TRASH}/{entry.name}"
            tree = measured(self._storage, [key])
            if tree.files:
                yield self._thing(Debris.TRASH, key, tree, "the process that was removing it died")

    # -- by their names, and the log ----------------------------------------------------

    def in_step_directories(self) -> Iterator[Found]:
        """Yield data of dead saves and temporary files in step directories. Follows no links."""
        dead, homes = set(self._dead()), homes_of(self._state)
        parts = {homes[s.save_id] for s in self._state.saves.values() if s.part is not None}
        tops = [
            entry.name
            for entry in listed(self._storage, "")
            if entry.is_dir
            and entry.name not in (CONTROL, SHARED)
            and not is_link(self._storage, entry.name)
        ]
        known = self._state.saves.names()
        inside = side_by_side(partial(listed, self._storage), tops)
        for top, entries in zip(tops, inside, strict=True):
            for entry in entries:
                key = f"{top}/{entry.name}"
                if key in parts and not is_link(self._storage, key):
                    for deeper in listed(self._storage, key):
                        yield from self._in_directory(key, deeper, homes, dead, ours=True)
                yield from self._in_directory(top, entry, homes, dead, ours=top in known)

    def _in_directory(
        self, top: str, entry: Entry, homes: dict[str, str], dead: set[str], *, ours: bool
    ) -> Iterator[Found]:
        key = f"{top}/{entry.name}"
        if not entry.is_dir:
            if ours and _PARTIAL.fullmatch(entry.name):
                yield self._temporary(key)
        elif is_link(self._storage, key):
            return
        elif entry.name in dead:
            yield from self._late(top, entry.name, homes.get(entry.name))
        elif homes.get(entry.name) == top and self._on_disk:
            for file in listed(self._storage, key):
                if not file.is_dir and _PARTIAL.fullmatch(file.name):
                    yield self._temporary(f"{key}/{file.name}")

    def _late(self, top: str, save_id: str, home: str | None) -> Iterator[Found]:
        """Yield data of a dead save if it is where that save put it. Anywhere else it is a copy."""
        key, why = f"{top}/{save_id}", "by the log, its save does not exist any more"
        if home is None:
            why = "its save was aborted, and the log does not say where its files belong"
        elif home != top:
            return
        found = self._thing(Debris.LATE, key, measured(self._storage, [key]), why)
        if home is None:
            yield replace(found, fate=Fate.STAYS)
        elif self._on_disk and names_save(self._storage, top, save_id):
            # A delayed write brings data, not the manifest that is renamed last.
            why = "its save is deleted in the log, but the checkpoint was put back"
            yield replace(found, fate=Fate.STAYS, why=why)
        else:
            yield found

    @property
    def _on_disk(self) -> bool:
        return self._caps.shape is Shape.FILESYSTEM

    def _dead(self) -> Iterator[str]:
        """Yield ids of saves without bytes by the log. ``attempts`` finds those with an attempt."""
        for save in self._state.saves.values():
            if save.save_id in self._records:
                continue
            match standing(save.save_id, self._look.views):
                case Standing.ABORTED:
                    yield save.save_id
                case Standing.DELETED if save.gone:
                    yield save.save_id

    def shared(self) -> Iterator[Found]:
        """Yield data on an object store that no checkpoint lists any more."""
        if self._on_disk:
            return
        dead = set(self._dead())
        copied = listed_by_copies(self._look)
        for entry in listed(self._storage, SHARED):
            writer = entry.name
            if not entry.is_dir or writer in self._records or not is_save_id(writer):
                continue
            if writer in self._state.saves and writer not in dead:
                continue
            keys = [
                key.removeprefix(f"{SHARED}/")
                for key in files_below(self._storage, shared_key(writer))
            ]
            used = drive(needed(writer, self._state, self._caps.shape), self._storage)
            if used is None or copied is None:
                fate, why = Fate.STAYS, "a manifest that may list it cannot be read"
            elif writer not in self._state.saves:
                keys = [path for path in keys if path not in copied]
                fate, why = Fate.STAYS, "the log does not know the save that wrote it"
            else:
                keys = [path for path in keys if path not in used and path not in copied]
                fate, why = Fate.GOES, "no checkpoint lists it"
            if keys:
                of = [shared_key(path) for path in keys]
                found = self._thing(
                    Debris.SHARED, shared_key(writer), measured(self._storage, of), why
                )
                yield replace(found, fate=fate, keys=tuple(of))

    # -- by their names and age ---------------------------------------------------------

    def temporary(self) -> Iterator[Found]:
        """Yield staged log entries that were never published, and half-written small files."""
        for folder, name_of in ((TMP, _WRITE_ID), (CONTROL, _PARTIAL)):
            if is_link(self._storage, folder):
                continue
            for entry in listed(self._storage, folder):
                if not entry.is_dir and name_of.fullmatch(entry.name):
                    yield self._temporary(f"{folder}/{entry.name}")
        yield from _loose(self._storage, self._look.root, self._older_than_s)

    def _temporary(self, key: str) -> Found:
        return _temporary(self._storage, self._look.root, key, self._older_than_s)

    def uploads(self, living: set[str]) -> Iterator[Found]:
        """Yield uploads that were never completed. living: attempts that may be under way."""
        for upload in self._uploads:
            where, *parts = upload.key.split("/")
            of = {p for p in parts[:3] if p in self._records or p in self._state.saves}
            if upload.age_s >= ORPHAN_S:
                fate, why = Fate.GOES, "it is older than a week: every new owner aborts it"
            elif where != CONTROL and not of:
                why = "its save is unknown; once it is a week old, a new owner of the run aborts it"
                fate = Fate.STAYS
            elif of & living or upload.age_s < self._older_than_s:
                fate, why = Fate.YOUNG, "it may still be in progress"
            else:
                fate, why = Fate.GOES, "it was never completed"
            uri, keys = self._look.root / upload.key, (upload.key,)
            yield Found(Debris.UPLOAD, upload.key, uri, None, None, upload.age_s, fate, why, keys)

    # -- measuring ----------------------------------------------------------------------

    def _thing(self, debris: Debris, key: str, tree: Tree, why: str) -> Found:
        uri, age_s = self._look.root / key, self._age_s(tree, key.rpartition("/")[2])
        return Found(debris, key, uri, tree.files, tree.size_bytes, age_s, Fate.GOES, why, (key,))

    def _age_s(self, tree: Tree, save_id: str) -> float | None:
        """Return seconds since the last write, or since the id was made if that is unknown."""
        if tree.newest_s is not None:
            return max(0.0, self._now_s - tree.newest_s)
        return age_s(began_at(save_id))


OLDER_THAN_S = 24 * 3600.0
_CLOCKS_APART_S = 300.0


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of one look at a run or of one clean-up.

    Attributes:
        uri: The run.
        holding: Who holds it.
        found: Everything that was found before.
        removed: What was removed of it; empty for a dry run.
        left: What should have been removed and is still there.
        notes: What could not be read or removed.
    """

    uri: Uri
    holding: Holding
    found: tuple[Found, ...] = ()
    removed: tuple[Found, ...] = ()
    left: tuple[Found, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def going(self) -> tuple[Found, ...]:
        """What ``collect`` removes."""
        return tuple(one for one in self.found if one.fate is Fate.GOES)


def look_for_debris(
    run_uri: Any,
    older_than_s: float = OLDER_THAN_S,
    storage_options: Mapping[str, Any] | None = None,
) -> Collected:
    """Find what dead jobs left in a run. Local, read-only.

    Args:
        run_uri: The run.
        older_than_s: Things that may be in use are removed only if they were last written at least this
            many seconds ago.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Returns:
        What was found; nothing is removed.

    Raises:
        NotFoundError: Nothing is there.
        StateError: It is a checkpoint.
        ManifestError: Its log is damaged, so it is not known what is dead.
    """
    with _looking(run_uri, storage_options) as look:
        survey = survey_debris(look, older_than_s)
        holding = holding_of(look.views)
        return Collected(look.root, holding, survey.found, notes=_notes(look, survey, holding))


def collect(
    run_uri: Any,
    older_than_s: float = OLDER_THAN_S,
    storage_options: Mapping[str, Any] | None = None,
) -> Collected:
    """Remove what dead jobs left in a run. Local; writes only if there is something to remove.

    After a crash some of it is removed, and the same call removes the rest.

    Args:
        run_uri: The run.
        older_than_s: Things that may be in use are removed only if they were last written at least this
            many seconds ago.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Returns:
        What was found, removed and left.

    Raises:
        NotFoundError: Nothing is there.
        StateError: It is a checkpoint, or the clocks are too far apart.
        ManifestError: The log is damaged.
        RunBusyError: A living owner holds the run, or a save may be under way; nothing was changed.
        SymlinkError: A link is in the control directory.
        FencedError: A newer owner took the run in the meantime; it cleans up itself.
    """
    before = look_for_debris(run_uri, older_than_s, storage_options)
    for one in before.found:
        if one.debris is Debris.LINK:
            raise SymlinkError(
                f"{one.name} is a symbolic link, nothing was removed",
                uri=one.uri,
                hint="remove the link; its target does not belong to the run",
            )
    if not before.going:
        return before
    options = {**options_of(run_uri), **(storage_options or {})}
    tidy_notes: list[str] = []
    with _looking(run_uri, storage_options) as look:
        has_log = bool(look.views)
        if has_log:
            _refuse(look, before)
        if older_than_s > 0:
            _refuse_clock(look)
        if not has_log:
            look.storage.remove_many([key for one in before.going for key in one.keys])
    if has_log:
        tidy_notes = _claim_and_tidy(before.uri, options, older_than_s)
    after = look_for_debris(run_uri, older_than_s, storage_options)
    still = {(one.debris, one.uri) for one in after.going}
    removed = tuple(one for one in before.going if (one.debris, one.uri) not in still)
    notes = tuple(dict.fromkeys([*before.notes, *tidy_notes]))
    return Collected(before.uri, before.holding, before.found, removed, after.going, notes)


def runs_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> tuple[Uri, ...]:
    """List the run at a URI, or those below it. Local, read-only.

    Args:
        uri: A run, or a place above runs.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Raises:
        NotFoundError: Nothing is there.
        StateError: It is a checkpoint.
    """
    found = look_at(uri, storage_options=storage_options)
    if isinstance(found, OneOf):
        raise _is_checkpoint(found.uri)
    return tuple(one.uri for one in found.runs) if isinstance(found, Runs) else (found.uri,)


# -- looking ----------------------------------------------------------------------------


@contextlib.contextmanager
def _looking(run_uri: Any, options: Mapping[str, Any] | None) -> Iterator[Look]:
    """Yield a look at a run; refuses a log with a gap, and a place that is no run."""
    with looking_at(run_uri, options) as look:
        if not look.views:
            _refuse_no_run(look)
        drive(refuse_partial_log(look), look.storage)
        yield look


def _refuse_no_run(look: Look) -> None:
    try:
        names = {entry.name for entry in look.storage.list("")}
        absent = not names and look.storage.capabilities.shape is Shape.OBJECT
    except NotFoundError:
        names, absent = set(), True
    if names & {MANIFEST, METADATA}:
        raise _is_checkpoint(look.root)
    if absent:
        drive(refuse_no_run(look.root, look.storage.capabilities.shape), look.storage)
        raise NotFoundError(
            "nothing exists there",
            uri=look.root,
            hint="run ckptfs ls on the parent to see what exists",
        )


def _is_checkpoint(uri: Uri) -> StateError:
    return StateError("a checkpoint, not a run", uri=uri, hint=f"the run is {uri.parent}")


def _notes(look: Look, survey: Survey, holder: Holding) -> tuple[str, ...]:
    notes = survey.notes
    if not look.views:
        notes += (f"no run log here ({CONTROL}): only temporary files can be known to be dead",)
    if any(state.foreign for state in look.views.values()):
        notes += ("a newer version of ckptfs wrote to this run: it can be looked at, not cleaned",)
    if holder.hold is Hold.HELD:
        notes += (f"the run is {holder.told}; nothing is removed while that one lives",)
    return notes


# -- removing ---------------------------------------------------------------------------


def _refuse(look: Look, before: Collected) -> None:
    """Raise an error if there is a reason not to append a fence now."""
    (state,) = look.views.values()
    refuse_newer(look)
    begun = [one for one in before.found if one.may_live and one.fate is Fate.YOUNG]
    if begun:
        names = ", ".join(dict.fromkeys(one.name for one in begun))
        raise RunBusyError(
            f"a save may be in progress: {names}",
            uri=look.root,
            hint="wait for it, or pass --older-than 0s if no job saves or copies there now",
        )
    if fence_brings_back(state):
        raise RunBusyError(
            'prepared with mode="overwrite", and nothing was committed since',
            uri=look.root,
            hint="let the job commit first: a new owner would bring the older checkpoints back",
        )


def _refuse_clock(look: Look) -> None:
    """Raise StateError if the clocks of this machine and of the store differ too much for ages."""
    key, storage = next(fresh_ids()), look.storage
    if look.views:
        key = staging_key(key)
        storage.make_dir(TMP)
    before_s = time.time()
    try:
        storage.replace(key, b"what time is it")
        written_s = storage.stat(key).modified_s
    finally:
        storage.remove(key)
    if written_s is None:
        return  # the store has no times, so no age came from its clock
    apart_s = max(before_s - written_s, written_s - time.time())
    if apart_s > _CLOCKS_APART_S:
        raise StateError(
            f"the clock of this machine and that of the store differ by {apart_s:.0f} s, so "
            "ages are unknown",
            uri=look.root,
            hint="set the clock, or pass --older-than 0s if no job saves or copies there now",
        )


def _claim_and_tidy(uri: Uri, options: Mapping[str, Any], older_than_s: float) -> list[str]:
    with (
        SoloControl() as control,
        open_session(uri, control, Place(options), write=True) as session,
        claim(session, takeover=Takeover.DEAD, caller=Caller("gc", for_call=True)) as run,
    ):
        return _tidy(run, older_than_s)


def _tidy(run: Run, older_than_s: float) -> list[str]:
    """Remove what recovery left. Return a note for each removal that was refused."""
    session, notes = run.session, list[str]()
    state = drive(catch_up(session.fold_from), session.storage)
    look = Look(run.uri, session.storage, {session.placement.mine.id: state})
    found = survey_debris(look, older_than_s).found
    for one in found:
        if one.fate is not Fate.GOES:
            continue
        try:
            _remove(one, run)
        except (AccessError, UnsupportedError) as error:
            notes.append(f"{one.name} stays: {error.message}")
    notes += _sweep(run, found, older_than_s)
    return notes


def _remove(one: Found, run: Run) -> None:
    storage = run.session.storage
    match one.debris:
        case Debris.LATE:
            for key in one.keys:
                drive(discard_late(key, run.generation, run.session.caps), storage)
        case Debris.SHARED | Debris.TEMPORARY:
            storage.remove_many(one.keys)


def _sweep(run: Run, found: Sequence[Found], older_than_s: float) -> list[str]:
    keys = {one.keys[0] for one in found if one.debris is Debris.UPLOAD and one.fate is Fate.GOES}
    if not keys:
        return []
    try:
        run.session.storage.sweep_uploads(min(older_than_s, ORPHAN_S), keys)
    except (AccessError, UnsupportedError) as error:
        return [f"unfinished uploads stay: {error.message}"]
    except StorageError as error:
        return [f"unfinished uploads stay for now: {error.message}"]
    return []
