"""What follows from folded logs: the state of each save, and the live saves. Pure, no I/O.

    views = {domain id: LogState, ...}            the domains that could be reached
    standing(save_id, views)                      whether one save is committed, aborted, deleted, ...
    catalog(views)                                all live saves, oldest first
    history(views)                                all saves ever committed, for people and for copies

``decisions`` says which entries may be appended and what may be deleted, ``recovery_plan`` what the holder of a
new fence does.

A save is committed if and only if every domain that it lists holds its seal. A domain out of reach
makes it in doubt, unless a ``decided`` entry in a reached log records the outcome. If a save has
several parts, its home alone decides; its seal in another domain records that the home decided.

A save that several groups of processes wrote has pieces:

    whole    step_100            sealed in its home, with a reference to every part
    part     step_100/actor      a checkpoint of its own, under an id of its own, in its own domains

A piece looks like the seal of a save (name, save_id, digest, domains), so that the same programs find,
project and erase it. A save without parts has one piece: itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ckptfs.commit.log.entries import (
    Generation,
    Kind,
    Outcome,
    Part,
    PartRef,
    Seal,
)
from ckptfs.commit.log.fold import LogState, Overwrite

__all__ = [
    "Key",
    "Live",
    "Standing",
    "Views",
    "catalog",
    "catalog_of",
    "commits",
    "hidden",
    "history",
    "in_order",
    "is_deleted",
    "later_overwrites",
    "living",
    "next_seq",
    "occupant",
    "order_key",
    "part_in",
    "part_name",
    "piece",
    "piece_ids",
    "pieces",
    "promise",
    "promised_here",
    "save_named",
    "split_name",
    "standing",
    "successor_here",
    "unsent",
    "used_overwrites",
]


def part_name(name: str, part: str) -> str:
    """The name of a part below the run."""
    return f"{name}/{part}"


def split_name(name: str) -> tuple[str, str | None]:
    """Split a name into the name of the checkpoint and that of its part, or None."""
    checkpoint, _, part = name.partition("/")
    return checkpoint, part or None


def piece(seal: Seal, ref: PartRef) -> Seal:
    """Return one part as if it were a save of its own."""
    return replace(
        seal,
        save_id=ref.save_id,
        name=part_name(seal.name, ref.name),
        digest=ref.digest,
        domains=ref.domains,
        parts=(),
    )


def pieces(seal: Seal, domain: str) -> list[Seal]:
    """Return the pieces of a save that a domain holds.

    The whole comes last, and is in every domain.
    """
    return [*(piece(seal, ref) for ref in seal.parts if domain in ref.domains), seal]


def piece_ids(seal: Seal) -> set[str]:
    """The ids of a save and of its parts."""
    return {seal.save_id, *(ref.save_id for ref in seal.parts)}


def part_in(save_id: str, views: Mapping[str, LogState]) -> Part | None:
    """Return the sealed part with this id from any reached log, or None if there is none."""
    return next((p for v in views.values() if (p := v.save(save_id).part) is not None), None)


def promise(part: Part) -> Seal:
    """Return a sealed part that its home has not decided yet, as if it were a save of its own."""
    return Seal(
        save_id=part.save_id,
        base=part.base,
        seq=0,
        fenced=True,
        name=part_name(part.name, part.part),
        step=part.step,
        artifact=Kind.CHECKPOINT,
        domains=part.domains,
        digest=part.digest,
    )


def promised_here(state: LogState) -> dict[str, list[Part]]:
    """Return the sealed parts in a log, by the id of the whole."""
    found: dict[str, list[Part]] = {}
    for save in state.saves.living.values():
        if save.part is not None:
            found.setdefault(save.part.of, []).append(save.part)
    return found


Views = Mapping[str, LogState]
Key = tuple[Generation, int, bool, int, str]


class Standing(StrEnum):
    """The state of a save, as far as the reached domains show it."""

    UNKNOWN = "unknown"  # no reached log has an entry of it
    PENDING = "pending"  # some reached domain has not sealed it
    IN_DOUBT = "in doubt"  # every reached domain sealed it, one is out of reach
    COMMITTED = "committed"
    ABORTED = "aborted"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Live:
    """One save of the catalog and its place in commit order."""

    seal: Seal
    key: Key


def seal_of(save_id: str, views: Views) -> Seal | None:
    """Return the seal of a save. It is the same in every domain that has it."""
    return next((s.seal for v in views.values() if (s := v.save(save_id)).seal is not None), None)


def standing(save_id: str, views: Views) -> Standing:
    """Return the state of a save, or of a part of one."""
    found = _standing_of_parts(save_id, views)
    part = part_in(save_id, views) if found is Standing.UNKNOWN else None
    return found if part is None else _standing_of_part(part, views)


def _standing_of_parts(save_id: str, views: Views) -> Standing:
    states = [view.save(save_id) for view in views.values()]
    if any(s.deleted for s in states):
        return Standing.DELETED
    # A record of the decision counts as much as the seals that it was made from.
    if any(s.decided is Outcome.ABORTED or s.aborted for s in states):
        return Standing.ABORTED
    if any(s.decided is Outcome.COMMITTED for s in states):
        return Standing.COMMITTED
    seal = seal_of(save_id, views)
    if seal is None:
        return Standing.UNKNOWN
    other_domains = (d for d in views if d not in seal.domains) if seal.parts else ()
    if any(views[d].save(save_id).seal is not None for d in other_domains):
        return Standing.COMMITTED
    reached = [views[d].save(save_id) for d in seal.domains if d in views]
    if any(s.seal is None for s in reached):
        return Standing.PENDING
    return Standing.COMMITTED if len(reached) == len(seal.domains) else Standing.IN_DOUBT


def _standing_of_part(part: Part, views: Views) -> Standing:
    """Return the state of a sealed part: that of the whole, if the whole includes it."""
    outcome = _standing_of_parts(part.of, views)
    if outcome in (Standing.COMMITTED, Standing.DELETED):
        seal = seal_of(part.of, views)
        chosen = seal is None or any(ref.save_id == part.save_id for ref in seal.parts)
        return outcome if chosen else Standing.ABORTED
    if outcome is Standing.ABORTED:
        return outcome
    if any(views[d].save(part.save_id).part is None for d in part.domains if d in views):
        return Standing.PENDING
    return Standing.PENDING if part.home in views else Standing.IN_DOUBT


def in_order(seals: Iterable[Seal], views: Views) -> list[Live]:
    """Return saves in commit order.

    They are ordered by (generation, seq). Unfenced saves share a seq; they are ordered by their
    position in the log of the lowest domain that they list.

    The position counts only if all saves with that seq have the same lowest domain and it is
    reached, because positions in different logs cannot be compared. Otherwise they are ordered by
    their ids, which begin with the time of the save. So all processes that reach that domain see
    one order, and all that do not reach it see one order too.
    """
    seals = list(seals)
    lowest: dict[tuple[Generation, int], set[str | None]] = {}
    for seal in seals:
        if not seal.fenced:
            lowest.setdefault((seal.base, seal.seq), set()).add(min(seal.domains, default=None))
    lives = []
    for seal in seals:
        home = min(seal.domains, default=None)
        others = set() if seal.fenced else lowest[seal.base, seal.seq] - {home}
        at = None
        if home is not None and home in views and not others:
            at = views[home].save(seal.save_id).sealed_at
        key = (seal.base, seal.seq, not seal.fenced, -1 if at is None else at, seal.save_id)
        lives.append(Live(seal, key))
    return sorted(lives, key=lambda live: live.key)


def order_key(seal: Seal, views: Views) -> Key:
    """Return the place of one save among all that still matter.

    All of them are walked only for an unfenced save.
    """
    others = [] if seal.fenced else [live.seal for live in commits(views)]
    every = in_order({one.save_id: one for one in (*others, seal)}.values(), views)
    return next(live.key for live in every if live.seal.save_id == seal.save_id)


def living(views: Views) -> list[str]:
    """Return the ids of the saves that may still matter in one of these logs, each once."""
    return list({save_id: None for view in views.values() for save_id in view.saves.living})


def unsent(views: Views, ids: Iterable[str] = ()) -> frozenset[str]:
    """Return the ids of saves that must be requested from every log before anything is decided.

    The views are logs as ``LogState.to_send`` made them. A save that is living in one of them, or
    is among ``ids``, may be settled in another one and therefore missing there.
    """
    if len(views) == 1:
        return frozenset()
    missing = {s for s in ids if any(s not in view.saves for view in views.values())}
    for save in (save for view in views.values() for save in view.saves.living.values()):
        if is_deleted(save.save_id, views):
            continue
        if save.seal is not None:
            domains, related = save.seal.everywhere, {ref.save_id for ref in save.seal.parts}
            known = [views[d].saves for d in domains if d in views]
            is_known = all(save.save_id in saves for saves in known)
        elif save.part is not None:
            related = {save.part.of}
            known = [views[d].saves for d in save.part.domains if d in views]
            home, of = views.get(save.part.home), save.part.of
            # If the home is out of reach, any log that has the whole shows what became of it.
            knows = [home] if home is not None else views.values()
            is_known = all(save.save_id in saves for saves in known) and any(
                of in view.saves for view in knows
            )
        else:
            continue
        if not is_known:
            missing |= {save.save_id, *related}
    return frozenset(missing)


def commits(views: Views) -> list[Live]:
    """Return the committed saves that still matter, in commit order.

    Deleted saves are included as long as they matter: a replaced save must not become live again
    when its successor is deleted.
    """
    return _committed_of(living(views), views)


def history(views: Views) -> list[Live]:
    """Return all saves that were ever committed, in commit order.

    Their number grows with the run.
    """
    ids = {save_id: None for view in views.values() for save_id in view.saves}
    return _committed_of(ids, views)


def _committed_of(ids: Iterable[str], views: Views) -> list[Live]:
    found = (
        seal
        for save_id in ids
        if (seal := seal_of(save_id, views)) is not None
        and standing(save_id, views) in (Standing.COMMITTED, Standing.DELETED)
    )
    return in_order(found, views)


def committed(views: Views) -> list[Live]:
    """Return all committed, undeleted saves in commit order, also superseded and hidden ones."""
    return [live for live in commits(views) if not is_deleted(live.seal.save_id, views)]


def is_deleted(save_id: str, views: Views) -> bool:
    """Whether any of these logs has the delete of the save."""
    return any(view.save(save_id).deleted for view in views.values())


def used_overwrites(views: Views, lives: Iterable[Live]) -> frozenset[Generation]:
    """Return the overwriting generations under which something was committed.

    lives: all ``commits``.
    """
    marks = {mark.generation for view in views.values() for mark in view.overwrites}
    if not marks:
        return frozenset()
    settled = {g for g in marks if any(view.saves.settled.was_base(g) for view in views.values())}
    return frozenset(settled | (marks & {live.seal.base for live in lives}))


def hidden(seal: Seal, views: Views, used: Collection[Generation]) -> bool:
    """Whether an overwriting fence took the save out of the catalog.

    It is hidden while that fence is the newest, and permanently once something was committed under
    it: if nothing was, a later fence brings the old saves back. ``used``: ``used_overwrites``.
    """
    return any(
        mark.generation == view.generation or mark.generation in used
        for view, mark in later_overwrites(seal, views)
    )


def later_overwrites(seal: Seal, views: Views) -> Iterator[tuple[LogState, Overwrite]]:
    """Yield the overwriting fences that came after the save, in the domains that hold it."""
    for domain in seal.everywhere:
        view = views.get(domain)
        at = None if view is None else _sealed_at(seal, view, domain)
        if view is not None and at is not None:
            yield from ((view, mark) for mark in view.overwrites if mark.at > at)


def _sealed_at(seal: Seal, view: LogState, domain: str) -> int | None:
    """Return the position in a log where the save was sealed.

    In a domain that holds only parts of the save, this is the first position of these parts: the
    decision of the home may be recorded there only after a later fence.
    """
    if domain in seal.domains:
        return view.save(seal.save_id).sealed_at
    found = [at for ref in seal.parts if (at := view.save(ref.save_id).sealed_at) is not None]
    return min(found, default=None)


def catalog(views: Views) -> list[Live]:
    """The live saves in commit order: committed, undeleted, not superseded, not hidden."""
    return catalog_of(commits(views), views)


def catalog_of(lives: Sequence[Live], views: Views) -> list[Live]:
    """Return the live saves out of all ``commits``."""
    newest = {live.seal.name: live.seal.save_id for live in lives}
    used = used_overwrites(views, lives)
    return [
        live
        for live in lives
        if newest[live.seal.name] == live.seal.save_id
        and not is_deleted(live.seal.save_id, views)
        and not hidden(live.seal, views, used)
    ]


def latest(views: Views, artifact: Kind | None = None) -> Live | None:
    """Return the last committed live save (of one kind) that was not saved by a failing run.

    It is never chosen by the largest step: a run that was restored at 50 and trained again to 70
    must not continue from the rejected 100.
    """
    lives = [
        live
        for live in catalog(views)
        if not live.seal.failure and artifact in (None, live.seal.artifact)
    ]
    return lives[-1] if lives else None


def save_named(name: str, views: Views) -> Seal | None:
    """Return the live or unsettled save that holds a name."""
    for live in catalog(views):
        if live.seal.name == name:
            return live.seal
    for view in views.values():
        for save in view.saves.living.values():
            if save.seal is None or save.seal.name != name:
                continue
            # Sealed in some domains only: another process is about to commit it, or failed to.
            if standing(save.save_id, views) in (Standing.IN_DOUBT, Standing.PENDING):
                return save.seal
    return None


def occupant(name: str, views: Views) -> Seal | None:
    """Return the save that may still have bytes under a name, in any state except aborted.

    This includes saves that an overwrite hid: files with plain names must not be mixed with theirs.
    """
    for view in views.values():
        for save in view.saves.living.values():
            if save.seal is None or save.seal.name != name or save.gone:
                continue
            if standing(save.save_id, views) is not Standing.ABORTED:
                return save.seal
    return None


def next_seq(base: Generation, views: Views, *, fenced: bool) -> int:
    """Return the place of a new save under its base.

    It comes after every fenced save that its coordinator saw. Unfenced saves share the number of
    the last fenced save, and are ordered by their position in the log.
    """
    seqs = [
        save.seal.seq
        for view in views.values()
        for save in view.saves.living.values()
        if save.seal is not None and save.seal.base == base and save.seal.fenced
    ]
    # Nothing is committed under a generation older than the newest, so only that one counts.
    highest = [view.saves.settled.highest for view in views.values()]
    seqs += [place[1] for place in highest if place is not None and place[0] == base]
    top = max(seqs, default=0)
    return top + 1 if fenced else top


def successor_here(state: LogState, seal: Seal) -> Seal | None:
    """Return the newest undeleted save of the name that this log sealed after ``seal``, or None."""
    sealed_at = state.save(seal.save_id).sealed_at
    later = [
        (save.sealed_at, save.seal)
        for save in state.saves.living.values()
        if save.seal is not None
        and save.sealed_at is not None
        and save.seal.name == seal.name
        and save.decided is not Outcome.ABORTED
        and not save.deleted
        and (sealed_at is None or save.sealed_at > sealed_at)
    ]
    return max(later, key=lambda pair: pair[0])[1] if later else None
