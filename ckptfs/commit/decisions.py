"""Which entries may be appended, and what may be deleted. Pure, no I/O.

Each time an append folds the log, one of these functions decides: it returns the entry, or the reason why the
entry may not be appended. It sees the log as it is at this try; if another process took the number, the append
folds that entry and decides again.

    may_seal  may_seal_part  may_publish      a save, a part of one, the decision of a part's home
    unreleased                                the owners that may still hold the run
    may_claim  may_fence                      a newer generation: a newcomer's own, one that is known
    may_abort  may_delete  may_forget         the newest owner aborts, deletes, records that bytes are gone
    may_pin                                   a pin, or its end

The other functions decide what may be deleted by retention, ``delete=``, ``ckptfs rm``, ``ckptfs gc`` and by the
clearing between saves; ``delete.deletion_steps`` deletes it:

    reason_to_keep              why one checkpoint stays: a pin, others use its files, a domain out of reach, ...
    needed                      which of several candidates must stay
    pending_deletes             saves that were replaced or overwritten
    waiting  half_deleted       deletes that did not finish, here and in other domains
    to_clear                    both, in one domain
    with_bytes  needs_claim     the saves of a name, and whether the run must be claimed to delete them
    fence_brings_back           whether such a claim would bring older checkpoints back
    inherited_pins              pins that pass to a successor

Two questions need I/O and are answered elsewhere: whether the owner of a run is alive (``ownership.claim``), and
which shared files another checkpoint lists (``delete.shared_data``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.commit.log.append import RefusedAppend
from ckptfs.commit.log.entries import (
    GENESIS,
    Abort,
    Delete,
    Fence,
    FenceMode,
    Generation,
    Gone,
    Outcome,
    Part,
    Pin,
    Seal,
)
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.state import (
    Live,
    Standing,
    Views,
    catalog,
    catalog_of,
    commits,
    is_deleted,
    later_overwrites,
    living,
    promised_here,
    seal_of,
    standing,
    used_overwrites,
)

__all__ = [
    "AT_ENTRY",
    "BY_HAND",
    "BY_NAME",
    "Cause",
    "Deletable",
    "Obstacle",
    "Refusal",
    "fence_brings_back",
    "half_deleted",
    "inherited_pins",
    "may_abort",
    "may_claim",
    "may_delete",
    "may_fence",
    "may_forget",
    "may_pin",
    "may_publish",
    "may_seal",
    "may_seal_part",
    "needed",
    "needs_claim",
    "pending_deletes",
    "reason_to_keep",
    "to_clear",
    "unreached",
    "unreleased",
    "waiting",
    "with_bytes",
]


class Refusal(StrEnum):
    """Why an append was not made."""

    FENCED = "fenced"  # a newer owner took the run
    ABORTED = "aborted"  # the save was aborted by a newer owner
    CONFLICT = "conflict"  # the name is committed
    NOTHING = "nothing"  # there is nothing left to say


def may_seal(state: LogState, seal: Seal, *, replace: bool) -> Seal | RefusedAppend[Refusal]:
    """Seal, unless there is a newer fence, the save was aborted, or the name was taken in between."""
    if state.generation > seal.base:
        return RefusedAppend(Refusal.FENCED, state)
    known = state.save(seal.save_id)
    if known.aborted:
        return RefusedAppend(Refusal.ABORTED, state)
    if known.seal is not None:
        return RefusedAppend(Refusal.NOTHING, state)
    if _broken(state, seal):
        return RefusedAppend(Refusal.ABORTED, state)
    return (
        RefusedAppend(Refusal.CONFLICT, state) if _conflicts(state, seal, replace=replace) else seal
    )


def _broken(state: LogState, seal: Seal) -> bool:
    """Whether this log should hold a part of the save, but does not, or holds a different one."""
    for ref in seal.parts:
        if any(domain in seal.domains for domain in ref.domains):
            known = state.save(ref.save_id)
            if known.part is None or known.decided or known.part.digest != ref.digest:
                return True
    return False


def _conflicts(state: LogState, seal: Seal, *, replace: bool) -> bool:
    """Whether a save in the log already holds the name, so that this one may not be sealed."""
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
    # In commit order it would be before a save of its name that was sealed while this one was being
    # written, so it would be replaced at once.
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


def may_seal_part(state: LogState, part: Part) -> Part | RefusedAppend[Refusal]:
    """Seal a part, unless there is a newer fence, or this log gave up the part or its whole."""
    if state.generation > part.base:
        return RefusedAppend(Refusal.FENCED, state)
    checkpoint, known = state.save(part.of), state.save(part.save_id)
    if (
        known.aborted
        or checkpoint.aborted
        or checkpoint.deleted
        or checkpoint.decided is Outcome.ABORTED
    ):
        return RefusedAppend(Refusal.ABORTED, state)
    # The decision was made without this part: it is too late.
    if checkpoint.seal is not None:
        return RefusedAppend(Refusal.CONFLICT, state)
    return RefusedAppend(Refusal.NOTHING, state) if known.part is not None else part


def may_publish(state: LogState, seal: Seal, by: Generation) -> Seal | RefusedAppend[Refusal]:
    """Record, in a domain that holds parts of a save, that the save's home committed it."""
    if state.generation > by:
        return RefusedAppend(Refusal.FENCED, state)
    known = state.save(seal.save_id)
    if known.seal is not None or known.aborted or known.deleted:
        return RefusedAppend(Refusal.NOTHING, state)
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


def may_claim(state: LogState, fence: Fence, judged: Generation) -> Fence | RefusedAppend[Refusal]:
    """Fence as a newcomer that judged the owner of ``judged``, unless there is a newer fence.

    The newcomer knows nothing about whether the owner of a newer fence is alive.
    """
    if state.generation != judged:
        return RefusedAppend(Refusal.FENCED, state)
    return may_fence(state, fence)


def may_fence(state: LogState, fence: Fence) -> Fence | RefusedAppend[Refusal]:
    """Fence, unless the current generation is as new or newer."""
    return RefusedAppend(Refusal.FENCED, state) if state.generation >= fence.generation else fence


def may_abort(state: LogState, save_id: str, by: Generation) -> Abort | RefusedAppend[Refusal]:
    """Abort a save that this domain has not sealed, as the newest owner."""
    if state.generation > by:
        return RefusedAppend(Refusal.FENCED, state)
    known = state.save(save_id)
    if known.seal is not None or known.part is not None or known.aborted:
        return RefusedAppend(Refusal.NOTHING, state)
    return Abort(save_id, by)


# -- what may be deleted --------------------------------------------------------------------


class Cause(StrEnum):
    """A reason to keep a checkpoint. The caller chooses which causes count: see ``reason_to_keep``."""

    NOT_LIVE = "not live"  # deleted, replaced or never committed: not the caller's to name
    PINNED = "pinned"
    USED = "used"  # a save that stays refers to it
    NEWEST = "newest"  # the last live commit of its kind
    UNREACHED = "unreached"  # a domain out of reach holds some of it, and perhaps a pin


BY_NAME = (Cause.NOT_LIVE, Cause.PINNED, Cause.USED)  # checked over all domains
AT_ENTRY = (Cause.PINNED, Cause.USED)  # one log, at each try of the append
BY_HAND = (Cause.PINNED, Cause.UNREACHED)  # before `ckptfs rm`; USED is decided at the entry


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a checkpoint may not be deleted."""

    cause: Cause
    names: tuple[str, ...] = ()  # USED: the checkpoints that refer to it. UNREACHED: the domains.

    @property
    def text(self) -> str:
        """The reason as a clause, for messages."""
        if self.cause is Cause.USED:
            return f"{', '.join(self.names)} uses its files"
        return f"it is {self.cause}"


def reason_to_keep(
    save_id: str, views: Views, causes: Iterable[Cause], deleted: Container[str] = frozenset()
) -> Obstacle | None:
    """Return the first of these causes that keeps a checkpoint, or None if it may be deleted.

    Args:
        save_id: The checkpoint.
        views: The folded logs.
        causes: The causes that count, in order.
        deleted: save_ids that are deleted together with it.
    """
    for cause in causes:
        names = _dependents(cause, save_id, views, deleted)
        if names is not None:
            return Obstacle(cause, names)
    return None


def _dependents(
    cause: Cause, save_id: str, views: Views, deleted: Container[str]
) -> tuple[str, ...] | None:
    """Return the names for the message if the cause keeps the save, or None if it does not."""
    match cause:
        case Cause.NOT_LIVE:
            return () if all(x.seal.save_id != save_id for x in catalog(views)) else None
        case Cause.PINNED:
            pinned = any(view.save(save_id).pinned for view in views.values())
            return () if pinned and not is_deleted(save_id, views) else None
        case Cause.USED:
            return _users(save_id, views, deleted) or None
        case Cause.NEWEST:
            return () if _is_newest(save_id, views) else None
        case Cause.UNREACHED:
            seal = seal_of(save_id, views)
            return (unreached([seal], views) if seal is not None else ()) or None


def _users(save_id: str, views: Views, deleted: Container[str]) -> tuple[str, ...]:
    """Return the names of saves that refer to this one and stay, or are not settled yet."""
    users = {
        save.seal.name
        for view in views.values()
        for save in view.saves.living.values()
        if save.seal is not None
        and save_id in save.seal.references
        and save.save_id not in deleted
        and standing(save.save_id, views) not in (Standing.DELETED, Standing.ABORTED)
    }
    return tuple(sorted(users))


def _is_newest(save_id: str, views: Views) -> bool:
    lives = [live.seal for live in catalog(views)]
    own_seal = next((seal for seal in lives if seal.save_id == save_id), None)
    alike = [seal for seal in lives if own_seal is not None and seal.artifact is own_seal.artifact]
    return bool(alike) and alike[-1].save_id == save_id


def unreached(seals: Iterable[Seal], views: Views) -> tuple[str, ...]:
    """Return the domains that hold some of these saves and are out of reach."""
    return tuple(sorted({domain for seal in seals for domain in seal.everywhere} - views.keys()))


def needed(views: Views, candidates: Container[str], roots: Iterable[str]) -> set[str]:
    """Return the ids of the saves that must stay, out of ``candidates`` and all others.

    A save must stay if it is pinned, is one of ``roots``, or is referred to by a save that stays or
    is unsettled.
    """
    seals = {
        save.save_id: save.seal
        for view in views.values()
        for save in view.saves.living.values()
        if save.seal is not None
    }
    pinned = {s.save_id for view in views.values() for s in view.saves.living.values() if s.pinned}
    stays = [
        save_id
        for save_id in seals
        if save_id not in candidates
        and standing(save_id, views) not in (Standing.DELETED, Standing.ABORTED)
    ]
    found: set[str] = set()
    to_visit = [*pinned, *roots, *stays]
    while to_visit:
        save_id = to_visit.pop()
        if save_id not in found:
            found.add(save_id)
            # A save that stays must stay complete: so the references of a reference stay too.
            to_visit += seals[save_id].references if save_id in seals else ()
    return found


@dataclass(frozen=True, slots=True)
class Deletable:
    """A save that may be deleted, and the reason, which is written into the log."""

    seal: Seal
    reason: str


def pending_deletes(views: Views, at_once: Container[str] = frozenset()) -> list[Deletable]:
    """Return the saves that the holder deletes by itself. Pinned and referenced saves stay.

    These are replaced saves, one commit after their successor (stock readers may still use the old
    `.metadata`), and saves that an overwrite hid, once something was committed under that
    overwrite.

    Args:
        views: The folded logs.
        at_once: save_ids of successors that wait for no further commit, because none may ever come.
    """
    lives = commits(views)
    used = used_overwrites(views, lives)
    needed_ids = _needed_ids(views, lives)
    successors = _successors(lives)
    out = []
    for live in lives:
        seal = live.seal
        if seal.save_id in needed_ids or is_deleted(seal.save_id, views):
            continue
        if seal.parts and views.keys().isdisjoint(seal.domains):
            continue  # its home may have pinned it
        successor = successors.get(seal.save_id)
        if successor is not None:
            last = lives[-1].seal.save_id
            settled = successor.save_id != last or successor.save_id in at_once
            if settled or is_deleted(successor.save_id, views):
                out.append(Deletable(seal, "replaced"))
        elif any(mark.generation in used for _, mark in later_overwrites(seal, views)):
            out.append(Deletable(seal, "overwritten"))
    return out


def _successors(lives: Sequence[Live]) -> dict[str, Seal]:
    """Return, for each replaced save by its id, the next save of the same name in commit order."""
    found: dict[str, Seal] = {}
    before: dict[str, str] = {}
    for live in lives:
        if live.seal.name in before:
            found[before[live.seal.name]] = live.seal
        before[live.seal.name] = live.seal.save_id
    return found


def _needed_ids(views: Views, lives: Sequence[Live]) -> set[str]:
    """Return the ids of live and pinned saves, and of the saves that they refer to."""
    seals = {live.seal.save_id: live.seal for live in catalog_of(lives, views)}
    for live in lives:
        if any(view.save(live.seal.save_id).pinned for view in views.values()):
            seals[live.seal.save_id] = live.seal
    return set(seals) | {r for seal in seals.values() for r in seal.references}


def waiting(state: LogState) -> list[Seal]:
    """Return the saves that have a delete in this log and still have bytes here."""
    return [
        save.seal
        for save in state.saves.living.values()
        if save.seal is not None and save.deleted and not save.gone
    ]


def to_clear(
    views: Views,
    domain: str,
    spare: Container[str] = frozenset(),
    at_once: Container[str] = frozenset(),
) -> list[Deletable]:
    """Return what the holder deletes in a domain between two saves.

    These are the doomed saves, and those with a delete that did not finish, except ``spare``.

    Args:
        views: The folded logs.
        domain: The domain to clear.
        spare: save_ids that this process removes later.
        at_once: As for ``pending_deletes``.
    """
    begun = [seal for seal in waiting(views[domain]) if seal.save_id not in spare]
    fresh = pending_deletes(views, at_once)
    return [
        *(Deletable(seal, "begun before") for seal in begun),
        *(one for one in fresh if domain in one.seal.everywhere),
    ]


def half_deleted(views: Views) -> list[Deletable]:
    """Return the saves that are deleted in one reached domain and not in another.

    The process that deleted them died in between.
    """
    found = []
    for save_id in living(views):
        seal = seal_of(save_id, views)
        if seal is None or not is_deleted(save_id, views):
            continue
        states = [view.save(save_id) for view in views.values()]
        if any(save.seal is not None and not save.deleted for save in states):
            found.append(Deletable(seal, "another domain began the delete"))
    return found


def with_bytes(name: str, state: LogState) -> list[Seal]:
    """Return the saves of a name that have bytes here according to the log, oldest first.

    They may be committed, in doubt or half deleted.
    """
    return [
        save.seal
        for save in state.saves.living.values()
        if save.seal is not None
        and save.seal.name == name
        and not (save.aborted or save.gone)
        and standing(save.save_id, {"": state})
        in (Standing.COMMITTED, Standing.DELETED, Standing.IN_DOUBT)
    ]


def needs_claim(name: str, state: LogState) -> bool:
    """Whether only a holder of the run may delete the saves of this name.

    It is so if a process may hold the run already, or if another process has begun the delete.
    """
    # A delete that another process entered in the log is that process's to carry out, name by name: if two
    # processes did so under one generation, they would move a successor's plain names away. A fence takes the
    # trash directory away from the other process.
    half = any(state.save(seal.save_id).deleted for seal in with_bytes(name, state))
    return half or not (state.generation == GENESIS or state.released)


def fence_brings_back(state: LogState) -> bool:
    """Whether a newer fence would bring back the saves that the newest fence hid.

    It would if the newest fence overwrites and nothing was committed under it yet.
    """
    views = {"": state}
    is_overwrite = state.fence.mode is FenceMode.OVERWRITE
    return is_overwrite and state.generation not in used_overwrites(views, commits(views))


def may_delete(
    state: LogState, save_id: str, by: Generation, reason: str
) -> Delete | RefusedAppend[Refusal]:
    """Delete a sealed save, as the newest owner."""
    if state.generation > by:
        return RefusedAppend(Refusal.FENCED, state)
    known = state.save(save_id)
    # If the home deleted the save before this log recorded its commit, this log has only parts of it.
    here = known.seal is not None or save_id in promised_here(state)
    if known.deleted or not here:
        return RefusedAppend(Refusal.NOTHING, state)
    return Delete(save_id, by, reason)


def may_forget(state: LogState, save_id: str, by: Generation) -> Gone | RefusedAppend[Refusal]:
    """Record that the bytes of a deleted save are gone here, as the newest owner."""
    if state.generation > by:
        return RefusedAppend(Refusal.FENCED, state)
    known = state.save(save_id)
    if not known.deleted or known.gone:
        return RefusedAppend(Refusal.NOTHING, state)
    return Gone(save_id, by)


def may_pin(
    state: LogState, save_id: str, by: Generation | None, *, pinned: bool
) -> Pin | RefusedAppend[Refusal]:
    """Pin or unpin a sealed, undeleted save.

    Args:
        state: The folded log.
        save_id: The save.
        by: The newest owner. None for a process that does not hold the run: a pin does not depend
            on who owns the run.
        pinned: Whether to pin or to unpin.
    """
    if by is not None and state.generation > by:
        return RefusedAppend(Refusal.FENCED, state)
    save = state.save(save_id)
    if save.seal is None or save.deleted or save.pinned is pinned:
        return RefusedAppend(Refusal.NOTHING, state)
    return Pin(save_id, pinned)


def inherited_pins(views: Views) -> list[tuple[str, str]]:
    """Return the pinned saves that were replaced, each with the live save of its name.

    People pin a step, so the pin now belongs to the successor, and the replaced bytes may be
    deleted.
    """
    live = {x.seal.name: x.seal.save_id for x in catalog(views)}
    found = {
        save.save_id: live[save.seal.name]
        for view in views.values()
        for save in view.saves.living.values()
        if save.pinned
        and save.seal is not None
        and live.get(save.seal.name, save.save_id) != save.save_id
        and standing(save.save_id, views) is Standing.COMMITTED
    }
    return list(found.items())
