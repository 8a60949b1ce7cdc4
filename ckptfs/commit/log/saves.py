"""All saves of one log, arranged so that the work depends on the saves that still matter. Pure.

    living     may still be loaded, replaced, deleted, referred to, or decided
    settled    can no longer change a decision: its bytes are gone, or it was aborted before it was sealed.
               A set of short texts, found by id or by name, and never walked in a save, a claim or a load

A run of many thousand saves with retention has a few living saves. Every decision walks ``living``, and looks
up a settled save if something names it (a copy of a deleted save that was put back, an attempt that wakes up).
``Saves`` is a mapping of both kinds; it is immutable, and a new version shares what did not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

from ckptfs.commit.log.entries import (
    EncodedSave,
    Generation,
    Outcome,
    Part,
    Seal,
    body_fields,
)
from ckptfs.schema import Component, Number, Schema, SchemaError, parse

__all__ = ["Draft", "Rank", "SaveState", "Saves", "Settled", "rank_of"]

V = TypeVar("V")

NOT_SEALED = -1  # below the number of every entry
LAST_ENDED = 256  # ids kept in order for processes that do not read this log: see HomeWord


@dataclass(frozen=True, slots=True)
class SaveState:
    """The state of one save in one domain's log.

    Attributes:
        save_id: The id of the save.
        seal: Its effective seal, or None.
        sealed_at: The number of that entry.
        aborted: Whether there is an effective abort.
        decided: The recorded outcome, or None.
        deleted: Whether there is a delete: its bytes are being removed.
        gone: Whether its bytes are removed.
        pinned: Whether retention leaves it alone.
        part: The entry of a part that is complete here, if the save is a part of another; else
            None.
    """

    save_id: Component
    seal: Seal | None = None
    sealed_at: Number | None = None
    aborted: bool = False
    decided: Outcome | None = None
    deleted: bool = False
    gone: bool = False
    pinned: bool = False
    part: Part | None = None


_SAVE = Schema(SaveState)


class Rank(NamedTuple):
    """The place of a save among all saves of its log.

    Saves are ordered by the generation that they began under, then by where they were sealed.
    """

    base: Generation
    seq: int
    is_plain: bool
    sealed_at: int


def rank_of(save: SaveState) -> Rank | None:
    """Return the rank of a sealed save, or None before its seal."""
    if save.seal is None or save.sealed_at is None:
        return None
    return Rank(save.seal.base, save.seal.seq, not save.seal.fenced, save.sealed_at)


# -- one save of a snapshot ----------------------------------------------------------------


def save_fields(save: SaveState) -> dict[str, Any]:
    """Return one save of a snapshot as JSON values."""
    return {
        "save_id": save.save_id,
        "seal": None if save.seal is None else body_fields(save.seal),
        "sealed_at": save.sealed_at,
        "aborted": save.aborted,
        "decided": save.decided,
        "deleted": save.deleted,
        "gone": save.gone,
        "pinned": save.pinned,
    } | ({} if save.part is None else {"part": body_fields(save.part)})


def save_from(raw: Any) -> SaveState:
    """Decode one save of a snapshot. SchemaError if it is none."""
    save = _SAVE.convert(raw)
    if not raw.keys() >= _ALWAYS:
        raise SchemaError(f"a save of a snapshot says nothing of {min(_ALWAYS - raw.keys())}")
    return save


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_IN_ALL_SAVES = [field.name for field in fields(SaveState) if field.name != "part"]
_ALWAYS = frozenset(_IN_ALL_SAVES)  # a missing field never means "not deleted"
_IN_ALL_SEALS = {
    *("base", "domains", "references", "parts"),
    *("save_id", "seq", "fenced", "name", "step", "artifact", "digest", "failure"),
}
_IN_SOME_SEALS = {"metrics", "origins"}


def _is_plainly_gone(save: SaveState, raw: Mapping[str, Any]) -> bool:
    """Whether a record of a snapshot can be kept as it is.

    The bytes of the save must be gone, and the record must have exactly the fields that this
    version writes.
    """
    if save.seal is None or save.sealed_at is None or save.part is not None or save.seal.parts:
        return False
    seal = raw["seal"]
    return (
        (save.gone, save.deleted, save.pinned, save.aborted) == (True, True, False, False)
        and save.decided is not Outcome.ABORTED
        and raw.keys() == _ALWAYS
        and seal.keys() - _IN_SOME_SEALS == _IN_ALL_SEALS
        and type(seal["step"]) in (int, type(None))
        and all(type(number) is float for _, number in seal.get("metrics", ()))
    )


# -- the set of those that are settled -------------------------------------------------------


class Layers(Generic[V]):
    """A mapping in which adding one item copies only a logarithm of it, on average.

    It consists of layers of halving size; the last one is the newest. Immutable.
    """

    __slots__ = ("_layers",)

    def __init__(self, layers: tuple[dict[str, V], ...] = ()) -> None:
        self._layers = layers

    def get(self, key: str) -> V | None:
        """Return the value of a key, or None."""
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return None

    def with_items(self, items: Mapping[str, V]) -> Layers[V]:
        """Return the mapping with these items. They replace the values of known keys."""
        if not items:
            return self
        *layers, last = [*self._layers, dict(items)]
        while layers and len(layers[-1]) <= len(last):
            last = {**layers.pop(), **last}
        return Layers((*layers, last))

    def __iter__(self) -> Iterator[str]:
        """Yield every key once, the oldest first."""
        yielded: set[str] = set()
        for layer in self._layers:
            yield from (key for key in layer if key not in yielded)
            if len(self._layers) > 1:
                yielded.update(layer)


class _SaveRecord(NamedTuple):
    """The record of one save in a snapshot, and the place in the log by which it is ordered."""

    sealed_at: int
    record: EncodedSave | dict[str, Any]


class Settled(NamedTuple):
    """The settled saves.

    Attributes:
        texts: The record of each save in a snapshot, by its id.
        names: The id with the greatest rank, for each name.
        others: The next id of the same name, for each id that has one.
        bases: The generations that a settled save was committed under.
        highest: The greatest (base, seq) of a save by a holder of the run.
        size: The number of settled saves.
        aborted: The last aborted saves that other domains may need to know of.
        deleted: The last deleted saves that other domains may need to know of.
        parts: The number of the sealing entry, for each save that is a part.
    """

    texts: Layers[EncodedSave] = Layers()
    names: Layers[str] = Layers()
    others: Layers[str] = Layers()
    bases: Layers[bool] = Layers()
    highest: tuple[Generation, int] | None = None
    size: int = 0
    aborted: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    parts: Layers[int] = Layers()

    def get(self, save_id: str) -> SaveState | None:
        """Return the state of a save when it was settled."""
        text = self.texts.get(save_id)
        return None if text is None else save_from(parse(text))

    def knows_name(self, name: str) -> bool:
        """Whether one of them has this name."""
        return self.names.get(name) is not None

    def was_base(self, generation: Generation) -> bool:
        """Whether one of them was committed under this generation."""
        return self.bases.get(_key_of(generation)) is not None

    def newest_of(self, name: str) -> Seal | None:
        """Return the seal with the greatest rank of a name."""
        save_id = self.names.get(name)
        found = None if save_id is None else self.get(save_id)
        return None if found is None else found.seal

    def ids_of(self, name: str) -> Iterator[str]:
        """Yield the ids of a name, the one with the greatest rank first."""
        save_id = self.names.get(name)
        while save_id is not None:
            yield save_id
            save_id = self.others.get(save_id)


class Saves(Mapping[str, SaveState]):
    """Every save of a log, by its id; settled ones first, each kind oldest first.

    Attributes:
        living: The saves that decisions walk.
        settled: The others.
        waiting: Living saves that are to be settled as soon as they decide nothing about others.
    """

    __slots__ = ("living", "settled", "waiting")

    def __init__(
        self,
        living: Mapping[str, SaveState] | None = None,
        settled: Settled | None = None,
        waiting: tuple[str, ...] = (),
    ) -> None:
        self.living: Mapping[str, SaveState] = {} if living is None else living
        self.settled = Settled() if settled is None else settled
        self.waiting = waiting

    @classmethod
    def of(cls, saves: Iterable[SaveState]) -> Saves:
        """Make a value of these saves, in this order."""
        draft = Draft(cls())
        for save in saves:
            draft.put(save)
        return draft.saves()

    @classmethod
    def read(cls, records: Iterable[Mapping[str, Any]]) -> Saves:
        """Read the saves of a snapshot. SchemaError if one of them is none."""
        draft = Draft(cls())
        for raw in records:
            draft.put_record(raw)
        return draft.saves()

    def to_send(self, ids: Collection[str] = ()) -> Saves:
        """Return what another rank needs to decide about a new save.

        These are the living saves and the wholes of their parts, the saves of ``ids``, and the sums
        over the other settled saves, which are unknown to that rank.
        """
        # Without its whole, a part of a save that was given up would be in doubt: see _may_settle.
        wholes = (save.part.of for save in self.living.values() if save.part is not None)
        wanted = dict.fromkeys([*ids, *wholes])
        requested = {save_id: save for save_id in wanted if (save := self.settled.get(save_id))}
        sums = Settled(bases=self.settled.bases, highest=self.settled.highest)
        return Saves({**requested, **self.living}, sums, self.waiting)

    def mapped(self, change: Callable[[SaveState], SaveState]) -> Saves:
        """Return the same saves, with equal values from ``change`` in place of the living ones."""
        living = {save_id: change(save) for save_id, save in self.living.items()}
        return Saves(living, self.settled, self.waiting)

    def knows_name(self, name: str) -> bool:
        """Whether a save of that name was ever sealed here."""
        return self.settled.knows_name(name) or any(
            save.seal is not None and save.seal.name == name for save in self.living.values()
        )

    def records(self) -> list[EncodedSave | dict[str, Any]]:
        """Return the record of each save for a snapshot. That of a settled save is made only once.

        Settled saves come first, then the living ones in their order, with all parts among them
        where they were sealed: a snapshot must not depend on whether its writer had settled the
        parts.
        """
        texts, parts = self.settled.texts, self.settled.parts
        first, by_seal = list[EncodedSave | dict[str, Any]](), list[_SaveRecord]()
        for save_id in texts:
            text = texts.get(save_id)
            if text is None or save_id in self.living:
                continue
            sealed_at = parts.get(save_id)
            if sealed_at is None:
                first.append(text)
            else:
                by_seal.append(_SaveRecord(sealed_at, text))
        before = NOT_SEALED
        for save in self.living.values():
            # The living ones keep their order: that of the first entry of each.
            before = before if save.sealed_at is None else max(before, save.sealed_at)
            by_seal.append(_SaveRecord(before, save_fields(save)))
        return [*first, *(one.record for one in sorted(by_seal, key=lambda one: one.sealed_at))]

    def names(self) -> set[str]:
        """Return the names of all saves that were ever sealed here."""
        lives = (save.seal.name for save in self.living.values() if save.seal is not None)
        return {*self.settled.names, *lives}

    def of_name(self, name: str) -> Iterator[SaveState]:
        """Yield all saves that were ever sealed here under a name."""
        for save in self.living.values():
            if save.seal is not None and save.seal.name == name:
                yield save
        yield from (self[save_id] for save_id in self.settled.ids_of(name))

    def __getitem__(self, save_id: str) -> SaveState:
        living = self.living.get(save_id)
        if living is not None:
            return living
        found = self.settled.get(save_id)
        if found is None:
            raise KeyError(save_id)
        return found

    def __contains__(self, save_id: object) -> bool:
        return save_id in self.living or (
            isinstance(save_id, str) and self.settled.texts.get(save_id) is not None
        )

    def __iter__(self) -> Iterator[str]:
        yield from (save_id for save_id in self.settled.texts if save_id not in self.living)
        yield from self.living

    def __len__(self) -> int:
        return self.settled.size + len(self.living)

    def __eq__(self, other: object) -> bool:
        """Compare the saves.

        Which of them are settled does not matter, because it says nothing about the log.
        """
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(other.get(key) == self[key] for key in self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Saves({dict(self)!r})"


def _key_of(generation: Generation) -> str:
    return f"{generation.number} {generation.nonce}"


# -- folding into it ---------------------------------------------------------------------------


def _may_settle(save: SaveState) -> bool:
    """Whether a save can be settled, as far as that depends on itself alone.

    A part is settled with its whole, once the bytes of the whole are gone. If the whole was given
    up, its parts stay living, because the process that removes their leftovers walks them.
    """
    if save.pinned or save.part is not None or save.decided is Outcome.ABORTED:
        return False
    if save.seal is None:
        return save.aborted and not save.deleted
    return save.deleted and save.gone


class _FinishedSave(NamedTuple):
    """A save that may be settled.

    Attributes:
        save_id: The id of the save.
        name: The name of a sealed save.
        rank: The rank of a sealed save.
        is_elsewhere: Whether other domains hold it too.
        text: Its record, if it comes from a snapshot.
        behind: How many living saves came before that record in the snapshot.
    """

    save_id: str
    name: str = ""
    rank: Rank | None = None
    is_elsewhere: bool = False
    text: EncodedSave | None = None
    behind: int = 0


def _ended(save: SaveState) -> _FinishedSave:
    if save.seal is None:
        return _FinishedSave(save.save_id)
    return _FinishedSave(save.save_id, save.seal.name, rank_of(save), len(save.seal.everywhere) > 1)


class _OpenSave(NamedTuple):
    """The lowest rank and the lowest place in the log of the saves of a name that have bytes."""

    rank: Rank
    sealed_at: int


class Draft:
    """The mutable saves while entries are folded into them.

    draft = Draft(state.saves); draft.put(changed); draft.saves()
    """

    def __init__(self, base: Saves) -> None:
        self._base = base
        self._living: dict[str, SaveState] | None = None
        self._records: dict[str, _FinishedSave] = {}
        self._settled = base.settled
        self._waiting = dict.fromkeys(base.waiting)
        self._erased: set[str] = set()  # ids of saves with removed bytes: they may have parts

    def get(self, save_id: str) -> SaveState:
        """Return the state of a save, or an empty state if it is unknown."""
        living = self._base.living if self._living is None else self._living
        found = living.get(save_id)
        if found is None and (record := self._records.get(save_id)) is not None:
            return save_from(parse(record.text or ""))
        return found or self._settled.get(save_id) or SaveState(save_id)

    def put(self, save: SaveState) -> None:
        """Replace the state of a save."""
        if self._living is None:
            self._living = dict(self._base.living)
        self._records.pop(save.save_id, None)
        if save.save_id not in self._living and self._settled.texts.get(save.save_id) is not None:
            if _may_settle(save):
                text = EncodedSave(_encode(save_fields(save)))
                texts = self._settled.texts.with_items({save.save_id: text})
                self._settled = self._settled._replace(texts=texts)
                return
            # It matters again: a pin came after its bytes were removed.
            self._settled = self._settled._replace(size=self._settled.size - 1)
        self._living[save.save_id] = save
        if _may_settle(save):
            self._waiting[save.save_id] = None
        else:
            self._waiting.pop(save.save_id, None)
        checkpoint = save if save.part is None else self.get(save.part.of)
        if checkpoint.deleted and checkpoint.gone:
            self._erased.add(checkpoint.save_id)

    def put_record(self, raw: Mapping[str, Any]) -> None:
        """Put one save of a snapshot. SchemaError if it is none."""
        save = save_from(raw)
        save_id, seal, rank = save.save_id, save.seal, rank_of(save)
        is_known = save_id in self._records or save_id in (self._living or ())
        if seal is None or is_known or not _is_plainly_gone(save, raw):
            self.put(save)
            return
        if self._living is None:
            self._living = dict(self._base.living)
        text, elsewhere = EncodedSave(_encode(raw)), len(seal.domains) > 1
        self._records[save_id] = _FinishedSave(
            save_id, seal.name, rank, elsewhere, text, len(self._living)
        )

    def saves(self) -> Saves:
        """Return the immutable saves, with everything settled that does not matter any more."""
        if self._living is None:
            return self._base
        if self._waiting or self._records or self._erased:
            self._settle(self._living)
        return Saves(self._living, self._settled, tuple(self._waiting))

    def _settle(self, living: dict[str, SaveState]) -> None:
        """Settle the waiting saves, except those that still decide something about others.

        The last commit stays: a replaced save is settled one commit after its successor. A save
        also stays if an older save of its name has bytes: it shows that the older one is not the
        newest of its name.
        """
        ranks = {save_id: rank for save_id, save in living.items() if (rank := rank_of(save))}
        records = self._records.items()
        sealed = ranks | {save_id: one.rank for save_id, one in records if one.rank is not None}
        last = {
            max(sealed, key=sealed.__getitem__, default=""),
            max(sealed, key=lambda save_id: sealed[save_id].sealed_at, default=""),
        }
        older: dict[str, _OpenSave] = {}
        for save_id, rank in ranks.items():
            save = living[save_id]
            if save.seal is not None and not (save.deleted and save.gone):
                known = older.get(save.seal.name, _OpenSave(rank, rank.sealed_at))
                older[save.seal.name] = _OpenSave(
                    min(known.rank, rank), min(known.sealed_at, rank.sealed_at)
                )

        def stays(one: _FinishedSave) -> bool:
            if one.rank is None:
                return bool(one.name)
            oldest = older.get(one.name)
            below = oldest is not None and (
                oldest.rank < one.rank or oldest.sealed_at < one.rank.sealed_at
            )
            return below or one.save_id in last

        ended = [one for save_id in self._waiting if not stays(one := _ended(living[save_id]))]
        ended += [record for _, record in records if not stays(record)]
        self._take_in(living, [record for _, record in records if stays(record)])
        # The outcome of a part is that of its whole.
        ended += [
            _FinishedSave(save_id)
            for save_id, save in living.items()
            if save.part is not None and save.part.of in self._erased and not save.pinned
        ]
        self._settled = _with_ended(self._settled, ended, living)
        for one in ended:
            living.pop(one.save_id, None)
            self._waiting.pop(one.save_id, None)

    def _take_in(self, living: dict[str, SaveState], records: list[_FinishedSave]) -> None:
        """Put these records of a snapshot among the living saves, where the snapshot had them."""
        if not records:
            return
        places = [(n, save) for n, save in enumerate(living.values(), 1)]
        places += [(one.behind, self.get(one.save_id)) for one in records]
        places.sort(key=lambda place: place[0])
        self._waiting |= dict.fromkeys(one.save_id for one in records)
        living.clear()
        living.update((save.save_id, save) for _, save in places)


def _with_ended(
    known: Settled, ended: list[_FinishedSave], living: Mapping[str, SaveState]
) -> Settled:
    """Return the settled saves with these added."""
    if not ended:
        return known
    texts, parts, bases = dict[str, EncodedSave](), dict[str, int](), dict[str, bool]()
    tops, others = dict[str, _FinishedSave](), dict[str, str]()
    highest, aborted, deleted = known.highest, [*known.aborted], [*known.deleted]
    for one in ended:
        save = living.get(one.save_id)
        if one.text is None and save is not None:
            texts[one.save_id] = EncodedSave(_encode(save_fields(save)))
        elif one.text is not None:
            texts[one.save_id] = one.text
        if save is not None and save.part is not None:
            parts[one.save_id] = NOT_SEALED if save.sealed_at is None else save.sealed_at
        if one.is_elsewhere:
            deleted.append(one.save_id)
        if one.rank is None:
            if save is not None and save.part is None:
                aborted.append(one.save_id)
            continue
        top = tops.get(one.name) or _top_of(known, one.name)
        if top is None or top.rank is None or one.rank > top.rank:
            tops[one.name] = one
            if top is not None:
                others[one.save_id] = top.save_id
        else:
            tops[one.name] = top
            after = others.get(top.save_id) or known.others.get(top.save_id)
            if after is not None:
                others[one.save_id] = after
            others[top.save_id] = one.save_id
        bases[_key_of(one.rank.base)] = True
        if not one.rank.is_plain:
            place = (one.rank.base, one.rank.seq)
            highest = place if highest is None else max(highest, place)
    fresh = {key: True for key in bases if known.bases.get(key) is None}
    names = {name: top.save_id for name, top in tops.items()}
    return Settled(
        known.texts.with_items(texts),
        known.names.with_items(names),
        known.others.with_items(others),
        known.bases.with_items(fresh),
        highest,
        known.size + len(ended),
        tuple(aborted[-LAST_ENDED:]),
        tuple(deleted[-LAST_ENDED:]),
        known.parts.with_items(parts),
    )


def _top_of(known: Settled, name: str) -> _FinishedSave | None:
    """Return the settled save of a name with the greatest rank."""
    save_id = known.names.get(name)
    found = None if save_id is None else known.get(save_id)
    return None if found is None else _ended(found)
