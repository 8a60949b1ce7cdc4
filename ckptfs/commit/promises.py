"""Sealed parts after their home decided: told where they lie, or let go.

Programs of one domain, and what they ask of its log:

unheard       does a reached domain hold parts of a committed save without knowing that?
publish       append the home's seal there: the record of its decision
note_deletes  say there that a save is deleted which its home deleted
is_released   may the bytes of an attempt go?
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfs.commit.decisions import Refusal, may_delete, may_publish
from ckptfs.commit.entries import Delete, Generation, Part, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.log import Appended, Refused, append
from ckptfs.commit.ops import Program
from ckptfs.commit.pieces import promised_here
from ckptfs.commit.protocol import Standing, Views, standing

__all__ = ["is_released", "not_told", "note_deletes", "publish", "unheard"]


def unheard(seal: Seal, views: Views) -> bool:
    """Whether a reached domain that holds parts of a committed save lacks its seal. Pure."""
    return any(
        views[d].save(seal.save_id).seal is None
        for d in seal.everywhere
        if d in views and d not in seal.domains
    )


def not_told(part: Part, views: Views) -> bool:
    """Whether a reached domain holds a part of a save that its home gave up, and no abort. Pure."""
    if standing(part.of, views) is not Standing.ABORTED:
        return False
    return any(
        view.save(part.save_id).part is not None and not view.save(part.of).aborted
        for view in views.values()
    )


def publish(
    seal: Seal,
    domain: str,
    state: LogState,
    by: Generation,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
) -> Program[Appended | Refused[Refusal]]:
    """Record the home's decision in this domain, if parts of the save lie here."""
    if domain in seal.domains or domain not in seal.everywhere:
        return Refused(Refusal.NOTHING, state)
    return (
        yield from append(
            lambda seen: may_publish(seen, seal, by),
            write_id=next(ids),
            stamp=stamp,
            state=state,
        )
    )


def note_deletes(
    views: Views,
    domain: str,
    by: Generation,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
) -> Program[Appended | Refused[Refusal]]:
    """Enter here the deletes of saves that were never published here: only parts of them are."""
    outcome: Appended | Refused[Refusal] = Refused(Refusal.NOTHING, views[domain])
    for whole in promised_here(views[domain]):
        known = outcome.state.save(whole)
        if known.seal is not None or known.deleted:
            continue
        if standing(whole, views) is not Standing.DELETED:
            continue

        def decide(seen: LogState, whole: str = whole) -> Delete | Refused[Refusal]:
            return may_delete(seen, whole, by, "deleted at home")

        outcome = yield from append(decide, write_id=next(ids), stamp=stamp, state=outcome.state)
        if isinstance(outcome, Refused) and outcome.reason is Refusal.FENCED:
            return outcome
    return outcome


def is_released(save_id: str, of: str, views: Views, domain: str) -> bool:
    """Whether nobody will ever want the bytes of this attempt. Pure.

    of: of a part, the id of the whole. A published part of a deleted save goes with that.
    """
    now = standing(save_id, views)
    if now is Standing.DELETED and of:
        return views[domain].save(of).seal is None
    return now is Standing.ABORTED
