"""The only executor of deletes: first the entry, then the bytes; always by rename, never by name.

A recursive delete of ``attempts/<id>`` through a stale NFS client emptied the committed step, 20 times of 20;
renaming it first gave "not found". So a save is deleted in four steps:

    1. an entry says so (delete, abort), appended under the holder's fence
    2. rename, piece by piece, to fresh unique names in ``trash/<generation>/``; "not found" means
       that this piece is done
    3. unlink below those names only
    4. an entry says that the bytes are gone: from here a plain save may take the name

``erase`` has steps 2 and 3, ``trash`` the directory for them. Files that are not ours, or that are in the place of
ours, stay: the save stays "deleted", and the person who put them there has to remove them. Between 1 and 4 no other
process projects to the name, so a check is still true at the rename.

``commit.decisions`` decides whether something may be deleted. The programs and their callers:

    enter_delete   finish_delete    step 1; steps 2 to 4                  the two halves of every delete
    delete_save                     both: clearing, recovery              replaced, overwritten or half deleted saves
    retire         erase_retired    retention, ``delete=``, ``ckptfs rm``: the bytes at any later time, any number of tries
    discard_attempt  discard_own_attempt  discard_late  wipe_leftovers
                                    bytes that were never committed, or came after their save was gone
    pin                             no delete: retention and ``rm`` leave the save alone

Between ``retire`` and ``erase_retired`` the save is complete where it was, so a reader that found it before the entry
can continue. If the process dies in between, the next owner of the run does the rest.

For a save that was removed by hand, the logs only record that it is gone:

    lies_nowhere     whether nothing of a save is left in this domain           (read-only)
    record_removal   the entries that say so                                    (the run's holder)
    find_removed     the saves of a name that were removed in all their domains (collective, read-only)
    record_removed   the same entries in every log that lists these saves       (collective, the run's holder)

A save keeps its name if anything of it is left, or if a domain that cannot be reached may still have it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ckptfs.commit.decisions import (
    AT_ENTRY,
    Refusal,
    may_delete,
    may_forget,
    may_pin,
    reason_to_keep,
)
from ckptfs.commit.delete.erase import LEFT, ProjectedFiles, erase, look_at_names, wipe_objects
from ckptfs.commit.delete.trash import move_to_trash, trash_of
from ckptfs.commit.log.append import (
    Appended,
    HolderMeans,
    Means,
    RefusedAppend,
    append,
    append_here,
    catch_up_again,
    write_snapshot,
)
from ckptfs.commit.log.entries import Delete, Generation, Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import (
    List,
    Program,
    Refresh,
    Remove,
    RemoveDir,
    RemoveTree,
    StatOf,
    drive,
    side_by_side,
)
from ckptfs.commit.paths import (
    ATTEMPTS,
    MANIFEST,
    METADATA,
    PARTIAL_PREFIX,
    AttemptKeys,
    shared_key,
)
from ckptfs.commit.save.projection import discard_source
from ckptfs.commit.session import RunSession, View, step_with_views
from ckptfs.commit.state import committed, pieces, save_named, successor_here
from ckptfs.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import Capabilities, Entry, Shape

__all__ = [
    "REMOVED_BY_HAND",
    "Erasure",
    "Removal",
    "delete_save",
    "discard_attempt",
    "discard_late",
    "discard_own_attempt",
    "enter_delete",
    "erase_retired",
    "find_removed",
    "finish_delete",
    "lies_nowhere",
    "pin",
    "record_removal",
    "record_removed",
    "remove_empty_attempt",
    "retire",
    "wipe_leftovers",
]

logger = logging.getLogger("ckptfs.commit")


def delete_save(
    seal: Seal,
    views: Mapping[str, LogState],
    means: HolderMeans,
    *,
    reason: str,
    still: Callable[[LogState], bool] = lambda _: True,
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Delete one committed save in this domain: the entry, its bytes, the entry that they are gone.

    views: The folded logs of all reached domains. still: As for ``enter_delete``.
    """
    state = views[means.domain]
    outcome = yield from enter_delete(seal.save_id, means, state, reason=reason, still=still)
    if isinstance(outcome, RefusedAppend) and (
        outcome.reason is Refusal.FENCED or not outcome.state.save(seal.save_id).deleted
    ):
        return outcome
    return (yield from finish_delete(seal, {**views, means.domain: outcome.state}, means))


def enter_delete(
    save_id: str,
    means: HolderMeans,
    state: LogState | None,
    *,
    reason: str,
    still: Callable[[LogState], bool] = lambda _: True,
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Append only the delete. Then the save is deleted, and its bytes may be removed at any time.

    still: Called with this domain's log at every try of the append. By then the save may be pinned,
    or may be the newest again.
    """

    def decide(current: LogState) -> Delete | RefusedAppend[Refusal]:
        if not still(current):
            return RefusedAppend(Refusal.NOTHING, current)
        return may_delete(current, save_id, means.holder, reason)

    return (yield from append_here(decide, means, state))


def finish_delete(
    seal: Seal,
    views: Mapping[str, LogState],
    means: HolderMeans,
    *,
    trash: str | None = None,
    found: Mapping[str, ProjectedFiles] | None = None,
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Remove the bytes of a save with a delete in this domain's log, and record this there.

    trash: The remover's own directory if it does not hold the run; None: the holder's.
    found: As for ``erase``.
    """
    state, where = views[means.domain], trash or trash_of(means.holder)
    if not (yield from erase(seal, views, means.domain, where, means.caps, found=found)):
        return RefusedAppend(Refusal.NOTHING, state)
    return (yield from _enter_gone(seal.save_id, means, state))


def _enter_gone(
    save_id: str, means: HolderMeans, state: LogState
) -> Program[Appended | RefusedAppend[Refusal]]:
    return (
        yield from append_here(
            lambda current: may_forget(current, save_id, means.holder), means, state
        )
    )


def discard_attempt(
    save_id: str, name: str, holder: Generation, caps: Capabilities
) -> Program[None]:
    """Remove the bytes of an attempt that has an effective abort.

    It was never committed, and therefore never projected. name is "" if its record was lost.
    """
    keys = AttemptKeys(caps.shape, name, save_id)
    trash = trash_of(holder)
    if caps.shape is Shape.OBJECT:
        yield from _wipe_attempt(keys)
        return
    yield from move_to_trash(keys.attempt, f"{trash}/{save_id}.attempt")
    if name:
        try:
            yield from move_to_trash(keys.projected_data, f"{trash}/{save_id}.data")
        except (UnsupportedError, SymlinkError) as error:
            # Another disk or a link is there; what was never committed was never moved to it.
            logger.warning(LEFT, name, error)


def discard_late(key: str, holder: Generation, caps: Capabilities) -> Program[None]:
    """Remove data of a save that is deleted and gone, which a delayed write brought back to ``key``.

    The last component of the key is the id of that save.
    """
    if caps.shape is Shape.OBJECT:
        yield RemoveTree(key)  # no other save uses it: the key contains the id of a dead save
    else:
        yield from move_to_trash(key, f"{trash_of(holder)}/{key.rpartition('/')[2]}.late")


def discard_own_attempt(save_id: str, name: str, caps: Capabilities) -> Program[None]:
    """Remove an attempt that this process began, knows unsealed, and has appended an abort for."""
    keys = AttemptKeys(caps.shape, name, save_id)
    if caps.shape is Shape.OBJECT:
        yield from _wipe_attempt(keys)
        return
    yield from discard_source(keys)


def _wipe_attempt(keys: AttemptKeys) -> Program[None]:
    """Remove everything of a save that was never committed, on an object store.

    No other save shares its files.
    """
    yield RemoveTree(shared_key(keys.save_id))
    yield from wipe_objects(keys, projected=False)


def wipe_leftovers(
    left_of: Callable[[str], list[Seal]], domain: str, caps: Capabilities
) -> Program[None]:
    """Object stores: remove what a delayed PUT wrote after its save was deleted and gone.

    left_of: the saves of a name without bytes. It is called for the names that are in the run, not for all that
    ever were.
    """
    if caps.shape is not Shape.OBJECT:
        return
    entries: list[Entry] = yield List("")
    for name in dict.fromkeys(entry.name for entry in entries):
        for seal in left_of(name):
            for piece in pieces(seal, domain):
                keys = AttemptKeys(caps.shape, piece.name, piece.save_id)
                yield from wipe_objects(keys, projected=True)


def remove_empty_attempt(save_id: str) -> Program[None]:
    """Remove the directories of an attempt that died before its record was complete.

    An attempt that has a file may belong to a living process that is writing data. A living process
    without a file sees that its directory is gone, and makes it again (``owner_steps.begin``).
    """
    data = f"{ATTEMPTS}/{save_id}/{save_id}"
    try:
        entries: list[Entry] = yield List(data)
    except NotFoundError:
        entries = []  # it died between the two directories
    if not all(entry.name.startswith(PARTIAL_PREFIX) for entry in entries):
        return
    for entry in entries:
        # Half of a record. The name is unique to its writer, so this is no other process's file.
        yield Remove(f"{data}/{entry.name}")
    for key in (data, f"{ATTEMPTS}/{save_id}"):
        try:
            yield RemoveDir(key)
        except AlreadyExistsError:
            return


class Erasure(Enum):
    """The result of removing a deleted save's bytes."""

    GONE = "gone"
    LATER = "later"  # a successor of its name is in doubt, or our trash was taken away
    FENCED = "fenced"  # a newer owner has to do it now


def retire(
    seal: Seal,
    means: HolderMeans,
    state: LogState | None,
    *,
    reason: str,
    together: Collection[str],
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Append the delete of a save that nothing keeps. Its bytes stay.

    together: The save_ids that are deleted together. Empty: another domain deleted the save already,
    and nothing keeps it here.

    Returns Refused if a newer owner has the run (FENCED), or if the save is deleted already or may
    not be deleted any more (NOTHING).
    """

    def still(current: LogState) -> bool:
        # What was decided by older folds of all domains may not be true for this log any more.
        here = {means.domain: current}
        return not together or reason_to_keep(seal.save_id, here, AT_ENTRY, together) is None

    done = yield from enter_delete(seal.save_id, means, state, reason=reason, still=still)
    if isinstance(done, RefusedAppend):
        return done
    summed = yield from write_snapshot(done.state, write_id=next(means.ids), stamp=means.stamp)
    return replace(done, state=summed)


def erase_retired(
    save_id: str,
    means: HolderMeans,
    state: LogState | None,
    *,
    again: bool = False,
    trash: str | None = None,
) -> Program[tuple[Erasure, LogState]]:
    """Remove the bytes of a deleted save and record this in the log. Harmless when repeated.

    again: An earlier try of this generation failed, so some bytes may be in its trash already.
    trash: The remover's own directory if it does not hold the run; None: the holder's.
    """
    current, found = yield from _look_again(save_id, means, state)
    save = current.save(save_id)
    if current.generation > means.holder:
        return Erasure.FENCED, current
    if save.seal is None or not save.deleted or save.gone:
        return Erasure.GONE, current
    if again and means.caps.shape is Shape.FILESYSTEM:
        # A renamed file is not found at its place any more: the next try would take it for removed.
        yield from _empty_trash(save_id, trash_of(means.holder))
    views = {means.domain: current}
    done = yield from finish_delete(save.seal, views, means, trash=trash, found=found)
    if done.state.save(save_id).gone:
        write_id = next(means.ids)
        return Erasure.GONE, (
            yield from write_snapshot(done.state, write_id=write_id, stamp=means.stamp)
        )
    fenced = done.state.generation > means.holder
    return (Erasure.FENCED if fenced else Erasure.LATER), done.state


def _look_again(
    save_id: str, means: Means, known: LogState | None
) -> Program[tuple[LogState, dict[str, ProjectedFiles]]]:
    """Return the log, and on an object store what is under the names of the save.

    Both are read in one round trip.
    """
    seal = known.save(save_id).seal if known is not None else None
    names: list[Seal] = []
    if means.caps.shape is Shape.OBJECT and known is not None and seal is not None:
        # If a successor has the names, they are not needed here.
        names = [] if successor_here(known, seal) else list(pieces(seal, means.domain))
    looks = (look_at_names(piece.name) for piece in names)
    current, *found = yield from side_by_side(catch_up_again(known), *looks)
    return current, {piece.save_id: one for piece, one in zip(names, found, strict=True)}


def _empty_trash(save_id: str, trash: str) -> Program[None]:
    try:
        entries: list[Entry] = yield List(trash)
    except NotFoundError:
        return
    for entry in entries:
        if entry.name.startswith(f"{save_id}."):
            yield RemoveTree(f"{trash}/{entry.name}")


def pin(
    save_id: str, means: Means, holder: Generation | None, state: LogState | None, *, pinned: bool
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Append the pin in this domain, or return why not. holder: as for ``may_pin``."""
    return (
        yield from append(
            lambda current: may_pin(current, save_id, holder, pinned=pinned),
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
        )
    )


REMOVED_BY_HAND = "removed by hand"  # the reason in the entry


@dataclass(frozen=True, slots=True)
class Removal:
    """A committed save that was removed by hand, and whether it is pinned."""

    seal: Seal
    pinned: bool


# -- in one domain --------------------------------------------------------------------------------


def lies_nowhere(seal: Seal, domain: str, shape: Shape) -> Program[bool]:
    """Whether nothing of a committed save is left in this domain: it was removed by hand.

    Reads only. In cases of doubt something is left: a link in the place of its directory, files
    under the plain names of a directory checkpoint, data that it shares with other saves.
    """
    for piece in pieces(seal, domain):
        # In the direction of movement, and each directory is opened again: its absence may be cached.
        for home in AttemptKeys(shape, piece.name, piece.save_id).homes():
            parent = home.rpartition("/")[0]
            for directory in (parent.rpartition("/")[0], parent):
                yield Refresh(directory)
            if (yield from _exists(f"{home}/{MANIFEST}")):
                return False
    here = {entry.name: entry for entry in (yield from _entries(""))}
    step = here.get(seal.name)
    if step is not None and (step.is_link or not step.is_dir):
        return False
    for piece in pieces(seal, domain):
        keys = AttemptKeys(shape, piece.name, piece.save_id)
        if shape is Shape.FILESYSTEM and (yield from _entries(keys.attempt)):
            return False
        if (yield from _entries(shared_key(piece.save_id))):
            return False
        if step is None:
            continue
        inside = {entry.name for entry in (yield from _entries(piece.name))}
        if inside and (
            piece.artifact is Kind.DIRECTORY
            or not inside.isdisjoint({piece.save_id, METADATA, MANIFEST})
        ):
            return False
    return True


def _exists(key: str) -> Program[bool]:
    try:
        yield StatOf(key)
    except NotFoundError:
        return False
    return True


def _entries(key: str) -> Program[list[Entry]]:
    try:
        entries: list[Entry] = yield List(key)
    except NotFoundError:
        return []
    return entries


def record_removal(
    seal: Seal, means: HolderMeans, state: LogState
) -> Program[LogState | RefusedAppend[Refusal]]:
    """Record that a save was removed by hand and that its bytes are gone here. Only for the holder.

    If something of it exists after all, nothing is recorded. Removes nothing.
    """
    if not (yield from lies_nowhere(seal, means.domain, means.caps.shape)):
        return RefusedAppend(Refusal.NOTHING, state)
    entered = yield from enter_delete(seal.save_id, means, state, reason=REMOVED_BY_HAND)
    if isinstance(entered, RefusedAppend) and not entered.state.save(seal.save_id).deleted:
        return entered
    done = yield from _enter_gone(seal.save_id, means, entered.state)
    if isinstance(done, RefusedAppend) and not done.state.save(seal.save_id).gone:
        return done
    return done.state


# -- over all domains -----------------------------------------------------------------------------


def find_removed(session: RunSession, name: str, artifact: Kind) -> tuple[Removal, ...]:
    """Find the committed saves of a name that have nothing left. Collective, read-only.

    All their domains must be reached, and none may have anything of them. Returns nothing while
    another save keeps the name from a save of this kind.
    """

    def look(ids: Collection[str]) -> tuple[View, frozenset[str]] | None:
        if not session.placement.is_owner:
            return None
        here = session.placement.mine.id
        state = drive(catch_up_again(session.fold_from), session.storage)
        seals = [
            save.seal
            for save in state.saves.living.values()
            if save.seal is not None and save.seal.name == name and not save.deleted
        ]
        try:
            gone = [
                seal.save_id
                for seal in seals
                if drive(lies_nowhere(seal, here, session.caps.shape), session.storage)
            ]
        except StorageError as error:
            logger.debug("whether %s lies here is not known: %s", name, error)
            gone = []
        return (here, state.to_send(ids)), frozenset(gone)

    def decide(
        answers: Sequence[tuple[View, frozenset[str]] | None],
    ) -> tuple[Removal, ...]:
        reports = [a for a in answers if a is not None]
        views = dict(view for view, _ in reports)
        gone = {view[0]: ids for view, ids in reports}
        committed_seals = [live.seal for live in committed(views) if live.seal.name == name]
        removed = tuple(
            Removal(seal, any(v.save(seal.save_id).pinned for v in views.values()))
            for seal in committed_seals
            if all(seal.save_id in gone.get(domain, ()) for domain in seal.everywhere)
        )
        ids = {one.seal.save_id for one in removed}
        current = save_named(name, views)
        keeps = {seal.save_id for seal in committed_seals} - ids
        if artifact is not Kind.DIRECTORY:
            # Older saves of the name may keep their data: the data of the next one has its own
            # directory.
            keeps &= {current.save_id} if current is not None else set()
        return () if current is None or current.save_id not in ids or keeps else removed

    return step_with_views(
        session.control,
        "removed by hand?",
        look,
        lambda report: None if report is None else report[0],
        decide,
    )


def record_removed(session: RunSession, name: str, artifact: Kind, holder: Generation) -> bool:
    """Record in every log what ``find_removed`` finds, and warn of it. Collective, by the holder.

    After a crash, each removal is recorded in all logs, in some (the next owner records it in the
    others), or in none.

    Returns:
        Whether the name is free.
    """
    removed = find_removed(session, name, artifact)
    done = session.control.step(
        "record removals", lambda: _record_here(session, removed, holder), all
    )
    if not (removed and done):
        return False
    if session.control.rank == 0:
        for one in removed:
            pinned = ", which is pinned" if one.pinned else ""
            logger.warning(
                "%s was removed by hand (save %s%s): the log records it as deleted, and the name is "
                "saved again",
                session.storage.uri(one.seal.name),
                one.seal.save_id,
                pinned,
            )
    return True


def _record_here(session: RunSession, removed: Sequence[Removal], holder: Generation) -> bool:
    if not session.placement.is_owner:
        return True
    means = session.means().held_by(holder)
    for one in removed:
        if means.domain not in one.seal.everywhere:
            continue
        state = drive(catch_up_again(session.fold_from), session.storage)
        done = drive(record_removal(one.seal, means, state), session.storage)
        if isinstance(done, RefusedAppend):
            return False
        session.known.learn(done)
        session.touch_log_later()
    return True
