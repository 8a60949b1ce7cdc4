"""The fold: the meaning of a prefix of one domain's log. Pure.

    LogState = fold(entry 0, entry 1, ..., entry n-1)

Everything else rests on two rules: a seal is void after an abort of the same save, and an abort is
void after its seal. The log orders them. All processes that folded the same prefix hold the same
state; a snapshot entry contains that state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.commit.log.entries import (
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
    Part,
    Pin,
    Release,
    Seal,
    Snapshot,
    body_fields,
)
from ckptfs.commit.log.saves import Draft, Saves, SaveState
from ckptfs.errors import ManifestError
from ckptfs.schema import Number, Schema, SchemaError

__all__ = [
    "LogState",
    "Overwrite",
    "SaveState",
    "fold_entries",
    "fold_entry",
    "snapshot_of",
    "state_from_snapshot",
]


@dataclass(frozen=True, slots=True)
class Overwrite:
    """A fence that took the older saves out of the catalog, at entry number ``at``."""

    generation: Generation
    at: int


@dataclass(frozen=True, slots=True)
class LogState:
    """The fold of entries 0 .. next-1 of one domain's log.

    Attributes:
        next: The number of the next entry.
        fence: The newest fence.
        fence_at: The number of that entry.
        released: Whether the newest fence's owner gave up the run.
        overwrites: The fences that took older saves out of the catalog.
        foreign: Whether the prefix contains something that this version does not know. Then it must
            not write a snapshot, which would lose that.
        snapshot_at: The number of the newest snapshot, or -1.
        saves: The saves in this log.
    """

    next: int = 0
    fence: Fence = Fence(GENESIS)
    fence_at: int = -1
    released: bool = False
    overwrites: tuple[Overwrite, ...] = ()
    foreign: bool = False
    snapshot_at: int = -1
    saves: Saves = field(default_factory=Saves)

    @property
    def generation(self) -> Generation:
        """The newest generation in this log."""
        return self.fence.generation

    def to_send(self, ids: Collection[str] = ()) -> LogState:
        """Return what another rank needs to decide: less than the whole state.

        These are the living saves, the wholes of the living parts, and the saves of ``ids``. With
        several domains a save may be settled in one and living in another: see ``unsent``.
        """
        return replace(self, saves=self.saves.to_send(ids))

    def save(self, save_id: str) -> SaveState:
        """Return the state of a save, or an empty one if the log has no entry of it."""
        return self.saves.get(save_id) or SaveState(save_id)


def fold_entry(state: LogState, body: Body) -> LogState:
    """Return the state after entry number ``state.next``, which has this body."""
    return fold_entries(state, [body])


def fold_entries(state: LogState, bodies: Iterable[Body]) -> LogState:
    """Return the state after these entries. The first of them has number ``state.next``.

    One call for many entries is cheaper than many calls, because the known saves are copied once.
    """
    draft, after, end = Draft(state.saves), state, state.next
    for here, body in enumerate(bodies, state.next):
        end = here + 1
        match body:
            case Seal() | Part() | Abort() | Decided() | Delete() | Gone() | Pin():
                known = draft.get(body.save_id)
                changed = _fold_save(known, body, here)
                if changed is not known:
                    draft.put(changed)
            case Fence() | Release() | Snapshot() | Foreign():
                after = _fold_run(after, body, here)
    return replace(after, next=end, saves=draft.saves())


def _fold_run(state: LogState, body: Fence | Release | Snapshot | Foreign, here: int) -> LogState:
    """Fold an entry that concerns the run as a whole."""
    match body:
        case Fence(generation=generation) if generation > state.generation:
            overwrites = state.overwrites
            if body.mode is FenceMode.OVERWRITE:
                overwrites = (*overwrites, Overwrite(generation, here))
            return replace(state, fence=body, fence_at=here, released=False, overwrites=overwrites)
        case Release(generation=generation) if generation == state.generation:
            return replace(state, released=True)
        case Snapshot():
            return replace(state, snapshot_at=here)
        case Foreign():
            return replace(state, foreign=True)
        case _:
            return state


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
    """Return the snapshot entry to append as number ``state.next``.

    Raises:
        ValueError: There are foreign entries below it.
    """
    if state.foreign:
        raise ValueError("a version that met a foreign entry must not write a snapshot")
    return Snapshot(
        {
            "fence": body_fields(state.fence),
            "fence_at": state.fence_at,
            "released": state.released,
            "overwrites": [[o.generation, o.at] for o in state.overwrites],
            "saves": state.saves.records(),
        }
    )


def state_from_snapshot(number: int, snapshot: Snapshot) -> LogState:
    """Return the state after the snapshot entry ``number``, without the entries below it.

    Raises:
        ManifestError: This version cannot read it. A newer one wrote a word that this one does not
            know, or the entry was damaged. The entries below it still have the same content.
    """
    try:
        return _state_from(number, snapshot.state)
    except SchemaError as error:
        raise ManifestError(f"snapshot {number} of the run log cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _SnapshotState:
    """The fields of a snapshot. Its saves are decoded one by one."""

    fence: Fence
    fence_at: Number
    released: bool
    overwrites: tuple[tuple[Generation, Number], ...]
    saves: list[dict[str, Any]]


_SNAPSHOT = Schema(_SnapshotState)


def _state_from(number: int, raw: Mapping[str, Any]) -> LogState:
    """Return the state that a snapshot's fields contain. SchemaError if they are no state."""
    snapshot = _SNAPSHOT.convert(raw)
    fields = {*SaveState.__dataclass_fields__}
    # A newer version's snapshot has more than is read here, so this version must not write another from it.
    newer = not _SNAPSHOT_FIELDS.issuperset(raw) or any(
        not fields.issuperset(save) for save in snapshot.saves
    )
    return LogState(
        next=number + 1,
        fence=snapshot.fence,
        fence_at=snapshot.fence_at,
        released=snapshot.released,
        overwrites=tuple(Overwrite(generation, at) for generation, at in snapshot.overwrites),
        foreign=newer,
        snapshot_at=number,
        saves=Saves.read(snapshot.saves),
    )
