"""The saves that one log ever heard of, so that work depends on those that still matter. Pure.

    living     may still be loaded, replaced, deleted, referred to, or decided
    settled    cannot matter any more but by what it was: its bytes are gone, or it was aborted before
               it was sealed. Found by its id or name, never walked on the way of a save or a load

A run of many thousand saves with retention has a few living ones. Every decision walks ``living``, and
looks a settled save up where somebody names one (a copy of a deleted save that was put back, an attempt
that wakes up). A mapping of both kinds; each version is a value, and shares what did not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ckptfs.commit.entries import EncodedSave, Generation, Outcome, Part, Seal

__all__ = ["Draft", "Named", "Rank", "SaveState", "Saves", "rank_of"]

V = TypeVar("V")


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


class Rank(NamedTuple):
    """Where a save stands among all of its log: what it began under, then where it was sealed."""

    base: Generation
    seq: int
    is_plain: bool
    sealed_at: int


def rank_of(save: SaveState) -> Rank | None:
    """The rank of a sealed save; None before its seal."""
    if save.seal is None or save.sealed_at is None:
        return None
    return Rank(save.seal.base, save.seal.seq, not save.seal.fenced, save.sealed_at)


class Named(NamedTuple):
    """The settled saves of one name. highest: the seal of the one with the greatest rank."""

    ids: tuple[str, ...]
    rank: Rank
    highest: Seal


class Layers(Generic[V]):
    """A mapping that grows: adding one item copies a logarithm of it, on average.

    Layers of halving size; the last one is the newest. Never changed once made.
    """

    __slots__ = ("_layers",)

    def __init__(self, layers: tuple[dict[str, V], ...] = ()) -> None:
        self._layers = layers

    def get(self, key: str) -> V | None:
        """The value of a key; None where there is none."""
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return None

    def with_item(self, key: str, value: V) -> Layers[V]:
        """The same mapping with one item more; the value of a known key is replaced."""
        *layers, last = [*self._layers, {key: value}]
        while layers and len(layers[-1]) <= len(last):
            last = {**layers.pop(), **last}
        return Layers((*layers, last))

    def __iter__(self) -> Iterator[str]:
        """Every key once, the oldest first."""
        seen: set[str] = set()
        for layer in self._layers:
            yield from (key for key in layer if key not in seen)
            if len(self._layers) > 1:
                seen.update(layer)


class Settled:
    """A settled save, and its text in a snapshot once that was asked for: it never changes again."""

    __slots__ = ("_text", "save")

    def __init__(self, save: SaveState) -> None:
        self.save = save
        self._text: EncodedSave | None = None

    def text(self, encode: Callable[[SaveState], Mapping[str, Any]]) -> EncodedSave:
        """The JSON object that a snapshot says of it."""
        if self._text is None:
            fields = encode(self.save)
            self._text = EncodedSave(json.dumps(fields, sort_keys=True, separators=(",", ":")))
        return self._text

    def __reduce__(self) -> tuple[type[Settled], tuple[SaveState]]:
        return Settled, (self.save,)


Index = tuple["Layers[Settled]", "Layers[Named]", "Layers[bool]"]


class Saves(Mapping[str, SaveState]):
    """Every save that a log heard of, by its id; settled ones first, each kind oldest first.

    living: those that decisions walk. highest: the greatest (base, seq) of a settled save whose writer
    held the run. waiting: living ones that are to be settled as soon as they say nothing of others.
    count: of settled ones. index: the settled by id, by name, and what they began under; for Draft.
    """

    __slots__ = ("count", "highest", "index", "living", "waiting")

    def __init__(
        self,
        living: Mapping[str, SaveState] | None = None,
        index: Index | None = None,
        highest: tuple[Generation, int] | None = None,
        waiting: tuple[str, ...] = (),
        count: int = 0,
    ) -> None:
        self.living: Mapping[str, SaveState] = {} if living is None else living
        self.index: Index = (Layers(), Layers(), Layers()) if index is None else index
        self.highest = highest
        self.waiting = waiting
        self.count = count

    @classmethod
    def of(cls, saves: Iterable[SaveState]) -> Saves:
        """These saves, in this order."""
        draft = Draft(cls())
        for save in saves:
            draft.put(save)
        return draft.saves()

    def without_settled(self) -> Saves:
        """The living ones, and what the others say together: enough to decide about a new save.

        For sending to another rank. A settled save is unknown there when it is asked for by its id.
        """
        _, names, bases = self.index
        return Saves(self.living, (Layers(), names, bases), self.highest, self.waiting)

    def mapped(self, change: Callable[[SaveState], SaveState]) -> Saves:
        """The same saves as equal values that ``change`` returns."""
        return Saves.of(change(save) for save in self.values())

    def named(self, name: str) -> Named | None:
        """The settled saves of a name; None where it has none."""
        return self.index[1].get(name)

    def knows_name(self, name: str) -> bool:
        """Whether a save of that name was ever sealed here."""
        return self.named(name) is not None or any(
            save.seal is not None and save.seal.name == name for save in self.living.values()
        )

    def was_base(self, generation: Generation) -> bool:
        """Whether a settled save was committed under that generation."""
        return self.index[2].get(_key_of(generation)) is not None

    def encoded(self, encode: Callable[[SaveState], Mapping[str, Any]]) -> Iterator[EncodedSave]:
        """What a snapshot says of each settled save; each is encoded once in its life."""
        settled = self.index[0]
        found = (settled.get(save_id) for save_id in settled if save_id not in self.living)
        return (one.text(encode) for one in found if one is not None)

    def __getitem__(self, save_id: str) -> SaveState:
        living = self.living.get(save_id)
        if living is not None:
            return living
        found = self.index[0].get(save_id)
        if found is None:
            raise KeyError(save_id)
        return found.save

    def __contains__(self, save_id: object) -> bool:
        return save_id in self.living or (
            isinstance(save_id, str) and self.index[0].get(save_id) is not None
        )

    def __iter__(self) -> Iterator[str]:
        yield from (save_id for save_id in self.index[0] if save_id not in self.living)
        yield from self.living

    def __len__(self) -> int:
        return self.count + len(self.living)

    def __eq__(self, other: object) -> bool:
        """Equal when the saves are: which of them were settled yet says nothing about the log."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(other.get(key) == self[key] for key in self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Saves({dict(self)!r})"


def _key_of(generation: Generation) -> str:
    return f"{generation.number} {generation.nonce}"


def _may_settle(save: SaveState) -> bool:
    """Whether a save can be settled, as far as that depends on itself alone.

    Parts stay living, and saves that have some: their home's word is looked for among them.
    """
    if save.pinned or save.part is not None:
        return False
    if save.seal is None:
        return save.aborted and not save.deleted
    if save.seal.parts or save.decided is Outcome.ABORTED:
        return False
    return save.deleted and save.gone


class _Open(NamedTuple):
    """The lowest rank and the lowest place in the log of the saves of a name that have bytes."""

    rank: Rank
    sealed_at: int


class Draft:
    """The saves while entries are folded into them: the one place where they change.

    draft = Draft(state.saves); draft.put(changed); draft.saves()
    """

    def __init__(self, base: Saves) -> None:
        self._base = base
        self._living: dict[str, SaveState] | None = None
        self._settled, self._names, self._bases = base.index
        self._highest, self._count = base.highest, base.count
        self._waiting = dict.fromkeys(base.waiting)

    def get(self, save_id: str) -> SaveState:
        """What is known of a save; an empty state if nothing is."""
        living = self._base.living if self._living is None else self._living
        found = living.get(save_id)
        if found is not None:
            return found
        settled = self._settled.get(save_id)
        return SaveState(save_id) if settled is None else settled.save

    def put(self, save: SaveState) -> None:
        """Replace what is known of a save."""
        if self._living is None:
            self._living = dict(self._base.living)
        if save.save_id not in self._living and self._settled.get(save.save_id) is not None:
            if _may_settle(save):
                self._settled = self._settled.with_item(save.save_id, Settled(save))
                return
            self._count -= 1  # it matters again: a pin came after its bytes went
        self._living[save.save_id] = save
        if _may_settle(save):
            self._waiting[save.save_id] = None
        else:
            self._waiting.pop(save.save_id, None)

    def saves(self) -> Saves:
        """The value, with everything settled that does not matter any more."""
        if self._living is None:
            return self._base
        if self._waiting:
            self._settle(self._living)
        return Saves(
            self._living,
            (self._settled, self._names, self._bases),
            self._highest,
            tuple(self._waiting),
            self._count,
        )

    def _settle(self, living: dict[str, SaveState]) -> None:
        """Settle what waits for it, but for what still says something of others.

        The last commit stays: a replaced save goes one commit after its successor. So does a save of
        whose name an older one has bytes: it says that the older one is not the newest of its name.
        """
        ranks = {save_id: rank for save_id, save in living.items() if (rank := rank_of(save))}
        last = {
            max(ranks, key=ranks.__getitem__, default=""),
            max(ranks, key=lambda save_id: ranks[save_id].sealed_at, default=""),
        }
        older: dict[str, _Open] = {}
        for save_id, rank in ranks.items():
            save = living[save_id]
            if save.seal is not None and not (save.deleted and save.gone):
                known = older.get(save.seal.name, _Open(rank, rank.sealed_at))
                older[save.seal.name] = _Open(
                    min(known.rank, rank), min(known.sealed_at, rank.sealed_at)
                )
        for save_id in [*self._waiting]:
            save, own = living[save_id], ranks.get(save_id)
            if save.seal is not None:
                kept = older.get(save.seal.name)
                if own is None or save_id in last:
                    continue
                if kept is not None and (kept.rank < own or kept.sealed_at < own.sealed_at):
                    continue
                self._remember(save.seal, own)
            self._settled = self._settled.with_item(save_id, Settled(save))
            self._count += 1
            del living[save_id], self._waiting[save_id]

    def _remember(self, seal: Seal, rank: Rank) -> None:
        """What a committed save says when nobody looks at it any more."""
        known = self._names.get(seal.name)
        named = Named((seal.save_id,), rank, seal)
        if known is not None:
            ids = (*known.ids, seal.save_id)
            named = Named(ids, rank, seal) if rank > known.rank else known._replace(ids=ids)
        self._names = self._names.with_item(seal.name, named)
        if self._bases.get(_key_of(seal.base)) is None:
            self._bases = self._bases.with_item(_key_of(seal.base), value=True)
        if seal.fenced:
            place = (seal.base, seal.seq)
            self._highest = place if self._highest is None else max(self._highest, place)
