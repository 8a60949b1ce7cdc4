"""The programs of retention in one domain, run by its owner: pin, enter a delete, remove the bytes.

    pin        append pin(save_id)                   retention leaves the save alone
    retire     append delete(save_id)                from here it is deleted, in every domain
    erase      rename to trash, unlink, append gone  any time later, any number of tries

Between ``retire`` and ``erase`` the save lies whole where it was: whoever found it before the entry
goes on reading. A process that dies in between leaves the rest to the next owner of the run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import Enum

from ckptfs.commit.decisions import Refusal
from ckptfs.commit.entries import Generation, Outcome, Pin, Seal
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import Appended, Refused, append, catch_up_again, write_snapshot
from ckptfs.commit.ops import List, Program, RemoveTree
from ckptfs.commit.reclaim import enter_delete, finish_delete
from ckptfs.commit.saving import Means
from ckptfs.commit.trash import trash_of
from ckptfs.errors import NotFoundError
from ckptfs.storage.base import Entry, Shape

__all__ = ["Erasure", "erase", "may_pin", "may_retire", "pin", "retire", "waiting"]


class Erasure(Enum):
    """What became of a deleted save's bytes."""

    GONE = "gone"
    LATER = "later"  # a successor of its name is in doubt, or our trash was taken away
    FENCED = "fenced"  # a newer owner's business now


def waiting(state: LogState) -> list[Seal]:
    """Saves that are deleted in this log and whose bytes are still here."""
    return [
        save.seal
        for save in state.saves.living.values()
        if save.seal is not None and save.deleted and not save.gone
    ]


def may_retire(state: LogState, save_id: str, going: Collection[str]) -> bool:
    """Whether what was decided over older folds of all domains still holds for this log.

    going: the save_ids that go together. Not while it is pinned, or while anything that stays, or
    is not settled yet, refers to it.
    """
    if state.save(save_id).pinned:
        return False
    return not any(
        save_id in save.seal.references
        for save in state.saves.living.values()
        if save.seal is not None
        and save.save_id not in going
        and not save.deleted
        and save.decided is not Outcome.ABORTED
    )


def retire(
    seal: Seal,
    means: Means,
    holder: Generation,
    state: LogState | None,
    *,
    reason: str,
    going: Collection[str],
) -> Program[Appended | Refused[Refusal]]:
    """Enter the delete of a save that retention lets go; its bytes stay.

    Refused: FENCED by a newer owner; NOTHING: deleted already, or it may not go any more. Where
    another domain deleted it, it is deleted, and nothing keeps it here.
    """
    done = yield from enter_delete(
        seal,
        state,
        holder,
        reason=reason,
        ids=means.ids,
        stamp=means.stamp,
        still=lambda seen: not going or may_retire(seen, seal.save_id, going),
    )
    if isinstance(done, Refused):
        return done
    summed = yield from write_snapshot(done.state, write_id=next(means.ids), stamp=means.stamp)
    return replace(done, state=summed)


def erase(
    save_id: str,
    means: Means,
    holder: Generation,
    state: LogState | None,
    *,
    again: bool = False,
    trash: str | None = None,
) -> Program[tuple[Erasure, LogState]]:
    """Remove the bytes of a deleted save and say so in the log; harmless when repeated.

    again: an earlier try of this generation failed, so that some may be in its trash already. trash: of
    a remover that holds nothing; else the holder's.
    """
    seen = yield from catch_up_again(state)
    save = seen.save(save_id)
    if seen.generation > holder:
        return Erasure.FENCED, seen
    if save.seal is None or not save.deleted or save.gone:
        return Erasure.GONE, seen
    if again and means.caps.shape is Shape.FILESYSTEM:
        # What was renamed is not found at its place any more: the next rename would take it for gone.
        yield from _empty_trash(save_id, trash_of(holder))
    done = yield from finish_delete(
        save.seal,
        {means.domain: seen},
        means.domain,
        holder,
        means.caps,
        ids=means.ids,
        stamp=means.stamp,
        trash=trash,
    )
    if done.state.save(save_id).gone:
        write_id = next(means.ids)
        return Erasure.GONE, (
            yield from write_snapshot(done.state, write_id=write_id, stamp=means.stamp)
        )
    fenced = done.state.generation > holder
    return (Erasure.FENCED if fenced else Erasure.LATER), done.state


def _empty_trash(save_id: str, trash: str) -> Program[None]:
    try:
        entries: list[Entry] = yield List(trash)
    except NotFoundError:
        return
    for entry in entries:
        if entry.name.startswith(f"{save_id}."):
            yield RemoveTree(f"{trash}/{entry.name}")


def may_pin(
    state: LogState, save_id: str, by: Generation, *, pinned: bool
) -> Pin | Refused[Refusal]:
    """Pin or unpin a sealed, undeleted save, as the newest owner."""
    if state.generation > by:
        return Refused(Refusal.FENCED, state)
    save = state.save(save_id)
    if save.seal is None or save.deleted or save.pinned is pinned:
        return Refused(Refusal.NOTHING, state)
    return Pin(save_id, pinned)


def pin(
    save_id: str, means: Means, holder: Generation, state: LogState | None, *, pinned: bool
) -> Program[Appended | Refused[Refusal]]:
    """Append the pin in this domain, or say why not."""
    return (
        yield from append(
            lambda seen: may_pin(seen, save_id, holder, pinned=pinned),
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
        )
    )
