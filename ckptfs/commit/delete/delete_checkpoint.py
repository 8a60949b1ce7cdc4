"""Deletes one committed checkpoint by its name, for callers that have a path but no run.

    free run     the entry is appended under the current generation, with a trash of our own
    held run     the run is claimed for the call, as replacing does: RunBusyError while the owner is alive

A fence would abort every save in progress, and a program that removes its older checkpoints while it writes the
next one (torchtitan's purge) would lose that one. Without a fence the log still decides: an entry under a
generation that is older than the newest fence is refused, and that fence removes the trash, so a stalled deleter
can move nothing any more. No other process makes that directory again, because its name belongs to one deleter.
See docs/design/0010-arriving.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.decisions import Refusal, needs_claim, with_bytes
from ckptfs.commit.delete.deletion_steps import Erasure, erase_retired, retire
from ckptfs.commit.delete.trash import drop_trash, own_trash
from ckptfs.commit.log.append import HolderMeans, RefusedAppend, catch_up
from ckptfs.commit.log.entries import Generation, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import MakeDir, Program, drive
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.run import Caller
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import SoloControl
from ckptfs.errors import FencedError, StateError, StorageError
from ckptfs.storage.base import Shape, Storage
from ckptfs.uri import Uri

__all__ = ["delete_checkpoint", "holds", "remove_save", "remove_unheld"]

Removed = tuple[Refusal | Erasure, LogState]
Remover = Callable[[Seal, HolderMeans, LogState], Program[Removed]]


def holds(checkpoint: Uri, storage_options: Mapping[str, Any], save_id: str | None = None) -> bool:
    """Whether the log of the run has this checkpoint, and its bytes are here. Local, read-only.

    With ``save_id``, only that save of it counts. Files that an older save left in its directory
    are not the checkpoint.
    """
    with looking_at(checkpoint.parent, storage_options) as look:
        found = [seal for view in look.views.values() for seal in with_bytes(checkpoint.name, view)]
    return any(save_id in (None, seal.save_id) for seal in found)


def delete_checkpoint(storage: Storage, name: str, takeover: Takeover = Takeover.AUTO) -> bool:
    """Delete the checkpoint ``name`` of the run that ``storage`` is rooted at. Local.

    Its bytes are gone when this returns. Files in its directory that are not ours stay. After a
    crash it is deleted or not; the next call or owner removes the rest of its bytes.

    Args:
        storage: The storage of the run.
        name: The name of the checkpoint.
        takeover: From which owners a held run may be claimed.

    Returns:
        False if the log has no such checkpoint; then nothing was done.

    Raises:
        StateError: It is pinned, or others refer to its files.
        StorageError: It is deleted, but its bytes are still there.
        RunBusyError: A living owner holds the run.
    """
    session = start_session(SoloControl(), storage, Place(), write=True)
    state = drive(catch_up(), session.storage)
    if not with_bytes(name, state):
        return False
    with contextlib.ExitStack() as stack:
        holder = state.generation
        remove: Remover = remove_unheld
        if needs_claim(name, state):
            run = stack.enter_context(
                claim(session, takeover=takeover, caller=Caller("rm", for_call=True))
            )
            session, holder = run.session, run.generation
            state = drive(catch_up(), session.storage)
            remove = remove_save
        for seal in with_bytes(name, state):
            state = _delete(seal, session, holder, state, remove)
    return True


def remove_unheld(seal: Seal, means: HolderMeans, state: LogState) -> Program[Removed]:
    """Remove a save as ``remove_save`` does, in a run without an owner.

    The holder in ``means`` is the current generation. The remover's trash is made before the entry
    is appended: a later fence removes that directory, and an earlier one refuses the entry.
    """
    if state.save(seal.save_id).deleted:
        return Erasure.LATER, state  # another process entered the delete, and moves the bytes
    if means.caps.shape is Shape.OBJECT:
        return (yield from remove_save(seal, means, state))
    trash = own_trash(means.holder, next(means.ids))
    yield MakeDir(trash)
    done = yield from remove_save(seal, means, state, trash)
    yield from drop_trash(trash)
    return done


def remove_save(
    seal: Seal, means: HolderMeans, state: LogState, trash: str | None = None
) -> Program[Removed]:
    """Enter the delete of a save unless that was done, and remove its bytes.

    Returns a Refusal if nothing was done: FENCED, or NOTHING if the save may not be deleted.

    trash: The remover's own directory if it does not hold the run; None: the holder's.
    """
    known = state if means.caps.exclusive_create else None
    if not state.save(seal.save_id).deleted:
        done = yield from retire(seal, means, known, reason="removed", together=(seal.save_id,))
        state = done.state
        if isinstance(done, RefusedAppend):
            if not state.save(seal.save_id).deleted:
                return done.reason, state
            return Erasure.LATER, state  # another process was first, and moves the bytes
        known = state if means.caps.exclusive_create else None
    again = trash is None  # the holder's trash has what an earlier try left; ours is new
    return (yield from erase_retired(seal.save_id, means, known, again=again, trash=trash))


def _delete(
    seal: Seal, session: RunSession, holder: Generation, state: LogState, remove: Remover
) -> LogState:
    where, means = session.storage.uri(seal.name), session.means().held_by(holder)
    what, state = drive(remove(seal, means, state), session.storage)
    session.touch_log_later()
    match what:
        case Refusal.FENCED | Erasure.FENCED:
            raise FencedError(
                f"the run has a new owner, which alone may remove {seal.name}",
                uri=where,
                hint="check whether it still exists",
            )
        case Refusal():
            raise StateError(
                f"{seal.name} cannot be deleted: it is pinned, or other checkpoints use its files",
                uri=where,
                hint="unpin it, or delete those first",
            )
        case Erasure.LATER:
            raise StorageError(
                f"{seal.name} is deleted, but its bytes could not be removed",
                uri=where,
                hint="ckptfs leaves links and other disks alone: remove them by hand, then remove "
                "the checkpoint again or call prepare_run()",
            )
    return state
