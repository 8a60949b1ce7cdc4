"""What an append decides, each time it folds: the entry, or why it may not be made. Pure, no I/O.

    may_seal  may_seal_part  may_publish      a save, a part of one, what a part's home decided
    unreleased                                who may still hold the run
    may_claim  may_fence                      a newer generation: a newcomer's own, one that is known
    may_abort  may_delete  may_forget         the newest owner gives up, deletes, says that bytes are gone

Each sees the log as it is at this very try: a number lost to somebody else is decided again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ckptfs.commit.log.append import Refused
from ckptfs.commit.log.entries import (
    GENESIS,
    Abort,
    Delete,
    Fence,
    Generation,
    Gone,
    Outcome,
    Part,
    Seal,
)
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.state import promised_here

__all__ = [
    "Refusal",
    "may_abort",
    "may_claim",
    "may_delete",
    "may_fence",
    "may_forget",
    "may_publish",
    "may_seal",
    "may_seal_part",
    "unreleased",
]


class Refusal(StrEnum):
    """Why an append was not made."""

    FENCED = "fenced"  # a newer owner took the run
    ABORTED = "aborted"  # the save was aborted by a newer owner
    CONFLICT = "conflict"  # the name is committed
    NOTHING = "nothing"  # there is nothing left to say


def may_seal(state: LogState, seal: Seal, *, replace: bool) -> Seal | Refused[Refusal]:
    """Seal, unless there is a newer fence, the save was aborted, or the name was taken in between."""
    if state.generation > seal.base:
        return Refused(Refusal.FENCED, state)
    known = state.save(seal.save_id)
    if known.aborted:
        return Refused(Refusal.ABORTED, state)
    if known.seal is not None:
        return Refused(Refusal.NOTHING, state)
    if _broken(state, seal):
        return Refused(Refusal.ABORTED, state)
    return Refused(Refusal.CONFLICT, state) if _conflicts(state, seal, replace=replace) else seal


def _broken(state: LogState, seal: Seal) -> bool:
    """Whether a part that this log should hold is not sealed here, or is another one."""
    for ref in seal.parts:
        if any(domain in seal.domains for domain in ref.domains):
            known = state.save(ref.save_id)
            if known.part is None or known.decided or known.part.digest != ref.digest:
                return True
    return False


def _conflicts(state: LogState, seal: Seal, *, replace: bool) -> bool:
    """Whether the saves of this name that the log holds leave no place for one more."""
    same = [
        save
        for save in state.saves.living.values()
        if save.seal is not None
        and save.seal.name == seal.name
        and save.decided is not Outcome.ABORTED
    ]
    others = [save.seal for save in same if save.seal is not None]
    if (settled := state.saves.settled.newest_of(seal.name)) is not None:
        others.append(settled)
    # It would be committed behind one that came while it was being written: dead on arrival.
    if any(_rank(other) > _rank(seal) for other in others):
        return True
    if not same:
        return False
    # The holder is still removing the bytes: a plain save's projection would run into that.
    if not seal.fenced and any(save.deleted and not save.gone for save in same):
        return True
    newest = max(same, key=lambda save: -1 if save.sealed_at is None else save.sealed_at)
    return not (replace or newest.deleted or _hidden_here(state, newest.sealed_at))


def _rank(seal: Seal) -> tuple[Generation, int, bool]:
    return (seal.base, seal.seq, not seal.fenced)


def _hidden_here(state: LogState, sealed_at: int | None) -> bool:
    return sealed_at is not None and any(
        mark.at > sealed_at
        and (
            mark.generation == state.generation
            or state.saves.settled.was_base(mark.generation)
            or any(
                s.seal is not None and s.seal.base == mark.generation
                for s in state.saves.living.values()
            )
        )
        for mark in state.overwrites
    )


def may_seal_part(state: LogState, part: Part) -> Part | Refused[Refusal]:
    """Seal a part, unless there is a newer fence, or the whole or the part was given up here."""
    if state.generation > part.base:
        return Refused(Refusal.FENCED, state)
    whole, known = state.save(part.of), state.save(part.save_id)
    if known.aborted or whole.aborted or whole.deleted or whole.decided is Outcome.ABORTED:
        return Refused(Refusal.ABORTED, state)
    # Decided without it: too late.
    if whole.seal is not None:
        return Refused(Refusal.CONFLICT, state)
    return Refused(Refusal.NOTHING, state) if known.part is not None else part


def may_publish(state: LogState, seal: Seal, by: Generation) -> Seal | Refused[Refusal]:
    """Record in a domain of its parts that a save's home committed it."""
    if state.generation > by:
        return Refused(Refusal.FENCED, state)
    known = state.save(seal.save_id)
    if known.seal is not None or known.aborted or known.deleted:
        return Refused(Refusal.NOTHING, state)
    return seal


def unreleased(views: Mapping[str, LogState]) -> tuple[Fence, ...]:
    """Return the unreleased fences of the newest number, the newest first: their owners may hold the run.

    There are several if newcomers that reach different domains took the same number.
    """
    number = max((v.generation.number for v in views.values()), default=GENESIS.number)
    fences = {
        view.fence.generation: view.fence
        for view in views.values()
        if view.generation.number == number and view.generation != GENESIS and not view.released
    }
    return tuple(fences[generation] for generation in sorted(fences, reverse=True))


def may_claim(state: LogState, fence: Fence, judged: Generation) -> Fence | Refused[Refusal]:
    """Fence as a newcomer that judged the owner of ``judged``, unless there is another fence by now: nothing is
    known about whether its owner is alive.
    """
    if state.generation != judged:
        return Refused(Refusal.FENCED, state)
    return may_fence(state, fence)


def may_fence(state: LogState, fence: Fence) -> Fence | Refused[Refusal]:
    """Fence, unless the current generation is as new or newer."""
    return Refused(Refusal.FENCED, state) if state.generation >= fence.generation else fence


def may_abort(state: LogState, save_id: str, by: Generation) -> Abort | Refused[Refusal]:
    """Abort a save that this domain has not sealed, as the newest owner."""
    if state.generation > by:
        return Refused(Refusal.FENCED, state)
    known = state.save(save_id)
    if known.seal is not None or known.part is not None or known.aborted:
        return Refused(Refusal.NOTHING, state)
    return Abort(save_id, by)


def may_delete(
    state: LogState, save_id: str, by: Generation, reason: str
) -> Delete | Refused[Refusal]:
    """Delete a sealed save, as the newest owner."""
    if state.generation > by:
        return Refused(Refusal.FENCED, state)
    known = state.save(save_id)
    # Of a save that its home deleted before it was known here as committed there are only parts.
    here = known.seal is not None or save_id in promised_here(state)
    if known.deleted or not here:
        return Refused(Refusal.NOTHING, state)
    return Delete(save_id, by, reason)


def may_forget(state: LogState, save_id: str, by: Generation) -> Gone | Refused[Refusal]:
    """Say that the bytes of a deleted save are gone here, as the newest owner."""
    if state.generation > by:
        return Refused(Refusal.FENCED, state)
    known = state.save(save_id)
    if not known.deleted or known.gone:
        return Refused(Refusal.NOTHING, state)
    return Gone(save_id, by)
