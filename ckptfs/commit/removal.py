"""What somebody removed by hand: the logs list it, and nothing of it lies in any domain.

    lies_nowhere     whether nothing of a save lies in this domain              (read-only)
    record_removal   the entries that say so                                    (the run's holder)
    find_removed     the saves of a name that were removed in all their domains (collective, read-only)
    record_removed   the same two entries in every log that lists them          (collective, the run's holder)

Nothing is deleted here. A save of which anything is left keeps its name, and so does one that a domain
out of reach may still hold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptfs.commit.decisions import Refusal, may_forget
from ckptfs.commit.entries import Generation, Kind, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import MANIFEST, METADATA, AttemptKeys, shared_key
from ckptfs.commit.log import Refused, append, catch_up_again
from ckptfs.commit.ops import List, Program, Refresh, StatOf, drive
from ckptfs.commit.pieces import pieces
from ckptfs.commit.protocol import committed, name_taken
from ckptfs.commit.reclaim import enter_delete
from ckptfs.commit.seat import Seat, View, step_with_views
from ckptfs.commit.spec import fresh_ids, now_text
from ckptfs.errors import NotFoundError, StorageError
from ckptfs.storage.base import Entry, Shape

__all__ = [
    "REMOVED_BY_HAND",
    "Removal",
    "find_removed",
    "lies_nowhere",
    "record_removal",
    "record_removed",
]

logger = logging.getLogger(__name__)

REMOVED_BY_HAND = "removed by hand"  # the reason in the entry


@dataclass(frozen=True, slots=True)
class Removal:
    """A committed save that somebody removed by hand, and whether it is pinned."""

    seal: Seal
    pinned: bool


# -- in one domain --------------------------------------------------------------------------------


def lies_nowhere(whole: Seal, domain: str, shape: Shape) -> Program[bool]:
    """Whether nothing of a committed save lies in this domain any more: somebody removed it by hand.

    Reads only. What cannot be told counts as something: a link in the place of its directory, files
    under the plain names of a directory artifact, data that it shares with other saves.
    """
    for piece in pieces(whole, domain):
        # In the direction of movement, each directory opened anew: a client may have cached its absence.
        for home in AttemptKeys(shape, piece.name, piece.save_id).homes():
            parent = home.rpartition("/")[0]
            for directory in (parent.rpartition("/")[0], parent):
                yield Refresh(directory)
            if (yield from _exists(f"{home}/{MANIFEST}")):
                return False
    here = {entry.name: entry for entry in (yield from _entries(""))}
    step = here.get(whole.name)
    if step is not None and (step.is_link or not step.is_dir):
        return False
    for piece in pieces(whole, domain):
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
    seal: Seal,
    state: LogState,
    domain: str,
    holder: Generation,
    shape: Shape,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
) -> Program[LogState | Refused[Refusal]]:
    """Enter that a save was removed by hand, and that its bytes are gone here; the holder's to do.

    Not where something of it lies here after all: then nothing is entered. Removes nothing.
    """
    if not (yield from lies_nowhere(seal, domain, shape)):
        return Refused(Refusal.NOTHING, state)
    entered = yield from enter_delete(
        seal, state, holder, reason=REMOVED_BY_HAND, ids=ids, stamp=stamp
    )
    if isinstance(entered, Refused) and not entered.state.save(seal.save_id).deleted:
        return entered
    done = yield from append(
        lambda seen: may_forget(seen, seal.save_id, holder),
        write_id=next(ids),
        stamp=stamp,
        state=entered.state,
    )
    if isinstance(done, Refused) and not done.state.save(seal.save_id).gone:
        return done
    return done.state


# -- over all domains -----------------------------------------------------------------------------


def find_removed(seat: Seat, name: str, artifact: Kind) -> tuple[Removal, ...]:
    """Collective, read-only. The committed saves of a name of which nothing lies in any domain, all of
    which are reached; none while another save keeps the name from one of this kind.
    """

    def look(ids: Collection[str]) -> tuple[View, frozenset[str]] | None:
        if not seat.placement.is_owner:
            return None
        here = seat.placement.mine.id
        state = drive(catch_up_again(_known(seat)), seat.storage)
        seals = [
            save.seal
            for save in state.saves.living.values()
            if save.seal is not None and save.seal.name == name and not save.deleted
        ]
        try:
            gone = [
                seal.save_id
                for seal in seals
                if drive(lies_nowhere(seal, here, seat.caps.shape), seat.storage)
            ]
        except StorageError as error:
            logger.debug("whether %s lies here is not known: %s", name, error)
            gone = []
        return (here, state.to_send(ids)), frozenset(gone)

    def decide(
        answers: Sequence[tuple[View, frozenset[str]] | None],
    ) -> tuple[Removal, ...]:
        told = [a for a in answers if a is not None]
        views = dict(view for view, _ in told)
        gone = {view[0]: ids for view, ids in told}
        mine = [live.seal for live in committed(views) if live.seal.name == name]
        removed = tuple(
            Removal(seal, any(v.save(seal.save_id).pinned for v in views.values()))
            for seal in mine
            if all(seal.save_id in gone.get(domain, ()) for domain in seal.everywhere)
        )
        ids = {one.seal.save_id for one in removed}
        taken = name_taken(name, views)
        keeps = {seal.save_id for seal in mine} - ids
        if artifact is not Kind.DIRECTORY:
            # Older saves of the name may keep their data: nothing of the next one meets theirs.
            keeps &= {taken.save_id} if taken is not None else set()
        return () if taken is None or taken.save_id not in ids or keeps else removed

    return step_with_views(
        seat.control,
        "removed by hand?",
        look,
        lambda told: None if told is None else told[0],
        decide,
    )


def record_removed(seat: Seat, name: str, artifact: Kind, holder: Generation) -> bool:
    """Collective, by the run's holder. Enter in every log what ``find_removed`` finds, and warn of it;
    whether the name is free when this returns.

    After a crash in it each removal is recorded in all logs, in some, which the next owner completes, or in
    none.
    """
    removed = find_removed(seat, name, artifact)
    done = seat.control.step("record removals", lambda: _record_here(seat, removed, holder), all)
    if not (removed and done):
        return False
    if seat.control.rank == 0:
        for one in removed:
            pinned = ", which is pinned" if one.pinned else ""
            logger.warning(
                "%s was removed by hand (save %s%s): the log records it as deleted, and the name is "
                "saved again",
                seat.storage.uri(one.seal.name),
                one.seal.save_id,
                pinned,
            )
    return True


def _record_here(seat: Seat, removed: Sequence[Removal], holder: Generation) -> bool:
    if not seat.placement.is_owner:
        return True
    control, here, ids = seat.control, seat.placement.mine.id, fresh_ids()
    stamp = Stamp(now_text(), control.world.hostname, os.getpid(), control.rank)
    for one in removed:
        if here not in one.seal.everywhere:
            continue
        state = drive(catch_up_again(_known(seat)), seat.storage)
        program = record_removal(
            one.seal, state, here, holder, seat.caps.shape, ids=ids, stamp=stamp
        )
        done = drive(program, seat.storage)
        if isinstance(done, Refused):
            return False
        seat.known.learn(done)
        seat.touch_log_later()
    return True


def _known(seat: Seat) -> LogState | None:
    # Without exclusive creates entries may slip in below what was folded.
    return seat.known.state if seat.caps.exclusive_create else None
