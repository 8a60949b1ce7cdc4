"""Which committed saves are copied to one place, and in which order. Pure.

    primary   commit order    10   20   30   40   50   60
    copy                      10   20                        holds these, by their origin
    pending                             30   40   50   60    committed after the last that it holds
    Keep(latest=2)                                50   60    what the copy's own retention would keep
    every="latest"                                     60

Copies are made in commit order and never out of it: if an older save reached a copy later, the copy
would name that one its latest. Therefore a save that was skipped is settled and never copied, and
so is one that could not be copied because it is damaged at the source.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from ckptfs.commit.log.entries import Generation, Seal
from ckptfs.commit.log.fold import LogState, SaveState
from ckptfs.commit.log.saves import Saves
from ckptfs.commit.save.shared_attempt import AGAIN, origin_of
from ckptfs.commit.state import (
    Key,
    Standing,
    Views,
    catalog,
    living,
    order_key,
    seal_of,
    standing,
)
from ckptfs.retention.policy import Keep, plan_retention

__all__ = [
    "Every",
    "One",
    "Policy",
    "Reached",
    "Todo",
    "fresh_id",
    "origin_of",
    "plan_copies",
    "reached",
]


class Every(Enum):
    """Which of several waiting saves are copied."""

    ALL = "all"  # all that the copy's retention would keep
    LATEST = "latest"  # the newest of each kind


@dataclass(frozen=True, slots=True)
class Policy:
    """What a copy keeps.

    Attributes:
        keep: The copy's retention.
        every: Which of several waiting saves are copied.
        mine: Whether a save is the manager's, as for retention.
    """

    keep: Keep
    every: Every
    mine: Callable[[Seal], bool]


@dataclass(frozen=True, slots=True)
class One:
    """One save to copy, and its id in the copy."""

    seal: Seal
    save_id: str


@dataclass(frozen=True, slots=True)
class Reached:
    """The last save, in the primary's commit order, that a copy ever held.

    ``key`` is its place in that order; None if the copy never held one.
    """

    key: Key | None = None

    def with_save(self, seal: Seal, primary: Views) -> Reached:
        """Return how far the copy is once ``seal`` was copied."""
        key = order_key(seal, primary)
        return Reached(key if self.key is None else max(self.key, key))


@dataclass(frozen=True, slots=True)
class Todo:
    """What to copy next.

    Attributes:
        copies: Oldest commit first.
        settled: Live saves of the primary that need no copy, or no longer.
        reached: How far the copy was before that.
    """

    copies: tuple[One, ...] = ()
    settled: frozenset[str] = frozenset()
    reached: Reached = Reached()


def fresh_id(origin: str, views: Views, tried: Collection[str] = ()) -> str:
    """Return the id of the next try to copy a save.

    The first try uses the save's own id, so that the copy has the same paths and names. Once a try
    began, its id is spent: an abort of it voids every later seal.
    """
    if origin not in tried and all(origin not in view.saves for view in views.values()):
        return origin
    return f"{origin}{AGAIN}{secrets.token_hex(4)}"


def plan_copies(
    primary: Views,
    copy: Views,
    policy: Policy,
    *,
    given_up: Collection[str] = (),
    tried: Collection[str] = (),
    before: Reached | None = None,
) -> Todo:
    """Return what to copy next, by the folded logs of both places.

    ``given_up`` are save_ids that cannot be copied. ``tried`` are ids of copies that this process
    began. ``before`` is how far the copy was at the last plan; without it both logs are read from
    their beginning.
    """
    catalogued = catalog(primary)
    lives = [live.seal for live in catalogued]
    came = reached(primary, copy, before)
    pending = [live.seal for live in catalogued if came.key is None or live.key > came.key]
    wanted = [seal for seal in pending if seal.save_id not in given_up]
    match policy.every:
        case Every.LATEST:
            newest = {(seal.artifact, seal.failure): seal.save_id for seal in wanted}
            wanted = [seal for seal in wanted if seal.save_id in newest.values()]
        case Every.ALL:
            retained = _retained(wanted, copy, policy)
            wanted = [seal for seal in wanted if seal.save_id in retained]
    ids = {seal.save_id for seal in wanted}
    return Todo(
        tuple(One(seal, fresh_id(seal.save_id, copy, tried)) for seal in wanted),
        frozenset(seal.save_id for seal in lives if seal.save_id not in ids),
        came,
    )


def reached(primary: Views, copy: Views, before: Reached | None = None) -> Reached:
    """Return how far the copy is.

    Of what is new since ``before``, only live saves can have been copied, because the copying job
    owns the copy's run.
    """
    ids = living(copy) if before else {save_id for view in copy.values() for save_id in view.saves}
    came = before or Reached()
    held = (Standing.COMMITTED, Standing.DELETED)
    for save_id in ids:
        seal = seal_of(save_id, copy)
        if seal is None or standing(save_id, copy) not in held:
            continue
        original = seal_of(origin_of(save_id), primary)
        if original is not None and standing(original.save_id, primary) in held:
            came = came.with_save(original, primary)
    return came


def _retained(wanted: Sequence[Seal], copy: Views, policy: Policy) -> set[str]:
    """Return which of these saves the copy would keep once all of them were there."""
    present = [live.seal for live in catalog(copy)]
    after = plan_retention(_log_of([*present, *wanted]), policy.keep, policy.mine)
    deleted = {gone.seal.save_id for gone in after.going}
    return {seal.save_id for seal in wanted if seal.save_id not in deleted}


def _log_of(seals: Sequence[Seal]) -> Views:
    """Return a log in which these saves were committed in this order."""
    place = "copy"
    saves = {}
    for at, seal in enumerate(seals):
        as_if = dataclasses.replace(
            seal,
            base=Generation(1, ""),
            seq=at,
            fenced=True,
            domains=(place,),
            parts=(),
            references=(),
        )
        saves[seal.save_id] = SaveState(seal.save_id, as_if, at)
    return {place: LogState(next=len(seals), saves=Saves.of(saves.values()))}
