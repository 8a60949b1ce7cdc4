"""Looks for debris in a run, read-only; see ``debris`` for what there is.

by the log       attempts, deleted and replaced saves, trash
by name and log  data of dead saves that came late, shared data that nobody lists
by name and age  temporary files, uploads

An id alone proves nothing: a person's copy of a checkpoint has the same one, and a run below has ids of
its own. So data is late only where its save put it, and an upload is ours only under an id of this run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ckptfs.commit.catalog.catalog import Look
from ckptfs.commit.decisions import doomed, waiting
from ckptfs.commit.delete.erase import listed_files
from ckptfs.commit.delete.shared_data import needed, not_needed
from ckptfs.commit.log.entries import Generation, Seal
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import ORPHAN_S
from ckptfs.commit.ownership.recovery import AttemptRecord, Report, attempts_here, plan_recovery
from ckptfs.commit.paths import (
    ATTEMPTS,
    CONTROL,
    PARTIAL_PREFIX,
    SHARED,
    TMP,
    TRASH,
    AttemptKeys,
    is_save_id,
    shared_key,
)
from ckptfs.commit.state import Standing, pieces, standing
from ckptfs.errors import AccessError, UnsupportedError
from ckptfs.storage.base import Entry, Shape, Storage, UnfinishedUpload
from ckptfs.storage.local.files import is_partial_name, writer_is_gone
from ckptfs.tools.copies import homes_of, listed_by_copies, names_save
from ckptfs.tools.debris import DAY_S, Debris, Fate, Found, Survey, attempt_fate, is_sending
from ckptfs.tools.lines import age_s, began_at, side_by_side
from ckptfs.tools.measured import Tree, attempt_tree, files_below, is_link, listed, measured
from ckptfs.uri import Uri

__all__ = ["survey_debris"]

_WRITE_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8,32}")
_PARTIAL = re.compile(re.escape(PARTIAL_PREFIX) + r"((probe-)?[0-9a-f]{8,64}|kept-.+)")


def survey_debris(look: Look, older_than_s: float = DAY_S) -> Survey:
    """Find what is left in a run, as one process sees it. Local, read-only.

    Where there is no log, only files that never got their name: writers of single files leave them.

    Args:
        look: What this process sees of the run.
        older_than_s: How many seconds ago something that may be in use must have been written last, to be
            removed.

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
        *finder.beside_steps(),
        *finder.shared(),
        *finder.temporary(),
        *finder.uploads({one.uri.name for one in attempts if one.fate is Fate.YOUNG}),
    )
    return Survey(found, finder.notes)


def _links(look: Look) -> Iterator[Found]:
    """Links where only directories of the run's own may be. None is looked behind: the names there are
    somebody else's files, and would read as ours that go.
    """
    here = [key for key in (TMP, ATTEMPTS, TRASH) if is_link(look.storage, key)]
    for folder in (ATTEMPTS, TRASH):
        if folder not in here:
            entries = listed(look.storage, folder)
            here += [f"{folder}/{entry.name}" for entry in entries if entry.is_link]
    why = "ckptfs looks at nothing behind it and claims no run with it: remove the link"
    for key in here:
        yield Found(Debris.LINK, key, look.root / key, None, None, None, Fate.STAYS, why, (key,))


def _loose(storage: Storage, root: Uri, older_than_s: float) -> Iterator[Found]:
    """Of single files: what lies beside them and never got its name."""
    for entry in listed(storage, ""):
        if not entry.is_dir and is_partial_name(entry.name):
            yield _temporary(storage, root, entry.name, older_than_s)


def _temporary(storage: Storage, root: Uri, key: str, older_than_s: float) -> Found:
    name, tree = key.rpartition("/")[2], measured(storage, [key])
    since_s = None if tree.newest_s is None else max(0.0, time.time() - tree.newest_s)
    age = age_s(began_at(name)) if since_s is None else since_s
    fate, why = Fate.GOES, "never got its name"
    if writer_is_gone(name):
        why = "its writer died before it got its name"
    elif age is None or age < older_than_s:
        fate, why = Fate.YOUNG, "somebody may be writing it"
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
            self.notes = (f"unfinished uploads: not permitted to look ({error.message})",)
        except UnsupportedError as error:
            self.notes = (f"unfinished uploads: they cannot be listed here ({error.message})",)

    # -- by the log ---------------------------------------------------------------------

    def attempts(self) -> Iterator[Found]:
        """Attempts that the next owner would abort, or whose abort is in the log."""
        report = Report(self._domain, self._state, tuple(self._records.values()))
        next_owner = Generation(self._state.generation.number + 1, "")
        plan = plan_recovery({self._domain: report}, next_owner)
        dead = {record.save_id for record in (*plan.abort, *plan.released)}
        doubtful = {seal.save_id for seal in plan.in_doubt}
        for record in self._records.values():
            if record.save_id in dead or record.base is None:
                yield self._attempt(record)
            elif record.save_id in doubtful:
                why = "in doubt: a domain that decides over it is out of reach"
                yield replace(self._attempt(record), fate=Fate.STAYS, why=why, may_live=False)

    def _attempt(self, record: AttemptRecord) -> Found:
        keys = AttemptKeys(self._caps.shape, record.name, record.save_id)
        tree = attempt_tree(self._storage, record)
        age_s = self._age_s(tree, record.save_id)
        fate = attempt_fate(
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
            fate.fate,
            fate.why,
            may_live=fate.may_live,
        )

    def deleted(self) -> Iterator[Found]:
        """Saves whose delete is in the log and whose bytes are here."""
        for seal in waiting(self._state):
            yield self._save(Debris.DELETED, seal, "its delete is in the log")

    def replaced(self) -> Iterator[Found]:
        """Saves that the next owner deletes without being asked."""
        for doom in doomed(self._look.views):
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
        """What a deleter moved away and did not come to remove."""
        if is_link(self._storage, TRASH):
            return
        for entry in listed(self._storage, TRASH):
            if entry.is_link:
                continue
            key = f"{TRASH}/{entry.name}"
            tree = measured(self._storage, [key])
            if tree.files:
                yield self._thing(Debris.TRASH, key, tree, "whoever removed it died")

    # -- by their names, and the log ----------------------------------------------------

    def beside_steps(self) -> Iterator[Found]:
        """In the directories of steps: data of dead saves, temporary files. Links are not followed."""
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
                        yield from self._beside(key, deeper, homes, dead, ours=True)
                yield from self._beside(top, entry, homes, dead, ours=top in known)

    def _beside(
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
        """Data of a dead save, where that save put it. Anywhere else it is somebody's copy."""
        key, why = f"{top}/{save_id}", "its save is not there any more, by the log"
        if home is None:
            why = "its save was aborted; the log does not say where it had to be"
        elif home != top:
            return
        found = self._thing(Debris.LATE, key, measured(self._storage, [key]), why)
        if home is None:
            yield replace(found, fate=Fate.STAYS)
        elif self._on_disk and names_save(self._storage, top, save_id):
            # A delayed write brings data, not the manifest that is renamed last.
            why = "its save is deleted by the log, and somebody put the checkpoint back"
            yield replace(found, fate=Fate.STAYS, why=why)
        else:
            yield found

    @property
    def _on_disk(self) -> bool:
        return self._caps.shape is Shape.FILESYSTEM

    def _dead(self) -> Iterator[str]:
        """Saves that have no bytes by the log. Those with an attempt are found as such."""
        for save in self._state.saves.values():
            if save.save_id in self._records:
                continue
            match standing(save.save_id, self._look.views):
                case Standing.ABORTED:
                    yield save.save_id
                case Standing.DELETED if save.gone:
                    yield save.save_id

    def shared(self) -> Iterator[Found]:
        """Object stores: data that no checkpoint lists any more."""
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
                fate, why = Fate.STAYS, "a manifest that may list it is unreadable"
            elif writer not in self._state.saves:
                keys = [path for path in keys if path not in copied]
                fate, why = Fate.STAYS, "the log has never heard of its writer"
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
        """Entries of the log on their way, and halves of small files."""
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
        """Uploads that nobody completed. living: ids of saves that may be under way."""
        for upload in self._uploads:
            where, *parts = upload.key.split("/")
            of = {p for p in parts[:3] if p in self._records or p in self._state.saves}
            if upload.age_s >= ORPHAN_S:
                fate, why = Fate.GOES, "older than a week: every new owner aborts it"
            elif where != CONTROL and not of:
                why = "its owner is unknown; a new owner of the run aborts it in a week"
                fate = Fate.STAYS
            elif of & living or upload.age_s < self._older_than_s:
                fate, why = Fate.YOUNG, "somebody may be sending it"
            else:
                fate, why = Fate.GOES, "nobody completed it"
            uri, keys = self._look.root / upload.key, (upload.key,)
            yield Found(Debris.UPLOAD, upload.key, uri, None, None, upload.age_s, fate, why, keys)

    # -- measuring ----------------------------------------------------------------------

    def _thing(self, debris: Debris, key: str, tree: Tree, why: str) -> Found:
        return Found(
            debris,
            key,
            self._look.root / key,
            tree.files,
            tree.size_bytes,
            self._age_s(tree, key.rpartition("/")[2]),
            Fate.GOES,
            why,
            (key,),
        )

    def _age_s(self, tree: Tree, save_id: str) -> float | None:
        """Since the last write; where the store does not tell, since the id was made."""
        if tree.newest_s is not None:
            return max(0.0, self._now_s - tree.newest_s)
        return age_s(began_at(save_id))
