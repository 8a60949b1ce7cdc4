"""The fold: what a prefix of one domain's log means. Pure.

    LogState = fold(entry 0, entry 1, ..., entry n-1)

Two rules carry everything else: a seal is void after an abort of the same save, and an abort is
void after its seal, because the log orders them. All processes that folded the same prefix hold the
same state; a snapshot entry is that state written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.commit.entries import (
    GENESIS,
    Abort,
    Body,
    Decided,
    Delete,
    Fence,
    FenceMode,
    Foreign,
    Generation,
    Gone,
    Outcome,
    Part,
    Pin,
    Release,
    Seal,
    Snapshot,
    UnknownValueError,
    body_fields,
    body_from,
    component,
    member,
)
from ckptfs.errors import ManifestError

__all__ = [
    "LogState",
    "Overwrite",
    "SaveState",
    "fold_entry",
    "snapshot_of",
    "state_from_snapshot",
]


@dataclass(frozen=True, slots=True)
class SaveState:
    """What one domain's log says about one save.

    sealed_at: number of the effective seal. aborted: an effective abort stands. deleted: its bytes
    go; gone: they went. part: the save is a part of another, and whole here.
    """

    save_id: str
    seal: Seal | None = None
    sealed_at: int | None = None
    aborted: bool = False
    decided: Outcome | None = None
    deleted: bool = False
    gone: bool = False
    pinned: bool = False
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Overwrite:
    """A fence that took the older saves out of the catalog, at entry number ``at``."""

    generation: Generation
    at: int


@dataclass(frozen=True, slots=True)
class LogState:
    """The fold of entries 0 .. next-1 of one domain's log.

    fence: the newest fence; fence_at: its number. released: the newest fence's owner left.
    foreign: something that this version does not know lies in the prefix (no snapshot may be written
    then, it would lose that).
    """

    next: int = 0
    fence: Fence = Fence(GENESIS)
    fence_at: int = -1
    released: bool = False
    overwrites: tuple[Overwrite, ...] = ()
    foreign: bool = False
    snapshot_at: int = -1
    saves: Mapping[str, SaveState] = field(default_factory=dict)

    @property
    def generation(self) -> Generation:
        """The newest generation that this log knows."""
        return self.fence.generation

    def save(self, save_id: str) -> SaveState:
        """The state of a save; an empty one if the log never heard of it."""
        return self.saves.get(save_id) or SaveState(save_id)


def fold_entry(state: LogState, body: Body) -> LogState:
    """The state after entry number ``state.next``, whose body this is."""
    here = state.next
    after = replace(state, next=here + 1)
    match body:
        case Fence(generation=generation) if generation > state.generation:
            overwrites = state.overwrites
            if body.mode is FenceMode.OVERWRITE:
                overwrites = (*overwrites, Overwrite(generation, here))
            return replace(after, fence=body, fence_at=here, released=False, overwrites=overwrites)
        case Release(generation=generation) if generation == state.generation:
            return replace(after, released=True)
        case Snapshot():
            return replace(after, snapshot_at=here)
        case Foreign():
            return replace(after, foreign=True)
        case Seal() | Part() | Abort() | Decided() | Delete() | Gone() | Pin():
            known = state.save(body.save_id)
            changed = _fold_save(known, body, here)
            if changed is known:
                return after
            return replace(after, saves={**state.saves, body.save_id: changed})
        case _:
            return after


def _fold_save(
    save: SaveState, body: Seal | Part | Abort | Decided | Delete | Gone | Pin, here: int
) -> SaveState:
    match body:
        case Seal():
            if save.aborted or save.seal is not None:
                return save
            return replace(save, seal=body, sealed_at=here)
        case Part():
            if save.aborted or save.part is not None:
                return save
            return replace(save, part=body, sealed_at=here)
        case Abort():
            sealed = save.seal is not None or save.part is not None
            return save if sealed else replace(save, aborted=True)
        case Decided(outcome=outcome):
            return save if save.decided is not None else replace(save, decided=outcome)
        case Delete():
            return replace(save, deleted=True)
        case Gone():
            return replace(save, gone=True)
        case Pin(pinned=pinned):
            return replace(save, pinned=pinned)


_SNAPSHOT_FIELDS = frozenset({"fence", "fence_at", "released", "overwrites", "saves"})


def snapshot_of(state: LogState) -> Snapshot:
    """The snapshot entry to append as number ``state.next``; never with foreign entries below."""
    if state.foreign:
        raise ValueError("a version that met a foreign entry must not write a snapshot")
    return Snapshot(
        {
            "fence": body_fields(state.fence),
            "fence_at": state.fence_at,
            "released": state.released,
            "overwrites": [[o.generation, o.at] for o in state.overwrites],
            "saves": [
                {
                    "save_id": s.save_id,
                    "seal": None if s.seal is None else body_fields(s.seal),
                    "sealed_at": s.sealed_at,
                    "aborted": s.aborted,
                    "decided": s.decided,
                    "deleted": s.deleted,
                    "gone": s.gone,
                    "pinned": s.pinned,
                }
                | ({} if s.part is None else {"part": body_fields(s.part)})
                for s in state.saves.values()
            ],
        }
    )


def state_from_snapshot(number: int, snapshot: Snapshot) -> LogState:
    """The state after a snapshot entry that lies at ``number``, without the entries below it.

    ManifestError: this version cannot read it. A newer one wrote a word that this one does not know, or
    the entry was damaged; the entries below it still say the same.
    """
    try:
        return _state_from(number, snapshot.state)
    except (
        UnknownValueError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise ManifestError(
            f"snapshot {number} of the run log cannot be read: {error!r}"
        ) from error


def _state_from(number: int, raw: Mapping[str, Any]) -> LogState:
    """The state that a snapshot's fields say; what is wrong with them is raised as it comes."""
    fields = {*SaveState.__dataclass_fields__}
    # A newer version's snapshot tells more than is read here: it must not be summed up again.
    newer = not _SNAPSHOT_FIELDS.issuperset(raw) or any(
        not fields.issuperset(s) for s in raw["saves"]
    )
    saves = [_save_from(s) for s in raw["saves"]]
    return LogState(
        next=number + 1,
        fence=body_from(Fence, raw["fence"]),
        fence_at=_number(raw["fence_at"]),
        released=_flag(raw["released"]),
        overwrites=tuple(
            Overwrite(Generation(int(g[0]), str(g[1])), _number(at)) for g, at in raw["overwrites"]
        ),
        foreign=newer,
        snapshot_at=number,
        saves={save.save_id: save for save in saves},
    )


def _save_from(raw: Mapping[str, Any]) -> SaveState:
    """One save of a snapshot."""
    return SaveState(
        component(raw["save_id"]),
        None if raw["seal"] is None else body_from(Seal, raw["seal"]),
        None if raw["sealed_at"] is None else _number(raw["sealed_at"]),
        _flag(raw["aborted"]),
        None if raw["decided"] is None else member(Outcome, raw["decided"]),
        _flag(raw["deleted"]),
        _flag(raw["gone"]),
        _flag(raw["pinned"]),
        body_from(Part, raw["part"]) if "part" in raw else None,
    )


def _number(value: Any) -> int:
    """An entry's number: compared with others, and used to find that entry."""
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no entry number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value
