"""Deleting one committed checkpoint by its name, for people who have a path and no run in hand.

    free run     the entry is appended under the generation that stands, with a trash of our own
    held run     the run is claimed for the call, as replacing does: RunBusyError while the owner lives

A fence would abort every save that is on its way, and a program that removes its older checkpoints
while the next one is being written (torchtitan's purge) would lose that one. Without it the log still
decides: an entry under a generation that a newer fence has passed is refused, and that fence takes the
trash away, so that a deleter that stalls moves nothing any more. Nobody else makes that directory again:
its name is one deleter's. See docs/design/0010-arriving.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptfs.commit.claim import Takeover, claim
from ckptfs.commit.decisions import Refusal
from ckptfs.commit.entries import GENESIS, Generation, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import Refused, catch_up
from ckptfs.commit.looking import looking_at
from ckptfs.commit.opening import Place, sit_down
from ckptfs.commit.ops import MakeDir, Program, drive
from ckptfs.commit.protocol import Standing, standing
from ckptfs.commit.retire import Erasure, erase, retire
from ckptfs.commit.run import Caller
from ckptfs.commit.saving import Means
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import fresh_ids, now_text
from ckptfs.commit.trash import drop_trash, own_trash
from ckptfs.errors import FencedError, StateError, StorageError
from ckptfs.storage.base import Shape, Storage
from ckptfs.topology.control import SoloControl
from ckptfs.uri import Uri

__all__ = ["delete_checkpoint", "holds", "remove_save", "remove_unheld"]

Removed = tuple[Refusal | Erasure, LogState]
Remover = Callable[[Seal, Means, Generation, LogState], Program[Removed]]


def holds(checkpoint: Uri, storage_options: Mapping[str, Any], save_id: str | None = None) -> bool:
    """Local, read-only. Whether the log of its run knows a checkpoint whose bytes lie here, or that very
    save of it: what an older one left in its directory is not the checkpoint.
    """
    with looking_at(checkpoint.parent, storage_options) as look:
        found = [seal for view in look.views.values() for seal in _savers(checkpoint.name, view)]
    return any(save_id in (None, seal.save_id) for seal in found)


def _savers(name: str, state: LogState) -> list[Seal]:
    """Saves of a name whose bytes lie here by the log, committed or half deleted; oldest first."""
    return [
        save.seal
        for save in state.saves.living.values()
        if save.seal is not None
        and save.seal.name == name
        and not (save.aborted or save.gone)
        and standing(save.save_id, {"": state})
        in (Standing.COMMITTED, Standing.DELETED, Standing.IN_DOUBT)
    ]


def delete_checkpoint(storage: Storage, name: str, takeover: Takeover = Takeover.AUTO) -> bool:
    """Local. Delete the checkpoint ``name`` of the run that ``storage`` is rooted at; its bytes are
    gone when it returns. False: the log knows none, nothing was done.

    Files of others in its directory stay. takeover: from whom a held run may be claimed. StateError: it
    is pinned, or others refer to its files. StorageError: it is deleted, its bytes are still there.
    RunBusyError: a living owner holds the run. After a crash it is deleted or not; the next call or
    owner removes the rest of its bytes.
    """
    seat = sit_down(SoloControl(), storage, Place(), write=True)
    state = drive(catch_up(), seat.storage)
    if not _savers(name, state):
        return False
    with contextlib.ExitStack() as stack:
        holder = state.generation
        remove: Remover = remove_unheld
        # One that somebody else has entered is theirs to move, name by name: two that do so under one
        # generation would take a successor's plain names. A fence takes the other's trash away.
        half = any(state.save(seal.save_id).deleted for seal in _savers(name, state))
        if half or not (holder == GENESIS or state.released):
            run = stack.enter_context(
                claim(seat, takeover=takeover, caller=Caller("rm", for_call=True))
            )
            seat, holder = run.seat, run.generation
            state = drive(catch_up(), seat.storage)
            remove = remove_save
        for seal in _savers(name, state):
            state = _delete(seal, seat, holder, state, remove)
    return True


def remove_unheld(
    seal: Seal, means: Means, holder: Generation, state: LogState
) -> Program[Removed]:
    """``remove_save`` in a run that nobody holds; holder is the generation that stands.

    Its trash is made before the entry: a fence that comes after that takes the directory away, and
    one that comes before refuses the entry.
    """
    if state.save(seal.save_id).deleted:
        return Erasure.LATER, state  # by another one, whose bytes they are to move
    if means.caps.shape is Shape.OBJECT:
        return (yield from remove_save(seal, means, holder, state))
    trash = own_trash(holder, next(means.ids))
    yield MakeDir(trash)
    done = yield from remove_save(seal, means, holder, state, trash)
    yield from drop_trash(trash)
    return done


def remove_save(
    seal: Seal, means: Means, holder: Generation, state: LogState, trash: str | None = None
) -> Program[Removed]:
    """Enter the delete of a save unless that was done, and remove its bytes. A Refusal: FENCED, or
    NOTHING where it may not go; nothing was done then.

    trash: of a remover that holds nothing; else the holder's.
    """
    known = state if means.caps.exclusive_create else None
    if not state.save(seal.save_id).deleted:
        done = yield from retire(
            seal, means, holder, known, reason="removed", going=(seal.save_id,)
        )
        state = done.state
        if isinstance(done, Refused):
            if not state.save(seal.save_id).deleted:
                return done.reason, state
            return Erasure.LATER, state  # another was first: its bytes are that one's to move
        known = state if means.caps.exclusive_create else None
    again = trash is None  # what an earlier try left lies in the holder's trash; ours is new
    return (yield from erase(seal.save_id, means, holder, known, again=again, trash=trash))


def _delete(
    seal: Seal, seat: Seat, holder: Generation, state: LogState, remove: Remover
) -> LogState:
    world, where = seat.control.world, seat.storage.uri(seal.name)
    stamp = Stamp(now_text(), world.hostname, os.getpid(), seat.control.rank)
    means = Means(seat.placement.mine.id, seat.caps, fresh_ids(), stamp)
    what, state = drive(remove(seal, means, holder, state), seat.storage)
    seat.touch_log_later()
    match what:
        case Refusal.FENCED | Erasure.FENCED:
            raise FencedError(
                f"the run has a new owner, {seal.name} is theirs to remove",
                uri=where,
                hint="look whether it is still there",
            )
        case Refusal():
            raise StateError(
                f"{seal.name} may not be deleted: it is pinned, or other checkpoints use its files",
                uri=where,
                hint="unpin it, or delete those first",
            )
        case Erasure.LATER:
            raise StorageError(
                f"{seal.name} is deleted, but its bytes could not be removed",
                uri=where,
                hint="what is a link or another disk by now is left alone: take that away by hand, "
                "then remove it again or prepare_run() the run",
            )
    return state
